"""Other norms become BLN."""

import copy
import warnings

import pytest
import torch
from model_nets import warmed
from torch import nn
from torch.nn.utils import prune

import bln
from bln import BatchLayerNorm

FUNCTION_KEPT = [
    (nn.BatchNorm1d(6), (8, 6)),
    (nn.BatchNorm1d(6, momentum=0.3), (8, 6, 5)),
    (nn.BatchNorm2d(6, eps=1e-3), (8, 6, 5, 4)),
    (nn.BatchNorm1d(6, eps=2.0), (8, 6)),
    (nn.BatchNorm2d(6, affine=False), (8, 6, 5, 4)),
    (nn.BatchNorm2d(6, momentum=None), (8, 6, 5, 4)),
    (nn.BatchNorm3d(6), (8, 6, 5, 4, 3)),
    (nn.LayerNorm(6), (8, 5, 6)),
    (nn.LayerNorm(6, elementwise_affine=False), (8, 6)),
    (nn.LayerNorm(6, bias=False), (8, 5, 4, 6)),
    (nn.InstanceNorm2d(6, track_running_stats=True, affine=True), (8, 6, 5, 4)),
    (nn.InstanceNorm2d(6, eps=1e-3), (8, 6, 5, 4)),
    (nn.InstanceNorm1d(6, affine=True), (8, 6, 5)),
    (nn.GroupNorm(3, 6), (8, 6, 5, 4)),
    (nn.GroupNorm(1, 6, affine=False), (8, 6)),
]
OF_ONE_SAMPLE = [(norm, shape) for norm, shape in FUNCTION_KEPT if getattr(norm, "running_mean", None) is None]


