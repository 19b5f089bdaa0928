"""Train every norm at every batch size: learning rates are tried on a few seeds, and the best one trains all of them.

    runs.jsonl      a line for each run: settings, results, time, memory, origin
    checkpoints/    nets under way

A run that has a line is not repeated, so the same command continues where it was stopped, even on another machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from .. import runs, table
from ..norms import GROUPS
from ..processes import side_by_side
from ..remaining import Progress
from ..runs import Estimate, locked
from ..steps import Lane, lane
from ..table import Row
from . import training
from .tasks import TASKS, load
from .training import Run, Training

SEEDS_ALONE = 3
"""The most seeds at batch size 1, where a run takes the most steps."""
SMALL = 4
"""Up to this batch size, rates are tried on all seeds if runs train together, since further runs cost little there."""
VARIANTS = {name for name in GROUPS if name != "bln-grouped"}
"""Forms of BLN with other numbers of groups than the recommended one."""
RATES = (1 / 3, 1, 3)
"""The learning rates tried, as multiples of the task's, which grows with the root of the batch size."""

Save = Callable[[list[Row]], None]
"""Adds lines to the table."""


@dataclass(frozen=True)
class Cell:
    """One norm at one batch size, with several learning rates and seeds."""

    task: str
    norm: str
    batch_size: int
    samples: int
    epochs: int
    seeds: int
    tried_on: int

    @property
    def name(self) -> str:
        """The name of the cell, for files."""
        return f"{self.task}-{self.norm}-batch{self.batch_size}-{self.samples}-{self.epochs}"

    @property
    def rates(self) -> list[float]:
        """The learning rates tried, to two digits."""
        middle = TASKS[self.task].learning_rate * math.sqrt(self.batch_size / 32)
        return [float(f"{factor * middle:.2g}") for factor in RATES]

    def runs(self, rates: Iterable[float], seeds: Iterable[int]) -> list[Run]:
        """Return the runs of these learning rates and seeds."""
        return [
            Run(self.task, self.norm, self.batch_size, rate, seed, self.samples, self.epochs)
            for rate in rates
            for seed in seeds
        ]

    @property
    def tried(self) -> list[Run]:
        """The runs by which the learning rate is chosen."""
        return self.runs(self.rates, range(self.tried_on))

    @property
    def runs_of_net(self) -> int:
        """The number of these runs that train as one net."""
        return len(self.tried) if TASKS[self.task].together else 1


def plan(
    name: str,
    *,
    norms: Sequence[str] | None = None,
    batch_sizes: Sequence[int] | None = None,
    seeds: int | None = None,
    seeds_alone: int | None = None,
    tried_on: int | None = None,
    samples: int | None = None,
    epochs: int | None = None,
    by_importance: bool = False,
) -> list[Cell]:
    """Return the cells of a task's study, those with the most steps first.

    With ``by_importance`` they come in the task's order of batch sizes, those with other numbers of groups last.
    """
    task = TASKS[name]
    seeds, samples, epochs = (
        default if asked is None else asked
        for asked, default in ((seeds, task.seeds), (samples, task.samples), (epochs, task.epochs))
    )
    for what, number in (("seeds", seeds), ("samples", samples), ("epochs", epochs)):
        if number < 1:
            raise ValueError(f"{what} must be at least 1, got {number}")
    for norm in norms or ():
        if norm not in task.norms:
            raise ValueError(f"unknown normalizer {norm!r}; known here: {', '.join(task.norms)}")
    for size in batch_sizes or ():
        if not 1 <= size <= samples:
            raise ValueError(f"a batch size must be 1 to the number of training samples, {samples:,}; got {size}")
    cells = []
    for size in sorted(batch_sizes or task.batch_sizes):
        seeds_here = min(seeds, seeds_alone or SEEDS_ALONE) if size == 1 else seeds
        tried = min(tried_on or (seeds_here if size <= SMALL and task.together else task.tried_on), seeds_here)
        cells += [Cell(name, norm, size, samples, epochs, seeds_here, tried) for norm in norms or task.norms]
    if by_importance:
        order = {size: place for place, size in enumerate(task.batch_sizes)}
        cells.sort(key=lambda cell: (cell.norm in VARIANTS, order.get(cell.batch_size, len(order))))
    return cells


def key(row: Row) -> Run:
    """Return the run of a line."""
    return Run(**{name: row[name] for name in Run.__dataclass_fields__})


