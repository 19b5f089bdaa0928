"""Runs on a Ray cluster of this machine: a lost worker's run goes to another and ends as if nothing had happened."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import ray
import torch

from bln.experiments.reproduce import reproduce
from bln.experiments.runs import RunFolder, Settings

CPU = torch.device("cpu")
RUNS = [Settings("digits-cnn", "bln", 5, 1.0, seed, "clean", 8) for seed in (0, 1)]


@pytest.fixture(scope="module")
def cluster():
    context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield context
    ray.shutdown()


def kill_a_worker(out: Path, killed: list[int]) -> threading.Thread:
    """End the process of the first run, in the middle of its training."""

    def kill() -> None:
        folder = RunFolder(out, RUNS[0])
        while not 2 <= len(folder.metrics()) < 7:
            time.sleep(0.02)
        for process in Path("/proc").iterdir():
            if process.name.isdigit() and _holds(process, folder.path / "lock"):
                os.kill(int(process.name), signal.SIGKILL)
                killed.append(int(process.name))

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def test_a_killed_worker_loses_nothing(tmp_path, cluster):
    expected = tmp_path / "expected"
    assert set(reproduce(RUNS, expected, Path(), device=CPU).values()) == {"finished"}

    out, killed = tmp_path / "ray", []
    thread = kill_a_worker(out, killed)
    ended = reproduce(RUNS, out, Path(), device=CPU, workers=2, backend="ray")
    thread.join(10)
    assert len(killed) == 1
    assert set(ended.values()) == {"finished"}
    for each in RUNS:
        for name in ("metrics.jsonl", "result.json"):
            assert (RunFolder(out, each).path / name).read_bytes() == (
                RunFolder(expected, each).path / name
            ).read_bytes()


def test_a_run_that_lost_its_last_worker_does_not_keep_the_others(tmp_path, cluster, monkeypatch):
    monkeypatch.setattr("bln.experiments.reproduce._LOST", 0)
    killed: list[int] = []
    thread = kill_a_worker(tmp_path, killed)
    ended = reproduce(RUNS, tmp_path, Path(), device=CPU, workers=2, backend="ray")
    thread.join(10)
    assert len(killed) == 1
    assert ended[RUNS[0]].startswith("error: it lost its worker 1 times")
    assert ended[RUNS[1]] == "finished"


def _holds(process: Path, lock: Path) -> bool:
    """Whether it is a process of Ray, other than this one, that has the lock open."""
    try:
        opened = {os.readlink(link) for link in (process / "fd").iterdir()}
    except OSError:
        return False
    return str(lock.resolve()) in opened and int(process.name) != os.getpid()
