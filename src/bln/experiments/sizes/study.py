"""Every norm at every batch size: learning rates are tried on a few seeds, and the best one gets all of them.

    runs.jsonl      a line for each run: settings, seed, what came out, time and memory, commit, versions, device
    checkpoints/    nets under way

A run that has its line is not made again, so the same command goes on where it was stopped, on another machine too.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import runs
from ..runs import RunError
from ..steps import lane
from . import training
from .nets import NORMALIZERS
from .training import TASKS, Cost, Run, Training

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 128)
NORMS = tuple(NORMALIZERS)
SEEDS, SEEDS_ALONE = 5, 3
"""Of each norm and batch size; at batch size 1, where a run takes most steps."""
TRIED_ON, SMALL = 2, 4
"""Seeds that each learning rate is tried on; up to this batch size all, since more runs in a net cost little there."""
RATES = (1 / 3, 1, 3)
"""Learning rates that are tried, as multiples of the task's, which grows with the root of the batch size."""

Row = dict[str, Any]
Progress = Callable[[float, str], None]
Keep = Callable[[list[Row]], None]


@dataclass(frozen=True)
class Cell:
    """One norm at one batch size, with several learning rates and seeds."""

    task: str
    norm: str
    batch_size: int
    images: int
    epochs: int
    seeds: int
    tried_on: int

    @property
    def name(self) -> str:
        """The cell's name."""
        return f"{self.task}-{self.norm}-batch{self.batch_size}-{self.images}-{self.epochs}"

    @property
    def rates(self) -> list[float]:
        """The learning rates tried, to two digits."""
        middle = TASKS[self.task].learning_rate * math.sqrt(self.batch_size / 32)
        return [float(f"{factor * middle:.2g}") for factor in RATES]

    def runs(self, rates: Iterable[float], seeds: Iterable[int]) -> list[Run]:
        """The runs of these learning rates and seeds."""
        return [
            Run(self.task, self.norm, self.batch_size, rate, seed, self.images, self.epochs)
            for rate in rates
            for seed in seeds
        ]

    @property
    def tried(self) -> list[Run]:
        """The runs that the learning rate is chosen by."""
        return self.runs(self.rates, range(self.tried_on))


def plan(
    task: str,
    *,
    norms: Sequence[str] | None = None,
    batch_sizes: Sequence[int] | None = None,
    seeds: int | None = None,
    seeds_alone: int | None = None,
    tried_on: int | None = None,
    images: int | None = None,
    epochs: int | None = None,
) -> list[Cell]:
    """The cells of a study, those with most steps first."""
    seeds, images, epochs = seeds or SEEDS, images or TASKS[task].images, epochs or TASKS[task].epochs
    for name in norms or ():
        if name not in NORMALIZERS:
            raise ValueError(f"unknown normalizer {name!r}; known here: {', '.join(NORMALIZERS)}")
    for size in batch_sizes or ():
        if not 1 <= size <= images:
            raise ValueError(f"a batch size must be 1 to the number of images, {images:,}; got {size}")
    return [
        Cell(task, norm, size, images, epochs, own, min(tried_on or (own if size <= SMALL else TRIED_ON), own))
        for size in sorted(batch_sizes or BATCH_SIZES)
        for own in [min(seeds, seeds_alone or SEEDS_ALONE) if size == 1 else seeds]
        for norm in norms or NORMS
    ]


# ---- the table


def table(out: Path) -> Path:
    """Where the lines of all runs are."""
    return out / "runs.jsonl"


