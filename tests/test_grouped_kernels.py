"""The grouped layer's kernels against the oracle: on a GPU where there is one, else through Triton's interpreter."""

import copy
import inspect
import itertools
import json
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bln
import oracle
import tolerance
from bln import _backends
from bln._backends import triton as kernels
from bln._backends.triton import functions, grouped
from bln._backends.triton import launch as launching
from bln._masks import count
from bln._spec import Spec
from bln.config import StatisticsConfig
from bln.population import Population
from cases import Case, cases

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXAMPLES = 60 if GPU else 10  # the interpreter takes its time
UNIT = torch.finfo(torch.float32).eps
CONFIGS = [*StatisticsConfig.all(), *map(StatisticsConfig.parse, ("16 16 F F", "F 2 T 0.5", "3 T 1 F"))]
ACTIVATIONS = [None, "relu", "silu", "gelu"]

# NumPy warns of infinities and NaN that the interpreter computes with; some tests are about them.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")


def on_device(tensor):
    """Return a copy on the device with the same strides, gaps included."""
    if tensor is None or not GPU or 0 in tensor.stride():
        return None if tensor is None else tensor.to(DEVICE)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE).copy_(tensor)


def spec_of(case: Case) -> Spec:
    return Spec(case.groups, False, case.eps, case.mix_eps, case.dim_scale)


def arguments(case: Case) -> list:
    """Return the first arguments of ``train`` and ``infer``."""
    tensors = [on_device(t) for t in (case.x, case.weight, case.bias, case.mask)]
    return [*tensors, case.channel_dim % case.x.dim(), spec_of(case)]


@contextmanager
def poisoned():
    """Fill fresh memory with NaN, so that a value nobody wrote shows."""
    with pytest.MonkeyPatch.context() as patch:
        empty, empty_like = torch.empty, torch.empty_like
        patch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
        patch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(torch.nan))
        yield


