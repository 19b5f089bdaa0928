"""The grouped layer with pooled batch statistics on a GPU: training and inference by the kernels in ``affine``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _coefficients, formula
from .._autograd import differentiate
from .._spec import Spec
from ..config import StatisticsConfig
from ..formula import Moments, Statistics
from . import affine
from .plan import Launch, Plan, Shape, plan, power_of_two
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """``y``, the planes and batch statistics that ``join`` wrote, and counts under a mask.

    With ``remember`` the population is updated.
    """
    planned = _plan(x, gamma, beta, mask, channel_dim, spec, residual, activation)
    if planned is None:
        x = x.movedim(channel_dim, -1).contiguous().movedim(-1, channel_dim)
        planned = _plan(x, gamma, beta, mask, channel_dim, spec, residual, activation)
        assert planned is not None
    return _Train.apply(  # type: ignore[no-untyped-call,no-any-return]
        x, gamma, beta, residual, mask, channel_dim, spec, planned, remember, activation
    )


def statistics(planes: Tensor, batch: Tensor, counts: Tensor | None, groups: int) -> Statistics:
    """The five statistics of a mini-batch, from what ``train`` returns."""
    mean, var = planes[0], planes[1]
    m = len(mean) if counts is None else (counts.sum(0) > 0).sum().clamp(min=1)
    inverse_m = mean.new_full((), 1 / m) if isinstance(m, int) else 1 / m.to(mean.dtype)
    return Statistics(*batch, *formula.feature_statistics(torch, Moments(mean, var, None), groups), inverse_m)


def measured(x: Tensor, mask: Tensor | None, planned: Plan, launch: str = "__call__") -> tuple[Tensor, Tensor | None]:
    """What ``measure`` writes: partial results, and counts under a mask."""
    n, c, p, _ = planned.shape
    partial = torch.empty(2, planned.splits, n, c, dtype=torch.float32, device=x.device)
    counts = None if mask is None else torch.empty(planned.splits, n, dtype=torch.float32, device=x.device)
    getattr(planned.measure, launch)(x, mask, partial, counts, n, c, p, planned.run, planned.splits)
    return partial, counts


def joined(
    partial: Tensor, counts: Tensor | None, gamma: Tensor | None, beta: Tensor | None, spec: Spec, planned: Plan,
    launch: str = "__call__",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What ``join`` writes: planes, batch statistics, and feature statistics averaged over samples."""
    n, c, p, _ = planned.shape
    planes = torch.empty(4, n, c, dtype=torch.float32, device=partial.device)
    batch = torch.empty(2, c, dtype=torch.float32, device=partial.device)
    features = torch.empty(2, planned.groups, dtype=torch.float32, device=partial.device)
    scale = formula.weights(0.0, 0.0, c, spec.dim_scale)[0]
    getattr(planned.join, launch)(
        partial, counts, gamma, beta, planes, batch, features, n, c, p, planned.run, planned.splits, planned.groups,
        spec.mix_eps, scale, spec.eps,
    )  # fmt: skip
    return planes, batch, features


def _update(batch: Tensor, features: Tensor, counts: Tensor | None, remember: Remembered, planned: Plan) -> None:
    if remember is None:
        return
    population, momentum = remember
    n, c, p, _ = planned.shape
    kept = buffers(population)
    written(kept)
    launch = planned.average if momentum is None else planned.update
    launch(batch, features, counts, *kept, n, c, p, planned.splits, planned.groups, momentum or 0.0)


