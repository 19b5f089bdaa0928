"""Launch choices: how slabs are held or swept over, in what tiles, by how many warps.

Times in comments are those of forward kernels on an H200, in bfloat16 unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from . import tiles

_ACROSS = 128  # features at most where positions lie side by side: threads hold some of each, and sums of them
_RESIDENT = 16384  # values of a slab that registers hold; in backward, half of it
_LANES = 32  # positions of a tile where they lie side by side: a warp's threads


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
        kind: The arrangement of a tile, one of ``tiles``.
        tile: Its extents; all features are in it.
        side: Values a thread reads side by side, where features lie last.
        even: Tiles cover the input exactly.
        warps: For each program.
        blocks: Tiles along positions.
        resident: Whole slabs are held in registers.
        programs: Of a resident grid, which goes from block to block.
        stages: Blocks a resident grid has under way, the next ones being loaded while it works on one.
        splits: Runs the samples of a block are split into, where it is swept over. Where there are several, the sweeps
            are two launches.
        run: Samples of each.
        swapped: The rows of a tile are positions, not samples.
    """

    kind: int
    tile: tuple[int, int, int]
    side: int
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
        return 1 if self.swapped else _rows(self.kind, self.tile)

    @property
    def positions(self) -> int:
        """Of a tile."""
        if self.swapped:
            return _rows(self.kind, self.tile)
        return self.tile[2] if self.kind == tiles.ACROSS else 1

    @cached_property
    def constants(self) -> dict[str, int | bool]:
        """What every kernel is launched with. Multiplications and additions may be fused, as Triton long did."""
        a, b, last = self.tile
        shape = {"A": a, "B": b, "L": last, "BN": self.samples, "BP": self.positions, "KIND": self.kind}
        return {**shape, "SIDE": self.side, "EVEN": self.even, "num_warps": self.warps, "enable_fp_fusion": True}

    @property
    def flags(self) -> int:
        """Programs along positions: each says whether what it met is finite, or leaves a row of gradients."""
        return self.programs if self.resident else self.blocks


def _rows(kind: int, tile: tuple[int, int, int]) -> int:
    return {tiles.NARROW.value: tile[0] * tile[1], tiles.WIDE.value: tile[1], tiles.ACROSS.value: tile[0]}[kind]


