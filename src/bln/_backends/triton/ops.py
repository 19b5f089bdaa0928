"""Training under ``torch.compile``: the kernels as operators of torch.

The grouped form launches kernels that reduce, and leaves the maps and the sums of backward to plain operators. The
compiler sees into its operators: it launches the kernels itself, and fuses the rest with the layer's neighbours. The
published form is one opaque operator forward and one backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ..._spec import Spec
from ...formula import Statistics
from ..coefficients import broadcast
from . import population as population_kernels
from . import published
from .functions import prepared
from .grouped import NO_POPULATION, Plan, join_launch, split_values
from .launch import INTERPRETED, Launch, Shape, like, new, on_its_device, stream_of, typed
from .primitives import POPULATION

if TYPE_CHECKING:
    from .functions import Update


def train(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    update: Update,
) -> tuple[Tensor, Statistics | None]:  # fmt: skip
    """Return ``y``, and the mini-batch's statistics unless the form is grouped, which updates the population itself."""
    numbers = float(spec.eps), float(spec.mix_eps), bool(spec.dim_scale)
    if spec.groups is None:
        y, *saved = torch.ops.bln.train(x, gamma, beta, mask, channel_dim, spec.per_position, *numbers)
        return y, published.Plan.statistics(x, mask, channel_dim, spec, [value.detach() for value in saved])
    y, statistics = _train(x, gamma, beta, channel_dim, spec.groups, *numbers)
    if update is not None:
        population, momentum = update
        buffers = [getattr(population, name) for name in POPULATION]
        positions = x.numel() // (x.shape[0] * x.shape[channel_dim])
        _update(statistics.detach(), *buffers, -1.0 if momentum is None else float(momentum), x.shape[0], positions)
    return y, None


# ---- the grouped form


def _operator(name: str, mutates_args: tuple[str, ...] = ()) -> Any:
    """Return a decorator that registers an operator the compiler sees into; opaque with the interpreter's kernels."""
    if not INTERPRETED:
        return torch.library.triton_op(name, mutates_args=mutates_args)

    def register(function: Any) -> Any:
        operator = torch.library.custom_op(name, function, mutates_args=mutates_args)
        operator.register_fake(function)
        return operator

    return register


def _launch(launch: Launch, *pointers: Tensor | None) -> None:
    """Launch visibly to the compiler; under the interpreter, skip fake tensors."""
    kernel = launch.kernel if INTERPRETED else torch.library.wrap_triton(launch.kernel)
    if not (INTERPRETED and isinstance(pointers[0], FakeTensor)):
        kernel[(launch.programs,)](*pointers, *launch.scalars, **launch.constexprs, **launch.options)


