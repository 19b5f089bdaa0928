"""Training, forward: Algorithm 1 on slabs ``x[:, p, :]``.

``resident`` holds whole slabs in registers: one read, one write. Larger ones are swept over twice, first measured, then
normalized. Where there are slabs enough for all processors one program does both, and finds some of the slab in the
cache the second time; else several programs share a slab, and the sweeps are launches of their own: see ``sharing``.

Where one program has the statistics of all slabs, it lets them into the population: ``single``, which holds all slabs
there are, or the one that ``sweep`` has more where there is one slab. Else ``population.enter`` does, afterwards.

Where positions lie side by side, a sample is one run of ``C * P`` values. If there are many features, sweeps go through
it as through ``LAPS`` times as many positions with as many times fewer features: that many features that follow each
other are one, and positions begin anew with each. Columns lie where they did. A row has a share in each lap.

All write one buffer of statistics: means of columns and their variances; then pairs of a mean and a variance, those of
rows; and, for ``population.enter``, the averages of these over samples ``[P]``, and for each program whether the
variances it met are finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import population, reductions, sharing, tiles


@triton.jit
def _store_columns(
    statistics, column, in_column, columns, mean_B, var_B, TILE: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr
):  # fmt: skip
    """Of so many columns, those of a tile."""
    inside = in_column & tiles.writers(TILE, ACROSS, SIDE)
    tl.store(statistics + column, mean_B, mask=inside)
    tl.store(statistics + columns + column, var_B, mask=inside)


@triton.jit
def _conclude(
    statistics, partials, parts, kept, updates, samples, C, known, m, entries_factor, m_factor, momentum,
    AVERAGE: tl.constexpr, SPREAD: tl.constexpr, CHAINED: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The statistics of one slab, of partial results with ``ALL`` features: stored, and let into the population, if
    there is one.
    """
    p, c = tl.zeros([1, 1], tl.int32), tl.arange(0, ALL)[None, :]
    if kept[0] is not None:
        counts, totals, old = population.recall(kept, updates, samples, p, c, 1, known, C, m)
    tiles.wait_for_previous(CHAINED)
    count, mean, square, sum_mean, sum_var = sharing.join(partials, parts, c, c < C, C, p, 1)
    divisor = tl.maximum(count, 1.0)
    var = square / divisor
    tl.store(statistics + c, mean, mask=c < C)
    tl.store(statistics + C + c, var, mask=c < C)
    if kept[0] is not None:
        entering = p < tl.where(tl.sum(square * 0.0) + tl.sum(sum_var * 0.0) == 0, 1, 0)
        new = mean, var * entries_factor, sum_mean / divisor, sum_var / divisor * m_factor, 1.0 / m
        population.let_in(
            kept, updates, samples, counts, totals, old, new, p, c, entering, entering & (c < C), known, C, m,
            momentum, AVERAGE, SPREAD,
        )  # fmt: skip


@triton.jit
def _store_averages(statistics, p, mean, var, N, P, C):
    tiles.store_pair(statistics, P.to(tl.int64) * (C + N) + p, mean, var, p < P)


@triton.jit
def _store_finite(statistics, program, check, N, P, C):
    """``check`` is a sum of variances, and of sums of some, each times 0: that is NaN for NaN and infinity."""
    tl.store(statistics + 2 * P.to(tl.int64) * (C + N + 1) + program, tl.where(check == 0, 1.0, 0.0))


