"""Kernels of the published form that read the input once: a tile on chip has all samples of some positions.

A tile is ``[BN, BP, BC]``, or ``[BN, BC, BP]`` with ``CHANNELS_FIRST``: all samples and features of ``BP`` positions.
Programs are persistent: each steps through tiles, so that sums over positions leave few partial results. There is no
mask. Buffers are those of ``two_pass``; an input that is a matrix of rows is taken as ``[R, 1, C]``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import divisible, indices, kernel, load, offsets
from .two_pass import load_parameter, row_statistics


@triton.jit
def tile_of(block, N, P, C, CHANNELS_FIRST: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr):
    """Return samples, positions and features of a tile, and offsets of its values."""
    c, p = indices(0, BC, BP, CHANNELS_FIRST)
    p += block * BP
    n = tl.arange(0, BN)[:, None, None]
    c, p = tl.expand_dims(c, 0), tl.expand_dims(p, 0)
    offs = tl.cast(n, tl.int64) * C * P + offsets(c, p, C, P, CHANNELS_FIRST)
    return n, p, c, offs


@kernel
def forward(
    x, y, gamma, beta, mean, var, row_stats, feature_stats, nonfinite, weights, N, P, C, w_B, w_F, eps, inv_entries,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write ``y`` by eqs 10-17, and what ``two_pass.measure`` and ``two_pass.join`` leave for backward."""
    FEATURES: tl.constexpr = 1 if CHANNELS_FIRST else 2
    C, P = divisible(C, P, CHANNELS_FIRST, VEC)
    bad = 0.0
    for block in range(tl.program_id(0), tl.cdiv(P, BP), tl.num_programs(0)):
        n, p, c, offs = tile_of(block, N, P, C, CHANNELS_FIRST, BN, BC, BP)
        row_inside, inside = (n < N) & (p < P), (n < N) & (p < P) & (c < C)
        v = load(x + offs, inside)
        mean_F, var_F = row_statistics(v, c, C, FEATURES)
        mean_B = tl.sum(v, 0, keep_dims=True) / N
        u = tl.where(n < N, v - mean_B, 0.0)
        var_B = tl.sum(u * u, 0, keep_dims=True) / N
        z = u * (w_B / tl.sqrt(var_B + eps)) + (v - mean_F) * (w_F / tl.sqrt(var_F + eps))
        z = load_parameter(gamma, c, C, 1.0) * z + load_parameter(beta, c, C, 0.0)
        tl.store(y + offs, z.to(y.dtype.element_ty), mask=inside)
        row = tl.cast(n, tl.int64) * P + p
        tl.store(row_stats + row, mean_F, mask=row_inside)
        tl.store(row_stats + tl.cast(N, tl.int64) * P + row, var_F, mask=row_inside)
        column = tl.cast(p, tl.int64) * C + c
        tl.store(mean + column, mean_B, mask=(p < P) & (c < C))
        tl.store(var + column, var_B, mask=(p < P) & (c < C))
        average_mean = tl.sum(tl.where(row_inside, mean_F, 0.0), 0, keep_dims=True) / N
        average_var = tl.sum(tl.where(row_inside, var_F, 0.0), 0, keep_dims=True) / N
        tl.store(feature_stats + p, average_mean, mask=p < P)
        tl.store(feature_stats + P + p, average_var, mask=p < P)
        finite = (var_B < float("inf")) & (average_var < float("inf"))  # NaN fails the comparison, too
        bad += tl.sum(tl.where((p < P) & (c < C) & (finite == 0), 1.0, 0.0))
    tl.store(nonfinite + tl.program_id(0), bad)
    if tl.program_id(0) == 0:
        tl.store(weights, w_B)
        tl.store(weights + 1, w_F)
        tl.store(weights + 2, inv_entries)


@kernel
def backward(
    x, dy, dx, gamma, mean, var, row_stats, gradients, N, P, C, w_B, w_F, eps,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write ``dx``, and each program's part of the gradients of gamma and beta, ``[programs, 2, C]``."""
    FEATURES: tl.constexpr = 1 if CHANNELS_FIRST else 2
    POSITIONS: tl.constexpr = 3 - FEATURES
    C, P = divisible(C, P, CHANNELS_FIRST, VEC)
    _, _, c, offs = tile_of(0, N, P, C, CHANNELS_FIRST, BN, BC, BP)
    gain = load_parameter(gamma, c, C, 1.0)
    d_gamma = tl.sum(tl.zeros(offs.shape, tl.float32), 0, keep_dims=True)
    d_beta = tl.sum(tl.zeros(offs.shape, tl.float32), 0, keep_dims=True)
    for block in range(tl.program_id(0), tl.cdiv(P, BP), tl.num_programs(0)):
        n, p, c, offs = tile_of(block, N, P, C, CHANNELS_FIRST, BN, BC, BP)
        row_inside, inside = (n < N) & (p < P), (n < N) & (p < P) & (c < C)
        v = load(x + offs, inside)
        g = load(dy + offs, inside)
        row = tl.cast(n, tl.int64) * P + p
        r_F = 1 / tl.sqrt(load(row_stats + tl.cast(N, tl.int64) * P + row, row_inside, 1.0) + eps)
        x_F = (v - load(row_stats + row, row_inside)) * r_F
        column, column_inside = tl.cast(p, tl.int64) * C + c, (p < P) & (c < C)
        r_B = 1 / tl.sqrt(load(var + column, column_inside, 1.0) + eps)
        x_B = (v - load(mean + column, column_inside)) * r_B
        total, dot_B = tl.sum(g, 0, keep_dims=True), tl.sum(g * x_B, 0, keep_dims=True)
        d_beta += total
        d_gamma += w_B * dot_B + w_F * tl.sum(g * x_F, 0, keep_dims=True)
        wdy = gain * g
        mean_wdy = tl.sum(wdy, FEATURES, keep_dims=True) / C
        mean_wdy_x_F = tl.sum(wdy * x_F, FEATURES, keep_dims=True) / C
        d = (w_B * r_B) * (wdy - gain * (total / N) - x_B * (gain * (dot_B / N)))
        d += (w_F * r_F) * (wdy - mean_wdy - x_F * mean_wdy_x_F)
        tl.store(dx + offs, d.to(dx.dtype.element_ty), mask=inside)
    pointers = gradients + 2 * tl.program_id(0).to(tl.int64) * C + c
    tl.store(pointers, tl.sum(d_gamma, POSITIONS, keep_dims=True), mask=c < C)
    tl.store(pointers + C, tl.sum(d_beta, POSITIONS, keep_dims=True), mask=c < C)
