"""Training, backward: the chain rule through Algorithm 1, statistics reused, in the arrangements of ``forward``.

With ``g = dy * gamma``, and averages over samples for each column and over features for each row,

    dx = w_B / sigma_B * (g - average(g) - x_B * average(g * x_B))
       + w_F / sigma_F * (g - average(g) - x_F * average(g * x_F))

Gradients of gamma and beta are float32 partial rows summed in a fixed order: the same bits each run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import tiles


@triton.jit
def _columns(statistics, q, c, P, Q, C, eps, KIND: tl.constexpr):
    """Batch means and one over deviations, of which there are some for ``Q`` positions."""
    at, inside = tiles.column_offset(q, c, Q, C, KIND), (q < Q) & (c < C)
    mean_B = tl.load(statistics + at, mask=inside, other=0.0)
    var_B = tl.load(statistics + P.to(tl.int64) * C + at, mask=inside, other=1.0)
    return mean_B, tl.rsqrt(var_B + eps)


@triton.jit
def _row_sums(d, v, mean_F, r_F, gamma, C, KIND: tl.constexpr, SHORT: tl.constexpr):
    """Averages of g, and of g times the distance to the row's mean, over its variance."""
    g = d * gamma
    flat = tiles.over_features(g, KIND)
    if SHORT:
        along = tiles.over_features(g * v, KIND) - mean_F * flat
    else:
        along = tiles.over_features(g * (v - mean_F), KIND)
    return flat * (1.0 / C), along * (r_F * r_F * (1.0 / C))


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
    x, dy, dx, gamma, statistics, partials, inverse_m, N, P, C, mix_eps, scale, eps,
    A: tl.constexpr, B: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, KIND: tl.constexpr,
    SIDE: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Whole slabs of some positions, then of the next, on a grid that stays."""
    tiles.begin_next(CHAINED)
    SHORT: tl.constexpr = x.dtype.element_ty.primitive_bitwidth < 32
    n, ps, c, folded = tiles.indices(A, B, L, KIND, SIDE)
    C = tiles.features(C, SIDE)
    w_B, w_F = tiles.weights(inverse_m, mix_eps, scale)
    g = tiles.parameter(gamma, folded, C, 1.0)
    rows = statistics + 2 * P.to(tl.int64) * C
    dgamma = tl.zeros((folded + ps).shape, tl.float32)
    dbeta = tl.zeros((c + ps).shape, tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(P, BP), tl.num_programs(0), num_stages=STAGES):
        p = block * BP + ps
        at, in_row = tiles.offset(n, p, c, P, C, KIND), (n < N) & (p < P)
        real = in_row & (c < C)
        v = tiles.fetch(x + at, real, EVEN).to(tl.float32)
        d = tiles.fetch(dy + at, real, EVEN).to(tl.float32)
        mean_B, r_B = _columns(statistics, p, folded, P, P, C, eps, KIND)
        row = tiles.row_offset(n, p, N, P, KIND)
        mean_F = tl.load(rows + row, mask=in_row, other=0.0)
        r_F = tl.rsqrt(tl.load(rows + P.to(tl.int64) * N + row, mask=in_row, other=1.0) + eps)
        flat_F, along_F = _row_sums(d, v, mean_F, r_F, g, C, KIND, SHORT)
        total, dot_B, dot_F = tiles.all_over_samples(  # out of bounds d is 0, and so are its products
            tiles.fold(d, KIND), tiles.fold(d * (v - mean_B), KIND),
            tiles.fold(d * (v * r_F - mean_F * r_F), KIND), KIND, False,
        )  # fmt: skip
        dbeta += total
        dgamma += (w_B * r_B) * dot_B + w_F * dot_F
        s_B = w_B * r_B
        flat_B, along_B = s_B * (g * total * (1.0 / N)), s_B * (g * dot_B * (r_B * r_B * (1.0 / N)))
        out = _derivative(d, v, mean_B, s_B, flat_B, along_B, mean_F, w_F * r_F, flat_F, along_F, g, SHORT)
        tiles.put(dx + at, out, real, EVEN)
    _store_parameters(partials + 2 * tl.program_id(0) * C, dgamma, dbeta, c, folded, C, KIND)


@triton.jit
def _sums(
    x, dy, hidden, statistics, sums, mean_B, gamma, p, first, last, N, P, C, eps,
    A: tl.constexpr, B: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, SIDE: tl.constexpr,
    EVEN: tl.constexpr, MASKED: tl.constexpr, POOLED: tl.constexpr,
):  # fmt: skip
    """Over the samples ``first`` to ``last``: what rows need is stored; returned are the column sums of dy,
    dy * (x - mean_B) and dy * x_F.
    """
    SHORT: tl.constexpr = x.dtype.element_ty.primitive_bitwidth < 32
    ns, _, c, _ = tiles.indices(A, B, L, KIND, SIDE)
    rows = statistics + 2 * P.to(tl.int64) * C
    in_row = tiles.real_rows(first + ns, p, last, P, hidden, MASKED)
    real = tiles.real_values(in_row, c, C, EVEN)
    at, row = tiles.offset(ns, p, c, P, C, KIND), tiles.row_offset(ns, p, N, P, KIND)
    step, row_step = tiles.strides(P, C, KIND)
    x, dy, rows, sums = x + first * step, dy + first * step, rows + first * row_step, sums + first * row_step
    count = P.to(tl.int64) * N
    ahead_v, ahead_d = tiles.fetch(x + at, real, EVEN), tiles.fetch(dy + at, real, EVEN)
    ahead_mean = tl.load(rows + row, mask=in_row, other=0.0)
    ahead_var = tl.load(rows + count + row, mask=in_row, other=1.0)
    total = tiles.fold(ahead_d.to(tl.float32) * 0.0, KIND)
    dot_B = total
    dot_F = total
    for start in range(first, last, BN):
        n = start + ns
        v, d = ahead_v.to(tl.float32), ahead_d.to(tl.float32)
        mean_F, r_F = ahead_mean, tl.rsqrt(ahead_var + eps)
        in_row = tiles.real_rows(n + BN, p, last, P, hidden, MASKED)
        real = tiles.real_values(in_row, c, C, EVEN)
        x, dy, rows = x + BN * step, dy + BN * step, rows + BN * row_step
        ahead_v = tiles.fetch(x + at, real, False)
        ahead_d = tiles.fetch(dy + at, real, False)
        ahead_mean = tiles.fetch(rows + row, in_row, False)
        ahead_var = tiles.fetch(rows + count + row, in_row, False)
        flat_F, along_F = _row_sums(d, v, mean_F, r_F, gamma, C, KIND, SHORT)
        tl.store(sums + row, flat_F, mask=(n < last) & (p < P))
        tl.store(sums + count + row, along_F, mask=(n < last) & (p < P))
        sums += BN * row_step
        total += tiles.fold(d, KIND)
        if SHORT:
            dot_B += tiles.fold(d * v, KIND)
        else:
            dot_B += tiles.fold(d * (v - mean_B), KIND)
        dot_F += tiles.fold(d * (v * r_F - mean_F * r_F), KIND)
    if SHORT:
        dot_B -= mean_B * total
    return tiles.all_over_samples(total, dot_B, dot_F, KIND, POOLED)


@triton.jit
def _differentiate(
    x, dy, dx, hidden, gamma, statistics, sums, mean_B, s_B, flat_B, along_B, w_F, p, first, last, N, P, C, eps,
    A: tl.constexpr, B: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, SIDE: tl.constexpr,
    EVEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dx of the samples ``first`` to ``last``, the last ones first; 0 at hidden entries."""
    SHORT: tl.constexpr = x.dtype.element_ty.primitive_bitwidth < 32
    ns, _, c, _ = tiles.indices(A, B, L, KIND, SIDE)
    means = statistics + 2 * P.to(tl.int64) * C
    count = P.to(tl.int64) * N
    steps = tl.cdiv(last - first, BN)
    begin = first + (steps - 1) * BN
    inside = tiles.real_rows(begin + ns, p, last, P, hidden, MASKED)
    real = tiles.real_values(inside, c, C, EVEN)
    at, row = tiles.offset(ns, p, c, P, C, KIND), tiles.row_offset(ns, p, N, P, KIND)
    step, row_step = tiles.strides(P, C, KIND)
    x, dy, dx = x + begin * step, dy + begin * step, dx + begin * step
    means, sums = means + begin * row_step, sums + begin * row_step
    ahead_v, ahead_d = tiles.fetch(x + at, real, EVEN), tiles.fetch(dy + at, real, EVEN)
    ahead_mean = tl.load(means + row, mask=inside, other=0.0)
    ahead_var = tl.load(means + count + row, mask=inside, other=1.0)
    ahead_flat = tl.load(sums + row, mask=inside, other=0.0)
    ahead_along = tl.load(sums + count + row, mask=inside, other=0.0)
    for done in range(steps):
        n = begin - done * BN + ns
        v, d = ahead_v.to(tl.float32), ahead_d.to(tl.float32)
        mean_F, var_F, flat_F, along_F = ahead_mean, ahead_var, ahead_flat, ahead_along
        in_this = inside
        inside = tiles.real_rows(n - BN, p, last, P, hidden, MASKED) & (n >= first + BN)
        real = tiles.real_values(inside, c, C, EVEN)
        x, dy, means, sums = x - BN * step, dy - BN * step, means - BN * row_step, sums - BN * row_step
        ahead_v = tiles.fetch(x + at, real, False)
        ahead_d = tiles.fetch(dy + at, real, False)
        ahead_mean = tiles.fetch(means + row, inside, False)
        ahead_var = tiles.fetch(means + count + row, inside, False)
        ahead_flat = tiles.fetch(sums + row, inside, False)
        ahead_along = tiles.fetch(sums + count + row, inside, False)
        s_F = w_F * tl.rsqrt(var_F + eps)
        out = _derivative(d, v, mean_B, s_B, flat_B, along_B, mean_F, s_F, flat_F, along_F, gamma, SHORT)
        if MASKED:
            out = tl.where(in_this, out, 0.0)
        tiles.put(dx + at, out, (n < last) & (p < P) & (c < C), EVEN)
        dx -= BN * step


