"""Training, backward: the chain rule through Algorithm 1, statistics reused, in the arrangements of ``forward``.

With ``g = dy * gamma``, and averages over samples for each column and over features for each row,

    dx = w_B / sigma_B * (g - average(g) - x_B * average(g * x_B))
       + w_F / sigma_F * (g - average(g) - x_F * average(g * x_F))

A second sweep has whole rows, unless they are in laps, and can find their averages itself; but columns' averages come
of a first one.

Gradients of gamma and beta are float32 partial rows summed in a fixed order: the same bits each run.

Loops load statistics before tiles: of loads that disagree on which threads hold what, the compiler follows the last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import reductions, sharing, tiles


@triton.jit
def _columns(
    statistics, columns, first, p, c, P, C, eps, ACROSS: tl.constexpr, POOLED: tl.constexpr, FULL: tl.constexpr,
    LAPS: tl.constexpr, TOUCHED: tl.constexpr,
):  # fmt: skip
    """Of so many columns, batch means and one over deviations of those of a tile."""
    if POOLED and LAPS > 1:
        mean = tiles.of_features(statistics, first, p, c, P, C, LAPS, TOUCHED, 0.0)
        var = tiles.of_features(statistics + columns, first, p, c, P, C, LAPS, TOUCHED, 0.0)
    else:
        column, in_column = tiles.column(p, c, P, C, ACROSS, POOLED)
        mean = tiles.fetch(statistics + column, in_column, FULL)
        var = tiles.fetch(statistics + columns + column, in_column, FULL, 1.0)
    return mean, tl.rsqrt(var + eps)


@triton.jit
def _row_sums(d, along, r_F, gamma, C, TILE: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr):
    """Averages over features of g, and of g times the distance to the row's mean, over its variance.

    ``along`` is dy times that distance.
    """
    flat, along = reductions.both_over_features(d * gamma, along * gamma, TILE, ACROSS, SIDE)
    return flat * (1.0 / C), along * (r_F * r_F * (1.0 / C))


@triton.jit
def _batch_averages(total, dot_B, r_B, w_B, gamma, count):
    """Averages over samples of g, and of g times the distance to the batch mean, over its variance; times w / sigma."""
    share = (gamma * (w_B / count)) * r_B
    return share * total, share * (r_B * r_B) * dot_B


@triton.jit
def _dgamma(dot_B, dot_F, s_B, w_F):
    """Of column sums of dy times the distance to the batch mean, and times x_F."""
    return s_B * dot_B + w_F * dot_F


@triton.jit
def _derivative(d, v, mean_B, s_B, flat_B, along_B, mean_F, s_F, flat_F, along_F, gamma, SHORT: tl.constexpr):
    """dx as two multiplications and additions for each value; ``s`` are w / sigma, and in the batch's averages."""
    slope = gamma * s_F + gamma * s_B
    down_F = s_F * along_F
    if SHORT:
        rest = (along_B * mean_B - flat_B) + (down_F * mean_F - s_F * flat_F)
        dx = d * slope + (rest - v * (along_B + down_F))
    else:
        rest = down_F * (mean_F - mean_B) - (flat_B + s_F * flat_F)
        dx = d * slope + (rest - (v - mean_B) * (along_B + down_F))
    return dx


