"""The Triton kernels against the oracle: on a GPU where there is one, else on the CPU through Triton's interpreter."""

import copy
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import bln
import oracle
import tolerance
from bln import formula, kernels, native
from bln._spec import Spec
from bln.config import StatisticsConfig
from bln.functional import current
from bln.kernels import choices, launch, sharing, slabs
from bln.kernels.launch import Given
from bln.kernels.training import statistics_size, summed
from bln.population import Population
from cases import Case, cases

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CONFIGS = [*StatisticsConfig.all(), *map(StatisticsConfig.parse, ("16 16 F F", "F 2 T 0.5", "3 T 1 F"))]
EXAMPLES = 25 if GPU else 12  # the interpreter takes its time


def on_device(tensor):
    return None if tensor is None else tensor.to(DEVICE)


def to_device(case: Case) -> Case:
    """With the same strides, gaps too."""
    if 0 in case.x.stride() or not GPU:
        x = on_device(case.x)
    else:
        x = torch.empty_strided(case.x.shape, case.x.stride(), dtype=case.x.dtype, device=DEVICE).copy_(case.x)
    moved = copy.copy(case)
    moved.x, moved.mask = x, on_device(case.mask)
    moved.weight, moved.bias = on_device(case.weight), on_device(case.bias)
    return moved


def options(case: Case) -> dict:
    return {"channel_dim": case.channel_dim % case.x.dim(), "per_position": case.per_position, **published(case)}


def published(case: Case) -> dict:
    """The options of a case without groups, which these kernels do not know."""
    return {name: value for name, value in case.options.items() if name != "groups"}


@contextmanager
def poisoned(poison=np.nan):
    """Fresh memory holds that."""
    with pytest.MonkeyPatch.context() as patch:
        empty, empty_like = torch.empty, torch.empty_like
        patch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(poison))
        patch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(poison))
        yield


def compare(case: Case) -> None:
    """Forward, statistics and gradients; outputs are written everywhere, since NaN is what was there before."""
    moved = to_device(case)
    x = moved.x.clone().requires_grad_() if moved.x.is_contiguous() else moved.x.detach().requires_grad_()
    parameters = [p.requires_grad_() for p in (moved.weight, moved.bias) if p is not None]
    dy = torch.randn(x.shape).to(x.dtype)
    with poisoned():
        y, statistics = kernels.train(x, moved.weight, moved.bias, moved.mask, **options(case))
        gradients = [g.cpu() for g in torch.autograd.grad(y, [x, *parameters], on_device(dy))]

    s = oracle.measure(case.rows, case.numpy_mask, case.per_position)
    clean = case.rows if case.mask is None else np.where(case.numpy_mask[..., None], case.rows, 0.0)
    inverse_m = 1 / np.maximum(s.m, 1)
    spread = (s.var_B, s.var_F, inverse_m)
    where = {"mask": case.numpy_mask, "per_position": case.per_position}
    expected = oracle.train(case.rows, *case.affine, **where, **case.options)
    bound = tolerance.output(clean, expected, *spread, *case.affine, case.x.dtype, **case.options)
    tolerance.close(case.to_rows(y), expected, bound, "y")
    unit, size = tolerance.ROUNDINGS * tolerance.epsilon(case.x.dtype), np.abs(clean).max() + 1e-30
    tolerance.close(statistics.batch_mean, s.mean_B, unit * size, "batch mean")
    tolerance.close(statistics.batch_var, s.var_B, unit * size**2, "batch variance")
    tolerance.close(statistics.feature_mean, s.mean_F, unit * size, "feature mean")
    tolerance.close(statistics.feature_var, s.var_F, unit * size**2, "feature variance")
    tolerance.close(statistics.inverse_m, inverse_m if case.mask is not None else 1 / len(clean), unit, "1/m")

    rows_dy = case.to_rows(dy).double().numpy()
    if case.mask is not None:
        rows_dy = np.where(case.numpy_mask[..., None], rows_dy, 0.0)
    wanted = oracle.train_backward(case.rows, rows_dy, case.affine[0], **where, **case.options)
    bounds = tolerance.gradient(clean, wanted[0], rows_dy, *spread, case.affine[0], case.x.dtype, **case.options)
    tolerance.close(case.to_rows(gradients[0]), wanted[0], bounds[0], "dx")
    rest = iter(gradients[1:])
    if case.weight is not None:
        tolerance.close(next(rest), wanted[1], bounds[1] + 1e-30, "dgamma")
    if case.bias is not None:
        tolerance.close(next(rest), wanted[2], bounds[2] + 1e-30, "dbeta")


@pytest.fixture
def anew():
    """Launches are chosen, not remembered."""
    slabs.choose.cache_clear()
    yield
    slabs.choose.cache_clear()


round_sizes = st.builds(lambda odd, power: min(odd << power, 2**15), st.integers(1, 31), st.integers(0, 11))
sizes = st.one_of(st.integers(1, 300), st.integers(1, 2**15), round_sizes)


