"""Kernels of the published form that read an input twice: once for its statistics, once to normalize it.

An input is seen as ``x[n, p, c]``, or ``x[n, c, p]`` where ``CHANNELS_FIRST``; a row is all features of a sample at a
position, and there are ``R`` rows. A tile has some positions and all features. A program follows its positions from
sample to sample, so that batch statistics grow in registers, and a row's feature statistics are at hand in each tile.
``POOLED``, the statistics of all positions are joined in the end. Dense inputs and pooled ones with features last are
seen as ``[R / P, P, C]``, whatever ``P`` suits a tile.

A column is what batch statistics have one value for: a position and a feature, ``Q * C`` of them; ``POOLED``, Q is 1.
Columns lie features last in any layout. ``weights`` are those of eq 16 and one over the entries that a batch
statistic averages, ``[3, W]``: W is 1 where they are the same at all positions, else Q.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import absorb, conclude, extents, gather, indices, offsets, shrink

_SIZES = ["P", "C", "R", "W", "Q", "S"]


@triton.jit
def locate(P, C, R, BC: tl.constexpr, BP: tl.constexpr, CHANNELS_FIRST: tl.constexpr):
    """The program's number in its range of samples, the samples in the range, and its positions and features."""
    splits = tl.num_programs(0) // tl.cdiv(P, BP)
    block, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    samples = tl.cdiv(R, P)
    run = tl.cdiv(samples, splits)
    c, p = indices(0, BC, BP, CHANNELS_FIRST)
    return split, split * run, tl.minimum((split + 1) * run, samples), block * BP + p, c


@triton.jit
def exists(row, p, P, R, CHANNELS_FIRST: tl.constexpr):
    """Mark the rows of a tile that exist. With channels first ``R`` bounds nothing that ``P`` does not.

    Its divisibility is not known, and with it loads along positions would be single values.
    """
    if CHANNELS_FIRST:
        there = p < P
    else:
        there = (p < P) & (row < R)
    return there


@triton.jit
def is_real(mask, row, p, P, R, CHANNELS_FIRST: tl.constexpr):
    """Mark the rows of a tile that exist and are not hidden."""
    real = exists(row, p, P, R, CHANNELS_FIRST)
    if mask is not None:
        real = real & (tl.load(mask + row, mask=real, other=0) != 0)
    return real


@triton.jit
def load(x, n, at, real, C, P):
    """A tile of sample ``n`` in float32; 0 where nothing is real."""
    return tl.load(x + tl.cast(n, tl.int64) * C * P + at, mask=real, other=0.0).to(tl.float32)


@triton.jit
def of_row(v, c, C, AXIS: tl.constexpr):
    """Eqs 12, 13 of each row of a tile: mean and variance."""
    mean = tl.sum(v, AXIS, keep_dims=True) / C
    u = tl.where(c < C, v - mean, 0.0)
    return mean, tl.sum(u * u, AXIS, keep_dims=True) / C


@triton.jit
def column_of(p, c, P, C, POOLED: tl.constexpr):
    """Where a column stands, and whether it exists."""
    if POOLED:
        at, inside = c.to(tl.int64), c < C
    else:
        at, inside = p.to(tl.int64) * C + c, (p < P) & (c < C)
    return at, inside


@triton.jit
def weights_at(weights, p, P, W, POOLED: tl.constexpr):
    """``w_B`` and ``w_F`` of each position of a tile."""
    q = p * 0
    if not POOLED:
        q = tl.where(W > 1, p, 0)
    return tl.load(weights + q, mask=p < P, other=0.0), tl.load(weights + W + q, mask=p < P, other=0.0)


@triton.jit
def parameter(pointer, c, C, default: tl.constexpr):
    """Gamma or beta."""
    value = tl.full(c.shape, default, tl.float32)
    if pointer is not None:
        value = tl.load(pointer + c, mask=c < C, other=0.0).to(tl.float32)
    return value


# ---- forward


