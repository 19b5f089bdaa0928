"""What a search found."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._transfer import framework
from ..config import StatisticsConfig
from ..population import Snapshot
from . import table
from .scores import Score

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

_LOST, _GROWN, _ERRORS = 0.2, 0.5, 3
"""A configuration collapses where it loses a fifth of its first metric or, without metrics, its loss grows by half, and
that is three standard errors or more. IMDB sorted by label costs FFxx a third, from .77 to .50, which is chance."""


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
    def depends_on_batch(self) -> bool:
        """Whether a prediction depends on the other samples of its mini-batch."""
        configs = [self.config] if isinstance(self.config, StatisticsConfig) else self.config.values()
        return any(config.uses_batch for config in configs)

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
    """The configurations that were tried, best first.

    Prints as a table: through rich in a terminal, as HTML in a notebook. Iterating gives ``Row`` after row, by
    loss and then by the first metric; rows whose loss is NaN come last.

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
        """The best row; an error if every loss is NaN."""
        if math.isnan(_key(self.rows[0], self.robust)[1]):
            raise ValueError(
                "every configuration has a NaN loss, so none is best. Is the model's output NaN in eval(), or the "
                "data? If the population statistics are at fault, pass calibrate=train_batches"
            )
        return self.rows[0]

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
            raise ImportError(
                'to_dataframe() takes pandas, which is not installed: pip install "batch-layer-norm[search]"'
            ) from error
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


def _key(row: Row, robust: bool) -> tuple[bool, float, float]:
    score = row.worst if robust else row.score
    metric = next(iter(score.metrics.values()), 0.0)
    return math.isnan(score.loss), score.loss, math.inf if math.isnan(metric) else -metric


def _write(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
