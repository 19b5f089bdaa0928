"""Kernels of the published form that read an input twice: once for its statistics, once to normalize it.

An input is seen as ``x[n, p, c]``, or ``x[n, c, p]`` where ``CHANNELS_FIRST``; a row is all features of a sample at a
position, and there are ``R`` rows. A tile has some positions and all features. A program follows its positions from
sample to sample, so that batch statistics grow in registers, and a row's feature statistics are at hand in each tile.
``POOLED``, the statistics of all positions are joined in the end. Dense inputs and pooled ones with features last are
seen as ``[R / P, P, C]``, whatever ``P`` suits a tile.

A column is what batch statistics have one value for: a position and a feature, ``Q * C`` of them; ``POOLED``, Q is 1.
Columns lie features last in any layout. Tensors between kernels are float32:

- ``rows``, ``[2, R]``: mean and variance of each row; 0 where it is hidden. ``features``, ``[2, Q]``: their averages.
- ``mean``, ``var``, ``[Q, C]``: eqs 10, 11. ``flags``: how many variances of each program are not finite.
- ``partial``: what each of ``S`` parts has of a column: mean and squares, ``[2, S, Q, C]``; backward three sums.
- ``sums``, ``[3, S, Q]``: rows in a part, and the sums of their means and variances.
- ``weights``, ``[3, W]``: those of eq 16 and one over the entries that a batch statistic averages. W is 1 where they
  are the same at all positions, else Q.
- ``shares``, ``[4, Q, C]``: ``flat`` and ``along``, so that the batch part of ``dx`` is
  ``gamma w_B r_B dy - flat - (x - mean_B) along``; then the gradients of gamma and beta.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import absorb, extents, gather, indices, is_real, kernel, load, mixing, offsets, shrink


@triton.jit
def locate(P, C, R, CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr):
    """``P`` and ``C``, the program's range of samples, its positions and features, and their offsets in a sample."""
    C, P = extents(C, P, CHANNELS_FIRST, VEC)
    splits, samples = tl.num_programs(0) // tl.cdiv(P, BP), tl.cdiv(R, P)
    block, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    run = tl.cdiv(samples, splits)
    c, p = indices(0, BC, BP, CHANNELS_FIRST)
    p += block * BP
    return P, C, split * run, tl.minimum((split + 1) * run, samples), p, c, offsets(c, p, C, P, CHANNELS_FIRST)


@triton.jit
def columns_of(p, c, P, C, POOLED: tl.constexpr):
    """Where the columns of a tile stand, which of them exist, and how many there are in all."""
    at, inside, columns = c.to(tl.int64), c < C, tl.cast(C, tl.int64)
    if not POOLED:
        at, inside, columns = p.to(tl.int64) * C + c, (p < P) & inside, tl.cast(P, tl.int64) * C
    return at, inside, columns


@triton.jit
def rows_of(mask, n, p, P, R, CHANNELS_FIRST: tl.constexpr):
    """Rows of a tile of sample ``n``, which of them exist, and which of those are not hidden.

    With channels first ``P`` bounds all that ``R`` does. The divisibility of ``R`` is not known, and with it loads
    along positions would be single values.
    """
    row, exists = tl.cast(n, tl.int64) * P + p, p < P
    if not CHANNELS_FIRST:
        exists = exists & (row < R)
    return row, exists, is_real(mask, row, exists)


