"""Training, forward: Algorithm 1 in two sweeps over each slab ``x[:, p, :]``.

The first sweep measures, the second normalizes. One program does both where there are positions enough for the whole
chip, and the second finds its slab in cache; else samples are split into runs, the sweeps are kernels of their own, and
``merge`` stands between them.

A tile is ``samples x positions x features`` values with all features in it, so feature statistics are complete in it.
Column sums stay where the values are and meet once, at the end: no program waits in the loop.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _measure(
    x, feature_mean, feature_var, p, first, last, N, P, C, stride_n, stride_p, stride_c,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Statistics of the samples ``first`` to ``last``: those of rows are stored, of columns (mean, squares) returned.

    Columns are summed around the mean of their first few entries. Those are entries too, so the variance is at least
    their share of the squared distance between the two means: the subtraction at the end loses no more than that share.
    """
    ns, cs = tl.arange(0, BN), tl.arange(0, BC)
    c = cs[None, None, :]
    inside = (p < P)[None, :, None] & (c < C)
    base = x + p.to(tl.int64)[None, :, None] * stride_p + c * stride_c
    few = (first + ns)[:, None, None]
    pivot = tl.load(base + few.to(tl.int64) * stride_n, mask=(few < last) & inside, other=0.0).to(tl.float32)
    pivot = tl.sum(pivot, 0) / tl.minimum(BN, last - first)
    total = tl.zeros([BN, BP, BC], tl.float32)
    square = tl.zeros([BN, BP, BC], tl.float32)
    for start in range(first, last, BN):
        n = start + ns
        real = (n < last)[:, None, None] & inside
        v = tl.load(base + n.to(tl.int64)[:, None, None] * stride_n, mask=real, other=0.0).to(tl.float32)
        mean_F = tl.sum(v, 2) / C  # eq 12
        u = tl.where(c < C, v - mean_F[:, :, None], 0.0)
        row, in_row = p[None, :] * N + n[:, None], (p < P)[None, :] & (n < last)[:, None]
        tl.store(feature_mean + row, mean_F, mask=in_row)
        tl.store(feature_var + row, tl.sum(u * u, 2) / C, mask=in_row)  # eq 13
        w = tl.where((n < last)[:, None, None], v - pivot[None, :, :], 0.0)
        total += w
        square += w * w
    count = last - first
    moved = tl.sum(total, 0) / count
    return pivot + moved, tl.sum(square, 0) - moved * moved * count


@triton.jit
def _normalize(
    x, y, gamma, beta, mean_B, var_B, feature_mean, feature_var, p, first, last,
    N, P, C, stride_n, stride_p, stride_c, w_B, w_F, eps,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Eqs 14-17 of the samples ``first`` to ``last``."""
    ns, cs = tl.arange(0, BN), tl.arange(0, BC)
    c = cs[None, None, :]
    inside = (p < P)[None, :, None] & (c < C)
    base = p.to(tl.int64)[None, :, None] * stride_p + c * stride_c
    g = tl.load(gamma + cs, mask=cs < C, other=0.0).to(tl.float32)[None, :]
    b = tl.load(beta + cs, mask=cs < C, other=0.0).to(tl.float32)[None, None, :]
    s_B = w_B * g * tl.rsqrt(var_B + eps)
    for start in range(first, last, BN):
        n = start + ns
        real = (n < last)[:, None, None] & inside
        at = base + n.to(tl.int64)[:, None, None] * stride_n
        v = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
        row, in_row = p[None, :] * N + n[:, None], (p < P)[None, :] & (n < last)[:, None]
        mean_F = tl.load(feature_mean + row, mask=in_row, other=0.0)
        s_F = w_F * tl.rsqrt(tl.load(feature_var + row, mask=in_row, other=0.0) + eps)
        out = (v - mean_B[None, :, :]) * s_B[None, :, :] + b
        out += (v - mean_F[:, :, None]) * s_F[:, :, None] * g[None, :, :]
        tl.store(y + at, out.to(y.dtype.element_ty), mask=real)


@triton.jit
def whole(
    x, y, gamma, beta, batch_mean, batch_var, feature_mean, feature_var,
    N, P, C, stride_n, stride_p, stride_c, w_B, w_F, eps,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Both sweeps over all samples of some positions."""
    p, cs = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BC)
    mean_B, square = _measure(x, feature_mean, feature_var, p, 0, N, N, P, C, stride_n, stride_p, stride_c, BN, BP, BC)
    var_B = square / N
    column, in_column = p[:, None] * C + cs[None, :], (p < P)[:, None] & (cs < C)[None, :]
    tl.store(batch_mean + column, mean_B, mask=in_column)
    tl.store(batch_var + column, var_B, mask=in_column)
    tl.debug_barrier()  # the rows' statistics were stored by other threads
    _normalize(
        x, y, gamma, beta, mean_B, var_B, feature_mean, feature_var, p, 0, N,
        N, P, C, stride_n, stride_p, stride_c, w_B, w_F, eps, BN, BP, BC,
    )  # fmt: skip


