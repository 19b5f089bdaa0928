"""The grouped layer with pooled batch statistics on a GPU: training and inference by the kernels in ``affine``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _coefficients
from .._autograd import differentiate, recomputing
from .._spec import Spec
from ..config import StatisticsConfig
from ..formula import Statistics
from .plan import Plan, Shape
from .population import written
from .slabs import on_its_device

if TYPE_CHECKING:
    from ..layer import BatchLayerNorm
    from ..population import Population

    Remembered = tuple[Population, float | None] | None  # a population and its momentum

FEWEST_POSITIONS = 4
"""With fewer, a pair of coefficients for each sample and feature would be more to move than the input."""


def usable(x: Tensor, channel_dim: int) -> bool:
    """Whether the kernels are for inputs of this shape."""
    values = x.numel() // x.shape[0]
    return FEWEST_POSITIONS * x.shape[channel_dim] <= values < 2**31


class Call(NamedTuple):
    """What a call needs besides tensors. One serves all calls with such tensors."""

    plan: Plan
    spec: Spec
    channel_dim: int
    activation: str | None
    device: torch.device


_calls: dict[Any, Call | None] = {}
_MOST = 4096


def _call(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    residual: Tensor | None = None, activation: str | None = None, known: bool = False,
) -> Call | None:  # fmt: skip
    """The call for such tensors; ``None`` where the input lies in memory as no kernel reads it.

    With ``known``, only one that was asked for before.
    """
    key = (
        x.shape, x.stride(), x.dtype, x.device, spec, channel_dim, mask is None, residual is None, activation,
        gamma if gamma is None else gamma.dtype, beta if beta is None else beta.dtype,
    )  # fmt: skip
    found = _calls.get(key, _calls)
    if found is _calls:
        if known:
            return None
        if len(_calls) >= _MOST:
            _calls.clear()
        shape, found = Shape.of(x, channel_dim), None
        if shape is not None:
            plan = Plan(shape, x.element_size(), spec, mask is not None, activation)
            found = Call(plan, spec, channel_dim, activation, x.device)
        _calls[key] = found
    return found  # type: ignore[return-value]


def _prepared(x: Tensor, *rest: Any) -> tuple[Tensor, Call]:
    """The input as a plan can read it, with features last if need be, and the call."""
    call = _call(x, *rest)
    if call is None:
        channel_dim = rest[3]
        x = x.movedim(channel_dim, -1).contiguous().movedim(-1, channel_dim)
        call = _call(x, *rest)
        assert call is not None
    return x, call


def _aligned(x: Tensor) -> Tensor:
    """A tensor whose first value lies as launches were compiled for."""
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.preserve_format)


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def _stream(device: torch.device) -> int:
    """The stream to launch on."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def train_layer(layer: BatchLayerNorm, x: Tensor) -> Tensor | None:
    """The layer's training forward of an ordinary input; ``None`` where it has to be looked at more closely.

    What is looked up here has been checked when it was first prepared. Attributes of a module are found in Python,
    one by one: that takes longer than all else here, so dictionaries are read.
    """
    if type(x) is not Tensor or layer._group is not None or torch._C._are_functorch_transforms_active():
        return None
    parameters, population = layer._parameters, layer._modules["population"]
    gamma, beta = parameters["weight"], parameters["bias"]
    call = _call(x, gamma, beta, None, layer.channel_dim % x.dim(), layer.spec, known=True)
    if call is None or call.plan.features != layer.num_features or call.device.index != torch._C._cuda_getDevice():
        return None
    remember: Any = None if recomputing() else (population, layer.momentum)
    y: Tensor = _Train.apply(x, gamma, beta, None, None, call, remember, None)  # type: ignore[no-untyped-call]
    return y


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
    found: list[Tensor] | None = None,
) -> Tensor:
    """Algorithm 1 of ``x``; ``g(BLN(x) + residual)`` if asked.

    With ``remember`` the population is updated; to ``found`` the statistics that ``join`` wrote are added.
    """
    x, call = _prepared(x, gamma, beta, mask, channel_dim, spec, residual, activation)
    y: Tensor = _Train.apply(x, gamma, beta, residual, mask, call, remember, found)  # type: ignore[no-untyped-call]
    return y