@triton.jit
def parts_of(P, BP: tl.constexpr, POOLED: tl.constexpr):
    """The program's number among those that have the same columns, and how many those are."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    if not POOLED:
        parts = parts // tl.cdiv(P, BP)
        part = part % parts
    return part, parts


@triton.jit
def features_of(v, c, C, AXIS: tl.constexpr):
    """Eqs 12, 13 of each row of a tile: mean and variance."""
    mean = tl.sum(v, AXIS, keep_dims=True) / C
    u = tl.where(c < C, v - mean, 0.0)
    return mean, tl.sum(u * u, AXIS, keep_dims=True) / C


@triton.jit
def weights_at(weights, p, P, W, POOLED: tl.constexpr):
    """``w_B`` and ``w_F`` of each position of a tile."""
    q = p * 0 if POOLED else tl.where(W > 1, p, 0)
    return load(weights + q, p < P), load(weights + W + q, p < P)


@triton.jit
def parameter(pointer, c, C, default: tl.constexpr):
    """Gamma or beta."""
    return load(pointer + c, c < C) if pointer is not None else tl.full(c.shape, default, tl.float32)


# ---- forward


@kernel
def measure(
    x, mask, rows, partial, sums, P, C, R,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    POOLED: tl.constexpr,
):  # fmt: skip
    """Feature statistics of each row, and the part of a range of samples in batch statistics.

    Each lane follows its own column by Welford's recurrence, so nothing cancels.
    """
    FEATURES: tl.constexpr = 0 if CHANNELS_FIRST else 1
    AXIS: tl.constexpr = 1 - FEATURES
    P, C, first, last, p, c, at = locate(P, C, R, CHANNELS_FIRST, BC, BP, VEC)
    mean, squares = tl.zeros(at.shape, tl.float32), tl.zeros(at.shape, tl.float32)
    zero = tl.zeros(p.shape, tl.float32)
    count, sum_mean, sum_var = zero, zero, zero
    for n in tl.range(first, last, num_stages=STAGES):
        row, exists, real = rows_of(mask, n, p, P, R, CHANNELS_FIRST)
        v = load(x + tl.cast(n, tl.int64) * C * P + at, real & (c < C))
        row_mean, row_var = features_of(v, c, C, FEATURES)
        tl.store(rows + row, row_mean, mask=exists)
        tl.store(rows + R + row, row_var, mask=exists)
        count += tl.where(real, 1.0, 0.0)
        sum_mean += row_mean
        sum_var += row_var
        moved = tl.where(real, v - mean, 0.0)
        mean += moved * (1.0 / tl.maximum(count, 1.0))
        squares += moved * (v - mean)
    part, parts = parts_of(P, BP, POOLED)
    Q = P
    if POOLED:
        _, mean, squares = gather(count, mean, squares, AXIS)
        mean, squares = tl.expand_dims(mean, AXIS), tl.expand_dims(squares, AXIS)
        count = tl.sum(count, AXIS, keep_dims=True)
        sum_mean, sum_var = tl.sum(sum_mean, AXIS, keep_dims=True), tl.sum(sum_var, AXIS, keep_dims=True)
        Q, p = P * 0 + 1, tl.zeros(count.shape, tl.int32)
    column, inside, columns = columns_of(p, c, P, C, POOLED)
    tl.store(partial + part * columns + column, mean, mask=inside)
    tl.store(partial + (parts + part) * columns + column, squares, mask=inside)
    line, plane = sums + tl.cast(part, tl.int64) * Q + p, tl.cast(parts, tl.int64) * Q
    tl.store(line, count, mask=p < Q)
    tl.store(line + plane, sum_mean, mask=p < Q)
    tl.store(line + 2 * plane, sum_var, mask=p < Q)


@kernel
def join(
    partial, sums, mean, var, features, flags, weights, Q, C, S, w_B, w_F, inverse, BS: tl.constexpr, BA: tl.constexpr
):  # fmt: skip
    """Batch statistics of all parts together, averages of feature statistics, and the weights without a mask."""
    columns, plane = tl.cast(Q, tl.int64) * C, tl.cast(S, tl.int64) * Q
    bad = 0.0
    for block in range(tl.program_id(0), tl.cdiv(columns, BA), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BA + tl.arange(0, BA)[None, :]
        q = at // C
        zero = tl.zeros([BS, BA], tl.float32)
        count, own, squares, sum_mean, sum_var = zero, zero, zero, zero, zero
        for start in range(0, S, BS):
            part = start + tl.arange(0, BS)[:, None]
            real = (part < S) & (at < columns)
            line = sums + tl.cast(part, tl.int64) * Q + q
            size = load(line, real)
            sum_mean += load(line + plane, real)
            sum_var += load(line + 2 * plane, real)
            value = partial + part * columns + at
            part_mean, part_squares = load(value, real), load(value + S * columns, real)
            count, own, squares = absorb(count, own, squares, size, part_mean, part_squares)
        count, own, squares = gather(count, own, squares, 0)
        size = tl.maximum(count, 1.0)
        own_var, mean_F, var_F = squares / size, tl.sum(sum_mean, 0) / size, tl.sum(sum_var, 0) / size
        at = tl.cast(block, tl.int64) * BA + tl.arange(0, BA)
        tl.store(mean + at, own, mask=at < columns)
        tl.store(var + at, own_var, mask=at < columns)
        first = (at < columns) & (at % C == 0)
        tl.store(features + at // C, mean_F, mask=first)
        tl.store(features + Q + at // C, var_F, mask=first)
        finite = (own_var < float("inf")) & (var_F < float("inf"))  # NaN is not less, either
        bad += tl.sum(tl.where((at < columns) & (finite == 0), 1.0, 0.0), 0)
    tl.store(flags + tl.program_id(0), bad)
    if tl.program_id(0) == 0:
        tl.store(weights, w_B)
        tl.store(weights + 1, w_F)
        tl.store(weights + 2, inverse)


@kernel
def normalize(
    x, y, mask, gamma, beta, mean, var, feature_mean, feature_var, weights, W, E_F, Std_F, P, C, R, eps,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    POOLED: tl.constexpr,
):  # fmt: skip
    """Eqs 14-17, or 22-25 with the population's feature statistics and a configuration; hidden rows come out 0.

    A row is summed in an order that does not depend on the rest of the mini-batch.
    """
    FEATURES: tl.constexpr = 0 if CHANNELS_FIRST else 1
    P, C, first, last, p, c, at = locate(P, C, R, CHANNELS_FIRST, BC, BP, VEC)
    column, inside, _columns = columns_of(p, c, P, C, POOLED)
    mean_B = load(mean + column, inside)
    w_B, w_F = weights_at(weights, p, P, W, POOLED)
    s_B = w_B / tl.sqrt(load(var + column, inside, 1.0) + eps)
    gain, shift = parameter(gamma, c, C, 1.0), parameter(beta, c, C, 0.0)
    kept_mean, kept_var = tl.zeros(p.shape, tl.float32), tl.full(p.shape, 1.0, tl.float32)
    if feature_mean is not None:
        q = p * 0 if POOLED else p
        kept_mean, kept_var = load(feature_mean + q, p < P), load(feature_var + q, p < P, 1.0)
    for n in tl.range(first, last, num_stages=STAGES):
        _, exists, real = rows_of(mask, n, p, P, R, CHANNELS_FIRST)
        v = load(x + tl.cast(n, tl.int64) * C * P + at, real & (c < C))
        mean_F, var_F = features_of(v, c, C, FEATURES)
        if feature_mean is not None:
            mean_F, var_F = shrink(E_F, Std_F, kept_mean, kept_var, mean_F, var_F, 1.0)  # eqs 20, 21
        s_F = w_F / tl.sqrt(var_F + eps)
        out = gain * (s_B * (v - mean_B) + s_F * (v - mean_F)) + shift
        if mask is not None:
            out = tl.where(real, out, 0.0)
        tl.store(y + tl.cast(n, tl.int64) * C * P + at, out.to(y.dtype.element_ty), mask=exists & (c < C))


@kernel
def weigh(inverse_m, updates, own, weights, M, Q, mix_eps, scale, B: tl.constexpr):
    """The weights of eq 24 from the population's ``1/m``, or where nothing was seen yet from the input's ``own``."""
    q = tl.program_id(0) * B + tl.arange(0, B)
    kept, current = load(inverse_m + q, q < Q, 1.0), load(own + tl.where(M > 1, q, 0), q < Q, 1.0)
    inverse = tl.where(tl.load(updates + q, mask=q < Q, other=0) > 0, kept, current)
    w_B, w_F = mixing(inverse, mix_eps, scale)
    tl.store(weights + q, w_B, mask=q < Q)
    tl.store(weights + Q + q, w_F, mask=q < Q)


# ---- backward


@kernel
def measure_backward(
    x, dy, mask, mean, rows, partial, P, C, R, eps,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    POOLED: tl.constexpr,
):  # fmt: skip
    """Sums of ``dy``, ``dy (x - mean_B)`` and ``dy x_F`` of each column, ``[3, S, Q, C]`` in ``partial``."""
    P, C, first, last, p, c, at = locate(P, C, R, CHANNELS_FIRST, BC, BP, VEC)
    column, inside, columns = columns_of(p, c, P, C, POOLED)
    mean_B = load(mean + column, inside)
    zero = tl.zeros(at.shape, tl.float32)
    total, dot_B, dot_F = zero, zero, zero
    for n in tl.range(first, last, num_stages=STAGES):
        row, _, real = rows_of(mask, n, p, P, R, CHANNELS_FIRST)
        v = load(x + tl.cast(n, tl.int64) * C * P + at, real & (c < C))
        g = load(dy + tl.cast(n, tl.int64) * C * P + at, real & (c < C))
        r_F = 1 / tl.sqrt(load(rows + R + row, real, 1.0) + eps)
        total += g
        dot_B += g * (v - mean_B)
        dot_F += g * ((v - load(rows + row, real)) * r_F)
    part, parts = parts_of(P, BP, POOLED)
    if POOLED:
        AXIS: tl.constexpr = 1 if CHANNELS_FIRST else 0
        total, dot_B = tl.sum(total, AXIS, keep_dims=True), tl.sum(dot_B, AXIS, keep_dims=True)
        dot_F = tl.sum(dot_F, AXIS, keep_dims=True)
    tl.store(partial + part * columns + column, total, mask=inside)
    tl.store(partial + (parts + part) * columns + column, dot_B, mask=inside)
    tl.store(partial + (2 * parts + part) * columns + column, dot_F, mask=inside)


@kernel
def join_backward(partial, gamma, var, weights, shares, W, Q, C, S, eps, BS: tl.constexpr, BA: tl.constexpr):
    """What the batch part of ``dx`` takes, and the gradients of gamma and beta at each position."""
    columns = tl.cast(Q, tl.int64) * C
    at = tl.program_id(0).to(tl.int64) * BA + tl.arange(0, BA)[None, :]
    zero = tl.zeros([BS, BA], tl.float32)
    total, dot_B, dot_F = zero, zero, zero
    for start in range(0, S, BS):
        part = start + tl.arange(0, BS)[:, None]
        real, value = (part < S) & (at < columns), partial + part * columns + at
        total += load(value, real)
        dot_B += load(value + S * columns, real)
        dot_F += load(value + 2 * S * columns, real)
    at = tl.program_id(0).to(tl.int64) * BA + tl.arange(0, BA)
    inside, weight = at < columns, weights + tl.where(W > 1, at // C, 0)
    w_B, w_F, inverse = load(weight, inside), load(weight + W, inside), load(weight + 2 * W, inside)
    r_B = 1 / tl.sqrt(load(var + at, inside, 1.0) + eps)
    d_beta, x_B = tl.sum(total, 0), r_B * tl.sum(dot_B, 0)
    share = w_B * r_B * inverse
    if gamma is not None:
        share *= load(gamma + at % C, inside)
    # Each factor of r in its turn: r ** 3 would underflow where x is of order 1e15.
    tl.store(shares + at, share * d_beta, mask=inside)
    tl.store(shares + columns + at, share * x_B * r_B, mask=inside)
    tl.store(shares + 2 * columns + at, w_B * x_B + w_F * tl.sum(dot_F, 0), mask=inside)
    tl.store(shares + 3 * columns + at, d_beta, mask=inside)


@kernel
def differentiate(
    x, dy, dx, mask, gamma, mean, var, rows, shares, weights, W, P, C, R, eps,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    POOLED: tl.constexpr,
):  # fmt: skip
    """The gradient of the input; 0 at hidden rows. A row's own averages are found in its tile."""
    FEATURES: tl.constexpr = 0 if CHANNELS_FIRST else 1
    P, C, first, last, p, c, at = locate(P, C, R, CHANNELS_FIRST, BC, BP, VEC)
    column, inside, columns = columns_of(p, c, P, C, POOLED)
    mean_B = load(mean + column, inside)
    w_B, w_F = weights_at(weights, p, P, W, POOLED)
    s_B = w_B / tl.sqrt(load(var + column, inside, 1.0) + eps)
    flat, along = load(shares + column, inside), load(shares + columns + column, inside)
    gain = parameter(gamma, c, C, 1.0)
    for n in tl.range(first, last, num_stages=STAGES):
        row, exists, real = rows_of(mask, n, p, P, R, CHANNELS_FIRST)
        v = load(x + tl.cast(n, tl.int64) * C * P + at, real & (c < C))
        h = gain * load(dy + tl.cast(n, tl.int64) * C * P + at, real & (c < C))
        r_F = 1 / tl.sqrt(load(rows + R + row, real, 1.0) + eps)
        x_F = (v - load(rows + row, real)) * r_F
        flat_F = tl.sum(h, FEATURES, keep_dims=True) / C
        along_F = tl.sum(h * x_F, FEATURES, keep_dims=True) / C
        d = s_B * h - flat - (v - mean_B) * along + (w_F * r_F) * (h - flat_F - x_F * along_F)
        if mask is not None:
            d = tl.where(real, d, 0.0)
        tl.store(dx + tl.cast(n, tl.int64) * C * P + at, d.to(dx.dtype.element_ty), mask=exists & (c < C))
