"""Every norm at every batch size: learning rates are tried on a few seeds, and the best one gets all of them.

    runs.jsonl      a line for each run: settings, results, time, memory, origin
    checkpoints/    nets under way

A run that has its line is not made again, so the same command goes on where it was stopped, on another machine too.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import runs, table
from ..norms import GROUPS
from ..runs import RunError
from ..steps import lane
from ..table import Row
from . import training
from .tasks import TASKS, load
from .training import Cost, Run, Training

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
        """The runs of these learning rates and seeds."""
        return [
            Run(self.task, self.norm, self.batch_size, rate, seed, self.samples, self.epochs)
            for rate in rates
            for seed in seeds
        ]

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
    seeds, samples, epochs = seeds or task.seeds, samples or task.samples, epochs or task.epochs
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
    """The run a line is of."""
    return Run(**{name: row[name] for name in Run.__dataclass_fields__})


def best_rate(rows: Sequence[Row]) -> float:
    """The learning rate with the highest accuracy on validation data, mean over the seeds all rates were tried on."""
    found: dict[float, dict[int, float]] = {}
    for row in rows:
        accuracy = row["curves"]["validation_accuracy"][-1] if row["status"] == "finished" else -math.inf
        found.setdefault(row["learning_rate"], {})[row["seed"]] = accuracy
    shared = set.intersection(*(set(each) for each in found.values()))
    return max(found, key=lambda rate: sum(found[rate][seed] for seed in shared) / max(1, len(shared)))


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another process works on {out}; wait for it, or take another --out") from None
        yield


# ---- the work


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
    on from its last whole epoch; processes end the cell they are at.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    budget = Budget(minutes)
    path = out / table.NAME
    with _locked(out):
        known = {key(row): row for row in table.read(path)}
        (out / "checkpoints").mkdir(exist_ok=True)

        def keep(rows: list[Row]) -> None:
            known.update((key(row), row) for row in rows)
            table.write(path, known.values())

        jobs = [(cell, _own(cell, known)) for cell in cells]
        if workers == 1 or device.type == "cuda":
            lanes = LANES if device.type == "cuda" else 1
            _side_by_side(jobs, out, folder, device, keep, progress, lanes=lanes, budget=budget)
        else:
            from joblib import Parallel, delayed

            parallel = Parallel(
                n_jobs=workers, backend="loky", batch_size=1, pre_dispatch=workers, return_as="generator_unordered"
            )
            ended = parallel(
                delayed(_process)(cell, rows, out, folder, device, threads(workers))
                for cell, rows in jobs
                if budget.left() > 0
            )
            for number, rows in enumerate(ended, 1):
                keep(rows)
                progress(number, f"{workers} at a time")
    return path


def unfinished(cells: Sequence[Cell], out: Path) -> int:
    """Return how many of these cells have runs left."""
    return sum(steps > 0 for steps in steps_left(cells, out))


def steps_left(cells: Sequence[Cell], out: Path) -> list[float]:
    """Return the training steps that each of these cells still takes, over its runs."""
    known = {key(row): row for row in table.read(out / table.NAME)}
    return [sum(_left(cell, known)) * cell.epochs * cell.samples / cell.batch_size for cell in cells]


def threads(workers: int) -> int:
    """Return how many threads each of ``workers`` processes has on this machine."""
    return max(1, (os.cpu_count() or 1) // workers)


def _own(cell: Cell, known: dict[Run, Row]) -> dict[Run, Row]:
    every = {*cell.tried, *cell.runs(cell.rates, range(cell.seeds))}
    return {run: row for run, row in known.items() if run in every}


def _process(cell: Cell, known: dict[Run, Row], out: Path, folder: Path, device: torch.device, count: int) -> list[Row]:
    torch.set_num_threads(count)
    found: list[Row] = []
    for _ in _work(cell, known, out, folder, device, found.extend):
        pass
    return found


Work = Generator[float, None, None]


def _work(cell: Cell, known: dict[Run, Row], out: Path, folder: Path, device: torch.device, keep: Keep) -> Work:
    """Try the learning rates, then train what is left of the seeds with the best; says what share is done."""
    known = dict(known)
    tried = [run for run in cell.tried if run not in known]
    first = yield from _scaled(_train(tried, cell.name + "-tried", out, folder, device), 0.5)
    known.update(zip(tried, first, strict=True))
    rate = best_rate([known[run] for run in cell.tried])
    for run, row in zip(tried, first, strict=True):
        if run.learning_rate != rate:
            row["test"] = None  # the test set is for the learning rate that was chosen
    if first:
        keep(first)
    rest = [run for run in cell.runs([rate], range(cell.seeds)) if run not in known]
    second = yield from _scaled(_train(rest, cell.name, out, folder, device), 0.5, 0.5)
    if second:
        keep(second)


def _scaled(work: training.Work, share: float, before: float = 0.0) -> Generator[float, None, list[Row]]:
    try:
        while True:
            yield before + share * next(work)
    except StopIteration as end:
        rows: list[Row] = end.value
        return rows
    finally:
        work.close()


def _train(group: Sequence[Run], name: str, out: Path, folder: Path, device: torch.device) -> training.Work:
    """Train these runs, as one net where their task can, and return their lines."""
    if not group:
        return []
    if len(group) > 1 and not TASKS[group[0].task].together:
        each = []
        for at, run in enumerate(group):
            own = _train([run], f"{name}-{run.learning_rate:g}-seed{run.seed}", out, folder, device)
            each += yield from _scaled(own, 1 / len(group), at / len(group))
        return each
    checkpoint = out / "checkpoints" / f"{name}-{len(group)}.pt"
    found = yield from Training(group, folder, device).run(checkpoint)
    finished = [at for at, each in enumerate(found) if each["status"] == "finished"]
    rows = [
        {**asdict(run), **each, "together": len(group), **runs.origin(runs.environment())}
        for run, each in zip(group, found, strict=True)
    ]
    if 0 < len(finished) < len(group):  # BLN keeps no statistics of a mini-batch in which one run is not finite
        again = yield from _train([group[at] for at in finished], name, out, folder, device)
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


def _amount(cell: Cell, known: dict[Run, Row]) -> float:
    """The work of a cell that is left, in units of a sample; a step costs about as much as 16 of them."""
    nets = sum(math.ceil(count / cell.at_once) for count in _left(cell, known))
    return nets * (cell.samples // cell.batch_size) * cell.epochs * (16 + cell.batch_size)


LANES = 12
"""Nets that train side by side on a GPU."""


@dataclass
class _Lane:
    """A cell under way."""

    work: Work
    enter: Callable[[], Any]
    amount: float
    share: float = 0.0
    since: float = 0.0


def _side_by_side(
    jobs: Sequence[tuple[Cell, dict[Run, Row]]],
    out: Path,
    folder: Path,
    device: torch.device,
    keep: Keep,
    progress: Progress,
    *,
    lanes: int = LANES,
    budget: Budget,
) -> None:
    """Several cells in lanes of their own, some steps of each in turn."""
    waiting = [(cell, rows, _amount(cell, rows)) for cell, rows in jobs]
    active: dict[Cell, _Lane] = {}
    ended, told = 0, -math.inf
    try:
        while budget.left() > 0:
            while len(active) < lanes and (job := next((job for job in waiting if budget.admits(job[2])), None)):
                waiting.remove(job)
                cell, rows, amount = job
                work = _work(cell, rows, out, folder, device, keep)
                active[cell] = _Lane(work, lane(device), amount, since=time.monotonic())
            if not active:
                return
            for cell, each in list(active.items()):
                with each.enter():
                    share = next(each.work, None)
                now = time.monotonic()
                budget.note(((1.0 if share is None else share) - each.share) * each.amount, now - each.since)
                each.share, each.since = 1.0 if share is None else share, now
                if share is None:
                    ended += 1
                    del active[cell]
            if time.monotonic() - told > 0.5:
                done = ended + sum(each.share for each in active.values())
                names = (
                    ", ".join(cell.name for cell in active) if len(active) < 2 else f"{len(active)} nets side by side"
                )
                progress(done, names)
                told = time.monotonic()
    finally:
        for each in active.values():
            each.work.close()


# ---- what it takes


@dataclass(frozen=True)
class Estimate:
    """What a study takes on this machine.

    Attributes:
        seconds: Of one net after the other; side by side on a GPU they take less.
        memory: Bytes of the nets that are in memory at once.
        runs: Trainings, those that choose learning rates included.
        measured: Nets whose steps were timed.
    """

    seconds: float
    memory: int
    runs: int
    measured: int

    def text(self) -> str:
        """One sentence."""
        return runs.forecast(self.runs, self.seconds, self.memory, f"{self.measured} nets")


def estimate(cells: Sequence[Cell], out: Path, folder: Path, device: torch.device, workers: int = 1) -> Estimate:
    """Time a few steps of each norm at the smallest and the largest batch size; what lies between is interpolated."""
    known = {key(row): row for row in table.read(out / table.NAME)}
    left = {cell: _left(cell, known) for cell in cells}
    cells = [cell for cell in cells if sum(left[cell])]
    seconds, memories, measured = 0.0, [], 0
    for norm in dict.fromkeys(cell.norm for cell in cells):
        own = sorted((cell for cell in cells if cell.norm == norm), key=lambda cell: cell.batch_size)
        ends = {cell.batch_size: cell for cell in (own[0], own[-1])}
        with lane(device)():  # a step is not captured outside of one
            costs = {size: training.measure(cell.tried[: cell.at_once], folder, device) for size, cell in ends.items()}
        measured += len(costs)
        for cell in own:
            cost = _between(costs, cell.batch_size)
            steps = cell.samples // cell.batch_size * cell.epochs
            # A forward pass takes about a third of a step, and evaluation has larger batches.
            seen = TASKS[cell.task].validation * cell.epochs + len(load(cell.task, folder, device).test)
            once = cost.step * steps + seen * costs[own[-1].batch_size].step / own[-1].batch_size / 3
            seconds += once * sum(max(1.0, count / cell.at_once) for count in left[cell] if count)
            memories.append(cost.memory)
    at_once = LANES if device.type == "cuda" else workers
    if device.type != "cuda":
        seconds /= min(workers, max(1, len(cells)))
    return Estimate(seconds, sum(sorted(memories)[-at_once:]), sum(map(sum, left.values())), measured)


def _left(cell: Cell, known: dict[Run, Row]) -> tuple[int, int]:
    """How many runs there still are: to choose the learning rate, and then."""
    tried = sum(run not in known for run in cell.tried)
    rest = cell.seeds - cell.tried_on
    if not tried:
        rate = best_rate([known[run] for run in cell.tried])
        rest = sum(run not in known for run in cell.runs([rate], range(cell.seeds)))
    return tried, rest


def _between(costs: dict[int, Cost], size: int) -> Cost:
    """A cost grows linearly with the batch size."""
    (small, low), (large, high) = min(costs.items()), max(costs.items())
    share = (size - small) / (large - small) if large > small else 0.0
    return Cost(low.step + share * (high.step - low.step), round(low.memory + share * (high.memory - low.memory)))
