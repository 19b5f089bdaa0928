"""Kernels of the grouped form with pooled batch statistics: ``y = a x + b``, one pair for each sample and feature.

Forward is three launches: ``measure`` reduces over positions, ``join`` makes statistics of the partial results,
``apply`` is the map. Backward is three more in the same roles. ``join`` is a launch of its own because the last program
of ``measure`` would have to walk all samples and features alone.

The input is ``x[n, c, p]``; ``CHANNELS_FIRST`` says whether positions or features are contiguous. The positions of a
sample are split into ``splits`` chunks of ``chunk``, of which the last may be shorter. A kernel over the input has one
program for each sample, chunk and block of ``BC`` features, blocks fastest. A chunk is read by one program in an order
that does not depend on ``N``, so a sample has the same bits in any mini-batch. A kernel that joins has one program for
each block of ``BC`` features, then one for each block of ``BG`` (sample, group) pairs, numbered ``n * groups + g``.

Buffers between the kernels are contiguous and float32:

- ``partial``, ``[2, splits, N, C]``: mean and squares of each chunk.
- ``counts``, ``[splits, N]``: valid positions of each chunk; ``None`` without a mask.
- ``statistics``: four numbers (``1/m``, the entries that a batch statistic averages, a counter of finished programs,
  padding); for each feature mean, variance, slope and offset, ``[4, C]``; for each pair the same, ``[4, N * groups]``.
  ``a = gamma * (slope_B + slope_F)`` and ``b = beta - gamma * (offset_B + offset_F)``.
- ``sums`` and ``dots``, ``[splits, N, C]``: sums of ``dy`` and of ``dy (x - mean_B)`` over each chunk.
- ``dx_terms``: ``p1`` and ``p0`` of each feature, ``[2, C]``; ``q1`` and ``q0`` of each pair, ``[2, N * groups]``.
  ``dx = a dy + c1 x + c0`` with ``c1 = -(p1 + q1)`` and ``c0 = p0 + q0``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .population import sections, update_grouped
from .primitives import choose, combine, divisible, indices, is_valid, kernel, load, mixing, offsets, reduce, sum_counts


@triton.jit
def locate(C, P, chunk, splits, CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr):
    """Return ``C``, ``P`` and the program's sample, features, positions in a tile, and first and last position.

    Chunks are whole tiles, which the compiler must see to load vectors.
    """
    C, P = divisible(C, P, CHANNELS_FIRST, VEC)
    blocks = tl.cdiv(C, BC)
    sample_chunk = tl.program_id(0) // blocks
    c, lane = indices(tl.program_id(0) % blocks, BC, BP, CHANNELS_FIRST)
    first = sample_chunk % splits * (chunk // BP) * BP
    return C, P, sample_chunk // splits, c, lane, first, tl.minimum(first + chunk, P)


# ---- forward


@kernel
def measure(
    x, mask, statistics, partial, counts, N, C, P, chunk, splits,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write ``partial`` and ``counts`` from one read of the input, and set ``join``'s counter to 0.

    Each lane of a tile follows its own positions by Welford's recurrence; Chan's formula combines the lanes at the
    end. So nothing cancels, and threads synchronize once.
    """
    AXIS: tl.constexpr = 1 if CHANNELS_FIRST else 0
    C, P, n, c, lane, first, last = locate(C, P, chunk, splits, CHANNELS_FIRST, BC, BP, VEC)
    sample = x + tl.cast(n, tl.int64) * C * P
    mean = tl.zeros([BC, BP] if CHANNELS_FIRST else [BP, BC], tl.float32)
    squares = tl.zeros([BC, BP] if CHANNELS_FIRST else [BP, BC], tl.float32)
    count = tl.zeros([1, BP] if CHANNELS_FIRST else [BP, 1], tl.float32)
    full = 0  # tiles that need no bounds or mask on positions
    if mask is None:
        full = (last - first) // BP
        for tile in tl.range(full, num_stages=STAGES):
            v = load(sample + offsets(c, first + tile * BP + lane, C, P, CHANNELS_FIRST), c < C)
            delta = v - mean
            mean += delta * (1.0 / (tile + 1))
            squares += delta * (v - mean)
        count += full
    for start in tl.range(first + full * BP, last, BP, num_stages=STAGES):
        p = start + lane
        valid = is_valid(mask, tl.cast(n, tl.int64) * P + p, p < P)
        v = load(sample + offsets(c, p, C, P, CHANNELS_FIRST), valid & (c < C))
        count += tl.where(valid, 1.0, 0.0)
        delta = tl.where(valid, v - mean, 0.0)
        mean += delta / tl.maximum(count, 1.0)
        squares += tl.where(valid, delta * (v - mean), 0.0)
    total, mean, squares = reduce(count, mean, squares, AXIS)
    row = partial + (tl.cast(first // chunk, tl.int64) * N + n) * C + c
    tl.store(row, tl.expand_dims(mean, AXIS), mask=c < C)
    tl.store(row + tl.cast(splits, tl.int64) * N * C, tl.expand_dims(squares, AXIS), mask=c < C)
    if mask is not None:
        tl.store(counts + first // chunk * N + n + tl.arange(0, 1), total)
    if tl.program_id(0) == 0:
        tl.store(statistics + 2, 0.0)


@triton.jit
def chunk_counts(counts, row, inside, N, P, chunk):
    """Return the valid positions of each row of ``partial``, which is chunk ``row // N`` of sample ``row % N``."""
    count = tl.where(inside, tl.minimum(chunk, P - row // N * chunk), 0).to(tl.float32)
    if counts is not None:
        count = load(counts + row, inside)
    return count


@triton.jit
def batch_statistics(partial, counts, c, N, C, P, chunk, splits, BR: tl.constexpr, BC: tl.constexpr):
    """Return mean and variance of a block of features, ``[BC]`` (eqs 10, 11); ``BR`` rows of ``partial`` at a time."""
    rows = N * splits
    mean, squares = tl.zeros([BR, BC], tl.float32), tl.zeros([BR, BC], tl.float32)
    count = tl.zeros([BR, 1], tl.float32)
    for start in range(0, rows, BR):
        row = start + tl.arange(0, BR)[:, None]
        inside = (row < rows) & (c < C)[None, :]
        pointers = partial + row.to(tl.int64) * C + c[None, :]
        row_count = chunk_counts(counts, row, row < rows, N, P, chunk)
        row_squares = load(pointers + tl.cast(rows, tl.int64) * C, inside)
        count, mean, squares = combine(count, mean, squares, row_count, load(pointers, inside), row_squares)
    count, mean, squares = reduce(count, mean, squares, 0)
    return mean, squares / tl.maximum(count, 1.0)


@triton.jit
def feature_statistics(partial, counts, pair, N, C, P, chunk, splits, groups, BG: tl.constexpr, BK: tl.constexpr):
    """Return mean and variance of a block of pairs, ``[BG]`` (eqs 12, 13); ``BK`` features of a group at a time."""
    K, pair = C // groups, pair[:, None]
    pair_inside = pair < tl.cast(N, tl.int64) * groups
    zero = tl.zeros([BG, BK], tl.float32)
    count, mean, squares = zero, zero, zero
    for split in range(splits):
        pair_count = chunk_counts(counts, split * N + pair // groups, pair_inside, N, P, chunk)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)[None, :]
            inside = pair_inside & (k < K)
            pointers = partial + split * tl.cast(N, tl.int64) * C + pair * K + k
            k_squares = load(pointers + splits * tl.cast(N, tl.int64) * C, inside)
            k_count = tl.where(k < K, pair_count, 0.0)
            count, mean, squares = combine(count, mean, squares, k_count, load(pointers, inside), k_squares)
    count, mean, squares = reduce(count, mean, squares, 1)
    return mean, squares / tl.maximum(count, 1.0)


@triton.jit
def count_samples(counts, N, P, splits, BR: tl.constexpr):
    """Return ``m``, the samples with any valid position, and the number of valid entries."""
    m, entries = tl.cast(N, tl.float32), tl.cast(N, tl.float32) * P
    if counts is not None:
        m, entries = 0.0, 0.0
        for start in range(0, N, BR):
            n = start + tl.arange(0, BR)
            count = sum_counts(counts, n, n < N, N, splits)
            m += tl.sum(tl.where(count > 0, 1.0, 0.0), 0)
            entries += tl.sum(count, 0)
    return m, entries


@triton.jit
def store_statistics(section, offs, size, mean, var, weight, eps):
    """Store mean, variance, slope and offset: eqs 14-16 as a map of ``x``."""
    slope = weight / tl.sqrt(var + eps)
    tl.store(section + offs, mean, mask=offs < size)
    tl.store(section + size + offs, var, mask=offs < size)
    tl.store(section + 2 * size + offs, slope, mask=offs < size)
    tl.store(section + 3 * size + offs, slope * mean, mask=offs < size)


@kernel
def join(
    statistics, partial, counts, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples,
    momentum, N, C, P, chunk, splits, groups, mix_eps, scale, eps,
    BR: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write ``statistics`` from ``partial`` and ``counts``; the last program updates the population, if given."""
    program, blocks = tl.program_id(0), tl.cdiv(C, BC)
    batch, features, pairs = sections(statistics, N, C, groups)
    m, entries = count_samples(counts, N, P, splits, BR)
    inv_m = 1 / tl.maximum(m, 1.0)
    w_B, w_F = mixing(inv_m, mix_eps, scale)
    eps = tl.cast(eps, tl.float32)
    if program < blocks:
        c = program * BC + tl.arange(0, BC)
        mean_B, var_B = batch_statistics(partial, counts, c, N, C, P, chunk, splits, BR, BC)
        store_statistics(batch, c, C, mean_B, var_B, w_B, eps)
        if program == 0:
            tl.store(statistics, inv_m)
            tl.store(statistics + 1, tl.maximum(entries, 1.0))
    else:
        pair = (program - blocks).to(tl.int64) * BG + tl.arange(0, BG)
        mean_F, var_F = feature_statistics(partial, counts, pair, N, C, P, chunk, splits, groups, BG, BK)
        store_statistics(features, pair, pairs, mean_F, var_F, w_F, eps)
    if batch_mean is not None:
        tl.debug_barrier()  # all threads have stored before one counts the program as finished
        finished = tl.atomic_add(statistics + 2, 1.0)
        if finished == tl.num_programs(0) - 1:
            population = batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples
            update_grouped(statistics, counts, population, N, C, splits, groups, m, entries, momentum)


@kernel
def join_inference(
    statistics, counts, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates,
    E_B, Std_B, E_F, Std_F, N, C, P, chunk, splits, groups, mix_eps, scale, eps,
    BR: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write ``statistics`` of inference (eqs 18-21); for finite priors read ``partial``, which follows in memory."""
    program, blocks = tl.program_id(0), tl.cdiv(C, BC)
    batch, features, pairs = sections(statistics, N, C, groups)
    partial = features + 4 * pairs
    m, _ = count_samples(counts, N, P, splits, BR)
    inv_m = tl.where(tl.load(updates + 4) > 0, tl.load(inverse_m), 1 / tl.maximum(m, 1.0))
    w_B, w_F = mixing(inv_m, mix_eps, scale)
    eps = tl.cast(eps, tl.float32)
    if program < blocks:
        c = program * BC + tl.arange(0, BC)
        mean_B, var_B = load(batch_mean + c, c < C), load(batch_var + c, c < C, 1.0)
        if tl.minimum(E_B, Std_B) < float("inf"):
            mean, var = batch_statistics(partial, counts, c, N, C, P, chunk, splits, BR, BC)
            mean_B, var_B = choose(E_B, Std_B, mean_B, var_B, mean, var, tl.maximum(m, 1.0))
        store_statistics(batch, c, C, mean_B, var_B, w_B, eps)
    else:
        pair = (program - blocks).to(tl.int64) * BG + tl.arange(0, BG)
        mean_F = load(feature_mean + pair % groups, pair < pairs)
        var_F = load(feature_var + pair % groups, pair < pairs, 1.0)
        if tl.minimum(E_F, Std_F) < float("inf"):
            mean, var = feature_statistics(partial, counts, pair, N, C, P, chunk, splits, groups, BG, BK)
            mean_F, var_F = choose(E_F, Std_F, mean_F, var_F, mean, var, 1.0)
        store_statistics(features, pair, pairs, mean_F, var_F, w_F, eps)


@triton.jit
def coefficients(statistics, gamma, beta, n, c, N, C, groups):
    """Return ``a`` and ``b`` of a sample's features."""
    batch, features, pairs = sections(statistics, N, C, groups)
    batch, features = batch + c, features + tl.cast(n, tl.int64) * groups + c // (C // groups)
    a = load(batch + 2 * C, c < C) + load(features + 2 * pairs, c < C)
    b = -(load(batch + 3 * C, c < C) + load(features + 3 * pairs, c < C))
    if gamma is not None:
        gain = load(gamma + c, c < C)
        a, b = gain * a, gain * b
    if beta is not None:
        b += load(beta + c, c < C)
    return a, b


@kernel
def apply(
    x, y, residual, mask, statistics, gamma, beta, N, C, P, chunk, splits, groups,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Write ``y = g(a x + b + residual)``; hidden entries are 0."""
    C, P, n, c, lane, first, last = locate(C, P, chunk, splits, CHANNELS_FIRST, BC, BP, VEC)
    n = N - 1 - n  # in reverse: what was measured last may still be in the cache
    sample = tl.cast(n, tl.int64) * C * P
    a, b = coefficients(statistics, gamma, beta, n, c, N, C, groups)
    for start in tl.range(first, last, BP, num_stages=STAGES):
        p = start + lane
        inside = (p < P) & (c < C)
        offs = offsets(c, p, C, P, CHANNELS_FIRST)
        z = a * load(x + sample + offs, inside) + b
        if residual is not None:
            z += load(residual + sample + offs, inside)
        if ACTIVATION == "relu":
            z = tl.where(z < 0, 0.0, z)  # propagates NaN, which tl.maximum would not
        elif ACTIVATION == "silu":
            z = z * tl.sigmoid(z)
        elif ACTIVATION == "gelu":
            z = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
        if mask is not None:
            z = tl.where(is_valid(mask, tl.cast(n, tl.int64) * P + p, p < P), z, 0.0)
        tl.store(y + sample + offs, z.to(y.dtype.element_ty), mask=inside)


# ---- backward


@triton.jit
def load_backward(x, dy, residual, sample, offs, inside, a, b, ACTIVATION: tl.constexpr):
    """Return ``x`` and the gradient before the activation; for ReLU, ``residual`` is the output ``y``."""
    v = load(x + sample + offs, inside)
    g = load(dy + sample + offs, inside)
    if ACTIVATION is not None:
        z = a * v + b
        if residual is not None:
            added = load(residual + sample + offs, inside)
            z = added if ACTIVATION == "relu" else z + added
        if ACTIVATION == "relu":
            g = g * tl.where(z > 0, 1.0, 0.0)
        elif ACTIVATION == "silu":
            s = tl.sigmoid(z)
            g = g * (s * (1 + z * (1 - s)))
        elif ACTIVATION == "gelu":
            g = g * (0.5 * (1 + tl.erf(z * 0.7071067811865476)) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z))
    return v, g


@kernel
def measure_backward(
    x, dy, residual, mask, statistics, gamma, beta, sums, dots, N, C, P, chunk, splits, groups,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Write ``sums`` and ``dots``, from ``dy`` taken before the activation."""
    AXIS: tl.constexpr = 1 if CHANNELS_FIRST else 0
    C, P, n, c, lane, first, last = locate(C, P, chunk, splits, CHANNELS_FIRST, BC, BP, VEC)
    sample = tl.cast(n, tl.int64) * C * P
    mean_B = load(statistics + 4 + c, c < C)
    a, b = mean_B, mean_B  # not used without an activation
    if ACTIVATION is not None:
        a, b = coefficients(statistics, gamma, beta, n, c, N, C, groups)
    total = tl.zeros([BC, BP] if CHANNELS_FIRST else [BP, BC], tl.float32)
    total_dot = tl.zeros([BC, BP] if CHANNELS_FIRST else [BP, BC], tl.float32)
    for start in tl.range(first, last, BP, num_stages=STAGES):
        p = start + lane
        valid = is_valid(mask, tl.cast(n, tl.int64) * P + p, p < P) & (c < C)
        offs = offsets(c, p, C, P, CHANNELS_FIRST)
        v, g = load_backward(x, dy, residual, sample, offs, valid, a, b, ACTIVATION)
        g = tl.where(valid, g, 0.0)
        total += g
        total_dot += g * tl.where(valid, v - mean_B, 0.0)
    row = (tl.cast(first // chunk, tl.int64) * N + n) * C + c
    tl.store(sums + row, tl.sum(total, AXIS, keep_dims=True), mask=c < C)
    tl.store(dots + row, tl.sum(total_dot, AXIS, keep_dims=True), mask=c < C)


@kernel
def join_backward(
    dx_terms, sums, dots, counts, statistics, gamma, gradients, N, C, P, splits, count_splits, groups,
    mix_eps, scale, eps, BR: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write ``dx_terms``, and the gradients of gamma and beta, ``[2, C]``: the chain rule through ``join``.

    ``sums`` and ``dots`` have ``splits`` chunks for each sample, ``counts`` has ``count_splits``.
    """
    program, blocks, K = tl.program_id(0), tl.cdiv(C, BC), C // groups
    batch, features, pairs = sections(statistics, N, C, groups)
    inv_m, entries = tl.load(statistics), tl.load(statistics + 1)
    w_B, w_F = mixing(inv_m, mix_eps, scale)
    eps = tl.cast(eps, tl.float32)
    if program < blocks:  # p1, p0 and the gradients of gamma and beta of a block of features
        c = program * BC + tl.arange(0, BC)
        mean_B = load(batch + c, c < C)
        zero = tl.zeros([BR, BC], tl.float32)
        total, total_B, total_F = zero, zero, zero
        for start in range(0, N * splits, BR):
            row = start + tl.arange(0, BR)[:, None]
            inside = (row < N * splits) & (c < C)[None, :]
            offs = row.to(tl.int64) * C + c[None, :]
            s, dot = load(sums + offs, inside), load(dots + offs, inside)
            feature = features + (row % N).to(tl.int64) * groups + c[None, :] // K
            mean_F = load(feature, inside)
            r_F = 1 / tl.sqrt(load(feature + pairs, inside, 1.0) + eps)
            total += s
            total_B += dot
            total_F += r_F * (dot + (mean_B[None, :] - mean_F) * s)
        r_B = 1 / tl.sqrt(load(batch + C + c, c < C, 1.0) + eps)
        d_sum, d_dot = tl.sum(total, 0), r_B * tl.sum(total_B, 0)
        tl.store(gradients + c, w_B * d_dot + w_F * tl.sum(total_F, 0), mask=c < C)
        tl.store(gradients + C + c, d_sum, mask=c < C)
        if gamma is not None:
            gain = load(gamma + c, c < C)
            d_sum, d_dot = gain * d_sum, gain * d_dot
        # One factor of r at a time: r ** 3 would underflow where x is of order 1e15.
        weight = w_B * r_B / entries
        p1 = weight * d_dot * r_B
        tl.store(dx_terms + c, p1, mask=c < C)
        tl.store(dx_terms + C + c, p1 * mean_B - weight * d_sum, mask=c < C)
    if program >= blocks:  # q1 and q0 of a block of pairs
        pair = (program - blocks).to(tl.int64) * BG + tl.arange(0, BG)
        mean_F = load(features + pair, pair < pairs)
        r_F = 1 / tl.sqrt(load(features + pairs + pair, pair < pairs, 1.0) + eps)
        total, total_F = tl.zeros([BG, BK], tl.float32), tl.zeros([BG, BK], tl.float32)
        for split in range(splits):
            for start in range(0, K, BK):
                k = start + tl.arange(0, BK)[None, :]
                inside = (pair < pairs)[:, None] & (k < K)
                offs = split * tl.cast(N, tl.int64) * C + pair[:, None] * K + k
                c = (pair % groups)[:, None] * K + k
                s, dot = load(sums + offs, inside), load(dots + offs, inside)
                if gamma is not None:
                    gain = load(gamma + c, inside)
                    s, dot = gain * s, gain * dot
                total += s
                total_F += dot + (load(batch + c, inside) - mean_F[:, None]) * s
        count = tl.zeros([BG], tl.float32) + P
        if counts is not None:
            count = sum_counts(counts, pair // groups, pair < pairs, N, count_splits)
        weight = w_F * r_F / (tl.maximum(count, 1.0) * K)
        q1 = weight * (r_F * tl.sum(total_F, 1)) * r_F
        tl.store(dx_terms + 2 * C + pair, q1, mask=pair < pairs)
        tl.store(dx_terms + 2 * C + pairs + pair, q1 * mean_F - weight * tl.sum(total, 1), mask=pair < pairs)


@kernel
def apply_backward(
    x, dy, residual, dx, d_residual, mask, statistics, gamma, beta, dx_terms, N, C, P, chunk, splits, groups,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Write ``dx = a g + c1 x + c0`` and ``d_residual = g``, the gradient before the activation; 0 where hidden."""
    C, P, n, c, lane, first, last = locate(C, P, chunk, splits, CHANNELS_FIRST, BC, BP, VEC)
    n = N - 1 - n  # in reverse: what was measured last may still be in the cache
    sample = tl.cast(n, tl.int64) * C * P
    a, b = coefficients(statistics, gamma, beta, n, c, N, C, groups)
    pair_terms = dx_terms + 2 * C + tl.cast(n, tl.int64) * groups + c // (C // groups)
    c1 = -(load(dx_terms + c, c < C) + load(pair_terms, c < C))
    c0 = load(dx_terms + C + c, c < C) + load(pair_terms + tl.cast(N, tl.int64) * groups, c < C)
    for start in tl.range(first, last, BP, num_stages=STAGES):
        p = start + lane
        inside = (p < P) & (c < C)
        offs = offsets(c, p, C, P, CHANNELS_FIRST)
        v, g = load_backward(x, dy, residual, sample, offs, inside, a, b, ACTIVATION)
        d = a * g + c1 * v + c0
        if mask is not None:
            valid = is_valid(mask, tl.cast(n, tl.int64) * P + p, p < P)
            d, g = tl.where(valid, d, 0.0), tl.where(valid, g, 0.0)
        tl.store(dx + sample + offs, d.to(dx.dtype.element_ty), mask=inside)
        if d_residual is not None:
            tl.store(d_residual + sample + offs, g.to(d_residual.dtype.element_ty), mask=inside)