class _Train(torch.autograd.Function):
    """Keeps the input and small statistics for backward; a second derivative goes through plain operators."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        residual: Tensor | None,
        mask: Tensor | None,
        channel_dim: int,
        spec: Spec,
        planned: Plan,
        remember: Remembered,
        activation: str | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        n, c, p, _ = planned.shape
        x, real = _aligned(x), _as_bytes(mask)
        partial, counts = measured(x, real, planned)
        planes, batch, features = joined(partial, counts, gamma, beta, spec, planned)
        _update(batch, features, counts, remember, planned)
        y = torch.empty_like(x)
        beside = None if residual is None else _like(residual, x)
        planned.apply(x, y, beside, real, planes, n, c, p, planned.run, planned.splits)
        ctx.rest = mask, channel_dim, spec, activation
        ctx.planned = planned
        kept = beside if activation is not None else None
        ctx.save_for_backward(x, gamma, beta, residual if kept is None else kept, real, planes, batch, counts)
        ctx.mark_non_differentiable(planes, batch, *([] if counts is None else [counts]))
        ctx.set_materialize_grads(False)
        return y, planes, batch, counts

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 10
        x, gamma, beta, residual, real, planes, batch, counts = ctx.saved_tensors
        mask, channel_dim, spec, activation = ctx.rest
        if torch.is_grad_enabled():
            return *differentiate(_plain, (x, gamma, beta, residual), ctx, dy), *[None] * 6
        planned: Plan = ctx.planned
        n, c, p, _ = planned.shape
        dy = _like(dy, x)
        beside = residual if activation is not None else None
        partial = torch.empty(2, planned.splits, n, c, dtype=torch.float32, device=x.device)
        planned.measure_backward(x, dy, beside, real, planes, partial, n, c, p, planned.run, planned.splits)
        coefficients, gradients = joined_backward(partial, counts, gamma, planes, batch, spec, planned)
        dx = torch.empty_like(x)
        d_residual = torch.empty_like(x) if ctx.needs_input_grad[3] and activation is not None else None
        planned.apply_backward(
            x, dy, beside, dx, d_residual, real, planes, coefficients, n, c, p, planned.run, planned.splits
        )
        if ctx.needs_input_grad[3] and activation is None:
            d_residual = dy if mask is None else torch.where(mask.unsqueeze(channel_dim), dy, 0)
        d_gamma = None if gamma is None else gradients[0].to(gamma.dtype)
        d_beta = None if beta is None else gradients[1].to(beta.dtype)
        return dx, d_gamma, d_beta, d_residual, *[None] * 6


def joined_backward(
    partial: Tensor, counts: Tensor | None, gamma: Tensor | None, planes: Tensor, batch: Tensor, spec: Spec,
    planned: Plan, launch: str = "__call__",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What ``join_backward`` writes: ``c1`` and ``c0``, and the gradients of gamma and beta."""
    n, c, p, _ = planned.shape
    coefficients = torch.empty(2, n, c, dtype=torch.float32, device=partial.device)
    gradients = torch.empty(2, c, dtype=torch.float32, device=partial.device)
    scale = formula.weights(0.0, 0.0, c, spec.dim_scale)[0]
    getattr(planned.join_backward, launch)(
        partial, counts, gamma, planes, batch, coefficients, gradients, n, c, p, planned.splits, planned.groups,
        spec.mix_eps, scale, spec.eps,
    )  # fmt: skip
    return coefficients, gradients


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
    planned = _plan(x, gamma, beta, mask, channel_dim, spec, residual, activation)
    if planned is None:
        x = x.movedim(channel_dim, -1).contiguous().movedim(-1, channel_dim)
        planned = _plan(x, gamma, beta, mask, channel_dim, spec, residual, activation)
    normalized: Tensor = _Infer.apply(  # type: ignore[no-untyped-call]
        x, gamma, beta, residual, mask, channel_dim, spec, population, config, activation, planned
    )
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
        mask: Tensor | None,
        channel_dim: int,
        spec: Spec,
        population: Population,
        config: StatisticsConfig,
        activation: str | None,
        planned: Plan,
    ) -> Tensor:
        n, c, p, _ = planned.shape
        x, real = _aligned(x), _as_bytes(mask)
        partial, counts = None, None
        if config.uses_batch or config.uses_features or mask is not None:
            partial, counts = measured(x, real, planned)
        planes = torch.empty(4, n, c, dtype=torch.float32, device=x.device)
        scale = formula.weights(0.0, 0.0, c, spec.dim_scale)[0]
        bits = int("".join("1" if letter == "T" else "0" for letter in str(config)), 2)
        planned.join_inference(bits)(
            partial, counts, gamma, beta, planes, *buffers(population)[:6], n, c, p, planned.run, planned.splits,
            planned.groups, spec.mix_eps, scale, spec.eps,
        )  # fmt: skip
        y = torch.empty_like(x)
        beside = None if residual is None else _like(residual, x)
        planned.apply(x, y, beside, real, planes, n, c, p, planned.run, planned.splits)
        ctx.rest = mask, channel_dim, spec, population, config, activation
        ctx.save_for_backward(x, gamma, beta, residual, *population.buffers())  # so that a change of it is noticed
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, residual, *_ = ctx.saved_tensors
        return *differentiate(_plain_inference, (x, gamma, beta, residual), ctx, dy), *[None] * 7


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


