"""What a search found, for every framework: rows of scores, the choice among them, exports. Imports no torch."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._frameworks import framework
from .._install import install
from ..config import StatisticsConfig
from . import table
from .score import Row, Score

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

    from ..population import Snapshot

DEPENDS_ON_BATCH = (
    "E_B or Std_B other than T makes a prediction depend on the other samples of its batch: such rows hold for batches "
    "composed like these."
)


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

    @property
    def best(self) -> Row:
        """The row to use: of those within a standard error of the lowest loss, the one that depends least on its batch.

        A single mini-batch has no standard error, so its losses cannot justify a dependence on the batch.
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
        if self._all_nan or self.best is self.lowest:
            return ""
        error = _score(self.lowest, self.robust).loss_error
        within = "loss says no more, having been taken on one mini-batch"
        if not math.isnan(error):
            number = sum(_within(row, self.lowest, self.robust) for row in self.rows)
            within = f"{number} rows are within a standard error, {error:.4f}, of the lowest loss"
        why = f"{within}, and of these it depends least on its batch."
        return f"best (*) is {self.best.label}, not {self.lowest.label}: {why}"

    @property
    def _all_nan(self) -> bool:
        return math.isnan(_score(self.rows[0], self.robust).loss)

    def _refuse_nan(self) -> None:
        if self._all_nan:
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
            The row applied; ``None`` for a configuration that was not searched.
        """
        which = self.best if which is None else which
        row = which if isinstance(which, Row) else self._find(which)
        tools = framework(model)
        statistics = self.statistics or {}
        found = tools.layers(model) if statistics else {}
        way_out = "apply to the model that was searched, or bln.configure(model, ...) and bln.calibrate it"
        if unknown := found.keys() - statistics.keys():
            raise ValueError(
                f"the search calibrated layers {list(statistics)}, but this model also has {sorted(unknown)}; {way_out}"
            )
        for name, layer in found.items():
            if not layer.population.fits(statistics[name]):
                raise ValueError(f"layer {name!r} {_misfit(layer.population, statistics[name])}; {way_out}")
        if row is not None and (danger := _danger(row)):
            warnings.warn(danger, stacklevel=2)
        tools.configure(model, which.config if isinstance(which, Row) else which)
        for name, layer in found.items():
            positions, values = statistics[name]
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
        """JSON, also written to ``path`` if given; NaN becomes null."""

        def plain(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        rows = [{key: plain(value) for key, value in record.items()} for record in self.records()]
        known = {"mode": self.mode, "samples": self.samples, "batches": self.batches, "robust": self.robust}
        return _write(json.dumps({**known, "notes": list(self.notes), "rows": rows}, indent=1), path)

    def to_csv(self, path: str | Path | None = None) -> str:
        """CSV, also written to ``path`` if given."""
        records = self.records()
        buffer = io.StringIO()
        columns = list(dict.fromkeys(key for record in records for key in record))
        writer = csv.DictWriter(buffer, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return _write(buffer.getvalue(), path)


def ranked(rows: Sequence[Row], robust: bool) -> tuple[Row, ...]:
    """Sort rows by loss, then by the first metric, of the worst order of samples if ``robust``; NaN last."""

    def key(row: Row) -> tuple[bool, float, float]:
        score = _score(row, robust)
        metric = next(iter(score.metrics.values()), 0.0)
        return math.isnan(score.loss), score.loss, math.inf if math.isnan(metric) else -metric

    return tuple(sorted(rows, key=key))


def preferred(rows: Sequence[Row], robust: bool) -> Row:
    """Choose, among rows within a standard error of the lowest loss, the one that depends least on its batch."""
    return min((row for row in rows if _within(row, rows[0], robust)), key=lambda row: row.batch_dependence)


def _within(row: Row, lowest: Row, robust: bool) -> bool:
    """Whether a loss is within a standard error of the lowest, or that error is unknown."""
    score, least = _score(row, robust), _score(lowest, robust)
    return row is lowest or score.loss <= least.loss + (math.inf if math.isnan(least.loss_error) else least.loss_error)


def _score(row: Row, robust: bool) -> Score:
    return row.worst if robust else row.score


def _danger(row: Row) -> str:
    """A warning where predictions collapse in some order of samples, as measured or, if unmeasured, as known."""
    if not row.rebatched and row.depends_on_batch:
        return (
            f"{row.label} makes a prediction depend on the other samples of its batch, and may collapse where they "
            "arrive one at a time or sorted by label. TTFF cannot; rebatch=True measures it"
        )
    ways = {"single": "one at a time", "sorted": "sorted by label"}
    if found := [way for name, way in ways.items() if name in row.collapses]:
        return f"{row.label} was measured to collapse where samples arrive {' or '.join(found)}; TTFF cannot"
    return ""


def _misfit(population: Any, snapshot: Snapshot) -> str:
    """How the shapes of a layer's statistics differ from those of a snapshot."""
    name, what = "batch_mean", "positions and features"
    if population.batch_mean.shape == snapshot[1][name].shape:
        name, what = "feature_mean", "groups of features, or positions without groups"
    kept, calibrated = tuple(getattr(population, name).shape), tuple(snapshot[1][name].shape)
    return f"keeps statistics of shape {kept}, but the search calibrated {calibrated}, {what}"


def _write(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
