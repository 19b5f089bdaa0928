"""The runs of the paper's experiments: collected from the table of runs, checked, and typed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

from ...config import StatisticsConfig
from ..table import distinct

FORMAT = 1
TASKS = ("cnn", "rnn", "resnet", "digits-cnn", "digits-rnn")
NORMS = (
    "bln-grouped", "bln", "bln-pooled", "bn", "gn", "ln", "rms", "batchrenorm", "bln-g1", "bln-g4", "bln-g16", "bln-gC",
)  # fmt: skip
PROTOCOLS = ("paper", "clean")
STATUSES = ("finished", "diverged", "running")
CURVES = ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy")
CONFIGURATIONS = tuple(str(config) for config in StatisticsConfig.all())

_OLD_NAMES = {"bln-shared": "bln-pooled", "bln-shared-no-scale": None}
"""Today's names of norms in older tables; ``None`` where the norm was dropped."""

_T = TypeVar("_T")


class Score(NamedTuple):
    """Loss and accuracy; NaN where the summary has null."""

    loss: float
    accuracy: float


class Setting(NamedTuple):
    """The settings that runs must share to be compared."""

    task: str
    protocol: str
    fraction: float
    batch_size: int


@dataclass(frozen=True)
class Run:
    """A run of the summary; NaN stands for losses that are not a number."""

    setting: Setting
    norm: str
    seed: int
    status: str
    train_loss: list[float]
    train_accuracy: list[float]
    validation_loss: list[float]
    validation_accuracy: list[float]
    best_epoch: int | None
    test: Score | None
    chosen: str | None
    validation_configurations: dict[str, Score] = field(default_factory=dict)
    test_configurations: dict[str, Score] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    memory_mib: float = math.nan
    """The memory a run needs; NaN where it was not measured."""

    @property
    def epochs(self) -> int:
        """The number of epochs logged."""
        return len(self.train_loss)


@dataclass(frozen=True)
class Summary:
    """All runs and their origin."""

    runs: list[Run]
    version: str = ""
    commit: str | None = None
    created: str = ""
    machines: tuple[str, ...] = ()

    def select(self, setting: Setting, norm: str) -> list[Run]:
        """Return the runs of one norm in one setting, by seed."""
        selected = (run for run in self.runs if run.setting == setting and run.norm == norm)
        return sorted(selected, key=lambda run: run.seed)

    def settings(self, task: str, protocol: str | None = None) -> list[Setting]:
        """Return the settings of a task that have a run, the smallest data and batch first."""
        return sorted(
            {run.setting for run in self.runs if run.setting.task == task and protocol in (None, run.setting.protocol)}
        )

    def protocols(self, *tasks: str) -> list[str]:
        """Return the protocols these tasks were run under, the paper's first."""
        present = {run.setting.protocol for run in self.runs if run.setting.task in tasks}
        return [protocol for protocol in PROTOCOLS if protocol in present]

    def norms(self, setting: Setting) -> list[str]:
        """Return the norms a setting was run with, in the order of all reports."""
        return self.order(run.norm for run in self.runs if run.setting == setting)

    @staticmethod
    def order(norms: Iterable[str]) -> list[str]:
        """Return each of these norms once, in the order of all reports."""
        present = set(norms)
        return [norm for norm in NORMS if norm in present] + sorted(present - set(NORMS))


