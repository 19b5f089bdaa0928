"""The published form's kernels against the oracle: on a GPU where there is one, else through Triton's interpreter."""

import ast
import copy
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bln
import oracle
import tolerance
from bln import formula
from bln._backends import native, operators
from bln._backends import triton as kernels
from bln._backends.triton import functions, published, table
from bln._masks import count
from bln._spec import Spec
from bln.config import StatisticsConfig
from bln.population import Population
from cases import Case, cases

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CONFIGS = [*StatisticsConfig.all(), *map(StatisticsConfig.parse, ("16 16 F F", "F 2 T 0.5", "3 T 1 F"))]
EXAMPLES = 25 if GPU else 12  # the interpreter is slow


def on_device(tensor):
    return None if tensor is None else tensor.to(DEVICE)


def to_device(case: Case) -> Case:
    """Return the case on the device; its input has the same strides, gaps included."""
    if 0 in case.x.stride() or not GPU:
        x = on_device(case.x)
    else:
        x = torch.empty_strided(case.x.shape, case.x.stride(), dtype=case.x.dtype, device=DEVICE).copy_(case.x)
    moved = copy.copy(case)
    moved.x, moved.mask = x, on_device(case.mask)
    moved.weight, moved.bias = on_device(case.weight), on_device(case.bias)
    return moved


def options(case: Case) -> dict:
    spec = Spec(None, case.per_position, case.eps, case.mix_eps, case.dim_scale)
    return {"channel_dim": case.channel_dim % case.x.dim(), "spec": spec}


@contextmanager
def poisoned(poison=np.nan):
    """Fill fresh memory with a value, so that one nobody wrote shows."""
    with pytest.MonkeyPatch.context() as patch:
        empty, empty_like = torch.empty, torch.empty_like
        patch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(poison))
        patch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(poison))
        yield


def compare(case: Case) -> None:
    """Compare forward, statistics and gradients with the oracle, and check that every output is written."""
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


KERNELS = {
    "persistent": {},
    "two passes": {"MAX_PERSISTENT": 0, "MAX_PERSISTENT_BACKWARD": 0},
    "two passes backward": {"MAX_PERSISTENT_BACKWARD": 0},
}
"""Limits that make small inputs take each kind of kernel."""


@pytest.fixture(params=KERNELS)
def kind(request, monkeypatch):
    """Launches of each kind, with few values in a tile, so that small inputs have several tiles."""
    for name, value in KERNELS[request.param].items():
        monkeypatch.setattr(published, name, value)
    monkeypatch.setattr(functions, "_plans", {})
    few = {name: row._replace(values=64, per_thread=1, min_samples=2) for name, row in table.PUBLISHED.items()}
    monkeypatch.setattr(table, "PUBLISHED", few)


def test_kernels_have_few_arguments_and_lines():
    for module in ("affine", "persistent", "two_pass", "population", "primitives"):
        tree = ast.parse((Path(kernels.__file__).parent / f"{module}.py").read_text())
        for kernel in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            assert len(kernel.args.args) <= 25, kernel.name
            assert kernel.end_lineno - kernel.lineno < 120, kernel.name


round_sizes = st.builds(lambda odd, power: min(odd << power, 2**15), st.integers(1, 31), st.integers(0, 11))
sizes = st.one_of(st.integers(1, 300), st.integers(1, 2**15), round_sizes)


