"""The population of the published form, averaged with a training mini-batch in one launch: ``Population.update``."""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import bessel, mix, newest_weight


@triton.jit
def average(kept, new, counter, m, momentum, updates, samples, at, in_column, in_counter):
    """Average one statistic: ``counter`` is where its counters stand, ``at`` where its values do."""
    count = tl.load(updates + counter, mask=in_counter, other=0) + 1
    total = tl.load(samples + counter, mask=in_counter, other=0) + tl.cast(m, tl.int64)
    weight = newest_weight(count, tl.maximum(total, 1), m, momentum)
    old = tl.load(kept + at, mask=in_column, other=0.0)
    tl.store(kept + at, mix(old, new, weight), mask=in_column)


@triton.jit(
    do_not_specialize=["m", "entries", "Q", "C", "known", "programs"],
    do_not_specialize_on_alignment=[
        "batch_mean", "batch_var", "feature_mean", "feature_var", "inverse_m", "updates", "samples"
    ],
)  # fmt: skip
def update(
    mean, var, features, flags, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples,
    momentum, known, m, entries, Q, C, programs, BQ: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Average the first ``Q`` of the ``known`` positions with a mini-batch, if all of its variances are finite.

    Args:
        mean, var, features: The mini-batch, as ``two_pass.join`` writes it.
        flags: Variances that are not finite, counted by each of ``programs``.
        batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples: The population.
        momentum: The least weight of the new values; negative to weight them by samples.
        known: Positions of the population.
        m, entries: Samples, and entries that a batch statistic averages.
        Q, C: Positions of the mini-batch, and features.
    """
    m, entries = tl.cast(m, tl.float32), tl.cast(entries, tl.float32)
    bad = 0.0
    for start in range(0, programs, BF):
        program = start + tl.arange(0, BF)
        bad += tl.sum(tl.load(flags + program, mask=program < programs, other=0.0), 0)
    if bad == 0:
        q = (tl.program_id(0) * BQ + tl.arange(0, BQ))[:, None]
        real = q < Q
        for start in range(0, C, BC):
            c = start + tl.arange(0, BC)[None, :]
            at, inside = tl.cast(q, tl.int64) * C + c, real & (c < C)
            new = tl.load(mean + at, mask=inside, other=0.0)
            average(batch_mean, new, q, m, momentum, updates, samples, at, inside, real)
            if entries > 1:
                new = tl.load(var + at, mask=inside, other=0.0) * bessel(entries)
                average(batch_var, new, known + q, m, momentum, updates, samples, at, inside, real)
        new = tl.load(features + q, mask=real, other=0.0)
        average(feature_mean, new, 2 * known + q, m, momentum, updates, samples, q, real, real)
        new = tl.load(features + Q + q, mask=real, other=0.0) * bessel(m)
        average(feature_var, new, 3 * known + q, m, momentum, updates, samples, q, real, real)
        average(inverse_m, real * 0.0 + 1 / m, 4 * known + q, m, momentum, updates, samples, q, real, real)
        tl.debug_barrier()  # every warp has read the counters before one writes
        counter = tl.arange(0, 8)[None, :]
        enters = real & (counter < 5) & (tl.where(counter == 1, entries, 2.0) > 1)  # a variance takes two entries
        at = counter * known + q
        tl.store(updates + at, tl.load(updates + at, mask=enters, other=0) + 1, mask=enters)
        tl.store(samples + at, tl.load(samples + at, mask=enters, other=0) + tl.cast(m, tl.int64), mask=enters)
