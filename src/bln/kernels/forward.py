"""Training, forward: Algorithm 1 on slabs ``x[:, p, :]``.

``resident`` holds whole slabs in registers: one read, one write. Larger ones are swept over twice, first measured, then
normalized, by one program or by several that share a slab (``sweep``); these wait for each other in between, so that
the second reading still finds the slab in the cache. Where a slab is the whole input, the two sweeps are launches of
their own with ``merge`` between them.

All write one buffer of statistics: batch means and variances ``[P, C]``, feature means and variances ``[P, N]``, the
averages over samples of these two ``[P]``, and for each program whether the variances it met are finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import tiles


@triton.jit
def _store_columns(statistics, p, cs, mean_B, var_B, P, C):
    at = p.to(tl.int64)[:, None] * C + cs[None, :]
    inside = (p < P)[:, None] & (cs < C)[None, :]
    tl.store(statistics + at, mean_B, mask=inside)
    tl.store(statistics + P.to(tl.int64) * C + at, var_B, mask=inside)


@triton.jit
def _store_averages(statistics, p, mean, var, N, P, C):
    at = 2 * P.to(tl.int64) * (C + N) + p
    tl.store(statistics + at, mean, mask=p < P)
    tl.store(statistics + P + at, var, mask=p < P)


@triton.jit
def _store_finite(statistics, program, check, N, P, C):
    """``check`` is a sum of zeros, each a variance times 0: that is NaN for NaN and infinity."""
    tl.store(statistics + 2 * P.to(tl.int64) * (C + N + 1) + program, tl.where(check == 0, 1.0, 0.0))


@triton.jit(do_not_specialize=["N", "P", "C"])
def resident(
    x, y, gamma, beta, statistics, inverse_m, N, P, C, stride_n, stride_p, stride_c, mix_eps, scale, eps,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Whole slabs of some positions, then of the next, on a grid that stays."""
    NARROW: tl.constexpr = x.dtype.element_ty.primitive_bitwidth < 32
    n, ps, cs = tl.arange(0, BN), tl.arange(0, BP), tl.arange(0, BC)
    w_B, w_F = tiles.weights(inverse_m, mix_eps, scale)
    g = tiles.parameter(gamma, cs, C, 1.0, BC)
    b = tiles.parameter(beta, cs, C, 0.0, BC)
    within = n.to(tl.int64)[:, None, None] * stride_n + cs[None, None, :] * stride_c
    rows = statistics + 2 * P.to(tl.int64) * C
    check = 0.0
    for block in tl.range(tl.program_id(0), tl.cdiv(P, BP), tl.num_programs(0), num_stages=STAGES):
        p = block * BP + ps
        at = p.to(tl.int64)[None, :, None] * stride_p + within
        real = tiles.real_entries(n, p, cs, N, P, C, x, N, False)
        v = tiles.load(x + at, real, EVEN)
        mean_F, var_F = tiles.row_statistics(v, real, C, EVEN)
        mean_B = tl.sum(v, 0) * (1.0 / N)  # eq 10
        w = v - mean_B[None, :, :]
        if not EVEN:
            w = tl.where(real, w, 0.0)
        var_B = tl.sum(w * w, 0) * (1.0 / N)  # eq 11
        s_B = w_B * g * tl.rsqrt(var_B + eps)
        s_F = w_F * tl.rsqrt(var_F + eps)
        out = tiles.transform(v, w, mean_B, s_B, mean_F, s_F, g, b, NARROW)
        tiles.store(y + at, out, real, EVEN)

        _store_columns(statistics, p, cs, mean_B, var_B, P, C)
        row, in_row = p.to(tl.int64)[None, :] * N + n[:, None], (p < P)[None, :] & (n < N)[:, None]
        tl.store(rows + row, mean_F, mask=in_row)
        tl.store(rows + P.to(tl.int64) * N + row, var_F, mask=in_row)
        average_F, average_var_F = tl.sum(mean_F, 0) * (1.0 / N), tl.sum(var_F, 0) * (1.0 / N)
        _store_averages(statistics, p, average_F, average_var_F, N, P, C)
        check += tl.sum(var_B * 0.0) + tl.sum(average_var_F * 0.0)
    _store_finite(statistics, tl.program_id(0), check, N, P, C)


