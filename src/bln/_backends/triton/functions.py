"""The autograd functions of training and inference on a GPU, for both forms: from a call to a plan, and back.

A plan has all launches for one kind of input. It is made once and kept, so that a call only looks it up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

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
from .launch import KINDS, aligned, like, on_its_device, stream_of, typed

if TYPE_CHECKING:
    from ...layer import BatchLayerNorm
    from ...population import Population

    Update = tuple[Population, float | None] | None  # a population and its momentum


class Call(NamedTuple):
    """What a call needs besides tensors. One serves all calls with such tensors."""

    plan: grouped.Plan | published.Plan
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
    """The call for such tensors; ``None`` where no kernel reads the input as it lies in memory.

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
        form = published if spec.groups is None else grouped
        plan = form.Plan.of(x, channel_dim, spec, mask is not None, activation)
        found = None if plan is None else Call(plan, spec, channel_dim, activation, x.device)
        _calls[key] = found
    return found  # type: ignore[return-value]


def prepared(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    residual: Tensor | None = None, activation: Activation | None = None,
) -> tuple[Tensor, Tensor | None, Call]:  # fmt: skip
    """The input and the residual as the kernels read them, copied if need be, and the call."""
    rest = gamma, beta, mask, channel_dim, spec, residual, activation
    call = _call(x, *rest)
    if call is None and not x.is_contiguous():
        x = x.contiguous()
        call = _call(x, *rest)
    if call is None:
        x = x.movedim(channel_dim, -1).contiguous().movedim(-1, channel_dim)
        call = _call(x, *rest)
    assert call is not None
    x = aligned(x)
    return x, None if residual is None else like(residual.expand(x.shape), x), call


def _as_it_came(y: Tensor, seen: Tensor, x: Tensor) -> Tensor:
    """The output of an input that was copied: contiguous where it was."""
    return y.contiguous() if seen is not x and x.is_contiguous() else y


@on_its_device
def train(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    update: Update = None, residual: Tensor | None = None, activation: Activation | None = None,
) -> tuple[Tensor, Statistics | None]:  # fmt: skip
    """Algorithm 1 of ``x``, ``g(BLN(x) + residual)`` if asked, and the statistics of the mini-batch.

    With ``update`` the population, which knows its positions, is updated by a kernel that can do it, and
    no statistics are returned.
    """
    if update is not None:
        update[0].expect(positions_of(x, channel_dim, spec))
    after = (residual, activation) if spec.groups is not None else (None, None)  # what the kernels do as well
    seen, fused, call = prepared(x, gamma, beta, mask, channel_dim, spec, *after)
    plan = call.plan
    update = update if mask is None or plan.updates_masked else None
    kept: list[tuple[Tensor, ...]] | None = None if update is not None else []
    y: Tensor = _Train.apply(seen, gamma, beta, fused, mask, call, update, kept)  # type: ignore[no-untyped-call]
    y = _as_it_came(y, seen, x)
    if not plan.fuses:
        y = finish(y, residual, mask, channel_dim, activation)
    return y, None if kept is None else plan.statistics(x, mask, channel_dim, spec, kept[0])


