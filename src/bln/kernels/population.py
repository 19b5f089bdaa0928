"""Population statistics, updated in one launch where operators take thirty: ``Population.update`` without a mask."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(population, new, weight, inside):
    """``torch.lerp`` in place; exactly the new value at weight 1."""
    old = tl.load(population, mask=inside, other=0.0)
    moved = new - old
    tl.store(population, tl.where(weight < 0.5, old + weight * moved, new - moved * (1 - weight)), mask=inside)


@triton.jit
def _count(updates, samples, at, inside, m, momentum, AVERAGE: tl.constexpr):
    """One more mini-batch for a statistic; its weight."""
    count = tl.load(updates + at, mask=inside, other=0) + 1
    total = tl.load(samples + at, mask=inside, other=0) + m
    tl.debug_barrier()  # every warp holds a copy of these, and must have read before one writes
    tl.store(updates + at, count, mask=inside)
    tl.store(samples + at, total, mask=inside)
    if AVERAGE:
        return m / total.to(tl.float32)
    return tl.maximum(1 / count.to(tl.float32), momentum)


@triton.jit(do_not_specialize=["programs", "N", "P", "C", "positions", "known", "m"])
def enter(
    statistics, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples,
    programs, N, P, C, positions, known, m, entries_factor, m_factor, momentum,
    ACROSS: tl.constexpr, AVERAGE: tl.constexpr, SPREAD: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Let the statistics of some positions in, if those of all positions are finite.

    Args:
        statistics: What ``forward`` wrote.
        batch_mean, ...: The population, for ``known`` positions, of which the first ``positions`` are met here.
        programs: How many wrote whether they met only finite variances.
        entries_factor, m_factor: Make variances unbiased.
        ACROSS: Positions lie side by side in the statistics, as in the input.
        AVERAGE: Weigh by samples; else by ``momentum``.
        SPREAD: There are two entries or more behind a batch variance.
    """
    columns = P.to(tl.int64) * C
    averages = statistics + 2 * (columns + P.to(tl.int64) * N)
    bad = tl.zeros([BF], tl.float32)
    for start in range(0, programs, BF):
        at = start + tl.arange(0, BF)
        bad += 1.0 - tl.load(averages + 2 * P + at, mask=at < programs, other=1.0)
    p = (tl.program_id(0) * BP + tl.arange(0, BP))[:, None]
    inside = p < tl.where(tl.sum(bad) == 0, positions, 0)

    weight = _count(updates, samples, p, inside, m, momentum, AVERAGE)
    weight_var = weight
    if SPREAD:
        weight_var = _count(updates, samples, known + p, inside, m, momentum, AVERAGE)
    weight_F = _count(updates, samples, 2 * known + p, inside, m, momentum, AVERAGE)
    _mix(feature_mean + p, tl.load(averages + p, mask=inside, other=0.0), weight_F, inside)
    weight_F = _count(updates, samples, 3 * known + p, inside, m, momentum, AVERAGE)
    _mix(feature_var + p, tl.load(averages + P + p, mask=inside, other=0.0) * m_factor, weight_F, inside)
    weight_m = _count(updates, samples, 4 * known + p, inside, m, momentum, AVERAGE)
    _mix(inverse_m + p, 1.0 / m + tl.zeros([BP, 1], tl.float32), weight_m, inside)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)[None, :]
        at, real = p.to(tl.int64) * C + c, inside & (c < C)
        column = at
        if ACROSS:
            column = c.to(tl.int64) * P + p
        _mix(batch_mean + at, tl.load(statistics + column, mask=real, other=0.0), weight, real)
        if SPREAD:
            var = tl.load(statistics + columns + column, mask=real, other=0.0) * entries_factor
            _mix(batch_var + at, var, weight_var, real)