@settings(max_examples=1000)
@example(
    n=9, p=4, c=2048, itemsize=4, layout="across", masked=False, pooled=False, hold=True, processors=132, shared=232448
)
@example(
    n=9,
    p=49,
    c=2560,
    itemsize=4,
    layout="across",
    masked=False,
    pooled=False,
    hold=True,
    processors=132,
    shared=232448,
)
@given(
    n=sizes, p=sizes, c=sizes, itemsize=st.sampled_from([2, 4]), layout=st.sampled_from(["last", "across", "dense"]),
    masked=st.booleans(), pooled=st.booleans(), hold=st.booleans(), processors=st.sampled_from([1, 20, 132]),
    shared=st.sampled_from([0, 49152, 101376, 232448]),
)  # fmt: skip
def test_any_shape_has_a_launch_that_a_gpu_can_make(
    n, p, c, itemsize, layout, masked, pooled, hold, processors, shared
):
    p = 1 if layout == "dense" else p
    beside = {training: layout == "across" and p > 1 and launch.across(p, c, training) for training in (0, 1)}
    inference, training = (
        Given(n, p, c, itemsize, beside[t], masked, pooled and beside[t], processors, shared) for t in (0, 1)
    )
    shares = choices.shares(inference) if choices.inference(inference).laps > 1 else None
    for tensors, across, each in (
        *([(1, True, shares)] if shares and not masked else []),
        (1, beside[0], choices.inference(inference)),
        (1, beside[0], choices.training(inference, backward=False, hold=False)),
        (1, beside[1], choices.training(training, backward=False, hold=hold)),
        (2, beside[1], choices.training(training, backward=True, hold=hold)),
    ):
        values = np.prod(each.tile)
        assert all(size & (size - 1) == 0 for size in (*each.tile, each.warps, each.side))
        assert values <= 2**20
        assert each.warps <= 32
        assert each.stages == 1 or (each.stages - 1) * tensors * values * itemsize <= shared
        positions = each.laps * p
        assert (positions if across else c) % each.side == 0
        assert each.blocks * each.positions >= positions
        if each.resident:
            assert each.samples >= n
        else:
            assert (each.splits - 1) * each.run < n <= each.splits * each.run
            assert each.run % each.samples == 0
        if each.even:
            assert n % each.samples == 0
            whole = positions % each.positions == 0 or (each.laps > 1 and each.touched == 1)
            assert whole or (across and positions > each.positions and not each.resident)
            assert not masked
            assert n == each.samples or not each.resident
        assert c % each.laps == 0
        assert each.width == launch.power_of_two(c // each.laps)
        if each.features:
            assert each.features * each.laps == c
            assert each.features % (each.width if across else each.tile[3]) == 0
    for backward, seen in ((False, training), (True, training), (False, inference)):
        each = choices.training(seen, backward=backward, hold=hold)
        pooled_at_once = seen.pooled and each.laps == 1
        assert p % each.positions == 0 or not (each.even and pooled_at_once)  # no position counts twice
        assert 2 * p * (c + n + 1) + each.flags <= statistics_size(n, p, c)  # there is room for what they say
        if not (each.resident or each.across):  # no processor is idle for want of programs, up to rounding
            assert each.blocks * each.splits >= min(processors // 4, each.blocks * launch.cdiv(n, each.samples))
    one, many = (choices.inference(inference._replace(n=some)) for some in (1, n))
    for name in ("tile", "side", "warps", "swapped", "turned"):  # rows are summed in the same order
        assert getattr(one, name) == getattr(many, name)
    if shares:
        one = choices.shares(inference._replace(n=1))
        assert one.constants | {"LONG": shares.long} == shares.constants


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "swept"])
@pytest.mark.parametrize("processors", [1, 3])
def test_ragged_shapes_layouts_types_and_masks(processors, resident, monkeypatch, anew):
    """With three processors samples are split into runs wherever there are fewer positions than that."""
    monkeypatch.setattr(slabs, "processors", lambda device: processors)
    if not resident:
        monkeypatch.setattr(choices, "_RESIDENT", 0)

    @settings(max_examples=EXAMPLES)
    @given(cases(dtypes=DTYPES, grouped=False))
    def check(case):
        compare(case)

    check()


def case_of(shape, channel_dim=1, per_position=True, dtype=torch.float32, mean=7.0, mask=None):
    d = shape[channel_dim]
    x = (torch.randn(shape) * 3 + mean).to(dtype)
    return Case(x, mask, torch.randn(d), torch.randn(d), channel_dim, per_position, 1e-4, 1e-4, True)


SHAPES = [
    ((40, 2, 513), -1, True, 8),  # swept over by several, features not a power of two
    ((40, 2, 384), -1, True, 8),  # the same, in whole pieces of a tile
    ((32, 3, 256), -1, True, 1),  # held, a row of two warps backward
    ((6, 2, 1024), -1, True, 1),  # wide rows
    ((37, 300), 1, True, 4),  # dense
    ((300, 64), 1, True, 1),  # too large to be held
    ((6, 24, 5, 5), 1, True, 1),  # positions side by side
    ((6, 24, 5, 5), 1, True, 8),  # the same, held, some at a time
    ((8, 16, 8, 8), 1, True, 8),  # the same, tiles even
    ((70, 64, 3, 3), 1, True, 2),  # the same, too large to be held
    ((6, 24, 5, 5), 1, False, 2),  # the same, pooled
    ((6, 130, 5, 5), 1, True, 2),  # more features than are taken so: copied
    ((3, 100, 8, 9), 1, True, 1),  # features in laps, blocks that have a part of two, of which two overlap
    ((3, 72, 5, 7), 1, True, 1),  # the same, three, and positions that are odd
    ((40, 66, 1, 32), 1, True, 1),  # the same, many samples
    ((4, 72, 1, 64), 1, False, 16),  # the same, pooled, swept over by several
    ((5, 96, 4, 31), 1, True, 8),  # the same, one, swept over by several
    ((6, 128, 8, 8), 1, True, 8),  # the same, tiles even
    ((3, 100, 8, 9), 1, False, 2),  # the same, pooled
    ((70, 8, 9, 8), 1, True, 16),  # positions overlap; swept over by so many that their results are joined first
    ((9, 5, 5, 24), -1, False, 2),  # pooled, features last
    ((3, 70, 6), -1, True, 1),  # positions packed
]
if GPU:
    SHAPES += [
        ((128, 56, 56, 64), -1, True, None), ((32, 112, 112, 64), -1, True, None), ((64, 28, 28, 256), -1, True, None),
        ((32, 512, 1024), -1, True, None), ((256, 197, 768), -1, True, None), ((128, 7, 7, 2048), -1, True, None),
        ((4096, 4096), 1, True, None), ((128, 64, 56, 56), 1, True, None), ((64, 256, 28, 28), 1, True, None),
        ((32, 28, 28, 256), -1, True, None), ((32, 14, 14, 512), -1, True, None), ((256, 56, 56, 64), -1, True, None),
        ((64, 64, 56, 56), 1, False, None), ((64, 56, 56, 64), -1, False, None), ((25, 6, 16, 16), 1, True, None),
        ((64, 1024, 14, 14), 1, True, None), ((40, 200, 30, 30), 1, True, None), ((64, 256, 28, 28), 1, False, None),
        ((128, 2048, 7, 7), 1, True, None), ((128, 2048, 7, 7), 1, False, None), ((32, 512, 14, 14), 1, True, None),
    ]  # fmt: skip


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("dtype", DTYPES[:2] if GPU else DTYPES[:1], ids=str)
@pytest.mark.parametrize(("shape", "channel_dim", "per_position", "processors"), SHAPES)
def test_every_kernel_and_tile(shape, channel_dim, per_position, processors, dtype, masked, monkeypatch, anew):
    if processors is not None:
        monkeypatch.setattr(slabs, "processors", lambda device: processors)
    rows = list(shape)
    rows.pop(channel_dim)
    compare(case_of(shape, channel_dim, per_position, dtype, mask=torch.rand(rows) < 0.7 if masked else None))