@triton.jit(do_not_specialize=_SIZES)
def measure(
    x, mask, rows, partial, sums, P, C, R,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    POOLED: tl.constexpr,
):  # fmt: skip
    """Feature statistics of each row, and the part of a range of samples in batch statistics.

    Each lane follows its own column by Welford's recurrence, so nothing cancels.

    Args:
        x: The input.
        mask: Nonzero at real rows, ``[R]``; ``None`` where nothing is hidden.
        rows: Mean and variance of each row are written here, ``[2, R]``; 0 where it is hidden.
        partial: Mean and squares of each column are written here, ``[2, S, Q, C]``, of ``S`` parts.
        sums: Rows, and the sums of their means and variances, ``[3, S, Q]``.
        P, C, R: Positions, features, rows.
    """
    FEATURES: tl.constexpr = 0 if CHANNELS_FIRST else 1
    C, P = extents(C, P, CHANNELS_FIRST, VEC)
    part, first, last, p, c = locate(P, C, R, BC, BP, CHANNELS_FIRST)
    at = offsets(c, p, C, P, CHANNELS_FIRST)
    mean = tl.zeros(at.shape, tl.float32)
    squares = tl.zeros(at.shape, tl.float32)
    count = tl.zeros(p.shape, tl.float32)
    sum_mean = tl.zeros(p.shape, tl.float32)
    sum_var = tl.zeros(p.shape, tl.float32)
    for n in tl.range(first, last, num_stages=STAGES):
        row = tl.cast(n, tl.int64) * P + p
        real = is_real(mask, row, p, P, R, CHANNELS_FIRST)
        v = load(x, n, at, real & (c < C), C, P)
        row_mean, row_var = of_row(v, c, C, FEATURES)
        tl.store(rows + row, row_mean, mask=exists(row, p, P, R, CHANNELS_FIRST))
        tl.store(rows + R + row, row_var, mask=exists(row, p, P, R, CHANNELS_FIRST))
        count += tl.where(real, 1.0, 0.0)
        sum_mean += row_mean
        sum_var += row_var
        moved = tl.where(real, v - mean, 0.0)
        mean += moved * (1.0 / tl.maximum(count, 1.0))
        squares += moved * (v - mean)
    parts, Q = tl.num_programs(0) // tl.cdiv(P, BP), P
    if POOLED:
        POSITIONS: tl.constexpr = 1 - FEATURES
        part, parts, Q = tl.program_id(0), tl.num_programs(0), P * 0 + 1
        _, mean, squares = gather(count, mean, squares, POSITIONS)
        mean, squares = tl.expand_dims(mean, POSITIONS), tl.expand_dims(squares, POSITIONS)
        count = tl.sum(count, POSITIONS, keep_dims=True)
        sum_mean = tl.sum(sum_mean, POSITIONS, keep_dims=True)
        sum_var = tl.sum(sum_var, POSITIONS, keep_dims=True)
        p = tl.zeros(count.shape, tl.int32)
    column, inside = column_of(p, c, P, C, POOLED)
    columns = tl.cast(Q, tl.int64) * C
    tl.store(partial + part * columns + column, mean, mask=inside)
    tl.store(partial + (parts + part) * columns + column, squares, mask=inside)
    line = sums + tl.cast(part, tl.int64) * Q + p
    plane = tl.cast(parts, tl.int64) * Q
    tl.store(line, count, mask=p < Q)
    tl.store(line + plane, sum_mean, mask=p < Q)
    tl.store(line + 2 * plane, sum_var, mask=p < Q)


