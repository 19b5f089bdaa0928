"""Partial results: what programs that share a slab find of it in a first sweep, each of a run of samples.

They are means and squares of columns ``[parts, P, C]``, then counts and sums of the means and variances of rows
``[parts, P]``. Few are joined by every program of the second sweep; of more, ``merge`` makes fewer. Where features are
in laps, ``unite`` makes rows, and ``pool`` joins the positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import reductions, tiles


@triton.jit
def store(
    partials, split, splits, column, in_column, columns, p, P, count, mean, square, sum_mean, sum_var,
    LAPS: tl.constexpr,
):  # fmt: skip
    """Those of a program. Sums over rows in ``LAPS`` are left to ``unite``."""
    tl.store(partials + split * columns + column, mean, mask=in_column)
    tl.store(partials + (splits + split) * columns + column, square, mask=in_column)
    at = partials + 2 * splits * columns + split * P + p
    tl.store(at, count, mask=p < P)
    if LAPS == 1:
        tl.store(at + splits * P, sum_mean, mask=p < P)
        tl.store(at + 2 * splits * P, sum_var, mask=p < P)


@triton.jit
def join(partials, parts, column, in_column, columns, p, P):
    """All parts together, one after the other."""
    counts = partials + 2 * parts * columns + p
    count = tl.zeros(p.shape, tl.float32)
    sum_mean = tl.zeros(p.shape, tl.float32)
    sum_var = tl.zeros(p.shape, tl.float32)
    mean = tl.zeros(column.shape, tl.float32)
    square = tl.zeros(column.shape, tl.float32)
    for part in range(parts):
        at = partials + part * columns + column
        its_mean = tl.load(at, mask=in_column, other=0.0)
        its_square = tl.load(at + parts * columns, mask=in_column, other=0.0)
        its_count = tl.load(counts + part * P, mask=p < P, other=0.0)
        sum_mean += tl.load(counts + (parts + part) * P, mask=p < P, other=0.0)
        sum_var += tl.load(counts + (2 * parts + part) * P, mask=p < P, other=0.0)
        mean, square, count = reductions.chan(mean, square, count, its_mean, its_square, its_count)
    return count, mean, square, sum_mean, sum_var


@triton.jit(do_not_specialize=["P", "C", "parts", "groups"])
def merge(
    partials, joined, P, C, parts, groups, ACROSS: tl.constexpr, CHAINED: tl.constexpr, EARLY: tl.constexpr,
    BS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each ``BS`` of many parts joined into one, in the same layout: for ``sweep``, whose programs would read all.

    A program has features of one position, or ``ACROSS``, where several lie side by side, positions of one feature.
    """
    if EARLY:
        tiles.begin_next(CHAINED)
    tiles.wait_for_previous(CHAINED)
    columns, group = P.to(tl.int64) * C, tl.program_id(1)
    width = C
    if ACROSS:
        width = P
    blocks = tl.cdiv(width, BLOCK)
    line, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    along = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    at, inside = line.to(tl.int64) * width + along, along < width
    p, real, first = line + tl.zeros([1, 1], tl.int32), tl.full([1, 1], 1, tl.int1), block == 0
    if ACROSS:
        p, real, first = along, inside, line == 0
    part = group * BS + tl.arange(0, BS)[:, None]
    there = part < parts
    rows = partials + 2 * parts * columns + part * P + p
    counts = tl.load(rows, mask=there & real, other=0.0)
    wanted = (part < tl.where(first, parts, 0)) & real  # of a position, by one program
    sums_mean = tl.load(rows + parts * P, mask=wanted, other=0.0)
    sums_var = tl.load(rows + 2 * parts * P, mask=wanted, other=0.0)
    means = tl.load(partials + part * columns + at, mask=there & inside, other=0.0)
    squares = tl.load(partials + (parts + part) * columns + at, mask=there & inside, other=0.0)
    mean, square, _ = reductions.joined(means, squares, counts)
    if not EARLY:
        tiles.begin_next(CHAINED)
    tl.store(joined + group * columns + at, mean, mask=inside)
    tl.store(joined + (groups + group) * columns + at, square, mask=inside)
    if first:
        count, sum_mean, sum_var = tl.reduce((counts, sums_mean, sums_var), 0, reductions.plus, keep_dims=True)
        to = joined + 2 * groups * columns + group * P + p
        tl.store(to, count, mask=real)
        tl.store(to + groups * P, sum_mean, mask=real)
        tl.store(to + 2 * groups * P, sum_var, mask=real)