@pytest.mark.parametrize(("norm", "shape"), FUNCTION_KEPT, ids=lambda value: str(value))
def test_the_function_is_kept(norm, shape):
    norm = warmed(copy.deepcopy(norm), shape)
    x = torch.randn(shape) * 3 + 2
    expected = norm(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = bln.convert(norm)
    assert isinstance(layer, BatchLayerNorm)
    assert not layer.training
    assert layer is not norm
    assert layer.eps == norm.eps
    # A dozen operations on numbers of this size: the input over a deviation, before means cancel.
    running_var = getattr(norm, "running_var", None)
    deviation = 1.0 if running_var is None else running_var.min().sqrt()
    size = (x.abs().max() / min(deviation, 1.0) + 1) * (1 if norm.weight is None else norm.weight.abs().max() + 1)
    assert (layer(x) - expected).abs().max() < 12 * torch.finfo(x.dtype).eps * size


@pytest.mark.parametrize(("norm", "shape"), OF_ONE_SAMPLE, ids=str)
def test_a_norm_of_single_samples_is_the_same_in_training_at_batch_one(norm, shape):
    norm = copy.deepcopy(norm).double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    layer = bln.convert(copy.deepcopy(norm)).train()
    x = torch.randn(1, *shape[1:], dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    expected = norm(x)
    torch.testing.assert_close(layer(x), expected)
    wanted = torch.autograd.grad(expected, [x, *norm.parameters()], dy)
    for actual, gradient in zip(torch.autograd.grad(layer(x), [x, *layer.parameters()], dy), wanted, strict=True):
        torch.testing.assert_close(actual, gradient)


def test_groups_are_the_largest_divisor_up_to_the_one_asked_for():
    def made(features, **options):
        return bln.convert(nn.BatchNorm2d(features), **options).groups

    assert [made(c) for c in (64, 12, 7, 22, 1)] == [8, 6, 7, 2, 1]
    assert [made(64, groups=g) for g in (1, 3, 16, 100)] == [1, 2, 16, 64]
    assert bln.convert(nn.GroupNorm(3, 12)).groups == 3
    assert bln.convert(nn.InstanceNorm1d(12)).groups == 12
    assert bln.convert(nn.LayerNorm(12)).groups is None
    for wrong in (0, 2.5, None, True):
        with pytest.raises(ValueError, match="groups must be"):
            bln.convert(nn.BatchNorm2d(8), groups=wrong)


def test_an_eps_that_cannot_be_kept_is_named_and_the_norm_left():
    net = nn.Sequential(nn.BatchNorm1d(6), nn.Sequential(nn.LayerNorm(6, eps=0.0)))
    with pytest.warns(UserWarning, match=r"1\.0: left as it is, torch\..*LayerNorm: its eps=0\.0 lets a constant"):
        bln.convert(net)
    assert type(net[1][0]) is nn.LayerNorm
    assert list(bln.layers(net)) == ["0"]


def test_sync_batch_norm_stays_synchronized():
    norm = nn.SyncBatchNorm(6)
    norm.running_mean.normal_()
    norm.eval()
    x = torch.randn(4, 6, 5)
    expected = nn.functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    layer = bln.convert(norm)
    assert layer.process_group == "world"
    torch.testing.assert_close(layer(x), expected, atol=1e-3, rtol=0)


def test_process_group_is_given_to_all_layers_and_changes_nothing_else():
    model = nn.Sequential(nn.BatchNorm1d(3), BatchLayerNorm(3, config="FTFF"), nn.LayerNorm(3))
    model(torch.randn(4, 3))
    layer, before = model[1], copy.deepcopy(model[1].state_dict())
    assert bln.convert(model, process_group="world") is model
    assert [module.process_group for module in model] == ["world"] * 3
    assert model[1] is layer
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    bln.convert(model)
    assert layer.process_group == "world"
    assert bln.convert(BatchLayerNorm(3), process_group="world").process_group == "world"


@pytest.mark.parametrize(("norm", "shape"), FUNCTION_KEPT[:6])
def test_training_moves_one_over_m_to_the_truth(norm, shape):
    layer = bln.convert(warmed(copy.deepcopy(norm), shape)).train()
    assert layer.population.inverse_m == 0
    for _ in range(100):
        layer(torch.randn(shape))
    assert layer.population.inverse_m.item() == pytest.approx(1 / 8, rel=0.05)


@pytest.mark.parametrize("momentum", [0.3, 0.0, 1e-30])
def test_a_new_mini_batch_weighs_as_much_as_it_did(momentum):
    """Against the running statistics it took over, as BatchNorm itself; feature statistics, new here, start at once."""
    norm = nn.BatchNorm1d(6, momentum=momentum)
    norm.running_mean.fill_(5)
    norm.running_var.fill_(4)
    layer, x = bln.convert(copy.deepcopy(norm)).train(), torch.randn(8, 6)
    norm(x)
    layer(x)
    assert layer.momentum == momentum
    torch.testing.assert_close(layer.population.batch_mean, norm.running_mean)
    torch.testing.assert_close(layer.population.batch_var, norm.running_var)
    torch.testing.assert_close(layer.population.feature_mean, x.view(8, 3, 2).mean((0, 2)))  # pairs of features
    layer = bln.convert(nn.LayerNorm(6)).train()
    layer(x)
    torch.testing.assert_close(layer.population.batch_mean, x.mean(0))


def test_an_average_of_many_mini_batches_is_not_lost_to_the_next_one():
    """BatchNorm did not write down how many samples it has seen: 32 for each mini-batch, so these weigh as before."""
    norm = nn.BatchNorm1d(6, momentum=None)
    for _ in range(20):
        norm(torch.randn(32, 6) + 5)
    layer, x = bln.convert(copy.deepcopy(norm)).train(), torch.randn(32, 6) + 50
    norm(x)
    layer(x)
    torch.testing.assert_close(layer.population.batch_mean, norm.running_mean)
    torch.testing.assert_close(layer.population.batch_var, norm.running_var)
    new = bln.convert(nn.BatchNorm1d(6, momentum=None)).train()  # and one that has seen nothing
    new(x)
    torch.testing.assert_close(new.population.batch_mean, x.mean(0))


def test_statistics_that_an_instance_norm_never_moves_stay():
    """Without a momentum, torch takes 0 there, and counts no mini-batch."""
    norm = nn.InstanceNorm1d(3, track_running_stats=True, momentum=None)
    norm.running_mean.fill_(5)
    layer = bln.convert(copy.deepcopy(norm)).train()
    layer(torch.randn(4, 3, 6))
    torch.testing.assert_close(layer.population.batch_mean, norm.running_mean)


def test_a_norm_whose_weight_is_computed_is_left():
    norm = prune.random_unstructured(nn.BatchNorm1d(6), "weight", 0.5)
    with pytest.warns(
        UserWarning,
        match=r"left as it is, torch\.nn\.modules\.batchnorm\.BatchNorm1d: its weight is computed, as by pruning",
    ):
        assert bln.convert(norm) is norm
    prune.remove(norm, "weight")
    assert isinstance(bln.convert(norm), BatchLayerNorm)


def test_hooks_that_stay_behind_are_named():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model[1].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="1: its hooks stay with the old BatchNorm1d") as warned:
        bln.convert(model)
    assert len(warned) == 1
    assert "0: its hooks" not in str(warned[0].message)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="expected a torch module, got str"):
        bln.convert("resnet18")


