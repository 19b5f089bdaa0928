"""What all kernels share: tiles of ``x[n, p, c]`` with all features in them, and the statistics of their rows.

A tile is ``BN samples x BP positions x BC features``. ``EVEN`` says that tiles cover the input exactly, so that nothing
has to be masked: a third of the instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def real_entries(n, p, c, last, P, C, hidden, N, MASKED: tl.constexpr):
    """Which values of the tile exist, and are not hidden: ``hidden[n, p]`` is 0 at real entries."""
    real = (n < last)[:, None, None] & ((p < P)[None, :, None] & (c < C)[None, None, :])
    if MASKED:
        row = n.to(tl.int64)[:, None] * P + p[None, :]
        shown = tl.load(hidden + row, mask=(n < last)[:, None] & (p < P)[None, :], other=1) == 0
        real = real & shown[:, :, None]
    return real


@triton.jit
def load(pointers, real, EVEN: tl.constexpr):
    """The tile, as float32; 0 where there is nothing."""
    if EVEN:
        return tl.load(pointers).to(tl.float32)
    return tl.load(pointers, mask=real, other=0.0).to(tl.float32)


@triton.jit
def store(pointers, values, real, EVEN: tl.constexpr):
    """The tile, in the type of the tensor."""
    if EVEN:
        tl.store(pointers, values.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=real)


@triton.jit
def row_statistics(v, real, C, EVEN: tl.constexpr):
    """Mean and variance over features, of values already in registers: the mean first, then the squares around it."""
    mean = tl.sum(v, 2) * (1.0 / C)  # eq 12
    u = v - mean[:, :, None]
    if not EVEN:
        u = tl.where(real, u, 0.0)
    return mean, tl.sum(u * u, 2) * (1.0 / C)  # eq 13


@triton.jit
def parameter(pointer, cs, C, default: tl.constexpr, BC: tl.constexpr):
    """Gamma or beta, as a row."""
    if pointer is None:
        return tl.full([1, BC], default, tl.float32)
    return tl.load(pointer + cs, mask=cs < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def weights(inverse_m, mix_eps, scale):
    """Eq 16."""
    return scale * (1.0 - (inverse_m + mix_eps)), scale * (inverse_m - mix_eps)


@triton.jit
def transform(v, w, mean_B, s_B, mean_F, s_F, g, b, NARROW: tl.constexpr):
    """Eqs 14-17 as one multiplication and one addition for each value.

    Args:
        v: The values.
        w: Their distances to the batch means.
        mean_B, s_B: Batch means and gamma * w_B / sigma_B, of columns.
        mean_F, s_F: Feature means and w_F / sigma_F, of rows.
        g, b: Gamma and beta.
        NARROW: The values have 11 bits or fewer, so it does no harm that means cancel to 24.
    """
    slope = s_F[:, :, None] * g[None, :, :] + s_B[None, :, :]
    if NARROW:
        return v * slope + ((b - mean_B * s_B)[None, :, :] - (mean_F * s_F)[:, :, None] * g[None, :, :])
    return w * slope + (((mean_B[None, :, :] - mean_F[:, :, None]) * s_F[:, :, None]) * g[None, :, :] + b[None, :, :])