class _Train(torch.autograd.Function):
    """Keeps the input and small statistics for backward; a second derivative goes through plain operators."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, mask: Tensor | None,
        call: Call, update: Update, kept: list[tuple[Tensor, ...]] | None,
    ) -> Tensor:  # fmt: skip
        y, found = call.plan.train(stream_of(call.device), x, gamma, beta, residual, mask, update, call.spec)
        ctx.call, ctx.mask = call, mask
        added = residual if call.plan.fuses and call.activation is not None else None
        if added is not None and call.activation == "relu":
            added = y  # its sign is all that backward asks of the residual, and the next layer holds it anyway
        ctx.save_for_backward(x, gamma, beta, added, *found)
        if kept is not None:
            kept.append(found)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        x, gamma, beta, residual, *found = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3]
        activation = call.activation if call.plan.fuses else None
        if torch.is_grad_enabled():
            if activation == "relu" and residual is not None:  # the output
                dy, residual, activation = torch.where(residual > 0, dy, 0), None, None
            if wanted and residual is None:
                residual = torch.zeros_like(x, requires_grad=True)  # it is added: its value does not matter
            ctx.rest = ctx.mask, call.channel_dim, call.spec, activation
            return *differentiate(_plain, (x, gamma, beta, residual), ctx, dy), *[None] * 4
        dy = like(dy, x)
        tensors = x, dy, gamma, beta, residual, ctx.mask, found
        dx, gradients, d_residual = call.plan.backward(stream_of(call.device), *tensors)
        if wanted and residual is None:
            d_residual = hide(dy, ctx.mask, call.channel_dim)
        return dx, typed(gradients[0], gamma), typed(gradients[1], beta), d_residual, None, None, None, None


_apply: Any = super(torch.autograd.Function, _Train).apply
"""``_Train.apply`` where no function transform is active."""


def train_layer(layer: BatchLayerNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | None:
    """The grouped layer's training forward of an ordinary input; ``None`` where it has to be looked at more closely.

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
    update: Any = None if recomputing() else (population, layer.momentum)
    residual = None if residual is None else like(residual, x)
    y: Tensor = _apply(x, gamma, beta, residual, None, call, update, None)
    return y


def _ordinary(residual: Tensor, x: Tensor) -> bool:
    """Whether the layer would take a residual without a closer look."""
    if type(residual) not in KINDS or residual.shape != x.shape:
        return False
    return residual.is_floating_point() and residual.device == x.device


def _plain(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, mask: Tensor | None,
    channel_dim: int, spec: Spec, activation: Activation | None,
) -> Tensor:  # fmt: skip
    """The same in operators, in float32."""
    scale, shift = (None if parameter is None else parameter.float() for parameter in (gamma, beta))
    y, _ = operators.train(x.float(), scale, shift, mask, channel_dim, spec)
    return finish(y, residual, mask, channel_dim, activation)


# ---- inference


@on_its_device
def infer(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    population: Population, config: StatisticsConfig, residual: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:  # fmt: skip
    """Algorithm 2 of ``x``, given a population that knows its positions, in any configuration."""
    population.positions_for(positions_of(x, channel_dim, spec))  # refuses what does not fit
    after = (residual, activation) if spec.groups is not None else (None, None)
    seen, fused, call = prepared(x, gamma, beta, mask, channel_dim, spec, *after)
    fuses = call.plan.fuses
    y: Tensor = _Infer.apply(seen, gamma, beta, fused, mask, call, population, config)  # type: ignore[no-untyped-call]
    y = _as_it_came(y, seen, x)
    return y if fuses else finish(y, residual, mask, channel_dim, activation)


class _Infer(torch.autograd.Function):
    """Its derivative goes through plain operators."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, mask: Tensor | None,
        call: Call, population: Population, config: StatisticsConfig,
    ) -> Tensor:  # fmt: skip
        y = call.plan.infer(stream_of(call.device), x, gamma, beta, residual, mask, population, config, call.spec)
        ctx.rest = mask, call.channel_dim, call.spec, population, config, call.activation if call.plan.fuses else None
        # The population is saved so that a change of it is noticed.
        ctx.save_for_backward(x, gamma, beta, residual, *population._buffers.values())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, residual, *_ = ctx.saved_tensors
        return *differentiate(_plain_inference, (x, gamma, beta, residual), ctx, dy), *[None] * 4


def _plain_inference(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, mask: Tensor | None,
    channel_dim: int, spec: Spec, population: Population, config: StatisticsConfig, activation: Activation | None,
) -> Tensor:  # fmt: skip
    """The same in operators, in float32."""
    scale, shift = (None if parameter is None else parameter.float() for parameter in (gamma, beta))
    known = population.at_positions_of(x, mask, channel_dim, spec)
    y, _ = operators.infer(x.float(), scale, shift, mask, channel_dim, spec, known, config)
    return finish(y, residual, mask, channel_dim, activation)