@triton.jit
def measure(
    x, partial_mean, partial_square, feature_mean, feature_var, N, P, C, stride_n, stride_p, stride_c, run,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The first sweep over one run of samples."""
    p, cs, split = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BC), tl.program_id(1)
    mean, square = _measure(
        x, feature_mean, feature_var, p, split * run, tl.minimum(N, (split + 1) * run),
        N, P, C, stride_n, stride_p, stride_c, BN, BP, BC,
    )  # fmt: skip
    column, in_column = (split * P + p[:, None]) * C + cs[None, :], (p < P)[:, None] & (cs < C)[None, :]
    tl.store(partial_mean + column, mean, mask=in_column)
    tl.store(partial_square + column, square, mask=in_column)


@triton.jit
def merge(
    partial_mean, partial_square, batch_mean, batch_var, N, columns, run, splits,
    BS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Batch statistics of all runs together: their means weighted by counts, their squares moved to the common mean."""
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mean = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, splits, BS):
        split = start + tl.arange(0, BS)[:, None]
        count = tl.maximum(tl.minimum(N - split * run, run), 0).to(tl.float32)
        found = (split < splits) & (at < columns)
        mean += tl.sum(count * tl.load(partial_mean + split * columns + at, mask=found, other=0.0), 0, keep_dims=True)
    mean = mean / N
    square = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, splits, BS):
        split = start + tl.arange(0, BS)[:, None]
        count = tl.maximum(tl.minimum(N - split * run, run), 0).to(tl.float32)
        found = (split < splits) & (at < columns)
        moved = tl.load(partial_mean + split * columns + at, mask=found, other=0.0) - mean
        inside = tl.load(partial_square + split * columns + at, mask=found, other=0.0)
        square += tl.sum(tl.where(found, inside + count * moved * moved, 0.0), 0, keep_dims=True)
    tl.store(batch_mean + at, mean, mask=at < columns)
    tl.store(batch_var + at, square / N, mask=at < columns)


@triton.jit
def normalize(
    x, y, gamma, beta, batch_mean, batch_var, feature_mean, feature_var,
    N, P, C, stride_n, stride_p, stride_c, run, w_B, w_F, eps,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The second sweep over one run of samples."""
    p, cs, split = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BC), tl.program_id(1)
    column, in_column = p[:, None] * C + cs[None, :], (p < P)[:, None] & (cs < C)[None, :]
    mean_B = tl.load(batch_mean + column, mask=in_column, other=0.0)
    var_B = tl.load(batch_var + column, mask=in_column, other=1.0)
    _normalize(
        x, y, gamma, beta, mean_B, var_B, feature_mean, feature_var, p, split * run, tl.minimum(N, (split + 1) * run),
        N, P, C, stride_n, stride_p, stride_c, w_B, w_F, eps, BN, BP, BC,
    )  # fmt: skip
