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
def _columns(statistics, p, cs, P, C, eps):
    """Batch means and one over deviations."""
    at = p.to(tl.int64)[:, None] * C + cs[None, :]
    inside = (p < P)[:, None] & (cs < C)[None, :]
    mean_B = tl.load(statistics + at, mask=inside, other=0.0)
    var_B = tl.load(statistics + P.to(tl.int64) * C + at, mask=inside, other=1.0)
    return mean_B, tl.rsqrt(var_B + eps)


@triton.jit
def _rows(statistics, n, p, last, N, P, C, eps):
    """Feature means and one over deviations."""
    at = 2 * P.to(tl.int64) * C + p.to(tl.int64)[None, :] * N + n[:, None]
    inside = (p < P)[None, :] & (n < last)[:, None]
    mean_F = tl.load(statistics + at, mask=inside, other=0.0)
    var_F = tl.load(statistics + P.to(tl.int64) * N + at, mask=inside, other=1.0)
    return mean_F, tl.rsqrt(var_F + eps)


@triton.jit
def _plus(a, b, c, d):
    return a + c, b + d


@triton.jit
def _derivative(g, u, w, s_B, flat_B, along_B, r_F, w_F, C):
    """dx, of ``g`` and of the distances to the row's mean ``u`` and to the column's ``w``."""
    flat, along = tl.reduce((g, g * u), 2, _plus)
    flat_F, along_F = flat * (1.0 / C), along * (r_F * r_F * (1.0 / C))
    s_F = w_F * r_F
    out = s_B[None, :, :] * (g - flat_B[None, :, :] - along_B[None, :, :] * w)
    return out + s_F[:, :, None] * (g - flat_F[:, :, None] - along_F[:, :, None] * u)


