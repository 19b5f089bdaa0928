"""The grouped layer with pooled batch statistics on a GPU: training and inference by the kernels in ``affine``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _coefficients
from .._activation import Activation, finish
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


def usable(x: Tensor, channel_dim: int, residual: Tensor | None = None) -> bool:
    """Whether the kernels are for inputs of this shape, and such a residual."""
    values = x.numel() // x.shape[0]
    fits = FEWEST_POSITIONS * x.shape[channel_dim] <= values < 2**31
    return fits and (residual is None or type(residual) in _KINDS)


_KINDS = (Tensor, torch.nn.Parameter)


class Call(NamedTuple):
    """What a call needs besides tensors. One serves all calls with such tensors."""

    plan: Plan
    spec: Spec
    channel_dim: int
    activation: Activation | None
    device: torch.device


_calls: dict[Any, Call | None] = {}
_MOST = 4096


def _call(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    residual: Tensor | None = None, activation: Activation | None = None, known: bool = False,
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


def _prepared(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    residual: Tensor | None, activation: Activation | None,
) -> tuple[Tensor, Tensor | None, Call]:  # fmt: skip
    """The input and the residual as the kernels read them, copied if need be, and the call."""
    if Shape.of(x, channel_dim) is None:
        x = x.movedim(channel_dim, -1).contiguous().movedim(-1, channel_dim)
    x = _aligned(x)
    residual = None if residual is None else _like(residual.expand(x.shape), x)
    call = _call(x, gamma, beta, mask, channel_dim, spec, residual, activation)
    assert call is not None
    return x, residual, call


def _aligned(x: Tensor) -> Tensor:
    """A tensor whose first value lies as launches were compiled for."""
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.preserve_format)


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    """A mask as the kernels read it."""
    return None if mask is None else _aligned(mask.contiguous().view(torch.uint8))


def _stream(device: torch.device) -> int:
    """The stream to launch on."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def train_layer(layer: BatchLayerNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | None:
    """The layer's training forward of an ordinary input; ``None`` where it has to be looked at more closely.

    What is looked up here has been checked when it was first prepared. Attributes of a module are found in Python,
    one by one: that takes longer than all else here, so dictionaries are read.
    """
    if type(x) is not Tensor or x.dim() < 2 or x.data_ptr() % 16 or layer._group is not None:
        return None
    if residual is not None and not _ordinary(residual, x):
        return None
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return None
    parameters, population = layer._parameters, layer.population
    gamma: Any = parameters.get("weight", _calls)
    beta: Any = parameters.get("bias", _calls)
    for parameter in (gamma, beta):
        if parameter is not None and (type(parameter) is not torch.nn.Parameter or not parameter.is_contiguous()):
            return None  # those that are computed, as by parametrizations, are not here at all
    if population.batch_mean.dtype != torch.float32:
        return None
    channel_dim, activation = layer.channel_dim % x.dim(), layer.activation
    call = _call(x, gamma, beta, None, channel_dim, layer.spec, residual, activation, known=True)
    if call is None or call.plan.features != layer.num_features or call.device.index != torch._C._cuda_getDevice():
        return None
    remember: Any = None if recomputing() else (population, layer.momentum)
    residual = None if residual is None else _like(residual, x)
    y: Tensor = _Train.apply(x, gamma, beta, residual, None, call, remember, None)  # type: ignore[no-untyped-call]
    return y


def _ordinary(residual: Tensor, x: Tensor) -> bool:
    """Whether a residual is one that the layer would not refuse."""
    if type(residual) not in _KINDS or residual.shape != x.shape:
        return False
    return residual.is_floating_point() and residual.device == x.device


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
    activation: Activation | None = None,
    found: list[Tensor] | None = None,
) -> Tensor:
    """Algorithm 1 of ``x``; ``g(BLN(x) + residual)`` if asked.

    With ``remember`` the population is updated; to ``found`` the statistics that ``join`` wrote are added.
    """
    x, residual, call = _prepared(x, gamma, beta, mask, channel_dim, spec, residual, activation)
    y: Tensor = _Train.apply(x, gamma, beta, residual, mask, call, remember, found)  # type: ignore[no-untyped-call]
    return y


