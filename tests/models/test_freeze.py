"""A model made ready for deployment computes what it did, with fewer operations."""

import copy
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bln
from bln import Affine, BatchLayerNorm, StatisticsConfig
from bln._models import freeze as freezing


def trained(model, *shape, config="TTTT", dtype=torch.float64):
    """Parameters and statistics far from where they start, in eval. In float64 'up to rounding' is 1e-12."""
    model.to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.3)
    for _ in range(3):
        model.train()(torch.randn(shape, dtype=dtype) * 2 + 1)
    bln.configure(model, config)
    return model.eval()


def frozen(model, *shape, example=False, batches=(1, 4)):
    """The model frozen, its report, and a check that it computes the same at several batch sizes."""
    inputs = [torch.randn(n, *shape[1:], dtype=next(model.parameters()).dtype) for n in batches]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        result, report = bln.freeze(model, inputs[0] if example else None, report=True)
        for x, y in zip(inputs, expected, strict=True):
            torch.testing.assert_close(result(x), y, atol=1e-10, rtol=1e-10)  # float64, sums of up to 100 terms
    return result, report


def bare(d, **options):
    """The layer as ``convert`` makes it of BatchNorm: one map for all positions."""
    return BatchLayerNorm(d, groups=2 if d % 2 == 0 else d, **options)