def train_with_statistics(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec
) -> tuple[Tensor, Statistics]:
    """``y`` and the five statistics of the mini-batch."""
    if torch.compiler.is_compiling():
        y, found = train_traced(x, gamma, beta, mask, channel_dim, spec)
    else:
        kept: list[Tensor] = []
        y = train(x, gamma, beta, mask, channel_dim, spec, found=kept)
        found = kept[0]
    assert spec.groups is not None
    n, c = x.shape[0], x.shape[channel_dim]
    features, groups = _parts(found, 4, n, c, spec.groups)
    return y, Statistics(features[0], features[1], groups[0], groups[1], found[4 * (c + n * spec.groups)])


def measured(
    x: Tensor, mask: Tensor | None, plan: Plan, stream: int, traced: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Launch ``measure``: the buffer of statistics, with partial results behind it, and counts under a mask."""
    found = torch.empty(plan.statistics, dtype=torch.float32, device=x.device)
    counts = None if plan.counts is None else torch.empty(plan.counts, dtype=torch.float32, device=x.device)
    launch = plan.measure.traced if traced else plan.measure
    launch(stream, x, mask, found, counts)
    return found, counts


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
        call: Call,
        remember: Remembered,
        kept: list[Tensor] | None,
    ) -> Tensor:
        plan, stream = call.plan, _stream(call.device)
        x, real = _aligned(x), _as_bytes(mask)
        found, counts = measured(x, real, plan, stream)
        if remember is None:
            plan.join(stream, found, counts, *_NO_POPULATION, 0.0)
        else:
            population: list[Any] = list(remember[0]._buffers.values())
            written(population)
            plan.join_updating(stream, found, counts, *population, -1.0 if remember[1] is None else remember[1])
        y = torch.empty_like(x)
        beside = None if residual is None else _like(residual, x)
        plan.apply(stream, x, y, beside, real, found, gamma, beta)
        ctx.call, ctx.masks = call, (mask, real, counts)
        ctx.save_for_backward(x, gamma, beta, beside if call.activation is not None else None, found)
        if kept is not None:
            kept.append(found)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        x, gamma, beta, residual, found = ctx.saved_tensors
        mask, real, counts = ctx.masks
        wanted = ctx.needs_input_grad[3]
        if torch.is_grad_enabled():
            if wanted and residual is None:
                residual = torch.zeros_like(x, requires_grad=True)  # it is added: its value does not matter
            ctx.rest = mask, call.channel_dim, call.spec, call.activation
            return *differentiate(_plain, (x, gamma, beta, residual), ctx, dy), *[None] * 4
        plan, stream = call.plan, _stream(call.device)
        dy = _like(dy, x)
        shares = torch.empty(plan.shares, dtype=torch.float32, device=x.device)
        plan.measure_backward(stream, x, dy, residual, real, found, gamma, beta, shares)
        gradients = torch.empty((2, plan.features), dtype=torch.float32, device=x.device)
        plan.join_backward(stream, shares, counts, found, gamma, gradients)
        dx = torch.empty_like(x)
        d_residual = torch.empty_like(x) if wanted and call.activation is not None else None
        plan.apply_backward(stream, x, dy, residual, dx, d_residual, real, found, gamma, beta, shares)
        if wanted and d_residual is None:
            d_residual = _coefficients.hide(dy, mask, call.channel_dim)
        d_gamma, d_beta = gradients.unbind()
        return dx, _typed(d_gamma, gamma), _typed(d_beta, beta), d_residual, None, None, None, None


_NO_POPULATION = (None,) * 7


def _typed(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    """A gradient in its parameter's type."""
    if parameter is None:
        return None
    return gradient if parameter.dtype == torch.float32 else gradient.to(parameter.dtype)


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
    x, call = _prepared(x, gamma, beta, mask, channel_dim, spec, residual, activation)
    y: Tensor = _Infer.apply(x, gamma, beta, residual, mask, call, population, config)  # type: ignore[no-untyped-call]
    return y


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
        call: Call,
        population: Population,
        config: StatisticsConfig,
    ) -> Tensor:
        plan, stream, kept = call.plan, _stream(call.device), list(population._buffers.values())
        x, real = _aligned(x), _as_bytes(mask)
        if config.uses_batch or config.uses_features or real is not None:
            found, counts = measured(x, real, plan, stream)
        else:
            found, counts = torch.empty(plan.statistics, dtype=torch.float32, device=x.device), None
        bits = int("".join("1" if letter == "T" else "0" for letter in str(config)), 2)
        plan.join_inference[bits](stream, found, counts, *kept[:6])
        y = torch.empty_like(x)
        beside = None if residual is None else _like(residual, x)
        plan.apply(stream, x, y, beside, real, found, gamma, beta)
        ctx.rest = mask, call.channel_dim, call.spec, population, config, call.activation
        ctx.save_for_backward(x, gamma, beta, residual, *kept)  # so that a change of the population is noticed
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, residual, *_ = ctx.saved_tensors
        return *differentiate(_plain_inference, (x, gamma, beta, residual), ctx, dy), *[None] * 4


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


