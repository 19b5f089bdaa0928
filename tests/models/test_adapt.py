"""A pretrained BatchNorm net fits its statistics to the request, and can be put back."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import bln

CLASSES = 4


def images(n, seed=0, labels=None):
    """Images whose class is the sign pattern of two channels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (n,), generator=generator) if labels is None else labels
    signs = torch.stack([labels % 2, labels // 2], 1).float() * 2 - 1
    x = torch.randn(n, 3, 4, 4, generator=generator) * 0.7
    x[:, :2] += 0.8 * signs[:, :, None, None]
    return x, labels


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for step in range(150):
        x, labels = images(32, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), labels).backward()
        optimizer.step()
    return net.eval()


@pytest.fixture
def net(trained):
    return copy.deepcopy(trained)


def shifted(x):
    """Darker, with less contrast."""
    return 0.3 * x - 2


def accuracy(net, x, labels, size):
    with torch.no_grad():
        return (torch.cat([net(part) for part in x.split(size)]).argmax(1) == labels).float().mean().item()


def test_an_infinite_prior_keeps_the_function(net):
    x = images(10)[0]
    expected = net(x)
    bln.adapt(net, prior=math.inf)
    torch.testing.assert_close(net(x), expected)


def test_statistics_are_shrunk_towards_the_running_ones_by_the_size_of_the_request(net):
    x, norm = shifted(images(6)[0]), net[1]
    y = net[0](x).detach()
    share = 16 / (16 + 6)
    mean = share * norm.running_mean + (1 - share) * y.mean((0, 2, 3))
    around = (y - mean[:, None, None]).square().mean((0, 2, 3))
    var = share * norm.running_var + (1 - share) * around
    expected = nn.functional.batch_norm(y, mean, var, norm.weight, norm.bias, eps=norm.eps)
    bln.adapt(net, prior=16)
    torch.testing.assert_close(net[1](y), expected, rtol=1e-5, atol=1e-5)


def test_it_mends_shifted_data(net):
    x, labels = images(256, 1000)
    assert accuracy(net, x, labels, 16) > 0.9
    before = accuracy(net, shifted(x), labels, 16)
    bln.adapt(net, prior=4)
    after = accuracy(net, shifted(x), labels, 16)
    assert before < 0.6
    assert after > before + 0.2


def test_the_prior_is_chosen_by_agreement_with_all_batches_together(net):
    x, labels = images(256, 1000)
    batches = [(part, None) for part in shifted(x).split(16)]
    fixed = {}
    for prior in (math.inf, 64, 16, 4):
        adaptation = bln.adapt(net, prior=prior)
        fixed[prior] = accuracy(net, shifted(x), labels, 16)
        adaptation.undo()
    adaptation = bln.adapt(net, iter(batches))
    assert set(adaptation.agreement) == set(fixed)
    assert adaptation.prior == max(adaptation.agreement, key=adaptation.agreement.get)
    assert fixed[adaptation.prior] >= max(fixed.values()) - 0.05
    assert all(layer.config.priors[:2] == (adaptation.prior,) * 2 for layer in adaptation.layers.values())
    assert all(layer.memory is None for layer in adaptation.layers.values())


def test_batches_sorted_by_class_choose_a_stronger_prior_than_shuffled_ones(net):
    x, labels = images(256, 1000)
    order = labels.argsort(stable=True)
    x = x - 0.5
    shuffled = bln.adapt(copy.deepcopy(net), x.split(16))
    by_class = bln.adapt(net, x[order].split(16))
    assert by_class.prior > shuffled.prior
    chosen = accuracy(net, x[order], labels[order], 16)
    by_class.set_prior(shuffled.prior)
    assert chosen > accuracy(net, x[order], labels[order], 16) + 0.1


def test_undo_restores_the_net(net):
    before = {name: (module, module.training) for name, module in net.named_modules()}
    state = copy.deepcopy(net.state_dict())
    x = images(4)[0]
    expected = net(x)
    adaptation = bln.adapt(net, [shifted(images(8)[0])], memory=10)
    assert bln.layers(net)
    adaptation.undo()
    assert {name: (module, module.training) for name, module in net.named_modules()} == before
    assert torch.equal(net(x), expected)
    for name, value in net.state_dict().items():
        assert torch.equal(value, state[name]), name
    adaptation.undo()


def test_layers_of_bln_keep_their_feature_statistics_and_are_put_back(net):
    bln.convert(net, groups=2)
    bln.configure(net, {"1": "TTFT", "4": "FTFF"})
    net[4].memory = 7
    adaptation = bln.adapt(net, prior=8)
    assert [str(layer.config) for layer in bln.layers(net).values()] == ["8 8 F T", "8 8 F F"]
    assert net[4].memory is None
    adaptation.undo()
    assert [str(layer.config) for layer in bln.layers(net).values()] == ["TTFT", "FTFF"]
    assert net[4].memory.samples == 7


def test_norms_without_batch_statistics_are_left():
    net = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.BatchNorm1d(6), bln.convert(nn.GroupNorm(2, 6))).eval()
    adaptation = bln.adapt(net)
    assert list(adaptation.layers) == ["2"]
    assert type(net[1]) is nn.LayerNorm
    assert str(net[3].config) == "TTFF"


