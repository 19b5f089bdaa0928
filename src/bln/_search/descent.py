"""A configuration for each layer, by coordinate descent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..config import StatisticsConfig
from .vectorized import Assignment

Costs = Callable[[Sequence[Assignment], str], list[float]]
"""The costs of assignments, lower is better, NaN for useless; the text tells what is being looked at."""

_ROUNDING = 1e-6
"""Less than this share of the cost is rounding, not an improvement: float32 sums of another order differ by less."""


def descend(start: Assignment, names: Sequence[str], configs: Sequence[StatisticsConfig], costs: Costs) -> Assignment:
    """Change one layer at a time to its best configuration until no change of a single layer improves.

    Costs are remembered, and only a lower one moves on, so that the cost never rises and the descent ends.
    """
    best, unchanged, at = start, 0, 0
    while unchanged < len(names):
        candidates = [(*best[:at], config, *best[at + 1 :]) for config in configs]
        found = costs(candidates, names[at])
        now = found[candidates.index(best)]
        lowest = min(found, key=lambda cost: (math.isnan(cost), cost))
        if lowest < now - _ROUNDING * abs(now) or (math.isnan(now) and not math.isnan(lowest)):
            best = candidates[found.index(lowest)]
            unchanged = 0
        # A layer's own change is followed by a look at all others, and then the search has come round to it.
        unchanged += 1
        at = (at + 1) % len(names)
    return best
