"""Training: Algorithm 1 and its derivative, as an autograd function and as an operator for compiled graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import formula
from ..formula import Statistics
from ..functional import current
from . import backward, forward, launch, population
from .slabs import Entries, Options, Slabs, across, chain, choose, gradients, on_its_device, options, transform, turned

if TYPE_CHECKING:
    from ..population import Population


@on_its_device
def train(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None = None,
    *,
    channel_dim: int,
    per_position: bool,
    eps: float,
    mix_eps: float,
    dim_scale: bool,
    remember: tuple[Population, float | None] | None = None,
) -> tuple[Tensor, Statistics | None]:
    """Algorithm 1 of ``x``.

    With ``remember``, a population that knows its positions and its momentum, the statistics are entered there, where
    there is no mask, and not returned.
    """
    slabs = Slabs.of(x, channel_dim, per_position)
    n, p, d = slabs.x.shape
    left = slabs.entries(mask, per_position)
    numbers = options(d, eps, mix_eps, dim_scale, 1 / x.shape[0], slabs.pooled)
    if torch.compiler.is_compiling():
        y, statistics = torch.ops.bln.train(slabs.x, gamma, beta, *(left or (None, None, None)), *numbers)
    else:
        y, statistics = _Train.apply(slabs.x, gamma, beta, left, numbers)  # type: ignore[no-untyped-call]
    y = slabs.back(y, channel_dim)
    if remember is not None and mask is None:
        _enter(*remember, statistics, slabs, x.shape[0])
        return y, None
    batch_mean, batch_var, feature_mean, feature_var = statistics[: 2 * p * (d + n)].split([p * d, p * d, p * n, p * n])
    columns = slabs.rows[1:] if per_position else slabs.rows[-1:]
    if slabs.pooled:
        batch_mean, batch_var = batch_mean[:d], batch_var[:d]
    elif across(slabs.x):
        batch_mean, batch_var = batch_mean.view(d, p).T, batch_var.view(d, p).T
    if not across(slabs.x):
        feature_mean, feature_var = feature_mean.view(p, n).T, feature_var.view(p, n).T
    return y, Statistics(
        batch_mean.reshape(columns),
        batch_var.reshape(columns),
        feature_mean.reshape(slabs.rows[:-1]),
        feature_var.reshape(slabs.rows[:-1]),
        x.new_full((), 1 / x.shape[0], dtype=torch.float32) if left is None else left.inverse_m.view(columns[:-1]),
    )


def _enter(kept: Population, momentum: float | None, statistics: Tensor, slabs: Slabs, m: int) -> None:
    """Update the population with the statistics of slabs."""
    n, p, c = slabs.x.shape
    positions, entries = (1, n * p) if slabs.pooled else (p, n)
    columns = launch.power_of_two(c)
    block = max(1, min(512 // columns, launch.power_of_two(positions)))
    _, after = chain(slabs.x.device)
    flags = choose(slabs.x, False, slabs.pooled, backward=False).flags
    finite = statistics[2 * p * (c + n + 1) :][:flags]
    if flags > 4096:  # each program reads all
        finite, flags, after = finite.amin(), 1, {"CHAINED": False}
    population.enter[(launch.cdiv(positions, block),)](
        statistics, finite, kept.batch_mean, kept.batch_var, kept.feature_mean, kept.feature_var, kept.inverse_m,
        kept.updates, kept.samples, flags, n, p, c, positions, kept.inverse_m.numel(), m,
        formula.bessel(entries), formula.bessel(m), 0.0 if momentum is None else momentum,
        ACROSS=across(slabs.x) and not slabs.pooled, AVERAGE=momentum is None, SPREAD=entries > 1, BP=block, BC=columns,
        BF=launch.power_of_two(flags), num_warps=max(1, min(8, columns * block // 128)), **after,
    )  # fmt: skip
    for buffer in kept.buffers():  # autograd does not see what a kernel writes
        if not buffer.is_inference():
            torch.autograd.graph.increment_version(buffer)


def _forward(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, left: Entries | None, numbers: Options
) -> tuple[Tensor, Tensor]:
    """``y``, and the buffer of statistics that ``forward`` describes, of slabs."""
    n, p, c = x.shape
    y = torch.empty_like(x)
    statistics = torch.empty(statistics_size(n, p, c), dtype=torch.float32, device=x.device)
    chosen = choose(x, left is not None, numbers.pooled, backward=False)
    eps, mix_eps, scale, inverse_m, pooled = numbers
    begin, after = chain(x.device)
    if chosen.resident:
        forward.resident[(chosen.programs,)](
            x, y, gamma, beta, statistics, inverse_m, n, p, c, mix_eps, scale, eps,
            STAGES=chosen.stages, **begin, **chosen.constants,
        )  # fmt: skip
        return y, statistics

    alone = chosen.splits == 1 and not pooled
    partials, parts = (None, 1) if alone else measure(x, statistics, left, numbers, chosen)
    hidden, _, weight = left or (None, None, inverse_m)
    forward.sweep[(chosen.blocks * chosen.splits,)](
        x, y, hidden, gamma, beta, statistics, partials, weight, n, p, c, chosen.run, chosen.splits, parts,
        mix_eps, scale, eps, MASKED=left is not None, POOLED=pooled, MEASURE=alone, NORMALIZE=True,
        **(begin if alone else after), **chosen.constants,
    )  # fmt: skip
    return y, statistics


_PARTS = 16  # partial results that each program of the second sweep reads; of more, a launch between makes one


def measure(
    x: Tensor, statistics: Tensor, left: Entries | None, numbers: Options, chosen: launch.Launch, most: int = _PARTS
) -> tuple[Tensor, int]:
    """The first sweep of ``forward`` alone: its partial results, and how many there are, not more than ``most``."""
    n, p, c = x.shape
    eps, mix_eps, scale, inverse_m, pooled = numbers
    programs = chosen.blocks * chosen.splits
    q, parts = (1, programs) if pooled else (p, chosen.splits)
    partials = torch.empty(parts * q * (2 * c + 3), dtype=torch.float32, device=x.device)
    hidden, _, weight = left or (None, None, inverse_m)
    begin, after = chain(x.device)
    forward.sweep[(programs,)](
        x, x, hidden, None, None, statistics, partials, weight, n, p, c, chosen.run, chosen.splits, 1,
        mix_eps, scale, eps, MASKED=left is not None, POOLED=pooled, MEASURE=True, NORMALIZE=False,
        **begin, **chosen.constants,
    )  # fmt: skip
    while parts > most:
        tile = _tall(parts)
        groups = launch.cdiv(parts, tile["BS"])
        joined = torch.empty(groups * q * (2 * c + 3), dtype=torch.float32, device=x.device)
        forward.merge[(launch.cdiv(q * c, tile["BLOCK"]), groups)](
            partials, joined, q, c, parts, groups, KIND=chosen.kind, **tile, **after
        )
        partials, parts = joined, groups
    return partials, parts


def _tall(number: int) -> dict[str, int]:
    """A tile that reads so many rows at once, of few columns, so that there are many such tiles."""
    rows = min(4096, launch.power_of_two(number))
    return {"BS": rows, "BLOCK": min(8, 8192 // rows), "num_warps": max(1, min(16, rows // 64))}


def _backward(
    x: Tensor,
    dy: Tensor,
    gamma: Tensor | None,
    statistics: Tensor,
    left: Entries | None,
    numbers: Options,
) -> tuple[Tensor, Tensor]:
    """Gradients of the slabs, and as two rows of gamma and beta."""
    n, p, c = x.shape
    dx = torch.empty_like(x)
    dy = laid_as(x, dy)
    chosen = choose(x, left is not None, numbers.pooled, backward=True)
    eps, mix_eps, scale, inverse_m, pooled = numbers
    begin, after = chain(x.device)
    rows = torch.empty(chosen.flags, 2, c, dtype=torch.float32, device=x.device)
    if chosen.resident:
        backward.resident[(chosen.programs,)](
            x, dy, dx, gamma, statistics, rows, inverse_m, n, p, c, mix_eps, scale, eps,
            STAGES=chosen.stages, **begin, **chosen.constants,
        )  # fmt: skip
        return dx, _total(rows.view(1, -1, 2 * c)).view(2, c)

    hidden, counts, weight = left or (None, None, inverse_m)
    programs = chosen.blocks * chosen.splits
    sums = torch.empty(2 * n * p, dtype=torch.float32, device=x.device)

    def sweep(partials: Tensor | None, parts: int, sum_: bool, differentiate: bool) -> None:
        backward.sweep[(programs,)](
            x, dy, dx, hidden, gamma, statistics, partials, sums, rows, weight, counts, n, p, c,
            chosen.run, chosen.splits, parts, mix_eps, scale, eps, MASKED=left is not None, POOLED=pooled,
            SUM=sum_, DIFFERENTIATE=differentiate, **(begin if sum_ else after), **chosen.constants,
        )  # fmt: skip

    if chosen.splits == 1 and not pooled:
        sweep(None, 1, True, True)
        return dx, _total(rows.view(1, -1, 2 * c)).view(2, c)
    q, parts = (1, programs) if pooled else (p, chosen.splits)
    partials = torch.empty(3, parts, q, c, dtype=torch.float32, device=x.device)
    sweep(partials, 1, True, False)
    if parts > _PARTS:
        partials, parts = _total(partials.view(3, parts, -1)), 1
    sweep(partials, parts, False, True)
    return dx, _total(rows.view(1, -1, 2 * c)).view(2, c)


def laid_as(x: Tensor, dy: Tensor) -> Tensor:
    """``dy`` with the strides of ``x``."""
    if dy.stride() == x.stride():
        return dy
    side_by_side = x.is_contiguous() and dy.transpose(1, 2).is_contiguous()
    return turned(dy) if side_by_side else torch.empty_like(x).copy_(dy)


def _total(parts: Tensor) -> Tensor:
    """``[outer, number, width]`` summed over the number, always in the same order."""
    outer, number, width = parts.shape
    if number == 1:
        return parts.view(outer, width)
    total = torch.empty(outer, width, dtype=torch.float32, device=parts.device)
    tile = _tall(number)
    _, after = chain(parts.device)
    backward.add[(launch.cdiv(width, tile["BLOCK"]), outer)](parts, total, number, width, **tile, **after)
    return total


class _Train(torch.autograd.Function):
    """On slabs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        left: Entries | None,
        numbers: Options,
    ) -> tuple[Tensor, Tensor]:
        y, statistics = _forward(x, gamma, beta, left, numbers)
        ctx.rest = left, numbers
        ctx.save_for_backward(x, gamma, beta, statistics)
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        return y, statistics

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 5
        x, gamma, beta, statistics = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives: through the plain formula
            return *gradients(_plain, (x, gamma, beta), ctx, dy), None, None
        dx, rows = _backward(x, dy, gamma, statistics, *ctx.rest)
        return dx, _as(rows[0], gamma), _as(rows[1], beta), None, None