@triton.jit
def _store_parameters(at, dgamma, dbeta, c, folded, C, KIND: tl.constexpr):
    """What the positions of a block give together."""
    if KIND == tiles.ACROSS:
        dgamma, dbeta = tl.sum(dgamma, 2, keep_dims=True), tl.sum(dbeta, 2, keep_dims=True)
    tl.store(at + folded, dgamma, mask=folded < C)
    tl.store(at + C + c, dbeta, mask=c < C)


@triton.jit
def _shared_offset(p, c, C, KIND: tl.constexpr):
    """In ``[P, 2, C]``, features last in any arrangement, so that all ranks send the same."""
    if KIND == tiles.ACROSS:
        at = p * (2 * C) + c
    else:
        at = p.to(tl.int64) * (2 * C) + c
    return at


@triton.jit(do_not_specialize=["N", "P", "C", "run", "splits", "parts"])
def sweep(
    x, dy, dx, hidden, gamma, statistics, partials, sums, rows, inverse_m, counts, N, P, C, run, splits, parts,
    mix_eps, scale, eps,
    A: tl.constexpr, B: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, KIND: tl.constexpr,
    SIDE: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr, POOLED: tl.constexpr,
    SUM: tl.constexpr, DIFFERENTIATE: tl.constexpr, CHAINED: tl.constexpr, SHARED: tl.constexpr = False,
):  # fmt: skip
    """One or both sweeps over a run of samples of some positions; as ``forward.sweep``.

    ``partials`` are column sums ``[3, splits, P, C]``, of which the second sweep alone reads ``parts``; ``sums`` is
    what the second sweep needs of each row; ``rows`` is what each block of positions gives to the gradients of gamma
    and beta, ``[blocks, 2, C]``.

    ``SHARED`` with other ranks, ``partials`` are for each split what the loss says of batch means and variances,
    ``[P, 2, C]``, then ``rows`` of the first sweep; of the former the second sweep reads the sum over splits and ranks.
    """
    tiles.begin_next(CHAINED)
    if not SUM:
        tiles.wait_for_previous(CHAINED)
    block, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    first, last = split * run, tl.minimum(N, (split + 1) * run)
    _, ps, c, folded = tiles.indices(A, B, L, KIND, SIDE)
    C = tiles.features(C, SIDE)
    p = block * BP + ps
    q, Q = p, P  # where the statistics of a position are, and for how many there are some
    if POOLED:
        q, Q = tl.zeros([1, 1, 1], tl.int32), P * 0 + 1
    columns = Q.to(tl.int64) * C
    mean_B, r_B = _columns(statistics, q, folded, P, Q, C, eps, KIND)
    g = tiles.parameter(gamma, folded, C, 1.0)
    count = N.to(tl.float32) * (P // Q)
    if counts is not None:  # they, and 1/m, are known for each position
        count = tl.maximum(tl.load(counts + q, mask=q < Q, other=1.0), 1.0)
        inverse_m = tl.load(inverse_m + q, mask=q < Q, other=1.0)
    w_B, w_F = tiles.weights(inverse_m, mix_eps, scale)
    s_B = w_B * r_B
    if SUM:
        total, dot_B, dot_F = _sums(
            x, dy, hidden, statistics, sums, mean_B, g, p, first, last, N, P, C, eps,
            A, B, L, BN, KIND, SIDE, EVEN, MASKED, POOLED,
        )  # fmt: skip
    if SUM and not DIFFERENTIATE:
        blocks = tl.num_programs(0) // splits
        if POOLED:
            split, splits, block, blocks = tl.program_id(0), tl.num_programs(0), 0, 1
        if SHARED:
            partials += split * 2 * (columns + blocks * C)
            to, in_column = partials + _shared_offset(q, folded, C, KIND), (q < Q) & (folded < C)
            tl.store(to, s_B * (g * total), mask=in_column)
            tl.store(to + C, s_B * (g * dot_B * (r_B * r_B)), mask=in_column)
            dgamma = tl.where(q < Q, s_B * dot_B + w_F * dot_F, 0.0)
            _store_parameters(partials + 2 * (columns + block * C), dgamma, total, c, folded, C, KIND)
        else:
            column, in_column = tiles.column_offset(q, c, Q, C, KIND), (q < Q) & (c < C)
            to = partials + split * columns + column
            tl.store(to, total, mask=in_column)
            tl.store(to + splits * columns, dot_B, mask=in_column)
            tl.store(to + 2 * splits * columns, dot_F, mask=in_column)
    if DIFFERENTIATE:
        if SUM:
            tl.debug_barrier()  # what rows need was stored by other threads
        elif SHARED:
            of, in_column = partials + _shared_offset(q, folded, C, KIND), (q < Q) & (folded < C)
            flat_B = tl.load(of, mask=in_column, other=0.0) / count
            along_B = tl.load(of + C, mask=in_column, other=0.0) / count
        else:
            column, in_column = tiles.column_offset(q, folded, Q, C, KIND), (q < Q) & (folded < C)
            total = tl.zeros(column.shape, tl.float32)
            dot_B = tl.zeros(column.shape, tl.float32)
            dot_F = tl.zeros(column.shape, tl.float32)
            for part in range(parts):
                of = partials + part * columns + column
                total += tl.load(of, mask=in_column, other=0.0)
                dot_B += tl.load(of + parts * columns, mask=in_column, other=0.0)
                dot_F += tl.load(of + 2 * parts * columns, mask=in_column, other=0.0)
        if not SHARED:
            if split == 0:
                dgamma = tl.where(q < Q, s_B * dot_B + w_F * dot_F, 0.0)
                if POOLED:  # each block has the sums of all: they count once
                    dgamma, once = tl.where(block == 0, dgamma, 0.0), tl.where(block == 0, total, 0.0)
                    _store_parameters(rows + 2 * block.to(tl.int64) * C, dgamma, once, folded, folded, C, tiles.NARROW)
                else:
                    _store_parameters(
                        rows + 2 * block.to(tl.int64) * C, dgamma, total, c if SUM else folded, folded, C, KIND
                    )
            flat_B, along_B = s_B * (g * total / count), s_B * (g * dot_B * (r_B * r_B / count))
        _differentiate(
            x, dy, dx, hidden, g, statistics, sums, mean_B, s_B, flat_B, along_B, w_F, p, first, last,
            N, P, C, eps, A, B, L, BN, KIND, SIDE, EVEN, MASKED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["number", "width"])
def add(parts, total, number, width, CHAINED: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum ``[outer, number, width]`` over the number."""
    tiles.begin_next(CHAINED)
    tiles.wait_for_previous(CHAINED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    parts += tl.program_id(1).to(tl.int64) * number * width
    found = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, number, BS):
        row = start + tl.arange(0, BS)[:, None]
        values = tl.load(parts + row.to(tl.int64) * width + at, mask=(row < number) & (at < width), other=0.0)
        found += tl.sum(values, 0, keep_dims=True)
    tl.store(total + tl.program_id(1) * width + at, found, mask=at < width)
