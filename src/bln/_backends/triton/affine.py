"""Kernels of the grouped layer with pooled batch statistics: ``y = a x + b``, one pair for each sample and feature.

An input is seen as ``x[n, c, p]``: sample, feature, position. ``CHANNELS_FIRST`` says whether positions or features are
contiguous in memory. Forward is three launches: ``measure`` finds mean and squares over positions, ``join`` makes
statistics of them, ``apply`` is the map. Backward is three more: ``measure_backward``, ``join_backward``,
``apply_backward``. Joining has a launch of its own because the last program of ``measure`` would go through all samples
and features alone. A range of positions of a sample is always handled by one program, in an order that does not depend
on the number of samples.

``measure`` writes ``partial``, ``[2, splits, N, C]``: mean and squares of each range of positions; and with a mask
``counts``, ``[splits, N]``: real positions. ``join`` writes ``statistics``: ``1/m``, the entries that a batch statistic
averages, a counter of programs and a gap; then for each feature mean, variance, slope and offset, ``[4, C]``; for each
sample and group the same, ``[4, N * groups]``. With them ``a = gamma * (slope_B + slope_F)`` and
``b = beta - gamma * (offset_B + offset_F)``. Backward, ``measure_backward`` writes ``sums`` and ``dots``,
``[splits, N, C]``, and ``join_backward`` writes ``shares``: two values for each feature, ``[2, C]``, and two for each
sample and group, ``[2, N * groups]``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .population import sections, update_grouped
from .primitives import absorb, counted, extents, gather, indices, is_real, kernel, load, mixing, offsets, shrink


@triton.jit
def locate(C, P, run, splits, CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr):
    """``C`` and ``P``, and what a program handles: its sample, features, lanes, and the range of its positions.

    A range is whole tiles, which the compiler must see to load vectors.
    """
    C, P = extents(C, P, CHANNELS_FIRST, VEC)
    blocks = tl.cdiv(C, BC)
    rest = tl.program_id(0) // blocks
    c, lane = indices(tl.program_id(0) % blocks, BC, BP, CHANNELS_FIRST)
    first = rest % splits * (run // BP) * BP
    return C, P, rest // splits, c, lane, first, tl.minimum(first + run, P)


# ---- forward


@kernel
def measure(
    x, mask, statistics, partial, counts, N, C, P, run, splits,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Mean and squares around it, over a range of the positions of a sample; ``join``'s counter is set to 0.

    Each lane of a tile follows its own positions by Welford's recurrence, and lanes are joined at the end by Chan's
    formula. So nothing cancels, and threads wait for each other once.
    """
    AXIS: tl.constexpr = 1 if CHANNELS_FIRST else 0
    C, P, n, c, lane, first, last = locate(C, P, run, splits, CHANNELS_FIRST, BC, BP, VEC)
    sample = x + tl.cast(n, tl.int64) * C * P
    mean = tl.zeros([BC, BP] if CHANNELS_FIRST else [BP, BC], tl.float32)
    squares = tl.zeros([BC, BP] if CHANNELS_FIRST else [BP, BC], tl.float32)
    count = tl.zeros([1, BP] if CHANNELS_FIRST else [BP, 1], tl.float32)
    full = 0  # tiles without a bound to look at
    if mask is None:
        full = (last - first) // BP
        for tile in tl.range(full, num_stages=STAGES):
            v = load(sample + offsets(c, first + tile * BP + lane, C, P, CHANNELS_FIRST), c < C)
            moved = v - mean
            mean += moved * (1.0 / (tile + 1))
            squares += moved * (v - mean)
        count += full
    for start in tl.range(first + full * BP, last, BP, num_stages=STAGES):
        p = start + lane
        real = is_real(mask, tl.cast(n, tl.int64) * P + p, p < P)
        v = load(sample + offsets(c, p, C, P, CHANNELS_FIRST), real & (c < C))
        count += tl.where(real, 1.0, 0.0)
        moved = tl.where(real, v - mean, 0.0)
        mean += moved / tl.maximum(count, 1.0)
        squares += tl.where(real, moved * (v - mean), 0.0)
    total, mean, squares = gather(count, mean, squares, AXIS)
    row = partial + (tl.cast(first // run, tl.int64) * N + n) * C + c
    tl.store(row, tl.expand_dims(mean, AXIS), mask=c < C)
    tl.store(row + tl.cast(splits, tl.int64) * N * C, tl.expand_dims(squares, AXIS), mask=c < C)
    if mask is not None:
        tl.store(counts + first // run * N + n + tl.arange(0, 1), total)
    if tl.program_id(0) == 0:
        tl.store(statistics + 2, 0.0)


@triton.jit
def part_sizes(counts, row, real, N, P, run):
    """Positions in each row of ``partial``, that of a range ``row // N`` and a sample ``row % N``."""
    size = tl.where(real, tl.minimum(run, P - row // N * run), 0).to(tl.float32)
    if counts is not None:
        size = load(counts + row, real)
    return size


@triton.jit
def batch_of(partial, counts, c, N, C, P, run, splits, BR: tl.constexpr, BA: tl.constexpr):
    """Eqs 10, 11 of a block of features: mean and variance, ``[BA]``."""
    rows = N * splits
    mean, squares = tl.zeros([BR, BA], tl.float32), tl.zeros([BR, BA], tl.float32)
    count = tl.zeros([BR, 1], tl.float32)
    for start in range(0, rows, BR):
        row = start + tl.arange(0, BR)[:, None]
        real = (row < rows) & (c < C)[None, :]
        at = partial + row.to(tl.int64) * C + c[None, :]
        size = part_sizes(counts, row, row < rows, N, P, run)
        part_squares = load(at + tl.cast(rows, tl.int64) * C, real)
        count, mean, squares = absorb(count, mean, squares, size, load(at, real), part_squares)
    count, mean, squares = gather(count, mean, squares, 0)
    return mean, squares / tl.maximum(count, 1.0)


@triton.jit
def features_of(partial, counts, q, N, C, P, run, splits, groups, BQ: tl.constexpr, BK: tl.constexpr):
    """Eqs 12, 13 of a block of samples and groups, rows of ``C / groups`` features: mean and variance, ``[BQ]``."""
    K, q = C // groups, q[:, None]
    in_q = q < tl.cast(N, tl.int64) * groups
    zero = tl.zeros([BQ, BK], tl.float32)
    count, mean, squares = zero, zero, zero
    for split in range(splits):
        size = part_sizes(counts, split * N + q // groups, in_q, N, P, run)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)[None, :]
            real = in_q & (k < K)
            at = partial + split * tl.cast(N, tl.int64) * C + q * K + k
            part_squares = load(at + splits * tl.cast(N, tl.int64) * C, real)
            part = tl.where(k < K, size, 0.0)
            count, mean, squares = absorb(count, mean, squares, part, load(at, real), part_squares)
    count, mean, squares = gather(count, mean, squares, 1)
    return mean, squares / tl.maximum(count, 1.0)


@triton.jit
def samples_of(counts, N, P, splits, BR: tl.constexpr):
    """``m``, the samples with any real entry, and all entries."""
    m, entries = tl.cast(N, tl.float32), tl.cast(N, tl.float32) * P
    if counts is not None:
        m, entries = 0.0, 0.0
        for start in range(0, N, BR):
            n = start + tl.arange(0, BR)
            size = counted(counts, n, n < N, N, splits)
            m += tl.sum(tl.where(size > 0, 1.0, 0.0), 0)
            entries += tl.sum(size, 0)
    return m, entries


@triton.jit
def store_statistics(to, at, width, mean, var, weight, eps):
    """Mean, variance, slope and offset, of eqs 14-16 sorted by ``x``."""
    slope = weight / tl.sqrt(var + eps)
    tl.store(to + at, mean, mask=at < width)
    tl.store(to + width + at, var, mask=at < width)
    tl.store(to + 2 * width + at, slope, mask=at < width)
    tl.store(to + 3 * width + at, slope * mean, mask=at < width)


@kernel
def join(
    statistics, partial, counts, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples,
    momentum, N, C, P, run, splits, groups, mix_eps, scale, eps,
    BR: tl.constexpr, BA: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Statistics of a training mini-batch, and the population's average with it.

    The first programs have a block of features each, the others one of samples and groups. The last to finish updates
    the population, if there is one.
    """
    program, blocks = tl.program_id(0), tl.cdiv(C, BA)
    batch, features, width = sections(statistics, N, C, groups)
    m, entries = samples_of(counts, N, P, splits, BR)
    inverse = 1 / tl.maximum(m, 1.0)
    w_B, w_F = mixing(inverse, mix_eps, scale)
    eps = tl.cast(eps, tl.float32)
    if program < blocks:
        c = program * BA + tl.arange(0, BA)
        mean_B, var_B = batch_of(partial, counts, c, N, C, P, run, splits, BR, BA)
        store_statistics(batch, c, C, mean_B, var_B, w_B, eps)
        if program == 0:
            tl.store(statistics, inverse)
            tl.store(statistics + 1, tl.maximum(entries, 1.0))
    else:
        q = (program - blocks).to(tl.int64) * BQ + tl.arange(0, BQ)
        mean_F, var_F = features_of(partial, counts, q, N, C, P, run, splits, groups, BQ, BK)
        store_statistics(features, q, width, mean_F, var_F, w_F, eps)
    if batch_mean is not None:
        tl.debug_barrier()  # all threads have stored before one says so
        done = tl.atomic_add(statistics + 2, 1.0)
        if done == tl.num_programs(0) - 1:
            population = batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples
            update_grouped(statistics, counts, population, N, C, splits, groups, m, entries, momentum)


@kernel
def join_inference(
    statistics, counts, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates,
    E_B, Std_B, E_F, Std_F, N, C, P, run, splits, groups, mix_eps, scale, eps,
    BR: tl.constexpr, BA: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Statistics of inference (eqs 18-21); behind ``statistics`` lies ``partial``, unless all is the population's."""
    program, blocks = tl.program_id(0), tl.cdiv(C, BA)
    batch, features, width = sections(statistics, N, C, groups)
    partial = features + 4 * width
    m, _ = samples_of(counts, N, P, splits, BR)
    inverse = tl.where(tl.load(updates + 4) > 0, tl.load(inverse_m), 1 / tl.maximum(m, 1.0))
    w_B, w_F = mixing(inverse, mix_eps, scale)
    eps = tl.cast(eps, tl.float32)
    if program < blocks:
        c = program * BA + tl.arange(0, BA)
        mean_B, var_B = load(batch_mean + c, c < C), load(batch_var + c, c < C, 1.0)
        if tl.minimum(E_B, Std_B) < float("inf"):
            own_mean, own_var = batch_of(partial, counts, c, N, C, P, run, splits, BR, BA)
            mean_B, var_B = shrink(E_B, Std_B, mean_B, var_B, own_mean, own_var, tl.maximum(m, 1.0))  # eqs 18, 19
        store_statistics(batch, c, C, mean_B, var_B, w_B, eps)
    else:
        q = (program - blocks).to(tl.int64) * BQ + tl.arange(0, BQ)
        mean_F = load(feature_mean + q % groups, q < width)
        var_F = load(feature_var + q % groups, q < width, 1.0)
        if tl.minimum(E_F, Std_F) < float("inf"):
            own_mean, own_var = features_of(partial, counts, q, N, C, P, run, splits, groups, BQ, BK)
            mean_F, var_F = shrink(E_F, Std_F, mean_F, var_F, own_mean, own_var, 1.0)  # eqs 20, 21
        store_statistics(features, q, width, mean_F, var_F, w_F, eps)


@triton.jit
def affine_of(statistics, gamma, beta, n, c, N, C, groups):
    """``a`` and ``b`` of a sample's features."""
    batch, features, width = sections(statistics, N, C, groups)
    batch, features = batch + c, features + tl.cast(n, tl.int64) * groups + c // (C // groups)
    a = load(batch + 2 * C, c < C) + load(features + 2 * width, c < C)
    b = -(load(batch + 3 * C, c < C) + load(features + 3 * width, c < C))
    if gamma is not None:
        gain = load(gamma + c, c < C)
        a, b = gain * a, gain * b
    if beta is not None:
        b += load(beta + c, c < C)
    return a, b


@kernel
def apply(
    x, y, residual, mask, statistics, gamma, beta, N, C, P, run, splits, groups,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """``y = g(a x + b + residual)`` at a range of the positions of a sample; hidden entries come out 0."""
    C, P, n, c, lane, first, last = locate(C, P, run, splits, CHANNELS_FIRST, BC, BP, VEC)
    n = N - 1 - n  # what was measured last may still be in the cache
    sample = tl.cast(n, tl.int64) * C * P
    a, b = affine_of(statistics, gamma, beta, n, c, N, C, groups)
    for start in tl.range(first, last, BP, num_stages=STAGES):
        p = start + lane
        inside = (p < P) & (c < C)
        at = offsets(c, p, C, P, CHANNELS_FIRST)
        z = a * load(x + sample + at, inside) + b
        if residual is not None:
            z += load(residual + sample + at, inside)
        if ACTIVATION == "relu":
            z = tl.where(z < 0, 0.0, z)  # hands on NaN
        elif ACTIVATION == "silu":
            z = z * tl.sigmoid(z)
        elif ACTIVATION == "gelu":
            z = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
        if mask is not None:
            z = tl.where(is_real(mask, tl.cast(n, tl.int64) * P + p, p < P), z, 0.0)
        tl.store(y + sample + at, z.to(y.dtype.element_ty), mask=inside)


# ---- backward


@triton.jit
def incoming(x, dy, residual, sample, at, inside, a, b, ACTIVATION: tl.constexpr):
    """``x`` and the gradient before the nonlinearity; with ReLU, the output stands in place of the residual."""
    v = load(x + sample + at, inside)
    g = load(dy + sample + at, inside)
    if ACTIVATION is not None:
        z = a * v + b
        if residual is not None:
            added = load(residual + sample + at, inside)
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
    x, dy, residual, mask, statistics, gamma, beta, sums, dots, N, C, P, run, splits, groups,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Sums of ``dy`` and of ``dy (x - mean_B)`` over a range of the positions of a sample."""
    AXIS: tl.constexpr = 1 if CHANNELS_FIRST else 0
    C, P, n, c, lane, first, last = locate(C, P, run, splits, CHANNELS_FIRST, BC, BP, VEC)
    sample = tl.cast(n, tl.int64) * C * P
    mean = load(statistics + 4 + c, c < C)
    a, b = mean, mean
    if ACTIVATION is not None:
        a, b = affine_of(statistics, gamma, beta, n, c, N, C, groups)
    total = tl.zeros([BC, BP] if CHANNELS_FIRST else [BP, BC], tl.float32)
    total_dot = tl.zeros([BC, BP] if CHANNELS_FIRST else [BP, BC], tl.float32)
    for start in tl.range(first, last, BP, num_stages=STAGES):
        p = start + lane
        inside = is_real(mask, tl.cast(n, tl.int64) * P + p, p < P) & (c < C)
        at = offsets(c, p, C, P, CHANNELS_FIRST)
        v, g = incoming(x, dy, residual, sample, at, inside, a, b, ACTIVATION)
        g = tl.where(inside, g, 0.0)
        total += g
        total_dot += g * tl.where(inside, v - mean, 0.0)
    row = (tl.cast(first // run, tl.int64) * N + n) * C + c
    tl.store(sums + row, tl.sum(total, AXIS, keep_dims=True), mask=c < C)
    tl.store(dots + row, tl.sum(total_dot, AXIS, keep_dims=True), mask=c < C)


@kernel
def join_backward(
    shares, sums, dots, counts, statistics, gamma, gradients, N, C, P, splits, count_splits, groups,
    mix_eps, scale, eps, BR: tl.constexpr, BA: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The chain rule through ``join``: ``shares``, and the gradients of gamma and beta, ``[2, C]``.

    Programs divide the work as there. ``p1``, ``p0`` of each feature and ``q1``, ``q0`` of each sample and group make
    ``c1 = -(p1 + q1)`` and ``c0 = p0 + q0`` of ``dx = a dy + c1 x + c0``. ``counts`` have ``count_splits`` ranges.
    """
    program, blocks, K = tl.program_id(0), tl.cdiv(C, BA), C // groups
    batch, features, width = sections(statistics, N, C, groups)
    inverse, entries = tl.load(statistics), tl.load(statistics + 1)
    w_B, w_F = mixing(inverse, mix_eps, scale)
    eps = tl.cast(eps, tl.float32)
    if program < blocks:  # p1, p0 and gradients of gamma and beta, of a block of features
        c = program * BA + tl.arange(0, BA)
        mean_B = load(batch + c, c < C)
        zero = tl.zeros([BR, BA], tl.float32)
        total, total_B, total_F = zero, zero, zero
        for start in range(0, N * splits, BR):
            row = start + tl.arange(0, BR)[:, None]
            inside = (row < N * splits) & (c < C)[None, :]
            at = row.to(tl.int64) * C + c[None, :]
            s, dot = load(sums + at, inside), load(dots + at, inside)
            feature = features + (row % N).to(tl.int64) * groups + c[None, :] // K
            mean_F = load(feature, inside)
            r_F = 1 / tl.sqrt(load(feature + width, inside, 1.0) + eps)
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
        # Each factor of r in its turn: r ** 3 would underflow where x is of order 1e15.
        weight = w_B * r_B / entries
        p1 = weight * d_dot * r_B
        tl.store(shares + c, p1, mask=c < C)
        tl.store(shares + C + c, p1 * mean_B - weight * d_sum, mask=c < C)
    if program >= blocks:  # q1 and q0 of a block of samples and groups
        q = (program - blocks).to(tl.int64) * BQ + tl.arange(0, BQ)
        mean_F = load(features + q, q < width)
        r_F = 1 / tl.sqrt(load(features + width + q, q < width, 1.0) + eps)
        total, total_F = tl.zeros([BQ, BK], tl.float32), tl.zeros([BQ, BK], tl.float32)
        for split in range(splits):
            for start in range(0, K, BK):
                k = start + tl.arange(0, BK)[None, :]
                inside = (q < width)[:, None] & (k < K)
                at = split * tl.cast(N, tl.int64) * C + q[:, None] * K + k
                c = (q % groups)[:, None] * K + k
                s, dot = load(sums + at, inside), load(dots + at, inside)
                if gamma is not None:
                    gain = load(gamma + c, inside)
                    s, dot = gain * s, gain * dot
                total += s
                total_F += dot + (load(batch + c, inside) - mean_F[:, None]) * s
        size = tl.zeros([BQ], tl.float32) + P
        if counts is not None:
            size = counted(counts, q // groups, q < width, N, count_splits)
        weight = w_F * r_F / (tl.maximum(size, 1.0) * K)
        q1 = weight * (r_F * tl.sum(total_F, 1)) * r_F
        tl.store(shares + 2 * C + q, q1, mask=q < width)
        tl.store(shares + 2 * C + width + q, q1 * mean_F - weight * tl.sum(total, 1), mask=q < width)


@kernel
def apply_backward(
    x, dy, residual, dx, d_residual, mask, statistics, gamma, beta, shares, N, C, P, run, splits, groups,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """``dx = a dy + c1 x + c0`` at a range of the positions of a sample, ``dy`` taken before the nonlinearity."""
    C, P, n, c, lane, first, last = locate(C, P, run, splits, CHANNELS_FIRST, BC, BP, VEC)
    n = N - 1 - n  # what was measured last may still be in the cache
    sample = tl.cast(n, tl.int64) * C * P
    a, b = affine_of(statistics, gamma, beta, n, c, N, C, groups)
    q = shares + 2 * C + tl.cast(n, tl.int64) * groups + c // (C // groups)
    c1 = -(load(shares + c, c < C) + load(q, c < C))
    c0 = load(shares + C + c, c < C) + load(q + tl.cast(N, tl.int64) * groups, c < C)
    for start in tl.range(first, last, BP, num_stages=STAGES):
        p = start + lane
        inside = (p < P) & (c < C)
        at = offsets(c, p, C, P, CHANNELS_FIRST)
        v, g = incoming(x, dy, residual, sample, at, inside, a, b, ACTIVATION)
        d = a * g + c1 * v + c0
        if mask is not None:
            real = is_real(mask, tl.cast(n, tl.int64) * P + p, p < P)
            d, g = tl.where(real, d, 0.0), tl.where(real, g, 0.0)
        tl.store(dx + sample + at, d.to(dx.dtype.element_ty), mask=inside)
        if d_residual is not None:
            tl.store(d_residual + sample + at, g.to(d_residual.dtype.element_ty), mask=inside)
