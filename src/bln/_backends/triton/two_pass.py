"""Kernels of the published form that read the input twice: once for its statistics, once to normalize it.

The input is ``x[n, p, c]``, or ``x[n, c, p]`` with ``CHANNELS_FIRST``. A row is all features of a sample at a position;
there are ``R``. A tile has ``BP`` positions of one sample and all features. A kernel over the input has one program for
each block of positions and range of samples, ranges fastest. It walks the samples, so that batch statistics accumulate
in registers, while the feature statistics of a row are sums within its tile.

A column is a position and feature with batch statistics of their own; there are ``Q * C``. ``POOLED``, all positions
share them: ``Q`` is 1, and lanes are combined at the end. A matrix of rows is then taken as ``[R / P, P, C]``, with
whatever ``P`` suits a tile.

Buffers between kernels are contiguous and float32, columns with features last in either layout:

- ``row_stats``, ``[2, R]``: mean and variance of each row; 0 where it is hidden.
- ``partial``, ``[2, S, Q, C]``: mean and squares of each column, from each of ``S`` programs that share it.
- ``row_sums``, ``[3, S, Q]``: their valid rows, and the sums of those rows' means and variances.
- ``mean``, ``var``, ``[Q, C]``: eqs 10, 11. ``feature_stats``, ``[2, Q]``: averages of ``row_stats`` over samples.
- ``nonfinite``: how many variances that are not finite each program of ``join`` met.
- ``weights``, ``[3, W]``: ``w_B``, ``w_F`` and one over the entries of a batch statistic. ``W`` is 1, or ``Q`` where
  they differ by position.
- ``partial`` in backward, ``[3, S, Q, C]``: sums of ``dy``, ``dy (x - mean_B)`` and ``dy x_F``.
- ``column_terms``, ``[4, Q, C]``: ``shift`` and ``slope``, with which the batch part of ``dx`` is
  ``gamma w_B r_B dy - shift - (x - mean_B) slope``; then the gradients of gamma and beta.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import choose, combine, divisible, indices, is_valid, kernel, load, mixing, offsets, reduce


@triton.jit
def locate(P, C, R, CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr):
    """Return ``P``, ``C`` and the program's first and last sample, positions, features, and offsets in a sample."""
    C, P = divisible(C, P, CHANNELS_FIRST, VEC)
    splits, samples = tl.num_programs(0) // tl.cdiv(P, BP), tl.cdiv(R, P)
    block, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    per_program = tl.cdiv(samples, splits)
    c, p = indices(0, BC, BP, CHANNELS_FIRST)
    p += block * BP
    last = tl.minimum((split + 1) * per_program, samples)
    return P, C, split * per_program, last, p, c, offsets(c, p, C, P, CHANNELS_FIRST)


@triton.jit
def columns_of(p, c, P, C, POOLED: tl.constexpr):
    """Return the numbers of a tile's columns, which of them are inside, and how many there are in all."""
    column, inside, columns = c.to(tl.int64), c < C, tl.cast(C, tl.int64)
    if not POOLED:
        column, inside, columns = p.to(tl.int64) * C + c, (p < P) & inside, tl.cast(P, tl.int64) * C
    return column, inside, columns


@triton.jit
def rows_of(mask, n, p, P, R, CHANNELS_FIRST: tl.constexpr):
    """Return the numbers of a tile's rows of sample ``n``, which of them are inside, and which are valid.

    With channels first, ``p < P`` implies ``row < R``. To test ``R`` as well, of unknown divisibility, would break
    loads along positions into single values.
    """
    row, inside = tl.cast(n, tl.int64) * P + p, p < P
    if not CHANNELS_FIRST:
        inside = inside & (row < R)
    return row, inside, is_valid(mask, row, inside)