@settings(max_examples=500)
@given(
    n=sizes, p=sizes, c=sizes, itemsize=st.sampled_from([2, 4]), channels_first=st.booleans(),
    pooled=st.booleans(), masked=st.booleans(),
)  # fmt: skip
def test_any_shape_has_a_launch_that_a_gpu_can_make(n, p, c, itemsize, channels_first, pooled, masked):
    channels_first = channels_first and p > 1
    c = min(c, published.MAX_FEATURES)
    view = published.Shape(n, c, p, channels_first, pooled or p == 1)
    if (
        channels_first
        and published.next_power_of_2(c) * published.min_positions(view, itemsize) > published.MAX_CHANNELS_FIRST
    ):
        return
    plan = published.Plan(view, itemsize, Spec.of(), masked)
    one = published.Plan(view._replace(n=1), itemsize, Spec.of(), masked)
    # A row is summed in the same order in any mini-batch.
    assert plan.normalize_inference.constexprs == one.normalize_inference.constexprs
    assert plan.normalize_inference.options == one.normalize_inference.options
    for sweep in (plan.measure, plan.normalize, plan.measure_backward, plan.normalize_backward):
        tile, positions = sweep.constexprs, sweep.scalars[0]
        assert tile["BC"] * tile["BP"] <= 2 * published.MAX_FEATURES
        assert c <= tile["BC"]
        blocks = published.cdiv(positions, tile["BP"])
        assert sweep.programs == blocks * sweep.splits
        assert sweep.programs <= max(published.MAX_PROGRAMS, blocks)
        assert (p if channels_first else c) % tile["VEC"] == 0
        assert sweep.options["num_warps"] <= 16
    for launch, most in (
        (plan.persistent_forward, published.MAX_PERSISTENT),
        (plan.persistent_backward, published.MAX_PERSISTENT_BACKWARD),
    ):
        if launch is not None:
            tile = launch.constexprs
            assert tile["BN"] * tile["BC"] * tile["BP"] <= most
            assert tile["BN"] >= launch.scalars[0]
            assert launch.programs <= published.MAX_PROGRAMS


def test_ragged_shapes_layouts_types_and_masks(kind):
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
    ((40, 2, 513), -1, True),  # wide rows, not a power of two
    ((32, 3, 256), -1, True),
    ((37, 300), 1, True),  # dense
    ((300, 64), 1, True),  # dense, too large for a persistent tile
    ((6, 24, 5, 5), 1, True),  # channels first
    ((8, 16, 8, 8), 1, True),  # the same, with full tiles
    ((70, 64, 3, 3), 1, True),  # the same, too large for a persistent tile
    ((6, 24, 5, 5), 1, False),  # the same, pooled
    ((2, 1030, 3, 3), 1, True),  # the same, too many features for a tile: copied
    ((9, 5, 5, 24), -1, False),  # pooled, features last
    ((300, 3, 3, 24), -1, False),  # the same, split over several programs
    ((3, 70, 6), -1, True),  # narrow rows
    ((2, 600, 24), -1, True),  # small batches, many positions
]
if GPU:
    SHAPES += [
        ((128, 56, 56, 64), -1, True), ((32, 112, 112, 64), -1, True), ((64, 28, 28, 256), -1, True),
        ((32, 512, 1024), -1, True), ((256, 197, 768), -1, True), ((128, 7, 7, 2048), -1, True),
        ((4096, 4096), 1, True), ((128, 64, 56, 56), 1, True), ((64, 256, 28, 28), 1, True),
        ((32, 28, 28, 256), -1, True), ((32, 14, 14, 512), -1, True), ((256, 56, 56, 64), -1, True),
        ((64, 64, 56, 56), 1, False), ((64, 56, 56, 64), -1, False), ((25, 6, 16, 16), 1, True),
        ((64, 1024, 14, 14), 1, True), ((40, 200, 30, 30), 1, True), ((64, 256, 28, 28), 1, False),
        ((128, 2048, 7, 7), 1, True), ((128, 2048, 7, 7), 1, False), ((32, 512, 14, 14), 1, True),
    ]  # fmt: skip


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("dtype", DTYPES[:2] if GPU else DTYPES[:1], ids=str)
@pytest.mark.parametrize(("shape", "channel_dim", "per_position"), SHAPES)
def test_every_kernel_at_sizes_it_is_chosen_for(shape, channel_dim, per_position, dtype, masked):
    rows = list(shape)
    rows.pop(channel_dim)
    compare(case_of(shape, channel_dim, per_position, dtype, mask=torch.rand(rows) < 0.7 if masked else None))