@triton.jit
def _hold(
    x, y, statistics, rows, n, p, c, folded, row, g, b, inverse_m, mix_eps, scale, eps, N, P, C,
    TILE: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    FEATURES: tl.constexpr,
):  # fmt: skip
    """Algorithm 1 of what ``x`` points to, whole slabs. Returned are means and variances of columns, and averages over
    samples of those of rows; and two sums of variances, each times 0.
    """
    SHORT: tl.constexpr = x.dtype.element_ty.primitive_bitwidth < 32
    w_B, w_F = tiles.weights(inverse_m, mix_eps, scale)
    in_row = tiles.real_rows(n, p, N, P, None, p, P, EVEN, False)
    real = tiles.real_values(in_row, c, C, FULL, FEATURES)
    v = tiles.fetch(x, real, FULL).to(tl.float32)
    mean_F, var_F = reductions.feature_statistics(v, real, C, TILE, ACROSS, SIDE, FEATURES)
    mean_B, var_B = reductions.batch_statistics(v, real, N, TILE, ACROSS, SIDE, FULL)
    sum_var = reductions.fold(var_F)
    check = var_B * 0.0 + sum_var * 0.0  # the second, so that it stays with the threads of the tile
    sum_mean, sum_var = reductions.both_over_samples(reductions.fold(mean_F), sum_var, TILE, ACROSS, SIDE, False)
    mean, var = sum_mean * (1.0 / N), sum_var * (1.0 / N)
    _store_averages(statistics, p, mean, var, N, P, C)
    s_B = w_B * g * tl.rsqrt(var_B + eps)
    s_F = w_F * tl.rsqrt(var_F + eps)
    tiles.put(y, tiles.transform(v, mean_B, s_B, mean_F, s_F, g, b, SHORT), real, FULL)
    column, in_column = tiles.column(p, folded, P, C, ACROSS, False)
    _store_columns(statistics, column, in_column, P.to(tl.int64) * C, mean_B, var_B, TILE, ACROSS, SIDE)
    tiles.store_pair(rows, row, mean_F, var_F, in_row, EVEN)
    return mean_B, var_B, mean, var, check, sum_var * 0.0


