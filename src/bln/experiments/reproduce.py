"""``bln reproduce``: makes many runs side by side, here or on Ray, and their lines of the table."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from .._install import install
from . import runs, table
from .norms import norm
from .processes import side_by_side
from .runs import Estimate, RunError, RunFolder, Settings
from .tasks import TASKS
from .training import Cost, Tick, measure, train_together

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

    combinations = itertools.product(
        tasks, fractions or FRACTIONS, batch_sizes or BATCH_SIZES, norms or NORMS, range(seeds)
    )
    return [
        Settings(task, name, size, fraction, seed, protocol, epochs or TASKS[task].epochs)
        for task, fraction, size, name, seed in combinations
        if fraction < 1 or size == 25 or (fractions and batch_sizes)
    ]


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
    found: dict[Settings, str] = {}
    ended: Iterable[dict[Settings, str]]
    if backend == "ray":
        ended = _on_ray(groups, out.resolve(), data_dir.resolve(), device, workers, address)
    elif workers > 1:
        ended = side_by_side(_run, [(group, out, data_dir, device) for group in groups], workers)
    else:
        ended = (_run_here(group, out, data_dir, device, progress, len(found)) for group in groups)
    for statuses in ended:
        found |= statuses
        progress(len(found), f"{len(found)} of {len(settings)} runs finished")
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
    group: Sequence[Settings], out: Path, data_dir: Path, device: torch.device, tick: Tick = lambda done: None
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
) -> Iterator[dict[Settings, str]]:
    if address is not None and address != "auto":
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
        for group, run in [(group, task.remote(group, out, data_dir, device)) for group in groups]:
            try:
                yield ray.get(run)
            except lost as error:
                why = f"error: it lost its worker {_LOST + 1} times: {str(error).splitlines()[0]}"
                yield dict.fromkeys(group, why)
    finally:
        if begun:
            ray.shutdown()


def _run_alone(group: Sequence[Settings], out: Path, data_dir: Path, device: torch.device) -> dict[Settings, str]:
    torch.set_num_threads(1)
    return _run(group, out, data_dir, device)


def _look_for(address: str) -> None:
    """Refuse an address where nobody answers: Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError, ValueError) as error:
        raise ValueError(
            f"no Ray cluster at {address!r}: {error}; `ray start --head` prints its address, which is host:port, "
            "ray://host:port or auto"
        ) from None


def rows(out: Path) -> list[table.Row]:
    """Return the lines of the table of runs: all runs in a folder, under way or finished."""
    found = []
    for path in sorted((out / "runs").glob("*/settings.json")):
        read = runs.read_json(path)
        if read is None:
            continue
        folder = RunFolder(out, Settings(**read["settings"]))
        lines, costs = folder.metrics(), folder.costs()
        blank = {"status": "running", "best_epoch": None, "test": None, "chosen": None, "configurations": None}
        names = ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy")
        row = {
            **asdict(folder.settings),
            "curves": {name: [line[name] for line in lines] for name in names},
            "seconds": costs["seconds"],
            "hours": sum(costs["seconds"]) / 3600,
            "memory_mib": None if costs["memory"] is None else costs["memory"] / 2**20,
            **read["origin"],
            **(folder.result() or blank),
        }
        found.append(_rounded(row))
    return found


def estimate(
    settings: Sequence[Settings], out: Path, data_dir: Path, device: torch.device, workers: int = 1
) -> Estimate:
    """Return what the runs that are left take, from a few measured steps of each kind."""
    left = [folder for each in settings if not (folder := RunFolder(out, each)).result()]
    costs: dict[Settings, Cost] = {}
    seconds = 0.0
    for folder in left:
        each = folder.settings
        kind = replace(each, seed=0, epochs=0)
        if kind not in costs:
            costs[kind] = measure(each, out, data_dir, device)
        seconds += costs[kind].epoch * (each.epochs - len(folder.metrics()))
    at_once = TOGETHER if device.type == "cuda" else workers
    if device.type != "cuda":
        seconds /= workers
    memory = at_once * max((cost.memory for cost in costs.values()), default=0)
    return Estimate(seconds, memory, len(left), f"{len(costs)} kinds of runs")


def work_left(settings: Sequence[Settings], out: Path) -> list[float]:
    """Return the work of each run in steps, and 0 for those that are finished."""
    return [
        0.0 if RunFolder(out, each).result() else each.fraction * each.epochs / each.batch_size for each in settings
    ]


def _rounded(value: Any) -> Any:
    """Six digits say more than any run can repeat."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