def best_rate(rows: Sequence[Row]) -> float:
    """Return the rate with the highest validation accuracy, mean over the seeds that all rates were tried on."""
    accuracies: dict[float, dict[int, float]] = {}
    for row in rows:
        accuracy = row["curves"]["validation_accuracy"][-1] if row["status"] == "finished" else -math.inf
        accuracies.setdefault(row["learning_rate"], {})[row["seed"]] = accuracy
    shared = set.intersection(*(set(by_seed) for by_seed in accuracies.values()))
    return max(accuracies, key=lambda rate: sum(accuracies[rate][seed] for seed in shared) / max(1, len(shared)))


# ---- the work


class Place(NamedTuple):
    """The folder of results, the folder of data sets, and the device."""

    out: Path
    folder: Path
    device: torch.device


def study(
    cells: Sequence[Cell],
    out: Path,
    folder: Path,
    *,
    device: torch.device,
    workers: int = 1,
    minutes: float | None = None,
    progress: Progress = lambda done, text: None,
) -> Path:
    """Train the cells until all have ended or ``minutes`` are over, and return the path of the table.

    On a GPU several cells train side by side in this process, elsewhere in processes of their own. When time is up,
    nets in this process stop, to go on from their last checkpoint; other processes end their cells.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    budget = Budget(minutes)
    place, path = Place(out, folder, device), out / table.NAME
    with locked(out / "lock"):
        known = {key(row): row for row in table.read(path)}

        def save(rows: list[Row]) -> None:
            if rows:
                known.update((key(row), row) for row in rows)
                table.write(path, known.values())

        if workers == 1 or device.type == "cuda":
            lanes = LANES if device.type == "cuda" else 1
            _in_lanes(cells, known, place, save, progress, lanes=lanes, budget=budget)
        else:
            # A copy for each: jobs are pickled in another thread, while this one adds what has ended.
            jobs = ((cell, dict(known), place) for cell in cells if budget.left() > 0)
            for number, rows in enumerate(side_by_side(_alone, jobs, workers), 1):
                save(rows)
                progress(number, f"{workers} at a time")
    return path


def unfinished(cells: Sequence[Cell], out: Path) -> int:
    """Return the number of cells that have runs left."""
    return sum(steps > 0 for steps in steps_left(cells, out))


def steps_left(cells: Sequence[Cell], out: Path) -> list[float]:
    """Return the training steps left of each cell, summed over its nets."""
    known = {key(row): row for row in table.read(out / table.NAME)}
    return [_steps(cell, known) for cell in cells]


def _alone(cell: Cell, known: dict[Run, Row], place: Place) -> list[Row]:
    rows: list[Row] = []
    training.finish(_work(cell, known, place, rows.extend))
    return rows


def _work(cell: Cell, known: dict[Run, Row], place: Place, save: Save) -> training.CountedWork:
    """Try the learning rates, then train the other seeds with the best one."""
    tried = {run: known[run] for run in cell.tried if run in known}
    untried = [run for run in cell.tried if run not in known]
    rows = yield from _train(untried, cell.name + "-tried", place)
    tried.update(zip(untried, rows, strict=True))
    rate = best_rate(list(tried.values()))
    for row in rows:
        if row["learning_rate"] != rate:
            row["test"] = None  # the test set is used with the chosen learning rate alone
    save(rows)
    rest = [run for run in cell.runs([rate], range(cell.seeds)) if run not in known and run not in tried]
    save((yield from _train(rest, cell.name, place)))


def _train(group: Sequence[Run], name: str, place: Place) -> training.CountedWork:
    """Train runs, as one net if their task allows it, and return their lines."""
    rows: list[Row] = []
    if len(group) > 1 and not TASKS[group[0].task].together:
        for run in group:
            rows += yield from _train([run], f"{name}-{run.learning_rate:g}-seed{run.seed}", place)
    elif group:
        checkpoint = place.out / "checkpoints" / f"{name}-{len(group)}.pt"
        results = yield from Training(group, place.folder, place.device).run(checkpoint)
        origin = {"together": len(group), **runs.origin(place.device)}
        rows = [{**asdict(run), **result, **origin} for run, result in zip(group, results, strict=True)]
        finished = [at for at, row in enumerate(rows) if row["status"] == "finished"]
        # BLN skips the statistics of a mini-batch in which any run is not finite: train the others without those.
        if 0 < len(finished) < len(group):
            again = yield from _train([group[at] for at in finished], name, place)
            for at, row in zip(finished, again, strict=True):
                rows[at] = row
    return rows


class Budget:
    """A limit of time, which admits a cell if the pace so far lets it end in time."""

    def __init__(self, minutes: float | None) -> None:
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._seconds, self._done = 0.0, 0.0

    def left(self) -> float:
        """Return the seconds left."""
        return self._end - time.monotonic()

    def note(self, work: float, seconds: float) -> None:
        """Note the seconds that an amount of work has taken."""
        self._done += work
        self._seconds += seconds

    def admits(self, work: float) -> bool:
        """Return whether an amount of work is likely to end in time. Before any is done, all is admitted."""
        expected = work * self._seconds / self._done if self._done else 0.0
        return 0 < self.left() >= expected


LANES = 12
"""Nets that train side by side on a GPU."""


@dataclass
class _Lane:
    """A cell under way. Work is counted in samples, and each step costs about as much as 16 further ones."""

    cell: Cell
    work: training.CountedWork
    enter: Lane
    amount: float
    since: float
    done: float = 0.0


def _in_lanes(
    cells: Sequence[Cell],
    known: dict[Run, Row],
    place: Place,
    save: Save,
    progress: Progress,
    *,
    lanes: int,
    budget: Budget,
) -> None:
    """Train cells in lanes of their own, some steps of each in turn."""
    waiting = {cell: _steps(cell, known) * (16 + cell.batch_size) for cell in cells}
    active: list[_Lane] = []
    ended, last_progress = 0, -math.inf
    try:
        while budget.left() > 0:
            while len(active) < lanes and (cell := next(filter(lambda c: budget.admits(waiting[c]), waiting), None)):
                work = _work(cell, known, place, save)
                active.append(_Lane(cell, work, lane(place.device), waiting.pop(cell), time.monotonic()))
            if not active:
                return
            for of_cell in list(active):
                with of_cell.enter():
                    steps = next(of_cell.work, None)
                if steps is None:
                    ended += 1
                    active.remove(of_cell)
                    continue
                now, done = time.monotonic(), steps * (16 + of_cell.cell.batch_size)
                budget.note(done, now - of_cell.since)
                of_cell.since, of_cell.done = now, of_cell.done + done
            if time.monotonic() - last_progress > 0.5:
                name = active[0].cell.name if len(active) == 1 else f"{len(active)} nets side by side"
                progress(ended + sum(min(1.0, of_cell.done / of_cell.amount) for of_cell in active), name)
                last_progress = time.monotonic()
    finally:
        for of_cell in active:
            of_cell.work.close()


# ---- costs


def estimate(cells: Sequence[Cell], out: Path, folder: Path, device: torch.device, workers: int = 1) -> Estimate:
    """Estimate the cost of the runs that are left, from a few steps at the smallest and the largest batch size.

    The seconds are those of one net after the other. Side by side on a GPU they take less.
    """
    known = {key(row): row for row in table.read(out / table.NAME)}
    left = {cell: sum(_left(cell, known)) for cell in cells}
    cells = [cell for cell in cells if left[cell]]
    seconds, memories, measured = 0.0, [], 0
    for norm in dict.fromkeys(cell.norm for cell in cells):
        of_norm = sorted((cell for cell in cells if cell.norm == norm), key=lambda cell: cell.batch_size)
        ends = {cell.batch_size: cell for cell in (of_norm[0], of_norm[-1])}
        with lane(device)():  # steps can be captured in a lane alone
            costs = [training.measure(cell.tried[: cell.runs_of_net], folder, device) for cell in ends.values()]
        measured += len(costs)
        for cell in of_norm:
            step, memory = (np.interp(cell.batch_size, [*ends], values) for values in zip(*costs, strict=True))
            # A forward pass takes about a third of a step, and evaluation has larger batches.
            evaluated = TASKS[cell.task].validation * cell.epochs + len(load(cell.task, folder, device).test)
            evaluation = evaluated * costs[-1].step / of_norm[-1].batch_size / 3
            seconds += step * _steps(cell, known) + evaluation * _nets(cell, known)
            memories.append(int(memory))
    side_by_side_nets = LANES if device.type == "cuda" else workers
    if device.type != "cuda":
        seconds /= min(workers, max(1, len(cells)))
    return Estimate(seconds, sum(sorted(memories)[-side_by_side_nets:]), sum(left.values()), f"{measured} nets")


def _left(cell: Cell, known: dict[Run, Row]) -> tuple[int, int]:
    """Return the number of runs left to choose the learning rate by, and of those that follow."""
    untried = sum(run not in known for run in cell.tried)
    rest = cell.seeds - cell.tried_on
    if not untried:
        rate = best_rate([known[run] for run in cell.tried])
        rest = sum(run not in known for run in cell.runs([rate], range(cell.seeds)))
    return untried, rest


def _nets(cell: Cell, known: dict[Run, Row]) -> int:
    return sum(math.ceil(count / cell.runs_of_net) for count in _left(cell, known))


def _steps(cell: Cell, known: dict[Run, Row]) -> int:
    return _nets(cell, known) * (cell.samples // cell.batch_size) * cell.epochs
