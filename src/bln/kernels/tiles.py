"""What all kernels share: tiles of ``x[n, p, c]`` in two arrangements.

Of the four dimensions of a tile, the threads of a warp lie along the last, ``L``, and where that is short, they and the
warps along ``B``, and where that is, too, along ``A``, then ``H``. Else each thread holds all of ``A`` and of ``H``.

              A         B         H         L
    last      samples   samples   features  features    features lie last: a row within a warp or a few
    ACROSS    samples   features  features  positions   positions lie side by side in memory, each thread has its own

Which dimension the compiler gives to warps has changed between its versions: see ``WARPS``.

Indices and sums keep four dimensions, those they do not depend on being 1, so that everything else is written once.
Columns are what depends on features and positions, rows what depends on samples and positions. ``EVEN`` says that all
rows of all tiles exist; ``FULL``, that features fill them, too, so that nothing has to be masked. ``FEATURES`` is the
number of these, where they fill whole pieces ``H`` of a tile: the compiler then leaves the others out; else it is 0.
``LONG`` says that 32 bits do not count all values.
"""

from __future__ import annotations

import triton
import triton.language as tl

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
WARPS = tl.constexpr(2 if VERSION >= (3, 7) else 0)  # where B stands
HELD = tl.constexpr(1)  # where A stands
PIECES = tl.constexpr(0 if VERSION >= (3, 7) else 2)  # where H stands
LANES = tl.constexpr(3)  # where L stands
ZERO_AND_ONE = tl.constexpr(0x3F800000_00000000)  # as two float32, the first one lower


@triton.jit
def indices(TILE: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr):
    """Samples, positions and features of a tile; and features with the warps they are in, to load columns with."""
    a, b, h = tl.arange(0, TILE[0]), tl.arange(0, TILE[1]), tl.arange(0, TILE[2])
    if WARPS == 0:
        a, b, h = a[None, :, None, None], b[:, None, None, None], h[None, None, :, None]
    else:
        a, b, h = a[None, :, None, None], b[None, None, :, None], h[:, None, None, None]
    last = tl.arange(0, TILE[3])[None, None, None, :]
    if ACROSS:
        n, p, c = a, last, b * TILE[2] + h
        folded = c
    else:
        n, p, c = b * TILE[0] + a, tl.zeros([1, 1, 1, 1], tl.int32), h * TILE[3] + last
        folded = c + (b * 0 if SIDE < 8 else 0)  # see ``sides``
    return n, p, c, folded


@triton.jit
def writers(TILE: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr):
    """Which entries of ``B`` write a column; with ``folded`` features, all of them have it."""
    if ACROSS or SIDE >= 8:
        first = tl.full([1, 1, 1, 1], 1, tl.int1)
    elif WARPS == 0:
        first = tl.arange(0, TILE[1])[:, None, None, None] == 0
    else:
        first = tl.arange(0, TILE[1])[None, None, :, None] == 0
    return first