class TestFolding:
    @pytest.mark.parametrize(
        "before",
        [
            nn.Conv1d(4, 6, 3, padding=1),
            nn.Conv1d(4, 6, 3, bias=False, groups=2),
            nn.Conv2d(4, 6, 3, stride=2, dilation=2, padding=2, groups=2),
            nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular"),
            nn.Conv3d(4, 6, 3, padding=1),
            nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1),
            nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False),
            nn.ConvTranspose3d(4, 6, 2, groups=2),
        ],
        ids=str,
    )
    def test_into_the_convolution_before(self, before):
        shape = (5, 4, *[6] * (before.weight.dim() - 2))
        net = trained(nn.Sequential(copy.deepcopy(before), bare(6), nn.ReLU()), *shape)
        net, report = frozen(net, *shape)
        assert report.folded == {"1": "into 0"}
        assert type(net[1]) is nn.Identity

    @pytest.mark.parametrize(
        ("behind", "folds"),
        [
            (nn.Conv1d(4, 6, 3), True),
            (nn.Conv1d(4, 6, 3, padding=1), False),
            (nn.Conv2d(4, 6, 3, groups=2, stride=2, bias=False), True),
            (nn.Conv2d(4, 6, (3, 1), padding=(1, 0)), False),
            (nn.Conv2d(4, 6, 1, padding="same"), True),
            (nn.Conv2d(4, 6, 3, padding="same"), False),
            (nn.Conv2d(4, 6, 3, padding="valid"), True),
            (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), True),
            (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), True),
            (nn.Conv2d(4, 6, 3, padding="same", padding_mode="replicate"), True),
            (nn.Conv3d(4, 6, 2, groups=2), True),
            (nn.ConvTranspose1d(4, 6, 3), False),
            (nn.ConvTranspose1d(4, 6, 2, stride=2), False),
            (nn.ConvTranspose2d(4, 6, 1, groups=2), False),
            (nn.ConvTranspose2d(4, 6, 1, stride=2), False),
            (nn.ConvTranspose2d(4, 6, 1, padding=1, bias=False), False),
        ],
        ids=str,
    )
    def test_into_the_convolution_behind_unless_zeros_would_miss_the_shift(self, behind, folds):
        shape = (5, 4, *[6] * (behind.weight.dim() - 2))
        net = trained(nn.Sequential(nn.Tanh(), bare(4), copy.deepcopy(behind)), *shape)
        _, report = frozen(net, *shape)
        assert report.folded == ({"1": "into 2"} if folds else {})
        assert folds or "zeros" in report.kept["1"]

    @pytest.mark.parametrize("behind", [nn.Conv2d(4, 6, 3, padding=1), nn.ConvTranspose2d(4, 6, 3, 2, groups=2)])
    def test_a_shift_of_zero_needs_no_padding_to_be_right(self, behind):
        net = nn.Sequential(nn.Tanh(), bare(4, bias=False), copy.deepcopy(behind))
        net = trained(net, 5, 4, 6, 6)
        for statistic in (net[1].population.batch_mean, net[1].population.feature_mean):
            statistic.zero_()
        _, report = frozen(net, 5, 4, 6, 6)
        assert report.folded == {"1": "into 2"}

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("groups", [None, 2])
    def test_into_linear_layers_on_either_side(self, bias, groups):
        net = nn.Sequential(
            nn.Linear(5, 4, bias=bias), BatchLayerNorm(4, groups=groups), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid(),
            BatchLayerNorm(4, groups=groups), nn.Dropout(), nn.Linear(4, 3, bias=bias),
        )  # fmt: skip
        # A pooled layer does not know that its inputs have no positions.
        _, report = frozen(trained(net, 6, 5), 6, 5, example=groups is not None)
        assert report.folded == {"1": "into 0", "5": "into 7"}

    def test_two_layers_around_one(self):
        net = nn.Sequential(BatchLayerNorm(5), nn.Linear(5, 4), BatchLayerNorm(4))
        _, report = frozen(trained(net, 6, 5), 6, 5)
        assert report.folded == {"0": "into 1", "2": "into 1"}

    @pytest.mark.parametrize("channel_dim", [-1, 1])
    @pytest.mark.parametrize("per_position", [True, False])
    @pytest.mark.parametrize("groups", [None, 2])
    @pytest.mark.parametrize("form", ["module", "function", "method"])
    def test_through_a_flatten_into_a_linear_layer(self, channel_dim, per_position, groups, form):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = BatchLayerNorm(4, groups=groups, channel_dim=channel_dim, per_position=per_position)
                self.flatten = nn.Flatten()
                self.head = nn.Linear(60, 3)

            def forward(self, x):
                h = self.norm(torch.tanh(x))
                if form == "module":
                    h = self.flatten(h)
                else:
                    h = torch.flatten(h, 1) if form == "function" else h.flatten(start_dim=1)
                return self.head(h)

        shape = (6, 4, 5, 3) if channel_dim == 1 else (6, 5, 3, 4)
        _, report = frozen(trained(Net(), *shape), *shape)
        assert report.folded == {"norm": "into head"}

    @pytest.mark.parametrize("channel_dim", [1, -1])
    @pytest.mark.parametrize("groups", [None, 2])
    def test_a_shorter_sequence_uses_the_first_positions(self, channel_dim, groups):
        """Folded behind a flatten, whose linear layer says how long it is, and kept as an operation."""
        long, short = ((6, 4, 9), (6, 4, 7)) if channel_dim == 1 else ((6, 9, 4), (6, 7, 4))
        layer = BatchLayerNorm(4, groups=groups, per_position=True, channel_dim=channel_dim)
        layer = trained(nn.Sequential(layer), *long)[0]
        head = nn.Linear(4 * 7, 3, dtype=torch.float64)
        _, report = frozen(nn.Sequential(copy.deepcopy(layer), nn.Flatten(), head), *short)
        assert report.folded == {"0": "into 2"}
        _, report = frozen(nn.Sequential(layer, nn.Tanh()), *short)
        assert "0" in report.kept

    @pytest.mark.parametrize("example", [False, True])
    def test_inside_of_a_compiled_model(self, example):
        net = trained(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), BatchLayerNorm(8), nn.Linear(8, 2)), 16, 4)
        compiled, report = frozen(torch.compile(net, backend="eager"), 16, 4, example=example)
        assert report.folded == {"2": "into 3"}
        assert compiled._orig_mod is net
        assert not bln.layers(net)

    def test_positions_differ_so_only_a_flatten_folds(self):
        net = nn.Sequential(nn.Conv1d(3, 4, 3), BatchLayerNorm(4), nn.Conv1d(4, 2, 3))
        _, report = frozen(trained(net, 6, 3, 9), 6, 3, 9)
        assert report.kept == {"1": "it differs from position to position; it differs from position to position"}

    def test_per_position_statistics_that_agree_are_one_map(self):
        norm = BatchLayerNorm(4, position_shape=(6, 6), config="TTTT").double()
        norm.population.batch_mean.copy_(torch.randn(4))
        norm.population.mark_seen(["batch_mean", "batch_var", "inverse_m"], 1)
        net = nn.Sequential(nn.Conv2d(3, 4, 3).double(), norm, nn.ReLU()).eval()
        _, report = frozen(net, 6, 3, 8, 8)
        assert report.folded == {"1": "into 0"}

    def test_old_references_keep_the_old_values(self):
        net = trained(nn.Sequential(nn.Linear(5, 4), BatchLayerNorm(4)), 6, 5)
        state = net.state_dict()
        before = {name: value.clone() for name, value in state.items()}
        bln.freeze(net)
        for name, value in before.items():
            assert torch.equal(state[name], value), name

    def test_memory_format_and_requires_grad_stay(self):
        net = nn.Sequential(nn.Conv2d(4, 6, 3), bare(6)).to(memory_format=torch.channels_last)
        net[0].weight.requires_grad_(False)
        net = trained(net, 5, 4, 6, 6)
        bln.freeze(net)
        assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert not net[0].weight.requires_grad
        assert net[0].bias.requires_grad