@triton.jit(do_not_specialize=["N", "P", "C"])
def resident(
    x, dy, dx, gamma, statistics, gradients, inverse_m, N, P, C, mix_eps, scale, eps,
    TILE: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr,
    LONG: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, FEATURES: tl.constexpr, STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Whole slabs, in the manner of ``forward.resident``."""
    tiles.begin_next(CHAINED)
    SHORT: tl.constexpr = x.dtype.element_ty.primitive_bitwidth < 32
    n, ps, c, folded = tiles.indices(TILE, ACROSS, SIDE)
    P, C = tiles.sides(P, C, ACROSS, SIDE)
    w_B, w_F = tiles.weights(inverse_m, mix_eps, scale)
    g = tiles.parameter(gamma, folded, C, 1.0)
    rows = statistics + 2 * P.to(tl.int64) * C
    dgamma = reductions.fold((n + ps + c).to(tl.float32) * 0.0)  # of the samples a thread has, and all positions
    dbeta = dgamma
    at, row = tiles.offset(n, ps, c, P, C, ACROSS, LONG), tiles.row_offset(n, ps, N, P, ACROSS, LONG)
    step, row_step = tiles.block_strides(N, C, BP, ACROSS)
    for block in tl.range(tl.program_id(0), tl.cdiv(P, BP), tl.num_programs(0), num_stages=STAGES):
        p = block * BP + ps
        in_row = tiles.real_rows(n, p, N, P, None, p, P, EVEN, False)
        real = tiles.real_values(in_row, c, C, FULL, FEATURES)
        mean_B, r_B = _columns(statistics, P.to(tl.int64) * C, 0, p, folded, P, C, eps, ACROSS, False, FULL, 1, 1)
        mean_F, var_F = tiles.load_pair(rows + block * row_step, row, in_row, EVEN)
        r_F = tl.rsqrt(var_F + eps)
        v = tiles.fetch(x + block * step + at, real, FULL).to(tl.float32)
        d = tiles.fetch(dy + block * step + at, real, FULL).to(tl.float32)
        along = d * (v - mean_F)  # out of bounds d is 0, and so are its products
        flat_F, along_F = _row_sums(d, along, r_F, g, C, TILE, ACROSS, SIDE)
        s_B = w_B * r_B
        total, dot_B = reductions.fold(d), reductions.fold(d * (v - mean_B))
        dbeta += total
        dgamma += _dgamma(dot_B, reductions.fold(along * r_F), s_B, w_F)
        total, dot_B = reductions.both_over_samples(total, dot_B, TILE, ACROSS, SIDE, False)
        flat_B, along_B = _batch_averages(total, dot_B, r_B, w_B, g, N)
        out = _derivative(d, v, mean_B, s_B, flat_B, along_B, mean_F, w_F * r_F, flat_F, along_F, g, SHORT)
        tiles.put(dx + block * step + at, out, real, FULL)
    dgamma, dbeta = reductions.both_over_samples(dgamma, dbeta, TILE, ACROSS, SIDE, False)
    if ACROSS:
        dgamma, dbeta = tl.sum(dgamma, tiles.LANES, keep_dims=True), tl.sum(dbeta, tiles.LANES, keep_dims=True)
    _store_line(gradients + 2 * tl.program_id(0) * C, dgamma, dbeta, c, C)


@triton.jit
def _sums(
    x, dy, hidden, statistics, sums, mean_B, gamma, p, q, Q, first, last, stride, N, P, C, eps,
    TILE: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr, LONG: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, FEATURES: tl.constexpr, MASKED: tl.constexpr, POOLED: tl.constexpr,
    STAGES: tl.constexpr, LAPS: tl.constexpr,
):  # fmt: skip
    """Over the samples of tiles ``stride`` apart, from ``first`` to ``last``: what rows need, or their shares of it, is
    stored, if it is wanted; returned are the column sums of dy, dy * (x - mean_B) and dy * x_F. There are rows of ``Q``
    positions.
    """
    SHORT: tl.constexpr = x.dtype.element_ty.primitive_bitwidth < 32
    ns, _, c, _ = tiles.indices(TILE, ACROSS, SIDE)
    rows = statistics + 2 * P.to(tl.int64) * C
    at, row = tiles.offset(ns, p, c, P, C, ACROSS, LONG), tiles.row_offset(ns, q, N, Q, ACROSS, LONG)
    step, row_step = P.to(tl.int64) * C, tiles.row_stride(Q, ACROSS)
    share, share_step = tiles.row_offset(ns, p, N, P, ACROSS, LONG), tiles.row_stride(P, ACROSS)
    total = reductions.fold((ns + p + c).to(tl.float32) * 0.0)
    dot_B = total
    dot_F = total
    for start in tl.range(first, last, stride, num_stages=STAGES):
        n = start + ns
        in_row = tiles.real_rows(n, p, last, P, hidden, q, Q, EVEN, MASKED)
        real = tiles.real_values(in_row, c, C, FULL, FEATURES)
        mean_F, var_F = tiles.load_pair(rows + start * row_step, row, in_row, EVEN)
        r_F = tl.rsqrt(var_F + eps)
        v = tiles.fetch(x + start * step + at, real, FULL).to(tl.float32)
        d = tiles.fetch(dy + start * step + at, real, FULL).to(tl.float32)
        along = d * (v - mean_F)
        if sums is not None:
            flat_F, along_F = _row_sums(d, along, r_F, gamma, C * LAPS, TILE, ACROSS, SIDE)
            tiles.store_pair(sums + start * share_step, share, flat_F, along_F, (n < last) & (p < P), EVEN)
        total += reductions.fold(d)
        if SHORT:
            dot_B += reductions.fold(d * v)
        else:
            dot_B += reductions.fold(d * (v - mean_B))
        dot_F += reductions.fold(along * r_F)
    if SHORT:
        dot_B -= mean_B * total
    total, dot_B = reductions.both_over_samples(total, dot_B, TILE, ACROSS, SIDE, POOLED and LAPS == 1)
    return total, dot_B, reductions.over_samples(dot_F, TILE, ACROSS, SIDE, POOLED and LAPS == 1)


@triton.jit
def _differentiate(
    x, dy, dx, hidden, gamma, statistics, sums, mean_B, s_B, flat_B, along_B, w_F, p, q, Q, first, last, stride, N, P,
    C, eps,
    TILE: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr, LONG: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, FEATURES: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of the samples that ``_sums`` had, the last ones first; 0 at hidden entries. There are rows of ``Q``
    positions.
    """
    SHORT: tl.constexpr = x.dtype.element_ty.primitive_bitwidth < 32
    ns, _, c, _ = tiles.indices(TILE, ACROSS, SIDE)
    rows = statistics + 2 * P.to(tl.int64) * C
    at, row = tiles.offset(ns, p, c, P, C, ACROSS, LONG), tiles.row_offset(ns, q, N, Q, ACROSS, LONG)
    step, row_step = P.to(tl.int64) * C, tiles.row_stride(Q, ACROSS)
    steps = tl.cdiv(last - first, stride)
    for left in tl.range(0, steps, num_stages=STAGES):
        start = first + (steps - 1 - left) * stride
        n = start + ns
        in_row = tiles.real_rows(n, p, last, P, hidden, q, Q, EVEN, MASKED)
        real = tiles.real_values(in_row, c, C, FULL, FEATURES)
        mean_F, var_F = tiles.load_pair(rows + start * row_step, row, in_row, EVEN)
        if sums is not None:
            flat_F, along_F = tiles.load_pair(sums + start * row_step, row, in_row, EVEN)
        v = tiles.fetch(x + start * step + at, real, FULL).to(tl.float32)
        d = tiles.fetch(dy + start * step + at, real, FULL).to(tl.float32)
        r_F = tl.rsqrt(var_F + eps)
        if sums is None:
            flat_F, along_F = _row_sums(d, d * (v - mean_F), r_F, gamma, C, TILE, ACROSS, SIDE)
        out = _derivative(d, v, mean_B, s_B, flat_B, along_B, mean_F, w_F * r_F, flat_F, along_F, gamma, SHORT)
        if MASKED:
            out = tl.where(in_row, out, 0.0)
        there = tiles.real_values(tiles.real_rows(n, p, last, P, None, q, Q, EVEN, False), c, C, FULL, FEATURES)
        tiles.put(dx + start * step + at, out, there, FULL)


@triton.jit
def _store_parameters(
    gradients, block, dgamma, dbeta, p, c, P, C, positions, BP: tl.constexpr, ACROSS: tl.constexpr,
    POOLED: tl.constexpr, LAPS: tl.constexpr, TOUCHED: tl.constexpr,
):  # fmt: skip
    """What the columns of a block give together, in ``LAPS`` those of each one; ``POOLED``, the first has what all
    give.
    """
    if LAPS > 1:
        wide = 2 * (C * LAPS).to(tl.int64)
        sharing.store_sums(
            gradients, (dgamma, dbeta), 2, wide, C * LAPS, block, 0, 1, p, c, P, C, positions, BP, LAPS, TOUCHED
        )
    else:
        if not POOLED:
            once = (p < P) & (p >= block * BP)  # not what is in two blocks
            dgamma, dbeta = tl.where(once, dgamma, 0.0), tl.where(once, dbeta, 0.0)
            if ACROSS:
                dgamma, dbeta = tl.sum(dgamma, tiles.LANES, keep_dims=True), tl.sum(dbeta, tiles.LANES, keep_dims=True)
        _store_line(gradients + 2 * block.to(tl.int64) * C, dgamma, dbeta, c, C)


@triton.jit
def _store_pooled(
    partials, block, split, splits, p, c, P, C, positions, total, dot_B, dot_F, r_B, w_B, w_F, gamma,
    BP: tl.constexpr, SHARED: tl.constexpr, LAPS: tl.constexpr, TOUCHED: tl.constexpr,
):  # fmt: skip
    """The sums of all positions of a lap, for each that a program has a part of, ``[3, parts, C]``; ``SHARED``, what is
    made of them, ``[parts, 4, C]``.
    """
    features = (C * LAPS).to(tl.int64)
    if SHARED:
        flat_B, along_B = _batch_averages(total, dot_B, r_B, w_B, gamma, 1.0)
        sums = flat_B, along_B, _dgamma(dot_B, dot_F, w_B * r_B, w_F), total
        sharing.store_sums(
            partials, sums, 4, 4 * features, features, block, split, splits, p, c, P, C, positions, BP, LAPS, TOUCHED
        )
    else:
        step = splits * sharing.places(positions, BP, TOUCHED) * features
        sharing.store_sums(
            partials, (total, dot_B, dot_F), 3, features, step, block, split, splits, p, c, P, C, positions,
            BP, LAPS, TOUCHED,
        )  # fmt: skip


@triton.jit
def _store_features(gradients, statistics, partials, w_B, w_F, C, eps):
    """What all columns give, of sums over all positions."""
    for start in range(0, C, 256):
        c = start + tl.arange(0, 256)[None, None, None, :]
        r_B = tl.rsqrt(tl.load(statistics + C + c, mask=c < C, other=1.0) + eps)
        total = tl.load(partials + c, mask=c < C, other=0.0)
        dot_B = tl.load(partials + C + c, mask=c < C, other=0.0)
        dot_F = tl.load(partials + 2 * C + c, mask=c < C, other=0.0)
        tl.store(gradients + c, _dgamma(dot_B, dot_F, w_B * r_B, w_F), mask=c < C)
        tl.store(gradients + C + c, total, mask=c < C)


@triton.jit
def _store_line(to, dgamma, dbeta, c, C):
    tl.store(to + c + tl.zeros(dgamma.shape, tl.int32), dgamma, mask=c < C)
    tl.store(to + C + c + tl.zeros(dbeta.shape, tl.int32), dbeta, mask=c < C)


@triton.jit
def _feature(p, q, Q, c, P, C, positions, LAPS: tl.constexpr):
    """Of columns, and whether there is one."""
    inside = (q < Q) & (c < C)
    if LAPS > 1:
        c, inside = c * LAPS + p // positions, (p < P) & (c < C)
    return c, inside


@triton.jit
def _shared_offset(p, c, C, ACROSS: tl.constexpr):
    """In ``[P, 2, C]``, features last in any arrangement, so that all ranks send the same."""
    if ACROSS:
        at = p * (2 * C) + c
    else:
        at = p.to(tl.int64) * (2 * C) + c
    return at


@triton.jit(do_not_specialize=["N", "P", "C", "run", "splits", "parts"])
def sweep(
    x, dy, dx, hidden, gamma, statistics, partials, sums, gradients, inverse_m, counts, N, P, C, run, splits, parts,
    mix_eps, scale, eps,
    TILE: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr,
    LONG: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, FEATURES: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, POOLED: tl.constexpr,
    SUM: tl.constexpr, DIFFERENTIATE: tl.constexpr, CHAINED: tl.constexpr, EARLY: tl.constexpr = False,
    SHARED: tl.constexpr = False, LAPS: tl.constexpr = 1, TOUCHED: tl.constexpr = 1, STRIDED: tl.constexpr = False,
):  # fmt: skip
    """One or both sweeps over some samples of some positions; as ``forward.sweep``.

    ``partials`` are three sums of each column, ``[3, splits, P, C]``, or ``[3, splits, C, P]`` where positions lie side
    by side, or ``POOLED`` ``[3, programs, C]``, of which the second sweep alone reads ``parts``; ``sums`` is what the
    second sweep needs of each row, or nothing if it finds that itself; ``gradients`` are those of gamma and beta that
    each block of positions gives, ``[blocks, 2, C]``, or ``POOLED`` all give, ``[2, C]``.

    ``SHARED`` with other ranks, ``partials`` are for each split what the loss says of batch means and variances,
    ``[P, 2, C]``, then ``gradients`` of the first sweep; of the former the second one reads the sum over splits and
    ranks.

    In several ``LAPS``, the first sweep leaves shares of ``sums``; ``gradients`` are those of each lap of each block,
    see ``sharing.store_sums``.
    """
    if DIFFERENTIATE or EARLY:
        tiles.begin_next(CHAINED)
    if not SUM:
        tiles.wait_for_previous(CHAINED)
    block, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    first, last, stride = tiles.samples_of(split, splits, run, N, BN, LONG, STRIDED)
    _, ps, c, folded = tiles.indices(TILE, ACROSS, SIDE)
    P, C = tiles.sides(P, C, ACROSS, SIDE)
    positions, features = tiles.positions(P, SIDE, LAPS, TOUCHED), C * LAPS  # those there really are
    first_p = tiles.position(block, P, positions, BP, ACROSS, SIDE, EVEN, LAPS, TOUCHED)
    p = first_p + ps
    row = tiles.row_position(p, first_p, P, positions, LAPS, TOUCHED)
    q, Q = row, positions  # where the statistics of a position are, and for how many
    if POOLED:
        q, Q = tl.zeros([1, 1, 1, 1], tl.int32), P * 0 + 1
    columns = Q.to(tl.int64) * features
    mean_B, r_B = _columns(
        statistics, columns, first_p, p, folded, P, C, eps, ACROSS, POOLED, FULL, LAPS, TOUCHED
    )  # fmt: skip
    g = tiles.of_features(gamma, first_p, p, folded, P, C, LAPS, TOUCHED, 1.0)
    count = N.to(tl.float32) * (positions // Q)
    if counts is not None:  # they, and 1/m, are known for each position
        count = tl.maximum(tl.load(counts + q, mask=q < Q, other=1.0), 1.0)
        inverse_m = tl.load(inverse_m + q, mask=q < Q, other=1.0)
    w_B, w_F = tiles.weights(inverse_m, mix_eps, scale)
    s_B = w_B * r_B
    if SUM:
        total, dot_B, dot_F = _sums(
            x, dy, hidden, statistics, sums, mean_B, g, p, row, positions, first, last, stride, N, P, C, eps,
            TILE, ACROSS, SIDE, LONG, EVEN, FULL, FEATURES, MASKED, POOLED, STAGES, LAPS,
        )  # fmt: skip
    if SUM and not DIFFERENTIATE:
        if not EARLY:
            tiles.begin_next(CHAINED)
        if POOLED and LAPS > 1:
            _store_pooled(
                partials, block, split, splits, p, c, P, C, positions, total, dot_B, dot_F, r_B, w_B, w_F, g,
                BP, SHARED, LAPS, TOUCHED,
            )  # fmt: skip
        else:
            lines = tl.num_programs(0) // splits
            if POOLED:
                split, splits, block, lines = tl.program_id(0), tl.num_programs(0), block * 0, 1
            elif LAPS > 1:
                lines = sharing.places(positions, BP, TOUCHED)
            if SHARED:
                partials += split * 2 * (columns + lines * features)
                feature, in_column = _feature(p, q, Q, folded, P, C, positions, LAPS)
                to = partials + _shared_offset(q, feature, features, ACROSS)
                flat_B, along_B = _batch_averages(total, dot_B, r_B, w_B, g, 1.0)  # sums, still
                tl.store(to, flat_B, mask=in_column)
                tl.store(to + features, along_B, mask=in_column)
                _store_parameters(
                    partials + 2 * columns, block, _dgamma(dot_B, dot_F, s_B, w_F), total, p, c, P, C, positions,
                    BP, ACROSS, POOLED, LAPS, TOUCHED,
                )  # fmt: skip
            else:
                column, in_column = tiles.column(p, c, P, C, ACROSS, POOLED)
                to = partials + split * columns + column
                tl.store(to, total, mask=in_column)
                tl.store(to + splits * columns, dot_B, mask=in_column)
                tl.store(to + 2 * splits * columns, dot_F, mask=in_column)
    if DIFFERENTIATE:
        if SUM:
            tl.debug_barrier()  # what rows need was stored by other threads, if it was
        elif SHARED:
            if POOLED:
                flat_B = tiles.of_features(partials, first_p, p, folded, P, C, LAPS, TOUCHED, 0.0)
                along_B = tiles.of_features(partials + features, first_p, p, folded, P, C, LAPS, TOUCHED, 0.0)
            else:
                feature, in_column = _feature(p, q, Q, folded, P, C, positions, LAPS)
                of = partials + _shared_offset(q, feature, features, ACROSS)
                flat_B = tl.load(of, mask=in_column, other=0.0)
                along_B = tl.load(of + features, mask=in_column, other=0.0)
            flat_B, along_B = flat_B / count, along_B / count
        else:
            if POOLED and LAPS > 1:  # there is one part alone
                total = tiles.of_features(partials, first_p, p, folded, P, C, LAPS, TOUCHED, 0.0)
                dot_B = tiles.of_features(partials + features, first_p, p, folded, P, C, LAPS, TOUCHED, 0.0)
            else:
                column, in_column = tiles.column(p, folded, P, C, ACROSS, POOLED)
                total = tl.zeros(column.shape, tl.float32)
                dot_B = tl.zeros(column.shape, tl.float32)
                dot_F = tl.zeros(column.shape, tl.float32)
                for part in range(parts):
                    of = partials + part * columns + column
                    total += tl.load(of, mask=in_column, other=0.0)
                    dot_B += tl.load(of + parts * columns, mask=in_column, other=0.0)
                    dot_F += tl.load(of + 2 * parts * columns, mask=in_column, other=0.0)
        if not SHARED:
            first_of_all = split
            if POOLED:
                first_of_all = tl.program_id(0)
            if first_of_all == 0:
                if not POOLED or LAPS == 1:
                    _store_parameters(
                        gradients, block, _dgamma(dot_B, dot_F, s_B, w_F), total, p, c, P, C, positions,
                        BP, ACROSS, POOLED, LAPS, TOUCHED,
                    )  # fmt: skip
                else:
                    _store_features(gradients, statistics, partials, w_B, w_F, features, eps)
            flat_B, along_B = _batch_averages(total, dot_B, r_B, w_B, g, count)
        _differentiate(
            x, dy, dx, hidden, g, statistics, sums, mean_B, s_B, flat_B, along_B, w_F, p, row, positions, first,
            last, stride, N, P, C, eps, TILE, ACROSS, SIDE, LONG, EVEN, FULL, FEATURES, MASKED, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["number", "width"])
def add(
    parts, total, number, width, FLAT: tl.constexpr, CHAINED: tl.constexpr, EARLY: tl.constexpr, BS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum ``[outer, number, width]`` over the number. ``FLAT``, the grid has one dimension, since a second one would
    not be long enough.
    """
    if EARLY:
        tiles.begin_next(CHAINED)
    tiles.wait_for_previous(CHAINED)
    block, outer = tl.program_id(0), tl.program_id(1)
    if FLAT:
        blocks = tl.cdiv(width, BLOCK)
        block, outer = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    at = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    parts += outer.to(tl.int64) * number * width
    found = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, number, BS):
        row = start + tl.arange(0, BS)[:, None]
        of = parts + row.to(tl.int64) * width + at
        values = tl.load(of, mask=(row < number) & (at < width), other=0.0)
        found += tl.sum(values, 0, keep_dims=True)
    if not EARLY:
        tiles.begin_next(CHAINED)
    tl.store(total + outer.to(tl.int64) * width + at, found, mask=at < width)
