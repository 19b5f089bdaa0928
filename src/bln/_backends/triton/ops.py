"""Training under ``torch.compile``: the kernels as operators of torch.

The grouped form is kernels for what is reduced over samples, and operators for all else. A compiler looks into these:
it launches the kernels itself, and fuses the maps and the sums of backward with the layer's neighbours. The published
form is one operator forward and one backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ..._spec import Spec
from ...formula import Statistics
from ..coefficients import broadcast
from . import population as kernels_of_population
from . import published
from .functions import prepared
from .grouped import NO_POPULATION, Plan, joining, parts
from .launch import INTERPRETED, Launch, Shape, like, new, on_its_device, stream_of, typed
from .primitives import POPULATION

if TYPE_CHECKING:
    from .functions import Update


def train(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    update: Update,
) -> tuple[Tensor, Statistics | None]:  # fmt: skip
    """``y`` and the statistics of the mini-batch; none in the grouped form, which updates the population itself."""
    numbers = float(spec.eps), float(spec.mix_eps), bool(spec.dim_scale)
    if spec.groups is None:
        y, *found = torch.ops.bln.train(x, gamma, beta, mask, channel_dim, spec.per_position, *numbers)
        return y, published.Plan.statistics(x, mask, channel_dim, spec, [value.detach() for value in found])
    y, found = _train(x, gamma, beta, channel_dim, spec.groups, *numbers)
    if update is not None:
        population, momentum = update
        buffers = [getattr(population, name) for name in POPULATION]
        positions = x.numel() // (x.shape[0] * x.shape[channel_dim])
        _update(found.detach(), *buffers, -1.0 if momentum is None else float(momentum), x.shape[0], positions)
    return y, None


# ---- the grouped form


def _operator(name: str, mutates_args: tuple[str, ...] = ()) -> Any:
    """An operator that a compiler looks into; the interpreter's kernels no compiler can look into."""
    if not INTERPRETED:
        return torch.library.triton_op(name, mutates_args=mutates_args)

    def register(function: Any) -> Any:
        operator = torch.library.custom_op(name, function, mutates_args=mutates_args)
        operator.register_fake(function)
        return operator

    return register


def _launch(launch: Launch, *pointers: Tensor | None) -> None:
    """Launch so that a compiler sees it; the interpreter leaves out tensors without values."""
    kernel = launch.kernel if INTERPRETED else torch.library.wrap_triton(launch.kernel)
    if not (INTERPRETED and isinstance(pointers[0], FakeTensor)):
        kernel[(launch.programs,)](*pointers, *launch.numbers, **launch.constants, **launch.options)


