"""Partial results: what programs that share a slab find of it in a first sweep, each of some samples.

They are means and squares of columns ``[parts, P, C]``, or ``[parts, C, P]`` where positions lie side by side, then
counts and sums of the means and variances of rows ``[parts, P]``; of pooled statistics, those of one position. Few are
joined by every program of the second sweep; of more, ``merge`` makes fewer.

Where features are in laps, ``unite`` makes rows. Pooled, a program has parts of some laps, and leaves what it found for
each: means and squares of features ``[parts, C]``, and counts ``[parts, laps]``, a lap being in so many blocks, times
splits, at most. ``pool`` joins them. Sums over columns, of which gradients are made, are left in the same manner.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import reductions, tiles


@triton.jit
def store(
    partials, split, splits, column, in_column, columns, p, P, count, mean, square, sum_mean, sum_var,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Those of a program; ``SUMS`` over rows, too, unless they are left to ``unite``."""
    tl.store(partials + split * columns + column, mean, mask=in_column)
    tl.store(partials + (splits + split) * columns + column, square, mask=in_column)
    at = partials + 2 * splits * columns + split * P + p
    tl.store(at, count, mask=p < P)
    if SUMS:
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


@triton.jit
def part_of_lap(
    number: tl.constexpr, block, split, splits, p, P, positions, BP: tl.constexpr, LAPS: tl.constexpr,
    TOUCHED: tl.constexpr,
):  # fmt: skip
    """One of the laps that a block has a part of: which it is, or ``LAPS``; the positions that are in the block for the
    first time; where their results are among the parts, and whether no program has the next place.
    """
    if TOUCHED == 1:
        blocks = tl.cdiv(positions, BP)
        lap, at, empty = block // blocks, block % blocks, block < 0
        begin = lap * positions + at * BP
    else:
        begin = block * BP
        lap = begin // positions + number
        at = block - lap * positions // BP
        empty = (block == ((lap + 1) * positions - 1) // BP) & (at + 1 < places(positions, BP, TOUCHED))
        if number > 0:
            lap = tl.where(lap * positions < begin + BP, lap, LAPS)
    return lap, (p >= begin) & (p < P) & (p // positions == lap), at * splits + split, empty


@triton.jit
def store_pooled(
    partials, block, split, splits, p, c, P, C, positions, count, mean, square, BP: tl.constexpr, LAPS: tl.constexpr,
    TOUCHED: tl.constexpr,
):  # fmt: skip
    """What a program found of all positions of a lap, for each it has a part of."""
    parts = splits * places(positions, BP, TOUCHED)
    features = C * LAPS
    for number in tl.static_range(TOUCHED):
        lap, its, at, empty = part_of_lap(number, block, split, splits, p, P, positions, BP, LAPS, TOUCHED)
        its_mean, its_square, its_count = reductions.joined(
            tl.where(its, mean, 0.0), tl.where(its, square, 0.0), tl.where(its, count, 0.0), tiles.LANES
        )
        for more in tl.static_range(1 if TOUCHED == 1 else 2):
            last = LAPS
            if more == 1:  # 0, where no program has the next place
                its_count, its_mean = tl.zeros(its_count.shape, tl.float32), tl.zeros(its_mean.shape, tl.float32)
                its_square, at, last = its_mean, at + splits, tl.where(empty, LAPS, 0)
            in_column = (c < C) & (lap + c * 0 < last)
            to = partials + at.to(tl.int64) * features + c * LAPS + lap
            tl.store(to, its_mean, mask=in_column)
            tl.store(to + parts.to(tl.int64) * features, its_square, mask=in_column)
            to = partials + 2 * parts.to(tl.int64) * features + at * LAPS + lap + tl.zeros([1, 1, 1, 1], tl.int32)
            tl.store(to, its_count, mask=lap + tl.zeros([1, 1, 1, 1], tl.int32) < last)


@triton.jit
def store_sums(
    to, columns, ROWS: tl.constexpr, wide, step, block, split, splits, p, c, P, C, positions, BP: tl.constexpr,
    LAPS: tl.constexpr, TOUCHED: tl.constexpr,
):  # fmt: skip
    """Of so many quantities that columns have, the sums over all positions of a lap, for each that a program has a
    part of; and 0 where no program has one. Parts lie ``wide`` apart, quantities ``step``.
    """
    for number in tl.static_range(TOUCHED):
        lap, its, at, empty = part_of_lap(number, block, split, splits, p, P, positions, BP, LAPS, TOUCHED)
        here = to + at * wide + c * LAPS + lap
        there = here + splits * wide
        in_column, in_next = (c < C) & (lap + c * 0 < LAPS), (c < C) & (lap + c * 0 < tl.where(empty, LAPS, 0))
        for row in tl.static_range(ROWS):
            total = tl.sum(tl.where(its, columns[row], 0.0), tiles.LANES, keep_dims=True)
            tl.store(here + row * step, total, mask=in_column)
            if TOUCHED > 1:
                tl.store(there + row * step, tl.zeros(total.shape, tl.float32), mask=in_next)


@triton.jit
def places(positions, BP: tl.constexpr, TOUCHED: tl.constexpr):
    """Blocks that a lap may be in."""
    return tl.cdiv(positions, BP) + (0 if TOUCHED == 1 else 1)


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
    mean, square, count = reductions.joined(means, squares, counts)
    if not EARLY:
        tiles.begin_next(CHAINED)
    tl.store(joined + group * columns + at, mean, mask=inside)
    tl.store(joined + (groups + group) * columns + at, square, mask=inside)
    if first:
        sum_mean, sum_var = tl.sum(sums_mean, 0, keep_dims=True), tl.sum(sums_var, 0, keep_dims=True)
        to = joined + 2 * groups * columns + group * P + p
        tl.store(to, count, mask=real)
        tl.store(to + groups * P, sum_mean, mask=real)
        tl.store(to + 2 * groups * P, sum_var, mask=real)


@triton.jit(do_not_specialize=["N", "P", "C", "run", "splits", "laps"])
def unite(
    shares, statistics, sums, N, P, C, run, splits, laps, TILE: tl.constexpr, CHAINED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The statistics of rows, of which each lap has its ``shares``, all of as many features; and, if wanted, their
    ``sums``, which partial results are without. Each program has some positions, and a run of samples.

    A tile has laps where others have samples, so that a thread loads all shares of a row at once, and samples where
    they have features.
    """
    if EARLY:
        tiles.begin_next(CHAINED)
    tiles.wait_for_previous(CHAINED)
    block, split = tl.program_id(0) // splits, (tl.program_id(0) % splits).to(tl.int64)
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
    if sums is not None:
        at = sums + split * P + p
        tl.store(at, tl.sum(sum_mean, tiles.WARPS, keep_dims=True), mask=p < P)
        tl.store(at + splits * P, tl.sum(sum_var, tiles.WARPS, keep_dims=True), mask=p < P)


@triton.jit(do_not_specialize=["number", "C", "parts", "laps"])
def pool(
    partials, sums, pooled, number, C, parts, laps, CHAINED: tl.constexpr, EARLY: tl.constexpr,
    BR: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What ``store_pooled`` left as one partial result. Each program has some features, but the last one the ``sums``
    of rows, of which there are so many, if there are any.
    """
    if EARLY:
        tiles.begin_next(CHAINED)
    tiles.wait_for_previous(CHAINED)
    if tl.program_id(0) < tl.num_programs(0) - (0 if sums is None else 1):
        columns = parts.to(tl.int64) * C
        c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
        count = tl.zeros([1, BLOCK], tl.float32)
        mean = tl.zeros([1, BLOCK], tl.float32)
        square = tl.zeros([1, BLOCK], tl.float32)
        for start in range(0, parts, BS):
            part = (start + tl.arange(0, BS)[:, None]).to(tl.int64)
            inside = (part < parts) & (c < C)
            means = tl.load(partials + part * C + c, mask=inside, other=0.0)
            squares = tl.load(partials + columns + part * C + c, mask=inside, other=0.0)
            counts = tl.load(partials + 2 * columns + part * laps + c % laps, mask=inside, other=0.0)
            some = reductions.joined(means, squares, counts)
            mean, square, count = reductions.chan(mean, square, count, some[0], some[1], some[2])
        tl.store(pooled + c, mean, mask=c < C)
        tl.store(pooled + C + c, square, mask=c < C)
        tl.store(pooled + 2 * C + c, count, mask=c == 0)
    elif sums is not None:
        sum_mean = tl.zeros([BR], tl.float32)
        sum_var = tl.zeros([BR], tl.float32)
        for start in range(0, number, BR):
            row = start + tl.arange(0, BR)
            sum_mean += tl.load(sums + row, mask=row < number, other=0.0)
            sum_var += tl.load(sums + number + row, mask=row < number, other=0.0)
        tl.store(pooled + 2 * C + 1, tl.sum(sum_mean))
        tl.store(pooled + 2 * C + 2, tl.sum(sum_var))
    if not EARLY:
        tiles.begin_next(CHAINED)
