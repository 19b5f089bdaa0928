"""What a search found."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._frameworks import framework
from .._install import install
from ..config import StatisticsConfig
from . import table
from .score import Score

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

    from ..population import Snapshot

_LOST, _GROWN, _ERRORS = 0.2, 0.5, 3
"""A configuration collapses where it loses a fifth of its first metric or, without metrics, its loss grows by half, and
that is three standard errors or more. IMDB sorted by label costs FFxx a third, from .77 to .50, which is chance."""


DEPENDS_ON_BATCH = (
    "E_B or Std_B other than T makes a prediction depend on the other samples of its batch: such rows hold for batches "
    "composed like these."
)


@dataclass(frozen=True)
class Row:
    """One configuration and its scores.

    Attributes:
        config: The configuration of all layers, or of each by name.
        score: Loss and metrics as the batches were given, with standard errors.
        rebatched: The scores when the same samples arrive otherwise: ``shuffled``, ``sorted``, ``single``.
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
        """Its standard error over mini-batches."""
        return self.score.loss_error

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of each metric over samples."""
        return self.score.metrics

    @property
    def metrics_error(self) -> dict[str, float]:
        """Their standard errors over mini-batches."""
        return self.score.metrics_error

    @property
    def worst(self) -> Score:
        """The score with the highest loss of all arrangements, NaN being the highest."""
        return max([self.score, *self.rebatched.values()], key=lambda s: (math.isnan(s.loss), s.loss))

    @property
    def collapses(self) -> tuple[str, ...]:
        """The arrangements that ruin it."""
        return tuple(name for name, score in self.rebatched.items() if _ruined(self.score, score))

    @property
    def per_layer(self) -> bool:
        """Whether layers have configurations of their own."""
        return not isinstance(self.config, StatisticsConfig)

    @property
    def batch_dependence(self) -> float:
        """How much batch statistics come from the mini-batch, on average over layers: from 0 under ``TT`` to 2."""
        configs = [self.config] if isinstance(self.config, StatisticsConfig) else list(self.config.values())
        return sum(config.batch_dependence for config in configs) / len(configs)

    @property
    def depends_on_batch(self) -> bool:
        """Whether a prediction depends on the other samples of its mini-batch."""
        return self.batch_dependence > 0

    @property
    def label(self) -> str:
        """``TTFF``, or each layer's configuration in order."""
        return (
            str(self.config) if isinstance(self.config, StatisticsConfig) else " ".join(map(str, self.config.values()))
        )

    def record(self) -> dict[str, Any]:
        """All of it as one flat dict."""
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
    for name, value in given.metrics.items():  # the first decides
        return value - other.metrics[name] > _much(_LOST * abs(value), given.metrics_error[name])
    return other.loss - given.loss > _much(_GROWN * abs(given.loss), given.loss_error)


def _much(share: float, error: float) -> float:
    return share if math.isnan(error) else max(share, _ERRORS * error)


