"""Every norm at every batch size: learning rates are tried on a few seeds, and the best one gets all of them.

    runs.jsonl      a line for each run: settings, results, time, memory, origin
    checkpoints/    nets under way

A run that has its line is not made again, so the same command goes on where it was stopped, on another machine too.
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
from ..runs import Estimate, locked
from ..steps import Lane, lane
from ..table import Row
from . import training
from .tasks import TASKS, load
from .training import Run, Training

SEEDS_ALONE = 3
"""Seeds at batch size 1, where a run takes most steps, at most."""
SMALL = 4
"""Up to this batch size rates are tried on all seeds where runs train together: more of them cost little there."""
VARIANTS = {name for name in GROUPS if name != "bln-grouped"}
RATES = (1 / 3, 1, 3)
"""Learning rates that are tried, as multiples of the task's, which grows with the root of the batch size."""

Progress = Callable[[float, str], None]
Keep = Callable[[list[Row]], None]


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
        """The cell's name."""
        return f"{self.task}-{self.norm}-batch{self.batch_size}-{self.samples}-{self.epochs}"

    @property
    def rates(self) -> list[float]:
        """The learning rates tried, to two digits."""
        middle = TASKS[self.task].learning_rate * math.sqrt(self.batch_size / 32)
        return [float(f"{factor * middle:.2g}") for factor in RATES]

    def runs(self, rates: Iterable[float], seeds: Iterable[int]) -> list[Run]:
        """Return the runs of these learning rates and seeds."""
        given = self.task, self.norm, self.batch_size
        return [Run(*given, rate, seed, self.samples, self.epochs) for rate in rates for seed in seeds]

    @property
    def tried(self) -> list[Run]:
        """The runs that the learning rate is chosen by."""
        return self.runs(self.rates, range(self.tried_on))

    @property
    def at_once(self) -> int:
        """How many of these are one net."""
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
    """Return the cells of a task's study, those with most steps first, or those that say most.

    Those say most that compare kinds of norms, batch size by batch size in the order of the task; numbers of groups
    come after them.
    """
    task = TASKS[name]
    seeds, samples, epochs = (
        own if given is None else given
        for given, own in ((seeds, task.seeds), (samples, task.samples), (epochs, task.epochs))
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
        own = min(seeds, seeds_alone or SEEDS_ALONE) if size == 1 else seeds
        tried = tried_on or (own if size <= SMALL and task.together else task.tried_on)
        cells += [Cell(name, norm, size, samples, epochs, own, min(tried, own)) for norm in norms or task.norms]
    if by_importance:
        order = {size: place for place, size in enumerate(task.batch_sizes)}
        cells.sort(key=lambda cell: (cell.norm in VARIANTS, order.get(cell.batch_size, len(order))))
    return cells


def key(row: Row) -> Run:
    """Return the run a line is of."""
    return Run(**{name: row[name] for name in Run.__dataclass_fields__})


def best_rate(rows: Sequence[Row]) -> float:
    """Return the rate with the highest accuracy on validation data, mean over the seeds all rates were tried on."""
    found: dict[float, dict[int, float]] = {}
    for row in rows:
        accuracy = row["curves"]["validation_accuracy"][-1] if row["status"] == "finished" else -math.inf
        found.setdefault(row["learning_rate"], {})[row["seed"]] = accuracy
    shared = set.intersection(*(set(each) for each in found.values()))
    return max(found, key=lambda rate: sum(found[rate][seed] for seed in shared) / max(1, len(shared)))


# ---- the work


class Place(NamedTuple):
    """Where work is done: the folder of results, the one of data sets, and the device."""

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
    """Bring the cells to their end, those that ``minutes`` allow, and return the table.

    On a GPU several cells train side by side in this process, elsewhere in processes of their own. What is cut off goes
    on from its last checkpoint; processes end the cell they are at.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    budget = Budget(minutes)
    place, path = Place(out, folder, device), out / table.NAME
    with locked(out / "lock"):
        known = {key(row): row for row in table.read(path)}

        def keep(rows: list[Row]) -> None:
            if rows:
                known.update((key(row), row) for row in rows)
                table.write(path, known.values())

        if workers == 1 or device.type == "cuda":
            lanes = LANES if device.type == "cuda" else 1
            _in_lanes(cells, known, place, keep, progress, lanes=lanes, budget=budget)
        else:
            # A copy for each: jobs are pickled in another thread, while this one adds what has ended.
            jobs = ((cell, dict(known), place) for cell in cells if budget.left() > 0)
            for number, rows in enumerate(side_by_side(_alone, jobs, workers), 1):
                keep(rows)
                progress(number, f"{workers} at a time")
    return path


def unfinished(cells: Sequence[Cell], out: Path) -> int:
    """Return how many of these cells have runs left."""
    return sum(steps > 0 for steps in steps_left(cells, out))


def steps_left(cells: Sequence[Cell], out: Path) -> list[float]:
    """Return the training steps that each of these cells still takes, over its nets."""
    known = {key(row): row for row in table.read(out / table.NAME)}
    return [_steps(cell, known) for cell in cells]


def _alone(cell: Cell, known: dict[Run, Row], place: Place) -> list[Row]:
    found: list[Row] = []
    training.finish(_work(cell, known, place, found.extend))
    return found


def _work(cell: Cell, known: dict[Run, Row], place: Place, keep: Keep) -> training.Work:
    """Try the learning rates, then train what is left of the seeds with the best."""
    found = {run: known[run] for run in cell.tried if run in known}
    tried = [run for run in cell.tried if run not in known]
    rows = yield from _train(tried, cell.name + "-tried", place)
    found.update(zip(tried, rows, strict=True))
    rate = best_rate(list(found.values()))
    for row in rows:
        if row["learning_rate"] != rate:
            row["test"] = None  # the test set is for the learning rate that was chosen
    keep(rows)
    rest = [run for run in cell.runs([rate], range(cell.seeds)) if run not in known and run not in found]
    keep((yield from _train(rest, cell.name, place)))


def _train(group: Sequence[Run], name: str, place: Place) -> training.Work:
    """Train these runs, as one net where their task can, and return their lines."""
    rows: list[Row] = []
    if len(group) > 1 and not TASKS[group[0].task].together:
        for run in group:
            rows += yield from _train([run], f"{name}-{run.learning_rate:g}-seed{run.seed}", place)
    elif group:
        checkpoint = place.out / "checkpoints" / f"{name}-{len(group)}.pt"
        found = yield from Training(group, place.folder, place.device).run(checkpoint)
        more = {"together": len(group), **runs.origin(place.device)}
        rows = [{**asdict(run), **each, **more} for run, each in zip(group, found, strict=True)]
        finished = [at for at, row in enumerate(rows) if row["status"] == "finished"]
        if 0 < len(finished) < len(group):  # BLN keeps no statistics of a mini-batch in which one run is not finite
            again = yield from _train([group[at] for at in finished], name, place)
            for at, row in zip(finished, again, strict=True):
                rows[at] = row
    return rows


class Budget:
    """Time to spend. It admits a cell that is likely to end in time, by what work has taken so far."""

    def __init__(self, minutes: float | None) -> None:
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._seconds, self._done = 0.0, 0.0

    def left(self) -> float:
        """Return the seconds left."""
        return self._end - time.monotonic()

    def note(self, work: float, seconds: float) -> None:
        """Note the seconds that some work has taken."""
        self._done += work
        self._seconds += seconds

    def admits(self, work: float) -> bool:
        """Return whether so much work is likely to end in time; the first is tried."""
        expected = work * self._seconds / self._done if self._done else 0.0
        return 0 < self.left() >= expected


LANES = 12
"""Nets that train side by side on a GPU."""


@dataclass
class _Lane:
    """A cell under way; its work is counted in samples, and a step costs about as much as 16 of them."""

    cell: Cell
    work: training.Work
    enter: Lane
    amount: float
    since: float
    done: float = 0.0


def _in_lanes(
    cells: Sequence[Cell],
    known: dict[Run, Row],
    place: Place,
    keep: Keep,
    progress: Progress,
    *,
    lanes: int,
    budget: Budget,
) -> None:
    """Several cells in lanes of their own, some steps of each in turn."""
    waiting = {cell: _steps(cell, known) * (16 + cell.batch_size) for cell in cells}
    active: list[_Lane] = []
    ended, told = 0, -math.inf
    try:
        while budget.left() > 0:
            while len(active) < lanes and (cell := next(filter(lambda c: budget.admits(waiting[c]), waiting), None)):
                work = _work(cell, known, place, keep)
                active.append(_Lane(cell, work, lane(place.device), waiting.pop(cell), time.monotonic()))
            if not active:
                return
            for each in list(active):
                with each.enter():
                    steps = next(each.work, None)
                if steps is None:
                    ended += 1
                    active.remove(each)
                    continue
                now, done = time.monotonic(), steps * (16 + each.cell.batch_size)
                budget.note(done, now - each.since)
                each.since, each.done = now, each.done + done
            if time.monotonic() - told > 0.5:
                name = active[0].cell.name if len(active) == 1 else f"{len(active)} nets side by side"
                progress(ended + sum(min(1.0, each.done / each.amount) for each in active), name)
                told = time.monotonic()
    finally:
        for each in active:
            each.work.close()


# ---- what it takes


def estimate(cells: Sequence[Cell], out: Path, folder: Path, device: torch.device, workers: int = 1) -> Estimate:
    """Time a few steps of each norm at the smallest and the largest batch size; what lies between is interpolated.

    The seconds are those of one net after the other; side by side on a GPU they take less.
    """
    known = {key(row): row for row in table.read(out / table.NAME)}
    left = {cell: sum(_left(cell, known)) for cell in cells}
    cells = [cell for cell in cells if left[cell]]
    seconds, memories, measured = 0.0, [], 0
    for norm in dict.fromkeys(cell.norm for cell in cells):
        own = sorted((cell for cell in cells if cell.norm == norm), key=lambda cell: cell.batch_size)
        ends = {cell.batch_size: cell for cell in (own[0], own[-1])}
        with lane(device)():  # a step is not captured outside of one
            costs = [training.measure(cell.tried[: cell.at_once], folder, device) for cell in ends.values()]
        measured += len(costs)
        for cell in own:
            step, memory = (np.interp(cell.batch_size, [*ends], values) for values in zip(*costs, strict=True))
            # A forward pass takes about a third of a step, and evaluation has larger batches.
            seen = TASKS[cell.task].validation * cell.epochs + len(load(cell.task, folder, device).test)
            evaluation = seen * costs[-1].step / own[-1].batch_size / 3
            seconds += step * _steps(cell, known) + evaluation * _nets(cell, known)
            memories.append(int(memory))
    at_once = LANES if device.type == "cuda" else workers
    if device.type != "cuda":
        seconds /= min(workers, max(1, len(cells)))
    return Estimate(seconds, sum(sorted(memories)[-at_once:]), sum(left.values()), f"{measured} nets")


def _left(cell: Cell, known: dict[Run, Row]) -> tuple[int, int]:
    """Return how many runs there still are: to choose the learning rate, and then."""
    tried = sum(run not in known for run in cell.tried)
    rest = cell.seeds - cell.tried_on
    if not tried:
        rate = best_rate([known[run] for run in cell.tried])
        rest = sum(run not in known for run in cell.runs([rate], range(cell.seeds)))
    return tried, rest


def _nets(cell: Cell, known: dict[Run, Row]) -> int:
    return sum(math.ceil(count / cell.at_once) for count in _left(cell, known))


def _steps(cell: Cell, known: dict[Run, Row]) -> int:
    return _nets(cell, known) * (cell.samples // cell.batch_size) * cell.epochs
