"""Kernels of the grouped layer with pooled batch statistics: ``y = a x + b``, one pair for each sample and feature.

An input is seen as ``x[n, c, p]``: sample, feature, position. ``CHANNELS_FIRST`` says whether positions or features are
contiguous in memory. Forward is three launches: ``measure`` finds mean and squares over positions, ``join`` makes
statistics of them, ``apply`` is the map. Backward is three more: ``measure_backward``, ``join_backward``,
``apply_backward``. A range of positions of a sample is always handled by one program, in an order that does not
depend on the number of samples.

``join`` writes one buffer, ``statistics``: for each feature mean, variance, slope and offset, ``[4, C]``; for each
sample and group the same, ``[4, N * groups]``; then ``1/m``, the entries that a batch statistic averages, a counter of
programs and a gap. With them ``a = gamma * (slope_B + slope_F)`` and ``b = beta - gamma * (offset_B + offset_F)``.
After it in the same memory follow the partial results of ``measure``, ``[2, splits, N, C]``. Backward has such a buffer
too, ``shares``: two values for each feature, ``[2, C]``, two for each sample and group, ``[2, N * groups]``, and after
them partial results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import absorb, bessel, conclude, extents, indices, mix, mixing, newest_weight, offsets, shrink


@triton.jit
def locate(C, P, run, splits, BC: tl.constexpr, BP: tl.constexpr):
    """Split the program's number into a block of features, a range of positions and a sample.

    A range is whole tiles, which the compiler must see to load vectors.
    """
    blocks = tl.cdiv(C, BC)
    program = tl.program_id(0)
    block, rest = program % blocks, program // blocks
    first = rest % splits * (run // BP) * BP
    return block, rest // splits, first, tl.minimum(first + run, P)


@triton.jit
def is_real(mask, n, p, P):
    """Mark the positions of a tile that exist and are not hidden.

    A range is whole tiles, so ``P`` is the only bound; a multiple of the vector width, unlike a range's end.
    """
    real = p < P
    if mask is not None:
        real = real & (tl.load(mask + tl.cast(n, tl.int64) * P + p, mask=real, other=0) != 0)
    return real


@triton.jit
def after_groups(statistics, N, C, groups):
    """Where ``1/m``, entries and the counter of programs stand in ``statistics``; partial results are 4 further on."""
    return statistics + 4 * C + 4 * tl.cast(N, tl.int64) * groups


# ---- forward


@triton.jit(do_not_specialize=["N", "C", "P", "run", "splits", "groups"])
def measure(
    x, mask, statistics, partial, counts, N, C, P, run, splits, groups,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Mean and squares around it, over a range of the positions of a sample.

    Each lane of a tile follows its own positions by Welford's recurrence, and lanes are joined at the end by Chan's
    formula. So nothing cancels, and threads wait for each other once.

    Args:
        x: The input.
        mask: Nonzero at real entries, ``[N, P]``; ``None`` where nothing is hidden.
        statistics: The counter of programs in it is set to 0.
        partial: Means and squares are written here, ``[2, splits, N, C]``; ``None`` is after ``statistics``.
        counts: With a mask, real positions are written here, ``[splits, N]``.
        N, C, P, groups: Samples, features, positions, groups of features.
        run, splits: Positions in a range, and how many ranges there are.
        STAGES: Tiles under way at a time: a loop without matrix products is pipelined only if it says so.
    """
    AXIS: tl.constexpr = 1 if CHANNELS_FIRST else 0
    C, P = extents(C, P, CHANNELS_FIRST, VEC)
    block, n, first, last = locate(C, P, run, splits, BC, BP)
    c, lane = indices(block, BC, BP, CHANNELS_FIRST)
    sample = x + tl.cast(n, tl.int64) * C * P
    mean = tl.zeros([BC, BP] if CHANNELS_FIRST else [BP, BC], tl.float32)
    squares = tl.zeros([BC, BP] if CHANNELS_FIRST else [BP, BC], tl.float32)
    count = tl.zeros([1, BP] if CHANNELS_FIRST else [BP, 1], tl.float32)
    full = 0  # tiles without a bound to look at
    if mask is None:
        full = (last - first) // BP
        for tile in tl.range(full, num_stages=STAGES):
            at = offsets(c, first + tile * BP + lane, C, P, CHANNELS_FIRST)
            v = tl.load(sample + at, mask=c < C, other=0.0).to(tl.float32)
            moved = v - mean
            mean += moved * (1.0 / (tile + 1))
            squares += moved * (v - mean)
        count += full
    for start in tl.range(first + full * BP, last, BP, num_stages=STAGES):
        p = start + lane
        real = is_real(mask, n, p, P)
        v = tl.load(sample + offsets(c, p, C, P, CHANNELS_FIRST), mask=real & (c < C), other=0.0).to(tl.float32)
        count += tl.where(real, 1.0, 0.0)
        moved = tl.where(real, v - mean, 0.0)
        mean += moved / tl.maximum(count, 1.0)
        squares += tl.where(real, moved * (v - mean), 0.0)
    total = tl.sum(count, AXIS)
    joined = tl.sum(mean * count, AXIS) / tl.maximum(total, 1.0)
    apart = mean - tl.expand_dims(joined, AXIS)
    squares = tl.sum(squares + count * apart * apart, AXIS)

    c = block * BC + tl.arange(0, BC)
    split = first // run
    row = (tl.cast(split, tl.int64) * N + n) * C + c
    if partial is None:
        partial = after_groups(statistics, N, C, groups) + 4
    tl.store(partial + row, joined, mask=c < C)
    tl.store(partial + tl.cast(splits, tl.int64) * N * C + row, squares, mask=c < C)
    if mask is not None:
        if block == 0:
            tl.store(counts + split * N + n + tl.arange(0, 1), total)
    if tl.program_id(0) == 0:
        tl.store(after_groups(statistics, N, C, groups) + 2, 0.0)