@dataclass(frozen=True, repr=False)
class SearchResult:
    """The configurations that were tried, lowest loss first.

    Prints as a table: through rich in a terminal, as HTML in a notebook. Iterating gives ``Row`` after row, by
    loss and then by the first metric; rows whose loss is NaN come last. ``best`` follows the one-standard-error rule,
    ``lowest`` is the first row.

    Attributes:
        rows: Every configuration tried.
        mode: How they were run: ``together`` or ``separate``.
        notes: What one should know about these numbers.
        samples, batches: The data they were taken on.
        robust: Ranked by the worst arrangement.
        statistics: After a calibration, the population statistics of each layer. ``apply`` puts them in place.
    """

    rows: Sequence[Row]
    mode: str
    notes: tuple[str, ...]
    samples: int
    batches: int
    robust: bool = False
    statistics: Mapping[str, Snapshot] | None = None

    @property
    def best(self) -> Row:
        """The row to use: of those within a standard error of the lowest loss, the one that depends least on its batch.

        A single mini-batch has no standard error, and so nothing to say for depending on it.
        """
        self._refuse_nan()
        return preferred(self.rows, self.robust)

    @property
    def lowest(self) -> Row:
        """The row with the lowest loss."""
        self._refuse_nan()
        return self.rows[0]

    @property
    def why(self) -> str:
        """Why ``best`` is not ``lowest``; empty where it is."""
        if math.isnan(_key(self.rows[0], self.robust)[1]) or self.best is self.lowest:
            return ""
        error = _score(self.lowest, self.robust).loss_error
        within = "loss says no more, having been taken on one mini-batch"
        if not math.isnan(error):
            number = sum(_within(row, self.lowest, self.robust) for row in self.rows)
            within = f"{number} rows are within a standard error, {error:.4f}, of the lowest loss"
        why = f"{within}, and of these it depends least on its batch."
        return f"best (*) is {self.best.label}, not {self.lowest.label}: {why}"

    def _refuse_nan(self) -> None:
        if math.isnan(_key(self.rows[0], self.robust)[1]):
            raise ValueError(
                "every configuration has a NaN loss, so none is best. Is the model's output NaN in eval(), or the "
                "data? If the population statistics are at fault, pass calibrate=train_batches"
            )

    def apply(self, model: Any, which: Row | StatisticsConfig | str | Mapping[str, Any] | None = None) -> Row | None:
        """Give the model the best configuration, or another; after a calibration, its statistics too.

        Args:
            model: The model searched, of any framework, or one with layers of the same names.
            which: A row, ``"FTFF"``, a ``StatisticsConfig`` or a mapping from names to such; ``None`` is the best.

        Returns:
            The row applied, if it is one of them.
        """
        if which is None:
            which = self.best
        row = which if isinstance(which, Row) else self._find(which)
        layers, configure = framework(model)[:2]
        if self.statistics is not None and (unknown := layers(model).keys() - self.statistics.keys()):
            raise ValueError(
                f"the search calibrated layers {list(self.statistics)}, but this model also has {sorted(unknown)}; "
                "apply to the model that was searched, or bln.configure(model, ...) and bln.calibrate it"
            )
        found = layers(model) if self.statistics is not None else {}
        for name, layer in found.items():
            if not layer.population.fits(snapshot := (self.statistics or {})[name]):
                kept, calibrated = layer.population.batch_mean.shape, snapshot[1]["batch_mean"].shape
                what = "positions and features"
                if kept == calibrated:
                    kept, calibrated = layer.population.feature_mean.shape, snapshot[1]["feature_mean"].shape
                    what = "groups of features, or positions without groups"
                raise ValueError(
                    f"layer {name!r} keeps statistics of shape {tuple(kept)}, but the search calibrated "
                    f"{tuple(calibrated)}, {what}; apply to the model that was searched, or "
                    "bln.configure(model, ...) and bln.calibrate it"
                )
        if row is not None and (danger := _danger(row)):
            warnings.warn(danger, stacklevel=2)
        configure(model, which.config if isinstance(which, Row) else which)
        for name, layer in found.items():
            positions, values = (self.statistics or {})[name]
            device = layer.population.batch_mean.device
            layer.population.restore((positions, {key: v.to(device, copy=True) for key, v in values.items()}))
        return row

    def _find(self, which: StatisticsConfig | str | Mapping[str, Any]) -> Row | None:
        wanted: Any
        if isinstance(which, Mapping):
            wanted = {name: StatisticsConfig.parse(config) for name, config in which.items()}
        else:
            wanted = StatisticsConfig.parse(which)
        return next((row for row in self.rows if row.config == wanted), None)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: int | StatisticsConfig | str | Mapping[str, Any]) -> Row:
        """The row at a rank, or of a configuration."""
        if isinstance(which, int):
            return self.rows[which]
        if (row := self._find(which)) is None:
            raise KeyError(which if isinstance(which, str) else str(which))
        return row

    # ---- printing and saving

    def __str__(self) -> str:
        return table.terminal(self) if sys.stdout.isatty() else table.text(self)

    __repr__ = __str__

    def __rich__(self) -> Any:
        return table.rich(self)

    def _repr_html_(self) -> str:
        return table.html(self)

    def records(self) -> list[dict[str, Any]]:
        """A flat dict for each row, best first."""
        return [{"rank": rank, **row.record()} for rank, row in enumerate(self.rows, 1)]

    def to_dataframe(self) -> pandas.DataFrame:
        """A DataFrame with a line for each row, best first."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(f"to_dataframe() takes pandas, which is not installed: {install('search')}") from error
        return pandas.DataFrame(self.records())

    def to_json(self, path: str | Path | None = None) -> str:
        """JSON, written to ``path`` if there is one; NaN becomes null."""

        def plain(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        rows = [{key: plain(value) for key, value in record.items()} for record in self.records()]
        known = {"mode": self.mode, "samples": self.samples, "batches": self.batches, "robust": self.robust}
        text = json.dumps({**known, "notes": list(self.notes), "rows": rows}, indent=1)
        return _write(text, path)

    def to_csv(self, path: str | Path | None = None) -> str:
        """CSV, written to ``path`` if there is one."""
        records = self.records()
        columns = list(dict.fromkeys(key for record in records for key in record))
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return _write(buffer.getvalue(), path)


def ranked(rows: Sequence[Row], robust: bool) -> tuple[Row, ...]:
    """Best first: by loss, then by the first metric, of the worst arrangement if ``robust``; NaN last."""
    return tuple(sorted(rows, key=lambda row: _key(row, robust)))


def preferred(rows: Sequence[Row], robust: bool) -> Row:
    """Choose, among rows within a standard error of the lowest loss, the one that depends least on its batch."""
    return min((row for row in rows if _within(row, rows[0], robust)), key=lambda row: row.batch_dependence)


def _within(row: Row, lowest: Row, robust: bool) -> bool:
    """Whether a loss is within a standard error of the lowest, or whether nobody knows the error."""
    score, least = _score(row, robust), _score(lowest, robust)
    return row is lowest or score.loss <= least.loss + (math.inf if math.isnan(least.loss_error) else least.loss_error)


def _danger(row: Row) -> str:
    """What to say of a configuration that lets predictions collapse, as measured or, if nobody did, as known."""
    ways = {"single": "one at a time", "sorted": "sorted by label"}
    if row.rebatched:
        if found := [way for name, way in ways.items() if name in row.collapses]:
            return f"{row.label} was measured to collapse where samples arrive {' or '.join(found)}; TTFF cannot"
    elif row.depends_on_batch:
        return (
            f"{row.label} makes a prediction depend on the other samples of its batch, and may collapse where they "
            "arrive one at a time or sorted by label. TTFF cannot; rebatch=True measures it"
        )
    return ""


def _score(row: Row, robust: bool) -> Score:
    return row.worst if robust else row.score


def _key(row: Row, robust: bool) -> tuple[bool, float, float]:
    score = _score(row, robust)
    metric = next(iter(score.metrics.values()), 0.0)
    return math.isnan(score.loss), score.loss, math.inf if math.isnan(metric) else -metric


def _write(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
