"""The Triton kernels on the CPU, through Triton's interpreter, against the oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import oracle
import tolerance
from bln import formula, kernels, native
from cases import Case, cases

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(case: Case, x: torch.Tensor, engine=kernels):
    d = x.shape[case.channel_dim]
    w_B, w_F = formula.weights(1 / x.shape[0], case.mix_eps, d, case.dim_scale)
    return engine.train(
        x, case.weight, case.bias, channel_dim=case.channel_dim % x.dim(), per_position=case.per_position,
        eps=case.eps, w_B=w_B, w_F=w_F,
    )  # fmt: skip


def compare(case: Case) -> None:
    """Forward, statistics and gradients; outputs are written everywhere, since NaN is what was there before."""
    x = case.x.clone().requires_grad_()
    parameters = [p.requires_grad_() for p in (case.weight, case.bias) if p is not None]
    y, statistics = run(case, x)
    dy = torch.randn(y.shape).to(y.dtype)
    gradients = torch.autograd.grad(y, [x, *parameters], dy)

    s = oracle.measure(case.rows, None, case.per_position)
    spread = (s.var_B, s.var_F, np.asarray(1 / case.x.shape[0]))
    expected = oracle.train(case.rows, *case.affine, per_position=case.per_position, **case.options)
    bound = tolerance.output(case.rows, expected, *spread, *case.affine, case.x.dtype, **case.options)
    tolerance.close(case.to_rows(y), expected, bound, "y")
    unit, size = tolerance.ROUNDINGS * tolerance.epsilon(case.x.dtype), np.abs(case.rows).max()
    tolerance.close(statistics.batch_mean, s.mean_B, unit * size, "batch mean")
    tolerance.close(statistics.batch_var, s.var_B, unit * size**2, "batch variance")
    tolerance.close(statistics.feature_mean, s.mean_F, unit * size, "feature mean")
    tolerance.close(statistics.feature_var, s.var_F, unit * size**2, "feature variance")

    rows_dy = case.to_rows(dy).double().numpy()
    wanted = oracle.train_backward(case.rows, rows_dy, case.affine[0], per_position=case.per_position, **case.options)
    bounds = tolerance.gradient(case.rows, wanted[0], rows_dy, *spread, case.affine[0], case.x.dtype, **case.options)
    tolerance.close(case.to_rows(gradients[0]), wanted[0], bounds[0], "dx")
    rest = iter(gradients[1:])
    if case.weight is not None:
        tolerance.close(next(rest), wanted[1], bounds[1], "dgamma")
    if case.bias is not None:
        tolerance.close(next(rest), wanted[2], bounds[2], "dbeta")


@pytest.fixture
def poisoned(monkeypatch):
    """Fresh memory holds NaN."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


@pytest.mark.parametrize("processors", [1, 3])
def test_ragged_shapes_layouts_and_types(processors, monkeypatch, poisoned):
    """With three processors samples are split into runs wherever there are fewer positions than that."""
    monkeypatch.setattr(kernels, "_processors", lambda device: processors)

    @settings(max_examples=25)
    @given(cases(dtypes=DTYPES, masked=False))
    def check(case):
        compare(case)

    check()


@pytest.mark.parametrize(
    ("shape", "channel_dim", "per_position", "processors"),
    [
        ((40, 2, 513), -1, True, 8),  # split, features not a power of two
        ((37, 300), 1, True, 4),  # dense, split
        ((130, 64), 1, True, 1),  # many tiles in one program
        ((6, 24, 5, 5), 1, True, 1),  # positions side by side
        ((6, 24, 5, 5), 1, False, 2),  # pooled
        ((3, 70, 6), -1, True, 1),  # positions packed
    ],
)
def test_every_kernel_and_tile(shape, channel_dim, per_position, processors, monkeypatch, poisoned):
    monkeypatch.setattr(kernels, "_processors", lambda device: processors)
    d = shape[channel_dim]
    compare(
        Case(
            torch.randn(shape) * 3 + 7,
            None,
            torch.randn(d),
            torch.randn(d),
            channel_dim,
            per_position,
            1e-4,
            1e-4,
            True,
        )
    )


def test_mean_2000_deviation_1(poisoned):
    compare(Case(torch.randn(64, 6) + 2000, None, torch.ones(6), None, 1, True, 1e-4, 1e-4, True))


def test_an_outlier_among_the_first_samples(poisoned):
    """Columns are summed around the mean of their first entries: the worst that can be is one that is far off."""
    x = torch.randn(200, 64)
    x[0] += 1000
    compare(Case(x, None, torch.ones(64), None, 1, True, 1e-4, 1e-4, True))


def test_gradients_are_the_same_bits_each_time():
    case = Case(torch.randn(20, 33, 6), None, torch.randn(33), torch.randn(33), 1, True, 1e-4, 1e-4, True)
    dy = torch.randn(20, 33, 6)
    found = []
    for _ in range(2):
        x, case.weight = case.x.clone().requires_grad_(), case.weight.detach().requires_grad_()
        found.append(torch.autograd.grad(run(case, x)[0], [x, case.weight], dy))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("x", [torch.randn(4, 5, 3), torch.randn(4, 10, 3)[:, ::2]], ids=["dense", "with gaps"])
def test_second_derivatives_are_those_of_the_native_path(x):
    case = Case(x, None, torch.randn(5), torch.randn(5), 1, True, 1e-4, 1e-4, True)
    case.weight.requires_grad_()
    results = []
    for engine in (kernels, native):
        x = case.x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(run(case, x, engine)[0].pow(3).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), [x, case.weight]))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)  # float32, twice through 1 / deviation


def test_an_input_with_gaps_or_repetitions():
    wide = torch.randn(8, 12, 6)
    for x in (wide[:, ::2], wide[::2, :6], torch.randn(4, 1, 3).expand(4, 6, 3)):
        compare(Case(x, None, torch.randn(6), None, 1, True, 1e-4, 1e-4, True))
