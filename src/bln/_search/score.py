"""The scores of a configuration, for every framework. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import StatisticsConfig

_LOST, _GROWN, _ERRORS = 0.2, 0.5, 3
"""A configuration collapses where it loses a fifth of its first metric or, without metrics, its loss grows by half, and
that is three standard errors or more. IMDB sorted by label costs FFxx a third, from .77 to .50, which is chance."""


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

    A mini-batch is weighted by its ``samples``, in the standard error too.

    >>> averages([[[1.0]], [[3.0]]], [5, 5], [])
    [Score(loss=2.0, loss_error=1.0, metrics={}, metrics_error={})]
    """
    total = sum(samples)
    weights = [number / total if total else math.nan for number in samples]
    scores = []
    for of_batches in zip(*values, strict=True):
        columns = zip(*of_batches, strict=True)
        (loss, *means), (error, *errors) = zip(*(_mean(column, weights) for column in columns), strict=True)
        by_name = (dict(zip(metrics, numbers, strict=True)) for numbers in (means, errors))
        scores.append(Score(loss, error, *by_name))
    return scores


def _mean(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """The weighted mean and its standard error."""
    mean = sum(weight * value for weight, value in zip(weights, values, strict=True))
    count = len(values)
    if count < 2:
        return mean, math.nan
    parts = [weight * (value - mean) for weight, value in zip(weights, values, strict=True)]
    return mean, math.sqrt(sum(part * part for part in parts) * count / (count - 1))


@dataclass(frozen=True)
class Row:
    """One configuration and its scores.

    Attributes:
        config: The configuration of all layers, or of each by name.
        score: Loss and metrics as the batches were given, with standard errors.
        rebatched: The scores of the same samples in other mini-batches: ``shuffled``, ``sorted``, ``single``.
        uncalibrated: The score with the population statistics as they were found, after a calibration.
    """

    config: StatisticsConfig | dict[str, StatisticsConfig]
    score: Score
    rebatched: dict[str, Score] = field(default_factory=dict)
    uncalibrated: Score | None = None

    @property
    def loss(self) -> float:
        """The mean loss over samples."""
        return self.score.loss

    @property
    def loss_error(self) -> float:
        """The loss's standard error over mini-batches."""
        return self.score.loss_error

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of each metric over samples."""
        return self.score.metrics

    @property
    def metrics_error(self) -> dict[str, float]:
        """The metrics' standard errors over mini-batches."""
        return self.score.metrics_error

    @property
    def worst(self) -> Score:
        """The score with the highest loss among all orders of samples, NaN being the highest."""
        return max([self.score, *self.rebatched.values()], key=lambda s: (math.isnan(s.loss), s.loss))

    @property
    def collapses(self) -> tuple[str, ...]:
        """The orders of samples that ruin it."""
        return tuple(name for name, score in self.rebatched.items() if _ruined(self.score, score))

    @property
    def per_layer(self) -> bool:
        """Whether layers have configurations of their own."""
        return not isinstance(self.config, StatisticsConfig)

    @property
    def _configs(self) -> list[StatisticsConfig]:
        return [self.config] if isinstance(self.config, StatisticsConfig) else list(self.config.values())

    @property
    def batch_dependence(self) -> float:
        """How much batch statistics come from the mini-batch, on average over layers: from 0 under ``TT`` to 2."""
        return sum(config.batch_dependence for config in self._configs) / len(self._configs)

    @property
    def depends_on_batch(self) -> bool:
        """Whether a prediction depends on the other samples of its mini-batch."""
        return self.batch_dependence > 0

    @property
    def label(self) -> str:
        """``TTFF``, or each layer's configuration in order."""
        return " ".join(map(str, self._configs))

    def record(self) -> dict[str, Any]:
        """The row as one flat dict."""
        named = self.config if isinstance(self.config, dict) else {}
        flat: dict[str, Any] = {"config": self.label, **{f"config[{name}]": str(c) for name, c in named.items()}}
        scores = {"": self.score, **{f"{name}_": score for name, score in self.rebatched.items()}}
        if self.uncalibrated is not None:
            scores["uncalibrated_"] = self.uncalibrated
        for prefix, score in scores.items():
            flat |= {f"{prefix}loss": score.loss, f"{prefix}loss_error": score.loss_error}
            for name, value in score.metrics.items():
                flat |= {f"{prefix}{name}": value, f"{prefix}{name}_error": score.metrics_error[name]}
        if self.rebatched:
            flat["collapses"] = " ".join(self.collapses)
        flat["depends_on_batch"] = self.depends_on_batch
        return flat


def _ruined(given: Score, other: Score) -> bool:
    if math.isnan(other.loss):
        return True
    lost, share, error = other.loss - given.loss, _GROWN * abs(given.loss), given.loss_error
    for name, value in list(given.metrics.items())[:1]:
        lost, share, error = value - other.metrics[name], _LOST * abs(value), given.metrics_error[name]
    return lost > (share if math.isnan(error) else max(share, _ERRORS * error))
