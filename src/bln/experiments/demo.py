"""``bln demo``: accuracy against batch size on data that comes with scikit-learn, in two minutes on two cores."""

from __future__ import annotations

from .sizes import study

NORMS = ("bn", "gn", "bln-grouped", "bln")
BATCH_SIZES = (1, 4, 25)
SEEDS = 5


def cells() -> list[study.Cell]:
    """BatchNorm, GroupNorm and both forms of BLN; all seeds at every batch size."""
    return study.plan(
        "digits-resnet", norms=NORMS, batch_sizes=BATCH_SIZES, seeds=SEEDS, seeds_alone=SEEDS, tried_on=SEEDS
    )