def collect(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarize the runs of the paper's experiments in a table, for :func:`read`."""
    renamed = [{**row, "norm": _OLD_NAMES.get(row["norm"], row["norm"])} for row in rows if row["task"] in TASKS]
    runs = [row for row in renamed if row["norm"]]
    return {
        "format": FORMAT,
        "bln": ", ".join(distinct(row["versions"]["bln"] for row in runs)),
        "commit": ", ".join(distinct(row["commit"] for row in runs)),
        "created": max(distinct(row["started"] or row["collected"] for row in runs), default=""),
        "machines": distinct(f"{row['device']}, torch {row['versions']['torch']}" for row in runs),
        "runs": runs,
    }


def read(summary: Mapping[str, Any]) -> Summary:
    """Check a summary and return it typed; a ``ValueError`` says in a line what is wrong, and the way out."""
    if not isinstance(summary, Mapping):
        raise ValueError(f"a summary is a JSON object, not {type(summary).__name__}: {_AGAIN}")
    if summary.get("format") != FORMAT:
        raise ValueError(
            f"the summary has format {summary.get('format')!r}, this version of bln reads format {FORMAT}: "
            f"{_AGAIN}, or install the version that wrote it ({summary.get('bln', 'unknown')})"
        )
    runs = summary.get("runs")
    if not isinstance(runs, list):
        raise ValueError(f"the summary's 'runs' is no list: {_AGAIN}")
    read_runs = [_run(run, f"runs[{at}]") for at, run in enumerate(runs)]
    seen: dict[tuple[Setting, str, int], int] = {}
    for at, run in enumerate(read_runs):
        first = seen.setdefault((run.setting, run.norm, run.seed), at)
        if first != at:
            raise ValueError(f"the summary's runs[{first}] and runs[{at}] are the same run: keep one of them")
    return Summary(
        read_runs,
        str(summary.get("bln") or "unknown"),
        summary.get("commit") or None,
        str(summary.get("created") or "unknown"),
        tuple(map(str, summary.get("machines") or ())),
    )


@cache
def authors() -> Summary:
    """Return the runs that the paper's authors logged, one for each setting and norm."""
    return read(json.loads((files("bln.experiments") / "authors.json").read_text("utf-8")))


_AGAIN = "collect it again with `bln reproduce`"


class _Field:
    """A value of a run, with its place in the summary for error messages."""

    def __init__(self, value: Any, where: str) -> None:
        self.value, self.where = value, where

    def fail(self, expected: str) -> ValueError:
        value = repr(self.value)
        value = value if len(value) <= 60 else value[:57] + "..."
        return ValueError(f"the summary's {self.where} is {value}, expected {expected}: {_AGAIN}")

    def __getitem__(self, key: str) -> _Field:
        if not isinstance(self.value, Mapping):
            raise self.fail("an object")
        if key not in self.value:
            raise ValueError(f"the summary's {self.where} has no {key!r}: {_AGAIN}")
        return _Field(self.value[key], f"{self.where}.{key}")

    def one_of(self, allowed: tuple[str, ...]) -> str:
        if self.value not in allowed:
            raise self.fail("one of " + ", ".join(allowed))
        return str(self.value)

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            raise self.fail("a name")
        return self.value

    def whole(self, least: int) -> int:
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < least:
            raise self.fail(f"a whole number from {least} on")
        return self.value

    def number(self) -> float:
        """Return a number; null is NaN."""
        if self.value is None:
            return math.nan
        if not isinstance(self.value, int | float) or isinstance(self.value, bool):
            raise self.fail("a number or null")
        return float(self.value) if math.isfinite(self.value) else math.nan

    def items(self) -> Iterator[_Field]:
        if not isinstance(self.value, list):
            raise self.fail("a list")
        return (_Field(value, f"{self.where}[{at}]") for at, value in enumerate(self.value))

    def optional(self, read: Callable[[_Field], _T]) -> _T | None:
        return None if self.value is None else read(self)


def _score(pair: _Field) -> Score:
    values = [value.number() for value in pair.items()]
    if len(values) != 2:
        raise pair.fail("[loss, accuracy]")
    return Score(*values)


def _configurations(table: _Field) -> dict[str, Score]:
    if not isinstance(table.value, Mapping) or set(table.value) != set(CONFIGURATIONS):
        raise table.fail("an object with the 16 configurations, TTTT to FFFF")
    return {config: _score(table[config]) for config in table.value}


def _run(raw: Any, where: str) -> Run:
    run = _Field(raw, where)
    fraction = run["fraction"].number()
    if not 0 < fraction <= 1:
        raise run["fraction"].fail("a number above 0, up to 1")
    curves = {name: [value.number() for value in run["curves"][name].items()] for name in CURVES}
    if len({len(curve) for curve in curves.values()}) != 1:
        raise ValueError(f"the summary's {where}.curves has lists of different lengths: {_AGAIN}")
    best = run["best_epoch"].optional(lambda value: value.whole(1))
    if best is not None and best > len(curves["train_loss"]):
        raise run["best_epoch"].fail(f"an epoch up to {len(curves['train_loss'])}")
    tables = run["configurations"]
    both = None if tables.value is None else [tables[part].optional(_configurations) for part in ("validation", "test")]
    return Run(
        Setting(run["task"].one_of(TASKS), run["protocol"].one_of(PROTOCOLS), fraction, run["batch_size"].whole(1)),
        norm=run["norm"].text(),
        seed=run["seed"].whole(0),
        status=run["status"].one_of(STATUSES),
        **curves,
        best_epoch=best,
        test=run["test"].optional(lambda test: Score(test["loss"].number(), test["accuracy"].number())),
        chosen=run["chosen"].optional(lambda value: value.one_of(CONFIGURATIONS)),
        validation_configurations=(both and both[0]) or {},
        test_configurations=(both and both[1]) or {},
        seconds=[value.number() for value in run["seconds"].items()],
        memory_mib=run["memory_mib"].number() if "memory_mib" in raw else math.nan,
    )
