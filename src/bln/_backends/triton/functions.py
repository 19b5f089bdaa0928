"""Training and inference on a GPU, for both forms: autograd functions, and a cache of plans for their launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..._activation import Activation, finish
from ..._autograd import differentiate, recomputing
from ..._masks import hide, positions_of
from ..._spec import Spec
from ...config import StatisticsConfig
from ...formula import Statistics
from .. import operators
from . import grouped, published
from .launch import PLAIN_TYPES, Shape, aligned, like, on_its_device, stream_of, typed

if TYPE_CHECKING:
    from ...layer import BatchLayerNorm
    from ...population import Population

    Plan = grouped.Plan | published.Plan
    Update = tuple[Population, float | None] | None  # the population to update, and its momentum

_plans: dict[Any, Plan | None] = {}
"""Plans by ``_key``; ``None`` where the kernels cannot read the input's layout."""
_MAX_PLANS = 4096
_ABSENT: Any = object()


def _key(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    residual: Tensor | None, activation: Activation | None,
) -> tuple[Any, ...]:  # fmt: skip
    return (
        x.shape, x.stride(), x.dtype, x.device, spec, channel_dim, mask is None, residual is None, activation,
        gamma if gamma is None else gamma.dtype, beta if beta is None else beta.dtype,
    )  # fmt: skip


def _plan(x: Tensor, *rest: Any) -> Plan | None:
    """Return the plan for these tensors, made by the first call."""
    key = _key(x, *rest)
    plan = _plans.get(key)
    if plan is None and key not in _plans:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _, _, mask, channel_dim, spec, _, activation = rest
        form = published if spec.groups is None else grouped
        shape = Shape.of(x, channel_dim) if form is grouped else published.shape_of(x, channel_dim, spec)
        if shape is not None:
            plan = form.Plan(shape, x.element_size(), spec, mask is not None, activation)
            plan.channel_dim, plan.device = channel_dim, x.device
        _plans[key] = plan
    return plan


def prepared(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    residual: Tensor | None = None, activation: Activation | None = None,
) -> tuple[Tensor, Tensor | None, Plan]:  # fmt: skip
    """Return the input and the residual in a layout that the kernels read, copied if need be, and the plan."""
    rest = gamma, beta, mask, channel_dim, spec, residual, activation
    plan = _plan(x, *rest)
    if plan is None and not x.is_contiguous():
        x = x.contiguous()
        plan = _plan(x, *rest)
    if plan is None:
        x = x.movedim(channel_dim, -1).contiguous().movedim(-1, channel_dim)
        plan = _plan(x, *rest)
    assert plan is not None
    x = aligned(x)
    return x, None if residual is None else like(residual.expand(x.shape), x), plan


def _run(
    function: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int,
    spec: Spec, residual: Tensor | None, activation: Activation | None, *rest: Any,
) -> Tensor:  # fmt: skip
    """Apply an autograd function to prepared tensors, then in the published form the residual and the activation."""
    fused = (residual, activation) if spec.groups is not None else (None, None)
    prepared_x, fused_residual, plan = prepared(x, gamma, beta, mask, channel_dim, spec, *fused)
    y: Tensor = function.apply(prepared_x, gamma, beta, fused_residual, mask, plan, *rest)
    y = y.contiguous() if prepared_x is not x and x.is_contiguous() else y
    return finish(y, residual, mask, channel_dim, activation) if spec.groups is None else y


@on_its_device
def train(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    update: Update = None, residual: Tensor | None = None, activation: Activation | None = None,
) -> tuple[Tensor, Statistics | None]:  # fmt: skip
    """Return ``g(BLN(x) + residual)`` by Algorithm 1, and the mini-batch's statistics.

    With ``update`` a kernel updates the population and no statistics are returned, but in the published form masked.
    """
    if update is not None:
        update[0].expect(positions_of(x, channel_dim, spec))
        update = update if mask is None or spec.groups is not None else None
    statistics: list[Statistics] | None = [] if update is None else None
    y = _run(_Train, x, gamma, beta, mask, channel_dim, spec, residual, activation, update, statistics)
    return y, statistics[0] if statistics else None


