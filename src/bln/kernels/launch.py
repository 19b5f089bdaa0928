"""Launch choices: one kernel or two, in what tiles, by how many warps."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
        splits: Runs the samples are split into. 1: one program does both sweeps over its positions.
        warps: For each program.
        programs: For each multiprocessor, where the grid stays.
    """

    samples: int
    positions: int
    features: int
    splits: int
    warps: int
    programs: int

    @property
    def tile(self) -> dict[str, int]:
        """What a kernel is launched with."""
        return {"BN": self.samples, "BP": self.positions, "BC": self.features, "num_warps": self.warps}

    @classmethod
    def choose(
        cls, n: int, p: int, c: int, *, backward: bool, wide: bool, positions_last: bool, processors: int
    ) -> Launch:
        """The heuristic, from timings on an H200; where positions lie side by side it is checked but not yet timed.

        Args:
            n: Samples.
            p: Positions.
            c: Features.
            backward: Two tensors are read, and three sums kept for each column.
            wide: Values of 4 bytes.
            positions_last: Positions, not features, lie side by side in memory.
            processors: Multiprocessors of the device.
        """
        features = power_of_two(c)
        if positions_last and p > 1:
            # Runs of positions, so that neighbouring threads read neighbouring values.
            positions = max(8, min(64, power_of_two(p), 8192 // features))
            warps = max(1, min(16, positions * features // 1024))
            return cls(1, positions, features, 1, warps, programs=max(1, 16 // warps))
        # 1,024 values for each warp. More warps share longer rows, and wait for each other: at 64 features and
        # bfloat16 two take a third longer than one. In backward few warps leave registers for the sums: at 256
        # features one is 1.2 times as fast as four.
        if backward:
            warps = 1 if features <= 256 else 2 if features <= 1024 else 4
        else:
            warps = max(1, min(8, power_of_two(math.isqrt(features) // 8) * (2 if wide else 1)))
        positions = 1
        while positions * features < 32 and 2 * positions <= p and cdiv(p, 2 * positions) >= 4 * processors:
            positions *= 2
        samples = max(1, min(power_of_two(n), 1024 * warps // (features * positions)))
        # Too few positions to fill the chip, or to even out long programs: split the samples into runs of 16 and more.
        few = p < processors or (p < 2 * processors and n * features > 65536)
        splits = max(1, min(cdiv(n, max(16, samples)), cdiv(8 * processors, p))) if few else 1
        return cls(samples, positions, features, splits, warps, programs=max(1, 16 // warps))
