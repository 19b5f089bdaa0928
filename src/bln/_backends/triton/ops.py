"""Training under ``torch.compile``: the kernels as operators of torch.

The grouped form is kernels for what is reduced over samples, and operators for all else. A compiler looks into these:
it launches the kernels itself, and fuses the maps and the sums of backward with the layer's neighbours. The published
form is one operator forward and one backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import formula
from ..._spec import Spec
from ...formula import Statistics
from ...population import Population
from ..coefficients import broadcast
from . import affine, published
from .functions import prepared
from .grouped import Over, joining_tile
from .launch import INTERPRETED, Shape, like, on_its_device, stream_of, typed

if TYPE_CHECKING:
    from .functions import Update

# The interpreter runs kernels that no compiler can look into.
_operator: Any = torch.library.custom_op if INTERPRETED else torch.library.triton_op


def _launched(kernel: Any) -> Any:
    """Return the kernel as a compiler sees it."""
    return kernel if INTERPRETED else torch.library.wrap_triton(kernel)


def train(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    update: Update,
) -> tuple[Tensor, Statistics | None]:  # fmt: skip
    """``y`` and the statistics of the mini-batch; none in the grouped form, which updates the population itself."""
    if spec.groups is None:
        numbers = float(spec.eps), float(spec.mix_eps), bool(spec.dim_scale)
        y, *found = torch.ops.bln.train(x, gamma, beta, mask, channel_dim, spec.per_position, *numbers)
        kept = [value.detach() for value in found]
        return y, published.Plan.statistics(None, x, mask, channel_dim, spec, kept)  # type: ignore[arg-type]
    scale = formula.weights(0.0, 0.0, x.shape[channel_dim], spec.dim_scale)[0]
    y, found = _train(x, gamma, beta, channel_dim, spec.groups, float(spec.mix_eps), float(scale), float(spec.eps))
    if update is not None:
        _update_population(*update, found, x)
    return y, None


def _measure(x: Tensor, channel_dim: int, groups: int, mix_eps: float, scale: float, eps: float) -> Tensor:
    """Launch the kernels that find the statistics, in one buffer as ``affine`` describes it."""
    shape = Shape.of(x, channel_dim)
    if shape is None:
        x = x.movedim(channel_dim, -1).contiguous().movedim(-1, channel_dim)
        shape = Shape.of(x, channel_dim)
    assert shape is not None
    over = Over("measure", shape, x.element_size(), groups, {})
    n, c = shape.n, shape.c
    found = x.new_empty(4 * (c + n * groups) + 4, dtype=torch.float32)
    partial = x.new_empty((2, over.splits, n, c), dtype=torch.float32)
    _launched(affine.measure)[(over.programs,)](
        x, None, found, partial, None, *over.sizes, **over.constants, num_warps=over.options["num_warps"]
    )
    joining, programs = joining_tile(n, c, groups)
    nothing = (None,) * 7
    _launched(affine.join)[(programs,)](
        found, partial, None, *nothing, 0.0, *over.sizes, mix_eps, scale, eps, **joining, num_warps=4
    )
    return found


def _parts(buffer: Tensor, count: int, n: int, c: int, groups: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A few values for each feature, and for each sample and feature."""
    of_groups = buffer[count * c : count * (c + n * groups)].view(count, n, groups, 1)
    spread = of_groups.expand(-1, -1, -1, c // groups).reshape(count, n, c)
    return buffer[: count * c].view(count, c).unbind(), spread.unbind()


def _slope(found: Tensor, gamma: Tensor | None, x: Tensor, channel_dim: int, groups: int) -> Tensor:
    """``a`` of ``y = a x + b``."""
    batch, feature = _parts(found, 4, x.shape[0], x.shape[channel_dim], groups)
    a = batch[2] + feature[2]
    return broadcast(a if gamma is None else gamma.float() * a, x, channel_dim)


@_operator("bln::train_grouped", mutates_args=())
def _train(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, channel_dim: int, groups: int,
    mix_eps: float, scale: float, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``y``, and the buffer of statistics."""
    found = _measure(x, channel_dim, groups, mix_eps, scale, eps)
    batch, feature = _parts(found, 4, x.shape[0], x.shape[channel_dim], groups)
    b = -(batch[3] + feature[3])
    b = b if gamma is None else gamma.float() * b
    b = b if beta is None else b + beta.float()
    y = _slope(found, gamma, x, channel_dim, groups) * x.float() + broadcast(b, x, channel_dim)
    return y.to(x.dtype), found


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
    centred = v - broadcast(found[:c], x, channel_dim)
    shares, gradients = _join_backward(
        g.sum(over), (g * centred).sum(over), found, gamma, x.numel() // (n * c), groups, *numbers
    )
    batch, feature = _parts(shares, 2, n, c, groups)
    c1, c0 = (broadcast(value, x, channel_dim) for value in (-(batch[0] + feature[0]), batch[1] + feature[1]))
    dx = _slope(found, gamma, x, channel_dim, groups) * g + c1 * v + c0
    d_gamma = None if gamma is None else gradients[0].to(gamma.dtype)
    d_beta = None if ctx.beta_type is None else gradients[1].to(ctx.beta_type)
    return dx.to(x.dtype), d_gamma, d_beta, *[None] * 5


@_operator("bln::join_backward", mutates_args=())
def _join_backward(
    sums: Tensor, dots: Tensor, found: Tensor, gamma: Tensor | None, p: int, groups: int,
    mix_eps: float, scale: float, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What ``dx`` takes besides ``a``, and the gradients of gamma and beta, from sums over positions."""
    n, c = sums.shape
    shares = sums.new_empty(2 * (c + n * groups))
    gradients = sums.new_empty((2, c))
    joining, programs = joining_tile(n, c, groups)
    _launched(affine.join_backward)[(programs,)](
        shares, sums.contiguous(), dots.contiguous(), None, found, gamma, gradients, n, c, p, 1, 1, groups,
        mix_eps, scale, eps, **joining, num_warps=4,
    )  # fmt: skip
    return shares, gradients


_train.register_autograd(_differentiate, setup_context=_keep)
_POPULATION = ("batch_mean", "batch_var", "feature_mean", "feature_var", "inverse_m", "updates", "samples")


@_operator("bln::update_population", mutates_args=_POPULATION)
def _update(
    found: Tensor, batch_mean: Tensor, batch_var: Tensor, feature_mean: Tensor, feature_var: Tensor, inverse_m: Tensor,
    updates: Tensor, samples: Tensor, momentum: float, n: int, p: int,
) -> None:  # fmt: skip
    """Average the population with a mini-batch."""
    population = batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples
    _launched(affine.update_population)[(1,)](
        found, *population, momentum, n, batch_mean.shape[0], p, feature_mean.shape[0], num_warps=4
    )


def _update_population(population: Population, momentum: float | None, found: Tensor, x: Tensor) -> None:
    n, c = x.shape[0], population.batch_mean.shape[-1]
    _update(
        found.detach(), population.batch_mean, population.batch_var, population.feature_mean, population.feature_var,
        population.inverse_m, population.updates, population.samples,
        -1.0 if momentum is None else float(momentum), n, x.numel() // (n * c),
    )  # fmt: skip


if INTERPRETED:  # no compiler looks in

    @_train.register_fake
    def _(x: Tensor, gamma: Any, beta: Any, channel_dim: int, groups: int, *_: float) -> tuple[Tensor, Tensor]:
        n, c = x.shape[0], x.shape[channel_dim]
        return torch.empty_like(x), x.new_empty(4 * (c + n * groups) + 4, dtype=torch.float32)

    @_join_backward.register_fake
    def _(sums: Tensor, dots: Tensor, found: Tensor, gamma: Any, p: int, groups: int, *_: float) -> Any:
        n, c = sums.shape
        return sums.new_empty(2 * (c + n * groups)), sums.new_empty((2, c))

    @_update.register_fake
    def _(*_: Any) -> None:
        return None


# ---- the published form


@torch.library.custom_op("bln::train", mutates_args=())
@on_its_device
def _train_published(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, per_position: bool,
    eps: float, mix_eps: float, dim_scale: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    spec = Spec(None, per_position, eps, mix_eps, dim_scale)
    seen, _, call = prepared(x, gamma, beta, mask, channel_dim, spec)
    y, found = call.plan.train(stream_of(call.device), seen, gamma, beta, None, mask, None, spec)
    mean, var, rows, weights = found
    return like(y, x), mean, var, rows, weights


@torch.library.custom_op("bln::train_backward", mutates_args=())
@on_its_device
def _train_published_backward(
    x: Tensor, dy: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, mean: Tensor, var: Tensor,
    rows: Tensor, weights: Tensor, channel_dim: int, per_position: bool, eps: float, mix_eps: float, dim_scale: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    spec = Spec(None, per_position, eps, mix_eps, dim_scale)
    seen, _, call = prepared(x, gamma, beta, mask, channel_dim, spec)
    kept = [mean, var, rows, weights]
    dx, gradients, _ = call.plan.backward(stream_of(call.device), seen, like(dy, seen), gamma, beta, None, mask, kept)
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
