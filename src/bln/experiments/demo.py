"""The runs of ``bln demo``: accuracy against batch size on scikit-learn's digits, in minutes on two cores."""

from __future__ import annotations

from .sizes import study

NORMS = ("bn", "gn", "bln-grouped", "bln")
BATCH_SIZES = (1, 4, 25)
SEEDS, TRIED_ON = 8, 2
"""Seeds of each norm and batch size, and the fewest that each learning rate is tried on."""


def cells(seeds: int | None = None) -> list[study.Cell]:
    """Return the cells of BatchNorm, GroupNorm and both forms of BLN."""
    seeds = SEEDS if seeds is None else seeds
    tried_on = min(max(TRIED_ON, seeds // 8), seeds)
    return study.plan(
        "digits-resnet", norms=NORMS, batch_sizes=BATCH_SIZES, seeds=seeds, seeds_alone=seeds, tried_on=tried_on
    )