@triton.jit(do_not_specialize=["N", "P", "C", "run", "splits", "laps"])
def unite(
    shares, statistics, partials, N, P, C, run, splits, laps, TILE: tl.constexpr, CHAINED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The statistics of rows, of which each lap has its ``shares``, all of as many features; and the sums of both that
    partial results are without. Each program has some positions, and a run of samples.

    A tile has laps where others have samples, so that a thread loads all shares of a row at once, and samples where
    they have features.
    """
    if EARLY:
        tiles.begin_next(CHAINED)
    tiles.wait_for_previous(CHAINED)
    block, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    last = tl.minimum(N, (split + 1) * run)
    lap, ps, ns, _ = tiles.indices(TILE, True, 1)
    p = block * TILE[3] + ps
    sum_mean = tl.zeros((ns + ps).shape, tl.float32)
    sum_var = sum_mean
    for start in range(split * run, last, TILE[1]):
        n = (start + ns).to(tl.int64)
        real = (n < last) & (p < P)
        there = real & (lap < laps)
        means, variances = tiles.load_pair(shares, (n * laps + lap) * P + p, there)
        mean = reductions.fold(means) / laps
        moved = means - mean
        var = reductions.fold(tl.where(there, variances + moved * moved, 0.0)) / laps
        tiles.store_pair(statistics, P.to(tl.int64) * C + n * P + p, mean, var, real)
        sum_mean += mean  # 0 where there is no row
        sum_var += var
    if not EARLY:
        tiles.begin_next(CHAINED)
    at = partials + 2 * splits * P.to(tl.int64) * C + split * P + p
    tl.store(at + splits * P, tl.sum(sum_mean, tiles.WARPS, keep_dims=True), mask=p < P)
    tl.store(at + 2 * splits * P, tl.sum(sum_var, tiles.WARPS, keep_dims=True), mask=p < P)


@triton.jit(do_not_specialize=["P", "C", "parts"])
def pool(
    partials, pooled, P, C, parts, CHAINED: tl.constexpr, EARLY: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Partial results of positions that lie side by side as one of all of them; each program has some features."""
    if EARLY:
        tiles.begin_next(CHAINED)
    tiles.wait_for_previous(CHAINED)
    columns, rows = P.to(tl.int64) * C, parts * P
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    count = tl.zeros([1, BLOCK], tl.float32)
    mean = tl.zeros([1, BLOCK], tl.float32)
    square = tl.zeros([1, BLOCK], tl.float32)
    sum_mean = tl.zeros([1, 1], tl.float32)
    sum_var = tl.zeros([1, 1], tl.float32)
    for start in range(0, rows, BS):
        row = start + tl.arange(0, BS)[:, None]
        real, inside = row < rows, (row < rows) & (c < C)
        of, at = partials + row // P * columns + c.to(tl.int64) * P + row % P, partials + 2 * parts * columns + row
        counts = tl.load(at, mask=real, other=0.0)
        means = tl.load(of, mask=inside, other=0.0)
        squares = tl.load(of + parts * columns, mask=inside, other=0.0)
        some = reductions.joined(means, squares, counts)
        mean, square, count = reductions.chan(mean, square, count, some[0], some[1], some[2])
        wanted = row < tl.where(tl.program_id(0) == 0, rows, 0)
        sum_mean += tl.sum(tl.load(at + rows, mask=wanted, other=0.0), 0, keep_dims=True)
        sum_var += tl.sum(tl.load(at + 2 * rows, mask=wanted, other=0.0), 0, keep_dims=True)
    if not EARLY:
        tiles.begin_next(CHAINED)
    tl.store(pooled + c, mean, mask=c < C)
    tl.store(pooled + C + c, square, mask=c < C)
    if tl.program_id(0) == 0:
        to = pooled + 2 * C + tl.zeros([1, 1], tl.int32)
        tl.store(to + tl.zeros([1, BLOCK], tl.int32), count, mask=c == 0)
        tl.store(to + 1, sum_mean)
        tl.store(to + 2, sum_var)
