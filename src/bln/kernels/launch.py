"""Launch choices: how slabs are held or swept over, in what tiles, by how many warps.

Times in comments are those of forward kernels on an H200, in bfloat16 unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd, prod
from typing import Any

FEATURES = 2**15  # at most: all of them are in a tile
_RESIDENT = 16384  # values of a slab that registers hold
_LANES = 32  # threads of a warp
_BLOCK = 8  # positions, where they lie side by side, of which a program holds whole slabs
_LAP = 32  # features of a lap, see ``laps``
_CONCLUDING = 4096  # features of a dense input at most of which one program makes the statistics
_EARLY = 2**20  # values at most of which the next launch begins early: see ``slabs.chain``


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def across(p: int, c: int, training: bool) -> bool:
    """Whether the kernels take ``p`` positions side by side; else they want a copy with features last.

    In training (64, 784, 256) takes 2.1 times a copy in laps in float32, 3.4 by way of copies, (32, 196, 512) 2.7 and
    4.0. At inference samples are read once, all features at a time, if a tile can have them: (64, 784, 256) takes 1.4
    times a copy, 3.2 by way of copies; in bfloat16 2.2 and 3.1. Else they are in laps: (128, 49, 2048) takes 1.9 so,
    and 3.0; in bfloat16 2.4 and 3.5.
    """
    fits = c <= 128 if training else _at_once(p, c)
    # Offsets within a tile have 32 bits: of a few samples, of more if p is small.
    return (fits or laps(p, c) > 1) and p * c < 2**26


def _at_once(p: int, c: int) -> bool:
    """Whether a tile has all features at inference. Of few positions there may be more: (128, 4, 1024) takes 2.8 times
    a copy so, 6.6 by way of copies.
    """
    return c <= 256 or (p < 32 and p % 4 == 0 and power_of_two(p) * power_of_two(c) <= 8192)


def laps(p: int, c: int) -> int:
    """The number of laps, see ``forward``, where positions lie side by side.

    If there are many features, as few as leave 32 of them, or down to half as many, or else up to twice as many. Not
    too many: a tile has parts of some, and a thread of ``sharing.unite`` shares of all. And values are to be read four
    at a time. (64, 784, 128) takes 2.4 times a copy in four laps in float32, 2.9 in one.
    """
    if c <= 64 or p < 32:
        return 1
    least = cdiv(c, _LAP)
    some = [*range(least, 2 * least + 1), *(range(least - 1, cdiv(c, 2 * _LAP) - 1, -1) if c > 128 else ())]
    return next((number for number in some if number <= 64 and c % number == 0 and number * p % 4 == 0), 1)


def _blocks(p: int, positions: int, laps: int) -> tuple[int, bool]:
    """Of so many positions; and whether each lap has blocks of its own: if those do not overlap much. Then a tile needs
    gamma and beta of as many features as it has.
    """
    own = cdiv(p, positions)
    apart = laps > 1 and p % 4 == 0 and p >= positions and own * positions <= 1.1 * p
    return laps * own if apart else cdiv(laps * p, positions), apart


@dataclass(frozen=True)
class Launch:
    """How to go through ``x[n, p, c]``.

    Attributes:
        tile: Extents of a tile, as ``tiles`` arranges them; all features are in it, or all of a lap.
        across: Positions, not features, lie side by side in memory.
        side: Values a thread reads side by side.
        long: There are so many values that 32 bits do not count them.
        even: Tiles cover samples and positions exactly, and no entry is hidden.
        features: Their number, where they fill whole pieces of a tile's rows, or ``across`` the tile, and so are known
            when it is compiled; else 0.
        warps: For each program.
        blocks: Tiles along positions.
        resident: Whole slabs are held in registers.
        programs: Of a resident grid, which goes from block to block.
        stages: Tiles a program has under way, the next ones being loaded while it works on one.
        splits: Programs among which the samples of a block are split, where it is swept over. Where there are several,
            the sweeps are two launches.
        run: Samples of each.
        strided: Instead of a run, each program has one tile of every ``splits``: see ``tiles.samples_of``.
        early: Programs of a first sweep, and of what is launched between two, let the next begin when they begin, else
            when they end.
        swapped: The rows of a tile are positions of one sample, not samples of one position.
        turned: Statistics of columns are to lie as the input does.
        laps: See ``forward``; if there are several, the sweeps are two launches.
        touched: Laps that a tile may have a part of.
    """

    tile: tuple[int, int, int, int]
    across: bool
    side: int
    long: bool
    even: bool
    features: int
    warps: int
    blocks: int
    resident: bool = False
    programs: int = 0
    stages: int = 1
    splits: int = 1
    run: int = 0
    strided: bool = False
    early: bool = False
    swapped: bool = False
    turned: bool = False
    laps: int = 1
    touched: int = 1

    @property
    def samples(self) -> int:
        """Of a tile."""
        return 1 if self.swapped else _rows(self.tile, self.across)

    @property
    def width(self) -> int:
        """Features of a tile."""
        return self.tile[2] * self.tile[1 if self.across else 3]

    @property
    def positions(self) -> int:
        """Of a tile."""
        if self.swapped:
            return _rows(self.tile, self.across)
        return self.tile[-1] if self.across else 1

    def extents(self, p: int, c: int) -> tuple[int, int]:
        """Positions and features as sweeps go through them. A kernel that made them would know that they are a multiple
        of ``laps``, and read too much at once, see ``tiles.sides``: the first sweep over (128, 49, 2048) in bfloat16
        took 169 us so, and takes 14.
        """
        return p * self.laps, c // self.laps

    @property
    def late(self) -> bool:
        """Backward, the second sweep finds the averages of rows itself: nothing is stored and loaded for them.

        Before tiles were ``strided``, (256, 3136, 64) pooled took 1.77 times an addition so in float32, else 1.83;
        (512, 784, 64) 1.84, else 2.2. But (64, 784, 256) pooled 2.2, else 2.0, and (64, 3136, 32) across in float32
        2.05, else 1.93.
        """
        return not self.across and self.width <= 128

    @property
    def in_laps(self) -> dict[str, int]:
        """What all that go through laps are launched with besides."""
        return {"LAPS": self.laps, "TOUCHED": self.touched}

    @property
    def in_sweeps(self) -> dict[str, int]:
        """What ``forward.sweep`` and ``backward.sweep`` are launched with besides."""
        return {**self.in_laps, "STRIDED": self.strided}

    @cached_property
    def constants(self) -> dict[str, Any]:
        """What every kernel is launched with. Multiplications and additions may be fused, as Triton long did."""
        shape = {"TILE": self.tile, "BN": self.samples, "BP": self.positions, "ACROSS": self.across, "SIDE": self.side}
        return {
            **shape,
            "LONG": self.long,
            "EVEN": self.even,
            "FULL": self.even and self.features == self.width,
            "FEATURES": self.features,
            "STAGES": self.stages,
            "num_warps": self.warps,
            "enable_fp_fusion": True,
        }

    def in_two(self, pooled: bool) -> bool:
        """Whether the sweeps are two launches."""
        return self.splits > 1 or self.laps > 1 or pooled

    def concluding(self, p: int, c: int, pooled: bool) -> int:
        """Features, up to a power of two, of the program that the second launch has more, see ``forward.sweep``, where
        statistics are those of one slab; 0 if there is none. Pooled, there always is, and features are not many.
        """
        return power_of_two(c) if pooled or (p == 1 and self.splits > 1 and c <= _CONCLUDING) else 0

    def places(self, p: int) -> int:
        """Blocks that a lap may be in. See ``sharing``."""
        return cdiv(p, self.positions) + (self.touched > 1)

    def parts(self, p: int) -> int:
        """Of pooled results in laps."""
        return self.places(p) * self.splits

    @property
    def flags(self) -> int:
        """Programs along positions: each says whether what it met is finite, if ``population.enter`` is to know, or
        leaves a row of gradients.
        """
        return self.programs if self.resident else self.blocks


def _rows(tile: tuple[int, int, int, int], across: bool) -> int:
    return tile[0] * (1 if across else tile[1])


def fitting(stages: int, size: int, shared: int) -> int:
    """So many stages, or as many as there is memory for: tiles loaded ahead are kept there, and sums take some, too."""
    return max(1, min(stages, 1 + shared * 3 // 4 // size))


def _known(c: int, tile: tuple[int, int, int, int], across: bool) -> int:
    piece = prod(tile[1:3]) if across else tile[3]
    return c if c % piece == 0 else 0


def _even(p: int, positions: int, pooled: bool = False) -> bool:
    """Blocks may overlap, see ``tiles.position``, but not if what is in two would count twice."""
    return p % positions == 0 or (p > positions and not pooled)


def _long(n: int, p: int, c: int) -> bool:
    return n * p * c >= 2**31


def arrange(n: int, c: int, warps: int, values: int, held: int, side: int) -> tuple[tuple[int, int, int, int], int]:
    """Extents and side of a tile with so many values for each thread, if there are as many samples.

    Of a row, a thread holds so many features, so many side by side: the fewer threads share a row, the fewer times
    sums over it go from thread to thread.
    """
    features, samples = power_of_two(c), power_of_two(n)
    held = min(held, features)
    side = min(side, held)
    rows = max(1, min(samples, warps * _LANES * held // features))
    tile = max(1, min(samples // rows, values // held)), rows, held // side, features // (held // side)
    return tile, gcd(c, side)


def arrange_across(c: int, samples: int, positions: int, side: int) -> tuple[tuple[int, int, int, int], int]:
    """Extents of a tile of so many samples, and of positions that lie side by side; and how many warps it takes.

    Each thread has up to eight features of a row, so that few threads share one, but not fewer than eight: else the
    compiler moves tiles from thread to thread. Or 16, where it has one position of each.
    """
    features = power_of_two(c)
    held = max(1, min(features // 8, 8)) if side > 1 else min(features, 16)
    rows = features // held
    return (samples, rows, held, positions), max(1, rows * positions // (side * _LANES))


def swept(
    n: int,
    p: int,
    c: int,
    tile: tuple[int, int, int, int],
    *,
    across: bool,
    masked: bool,
    side: int,
    warps: int,
    splits: int,
    stages: int = 1,
    laps: int = 1,
    pooled: bool = False,
) -> Launch:
    """A launch that sweeps over slabs in such tiles, in up to so many runs of samples."""
    samples, positions = _rows(tile, across), tile[-1] if across else 1
    run = cdiv(cdiv(n, splits), samples) * samples  # whole tiles
    stages = 1 if run == samples else stages  # no tile comes after
    blocks, apart = _blocks(p, positions, laps)
    even = not masked and n % samples == 0 and (apart or _even(laps * p, positions, pooled and laps == 1))
    return Launch(
        tile, across, side, _long(n, p, c), even, _known(c // laps, tile, across), warps, blocks,
        splits=cdiv(n, run), run=run, stages=stages, early=n * p * c <= _EARLY, laps=laps,
        touched=1 if laps == 1 or apart else 1 + cdiv(positions - 1, p),
    )  # fmt: skip


def training(
    n: int,
    p: int,
    c: int,
    *,
    backward: bool,
    itemsize: int,
    across: bool,
    masked: bool,
    pooled: bool,
    processors: int,
    shared: int,
    alone: bool = True,
) -> Launch:
    """The heuristic for training.

    Args:
        n: Samples.
        p: Positions.
        c: Features.
        backward: Two tensors are read, and three sums kept for each column.
        itemsize: Bytes of a value.
        across: Positions, not features, lie side by side in memory.
        masked: Some entries are hidden.
        pooled: Statistics are those of all positions together.
        processors: Multiprocessors of the device.
        shared: Bytes of shared memory a program may have.
        alone: Statistics are those of this process alone; else other ranks have to be asked between two sweeps.
    """
    features, slab = power_of_two(c), power_of_two(c) * power_of_two(n)
    size = (2 if backward else 1) * itemsize  # of what is loaded for each value

    few = p <= 2 * processors
    half = backward if itemsize == 4 else features > 128  # two tensors in float32; wide rows, which are swept over well
    whole = _RESIDENT // 2 if half else _RESIDENT
    if alone and across and not (masked or pooled) and slab * _BLOCK <= whole // 4 and p <= 2 * processors * _BLOCK:
        # (25, 256, 6) takes 3 us so, 8 if swept over in two launches; with 32 positions for each program 7.
        tile, blocks = (power_of_two(n), 1, features, _BLOCK), cdiv(p, _BLOCK)
        even, known = power_of_two(n) == n and p % _BLOCK == 0, _known(c, tile, across)
        warps = max(1, slab * _BLOCK // 512)
        return Launch(tile, across, 1, _long(n, p, c), even, known, warps, blocks, True, blocks)
    if alone and not (masked or pooled or across) and slab <= whole and (features <= 128 or (c == 256 and not few)):
        # Few warps that each do much: warps of a program wait for each other, and what is done for columns is done for
        # each warp. (128, 3136, 64) takes 1.3 times a copy with 64 values for each thread, 1.7 with 32. Backward, where
        # registers are short, two tensors of 32 values each: (32, 3136, 128) takes 1.4 times an addition so, 1.8 with
        # 64; but 64 of few bits and features: (128, 3136, 64) takes 1.3 so, 1.7 with 32. (32, 784, 256) takes 1.3 times
        # a copy in float32 if held, 1.4 swept over; backward 1.3 and 1.8. Few small slabs, (25, 1, 120) backward in
        # float32: 1.8 times an addition with 16 values for each thread, 2.2 with 32.
        short = itemsize == 2 and features <= 64 and slab >= 8192  # (128, 3136, 64) takes 1.39 so, else 1.44
        light = not short and (backward or (few and slab < 8192))
        each = 512 if backward and few and slab < 8192 else 1024 if light else 2048
        warps = max(1, slab // each)
        held, side = (8, 8) if short else (4 if backward else max(4, min(8, features // 16)), 4)
        tile, side = arrange(n, c, warps, slab, held, side)
        even, known = power_of_two(n) == n, _known(c, tile, across)
        programs = min(p, processors * max(1, 8 // warps))
        # (256, 3136, 64) takes 1.46 with three blocks ahead, 1.50 with two, but (128, 3136, 64) 1.42 and 1.39.
        stages = 1 if few else fitting(4 if short and slab > 8192 else 3, size * slab, shared)
        return Launch(tile, across, side, _long(n, p, c), even, known, warps, p, True, programs, stages=stages)

    if across:
        # 64 positions for each program, no more programs than run at a time, and two tiles under way beside the one
        # worked on: (128, 3136, 64) takes 2.1 times a copy so, 2.4 with none, 2.6 with 32 positions. Each program
        # leaves partial results as large as a slab, so of smaller inputs there are half as many. But not backward in
        # bfloat16, nor in laps, whose slabs are half as large. Two samples at a time, where registers are not short:
        # (64, 784, 256) takes 2.8 so, backward 2.6 times an addition, with one 3.4 and 3.1. Of large inputs in bfloat16
        # more is under way: (32, 12544, 64) takes 1.9 with tiles of one sample, five of them ahead, 2.1 with two and
        # two, but (128, 3136, 64) pooled 1.94 and 1.86; (64, 784, 256) takes 2.6 with four ahead, 2.8 with two.
        number = laps(p, c)
        large, light = n * p * c > 2**24, itemsize == 2 and not backward
        ahead = light and large and features == 64 and not (masked or pooled)
        two = features < 64 or (light and not ahead)
        if number > 1:
            two = c // number <= _LAP and (not backward or itemsize == 2)
        samples = 2 if two else 1
        # Inference, which measures in the same way, may have more features of fewer positions, see ``_at_once``.
        positions, side = min(64, power_of_two(p)) if number == 1 and features > 256 else 64, gcd(number * p, 4)
        most = 2 if large or (backward and itemsize == 2) or number > 1 else 1
        tile, warps = arrange_across(c // number, min(samples, power_of_two(n)), positions, side)
        blocks = _blocks(p, positions, number)[0]
        stages = 4 if most == 1 and itemsize == 4 else 3
        splits = max(1, most * processors // blocks)
        scarce = blocks < processors // 4
        if scarce and number == 1:  # two samples for each at least: (128, 64, 64) takes 11.5 us, else 12.5
            splits = min(splits, cdiv(n, 2))
        elif scarce and n * p * c < 2**22:  # (128, 64, 256) takes 17 us so, else 19, and backward 18 and 25
            splits = processors // blocks
        if ahead:
            stages = 6
        elif light and number > 1 and n * p * c > 2**23:
            stages = 5
        stages = 1 if masked else fitting(stages, 2 * size * prod(tile), shared)
        return swept(
            n, p, c, tile, across=True, masked=masked, side=side, warps=warps, splits=splits, stages=stages,
            laps=number, pooled=pooled,
        )  # fmt: skip

    if p == 1:
        return _one_slab(
            n, c, backward=backward, itemsize=itemsize, masked=masked, processors=processors, shared=shared
        )

    # A row within a warp, or two or four: (32, 512, 1024) takes 1.6 times a copy with 16 features for each thread and
    # two rows at a time, 2.1 with 32. What matters most is that enough is under way: with no tile ahead it takes 2.5,
    # with two 2.1, with three 1.9.
    held = min(32 if features > 2048 else 16, max(8, features // 32))
    splits, stages = 1, 4
    # (256, 197, 768) takes 1.6 in four runs of samples in float32, 2.5 in one.
    split = p < processors or slab > 2**17
    in_warp = 512 < features <= 1024 and features != c and not backward
    held = 32 if in_warp else _whole(c, held)  # (256, 197, 768) takes 1.8 so, 2.0 with two warps for a row
    # Of few bits 16 bytes at a time, if pieces are whole then, too.
    short = itemsize == 2 and (backward or in_warp) and features > 512 and c % (8 * features // held) == 0
    side, least = 8 if short else 4, 1 if in_warp and not short else 2
    warps = max(least, features // (32 * held))
    if features <= 128:
        warps, values, stages = (2, 32, 3) if itemsize == 2 else (4, 16, 3)
    elif features <= 256:
        values = 16 if backward and itemsize == 2 else 32
        warps = 4 if backward and itemsize == 4 else warps
    elif c == 512 and few and not backward:  # (32, 196, 512) takes 2.3 so, 2.6 with two warps
        held, warps, values, stages = 8, 4, 32, 3
    elif c == 1024 and not (backward or split):  # (32, 512, 1024) takes 1.73 so, 1.78 with half the values
        values, stages = (64, 3) if itemsize == 2 else (32, 5)
    elif backward and features == 1024 and itemsize == 4 and not split:
        warps, values, stages = 4, 32, 6  # (32, 512, 1024) takes 1.6 so, 1.7 with half of all
    else:
        values = max(held, 32 if features <= (512 if backward else 1024) else 16)
    if split:
        if features > 1024 and not backward:
            values = 32  # (128, 49, 2048) takes 2.1 so, 2.4 with one row at a time
        elif features > 512:
            values = held
        # Each program leaves partial results. If slabs are few, so are programs: (256, 49, 512) takes 1.8 times a copy
        # with two for each multiprocessor in float32, 2.2 with six. But (256, 100, 768) takes 1.8 with six, 2.4 with
        # two. And each has some rows: (64, 16, 1024) takes 2.3 times an addition with four or more, 3.7 with two.
        many = n * p * c > 2**23 and (features == 1024 or (itemsize == 2 and features <= 256))
        most = 6 if features <= 1024 and (many or p >= processors) else 2
        if backward:
            stages = 5 if features > 1024 else 3 if itemsize == 4 else 4
            filled = processors // p * p >= 0.7 * processors
            if (1024 if itemsize == 4 else 2048) < features <= 4096 and filled:
                most = 1  # (128, 49, 2048) takes 1.7 times an addition so in float32, else 1.8
        some = n // (8 if features > 1024 else 4 if backward else 1)
        splits = max(1, min(most * processors // p, max(some, processors // p), n))
    tile, side = arrange(n, c, warps, values, held, side)
    stages = 1 if masked else fitting(stages, size * prod(tile), shared)
    return swept(n, p, c, tile, across=False, masked=masked, side=side, warps=warps, splits=splits, stages=stages)


def _whole(c: int, held: int) -> int:
    """Features of a row for each thread, twice as many if pieces of the row are whole then, and only then.

    (32, 512, 640) takes 2.3 times a copy so, 3.0 with masks.
    """
    features = power_of_two(c)
    doubled = features >= 32 and c % (4 * features // held) and c % (2 * features // held) == 0
    return 2 * held if doubled else held


# Rows of up to so many features: warps, features and values of a thread, tiles under way, and programs for each
# multiprocessor. Each program leaves partial results as long as a row: few programs where rows are long. For most lines
# four to seven choices were measured: (401408, 1, 64) takes 1.8 times a copy with this one, 1.9 to 2.3 with others;
# (50176, 1, 256) 2.1, and 2.1 to 2.5; (16384, 1, 1024) 2.0, and 2.0 to 2.3.
_ROWS = {
    (False, 4): [
        (128, 4, 8, 32, 3, 3), (256, 4, 8, 32, 4, 3), (512, 2, 16, 32, 5, 2), (1024, 4, 16, 32, 5, 2),
        (2048, 4, 16, 32, 4, 2), (FEATURES, 4, 32, 32, 5, 1),
    ],
    (False, 2): [
        (128, 4, 8, 32, 4, 3), (256, 4, 8, 32, 4, 3), (512, 4, 16, 32, 4, 2), (1024, 4, 16, 32, 5, 2),
        (2048, 4, 16, 32, 4, 2), (FEATURES, 4, 32, 32, 5, 2),
    ],
    (True, 4): [
        (128, 2, 8, 16, 4, 8), (256, 4, 8, 16, 3, 3), (512, 2, 16, 32, 5, 2), (1024, 2, 16, 16, 4, 4),
        (2048, 4, 16, 16, 5, 2), (4096, 8, 16, 16, 5, 1), (FEATURES, 4, 32, 32, 4, 1),
    ],
    (True, 2): [
        (128, 4, 8, 16, 4, 3), (256, 2, 8, 16, 4, 4), (512, 2, 16, 16, 3, 2), (1024, 2, 16, 16, 4, 4),
        (2048, 4, 16, 16, 5, 2), (4096, 8, 16, 16, 5, 1), (FEATURES, 4, 32, 32, 4, 1),
    ],
}  # fmt: skip


def _one_slab(n: int, c: int, *, backward: bool, itemsize: int, masked: bool, processors: int, shared: int) -> Launch:
    """Samples of one position, which all programs share: a dense input, or statistics of all positions together."""
    features = power_of_two(c)
    warps, held, values, stages, most = next(rest for up_to, *rest in _ROWS[backward, itemsize] if features <= up_to)
    ragged = features > 512 and features != c and not backward
    held = _whole(c, 32 if ragged else held)
    if n * features < 2**18:
        warps = 2  # small tiles, so that there are some programs
    warps = max(warps, features // (32 * held))
    if ragged:  # with rows of 768, 2.2 times a copy, else 2.5
        warps = min(32, max(4, 2 * features // (32 * held)))
    # Of few bits 16 bytes at a time, if pieces are whole then, too: backward (4096, 1, 4096) takes 2.1 so, 2.3 with 8.
    # But not (200704, 1, 128), which takes 1.9 with four values, 3.4 with eight: the compiler would load tiles twice.
    short = itemsize == 2 and (features <= 64 or (backward and features > 512)) and c % (8 * features // held) == 0
    tile, side = arrange(n, c, warps, values, held, 8 if short else 4)
    stages = 1 if masked else fitting(stages, (2 if backward else 1) * itemsize * prod(tile), shared)
    splits = min(most * processors, max(processors, n // 16))
    chosen = swept(n, 1, c, tile, across=False, masked=masked, side=side, warps=warps, splits=splits, stages=stages)
    # In float32 (802816, 1, 64) takes 1.69 times a copy so, 1.75 in runs, (6272, 1, 2048) 1.67 and 1.76; backward,
    # (4096, 1, 4096) takes 1.76 times an addition, and 1.81. With more positions runs are as fast or faster.
    return replace(chosen, strided=True)


@lru_cache(maxsize=4096)
def inference(
    n: int, p: int, c: int, *, itemsize: int, across: bool, masked: bool, pooled: bool, processors: int, shared: int
) -> Launch:
    """The heuristic for inference. A tile is the same for any n, so that a row is summed in the same order."""
    features = power_of_two(c)
    if across and not _at_once(p, c):  # in laps, as in training
        number, positions = laps(p, c), 64
        side = gcd(number * p, 4)
        tile, warps = arrange_across(c // number, 2 if c // number <= _LAP else 1, positions, side)
        splits = max(1, 2 * processors // _blocks(p, positions, number)[0])
        stages = 1 if masked else fitting(3 if itemsize == 4 else 5, 2 * itemsize * prod(tile), shared)
        chosen = swept(
            n, p, c, tile, across=True, masked=masked, side=side, warps=warps, splits=splits, stages=stages, laps=number
        )
        return replace(chosen, turned=True)
    if across:
        # Where the statistics of columns lie as the input does, which takes another launch, and where as many programs
        # as run at a time have two tiles under way beside the one they work on, (128, 3136, 64) takes 1.3 times a copy,
        # else 1.7: of loads that disagree on which threads hold what, the compiler would follow the wrong ones. Pooled
        # statistics are the same at all positions, and those of a tile have to fill a warp then: (64, 784, 128) takes
        # 1.6 with 64 positions, 2.8 with 32.
        swapped, turned = False, p * c >= 2**14
        wide = (features <= 64 and p >= 1024) or (pooled and turned)
        side, positions = (4, 64) if wide else (4 if turned else 8 // itemsize, 32)
        positions = min(positions, power_of_two(p))  # (256, 16, 256) takes 2.0 with 16 of them, 18 with 32
        most = 1 if features * positions >= 8192 else 3 if itemsize == 2 else 2
        tile, warps = arrange_across(c, 1 if turned else 2, positions, gcd(p, side))
        side, stages = gcd(p, side), fitting(3, most * itemsize * prod(tile), shared) if turned and not masked else 1
    else:
        turned = False
        # What matters is that enough is under way: (4096, 1, 4096) in float32 takes 1.1 times a copy with two tiles
        # ahead, 1.3 with none. And that few programs read the statistics of columns, which are longer than rows.
        warps = 2 if features <= 1024 else max(4, features // 1024)
        held = max(8, min(32 if features > 2048 else 16, features // 32))
        values, stages = max(held, 32 if features == 1024 else 16), 4 if itemsize == 2 else 3
        # Columns stay with their threads where the rows of a tile are positions: (32, 12544, 64) takes 1.1 times a copy
        # so, else 1.3. But not if more programs are begun than run at a time: with eight for each multiprocessor 1.3.
        rows = max(1, 4 * _LANES * held // features)
        swapped = p >= 128 and p % rows == 0 and features <= (1024 if itemsize == 2 else 64)
        most = 5 if features == 512 else 6
        if swapped:
            warps, values = 4, held
        short = itemsize == 2 and features >= 1024 and c % (8 * features // held) == 0
        side = gcd(c, 8 if short else 4)  # (4096, 1, 4096) takes 1.2 with eight, 1.4 with four
        tile, side = arrange(2**15, c, warps, values, held, side)
        stages = 1 if masked else fitting(stages, prod(tile) * itemsize, shared)
    rows = _rows(tile, across)
    samples, positions = (1, rows) if swapped else (rows, tile[-1] if across else 1)
    blocks, tiles = cdiv(p, positions), cdiv(n, samples)
    if swapped or turned:
        splits = max(1, most * processors // blocks)
    else:
        programs = max(1, 16 // warps) if across else 32 // warps
        programs = 4 if itemsize == 2 and features > 1024 else 8 if features == 512 else programs
        splits = cdiv(tiles, max(1, min(16, tiles * blocks // (programs * processors))))
    run = samples * cdiv(tiles, splits)
    even = not masked and n % samples == 0 and _even(p, positions)
    return Launch(
        tile, across, side, _long(n, p, c), even, _known(c, tile, across), warps, blocks, splits=cdiv(n, run), run=run,
        swapped=swapped, turned=turned, stages=stages,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def shares(n: int, p: int, c: int, *, itemsize: int, processors: int, shared: int) -> Launch:
    """For what laps have of rows, at inference. Their features are within a warp, so that warps do not wait for each
    other: (64, 784, 512) takes 2.3 times a copy so in all, 2.9 in the tiles of training.
    """
    number = laps(p, c)
    features = power_of_two(c // number)
    rows, positions = (2, 64) if features <= _LAP else (4, 32)
    most = 16 if itemsize == 2 and n * p * c > 2**23 else 8
    tile = 1, rows, features // rows, positions
    splits = max(1, most * processors // _blocks(p, positions, number)[0])
    chosen = swept(n, p, c, tile, across=True, masked=False, side=4, warps=1, splits=splits, laps=number)
    # Stages are the same for any n: which threads have what, and in which order they add, follows from them.
    # (32, 196, 512) takes 2.9 with four, 3.7 with three, in bfloat16.
    return replace(chosen, stages=fitting(4 if itemsize == 2 else 3, 8 * itemsize * prod(tile), shared))
