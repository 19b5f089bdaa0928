"""Training on statistics over all ranks: the sweeps of ``forward`` and ``backward``, with a collective between them.

Messages are those of ``bln.synchronized``, so that other ranks may go other ways. Forward, one is a single partial
result as ``forward.sweep`` leaves it, of all positions that statistics are kept for; pooled, the samples stand behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import synchronized
from . import backward, forward, launch, reductions, tiles
from .population import NOTHING, buffers, mix, weight_of, written
from .slabs import (
    Options,
    Slabs,
    as_it_came,
    beside,
    chain,
    choose,
    features_last,
    on_its_device,
    options,
    processors,
)
from .training import gradients_of, measure, parameters, statistics_size, summed

if TYPE_CHECKING:
    from ..population import Population


@triton.jit
def _sum(values, step, part, parts, real, BS: tl.constexpr):
    """Over parts, ``step`` apart."""
    total = real.to(tl.float32) * 0.0
    for start in range(0, parts, BS):
        found = real & (start + part < parts)
        total += tl.sum(tl.load(values + (start + part) * step, mask=found, other=0.0), 0, keep_dims=True)
    return total


@triton.jit
def _join(means, squares, counts, step, row_step, part, parts, real, inside, BS: tl.constexpr):
    """Parts that lie ``step`` apart, and their counts ``row_step``, as one."""
    mean = inside.to(tl.float32) * 0.0
    square = mean
    count = mean
    for start in range(0, parts, BS):
        found = inside & (start + part < parts)
        some_means = tl.load(means + (start + part) * step, mask=found, other=0.0)
        some_squares = tl.load(squares + (start + part) * step, mask=found, other=0.0)
        some_counts = tl.load(counts + (start + part) * row_step, mask=real & (start + part < parts), other=0.0)
        some = reductions.joined(some_means, some_squares, some_counts)
        mean, square, count = reductions.chan(mean, square, count, some[0], some[1], some[2])
    return count, mean, square


@triton.jit(do_not_specialize=["P", "C", "known", "parts", "m"])
def pack(
    partials, message, P, C, known, parts, m,
    ACROSS: tl.constexpr, POOLED: tl.constexpr, CHAINED: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Partial results of ``P`` positions as the message of a rank, for ``known`` of them, features last."""
    tiles.wait_for_previous(CHAINED)
    part = tl.arange(0, BS)[:, None]
    columns, all_columns = P.to(tl.int64) * C, known.to(tl.int64) * C
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    p, c = at // C, at % C
    real, inside = p < P, at < all_columns
    means, counts = partials + tiles.column_offset(p, c, P, C, ACROSS), partials + 2 * parts * columns + p
    count, mean, square = _join(means, means + parts * columns, counts, columns, P, part, parts, real, real, BS)
    tl.store(message + at, mean, mask=inside)
    tl.store(message + all_columns + at, square, mask=inside)
    rows, first = message + 2 * all_columns + p, inside & (c == 0)
    tl.store(rows, count, mask=first)
    tl.store(rows + known, _sum(counts + parts * P, P, part, parts, real, BS), mask=first)
    tl.store(rows + 2 * known, _sum(counts + 2 * parts * P, P, part, parts, real, BS), mask=first)
    if POOLED:
        tl.store(rows + 3 * known, count * 0.0 + m, mask=first)


@triton.jit
def _row(table, row, number: tl.constexpr):
    """One row, out of the registers."""
    return tl.sum(tl.where(row == number, table, 0.0), 0, keep_dims=True)