def _coefficient(
    buffer: Tensor, count: int, which: int, x: Tensor, channel_dim: int, groups: int, gamma: Tensor | None = None
) -> Tensor:
    """Return one of ``count`` values of each feature plus that of its pair, times gamma, shaped to broadcast."""
    n, c = x.shape[0], x.shape[channel_dim]
    features, pairs = split_values(buffer, count, n, c, groups)
    total = features[which] + pairs[which][..., None].expand(-1, -1, c // groups).reshape(n, c)
    return broadcast(total if gamma is None else gamma.float() * total, x, channel_dim)


@_operator("bln::train_grouped")
def _train(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, channel_dim: int, groups: int,
    eps: float, mix_eps: float, dim_scale: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``y``, and the buffer ``statistics`` that ``affine`` describes."""
    dense, shape = x, Shape.of(x, channel_dim)
    if shape is None:
        dense = x.movedim(channel_dim, -1).contiguous().movedim(-1, channel_dim)
        shape = Shape.of(dense, channel_dim)
    assert shape is not None
    plan = Plan(shape, x.element_size(), Spec(groups, False, eps, mix_eps, dim_scale), False, None)
    statistics, partial = new(x, plan.partial_at), new(x, plan.forward_size - plan.partial_at)
    _launch(plan.measure, dense, None, statistics, partial, None)
    _launch(plan.join, statistics, partial, None, *NO_POPULATION)
    common = x, channel_dim, groups, gamma
    b = -_coefficient(statistics[4:], 4, 3, *common)
    b = b if beta is None else b + broadcast(beta.float(), x, channel_dim)
    return (_coefficient(statistics[4:], 4, 2, *common) * x.float() + b).to(x.dtype), statistics


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gamma, beta, *ctx.options = inputs
    ctx.beta_type = None if beta is None else beta.dtype
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, gamma, output[1])


def _backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    """Return ``dx = a dy + c1 x + c0``, and the gradients of gamma and beta."""
    x, gamma, statistics = ctx.saved_tensors
    channel_dim, groups, *numbers = ctx.options
    n, c = x.shape[0], x.shape[channel_dim]
    positions = [dim for dim in range(1, x.dim()) if dim != channel_dim]
    g, v = dy.float(), x.float()
    centred = v - broadcast(statistics[4 : 4 + c], x, channel_dim)
    sums, dots = g.sum(positions), (g * centred).sum(positions)
    dx_terms, gradients = _join_backward(sums, dots, statistics, gamma, x.numel() // (n * c), groups, *numbers)
    common = x, channel_dim, groups
    dx = _coefficient(statistics[4:], 4, 2, *common, gamma) * g - _coefficient(dx_terms, 2, 0, *common) * v
    dx = dx + _coefficient(dx_terms, 2, 1, *common)
    d_gamma = None if gamma is None else gradients[0].to(gamma.dtype)
    d_beta = None if ctx.beta_type is None else gradients[1].to(ctx.beta_type)
    return dx.to(x.dtype), d_gamma, d_beta, *[None] * 5


@_operator("bln::join_backward")
def _join_backward(
    sums: Tensor, dots: Tensor, statistics: Tensor, gamma: Tensor | None, p: int, groups: int,
    eps: float, mix_eps: float, dim_scale: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``affine``'s ``dx_terms``, and the gradients of gamma and beta, from sums over positions."""
    n, c = sums.shape
    dx_terms, gradients = new(sums, 2 * (c + n * groups)), new(sums, 2, c)
    join = join_launch("join_backward", Spec(groups, False, eps, mix_eps, dim_scale), n, c, p, 1, 1)
    _launch(join, dx_terms, sums.contiguous(), dots.contiguous(), None, statistics, gamma, gradients)
    return dx_terms, gradients


_train.register_autograd(_backward, setup_context=_setup_context)


@_operator("bln::update_population", mutates_args=POPULATION)
def _update(
    statistics: Tensor, batch_mean: Tensor, batch_var: Tensor, feature_mean: Tensor, feature_var: Tensor,
    inverse_m: Tensor, updates: Tensor, samples: Tensor, momentum: float, n: int, p: int,
) -> None:  # fmt: skip
    """Average a mini-batch into the population."""
    population = batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples
    scalars = momentum, n, batch_mean.shape[0], p, feature_mean.shape[0]
    _launch(Launch(population_kernels.update_unmasked, 1, scalars, {}), statistics, *population)


# ---- the published form


@torch.library.custom_op("bln::train", mutates_args=())
@on_its_device
def _train_published(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, per_position: bool,
    eps: float, mix_eps: float, dim_scale: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    spec = Spec(None, per_position, eps, mix_eps, dim_scale)
    prepared_x, _, plan = prepared(x, gamma, beta, mask, channel_dim, spec)
    y, saved = plan.train(stream_of(plan.device), (prepared_x, gamma, beta, None, mask), None)
    return like(y, x), *saved


@torch.library.custom_op("bln::train_backward", mutates_args=())
@on_its_device
def _train_published_backward(
    x: Tensor, dy: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, mean: Tensor, var: Tensor,
    rows: Tensor, weights: Tensor, channel_dim: int, per_position: bool, eps: float, mix_eps: float, dim_scale: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    spec = Spec(None, per_position, eps, mix_eps, dim_scale)
    prepared_x, _, plan = prepared(x, gamma, beta, mask, channel_dim, spec)
    tensors, saved = (prepared_x, gamma, beta, None, mask), [mean, var, rows, weights]
    dx, gradients, _ = plan.backward(stream_of(plan.device), like(dy, prepared_x), tensors, saved)
    return like(dx, x), gradients.clone()  # no view: the compiler relies on the storage offset of outputs


@_train_published.register_fake
def _(x: Tensor, gamma: Any, beta: Any, mask: Any, channel_dim: int, per_position: bool, *_: Any) -> Any:
    c = x.shape[channel_dim]
    p = x.numel() // (x.shape[0] * c)
    q = p if per_position else 1
    sizes = (q, c), (q, c), (2, x.shape[0] * p), (3, 1 if mask is None else q)
    return torch.empty_like(x), *(x.new_empty(size, dtype=torch.float32) for size in sizes)


@_train_published_backward.register_fake
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((2, rest[4].shape[-1]), dtype=torch.float32)


def _setup_context_published(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.options = inputs[4:]


def _backward_published(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, gamma, beta, mask, *saved = ctx.saved_tensors
    dx, gradients = torch.ops.bln.train_backward(x, dy, gamma, beta, mask, *saved, *ctx.options)
    return dx, typed(gradients[0], gamma), typed(gradients[1], beta), *[None] * 6


_train_published.register_autograd(_backward_published, setup_context=_setup_context_published)