def arrange(
    n: int, c: int, itemsize: int, across: bool, warps: int, values: int, once: bool = False
) -> tuple[int, tuple[int, int, int], int]:
    """Kind, extents and side of a tile with so many values for each thread, if there are as many samples.

    ``once`` says that columns are loaded once and not for each tile.
    """
    features, samples = power_of_two(c), power_of_two(n)
    if across:
        return tiles.ACROSS.value, (max(1, min(samples, values * warps // features)), features, _LANES), 1
    side = 8 if itemsize == 2 and (once or features < 32 * warps) else 4
    if features <= 32 * side:
        rows = min(samples, warps * 32 * side // features)
        tile = max(1, min(samples // rows, values // side)), rows, features
        return tiles.NARROW.value, tile, side if c % side == 0 else 1
    side = 4
    pieces = max(1, min(values // side, features // (32 * side)))
    row = features // pieces
    rows = warps * 32 * side // row * max(1, values // (pieces * side))
    return tiles.WIDE.value, (pieces, max(1, min(samples, rows)), row), side if c % side == 0 else 1


def swept(
    n: int, p: int, c: int, *, itemsize: int, across: bool, masked: bool, warps: int, values: int, splits: int
) -> Launch:
    """A launch that sweeps over slabs, in up to so many runs of samples."""
    kind, tile, side = arrange(n, c, itemsize, across, warps, values)
    samples, positions = _rows(kind, tile), tile[2] if across else 1
    run = cdiv(cdiv(n, splits), samples) * samples  # whole tiles
    even = not masked and n % samples == 0 and power_of_two(c) == c and p % positions == 0
    return Launch(kind, tile, side, even, warps, cdiv(p, positions), splits=cdiv(n, run), run=run)


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
    features, samples = power_of_two(c), power_of_two(n)
    slab = features * samples
    held = alone and not (masked or pooled or across) and features <= 128
    if held and slab <= (_RESIDENT // 2 if backward else _RESIDENT):
        # Few warps that each do much: warps of a program wait for each other. 64 values for each thread, in backward
        # 32, are as many as registers hold. (128, 3136, 64) in float32 takes 1.31 times a copy so, 1.54 with half as
        # many values; in bfloat16 1.66 with the next blocks loaded meanwhile, 2.2 without.
        warps = max(1, slab // (1024 if backward or (itemsize == 4 and slab <= 2048) else 2048))
        if features == 128 and slab == 8192 and p <= 2 * processors:  # (64, 80, 128) in backward: 2.3, with 8 warps 2.6
            warps = 4
        kind, tile, side = arrange(n, c, itemsize, across, warps, slab, once=not backward)
        even = samples == n and features == c
        programs = min(p, processors * max(1, (16 if backward and warps < 8 else 8) // warps))
        size = (2 if backward else 1) * slab * itemsize  # of what a stage loads; sums take some of the memory, too
        stages = 1 if p <= 2 * processors else max(1, min(3, 1 + shared * 3 // 4 // size))
        return Launch(kind, tile, side, even, warps, p, True, programs, stages=stages)

    blocks = cdiv(p, _LANES) if across else p
    # More than two programs for a processor only make more partial results: (256, 3136, 64) with positions side by side
    # takes 3.0 times a copy in 2 runs of samples, 3.7 in 6; (256, 197, 768) 2.7 in 2, 3.0 in 3, and 3.3 in one.
    if across:
        warps, values = max(1, min(8, features // 16)), 16 if backward else 32
        splits = 1 if blocks >= 2 * processors else cdiv(2 * processors, blocks)
    else:
        splits = 1 if blocks >= processors and slab <= 2**17 else cdiv(2 * processors, blocks)
        # Rows of up to 512 features within a warp, longer ones within a few: (32, 196, 512) takes 2.6 times a copy with
        # 2 warps, 3.4 with 4. (32, 512, 1024) in float32 takes 1.8 within a warp, 2.0 within two; but (256, 197, 768),
        # where programs share slabs, 2.1 and 1.9.
        within = features <= 512 or (features <= 1024 and splits == 1)
        warps = 2 if features > 128 and within else 4
        values = 32 if within and not backward else 16
        if backward and features == 256 and itemsize == 4:  # (64, 784, 256) takes 1.85 times an addition, else 2.0
            warps = 4
        if backward and features > 512:
            # One row at a time: (256, 197, 768) in float32 takes 2.0 times an addition so, 2.4 with two.
            warps, values = min(8, features // 256), 8 if features <= 2048 else 16
            splits = splits if splits == 1 else cdiv(16 // warps * processors, blocks)
        if p == 1:  # partial results are as long as rows: few of them where rows are few
            warps = 4 if features <= 1024 else 8
            splits = min(8 * processors, max(processors, n // (32 if features <= 512 else 16)))
            if features > 1024:  # (4096, 1, 4096) in float32 takes 1.96 times a copy in 256 runs, 2.24 in 128
                splits = min(2 * processors, max(processors, n // (32 if backward else 16)))
    return swept(n, p, c, itemsize=itemsize, across=across, masked=masked, warps=warps, values=values, splits=splits)


@lru_cache(maxsize=4096)
def inference(n: int, p: int, c: int, *, itemsize: int, across: bool, masked: bool, processors: int) -> Launch:
    """The heuristic for inference. Rows are summed in the same order for any n."""
    features = power_of_two(c)
    if across:
        warps, values = max(1, min(8, features // 16)), 32
    else:  # (64, 784, 256) takes 1.7 times a copy, 2.4 with 32 values for each thread
        warps, values = 2 if features <= 128 else 4 if features <= 2048 else 8, 16
    swapped = not across and n < 8
    kind, tile, side = arrange(max(p if swapped else n, 16), c, itemsize, across, warps, values)
    rows = _rows(kind, tile)
    samples, positions = (1, rows) if swapped else (rows, tile[2] if across else 1)
    blocks = cdiv(p, positions)
    run = samples * max(1, min(16, n * blocks // (samples * 8 * processors)))
    even = not masked and n % samples == 0 and features == c and p % positions == 0
    return Launch(kind, tile, side, even, warps, blocks, splits=cdiv(n, run), run=run, swapped=swapped)