@pytest.mark.parametrize("per_position", [True, False], ids=["", "pooled"])
@pytest.mark.parametrize("shape", [(2, 200, 8, 9), (3, 96, 4, 31), (5, 256, 7, 7), (2, 320, 3, 11), (2, 148, 4, 8)])
def test_many_laps_of_features(shape, per_position):
    compare(case_of(shape, per_position=per_position))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # of the interpreter
def test_what_one_feature_of_a_lap_alone_meets():
    """A column whose squares are more than float32 holds, but not those of the rows it is in: nothing is learned."""
    case, population = case_of((8, 128, 8, 9)), Population(128, (8, 9)).to(DEVICE)
    case.x.zero_()[:, 100, 3, 3] = torch.tensor([1e19, -1e19]).repeat(4)
    kernels.train(to_device(case).x, None, None, **options(case), remember=(population, None))
    assert not population.updates.any()


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
@pytest.mark.parametrize("per_position", [True, False], ids=["", "pooled"])
def test_an_infinite_gradient_of_a_lap(per_position):
    """Places that no program has are 0 whatever comes: the gradient of beta is the sum, as it is for other features."""
    x, beta = torch.randn(2, 66, 36, device=DEVICE), torch.zeros(66, device=DEVICE, requires_grad=True)
    options = {"eps": 1e-4, "mix_eps": 1e-4, "dim_scale": True}
    y, _ = kernels.train(x, None, beta, channel_dim=1, per_position=per_position, **options)
    dy = torch.randn(2, 66, 36, device=DEVICE)
    dy[0, ::7, 3] = torch.inf
    (found,) = torch.autograd.grad(y, beta, dy)
    torch.testing.assert_close(found, dy.sum((0, 2)), rtol=0, atol=1e-4)  # 72 terms of 24 bits


@pytest.mark.parametrize("per_position", [True, False], ids=["", "pooled"])
@pytest.mark.parametrize("shape", [(5, 70, 9, 8), (5, 3, 1, 67), (5, 192, 5, 7), (70, 30), (70, 300)])
def test_ranks_asked_between_sweeps_of_laps_of_blocks_that_overlap_and_of_one_slab(
    shape, per_position, chosen, monkeypatch, anew
):
    """One rank, which hears what it said: the layer without."""
    monkeypatch.setattr(slabs, "processors", lambda device: 6)
    monkeypatch.setattr(bln.synchronized, "gather", lambda message, group: message)
    monkeypatch.setattr(bln.synchronized, "add_up", lambda message, task: message)
    layer = bln.BatchLayerNorm(shape[1], per_position=per_position).to(DEVICE)
    nn.init.normal_(layer.weight)
    alone, positions = copy.deepcopy(layer), shape[2:] if per_position else ()
    layer.population.learned(positions, True)
    layer._agreed = True
    x, dy, found = torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE), []
    for each in (layer, alone):
        x = x.detach().requires_grad_()
        with poisoned():
            group = mock.Mock(**{"size.return_value": 1})
            y = alone(x) if each is alone else layer._synchronized(x, None, 1, positions, group)
            found.append([y, *torch.autograd.grad(y, [x, each.weight, each.bias], dy)])
    for name, ours, theirs in zip(("y", "dx", "dgamma", "dbeta"), *found, strict=True):
        size = theirs.detach().abs().max().item()  # another order of sums
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=1e-5 * size, msg=lambda text, name=name: f"{name}: {text}"
        )
    for name, ours in layer.population.named_buffers():
        torch.testing.assert_close(ours, getattr(alone.population, name), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("flat", [False, True], ids=["", "flat"])
@pytest.mark.parametrize(("number", "width"), [(3, 300), (70, 300), (70, 2100)])
def test_sums_of_parts(number, width, flat, monkeypatch):
    monkeypatch.setattr("bln.kernels.training._GRID", 1 if flat else 10)
    parts = torch.randn(4 if width < 2048 else 2, number, width, device=DEVICE)
    found = summed(parts)
    bound = number * torch.finfo(torch.float32).eps * parts.abs().sum(1).max().item()  # in whatever order
    torch.testing.assert_close(found.double(), parts.double().sum(1), rtol=0, atol=bound)


@pytest.mark.parametrize("samples", [8, 64, 3000])
def test_mean_2000_deviation_1(samples):
    x = torch.randn(samples, 6) + 2000
    compare(Case(x, None, torch.ones(6), None, 1, True, 1e-4, 1e-4, True))


def test_an_outlier_among_the_first_samples():
    """Columns are summed around the mean of their first entries: the worst that can be is one that is far off."""
    case = case_of((600, 64), mean=0.0)
    case.x[0] += 1000
    compare(case)


@pytest.mark.parametrize("shape", [(20, 33, 6), (300, 70)])
def test_gradients_are_the_same_bits_each_time(shape):
    case = to_device(case_of(shape))
    dy = torch.randn(shape, device=DEVICE)
    found = []
    for _ in range(2):
        x, gamma = case.x.clone().requires_grad_(), case.weight.detach().requires_grad_()
        y, _ = kernels.train(x, gamma, case.bias, **options(case))
        found.append(torch.autograd.grad(y, [x, gamma], dy))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("x", [torch.randn(4, 5, 3), torch.randn(4, 10, 3)[:, ::2]], ids=["dense", "with gaps"])
def test_second_derivatives_are_those_of_the_native_path(x):
    case = to_device(Case(x, None, torch.randn(5), torch.randn(5), 1, True, 1e-4, 1e-4, True))
    gamma = case.weight.requires_grad_()
    w_B, w_F = formula.weights(1 / 4, 1e-4, 5, True)
    results = []
    for engine in ("kernels", "native"):
        x = case.x.detach().requires_grad_()
        if engine == "kernels":
            y, _ = kernels.train(x, gamma, case.bias, **options(case))
        else:
            y, _ = native.train(x, gamma, case.bias, channel_dim=1, per_position=True, eps=1e-4, w_B=w_B, w_F=w_F)
        (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), [x, gamma]))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)  # float32, twice through 1 / deviation


def test_an_input_with_gaps_or_repetitions():
    wide = torch.randn(8, 12, 6)
    for x in (wide[:, ::2], wide[::2, :6], torch.randn(4, 1, 3).expand(4, 6, 3)):
        compare(Case(x, None, torch.randn(6), None, 1, True, 1e-4, 1e-4, True))