@torch.library.triton_op("bln::grouped_join", mutates_args={})
def grouped_join(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    channel_dim: int,
    groups: int,
    eps: float,
    mix_eps: float,
    dim_scale: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``measure`` and ``join`` write: planes, batch and averaged feature statistics, and counts under a mask."""
    planned = _traced_plan(x, channel_dim, groups, mask is not None)
    spec = Spec(groups, False, eps, mix_eps, dim_scale)
    partial, counts = measured(x, mask, planned, "traced")
    planes, batch, features = joined(partial, counts, gamma, beta, spec, planned, "traced")
    return planes, batch, features, partial.new_empty(0) if counts is None else counts


@torch.library.triton_op("bln::grouped_join_backward", mutates_args={})
def grouped_join_backward(
    x: Tensor,
    dy: Tensor,
    gamma: Tensor | None,
    mask: Tensor | None,
    planes: Tensor,
    batch: Tensor,
    counts: Tensor,
    channel_dim: int,
    groups: int,
    eps: float,
    mix_eps: float,
    dim_scale: bool,
) -> tuple[Tensor, Tensor]:
    """What ``measure_backward`` and ``join_backward`` write: ``c1`` and ``c0``, gradients of gamma and beta."""
    planned = _traced_plan(x, channel_dim, groups, mask is not None)
    n, c, p, _ = planned.shape
    spec = Spec(groups, False, eps, mix_eps, dim_scale)
    partial = torch.empty(2, planned.splits, n, c, dtype=torch.float32, device=x.device)
    planned.measure_backward.traced(x, dy, None, mask, planes, partial, n, c, p, planned.run, planned.splits)
    known = counts if mask is not None else None
    return joined_backward(partial, known, gamma, planes, batch, spec, planned, "traced")


@torch.library.triton_op(
    "bln::grouped_update",
    mutates_args={"batch_mean", "batch_var", "feature_mean", "feature_var", "inverse_m", "updates", "samples"},
)
def grouped_update(
    batch: Tensor,
    features: Tensor,
    counts: Tensor,
    batch_mean: Tensor,
    batch_var: Tensor,
    feature_mean: Tensor,
    feature_var: Tensor,
    inverse_m: Tensor,
    updates: Tensor,
    samples: Tensor,
    n: int,
    p: int,
    masked: bool,
    momentum: float | None,
) -> None:
    """Average the population with a mini-batch."""
    c, groups = batch.shape[1], features.shape[1]
    constants = {"AVERAGE": momentum is None, "MASKED": masked, "BLOCK": min(1024, power_of_two(c))}
    Launch(affine.update, 1, constants, 4).traced(
        batch, features, counts if masked else None, batch_mean, batch_var, feature_mean, feature_var, inverse_m,
        updates, samples, n, c, p, counts.shape[0] if masked else 1, groups, momentum or 0.0,
    )  # fmt: skip


def train_traced(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    channel_dim: int,
    spec: Spec,
    remember: Remembered = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """``train`` for a compiler: the reductions are operators that it sees through, the maps plain operators."""
    if Shape.of(x, channel_dim) is None:
        x = x.movedim(channel_dim, -1).contiguous().movedim(-1, channel_dim)
    detached = (None if t is None else t.detach() for t in (x, gamma, beta))
    real = _as_bytes(mask)
    planes, batch, features, counts = torch.ops.bln.grouped_join(
        *detached, real, channel_dim, spec.groups, spec.eps, spec.mix_eps, spec.dim_scale
    )
    if remember is not None:
        population, momentum = remember
        n = x.shape[0]
        p = x.numel() // (n * x.shape[channel_dim])
        kept = (getattr(population, name) for name in Statistics._fields)
        torch.ops.bln.grouped_update(
            batch, features, counts, *kept, population.updates, population.samples, n, p, mask is not None, momentum
        )
    y = _Traced.apply(x, gamma, beta, mask, planes, batch, counts, channel_dim, spec)  # type: ignore[no-untyped-call]
    return y, planes, batch, counts if mask is not None else None


def _beside(value: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    return value.reshape(value.shape[0], *[1] * (channel_dim - 1), value.shape[1], *[1] * (x.dim() - 1 - channel_dim))


class _Traced(torch.autograd.Function):
    """``a x + b`` in plain operators, its derivative by the reduction and another such map."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        mask: Tensor | None,
        planes: Tensor,
        batch: Tensor,
        counts: Tensor,
        channel_dim: int,
        spec: Spec,
    ) -> Tensor:
        ctx.save_for_backward(x, gamma, mask, planes, batch, counts)
        ctx.channel_dim, ctx.spec, ctx.with_beta = channel_dim, spec, beta is not None
        a, b = (_beside(plane, x, channel_dim) for plane in (planes[2], planes[3]))
        return _coefficients.hide(a * x.float() + b, mask, channel_dim).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, mask, planes, batch, counts = ctx.saved_tensors
        channel_dim, spec = ctx.channel_dim, ctx.spec
        if dy.stride() != x.stride():
            dy = torch.empty_like(x).copy_(dy)
        coefficients, gradients = torch.ops.bln.grouped_join_backward(
            x, dy, gamma, _as_bytes(mask), planes, batch, counts, channel_dim, spec.groups, spec.eps, spec.mix_eps,
            spec.dim_scale,
        )  # fmt: skip
        a, c1, c0 = (_beside(value, x, channel_dim) for value in (planes[2], coefficients[0], coefficients[1]))
        dx = _coefficients.hide(a * dy.float() + c1 * x.float() + c0, mask, channel_dim).to(x.dtype)
        d_gamma = None if gamma is None else gradients[0].to(gamma.dtype)
        return dx, d_gamma, gradients[1].clone() if ctx.with_beta else None, *[None] * 6
