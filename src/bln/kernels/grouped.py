"""The grouped layer with pooled batch statistics on a GPU: training and inference by the kernels in ``affine``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _coefficients, formula
from .._autograd import differentiate
from .._spec import Spec
from ..config import StatisticsConfig
from ..formula import Statistics
from .plan import Plan, Shape, plan
from .population import buffers, written
from .slabs import on_its_device

if TYPE_CHECKING:
    from ..population import Population

    Remembered = tuple[Population, float | None] | None  # a population and its momentum

FEWEST_POSITIONS = 4
"""With fewer, a pair of coefficients for each sample and feature would be more to move than the input."""


def usable(x: Tensor, channel_dim: int) -> bool:
    """Whether the kernels are for inputs of this shape."""
    values = x.numel() // x.shape[0]
    return FEWEST_POSITIONS * x.shape[channel_dim] <= values < 2**31


def _plan(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    residual: Tensor | None = None, activation: str | None = None,
) -> Plan | None:  # fmt: skip
    """The launches for such tensors; ``None`` where the input lies in memory as none of them reads it."""
    key = (
        x.shape, x.stride(), x.dtype, x.device, channel_dim, spec.groups, mask is None, residual is None, activation,
        gamma if gamma is None else gamma.dtype, beta if beta is None else beta.dtype,
    )  # fmt: skip
    assert spec.groups is not None
    groups = spec.groups

    def make() -> Plan | None:
        shape = Shape.of(x, channel_dim)
        return None if shape is None else Plan(shape, x.element_size(), groups, mask is not None, activation)

    return plan(key, make)


def _aligned(x: Tensor) -> Tensor:
    """A tensor whose first value lies as launches were compiled for."""
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.preserve_format)


class Measured(NamedTuple):
    """What ``measure`` writes: partial results, counts under a mask, and room for the statistics."""

    partial: Tensor
    counts: Tensor | None
    found: Tensor


class Call:
    """What a call needs besides tensors that have gradients."""

    def __init__(
        self, planned: Plan, spec: Spec, channel_dim: int, mask: Tensor | None, activation: str | None
    ) -> None:
        self.planned, self.spec, self.channel_dim = planned, spec, channel_dim
        self.mask, self.activation = mask, activation
        self.numbers = _numbers(planned, spec)
        self.remember: Remembered = None
        self.found: Any = None  # the statistics, once there are some


def _called(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    residual: Tensor | None, activation: str | None,
) -> tuple[Tensor, Call]:  # fmt: skip
    """The input as a plan can read it, with features last if need be, and the call."""
    planned = _plan(x, gamma, beta, mask, channel_dim, spec, residual, activation)
    if planned is None:
        x = x.movedim(channel_dim, -1).contiguous().movedim(-1, channel_dim)
        planned = _plan(x, gamma, beta, mask, channel_dim, spec, residual, activation)
        assert planned is not None
    return x, Call(planned, spec, channel_dim, mask, activation)


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


@on_its_device
def train(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    channel_dim: int,
    spec: Spec,
    remember: Remembered = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Call]:
    """``y``, and the call with the statistics that ``join`` wrote. With ``remember`` the population is updated."""
    x, call = _called(x, gamma, beta, mask, channel_dim, spec, residual, activation)
    call.remember = remember
    return _Train.apply(x, gamma, beta, residual, call), call  # type: ignore[no-untyped-call]


def train_with_statistics(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec
) -> tuple[Tensor, Statistics]:
    """``y`` and the five statistics of the mini-batch."""
    if torch.compiler.is_compiling():
        y, found = train_traced(x, gamma, beta, mask, channel_dim, spec)
    else:
        y, call = train(x, gamma, beta, mask, channel_dim, spec)
        found = call.found
    assert spec.groups is not None
    features, groups = _parts(found, x.shape[0], x.shape[channel_dim], spec.groups)
    return y, Statistics(features[0], features[1], groups[0], groups[1], found[-3])


def measured(x: Tensor, mask: Tensor | None, planned: Plan, launch: str = "__call__") -> Measured:
    """Launch ``measure``; room for the statistics comes with its results."""
    partial = torch.empty(planned.partial, dtype=torch.float32, device=x.device)
    found = torch.empty(planned.statistics, dtype=torch.float32, device=x.device)
    counts = None if planned.counts is None else torch.empty(planned.counts, dtype=torch.float32, device=x.device)
    getattr(planned.measure, launch)(x, mask, partial, counts, found, *planned.sizes)
    return Measured(partial, counts, found)


def _numbers(planned: Plan, spec: Spec) -> tuple[float, float, float]:
    """What the kernels know as ``mix_eps``, ``scale`` and ``eps``."""
    return spec.mix_eps, formula.weights(0.0, 0.0, planned.sizes[1], spec.dim_scale)[0], spec.eps


class _Train(torch.autograd.Function):
    """Keeps the input and small statistics for backward; a second derivative goes through plain operators."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        residual: Tensor | None,
        call: Call,
    ) -> Tensor:
        planned = call.planned
        x, real = _aligned(x), _as_bytes(call.mask)
        partial, counts, found = measured(x, real, planned)
        if call.remember is None:
            planned.join(partial, counts, found, *[None] * 7, *planned.sizes, *call.numbers, 0.0)
        else:
            population, momentum = call.remember
            kept = buffers(population)
            written(kept)
            planned.join_updating(
                partial, counts, found, *kept, *planned.sizes, *call.numbers, -1.0 if momentum is None else momentum
            )
        y = torch.empty_like(x)
        residual = None if residual is None else _like(residual, x)
        planned.apply(x, y, residual, real, found, gamma, beta, *planned.sizes)
        ctx.call, ctx.with_residual = call, residual is not None
        ctx.save_for_backward(x, gamma, beta, residual if call.activation is not None else None, real, found, counts)
        call.found = found
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        x, gamma, beta, residual, real, found, counts = ctx.saved_tensors
        if torch.is_grad_enabled():
            if ctx.with_residual and residual is None:
                residual = torch.zeros_like(x, requires_grad=True)  # it is added: its value does not matter
            return *differentiate(_plain, (x, gamma, beta, residual), _Rest(ctx, call), dy), None
        planned = call.planned
        dy = _like(dy, x)
        partial = torch.empty(planned.partial, dtype=torch.float32, device=x.device)
        planned.measure_backward(x, dy, residual, real, found, gamma, beta, partial, *planned.sizes)
        shares, d_gamma, d_beta = shared(partial, counts, found, gamma, planned, call.numbers)
        dx = torch.empty_like(x)
        wanted = ctx.needs_input_grad[3]
        d_residual = torch.empty_like(x) if wanted and call.activation is not None else None
        planned.apply_backward(x, dy, residual, dx, d_residual, real, found, gamma, beta, shares, *planned.sizes)
        if wanted and d_residual is None:
            d_residual = _coefficients.hide(dy, call.mask, call.channel_dim)
        return dx, _typed(d_gamma, gamma), _typed(d_beta, beta), d_residual, None


