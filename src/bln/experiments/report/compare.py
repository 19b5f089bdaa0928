"""The four measures that norms are compared by, and paired differences over the seeds of both."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from .statistics import Estimate, paired_interval
from .summary import Run, Setting, Summary


class Measure(NamedTuple):
    """A number of a finished run; NaN of one that diverged."""

    name: str
    of: Callable[[Run], float]
    better: int
    """1 where higher is better, -1 where lower is."""


def _finished(of: Callable[[Run], float]) -> Callable[[Run], float]:
    return lambda run: of(run) if run.status == "finished" else math.nan


TRAIN_ACCURACY = Measure(
    "train accuracy, last epoch", _finished(lambda run: run.train_accuracy[-1] if run.epochs else math.nan), 1
)
TRAIN_LOSS = Measure(
    "training loss, mean over epochs",
    _finished(lambda run: sum(run.train_loss) / run.epochs if run.epochs else math.nan),
    -1,
)
TEST_ACCURACY = Measure("test accuracy", _finished(lambda run: run.test.accuracy if run.test else math.nan), 1)
TEST_LOSS = Measure("test loss", _finished(lambda run: run.test.loss if run.test else math.nan), -1)
MEASURES = (TRAIN_ACCURACY, TRAIN_LOSS, TEST_ACCURACY, TEST_LOSS)


def ended(summary: Summary, setting: Setting, norm: str) -> list[Run]:
    """Return the runs that have ended, finished or diverged, by seed."""
    return [run for run in summary.select(setting, norm) if run.status != "running"]


def pairs(summary: Summary, setting: Setting, first: str, second: str) -> list[tuple[Run, Run]]:
    """Return the ended runs of two norms, paired by seed."""
    seconds = {run.seed: run for run in ended(summary, setting, second)}
    return [(run, seconds[run.seed]) for run in ended(summary, setting, first) if run.seed in seconds]


class Difference(NamedTuple):
    """First minus second of a measure, over seeds; pairs in which a run diverged are left out and counted."""

    estimate: Estimate
    diverged: int


def difference(summary: Summary, setting: Setting, first: str, second: str, measure: Measure) -> Difference:
    """Return the paired difference of two norms."""
    values = [measure.of(a) - measure.of(b) for a, b in pairs(summary, setting, first, second)]
    finished = [value for value in values if not math.isnan(value)]
    return Difference(paired_interval(finished), len(values) - len(finished))
