"""A run is a folder: what it was asked to do, how far it got, what came out. It survives being killed.

    settings.json     what was asked, and the versions, machine and commit that began it
    metrics.jsonl     a line for each epoch; the same bytes whether the run was interrupted or not
    times.jsonl       seconds of each epoch
    memory.json       bytes a run needs
    tensorboard/      the metrics again
    checkpoint.pt     weights, optimizer, best weights and metrics after the last whole epoch; gone when finished
    best.pt           weights of the epoch with the lowest validation loss
    result.json       written last: a run that has it is finished

Every file is written under another name, flushed, and moved to its place. What is read back is checked against a hash
first; what fails the check is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

import bln

FORMAT = 1
"""Bump when older runs can no longer be resumed or compared."""


class RunError(RuntimeError):
    """A run that cannot go on; the message says what to do."""


@dataclass(frozen=True)
class Settings:
    """All that decides the numbers of a run."""

    task: str
    norm: str
    batch_size: int
    fraction: float
    seed: int
    protocol: str
    epochs: int

    @property
    def name(self) -> str:
        """The run's folder."""
        norm = self.norm.replace(":", "-").replace("/", "-")
        return (
            f"{self.task}-{norm}-batch{self.batch_size}-{self.fraction:g}-{self.protocol}-{self.epochs}-seed{self.seed}"
        )


class Named(Protocol):
    """Settings of any kind: a dataclass of plain values, and the name of their folder."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """The run's folder."""


NamedT = TypeVar("NamedT", bound=Named)


class RunFolder(Generic[NamedT]):
    """The files of one run."""

    def __init__(self, out: Path, settings: NamedT) -> None:
        self.path = out / "runs" / settings.name
        self.settings = settings

    # ---- before training

    def prepare(self) -> None:
        """Make the folder, or check that the existing one is of the same run and version."""
        self.path.mkdir(parents=True, exist_ok=True)
        for stray in self.path.glob(".*.tmp"):
            stray.unlink(missing_ok=True)
        asked = {"format": FORMAT, "settings": asdict(self.settings)}
        found = read_json(self.path / "settings.json")
        if found is None:
            write(self.path / "settings.json", _json({**asked, "environment": environment()}))
            return
        for key, expected in asked.items():
            if found.get(key) != expected:
                raise RunError(
                    f"{self.path} was made with {key} {found.get(key)!r}, this is {expected!r}; take another --out, "
                    "or delete that folder"
                )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of this run; the lock goes with the process that holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"another process works on {self.path}; wait for it, or take another --out") from None
            yield

    # ---- while training

    def save(self, state: dict[str, Any], metrics: list[dict[str, Any]], seconds: list[float]) -> None:
        """Save a whole epoch. The checkpoint goes first: the rest is made from it."""
        write_tensors(self.path / "checkpoint.pt", {**state, "metrics": metrics, "seconds": seconds})
        self._write_metrics(metrics, seconds)

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """Return the last whole epoch, or ``None``; metrics are cut back to it."""
        state = read_tensors(self.path / "checkpoint.pt", device)
        self._write_metrics(state["metrics"] if state else [], state["seconds"] if state else [])
        return state

    def _write_metrics(self, metrics: list[dict[str, Any]], seconds: list[float]) -> None:
        write(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in metrics).encode())
        write(self.path / "times.jsonl", "".join(json.dumps(second) + "\n" for second in seconds).encode())

    def note_memory(self, count: int) -> None:
        """Save how many bytes the run needs."""
        write(self.path / "memory.json", _json({"bytes": count}))

    def memory(self) -> int | None:
        """Return how many bytes the run needs, if that was saved."""
        found = read_json(self.path / "memory.json")
        return None if found is None else found.get("bytes")

    # ---- after

    def finish(self, result: dict[str, Any], best: dict[str, Any] | None) -> None:
        """Write the results, and delete the checkpoint."""
        if best is not None:
            write_tensors(self.path / "best.pt", best)
        metrics = (self.path / "metrics.jsonl").read_bytes()
        result = {**result, "metrics_sha256": hashlib.sha256(metrics).hexdigest()}
        write(self.path / "result.json", _json({**result, "sha256": hashlib.sha256(_json(result)).hexdigest()}))
        (self.path / "checkpoint.pt").unlink(missing_ok=True)

    def result(self) -> dict[str, Any] | None:
        """Return the results, or ``None`` unless they and their metrics are there unharmed."""
        try:
            content, metrics = ((self.path / name).read_bytes() for name in ("result.json", "metrics.jsonl"))
        except OSError:
            return None
        found = read_json(self.path / "result.json")
        if found is None or _json(found) != content:
            return None
        given, of_metrics = found.pop("sha256", None), found.get("metrics_sha256")
        if given != hashlib.sha256(_json(found)).hexdigest() or of_metrics != hashlib.sha256(metrics).hexdigest():
            return None
        del found["metrics_sha256"]
        return found

    def best(self) -> dict[str, Any] | None:
        """Return the best weights of a finished run; ``None`` where they are missing or harmed."""
        return read_tensors(self.path / "best.pt", torch.device("cpu"))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of whole epochs."""
        try:
            return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        except (OSError, ValueError):
            return []

    def seconds(self) -> list[float]:
        """Return the seconds of whole epochs."""
        try:
            return [json.loads(line) for line in (self.path / "times.jsonl").read_text().splitlines()]
        except (OSError, ValueError):
            return []


# ---- the folder of all runs


def claim(out: Path) -> None:
    """Make the folder of all runs, or check that the existing one is of this version."""
    mine = {"format": FORMAT, "version": bln.__version__}
    found = read_json(out / "version.json")
    if found is None:
        out.mkdir(parents=True, exist_ok=True)
        write(out / "version.json", _json(mine))
    elif found != mine:
        raise RunError(
            f"{out} holds runs of version {found.get('version')} (format {found.get('format')}), this is "
            f"{bln.__version__} (format {FORMAT}); take another --out"
        )


# ---- files


def write(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
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
    """Return tensors written by ``write_tensors``; ``None`` where they are missing or harmed."""
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
    """Return a JSON object; ``None`` where it is missing or harmed."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def environment() -> dict[str, Any]:
    """Return where numbers come from: versions, machine, commit, time."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def origin(found: dict[str, Any]) -> dict[str, Any]:
    """Return where a run comes from, as the table has it, of what :func:`environment` has found."""
    return {
        "commit": found["commit"],
        "versions": {"bln": bln.__version__, "torch": found["torch"], "python": found["python"]},
        "device": found["gpu"] or f"{found['processor']}, {found['threads']} threads",
        "started": found["started"],
    }


def forecast(count: int, seconds: float, memory: int, measured: str) -> str:
    """Return what ``count`` runs take, in a sentence."""
    time = (
        f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else (
            f"{seconds / 3600:.1f} h"
        )
    )  # fmt: skip
    return f"{count} runs, about {time} and {memory / 2**30:.2g} GiB, from a few steps of {measured} on this machine"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str | None:
    """Return the commit this package runs from, if it runs from a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
