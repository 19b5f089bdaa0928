"""Norms of any class become the BLN layer that computes the same, or are left."""

import copy
import pickle
import re
import warnings

import pytest
import torch
from model_nets import warmed
from torch import nn

import bln
from bln import BatchLayerNorm


class ChannelsFirst(nn.LayerNorm):
    """At each position of (N, C, H, W), and there alone."""

    def forward(self, x):
        _, _, _, _ = x.shape
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class BatchNormAct(nn.BatchNorm2d):
    def __init__(self, *args, act=nn.ReLU, **kwargs):
        super().__init__(*args, **kwargs)
        self.act = act(inplace=True)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class GroupNormAct(nn.GroupNorm):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drop = nn.Identity()
        self.activation = nn.PReLU()

    def forward(self, x):
        return self.activation(self.drop(super().forward(x)))


class OneGroup(nn.GroupNorm):
    def __init__(self, features, **kwargs):
        super().__init__(1, features, **kwargs)


class HandWrittenNorm(nn.Module):
    """A layer norm that is no subclass, with eps under another name."""

    def __init__(self, features):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.variance_epsilon = 1e-12

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = (x - mean).square().mean(-1, keepdim=True)
        return self.weight * (x - mean) / (var + self.variance_epsilon).sqrt() + self.bias


class ChangedBatchNorm(nn.BatchNorm2d):
    """A subclass that changes nothing in eval()."""


BY_BEHAVIOUR = [
    (ChannelsFirst(6, eps=1e-6), (8, 6, 5, 4), {"groups": None, "channel_dim": 1}),
    (nn.LayerNorm(6), (8, 5, 6), {"groups": None, "channel_dim": -1}),
    (BatchNormAct(6), (8, 6, 5, 4), {"groups": 6, "channel_dim": 1}),
    (BatchNormAct(6, affine=False, act=nn.Hardswish), (8, 6, 5, 4), {"groups": 6}),
    (BatchNormAct(6, track_running_stats=False), (8, 6, 5, 4), {"groups": 6, "config": "FFFF"}),
    (GroupNormAct(3, 6), (8, 6, 5, 4), {"groups": 3}),
    (OneGroup(6), (8, 6, 5), {"groups": 1}),
    (HandWrittenNorm(6), (8, 5, 6), {"groups": None, "channel_dim": -1, "eps": 1e-12}),
    (ChangedBatchNorm(6), (8, 6, 5, 4), {"groups": 6}),
]


@pytest.mark.parametrize(("norm", "shape", "options"), BY_BEHAVIOUR, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("meta", [False, True])
def test_a_norm_of_another_class_is_known_by_what_it_computes(norm, shape, options, meta):
    norm = warmed(copy.deepcopy(norm), shape)
    x = torch.randn(shape) * 3 + 2
    expected, parameters, state = norm(x.clone()), list(norm.parameters()), torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if meta:
            assert bln.layers(bln.convert(copy.deepcopy(norm).to("meta")))
        converted = bln.convert(nn.Sequential(norm))
    assert torch.equal(torch.get_rng_state(), state)
    (layer,) = bln.layers(converted).values()
    for name, value in options.items():
        assert str(getattr(layer, name)) == str(value), name
    assert {id(p) for p in converted.parameters()} == {id(p) for p in parameters}
    # Float32 through a dozen operations, on values of a few units.
    torch.testing.assert_close(converted.eval()(x.clone()), expected, atol=1e-5, rtol=1e-5)
    converted.train()(x.clone().requires_grad_() * 1).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in parameters)


