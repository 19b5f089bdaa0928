"""Launch choices: how slabs are held or swept over, in what tiles, by how many warps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

_RESIDENT = 16384  # values of a slab that registers hold; half of it in backward, which has two tensors and more sums
_SHARE = 96 * 1024  # bytes of a slab for one program, where several share it
_SHARERS = 16  # programs that may wait for each other: few enough to run at the same time whatever else runs


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Launch:
    """How to go through ``x[n, p, c]``.

    Attributes:
        samples, positions, features: The tile; all features are in it.
        even: Tiles cover the input exactly.
        warps: For each program.
        resident: Whole slabs are held in registers.
        blocks: Tiles along positions.
        programs: Of a resident grid, which goes from block to block.
        stages: Blocks a resident grid loads ahead.
        splits: Runs the samples of a block are split into, where it is swept over.
        run: Samples of each.
        together: The programs that share a block wait for each other between the sweeps. Otherwise, if there are
            several, the sweeps are two launches.
        fold: Column sums are added up in each iteration: each thread has the same columns of all samples of a tile.
    """

    samples: int
    positions: int
    features: int
    even: bool
    warps: int
    resident: bool
    blocks: int
    programs: int = 0
    stages: int = 1
    splits: int = 1
    run: int = 0
    together: bool = False
    fold: bool = False

    @property
    def tile(self) -> dict[str, int | bool]:
        """What every kernel is launched with. Multiplications and additions may be fused, as Triton long did."""
        tile = {"BN": self.samples, "BP": self.positions, "BC": self.features, "EVEN": self.even}
        return {**tile, "num_warps": self.warps, "enable_fp_fusion": True}

    @property
    def flags(self) -> int:
        """How many programs say whether what they met is finite."""
        return self.programs if self.resident else self.blocks


@lru_cache(maxsize=4096)
def training(
    n: int,
    p: int,
    c: int,
    *,
    backward: bool,
    itemsize: int,
    positions_last: bool,
    masked: bool,
    pooled: bool,
    processors: int,
) -> Launch:
    """The heuristic for training.

    Args:
        n: Samples.
        p: Positions.
        c: Features.
        backward: Two tensors are read, and three sums kept for each column.
        itemsize: Bytes of a value.
        positions_last: Positions, not features, lie side by side in memory.
        masked: Some entries are hidden.
        pooled: Statistics are those of all positions together.
        processors: Multiprocessors of the device.
    """
    features, all_samples = power_of_two(c), power_of_two(n)
    line = 32 // itemsize  # values in the shortest stretch that memory hands out
    positions = line if positions_last and p > 1 else 1
    limit = _RESIDENT // (2 if backward else 1) // (2 if positions > 1 else 1)
    if not (masked or pooled) and all_samples * features * positions <= limit:
        # Tiny slabs are packed, as long as all processors have some.
        while all_samples * features * positions < 1024 and cdiv(p, 2 * positions) >= 4 * processors:
            positions *= 2
        values = all_samples * features * positions
        each = 1024 if itemsize == 4 or positions_last or backward else 2048  # for a warp; more do not fit registers
        warps = max(1, min(16, values // each))
        blocks = cdiv(p, positions)
        return Launch(
            all_samples,
            positions,
            features,
            even=all_samples == n and features == c and p % positions == 0,
            warps=warps,
            resident=True,
            blocks=blocks,
            programs=min(blocks, processors * max(1, (16 if backward else 8) // warps)),
            stages=3 if values * itemsize <= 32768 else 2,
        )

    if positions_last and p > 1:
        # Runs of positions, so that neighbouring threads read neighbouring values.
        positions = max(line, min(32, power_of_two(p), 4096 // features))
        warps = max(1, min(16, positions * features // 512))
        samples = 1
    else:
        # 512 values for each warp, 1,024 of narrow rows, whose sums take fewer registers.
        warps = max(1, min(8, features // 512))
        samples = max(1, min(all_samples, (1024 if features <= 256 else 512) * warps // features))
    blocks = cdiv(p, positions)
    shares = min(cdiv(n, 2 * samples), max(1, n * c * positions * itemsize // _SHARE))
    together = not pooled and (blocks * min(shares, _SHARERS) >= 2 * processors or shares <= _SHARERS)
    splits = min(shares, _SHARERS) if together else min(cdiv(n, 2 * samples), cdiv(8 * processors, blocks))
    run = cdiv(cdiv(n, splits), samples) * samples
    splits = cdiv(n, run)
    return Launch(
        samples,
        positions,
        features,
        even=not masked and n % samples == 0 and features == c and p % positions == 0,
        warps=warps,
        resident=False,
        blocks=blocks,
        splits=splits,
        run=run,
        together=together and splits > 1,
        fold=samples == 1 or (positions == 1 and features * itemsize >= 512 * warps),
    )


@lru_cache(maxsize=4096)
def inference(n: int, p: int, c: int, *, positions_last: bool, masked: bool, processors: int) -> Launch:
    """The heuristic for inference. The rows of a tile, and so the order a row is summed in, are the same for any n."""
    features = power_of_two(c)
    warps = max(1, min(8, features // 512))
    rows = max(1, 1024 * warps // features)
    if positions_last and p > 1:
        samples, positions = 1, max(8, min(32, rows))
        warps = max(1, min(16, positions * features // 512))
    else:
        samples = min(power_of_two(n), rows)
        positions = rows // samples
    blocks = cdiv(p, positions)
    run = samples * max(1, min(8, n * blocks // (samples * 16 * processors)))
    return Launch(
        samples,
        positions,
        features,
        even=not masked and n % samples == 0 and features == c and p % positions == 0,
        warps=warps,
        resident=False,
        blocks=blocks,
        splits=cdiv(n, run),
        run=run,
    )