def test_norms_that_cannot_be_adapted_are_named(net):
    class FrozenNorm(nn.BatchNorm2d):
        def __init__(self, features):
            super().__init__(features, affine=False)
            del self.weight
            self.register_buffer("weight", torch.ones(features))

    net[4] = FrozenNorm(8).eval()
    with pytest.warns(UserWarning, match=r"bln.adapt:\n  4: left as it is, .*FrozenNorm: its weight is a buffer"):
        adaptation = bln.adapt(net)
    assert list(adaptation.layers) == ["1"]


def test_norms_without_running_statistics_keep_taking_those_of_the_request(net):
    net[1] = nn.BatchNorm2d(8, track_running_stats=False).eval()
    x = images(4)[0]
    expected = net(x)
    with pytest.warns(UserWarning, match=r"bln.adapt:\n  1: left as it is, it has no population statistics"):
        adaptation = bln.adapt(net, prior=math.inf)
    assert list(adaptation.layers) == ["4"]
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-5)


def test_with_a_memory_single_samples_adapt_in_time(net):
    x, labels = images(400, 1000)
    alone = bln.adapt(net, prior=16)
    without = accuracy(net, shifted(x)[200:], labels[200:], 1)
    alone.undo()
    adaptation = bln.adapt(net, prior=16, memory=200)
    accuracy(net, shifted(x)[:200], labels[:200], 1)
    assert accuracy(net, shifted(x)[200:], labels[200:], 1) > without
    assert not any("memory" in name for name in net.state_dict())

    saved = adaptation.state_dict()
    y = net(shifted(x)[:2])
    adaptation.forget()
    assert not any(value.any() for value in adaptation.state_dict().values())
    adaptation.load_state_dict(saved)
    torch.testing.assert_close(net(shifted(x)[:2]), y)
    with pytest.raises(ValueError, match=r"expected the memory of 6 tensors.*got 1.*memory= first"):
        adaptation.load_state_dict(dict(list(saved.items())[:1]))


def test_choosing_leaves_no_trace(net):
    """Modes, random state and what is remembered; the memory starts empty."""
    net.train()
    net[1].eval()
    torch.manual_seed(3)
    adaptation = bln.adapt(net, [shifted(images(8)[0])] * 3, memory=100)
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(3))
    assert net.training
    assert not net[1].training
    assert not any(value.any() for value in adaptation.state_dict().values())


@pytest.mark.parametrize(
    ("batches", "options", "error", "message"),
    [
        ([], {}, ValueError, "adapt got no batches to choose by"),
        (torch.ones(3, 3, 4, 4), {}, TypeError, "expected an iterable of batches, got one tensor"),
        (None, {"prior": -1}, ValueError, "prior strength of -1"),
        (None, {"prior": math.nan}, ValueError, "prior strength of nan"),
        (None, {"prior": "T"}, TypeError, "a prior strength, a number above 0"),
        (None, {"memory": 0}, ValueError, "memory must be None or an integer"),
        ([torch.ones(3, 3, 4, 4)], {"step": lambda model, batch: "low"}, TypeError, "given a str.*pass step="),
        ([torch.ones(3, 5, 4, 4)], {}, RuntimeError, "channels"),
    ],
)
def test_what_cannot_be_leaves_the_net_as_it_was(net, batches, options, error, message):
    before = dict(net.named_modules())
    with pytest.raises(error, match=message):
        bln.adapt(net, batches, **options)
    assert dict(net.named_modules()) == before


def test_a_net_without_batch_norm_has_nothing_to_adapt():
    for norm in (nn.GroupNorm(2, 6), nn.LayerNorm(6), nn.Identity()):
        with pytest.raises(ValueError, match="no norm with batch statistics, so there is nothing to adapt"):
            bln.adapt(nn.Sequential(nn.Linear(6, 6), norm))
    with pytest.raises(ValueError, match=r"a BatchNorm1d cannot be replaced in place; put it in nn.Sequential"):
        bln.adapt(nn.BatchNorm1d(6))
    with pytest.raises(TypeError, match="expected a torch module, got str"):
        bln.adapt("net")


def test_nan_in_a_request_stays_there(net):
    adaptation = bln.adapt(net, prior=16, memory=50)
    x = shifted(images(4)[0])
    net(x)
    saved = adaptation.state_dict()
    bad = x.clone()
    bad[0, 0, 0, 0] = math.nan
    net(bad)
    for name, value in adaptation.state_dict().items():
        assert torch.equal(value, saved[name]), name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert net(x).isfinite().all()


def test_outputs_of_one_number_are_compared_as_numbers(net):
    net[-1] = nn.Linear(8, 1)
    adaptation = bln.adapt(net, shifted(images(64)[0]).split(16))
    assert all(score <= 0 for score in adaptation.agreement.values())
    assert repr(adaptation).startswith("Adaptation(prior=")


def test_a_compiled_net_is_adapted_inside(net):
    compiled = torch.compile(net, backend="eager")
    x = images(4)[0]
    adaptation = bln.adapt(compiled, prior=16)
    assert list(adaptation.layers) == ["1", "4"]
    torch.testing.assert_close(compiled(x), net(x))
