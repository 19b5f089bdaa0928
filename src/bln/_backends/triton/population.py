"""The population, averaged with a training mini-batch in one launch: ``Population.update``."""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import counted, kernel, load


@triton.jit
def bessel(count):
    """``count / (count - 1)``; 1 where the count is 1."""
    return count / tl.maximum(count - 1, 1.0)


@triton.jit
def average(population, STATISTIC: tl.constexpr, new, m, momentum, known, q, real, at, inside):
    """Mix new values into one statistic: ``at`` is where they stand, ``q`` the position whose counters they have.

    They weigh at least ``momentum``, and as their samples where it is negative; exactly the new value at weight 1.
    """
    count = tl.load(population[5] + STATISTIC * known + q, mask=real, other=0) + 1
    total = tl.load(population[6] + STATISTIC * known + q, mask=real, other=0) + tl.cast(m, tl.int64)
    momentum = tl.cast(momentum, tl.float32)
    weight = tl.maximum(1 / count.to(tl.float32), momentum)
    weight = tl.where(momentum < 0, m / tl.maximum(total, 1).to(tl.float32), weight)
    kept = population[STATISTIC] + at
    old = tl.load(kept, mask=inside, other=0.0)
    moved = new - old
    tl.store(kept, tl.where(weight < 0.5, old + weight * moved, new - moved * (1 - weight)), mask=inside)


@triton.jit
def count_in(population, m, entries, known, q, real):
    """Count a mini-batch in all statistics, after they were averaged; a variance takes two entries."""
    tl.debug_barrier()  # every warp has read the counters before one writes
    row = tl.arange(0, 8)[None, :]
    at, enters = row * known + q, (row < 5) & (tl.where(row == 1, entries, 2.0) > 1) & real
    updates, samples = population[5] + at, population[6] + at
    tl.store(updates, tl.load(updates, mask=enters, other=0) + 1, mask=enters)
    tl.store(samples, tl.load(samples, mask=enters, other=0) + tl.cast(m, tl.int64), mask=enters)


@kernel
def update(
    mean, var, features, flags, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples,
    momentum, known, m, entries, Q, C, programs, BQ: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Average the first ``Q`` of the ``known`` positions with a mini-batch of the published form, ``two_pass.join``'s.

    Unless some of its variances are not finite: each of at most ``BF`` ``programs`` has counted them in ``flags``.
    """
    population = batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples
    m, entries = tl.cast(m, tl.float32), tl.cast(entries, tl.float32)
    program = tl.arange(0, BF)
    if tl.sum(load(flags + program, program < programs), 0) == 0:
        q = (tl.program_id(0) * BQ + tl.arange(0, BQ))[:, None]
        real = q < Q
        for start in range(0, C, BC):
            c = start + tl.arange(0, BC)[None, :]
            at, inside = tl.cast(q, tl.int64) * C + c, real & (c < C)
            average(population, 0, load(mean + at, inside), m, momentum, known, q, real, at, inside)
            if entries > 1:
                new = load(var + at, inside) * bessel(entries)
                average(population, 1, new, m, momentum, known, q, real, at, inside)
        average(population, 2, load(features + q, real), m, momentum, known, q, real, q, real)
        average(population, 3, load(features + Q + q, real) * bessel(m), m, momentum, known, q, real, q, real)
        average(population, 4, real * 0.0 + 1 / m, m, momentum, known, q, real, q, real)
        count_in(population, m, entries, known, q, real)


# ---- the grouped form


@triton.jit
def sections(statistics, N, C, groups):
    """The grouped form's statistics of features and of samples and groups, and how many of the latter there are."""
    return statistics + 4, statistics + 4 + 4 * C, tl.cast(N, tl.int64) * groups


@triton.jit
def over_samples(features, counts, g, N, groups, splits):
    """Feature statistics of some groups, summed over the samples that have any real entry."""
    g = g[None, :]
    total = tl.zeros([128, 32], tl.float32)
    for first in range(0, N, 128):
        n = first + tl.arange(0, 128)[:, None]
        real = (n < N) & (g < groups)
        if counts is not None:
            real = real & (counted(counts, n, n < N, N, splits) > 0)
        total += tl.load(features + tl.cast(n, tl.int64) * groups + g, mask=real, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def update_grouped(statistics, counts, population, N, C, splits, groups, m, entries, momentum):
    """Average with a mini-batch of the grouped form, ``affine.join``'s, unless its statistics are not finite."""
    lane, few = tl.arange(0, 1024), tl.arange(0, 32)
    batch, features, width = sections(statistics, N, C, groups)
    bad = 0.0
    for start in range(0, C, 1024):
        var = tl.load(batch + C + start + lane, mask=start + lane < C, other=0.0, cache_modifier=".cg")
        bad += tl.sum(tl.where(var < float("inf"), 0.0, 1.0))  # NaN is not less, either
    for start in range(0, groups, 32):
        var = over_samples(features + width, counts, start + few, N, groups, splits)
        bad += tl.sum(tl.where(var < float("inf"), 0.0, 1.0))
    if (bad == 0) & (m > 0):
        for start in range(0, C, 1024):
            c = start + lane
            mean = tl.load(batch + c, mask=c < C, other=0.0, cache_modifier=".cg")
            average(population, 0, mean, m, momentum, 1, 0, True, c, c < C)
            if entries > 1:
                var = tl.load(batch + C + c, mask=c < C, other=0.0, cache_modifier=".cg")
                average(population, 1, var * bessel(entries), m, momentum, 1, 0, True, c, c < C)
        for start in range(0, groups, 32):
            g = start + few
            mean = over_samples(features, counts, g, N, groups, splits) / m
            average(population, 2, mean, m, momentum, 1, 0, True, g, g < groups)
            var = over_samples(features + width, counts, g, N, groups, splits) / m
            average(population, 3, var * bessel(m), m, momentum, 1, 0, True, g, g < groups)
        average(population, 4, 1 / m, m, momentum, 1, 0, True, 0, True)
        count_in(population, m, entries, 1, 0, True)


@kernel
def update_unmasked(
    statistics, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples, momentum,
    N, C, P, groups,
):  # fmt: skip
    """Average the population with a mini-batch of the grouped form without a mask, alone: for compiled graphs."""
    population = batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples
    m = tl.cast(N, tl.float32)
    update_grouped(statistics, None, population, N, C, 1, groups, m, m * P, momentum)
