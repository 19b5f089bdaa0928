"""``bln demo``: everything on data that comes with scikit-learn, in minutes."""

from __future__ import annotations

from .runs import Settings
from .tasks import TASKS

SEEDS = 3
FRACTIONS = {25: 1.0, 1: 0.25}
"""Of the training data, by batch size: single samples take 25 times the steps."""


def settings() -> list[Settings]:
    """A small LeNet and an LSTM, each with BLN, BN and LN at batch size 1 and 25."""
    return [
        Settings(task, norm, size, fraction, seed, "clean", TASKS[task].epochs)
        for task in ("digits-cnn", "digits-rnn")
        for size, fraction in FRACTIONS.items()
        for norm in ("bln", "bn", "ln")
        for seed in range(SEEDS)
    ]
