"""Training: Algorithm 1 and its derivative, as an autograd function and as an operator for compiled graphs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._autograd import differentiate
from .._spec import Spec
from ..formula import Statistics
from ..functional import current
from . import backward, forward, launch, population, sharing
from .population import NOTHING, Memory
from .slabs import (
    Entries,
    Options,
    Slabs,
    as_it_came,
    beside,
    chain,
    choose,
    features_last,
    on_its_device,
    options,
    transform,
)

if TYPE_CHECKING:
    from .population import Remembered


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
    remember: Remembered = None,
) -> tuple[Tensor, Statistics | None]:
    """Algorithm 1 of ``x``.

    With ``remember``, whose population knows its positions, the statistics are entered there, where there is no mask,
    and not returned.
    """
    slabs = Slabs.of(x, channel_dim, per_position)
    if slabs is None:
        y, found = train(
            features_last(x, channel_dim), gamma, beta, mask, channel_dim=x.dim() - 1, per_position=per_position,
            eps=eps, mix_eps=mix_eps, dim_scale=dim_scale, remember=remember,
        )  # fmt: skip
        return as_it_came(y, x, channel_dim), found

    left = slabs.entries(mask, per_position)
    numbers = options(slabs.c, eps, mix_eps, dim_scale, x.shape[0])
    remember = None if mask is not None else remember
    if torch.compiler.is_compiling():
        y, statistics = torch.ops.bln.train(
            x, gamma, beta, *(left or (None, None, None)), channel_dim, per_position, *numbers
        )
        statistics = statistics.detach()
    else:
        y, statistics = _Train.apply(  # type: ignore[no-untyped-call]
            x, gamma, beta, left, slabs, channel_dim, numbers, remember
        )
    if remember is not None:
        return y, None

    n, p, c, across, pooled = slabs
    columns = statistics[: 2 * (1 if pooled else p) * c].view(2, -1)
    rows = statistics[2 * p * c : 2 * p * (c + n)].view(-1, 2).T
    if across and not pooled:
        columns = columns.view(2, c, p).mT
    if not across:
        rows = rows.view(2, p, n).mT
    shape = [size for at, size in enumerate(x.shape) if at != channel_dim]
    positions = shape[1:] if per_position else []
    inverse_m = x.new_full((), 1 / x.shape[0], dtype=torch.float32) if left is None else left.inverse_m.view(positions)
    (batch_mean, batch_var), (feature_mean, feature_var) = columns.reshape(2, *positions, c), rows.reshape(2, *shape)
    return y, Statistics(batch_mean, batch_var, feature_mean, feature_var, inverse_m)


def _enter(memory: Memory, statistics: Tensor, slabs: Slabs, chosen: launch.Launch) -> None:
    """Update the population, if there is one, with the statistics of slabs."""
    if memory is NOTHING:
        return
    n, p, c, across, _ = slabs
    columns = launch.power_of_two(c)
    # (25, 256, 6) takes 2.7 times a copy with small blocks, else 2.9; (128, 3136, 64) in bfloat16 1.34 with eight
    # columns for each thread, 1.37 with 16; but (32, 12544, 64) 1.50 with 16, 1.57 with eight.
    some = p * columns
    size, each = (256, 128) if some <= 2**16 else (1024, 256) if some <= 2**18 else (2048, 512)
    block = max(1, min(size // columns, launch.power_of_two(p)))
    finite, flags = None, chosen.flags
    after = chain(statistics.device).after
    if flags > 4096:  # each program reads all
        finite, flags, after = statistics[2 * p * (c + n + 1) :][:flags].amin(), 1, {"CHAINED": False}
    population.enter[(launch.cdiv(p, block),)](
        statistics, finite, *memory.buffers, flags, n, p, c, *memory.numbers, ACROSS=across, SIDE=math.gcd(c, 4),
        BP=block, BC=columns, BF=launch.power_of_two(flags), num_warps=max(1, min(8, columns * block // each)),
        **memory.constants, **after,
    )  # fmt: skip


def _forward(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    left: Entries | None,
    slabs: Slabs,
    numbers: Options,
    remember: Remembered = None,
) -> tuple[Tensor, Tensor]:
    """``y``, and the buffer of statistics that ``forward`` describes, which a population may remember."""
    n, p, c, _, pooled = slabs
    y = torch.empty_like(x)
    statistics = torch.empty(statistics_size(n, p, c), dtype=torch.float32, device=x.device)
    chosen = choose(slabs, x.element_size(), x.device, left is not None, False)
    eps, mix_eps, scale, inverse_m = numbers
    begin, after = chain(x.device)
    memory = population.memory(remember, n * p if pooled else n, x.shape[0])
    if chosen.resident:
        given = x, y, gamma, beta, statistics, inverse_m, n, p, c, mix_eps, scale, eps
        constants = {**begin, **chosen.constants}
        if chosen.blocks == 1 and memory is not NOTHING:
            forward.single[(1,)](*given, *memory.buffers, *memory.numbers, **memory.constants, **constants)
        else:
            forward.resident[(chosen.programs,)](*given, **constants)
            _enter(memory, statistics, slabs, chosen)
        return y, statistics

    at_once = not chosen.in_two(pooled)
    concluding = chosen.concluding(p, c, pooled)
    partials, parts = (None, 1) if at_once else measure(x, statistics, left, slabs, numbers, chosen)
    hidden, _, inverse_m_at = left or (None, None, inverse_m)
    learned = memory if concluding else NOTHING
    forward.sweep[(chosen.blocks * chosen.splits + bool(concluding),)](
        x, y, hidden, gamma, beta, statistics, partials, inverse_m_at, n, *chosen.extents(p, c), chosen.run,
        chosen.splits, parts, mix_eps, scale, eps, *learned.buffers, *learned.numbers, MASKED=left is not None,
        POOLED=pooled, MEASURE=at_once, NORMALIZE=True, ALL=concluding, EARLY=chosen.early, **learned.constants,
        **chosen.in_sweeps, **(begin if at_once else after), **chosen.constants,
    )  # fmt: skip
    if not concluding:
        _enter(memory, statistics, slabs, chosen)
    return y, statistics


# Partial results that each program of the second sweep reads; of more, launches between make fewer. With 16 of them,
# (64, 784, 128) across took 5.4 times a copy in float32, and with those of a launch between 3.4.
_PARTS = 6

_GRID = 2**16 - 1  # programs along the second dimension of one


def measure(
    x: Tensor,
    statistics: Tensor | None,
    left: Entries | None,
    slabs: Slabs,
    numbers: Options,
    chosen: launch.Launch,
    most: int = _PARTS,
) -> tuple[Tensor, int]:
    """The first sweep of ``forward`` alone: its partial results, and how many there are, not more than ``most``.

    Without ``statistics``, to which those of rows would be written, columns alone are measured.
    """
    n, p, c, _, pooled = slabs
    eps, mix_eps, scale, inverse_m = numbers
    programs, laps = chosen.blocks * chosen.splits, chosen.laps
    q, parts = (1, programs) if pooled else (p, chosen.splits)
    behind = 3 * parts * q  # columns
    if pooled and laps > 1:
        parts = chosen.parts(p)
        behind = parts * laps + 2 * chosen.splits * p
    partials = torch.empty(2 * parts * q * c + behind, dtype=torch.float32, device=x.device)
    hidden, _, inverse_m_at = left or (None, None, inverse_m)
    begin, after = chain(x.device)
    rows, sums = statistics, None
    if laps > 1 and statistics is not None:  # shares of them
        rows = torch.empty(2 * n * p * laps, dtype=torch.float32, device=x.device)
    forward.sweep[(programs,)](
        x, x, hidden, None, None, rows, partials, inverse_m_at, n, *chosen.extents(p, c), chosen.run, chosen.splits, 1,
        mix_eps, scale, eps, *NOTHING.buffers, *NOTHING.numbers, MASKED=left is not None, POOLED=pooled, MEASURE=True,
        NORMALIZE=False, EARLY=chosen.early, **chosen.in_sweeps, **begin, **chosen.constants,
    )  # fmt: skip
    if laps > 1 and rows is not None and statistics is not None:
        sums = partials[-2 * chosen.splits * p :]
        unite(rows, statistics, sums, n, p, c, chosen)
    if pooled and laps > 1:
        joined = torch.empty(2 * c + 3, dtype=torch.float32, device=x.device)
        tall = min(128, launch.power_of_two(parts))
        block = max(8, 512 // tall)
        sharing.pool[(launch.cdiv(c, block) + (sums is not None),)](
            partials, sums, joined, chosen.splits * p, c, parts, laps, EARLY=chosen.early,
            BR=4096, BS=tall, BLOCK=block, num_warps=4, **after,
        )  # fmt: skip
        return joined, 1
    while parts > most:
        across = chosen.across and q > 1
        outer, inner = (c, q) if across else (q, c)
        tile = _tall(parts, inner)
        groups = launch.cdiv(parts, tile["BS"])
        joined = torch.empty(groups * q * (2 * c + 3), dtype=torch.float32, device=x.device)
        sharing.merge[(outer * launch.cdiv(inner, tile["BLOCK"]), groups)](
            partials, joined, q, c, parts, groups, ACROSS=across, EARLY=chosen.early, **tile, **after
        )
        partials, parts = joined, groups
    return partials, parts


def unite(
    shares: Tensor, statistics: Tensor, sums: Tensor | None, n: int, p: int, c: int, chosen: launch.Launch
) -> None:
    """Statistics of rows, behind those of ``c`` features, and their ``sums``, of the shares that laps have.

    A thread has all shares of a row, whatever the tile.
    """
    samples = min(32, launch.power_of_two(chosen.run))
    shape = launch.power_of_two(chosen.laps), samples, 1, 128 // samples
    sharing.unite[(launch.cdiv(p, shape[-1]) * chosen.splits,)](
        shares, statistics, sums, n, p, c, chosen.run, chosen.splits, chosen.laps,
        TILE=shape, EARLY=chosen.early, num_warps=4, enable_fp_fusion=False, **chain(shares.device).after,
    )  # fmt: skip


def _tall(number: int, width: int) -> dict[str, int]:
    """A tile that reads so many rows at once; if there are many, of few columns, so that there are many such tiles.

    (4096, 1, 4096) takes 1.79 times an addition backward in float32 with 16 columns, 1.81 with eight; but forward
    (6272, 1, 512) takes 2.2 times a copy with 16, 2.1 with eight.
    """
    rows = min(4096, launch.power_of_two(number))
    if rows <= 16:
        return {"BS": rows, "BLOCK": 256, "num_warps": 4}
    columns = 16 if width >= 2048 else 8
    return {"BS": rows, "BLOCK": min(columns, 8192 // rows), "num_warps": max(1, min(16, rows // 64))}


def _backward(
    x: Tensor,
    dy: Tensor,
    gamma: Tensor | None,
    statistics: Tensor,
    left: Entries | None,
    slabs: Slabs,
    numbers: Options,
) -> tuple[Tensor, Tensor]:
    """Gradients of the input, and as two rows of gamma and beta; ``dy`` lies as the input does."""
    n, p, c, _, pooled = slabs
    dx = torch.empty_like(x)
    chosen = choose(slabs, x.element_size(), x.device, left is not None, True)
    eps, mix_eps, scale, inverse_m = numbers
    begin, after = chain(x.device)
    lines = 1 if pooled else chosen.flags if chosen.laps == 1 else chosen.places(p)
    rows = torch.empty(1, lines, 2 * c, dtype=torch.float32, device=x.device)
    if chosen.resident:
        backward.resident[(chosen.programs,)](
            x, dy, dx, gamma, statistics, rows, inverse_m, n, p, c, mix_eps, scale, eps,
            **begin, **chosen.constants,
        )  # fmt: skip
        return dx, parameters(rows)

    hidden, counts, inverse_m_at = left or (None, None, inverse_m)
    programs = chosen.blocks * chosen.splits
    laps = chosen.laps
    sums = None if chosen.late else torch.empty(n, laps, 2 * p, dtype=torch.float32, device=x.device)

    def sweep(sums: Tensor | None, partials: Tensor | None, parts: int, sum_: bool, differentiate: bool) -> None:
        backward.sweep[(programs,)](
            x, dy, dx, hidden, gamma, statistics, partials, sums, rows, inverse_m_at, counts, n, *chosen.extents(p, c),
            chosen.run, chosen.splits, parts, mix_eps, scale, eps, MASKED=left is not None, POOLED=pooled,
            SUM=sum_, DIFFERENTIATE=differentiate, EARLY=chosen.early, **chosen.in_sweeps,
            **(begin if sum_ else after), **chosen.constants,
        )  # fmt: skip

    if not chosen.in_two(pooled):
        sweep(sums, None, 1, True, True)
        return dx, parameters(rows)
    q, parts = (1, programs if laps == 1 else chosen.parts(p)) if pooled else (p, chosen.splits)
    partials = torch.empty(3, parts, q * c, dtype=torch.float32, device=x.device)
    sweep(sums, partials, 1, True, False)
    if sums is not None and laps > 1:
        sums = summed(sums, chosen.early)
    if parts > (1 if pooled and laps > 1 else _PARTS):
        partials, parts = summed(partials, chosen.early), 1
    sweep(sums, partials, parts, False, True)
    return dx, parameters(rows)


def parameters(rows: Tensor) -> Tensor:
    """Gradients of gamma and beta, of what blocks of positions give, ``[1, blocks, 2 * C]``."""
    return summed(rows).view(2, -1)


def summed(parts: Tensor, early: bool = False) -> Tensor:
    """``[outer, number, width]``, summed over the number, always in the same order."""
    outer, number, width = parts.shape
    if number == 1:
        return parts.view(outer, width)
    total = torch.empty(outer, width, dtype=torch.float32, device=parts.device)
    tile = _tall(number, width)
    after = chain(parts.device).after
    blocks, flat = launch.cdiv(width, tile["BLOCK"]), outer > _GRID
    backward.add[(blocks * outer,) if flat else (blocks, outer)](
        parts, total, number, width, FLAT=flat, EARLY=early, **tile, **after
    )
    return total


class _Train(torch.autograd.Function):
    """Keeps the input and the statistics for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        left: Entries | None,
        slabs: Slabs,
        channel_dim: int,
        numbers: Options,
        remember: Remembered,
    ) -> tuple[Tensor, Tensor]:
        y, statistics = _forward(x, gamma, beta, left, slabs, numbers, remember)
        ctx.rest = left, slabs, channel_dim, numbers
        ctx.save_for_backward(x, gamma, beta, statistics)
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        return y, statistics

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 8
        x, gamma, beta, statistics = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives: through the plain formula
            return *differentiate(_plain, (x, gamma, beta), ctx, dy), *[None] * 5
        left, slabs, channel_dim, numbers = ctx.rest
        dx, rows = _backward(x, beside(dy, x, slabs, channel_dim), gamma, statistics, left, slabs, numbers)
        return dx, *gradients_of(rows, gamma, beta), *[None] * 5


