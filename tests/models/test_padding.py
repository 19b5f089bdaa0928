"""A padding mask that a model is called with reaches the BLN layers inside of it."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import bln
from bln import BatchLayerNorm

PADDED = torch.arange(6) >= torch.tensor([6, 4, 2, 5])[:, None]
FLOAT = torch.zeros(4, 6).masked_fill(PADDED, -torch.inf)


def encoder(**options):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)


def filled(x, value):
    """The same real entries, and other padding."""
    return torch.where(PADDED[..., None], value, x)


def masked_net():
    return nn.Sequential(
        nn.Linear(8, 8), BatchLayerNorm(8, channel_dim=-1, per_position=False), nn.Tanh(), nn.Linear(8, 8),
        BatchLayerNorm(8, groups=4, channel_dim=-1),
    )  # fmt: skip


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", [PADDED, FLOAT], ids=["bool", "float"])
def test_padded_values_alone_change_nothing_in_a_converted_transformer_in_training(mask, norm_first):
    net, x = bln.convert(encoder(norm_first=norm_first)), torch.randn(4, 6, 8)
    one, other = net(x, src_key_padding_mask=mask), net(filled(x, 100.0), None, mask)
    assert torch.equal(one[~PADDED], other[~PADDED])
    assert (net(filled(x, 100.0)) - one)[~PADDED].abs().max() > 0.01  # without the mask they do
    layer = next(iter(bln.layers(net).values()))
    alone = copy.deepcopy(layer)
    layer.reset_statistics()
    net(filled(x, 1e6), src_key_padding_mask=mask)
    assert layer.population.batch_mean.abs().max() < 100
    assert torch.equal(alone(x, ~PADDED)[PADDED], torch.zeros(int(PADDED.sum()), 8))


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_function_in_eval_is_kept_at_real_and_at_padded_entries(norm_first):
    net, x = encoder(norm_first=norm_first).eval(), torch.randn(4, 6, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype, says torch
        expected = net(x, src_key_padding_mask=PADDED)
    bln.convert(net)
    # Float32 through seven norms.
    torch.testing.assert_close(net(x, src_key_padding_mask=PADDED), expected, atol=1e-5, rtol=1e-5)


def test_current_batch_statistics_in_eval_are_those_of_real_entries():
    net, x = bln.convert(encoder()).eval(), torch.randn(4, 6, 8)
    net.train()(x, src_key_padding_mask=PADDED)
    bln.configure(net.eval(), "FFFF")
    one, other = (net(filled(x, value), src_key_padding_mask=PADDED) for value in (0.0, 100.0))
    assert torch.equal(one[~PADDED], other[~PADDED])


def test_encoder_and_decoder_have_masks_of_their_own():
    """Of the same shape, so that only the call says which belongs where."""
    torch.manual_seed(0)
    net = bln.convert(nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True))
    source, target, padded = torch.randn(4, 6, 8), torch.randn(4, 6, 8), PADDED.flip(0)
    masks = {"src_key_padding_mask": padded, "tgt_key_padding_mask": PADDED, "memory_key_padding_mask": padded}
    expected = net(source, target, **masks)[~PADDED]
    other = source.masked_fill(padded[..., None], 9.0), target.masked_fill(PADDED[..., None], 9.0)
    assert torch.equal(net(*other, **masks)[~PADDED], expected)
    masks["tgt_key_padding_mask"] = None
    assert (net(source, target, **masks)[PADDED] != 0).all()


def test_a_mask_given_around_a_model_is_used_where_it_fits():
    net, x = masked_net(), torch.randn(4, 6, 8)
    mask = ~PADDED
    with bln.padding(mask):
        y = net(x)
        dense = BatchLayerNorm(8)
        assert (dense(x[:, 0]) != 0).all()
        first = BatchLayerNorm(8, groups=2)
        assert torch.equal(first(x.mT), first(x.mT, mask))
        assert torch.equal(first(x.mT, torch.ones_like(mask))[:, :, -1] != 0, torch.ones(4, 8, dtype=torch.bool))
        with bln.padding(torch.ones_like(mask)):
            assert (net(x) != 0).all()
    by_hand = net[4](net[3](net[2](net[1](net[0](x), mask))), mask)
    assert torch.equal(y, by_hand)
    assert (net(x) != 0).all()
    for wrong in (mask.int(), mask.tolist()):
        with pytest.raises(TypeError, match="expected a boolean mask, true at real entries"):
            bln.padding(wrong)


def test_a_mask_of_the_user_reaches_a_converted_transformer():
    net, x = bln.convert(encoder()), torch.randn(4, 6, 8)
    with bln.padding(~PADDED):
        assert (net(x)[PADDED] == 0).all()
        assert (net.eval()(x)[PADDED] == 0).all()


def test_an_error_leaves_no_mask_behind():
    net, x = bln.convert(encoder()), torch.randn(4, 6, 8)
    with pytest.raises(AssertionError, match="embedding dimension"):
        net(x[..., :5], src_key_padding_mask=PADDED)
    with pytest.raises(AssertionError, match="embedding dimension"), bln.padding(~PADDED):
        net(x[..., :5])
    assert (BatchLayerNorm(8, channel_dim=-1)(x) != 0).all()


def test_compiled_models_take_new_masks_without_a_new_graph():
    torch.compiler.reset()  # graphs of other tests count towards the limit
    net, x = bln.convert(encoder()), torch.randn(4, 6, 8)
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    plain = masked_net()

    @torch.compile(fullgraph=True, backend="eager")
    def inside(x, mask):
        with bln.padding(mask):
            return plain(x)

    around = torch.compile(plain, fullgraph=True, backend="eager")
    graphs = []
    for padded in (PADDED, PADDED.flip(0), PADDED.roll(1, 0)):
        torch.testing.assert_close(compiled(x, src_key_padding_mask=padded), net(x, src_key_padding_mask=padded))
        with bln.padding(~padded):
            expected = plain(x)
            torch.testing.assert_close(around(x), expected)
        torch.testing.assert_close(inside(x, ~padded), expected)
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1
    assert (around(x) != 0).all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_recomputes_with_the_mask(reentrant):
    net, gradients = masked_net().double(), []
    for recompute in (False, True):
        x = torch.linspace(-1, 1, 192, dtype=torch.float64).sin().reshape(4, 6, 8).requires_grad_()
        with bln.padding(~PADDED):
            y = checkpoint(net, x, use_reentrant=reentrant) if recompute else net(x)
        y.pow(3).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_a_converted_transformer_recompute_with_the_mask_of_the_user(reentrant):
    net, gradients = bln.convert(encoder()).double().layers[0], []
    for recompute in (False, True):
        x = torch.linspace(-1, 1, 192, dtype=torch.float64).sin().reshape(4, 6, 8).requires_grad_()
        with bln.padding(~PADDED):
            y = checkpoint(net, x, use_reentrant=reentrant) if recompute else net(x)
        y.pow(3).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_checkpoints_of_several_masks_are_told_apart_or_refused():
    net, x = masked_net(), torch.randn(4, 6, 8, requires_grad=True)
    kept = []
    for padded in (PADDED, PADDED.flip(0)):  # one after the other, though the first graph lives on
        with bln.padding(~padded):
            kept.append(checkpoint(net, x, use_reentrant=False).square().sum())
        kept[-1].backward()
    losses = []
    for padded in (PADDED, PADDED.flip(0)):
        with bln.padding(~padded):
            losses.append(checkpoint(net, x, use_reentrant=False).square().sum())
    with pytest.raises(RuntimeError, match="several padding masks since the last backward"):
        sum(losses).backward()

    stack = bln.convert(encoder())  # whose layers are called with the mask again
    outputs = [
        checkpoint(stack, x, use_reentrant=False, src_key_padding_mask=padded) for padded in (PADDED, PADDED.flip(0))
    ]
    sum(y.square().sum() for y in outputs).backward()


def test_copies_and_pickles_keep_what_gives_the_mask_and_converting_again_adds_nothing():
    net, x = bln.convert(bln.convert(encoder())), torch.randn(4, 6, 8)
    assert [len(m._forward_pre_hooks) for m in net.modules() if m._forward_pre_hooks] == [1, 1, 1]
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        one, two = (other(filled(x, value), src_key_padding_mask=PADDED) for value in (0.0, 100.0))
        assert torch.equal(one[~PADDED], two[~PADDED])


def test_a_mask_is_for_its_own_thread():
    layer, x, seen = BatchLayerNorm(8, channel_dim=-1), torch.randn(4, 6, 8), []
    with bln.padding(~PADDED):
        thread = threading.Thread(target=lambda: seen.append(layer(x)))
        thread.start()
        thread.join()
    assert (seen[0] != 0).all()


class Around(nn.Module):
    """A norm before a part that is called with the mask, which it does not get."""

    def __init__(self, part):
        super().__init__()
        self.norm, self.part, self.head = nn.LayerNorm(8), part, nn.BatchNorm1d(8)

    def forward(self, x, padded):
        x = self.norm(x)
        if isinstance(self.part, nn.MultiheadAttention):
            return self.head(self.part(x, x, x, padded)[0][:, 0])
        return self.head(self.part(x, src_key_padding_mask=padded)[:, 0])


@pytest.mark.parametrize("make", [encoder, lambda: nn.MultiheadAttention(8, 2, batch_first=True)])
def test_training_says_once_that_norms_outside_of_the_masked_part_see_padding(make):
    x, net = torch.randn(4, 6, 8), bln.convert(Around(make()))
    bln.convert(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x, None)
        net.eval()(x, PADDED)
        with bln.padding(~PADDED):
            net.train()(x, PADDED)
        torch.compile(net, fullgraph=True, backend="eager")(x, PADDED)
    net = pickle.loads(pickle.dumps(net))
    with pytest.warns(UserWarning, match=r"called with a padding mask, which .* do not get: norm\. .* bln\.padding"):
        net(x, PADDED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x, PADDED)


def test_samples_in_the_second_dimension_get_no_mask():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = bln.convert(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1, enable_nested_tensor=False))
    assert not any(m._forward_pre_hooks for m in net.modules())