@triton.jit(do_not_specialize=["N", "P", "C"])
def resident(
    x, y, gamma, beta, statistics, inverse_m, N, P, C, mix_eps, scale, eps,
    TILE: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr,
    LONG: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, FEATURES: tl.constexpr, STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Whole slabs, one after the other, on a grid that stays; positions lying side by side, a few at a time."""
    tiles.begin_next(CHAINED)
    n, ps, c, folded = tiles.indices(TILE, ACROSS, SIDE)
    P, C = tiles.sides(P, C, ACROSS, SIDE)
    g = tiles.parameter(gamma, folded, C, 1.0)
    b = tiles.parameter(beta, folded, C, 0.0)
    rows = statistics + 2 * P.to(tl.int64) * C
    check = reductions.fold((n + ps + c).to(tl.float32) * 0.0)
    check_F = tl.zeros(ps.shape, tl.float32)
    at, row = tiles.offset(n, ps, c, P, C, ACROSS, LONG), tiles.row_offset(n, ps, N, P, ACROSS, LONG)
    step, row_step = tiles.block_strides(N, C, BP, ACROSS)
    for block in tl.range(tl.program_id(0), tl.cdiv(P, BP), tl.num_programs(0), num_stages=STAGES):
        _, _, _, _, these, these_F = _hold(
            x + block * step + at, y + block * step + at, statistics, rows + block * row_step, n, block * BP + ps, c,
            folded, row, g, b, inverse_m, mix_eps, scale, eps, N, P, C,
            TILE, ACROSS, SIDE, EVEN, FULL, FEATURES,
        )  # fmt: skip
        check += these
        check_F += these_F
    _store_finite(statistics, tl.program_id(0), tl.sum(check) + tl.sum(check_F), N, P, C)


@triton.jit(do_not_specialize=["N", "P", "C", "known", "m"])
def single(
    x, y, gamma, beta, statistics, inverse_m, N, P, C, mix_eps, scale, eps,
    batch_mean, batch_var, feature_mean, feature_var, kept_inverse_m, updates, samples,
    known, m, entries_factor, m_factor, momentum,
    TILE: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr,
    LONG: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, FEATURES: tl.constexpr, STAGES: tl.constexpr,
    CHAINED: tl.constexpr, AVERAGE: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """All slabs at once, in one program, which therefore lets their statistics into the population, too."""
    n, p, c, folded = tiles.indices(TILE, ACROSS, SIDE)
    P, C = tiles.sides(P, C, ACROSS, SIDE)
    kept = batch_mean, batch_var, feature_mean, feature_var, kept_inverse_m
    counts, totals, old = population.recall(kept, updates, samples, p, folded, P, known, C, m)
    g = tiles.parameter(gamma, folded, C, 1.0)
    b = tiles.parameter(beta, folded, C, 0.0)
    at, row = tiles.offset(n, p, c, P, C, ACROSS, LONG), tiles.row_offset(n, p, N, P, ACROSS, LONG)
    mean_B, var_B, mean_F, var_F, check, check_F = _hold(
        x + at, y + at, statistics, statistics + 2 * P.to(tl.int64) * C, n, p, c, folded, row, g, b, inverse_m,
        mix_eps, scale, eps, N, P, C, TILE, ACROSS, SIDE, EVEN, FULL, FEATURES,
    )  # fmt: skip
    entering = p < tl.where(tl.sum(check) + tl.sum(check_F) == 0, P, 0)
    new = mean_B, var_B * entries_factor, mean_F, var_F * m_factor, 1.0 / m
    in_column = entering & (folded < C) & tiles.writers(TILE, ACROSS, SIDE)
    population.let_in(
        kept, updates, samples, counts, totals, old, new, p, folded, entering, in_column, known, C, m, momentum,
        AVERAGE, SPREAD,
    )  # fmt: skip


@triton.jit
def _measure(
    x, hidden, rows, p, q, Q, first, last, stride, N, P, C,
    TILE: tl.constexpr, BN: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr, LONG: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, FEATURES: tl.constexpr, MASKED: tl.constexpr, POOLED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Statistics of the samples of tiles ``stride`` apart, from ``first`` to ``last``: those of rows, or their shares,
    are stored; returned are, of columns, the number of entries, their mean and squares around it, and the sums of the
    rows' means and variances, or 0 where ``rows`` are not wanted. What is hidden is so at rows of ``Q`` positions.

    Columns are summed around the mean of their first few entries. Those are entries too, so the variance is at least
    their share of the squared distance between the two means: the subtraction at the end loses no more than that share.
    """
    ns, _, c, _ = tiles.indices(TILE, ACROSS, SIDE)
    at, row = tiles.offset(ns, p, c, P, C, ACROSS, LONG), tiles.row_offset(ns, p, N, P, ACROSS, LONG)
    step, row_step = P.to(tl.int64) * C, tiles.row_stride(P, ACROSS)
    in_row = tiles.real_rows(first + ns, p, last, P, hidden, q, Q, EVEN, MASKED)
    real = tiles.real_values(in_row, c, C, FULL, FEATURES)
    v = tiles.fetch(x + first * step + at, real, FULL).to(tl.float32)
    entries = reductions.entries(in_row, p, TILE, BN, ACROSS, SIDE, EVEN, POOLED)
    pivot = reductions.over_samples(reductions.fold(v), TILE, ACROSS, SIDE, POOLED) / tl.maximum(entries, 1.0)
    total = tl.zeros(reductions.fold(v).shape, tl.float32)
    square = total
    sum_mean = tl.zeros((ns + p).shape, tl.float32)
    sum_var = sum_mean
    count = tl.zeros(entries.shape, tl.float32)
    for start in tl.range(first, last, stride, num_stages=STAGES):
        n = start + ns
        in_row = tiles.real_rows(n, p, last, P, hidden, q, Q, EVEN, MASKED)
        real = tiles.real_values(in_row, c, C, FULL, FEATURES)
        v = tiles.fetch(x + start * step + at, real, FULL).to(tl.float32)
        if rows is not None:
            mean_F, var_F = reductions.feature_statistics(v, real, C, TILE, ACROSS, SIDE, FEATURES)
            tiles.store_pair(rows + start * row_step, row, mean_F, var_F, (n < last) & (p < P), EVEN)
            sum_mean += mean_F  # 0 where there is no row
            sum_var += var_F
        entries = reductions.entries(in_row, p, TILE, BN, ACROSS, SIDE, EVEN, POOLED)
        if MASKED:  # as long as a column has no entry, nothing was summed around anything
            here = reductions.over_samples(reductions.fold(v), TILE, ACROSS, SIDE, POOLED) / tl.maximum(entries, 1.0)
            pivot = tl.where(count == 0, here, pivot)
        count += entries
        w = v - pivot
        if not FULL:
            w = tl.where(real, w, 0.0)
        total += reductions.fold(w)
        square += reductions.fold(w * w)
    divisor = tl.maximum(count, 1.0)
    moved = reductions.over_samples(total, TILE, ACROSS, SIDE, POOLED) / divisor
    squares = reductions.over_samples(square, TILE, ACROSS, SIDE, POOLED) - moved * moved * divisor
    squares = tl.where(squares < 0, 0.0, squares)  # by rounding
    sum_mean, sum_var = reductions.both_over_samples(
        reductions.fold(sum_mean), reductions.fold(sum_var), TILE, ACROSS, SIDE, POOLED
    )
    return count, pivot + moved, squares, sum_mean, sum_var


@triton.jit
def _normalize(
    x, y, hidden, rows, mean_B, s_B, w_F, g, b, p, q, Q, first, last, stride, N, P, C, eps,
    TILE: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr, LONG: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, FEATURES: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Eqs 14-17 of the samples that ``_measure`` had, the last ones first; hidden entries become 0. There are rows of
    ``Q`` positions.
    """
    SHORT: tl.constexpr = x.dtype.element_ty.primitive_bitwidth < 32
    ns, _, c, _ = tiles.indices(TILE, ACROSS, SIDE)
    at, row = tiles.offset(ns, p, c, P, C, ACROSS, LONG), tiles.row_offset(ns, q, N, Q, ACROSS, LONG)
    step, row_step = P.to(tl.int64) * C, tiles.row_stride(Q, ACROSS)
    steps = tl.cdiv(last - first, stride)
    for left in tl.range(0, steps, num_stages=STAGES):
        start = first + (steps - 1 - left) * stride
        n = start + ns
        in_row = tiles.real_rows(n, p, last, P, hidden, q, Q, EVEN, MASKED)
        mean_F, var_F = tiles.load_pair(rows + start * row_step, row, in_row, EVEN)
        v = tiles.fetch(x + start * step + at, tiles.real_values(in_row, c, C, FULL, FEATURES), FULL).to(tl.float32)
        out = tiles.transform(v, mean_B, s_B, mean_F, w_F * tl.rsqrt(var_F + eps), g, b, SHORT)
        if MASKED:
            out = tl.where(in_row, out, 0.0)
        there = tiles.real_values(tiles.real_rows(n, p, last, P, None, q, Q, EVEN, False), c, C, FULL, FEATURES)
        tiles.put(y + start * step + at, out, there, FULL)


@triton.jit(do_not_specialize=["N", "P", "C", "run", "splits", "parts", "known", "m"])
def sweep(
    x, y, hidden, gamma, beta, statistics, partials, inverse_m, N, P, C, run, splits, parts, mix_eps, scale, eps,
    batch_mean, batch_var, feature_mean, feature_var, kept_inverse_m, updates, samples,
    known, m, entries_factor, m_factor, momentum,
    TILE: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr,
    LONG: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, FEATURES: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, POOLED: tl.constexpr,
    MEASURE: tl.constexpr, NORMALIZE: tl.constexpr, CHAINED: tl.constexpr, EARLY: tl.constexpr = False,
    SHARED: tl.constexpr = False, LAPS: tl.constexpr = 1, TOUCHED: tl.constexpr = 1, ALL: tl.constexpr = 0,
    AVERAGE: tl.constexpr = False, SPREAD: tl.constexpr = False, STRIDED: tl.constexpr = False,
):  # fmt: skip
    """One or both sweeps over some samples, see ``tiles.samples_of``, of some positions.

    Of the first alone, ``splits`` programs for each block of positions leave partial results, and rows if there are
    ``statistics``; the second alone reads ``parts`` of them. Statistics ``POOLED`` over positions are partial results
    of one position, and so read. Where the second sweep reads what is ``SHARED`` with other ranks, so is ``inverse_m``.
    Where statistics are those of one slab, the second sweep may have one program more, with ``ALL`` features, which
    stores them and lets them into the population.

    In several ``LAPS``, ``statistics`` of the first sweep are the shares of rows alone, and partial results are without
    sums over rows: see ``sharing``. ``TOUCHED`` is the number of laps that a tile may have a part of.
    """
    if NORMALIZE or EARLY:
        tiles.begin_next(CHAINED)
    block, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    first, last, stride = tiles.samples_of(split, splits, run, N, BN, LONG, STRIDED)
    if ALL > 0:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            kept = batch_mean, batch_var, feature_mean, feature_var, kept_inverse_m
            _conclude(
                statistics, partials, parts, kept, updates, samples, C * LAPS, known, m, entries_factor, m_factor,
                momentum, AVERAGE, SPREAD, CHAINED, ALL,
            )  # fmt: skip
            block, first = block * 0, last  # it has no samples
    if not MEASURE:
        tiles.wait_for_previous(CHAINED)
    _, ps, c, folded = tiles.indices(TILE, ACROSS, SIDE)
    P, C = tiles.sides(P, C, ACROSS, SIDE)
    rows, columns = statistics, P.to(tl.int64) * C
    if statistics is not None and (NORMALIZE or LAPS == 1):
        rows += 2 * columns
    positions, features = tiles.positions(P, SIDE, LAPS, TOUCHED), C * LAPS  # those there really are
    first_p = tiles.position(block, P, positions, BP, ACROSS, SIDE, EVEN, LAPS, TOUCHED)
    p = first_p + ps
    row = tiles.row_position(p, first_p, P, positions, LAPS, TOUCHED)
    if MEASURE:
        count, mean_B, square, sum_mean, sum_var = _measure(
            x, hidden, rows, p, row, positions, first, last, stride, N, P, C,
            TILE, BN, ACROSS, SIDE, LONG, EVEN, FULL, FEATURES, MASKED, POOLED and LAPS == 1, STAGES,
        )  # fmt: skip
    q, Q = row, positions  # where the statistics of a position are, and for how many
    if POOLED:
        q, Q, columns = tl.zeros([1, 1, 1, 1], tl.int32), P * 0 + 1, features.to(tl.int64)
    if MEASURE and not NORMALIZE:
        if not EARLY:
            tiles.begin_next(CHAINED)  # no earlier: (128, 3136, 64), pooled and across, would take 3 us more
        if POOLED and LAPS > 1:
            sharing.store_pooled(
                partials, block, split, splits, p, c, P, C, positions, count, mean_B, square, BP, LAPS, TOUCHED
            )
        else:
            if POOLED:
                split, splits = tl.program_id(0), tl.num_programs(0)
            column, in_column = tiles.column(p, c, P, C, ACROSS, POOLED)
            sharing.store(
                partials, split, splits, column, in_column, columns, q, Q, count, mean_B, square, sum_mean, sum_var,
                LAPS == 1 or statistics is None,
            )  # fmt: skip
    if NORMALIZE:
        if MEASURE:
            tl.debug_barrier()  # statistics of rows were stored by other threads
        else:
            if POOLED and LAPS > 1:  # there is one part alone
                mean_B = tiles.of_features(partials, first_p, p, folded, P, C, LAPS, TOUCHED, 0.0)
                square = tiles.of_features(partials + features, first_p, p, folded, P, C, LAPS, TOUCHED, 0.0)
                count = tl.load(partials + 2 * features + q)
            else:
                column, in_column = tiles.column(p, folded, P, C, ACROSS, POOLED)
                count, mean_B, square, sum_mean, sum_var = sharing.join(
                    partials, parts, column, in_column, columns, q, Q
                )
        divisor = tl.maximum(count, 1.0)
        var_B = square / divisor
        if ALL == 0:
            tl.static_assert(not POOLED)
            if split == 0:
                column, in_column = tiles.column(p, folded, P, C, ACROSS, False)
                _store_columns(statistics, column, in_column, columns, mean_B, var_B, TILE, ACROSS, SIDE)
                _store_averages(statistics, q, sum_mean / divisor, sum_var / divisor, N, positions, features)
                _store_finite(statistics, block, tl.sum(square * 0.0) + tl.sum(sum_var * 0.0), N, positions, features)
        if MASKED or SHARED:  # there is one for each position
            inverse_m = tl.load(inverse_m + q, mask=q < Q, other=1.0)
        w_B, w_F = tiles.weights(inverse_m, mix_eps, scale)
        g = tiles.of_features(gamma, first_p, p, folded, P, C, LAPS, TOUCHED, 1.0)
        b = tiles.of_features(beta, first_p, p, folded, P, C, LAPS, TOUCHED, 0.0)
        s_B = w_B * g * tl.rsqrt(var_B + eps)
        _normalize(
            x, y, hidden, rows, mean_B, s_B, w_F, g, b, p, row, positions, first, last, stride, N, P, C, eps,
            TILE, ACROSS, SIDE, LONG, EVEN, FULL, FEATURES, MASKED, STAGES,
        )  # fmt: skip
