"""``bln reproduce``: makes many runs side by side, here or on Ray, and their lines of the table."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from .._install import install
from . import runs, table
from .norms import norm
from .runs import RunError, RunFolder, Settings
from .tasks import TASKS
from .training import measure, train_together

BATCH_SIZES = (1, 25)
FRACTIONS = (0.2, 1.0)
NORMS = ("bln", "bn", "ln")
PROTOCOLS = ("paper", "clean")


def plan(
    tasks: Sequence[str],
    *,
    batch_sizes: Sequence[int] | None = None,
    fractions: Sequence[float] | None = None,
    norms: Sequence[str] | None = None,
    seeds: int = 5,
    protocol: str = "paper",
    epochs: int | None = None,
) -> list[Settings]:
    """Return the runs of these tasks. ``None`` is what the paper has: all the data at batch size 25 alone."""
    for size in batch_sizes or ():
        if size < 1:
            raise ValueError(f"a batch size must be at least 1, got {size}")
    for fraction in fractions or ():
        if not 0 < fraction <= 1:
            raise ValueError(f"a fraction of the training data must be in (0, 1], got {fraction:g}")
    for name, value in (("seeds", seeds), ("epochs", epochs)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if protocol not in PROTOCOLS:
        raise ValueError(f"the protocol must be 'paper' or 'clean', got {protocol!r}")
    for name in norms or ():
        norm(name)

    found = []
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
        combinations = itertools.product(
            fractions or FRACTIONS, batch_sizes or BATCH_SIZES, norms or NORMS, range(seeds)
        )
        for fraction, size, name, seed in combinations:
            given = fractions is not None and batch_sizes is not None
            if fraction == 1 and size != 25 and not given:
                continue
            found.append(Settings(task, name, size, fraction, seed, protocol, epochs or TASKS[task].epochs))
    return found


def device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` is a GPU where the machine has one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(name)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return chosen


Progress = Callable[[float, str], None]
"""Called with the number of runs done, fractions included, and what is under way."""


def reproduce(
    settings: Sequence[Settings],
    out: Path,
    data_dir: Path,
    *,
    device: torch.device,
    workers: int = 1,
    backend: str = "local",
    address: str | None = None,
    progress: Progress = lambda done, text: None,
) -> dict[Settings, str]:
    """Bring all runs to their end, and return how each ended. One that cannot go on does not stop the others.

    On a GPU runs that differ in the seed alone train together, each on a stream of its own.

    Args:
        settings: The runs.
        out: Where their folders are; with ``ray``, on storage all machines share.
        data_dir: Where the data sets are, likewise.
        device: To train on.
        workers: Processes side by side.
        backend: ``local``, processes of joblib; or ``ray``, tasks of a Ray cluster. A task whose worker is lost is
            started again on another, and resumes from its checkpoint.
        address: Of the cluster; without one, Ray starts on this machine.
        progress: Told how far it is.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if backend not in ("local", "ray"):
        raise ValueError(f"the backend must be 'local' or 'ray', got {backend!r}")
    groups = _groups(settings, TOGETHER if device.type == "cuda" else 1)
    if backend == "ray":
        with _watched(settings, out, progress):
            ended = _on_ray(groups, out.resolve(), data_dir.resolve(), device, workers, address)
    elif workers == 1:
        ended, before = [], 0
        for group in groups:
            ended.append(_run_here(group, out, data_dir, device, progress, before))
            before += len(group)
    else:
        from joblib import Parallel, delayed

        threads = max(1, (os.cpu_count() or 1) // workers)
        with _watched(settings, out, progress):
            parallel = Parallel(n_jobs=workers, backend="loky", batch_size=1)
            ended = parallel(delayed(_run_alone)(group, out, data_dir, device, threads) for group in groups)
    found = {each: status for statuses in ended for each, status in statuses.items()}
    return {each: found[each] for each in settings}


TOGETHER = 8
"""The most runs that train together: each holds its data on the device."""


def _groups(settings: Sequence[Settings], most: int) -> list[list[Settings]]:
    """Return groups of runs that differ in the seed alone, of limited size."""
    alike: dict[Settings, list[Settings]] = {}
    for each in settings:
        alike.setdefault(replace(each, seed=0), []).append(each)
    return [group[at : at + most] for group in alike.values() for at in range(0, len(group), most)]


def _run(
    group: Sequence[Settings], out: Path, data_dir: Path, device: torch.device, tick: Callable[[float], None]
) -> dict[Settings, str]:
    ended = train_together(group, out, data_dir, device, tick)
    statuses = (f"error: {each}" if isinstance(each, RunError) else each for each in ended)
    return dict(zip(group, statuses, strict=True))


def _run_here(
    group: Sequence[Settings], out: Path, data_dir: Path, device: torch.device, progress: Progress, before: int
) -> dict[Settings, str]:
    name = group[0].name + (f" and {len(group) - 1} more seeds" if len(group) > 1 else "")
    progress(before, name)
    return _run(group, out, data_dir, device, lambda done: progress(before + done * len(group), name))


def _run_alone(
    group: Sequence[Settings], out: Path, data_dir: Path, device: torch.device, threads: int
) -> dict[Settings, str]:
    torch.set_num_threads(threads)
    return _run(group, out, data_dir, device, lambda done: None)


_LOST = 5
"""How often a run is started again after its worker was lost."""
_PATIENCE = 10.0
"""Seconds that a cluster has to answer."""


def _on_ray(
    groups: Sequence[Sequence[Settings]],
    out: Path,
    data_dir: Path,
    device: torch.device,
    workers: int,
    address: str | None,
) -> list[dict[Settings, str]]:
    if address is not None:
        _look_for(address)
    try:
        import ray
    except ImportError:
        raise ValueError(f"--backend ray needs Ray: {install('ray')}") from None
    begun = not ray.is_initialized()
    if begun:
        try:
            ray.init(address=address, num_cpus=None if address else workers, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise ValueError(f"no Ray cluster at {address!r}: {str(error).splitlines()[0]}") from None
    lost = ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError
    try:
        task = ray.remote(num_cpus=1, num_gpus=int(device.type == "cuda"), max_retries=_LOST)(_run_alone)
        statuses: list[dict[Settings, str]] = []
        for group, run in [(group, task.remote(group, out, data_dir, device, 1)) for group in groups]:
            try:
                statuses.append(ray.get(run))
            except lost as error:
                why = f"error: it lost its worker {_LOST + 1} times: {str(error).splitlines()[0]}"
                statuses.append(dict.fromkeys(group, why))
        return statuses
    finally:
        if begun:
            ray.shutdown()


def _look_for(address: str) -> None:
    """Refuse an address where nobody answers: Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address in ("auto", "local"):
        return
    if not (host and port.isdigit()):
        raise ValueError(f"the address of a Ray cluster must be host:port, ray://host:port or auto, got {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"no Ray cluster at {address!r}: {error}; `ray start --head` prints its address") from None


@contextmanager
def _watched(settings: Sequence[Settings], out: Path, progress: Progress) -> Iterator[None]:
    """Report the progress of other processes, as their folders show it."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(1.0):
            folders = [RunFolder(out, each) for each in settings]
            done = [1.0 if f.result() else len(f.metrics()) / (f.settings.epochs + 1) for f in folders]
            progress(sum(done), f"{sum(d == 1 for d in done)} of {len(done)} runs finished")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def rows(out: Path) -> list[table.Row]:
    """Return the lines of the table of runs: all runs in a folder, under way or finished."""
    found = []
    for path in sorted((out / "runs").glob("*/settings.json")):
        read = runs.read_json(path)
        if read is None or read.get("format") != runs.FORMAT:
            continue
        folder = RunFolder(out, Settings(**read["settings"]))
        lines = folder.metrics()
        blank = {"status": "running", "best_epoch": None, "test": None, "chosen": None, "configurations": None}
        names = ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy")
        found.append(
            {
                **asdict(folder.settings),
                "curves": {name: [_rounded(line[name]) for line in lines] for name in names},
                "seconds": folder.seconds(),
                "hours": _rounded(sum(folder.seconds()) / 3600),
                "memory_mib": _mebibytes(folder.memory()),
                **runs.origin(read["environment"]),
                **_rounded(folder.result() or blank),
            }
        )
    return found


def _mebibytes(count: int | None) -> float | None:
    return None if count is None else round(count / 2**20, 3)


def estimate(settings: Sequence[Settings], out: Path, data_dir: Path, device: torch.device, workers: int = 1) -> str:
    """Return what the runs that are left take, in a sentence, from a few measured steps of each kind."""
    found = {each: _epochs_left(out, each) for each in settings}
    left = {each: epochs for each, epochs in found.items() if epochs is not None}
    costs, seconds = {}, 0.0
    for each, epochs in left.items():
        kind = replace(each, seed=0, epochs=0)
        if kind not in costs:
            costs[kind] = measure(each, out, data_dir, device)
        seconds += costs[kind].epoch * epochs
    if device.type != "cuda":
        seconds /= workers
    memory = sum(sorted(cost.memory for cost in costs.values())[-1:]) * (TOGETHER if device.type == "cuda" else workers)
    return runs.forecast(len(left), seconds, memory, f"{len(costs)} kinds of runs")


def _epochs_left(out: Path, settings: Settings) -> int | None:
    folder = RunFolder(out, settings)
    return None if folder.result() else settings.epochs - len(folder.metrics())


def _rounded(value: Any) -> Any:
    """Six digits say more than any run can repeat."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
