"""Kernels that average a training mini-batch into the population: ``Population.update`` in one launch.

The population is the buffers ``primitives.POPULATION``: five statistics in float32, ``[positions]``, the batch ones
``[positions, C]``, grouped feature ones ``[groups]``; then ``updates`` and ``samples``, ``[5, positions]`` int64, which
count mini-batches and samples in each statistic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import kernel, load, sum_counts


@triton.jit
def bessel(count):
    """Return ``count / (count - 1)``; 1 where the count is 1."""
    return count / tl.maximum(count - 1, 1.0)


@triton.jit
def average(population, STATISTIC: tl.constexpr, new, m, momentum, positions, q, q_inside, offs, inside):
    """Average new values into one statistic, at ``offs``; ``q`` is the position whose counters they use.

    A new value weighs at least ``momentum``, or if that is negative, in proportion to its samples. At weight 1 the
    result is the new value exactly.
    """
    count = tl.load(population[5] + STATISTIC * positions + q, mask=q_inside, other=0) + 1
    total = tl.load(population[6] + STATISTIC * positions + q, mask=q_inside, other=0) + tl.cast(m, tl.int64)
    momentum = tl.cast(momentum, tl.float32)
    weight = tl.maximum(1 / count.to(tl.float32), momentum)
    weight = tl.where(momentum < 0, m / tl.maximum(total, 1).to(tl.float32), weight)
    pointers = population[STATISTIC] + offs
    old = tl.load(pointers, mask=inside, other=0.0)
    delta = new - old
    tl.store(pointers, tl.where(weight < 0.5, old + weight * delta, new - delta * (1 - weight)), mask=inside)


@triton.jit
def increment_counters(population, m, entries, positions, q, q_inside):
    """Count the mini-batch in all statistics, once they are averaged; a single entry has no variance to count."""
    tl.debug_barrier()  # every warp has read the counters before one writes
    statistic = tl.arange(0, 8)[None, :]
    offs = statistic * positions + q
    counted = (statistic < 5) & (tl.where(statistic == 1, entries, 2.0) > 1) & q_inside
    updates, samples = population[5] + offs, population[6] + offs
    tl.store(updates, tl.load(updates, mask=counted, other=0) + 1, mask=counted)
    tl.store(samples, tl.load(samples, mask=counted, other=0) + tl.cast(m, tl.int64), mask=counted)


@kernel
def update(
    mean, var, feature_stats, nonfinite, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples,
    momentum, positions, m, entries, Q, C, programs, BQ: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Average a mini-batch of the published form into the first ``Q`` positions, unless a variance is not finite.

    Grid: ``cdiv(Q, BQ)``, one program for each block of positions. Reads what ``two_pass.join`` or
    ``persistent.forward`` wrote; ``nonfinite`` has a number from each of their ``programs``, at most ``BF``.
    """
    population = batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples
    m, entries = tl.cast(m, tl.float32), tl.cast(entries, tl.float32)
    program = tl.arange(0, BF)
    if tl.sum(load(nonfinite + program, program < programs), 0) == 0:
        q = (tl.program_id(0) * BQ + tl.arange(0, BQ))[:, None]
        q_inside = q < Q
        for start in range(0, C, BC):
            c = start + tl.arange(0, BC)[None, :]
            offs, inside = tl.cast(q, tl.int64) * C + c, q_inside & (c < C)
            average(population, 0, load(mean + offs, inside), m, momentum, positions, q, q_inside, offs, inside)
            if entries > 1:
                new = load(var + offs, inside) * bessel(entries)
                average(population, 1, new, m, momentum, positions, q, q_inside, offs, inside)
        average(population, 2, load(feature_stats + q, q_inside), m, momentum, positions, q, q_inside, q, q_inside)
        var_F = load(feature_stats + Q + q, q_inside) * bessel(m)
        average(population, 3, var_F, m, momentum, positions, q, q_inside, q, q_inside)
        average(population, 4, q_inside * 0.0 + 1 / m, m, momentum, positions, q, q_inside, q, q_inside)
        increment_counters(population, m, entries, positions, q, q_inside)


# ---- the grouped form, which has one position


@triton.jit
def sections(statistics, N, C, groups):
    """Return pointers to the two sections of ``affine``'s ``statistics``, and the number of (sample, group) pairs."""
    return statistics + 4, statistics + 4 + 4 * C, tl.cast(N, tl.int64) * groups


@triton.jit
def sum_over_samples(values, counts, g, N, groups, splits):
    """Sum a value of (sample, group) pairs, ``[N, groups]``, over the samples with any valid position."""
    g = g[None, :]
    total = tl.zeros([128, 32], tl.float32)
    for first in range(0, N, 128):
        n = first + tl.arange(0, 128)[:, None]
        valid = (n < N) & (g < groups)
        if counts is not None:
            valid = valid & (sum_counts(counts, n, n < N, N, splits) > 0)
        total += tl.load(values + tl.cast(n, tl.int64) * groups + g, mask=valid, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def update_grouped(statistics, counts, population, N, C, splits, groups, m, entries, momentum):
    """Average a mini-batch of the grouped form into the population, in one program, unless a variance is not finite."""
    lanes, group_lanes = tl.arange(0, 1024), tl.arange(0, 32)  # .cg: other programs wrote these, so L1 may be stale
    batch, features, pairs = sections(statistics, N, C, groups)
    nonfinite = 0.0
    for start in range(0, C, 1024):
        var = tl.load(batch + C + start + lanes, mask=start + lanes < C, other=0.0, cache_modifier=".cg")
        nonfinite += tl.sum(tl.where(var < float("inf"), 0.0, 1.0))  # NaN fails the comparison, too
    for start in range(0, groups, 32):
        var = sum_over_samples(features + pairs, counts, start + group_lanes, N, groups, splits)
        nonfinite += tl.sum(tl.where(var < float("inf"), 0.0, 1.0))
    if (nonfinite == 0) & (m > 0):
        for start in range(0, C, 1024):
            c = start + lanes
            mean = tl.load(batch + c, mask=c < C, other=0.0, cache_modifier=".cg")
            average(population, 0, mean, m, momentum, 1, 0, True, c, c < C)
            if entries > 1:
                var = tl.load(batch + C + c, mask=c < C, other=0.0, cache_modifier=".cg")
                average(population, 1, var * bessel(entries), m, momentum, 1, 0, True, c, c < C)
        for start in range(0, groups, 32):
            g = start + group_lanes
            mean = sum_over_samples(features, counts, g, N, groups, splits) / m
            average(population, 2, mean, m, momentum, 1, 0, True, g, g < groups)
            var = sum_over_samples(features + pairs, counts, g, N, groups, splits) / m
            average(population, 3, var * bessel(m), m, momentum, 1, 0, True, g, g < groups)
        average(population, 4, 1 / m, m, momentum, 1, 0, True, 0, True)
        increment_counters(population, m, entries, 1, 0, True)


@kernel
def update_unmasked(
    statistics, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples, momentum,
    N, C, P, groups,
):  # fmt: skip
    """Update the population as ``affine.join`` does, without a mask, by one program of its own: for compiled graphs."""
    population = batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples
    m = tl.cast(N, tl.float32)
    update_grouped(statistics, None, population, N, C, 1, groups, m, m * P, momentum)