def _slabs(x: Tensor, channel_dim: int, per_position: bool) -> Slabs:
    """Of what lies as the kernels want it."""
    slabs = Slabs.of(x, channel_dim, per_position)
    assert slabs is not None
    return slabs


@torch.library.custom_op("bln::train", mutates_args=())
@on_its_device
def _train(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, hidden: Tensor | None, count: Tensor | None,
    inverse_m_at: Tensor | None, channel_dim: int, per_position: bool, eps: float, mix_eps: float, scale: float,
    inverse_m: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    slabs = _slabs(x, channel_dim, per_position)
    return _forward(x, gamma, beta, _left(hidden, count, inverse_m_at), slabs, Options(eps, mix_eps, scale, inverse_m))


@torch.library.custom_op("bln::train_backward", mutates_args=())
@on_its_device
def _train_backward(
    x: Tensor, dy: Tensor, gamma: Tensor | None, statistics: Tensor, hidden: Tensor | None, count: Tensor | None,
    inverse_m_at: Tensor | None, channel_dim: int, per_position: bool, eps: float, mix_eps: float, scale: float,
    inverse_m: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    slabs, numbers = _slabs(x, channel_dim, per_position), Options(eps, mix_eps, scale, inverse_m)
    return _backward(
        x, beside(dy, x, slabs, channel_dim), gamma, statistics, _left(hidden, count, inverse_m_at), slabs, numbers
    )


def _left(hidden: Tensor | None, count: Tensor | None, inverse_m_at: Tensor | None) -> Entries | None:
    return None if hidden is None or count is None or inverse_m_at is None else Entries(hidden, count, inverse_m_at)


@_train.register_fake
def _(
    x: Tensor, gamma: Any, beta: Any, hidden: Any, count: Any, inverse_m_at: Any, channel_dim: int, per_position: bool,
    *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    slabs = _slabs(x, channel_dim, per_position)
    n, p, c = slabs[:3]
    return torch.empty_like(x), x.new_empty(statistics_size(n, p, c), dtype=torch.float32)


@_train_backward.register_fake
def _(
    x: Tensor,
    dy: Any,
    gamma: Any,
    statistics: Any,
    hidden: Any,
    count: Any,
    inverse_m_at: Any,
    channel_dim: int,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((2, x.shape[channel_dim]), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gamma, beta, hidden, count, inverse_m_at, *rest = inputs
    ctx.save_for_backward(x, gamma, beta, output[1], hidden, count, inverse_m_at)
    ctx.rest = rest


def _differentiate(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, gamma, beta, statistics, *left = ctx.saved_tensors
    dx, rows = torch.ops.bln.train_backward(x, dy, gamma, statistics, *left, *ctx.rest)
    return dx, *gradients_of(rows, gamma, beta), *[None] * 9


_train.register_autograd(_differentiate, setup_context=_keep)


def statistics_size(n: int, p: int, c: int) -> int:
    """Of the buffer that ``forward`` describes, with room for two programs for each position. There are no more: of
    blocks of 64 positions, up to 64 laps have ``p + 1``, or ``p + 64`` where each has its own, ``p`` being 64 at least.
    """
    return 2 * p * (c + n + 2)


def gradients_of(rows: Tensor, *parameters: Tensor | None) -> list[Tensor | None]:
    """One row for each, gamma and beta, in its type, if there is one."""
    return [None if of is None else row.to(of.dtype) for row, of in zip(rows.unbind(), parameters, strict=True)]


def _plain(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    left: Entries | None,
    slabs: Slabs,
    channel_dim: int,
    numbers: Options,
) -> Tensor:
    """The formula, in float32."""
    rows, mask = slabs.rows(x, channel_dim), None
    if left is not None:
        mask = left.hidden == 0
        rows = torch.where(mask[..., None], rows, 0)
    statistics = current(rows, mask, Spec(per_position=not slabs.pooled))
    inverse_m = rows.new_full((), numbers.inverse_m) if left is None else left.inverse_m
    y = transform(rows, statistics._replace(inverse_m=inverse_m), gamma, beta, numbers)
    return slabs.restore(y if mask is None else torch.where(mask[..., None], y, 0), x, channel_dim)
