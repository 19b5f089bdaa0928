"""What all kernels share: tiles of ``x[n, p, c]`` in three arrangements, and sums over them.

The threads of a warp lie along the last dimension ``L`` of a tile, the warps along a dimension ``B``; along the other,
``A``, each thread holds everything itself.

              A         B         L
    NARROW    samples   samples   features    a row of features within a warp
    WIDE      features  samples   features    a row within one warp or a few
    ACROSS    samples   features  positions   positions lie side by side in memory, and each thread has its own

Which of the first two dimensions the compiler gives to warps has changed between its versions: see ``WARPS``.

Indices and sums keep three dimensions, those they do not depend on being 1, so that everything else is written once.
Columns are what depends on features and positions, rows what depends on samples and positions. ``EVEN`` says that tiles
cover the input exactly, so that nothing has to be masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

NARROW = tl.constexpr(0)
WIDE = tl.constexpr(1)
ACROSS = tl.constexpr(2)
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
WARPS = tl.constexpr(int(VERSION >= (3, 7)))  # where B stands
HELD = tl.constexpr(1 - WARPS.value)  # where A stands
TOGETHER = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter would combine values pair by pair


@triton.jit
def indices(A: tl.constexpr, B: tl.constexpr, L: tl.constexpr, KIND: tl.constexpr, SIDE: tl.constexpr):
    """Samples, positions and features of a tile; and features with the warps they are in, to load columns with."""
    if HELD == 0:
        a, b = tl.arange(0, A)[:, None, None], tl.arange(0, B)[None, :, None]
    else:
        a, b = tl.arange(0, A)[None, :, None], tl.arange(0, B)[:, None, None]
    last = tl.arange(0, L)[None, None, :]
    one = tl.zeros([1, 1, 1], tl.int32)
    if KIND == NARROW:
        n, p, c, folded = a * B + b, one, last, last + (b * 0 if SIDE < 8 else 0)
    elif KIND == WIDE:
        n, p, c, folded = b, one, a * L + last, a * L + last + b * 0
    else:
        n, p, c, folded = a, last, b, b
    return n, p, c, folded


@triton.jit
def features(C, SIDE: tl.constexpr):
    """Their number, known to be a multiple of ``SIDE`` and no more: so many values a thread reads side by side.

    With 4, of the input as of columns in float32, a thread has all columns it needs. With 8, of a 16-bit input,
    columns go from thread to thread, which takes few of them.
    """
    return (C // SIDE) * SIDE


@triton.jit
def column_offset(p, c, P, C, KIND: tl.constexpr):
    """Where something is that there is for each column."""
    if KIND == ACROSS:
        at = c * P + p
    else:
        at = p.to(tl.int64) * C + c
    return at


@triton.jit
def offset(n, p, c, P, C, KIND: tl.constexpr):
    """Where values are. Nothing is known about P, so that each thread reads one position, not some side by side."""
    if KIND == ACROSS:
        at = (n * C + c) * P + p
    else:
        at = (n.to(tl.int64) * P + p) * C + c
    return at


@triton.jit
def row_offset(n, p, N, P, KIND: tl.constexpr):
    """Where something is that there is for each row."""
    if KIND == ACROSS:
        at = n * P + p
    else:
        at = p.to(tl.int64) * N + n
    return at


@triton.jit
def strides(P, C, KIND: tl.constexpr):
    """From a sample to the next: of values, and of rows."""
    row = P.to(tl.int64)
    if KIND != ACROSS:
        row = P.to(tl.int64) * 0 + 1
    return P.to(tl.int64) * C, row


@triton.jit
def real_rows(n, p, last, P, hidden, MASKED: tl.constexpr):
    """Which rows exist, and are not hidden: ``hidden[n, p]`` is 0 at real entries."""
    real = (n >= 0) & (n < last) & (p < P)
    if MASKED:
        real = real & (tl.load(hidden + n.to(tl.int64) * P + p, mask=real, other=1) == 0)
    return real


@triton.jit
def real_values(in_row, c, C, EVEN: tl.constexpr):
    """Which values exist, in rows that do."""
    real = in_row
    if not EVEN:
        real = in_row & (c < C)
    return real


@triton.jit
def fetch(pointers, real, EVEN: tl.constexpr):
    """A tile, in its own type; 0 where there is nothing."""
    if EVEN:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=real, other=0.0)
    return tile


@triton.jit
def put(pointers, values, real, EVEN: tl.constexpr):
    """A tile, in the type of the tensor."""
    if EVEN:
        tl.store(pointers, values.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=real)


@triton.jit
def over_features(t, KIND: tl.constexpr):
    """For each row."""
    if KIND == NARROW:
        total = tl.sum(t, 2, keep_dims=True)
    elif KIND == WIDE:
        total = tl.sum(tl.sum(t, HELD, keep_dims=True), 2, keep_dims=True)
    else:
        total = tl.sum(t, WARPS, keep_dims=True)
    return total


@triton.jit
def fold(t, KIND: tl.constexpr):
    """Over those samples a thread has itself: what a loop adds up."""
    total = t
    if KIND != WIDE:
        total = tl.sum(t, HELD, keep_dims=True)
    return total


@triton.jit
def over_samples(t, KIND: tl.constexpr, POOLED: tl.constexpr):
    """Of what was folded: for each column, where statistics are pooled those of all positions of the tile together."""
    total = t
    if KIND != ACROSS:
        total = tl.sum(t, WARPS, keep_dims=True)
    elif POOLED:
        total = tl.sum(t, 2, keep_dims=True)
    return total


@triton.jit
def _add_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def all_over_samples(t, u, v, KIND: tl.constexpr, POOLED: tl.constexpr):
    """Three sums ``over_samples`` at once: warps have to meet once and not three times."""
    if not TOGETHER:
        t, u, v = over_samples(t, KIND, POOLED), over_samples(u, KIND, POOLED), over_samples(v, KIND, POOLED)
    elif KIND != ACROSS:
        t, u, v = tl.reduce((t, u, v), WARPS, _add_triples, keep_dims=True)
    elif POOLED:
        t, u, v = tl.reduce((t, u, v), 2, _add_triples, keep_dims=True)
    return t, u, v


@triton.jit
def entries(in_row, p, BN: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr, POOLED: tl.constexpr):
    """How many of the rows of a tile enter each column."""
    if EVEN and POOLED:
        count = tl.zeros([1, 1, 1], tl.float32) + BN * p.shape[2]
    elif EVEN:
        count = tl.zeros(p.shape, tl.float32) + BN
    else:
        count = over_samples(fold(in_row.to(tl.float32), KIND), KIND, POOLED)
    return count


@triton.jit
def feature_statistics(v, real, C, KIND: tl.constexpr, EVEN: tl.constexpr):
    """Eqs 12 and 13, of values already in registers: the mean first, then the squares around it."""
    mean = over_features(v, KIND) * (1.0 / C)
    u = v - mean
    if not EVEN:
        u = tl.where(real, u, 0.0)
    return mean, over_features(u * u, KIND) * (1.0 / C)


@triton.jit
def parameter(pointer, c, C, default: tl.constexpr):
    """Gamma or beta."""
    if pointer is None:
        value = tl.full(c.shape, default, tl.float32)
    else:
        value = tl.load(pointer + c, mask=c < C, other=0.0).to(tl.float32)
    return value


@triton.jit
def weights(inverse_m, mix_eps, scale):
    """Eq 16."""
    return scale * (1.0 - (inverse_m + mix_eps)), scale * (inverse_m - mix_eps)


@triton.jit
def transform(v, mean_B, s_B, mean_F, s_F, g, b, SHORT: tl.constexpr):
    """Eqs 14-17 as one multiplication and one addition for each value.

    Args:
        v: The values.
        mean_B, s_B: Batch means and gamma * w_B / sigma_B, of columns.
        mean_F, s_F: Feature means and w_F / sigma_F, of rows.
        g, b: Gamma and beta.
        SHORT: The values have 11 bits or fewer, so it does no harm that means cancel to 24.
    """
    slope = tl.fma(s_F, g, s_B)
    if SHORT:
        y = tl.fma(v, slope, tl.fma(-(mean_F * s_F), g, tl.fma(-mean_B, s_B, b)))
    else:
        y = tl.fma(v - mean_B, slope, tl.fma((mean_B - mean_F) * s_F, g, b))
    return y


@triton.jit
def begin_next(CHAINED: tl.constexpr):
    """Let the programs of the next launch begin where there is room for them, if it says so too."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(CHAINED: tl.constexpr):
    """Before anything is read that the launch before has written."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["P", "C"])
def turn(x, y, P, C, SIDE_P: tl.constexpr, SIDE_C: tl.constexpr, BLOCK: tl.constexpr):
    """``y[n, p, c] = x[n, c, p]``, both contiguous; of positions and features, so many lie side by side in memory."""
    P, C = (P // SIDE_P) * SIDE_P, (C // SIDE_C) * SIDE_C
    program, blocks_p, blocks_c = tl.program_id(0), tl.cdiv(P, BLOCK), tl.cdiv(C, BLOCK)
    p = program // blocks_c % blocks_p * BLOCK + tl.arange(0, BLOCK)
    c = program % blocks_c * BLOCK + tl.arange(0, BLOCK)
    sample = (program // (blocks_p * blocks_c)).to(tl.int64) * P * C
    inside = (c < C)[:, None] & (p < P)[None, :]
    values = tl.load(x + sample + c.to(tl.int64)[:, None] * P + p[None, :], mask=inside)
    to = y + sample + p.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(to, tl.trans(values), mask=tl.trans(inside))