@triton.jit
def sides(P, C, ACROSS: tl.constexpr, SIDE: tl.constexpr):
    """Positions and features; those side by side in memory known to be a multiple of ``SIDE``, and no more: so many
    values a thread reads at once.

    With 4 features, of the input as of columns in float32, a thread has all columns it needs. With 8, of a 16-bit
    input, columns go from thread to thread, which takes few of them.
    """
    if ACROSS:
        P = (P // SIDE) * SIDE
    else:
        C = (C // SIDE) * SIDE
    return P, C


@triton.jit
def positions(P, SIDE: tl.constexpr, LAPS: tl.constexpr, TOUCHED: tl.constexpr):
    """Those of a lap. Where a tile has a part of one alone, they are known to be a multiple of ``SIDE``, too."""
    if LAPS > 1:
        P = P // LAPS
        if TOUCHED == 1:
            P = (P // SIDE) * SIDE
    return P


@triton.jit
def position(
    block, P, positions, BP: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr, EVEN: tl.constexpr,
    LAPS: tl.constexpr = 1, TOUCHED: tl.constexpr = 1,
):  # fmt: skip
    """The first of a block. Where side by side they do not fill the last one, it begins earlier, so that all of its
    positions exist; some are in the block before, too, and what two programs do for them is the same.

    Of several ``LAPS``, each has blocks of its own if a tile has a part of one alone.
    """
    if LAPS > 1 and TOUCHED == 1:
        blocks = tl.cdiv(positions, BP)
        first = block // blocks * positions + tl.minimum(block % blocks * BP, positions - BP)
    else:
        first = block * BP
        if ACROSS and EVEN:
            first = tl.minimum(first, P - BP) // SIDE * SIDE  # known to be a multiple
    return first


@triton.jit
def samples_of(split, splits, run, N, BN: tl.constexpr, LONG: tl.constexpr, STRIDED: tl.constexpr = False):
    """Those of one of several programs: the first, where they end, and how far apart its tiles are.

    It has a run of them; or, ``STRIDED``, one tile of every ``splits``, so that all programs together go through memory
    from one end to the other.
    """
    if LONG:  # there may be so many rows, too
        split, splits, N = split.to(tl.int64), splits.to(tl.int64), N.to(tl.int64)
    if STRIDED:
        first, last, stride = split * BN, N, splits * BN
    else:
        first, last, stride = split * run, tl.minimum(N, (split + 1) * run), BN
    return first, last, stride


@triton.jit
def row_position(p, first, P, positions, LAPS: tl.constexpr, TOUCHED: tl.constexpr):
    """The positions, of those of a lap, whose rows have shares in a tile."""
    if LAPS > 1:
        if TOUCHED == 1:
            p = p - first // positions * positions
        else:
            p = tl.where(p < P, p % positions, P)  # none beyond the last lap
    return p


@triton.jit
def column_offset(p, c, P, C, ACROSS: tl.constexpr):
    """Where something is that there is for each column."""
    if ACROSS:
        at = c * P + p
    else:
        at = p.to(tl.int64) * C + c
    return at


@triton.jit
def column(p, c, P, C, ACROSS: tl.constexpr, POOLED: tl.constexpr):
    """The same, and whether there is one; where statistics are ``POOLED``, there is one for each feature."""
    if POOLED:
        at, inside = c, c < C
    else:
        at, inside = column_offset(p, c, P, C, ACROSS), (p < P) & (c < C)
    return at, inside


@triton.jit
def offset(n, p, c, P, C, ACROSS: tl.constexpr, LONG: tl.constexpr):
    """Where values are."""
    if ACROSS:
        at = (n * C + c) * P + p
    elif LONG:
        at = (n.to(tl.int64) * P + p) * C + c
    else:  # half as many registers hold where to read
        at = (n * P + p) * C + c
    return at


@triton.jit
def row_offset(n, p, N, P, ACROSS: tl.constexpr, LONG: tl.constexpr):
    """Where something is that there is for each row."""
    if ACROSS:
        at = n * P + p
    elif LONG:
        at = p.to(tl.int64) * N + n
    else:
        at = p * N + n
    return at


@triton.jit
def row_stride(P, ACROSS: tl.constexpr):
    """From a sample to the next, of pairs for each row."""
    row = 2
    if ACROSS:
        row = P.to(tl.int64) * 2
    return tl.cast(row, tl.int64)


@triton.jit
def block_strides(N, C, BP: tl.constexpr, ACROSS: tl.constexpr):
    """From a block of ``BP`` positions to the next: of values, and of pairs for each row."""
    value, row = C, 2 * N
    if ACROSS:
        value, row = BP, 2 * BP
    return tl.cast(value, tl.int64), tl.cast(row, tl.int64)


@triton.jit
def real_rows(n, p, last, P, hidden, q, Q, EVEN: tl.constexpr, MASKED: tl.constexpr):
    """Which rows exist, and are not hidden: ``hidden[n, q]``, of ``Q`` positions, is 0 at real entries."""
    if EVEN:
        real = tl.full((n + p).shape, 1, tl.int1)
    else:
        real = (n < last) & (p < P)
    if MASKED:
        real = real & (tl.load(hidden + n.to(tl.int64) * Q + q, mask=real, other=1) == 0)
    return real


@triton.jit
def real_values(in_row, c, C, FULL: tl.constexpr, FEATURES: tl.constexpr):
    """Which values exist, in rows that do."""
    real = in_row
    if not FULL:
        real = in_row & (c < (FEATURES if FEATURES > 0 else C))
    return real


@triton.jit
def fetch(pointers, real, FULL: tl.constexpr, other: tl.constexpr = 0.0):
    """A tile in its own type, or columns; ``other`` where there is nothing."""
    if FULL:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=real, other=other)
    return tile


@triton.jit
def put(pointers, values, real, FULL: tl.constexpr):
    """A tile, in the type of the tensor."""
    if FULL:
        tl.store(pointers, values.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=real)


@triton.jit
def store_pair(pointer, at, first, second, inside, EVEN: tl.constexpr = False):
    """Two numbers that stand side by side, as one: on the way to those threads that write, it goes once."""
    low, high = first.to(tl.uint32, bitcast=True).to(tl.uint64), second.to(tl.uint32, bitcast=True).to(tl.uint64)
    to = pointer.to(tl.pointer_type(tl.uint64), bitcast=True) + at
    if EVEN:
        tl.store(to, (high << 32) | low)
    else:
        tl.store(to, (high << 32) | low, mask=inside)


@triton.jit
def load_pair(pointer, at, inside, EVEN: tl.constexpr = False):
    """What ``store_pair`` stored; 0 and 1, as mean and variance, where there is nothing."""
    of = pointer.to(tl.pointer_type(tl.uint64), bitcast=True) + at
    if EVEN:
        pair = tl.load(of)
    else:
        pair = tl.load(of, mask=inside, other=ZERO_AND_ONE)
    return pair.to(tl.uint32).to(tl.float32, bitcast=True), (pair >> 32).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def parameter(pointer, c, C, default: tl.constexpr):
    """Gamma or beta."""
    if pointer is None:
        value = tl.full(c.shape, default, tl.float32)
    else:
        value = tl.load(pointer + c, mask=c < C, other=0.0).to(tl.float32)
    return value


@triton.jit
def of_features(pointer, first, p, c, P, C, LAPS: tl.constexpr, TOUCHED: tl.constexpr, default: tl.constexpr):
    """What there is for each feature, gamma, beta or a pooled statistic, for the columns of a tile; 0 where there is no
    feature, and the default if there is no such thing.

    Of each lap that a tile has a part of, from its ``first`` position on, it is loaded once. For each column it would
    be loaded by other threads than have the column, and the compiler would move tiles between them.
    """
    if LAPS == 1 or pointer is None:
        value = parameter(pointer, c, C, default)
    else:
        lap = first // (P // LAPS)
        value = parameter(pointer, c * LAPS + lap, C * LAPS, default)
        for _ in tl.static_range(TOUCHED - 1):
            lap += 1
            value = tl.where(p // (P // LAPS) == lap, parameter(pointer, c * LAPS + lap, C * LAPS, default), value)
    return value


@triton.jit
def weights(inverse_m, mix_eps, scale):
    """Eq 16."""
    return scale * (1.0 - (inverse_m + mix_eps)), scale * (inverse_m - mix_eps)


@triton.jit
def transform(v, mean_B, s_B, mean_F, s_F, g, b, SHORT: tl.constexpr):
    """Eqs 14-17, in three operations for each value that has few bits, in five for others.

    Args:
        v: The values.
        mean_B, s_B: Batch means and gamma * w_B / sigma_B, of columns.
        mean_F, s_F: Feature means and w_F / sigma_F, of rows.
        g, b: Gamma and beta.
        SHORT: The values have 11 bits or fewer, so it does little harm that means cancel to 24: of a column that is
            1e4 throughout, bfloat16 comes out as .04 where five operations have .01.
    """
    if SHORT:
        y = tl.fma(v, tl.fma(s_F, g, s_B), tl.fma(-(mean_F * s_F), g, tl.fma(-mean_B, s_B, b)))
    else:
        y = tl.fma((v - mean_F) * s_F, g, tl.fma(v - mean_B, s_B, b))
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
def turn(
    x, second, y, P, C, SIDE_P: tl.constexpr, SIDE_C: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    """``y[n, p, c] = x[n, c, p]``, both contiguous; of positions and features, so many lie side by side in memory.

    The ``second`` sample may be a tensor of its own. ``CHAINED``, this does not need what the launch before writes, but
    the one after it may.
    """
    P, C = (P // SIDE_P) * SIDE_P, (C // SIDE_C) * SIDE_C
    program, blocks_p, blocks_c = tl.program_id(0), tl.cdiv(P, BLOCK), tl.cdiv(C, BLOCK)
    p = program // blocks_c % blocks_p * BLOCK + tl.arange(0, BLOCK)
    c = program % blocks_c * BLOCK + tl.arange(0, BLOCK)
    sample = (program // (blocks_p * blocks_c)).to(tl.int64) * P * C
    of = x + sample
    if second is not None:
        of = second if sample > 0 else x
    inside = (c < C)[:, None] & (p < P)[None, :]
    values = tl.load(of + c.to(tl.int64)[:, None] * P + p[None, :], mask=inside)
    to = y + sample + p.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(to, tl.trans(values), mask=tl.trans(inside))
    wait_for_previous(CHAINED)
