"""``bln demo``: accuracy against batch size on data that comes with scikit-learn, in two minutes on two cores."""

from __future__ import annotations

from .sizes import study

NORMS = ("bn", "gn", "bln-grouped", "bln")
BATCH_SIZES = (1, 4, 25)
SEEDS, TRIED_ON = 8, 2
"""Of each norm and batch size; and how many of them each learning rate is tried on."""


def cells() -> list[study.Cell]:
    """BatchNorm, GroupNorm and both forms of BLN."""
    return study.plan(
        "digits-resnet", norms=NORMS, batch_sizes=BATCH_SIZES, seeds=SEEDS, seeds_alone=SEEDS, tried_on=TRIED_ON
    )
