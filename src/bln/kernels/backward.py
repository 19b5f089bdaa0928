"""Training, backward: the chain rule through Algorithm 1, statistics reused, in two sweeps as in forward.

With ``g = dy * gamma``, and averages over samples for each column and over features for each row,

    dx = w_B / sigma_B * (g - average(g) - x_B * average(g * x_B))
       + w_F / sigma_F * (g - average(g) - x_F * average(g * x_F))

Gradients of gamma and beta are float32 partial rows summed in a fixed order: the same bits each run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sums(
    x, dy, mean_B, r_B, feature_mean, feature_var, p, first, last,
    N, P, C, stride_n, stride_p, stride_c, dy_stride_n, dy_stride_p, dy_stride_c, eps,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Column sums of dy, dy * x_B and dy * x_F over the samples ``first`` to ``last``."""
    ns, cs = tl.arange(0, BN), tl.arange(0, BC)
    c = cs[None, None, :]
    inside = (p < P)[None, :, None] & (c < C)
    base = x + p.to(tl.int64)[None, :, None] * stride_p + c * stride_c
    dy_base = dy + p.to(tl.int64)[None, :, None] * dy_stride_p + c * dy_stride_c
    total = tl.zeros([BN, BP, BC], tl.float32)
    dot_B = tl.zeros([BN, BP, BC], tl.float32)
    dot_F = tl.zeros([BN, BP, BC], tl.float32)
    for start in range(first, last, BN):
        n = start + ns
        real = (n < last)[:, None, None] & inside
        v = tl.load(base + n.to(tl.int64)[:, None, None] * stride_n, mask=real, other=0.0).to(tl.float32)
        d = tl.load(dy_base + n.to(tl.int64)[:, None, None] * dy_stride_n, mask=real, other=0.0).to(tl.float32)
        row, in_row = p[None, :] * N + n[:, None], (p < P)[None, :] & (n < last)[:, None]
        mean_F = tl.load(feature_mean + row, mask=in_row, other=0.0)
        r_F = tl.rsqrt(tl.load(feature_var + row, mask=in_row, other=1.0) + eps)
        total += d  # 0 out of bounds, and so are its products
        dot_B += d * (v - mean_B[None, :, :])
        dot_F += d * ((v - mean_F[:, :, None]) * r_F[:, :, None])
    return tl.sum(total, 0), tl.sum(dot_B, 0) * r_B, tl.sum(dot_F, 0)


