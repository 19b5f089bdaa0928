"""Sums over tiles, the statistics they make, and how partial ones become one.

Sums go over what a thread has itself, then over its warp. What other warps have every thread reads, so that they wait
for each other once: ``tl.sum`` lets them wait twice, and up to 16 threads for the same bank of memory. Which threads
then hold the result the compiler decides. Moving it takes as long again, so kernels are written to leave it there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import tiles


@triton.jit
def _by_warps(t, DIM: tl.constexpr, WITHIN: tl.constexpr):
    """A dimension last, in groups of so many entries: as many as are within a warp, or sums take longer."""
    if DIM == 0:
        t = tl.permute(t, (1, 2, 3, 0))
    elif DIM == 2:
        t = tl.permute(t, (0, 1, 3, 2))
    return tl.reshape(t, (t.shape[0], t.shape[1], t.shape[2], t.shape[3] // WITHIN, WITHIN))


@triton.jit
def _in_place(t, DIM: tl.constexpr):
    """The last dimension where it was before ``_by_warps``."""
    if DIM == 0:
        t = tl.permute(t, (3, 0, 1, 2))
    elif DIM == 2:
        t = tl.permute(t, (0, 1, 3, 2))
    return t


@triton.jit
def _halves(t):
    """Of the last dimension, which goes from warp to warp: every thread gets what all of them have."""
    return tl.split(tl.reshape(t, (t.shape[0], t.shape[1], t.shape[2], t.shape[3] // 2, 2)))


@triton.jit
def _stack(t, u):
    """Two as one, so that they go from warp to warp together."""
    both = tl.permute(tl.join(t, u), (0, 1, 2, 4, 3))
    return tl.reshape(both, (t.shape[0], t.shape[1], t.shape[2] * 2, t.shape[3]))


@triton.jit
def _unstack(both):
    """The two again."""
    both = tl.reshape(both, (both.shape[0], both.shape[1], both.shape[2] // 2, 2, both.shape[3]))
    return tl.split(tl.permute(both, (0, 1, 2, 4, 3)))


@triton.jit
def _over_warps(t):
    """A sum over the last dimension."""
    for _ in tl.static_range(10):
        if t.shape[3] > 1:
            left, right = _halves(t)
            t = left + right
    tl.static_assert(t.shape[3] == 1)
    return t


@triton.jit
def _over(t, DIM: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr):
    """A sum over ``L`` or ``B``."""
    WITHIN: tl.constexpr = 32 * SIDE if DIM == tiles.LANES else (32 * SIDE // TILE[3] if TILE[3] < 32 * SIDE else 1)
    if t.shape[DIM] <= WITHIN:
        total = tl.sum(t, DIM, keep_dims=True)
    else:
        total = _in_place(_over_warps(tl.sum(_by_warps(t, DIM, WITHIN), 4)), DIM)
    return total


@triton.jit
def _both_over(t, u, DIM: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr):
    """Two such sums."""
    WITHIN: tl.constexpr = 32 * SIDE if DIM == tiles.LANES else (32 * SIDE // TILE[3] if TILE[3] < 32 * SIDE else 1)
    if t.shape[DIM] <= WITHIN:
        t, u = tl.sum(t, DIM, keep_dims=True), tl.sum(u, DIM, keep_dims=True)
    else:
        t, u = tl.sum(_by_warps(t, DIM, WITHIN), 4), tl.sum(_by_warps(u, DIM, WITHIN), 4)
        t, u = _unstack(_over_warps(_stack(t, u)))
        t, u = _in_place(t, DIM), _in_place(u, DIM)
    return t, u


@triton.jit
def over_features(t, TILE: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr):
    """For each row."""
    return _over(tl.sum(t, tiles.PIECES, keep_dims=True), tiles.WARPS if ACROSS else tiles.LANES, TILE, SIDE)


@triton.jit
def both_over_features(t, u, TILE: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr):
    """Two such sums."""
    t, u = tl.sum(t, tiles.PIECES, keep_dims=True), tl.sum(u, tiles.PIECES, keep_dims=True)
    return _both_over(t, u, tiles.WARPS if ACROSS else tiles.LANES, TILE, SIDE)


@triton.jit
def fold(t):
    """Over ``A``, the samples a thread has itself: what a loop adds up."""
    return tl.sum(t, tiles.HELD, keep_dims=True)


@triton.jit
def over_samples(t, TILE: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr, POOLED: tl.constexpr):
    """Of what was folded: for each column, where statistics are pooled those of all positions of the tile together."""
    total = t
    if not ACROSS:
        total = _over(t, tiles.WARPS, TILE, SIDE)
    elif POOLED:
        total = tl.sum(t, tiles.LANES, keep_dims=True)
    return total


@triton.jit
def both_over_samples(t, u, TILE: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr, POOLED: tl.constexpr):
    """Two such sums."""
    if not ACROSS:
        t, u = _both_over(t, u, tiles.WARPS, TILE, SIDE)
    elif POOLED:
        t, u = tl.sum(t, tiles.LANES, keep_dims=True), tl.sum(u, tiles.LANES, keep_dims=True)
    return t, u


@triton.jit
def batch_statistics(v, real, N, TILE: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr, FULL: tl.constexpr):
    """Eqs 10 and 11 of a whole slab."""
    mean = over_samples(fold(v), TILE, ACROSS, SIDE, False) * (1.0 / N)
    w = v - mean
    if not FULL:
        w = tl.where(real, w, 0.0)
    return mean, over_samples(fold(w * w), TILE, ACROSS, SIDE, False) * (1.0 / N)


@triton.jit
def entries(
    in_row, p, TILE: tl.constexpr, BN: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr, EVEN: tl.constexpr,
    POOLED: tl.constexpr,
):  # fmt: skip
    """How many of the rows of a tile enter each column."""
    if EVEN and POOLED:
        count = tl.zeros([1, 1, 1, 1], tl.float32) + BN * p.shape[3]
    elif EVEN:
        count = tl.zeros(p.shape, tl.float32) + BN
    else:
        count = over_samples(fold(in_row.to(tl.float32)), TILE, ACROSS, SIDE, POOLED)
    return count


@triton.jit
def feature_statistics(
    v, real, C, TILE: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr, FEATURES: tl.constexpr
):  # fmt: skip
    """Eqs 12 and 13, of values already in registers: a mean first, then the squares around it.

    Of a row that does not exist, both are 0.
    """
    DIM: tl.constexpr = tiles.WARPS if ACROSS else tiles.LANES
    WITHIN: tl.constexpr = 32 * SIDE if DIM == tiles.LANES else (32 * SIDE // TILE[3] if TILE[3] < 32 * SIDE else 1)
    SOME: tl.constexpr = TILE[2] * (TILE[1] if ACROSS else TILE[3]) != FEATURES  # not all of them are features
    if FEATURES > 0 and v.shape[DIM] > WITHIN:
        mean, var = _statistics_over_warps(v, real, DIM, WITHIN, SOME, FEATURES)
    else:
        mean = over_features(v, TILE, ACROSS, SIDE) * (1.0 / C)
        u = v - mean
        if SOME:
            u = tl.where(real, u, 0.0)
        var = over_features(u * u, TILE, ACROSS, SIDE) * (1.0 / C)
    return mean, var


@triton.jit
def _statistics_over_warps(
    v, real, DIM: tl.constexpr, WITHIN: tl.constexpr, SOME: tl.constexpr, FEATURES: tl.constexpr
):  # fmt: skip
    """Of rows of which several warps have as many features each: those of a warp first, then of all.

    So warps wait for each other once, not twice, for the mean of all and then the squares around it.
    """
    SHARE: tl.constexpr = v.shape[DIM] // WITHIN / FEATURES
    mean = tl.sum(_by_warps(tl.sum(v, tiles.PIECES, keep_dims=True), DIM, WITHIN), 4) * SHARE
    u = v - _in_place(_repeated(mean, WITHIN), DIM)
    if SOME:
        u = tl.where(real, u, 0.0)
    var = tl.sum(_by_warps(tl.sum(u * u, tiles.PIECES, keep_dims=True), DIM, WITHIN), 4) * SHARE
    both = _stack(mean, var)
    for _ in tl.static_range(10):
        if both.shape[3] > 1:  # two parts as one: ``chan``, where they are of the same size
            left, right = _halves(both)
            mean, var = _unstack(left)
            other_mean, other_var = _unstack(right)
            moved = other_mean - mean
            both = _stack(mean + 0.5 * moved, 0.5 * (var + other_var) + (0.25 * moved) * moved)
    mean, var = _unstack(both)
    return _in_place(mean, DIM), _in_place(var, DIM)


@triton.jit
def _repeated(t, TIMES: tl.constexpr):
    """Each entry of the last dimension so many times."""
    shape: tl.constexpr = t.shape
    t = tl.broadcast_to(tl.expand_dims(t, 4), (shape[0], shape[1], shape[2], shape[3], TIMES))
    return tl.reshape(t, (shape[0], shape[1], shape[2], shape[3] * TIMES))


@triton.jit
def chan(mean, square, count, other_mean, other_square, other_count):
    """Two parts as one, by Chan's formula: their mean, the squares around it, and the number of their entries."""
    share = other_count / tl.maximum(count + other_count, 1.0)
    moved = other_mean - mean
    return mean + share * moved, square + other_square + count * share * moved * moved, count + other_count


@triton.jit
def joined(means, squares, counts, DIM: tl.constexpr = 0):
    """Many parts, along a dimension, as one: the mean of their means, weighed by counts, and the squares around it. A
    reduction by ``chan`` would divide for each two.
    """
    count = tl.sum(counts, DIM, keep_dims=True)
    mean = tl.sum(counts * means, DIM, keep_dims=True) / tl.maximum(count, 1.0)
    moved = means - mean
    return mean, tl.sum(squares + counts * moved * moved, DIM, keep_dims=True), count