def read(path: Path) -> list[Row]:
    """The lines of all runs; none if there is no table yet. A last line that was cut off is left out."""
    try:
        lines = path.read_text("utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


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
    progress: Progress = lambda done, text: None,
) -> Path:
    """Bring all cells to their end and return the table.

    On a GPU several cells train side by side in this process, elsewhere in processes of their own.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    path = table(out)
    with _locked(out):
        known = {key(row): row for row in read(path)}
        (out / "checkpoints").mkdir(exist_ok=True)

        def keep(rows: list[Row]) -> None:
            known.update((key(row), row) for row in rows)
            runs.write(path, "".join(json.dumps(row) + "\n" for row in known.values()).encode())

        jobs = [(cell, _own(cell, known)) for cell in cells]
        if device.type == "cuda":
            _side_by_side(jobs, out, folder, device, keep, progress)
        elif workers == 1:
            for number, (cell, rows) in enumerate(jobs):
                for done in _work(cell, rows, out, folder, device, keep):
                    progress(number + done, cell.name)
        else:
            from joblib import Parallel, delayed

            parallel = Parallel(n_jobs=workers, backend="loky", batch_size=1, return_as="generator_unordered")
            ended = parallel(
                delayed(_process)(cell, rows, out, folder, device, threads(workers)) for cell, rows in jobs
            )
            for number, rows in enumerate(ended, 1):
                keep(rows)
                progress(number, f"{number} of {len(jobs)} norms and batch sizes")
    return path


def threads(workers: int) -> int:
    """How many threads each of so many processes has on this machine."""
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
    while True:
        try:
            done = next(work)
        except StopIteration as end:
            rows: list[Row] = end.value
            return rows
        yield before + share * done


def _train(group: Sequence[Run], name: str, out: Path, folder: Path, device: torch.device) -> training.Work:
    """Train these runs as one net, and return their lines."""
    if not group:
        return []
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


LANES = 12
"""Nets that train side by side on a GPU."""


def _side_by_side(
    jobs: Sequence[tuple[Cell, dict[Run, Row]]],
    out: Path,
    folder: Path,
    device: torch.device,
    keep: Keep,
    progress: Progress,
) -> None:
    """Several cells on streams of their own, some steps of each in turn."""
    waiting = iter(jobs)
    active: dict[Cell, tuple[Work, Callable[[], Any]]] = {}
    shares: dict[Cell, float] = {}
    told = -math.inf
    try:
        while True:
            while len(active) < LANES and (job := next(waiting, None)) is not None:
                cell, rows = job
                active[cell] = _work(cell, rows, out, folder, device, keep), lane(device)
            if not active:
                return
            for cell, (work, enter) in list(active.items()):
                with enter():
                    share = next(work, None)
                shares[cell] = 1.0 if share is None else share
                if share is None:
                    del active[cell]
            if time.monotonic() - told > 0.5:
                progress(sum(shares.values()), f"{len(active)} nets side by side")
                told = time.monotonic()
    finally:
        for work, _ in active.values():
            work.close()


# ---- what it takes


@dataclass(frozen=True)
class Estimate:
    """What a study takes on this machine.

    Attributes:
        seconds: One net after the other; on a GPU they go side by side, and it is less.
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
    known = {key(row): row for row in read(table(out))}
    left = {cell: _left(cell, known) for cell in cells}
    cells = [cell for cell in cells if sum(left[cell])]
    seconds, memories, measured = 0.0, [], 0
    for norm in dict.fromkeys(cell.norm for cell in cells):
        own = sorted((cell for cell in cells if cell.norm == norm), key=lambda cell: cell.batch_size)
        ends = {cell.batch_size: cell for cell in (own[0], own[-1])}
        costs = {size: training.measure(cell.tried, folder, device) for size, cell in ends.items()}
        measured += len(costs)
        for cell in own:
            cost = _between(costs, cell.batch_size)
            steps = cell.images // cell.batch_size * cell.epochs
            # A forward pass takes about a third of a step, and evaluation has larger batches.
            seen = TASKS[cell.task].validation * cell.epochs + training.tested(cell.task, folder, device)
            once = cost.step * steps + seen * costs[own[-1].batch_size].step / own[-1].batch_size / 3
            seconds += once * sum(max(1.0, count / len(cell.tried)) for count in left[cell] if count)
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