def test_a_gradient_that_is_expanded():
    case = to_device(case_of((6, 4, 5)))
    x = case.x.requires_grad_()
    y, _ = kernels.train(x, case.weight, case.bias, **options(case))
    (summed,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (ones,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(summed, ones)


# ---- the population


@settings(max_examples=EXAMPLES)
@given(
    case=cases(dtypes=DTYPES, masked=False, grouped=False), momentum=st.sampled_from([None, 0.1, 1.0]), data=st.data()
)
def test_the_population_is_updated_as_operators_do(case, momentum, data):
    """Over three mini-batches of different sizes, one of them with infinity in it."""
    positions = case.rows.shape[1:-1] if case.per_position else ()
    theirs = Population(case.rows.shape[-1], positions).to(DEVICE)
    mine = copy.deepcopy(theirs)
    for number in range(3):
        n = data.draw(st.integers(1, len(case.x)))
        moved = to_device(copy.copy(case))
        x = moved.x[:n] + number
        if number == 1:
            x[(0,) * x.dim()] = torch.inf
        with np.errstate(invalid="ignore"):  # the interpreter's NumPy would warn of the infinity
            _, statistics = kernels.train(x, None, None, **options(case))
            _, nothing = kernels.train(x, None, None, **options(case), remember=(mine, momentum))
        assert nothing is None
        m, entries = bln.functional.count(case.to_rows(x).shape[:-1], None, case.per_position)
        theirs.update(statistics, m, entries, None, tuple(positions), momentum)
    assert torch.equal(mine.updates, theirs.updates)
    assert torch.equal(mine.samples, theirs.samples)
    assert mine.updates[0].max() == 2
    for name, value in mine.named_buffers():
        expected = getattr(theirs, name)
        scale = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6 * scale)  # another order of sums


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
@pytest.mark.parametrize(
    ("shape", "channel_dim", "known", "momentum", "concluded"),
    [
        ((70, 300), 1, (), 0.3, True),  # dense, shared by several programs
        ((70, 1, 300), 2, (3,), None, True),  # the first of three positions
        ((70, 4100), 1, (), 0.3, False),  # more features than one program makes statistics of
        ((9, 5, 5, 24), 3, (), 0.3, True),  # pooled
        ((6, 24, 5, 5), 1, (), None, True),  # the same, positions side by side
        ((4, 128, 12, 12), 1, (), 0.3, True),  # the same, features in laps
    ],
)
def test_a_population_learns_of_one_slab_unless_anything_is_not_finite(
    shape, channel_dim, known, momentum, concluded, monkeypatch, anew
):
    monkeypatch.setattr(slabs, "processors", lambda device: 3)
    monkeypatch.setattr(choices, "_RESIDENT", 0)
    case = case_of(shape, channel_dim, per_position=len(shape) < 4)
    x, features, positions = to_device(case).x, shape[channel_dim], (1,) if known else ()
    seen = slabs.Slabs.of(x, channel_dim, case.per_position)
    chosen = slabs.choose(seen, 4, x.device, False, False)
    assert (chosen.concluding(seen.p, features, seen.pooled) > 0) is concluded
    theirs = Population(features, known).to(DEVICE)
    mine = copy.deepcopy(theirs)
    one_column = torch.zeros_like(x)  # whose squares are more than float32 holds, but not those of any row
    one_column.movedim(channel_dim, -1)[::2, ..., 7] = 1e19
    one_column.movedim(channel_dim, -1)[1::2, ..., 7] = -1e19
    for bad in (None, torch.nan, torch.inf, one_column, None):
        x = torch.randn_like(x) if bad is not one_column else one_column
        if isinstance(bad, float):
            x.view(-1)[-1] = bad
        with poisoned(), np.errstate(over="ignore"):
            _, found = kernels.train(x, None, None, **options(case))
            kernels.train(x, None, None, **options(case), remember=(mine, momentum))
        m, entries = bln.functional.count(case.to_rows(x).shape[:-1], None, case.per_position)
        theirs.update(found, m, entries, None, positions, momentum)
    assert mine.updates.reshape(5, -1)[:, 0].eq(2).all()
    assert torch.equal(mine.samples, theirs.samples)
    for name, value in mine.named_buffers():  # float32, sums in another order
        torch.testing.assert_close(value, getattr(theirs, name), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("positions", [1, 3, 9])
def test_a_population_of_many_columns(positions):
    """In blocks of three sizes."""
    case = case_of((4, positions, 20000), -1)
    theirs = Population(20000, (positions,)).to(DEVICE)
    mine, x = copy.deepcopy(theirs), to_device(case).x
    with poisoned():
        _, found = kernels.train(x, None, None, **options(case))
        kernels.train(x, None, None, **options(case), remember=(mine, None))
    theirs.update(found, 4, 4, None, (positions,), None)
    for name, value in mine.named_buffers():  # float32, sums in another order
        torch.testing.assert_close(value, getattr(theirs, name), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("channel_dim", [1, 2])
@pytest.mark.parametrize("swept", [False, True])
@pytest.mark.parametrize(
    ("n", "c", "along", "value", "enters"),
    [(2, 64, 0, 9e18, True), (2, 64, 0, 1e20, False), (2, 64, 2, 1e20, False), (8, 2, 2, 9e18, False)],
)
def test_a_large_variance_enters_and_an_infinite_one_does_not(
    n, c, along, value, enters, swept, channel_dim, monkeypatch, anew
):
    """Of columns, finite ones whose sum is not; of rows, where no column varies, and finite ones whose sum is not."""
    if swept:
        monkeypatch.setattr(choices, "_RESIDENT", 0)
    both = {"channel_dim": channel_dim, "per_position": True, "eps": 1e-4, "mix_eps": 1e-4, "dim_scale": True}
    x = torch.full((n, 3, c), value, device=DEVICE)
    x.narrow(along, 0, x.shape[along] // 2).neg_()
    x = x.movedim(2, channel_dim).contiguous()
    population = Population(c, (3,)).to(DEVICE)
    with np.errstate(over="ignore", invalid="ignore"):
        kernels.train(x, None, None, **both, remember=(population, None))
    assert population.updates.eq(int(enters)).all()
    assert all(torch.isfinite(buffer).all() for buffer in population.buffers())


def test_a_shorter_sequence_updates_the_first_positions():
    population = Population(4, (9,)).to(DEVICE)
    x = torch.randn(6, 5, 4, device=DEVICE)
    both = {"channel_dim": 2, "per_position": True, "eps": 1e-4, "mix_eps": 1e-4, "dim_scale": True}
    kernels.train(x, None, None, **both, remember=(population, None))
    assert population.updates[:, :5].eq(1).all()
    assert population.updates[:, 5:].eq(0).all()
    torch.testing.assert_close(population.batch_mean[:5], x.mean(0), rtol=1e-5, atol=1e-6)
    assert population.batch_mean[5:].eq(0).all()


# ---- inference


def compare_inference(case: Case, config: StatisticsConfig, known: bool, poison: float = np.nan) -> None:
    """With a population that is ``known``, or that has learned nothing."""
    positions = case.rows.shape[1:-1] if case.per_position else ()
    d = case.rows.shape[-1]
    population, truth = Population(d, positions), oracle.Population(positions, d)
    if known:
        seen = np.nan_to_num(case.rows, posinf=0.0)[::-1] + 0.5
        truth.update(seen, None, case.numpy_mask[::-1] if case.mask is not None else None, case.per_position)
        for name, value in zip(
            bln.Statistics._fields, (truth.mean_B, truth.var_B, truth.mean_F, truth.var_F, truth.inverse_m), strict=True
        ):
            getattr(population, name).copy_(torch.from_numpy(np.asarray(value)))
        population.updates.copy_(torch.from_numpy(np.asarray(truth.updates)))
    moved = to_device(case)
    with poisoned(poison):
        y = kernels.infer(
            moved.x, moved.weight, moved.bias, moved.mask, **options(case), kept=population.to(DEVICE), config=config
        )
    where = {"mask": case.numpy_mask, "per_position": case.per_position}
    expected = truth.infer(case.rows, str(config), *case.affine, **where, **case.options)
    s = oracle.measure(case.rows, case.numpy_mask, case.per_position)
    _, var_B, _, var_F = truth.choose(s, str(config))
    inverse_m = np.where(truth.updates > 0, truth.inverse_m, 1 / np.maximum(s.m, 1))
    clean = case.rows if case.mask is None else np.where(case.numpy_mask[..., None], case.rows, 0.0)
    size = np.concatenate([clean.ravel(), truth.mean_B.ravel(), np.asarray(truth.mean_F).ravel()])
    bound = tolerance.output(size, expected, var_B, var_F, inverse_m, *case.affine, case.x.dtype, **case.options)
    tolerance.close(case.to_rows(y), expected, bound, str(config))


@settings(max_examples=EXAMPLES * 2)
@given(case=cases(dtypes=DTYPES, grouped=False), config=st.sampled_from(CONFIGS), known=st.booleans())
def test_inference_is_algorithm_2_in_every_configuration(case, config, known):
    compare_inference(case, config, known)


@pytest.mark.parametrize("per_position", [True, False], ids=["", "pooled"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(("config", "shape", "processors"), [("FFFF", (3, 100, 8, 9), 1), ("TFFT", (8, 72, 6, 8), 8)])
def test_inference_with_current_statistics_of_laps(config, shape, processors, masked, per_position, monkeypatch, anew):
    """By one program for each block, and by several. What nobody wrote would overflow if it were summed."""
    monkeypatch.setattr(slabs, "processors", lambda device: processors)
    mask = torch.rand(shape[0], *shape[2:]) < 0.7 if masked else None
    case = case_of(shape, per_position=per_position, mask=mask)
    compare_inference(case, StatisticsConfig.parse(config), known=True, poison=3e38)


@pytest.mark.parametrize(
    ("masked", "per_position"), [(False, True), (True, True), (False, False)], ids=["", "masked", "pooled"]
)
@pytest.mark.parametrize("config", ["FFFF", "TTFF", "TFTF", "FTFT", "TTTT"])
@pytest.mark.parametrize("shape", [(2, 296, 5, 7), (2, 260, 8, 8), (3, 1030, 2, 2)])
def test_inference_in_laps_and_of_whole_samples(shape, config, masked, per_position):
    mask = torch.rand(shape[0], *shape[2:]) < 0.7 if masked else None
    compare_inference(case_of(shape, per_position=per_position, mask=mask), StatisticsConfig.parse(config), known=True)


# What the order of sums depends on is the compiler's: the interpreter, which takes its time, need not try all four.
@pytest.mark.parametrize("config", ["TTFF", "TTTF", "TTFT", "TTTT"] if GPU else ["TTFF", "TTTT"])
@pytest.mark.parametrize(
    ("shape", "channel_dim", "per_position"),
    [
        *((shape, -1, True) for shape in ((40, 6, 24), (64, 4, 8), (64, 4, 16), (20, 16, 16, 6), (20, 10, 10))),
        *((shape, 1, True) for shape in ((40, 24, 5, 5), (70, 3, 3), (20, 200, 4, 2), (20, 8, 4, 4), (20, 16, 4, 4))),
        *((shape, 1, True) for shape in ((20, 128, 12, 12), (20, 24, 6, 6), (20, 24, 1, 33), (40, 300))),
        ((20, 260, 3, 12), 1, True), ((20, 300, 4, 4), 1, True), ((20, 296, 5, 7), 1, True),
        ((20, 128, 16), -1, True), ((20, 5, 513), -1, True), ((20, 24, 6, 6), 1, False), ((20, 128, 12, 12), 1, False),
        ((20, 260, 3, 12), 1, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES[:2] if GPU else DTYPES[:1], ids=str)
@pytest.mark.parametrize("processors", [None, 1] if GPU else [None], ids=["", "one processor"][: 1 + GPU])
def test_a_sample_has_the_same_bits_in_any_company(
    config, shape, channel_dim, per_position, processors, dtype, monkeypatch, anew
):
    if processors is not None:  # so that there are many samples for each program
        monkeypatch.setattr(slabs, "processors", lambda device: processors)
    case = to_device(case_of(shape, channel_dim, per_position, dtype=dtype))
    positions = tuple(s for at, s in enumerate(shape) if at not in (0, channel_dim % len(shape)) and per_position)
    population = Population(shape[channel_dim], positions).to(DEVICE)
    for buffer in population.buffers():  # as if it had learned something
        buffer.uniform_(0.1, 0.9) if buffer.is_floating_point() else buffer.fill_(1)

    def infer(x):
        return kernels.infer(
            x, case.weight, case.bias, **options(case), kept=population, config=StatisticsConfig.parse(config)
        )

    whole = infer(case.x)
    for n in (1, 2, 3, 17) if GPU else (3, 17):
        assert torch.equal(infer(case.x[:n]), whole[:n])
    assert torch.equal(infer(case.x[-1:]), whole[-1:])


@pytest.mark.parametrize("config", ["TTFF", "FTFF", "TFTF", "FFTT"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_gradients_through_inference(config, masked):
    case = to_device(case_of((5, 4, 3), mask=torch.rand(5, 3) < 0.7 if masked else None))
    population = Population(4, (3,)).to(DEVICE)
    gamma, beta = case.weight.requires_grad_(), case.bias.requires_grad_()
    found = []
    for engine in (kernels.infer, plain_inference):
        x = case.x.detach().requires_grad_()
        y = engine(x, gamma, beta, case.mask, **options(case), kept=population, config=StatisticsConfig.parse(config))
        dx, dgamma, dbeta = torch.autograd.grad(y.pow(3).sum(), [x, gamma, beta], create_graph=True)
        found.append(([dx], [dgamma], [dbeta], torch.autograd.grad(dx.square().sum(), [x, gamma])))
    for mine, theirs in zip(*found, strict=True):
        # Sums of terms that may be as large as the largest and cancel: of 2400, none was 50 roundings apart.
        size = max(float(gradient.detach().abs().max()) for gradient in theirs)
        torch.testing.assert_close(list(mine), list(theirs), atol=250 * torch.finfo(torch.float32).eps * size, rtol=0)


def plain_inference(x, gamma, beta, mask, *, kept, config, **options):
    m, _ = bln.functional.count([x.shape[0], *x.shape[2:]], mask, True)
    population = kept.statistics(tuple(x.shape[2:]), m)
    return bln.functional.batch_layer_norm(x, gamma, beta, mask=mask, population=population, config=config, **options)


def test_gradients_through_inference_notice_a_changed_population():
    case = to_device(case_of((5, 4, 3)))
    population = Population(4, (3,)).to(DEVICE)
    config = StatisticsConfig.parse("TTFF")
    y = kernels.infer(case.x.requires_grad_(), None, None, **options(case), kept=population, config=config)
    population.reset()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_through_inference_notice_training_in_between(chosen):
    layer = bln.BatchLayerNorm(4, channel_dim=-1, position_shape=(3,)).to(DEVICE)
    y = layer.eval()(torch.randn(5, 3, 4, device=DEVICE, requires_grad=True))
    layer.train()(torch.randn(5, 3, 4, device=DEVICE))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- as an operator


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("pooled", [False, True], ids=["", "pooled"])
def test_the_operator_keeps_what_a_compiler_trusts_in(masked, pooled):
    x = torch.randn(6, 5, 4, device=DEVICE)
    gamma, beta = torch.randn(5, device=DEVICE), torch.randn(5, device=DEVICE)
    left = (None, None, None)
    if masked:
        mask = torch.rand(6, 4, device=DEVICE) < 0.7
        left = slabs.Slabs.of(x, 1, not pooled).entries(mask, not pooled)
    numbers = slabs.options(5, 1e-4, 1e-4, True, 6)
    inputs = (x.requires_grad_(), gamma.requires_grad_(), beta.requires_grad_(), *left, 1, not pooled, *numbers)
    # What is for `population.enter` is not always written, so values differ there from run to run.
    torch.library.opcheck(
        torch.ops.bln.train.default, inputs,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.parametrize("across", [False, True], ids=["", "across"])
@pytest.mark.parametrize(("parts", "p", "c", "tall"), [(20, 1, 6, 32), (5, 3, 10, 8), (37, 11, 3, 16)])
def test_many_partial_results_are_joined(parts, p, c, tall, across):
    """In groups of so many. Some parts have no entries at a position, and no part has any at the second."""
    groups, line = launch.cdiv(parts, tall), (c, p) if across else (p, c)
    counts = torch.randint(0, 4, (parts, p))
    counts[:, 1:2] = 0
    columns = counts[:, None, :] if across else counts[:, :, None]
    means, squares = torch.randn(parts, *line) * (columns > 0), torch.rand(parts, *line) * (columns > 0)
    sums = torch.randn(2, parts, p) * (counts > 0)
    partials = torch.cat([t.float().reshape(-1) for t in (means, squares, counts, sums)])
    joined = torch.full((groups * p * (2 * c + 3),), torch.nan, device=DEVICE)
    sharing.merge[(line[0] * launch.cdiv(line[1], 8), groups)](
        partials.to(DEVICE), joined, p, c, parts, groups, ACROSS=across, CHAINED=False, EARLY=False, BS=tall, BLOCK=8
    )
    some = [slice(first, first + tall) for first in range(0, parts, tall)]
    total = torch.stack([columns[of].sum(0) for of in some]).double().clamp(min=1)
    mean = torch.stack([(columns[of] * means[of].double()).sum(0) for of in some]) / total
    square = torch.stack(
        [(squares[of] + columns[of] * (means[of] - m) ** 2).sum(0) for of, m in zip(some, mean, strict=True)]
    )
    rows = [torch.stack([t[of].double().sum(0) for of in some]) for t in (counts, *sums)]
    expected = torch.cat([t.reshape(-1) for t in (mean, square, *rows)])
    torch.testing.assert_close(joined.cpu().double(), expected, atol=1e-5, rtol=1e-5)  # 24 bits, a few dozen additions


@pytest.mark.parametrize("per_position", [True, False], ids=["", "pooled"])
@pytest.mark.parametrize(("shape", "channel_dim"), [((22, 3, 5), 2), ((22, 5, 3), 1)])
def test_messages_of_many_ranks_are_joined(shape, channel_dim, per_position, chosen, monkeypatch):
    """Eleven ranks of two samples, of which this process is the first: more than are read at once."""
    ranks, whole = 11, torch.randn(shape, device=DEVICE)
    group, gathered = mock.Mock(**{"size.return_value": ranks}), []
    layer = bln.BatchLayerNorm(5, channel_dim=channel_dim, per_position=per_position).to(DEVICE)
    alone = copy.deepcopy(layer)
    positions = (3,) if per_position else ()
    layer.population.learned(positions, True)
    layer._agreed = True

    def gather(message, group):
        gathered.append(message)
        return torch.cat([message, *gathered[:-1]] if len(gathered) == ranks else [message] * ranks)

    monkeypatch.setattr(bln.synchronized, "gather", gather)
    before = layer.population.snapshot()
    for part in reversed(whole.split(2)):
        layer.population.restore(before)
        y = layer._synchronized(part, None, channel_dim, positions, group)
    torch.testing.assert_close(y, alone(whole)[:2], rtol=1e-4, atol=1e-5)
    for name, ours in layer.population.named_buffers():
        torch.testing.assert_close(ours, getattr(alone.population, name), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # of the interpreter
def test_what_overflows_where_ranks_meet_does_not_enter_in_part():
    """Their means are so far apart that the joined variance of one feature is infinite, one of the last."""
    d, ranks = 1500, 8
    population = Population(d, ()).to(DEVICE)
    before = population.snapshot()[1]
    task = bln.synchronized.Task(
        1, Spec.of(per_position=False), (), mock.Mock(**{"size.return_value": ranks}), torch.float32
    )
    messages = torch.zeros(ranks, task.size(d), device=DEVICE)
    messages[:, 2 * d] = messages[:, 2 * d + 3] = 2  # entries and samples
    messages[0, 1400] = 1e20
    kernels.synchronized._join_messages(messages.view(-1), 1, d, 0, task, (population, 0.1))
    assert all(torch.equal(value, before[name]) for name, value in population.named_buffers())
    messages[0, 1400] = 1
    kernels.synchronized._join_messages(messages.view(-1), 1, d, 0, task, (population, 0.1))
    assert population.updates.eq(1).all()


def test_every_kernel_compiles_to_machine_code():
    """Types that the interpreter does not look at; no GPU is needed for it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(bln.__file__).parents[1])
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} == {
        "forward", "single", "backward", "inference", "shares", "merge", "unite", "pool", "add", "turn", "pack", "join",
        "population", "grouped",
    }  # fmt: skip


# ---- in the layer


@pytest.fixture
def chosen(monkeypatch):
    """The layer takes the kernels, as it does on a GPU."""
    monkeypatch.setattr(bln.functional, "_on_gpu", lambda x: True)


def twins(shape, channel_dim, **options):
    layer = bln.BatchLayerNorm(shape[channel_dim], channel_dim=channel_dim, **options).to(DEVICE)
    nn.init.normal_(layer.weight)
    return layer, copy.deepcopy(layer)


def step(module, x, *rest):
    x = x.clone().requires_grad_()
    y = module(x, *rest)
    return y, torch.autograd.grad(y.float().pow(2).sum(), x)[0]


LAYERS = [
    ((6, 7, 3, 3), 1, {}),
    ((6, 9, 8), -1, {"momentum": None}),
    ((6, 5), 1, {}),
    ((6, 7, 4), 1, {"per_position": False}),
    ((3, 66, 4, 9), 1, {}),
    ((4, 128, 8, 8), 1, {"per_position": False}),
]
if GPU:
    LAYERS += [((32, 64, 14, 14), 1, {}), ((64, 80, 128), -1, {}), ((64, 3, 2048), -1, {}), ((2048, 512), 1, {})]


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(("shape", "channel_dim", "options"), LAYERS)
def test_the_layer_with_kernels_is_the_layer_without(shape, channel_dim, options, masked, monkeypatch):
    mine, theirs = twins(shape, channel_dim, **options)
    for _ in range(3):
        x, results = torch.randn(shape, device=DEVICE), []
        rows = [size for at, size in enumerate(shape) if at != channel_dim % len(shape)]
        rest = [torch.rand(rows, device=DEVICE) < 0.7] if masked else []
        for layer, yes in ((mine, True), (theirs, False)):
            monkeypatch.setattr(bln.functional, "_on_gpu", lambda x, yes=yes: yes)
            trained = step(layer.train(), x, *rest)
            evaluated = step(layer.eval(), x, *rest)
            results.append((*trained, *evaluated))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for (name, a), b in zip(mine.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)


def test_parameters_with_gaps(chosen):
    x, table = torch.randn(6, 5, 3, device=DEVICE), torch.randn(5, 2, device=DEVICE)
    found, expected = (bln.functional.batch_layer_norm(x, w, w) for w in (table[:, 0], table[:, 0].contiguous()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_more_features_than_a_tile_has_are_left_to_the_formula(chosen):
    for shape in ((2, 40000), (2, 3, 40000)):
        x = torch.randn(shape, device=DEVICE)
        found, expected = (bln.functional.batch_layer_norm(t, channel_dim=-1) for t in (x, x.double()))
        # Of two samples that are nearly the same, rounding is up to 1/sqrt(eps) = 100 times as large, over sqrt(40000).
        torch.testing.assert_close(found, expected.float(), rtol=100 * torch.finfo(x.dtype).eps, atol=1e-6)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("per_position", [True, False], ids=["", "pooled"])
def test_a_mask_may_lie_in_any_way(chosen, per_position, training):
    layer, twin = twins((6, 5, 4), -1, per_position=per_position)
    mask = (torch.arange(5)[:, None] < torch.tensor([5, 3, 4, 2, 1, 5])).to(DEVICE).T
    x = torch.randn(6, 5, 4, device=DEVICE)
    layer(x), twin(x)
    assert not mask.is_contiguous()
    torch.testing.assert_close(
        layer.train(training)(x, mask), twin.train(training)(x, mask.contiguous()), rtol=0, atol=0
    )


def test_statistics_of_a_compiled_call_have_no_gradient(chosen):
    torch._dynamo.reset()
    x = torch.randn(6, 4, 5, device=DEVICE, requires_grad=True)
    call = torch.compile(
        lambda x: bln.functional.batch_layer_norm(x, return_statistics=True), fullgraph=True, backend="aot_eager"
    )
    y, statistics = call(x)
    assert y.requires_grad
    assert not any(value.requires_grad for value in statistics)


@pytest.mark.parametrize("per_position", [True, False], ids=["", "pooled"])
@pytest.mark.parametrize("channels", [4, 130])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_what_came_contiguous_stays_so(chosen, channels, per_position, training):
    layer = bln.BatchLayerNorm(channels, per_position=per_position).to(DEVICE)
    x = torch.randn(4, channels, 3, 3, device=DEVICE, requires_grad=True)
    layer(x)
    y = layer.train(training)(x)
    assert y.is_contiguous()
    assert torch.autograd.grad(y.square().sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("dim", [2, 3, 4])
@pytest.mark.parametrize("channel_dim", [1, -1], ids=["second", "last"])
def test_gradients_in_any_layout(chosen, dim, channel_dim):
    for shape in ((1, 1, 1, 1)[:dim], (1, 5, 3, 2)[:dim], (4, 5, 3, 2)[:dim]):
        x = torch.randn(shape, device=DEVICE, requires_grad=True)
        dy = torch.randn(shape, device=DEVICE)
        layer = bln.BatchLayerNorm(shape[channel_dim], channel_dim=channel_dim).to(DEVICE)
        expected = torch.autograd.grad(layer(x), x, dy)[0]
        stretched = dy.new_zeros([2 * size for size in shape])[tuple(slice(size) for size in shape)].copy_(dy)
        moved = dy.movedim(1, -1).contiguous().movedim(-1, 1)
        odd = dy.as_strided(shape, [7 if size == 1 else step for size, step in zip(shape, dy.stride(), strict=True)])
        for gradient in (stretched, moved, odd):
            torch.testing.assert_close(torch.autograd.grad(layer(x), x, gradient)[0], expected, rtol=0, atol=0)


def test_the_layer_refuses_other_positions_and_learns_nothing(chosen):
    layer = bln.BatchLayerNorm(4, channel_dim=-1, position_shape=(5, 5)).to(DEVICE)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match="statistics are kept for positions"):
        layer(torch.randn(3, 5, 6, 4, device=DEVICE))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_a_recomputed_forward_learns_once(chosen):
    layer, _ = twins((6, 4, 5), 1)
    x = torch.randn(6, 4, 5, device=DEVICE, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.population.updates.eq(1).all()


@pytest.mark.parametrize("dtype", DTYPES[:2] if GPU else DTYPES[:1], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(("shape", "channel_dim", "options"), LAYERS)
def test_a_compiled_layer_is_the_layer(shape, channel_dim, options, masked, dtype, chosen):
    torch._dynamo.reset()
    layer, twin = twins(shape, channel_dim, **options)
    compiled = torch.compile(twin, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    rows = [size for at, size in enumerate(shape) if at != channel_dim % len(shape)]
    rest = [torch.rand(rows, device=DEVICE) < 0.7] if masked else []
    unit = torch.finfo(dtype).eps
    for training in (True, True, False):
        x = torch.randn(shape, device=DEVICE, dtype=dtype)
        mine, theirs = step(layer.train(training), x, *rest), step(compiled.train(training), x, *rest)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=8 * unit, atol=8 * unit * b.abs().max().item())
    for (name, a), b in zip(layer.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)


if GPU:

    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_a_cuda_graph_replays_the_layer(mode):
        layer = bln.BatchLayerNorm(64, channel_dim=-1, position_shape=(196,)).cuda().train(mode == "train")
        x = torch.randn(32, 196, 64, device="cuda")
        for _ in range(3):
            layer(x)
        layer.reset_statistics()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        layer.reset_statistics()
        twin = copy.deepcopy(layer)
        for _ in range(3):
            x.normal_()
            graph.replay()
            torch.testing.assert_close(y, twin(x), rtol=0, atol=0)
        for mine, theirs in zip(layer.buffers(), twin.buffers(), strict=True):
            assert torch.equal(mine, theirs)

    def test_more_than_two_to_the_31_elements():
        layer = bln.BatchLayerNorm(64, channel_dim=-1).cuda()
        x = torch.randn(33, 1024 * 1024, 64, device="cuda", dtype=torch.bfloat16)
        y = layer(x)
        expected, _ = kernels.train(
            x[:, -1000:].contiguous(), layer.weight, layer.bias, channel_dim=2, per_position=True, eps=layer.eps,
            mix_eps=layer.eps, dim_scale=True,
        )  # fmt: skip
        assert torch.equal(y[:, -1000:], expected)

    def test_more_than_two_to_the_31_rows():
        """Of rows that come again and again, so that their statistics, and gradients, are those of some."""
        some, times = 2**20, 2**11 + 1
        block, slope = torch.randn(2, some, 2, device="cuda", dtype=torch.bfloat16) + 1
        x, dy = block.repeat(times, 1).requires_grad_(), slope.repeat(times, 1)
        layer = bln.BatchLayerNorm(2, mix_eps=0.25, dim_scale=False).cuda()  # so that features count
        y = layer(x)
        dx = torch.autograd.grad(y, x, dy)[0]
        rows = block.double()[:, None].requires_grad_()
        statistics = current(rows, None, layer.spec)._replace(inverse_m=torch.tensor(1 / len(x)))
        expected = formula.transform(rows, statistics, spec=Spec(eps=layer.eps, mix_eps=0.25, dim_scale=False))
        gradient = torch.autograd.grad(expected, rows, slope.double()[:, None])[0]
        unit = torch.finfo(x.dtype).eps  # outputs are rounded once; gradients are sums of terms some times their size
        for at in (0, times // 2, times - 1):
            part = slice(at * some, (at + 1) * some)
            torch.testing.assert_close(y[part].double(), expected[:, 0], rtol=3 * unit, atol=3 * unit)
            torch.testing.assert_close(dx[part].double(), gradient[:, 0], rtol=6 * unit, atol=6 * unit)
        layer.eval()
        torch.testing.assert_close(layer(x)[-some:], layer(block), rtol=0, atol=0)

    def test_the_error_is_no_larger_than_torchs_own():
        """Of the batch part against BatchNorm, of the feature part against LayerNorm, on the same data."""
        for mean in (0.0, 10.0, 1000.0):
            x = torch.randn(256, 49, 64, device="cuda") + mean
            truth = x.double()
            batch = (truth - truth.mean(0)) * (truth.var(0, correction=0) + 1e-5).rsqrt()
            features = nn.functional.layer_norm(truth, (64,), eps=1e-5)
            theirs = nn.BatchNorm1d(49 * 64, affine=False).cuda()(x.reshape(256, -1)).view_as(x)
            error_B, error_F = (theirs - batch).abs().max(), (nn.functional.layer_norm(x, (64,)) - features).abs().max()
            both = {"channel_dim": 2, "per_position": True, "eps": 1e-5, "mix_eps": 1e-5, "dim_scale": False}
            y, _ = kernels.train(x, None, None, **both)
            w_B, w_F = formula.weights(1 / 256, 1e-5, 64, False)
            mine = (y - (w_B * batch + w_F * features)).abs().max()
            assert mine <= 2 * (w_B * error_B + abs(w_F) * error_F), (mean, mine, error_B, error_F)