def _parts(found: Tensor, count: int, n: int, c: int, groups: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A few values for each feature, and for each sample and group, from a buffer where they stand in this order."""
    features, rest = found[: count * c], found[count * c : count * (c + n * groups)]
    return features.view(count, c).unbind(), rest.view(count, n, groups).unbind()


def train_with_statistics(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec
) -> tuple[Tensor, Statistics]:
    """``y`` and the five statistics of the mini-batch."""
    kept: list[Tensor] = []
    y = train(x, gamma, beta, mask, channel_dim, spec, found=kept)
    found = kept[0]
    assert spec.groups is not None
    n, c = x.shape[0], x.shape[channel_dim]
    features, groups = _parts(found, 4, n, c, spec.groups)
    return y, Statistics(features[0], features[1], groups[0], groups[1], found[4 * (c + n * spec.groups)])


def measured(x: Tensor, mask: Tensor | None, plan: Plan, stream: int) -> tuple[Tensor, Tensor | None]:
    """Launch ``measure``: the buffer of statistics, with partial results behind it, and counts under a mask."""
    found = torch.empty(plan.statistics, dtype=torch.float32, device=x.device)
    counts = None if plan.counts is None else torch.empty(plan.counts, dtype=torch.float32, device=x.device)
    plan.measure(stream, x, mask, found, counts)
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
        real = _as_bytes(mask)
        found, counts = measured(x, real, plan, stream)
        if remember is None:
            plan.join(stream, found, counts, *_NO_POPULATION, 0.0)
        else:
            population: list[Any] = list(remember[0]._buffers.values())
            written(population)
            plan.join_updating(stream, found, counts, *population, -1.0 if remember[1] is None else float(remember[1]))
        y = torch.empty_like(x)
        plan.apply(stream, x, y, residual, real, found, gamma, beta)
        ctx.call, ctx.masks = call, (mask, real, counts)
        ctx.save_for_backward(x, gamma, beta, residual if call.activation is not None else None, found)
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
        d_residual = None if residual is None else torch.empty_like(x)  # wanted or not: the launch is for both
        plan.apply_backward(stream, x, dy, residual, dx, d_residual, real, found, gamma, beta, shares)
        if wanted and residual is None:
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
    activation: Activation | None,
) -> Tensor:
    """The same in operators, in float32."""
    scale, shift = (None if parameter is None else parameter.float() for parameter in (gamma, beta))
    y, _ = _coefficients.train(x.float(), scale, shift, mask, channel_dim, spec)
    return finish(y, residual, mask, channel_dim, activation)


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
    activation: Activation | None = None,
) -> Tensor:
    """Algorithm 2 of ``x`` in any configuration."""
    x, residual, call = _prepared(x, gamma, beta, mask, channel_dim, spec, residual, activation)
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
        real = _as_bytes(mask)
        if config.uses_batch or config.uses_features or real is not None:
            found, counts = measured(x, real, plan, stream)
        else:
            found, counts = torch.empty(plan.statistics, dtype=torch.float32, device=x.device), None
        plan.join_inference(stream, found, counts, *kept[:6], *config.priors)
        y = torch.empty_like(x)
        plan.apply(stream, x, y, residual, real, found, gamma, beta)
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
    activation: Activation | None,
) -> Tensor:
    """The same in operators, in float32."""
    scale, shift = (None if parameter is None else parameter.float() for parameter in (gamma, beta))
    m: Any = x.shape[0] if mask is None else mask.reshape(x.shape[0], -1).any(1).sum()
    kept = population.statistics((), m)
    y, _ = _coefficients.infer(x.float(), scale, shift, mask, channel_dim, spec, kept, config)
    return finish(y, residual, mask, channel_dim, activation)