@triton.jit(do_not_specialize=["ranks", "P", "C", "known"])
def join(
    messages, joined, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples,
    ranks, P, C, known, momentum,
    ACROSS: tl.constexpr, POOLED: tl.constexpr, LEARN: tl.constexpr, AVERAGE: tl.constexpr,
    BS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """The messages of all ranks as one partial result of ``P`` positions, and ``1/m`` behind it; and the population,
    ``Population.update`` of all positions that are ``known``.

    A mini-batch with a row variance that is not finite does not enter: NaN and infinity show in them. A batch variance
    may still overflow, which keeps out its position alone.
    """
    part = tl.arange(0, BS)[:, None, None]
    columns, own_columns = known.to(tl.int64) * C, P.to(tl.int64) * C
    step = 2 * columns + (4 if POOLED else 3) * known
    check = 0.0
    if LEARN:
        for start in range(0, known, BF):
            p = start + tl.arange(0, BF)[None, :, None]
            check += tl.sum(_sum(messages + 2 * (columns + known) + p, step, part, ranks, p < known, BS) * 0.0)
    for block in range(tl.program_id(0), tl.cdiv(known, BP), tl.num_programs(0)):
        p = block * BP + tl.arange(0, BP)[None, :, None]
        real, own, counts = p < known, p < P, messages + 2 * columns + p
        count = _sum(counts, step, part, ranks, real, BS)
        sum_mean = _sum(counts + known, step, part, ranks, real, BS)
        sum_var = _sum(counts + 2 * known, step, part, ranks, real, BS)
        m = count
        if POOLED:
            m = _sum(counts + 3 * known, step, part, ranks, real, BS)
        one_over_m = 1.0 / tl.maximum(m, 1.0)
        tl.store(joined + 2 * own_columns + p, count, mask=own)
        tl.store(joined + 2 * own_columns + P + p, sum_mean, mask=own)
        tl.store(joined + 2 * own_columns + 2 * P + p, sum_var, mask=own)
        tl.store(joined + 2 * own_columns + 3 * P + p, one_over_m, mask=own)
        enters = real & (tl.where(check == 0, count, 0.0) > 0)
        row = tl.arange(0, 8)[:, None, None]  # of the counters: one for each statistic
        if LEARN:
            counter, in_row = row * known + p, (row < 5) & real
            seen = tl.load(updates + counter, mask=in_row, other=0) + 1
            total = tl.load(samples + counter, mask=in_row, other=0) + m.to(tl.int64)
            weight = weight_of(seen, tl.maximum(total, 1), m, momentum, AVERAGE)
            old_mean_F = tl.load(feature_mean + p, mask=real, other=0.0)
            old_var_F = tl.load(feature_var + p, mask=real, other=0.0)
            old_m = tl.load(inverse_m + p, mask=real, other=0.0)
        overflow = real.to(tl.float32) * 0.0
        for start in range(0, C, BC):
            c = start + tl.arange(0, BC)[None, None, :]
            inside, at = real & (c < C), p.to(tl.int64) * C + c
            _, mean, square = _join(
                messages + at, messages + columns + at, counts, step, step, part, ranks, real, inside, BS
            )
            to = joined + tiles.column_offset(p, c, P, C, ACROSS)
            tl.store(to, mean, mask=own & inside)
            tl.store(to + own_columns, square, mask=own & inside)
            overflow += tl.sum(square * 0.0, 2, keep_dims=True)
        enters = enters & (overflow == 0)
        if LEARN:
            for start in range(0, C, BC):
                c = start + tl.arange(0, BC)[None, None, :]
                inside, at = real & (c < C), p.to(tl.int64) * C + c
                _, mean, square = _join(
                    messages + at, messages + columns + at, counts, step, step, part, ranks, real, inside, BS
                )
                old = tl.load(batch_mean + at, mask=inside, other=0.0)
                tl.store(batch_mean + at, mix(old, mean, _row(weight, row, 0)), mask=inside & enters)
                old = tl.load(batch_var + at, mask=inside, other=0.0)
                new = square / tl.maximum(count - 1, 1.0)  # unbiased
                tl.store(batch_var + at, mix(old, new, _row(weight, row, 1)), mask=inside & enters & (count > 1))
            tl.debug_barrier()  # every warp holds a copy of the counters, and must have read before one writes
            divisor = tl.maximum(count, 1.0)
            var_F = sum_var / divisor * (m / tl.maximum(m - 1, 1.0))
            tl.store(feature_mean + p, mix(old_mean_F, sum_mean / divisor, _row(weight, row, 2)), mask=enters)
            tl.store(feature_var + p, mix(old_var_F, var_F, _row(weight, row, 3)), mask=enters)
            tl.store(inverse_m + p, mix(old_m, one_over_m, _row(weight, row, 4)), mask=enters)
            entered = in_row & enters & ((row != 1) | (count > 1))  # a variance takes two entries
            tl.store(updates + counter, seen, mask=entered)
            tl.store(samples + counter, total, mask=entered)


@on_its_device
def train(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    task: synchronized.Task,
    remember: tuple[Population, float | None] | None,
) -> Tensor:
    """Algorithm 1 of the samples of all ranks; with ``remember``, a population and its momentum learn of them."""
    slabs = Slabs.of(x, task.channel_dim, task.spec.per_position)
    if slabs is None:
        rows = features_last(x, task.channel_dim)
        return as_it_came(
            train(rows, gamma, beta, task._replace(channel_dim=x.dim() - 1), remember), x, task.channel_dim
        )
    numbers = options(slabs.c, task.spec.eps, task.spec.mix_eps, task.spec.dim_scale, x.shape[0])
    y: Tensor = _Train.apply(x, gamma, beta, slabs, numbers, task, remember)  # type: ignore[no-untyped-call]
    return y


def _message(
    x: Tensor, statistics: Tensor, slabs: Slabs, numbers: Options, chosen: launch.Launch, task: synchronized.Task
) -> Tensor:
    """The first sweep, and what this rank says of its samples."""
    p, c, known = 1 if slabs.pooled else slabs.p, slabs.c, task.known
    partials, parts = measure(x, statistics, None, slabs, numbers, chosen, most=chosen.blocks * chosen.splits)
    if parts == 1 and task.spec.per_position and not slabs.across and known == p:
        return partials
    message = torch.empty(task.size(c), dtype=torch.float32, device=x.device)
    tall = min(256, launch.power_of_two(parts))
    block = 2048 // tall
    pack[(launch.cdiv(known * c, block),)](
        partials, message, p, c, known, parts, x.shape[0],
        ACROSS=chosen.across, POOLED=not task.spec.per_position, BS=tall, BLOCK=block, **chain(x.device).after,
    )  # fmt: skip
    return message


def _join_messages(
    messages: Tensor,
    p: int,
    c: int,
    across: bool,
    task: synchronized.Task,
    remember: tuple[Population, float | None] | None,
) -> Tensor:
    """What ``join`` makes of them."""
    ranks, known = task.group.size(), task.known
    joined = torch.empty(p * (2 * c + 4), dtype=torch.float32, device=messages.device)
    kept: list[Tensor] = []
    momentum: float | None = 0.0
    if remember is not None:
        remember[0].learned(task.positions, True)
        kept, momentum = buffers(remember[0]), remember[1]
    tall = min(8, launch.power_of_two(ranks))
    wide = min(8192 // tall, launch.power_of_two(c))
    high = max(1, min(2048 // (tall * wide), launch.power_of_two(known)))
    programs = min(launch.cdiv(known, high), 2 * processors(messages.device))
    join[(programs,)](
        messages, joined, *(kept or (None,) * 7), ranks, p, c, known, 0.0 if momentum is None else momentum,
        ACROSS=across, POOLED=not task.spec.per_position, LEARN=remember is not None, AVERAGE=momentum is None,
        BS=tall, BP=high, BC=wide, BF=min(1024, launch.power_of_two(known)),
        num_warps=max(1, min(8, tall * high * wide // 256)),
    )  # fmt: skip
    written(kept)
    return joined


class _Train(torch.autograd.Function):
    """Keeps the input and the statistics for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        slabs: Slabs,
        numbers: Options,
        task: synchronized.Task,
        remember: tuple[Population, float | None] | None,
    ) -> Tensor:
        n, p, c, _, pooled = slabs
        q = 1 if pooled else p
        statistics = torch.empty(statistics_size(n, p, c), dtype=torch.float32, device=x.device)
        chosen = choose(slabs, x.element_size(), x.device, False, False, hold=False)
        message = _message(x, statistics, slabs, numbers, chosen, task)
        joined = _join_messages(synchronized.gather(message, task.group), q, c, chosen.across, task, remember)
        inverse_m = joined[q * (2 * c + 3) :]
        y = torch.empty_like(x)
        concluding = chosen.concluding(p, c, pooled)
        forward.sweep[(chosen.blocks * chosen.splits + bool(concluding),)](
            x, y, None, gamma, beta, statistics, joined, inverse_m, n, *chosen.extents(p, c), chosen.run, chosen.splits,
            1, numbers.mix_eps, numbers.scale, numbers.eps, *NOTHING.buffers, *NOTHING.numbers, MASKED=False,
            POOLED=pooled, MEASURE=False, NORMALIZE=True, ALL=concluding, SHARED=True, **chosen.in_sweeps,
            **chain(x.device).begin, **chosen.constants,
        )  # fmt: skip
        ctx.rest = slabs, numbers, task
        ctx.save_for_backward(x, gamma, beta, statistics, joined[2 * q * c :], inverse_m)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, statistics, counts, inverse_m = ctx.saved_tensors
        slabs, numbers, task = ctx.rest
        n, p, c, _, pooled = slabs
        dy = beside(dy, x, slabs, task.channel_dim)
        chosen = choose(slabs, x.element_size(), x.device, False, True, hold=False)
        programs = chosen.blocks * chosen.splits
        laps = chosen.laps
        q, blocks, parts = p, chosen.blocks if laps == 1 else chosen.places(p), chosen.splits
        if pooled:
            q, blocks, parts = 1, 1, programs if laps == 1 else chosen.parts(p)
        sums = None if chosen.late else torch.empty(n, laps, 2 * p, dtype=torch.float32, device=x.device)
        begin = chain(x.device).begin

        def sweep(sums: Tensor | None, dx: Tensor, partials: Tensor, first: bool) -> None:
            backward.sweep[(programs,)](
                x, dy, dx, None, gamma, statistics, partials, sums, None, inverse_m, counts, n, *chosen.extents(p, c),
                chosen.run, chosen.splits, 1, numbers.mix_eps, numbers.scale, numbers.eps, MASKED=False,
                POOLED=pooled, SUM=first, DIFFERENTIATE=not first, SHARED=True, **chosen.in_sweeps, **begin,
                **chosen.constants,
            )  # fmt: skip

        partials = torch.empty(1, parts, 2 * c * (q + blocks), dtype=torch.float32, device=x.device)
        sweep(sums, dy, partials, True)
        message, rows = torch.split(summed(partials).view(-1), [2 * q * c, 2 * blocks * c])
        gradient, dx = parameters(rows.view(1, blocks, 2 * c)), None
        if ctx.needs_input_grad[0]:
            message = synchronized.add_up(synchronized.fit(message.view(q, 2, c), (task.known,)), task)
            dx = torch.empty_like(x)
            sweep(sums if sums is None or laps == 1 else summed(sums), dx, message, False)
        return dx, *gradients_of(gradient, gamma, beta), None, None, None, None
