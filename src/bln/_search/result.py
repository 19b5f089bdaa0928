"""``SearchResult``, for every framework: scores, rows, the choice among them, exports. Imports no torch."""

from __future__ import annotations

import csv
import io
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._frameworks import framework
from .._install import install
from ..config import StatisticsConfig
from . import table

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

    from ..population import Snapshot

DEPENDS_ON_BATCH = (
    "E_B or Std_B other than T makes a prediction depend on the other samples of its batch: such rows hold for batches "
    "composed like these."
)
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


def average_scores(
    values: Sequence[Sequence[Sequence[float]]], samples: Sequence[int], metrics: Sequence[str]
) -> list[Score]:
    """Return the score of each configuration, from its loss and ``metrics`` on each mini-batch.

    A mini-batch is weighted by its ``samples``, in the standard error too.

    >>> average_scores([[[1.0]], [[3.0]]], [5, 5], [])
    [Score(loss=2.0, loss_error=1.0, metrics={}, metrics_error={})]
    """
    count, weights = len(samples), [number / sum(samples) for number in samples]

    def mean(column: Sequence[float]) -> tuple[float, float]:
        """Return the weighted mean and its standard error."""
        mean = sum(weight * value for weight, value in zip(weights, column, strict=True))
        parts = [weight * (value - mean) for weight, value in zip(weights, column, strict=True)]
        squares = sum(part * part for part in parts)  # not part**2, which raises an error where it overflows
        return mean, math.sqrt(squares * count / (count - 1)) if count > 1 else math.nan

    scores = []
    for of_batches in zip(*values, strict=True):
        (loss, *means), (error, *errors) = zip(*map(mean, zip(*of_batches, strict=True)), strict=True)
        by_name = (dict(zip(metrics, numbers, strict=True)) for numbers in (means, errors))
        scores.append(Score(loss, error, *by_name))
    return scores


@dataclass(frozen=True, kw_only=True)
class Row(Score):
    """One configuration and its scores.

    Attributes:
        config: The configuration of all layers, or of each by name.
        loss: The mean loss over samples.
        loss_error: The loss's standard error over mini-batches; NaN for one mini-batch.
        metrics: The mean of each metric over samples.
        metrics_error: The metrics' standard errors over mini-batches.
        rebatched: The scores of the same samples in other mini-batches: ``shuffled``, ``sorted``, ``single``.
        uncalibrated: The score with the population statistics as they were found, after a calibration.
    """

    config: StatisticsConfig | dict[str, StatisticsConfig]
    rebatched: dict[str, Score] = field(default_factory=dict)
    uncalibrated: Score | None = None

    @property
    def worst(self) -> Score:
        """The score with the highest loss among all orders of samples, NaN being the highest."""
        return max([self, *self.rebatched.values()], key=lambda score: nan_last(score.loss))

    @property
    def collapses(self) -> tuple[str, ...]:
        """The orders of samples in which the score collapses."""
        return tuple(name for name, score in self.rebatched.items() if _collapses(self, score))

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
        """Return the row as one flat dict."""
        flat: dict[str, Any] = {"config": self.label}
        if isinstance(self.config, dict):
            flat |= {f"config[{name}]": str(config) for name, config in self.config.items()}
        scores: dict[str, Score] = {"": self, **{f"{name}_": score for name, score in self.rebatched.items()}}
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


def _collapses(score: Score, other: Score) -> bool:
    """Whether another order of samples is as much worse as ``_LOST``, ``_GROWN`` and ``_ERRORS`` say."""
    if math.isnan(other.loss):
        return True
    lost, share, error = other.loss - score.loss, _GROWN * abs(score.loss), score.loss_error
    for name, value in list(score.metrics.items())[:1]:
        lost, share, error = value - other.metrics[name], _LOST * abs(value), score.metrics_error[name]
    return lost > (share if math.isnan(error) else max(share, _ERRORS * error))


