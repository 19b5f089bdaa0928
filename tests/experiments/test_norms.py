"""Normalizers by name, and the nets they go into."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bln
from bln.experiments import models
from bln.experiments.lstm import LSTM, _Recurrence
from bln.experiments.norms import NORMS, BatchNorm, BatchRenorm, norm


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("net", ["digits_cnn", "digits_rnn"])
def test_every_normalizer_trains_every_net_at_every_batch_size(name, size, net):
    model = getattr(models, net)(NORMS[name])
    x, y = torch.randn(size, 1, 8, 8), torch.randint(10, (size,))
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert model.eval()(x).isfinite().all()


def test_unknown_normalizers_are_told_the_nearest():
    with pytest.raises(
        ValueError, match=r"unknown normalizer 'batchrenom'; did you mean 'batchrenorm'\? known: bln, bn"
    ):
        norm("batchrenom")
    with pytest.raises(ValueError, match="no normalizer at 'nowhere:at_all'"):
        norm("nowhere:at_all")


def test_a_user_adds_one_with_one_line(monkeypatch):
    monkeypatch.setitem(NORMS, "mine", lambda features, channel_dim: nn.Identity())
    assert isinstance(models.lenet(norm("mine"))[3], nn.Identity)
    assert norm("bln.experiments.norms:BatchNorm") is BatchNorm


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 4), (6, 5, 4, 3)])
def test_batch_norm_is_torchs_and_a_single_value_gives_what_keras_gives(shape):
    ours = BatchNorm(5)
    theirs = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d][len(shape) - 2](5, eps=1e-3, momentum=0.01)
    x = torch.randn(shape)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    ours.train()
    with torch.no_grad():
        ours.bias.copy_(torch.randn(5))
    mean, var = ours.running_mean.clone(), ours.running_var.clone()
    one = torch.randn(1, 5, requires_grad=True)
    y = ours(one)
    assert torch.equal(y[0], ours.bias)
    torch.testing.assert_close(ours.running_mean, mean * 0.99 + 0.01 * one[0].detach())
    torch.testing.assert_close(ours.running_var, var * 0.99)
    y.sum().backward()
    assert torch.equal(one.grad, torch.zeros(1, 5))  # the mean moves with the value


def test_layer_norm_is_over_features_at_each_position():
    x = torch.randn(4, 5, 3)
    found = NORMS["ln"](5, 1)(x)
    expected = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + 1e-3).sqrt()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("features", [6, 16])
def test_the_grouped_form_is_group_norm_at_a_single_sample(features):
    x = torch.randn(1, features, 4, 5)
    torch.testing.assert_close(NORMS["bln-grouped"](features, 1)(x), NORMS["gn"](features, 1)(x))


def test_batch_renorm_begins_as_batch_norm_and_ends_near_its_running_statistics():
    x = torch.randn(32, 5, 4) * 2 + 1
    renorm, plain = BatchRenorm(5, warm=3, ramp=4), BatchNorm(5)
    torch.testing.assert_close(renorm(x), plain(x), atol=1e-5, rtol=1e-5)
    for _ in range(20):
        renorm(x)
    assert renorm.steps == 21
    # Within the limits of r and d, its output in training is that of inference with the running statistics of before.
    renorm.running_mean.fill_(0.8)
    renorm.running_var.fill_(4.5)
    expected = copy.deepcopy(renorm).eval()(x)
    torch.testing.assert_close(renorm(x), expected, atol=1e-4, rtol=1e-4)


def test_equal_weights_are_one_half_each_in_training_and_inference():
    layer = NORMS["bln-half"](5, 1)
    x = torch.randn(8, 5, 3)
    y = layer(x)
    batch = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-3).sqrt()
    feature = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + 1e-3).sqrt()
    expected = ((0.5 - 1e-4) * batch + (0.5 - 1e-4) * feature) / 5**0.5
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-4)
    layer.config = "FFFF"
    torch.testing.assert_close(layer.eval()(x), expected, atol=1e-5, rtol=1e-4)


class TestLSTM:
    def test_without_dropout_it_is_torchs(self):
        ours, theirs = LSTM(5, 3), nn.LSTM(5, 3, batch_first=True)
        gates = torch.arange(12).unflatten(0, (4, 3))[[1, 2, 3, 0]].flatten()  # torch: input, forget, candidate, output
        with torch.no_grad():
            theirs.weight_ih_l0.copy_(ours.kernel.t()[gates])
            theirs.weight_hh_l0.copy_(ours.recurrent.t()[gates])
            theirs.bias_ih_l0.copy_(ours.bias[gates])
            theirs.bias_hh_l0.zero_()
        x = torch.randn(4, 7, 5)
        torch.testing.assert_close(ours(x), theirs(x)[0])
        ours.last = True
        torch.testing.assert_close(ours(x), theirs(x)[0][:, -1])

    def test_gradients(self):
        driven, recurrent = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 2, 12), (3, 12)))
        mask = torch.rand(2, 3, dtype=torch.float64)
        assert torch.autograd.gradcheck(_Recurrence.apply, (driven, recurrent, mask))

    @pytest.mark.parametrize("last", [False, True])
    def test_vectorized_over_copies_it_is_each_copy_alone(self, last):
        layer, x = LSTM(5, 3, last=last).double(), torch.randn(4, 2, 7, 5, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(torch.vmap(layer)(x), torch.stack([layer(part) for part in x]))

    def test_dropout_keeps_one_mask_for_all_time_steps_and_none_in_eval(self):
        layer = LSTM(6, 3, dropout=0.5)
        x = torch.ones(200, 4, 6, requires_grad=True)
        layer(x).sum().backward()
        dropped = x.grad == 0
        assert torch.equal(dropped.any(1), dropped.all(1))  # a feature is hidden at all steps or at none
        assert 0.4 < dropped.float().mean() < 0.6
        x = torch.randn(3, 4, 6)
        assert torch.equal(layer.eval()(x), layer(x))
        assert not torch.equal(layer.train()(x), layer(x))

    def test_weights_are_glorot_uniform_and_the_forget_bias_is_one(self):
        layer = LSTM(512, 128)
        limit = (6 / (512 + 4 * 128)) ** 0.5
        assert limit * 0.99 < layer.kernel.abs().max() <= limit
        assert layer.bias.unflatten(0, (4, 128)).mean(1).tolist() == [0, 0, 1, 0]


def test_words_have_the_gradient_of_an_embedding():
    ours, theirs = models.Words(30, 4), nn.Embedding(30, 4)
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, copy.deepcopy(ours)):
        for _ in range(3):
            tokens, upstream = torch.randint(30, (5, 6)), torch.randn(5, 6, 4)
            for each in (model, theirs):
                each.zero_grad()
                each(tokens).backward(upstream)
            assert not model.weight.grad.is_sparse
            torch.testing.assert_close(model.weight.grad, theirs.weight.grad)


def test_the_papers_nets_have_its_sizes():
    def features(model):
        return [layer.num_features for layer in bln.layers(model).values()]

    lenet, sentiment = models.lenet(NORMS["bln"]), models.sentiment(NORMS["bln"])
    assert features(lenet) == [6, 16, 120, 84]
    assert features(sentiment) == [128, 64, 32]
    assert lenet(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert [layer.population.position_shape for layer in bln.layers(lenet).values()] == [(16, 16), (6, 6), (), ()]
    assert sentiment(torch.randint(20_000, (2, 80))).shape == (2,)
    dense = lenet[9].weight
    torch.testing.assert_close(dense @ dense.t(), torch.eye(120), atol=1e-5, rtol=0)