def test_an_activation_inside_of_a_norm_stays_with_it():
    norm = warmed(BatchNormAct(6), (8, 6, 5, 4)).train()
    act, drop = norm.act, norm.drop
    net = bln.convert(nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.Flatten(), nn.Linear(54, 2)))
    made = net[1]
    assert made.training
    assert made.act is act
    assert made.drop is drop
    assert made.norm.weight is norm.weight
    assert (made.norm.num_features, made.norm.eps) == (6, 1e-5)
    assert [type(m).__name__ for m in made] == ["BatchLayerNorm", "Dropout", "ReLU"]
    assert list(bln.layers(net)) == ["1.norm"]
    x = torch.randn(4, 3, 5, 5)
    expected = net.eval()(x)
    again = bln.convert(nn.Sequential(nn.Conv2d(3, 6, 3), BatchNormAct(6), nn.Flatten(), nn.Linear(54, 2))).eval()
    again.load_state_dict(net.state_dict())
    copied, pickled = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    for same in (again, copied, pickled, compiled, bln.convert(net)):
        assert torch.equal(same(x), expected)
    bln.configure(net, "TTTT")
    expected = net(x)
    frozen, report = bln.freeze(net, report=True)
    assert report.folded == {"1.norm": "into 0"}
    torch.testing.assert_close(frozen(x), expected)


def norm_with(act, drop=None):
    """As timm has it: the norm, then its ``drop``, then its ``act``."""
    norm = BatchNormAct(6, act=lambda inplace: act)
    norm.drop = drop or nn.Identity()
    return norm


class SiLU(nn.Module):
    """A library's own."""

    def forward(self, x):
        return x * x.sigmoid()


class ReLU(nn.Module):
    """Another function of that name."""

    def forward(self, x):
        return x.clamp(0, 6)


@pytest.mark.parametrize("drop", [None, nn.Dropout(0.0), nn.Dropout2d(0.0)], ids=str)
@pytest.mark.parametrize(
    ("act", "name"),
    [(nn.ReLU(), "relu"), (nn.ReLU(inplace=True), "relu"), (nn.SiLU(), "silu"), (SiLU(), "silu"), (nn.GELU(), "gelu")],
    ids=str,
)
def test_a_norm_with_a_known_activation_becomes_one_layer(act, name, drop):
    norm = warmed(norm_with(act, drop), (8, 6, 5, 4))
    x, parameters = torch.randn(8, 6, 5, 4), dict(norm.named_parameters())
    expected = norm(x.clone())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = bln.convert(nn.Sequential(nn.Identity(), norm))
    made = net[1]
    assert type(made) is bln.BatchLayerNorm
    assert made.activation == name
    # Float32 through a dozen operations, on values of a few units.
    torch.testing.assert_close(made.eval()(x), expected, atol=1e-5, rtol=1e-5)
    # Names in the state dict are the norm's own, and so are the parameters.
    assert all(dict(made.named_parameters())[key] is value for key, value in parameters.items())
    again = bln.convert(nn.Sequential(nn.Identity(), norm_with(act, drop))).eval()
    again.load_state_dict(net.state_dict())
    assert torch.equal(again(x), net.eval()(x))


def hooked(module):
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("act", "drop"),
    [
        (nn.GELU("tanh"), None), (nn.Hardswish(), None), (nn.ReLU6(), None), (ReLU(), None), (hooked(nn.ReLU()), None),
        (nn.ReLU(), nn.Dropout(0.1)), (nn.ReLU(), hooked(nn.Dropout(0.0))), (nn.PReLU(), None),
    ],
    ids=str,
)  # fmt: skip
def test_a_norm_with_anything_else_behind_it_keeps_that_as_modules(act, drop):
    norm = warmed(norm_with(act, drop), (8, 6, 5, 4))
    x = torch.randn(8, 6, 5, 4)
    expected = norm(x.clone())
    made = bln.convert(norm)
    assert made.norm.activation is None
    assert made.act is act
    assert drop is None or made.drop is drop
    torch.testing.assert_close(made.eval()(x), expected, atol=1e-5, rtol=1e-5)