class Block(nn.Module):
    """A residual block in the style of ResNet, its nonlinearity in place."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), bare(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), bare(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(h)) + x)


@given(st.data())
def test_any_chain_of_layers_computes_what_it_did(data):
    """Convolutions, nonlinearities, dropout and BLN in any order, then a flatten and linear layers."""
    pick = lambda *choices: data.draw(st.sampled_from(choices))  # noqa: E731
    features, parts = 4, []
    for _ in range(data.draw(st.integers(1, 5))):
        kind = pick("conv", "transposed", "norm", "norm", "tanh", "dropout")
        groups = pick(1, 2)
        if kind == "conv":
            padding = {"padding": 1, "padding_mode": pick("zeros", "circular")} if pick(True, False) else {}
            parts.append(nn.Conv1d(features, 6 if groups == 1 else 4, pick(1, 3), groups=groups, **padding))
        elif kind == "transposed":
            parts.append(nn.ConvTranspose1d(features, 6, pick(1, 2), groups=groups, bias=pick(True, False)))
        elif kind == "norm":
            config = pick("TTTT", "TTTT", "TTTT", "TTFF")
            parts.append(
                BatchLayerNorm(
                    features, groups=pick(None, 2), per_position=pick(True, False), config=config,
                    bias=pick(True, False),
                )
            )  # fmt: skip
        else:
            parts.append(nn.Tanh() if kind == "tanh" else nn.Dropout())
        features = getattr(parts[-1], "out_channels", features)
    parts += [nn.Flatten(), nn.LazyLinear(3), *([BatchLayerNorm(3, config="TTTT")] if pick(True, False) else [])]
    net = nn.Sequential(*parts, nn.Linear(3, 2))
    net(torch.randn(2, 4, 12))
    configs = {name: layer.config for name, layer in bln.layers(net).items()}
    if not configs:
        return
    trained(net, 5, 4, 12)
    bln.configure(net, configs)
    fixed = sum(str(config) == "TTTT" for config in configs.values())
    if fixed:
        _, report = frozen(net, 5, 4, 12, example=pick(True, False))
        assert len(report.folded) + len(report.kept) == fixed


class TestWhatIsNotFolded:
    def reasons(self, net, *shape, **options):
        _, report = frozen(trained(net, *shape), *shape, **options)
        assert not report.left
        return report

    def test_a_residual_block_folds_within_its_branch(self):
        report = self.reasons(nn.Sequential(Block(), Block()), 6, 4, 5, 5)
        assert report.folded == {f"{i}.norm{j}": f"into {i}.conv{j}" for i in (0, 1) for j in (1, 2)}

    def test_across_a_nonlinearity(self):
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), BatchLayerNorm(4), nn.Tanh(), nn.Linear(4, 4))
        assert self.reasons(net, 6, 4).kept == {
            "2": "1 before it is no linear layer or convolution; 3 after it is no linear layer or convolution"
        }

    def test_outputs_that_are_used_twice(self):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.norm, self.second = nn.Linear(4, 4), BatchLayerNorm(4), nn.Linear(4, 4)

            def forward(self, x):
                h = self.first(x)
                y = self.norm(h)
                return self.second(y) + y + h

        assert self.reasons(Twice(), 6, 4).kept == {
            "norm": "first before it is used elsewhere too; what comes out of it is used 2 times"
        }

    def test_layers_that_are_used_twice(self):
        linear, norm = nn.Linear(4, 4), BatchLayerNorm(4)
        assert "used more than once" in self.reasons(nn.Sequential(linear, BatchLayerNorm(4), linear), 6, 4).kept["1"]
        net = nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh(), nn.Linear(4, 4), norm)
        assert self.reasons(net, 6, 4).kept == {"1": "it is used more than once"}
        assert net[1] is net[4]

    def test_a_layer_that_is_also_used_inside_a_module_of_torchs_own(self):
        """``torch.fx`` does not look into it."""

        class Hidden(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder = nn.TransformerEncoderLayer(4, 1, 4, batch_first=True)
                self.linear, self.norm = self.encoder.linear1, BatchLayerNorm(4, channel_dim=-1, per_position=False)

            def forward(self, x):
                return self.encoder(torch.tanh(self.norm(self.linear(x))))

        assert "linear1 before it is used more than once" in self.reasons(Hidden(), 6, 3, 4).kept["norm"]

    @pytest.mark.parametrize("form", ["module", "function", "method"])
    def test_a_flatten_of_something_else(self, form):
        """Four features of four positions, flattened to four: the sizes would fit."""

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.head, self.flatten = BatchLayerNorm(4), nn.Linear(4, 3), nn.Flatten(2)

            def forward(self, x):
                h = self.norm(torch.tanh(x))
                if form == "module":
                    h = self.flatten(h)
                else:
                    h = torch.flatten(h, 2) if form == "function" else h.flatten(2, -1)
                return self.head(h)

        assert "flatten after it is no linear layer" in self.reasons(Net(), 6, 4, 2, 2).kept["norm"]

    def test_inputs_without_samples(self):
        """What a convolution takes for features, the layer takes for samples: the shapes would fit."""
        net = trained(nn.Sequential(nn.Conv1d(4, 6, 1), bare(6)), 5, 4, 6)
        x = torch.randn(4, 6).double()
        expected = net(x)
        _, report = bln.freeze(net, x, report=True)
        assert "features stand elsewhere" in report.kept["1"]
        torch.testing.assert_close(net(x), expected)

    def test_shared_weights(self):
        net = nn.Sequential(nn.Linear(4, 4), BatchLayerNorm(4), nn.Tanh(), nn.Linear(4, 4))
        net[3].weight = net[0].weight
        assert "shares its weights" in self.reasons(net, 6, 4).kept["1"]

    def test_weights_that_are_read_elsewhere(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.norm = nn.Linear(4, 4), BatchLayerNorm(4)

            def forward(self, x):
                return F.linear(torch.tanh(self.norm(self.first(x))), self.first.weight.t())

        assert "first before it is used more than once" in self.reasons(Tied(), 6, 4).kept["norm"]

    @pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
    def test_hooks_on_the_neighbour_and_on_the_layer(self, register):
        net = nn.Sequential(nn.Linear(4, 4), BatchLayerNorm(4))
        seen = []
        getattr(net[0], register)(lambda *_: seen.append(1))
        assert (
            "0 before it is used more than once, shares its weights or has hooks" in self.reasons(net, 6, 4).kept["1"]
        )
        seen.clear()
        net(torch.randn(2, 4).double())
        assert seen == [1]

        net = trained(nn.Sequential(nn.Linear(4, 4), BatchLayerNorm(4)), 6, 4)
        getattr(net[1], register)(lambda *_: seen.append(2))
        with pytest.warns(UserWarning, match="it has hooks"):
            bln.freeze(net)
        assert isinstance(net[1], BatchLayerNorm)

    def test_hooks_on_a_container_between(self):
        """They see what passes from one part to the other, so that must stay."""
        net = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(BatchLayerNorm(4), nn.Tanh()))
        seen = []
        net[0].register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
        net.register_forward_hook(lambda *_: None)  # around both: sees nothing of it
        net = trained(net, 6, 4)
        x = torch.randn(3, 4).double()
        net(x)
        (expected,) = seen[-1:]
        seen.clear()
        _, report = bln.freeze(net, report=True)
        assert "0 before it is no linear layer" in report.kept["1.0"]
        assert not seen, "tracing called the hook"
        net(x)
        assert torch.equal(seen[-1], expected)

    @pytest.mark.parametrize("wrap", [nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm])
    def test_parametrizations(self, wrap):
        net = nn.Sequential(wrap(nn.Linear(4, 4)), BatchLayerNorm(4))
        assert "0 before it is no linear layer or convolution" in self.reasons(net, 6, 4).kept["1"]

    def test_subclasses_and_replaced_forwards(self):
        class Doubled(nn.Linear):
            def forward(self, x):
                return 2 * torch.tanh(super().forward(x))

        class Shifted(BatchLayerNorm):
            def forward(self, x, mask=None):
                return super().forward(x, mask) + 1

        net = trained(nn.Sequential(Doubled(4, 4), BatchLayerNorm(4), nn.Linear(4, 4)), 6, 4)
        net[2].forward = lambda x: x.square()
        _, report = frozen(net, 6, 4)
        assert "1" in report.kept
        with pytest.warns(UserWarning, match="Shifted may compute something else"):
            bln.freeze(trained(nn.Sequential(nn.Linear(4, 4), Shifted(4)), 6, 4))

    def test_features_that_stand_elsewhere(self):
        """Five features of five positions each: the linear layer works on positions, the shapes would fit."""
        net = nn.Sequential(nn.Linear(5, 5), bare(5), nn.Linear(5, 5))
        assert self.reasons(copy.deepcopy(net), 6, 5, 5).kept["1"].count("pass example=") == 2
        report = self.reasons(copy.deepcopy(net), 6, 5, 5, example=True)
        assert report.kept["1"].count("features stand elsewhere") == 2
        net = nn.Sequential(nn.Conv1d(5, 5, 1), bare(5, channel_dim=-1), nn.Conv1d(5, 5, 1))
        assert self.reasons(net, 6, 5, 5).kept["1"].count("features stand elsewhere") == 2

    def test_an_example_shows_that_features_are_last(self):
        net = nn.Sequential(nn.Linear(5, 5), bare(5), nn.Tanh())
        assert self.reasons(net, 6, 5, example=True).folded == {"1": "into 0"}

    @pytest.mark.parametrize("how", ["operator", "method", "function", "keyword", "module"])
    def test_what_is_changed_in_place_once_the_layer_is_gone(self, how):
        """The layer made a copy; folded into what stands behind it, it would hand on the memory itself."""

        class InPlace(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.linear, self.relu = BatchLayerNorm(4), nn.Linear(4, 4), nn.ReLU(inplace=True)

            def forward(self, x):
                h = torch.tanh(x)
                y = self.norm(h)
                if how == "operator":
                    h += 1
                elif how == "method":
                    h.relu_()
                elif how == "function":
                    torch.relu_(h)
                else:
                    h = F.relu(h, inplace=True) if how == "keyword" else self.relu(h)
                return self.linear(y) + h

        assert "changed in place" in self.reasons(InPlace(), 6, 4).kept["norm"]

    def test_low_precision_weights(self):
        net = trained(nn.Sequential(nn.Linear(4, 4), BatchLayerNorm(4)), 6, 4, dtype=torch.float32).bfloat16()
        x = torch.randn(3, 4).bfloat16()
        with torch.no_grad():
            y = net(x)
            _, report = bln.freeze(net, report=True)
            assert "freeze first" in report.kept["1"]
            torch.testing.assert_close(net(x), y)  # assert_close knows how bfloat16 rounds

    def test_masked_calls(self):
        class Masked(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.norm = nn.Linear(4, 4), BatchLayerNorm(4, channel_dim=-1)

            def forward(self, x, mask=None):
                return self.norm(self.linear(x), mask)

        net = trained(Masked(), 6, 3, 4)
        x, mask = torch.randn(5, 3, 4).double(), torch.rand(5, 3) < 0.7
        mask[0, 0] = True
        with torch.no_grad():
            expected = net(x, mask), net(x)
            _, report = bln.freeze(net, (x, mask), report=True)
            assert report.kept == {"norm": "it is called with a mask"}
            torch.testing.assert_close(net(x, mask), expected[0])
            torch.testing.assert_close(net(x), expected[1])

    def test_optional_arguments_that_change_the_neighbours(self):
        class Optional(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.norm = nn.Linear(4, 4), BatchLayerNorm(4)

            def forward(self, x, offset=None):
                h = self.linear(x)
                return self.norm(h if offset is None else h.tanh() + offset)

        report = self.reasons(Optional(), 6, 4)
        assert "depends on optional arguments" in report.kept["norm"]
        assert self.reasons(Optional(), 6, 4, example=True).folded == {"norm": "into linear"}


class Branching(nn.Module):
    """``torch.fx`` cannot trace it, but its parts."""

    def __init__(self, iterated=False):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 4), BatchLayerNorm(4), nn.Tanh())
        self.iterated = iterated

    def forward(self, x):
        if x.sum() > 1e6:
            return x
        if not self.iterated:
            return self.features(x)
        seen = []
        for module in self.features:
            x = module(x)
            seen.append(x)
        return sum(seen)


class TestModelsThatCannotBeTraced:
    def test_without_an_example_nothing_is_folded(self):
        _, report = frozen(trained(Branching(), 6, 4), 6, 4)
        assert "torch.fx cannot trace Branching" in report.kept["features.1"]
        assert "pass example=" in report.kept["features.1"]

    def test_an_example_shows_which_parts_are_called(self):
        _, report = frozen(trained(Branching(), 6, 4), 6, 4, example=True)
        assert report.folded == {"features.1": "into features.0"}
        assert report.difference < 1e-12

    def test_a_container_that_is_iterated_is_not_taken_for_called(self):
        """What comes out of each of its modules is used: nothing may move from one to the other."""
        _, report = frozen(trained(Branching(iterated=True), 6, 4), 6, 4, example=True)
        assert "features.1" in report.kept

    def test_a_layer_of_a_part_that_is_called_from_outside_too(self):
        class Outside(Branching):
            def forward(self, x):
                return super().forward(x) + self.features[0](x)

        _, report = frozen(trained(Outside(), 6, 4), 6, 4, example=True)
        assert "features.0 before it is used more than once" in report.kept["features.1"]

    def test_a_part_that_is_called_twice(self):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.part = Branching()

            def forward(self, x):
                return self.part(self.part(x))

        _, report = frozen(trained(Twice(), 6, 4), 6, 4, example=True)
        assert "part.features.1" in report.kept

    def test_tracing_leaves_nothing_behind(self):
        class Keeping(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.norm, self.last = nn.Linear(4, 4), BatchLayerNorm(4), None

            def forward(self, x):
                self.last = self.norm(self.linear(x))
                return self.last

        net = trained(Keeping(), 6, 4)
        last = net.last
        bln.freeze(net)
        assert net.last is last

    def test_an_encoder_of_torchs_own(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        bln.convert(net)
        net = trained(net, 6, 5, 8)
        _, report = frozen(net, 6, 5, 8)
        assert len(report.kept) == 4


class TestReport:
    def net(self):
        net = nn.Sequential(
            nn.Conv1d(3, 4, 3), nn.Tanh(), BatchLayerNorm(4), nn.Conv1d(4, 4, 1), BatchLayerNorm(4), nn.Flatten(),
            nn.Linear(28, 5), nn.Tanh(), BatchLayerNorm(5), nn.Linear(5, 2),
        )  # fmt: skip
        net = trained(net, 6, 3, 9)
        bln.configure(net, {"8": "FTFF"})
        return net

    def test_it_says_what_became_of_each_layer(self):
        net, report = frozen(self.net(), 6, 3, 9, batches=(4,))
        assert report.folded == {"4": "into 6"}
        assert set(report.kept) == {"2"}
        assert set(report.left) == {"8"}
        assert str(report).splitlines() == [
            "bln.freeze: 1 folded away, 1 kept as one multiply-add, 1 left as they are",
            "  folded  4  into 6",
            f"  kept    2  {report.kept['2']}",
            "  left    8  FTFF looks at the current input; with TTTT alone it is a fixed map",
        ]
        assert isinstance(net[2], Affine)
        assert isinstance(net[8], BatchLayerNorm)

    def test_an_example_adds_how_far_outputs_moved(self):
        _, report = bln.freeze(self.net(), torch.randn(4, 3, 9).double(), report=True)
        assert report.difference < 1e-12
        assert "outputs of the example moved by" in str(report)

    def test_the_model_alone_is_returned_unless_asked(self):
        net = self.net()
        assert bln.freeze(net) is net

    def test_a_model_that_is_itself_a_layer(self):
        layer = trained(nn.Sequential(BatchLayerNorm(4)), 6, 4)[0]
        x = torch.randn(3, 4).double()
        expected = layer(x)
        affine = bln.freeze(layer)
        assert isinstance(affine, Affine)
        torch.testing.assert_close(affine(x), expected)

    @pytest.mark.parametrize("config", [str(c) for c in StatisticsConfig.all() if str(c) != "TTTT"])
    @pytest.mark.parametrize("groups", [None, 2])
    def test_other_configurations_are_left_and_said_to_be(self, config, groups):
        net = trained(nn.Sequential(nn.Linear(4, 4), BatchLayerNorm(4, groups=groups)), 6, 4, config=config)
        x = torch.randn(3, 4).double()
        expected = net(x)
        with pytest.warns(UserWarning, match=f"every layer is left as it is:\n  1: {config} looks at"):
            bln.freeze(net)
        assert torch.equal(net(x), expected)

    @pytest.mark.parametrize("groups", [None, 2])
    def test_a_layer_without_statistics_is_left(self, groups):
        """Its ``1/m`` is that of each input; so at a position no sequence reached."""
        net = nn.Sequential(nn.Linear(4, 4), BatchLayerNorm(4, groups=groups, config="TTTT"))
        with pytest.warns(UserWarning, match="not been trained or calibrated"):
            bln.freeze(net)
        tail = BatchLayerNorm(4, groups=groups, per_position=True, config="TTTT", channel_dim=-1, position_shape=9)
        tail(torch.randn(5, 7, 4))
        with pytest.warns(UserWarning, match="at some position"):
            assert bln.freeze(tail) is tail

    def test_a_model_without_layers(self):
        with pytest.raises(ValueError, match=r"has no BatchLayerNorm; bln.convert"):
            bln.freeze(nn.Linear(3, 3))

    def test_an_example_that_does_not_fit(self):
        with pytest.raises(ValueError, match="example does not run through the model"):
            bln.freeze(self.net(), torch.randn(2, 4))

    @pytest.mark.parametrize("how", ["tuple", "dict"])
    def test_examples_of_several_inputs(self, how):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.norm = nn.Linear(4, 4), BatchLayerNorm(4)

            def forward(self, x, y=None):
                return self.norm(self.linear(x if y is None else x + y))

        net, (x, y) = trained(Two(), 6, 4), torch.randn(2, 3, 4).double()
        expected = net(x, y)
        _, report = bln.freeze(net, (x, y) if how == "tuple" else {"x": x, "y": y}, report=True)
        assert report.folded == {"norm": "into linear"}
        torch.testing.assert_close(net(x, y), expected)


def test_an_error_on_the_way_changes_nothing(monkeypatch):
    net = trained(
        nn.Sequential(nn.Linear(4, 4), BatchLayerNorm(4), nn.Tanh(), nn.Linear(4, 4), BatchLayerNorm(4)), 6, 4
    )
    x = torch.randn(3, 4).double()
    expected = net(x)
    made = freezing.fixed_map

    def fail(layer):
        if layer is net[4]:
            raise RuntimeError("out of memory")
        return made(layer)

    monkeypatch.setattr(freezing, "fixed_map", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        bln.freeze(net)
    assert torch.equal(net(x), expected)


def test_the_model_is_put_into_eval_and_no_layer_learns_again():
    net = trained(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), BatchLayerNorm(4), nn.Tanh(), nn.Dropout()), 6, 4).train()
    bln.freeze(net)
    assert not any(module.training for module in net.modules())
    x = torch.randn(5, 4).double()
    once = net[2](x)
    net.train()
    assert torch.equal(net[2](x), once)


def test_a_frozen_model_is_saved_loaded_copied_and_moved():
    net = bln.freeze(trained(nn.Sequential(nn.Tanh(), BatchLayerNorm(4), nn.Tanh()), 6, 4, 3, dtype=torch.float32))
    again = copy.deepcopy(net)
    again[1].scale.zero_()
    again.load_state_dict(net.state_dict())
    x = torch.randn(5, 4, 3)
    assert torch.equal(again(x), net(x))
    assert again.half()[1].scale.dtype == torch.float32
    assert again(x.half()).dtype == torch.float16
    assert again.double()[1].scale.dtype == torch.float64


def test_freezing_warns_of_nothing_when_something_was_frozen():
    net = trained(nn.Sequential(nn.Linear(4, 4), BatchLayerNorm(4)), 6, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bln.freeze(net)


def test_the_example_freezes_and_exports(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["freeze_and_export.py", "--folder", str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # ONNX is tested where it is installed
    runpy.run_path(str(Path(__file__).parents[2] / "examples/freeze_and_export.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "3 folded away, 0 kept" in printed
    before, frozen = re.findall(r"accuracy ([\d.]+)", printed)
    assert float(frozen) == pytest.approx(float(before), abs=0.003)  # a sample on the edge may fall either way
    assert float(before) > 0.9  # a tenth of that is chance
    program = torch.export.load(tmp_path / "digits.pt2")
    assert program.module()(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