@triton.jit
def _measure(
    x, hidden, rows, p, first, last, N, P, C, stride_n, stride_p, stride_c,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, FOLD: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Statistics of the samples ``first`` to ``last``: those of rows are stored; returned are, of columns, the number
    of entries, their mean and squares around it, and the sums of the rows' means and variances.

    Columns are summed around the mean of their first few entries. Those are entries too, so the variance is at least
    their share of the squared distance between the two means: the subtraction at the end loses no more than that share.
    """
    ns, cs = tl.arange(0, BN), tl.arange(0, BC)
    base = x + p.to(tl.int64)[None, :, None] * stride_p + cs[None, None, :] * stride_c
    n = first + ns
    real = tiles.real_entries(n, p, cs, last, P, C, hidden, N, MASKED)
    pivot = tl.sum(tiles.load(base + n.to(tl.int64)[:, None, None] * stride_n, real, EVEN), 0)
    pivot = pivot / (BN if EVEN else tl.maximum(tl.sum(real.to(tl.float32), 0), 1.0))
    total = tl.zeros([1 if FOLD else BN, BP, BC], tl.float32)
    square = tl.zeros([1 if FOLD else BN, BP, BC], tl.float32)
    sum_mean = tl.zeros([BN, BP], tl.float32)
    sum_var = tl.zeros([BN, BP], tl.float32)
    count = tl.zeros([BN, BP], tl.float32)
    for start in range(first, last, BN):
        n = start + ns
        real = tiles.real_entries(n, p, cs, last, P, C, hidden, N, MASKED)
        v = tiles.load(base + n.to(tl.int64)[:, None, None] * stride_n, real, EVEN)
        mean_F, var_F = tiles.row_statistics(v, real, C, EVEN)
        row, in_row = p.to(tl.int64)[None, :] * N + n[:, None], (p < P)[None, :] & (n < last)[:, None]
        tl.store(rows + row, mean_F, mask=in_row)
        tl.store(rows + P.to(tl.int64) * N + row, var_F, mask=in_row)
        sum_mean += mean_F  # 0 where there is no row
        sum_var += var_F
        w = v - pivot[None, :, :]
        if not EVEN:
            w = tl.where(real, w, 0.0)
            count += tl.max(real.to(tl.float32), 2)
        if FOLD:
            total += tl.sum(w, 0, keep_dims=True)
            square += tl.sum(w * w, 0, keep_dims=True)
        else:
            total += w
            square += w * w
    counted = tl.sum(count, 0)
    if EVEN:
        counted += last - first
    divisor = tl.maximum(counted, 1.0)[:, None]
    moved = tl.sum(total, 0) / divisor
    squares = tl.sum(square, 0) - moved * moved * divisor
    return counted, pivot + moved, squares, tl.sum(sum_mean, 0), tl.sum(sum_var, 0)


@triton.jit
def _normalize(
    x, y, hidden, gamma, beta, rows, mean_B, var_B, w_B, w_F, p, first, last,
    N, P, C, stride_n, stride_p, stride_c, eps,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Eqs 14-17 of the samples ``first`` to ``last``; hidden entries become 0."""
    NARROW: tl.constexpr = x.dtype.element_ty.primitive_bitwidth < 32
    ns, cs = tl.arange(0, BN), tl.arange(0, BC)
    base = p.to(tl.int64)[None, :, None] * stride_p + cs[None, None, :] * stride_c
    g = tiles.parameter(gamma, cs, C, 1.0, BC)
    b = tiles.parameter(beta, cs, C, 0.0, BC)
    s_B = w_B * g * tl.rsqrt(var_B + eps)
    for start in range(first, last, BN):
        n = start + ns
        real = tiles.real_entries(n, p, cs, last, P, C, hidden, N, MASKED)
        at = base + n.to(tl.int64)[:, None, None] * stride_n
        v = tiles.load(x + at, real, EVEN)
        row, in_row = p.to(tl.int64)[None, :] * N + n[:, None], (p < P)[None, :] & (n < last)[:, None]
        mean_F = tl.load(rows + row, mask=in_row, other=0.0)
        s_F = w_F * tl.rsqrt(tl.load(rows + P.to(tl.int64) * N + row, mask=in_row, other=0.0) + eps)
        out = tiles.transform(v, v - mean_B[None, :, :], mean_B, s_B, mean_F, s_F, g, b, NARROW)
        if MASKED:
            out = tl.where(real, out, 0.0)
            real = tiles.real_entries(n, p, cs, last, P, C, hidden, N, False)
        tiles.store(y + at, out, real, EVEN)


@triton.jit(do_not_specialize=["N", "P", "C", "run", "splits", "parts"])
def sweep(
    x, y, hidden, gamma, beta, statistics, partials, ready, inverse_m, N, P, C, stride_n, stride_p, stride_c,
    run, splits, parts, mix_eps, scale, eps,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, FOLD: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr,
    POOLED: tl.constexpr, MEASURE: tl.constexpr, NORMALIZE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One or both sweeps over a run of samples of some positions.

    Of the first, ``splits`` programs for each block of positions leave partial results; the second reads ``parts``,
    which where statistics are ``POOLED`` over positions are those of all.
    Programs that do both take their turns in the order in which they start, so those a program waits for are running,
    or will be as soon as others, which wait for nothing that has not begun, are done.
    """
    turn = tl.program_id(0)
    if WAIT:
        turn = tl.atomic_add(ready, 1)
    block, split = turn // splits, turn % splits
    first, last = split * run, tl.minimum(N, (split + 1) * run)
    p, cs = block * BP + tl.arange(0, BP), tl.arange(0, BC)
    rows = statistics + 2 * P.to(tl.int64) * C
    if MEASURE:
        count, mean, square, sum_mean, sum_var = _measure(
            x, hidden, rows, p, first, last, N, P, C, stride_n, stride_p, stride_c, BN, BP, BC, FOLD, EVEN, MASKED
        )
        _store_part(partials, split, splits, p, cs, count, mean, square, sum_mean, sum_var, P, C)
    if MEASURE and NORMALIZE:
        tl.debug_barrier()  # rows and parts were stored by other threads
    if WAIT:
        tl.atomic_add(ready + 1 + block, 1, sem="release")
        while tl.atomic_add(ready + 1 + block, 0, sem="acquire") < splits:
            pass
        tl.debug_barrier()
    if NORMALIZE:
        q, Q = p, P  # where the statistics of a position are, and for how many there are some
        if POOLED:
            q, Q = p * 0, P * 0 + 1
        count, mean_B, square, sum_mean, sum_var = _join(partials, parts, q, cs, Q, C, BP, BC)
        divisor = tl.maximum(count, 1.0)
        var_B = square / divisor[:, None]
        if split == 0:
            _store_columns(statistics, q, cs, mean_B, var_B, P, C)
            _store_averages(statistics, q, sum_mean / divisor, sum_var / divisor, N, P, C)
            _store_finite(statistics, block, tl.sum(square * 0.0) + tl.sum(sum_var * 0.0), N, P, C)
        if MASKED:
            inverse_m = tl.load(inverse_m + q, mask=q < Q, other=1.0)[:, None]
        w_B, w_F = tiles.weights(inverse_m, mix_eps, scale)
        if MASKED:
            w_F = tl.trans(w_F)
        _normalize(
            x, y, hidden, gamma, beta, rows, mean_B, var_B, w_B, w_F, p, first, last,
            N, P, C, stride_n, stride_p, stride_c, eps, BN, BP, BC, EVEN, MASKED,
        )  # fmt: skip


@triton.jit
def _store_part(partials, split, splits, p, cs, count, mean, square, sum_mean, sum_var, P, C):
    """Partial results: means, squares ``[splits, P, C]``; counts, sums of rows' means and variances ``[splits, P]``."""
    columns = P.to(tl.int64) * C
    column, in_column = p.to(tl.int64)[:, None] * C + cs[None, :], (p < P)[:, None] & (cs < C)[None, :]
    tl.store(partials + split * columns + column, mean, mask=in_column)
    tl.store(partials + (splits + split) * columns + column, square, mask=in_column)
    at = partials + 2 * splits * columns + split * P + p
    tl.store(at, count, mask=p < P)
    tl.store(at + splits * P, sum_mean, mask=p < P)
    tl.store(at + 2 * splits * P, sum_var, mask=p < P)


@triton.jit
def _join(partials, parts, p, cs, P, C, BP: tl.constexpr, BC: tl.constexpr):
    """All parts together: means weighted by counts, squares moved to the common mean. Read past the first cache."""
    columns = P.to(tl.int64) * C
    column, in_column = p.to(tl.int64)[:, None] * C + cs[None, :], (p < P)[:, None] & (cs < C)[None, :]
    counts = partials + 2 * parts * columns + p
    count = tl.zeros([BP], tl.float32)
    sum_mean = tl.zeros([BP], tl.float32)
    sum_var = tl.zeros([BP], tl.float32)
    mean = tl.zeros([BP, BC], tl.float32)
    for part in range(parts):
        has = tl.load(counts + part * P, mask=p < P, other=0.0, cache_modifier=".cg")
        count += has
        sum_mean += tl.load(counts + (parts + part) * P, mask=p < P, other=0.0, cache_modifier=".cg")
        sum_var += tl.load(counts + (2 * parts + part) * P, mask=p < P, other=0.0, cache_modifier=".cg")
        mean += has[:, None] * tl.load(
            partials + part * columns + column, mask=in_column, other=0.0, cache_modifier=".cg"
        )
    mean = mean / tl.maximum(count, 1.0)[:, None]
    square = tl.zeros([BP, BC], tl.float32)
    for part in range(parts):
        has = tl.load(counts + part * P, mask=p < P, other=0.0, cache_modifier=".cg")
        at = partials + part * columns + column
        moved = tl.load(at, mask=in_column, other=0.0, cache_modifier=".cg") - mean
        inside = tl.load(at + parts * columns, mask=in_column, other=0.0, cache_modifier=".cg")
        square += inside + has[:, None] * moved * moved
    return count, mean, square, sum_mean, sum_var


@triton.jit(do_not_specialize=["P", "C", "parts"])
def merge(partials, joined, P, C, parts, BS: tl.constexpr, BLOCK: tl.constexpr):
    """Many parts joined into one, in the same layout: for ``sweep``, which would read all of them in each program.

    Parts of ``[splits, P, C]`` are parts of ``[splits * P, 1, C]`` too: so they are joined where statistics are pooled.
    """
    columns = P.to(tl.int64) * C
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    p, inside = at // C, at < columns
    counts = partials + 2 * parts * columns + p
    count = tl.zeros([1, BLOCK], tl.float32)
    sum_mean = tl.zeros([1, BLOCK], tl.float32)
    sum_var = tl.zeros([1, BLOCK], tl.float32)
    mean = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, parts, BS):
        part = start + tl.arange(0, BS)[:, None]
        found = (part < parts) & inside
        has = tl.load(counts + part * P, mask=found, other=0.0)
        count += tl.sum(has, 0, keep_dims=True)
        sum_mean += tl.sum(tl.load(counts + (parts + part) * P, mask=found, other=0.0), 0, keep_dims=True)
        sum_var += tl.sum(tl.load(counts + (2 * parts + part) * P, mask=found, other=0.0), 0, keep_dims=True)
        mean += tl.sum(has * tl.load(partials + part * columns + at, mask=found, other=0.0), 0, keep_dims=True)
    mean = mean / tl.maximum(count, 1.0)
    square = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, parts, BS):
        part = start + tl.arange(0, BS)[:, None]
        found = (part < parts) & inside
        has = tl.load(counts + part * P, mask=found, other=0.0)
        moved = tl.load(partials + part * columns + at, mask=found, other=0.0) - mean
        within = tl.load(partials + (parts + part) * columns + at, mask=found, other=0.0)
        square += tl.sum(within + has * moved * moved, 0, keep_dims=True)
    tl.store(joined + at, mean, mask=inside)
    tl.store(joined + columns + at, square, mask=inside)
    first = inside & (at % C == 0)
    tl.store(joined + 2 * columns + p, count, mask=first)
    tl.store(joined + 2 * columns + P + p, sum_mean, mask=first)
    tl.store(joined + 2 * columns + 2 * P + p, sum_var, mask=first)