class _Rest:
    """What ``differentiate`` asks a context for."""

    def __init__(self, ctx: Any, call: Call) -> None:
        self.needs_input_grad = ctx.needs_input_grad
        self.rest = call.mask, call.channel_dim, call.spec, call.activation


def _typed(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    """A gradient in its parameter's type."""
    return None if parameter is None else gradient.to(parameter.dtype)


def shared(
    partial: Tensor, counts: Tensor | None, found: Tensor, gamma: Tensor | None, planned: Plan,
    numbers: tuple[float, float, float], launch: str = "__call__",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch ``join_backward``: the shares of ``c1`` and ``c0``, the gradients of gamma and beta."""
    n, c, p, _, splits, groups = planned.sizes
    shares = torch.empty(planned.shares, dtype=torch.float32, device=partial.device)
    d_gamma, d_beta = (torch.empty(c, dtype=torch.float32, device=partial.device) for _ in range(2))
    getattr(planned.join_backward, launch)(
        partial, counts, found, gamma, shares, d_gamma, d_beta, n, c, p, splits, groups, *numbers
    )
    return shares, d_gamma, d_beta


def _like(value: Tensor, x: Tensor) -> Tensor:
    """A tensor lying as ``x`` does, and aligned."""
    if value.stride() == x.stride() and value.dtype == x.dtype:
        return _aligned(value)
    return torch.empty_like(x).copy_(value)


def _plain(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    channel_dim: int,
    spec: Spec,
    activation: str | None,
) -> Tensor:
    """The same in operators, in float32."""
    scale, shift = (None if parameter is None else parameter.float() for parameter in (gamma, beta))
    y, _ = _coefficients.train(x.float(), scale, shift, mask, channel_dim, spec)
    return activated(y, residual, mask, channel_dim, activation)


def activated(
    y: Tensor, residual: Tensor | None, mask: Tensor | None, channel_dim: int, activation: str | None
) -> Tensor:
    """Add the residual, then the nonlinearity."""
    y = y if residual is None else y + residual
    y = y if activation is None else getattr(torch.nn.functional, activation)(y)
    return _coefficients.hide(y, mask, channel_dim)


# ---- inference


@on_its_device
def infer(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    channel_dim: int,
    spec: Spec,
    population: Population,
    config: StatisticsConfig,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Algorithm 2 of ``x`` in any configuration."""
    x, call = _called(x, gamma, beta, mask, channel_dim, spec, residual, activation)
    normalized: Tensor = _Infer.apply(x, gamma, beta, residual, population, config, call)  # type: ignore[no-untyped-call]
    return normalized


class _Infer(torch.autograd.Function):
    """Its derivative goes through plain operators."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        residual: Tensor | None,
        population: Population,
        config: StatisticsConfig,
        call: Call,
    ) -> Tensor:
        planned, kept = call.planned, buffers(population)
        x, real = _aligned(x), _as_bytes(call.mask)
        if config.uses_batch or config.uses_features or real is not None:
            partial, counts, found = measured(x, real, planned)
        else:
            partial, counts = None, None
            found = torch.empty(planned.statistics, dtype=torch.float32, device=x.device)
        bits = int("".join("1" if letter == "T" else "0" for letter in str(config)), 2)
        planned.join_inference[bits](partial, counts, found, *kept[:6], *planned.sizes, *call.numbers)
        y = torch.empty_like(x)
        beside = None if residual is None else _like(residual, x)
        planned.apply(x, y, beside, real, found, gamma, beta, *planned.sizes)
        ctx.rest = call.mask, call.channel_dim, call.spec, population, config, call.activation
        ctx.save_for_backward(x, gamma, beta, residual, *kept)  # so that a change of the population is noticed
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, residual, *_ = ctx.saved_tensors
        return *differentiate(_plain_inference, (x, gamma, beta, residual), ctx, dy), *[None] * 3


def _plain_inference(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    channel_dim: int,
    spec: Spec,
    population: Population,
    config: StatisticsConfig,
    activation: str | None,
) -> Tensor:
    """The same in operators, in float32."""
    scale, shift = (None if parameter is None else parameter.float() for parameter in (gamma, beta))
    m: Any = x.shape[0] if mask is None else mask.reshape(x.shape[0], -1).any(1).sum()
    kept = population.statistics((), m)
    y, _ = _coefficients.infer(x.float(), scale, shift, mask, channel_dim, spec, kept, config)
    return activated(y, residual, mask, channel_dim, activation)


# ---- inside of compiled graphs: the compiler launches the kernels itself, and fuses the maps with what is around them


def _traced_plan(x: Tensor, channel_dim: int, groups: int, masked: bool) -> Plan:
    shape = Shape.of(x, channel_dim)
    assert shape is not None
    return Plan(shape, x.element_size(), groups, masked, None)


@torch.library.triton_op(
    "bln::grouped_join",
    mutates_args={"batch_mean", "batch_var", "feature_mean", "feature_var", "inverse_m", "updates", "samples"},
)
def grouped_join(
    x: Tensor,
    mask: Tensor | None,
    batch_mean: Tensor | None,
    batch_var: Tensor | None,
    feature_mean: Tensor | None,
    feature_var: Tensor | None,
    inverse_m: Tensor | None,
    updates: Tensor | None,
    samples: Tensor | None,
    channel_dim: int,
    groups: int,
    eps: float,
    mix_eps: float,
    dim_scale: bool,
    momentum: float,
) -> tuple[Tensor, Tensor]:
    """Launch ``measure`` and ``join``: the statistics, and counts under a mask."""
    planned = _traced_plan(x, channel_dim, groups, mask is not None)
    partial, counts, found = measured(x, mask, planned, "traced")
    numbers = _numbers(planned, Spec(groups, False, eps, mix_eps, dim_scale))
    planned.join.traced(
        partial, counts, found, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples,
        *planned.sizes, *numbers, momentum,
    )  # fmt: skip
    return found, found.new_empty(0) if counts is None else counts


@torch.library.triton_op("bln::grouped_join_backward", mutates_args={})
def grouped_join_backward(
    x: Tensor,
    dy: Tensor,
    gamma: Tensor | None,
    mask: Tensor | None,
    found: Tensor,
    counts: Tensor,
    channel_dim: int,
    groups: int,
    eps: float,
    mix_eps: float,
    dim_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch ``measure_backward`` and ``join_backward``: shares of ``c1`` and ``c0``, gradients of gamma and beta."""
    planned = _traced_plan(x, channel_dim, groups, mask is not None)
    partial = torch.empty(planned.partial, dtype=torch.float32, device=x.device)
    planned.measure_backward.traced(x, dy, None, mask, found, None, None, partial, *planned.sizes)
    numbers = _numbers(planned, Spec(groups, False, eps, mix_eps, dim_scale))
    return shared(partial, counts if mask is not None else None, found, gamma, planned, numbers, "traced")


def train_traced(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    channel_dim: int,
    spec: Spec,
    remember: Remembered = None,
) -> tuple[Tensor, Tensor]:
    """``y`` and the statistics, for a compiler: reductions are operators that it sees through, maps plain operators."""
    if Shape.of(x, channel_dim) is None:
        x = x.movedim(channel_dim, -1).contiguous().movedim(-1, channel_dim)
    kept: tuple[Tensor | None, ...] = (None,) * 7
    momentum: float | None = 0.0
    if remember is not None:
        population, momentum = remember
        kept = (
            population.batch_mean, population.batch_var, population.feature_mean, population.feature_var,
            population.inverse_m, population.updates, population.samples,
        )  # fmt: skip
    found, counts = torch.ops.bln.grouped_join(
        x.detach(), _as_bytes(mask), *kept, channel_dim, spec.groups, spec.eps, spec.mix_eps, spec.dim_scale,
        -1.0 if momentum is None else momentum,
    )  # fmt: skip
    y = _Traced.apply(x, gamma, beta, mask, found, counts, channel_dim, spec)  # type: ignore[no-untyped-call]
    return y, found


def _over_positions(feature: Tensor, group: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    """The sum of a value for each feature and one for each sample and group, in a shape that meets ``x``."""
    n, groups = group.shape
    each = feature.view(1, groups, -1) + group.unsqueeze(-1)
    return each.reshape(n, *[1] * (channel_dim - 1), feature.shape[0], *[1] * (x.dim() - 1 - channel_dim))


def _parts(found: Tensor, n: int, c: int, groups: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Values for each feature, and for each sample and group, that stand one after the other in a buffer."""
    count = (found.shape[0]) // (c + n * groups)
    return found[: count * c].view(count, c).unbind(), found[count * c :][: count * n * groups].view(
        count, n, groups
    ).unbind()


class _Traced(torch.autograd.Function):
    """``a x + b`` in plain operators, its derivative by the reduction and another such map."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        mask: Tensor | None,
        found: Tensor,
        counts: Tensor,
        channel_dim: int,
        spec: Spec,
    ) -> Tensor:
        ctx.save_for_backward(x, gamma, mask, found, counts)
        ctx.channel_dim, ctx.spec, ctx.with_beta = channel_dim, spec, beta is not None
        assert spec.groups is not None
        features, groups = _parts(found, x.shape[0], x.shape[channel_dim], spec.groups)
        a = _over_positions(features[2], groups[2], x, channel_dim)
        b = -_over_positions(features[3], groups[3], x, channel_dim)
        along = -1, *[1] * (x.dim() - 1 - channel_dim)
        if gamma is not None:
            gain = gamma.float().view(along)
            a, b = gain * a, gain * b
        if beta is not None:
            b = b + beta.float().view(along)
        return _coefficients.hide(a * x.float() + b, mask, channel_dim).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, mask, found, counts = ctx.saved_tensors
        channel_dim, spec = ctx.channel_dim, ctx.spec
        if dy.stride() != x.stride():
            dy = torch.empty_like(x).copy_(dy)
        shares, d_gamma, d_beta = torch.ops.bln.grouped_join_backward(
            x, dy, gamma, _as_bytes(mask), found, counts, channel_dim, spec.groups, spec.eps, spec.mix_eps,
            spec.dim_scale,
        )  # fmt: skip
        n, c = x.shape[0], x.shape[channel_dim]
        features, groups = _parts(found, n, c, spec.groups)
        a = _over_positions(features[2], groups[2], x, channel_dim)
        if gamma is not None:
            a = gamma.float().view(-1, *[1] * (x.dim() - 1 - channel_dim)) * a
        (p1, p0), (q1, q0) = _parts(shares, n, c, spec.groups)
        c1, c0 = (_over_positions(p, q, x, channel_dim) for p, q in ((p1, q1), (p0, q0)))
        dx = _coefficients.hide(a * dy.float() - c1 * x.float() + c0, mask, channel_dim).to(x.dtype)
        with_beta = d_beta if ctx.with_beta else None
        return dx, None if gamma is None else d_gamma.to(gamma.dtype), with_beta, *[None] * 5
