"""A configuration for each layer, by coordinate descent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..config import StatisticsConfig

Assignment = tuple[StatisticsConfig, ...]
"""One configuration for each BLN layer, in the order of ``bln.layers``."""
Costs = Callable[[Sequence[Assignment], str], list[float]]
"""The costs of assignments, lower is better, NaN the worst; the text describes the step for a progress bar."""

_ROUNDING = 1e-6
"""An improvement by less than this share of the cost is rounding: float32 sums in another order differ by less."""


def descend(start: Assignment, names: Sequence[str], configs: Sequence[StatisticsConfig], costs: Costs) -> Assignment:
    """Change one layer at a time to its best configuration until no change of a single layer improves.

    Only a lower cost is accepted, so the cost never rises and the descent ends.
    """
    best, unchanged, at = start, 0, 0
    while unchanged < len(names):
        candidates = [(*best[:at], config, *best[at + 1 :]) for config in configs]
        found = costs(candidates, names[at])
        now = found[candidates.index(best)]
        lowest = min(found, key=nan_last)
        if lowest < now - _ROUNDING * abs(now) or (math.isnan(now) and not math.isnan(lowest)):
            best = candidates[found.index(lowest)]
            unchanged = 0
        unchanged += 1  # the layer just changed is at its best
        at = (at + 1) % len(names)
    return best


def nan_last(cost: float) -> tuple[bool, float]:
    """A key that sorts NaN after all numbers."""
    return math.isnan(cost), cost