@triton.jit(do_not_specialize=["N", "P", "C"])
def resident(
    x, dy, dx, gamma, statistics, partials, inverse_m, N, P, C, stride_n, stride_p, stride_c,
    dy_stride_n, dy_stride_p, dy_stride_c, mix_eps, scale, eps,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Whole slabs of some positions, then of the next, on a grid that stays."""
    n, ps, cs = tl.arange(0, BN), tl.arange(0, BP), tl.arange(0, BC)
    w_B, w_F = tiles.weights(inverse_m, mix_eps, scale)
    gamma = tiles.parameter(gamma, cs, C, 1.0, BC)
    within = n.to(tl.int64)[:, None, None] * stride_n + cs[None, None, :] * stride_c
    dy_within = n.to(tl.int64)[:, None, None] * dy_stride_n + cs[None, None, :] * dy_stride_c
    dgamma = tl.zeros([BP, BC], tl.float32)
    dbeta = tl.zeros([BP, BC], tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(P, BP), tl.num_programs(0), num_stages=STAGES):
        p = block * BP + ps
        at = p.to(tl.int64)[None, :, None] * stride_p + within
        real = tiles.real_entries(n, p, cs, N, P, C, x, N, False)
        v = tiles.load(x + at, real, EVEN)
        d = tiles.load(dy + p.to(tl.int64)[None, :, None] * dy_stride_p + dy_within, real, EVEN)
        mean_B, r_B = _columns(statistics, p, cs, P, C, eps)
        mean_F, r_F = _rows(statistics, n, p, N, N, P, C, eps)
        u, w = v - mean_F[:, :, None], v - mean_B[None, :, :]
        total, dot_B = tl.sum(d, 0), tl.sum(d * w, 0)  # 0 out of bounds, and so are its products
        dbeta += total
        dgamma += (w_B * r_B) * dot_B + w_F * tl.sum(d * (u * r_F[:, :, None]), 0)
        flat_B, along_B = gamma * total * (1.0 / N), gamma * dot_B * (r_B * r_B * (1.0 / N))
        out = _derivative(d * gamma[None, :, :], u, w, w_B * r_B, flat_B, along_B, r_F, w_F, C)
        tiles.store(dx + at, out, real, EVEN)
    at = partials + 2 * tl.program_id(0) * C + cs
    tl.store(at, tl.sum(dgamma, 0), mask=cs < C)
    tl.store(at + C, tl.sum(dbeta, 0), mask=cs < C)


@triton.jit
def _sums(
    x, dy, hidden, statistics, mean_B, p, first, last, N, P, C, stride_n, stride_p, stride_c,
    dy_stride_n, dy_stride_p, dy_stride_c, eps,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, FOLD: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Column sums of dy, dy * (x - mean_B) and dy * x_F over the samples ``first`` to ``last``."""
    ns, cs = tl.arange(0, BN), tl.arange(0, BC)
    base = x + p.to(tl.int64)[None, :, None] * stride_p + cs[None, None, :] * stride_c
    dy_base = dy + p.to(tl.int64)[None, :, None] * dy_stride_p + cs[None, None, :] * dy_stride_c
    total = tl.zeros([1 if FOLD else BN, BP, BC], tl.float32)
    dot_B = tl.zeros([1 if FOLD else BN, BP, BC], tl.float32)
    dot_F = tl.zeros([1 if FOLD else BN, BP, BC], tl.float32)
    for start in range(first, last, BN):
        n = start + ns
        real = tiles.real_entries(n, p, cs, last, P, C, hidden, N, MASKED)
        v = tiles.load(base + n.to(tl.int64)[:, None, None] * stride_n, real, EVEN)
        d = tiles.load(dy_base + n.to(tl.int64)[:, None, None] * dy_stride_n, real, EVEN)
        mean_F, r_F = _rows(statistics, n, p, last, N, P, C, eps)
        along_B = d * (v - mean_B[None, :, :])  # 0 out of bounds, as dy is
        along_F = d * ((v - mean_F[:, :, None]) * r_F[:, :, None])
        if FOLD:
            total += tl.sum(d, 0, keep_dims=True)
            dot_B += tl.sum(along_B, 0, keep_dims=True)
            dot_F += tl.sum(along_F, 0, keep_dims=True)
        else:
            total += d
            dot_B += along_B
            dot_F += along_F
    return tl.sum(total, 0), tl.sum(dot_B, 0), tl.sum(dot_F, 0)


@triton.jit
def _differentiate(
    x, dy, dx, hidden, gamma, statistics, total, dot_B, mean_B, r_B, w_B, w_F, count, p, first, last,
    N, P, C, stride_n, stride_p, stride_c, dy_stride_n, dy_stride_p, dy_stride_c, eps,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dx of the samples ``first`` to ``last``, given the column sums over all; 0 at hidden entries."""
    ns, cs = tl.arange(0, BN), tl.arange(0, BC)
    base = p.to(tl.int64)[None, :, None] * stride_p + cs[None, None, :] * stride_c
    dy_base = dy + p.to(tl.int64)[None, :, None] * dy_stride_p + cs[None, None, :] * dy_stride_c
    flat_B, along_B = gamma * total / count, gamma * dot_B * (r_B * r_B / count)
    for start in range(first, last, BN):
        n = start + ns
        real = tiles.real_entries(n, p, cs, last, P, C, hidden, N, MASKED)
        at = base + n.to(tl.int64)[:, None, None] * stride_n
        v = tiles.load(x + at, real, EVEN)
        d = tiles.load(dy_base + n.to(tl.int64)[:, None, None] * dy_stride_n, real, EVEN)
        mean_F, r_F = _rows(statistics, n, p, last, N, P, C, eps)
        u, w = v - mean_F[:, :, None], v - mean_B[None, :, :]
        out = _derivative(d * gamma[None, :, :], u, w, w_B * r_B, flat_B, along_B, r_F, w_F, C)
        if MASKED:
            out = tl.where(real, out, 0.0)
            real = tiles.real_entries(n, p, cs, last, P, C, hidden, N, False)
        tiles.store(dx + at, out, real, EVEN)


@triton.jit
def _store_parameters(at, dgamma, dbeta, cs, block, C, BP: tl.constexpr, POOLED: tl.constexpr):
    """What the positions of a block give together; where sums are pooled, each has those of all: they count once."""
    counts = tl.arange(0, BP)[:, None] >= 0
    if POOLED:
        counts = tl.arange(0, BP)[:, None] + block == 0
    tl.store(at, tl.sum(tl.where(counts, dgamma, 0.0), 0), mask=cs < C)
    tl.store(at + C, tl.sum(tl.where(counts, dbeta, 0.0), 0), mask=cs < C)


@triton.jit(do_not_specialize=["N", "P", "C", "run", "splits", "parts"])
def sweep(
    x, dy, dx, hidden, gamma, statistics, partials, rows, ready, inverse_m, counts, N, P, C,
    stride_n, stride_p, stride_c, dy_stride_n, dy_stride_p, dy_stride_c, run, splits, parts, mix_eps, scale, eps,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, FOLD: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr,
    POOLED: tl.constexpr, SUM: tl.constexpr, DIFFERENTIATE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One or both sweeps over a run of samples of some positions; as ``forward.sweep``.

    ``partials`` are column sums ``[3, splits, P, C]``, of which the second sweep reads ``parts``; ``rows`` is what each
    block of positions gives to the gradients of gamma and beta, ``[blocks, 2, C]``.
    """
    turn = tl.program_id(0)
    if WAIT:
        turn = tl.atomic_add(ready, 1)
    block, split = turn // splits, turn % splits
    first, last = split * run, tl.minimum(N, (split + 1) * run)
    p, cs = block * BP + tl.arange(0, BP), tl.arange(0, BC)
    q, Q = p, P  # where the statistics of a position are, and for how many there are some
    if POOLED:
        q, Q = p * 0, P * 0 + 1
    mean_B, r_B = _columns(statistics, q, cs, P, C, eps)
    if SUM:
        total, dot_B, dot_F = _sums(
            x, dy, hidden, statistics, mean_B, p, first, last, N, P, C, stride_n, stride_p, stride_c,
            dy_stride_n, dy_stride_p, dy_stride_c, eps, BN, BP, BC, FOLD, EVEN, MASKED,
        )  # fmt: skip
        columns = P.to(tl.int64) * C
        column, in_column = p.to(tl.int64)[:, None] * C + cs[None, :], (p < P)[:, None] & (cs < C)[None, :]
        at = partials + split * columns + column
        tl.store(at, total, mask=in_column)
        tl.store(at + splits * columns, dot_B, mask=in_column)
        tl.store(at + 2 * splits * columns, dot_F, mask=in_column)
    if SUM and DIFFERENTIATE:
        tl.debug_barrier()
    if WAIT:
        tl.atomic_add(ready + 1 + block, 1, sem="release")
        while tl.atomic_add(ready + 1 + block, 0, sem="acquire") < splits:
            pass
        tl.debug_barrier()
    if DIFFERENTIATE:
        total = tl.zeros([BP, BC], tl.float32)
        dot_B = tl.zeros([BP, BC], tl.float32)
        dot_F = tl.zeros([BP, BC], tl.float32)
        columns = Q.to(tl.int64) * C
        column, in_column = q.to(tl.int64)[:, None] * C + cs[None, :], (q < Q)[:, None] & (cs < C)[None, :]
        for part in range(parts):
            at = partials + part * columns + column
            total += tl.load(at, mask=in_column, other=0.0, cache_modifier=".cg")
            dot_B += tl.load(at + parts * columns, mask=in_column, other=0.0, cache_modifier=".cg")
            dot_F += tl.load(at + 2 * parts * columns, mask=in_column, other=0.0, cache_modifier=".cg")
        gamma = tiles.parameter(gamma, cs, C, 1.0, BC)
        count = tl.zeros([BP, 1], tl.float32) + N.to(tl.float32) * (P // Q)
        if MASKED:
            count = tl.maximum(tl.load(counts + q, mask=q < Q, other=1.0), 1.0)[:, None]
            inverse_m = tl.load(inverse_m + q, mask=q < Q, other=1.0)[:, None]
        w_B, w_F = tiles.weights(inverse_m, mix_eps, scale)
        if split == 0:
            dgamma = (w_B * r_B) * dot_B + w_F * dot_F
            _store_parameters(rows + 2 * block * C + cs, dgamma, total, cs, block, C, BP, POOLED)
        if MASKED:
            w_F = tl.trans(w_F)
        _differentiate(
            x, dy, dx, hidden, gamma, statistics, total, dot_B, mean_B, r_B, w_B, w_F, count, p, first, last,
            N, P, C, stride_n, stride_p, stride_c, dy_stride_n, dy_stride_p, dy_stride_c, eps, BN, BP, BC, EVEN, MASKED,
        )  # fmt: skip