def test_norms_without_tensors_go_where_the_model_is():
    norms = [
        nn.InstanceNorm2d(4), nn.LayerNorm(4, elementwise_affine=False),
        nn.BatchNorm2d(4, affine=False, track_running_stats=False),
    ]  # fmt: skip
    for norm in norms:
        net = nn.Sequential(nn.Conv2d(3, 4, 1), norm).double().to("meta")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bln.convert(net)
        assert net[1].population.batch_mean.is_meta
        assert net[1].population.batch_mean.dtype == torch.float64


def test_a_transformer_of_other_layers_is_no_trouble():
    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)

    encoder = nn.TransformerEncoder(Custom(), 2, enable_nested_tensor=False)
    bln.convert(encoder)
    assert len(bln.layers(encoder)) == 2


def test_a_net_keeps_its_parameters_so_that_its_optimizer_keeps_working():
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(2), nn.LayerNorm(16))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = list(net.parameters())
    assert bln.convert(net) is net
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    old = net[1].weight.clone()
    net(torch.randn(4, 3, 6, 6)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(net[1].weight, old)


def test_batch_norm_without_running_statistics_uses_the_current_ones():
    norm = warmed(nn.BatchNorm2d(6, track_running_stats=False), (8, 6, 5, 4))
    x = torch.randn(8, 6, 5, 4)
    expected = norm(x)
    torch.testing.assert_close(bln.convert(norm)(x), expected)


def test_a_shared_norm_stays_shared():
    norm = nn.BatchNorm1d(4)
    net = bln.convert(nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm))
    assert isinstance(net[1], BatchLayerNorm)
    assert net[1] is net[3]


def test_types_and_devices_come_along():
    net = bln.convert(nn.Sequential(nn.BatchNorm1d(4)).bfloat16())
    assert net[0].weight.dtype == torch.bfloat16
    assert net[0].population.batch_var.dtype == torch.float32
    assert bln.convert(nn.BatchNorm1d(4, device="meta")).population.batch_mean.is_meta
    assert bln.convert(nn.BatchNorm1d(4, dtype=torch.float64)).population.batch_mean.dtype == torch.float64


def test_many_norms_left_for_the_same_reason_are_one_line():
    with pytest.warns(UserWarning, match="0, 1, 2 and 5 more: left as it is") as caught:
        bln.convert(nn.Sequential(*(nn.RMSNorm(4) for _ in range(8))))
    assert len(str(caught[0].message).splitlines()) == 2


def test_a_net_without_norms_is_told_of_insert():
    with pytest.warns(UserWarning, match=r"Sequential has no norms.*bln\.insert"):
        bln.convert(nn.Sequential(nn.Linear(3, 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bln.convert(nn.Sequential(nn.Linear(3, 3), BatchLayerNorm(3)))


@pytest.mark.parametrize("batch_first", [False, True])
def test_samples_in_the_second_dimension_are_warned_of_once(batch_first):
    blocks = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first) for _ in range(2)]
    net = nn.Sequential(*blocks, nn.Linear(8, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bln.convert(net)
    said = "".join(str(warning.message) for warning in caught)
    assert said.count("batch_first=True") == (not batch_first)
    assert batch_first or "0.self_attn has batch_first=False" in said


def test_a_transformer_does_not_bypass_the_layer_on_its_fast_path():
    """torch's fused encoder reads norm1.weight and computes layer norm itself, whatever norm1 is."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x, padding = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype, says torch
        expected = encoder(x, src_key_padding_mask=padding)
        bln.convert(encoder)
        actual = encoder(x, src_key_padding_mask=padding)
        torch.testing.assert_close(actual[~padding], expected[~padding], atol=1e-3, rtol=0)
        bln.configure(encoder, "TTTT")
        assert (encoder(x, src_key_padding_mask=padding) - actual)[~padding].abs().max() > 0.01


def test_a_converted_net_survives_a_round_trip(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    net(torch.randn(4, 3, 6, 6))
    bln.convert(net, groups=2)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    again = bln.convert(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()), groups=2)
    again.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(again.eval()(x), net.eval()(x))


@pytest.mark.parametrize("features", [1, 4, 6, 7])
def test_dense_layers_get_groups_of_two_features_or_more(features):
    layer = bln.convert(nn.Sequential(nn.Linear(3, features), nn.BatchNorm1d(features)))[1]
    assert features % layer.groups == 0
    assert features == 1 or features // layer.groups >= 2