@pytest.mark.parametrize("samples", [8, 64, 600])
def test_mean_2000_deviation_1(samples, kind):
    x = torch.randn(samples, 6) + 2000
    compare(Case(x, None, torch.ones(6), None, 1, True, 1e-4, 1e-4, True))


def test_an_outlier_among_the_first_samples():
    """Welford's running mean starts far off, which is the worst case for rounding."""
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
        y, _ = kernels.train(x, gamma, case.bias, None, **options(case))
        found.append(torch.autograd.grad(y, [x, gamma], dy))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("x", [torch.randn(4, 5, 3), torch.randn(4, 10, 3)[:, ::2]], ids=["dense", "with gaps"])
def test_second_derivatives_are_those_of_the_native_path(x):
    case = to_device(Case(x, None, torch.randn(5), torch.randn(5), 1, True, 1e-4, 1e-4, True))
    gamma = case.weight.requires_grad_()
    results = []
    for engine in ("kernels", "native"):
        x = case.x.detach().requires_grad_()
        if engine == "kernels":
            y, _ = kernels.train(x, gamma, case.bias, None, **options(case))
        else:
            y, _ = native.train(x, gamma, case.bias, None, 1, options(case)["spec"])
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
    y, _ = kernels.train(x, case.weight, case.bias, None, **options(case))
    (summed,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (ones,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(summed, ones)


# ---- the population


@settings(max_examples=EXAMPLES)
@given(
    case=cases(dtypes=DTYPES, masked=False, grouped=False), momentum=st.sampled_from([None, 0.1, 1.0]), data=st.data()
)
def test_the_population_is_updated_as_operators_do(case, momentum, data):
    """Three mini-batches of different sizes, one of which holds an infinity."""
    positions = case.rows.shape[1:-1] if case.per_position else ()
    theirs = Population(case.rows.shape[-1], positions).to(DEVICE)
    mine = copy.deepcopy(theirs)
    for number in range(3):
        n = data.draw(st.integers(1, len(case.x)))
        moved = to_device(copy.copy(case))
        x = moved.x[:n] + number
        if number == 1:
            x[(0,) * x.dim()] = torch.inf
        with np.errstate(invalid="ignore"):  # the interpreter's NumPy warns of the infinity
            _, statistics = kernels.train(x, None, None, None, **options(case))
            _, nothing = kernels.train(x, None, None, None, **options(case), update=(mine, momentum))
        assert nothing is None
        theirs.update_from(x, None, **options(case), batch=statistics, momentum=momentum)
    assert torch.equal(mine.updates, theirs.updates)
    assert torch.equal(mine.samples, theirs.samples)
    assert mine.updates[0].max() == 2
    for name, value in mine.named_buffers():
        expected = getattr(theirs, name)
        scale = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6 * scale)  # summed in another order


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
@pytest.mark.parametrize("kind", ["persistent", "two passes"], indirect=True)  # there is no backward
@pytest.mark.parametrize(
    ("shape", "channel_dim", "known", "momentum"),
    [
        ((70, 300), 1, (), 0.3),  # dense
        ((70, 1, 300), 2, (3,), None),  # the first of three positions
        ((9, 5, 5, 24), 3, (), 0.3),  # pooled
        ((6, 24, 5, 5), 1, (), None),  # the same, channels first
    ],
)
def test_the_population_is_updated_unless_a_variance_is_not_finite(shape, channel_dim, known, momentum, kind):
    case = case_of(shape, channel_dim, per_position=len(shape) < 4)
    x, features = to_device(case).x, shape[channel_dim]
    theirs = Population(features, known).to(DEVICE)
    mine = copy.deepcopy(theirs)
    one_column = torch.zeros_like(x)  # squares overflow in one column, but in no row
    one_column.movedim(channel_dim, -1)[::2, ..., 7] = 1e19
    one_column.movedim(channel_dim, -1)[1::2, ..., 7] = -1e19
    for bad in (None, torch.nan, torch.inf, one_column, None):
        x = torch.randn_like(x) if bad is not one_column else one_column
        if isinstance(bad, float):
            x.view(-1)[-1] = bad
        with poisoned(), np.errstate(over="ignore"):
            _, found = kernels.train(x, None, None, None, **options(case))
            kernels.train(x, None, None, None, **options(case), update=(mine, momentum))
        theirs.update_from(x, None, **options(case), batch=found, momentum=momentum)
    assert mine.updates.reshape(5, -1)[:, 0].eq(2).all()
    assert torch.equal(mine.samples, theirs.samples)
    for name, value in mine.named_buffers():  # float32, summed in another order
        torch.testing.assert_close(value, getattr(theirs, name), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("positions", [1, 3, 9])
def test_a_population_of_many_columns(positions):
    """More columns than a program takes in one step."""
    case = case_of((4, positions, 9000), -1)
    theirs = Population(9000, (positions,)).to(DEVICE)
    mine, x = copy.deepcopy(theirs), to_device(case).x
    with poisoned():
        _, found = kernels.train(x, None, None, None, **options(case))
        kernels.train(x, None, None, None, **options(case), update=(mine, None))
    theirs.update_from(x, None, **options(case), batch=found, momentum=None)
    for name, value in mine.named_buffers():  # float32, summed in another order
        torch.testing.assert_close(value, getattr(theirs, name), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("channel_dim", [1, 2])
@pytest.mark.parametrize(
    ("n", "c", "along", "value", "enters"),
    [(2, 64, 0, 9e18, True), (2, 64, 0, 1e20, False), (2, 64, 2, 1e20, False), (8, 2, 2, 9e18, False)],
)
def test_a_large_variance_is_averaged_and_an_infinite_one_is_not(n, c, along, value, enters, channel_dim, kind):
    """Columns finite, whose sum overflows; columns infinite; rows infinite; rows finite, whose sum overflows."""
    both = {"channel_dim": channel_dim, "spec": Spec.of()}
    x = torch.full((n, 3, c), value, device=DEVICE)
    x.narrow(along, 0, x.shape[along] // 2).neg_()
    x = x.movedim(2, channel_dim).contiguous()
    population = Population(c, (3,)).to(DEVICE)
    with np.errstate(over="ignore", invalid="ignore"):
        kernels.train(x, None, None, None, **both, update=(population, None))
    assert population.updates.eq(int(enters)).all()
    assert all(torch.isfinite(buffer).all() for buffer in population.buffers())


def test_a_shorter_sequence_updates_the_first_positions():
    population = Population(4, (9,)).to(DEVICE)
    x = torch.randn(6, 5, 4, device=DEVICE)
    both = {"channel_dim": 2, "spec": Spec.of()}
    kernels.train(x, None, None, None, **both, update=(population, None))
    assert population.updates[:, :5].eq(1).all()
    assert population.updates[:, 5:].eq(0).all()
    torch.testing.assert_close(population.batch_mean[:5], x.mean(0), rtol=1e-5, atol=1e-6)
    assert population.batch_mean[5:].eq(0).all()


# ---- inference


def compare_inference(case: Case, config: StatisticsConfig, known: bool, poison: float = np.nan) -> None:
    """Compare with the oracle, by a population that was updated (``known``) or never was."""
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
            moved.x,
            moved.weight,
            moved.bias,
            moved.mask,
            **options(case),
            population=population.to(DEVICE),
            config=config,
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


@pytest.mark.parametrize(
    ("masked", "per_position"), [(False, True), (True, True), (False, False)], ids=["", "masked", "pooled"]
)
@pytest.mark.parametrize("config", ["FFFF", "TTFF", "TFTF", "FTFT", "TTTT"])
@pytest.mark.parametrize("shape", [(2, 296, 5, 7), (3, 1030, 2, 2)])
def test_inference_in_tiles(shape, config, masked, per_position):
    """Memory that nobody wrote would overflow if it were summed."""
    mask = torch.rand(shape[0], *shape[2:]) < 0.7 if masked else None
    case = case_of(shape, per_position=per_position, mask=mask)
    compare_inference(case, StatisticsConfig.parse(config), known=True, poison=3e38)


# The compiler decides the order of sums, so the slow interpreter need not try all four.
@pytest.mark.parametrize("config", ["TTFF", "TTTF", "TTFT", "TTTT"] if GPU else ["TTFF", "TTTT"])
@pytest.mark.parametrize(
    ("shape", "channel_dim", "per_position"),
    [
        *((shape, -1, True) for shape in ((40, 6, 24), (64, 4, 8), (64, 4, 16), (20, 16, 16, 6), (20, 10, 10))),
        *((shape, 1, True) for shape in ((40, 24, 5, 5), (70, 3, 3), (20, 200, 4, 2), (20, 8, 4, 4), (20, 16, 4, 4))),
        *((shape, 1, True) for shape in ((20, 24, 1, 33), (40, 300), (20, 296, 5, 7))),
        ((20, 5, 513), -1, True), ((20, 24, 6, 6), 1, False), ((20, 6, 6, 24), -1, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES[:2] if GPU else DTYPES[:1], ids=str)
def test_a_sample_has_the_same_bits_in_any_mini_batch(config, shape, channel_dim, per_position, dtype):
    case = to_device(case_of(shape, channel_dim, per_position, dtype=dtype))
    positions = tuple(s for at, s in enumerate(shape) if at not in (0, channel_dim % len(shape)) and per_position)
    population = Population(shape[channel_dim], positions).to(DEVICE)
    for buffer in population.buffers():  # as if it had been updated
        buffer.uniform_(0.1, 0.9) if buffer.is_floating_point() else buffer.fill_(1)

    def infer(x):
        return kernels.infer(
            x,
            case.weight,
            case.bias,
            None,
            **options(case),
            population=population,
            config=StatisticsConfig.parse(config),
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
        y = engine(
            x, gamma, beta, case.mask, **options(case), population=population, config=StatisticsConfig.parse(config)
        )
        dx, dgamma, dbeta = torch.autograd.grad(y.pow(3).sum(), [x, gamma, beta], create_graph=True)
        found.append(([dx], [dgamma], [dbeta], torch.autograd.grad(dx.square().sum(), [x, gamma])))
    for mine, theirs in zip(*found, strict=True):
        # Terms as large as the largest value may cancel. Of 2,400 values none was 50 roundings apart.
        size = max(float(gradient.detach().abs().max()) for gradient in theirs)
        torch.testing.assert_close(list(mine), list(theirs), atol=250 * torch.finfo(torch.float32).eps * size, rtol=0)


def plain_inference(x, gamma, beta, mask, *, population, config, channel_dim, spec):
    m, _ = count([x.shape[0], *x.shape[2:]], mask, True)
    return bln.functional.batch_layer_norm(
        x, gamma, beta, mask=mask, population=population.statistics(tuple(x.shape[2:]), m), config=config,
        channel_dim=channel_dim, per_position=spec.per_position, eps=spec.eps, mix_eps=spec.mix_eps,
    )  # fmt: skip


def test_gradients_through_inference_notice_a_changed_population():
    case = to_device(case_of((5, 4, 3)))
    population = Population(4, (3,)).to(DEVICE)
    config = StatisticsConfig.parse("TTFF")
    y = kernels.infer(case.x.requires_grad_(), None, None, None, **options(case), population=population, config=config)
    population.reset()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_through_inference_notice_training_in_between(use_kernels):
    layer = bln.BatchLayerNorm(4, channel_dim=-1, position_shape=(3,)).to(DEVICE)
    y = layer.eval()(torch.randn(5, 3, 4, device=DEVICE, requires_grad=True))
    layer.train()(torch.randn(5, 3, 4, device=DEVICE))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- as an operator


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("pooled", [False, True], ids=["", "pooled"])
def test_the_operator_meets_the_compilers_contract(masked, pooled):
    x = torch.randn(6, 5, 4, device=DEVICE)
    gamma, beta = torch.randn(5, device=DEVICE), torch.randn(5, device=DEVICE)
    mask = torch.rand(6, 4, device=DEVICE) < 0.7 if masked else None
    inputs = (x.requires_grad_(), gamma.requires_grad_(), beta.requires_grad_(), mask, 1, not pooled, 1e-4, 1e-4, True)
    torch.library.opcheck(torch.ops.bln.train.default, inputs)


def test_every_kernel_compiles_to_machine_code():
    """Types, too, which the interpreter ignores; no GPU is needed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(bln.__file__).parents[1])
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} == {
        "forward", "backward", "measure", "join", "normalize", "inference_weights", "measure_backward", "join_backward",
        "normalize_backward", "update", "grouped",
    }  # fmt: skip


# ---- in the layer


@pytest.fixture
def use_kernels(monkeypatch):
    """Have the layer choose the kernels, as on a GPU."""
    monkeypatch.setattr(bln._backends, "_on_gpu", lambda x: True)


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
            monkeypatch.setattr(bln._backends, "_on_gpu", lambda x, yes=yes: yes)
            trained = step(layer.train(), x, *rest)
            evaluated = step(layer.eval(), x, *rest)
            results.append((*trained, *evaluated))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for (name, a), b in zip(mine.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)


def test_parameters_with_gaps(use_kernels):
    x, table = torch.randn(6, 5, 3, device=DEVICE), torch.randn(5, 2, device=DEVICE)
    found, expected = (bln.functional.batch_layer_norm(x, w, w) for w in (table[:, 0], table[:, 0].contiguous()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_more_features_than_a_tile_are_left_to_the_formula(use_kernels):
    for shape in ((2, 40000), (2, 3, 40000)):
        x = torch.randn(shape, device=DEVICE)
        found, expected = (bln.functional.batch_layer_norm(t, channel_dim=-1) for t in (x, x.double()))
        # Where two samples are nearly equal, roundings grow by up to 1/sqrt(eps) = 100, over sqrt(40000).
        torch.testing.assert_close(found, expected.float(), rtol=100 * torch.finfo(x.dtype).eps, atol=1e-6)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("per_position", [True, False], ids=["", "pooled"])
def test_a_mask_of_any_strides(use_kernels, per_position, training):
    layer, twin = twins((6, 5, 4), -1, per_position=per_position)
    mask = (torch.arange(5)[:, None] < torch.tensor([5, 3, 4, 2, 1, 5])).to(DEVICE).T
    x = torch.randn(6, 5, 4, device=DEVICE)
    layer(x), twin(x)
    assert not mask.is_contiguous()
    torch.testing.assert_close(
        layer.train(training)(x, mask), twin.train(training)(x, mask.contiguous()), rtol=0, atol=0
    )


def test_statistics_of_a_compiled_call_have_no_gradient(use_kernels):
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
def test_a_contiguous_input_gives_a_contiguous_output(use_kernels, channels, per_position, training):
    layer = bln.BatchLayerNorm(channels, per_position=per_position).to(DEVICE)
    x = torch.randn(4, channels, 3, 3, device=DEVICE, requires_grad=True)
    layer(x)
    y = layer.train(training)(x)
    assert y.is_contiguous()
    assert torch.autograd.grad(y.square().sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("dim", [2, 3, 4])
@pytest.mark.parametrize("channel_dim", [1, -1], ids=["second", "last"])
def test_gradients_in_any_layout(use_kernels, dim, channel_dim):
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


def test_the_layer_refuses_other_positions_and_updates_nothing(use_kernels):
    layer = bln.BatchLayerNorm(4, channel_dim=-1, position_shape=(5, 5)).to(DEVICE)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match="statistics are kept for positions"):
        layer(torch.randn(3, 5, 6, 4, device=DEVICE))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_a_recomputed_forward_updates_the_population_once(use_kernels):
    layer, _ = twins((6, 4, 5), 1)
    x = torch.randn(6, 4, 5, device=DEVICE, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.population.updates.eq(1).all()


def test_a_compiled_call_may_be_the_first_to_import_the_kernels():
    code = (
        "import torch, bln; from bln import _backends; _backends._on_gpu = lambda x: True\n"
        "for groups in (None, 2):\n"
        f"    layer, x = bln.BatchLayerNorm(6, groups=groups), torch.randn(4, 6, 5, device={DEVICE!r})\n"
        f"    print(torch.compile(layer.to({DEVICE!r}), backend='aot_eager', fullgraph=True)(x).shape)"
    )
    path = str(Path(bln.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": path, **({} if GPU else {"TRITON_INTERPRET": "1"})}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.count("torch.Size([4, 6, 5])") == 2, done.stderr


@pytest.mark.parametrize("dtype", DTYPES[:2] if GPU else DTYPES[:1], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(("shape", "channel_dim", "options"), LAYERS)
def test_a_compiled_layer_is_the_layer(shape, channel_dim, options, masked, dtype, use_kernels):
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
            x[:, -1000:].contiguous(), layer.weight, layer.bias, None, channel_dim=2, spec=layer.spec
        )
        assert torch.equal(y[:, -1000:], expected)

    def test_more_than_two_to_the_31_rows():
        """Rows repeat, so that statistics and gradients are those of one block of them."""
        some, times = 2**20, 2**11 + 1
        block, slope = torch.randn(2, some, 2, device="cuda", dtype=torch.bfloat16) + 1
        x, dy = block.repeat(times, 1).requires_grad_(), slope.repeat(times, 1)
        layer = bln.BatchLayerNorm(2, mix_eps=0.25, dim_scale=False).cuda()  # so that feature statistics count
        y = layer(x)
        dx = torch.autograd.grad(y, x, dy)[0]
        rows = block.double()[:, None].requires_grad_()
        statistics = operators.current(rows, None, layer.spec)._replace(inverse_m=torch.tensor(1 / len(x)))
        expected = formula.transform(rows, statistics, spec=Spec(eps=layer.eps, mix_eps=0.25, dim_scale=False))
        gradient = torch.autograd.grad(expected, rows, slope.double()[:, None])[0]
        unit = torch.finfo(x.dtype).eps  # outputs are rounded once; gradients sum terms a few times their size
        for at in (0, times // 2, times - 1):
            part = slice(at * some, (at + 1) * some)
            torch.testing.assert_close(y[part].double(), expected[:, 0], rtol=3 * unit, atol=3 * unit)
            torch.testing.assert_close(dx[part].double(), gradient[:, 0], rtol=6 * unit, atol=6 * unit)
        layer.eval()
        torch.testing.assert_close(layer(x)[-some:], layer(block), rtol=0, atol=0)

    def test_the_error_is_no_larger_than_torchs_own():
        """The batch part against BatchNorm, and the feature part against LayerNorm, on the same data."""
        for mean in (0.0, 10.0, 1000.0):
            x = torch.randn(256, 49, 64, device="cuda") + mean
            truth = x.double()
            batch = (truth - truth.mean(0)) * (truth.var(0, correction=0) + 1e-5).rsqrt()
            features = nn.functional.layer_norm(truth, (64,), eps=1e-5)
            theirs = nn.BatchNorm1d(49 * 64, affine=False).cuda()(x.reshape(256, -1)).view_as(x)
            error_B, error_F = (theirs - batch).abs().max(), (nn.functional.layer_norm(x, (64,)) - features).abs().max()
            both = {"channel_dim": 2, "spec": Spec.of(eps=1e-5, dim_scale=False)}
            y, _ = kernels.train(x, None, None, None, **both)
            w_B, w_F = formula.weights(1 / 256, 1e-5, 64, False)
            mine = (y - (w_B * batch + w_F * features)).abs().max()
            assert mine <= 2 * (w_B * error_B + abs(w_F) * error_F), (mean, mine, error_B, error_F)