class _Train(torch.autograd.Function):
    """Training; saves the input and small statistics for backward. Second derivatives go through plain operators."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, mask: Tensor | None,
        plan: Plan, update: Update, statistics: list[Statistics] | None,
    ) -> Tensor:  # fmt: skip
        population = None
        if update is not None:
            buffers: list[Any] = list(update[0]._buffers.values())
            torch.autograd.graph.increment_version(buffers)
            population = buffers, -1.0 if update[1] is None else float(update[1])
        y, saved = plan.train(stream_of(plan.device), (x, gamma, beta, residual, mask), population)
        ctx.plan, ctx.mask = plan, mask
        saved_residual = None if plan.activation is None else residual
        if saved_residual is not None and plan.activation == "relu":
            saved_residual = y  # backward needs only the sign of y, which the next layer saves anyway
        ctx.save_for_backward(x, gamma, beta, saved_residual, *saved)
        if statistics is not None:  # an output would take gradients
            statistics.append(plan.statistics(x, mask, plan.channel_dim, plan.spec, saved))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan, mask, residual_needs_grad = ctx.plan, ctx.mask, ctx.needs_input_grad[3]
        x, gamma, beta, residual, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            activation = plan.activation
            if activation == "relu" and residual is not None:  # it is y
                dy, residual, activation = torch.where(residual > 0, dy, 0), None, None
            if residual_needs_grad and residual is None:
                residual = torch.zeros_like(x, requires_grad=True)  # without an activation its value does not matter
            ctx.rest = mask, plan, activation
            return *differentiate(_plain, (x, gamma, beta, residual), ctx, dy), *[None] * 4
        dy = like(dy, x)
        dx, gradients, d_residual = plan.backward(stream_of(plan.device), dy, (x, gamma, beta, residual, mask), saved)
        if residual_needs_grad and residual is None:
            d_residual = hide(dy, mask, plan.channel_dim)
        return dx, typed(gradients[0], gamma), typed(gradients[1], beta), d_residual, None, None, None, None


_apply: Any = super(torch.autograd.Function, _Train).apply
"""``_Train.apply`` where no function transform is active."""


def train_layer(layer: BatchLayerNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | None:
    """Return a grouped layer's training output, on a fast path without the usual checks; ``None`` if it does not apply.

    It applies once a checked call has cached the plan. It reads the module's dictionaries, since looking up attributes
    of a module would take longer than all else here.
    """
    if type(x) is not Tensor or x.dim() < 2 or x.data_ptr() % 16 or layer._group is not None:
        return None
    if residual is not None:
        if type(residual) not in PLAIN_TYPES or residual.shape != x.shape or residual.device != x.device:
            return None
        if not residual.is_floating_point():
            return None
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return None
    parameters, population = layer._parameters, layer.population
    gamma: Any = parameters.get("weight", _ABSENT)
    beta: Any = parameters.get("bias", _ABSENT)
    for parameter in (gamma, beta):
        if parameter is not None and (type(parameter) is not torch.nn.Parameter or not parameter.is_contiguous()):
            return None  # those of a parametrization are computed, and absent here
    if population.batch_mean.dtype != torch.float32:
        return None
    plan = _plans.get(_key(x, gamma, beta, None, layer.channel_dim % x.dim(), layer.spec, residual, layer.activation))
    if plan is None or plan.shape.c != layer.num_features or plan.device.index != torch._C._cuda_getDevice():
        return None
    update: Any = None if recomputing() else (population, layer.momentum)
    residual = None if residual is None else like(residual, x)
    y: Tensor = _apply(x, gamma, beta, residual, None, plan, update, None)
    return y


@on_its_device
def infer(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    population: Population, config: StatisticsConfig, residual: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:  # fmt: skip
    """Return ``g(BLN(x) + residual)`` by Algorithm 2, in any configuration; the population has its positions."""
    population.positions_for(positions_of(x, channel_dim, spec))  # raises if they do not fit
    return _run(_Infer, x, gamma, beta, mask, channel_dim, spec, residual, activation, population, config)


class _Infer(torch.autograd.Function):
    """Inference; its derivatives go through plain operators."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, mask: Tensor | None,
        plan: Plan, population: Population, config: StatisticsConfig,
    ) -> Tensor:  # fmt: skip
        ctx.rest = mask, plan, plan.activation, population, config
        # With the population saved, autograd notices if it changes before backward.
        ctx.save_for_backward(x, gamma, beta, residual, *population._buffers.values())
        return plan.infer(stream_of(plan.device), (x, gamma, beta, residual, mask), population, config)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *differentiate(_plain, ctx.saved_tensors[:4], ctx, dy), *[None] * 4


def _plain(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, mask: Tensor | None,
    plan: Plan, activation: Activation | None, population: Population | None = None,
    config: StatisticsConfig | None = None,
) -> Tensor:  # fmt: skip
    """Return the same output by plain operators, in float32; with a population, that of inference."""
    scale, shift = (None if parameter is None else parameter.float() for parameter in (gamma, beta))
    statistics = None if population is None else population.at_positions_of(x, mask, plan.channel_dim, plan.spec)
    y, _ = operators.normalize(x.float(), scale, shift, mask, plan.channel_dim, plan.spec, statistics, config)
    return finish(y, residual, mask, plan.channel_dim, activation)
