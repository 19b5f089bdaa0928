"""Scores of configurations: means over samples with their standard errors, for every framework. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Score:
    """Loss and metrics, means over samples, and their standard errors over mini-batches (NaN for one mini-batch)."""

    loss: float
    loss_error: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_error: dict[str, float] = field(default_factory=dict)


def averages(
    values: Sequence[Sequence[Sequence[float]]], samples: Sequence[int], metrics: Sequence[str]
) -> list[Score]:
    """The score of each configuration, from its loss and ``metrics`` on each mini-batch.

    A mini-batch weighs as much as it has ``samples``, in the standard error too.

    >>> averages([[[1.0]], [[3.0]]], [5, 5], [])
    [Score(loss=2.0, loss_error=1.0, metrics={}, metrics_error={})]
    """
    total = sum(samples)
    weights = [number / total if total else math.nan for number in samples]
    scores = []
    for of_batches in zip(*values, strict=True):
        (loss, loss_error), *others = (_mean(column, weights) for column in zip(*of_batches, strict=True))
        means, errors = ([pair[which] for pair in others] for which in (0, 1))
        by_name = (dict(zip(metrics, numbers, strict=True)) for numbers in (means, errors))
        scores.append(Score(loss, loss_error, *by_name))
    return scores


def _mean(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """The weighted mean and its standard error."""
    mean = sum(weight * value for weight, value in zip(weights, values, strict=True))
    count = len(values)
    if count < 2:
        return mean, math.nan
    parts = [weight * (value - mean) for weight, value in zip(weights, values, strict=True)]
    return mean, math.sqrt(sum(part * part for part in parts) * count / (count - 1))