def _sum(
    buffer: Tensor, count: int, at: int, x: Tensor, channel_dim: int, groups: int, gamma: Tensor | None = None
) -> Tensor:
    """One of ``count`` values of each feature plus that of its sample and group, times gamma, to broadcast on ``x``."""
    n, c = x.shape[0], x.shape[channel_dim]
    of_features, of_groups = parts(buffer, count, n, c, groups)
    total = of_features[at] + of_groups[at][..., None].expand(-1, -1, c // groups).reshape(n, c)
    return broadcast(total if gamma is None else gamma.float() * total, x, channel_dim)


@_operator("bln::train_grouped")
def _train(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, channel_dim: int, groups: int,
    eps: float, mix_eps: float, dim_scale: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``y``, and the buffer of statistics that ``affine`` describes."""
    lying = x
    shape = Shape.of(x, channel_dim)
    if shape is None:
        lying = x.movedim(channel_dim, -1).contiguous().movedim(-1, channel_dim)
        shape = Shape.of(lying, channel_dim)
    assert shape is not None
    plan = Plan(shape, x.element_size(), Spec(groups, False, eps, mix_eps, dim_scale), False, None)
    found, partial = new(x, plan.partial), new(x, plan.statistics_size - plan.partial)
    _launch(plan.measure, lying, None, found, partial, None)
    _launch(plan.join, found, partial, None, *NO_POPULATION)
    where = x, channel_dim, groups, gamma
    b = -_sum(found[4:], 4, 3, *where)
    b = b if beta is None else b + broadcast(beta.float(), x, channel_dim)
    return (_sum(found[4:], 4, 2, *where) * x.float() + b).to(x.dtype), found


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gamma, beta, *ctx.options = inputs
    ctx.beta_type = None if beta is None else beta.dtype
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, gamma, output[1])


def _differentiate(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    """``dx = a dy + c1 x + c0``, and the gradients of gamma and beta."""
    x, gamma, found = ctx.saved_tensors
    channel_dim, groups, *numbers = ctx.options
    n, c = x.shape[0], x.shape[channel_dim]
    over = [at for at in range(1, x.dim()) if at != channel_dim]
    g, v = dy.float(), x.float()
    centred = v - broadcast(found[4 : 4 + c], x, channel_dim)
    shares, gradients = _join_backward(
        g.sum(over), (g * centred).sum(over), found, gamma, x.numel() // (n * c), groups, *numbers
    )
    where = x, channel_dim, groups
    dx = _sum(found[4:], 4, 2, *where, gamma) * g - _sum(shares, 2, 0, *where) * v + _sum(shares, 2, 1, *where)
    d_gamma = None if gamma is None else gradients[0].to(gamma.dtype)
    d_beta = None if ctx.beta_type is None else gradients[1].to(ctx.beta_type)
    return dx.to(x.dtype), d_gamma, d_beta, *[None] * 5


@_operator("bln::join_backward")
def _join_backward(
    sums: Tensor, dots: Tensor, found: Tensor, gamma: Tensor | None, p: int, groups: int,
    eps: float, mix_eps: float, dim_scale: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What ``dx`` takes besides ``a``, and the gradients of gamma and beta, from sums over positions."""
    n, c = sums.shape
    shares, gradients = new(sums, 2 * (c + n * groups)), new(sums, 2, c)
    join = joining("join_backward", Spec(groups, False, eps, mix_eps, dim_scale), n, c, p, 1, 1)
    _launch(join, shares, sums.contiguous(), dots.contiguous(), None, found, gamma, gradients)
    return shares, gradients


_train.register_autograd(_differentiate, setup_context=_keep)


@_operator("bln::update_population", mutates_args=POPULATION)
def _update(
    found: Tensor, batch_mean: Tensor, batch_var: Tensor, feature_mean: Tensor, feature_var: Tensor, inverse_m: Tensor,
    updates: Tensor, samples: Tensor, momentum: float, n: int, p: int,
) -> None:  # fmt: skip
    """Average the population with a mini-batch."""
    population = batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples
    numbers = momentum, n, batch_mean.shape[0], p, feature_mean.shape[0]
    _launch(Launch(kernels_of_population.update_unmasked, 1, numbers, {}), found, *population)


# ---- the published form


@torch.library.custom_op("bln::train", mutates_args=())
@on_its_device
def _train_published(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, per_position: bool,
    eps: float, mix_eps: float, dim_scale: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    spec = Spec(None, per_position, eps, mix_eps, dim_scale)
    seen, _, plan = prepared(x, gamma, beta, mask, channel_dim, spec)
    y, (mean, var, rows, weights) = plan.train(stream_of(plan.device), (seen, gamma, beta, None, mask), None)
    return like(y, x), mean, var, rows, weights


@torch.library.custom_op("bln::train_backward", mutates_args=())
@on_its_device
def _train_published_backward(
    x: Tensor, dy: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, mean: Tensor, var: Tensor,
    rows: Tensor, weights: Tensor, channel_dim: int, per_position: bool, eps: float, mix_eps: float, dim_scale: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    spec = Spec(None, per_position, eps, mix_eps, dim_scale)
    seen, _, plan = prepared(x, gamma, beta, mask, channel_dim, spec)
    tensors, found = (seen, gamma, beta, None, mask), [mean, var, rows, weights]
    dx, gradients, _ = plan.backward(stream_of(plan.device), like(dy, seen), tensors, found)
    return like(dx, x), gradients.clone()  # no view: a compiler trusts in where outputs begin


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


def _keep_published(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.rest = inputs[4:]


def _differentiate_published(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, gamma, beta, mask, *found = ctx.saved_tensors
    dx, gradients = torch.ops.bln.train_backward(x, dy, gamma, beta, mask, *found, *ctx.rest)
    return dx, typed(gradients[0], gamma), typed(gradients[1], beta), *[None] * 6


_train_published.register_autograd(_differentiate_published, setup_context=_keep_published)
