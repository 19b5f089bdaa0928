"""Launch choices: how slabs are held or swept over, in what tiles, by how many warps.

Times in comments are those of forward kernels on an H200, in bfloat16 unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, prod
from typing import Any

_ACROSS = 128  # features at most where positions lie side by side: threads hold some of each, and sums of them
_RESIDENT = 16384  # values of a slab that registers hold; of two tensors in float32, half of it
_LANES = 32  # threads of a warp, along positions where these lie side by side


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def across(p: int, c: int) -> bool:
    """Whether the kernels take ``p`` positions side by side; else they want a copy with features last."""
    return c <= _ACROSS and p * c < 2**26  # offsets within a tile of up to 32 samples have 32 bits


@dataclass(frozen=True)
class Launch:
    """How to go through ``x[n, p, c]``.

    Attributes:
        tile: Extents of a tile, as ``tiles`` arranges them; all features are in it.
        across: Positions, not features, lie side by side in memory.
        side: Values a thread reads side by side.
        long: There are so many values that 32 bits do not count them.
        even: Tiles cover the input exactly.
        warps: For each program.
        blocks: Tiles along positions.
        resident: Whole slabs are held in registers.
        programs: Of a resident grid, which goes from block to block.
        stages: Tiles a program has under way, the next ones being loaded while it works on one.
        splits: Runs the samples of a block are split into, where it is swept over. Where there are several, the sweeps
            are two launches.
        run: Samples of each.
        swapped: The rows of a tile are positions, not samples.
    """

    tile: tuple[int, int, int, int]
    across: bool
    side: int
    long: bool
    even: bool
    warps: int
    blocks: int
    resident: bool = False
    programs: int = 0
    stages: int = 1
    splits: int = 1
    run: int = 0
    swapped: bool = False

    @property
    def samples(self) -> int:
        """Of a tile."""
        return 1 if self.swapped else _rows(self.tile, self.across)

    @property
    def positions(self) -> int:
        """Of a tile."""
        if self.swapped:
            return _rows(self.tile, self.across)
        return self.tile[-1] if self.across else 1

    @cached_property
    def constants(self) -> dict[str, Any]:
        """What every kernel is launched with. Multiplications and additions may be fused, as Triton long did."""
        shape = {"TILE": self.tile, "BN": self.samples, "BP": self.positions, "ACROSS": self.across, "SIDE": self.side}
        return {
            **shape,
            "LONG": self.long,
            "EVEN": self.even,
            "STAGES": self.stages,
            "num_warps": self.warps,
            "enable_fp_fusion": True,
        }

    @property
    def flags(self) -> int:
        """Programs along positions: each says whether what it met is finite, or leaves a row of gradients."""
        return self.programs if self.resident else self.blocks


def _rows(tile: tuple[int, int, int, int], across: bool) -> int:
    return tile[0] * (1 if across else tile[1])


def fitting(stages: int, size: int, shared: int) -> int:
    """So many stages, or as many as there is memory for: tiles loaded ahead are kept there, and sums take some, too."""
    return max(1, min(stages, 1 + shared * 3 // 4 // size))


def _long(n: int, p: int, c: int) -> bool:
    return n * p * c >= 2**31


def arrange(
    n: int, c: int, across: bool, warps: int, values: int, held: int, side: int
) -> tuple[tuple[int, int, int, int], int]:
    """Extents and side of a tile with so many values for each thread, if there are as many samples.

    Of a row, a thread holds so many features, so many side by side: the fewer threads share a row, the fewer times
    sums over it go from thread to thread.
    """
    features, samples = power_of_two(c), power_of_two(n)
    if across:
        return (max(1, min(samples, 32, values * warps // (features * side))), features, 1, _LANES * side), side
    held = min(held, features)
    side = min(side, held)
    rows = max(1, min(samples, warps * 32 * held // features))
    tile = max(1, min(samples // rows, values // held)), rows, held // side, features // (held // side)
    return tile, gcd(c, side)


def swept(
    n: int,
    p: int,
    c: int,
    *,
    across: bool,
    masked: bool,
    warps: int,
    values: int,
    held: int,
    side: int,
    splits: int,
    stages: int = 1,
) -> Launch:
    """A launch that sweeps over slabs, in up to so many runs of samples."""
    tile, side = arrange(n, c, across, warps, values, held, side)
    samples, positions = _rows(tile, across), tile[-1] if across else 1
    run = cdiv(cdiv(n, splits), samples) * samples  # whole tiles
    even = not masked and n % samples == 0 and power_of_two(c) == c and p % positions == 0
    blocks = cdiv(p, positions)
    return Launch(tile, across, side, _long(n, p, c), even, warps, blocks, splits=cdiv(n, run), run=run, stages=stages)


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

    whole = _RESIDENT // (2 if backward and itemsize == 4 else 1)
    if alone and not (masked or pooled or across) and features <= 128 and slab <= whole:
        # Few warps that each do much: warps of a program wait for each other, and what is done for columns is done for
        # each warp. (128, 3136, 64) takes 1.4 times a copy with 64 values for each thread, 2.3 with 32; backward 1.5
        # and 2.2 times an addition. Of two tensors in float32, registers hold 32 each; small slabs are done best so.
        # Sixteen threads for a row, but where registers are short eight: (256, 3136, 64) takes 1.5 so, else 2.0.
        few = p <= 2 * processors
        warps = max(1, slab // (1024 if backward and (slab < 8192 or (itemsize == 4 and not few)) else 2048))
        short = itemsize == 2 and features <= 64 and slab >= (8192 if backward else 16384)
        held, side = (8, 8) if short else (max(4, features // 16), 4)
        tile, side = arrange(n, c, across, warps, slab, held, side)
        even = power_of_two(n) == n and features == c
        programs = min(p, processors * max(1, 8 // warps))
        stages = 1 if few else fitting(3, size * slab, shared)  # (256, 3136, 64) with one block ahead and not two: 2.2
        return Launch(tile, across, side, _long(n, p, c), even, warps, p, True, programs, stages=stages)

    if across:
        # Two positions for each thread where they are even in number: (128, 3136, 64) takes 1.9 times a copy so, 2.2
        # with one. No more programs than run at a time: 294 of them, with room for 264, take 2.8.
        small = n * features <= 512
        side = 1 if small else gcd(p, 2)
        warps, values = max(1, min(8, features // 16)), 32 if backward else 32 * side
        if backward and itemsize == 4 and not small:
            warps = min(8, 2 * warps)
        splits = max(1, 2 * processors // cdiv(p, _LANES * side))
        return swept(n, p, c, across=True, masked=masked, warps=warps, values=values, held=1, side=side, splits=splits)

    # A row within a warp, or two or four: (32, 512, 1024) takes 1.6 times a copy with 16 features for each thread and
    # two rows at a time, 2.1 with 32. What matters most is that enough is under way: with no tile ahead it takes 2.5,
    # with two 2.1, with three 1.9.
    held = min(32 if p == 1 or features > 2048 else 16, max(8, features // 32))
    warps, splits, stages = max(2, features // (32 * held)), 1, 4
    if features <= 128:
        many = not backward if p == 1 else itemsize == 2
        warps, values, stages = (2, 32, 3) if many else (4, 16, 3)
    elif features <= 256:
        values = 16 if backward else 32
    else:
        values = max(held, 32 if features <= (512 if backward else 1024) else 16)
    if p == 1:  # partial results are as long as rows: few of them where rows are few
        if features <= 256:
            stages, most = (1, 4 if backward else 8) if features <= 128 else (3, 4)
        else:
            stages, most = (5, 2) if features <= 1024 else (4, 1 if backward and features > 2048 else 2)
        if features > 512 and features != c and not backward:  # with rows of 768, 2.8 times a copy, else 3.4
            warps = min(32, 2 * warps)
        splits = min(most * processors, max(processors, n // 16))
    elif p < processors or slab > 2**17:  # (256, 197, 768) takes 2.4 in four runs of samples, one row at a time
        values = held if features > 512 else values
        splits = max(1, (6 if warps == 2 else 2) * processors // p)
    stages = 1 if masked else fitting(stages, size * values * warps * 32, shared)
    return swept(
        n, p, c, across=False, masked=masked, warps=warps, values=values, held=held, side=4, splits=splits,
        stages=stages,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def inference(
    n: int, p: int, c: int, *, itemsize: int, across: bool, masked: bool, processors: int, shared: int
) -> Launch:
    """The heuristic for inference. Rows are summed in the same order for any n."""
    features = power_of_two(c)
    held = max(4, min(32 if features > 2048 else 16, features // 32))
    if across:
        side, stages = gcd(p, 4 // itemsize), 1
        warps, values = max(1, min(8, features // 16)), 32 * side
    else:  # (4096, 1, 4096) takes 1.1 times a copy in float32 with two tiles ahead, 1.3 with none
        warps = 2 if features <= 1024 else 4 if features <= 4096 else 8
        side, values, stages = 4, max(16, held), 3
    swapped = not across and n < 8
    least = max(16, warps * 128 // features)  # rows enough that each thread has some, or it would have less of each
    tile, side = arrange(max(p if swapped else n, least), c, across, warps, values, held, side)
    stages = 1 if masked else fitting(stages, prod(tile) * itemsize, shared)
    rows = _rows(tile, across)
    samples, positions = (1, rows) if swapped else (rows, tile[-1] if across else 1)
    blocks = cdiv(p, positions)
    run = samples * max(1, min(16, n * blocks // (samples * 32 // warps * processors)))
    even = not (masked or swapped) and n % samples == 0 and features == c and p % positions == 0
    return Launch(
        tile, across, side, _long(n, p, c), even, warps, blocks, splits=cdiv(n, run), run=run, swapped=swapped,
        stages=stages,
    )  # fmt: skip