def _traced_plan(x: Tensor, channel_dim: int, spec: Spec, masked: bool) -> Plan:
    shape = Shape.of(x, channel_dim)
    assert shape is not None
    return Plan(shape, x.element_size(), spec, masked, None)


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
    momentum: float,
    channel_dim: int,
    groups: int,
    eps: float,
    mix_eps: float,
    dim_scale: bool,
) -> tuple[Tensor, Tensor]:
    """Launch ``measure`` and ``join``: the statistics, and counts under a mask."""
    plan = _traced_plan(x, channel_dim, Spec(groups, False, eps, mix_eps, dim_scale), mask is not None)
    found, counts = measured(x, mask, plan, 0, traced=True)
    plan.join.traced(
        0, found, counts, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples, momentum
    )
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
) -> tuple[Tensor, Tensor]:
    """Launch ``measure_backward`` and ``join_backward``: shares of ``c1`` and ``c0``, gradients of gamma and beta."""
    plan = _traced_plan(x, channel_dim, Spec(groups, False, eps, mix_eps, dim_scale), mask is not None)
    shares = torch.empty(plan.shares, dtype=torch.float32, device=x.device)
    plan.measure_backward.traced(0, x, dy, None, mask, found, None, None, shares)
    gradients = torch.empty((2, plan.features), dtype=torch.float32, device=x.device)
    plan.join_backward.traced(0, shares, counts if mask is not None else None, found, gamma, gradients)
    return shares, gradients


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
        x.detach(), _as_bytes(mask), *kept, -1.0 if momentum is None else momentum, channel_dim, spec.groups,
        spec.eps, spec.mix_eps, spec.dim_scale,
    )  # fmt: skip
    y = _Traced.apply(x, gamma, beta, mask, found, counts, channel_dim, spec)  # type: ignore[no-untyped-call]
    return y, found


def _over_positions(feature: Tensor, group: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    """The sum of a value for each feature and one for each sample and group, in a shape that meets ``x``."""
    n, groups = group.shape
    each = feature.view(1, groups, -1) + group.unsqueeze(-1)
    return each.reshape(n, *[1] * (channel_dim - 1), feature.shape[0], *[1] * (x.dim() - 1 - channel_dim))


def _parts(found: Tensor, count: int, n: int, c: int, groups: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A few values for each feature, and for each sample and group, from a buffer where they stand in this order."""
    features, rest = found[: count * c], found[count * c : count * (c + n * groups)]
    return features.view(count, c).unbind(), rest.view(count, n, groups).unbind()


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
        features, groups = _parts(found, 4, x.shape[0], x.shape[channel_dim], spec.groups)
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
        shares, gradients = torch.ops.bln.grouped_join_backward(
            x, dy, gamma, _as_bytes(mask), found, counts, channel_dim, spec.groups, spec.eps, spec.mix_eps,
            spec.dim_scale,
        )  # fmt: skip
        n, c = x.shape[0], x.shape[channel_dim]
        features, groups = _parts(found, 4, n, c, spec.groups)
        a = _over_positions(features[2], groups[2], x, channel_dim)
        if gamma is not None:
            a = gamma.float().view(-1, *[1] * (x.dim() - 1 - channel_dim)) * a
        (p1, p0), (q1, q0) = _parts(shares, 2, n, c, spec.groups)
        c1, c0 = (_over_positions(p, q, x, channel_dim) for p, q in ((p1, q1), (p0, q0)))
        dx = _coefficients.hide(a * dy.float() - c1 * x.float() + c0, mask, channel_dim).to(x.dtype)
        d_gamma, d_beta = gradients.unbind()
        return dx, _typed(d_gamma, gamma), d_beta if ctx.with_beta else None, *[None] * 5
