"""The runs of ``bln reproduce``: planned, trained side by side here or on Ray, and collected as lines of the table."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from .._install import install
from . import runs, table
from .norms import norm
from .processes import side_by_side
from .remaining import Progress
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
    """Return the runs of these tasks, by default the paper's: it has all the data at batch size 25 alone."""
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
    """Return the device of that name; ``auto`` is a GPU if the machine has one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        named = torch.device(name)
        torch.empty(0, device=named)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return named


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
    """Train all runs to their end, and return the status of each. One that cannot go on does not stop the others.

    On a GPU runs that differ in the seed alone train together, each on a stream of its own.

    Args:
        settings: The runs.
        out: The folder of their folders; with ``ray``, on storage that all machines share.
        data_dir: The folder of the data sets, likewise.
        device: The device to train on.
        workers: Processes side by side.
        backend: ``local``, processes of joblib; or ``ray``, tasks of a Ray cluster. A task whose worker is lost is
            started again on another, and resumes from its checkpoint.
        address: The address of the cluster; without one, Ray starts on this machine.
        progress: Called with the number of runs done, and the run under way.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if backend not in ("local", "ray"):
        raise ValueError(f"the backend must be 'local' or 'ray', got {backend!r}")
    groups = _groups(settings, TOGETHER if device.type == "cuda" else 1)
    statuses: dict[Settings, str] = {}
    results: Iterable[dict[Settings, str]]
    if backend == "ray":
        results = _on_ray(groups, out.resolve(), data_dir.resolve(), device, workers, address)
    elif workers > 1:
        results = side_by_side(_run, [(group, out, data_dir, device) for group in groups], workers)
    else:
        results = (_run_here(group, out, data_dir, device, progress, len(statuses)) for group in groups)
    for of_group in results:
        statuses |= of_group
        progress(len(statuses), f"{len(statuses)} of {len(settings)} runs finished")
    return {run: statuses[run] for run in settings}


TOGETHER = 8
"""The most runs that train together: each holds its data on the device."""


def _groups(settings: Sequence[Settings], most: int) -> list[list[Settings]]:
    """Group runs that differ in the seed alone, at most this many together."""
    alike: dict[Settings, list[Settings]] = {}
    for run in settings:
        alike.setdefault(replace(run, seed=0), []).append(run)
    return [group[at : at + most] for group in alike.values() for at in range(0, len(group), most)]


def _run(
    group: Sequence[Settings], out: Path, data_dir: Path, device: torch.device, tick: Tick = lambda done: None
) -> dict[Settings, str]:
    results = train_together(group, out, data_dir, device, tick)
    statuses = (f"error: {result}" if isinstance(result, RunError) else result for result in results)
    return dict(zip(group, statuses, strict=True))


def _run_here(
    group: Sequence[Settings], out: Path, data_dir: Path, device: torch.device, progress: Progress, before: int
) -> dict[Settings, str]:
    name = group[0].name + (f" and {len(group) - 1} more seeds" if len(group) > 1 else "")
    progress(before, name)
    return _run(group, out, data_dir, device, lambda done: progress(before + done * len(group), name))


_LOST = 5
"""The times a run is started again after its worker was lost."""
_PATIENCE = 10.0
"""Seconds to wait for a cluster's answer."""


def _on_ray(
    groups: Sequence[Sequence[Settings]],
    out: Path,
    data_dir: Path,
    device: torch.device,
    workers: int,
    address: str | None,
) -> Iterator[dict[Settings, str]]:
    if address is not None and address != "auto":
        _check_address(address)
    try:
        import ray
    except ImportError:
        raise ValueError(f"--backend ray needs Ray: {install('ray')}") from None
    started_here = not ray.is_initialized()
    if started_here:
        try:
            ray.init(address=address, num_cpus=None if address else workers, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise ValueError(f"no Ray cluster at {address!r}: {str(error).splitlines()[0]}") from None
    lost = ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError
    try:
        task = ray.remote(num_cpus=1, num_gpus=int(device.type == "cuda"), max_retries=_LOST)(_run_alone)
        for group, result in [(group, task.remote(group, out, data_dir, device)) for group in groups]:
            try:
                yield ray.get(result)
            except lost as error:
                status = f"error: it lost its worker {_LOST + 1} times: {str(error).splitlines()[0]}"
                yield dict.fromkeys(group, status)
    finally:
        if started_here:
            ray.shutdown()


def _run_alone(group: Sequence[Settings], out: Path, data_dir: Path, device: torch.device) -> dict[Settings, str]:
    torch.set_num_threads(1)
    return _run(group, out, data_dir, device)


def _check_address(address: str) -> None:
    """Refuse an address that does not answer, which Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError, ValueError) as error:
        raise ValueError(
            f"no Ray cluster at {address!r}: {error}; `ray start --head` prints its address, which is host:port, "
            "ray://host:port or auto"
        ) from None


def rows(out: Path) -> list[table.Row]:
    """Return a line of the table for each run in a folder, under way or finished."""
    lines = []
    for path in sorted((out / "runs").glob("*/settings.json")):
        begun = runs.read_json(path)
        if begun is None:
            continue
        folder = RunFolder(out, Settings(**begun["settings"]))
        metrics, costs = folder.metrics(), folder.costs()
        running = {"status": "running", "best_epoch": None, "test": None, "chosen": None, "configurations": None}
        names = ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy")
        row = {
            **asdict(folder.settings),
            "curves": {name: [epoch[name] for epoch in metrics] for name in names},
            "seconds": costs["seconds"],
            "hours": sum(costs["seconds"]) / 3600,
            "memory_mib": None if costs["memory"] is None else costs["memory"] / 2**20,
            **begun["origin"],
            **(folder.result() or running),
        }
        lines.append(_rounded(row))
    return lines


def estimate(
    settings: Sequence[Settings], out: Path, data_dir: Path, device: torch.device, workers: int = 1
) -> Estimate:
    """Estimate the cost of the runs that are left, by timing a few steps of each kind."""
    left = [folder for run in settings if not (folder := RunFolder(out, run)).result()]
    costs: dict[Settings, Cost] = {}
    seconds = 0.0
    for folder in left:
        run = folder.settings
        kind = replace(run, seed=0, epochs=0)
        if kind not in costs:
            costs[kind] = measure(run, out, data_dir, device)
        seconds += costs[kind].epoch * (run.epochs - len(folder.metrics()))
    side_by_side_runs = TOGETHER if device.type == "cuda" else workers
    if device.type != "cuda":
        seconds /= workers
    memory = side_by_side_runs * max((cost.memory for cost in costs.values()), default=0)
    return Estimate(seconds, memory, len(left), f"{len(costs)} kinds of runs")


def work_left(settings: Sequence[Settings], out: Path) -> list[float]:
    """Return the work left of each run, in proportion to its steps."""
    return [0.0 if RunFolder(out, run).result() else run.fraction * run.epochs / run.batch_size for run in settings]


def _rounded(value: Any) -> Any:
    """Round all numbers to six digits, which is more than a run can repeat."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