def test_running_statistics_of_a_norm_that_counts_no_mini_batches_are_those_of_one():
    norm = nn.BatchNorm2d(6, momentum=None)
    norm.num_batches_tracked = None  # as where a class of its own has none
    norm.running_mean.normal_()
    new, x = bln.convert(copy.deepcopy(norm.eval())), torch.randn(8, 6, 5, 4)
    torch.testing.assert_close(new(x), norm(x))
    assert new.population.updates[0] == 1
    new.train()(x)
    batch = (x.mean((0, 2, 3)) * 8 + norm.running_mean * 32) / 40
    torch.testing.assert_close(new.population.batch_mean, batch)


def test_what_cannot_be_converted_is_named_with_its_class_and_the_reason():
    class RMS(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(6)), 1e-6

        def forward(self, x):
            return (1 + self.weight) * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    class GemmaRMSNorm(RMS):
        pass

    class OnePlusNorm(nn.LayerNorm):
        def forward(self, x):
            return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)

    class OtherEpsNorm(nn.LayerNorm):
        def forward(self, x):
            return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, 10 * self.eps)

    class FrozenBatchNorm(nn.Module):
        eps = 1e-5

        def __init__(self):
            super().__init__()
            for name in ("weight", "bias", "running_mean", "running_var"):
                self.register_buffer(name, torch.ones(6))

    class AdaptiveNorm(nn.LayerNorm):
        def forward(self, x, scale):
            return super().forward(x) * scale

    class ScaledBatchNorm(nn.BatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    class GatedBatchNorm(nn.BatchNorm2d):
        def __init__(self):
            super().__init__(6)
            self.gate = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return super().forward(x) * (self.gate[:, None, None] if self.training else 1)

    class SplitBatchNorm(nn.BatchNorm2d):
        def __init__(self):
            super().__init__(6)
            self.others = nn.ModuleList([nn.BatchNorm2d(6)])

    class PreNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.body = nn.LayerNorm(6), nn.Linear(6, 6)

    class ConvNormAct(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(6, 6, 1), nn.Identity()

    def overwritten(norm):
        norm.forward = lambda x: x
        return norm

    no_norm = "it computes no batch, layer, group or instance normalization"
    left = {
        "wide": (nn.LayerNorm([6, 4]), r"normalized_shape=\(6, 4\) spans more"),
        "rms": (nn.RMSNorm(6), "it subtracts no mean, as RMSNorm"),
        "gemma": (GemmaRMSNorm(), "it subtracts no mean, as RMSNorm"),
        "one_plus": (OnePlusNorm(6), no_norm),
        "other_eps": (OtherEpsNorm(6), no_norm),
        "scaled": (ScaledBatchNorm(6), no_norm),
        "gated": (GatedBatchNorm(), no_norm),
        "split": (SplitBatchNorm(), no_norm),
        "overwritten": (overwritten(nn.BatchNorm2d(6)), no_norm),
        "frozen": (FrozenBatchNorm(), "its weight is a buffer, so it is frozen"),
        "adaptive": (AdaptiveNorm(6), r"it cannot be run on an input alone \(.*scale"),
        "response": (nn.LocalResponseNorm(2), "it has no weight, bias or running mean of one dimension"),
        "lazy": (nn.LazyBatchNorm2d(), "it does not know its features yet; run the model once"),
    }
    others = {
        "usual": nn.BatchNorm1d(6), "already": BatchLayerNorm(6), "pre": PreNorm(), "conv": ConvNormAct(),
        "group": nn.GroupNorm(2, 6), "linear": nn.Linear(6, 6),
    }  # fmt: skip
    net = nn.ModuleDict({**{name: module for name, (module, _) in left.items()}, **others})
    with pytest.warns(UserWarning, match=r"bln\.convert") as caught:
        bln.convert(net)
    _, *lines = str(caught.pop().message).splitlines()
    assert not caught
    assert len(lines) == len(left)
    for line, (name, (module, reason)) in zip(lines, left.items(), strict=True):
        kind = type(module)
        assert line.startswith(f"  {name}: left as it is, {kind.__module__}.{kind.__qualname__}: ")
        assert re.search(reason, line), line
        assert net[name] is module
    assert set(bln.layers(net)) == {"usual", "already", "pre.norm", "group", "split.others.0"}
