"""What a launch is: how slabs are held or swept over, in what tiles, by how many warps. ``choices`` has which one.

Times in comments are those of forward kernels on an H200, in bfloat16 unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import Any, NamedTuple

FEATURES = 2**15  # at most: all of them are in a tile
LANES = 32  # threads of a warp
LAP = 32  # features of a lap, see ``laps``
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
    fits = c <= 128 if training else at_once(p, c)
    # Offsets within a tile have 32 bits: of a few samples, of more if p is small.
    return (fits or laps(p, c) > 1) and p * c < 2**26


def at_once(p: int, c: int) -> bool:
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
    least = cdiv(c, LAP)
    some = [*range(least, 2 * least + 1), *(range(least - 1, cdiv(c, 2 * LAP) - 1, -1) if c > 128 else ())]
    return next((number for number in some if number <= 64 and c % number == 0 and number * p % 4 == 0), 1)


def blocks_of(p: int, positions: int, laps: int) -> tuple[int, bool]:
    """Of so many positions; and whether each lap has blocks of its own: if those do not overlap much. Then a tile needs
    gamma and beta of as many features as it has.
    """
    own = cdiv(p, positions)
    apart = laps > 1 and p % 4 == 0 and p >= positions and own * positions <= 1.1 * p
    return laps * own if apart else cdiv(laps * p, positions), apart


class Given(NamedTuple):
    """What a launch is chosen for."""

    n: int  # samples
    p: int  # positions
    c: int  # features
    itemsize: int  # bytes of a value
    across: bool  # positions, not features, lie side by side in memory
    masked: bool  # some entries are hidden
    pooled: bool  # statistics are those of all positions together
    processors: int  # multiprocessors of the device
    shared: int  # bytes of shared memory a program may have

    @property
    def features(self) -> int:
        """Of a tile that has all of them."""
        return power_of_two(self.c)

    @property
    def slab(self) -> int:
        """Values of a tile that has a whole one."""
        return power_of_two(self.c) * power_of_two(self.n)

    @property
    def values(self) -> int:
        """Of the input."""
        return self.n * self.p * self.c

    @property
    def long(self) -> bool:
        """Whether 32 bits do not count all values, nor rows and as many as all programs step on by."""
        return self.values >= 2**31 - 2**24

    @property
    def few(self) -> bool:
        """Whether there are few slabs, two for each multiprocessor at most."""
        return self.p <= 2 * self.processors


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
        return 1 if self.swapped else rows_of(self.tile, self.across)

    @property
    def width(self) -> int:
        """Features of a tile."""
        return self.tile[2] * self.tile[1 if self.across else 3]

    @property
    def positions(self) -> int:
        """Of a tile."""
        if self.swapped:
            return rows_of(self.tile, self.across)
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


def rows_of(tile: tuple[int, int, int, int], across: bool) -> int:
    """Samples of a tile, or the positions it has in their place."""
    return tile[0] * (1 if across else tile[1])


def fitting(stages: int, size: int, shared: int, programs: int = 1) -> int:
    """So many stages, or as many as there is memory for: tiles loaded ahead are kept there, and sums take some, too.

    Args:
        stages: Those wanted.
        size: Bytes of a tile.
        shared: Bytes there are.
        programs: That are to share them on a multiprocessor.
    """
    return max(1, min(stages, 1 + shared * 3 // 4 // (size * programs)))


def known(c: int, tile: tuple[int, int, int, int], across: bool) -> int:
    """See ``Launch.features``."""
    piece = prod(tile[1:3]) if across else tile[3]
    return c if c % piece == 0 else 0


def even_positions(p: int, positions: int, pooled: bool = False) -> bool:
    """Blocks may overlap, see ``tiles.position``, but not if what is in two would count twice."""
    return p % positions == 0 or (p > positions and not pooled)


def arrange(n: int, c: int, warps: int, values: int, held: int, side: int) -> tuple[tuple[int, int, int, int], int]:
    """Extents and side of a tile with so many values for each thread, if there are as many samples.

    Of a row, a thread holds so many features, so many side by side: the fewer threads share a row, the fewer times
    sums over it go from thread to thread.
    """
    features, samples = power_of_two(c), power_of_two(n)
    held = min(held, features)
    side = min(side, held)
    rows = max(1, min(samples, warps * LANES * held // features))
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
    return (samples, rows, held, positions), max(1, rows * positions // (side * LANES))


def swept(
    given: Given,
    tile: tuple[int, int, int, int],
    *,
    side: int,
    warps: int,
    splits: int,
    stages: int = 1,
    laps: int = 1,
) -> Launch:
    """A launch that sweeps over slabs in such tiles, in up to so many runs of samples."""
    n, p, c = given[:3]
    across = given.across
    samples, positions = rows_of(tile, across), tile[-1] if across else 1
    run = cdiv(cdiv(n, splits), samples) * samples  # whole tiles
    stages = 1 if run == samples else stages  # no tile comes after
    blocks, apart = blocks_of(p, positions, laps)
    whole = apart or even_positions(laps * p, positions, given.pooled and laps == 1)
    even = not given.masked and n % samples == 0 and whole
    return Launch(
        tile, across, side, given.long, even, known(c // laps, tile, across), warps, blocks, splits=cdiv(n, run),
        run=run, stages=stages, early=given.values <= _EARLY, laps=laps,
        touched=1 if laps == 1 or apart else 1 + cdiv(positions - 1, p),
    )  # fmt: skip