@triton.jit(do_not_specialize=_SIZES)
def join(
    partial, sums, mean, var, features, flags, weights, Q, C, S, w_B, w_F, inverse,
    BS: tl.constexpr, BA: tl.constexpr,
):  # fmt: skip
    """Batch statistics of all parts together, and averages of feature statistics.

    Args:
        partial, sums: What ``measure`` wrote.
        mean, var: Eqs 10, 11 are written here, ``[Q, C]``.
        features: Averages over rows of feature means and variances, ``[2, Q]``.
        flags: For each program, how many of its variances are not finite.
        weights: The three numbers behind parts are written here, where they are the same at all positions.
        Q, C, S: Positions with statistics of their own, features, parts.
    """
    columns, plane = tl.cast(Q, tl.int64) * C, tl.cast(S, tl.int64) * Q
    bad = 0.0
    for block in range(tl.program_id(0), tl.cdiv(columns, BA), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BA + tl.arange(0, BA)[None, :]
        q = at // C
        own = tl.zeros([BS, BA], tl.float32)
        squares = tl.zeros([BS, BA], tl.float32)
        count = tl.zeros([BS, BA], tl.float32)
        sum_mean = tl.zeros([BS, BA], tl.float32)
        sum_var = tl.zeros([BS, BA], tl.float32)
        for start in range(0, S, BS):
            part = start + tl.arange(0, BS)[:, None]
            real = (part < S) & (at < columns)
            line = sums + tl.cast(part, tl.int64) * Q + q
            size = tl.load(line, mask=real, other=0.0)
            sum_mean += tl.load(line + plane, mask=real, other=0.0)
            sum_var += tl.load(line + 2 * plane, mask=real, other=0.0)
            value = partial + part * columns + at
            part_mean = tl.load(value, mask=real, other=0.0)
            part_squares = tl.load(value + S * columns, mask=real, other=0.0)
            count, own, squares = absorb(count, own, squares, size, part_mean, part_squares)
        found_mean, found_var = conclude(count, own, squares, 0)
        size = tl.maximum(tl.sum(count, 0), 1.0)
        mean_F, var_F = tl.sum(sum_mean, 0) / size, tl.sum(sum_var, 0) / size
        at = tl.cast(block, tl.int64) * BA + tl.arange(0, BA)
        tl.store(mean + at, found_mean, mask=at < columns)
        tl.store(var + at, found_var, mask=at < columns)
        first = (at < columns) & (at % C == 0)
        tl.store(features + at // C, mean_F, mask=first)
        tl.store(features + Q + at // C, var_F, mask=first)
        finite = (found_var < float("inf")) & (var_F < float("inf"))  # NaN is not less, either
        bad += tl.sum(tl.where((at < columns) & (finite == 0), 1.0, 0.0), 0)
    tl.store(flags + tl.program_id(0), bad)
    if weights is not None:
        if tl.program_id(0) == 0:
            tl.store(weights, w_B)
            tl.store(weights + 1, w_F)
            tl.store(weights + 2, inverse)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=["gamma", "beta"])
def normalize(
    x, y, mask, gamma, beta, mean, var, feature_mean, feature_var, weights, W, E_F, Std_F, P, C, R, eps,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    POOLED: tl.constexpr,
):  # fmt: skip
    """Eqs 14-17, or 22-25 with the feature statistics of a configuration; hidden rows come out 0.

    A row is summed in an order that does not depend on the rest of the mini-batch.

    Args:
        x, y, mask: Input, output, and what is real.
        gamma, beta: The parameters.
        mean, var: Batch statistics, ``[Q, C]``.
        feature_mean, feature_var: The population's, ``[Q]``; ``None`` in training.
        weights, W: As the module says.
        E_F, Std_F: Prior strengths; 0 is the row's own statistic, infinity the population's.
        P, C, R, eps: Positions, features, rows, and the epsilon under the roots.
    """
    FEATURES: tl.constexpr = 0 if CHANNELS_FIRST else 1
    C, P = extents(C, P, CHANNELS_FIRST, VEC)
    _, first, last, p, c = locate(P, C, R, BC, BP, CHANNELS_FIRST)
    at = offsets(c, p, C, P, CHANNELS_FIRST)
    eps = tl.cast(eps, tl.float32)
    column, inside = column_of(p, c, P, C, POOLED)
    mean_B = tl.load(mean + column, mask=inside, other=0.0)
    w_B, w_F = weights_at(weights, p, P, W, POOLED)
    s_B = w_B / tl.sqrt(tl.load(var + column, mask=inside, other=1.0) + eps)
    gain, shift = parameter(gamma, c, C, 1.0), parameter(beta, c, C, 0.0)
    kept_mean, kept_var = tl.zeros(p.shape, tl.float32), tl.full(p.shape, 1.0, tl.float32)
    if feature_mean is not None:
        q = p * 0
        if not POOLED:
            q = p
        kept_mean = tl.load(feature_mean + q, mask=p < P, other=0.0)
        kept_var = tl.load(feature_var + q, mask=p < P, other=1.0)
    for n in tl.range(first, last, num_stages=STAGES):
        row = tl.cast(n, tl.int64) * P + p
        real = is_real(mask, row, p, P, R, CHANNELS_FIRST)
        v = load(x, n, at, real & (c < C), C, P)
        mean_F, var_F = of_row(v, c, C, FEATURES)
        if feature_mean is not None:
            mean_F, var_F = shrink(E_F, Std_F, kept_mean, kept_var, mean_F, var_F, 1.0)  # eqs 20, 21
        s_F = w_F / tl.sqrt(var_F + eps)
        out = gain * (s_B * (v - mean_B) + s_F * (v - mean_F)) + shift
        if mask is not None:
            out = tl.where(real, out, 0.0)
        there = exists(row, p, P, R, CHANNELS_FIRST) & (c < C)
        tl.store(y + tl.cast(n, tl.int64) * C * P + at, out.to(y.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["M", "Q"], do_not_specialize_on_alignment=["inverse_m", "updates"])
def weigh(inverse_m, updates, own, weights, M, Q, mix_eps, scale, B: tl.constexpr):
    """The weights of eq 24 from the population's ``1/m``, or where nothing was seen yet from the input's ``own``."""
    q = tl.program_id(0) * B + tl.arange(0, B)
    inverse = tl.load(inverse_m + q, mask=q < Q, other=1.0)
    current = tl.load(own + tl.where(M > 1, q, 0), mask=q < Q, other=1.0)
    inverse = tl.where(tl.load(updates + q, mask=q < Q, other=0) > 0, inverse, current)
    tl.store(weights + q, scale * (1 - (inverse + mix_eps)), mask=q < Q)
    tl.store(weights + Q + q, scale * (inverse - mix_eps), mask=q < Q)


# ---- backward


@triton.jit(do_not_specialize=_SIZES)
def measure_backward(
    x, dy, mask, mean, rows, partial, P, C, R, eps,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    POOLED: tl.constexpr,
):  # fmt: skip
    """Sums of ``dy``, ``dy (x - mean_B)`` and ``dy x_F`` of each column, ``[3, S, Q, C]`` in ``partial``."""
    C, P = extents(C, P, CHANNELS_FIRST, VEC)
    part, first, last, p, c = locate(P, C, R, BC, BP, CHANNELS_FIRST)
    at = offsets(c, p, C, P, CHANNELS_FIRST)
    eps = tl.cast(eps, tl.float32)
    column, inside = column_of(p, c, P, C, POOLED)
    mean_B = tl.load(mean + column, mask=inside, other=0.0)
    total = tl.zeros(at.shape, tl.float32)
    dot_B = tl.zeros(at.shape, tl.float32)
    dot_F = tl.zeros(at.shape, tl.float32)
    for n in tl.range(first, last, num_stages=STAGES):
        row = tl.cast(n, tl.int64) * P + p
        real = is_real(mask, row, p, P, R, CHANNELS_FIRST)
        v = load(x, n, at, real & (c < C), C, P)
        g = load(dy, n, at, real & (c < C), C, P)
        mean_F = tl.load(rows + row, mask=real, other=0.0)
        r_F = 1 / tl.sqrt(tl.load(rows + R + row, mask=real, other=1.0) + eps)
        total += g
        dot_B += g * (v - mean_B)
        dot_F += g * ((v - mean_F) * r_F)
    parts, columns = tl.num_programs(0) // tl.cdiv(P, BP), tl.cast(P, tl.int64) * C
    if POOLED:
        POSITIONS: tl.constexpr = 0 if CHANNELS_FIRST is False else 1
        part, parts, columns = tl.program_id(0), tl.num_programs(0), tl.cast(C, tl.int64)
        total = tl.sum(total, POSITIONS, keep_dims=True)
        dot_B = tl.sum(dot_B, POSITIONS, keep_dims=True)
        dot_F = tl.sum(dot_F, POSITIONS, keep_dims=True)
        column, inside = c.to(tl.int64), c < C
    tl.store(partial + part * columns + column, total, mask=inside)
    tl.store(partial + (parts + part) * columns + column, dot_B, mask=inside)
    tl.store(partial + (2 * parts + part) * columns + column, dot_F, mask=inside)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=["gamma"])
def join_backward(
    partial, gamma, var, weights, shares, W, Q, C, S, eps, BS: tl.constexpr, BA: tl.constexpr
):  # fmt: skip
    """What the batch part of ``dx`` takes, and the gradients of gamma and beta at each position.

    ``shares`` are ``[4, Q, C]``: ``flat`` and ``along``, so that the batch part of ``dx`` is
    ``gamma w_B r_B dy - flat - (x - mean_B) along``; then the gradients.
    """
    columns = tl.cast(Q, tl.int64) * C
    eps = tl.cast(eps, tl.float32)
    at = tl.program_id(0).to(tl.int64) * BA + tl.arange(0, BA)[None, :]
    total = tl.zeros([BS, BA], tl.float32)
    dot_B = tl.zeros([BS, BA], tl.float32)
    dot_F = tl.zeros([BS, BA], tl.float32)
    for start in range(0, S, BS):
        part = start + tl.arange(0, BS)[:, None]
        real = (part < S) & (at < columns)
        value = partial + part * columns + at
        total += tl.load(value, mask=real, other=0.0)
        dot_B += tl.load(value + S * columns, mask=real, other=0.0)
        dot_F += tl.load(value + 2 * S * columns, mask=real, other=0.0)
    at = tl.program_id(0).to(tl.int64) * BA + tl.arange(0, BA)
    inside = at < columns
    q = tl.where(W > 1, at // C, 0)
    w_B = tl.load(weights + q, mask=inside, other=0.0)
    w_F = tl.load(weights + W + q, mask=inside, other=0.0)
    inverse = tl.load(weights + 2 * W + q, mask=inside, other=0.0)
    r_B = 1 / tl.sqrt(tl.load(var + at, mask=inside, other=1.0) + eps)
    d_beta, x_B = tl.sum(total, 0), r_B * tl.sum(dot_B, 0)
    share = w_B * r_B * inverse
    if gamma is not None:
        share *= tl.load(gamma + at % C, mask=inside, other=0.0).to(tl.float32)
    # Each factor of r in its turn: r ** 3 would underflow where x is of order 1e15.
    tl.store(shares + at, share * d_beta, mask=inside)
    tl.store(shares + columns + at, share * x_B * r_B, mask=inside)
    tl.store(shares + 2 * columns + at, w_B * x_B + w_F * tl.sum(dot_F, 0), mask=inside)
    tl.store(shares + 3 * columns + at, d_beta, mask=inside)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=["gamma"])
def differentiate(
    x, dy, dx, mask, gamma, mean, var, rows, shares, weights, W, P, C, R, eps,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    POOLED: tl.constexpr,
):  # fmt: skip
    """The gradient of the input; 0 at hidden rows. A row's own averages are found in its tile."""
    FEATURES: tl.constexpr = 0 if CHANNELS_FIRST else 1
    C, P = extents(C, P, CHANNELS_FIRST, VEC)
    _, first, last, p, c = locate(P, C, R, BC, BP, CHANNELS_FIRST)
    at = offsets(c, p, C, P, CHANNELS_FIRST)
    eps = tl.cast(eps, tl.float32)
    column, inside = column_of(p, c, P, C, POOLED)
    columns = tl.cast(C, tl.int64)
    if not POOLED:
        columns = tl.cast(P, tl.int64) * C
    mean_B = tl.load(mean + column, mask=inside, other=0.0)
    w_B, w_F = weights_at(weights, p, P, W, POOLED)
    s_B = w_B / tl.sqrt(tl.load(var + column, mask=inside, other=1.0) + eps)
    flat = tl.load(shares + column, mask=inside, other=0.0)
    along = tl.load(shares + columns + column, mask=inside, other=0.0)
    gain = parameter(gamma, c, C, 1.0)
    for n in tl.range(first, last, num_stages=STAGES):
        row = tl.cast(n, tl.int64) * P + p
        real = is_real(mask, row, p, P, R, CHANNELS_FIRST)
        v = load(x, n, at, real & (c < C), C, P)
        h = gain * load(dy, n, at, real & (c < C), C, P)
        r_F = 1 / tl.sqrt(tl.load(rows + R + row, mask=real, other=1.0) + eps)
        x_F = (v - tl.load(rows + row, mask=real, other=0.0)) * r_F
        flat_F = tl.sum(h, FEATURES, keep_dims=True) / C
        along_F = tl.sum(h * x_F, FEATURES, keep_dims=True) / C
        d = s_B * h - flat - (v - mean_B) * along + (w_F * r_F) * (h - flat_F - x_F * along_F)
        if mask is not None:
            d = tl.where(real, d, 0.0)
        there = exists(row, p, P, R, CHANNELS_FIRST) & (c < C)
        tl.store(dx + tl.cast(n, tl.int64) * C * P + at, d.to(dx.dtype.element_ty), mask=there)