@triton.jit
def _differentiate(
    x, dy, dx, g, total, dot_B, mean_B, r_B, feature_mean, feature_var, p, first, last,
    N, P, C, stride_n, stride_p, stride_c, dy_stride_n, dy_stride_p, dy_stride_c, w_B, w_F, eps,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx of the samples ``first`` to ``last``, given the column sums over all."""
    ns, cs = tl.arange(0, BN), tl.arange(0, BC)
    c = cs[None, None, :]
    inside = (p < P)[None, :, None] & (c < C)
    base = p.to(tl.int64)[None, :, None] * stride_p + c * stride_c
    dy_base = dy + p.to(tl.int64)[None, :, None] * dy_stride_p + c * dy_stride_c
    s_B = w_B * r_B
    along_B, flat_B = s_B * r_B * (g * dot_B / N), s_B * (g * total / N)
    for start in range(first, last, BN):
        n = start + ns
        real = (n < last)[:, None, None] & inside
        at = base + n.to(tl.int64)[:, None, None] * stride_n
        v = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
        d = tl.load(dy_base + n.to(tl.int64)[:, None, None] * dy_stride_n, mask=real, other=0.0).to(tl.float32)
        d = d * g[None, :, :]
        row, in_row = p[None, :] * N + n[:, None], (p < P)[None, :] & (n < last)[:, None]
        mean_F = tl.load(feature_mean + row, mask=in_row, other=0.0)
        r_F = tl.rsqrt(tl.load(feature_var + row, mask=in_row, other=1.0) + eps)
        u = v - mean_F[:, :, None]
        s_F = w_F * r_F
        along_F, flat_F = s_F * r_F * r_F * (tl.sum(d * u, 2) / C), s_F * (tl.sum(d, 2) / C)
        out = d * (s_B[None, :, :] + s_F[:, :, None]) - (flat_B[None, :, :] + flat_F[:, :, None])
        out -= along_B[None, :, :] * (v - mean_B[None, :, :]) + along_F[:, :, None] * u
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=real)


@triton.jit
def whole(
    x, dy, dx, gamma, batch_mean, batch_var, feature_mean, feature_var, partial_gamma, partial_beta,
    N, P, C, stride_n, stride_p, stride_c, dy_stride_n, dy_stride_p, dy_stride_c, w_B, w_F, eps,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Both sweeps over all samples of some positions, then of the next, on a grid that stays."""
    ps, cs = tl.arange(0, BP), tl.arange(0, BC)
    g = tl.load(gamma + cs, mask=cs < C, other=0.0).to(tl.float32)[None, :]
    dgamma = tl.zeros([BP, BC], tl.float32)
    dbeta = tl.zeros([BP, BC], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(P, BP), tl.num_programs(0)):
        p = block * BP + ps
        column, in_column = p[:, None] * C + cs[None, :], (p < P)[:, None] & (cs < C)[None, :]
        mean_B = tl.load(batch_mean + column, mask=in_column, other=0.0)
        r_B = tl.rsqrt(tl.load(batch_var + column, mask=in_column, other=1.0) + eps)
        total, dot_B, dot_F = _sums(
            x, dy, mean_B, r_B, feature_mean, feature_var, p, 0, N,
            N, P, C, stride_n, stride_p, stride_c, dy_stride_n, dy_stride_p, dy_stride_c, eps, BN, BP, BC,
        )  # fmt: skip
        dbeta += total
        dgamma += w_B * dot_B + w_F * dot_F
        _differentiate(
            x, dy, dx, g, total, dot_B, mean_B, r_B, feature_mean, feature_var, p, 0, N,
            N, P, C, stride_n, stride_p, stride_c, dy_stride_n, dy_stride_p, dy_stride_c, w_B, w_F, eps,
            BN, BP, BC,
        )  # fmt: skip
    at = tl.program_id(0) * C + cs
    tl.store(partial_gamma + at, tl.sum(dgamma, 0), mask=cs < C)
    tl.store(partial_beta + at, tl.sum(dbeta, 0), mask=cs < C)


@triton.jit
def sums(
    x, dy, batch_mean, batch_var, feature_mean, feature_var, partial_total, partial_dot, partial_gamma,
    N, P, C, stride_n, stride_p, stride_c, dy_stride_n, dy_stride_p, dy_stride_c, run, w_B, w_F, eps,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The first sweep over one run of samples."""
    p, cs, split = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BC), tl.program_id(1)
    column, in_column = p[:, None] * C + cs[None, :], (p < P)[:, None] & (cs < C)[None, :]
    mean_B = tl.load(batch_mean + column, mask=in_column, other=0.0)
    r_B = tl.rsqrt(tl.load(batch_var + column, mask=in_column, other=1.0) + eps)
    total, dot_B, dot_F = _sums(
        x, dy, mean_B, r_B, feature_mean, feature_var, p, split * run, tl.minimum(N, (split + 1) * run),
        N, P, C, stride_n, stride_p, stride_c, dy_stride_n, dy_stride_p, dy_stride_c, eps, BN, BP, BC,
    )  # fmt: skip
    column += split * P * C
    tl.store(partial_total + column, total, mask=in_column)
    tl.store(partial_dot + column, dot_B, mask=in_column)
    tl.store(partial_gamma + column, w_B * dot_B + w_F * dot_F, mask=in_column)


@triton.jit
def differentiate(
    x, dy, dx, gamma, batch_mean, batch_var, feature_mean, feature_var, column_total, column_dot,
    N, P, C, stride_n, stride_p, stride_c, dy_stride_n, dy_stride_p, dy_stride_c, run, w_B, w_F, eps,
    BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The second sweep over one run of samples."""
    p, cs, split = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BC), tl.program_id(1)
    column, in_column = p[:, None] * C + cs[None, :], (p < P)[:, None] & (cs < C)[None, :]
    g = tl.load(gamma + cs, mask=cs < C, other=0.0).to(tl.float32)[None, :]
    mean_B = tl.load(batch_mean + column, mask=in_column, other=0.0)
    r_B = tl.rsqrt(tl.load(batch_var + column, mask=in_column, other=1.0) + eps)
    total = tl.load(column_total + column, mask=in_column, other=0.0)
    dot_B = tl.load(column_dot + column, mask=in_column, other=0.0)
    _differentiate(
        x, dy, dx, g, total, dot_B, mean_B, r_B, feature_mean, feature_var, p,
        split * run, tl.minimum(N, (split + 1) * run),
        N, P, C, stride_n, stride_p, stride_c, dy_stride_n, dy_stride_p, dy_stride_c, w_B, w_F, eps, BN, BP, BC,
    )  # fmt: skip