@dataclass(frozen=True, repr=False)
class SearchResult:
    """The configurations that were tried, lowest loss first.

    Prints as a table. Iterating gives ``Row`` after row, by loss and then by the first metric;
    rows whose loss is NaN come last. ``best`` follows the one-standard-error rule, ``lowest`` is the first row.

    Attributes:
        rows: Every configuration tried.
        mode: How they were run: ``together`` or ``separate``.
        notes: How to read these numbers, and what limits them.
        samples, batches: The data they were taken on.
        robust: Ranked by the worst order of samples.
        statistics: After a calibration, the population statistics of each layer. ``apply`` puts them in place.
    """

    rows: Sequence[Row]
    mode: str
    notes: tuple[str, ...]
    samples: int
    batches: int
    robust: bool = False
    statistics: Mapping[str, Snapshot] | None = None

    def __post_init__(self) -> None:
        def key(row: Row) -> tuple[bool, float, float]:
            metric = next(iter(self._score(row).metrics.values()), 0.0)
            return *nan_last(self._score(row).loss), math.inf if math.isnan(metric) else -metric

        object.__setattr__(self, "rows", tuple(sorted(self.rows, key=key)))

    def _score(self, row: Row) -> Score:
        return row.worst if self.robust else row

    @property
    def best(self) -> Row:
        """The row to use: of those within a standard error of the lowest loss, the one that depends least on its batch.

        A single mini-batch has no standard error, so its losses cannot justify a dependence on the batch.
        """
        lowest = self._score(self.lowest)
        most = lowest.loss + (math.inf if math.isnan(lowest.loss_error) else lowest.loss_error)
        within = [row for row in self.rows if row is self.rows[0] or self._score(row).loss <= most]
        return min(within, key=lambda row: row.batch_dependence)

    @property
    def lowest(self) -> Row:
        """The row with the lowest loss."""
        if self.all_nan:
            raise ValueError(
                "every configuration has a NaN loss, so none is best. Is the model's output NaN in eval(), or the "
                "data? If the population statistics are at fault, pass calibrate=train_batches"
            )
        return self.rows[0]

    @property
    def why(self) -> str:
        """Why ``best`` is not ``lowest``; empty where it is."""
        if self.all_nan or self.best is self.lowest:
            return ""
        within = "with a loss on one mini-batch" if self.batches == 1 else "within a standard error of the lowest loss"
        chosen = f"best (*) is {self.best.label}, not {self.lowest.label}"
        return f"{chosen}: of the rows {within}, it depends least on its batch."

    @property
    def all_nan(self) -> bool:
        """Whether no configuration has a loss to rank it by."""
        return math.isnan(self._score(self.rows[0]).loss)

    def apply(self, model: Any, which: Row | StatisticsConfig | str | Mapping[str, Any] | None = None) -> Row | None:
        """Give the model the best configuration, or another; after a calibration, its statistics too.

        Args:
            model: The model searched, of any framework, or one with layers of the same names.
            which: A row, ``"FTFF"``, a ``StatisticsConfig`` or a mapping from names to such; ``None`` is the best.

        Returns:
            The row applied; ``None`` for a configuration that was not searched.
        """
        which = self.best if which is None else which
        row = which if isinstance(which, Row) else self._find(which)
        tools, statistics = framework(model), self.statistics or {}
        layers = tools.layers(model) if statistics else {}
        for name, layer in layers.items():
            if name not in statistics or not layer.population.fits(statistics[name]):
                raise ValueError(
                    f"the search calibrated no statistics that fit the layer {name!r}; apply to the model that was "
                    "searched, or bln.configure(model, ...) and bln.calibrate it"
                )
        if row is not None and (danger := _danger(row)):
            warnings.warn(danger, stacklevel=2)
        tools.configure(model, which.config if isinstance(which, Row) else which)
        for name, layer in layers.items():
            positions, values = statistics[name]
            device = layer.population.batch_mean.device
            layer.population.restore((positions, {key: value.to(device) for key, value in values.items()}))
        return row

    def _find(self, which: StatisticsConfig | str | Mapping[str, Any]) -> Row | None:
        parse = StatisticsConfig.parse
        wanted = {name: parse(c) for name, c in which.items()} if isinstance(which, Mapping) else parse(which)
        return next((row for row in self.rows if row.config == wanted), None)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: int | StatisticsConfig | str | Mapping[str, Any]) -> Row:
        """Return the row at a rank, or that of a configuration."""
        if isinstance(which, int):
            return self.rows[which]
        if (row := self._find(which)) is None:
            raise KeyError(which if isinstance(which, str) else str(which))
        return row

    # ---- printing and saving

    def __str__(self) -> str:
        return table.text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"  # whose long lines a notebook does not wrap

    def records(self) -> list[dict[str, Any]]:
        """Return a flat dict for each row, best first."""
        return [{"rank": rank, **row.record()} for rank, row in enumerate(self.rows, 1)]

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a DataFrame with a line for each row, best first."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(f"to_dataframe() takes pandas, which is not installed: {install('search')}") from error
        return pandas.DataFrame(self.records())

    def to_json(self, path: str | Path | None = None) -> str:
        """Return JSON, with null for NaN; write it to ``path``, too, if given."""

        def plain(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        rows = [{key: plain(value) for key, value in record.items()} for record in self.records()]
        known = {"mode": self.mode, "samples": self.samples, "batches": self.batches, "robust": self.robust}
        return _write(json.dumps({**known, "notes": list(self.notes), "rows": rows}, indent=1), path)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return CSV; write it to ``path``, too, if given."""
        records, buffer = self.records(), io.StringIO()
        writer = csv.DictWriter(buffer, list(dict.fromkeys(chain(*records))), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return _write(buffer.getvalue(), path)


def notes_on_population(calibrate: str, untrained: Sequence[str]) -> list[str]:
    """Return notes on population statistics that were not calibrated; ``calibrate`` is the call that would do so."""
    notes = [
        f"Population statistics averaged while the weights still moved can ruin rows with T; {calibrate} recomputes "
        "them under frozen weights."
    ]
    if untrained:
        notes.append(f"No training batch was seen by {', '.join(untrained)}: T there means mean 0, variance 1.")
    return notes


def nan_last(cost: float) -> tuple[bool, float]:
    """Return a key that sorts NaN after all numbers."""
    return math.isnan(cost), cost


def _danger(row: Row) -> str:
    """Return a warning if predictions were measured to collapse in some order of samples, or, unmeasured, may do so."""
    if not row.rebatched and row.depends_on_batch:
        return (
            f"{row.label} makes a prediction depend on the other samples of its batch, and may collapse where they "
            "arrive one at a time or sorted by label. TTFF cannot; rebatch=True measures it"
        )
    ways = {"single": "one at a time", "sorted": "sorted by label"}
    if found := [way for name, way in ways.items() if name in row.collapses]:
        return f"{row.label} was measured to collapse where samples arrive {' or '.join(found)}; TTFF cannot"
    return ""


def _write(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