@triton.jit
def part_sizes(counts, row, real, N, P, run):
    """Positions in each row of ``partial``, that of a range ``row // N`` and a sample ``row % N``."""
    if counts is not None:
        size = tl.load(counts + row, mask=real, other=0.0)
    else:
        size = tl.where(real, tl.minimum(run, P - row // N * run), 0).to(tl.float32)
    return size


@triton.jit
def batch_of(partial, counts, block, N, C, P, run, splits, BR: tl.constexpr, BA: tl.constexpr):
    """Eqs 10, 11 of a block of features: mean and variance, ``[BA]``."""
    rows = N * splits
    c = block * BA + tl.arange(0, BA)[None, :]
    mean = tl.zeros([BR, BA], tl.float32)
    squares = tl.zeros([BR, BA], tl.float32)
    count = tl.zeros([BR, 1], tl.float32)
    for start in range(0, rows, BR):
        row = start + tl.arange(0, BR)[:, None]
        real = (row < rows) & (c < C)
        at = partial + row.to(tl.int64) * C + c
        size = part_sizes(counts, row, row < rows, N, P, run)
        part_mean = tl.load(at, mask=real, other=0.0)
        part_squares = tl.load(at + tl.cast(rows, tl.int64) * C, mask=real, other=0.0)
        count, mean, squares = absorb(count, mean, squares, size, part_mean, part_squares)
    return conclude(count, mean, squares, 0)


@triton.jit
def features_of(
    partial, counts, block, N, C, P, run, splits, groups,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Eqs 12, 13 of a block of samples and groups, rows of ``C / groups`` features: mean and variance, ``[BQ]``."""
    K = C // groups
    q = tl.cast(block, tl.int64) * BQ + tl.arange(0, BQ)[:, None]
    in_q = q < tl.cast(N, tl.int64) * groups
    mean = tl.zeros([BQ, BK], tl.float32)
    squares = tl.zeros([BQ, BK], tl.float32)
    count = tl.zeros([BQ, BK], tl.float32)
    plane = splits * tl.cast(N, tl.int64) * C
    for split in range(splits):
        row = split * N + q // groups
        size = part_sizes(counts, row, in_q, N, P, run)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)[None, :]
            real = in_q & (k < K)
            at = partial + split * tl.cast(N, tl.int64) * C + q * K + k
            part_mean = tl.load(at, mask=real, other=0.0)
            part_squares = tl.load(at + plane, mask=real, other=0.0)
            part = tl.where(k < K, size, 0.0)
            count, mean, squares = absorb(count, mean, squares, part, part_mean, part_squares)
    return conclude(count, mean, squares, 1)


@triton.jit
def samples_of(counts, N, P, splits, BR: tl.constexpr):
    """``m``, the samples with any real entry, and all entries."""
    m, entries = tl.cast(N, tl.float32), tl.cast(N, tl.float32) * P
    if counts is not None:
        m, entries = 0.0, 0.0
        for start in range(0, N, BR):
            n = start + tl.arange(0, BR)
            size = tl.zeros([BR], tl.float32)
            for split in range(splits):
                size += tl.load(counts + split * N + n, mask=n < N, other=0.0)
            m += tl.sum(tl.where(size > 0, 1.0, 0.0), 0)
            entries += tl.sum(size, 0)
    return m, entries


@triton.jit
def store_statistics(to, at, width, mean, var, weight, eps, real):
    """Mean, variance, slope and offset, of eqs 14-16 sorted by ``x``."""
    slope = weight / tl.sqrt(var + eps)
    tl.store(to + at, mean, mask=real)
    tl.store(to + width + at, var, mask=real)
    tl.store(to + 2 * width + at, slope, mask=real)
    tl.store(to + 3 * width + at, slope * mean, mask=real)


@triton.jit(
    do_not_specialize=["N", "C", "P", "run", "splits", "groups"],
    do_not_specialize_on_alignment=[
        "batch_mean", "batch_var", "feature_mean", "feature_var", "inverse_m", "updates", "samples"
    ],
)  # fmt: skip
def join(
    statistics, partial, counts, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples,
    momentum, N, C, P, run, splits, groups, mix_eps, scale, eps,
    BR: tl.constexpr, BA: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Statistics of a training mini-batch, and the population's average with it.

    The first programs have a block of features each, the others one of samples and groups. The last to finish updates
    the population, if there is one.

    Args:
        statistics: Written, as the module says.
        partial, counts: What ``measure`` wrote.
        batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples: The population, or nothing.
        momentum: The least weight of new values in the population; negative to weight them by samples.
        mix_eps, scale, eps: As in the formula.
    """
    program = tl.program_id(0)
    if partial is None:
        partial = after_groups(statistics, N, C, groups) + 4
    blocks = tl.cdiv(C, BA)
    m, entries = samples_of(counts, N, P, splits, BR)
    inverse = 1 / tl.maximum(m, 1.0)
    w_B, w_F = mixing(inverse, mix_eps, scale)
    eps = tl.cast(eps, tl.float32)
    if program < blocks:
        mean_B, var_B = batch_of(partial, counts, program, N, C, P, run, splits, BR, BA)
        c = program * BA + tl.arange(0, BA)
        store_statistics(statistics, c, C, mean_B, var_B, w_B, eps, c < C)
        if program == 0:
            tl.store(after_groups(statistics, N, C, groups), inverse)
            tl.store(after_groups(statistics, N, C, groups) + 1, tl.maximum(entries, 1.0))
    else:
        mean_F, var_F = features_of(partial, counts, program - blocks, N, C, P, run, splits, groups, BQ, BK)
        q = (program - blocks).to(tl.int64) * BQ + tl.arange(0, BQ)
        width = tl.cast(N, tl.int64) * groups
        store_statistics(statistics + 4 * C, q, width, mean_F, var_F, w_F, eps, q < width)
    if batch_mean is not None:
        tl.debug_barrier()  # all threads have stored before one says so
        done = tl.atomic_add(after_groups(statistics, N, C, groups) + 2, 1.0)
        if done == tl.num_programs(0) - 1:
            update(
                statistics, counts, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples,
                N, C, splits, groups, m, entries, momentum,
            )  # fmt: skip


WIDE: tl.constexpr = tl.constexpr(1024)
"""Features that one program takes at a time."""


@triton.jit
def update(
    statistics, counts, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples,
    N, C, splits, groups, m, entries, momentum,
):  # fmt: skip
    """Average the population with a mini-batch, unless its statistics are not finite: ``Population.update``."""
    lane, few = tl.arange(0, WIDE), tl.arange(0, 32)
    bad = 0.0
    for start in range(0, C, WIDE):
        var = tl.load(statistics + C + start + lane, mask=start + lane < C, other=0.0, cache_modifier=".cg")
        bad += tl.sum(tl.where(var < float("inf"), 0.0, 1.0), 0)  # NaN is not less, either
    width = tl.cast(N, tl.int64) * groups
    features = statistics + 4 * C
    for start in range(0, groups, 32):
        var = over_samples(features + width, counts, start, N, groups, splits, 128, 32)
        bad += tl.sum(tl.where(var < float("inf"), 0.0, 1.0), 0)
    if (bad == 0) & (m > 0):
        row = tl.arange(0, 8)
        enters = (row < 5) & (tl.where(row == 1, entries, 2.0) > 1)  # a variance takes two entries
        count = tl.load(updates + row, mask=enters, other=0) + 1
        total = tl.load(samples + row, mask=enters, other=0) + m.to(tl.int64)
        old = tl.load(inverse_m)
        tl.debug_barrier()  # every warp has read the counters
        tl.store(updates + row, count, mask=enters)
        tl.store(samples + row, total, mask=enters)
        weights = newest_weight(count, total, m, momentum)
        for start in range(0, C, WIDE):
            c = start + lane
            mean = tl.load(statistics + c, mask=c < C, other=0.0, cache_modifier=".cg")
            var = tl.load(statistics + C + c, mask=c < C, other=0.0, cache_modifier=".cg")
            blend(batch_mean, mean, c, C, pick(weights, row, 0))
            if entries > 1:
                blend(batch_var, var * bessel(entries), c, C, pick(weights, row, 1))
        for start in range(0, groups, 32):
            g = start + few
            mean = over_samples(features, counts, start, N, groups, splits, 128, 32) / m
            var = over_samples(features + width, counts, start, N, groups, splits, 128, 32) / m
            blend(feature_mean, mean, g, groups, pick(weights, row, 2))
            blend(feature_var, var * bessel(m), g, groups, pick(weights, row, 3))
        tl.store(inverse_m, mix(old, 1 / m, pick(weights, row, 4)))


@triton.jit(
    do_not_specialize=["N", "C", "P", "groups"],
    do_not_specialize_on_alignment=[
        "batch_mean", "batch_var", "feature_mean", "feature_var", "inverse_m", "updates", "samples"
    ],
)  # fmt: skip
def update_population(
    statistics, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples, momentum,
    N, C, P, groups,
):  # fmt: skip
    """Average the population with a mini-batch without a mask, alone: for compiled graphs."""
    m = tl.cast(N, tl.float32)
    update(
        statistics, None, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples,
        N, C, 1, groups, m, m * P, momentum,
    )  # fmt: skip


@triton.jit
def pick(values, row, at: tl.constexpr):
    """One of a few values."""
    return tl.sum(tl.where(row == at, values, 0.0), 0)


@triton.jit
def over_samples(features, counts, start, N, groups, splits, BR: tl.constexpr, BA: tl.constexpr):
    """Feature statistics of some groups, summed over the samples that have any real entry."""
    g = start + tl.arange(0, BA)[None, :]
    total = tl.zeros([BR, BA], tl.float32)
    for first in range(0, N, BR):
        n = first + tl.arange(0, BR)[:, None]
        real = (n < N) & (g < groups)
        if counts is not None:
            size = tl.zeros([BR, 1], tl.float32)
            for split in range(splits):
                size += tl.load(counts + split * N + n, mask=n < N, other=0.0)
            real = real & (size > 0)
        total += tl.load(features + tl.cast(n, tl.int64) * groups + g, mask=real, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def blend(kept, new, at, size, weight):
    """Mix statistics of a mini-batch into those kept."""
    tl.store(kept + at, mix(tl.load(kept + at, mask=at < size, other=0.0), new, weight), mask=at < size)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """The nonlinearity that follows the layer, if any."""
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)  # hands on NaN
    elif ACTIVATION == "silu":
        z = z * tl.sigmoid(z)
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    return z


@triton.jit
def slope(z, ACTIVATION: tl.constexpr):
    """The derivative of the nonlinearity."""
    if ACTIVATION == "relu":
        found = tl.where(z > 0, 1.0, 0.0)
    elif ACTIVATION == "silu":
        s = tl.sigmoid(z)
        found = s * (1 + z * (1 - s))
    elif ACTIVATION == "gelu":
        found = 0.5 * (1 + tl.erf(z * 0.7071067811865476)) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    else:
        found = z * 0 + 1.0
    return found


@triton.jit
def affine_of(statistics, gamma, beta, n, c, N, C, groups):
    """``a`` and ``b`` of a sample's features."""
    real = c < C
    at = statistics + 4 * C + tl.cast(n, tl.int64) * groups + c // (C // groups)
    width = tl.cast(N, tl.int64) * groups
    a = tl.load(statistics + 2 * C + c, mask=real, other=0.0) + tl.load(at + 2 * width, mask=real, other=0.0)
    b = -(tl.load(statistics + 3 * C + c, mask=real, other=0.0) + tl.load(at + 3 * width, mask=real, other=0.0))
    if gamma is not None:
        gain = tl.load(gamma + c, mask=real, other=0.0).to(tl.float32)
        a, b = gain * a, gain * b
    if beta is not None:
        b += tl.load(beta + c, mask=real, other=0.0).to(tl.float32)
    return a, b


@triton.jit(
    do_not_specialize=["N", "C", "P", "run", "splits", "groups"], do_not_specialize_on_alignment=["gamma", "beta"]
)
def apply(
    x, y, residual, mask, statistics, gamma, beta, N, C, P, run, splits, groups,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """``y = g(a x + b + residual)`` at a range of the positions of a sample; hidden entries come out 0."""
    C, P = extents(C, P, CHANNELS_FIRST, VEC)
    block, n, first, last = locate(C, P, run, splits, BC, BP)
    n = N - 1 - n  # what was measured last may still be in the cache
    c, lane = indices(block, BC, BP, CHANNELS_FIRST)
    sample = tl.cast(n, tl.int64) * C * P
    a, b = affine_of(statistics, gamma, beta, n, c, N, C, groups)
    for start in tl.range(first, last, BP, num_stages=STAGES):
        p = start + lane
        inside = (p < P) & (c < C)
        at = offsets(c, p, C, P, CHANNELS_FIRST)
        z = a * tl.load(x + sample + at, mask=inside, other=0.0).to(tl.float32) + b
        if residual is not None:
            z += tl.load(residual + sample + at, mask=inside, other=0.0).to(tl.float32)
        z = activate(z, ACTIVATION)
        if mask is not None:
            z = tl.where(is_real(mask, n, p, P), z, 0.0)
        tl.store(y + sample + at, z.to(y.dtype.element_ty), mask=inside)


# ---- inference


@triton.jit(
    do_not_specialize=["N", "C", "P", "run", "splits", "groups"],
    do_not_specialize_on_alignment=[
        "batch_mean", "batch_var", "feature_mean", "feature_var", "inverse_m", "updates"
    ],
)  # fmt: skip
def join_inference(
    statistics, counts, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates,
    E_B, Std_B, E_F, Std_F, N, C, P, run, splits, groups, mix_eps, scale, eps,
    BR: tl.constexpr, BA: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Statistics of inference (eqs 18-21).

    Args:
        statistics: Written, as the module says; what follows it is not read where all comes from the population.
        counts: What ``measure`` wrote.
        batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates: The population.
        E_B, Std_B, E_F, Std_F: The configuration's prior strengths.
    """
    program = tl.program_id(0)
    partial = after_groups(statistics, N, C, groups) + 4
    blocks = tl.cdiv(C, BA)
    m, _ = samples_of(counts, N, P, splits, BR)
    inverse = tl.where(tl.load(updates + 4) > 0, tl.load(inverse_m), 1 / tl.maximum(m, 1.0))
    w_B, w_F = mixing(inverse, mix_eps, scale)
    eps = tl.cast(eps, tl.float32)
    if program < blocks:
        c = program * BA + tl.arange(0, BA)
        mean_B = tl.load(batch_mean + c, mask=c < C, other=0.0)
        var_B = tl.load(batch_var + c, mask=c < C, other=1.0)
        if tl.minimum(E_B, Std_B) < float("inf"):
            own_mean, own_var = batch_of(partial, counts, program, N, C, P, run, splits, BR, BA)
            mean_B, var_B = shrink(E_B, Std_B, mean_B, var_B, own_mean, own_var, tl.maximum(m, 1.0))  # eqs 18, 19
        store_statistics(statistics, c, C, mean_B, var_B, w_B, eps, c < C)
    else:
        q = (program - blocks).to(tl.int64) * BQ + tl.arange(0, BQ)
        width = tl.cast(N, tl.int64) * groups
        mean_F = tl.load(feature_mean + q % groups, mask=q < width, other=0.0)
        var_F = tl.load(feature_var + q % groups, mask=q < width, other=1.0)
        if tl.minimum(E_F, Std_F) < float("inf"):
            own_mean, own_var = features_of(partial, counts, program - blocks, N, C, P, run, splits, groups, BQ, BK)
            mean_F, var_F = shrink(E_F, Std_F, mean_F, var_F, own_mean, own_var, 1.0)  # eqs 20, 21
        store_statistics(statistics + 4 * C, q, width, mean_F, var_F, w_F, eps, q < width)


# ---- backward


@triton.jit
def after_shares(shares, N, C, groups):
    """Where the partial results of backward stand."""
    return shares + 2 * C + 2 * tl.cast(N, tl.int64) * groups


@triton.jit
def incoming(x, dy, residual, sample, at, inside, a, b, ACTIVATION: tl.constexpr):
    """``x`` and the gradient before the nonlinearity.

    With ReLU, the output stands in place of the residual.
    """
    v = tl.load(x + sample + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + sample + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        z = a * v + b
        if residual is not None:
            added = tl.load(residual + sample + at, mask=inside, other=0.0).to(tl.float32)
            z = added if ACTIVATION == "relu" else z + added
        g = g * slope(z, ACTIVATION)
    return v, g


@triton.jit(
    do_not_specialize=["N", "C", "P", "run", "splits", "groups"], do_not_specialize_on_alignment=["gamma", "beta"]
)
def measure_backward(
    x, dy, residual, mask, statistics, gamma, beta, shares, N, C, P, run, splits, groups,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Sums of ``dy`` and of ``dy (x - mean_B)`` over a range of positions, written after ``shares``."""
    AXIS: tl.constexpr = 1 if CHANNELS_FIRST else 0
    C, P = extents(C, P, CHANNELS_FIRST, VEC)
    block, n, first, last = locate(C, P, run, splits, BC, BP)
    c, lane = indices(block, BC, BP, CHANNELS_FIRST)
    sample = tl.cast(n, tl.int64) * C * P
    mean = tl.load(statistics + c, mask=c < C, other=0.0)
    a, b = mean, mean
    if ACTIVATION is not None:
        a, b = affine_of(statistics, gamma, beta, n, c, N, C, groups)
    sums = tl.zeros([BC, BP] if CHANNELS_FIRST else [BP, BC], tl.float32)
    dots = tl.zeros([BC, BP] if CHANNELS_FIRST else [BP, BC], tl.float32)
    for start in tl.range(first, last, BP, num_stages=STAGES):
        p = start + lane
        inside = is_real(mask, n, p, P) & (c < C)
        at = offsets(c, p, C, P, CHANNELS_FIRST)
        v, g = incoming(x, dy, residual, sample, at, inside, a, b, ACTIVATION)
        g = tl.where(inside, g, 0.0)
        sums += g
        dots += g * tl.where(inside, v - mean, 0.0)
    c = block * BC + tl.arange(0, BC)
    row = ((first // run).to(tl.int64) * N + n) * C + c
    partial = after_shares(shares, N, C, groups)
    tl.store(partial + row, tl.sum(sums, AXIS), mask=c < C)
    tl.store(partial + tl.cast(splits, tl.int64) * N * C + row, tl.sum(dots, AXIS), mask=c < C)


@triton.jit(
    do_not_specialize=["N", "C", "P", "splits", "count_splits", "groups"], do_not_specialize_on_alignment=["gamma"]
)
def join_backward(
    shares, sums, dots, counts, statistics, gamma, gradients, N, C, P, splits, count_splits, groups,
    mix_eps, scale, eps, BR: tl.constexpr, BA: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The chain rule through ``join``.

    Programs divide the work as there. ``c1 = -(p1 + q1)`` and ``c0 = p0 + q0`` make ``dx = a dy + c1 x + c0``.

    Args:
        shares: ``p1`` and ``p0`` of each feature, then ``q1`` and ``q0`` of each sample and group, are written here.
        sums, dots: What ``measure_backward`` found, ``[splits, N, C]`` each; ``None`` is after ``shares``.
        counts, statistics, gamma: As in ``join`` and ``apply``.
        gradients: Those of gamma and beta, ``[2, C]``, are written here.
        splits, count_splits: How many ranges of positions ``partial`` and ``counts`` have.
    """
    blocks = tl.cdiv(C, BA)
    tail = after_groups(statistics, N, C, groups)
    inverse, entries = tl.load(tail), tl.load(tail + 1)
    w_B, w_F = mixing(inverse, mix_eps, scale)
    eps = tl.cast(eps, tl.float32)
    if sums is None:
        sums = after_shares(shares, N, C, groups)
        dots = sums + splits * tl.cast(N, tl.int64) * C
    block = tl.program_id(0)
    if block < blocks:
        share_batch(
            shares, sums, dots, statistics, gamma, gradients, block, N, C, splits, groups, w_B, w_F, entries, eps, BR,
            BA,
        )  # fmt: skip
    else:
        share_features(
            shares, sums, dots, counts, statistics, gamma, block - blocks, N, C, P, splits, count_splits, groups,
            w_F, eps, BQ, BK,
        )  # fmt: skip


@triton.jit
def share_batch(
    shares, sum_parts, dot_parts, statistics, gamma, gradients, block, N, C, splits, groups, w_B, w_F, entries, eps,
    BR: tl.constexpr, BA: tl.constexpr,
):  # fmt: skip
    """``p1``, ``p0`` and gradients of gamma and beta, of a block of features."""
    K = C // groups
    width = tl.cast(N, tl.int64) * groups
    c = block * BA + tl.arange(0, BA)
    real = c < C
    mean_B = tl.load(statistics + c, mask=real, other=0.0)
    total = tl.zeros([BR, BA], tl.float32)
    total_B = tl.zeros([BR, BA], tl.float32)
    total_F = tl.zeros([BR, BA], tl.float32)
    for start in range(0, N * splits, BR):
        row = start + tl.arange(0, BR)[:, None]
        inside = (row < N * splits) & real[None, :]
        at = row.to(tl.int64) * C + c[None, :]
        sums = tl.load(sum_parts + at, mask=inside, other=0.0)
        dots = tl.load(dot_parts + at, mask=inside, other=0.0)
        feature = statistics + 4 * C + (row % N).to(tl.int64) * groups + c[None, :] // K
        mean_F = tl.load(feature, mask=inside, other=0.0)
        r_F = 1 / tl.sqrt(tl.load(feature + width, mask=inside, other=1.0) + eps)
        total += sums
        total_B += dots
        total_F += r_F * (dots + (mean_B[None, :] - mean_F) * sums)
    r_B = 1 / tl.sqrt(tl.load(statistics + C + c, mask=real, other=1.0) + eps)
    d_sum, d_dot = tl.sum(total, 0), r_B * tl.sum(total_B, 0)
    tl.store(gradients + c, w_B * d_dot + w_F * tl.sum(total_F, 0), mask=real)
    tl.store(gradients + C + c, d_sum, mask=real)
    if gamma is not None:
        gain = tl.load(gamma + c, mask=real, other=0.0).to(tl.float32)
        d_sum, d_dot = gain * d_sum, gain * d_dot
    # Each factor of r in its turn: r ** 3 would underflow where x is of order 1e15.
    weight = w_B * r_B / entries
    p1 = weight * d_dot * r_B
    tl.store(shares + c, p1, mask=real)
    tl.store(shares + C + c, p1 * mean_B - weight * d_sum, mask=real)


@triton.jit
def share_features(
    shares, sum_parts, dot_parts, counts, statistics, gamma, block, N, C, P, splits, count_splits, groups, w_F, eps,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``q1`` and ``q0`` of a block of samples and groups."""
    K = C // groups
    width = tl.cast(N, tl.int64) * groups
    q = tl.cast(block, tl.int64) * BQ + tl.arange(0, BQ)
    real = q < width
    features = statistics + 4 * C
    mean_F = tl.load(features + q, mask=real, other=0.0)
    r_F = 1 / tl.sqrt(tl.load(features + width + q, mask=real, other=1.0) + eps)
    total = tl.zeros([BQ, BK], tl.float32)
    total_F = tl.zeros([BQ, BK], tl.float32)
    for split in range(splits):
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)[None, :]
            inside = real[:, None] & (k < K)
            at = split * tl.cast(N, tl.int64) * C + q[:, None] * K + k
            sums = tl.load(sum_parts + at, mask=inside, other=0.0)
            dots = tl.load(dot_parts + at, mask=inside, other=0.0)
            c = (q % groups)[:, None] * K + k
            mean_B = tl.load(statistics + c, mask=inside, other=0.0)
            if gamma is not None:
                gain = tl.load(gamma + c, mask=inside, other=0.0).to(tl.float32)
                sums, dots = gain * sums, gain * dots
            total += sums
            total_F += dots + (mean_B - mean_F[:, None]) * sums
    size = tl.zeros([BQ], tl.float32) + P
    if counts is not None:
        size = tl.zeros([BQ], tl.float32)
        for split in range(count_splits):
            size += tl.load(counts + split * N + q // groups, mask=real, other=0.0)
    weight = w_F * r_F / (tl.maximum(size, 1.0) * K)
    q1 = weight * (r_F * tl.sum(total_F, 1)) * r_F
    tl.store(shares + 2 * C + q, q1, mask=real)
    tl.store(shares + 2 * C + width + q, q1 * mean_F - weight * tl.sum(total, 1), mask=real)


@triton.jit(
    do_not_specialize=["N", "C", "P", "run", "splits", "groups"], do_not_specialize_on_alignment=["gamma", "beta"]
)
def apply_backward(
    x, dy, residual, dx, d_residual, mask, statistics, gamma, beta, shares, N, C, P, run, splits, groups,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """``dx = a dy + c1 x + c0`` at a range of the positions of a sample, ``dy`` taken before the nonlinearity."""
    C, P = extents(C, P, CHANNELS_FIRST, VEC)
    block, n, first, last = locate(C, P, run, splits, BC, BP)
    n = N - 1 - n  # what was measured last may still be in the cache
    c, lane = indices(block, BC, BP, CHANNELS_FIRST)
    sample = tl.cast(n, tl.int64) * C * P
    a, b = affine_of(statistics, gamma, beta, n, c, N, C, groups)
    q = shares + 2 * C + tl.cast(n, tl.int64) * groups + c // (C // groups)
    width = tl.cast(N, tl.int64) * groups
    c1 = -(tl.load(shares + c, mask=c < C, other=0.0) + tl.load(q, mask=c < C, other=0.0))
    c0 = tl.load(shares + C + c, mask=c < C, other=0.0) + tl.load(q + width, mask=c < C, other=0.0)
    for start in tl.range(first, last, BP, num_stages=STAGES):
        p = start + lane
        inside = (p < P) & (c < C)
        at = offsets(c, p, C, P, CHANNELS_FIRST)
        v, g = incoming(x, dy, residual, sample, at, inside, a, b, ACTIVATION)
        d = a * g + c1 * v + c0
        if mask is not None:
            real = is_real(mask, n, p, P)
            d, g = tl.where(real, d, 0.0), tl.where(real, g, 0.0)
        tl.store(dx + sample + at, d.to(dx.dtype.element_ty), mask=inside)
        if d_residual is not None:
            tl.store(d_residual + sample + at, g.to(d_residual.dtype.element_ty), mask=inside)
