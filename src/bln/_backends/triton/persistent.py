"""Kernels of the published form that read an input once: the samples of some positions are held on chip.

A tile has all samples and features of its positions, ``[BN, BP, BC]`` or where ``CHANNELS_FIRST`` ``[BN, BC, BP]``.
Programs go from tile to tile, so that what they add up for all positions stays in few partial results. Statistics lie
as ``two_pass`` leaves them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import extents, indices, kernel, load, offsets
from .two_pass import features_of, parameter


@triton.jit
def tile_of(block, N, P, C, CHANNELS_FIRST: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr):
    """Samples, positions and features of a tile, and offsets of its values."""
    c, p = indices(0, BC, BP, CHANNELS_FIRST)
    p += block * BP
    n = tl.arange(0, BN)[:, None, None]
    c, p = tl.expand_dims(c, 0), tl.expand_dims(p, 0)
    at = tl.cast(n, tl.int64) * C * P + offsets(c, p, C, P, CHANNELS_FIRST)
    return n, p, c, at


@kernel
def forward(
    x, y, gamma, beta, mean, var, rows, features, flags, weights, N, P, C, w_B, w_F, eps, inverse,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Eqs 10-17. What is written besides ``y`` is described in ``two_pass``; ``inverse`` is one over entries."""
    FEATURES: tl.constexpr = 1 if CHANNELS_FIRST else 2
    C, P = extents(C, P, CHANNELS_FIRST, VEC)
    bad = 0.0
    for block in range(tl.program_id(0), tl.cdiv(P, BP), tl.num_programs(0)):
        n, p, c, at = tile_of(block, N, P, C, CHANNELS_FIRST, BN, BC, BP)
        in_row, inside = (n < N) & (p < P), (n < N) & (p < P) & (c < C)
        v = load(x + at, inside)
        mean_F, var_F = features_of(v, c, C, FEATURES)
        mean_B = tl.sum(v, 0, keep_dims=True) / N
        u = tl.where(n < N, v - mean_B, 0.0)
        var_B = tl.sum(u * u, 0, keep_dims=True) / N
        z = u * (w_B / tl.sqrt(var_B + eps)) + (v - mean_F) * (w_F / tl.sqrt(var_F + eps))
        z = parameter(gamma, c, C, 1.0) * z + parameter(beta, c, C, 0.0)
        tl.store(y + at, z.to(y.dtype.element_ty), mask=inside)
        row = tl.cast(n, tl.int64) * P + p
        tl.store(rows + row, mean_F, mask=in_row)
        tl.store(rows + tl.cast(N, tl.int64) * P + row, var_F, mask=in_row)
        column = tl.cast(p, tl.int64) * C + c
        tl.store(mean + column, mean_B, mask=(p < P) & (c < C))
        tl.store(var + column, var_B, mask=(p < P) & (c < C))
        over_mean = tl.sum(tl.where(in_row, mean_F, 0.0), 0, keep_dims=True) / N
        over_var = tl.sum(tl.where(in_row, var_F, 0.0), 0, keep_dims=True) / N
        tl.store(features + p, over_mean, mask=p < P)
        tl.store(features + P + p, over_var, mask=p < P)
        finite = (var_B < float("inf")) & (over_var < float("inf"))  # NaN is not less, either
        bad += tl.sum(tl.where((p < P) & (c < C) & (finite == 0), 1.0, 0.0))
    tl.store(flags + tl.program_id(0), bad)
    if tl.program_id(0) == 0:
        tl.store(weights, w_B)
        tl.store(weights + 1, w_F)
        tl.store(weights + 2, inverse)


@kernel
def backward(
    x, dy, dx, gamma, mean, var, rows, gradients, N, P, C, w_B, w_F, eps,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradient of the input, and each program's part in those of gamma and beta, ``[programs, 2, C]``."""
    FEATURES: tl.constexpr = 1 if CHANNELS_FIRST else 2
    POSITIONS: tl.constexpr = 3 - FEATURES
    C, P = extents(C, P, CHANNELS_FIRST, VEC)
    _, _, c, at = tile_of(0, N, P, C, CHANNELS_FIRST, BN, BC, BP)
    gain = parameter(gamma, c, C, 1.0)
    d_gamma = tl.sum(tl.zeros(at.shape, tl.float32), 0, keep_dims=True)
    d_beta = tl.sum(tl.zeros(at.shape, tl.float32), 0, keep_dims=True)
    for block in range(tl.program_id(0), tl.cdiv(P, BP), tl.num_programs(0)):
        n, p, c, at = tile_of(block, N, P, C, CHANNELS_FIRST, BN, BC, BP)
        in_row, inside = (n < N) & (p < P), (n < N) & (p < P) & (c < C)
        v = load(x + at, inside)
        g = load(dy + at, inside)
        row = tl.cast(n, tl.int64) * P + p
        r_F = 1 / tl.sqrt(load(rows + tl.cast(N, tl.int64) * P + row, in_row, 1.0) + eps)
        x_F = (v - load(rows + row, in_row)) * r_F
        column, in_column = tl.cast(p, tl.int64) * C + c, (p < P) & (c < C)
        r_B = 1 / tl.sqrt(load(var + column, in_column, 1.0) + eps)
        x_B = (v - load(mean + column, in_column)) * r_B
        total, dot_B = tl.sum(g, 0, keep_dims=True), tl.sum(g * x_B, 0, keep_dims=True)
        d_beta += total
        d_gamma += w_B * dot_B + w_F * tl.sum(g * x_F, 0, keep_dims=True)
        h = gain * g
        flat_F = tl.sum(h, FEATURES, keep_dims=True) / C
        along_F = tl.sum(h * x_F, FEATURES, keep_dims=True) / C
        d = (w_B * r_B) * (h - gain * (total / N) - x_B * (gain * (dot_B / N)))
        d += (w_F * r_F) * (h - flat_F - x_F * along_F)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
    to = gradients + 2 * tl.program_id(0).to(tl.int64) * C + c
    tl.store(to, tl.sum(d_gamma, POSITIONS, keep_dims=True), mask=c < C)
    tl.store(to + C, tl.sum(d_beta, POSITIONS, keep_dims=True), mask=c < C)
