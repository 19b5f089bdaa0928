"""The folder of a run, from which it resumes after being killed: settings, metrics, checkpoint, result.

    settings.json     the settings, with the commit, versions and machine that began the run
    metrics.jsonl     a line for each epoch, the same bytes with or without interruptions
    costs.json        the seconds of each epoch, and the bytes of memory that the run needs
    tensorboard/      the metrics again
    checkpoint.pt     weights, optimizer, best weights, metrics and costs after the last whole epoch; deleted at the end
    best.pt           the weights of the epoch with the lowest validation loss
    result.json       written last: a run that has it is finished

Every file is written under another name, flushed, and renamed. Checkpoints and results are checked by a hash when they
are read; one that fails the check counts as missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import bln

FORMAT = 2
"""Bump when older runs can no longer be resumed or compared."""


class RunError(RuntimeError):
    """A run that cannot go on; the message says what to do."""


@dataclass(frozen=True)
class Settings:
    """The settings that decide the numbers of a run."""

    task: str
    norm: str
    batch_size: int
    fraction: float
    seed: int
    protocol: str
    epochs: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        norm = self.norm.replace(":", "-").replace("/", "-")
        return (
            f"{self.task}-{norm}-batch{self.batch_size}-{self.fraction:g}-{self.protocol}-{self.epochs}-seed{self.seed}"
        )


class RunFolder:
    """The files of one run."""

    def __init__(self, out: Path, settings: Settings) -> None:
        self.path = out / "runs" / settings.name
        self.settings = settings

    # ---- before training

    def prepare(self, device: torch.device) -> None:
        """Create the folder, or delete half-written files that a killed process left."""
        for stray in self.path.glob(".*.tmp"):
            stray.unlink(missing_ok=True)
        if read_json(self.path / "settings.json") is None:
            write(self.path / "settings.json", _json({"settings": asdict(self.settings), "origin": origin(device)}))

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes out of this run."""
        return locked(self.path / "lock")

    # ---- while training

    def save(self, state: dict[str, Any], metrics: list[dict[str, Any]], costs: dict[str, Any]) -> None:
        """Save a whole epoch, the checkpoint first, since the other files can be restored from it."""
        write_tensors(self.path / "checkpoint.pt", {**state, "metrics": metrics, "costs": costs})
        self._write_metrics(metrics, costs)

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """Return the state after the last whole epoch, or ``None``; metrics of later epochs are dropped."""
        state = read_tensors(self.path / "checkpoint.pt", device)
        self._write_metrics(*((state["metrics"], state["costs"]) if state else ([], {})))
        return state

    def _write_metrics(self, metrics: list[dict[str, Any]], costs: dict[str, Any]) -> None:
        write(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in metrics).encode())
        write(self.path / "costs.json", _json(costs))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of whole epochs."""
        try:
            return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        except (OSError, ValueError):
            return []

    def costs(self) -> dict[str, Any]:
        """Return the ``seconds`` of whole epochs and the bytes of ``memory``, as far as they are known."""
        return {"seconds": [], "memory": None, **(read_json(self.path / "costs.json") or {})}

    # ---- after

    def finish(self, result: dict[str, Any], best: dict[str, Any] | None) -> None:
        """Write the results, and delete the checkpoint."""
        if best is not None:
            write_tensors(self.path / "best.pt", best)
        write(self.path / "result.json", _json({**result, "sha256": self._hash(result)}))
        (self.path / "checkpoint.pt").unlink(missing_ok=True)

    def result(self) -> dict[str, Any] | None:
        """Return the results, or ``None`` if they or their metrics are missing or damaged."""
        result = read_json(self.path / "result.json")
        if result is None or not (self.path / "metrics.jsonl").exists():
            return None
        return result if result.pop("sha256", "") == self._hash(result) else None

    def _hash(self, result: dict[str, Any]) -> str:
        return hashlib.sha256(_json(result) + (self.path / "metrics.jsonl").read_bytes()).hexdigest()


# ---- the folder of all runs


def claim(out: Path) -> None:
    """Create the folder of all runs, or check that the existing one is of this version."""
    current = {"format": FORMAT, "version": bln.__version__}
    existing = read_json(out / "version.json")
    if existing is None:
        write(out / "version.json", _json(current))
    elif existing != current:
        raise RunError(
            f"{out} holds runs of version {existing.get('version')} (format {existing.get('format')}), this is "
            f"{bln.__version__} (format {FORMAT}); take another --out"
        )


# ---- files


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes out by a lock file; the lock goes with the process that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another process works on {path.parent}; wait for it, or take another folder") from None
        yield


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, and create its folders."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error.strerror}; make room there or take another --out") from error


def write_tensors(path: Path, state: dict[str, Any]) -> None:
    """Write tensors, with their hash in front."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getvalue()
    write(path, hashlib.sha256(payload).digest() + payload)


def read_tensors(path: Path, device: torch.device) -> dict[str, Any] | None:
    """Return tensors written by ``write_tensors``; ``None`` where they are missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        return None
    state: dict[str, Any] = torch.load(io.BytesIO(content[32:]), map_location=device, weights_only=True)
    return state


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON object; ``None`` where it is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def origin(device: torch.device) -> dict[str, Any]:
    """Return the origin of a run: commit, versions, device, time."""
    cpu = f"{_processor()}, {torch.get_num_threads()} threads"
    return {
        "commit": _commit(),
        "versions": {"bln": bln.__version__, "torch": str(torch.__version__), "python": platform.python_version()},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@dataclass(frozen=True)
class Estimate:
    """The time and memory that runs take on this machine.

    Attributes:
        seconds: The time of all runs.
        memory: The bytes of the runs that are in memory together.
        runs: The number of runs.
        measured: The number and kind of things timed, as text.
    """

    seconds: float
    memory: int
    runs: int
    measured: str

    def text(self) -> str:
        """Return the estimate as a sentence."""
        units = (self.seconds, "s", 100), (self.seconds / 60, "min", 100), (self.seconds / 3600, "h", math.inf)
        time, unit = next((value, unit) for value, unit, most in units if value < most)
        gib = self.memory / 2**30
        memory = f"{1024 * gib:.0f} MiB" if 0 < gib < 0.1 else f"{gib:.2g} GiB"
        return (
            f"{self.runs} runs, about {time:.{int(unit == 'h')}f} {unit} and {memory}, from a few steps of "
            f"{self.measured} on this machine"
        )


def _processor() -> str:
    info = Path("/proc/cpuinfo")  # platform.processor() does not know the model on Linux
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return model[1] if model else platform.machine()


def _commit() -> str | None:
    """Return the commit of the checkout that this package runs from; ``None`` if it is installed otherwise."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
