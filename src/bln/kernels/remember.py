"""Population statistics, updated in two launches in place of thirty: what ``Population.update`` does without a mask."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def average(
    batch_var, feature_mean, feature_var, averages, finite, N, P, C,
    BP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Feature statistics of some positions averaged over samples, and whether all variances there are finite."""
    p = (tl.program_id(0) * BP + tl.arange(0, BP))[:, None]
    mean = tl.zeros([BP, BN], tl.float32)
    var = tl.zeros([BP, BN], tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)[None, :]
        mean += tl.load(feature_mean + p.to(tl.int64) * N + n, mask=(p < P) & (n < N), other=0.0) / N
        var += tl.load(feature_var + p.to(tl.int64) * N + n, mask=(p < P) & (n < N), other=0.0) / N
    mean_F, var_F = tl.sum(mean, 1, keep_dims=True), tl.sum(var, 1, keep_dims=True)
    tl.store(averages + p, mean_F, mask=p < P)
    tl.store(averages + P + p, var_F, mask=p < P)
    bad = tl.sum(1 - (var_F < float("inf")).to(tl.int32))  # NaN is not below infinity
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)[None, :]
        v = tl.load(batch_var + p.to(tl.int64) * C + c, mask=(p < P) & (c < C), other=0.0)
        bad += tl.sum(1 - (v < float("inf")).to(tl.int32))
    tl.store(finite + tl.program_id(0), (bad == 0).to(tl.int32))


@triton.jit
def _mix(population, new, weight, mask):
    """``torch.lerp`` in place; exactly the new value at weight 1."""
    old = tl.load(population, mask=mask, other=0.0)
    moved = new - old
    tl.store(population, tl.where(weight < 0.5, old + weight * moved, new - moved * (1 - weight)), mask=mask)


@triton.jit
def _count(updates, samples, at, inside, m, momentum, PLAIN: tl.constexpr):
    """One more mini-batch for a statistic; its weight."""
    count = tl.load(updates + at, mask=inside, other=0) + 1
    total = tl.load(samples + at, mask=inside, other=0) + m
    tl.debug_barrier()  # every warp holds a copy of these, and must have read before one writes
    tl.store(updates + at, count, mask=inside)
    tl.store(samples + at, total, mask=inside)
    if PLAIN:
        return m / total.to(tl.float32)
    return tl.maximum(1 / count.to(tl.float32), momentum)


@triton.jit
def enter(
    finite, blocks, averages, new_mean, new_var,
    batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples,
    P, C, known, m, entries_factor, m_factor, momentum,
    PLAIN: tl.constexpr, HAS_VARIANCE: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """The five statistics of some positions, if all are finite everywhere."""
    bad = tl.zeros([BF], tl.int32)
    for start in range(0, blocks, BF):
        at = start + tl.arange(0, BF)
        bad += 1 - tl.load(finite + at, mask=at < blocks, other=1)
    p = (tl.program_id(0) * BP + tl.arange(0, BP))[:, None]
    inside = p < tl.where(tl.sum(bad) == 0, P, 0)
    weight = _count(updates, samples, p, inside, m, momentum, PLAIN)
    weight_var = weight
    if HAS_VARIANCE:
        weight_var = _count(updates, samples, known + p, inside, m, momentum, PLAIN)
    weight_F = _count(updates, samples, 2 * known + p, inside, m, momentum, PLAIN)
    _mix(feature_mean + p, tl.load(averages + p, mask=inside, other=0.0), weight_F, inside)
    weight_F = _count(updates, samples, 3 * known + p, inside, m, momentum, PLAIN)
    _mix(feature_var + p, tl.load(averages + P + p, mask=inside, other=0.0) * m_factor, weight_F, inside)
    weight_m = _count(updates, samples, 4 * known + p, inside, m, momentum, PLAIN)
    _mix(inverse_m + p, 1.0 / m + tl.zeros([BP, 1], tl.float32), weight_m, inside)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)[None, :]
        at, real = p.to(tl.int64) * C + c, inside & (c < C)
        _mix(batch_mean + at, tl.load(new_mean + at, mask=real, other=0.0), weight, real)
        if HAS_VARIANCE:
            _mix(batch_var + at, tl.load(new_var + at, mask=real, other=0.0) * entries_factor, weight_var, real)