@torch.library.custom_op("bln::train", mutates_args=())
def _train(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, hidden: Tensor | None, count: Tensor | None,
    weight: Tensor | None, eps: float, mix_eps: float, scale: float, inverse_m: float, pooled: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _forward(x, gamma, beta, _left(hidden, count, weight), Options(eps, mix_eps, scale, inverse_m, pooled))


@torch.library.custom_op("bln::train_backward", mutates_args=())
def _train_backward(
    x: Tensor, dy: Tensor, gamma: Tensor | None, statistics: Tensor, hidden: Tensor | None, count: Tensor | None,
    weight: Tensor | None, eps: float, mix_eps: float, scale: float, inverse_m: float, pooled: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    numbers = Options(eps, mix_eps, scale, inverse_m, pooled)
    return _backward(x, dy, gamma, statistics, _left(hidden, count, weight), numbers)


def _left(hidden: Tensor | None, count: Tensor | None, weight: Tensor | None) -> Entries | None:
    return None if hidden is None or count is None or weight is None else Entries(hidden, count, weight)


@_train.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    n, p, c = x.shape
    return torch.empty_like(x), x.new_empty(statistics_size(n, p, c), dtype=torch.float32)


@_train_backward.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((2, x.shape[2]), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gamma, beta, hidden, count, weight, *numbers = inputs
    ctx.save_for_backward(x, gamma, beta, output[1], hidden, count, weight)
    ctx.numbers = numbers


def _differentiate(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, gamma, beta, statistics, *left = ctx.saved_tensors
    dx, rows = torch.ops.bln.train_backward(x, dy, gamma, statistics, *left, *ctx.numbers)
    return dx, _as(rows[0], gamma), _as(rows[1], beta), *[None] * 8


_train.register_autograd(_differentiate, setup_context=_keep)


def statistics_size(n: int, p: int, c: int) -> int:
    """Of the buffer that ``forward`` describes; there are no more programs than positions."""
    return 2 * p * (c + n) + 3 * p


def _as(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else gradient.to(parameter.dtype)


def _plain(x: Tensor, gamma: Tensor | None, beta: Tensor | None, left: Entries | None, numbers: Options) -> Tensor:
    """The formula, on slabs in float32."""
    rows, mask = x.float(), None
    if left is not None:
        mask = left.hidden == 0
        rows = torch.where(mask[..., None], rows, 0)
    statistics = current(rows, mask, not numbers.pooled)
    inverse_m = rows.new_full((), numbers.inverse_m) if left is None else left.inverse_m
    y = transform(rows, statistics._replace(inverse_m=inverse_m), gamma, beta, numbers)
    return y if mask is None else torch.where(mask[..., None], y, 0)