@triton.jit
def partial_index(P, BP: tl.constexpr, POOLED: tl.constexpr):
    """Return the program's number among the programs that share its columns, and how many those are."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    if not POOLED:
        parts = parts // tl.cdiv(P, BP)
        part = part % parts
    return part, parts


@triton.jit
def row_statistics(v, c, C, AXIS: tl.constexpr):
    """Return mean and variance of each row of a tile (eqs 12, 13)."""
    mean = tl.sum(v, AXIS, keep_dims=True) / C
    u = tl.where(c < C, v - mean, 0.0)
    return mean, tl.sum(u * u, AXIS, keep_dims=True) / C


@triton.jit
def load_weights(weights, p, P, W, POOLED: tl.constexpr):
    """Return ``w_B`` and ``w_F`` of each position of a tile."""
    q = p * 0 if POOLED else tl.where(W > 1, p, 0)
    return load(weights + q, p < P), load(weights + W + q, p < P)


@triton.jit
def load_parameter(pointer, c, C, default: tl.constexpr):
    """Return gamma or beta, or its default where there is none."""
    return load(pointer + c, c < C) if pointer is not None else tl.full(c.shape, default, tl.float32)


# ---- forward


@kernel
def measure(
    x, mask, row_stats, partial, row_sums, P, C, R,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    POOLED: tl.constexpr,
):  # fmt: skip
    """Write ``row_stats``, ``partial`` and ``row_sums`` from one read of the input.

    Each lane follows its own column by Welford's recurrence, so nothing cancels.
    """
    FEATURES: tl.constexpr = 0 if CHANNELS_FIRST else 1
    AXIS: tl.constexpr = 1 - FEATURES
    P, C, first, last, p, c, offs = locate(P, C, R, CHANNELS_FIRST, BC, BP, VEC)
    mean, squares = tl.zeros(offs.shape, tl.float32), tl.zeros(offs.shape, tl.float32)
    zero = tl.zeros(p.shape, tl.float32)
    count, sum_mean, sum_var = zero, zero, zero
    for n in tl.range(first, last, num_stages=STAGES):
        row, inside, valid = rows_of(mask, n, p, P, R, CHANNELS_FIRST)
        v = load(x + tl.cast(n, tl.int64) * C * P + offs, valid & (c < C))
        mean_F, var_F = row_statistics(v, c, C, FEATURES)
        tl.store(row_stats + row, mean_F, mask=inside)
        tl.store(row_stats + R + row, var_F, mask=inside)
        count += tl.where(valid, 1.0, 0.0)
        sum_mean += mean_F
        sum_var += var_F
        delta = tl.where(valid, v - mean, 0.0)
        mean += delta * (1.0 / tl.maximum(count, 1.0))
        squares += delta * (v - mean)
    part, parts = partial_index(P, BP, POOLED)
    Q = P
    if POOLED:
        _, mean, squares = reduce(count, mean, squares, AXIS)
        mean, squares = tl.expand_dims(mean, AXIS), tl.expand_dims(squares, AXIS)
        count = tl.sum(count, AXIS, keep_dims=True)
        sum_mean, sum_var = tl.sum(sum_mean, AXIS, keep_dims=True), tl.sum(sum_var, AXIS, keep_dims=True)
        Q, p = P * 0 + 1, tl.zeros(count.shape, tl.int32)
    column, inside, columns = columns_of(p, c, P, C, POOLED)
    tl.store(partial + part * columns + column, mean, mask=inside)
    tl.store(partial + (parts + part) * columns + column, squares, mask=inside)
    pointers, plane = row_sums + tl.cast(part, tl.int64) * Q + p, tl.cast(parts, tl.int64) * Q
    tl.store(pointers, count, mask=p < Q)
    tl.store(pointers + plane, sum_mean, mask=p < Q)
    tl.store(pointers + 2 * plane, sum_var, mask=p < Q)


@kernel
def join(
    partial, row_sums, mean, var, feature_stats, nonfinite, weights, Q, C, S, w_B, w_F, inv_entries,
    BS: tl.constexpr, BQC: tl.constexpr,
):  # fmt: skip
    """Write ``mean``, ``var``, ``feature_stats`` and ``nonfinite``, and the ``weights`` of an input without a mask.

    Programs step through blocks of ``BQC`` columns, and read ``BS`` of a column's ``S`` partial results at a time.
    """
    columns, plane = tl.cast(Q, tl.int64) * C, tl.cast(S, tl.int64) * Q
    bad = 0.0
    for block in range(tl.program_id(0), tl.cdiv(columns, BQC), tl.num_programs(0)):
        column = tl.cast(block, tl.int64) * BQC + tl.arange(0, BQC)[None, :]
        q = column // C
        zero = tl.zeros([BS, BQC], tl.float32)
        count, mean_B, squares, sum_mean, sum_var = zero, zero, zero, zero, zero
        for start in range(0, S, BS):
            part = start + tl.arange(0, BS)[:, None]
            inside = (part < S) & (column < columns)
            pointers = row_sums + tl.cast(part, tl.int64) * Q + q
            part_count = load(pointers, inside)
            sum_mean += load(pointers + plane, inside)
            sum_var += load(pointers + 2 * plane, inside)
            pointers = partial + part * columns + column
            part_mean, part_squares = load(pointers, inside), load(pointers + S * columns, inside)
            count, mean_B, squares = combine(count, mean_B, squares, part_count, part_mean, part_squares)
        count, mean_B, squares = reduce(count, mean_B, squares, 0)
        count = tl.maximum(count, 1.0)
        var_B, mean_F, var_F = squares / count, tl.sum(sum_mean, 0) / count, tl.sum(sum_var, 0) / count
        column = tl.cast(block, tl.int64) * BQC + tl.arange(0, BQC)
        tl.store(mean + column, mean_B, mask=column < columns)
        tl.store(var + column, var_B, mask=column < columns)
        first = (column < columns) & (column % C == 0)
        tl.store(feature_stats + column // C, mean_F, mask=first)
        tl.store(feature_stats + Q + column // C, var_F, mask=first)
        finite = (var_B < float("inf")) & (var_F < float("inf"))  # NaN fails the comparison, too
        bad += tl.sum(tl.where((column < columns) & (finite == 0), 1.0, 0.0), 0)
    tl.store(nonfinite + tl.program_id(0), bad)
    if tl.program_id(0) == 0:
        tl.store(weights, w_B)
        tl.store(weights + 1, w_F)
        tl.store(weights + 2, inv_entries)


@kernel
def normalize(
    x, y, mask, gamma, beta, mean, var, feature_mean, feature_var, weights, W, E_F, Std_F, P, C, R, eps,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    POOLED: tl.constexpr,
):  # fmt: skip
    """Write ``y`` by eqs 14-17, or, given the population's feature statistics, by eqs 20-25; hidden rows are 0.

    A row is summed in an order that does not depend on the other samples.
    """
    FEATURES: tl.constexpr = 0 if CHANNELS_FIRST else 1
    P, C, first, last, p, c, offs = locate(P, C, R, CHANNELS_FIRST, BC, BP, VEC)
    column, column_inside, _columns = columns_of(p, c, P, C, POOLED)
    mean_B = load(mean + column, column_inside)
    w_B, w_F = load_weights(weights, p, P, W, POOLED)
    s_B = w_B / tl.sqrt(load(var + column, column_inside, 1.0) + eps)
    gain, shift = load_parameter(gamma, c, C, 1.0), load_parameter(beta, c, C, 0.0)
    population_mean, population_var = tl.zeros(p.shape, tl.float32), tl.full(p.shape, 1.0, tl.float32)
    if feature_mean is not None:
        q = p * 0 if POOLED else p
        population_mean, population_var = load(feature_mean + q, p < P), load(feature_var + q, p < P, 1.0)
    for n in tl.range(first, last, num_stages=STAGES):
        _, inside, valid = rows_of(mask, n, p, P, R, CHANNELS_FIRST)
        v = load(x + tl.cast(n, tl.int64) * C * P + offs, valid & (c < C))
        mean_F, var_F = row_statistics(v, c, C, FEATURES)
        if feature_mean is not None:
            mean_F, var_F = choose(E_F, Std_F, population_mean, population_var, mean_F, var_F, 1.0)
        s_F = w_F / tl.sqrt(var_F + eps)
        out = gain * (s_B * (v - mean_B) + s_F * (v - mean_F)) + shift
        if mask is not None:
            out = tl.where(valid, out, 0.0)
        tl.store(y + tl.cast(n, tl.int64) * C * P + offs, out.to(y.dtype.element_ty), mask=inside & (c < C))


@kernel
def inference_weights(inverse_m, updates, current_inverse_m, weights, M, Q, mix_eps, scale, BQ: tl.constexpr):
    """Write the weights of eq 24, ``[2, Q]``, from the population's ``1/m``, or the input's where it has none yet.

    The input's ``1/m`` has ``M`` values, 1 or ``Q``. Grid: ``cdiv(Q, BQ)``.
    """
    q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    learned, current = load(inverse_m + q, q < Q, 1.0), load(current_inverse_m + tl.where(M > 1, q, 0), q < Q, 1.0)
    inv_m = tl.where(tl.load(updates + q, mask=q < Q, other=0) > 0, learned, current)
    w_B, w_F = mixing(inv_m, mix_eps, scale)
    tl.store(weights + q, w_B, mask=q < Q)
    tl.store(weights + Q + q, w_F, mask=q < Q)


# ---- backward


@kernel
def measure_backward(
    x, dy, mask, mean, row_stats, partial, P, C, R, eps,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    POOLED: tl.constexpr,
):  # fmt: skip
    """Write ``partial``: sums of ``dy``, ``dy (x - mean_B)`` and ``dy x_F`` of each column."""
    P, C, first, last, p, c, offs = locate(P, C, R, CHANNELS_FIRST, BC, BP, VEC)
    column, column_inside, columns = columns_of(p, c, P, C, POOLED)
    mean_B = load(mean + column, column_inside)
    zero = tl.zeros(offs.shape, tl.float32)
    total, dot_B, dot_F = zero, zero, zero
    for n in tl.range(first, last, num_stages=STAGES):
        row, _, valid = rows_of(mask, n, p, P, R, CHANNELS_FIRST)
        v = load(x + tl.cast(n, tl.int64) * C * P + offs, valid & (c < C))
        g = load(dy + tl.cast(n, tl.int64) * C * P + offs, valid & (c < C))
        r_F = 1 / tl.sqrt(load(row_stats + R + row, valid, 1.0) + eps)
        total += g
        dot_B += g * (v - mean_B)
        dot_F += g * ((v - load(row_stats + row, valid)) * r_F)
    part, parts = partial_index(P, BP, POOLED)
    if POOLED:
        AXIS: tl.constexpr = 1 if CHANNELS_FIRST else 0
        total, dot_B = tl.sum(total, AXIS, keep_dims=True), tl.sum(dot_B, AXIS, keep_dims=True)
        dot_F = tl.sum(dot_F, AXIS, keep_dims=True)
    tl.store(partial + part * columns + column, total, mask=column_inside)
    tl.store(partial + (parts + part) * columns + column, dot_B, mask=column_inside)
    tl.store(partial + (2 * parts + part) * columns + column, dot_F, mask=column_inside)


@kernel
def join_backward(partial, gamma, var, weights, column_terms, W, Q, C, S, eps, BS: tl.constexpr, BQC: tl.constexpr):
    """Write ``column_terms``. Grid: ``cdiv(Q * C, BQC)``, one program for each block of columns."""
    columns = tl.cast(Q, tl.int64) * C
    column = tl.program_id(0).to(tl.int64) * BQC + tl.arange(0, BQC)[None, :]
    zero = tl.zeros([BS, BQC], tl.float32)
    total, dot_B, dot_F = zero, zero, zero
    for start in range(0, S, BS):
        part = start + tl.arange(0, BS)[:, None]
        inside, pointers = (part < S) & (column < columns), partial + part * columns + column
        total += load(pointers, inside)
        dot_B += load(pointers + S * columns, inside)
        dot_F += load(pointers + 2 * S * columns, inside)
    column = tl.program_id(0).to(tl.int64) * BQC + tl.arange(0, BQC)
    inside, pointers = column < columns, weights + tl.where(W > 1, column // C, 0)
    w_B, w_F, inv_entries = load(pointers, inside), load(pointers + W, inside), load(pointers + 2 * W, inside)
    r_B = 1 / tl.sqrt(load(var + column, inside, 1.0) + eps)
    d_beta, sum_B = tl.sum(total, 0), r_B * tl.sum(dot_B, 0)  # sum_B: of dy x_B
    factor = w_B * r_B * inv_entries
    if gamma is not None:
        factor *= load(gamma + column % C, inside)
    # One factor of r at a time: r ** 3 would underflow where x is of order 1e15.
    tl.store(column_terms + column, factor * d_beta, mask=inside)
    tl.store(column_terms + columns + column, factor * sum_B * r_B, mask=inside)
    tl.store(column_terms + 2 * columns + column, w_B * sum_B + w_F * tl.sum(dot_F, 0), mask=inside)
    tl.store(column_terms + 3 * columns + column, d_beta, mask=inside)


@kernel
def normalize_backward(
    x, dy, dx, mask, gamma, mean, var, row_stats, column_terms, weights, W, P, C, R, eps,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    POOLED: tl.constexpr,
):  # fmt: skip
    """Write ``dx``; hidden rows are 0. The feature part needs two means of each row, which its tile has whole."""
    FEATURES: tl.constexpr = 0 if CHANNELS_FIRST else 1
    P, C, first, last, p, c, offs = locate(P, C, R, CHANNELS_FIRST, BC, BP, VEC)
    column, column_inside, columns = columns_of(p, c, P, C, POOLED)
    mean_B = load(mean + column, column_inside)
    w_B, w_F = load_weights(weights, p, P, W, POOLED)
    s_B = w_B / tl.sqrt(load(var + column, column_inside, 1.0) + eps)
    shift, slope = load(column_terms + column, column_inside), load(column_terms + columns + column, column_inside)
    gain = load_parameter(gamma, c, C, 1.0)
    for n in tl.range(first, last, num_stages=STAGES):
        row, inside, valid = rows_of(mask, n, p, P, R, CHANNELS_FIRST)
        v = load(x + tl.cast(n, tl.int64) * C * P + offs, valid & (c < C))
        wdy = gain * load(dy + tl.cast(n, tl.int64) * C * P + offs, valid & (c < C))
        r_F = 1 / tl.sqrt(load(row_stats + R + row, valid, 1.0) + eps)
        x_F = (v - load(row_stats + row, valid)) * r_F
        mean_wdy = tl.sum(wdy, FEATURES, keep_dims=True) / C
        mean_wdy_x_F = tl.sum(wdy * x_F, FEATURES, keep_dims=True) / C
        d = s_B * wdy - shift - (v - mean_B) * slope + (w_F * r_F) * (wdy - mean_wdy - x_F * mean_wdy_x_F)
        if mask is not None:
            d = tl.where(valid, d, 0.0)
        tl.store(dx + tl.cast(n, tl.int64) * C * P + offs, d.to(dx.dtype.element_ty), mask=inside & (c < C))