@contextmanager
def small_tiles(features=4, positions=8, tiles=2, rows=4, join_features=4, pairs=2, group_features=2):
    """Give small inputs several blocks of features, tiles in a chunk, chunks, and steps of the kernels that join."""
    lengths = itertools.cycle([tiles, 1, tiles + 1])  # launches differ in their chunks

    def tile_sizes(*_):
        return features, positions, positions * next(lengths)

    def join_tile(n, c, groups):
        constexprs = {"BR": rows, "BC": join_features, "BG": pairs, "BK": group_features}
        return constexprs, -(-c // join_features) + -(-n * groups // pairs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "tile_sizes", tile_sizes)
        patch.setattr(grouped, "join_tile", join_tile)
        patch.setattr(functions, "_plans", {})
        yield


# Few tilings, since each program is slow in the interpreter, and each tiling slow to compile on a GPU.
ODD = {"features": 2, "positions": 32, "tiles": 1, "rows": 1, "join_features": 2, "pairs": 8, "group_features": 1}
tilings = st.sampled_from([None, None, {"positions": 32, "rows": 2}, ODD])
grouped_cases = cases(dtypes=DTYPES, grouped=True)


def tiled(tiling):
    return nullcontext() if tiling is None else small_tiles(**tiling)


def case_of(shape, channel_dim=1, groups=2, dtype=torch.float32, mean=7.0, mask=None, **options):
    d = shape[channel_dim]
    x = (torch.randn(shape) * 3 + mean).to(dtype)
    options = {"eps": 1e-4, "mix_eps": 0.0, "dim_scale": False, **options}
    return Case(x, mask, torch.randn(d), torch.randn(d), channel_dim, False, groups=groups, **options)


def random_mask(shape, channel_dim, share=0.7):
    rows = list(shape)
    rows.pop(channel_dim)
    mask = torch.rand(rows) < share
    mask.view(-1)[0] = True
    return mask


def compare(case: Case, train=kernels.train) -> None:
    """Compare forward, statistics and gradients with the oracle, and check that every output is written."""
    x, gamma, beta, *rest = arguments(case)
    x = x.detach().requires_grad_()
    parameters = [p.requires_grad_() for p in (gamma, beta) if p is not None]
    dy = torch.randn(x.shape).to(x.dtype)
    with poisoned():
        y, statistics = train(x, gamma, beta, *rest)
        gradients = torch.autograd.grad(y, [x, *parameters], on_device(dy))
    assert y.dtype == x.dtype
    assert not any(value.requires_grad for value in statistics)

    s = oracle.measure(case.rows, case.numpy_mask, False, case.groups)
    clean = case.rows if case.mask is None else np.where(case.numpy_mask[..., None], case.rows, 0.0)
    inverse_m = 1 / np.maximum(s.m, 1)
    spread = (s.var_B, s.var_F, inverse_m)
    where = {"mask": case.numpy_mask, "per_position": False}
    expected = oracle.train(case.rows, *case.affine, **where, **case.options)
    bound = tolerance.output(clean, expected, *spread, *case.affine, case.x.dtype, **case.options)
    tolerance.close(case.to_rows(y), expected, bound, "y")
    unit, size = tolerance.ROUNDINGS * UNIT, np.abs(clean).max() + 1e-30
    for name, value in zip(statistics._fields, statistics, strict=True):
        truth = inverse_m if name == "inverse_m" else getattr(s, oracle.NAMES[name])
        scale = {"mean": size, "var": size**2}.get(name.split("_")[1], 1.0)
        tolerance.close(value, truth, unit * scale, name)

    rows_dy = case.to_rows(dy).double().numpy()
    if case.mask is not None:
        rows_dy = np.where(case.numpy_mask[..., None], rows_dy, 0.0)
    wanted = oracle.train_backward(case.rows, rows_dy, case.affine[0], **where, **case.options)
    bounds = tolerance.gradient(clean, wanted[0], rows_dy, *spread, case.affine[0], case.x.dtype, **case.options)
    tolerance.close(case.to_rows(gradients[0]), wanted[0], bounds[0] + 1e-30, "dx")
    rest = iter(gradients[1:])
    if case.weight is not None:
        tolerance.close(next(rest), wanted[1], bounds[1] + 1e-30, "dgamma")
    if case.bias is not None:
        tolerance.close(next(rest), wanted[2], bounds[2] + 1e-30, "dbeta")


# ---- training


@settings(max_examples=2 * EXAMPLES)
@given(case=grouped_cases, tiling=tilings)
def test_ragged_shapes_layouts_types_and_masks(case, tiling):
    with tiled(tiling):
        compare(case)


@pytest.mark.parametrize("shape", [(1, 1, 4), (2, 1, 4), (1, 2, 4), (1, 3, 4), (1, 1)], ids=str)
def test_one_feature_or_sample(shape):
    """The shortest buffers, whose padding is as long as a section."""
    compare(case_of(shape, groups=1))


SHAPES = [
    ((3, 6, 5, 7), 1, 3),
    ((3, 5, 7, 6), -1, 2),
    ((2, 70, 9), 1, 7),  # neither the features nor those of a group are a power of two
    ((2, 9, 70), -1, 5),
    ((2, 522, 4), 1, 2),  # 261 features in a group: more than one step
    ((2, 4, 522), -1, 1),
    ((1, 2, 3000), 1, 1),  # several tiles
    ((1, 3000, 2), -1, 2),
    ((1, 1, 70000), 1, 1),  # several chunks
    ((1, 33000, 2), -1, 1),
]
if GPU:
    SHAPES += [
        ((128, 64, 56, 56), 1, 8), ((128, 56, 56, 64), -1, 8), ((128, 2048, 7, 7), 1, 8), ((128, 7, 7, 2048), -1, 8),
        ((32, 512, 14, 14), 1, 32), ((2, 200, 336, 256), -1, 8), ((2, 256, 200, 336), 1, 8), ((1, 3, 1024, 1025), 1, 1),
        ((256, 197, 768), -1, 12), ((70, 6, 4), 1, 3), ((300, 2, 4), 1, 2), ((64, 3, 224, 224), 1, 3),
        ((4096, 96, 4), 1, 8),
    ]  # fmt: skip


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("dtype", DTYPES[:2] if GPU else DTYPES[:1], ids=str)
@pytest.mark.parametrize(("shape", "channel_dim", "groups"), SHAPES, ids=str)
def test_shapes_that_take_several_programs_and_steps(shape, channel_dim, groups, dtype, masked):
    mask = random_mask(shape, channel_dim) if masked else None
    compare(case_of(shape, channel_dim, groups, dtype, mask=mask))


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(
    ("shape", "channel_dim", "groups"),
    [((3, 12, 61), 1, 4), ((2, 40, 14), -1, 2), ((7, 2, 17), 1, 1)],
    ids=str,
)
def test_chunks_of_positions_are_joined(shape, channel_dim, groups, masked):
    mask = random_mask(shape, channel_dim, 0.5) if masked else None
    if masked:
        mask[0].reshape(-1)[:32] = False  # a whole chunk is hidden
    with small_tiles():
        compare(case_of(shape, channel_dim, groups, mask=mask))


@pytest.mark.parametrize("channel_dim", [1, -1])
def test_mean_2000_deviation_1(channel_dim):
    case = case_of((4, 6, 300) if channel_dim == 1 else (4, 300, 6), channel_dim, mean=0.0)
    case.x = case.x / 3 + 2000
    compare(case)


def test_inputs_of_order_1e15():
    """The third power of 1 / deviation would underflow."""
    case = case_of((4, 6, 30), mean=0.0)
    case.x *= 1e15
    compare(case)


def test_gradients_are_the_same_bits_each_time():
    x, gamma, *rest = arguments(case_of((2, 6, 37)))
    dy, found = torch.randn_like(x), []
    with small_tiles():
        for _ in range(2):
            x, gamma = x.detach().requires_grad_(), gamma.detach().requires_grad_()
            y = kernels.train(x, gamma, *rest)[0]
            found.append([y, *torch.autograd.grad(y, [x, gamma], dy)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_hidden_entries_do_not_matter():
    case = case_of((4, 6, 20), mask=random_mask((4, 6, 20), 1))
    hidden, found = ~case.mask[:, None].expand(case.x.shape), []
    for value in (0.0, torch.nan, torch.inf, 3e38):
        case.x = case.x.masked_fill(hidden, value)
        x, gamma, beta, *rest = arguments(case)
        dy = torch.ones_like(x).masked_fill(on_device(hidden), value)
        x = x.requires_grad_()
        y = kernels.train(x, gamma, beta, *rest)[0]
        found.append([y, *torch.autograd.grad(y, x, dy)])
        assert not y[on_device(hidden)].any()
        assert not found[-1][1][on_device(hidden)].any()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("channel_dim", [1, -1])
def test_an_output_has_the_strides_of_its_input(channel_dim):
    for x in (
        torch.randn(4, 6, 5, 3), torch.randn(4, 6, 5, 3).to(memory_format=torch.channels_last),
        torch.randn(4, 6, 5, 3).movedim(2, -1),
    ):  # fmt: skip
        groups = 3 if channel_dim == 1 else 1
        y = kernels.train(on_device(x), None, None, None, channel_dim % 4, Spec.of(groups=groups))[0]
        if x.is_contiguous() or x.movedim(channel_dim, -1).is_contiguous():
            assert y.stride() == x.stride()


# ---- the population


def same_population(mine, theirs):
    assert torch.equal(mine.updates, theirs.updates)
    assert torch.equal(mine.samples, theirs.samples)
    for name, value in mine.named_buffers():
        expected = getattr(theirs, name)
        scale = max(1.0, expected.abs().max().item())
        # Float32, the same statistics; averages over samples are summed in another order.
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6 * scale, msg=name)


def both_update(mine, theirs, x, mask, channel_dim, spec, momentum):
    """Update one population by the kernel, and the other by operators from the kernel's statistics."""
    with poisoned():
        y, statistics = kernels.train(x, None, None, mask, channel_dim, spec)
        also = kernels.train(x, None, None, mask, channel_dim, spec, (mine, momentum))[0]
    torch.testing.assert_close(y, also, rtol=0, atol=0, equal_nan=True)
    theirs.update_from(x, mask, channel_dim, spec, statistics, momentum)


@settings(max_examples=EXAMPLES)
@given(case=grouped_cases, momentum=st.sampled_from([None, 0.1, 0.0, 1.0]), tiling=tilings, data=st.data())
def test_the_population_is_updated_as_operators_do(case, momentum, tiling, data):
    """Three mini-batches of different sizes, one of which may hold an infinity or NaN."""
    theirs = Population(case.rows.shape[-1], (), groups=case.groups).to(DEVICE)
    mine = copy.deepcopy(theirs)
    x, _, _, mask, channel_dim, spec = arguments(case)
    spoiled = data.draw(st.integers(0, 3))
    with tiled(tiling):
        for number in range(3):
            n = data.draw(st.integers(1, len(x)))
            some, real = x[-n:] + number, None if mask is None else mask[-n:]
            if number == spoiled:
                at = [data.draw(st.integers(0, size - 1)) for size in some.shape]
                some[tuple(at)] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
            both_update(mine, theirs, some, real, channel_dim, spec, momentum)
    same_population(mine, theirs)
    assert all(torch.isfinite(buffer).all() for buffer in mine.buffers())


@pytest.mark.parametrize(
    ("channel_dim", "momentum", "tiling"), [(1, None, {}), (-1, 0.1, {}), (1, 0.0, None), (-1, 1.0, None)]
)
def test_a_population_after_many_mini_batches(channel_dim, momentum, tiling):
    """Compared with the oracle, with more features, groups and samples than one step takes."""
    shape = (6, 12, 5) if channel_dim == 1 else (6, 5, 12)
    mine, truth = Population(12, (), groups=6).to(DEVICE), oracle.Population((), 12, 6)
    with tiled(tiling):
        for n in (6, 1, 4):
            case = case_of(shape, channel_dim, groups=6, mean=0.0)
            case.x = case.x[:n]
            kernels.train(*arguments(case), (mine, momentum))
            truth.update(case.rows, momentum, None, False)
    for name, value in mine.named_buffers():
        if name not in ("updates", "samples"):
            expected = getattr(truth, oracle.NAMES[name])
            tolerance.close(value, expected, 32 * UNIT * max(1.0, np.abs(expected).max()), name)
    assert mine.updates.tolist() == [3] * 5
    assert mine.samples.tolist() == [11] * 5


@pytest.mark.parametrize(("momentum", "tiling"), [(None, None), (0.1, {})])
def test_a_mini_batch_that_is_not_finite_changes_nothing(momentum, tiling):
    """A NaN, an infinity, or one variance that overflows: of the last feature, or of one sample's group."""
    mine, x = Population(12, (), groups=3).to(DEVICE), torch.randn(6, 12, 5, device=DEVICE)
    spec = Spec.of(groups=3)
    with tiled(tiling):
        kernels.train(x, None, None, None, 1, spec, (mine, momentum))
        before = copy.deepcopy(mine)
        for value in (torch.nan, torch.inf, -torch.inf):
            spoiled = x.clone()
            spoiled[3, 7, 2] = value
            kernels.train(spoiled, None, None, None, 1, spec, (mine, momentum))
        one_feature = torch.zeros_like(x)  # squares overflow in the last feature alone
        one_feature[::2, 11], one_feature[1::2, 11] = 1.5e19, -1.5e19
        one_group = torch.zeros_like(x)  # no feature varies, but they are far apart
        one_group[:, 8:10], one_group[:, 10:] = 1.5e19, -1.5e19
        for spoiled in (one_feature, one_group):
            kernels.train(spoiled, None, None, None, 1, spec, (mine, momentum))
        assert all(torch.equal(value, getattr(before, name)) for name, value in mine.named_buffers())
        kernels.train(x, None, None, None, 1, spec, (mine, momentum))
    assert mine.updates.eq(2).all()


def test_one_entry_leaves_the_variance_as_it_was():
    mine, theirs = Population(4, (), groups=2).to(DEVICE), Population(4, (), groups=2).to(DEVICE)
    spec = Spec.of(groups=2)
    one = torch.zeros(3, 5, dtype=torch.bool)
    one[1, 2] = True
    for x, mask in ((torch.randn(1, 4), None), (torch.randn(3, 4, 5), one), (torch.randn(1, 4), None)):
        both_update(mine, theirs, on_device(x), on_device(mask), 1, spec, 0.1)
    same_population(mine, theirs)
    assert mine.updates.tolist() == [3, 0, 3, 3, 3]
    assert mine.batch_var.eq(1).all()


def test_a_mask_that_hides_everything_gives_zeros_and_no_update():
    mine = Population(4, (), groups=2).to(DEVICE)
    before = copy.deepcopy(mine)
    x = torch.full((3, 4, 5), torch.nan, device=DEVICE, requires_grad=True)
    mask = torch.zeros(3, 5, dtype=torch.bool, device=DEVICE)
    y = kernels.train(x, None, None, mask, 1, Spec.of(groups=2), (mine, 0.1))[0]
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert not y.any()
    assert not dx.any()
    assert all(torch.equal(value, getattr(before, name)) for name, value in mine.named_buffers())


# ---- inference


def known_population(case: Case, known: bool):
    """Return a population updated by another mini-batch, or by none, and the oracle's."""
    d = case.rows.shape[-1]
    population, truth = Population(d, (), groups=case.groups), oracle.Population((), d, case.groups)
    if known:
        seen = np.nan_to_num(case.rows, posinf=0.0)[::-1] + 0.5
        truth.update(seen, None, case.numpy_mask[::-1] if case.mask is not None else None, False)
        for name, theirs in oracle.NAMES.items():
            getattr(population, name).copy_(torch.from_numpy(np.asarray(getattr(truth, theirs))))
        population.updates.fill_(int(truth.updates))
    return population.to(DEVICE), truth


@settings(max_examples=3 * EXAMPLES)
@given(
    case=grouped_cases, config=st.sampled_from(CONFIGS), known=st.booleans(), tiling=tilings
)  # fmt: skip
def test_inference_is_algorithm_2_in_every_configuration(case, config, known, tiling):
    population, truth = known_population(case, known)
    with tiled(tiling), poisoned():
        y = kernels.infer(*arguments(case), population, config)
    expected = truth.infer(
        case.rows, str(config), *case.affine, mask=case.numpy_mask, per_position=False, **case.options
    )
    s = oracle.measure(case.rows, case.numpy_mask, False, case.groups)
    _, var_B, _, var_F = truth.choose(s, str(config))
    inverse_m = np.where(truth.updates > 0, truth.inverse_m, 1 / np.maximum(s.m, 1))
    clean = case.rows if case.mask is None else np.where(case.numpy_mask[..., None], case.rows, 0.0)
    size = np.concatenate([clean.ravel(), truth.mean_B.ravel(), truth.mean_F.ravel()])
    bound = tolerance.output(size, expected, var_B, var_F, inverse_m, *case.affine, case.x.dtype, **case.options)
    tolerance.close(case.to_rows(y), expected, bound, str(config))


@pytest.mark.parametrize("config", ["TTFF", "TTTF", "TTFT", "TTTT"] if GPU else ["TTFF", "TTTT"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(
    ("shape", "channel_dim"),
    [((20, 24, 5, 5), 1), ((20, 6, 10), -1), *([((200, 64, 14, 14), 1), ((200, 14, 14, 64), -1)] if GPU else [])],
    ids=str,
)
def test_a_sample_has_the_same_bits_in_any_mini_batch(config, shape, channel_dim, masked):
    case = case_of(shape, channel_dim, mask=random_mask(shape, channel_dim) if masked else None)
    x, gamma, beta, mask, *rest = arguments(case)
    population, _ = known_population(case, True)

    def infer(at):
        some = None if mask is None else mask[at]
        return kernels.infer(x[at], gamma, beta, some, *rest, population, StatisticsConfig.parse(config))

    whole = infer(slice(None))
    for at in (slice(0, 1), slice(0, 3), slice(-1, None), slice(3, 20)):
        assert torch.equal(infer(at), whole[at])


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("config", ["TTFF", "FTFF", "TFTF", "FFTT", "FFFF", "16 2 F F", "3 T 1 F"])
def test_gradients_through_inference(config, masked):
    case = case_of((5, 4, 6), mean=1.0, mask=random_mask((5, 4, 6), 1) if masked else None)
    population, _ = known_population(case, True)
    x, gamma, beta, mask, channel_dim, spec = arguments(case)
    residual, found = torch.randn_like(x), []
    for dtype in (torch.float32, torch.float64):
        tensors = [t.detach().to(dtype).requires_grad_() for t in (x, gamma, beta, residual)]
        if dtype == torch.float32:
            y = kernels.infer(
                *tensors[:3], mask, channel_dim, spec, population, StatisticsConfig.parse(config), tensors[3], "silu"
            )  # fmt: skip
        else:
            m, _ = count([5, 6], mask, False)
            kept = bln.Statistics(*(value.double() for value in population.statistics((), m)))
            y = reference(*tensors, mask, spec, "silu", population=kept, config=config)
        first = torch.autograd.grad(y.pow(3).sum(), tensors, create_graph=True)
        found.append([y, *first, *torch.autograd.grad(first[0].square().sum(), tensors)])
    same_gradients(*found, ["y", "dx", "dgamma", "dbeta", "dresidual", "dxdx", "dxdgamma", "dxdbeta", "dxdresidual"])


def test_gradients_through_inference_notice_a_changed_population():
    case = case_of((5, 4, 6))
    population, _ = known_population(case, True)
    x, *rest = arguments(case)
    y = kernels.infer(x.requires_grad_(), *rest, population, StatisticsConfig.parse("TTFF"))
    kernels.train(x, *rest, (population, 0.1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- the nonlinearity and the residual


def reference(x, gamma, beta, residual, mask, spec, activation, **inference):
    """Return the layer's output by operators in the type of the tensors; features are in dimension 1."""
    y = bln.functional.batch_layer_norm(x, gamma, beta, mask=mask, **spec._asdict(), **inference)
    y = y if residual is None else y + residual
    y = y if activation is None else getattr(nn.functional, activation)(y)
    return y if mask is None else torch.where(mask[:, None], y, 0)


def same_gradients(mine, theirs, names, dtype=torch.float32):
    """Compare to within 250 roundings of the largest value: terms of that size may cancel."""
    for name, a, b in zip(names, mine, theirs, strict=True):
        size = max(float(b.detach().abs().max()), 1e-6)
        assert torch.isfinite(a).all(), name
        bound = (250 * UNIT + 2 * torch.finfo(dtype).eps * (dtype != torch.float32)) * size
        torch.testing.assert_close(
            a.double(), b.double(), rtol=0, atol=bound, msg=lambda text, name=name: f"{name}: {text}"
        )


def away_from_kinks(make):
    """Draw inputs until none lies so near a kink that rounding decides its side."""
    while True:
        given = make()
        before = reference(
            *(t if t is None or t.dtype == torch.bool else t.double() for t in given[:5]), given[5], None
        )
        if before[before != 0].abs().min() > 1e-4:
            return given


def activated_case(shape, dtype, masked, with_residual, groups=2):
    def make():
        x, residual = (torch.randn(shape).to(dtype) for _ in range(2))
        gamma, beta = torch.randn(shape[1]), torch.randn(shape[1])
        mask = random_mask(shape, 1) if masked else None
        return x, gamma, beta, residual if with_residual else None, mask, Spec.of(groups=groups)

    x, gamma, beta, residual, mask, spec = away_from_kinks(make)
    return [on_device(t) for t in (x, gamma, beta, residual, mask)], spec


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "last"), [(torch.float32, False), (torch.bfloat16, True)])
def test_nonlinearities_and_residuals(activation, with_residual, masked, dtype, last):
    shape = (4, 6, 3, 5) if last else (4, 6, 7)
    tensors, spec = activated_case(shape, dtype, masked, with_residual)
    if last:
        tensors[0] = tensors[0].to(memory_format=torch.channels_last)
    *tensors, mask = tensors
    dy, found = torch.randn(shape).to(dtype).to(DEVICE), []
    for engine in ("kernels", "double"):
        given = [None if t is None else t.detach() if engine == "kernels" else t.detach().double() for t in tensors]
        inputs = [t.requires_grad_() for t in given if t is not None]
        with poisoned():
            if engine == "kernels":
                y = kernels.train(*given[:3], mask, 1, spec, None, given[3], activation)[0]
            else:
                y = reference(*given, mask, spec, activation)
            found.append([y, *torch.autograd.grad(y, inputs, dy.to(y.dtype))])
    assert [t.dtype for t in found[0][1:]] == [t.dtype for t in tensors if t is not None]
    same_gradients(*found, ["y", "dx", "dgamma", "dbeta", "dresidual"][: len(found[0])], dtype)


@pytest.mark.parametrize("gradient_of_residual_first", [False, True])
def test_a_gradient_of_the_residual_may_be_wanted_or_not(gradient_of_residual_first):
    """Both calls share a plan."""
    (x, gamma, beta, residual, _), spec = activated_case((4, 6, 7), torch.float32, False, True)
    for wanted in (gradient_of_residual_first, not gradient_of_residual_first):
        r = residual.detach().requires_grad_(wanted)
        y = kernels.train(x.requires_grad_(), gamma, beta, None, 1, spec, None, r, "silu")[0]
        y.sum().backward()
        assert (r.grad is not None) is wanted


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("residual_kind", ["none", "same", "strided", "double", "expanded"])
def test_second_derivatives(activation, residual_kind):
    (x, gamma, beta, residual, _), spec = activated_case((4, 6, 7), torch.float32, False, residual_kind != "none")
    residual = with_layout(residual, residual_kind)
    found = []
    for engine in ("kernels", "double"):
        double = engine == "double"
        given = [
            None if t is None else t.detach().double() if double else t.detach() for t in (x, gamma, beta, residual)
        ]
        inputs = [t.requires_grad_() for t in given if t is not None]
        if double:
            y = reference(*given, None, spec, activation)
        else:
            y = kernels.train(*given[:3], None, 1, spec, None, given[3], activation)[0]
        first = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), inputs)
        found.append([*first, *second])
    same_gradients(
        *found, [f"{order} {name}" for order in (1, 2) for name in ["x", "gamma", "beta", "residual"][: len(inputs)]]
    )


def test_relu_saves_no_residual_for_backward():
    (x, gamma, beta, residual, _), spec = activated_case((4, 6, 7), torch.float32, False, True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        y = kernels.train(x.requires_grad_(), gamma, beta, None, 1, spec, None, residual, "relu")[0]
    assert y.data_ptr() in saved
    assert residual.data_ptr() not in saved


def with_layout(residual, kind):
    """Return a residual of the same shape whose layout or type differs from the input's."""
    if kind == "strided":
        return torch.stack([residual, residual], -1)[..., 0]
    if kind == "double":
        return residual.double()
    if kind == "expanded":
        return residual[:1].expand(residual.shape)
    return residual


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("kind", ["strided", "double", "expanded", "one sample"])
def test_a_residual_in_another_layout_or_type(kind, activation):
    (x, gamma, beta, residual, _), spec = activated_case((4, 6, 7), torch.float32, False, True)
    given = residual[:1].contiguous() if kind == "one sample" else with_layout(residual, kind)
    found = []
    for other in (given, given.expand(x.shape).to(x.dtype).contiguous()):
        other = other.detach().requires_grad_()
        y = kernels.train(x, gamma, beta, None, 1, spec, None, other, activation)[0]
        (gradient,) = torch.autograd.grad(y, other, torch.ones_like(y))
        assert gradient.dtype == other.dtype
        found.append([y, gradient.to(x.dtype).sum(0) if kind == "one sample" else gradient.to(x.dtype)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


# ---- launches


def launches(planned):
    """Yield every launch of a plan, with its name."""
    for name, value in vars(planned).items():
        if isinstance(value, launching.Launch):
            yield name, value


def parameters_of(kernel):
    """Return the names of a kernel's arguments, and of its constexprs."""
    parameters = inspect.signature(kernel.fn).parameters.values()
    constexprs = [parameter.name for parameter in parameters if "constexpr" in str(parameter.annotation)]
    return [parameter.name for parameter in parameters if parameter.name not in constexprs], constexprs


@pytest.mark.parametrize("activation", ACTIVATIONS[:2])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("channels_first", [True, False])
def test_a_compiled_kernel_gets_arguments_and_constexprs_in_its_order(channels_first, masked, activation, monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    spec = Spec(2, False, 0.5, 0.25, True)
    planned = grouped.Plan(launching.Shape(3, 6, 40, channels_first), 4, spec, masked, activation)
    known = {"N": 3, "C": 6, "P": 40, "groups": 2, "mix_eps": 0.25, "scale": 6**-0.5, "eps": 0.5}
    known |= {"ACTIVATION": activation, "CHANNELS_FIRST": channels_first}
    found = dict(launches(planned))
    assert len({id(launch.kernel) for launch in found.values()}) == 7
    for name, launch in found.items():
        names, constexprs = parameters_of(launch.kernel)
        assert list(launch.constexprs) == constexprs, name
        assert names + constexprs == list(inspect.signature(launch.kernel.fn).parameters), name
        pointers, calls = names[: len(names) - len(launch.scalars)], []
        compiled = SimpleNamespace(run=lambda *given: calls.append(given), function="function", packed_metadata="data")  # noqa: B023
        launch.kernel = {(launch.programs,): lambda *given, **options: compiled}  # noqa: B023
        tensor = torch.zeros(4)
        for _ in range(2):  # the first compiles
            launch(77, tensor, *pointers[1:])
        ((*grid, stream, function, metadata, _, _, _), rest) = calls[0][:9], calls[0][9:]
        assert (grid, stream, function, metadata) == ([launch.programs, 1, 1], 77, "function", "data")
        given = dict(zip(names + constexprs, rest, strict=True))
        assert given[pointers[0]] == tensor.data_ptr()
        assert all(given[each] == each for each in pointers[1:]), name
        assert given | {each: value for each, value in known.items() if each in given} == given, name


class Launcher:
    """Triton's launcher as a launch sees it: ``launch`` is a C function; the call around it differs by version."""

    def __init__(self, style, scratch=0):
        self.style, self.global_scratch_size, self.profile_scratch_size, self.calls = style, scratch, 0, []
        self.launch = lambda *given: self.calls.append(given)

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *rest):
        hooks = metadata, launch_metadata, enter, leave
        if self.style == "flat":
            self.launch(x, y, z, stream, function, False, False, None, *hooks, *rest)
        elif self.style == "tuple":
            self.launch(x, y, z, stream, function, False, False, *hooks, None, None, ["notes"], "signature", rest)
        else:
            self.launch(stream, x, *rest)


@pytest.mark.parametrize("style", ["flat", "tuple", "unknown"])
@pytest.mark.parametrize("scratch", [0, 128])
def test_a_kernel_is_launched_as_tritons_launcher_would(style, scratch):
    run, head, fixed = Launcher(style, scratch), ("function", "data", None, None, None), (3, 0.5, True)
    direct = launching.direct_launch(run, 7, head, 2, fixed)
    assert not run.calls  # the probe launches nothing
    run(7, 1, 1, 55, *head, 4096, None, *fixed)
    direct(55, 4096, None)
    assert run.calls[0] == run.calls[1]
    assert (direct.__name__ == "through") == bool(scratch or style == "unknown")


def test_all_calls_of_a_launch_agree_in_what_triton_compiles_for(monkeypatch):
    """All calls of a plan share one compiled kernel: types, what is ``None``, and alignment must be the same."""
    kinds, call = {}, launching.Launch.__call__

    def kind(name, value):
        if isinstance(value, torch.Tensor):  # kernels are not specialized on the alignment of small ones
            anywhere = name in ("gamma", "beta", *Population(1, ())._buffers)
            return value.dtype, anywhere or value.data_ptr() % 16 == 0
        return type(value), value is None or type(value) is float  # Triton specializes on some integers

    def watched(self, stream, *pointers):
        names, _ = parameters_of(self.kernel)
        found = {name: kind(name, value) for name, value in zip(names, pointers, strict=False)}
        assert found == kinds.setdefault(self, found), self.kernel.fn.__name__
        assert all(good for _, good in found.values()), (self.kernel.fn.__name__, found)
        call(self, stream, *pointers)

    monkeypatch.setattr(launching.Launch, "__call__", watched)
    monkeypatch.setattr(functions, "_plans", {})

    def unaligned(tensor):
        """Return a copy that begins one value after an aligned address."""
        return torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].view(tensor.shape)

    shape = (3, 4, 5)
    for masked in (False, True):
        for move in (lambda t: t, unaligned):
            for wanted, momentum, eps, mix_eps in ((True, 0.1, 1e-4, 0.0), (False, 1, 1, 0), (True, None, 1e-3, 0.1)):
                x, dy, residual = (move(torch.randn(shape, device=DEVICE)) for _ in range(3))
                mask = move(torch.rand(3, 5, device=DEVICE) < 0.9) if masked else None
                gamma, beta = (move(torch.randn(4, device=DEVICE)) for _ in range(2))
                layer = bln.BatchLayerNorm(4, groups=2, momentum=momentum, eps=eps, mix_eps=mix_eps).to(DEVICE)
                x.requires_grad_(), residual.requires_grad_(wanted)
                both = x, gamma, beta, mask, 1, layer.spec
                y = kernels.train(*both, (layer.population, momentum), residual, "silu")[0]
                y.backward(dy)
                kernels.infer(*both, layer.population, StatisticsConfig.parse("FFFF"), residual, "silu")
                assert torch.isfinite(y).all()


# ---- in the layer


@pytest.fixture
def fresh_plans(monkeypatch):
    """Start without plans; without a GPU, the current device is that of a CPU tensor."""
    monkeypatch.setattr(_backends, "quick", kernels.train_layer)
    monkeypatch.setattr(functions, "_plans", {})
    if not GPU:
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)


@pytest.fixture
def use_kernels(monkeypatch, fresh_plans):
    """Have the layer choose the kernels, as on a GPU."""
    monkeypatch.setattr(_backends, "_on_gpu", lambda x: True)


@pytest.fixture
def launched(monkeypatch):
    """Collect the names of the kernels launched."""
    names, call = [], launching.Launch.__call__

    def watched(self, *arguments):
        names.append(self.kernel.fn.__name__)
        call(self, *arguments)

    monkeypatch.setattr(launching.Launch, "__call__", watched)
    return names


FORWARD, BACKWARD = ["measure", "join", "apply"], ["measure_backward", "join_backward", "apply_backward"]


def layer_of(features, channel_dim=1, groups=2, **options):
    layer = bln.BatchLayerNorm(features, groups=groups, channel_dim=channel_dim, **options).to(DEVICE)
    if layer.weight is not None:
        nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    return layer


def step(module, x, *rest):
    x = x.clone().requires_grad_()
    y = module(x, *rest)
    return y, torch.autograd.grad(y.float().pow(2).sum(), x)[0]


LAYERS = [
    ((6, 8, 3, 3), 1, {}),
    ((6, 9, 8), -1, {"momentum": None}),
    ((6, 4, 4), 1, {"groups": 4, "affine": False}),
    ((3, 6, 4, 9), 1, {"groups": 3, "dim_scale": True, "mix_eps": 0.01, "eps": 1e-3}),
]
if GPU:
    LAYERS += [((32, 64, 14, 14), 1, {"groups": 8}), ((64, 80, 128), -1, {"groups": 8}), ((8, 256, 64, 64), 1, {})]


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(("shape", "channel_dim", "options"), LAYERS, ids=str)
def test_the_layer_with_kernels_is_the_layer_without(
    shape, channel_dim, options, masked, launched, fresh_plans, monkeypatch
):
    mine = layer_of(shape[channel_dim], channel_dim, **options)
    theirs = copy.deepcopy(mine)
    for _ in range(3):
        x, results = torch.randn(shape, device=DEVICE), []
        rest = [on_device(random_mask(shape, channel_dim))] if masked else []
        for layer, yes in ((mine, True), (theirs, False)):
            monkeypatch.setattr(_backends, "_on_gpu", lambda x, yes=yes: yes)
            monkeypatch.setattr(_backends, "quick", kernels.train_layer if yes else None)
            launched.clear()
            trained = step(layer.train(), x, *rest)
            assert launched == (FORWARD + BACKWARD if yes else [])
            results.append((*trained, *step(layer.eval(), x, *rest)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # both in float32, summed in another order
    for (name, a), b in zip(mine.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)
    theirs.load_state_dict(mine.state_dict())
    with torch.no_grad():
        assert torch.equal(theirs.eval()(x, *rest), mine.eval()(x, *rest))


@pytest.mark.parametrize("last", [False, True], ids=["", "last"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activated_layer(activation, with_residual, masked, last, use_kernels, launched, monkeypatch):
    """Three launches, the second time on the fast path; hidden entries of the residual do not matter."""
    (x, gamma, beta, residual, mask), spec = activated_case((4, 6, 3, 5), torch.float32, masked, with_residual)
    layer = bln.BatchLayerNorm(6, groups=2, activation=activation).to(DEVICE)
    layer.load_state_dict({"weight": gamma, "bias": beta}, strict=False)
    x = x.to(memory_format=torch.channels_last) if last else x
    hidden = None if mask is None else ~mask[:, None].expand(x.shape)
    dy = torch.randn_like(x)
    double = [t if t is None else t.detach().double().requires_grad_() for t in (x, gamma, beta, residual)]
    expected = reference(*double, mask, spec, activation)
    wanted = [t for t in double if t is not None]
    truth = [expected, *torch.autograd.grad(expected, wanted, dy.double())]
    for time in (1, 2):
        launched.clear()
        inputs = [t.detach().clone().requires_grad_() for t in (x, residual) if t is not None]
        if hidden is not None and with_residual:
            inputs[1].data.masked_fill_(hidden, torch.nan)
        y = layer(inputs[0], mask, *inputs[1:])
        found = torch.autograd.grad(y, [inputs[0], layer.weight, layer.bias, *inputs[1:]], dy)
        assert launched == FORWARD + BACKWARD
        assert y.stride() == x.stride()
        same_gradients([y, *found], truth, ["y", "dx", "dgamma", "dbeta", "dresidual"][: len(truth)])
        assert hidden is None or not any(t[hidden].any() for t in (y, found[0], *found[3:]))
        if time == 1 and mask is None:
            monkeypatch.setattr(kernels, "train", None)  # the fast path does not call it

    launched.clear()
    layer.eval()
    layer.config = "FFTF"
    with poisoned():
        y = layer(inputs[0].detach(), mask, *(t.detach() for t in inputs[1:]))
    assert launched == ["measure", "join_inference", "apply"]
    population = bln.functional.Statistics(*(t.double() for t in layer.population.statistics((), 4)))
    expected = reference(*double, mask, spec, activation, population=population, config="FFTF")
    same_gradients([y], [expected], ["y"])


@pytest.mark.parametrize("kind", ["strided", "double", "expanded"])
def test_an_activated_layer_takes_residuals_of_any_layout(kind, use_kernels, launched):
    layer, x = layer_of(6, activation="silu"), torch.randn(4, 6, 7, device=DEVICE)
    given, found = with_layout(torch.randn(4, 6, 7, device=DEVICE), kind), []
    for other in (given.to(x.dtype).contiguous(), given, given):
        launched.clear()
        other = other.detach().requires_grad_()
        y = layer(x, residual=other)
        assert launched == FORWARD
        (gradient,) = torch.autograd.grad(y, other, torch.ones_like(y))
        assert gradient.dtype == other.dtype
        found.append([y, gradient.to(x.dtype)])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_an_activated_layer_refuses_a_residual_after_others_that_fit(use_kernels):
    layer, x = layer_of(6), torch.randn(4, 6, 7, device=DEVICE)
    for _ in range(2):
        layer(x, residual=x)
    for wrong, error in ((x[:, :, :1], ValueError), (x > 0, TypeError), (1.0, TypeError), (x.to("meta"), ValueError)):
        with pytest.raises(error, match="residual"):
            layer(x, residual=wrong)
    assert layer.population.updates.eq(2).all()


def test_another_activation_has_another_plan(use_kernels):
    """When a layer's activation changes, it does not use the plan of the old one."""
    layer, x = layer_of(6), torch.randn(4, 6, 7, device=DEVICE)
    layer(x)
    plain = layer(x)
    for activation in ("relu", "silu", None, "gelu", "relu"):
        layer.activation = activation
        expected = plain if activation is None else getattr(nn.functional, activation)(plain)
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transform", ["vmap", "few positions", "forward mode", "compiled"])
def test_where_kernels_cannot_run_operators_add_and_activate(transform, use_kernels, launched):
    layer, residual = layer_of(6, activation="gelu"), torch.randn(3, 4, 6, 7, device=DEVICE)
    x = torch.randn(4, 6, 7, device=DEVICE)
    layer(x, residual=residual[0])
    launched.clear()

    def expected(x, residual):
        y = bln.functional.batch_layer_norm(x.double(), layer.weight.double(), layer.bias.double(), groups=2)
        return nn.functional.gelu(y + residual.double()).float()

    layer.momentum = 0.0
    wanted = [expected(x, r) for r in residual]
    if transform == "vmap":  # of residuals alone
        wanted = [layer.eval()(x, residual=r) for r in residual]
        launched.clear()
        found = torch.func.vmap(lambda r: layer(x, residual=r))(residual)
    elif transform == "few positions":
        found = [layer(x[..., :2], residual=r[..., :2]) for r in residual]
        wanted = [expected(x[..., :2], r[..., :2]) for r in residual]
    elif transform == "forward mode":
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(residual[0], torch.ones_like(x))
            y, tangent = torch.autograd.forward_ad.unpack_dual(layer(x, residual=dual))
        slope = torch.func.jvp(lambda r: expected(x, r), (residual[0],), (torch.ones_like(x),))[1]
        torch.testing.assert_close(tangent, slope, rtol=1e-4, atol=1e-4)
        found, wanted = [y], wanted[:1]
    else:
        torch.compiler.reset()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        found = [compiled(x, residual=r) for r in residual]
    assert not launched
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)  # both in float32, summed in another order


@pytest.mark.skipif(GPU, reason="it poses a CPU tensor as one on a GPU")
@pytest.mark.parametrize("size", ["fixed", "dynamic"])
def test_a_compiler_launches_the_kernels_itself(size):
    sources = Path(bln.__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("compiled_graphs.py"), "bfloat16", size],
        env=environment | {"PYTHONPATH": str(sources)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"graph": "forward", "kernels": ["measure", "join", "update_unmasked"], "hidden": []},
        {"graph": "backward", "kernels": ["join_backward"], "hidden": []},
    ], done.stderr


def test_few_positions_are_left_to_operators(use_kernels, launched):
    layer = layer_of(4)
    for shape in ((6, 4), (6, 4, 3)):
        layer(torch.randn(shape, device=DEVICE))
    assert not launched
    layer(torch.randn(6, 4, 4, device=DEVICE))
    assert launched == FORWARD


def test_a_function_transform_falls_back_to_operators(use_kernels, launched):
    layer, x = layer_of(4), torch.randn(6, 4, 5, device=DEVICE)
    expected = torch.autograd.grad(layer(x.requires_grad_()).pow(2).sum(), x)[0]
    launched.clear()
    found = torch.func.grad(
        lambda x: bln.functional.batch_layer_norm(x, layer.weight, layer.bias, groups=2).pow(2).sum()
    )(x.detach())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # both in float32, summed in another order
    layer.eval()
    each = torch.func.vmap(lambda x: layer(x[None])[0])(x.detach())
    assert not launched
    torch.testing.assert_close(each, layer(x), rtol=1e-4, atol=1e-4)


def parametrized(layer):
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())


def with_gaps(layer):
    layer.weight = nn.Parameter(torch.stack([layer.weight.detach()] * 2, 1)[:, 0])


def in_double(layer):
    layer.weight = layer.bias = None
    layer.population.double()


@pytest.mark.parametrize("change", [parametrized, with_gaps, in_double])
def test_a_layer_that_kernels_cannot_take_is_left_to_operators(change, use_kernels, launched, monkeypatch):
    """Even after a layer with inputs of the same shape used the kernels."""
    layer, x = layer_of(4), torch.randn(6, 4, 5, device=DEVICE)
    other = copy.deepcopy(layer)
    if change is in_double:
        layer.weight = layer.bias = None
    layer(x), layer(x)
    change(other)
    twin = copy.deepcopy(other)
    launched.clear()
    y = other(x)
    assert change is parametrized or not launched
    monkeypatch.setattr(_backends, "_on_gpu", lambda x: False)
    monkeypatch.setattr(_backends, "quick", None)
    torch.testing.assert_close(y, twin(x), rtol=1e-4, atol=1e-4)  # both in float32, summed in another order
    for (name, mine), theirs in zip(other.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=name)


def test_forward_mode_derivatives_are_left_to_operators(use_kernels):
    layer, x, tangent = layer_of(4), *torch.randn(2, 6, 4, 5, device=DEVICE)
    layer(x), layer(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        found = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
    step = 1e-6
    moved = [
        bln.functional.batch_layer_norm(
            x.double() + sign * step * tangent, layer.weight.double(), layer.bias.double(), groups=2
        )
        for sign in (1, -1)
    ]
    expected = (moved[0] - moved[1]) / (2 * step)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)  # a difference quotient


@pytest.mark.parametrize("shape", [(), (4,), (6, 3, 5)], ids=str)
def test_the_layer_still_refuses_wrong_shapes_on_the_fast_path(shape, use_kernels):
    layer = layer_of(4)
    layer(torch.randn(6, 4, 5, device=DEVICE)), layer(torch.randn(6, 4, 5, device=DEVICE))
    layer_of(3, groups=1)(torch.randn(6, 3, 5, device=DEVICE))
    with pytest.raises(ValueError, match="expected"):
        layer(torch.randn(shape, device=DEVICE))


def test_a_recomputed_forward_updates_the_population_once(use_kernels, launched):
    layer, x = layer_of(4), torch.randn(6, 4, 5, device=DEVICE, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert launched == FORWARD + FORWARD + BACKWARD
    assert layer.population.updates.eq(1).all()
    assert layer.population.samples.eq(6).all()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_gradient_that_is_expanded_or_in_another_layout(use_kernels, training):
    layer, x = layer_of(4), torch.randn(6, 4, 5, 3, device=DEVICE, requires_grad=True)
    layer(x)
    y = layer.train(training)(x)
    (summed,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (ones,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    assert torch.equal(summed, ones)
    dy = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    strided = torch.stack([dy, dy], -1)[..., 0]
    for other in (dy.to(memory_format=torch.channels_last), strided, torch.cat([dy[:1], dy])[1:]):
        (found,) = torch.autograd.grad(y, x, other, retain_graph=True)
        # In eval(), operators sum in an order that depends on strides.
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if training else 1e-5)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_views_that_are_not_aligned(use_kernels, training, dtype):
    """First and second derivatives, through the view."""
    layer = layer_of(4)
    whole = torch.randn(6 * 4 * 5 + 1, device=DEVICE).to(dtype)
    layer(whole[:-1].view(6, 4, 5))
    layer.train(training)
    state, found = copy.deepcopy(layer.state_dict()), []
    for start in (0, 1):
        layer.load_state_dict(state)
        buffer = torch.cat([whole.new_zeros(start), whole[1:]]).requires_grad_()
        y = layer(buffer[start:].view(6, 4, 5))
        (first,) = torch.autograd.grad(y.float().pow(3).sum(), buffer, create_graph=True)
        (second,) = torch.autograd.grad(first.float().square().sum(), buffer)
        found.append([y, first[start:], second[start:]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("autocast", [True, False])
def test_low_precision_inputs_and_float32_parameters(use_kernels, launched, autocast):
    layer, linear = layer_of(8, -1), nn.Linear(5, 8).to(DEVICE)
    x = torch.randn(6, 7, 5, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        z = linear(x) if autocast else linear(x).bfloat16()
        y = layer(z)
        y.float().pow(2).sum().backward()
    assert launched == FORWARD + BACKWARD
    assert y.dtype == z.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == linear.weight.grad.dtype == torch.float32
    twin = copy.deepcopy(layer)
    expected = bln.functional.batch_layer_norm(
        z.double(), twin.weight.double(), twin.bias.double(), channel_dim=-1, groups=2
    )  # fmt: skip
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_low_precision_parameters(use_kernels, launched, dtype):
    """``layer.half()`` keeps its statistics in float32."""
    layer, x = layer_of(4).to(dtype), torch.randn(6, 4, 5, device=DEVICE).to(dtype).requires_grad_()
    y = layer(x)
    y.float().pow(2).sum().backward()
    assert launched == FORWARD + BACKWARD
    assert y.dtype == x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == dtype
    assert layer.population.batch_var.dtype == torch.float32
    twin = [p.detach().double().requires_grad_() for p in (x, layer.weight, layer.bias)]
    expected = bln.functional.batch_layer_norm(*twin, groups=2)
    # The loss takes y, which is rounded, so its gradients are a few roundings apart.
    gradients = torch.autograd.grad(expected, twin, 2 * y.detach().double())
    unit = torch.finfo(dtype).eps
    for mine, theirs in zip((y, x.grad, layer.weight.grad, layer.bias.grad), (expected, *gradients), strict=True):
        size = theirs.detach().abs().max().item()
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=unit, atol=unit * size)


def test_parameters_and_masks_of_any_strides(use_kernels):
    x, table = torch.randn(6, 4, 5, device=DEVICE), torch.randn(4, 2, device=DEVICE)
    mask = (torch.arange(5)[:, None] < torch.tensor([5, 3, 4, 2, 1, 5])).to(DEVICE).T
    assert not mask.is_contiguous()
    found, expected = (
        bln.functional.batch_layer_norm(x, w, w, groups=2, mask=m)
        for w, m in ((table[:, 0], mask), (table[:, 0].contiguous(), mask.contiguous()))
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_statistics_on_request(use_kernels, launched):
    x = torch.randn(6, 4, 5, device=DEVICE)
    y, found = bln.functional.batch_layer_norm(x, groups=2, return_statistics=True)
    assert launched == FORWARD
    again, expected = bln.functional.batch_layer_norm(x.double(), groups=2, return_statistics=True)
    torch.testing.assert_close(y.double(), again, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-5, atol=1e-5)
