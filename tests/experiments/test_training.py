"""Runs that survive: killed, harmed, diverged, repeated."""

import random
import signal
import subprocess
import sys
import time
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import TINY, patch
from torch import nn

import bln
from bln.experiments import norms, runs, tasks
from bln.experiments.runs import RunError, RunFolder
from bln.experiments.training import train

CPU = torch.device("cpu")


def run(settings, out):
    return train(settings, out, Path(), CPU)


def files(settings, out):
    folder = RunFolder(out, settings).path
    return {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "result.json")}


def start(settings, out):
    script = Path(__file__).with_name("tiny_runs.py")
    command = [sys.executable, script, out, *astuple(settings)]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("norm", ["bln", "bn"])
def test_killed_at_random_moments_it_ends_with_the_same_bytes(tmp_path, norm):
    settings = replace(TINY, norm=norm, fraction=1.0, epochs=6)
    whole = start(settings, tmp_path / "whole")
    assert whole.stdout.readline() == "started\n"
    ready = time.monotonic()
    assert whole.communicate(timeout=120)[0] == "finished\n"
    took = time.monotonic() - ready

    killed = tmp_path / "killed"
    process = start(settings, killed)  # once for sure: as soon as an epoch is there
    while not RunFolder(killed, settings).metrics():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    for _ in range(3):
        epochs = len(RunFolder(killed, settings).metrics())
        process = start(settings, killed)
        try:
            assert process.stdout.readline() == "started\n"
            process.wait(random.uniform(0, 0.5) * took)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.communicate(timeout=120)
        assert len(RunFolder(killed, settings).metrics()) >= epochs
    process = start(settings, killed)
    assert process.communicate(timeout=120)[0] == "started\nfinished\n"
    assert files(settings, tmp_path / "killed") == files(settings, tmp_path / "whole")


def test_a_finished_run_is_not_run_again(tmp_path, monkeypatch):
    assert run(TINY, tmp_path) == "finished"
    before = files(TINY, tmp_path)
    monkeypatch.setattr("bln.experiments.training._Training", None)  # would fail if it were
    assert run(TINY, tmp_path) == "finished"
    assert files(TINY, tmp_path) == before


@pytest.mark.parametrize("harmed", ["result.json", "metrics.jsonl", "checkpoint.pt"])
@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_harmed_files_are_found_and_made_again(tmp_path, harmed, how, monkeypatch):
    settings = replace(TINY, epochs=3)
    run(settings, tmp_path / "whole")
    out = tmp_path / "harmed"
    folder = RunFolder(out, settings)
    if harmed == "checkpoint.pt":  # interrupted after two epochs
        finish = runs.RunFolder.finish
        monkeypatch.setattr(runs.RunFolder, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(settings, out)
        monkeypatch.setattr(runs.RunFolder, "finish", finish)
    else:
        run(settings, out)
    path = folder.path / harmed
    content = path.read_bytes()
    middle = len(content) // 2
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[:middle])
    else:
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    (folder.path / ".metrics.jsonl.123.tmp").write_bytes(b"half")
    assert harmed == "checkpoint.pt" or folder.result() is None
    assert run(settings, out) == "finished"
    assert files(settings, out) == files(settings, tmp_path / "whole")
    assert not list(folder.path.glob(".*.tmp"))


class Explodes(nn.Module):
    """Fine for a while, then NaN."""

    def __init__(self, features):
        super().__init__()
        self.scale, self.steps = nn.Parameter(torch.ones(features)), 0

    def forward(self, x):
        if self.training:
            self.steps += 1
        return x * self.scale[:, *[None] * (x.dim() - 2)] * (torch.nan if self.steps > 12 else 1)


def test_a_diverged_run_is_recorded_as_such(tmp_path, monkeypatch):
    monkeypatch.setitem(norms.NORMS, "explodes", lambda features, channel_dim: Explodes(features))
    settings = replace(TINY, norm="explodes")  # 9 steps an epoch
    assert run(settings, tmp_path) == "diverged"
    lines = RunFolder(tmp_path, settings).metrics()
    assert [line["train_loss"] is None for line in lines] == [False, True]
    assert RunFolder(tmp_path, settings).result()["test"] is None
    assert run(settings, tmp_path) == "diverged"


def test_two_processes_do_not_work_on_one_run(tmp_path):
    folder = RunFolder(tmp_path, TINY)
    with folder.locked(), pytest.raises(RunError, match="another process works on"):
        run(TINY, tmp_path)


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, monkeypatch):
    settings = replace(TINY, epochs=2)
    run(settings, tmp_path / "whole")
    write, calls = runs.write, []

    def full(path, content):
        calls.append(path)
        if path.name == "checkpoint.pt" and len([c for c in calls if c == path]) == 2:
            raise RunError(f"cannot write {path}: No space left on device; make room there or take another --out")
        write(path, content)

    monkeypatch.setattr(runs, "write", full)
    with pytest.raises(RunError, match="No space left on device; make room"):
        run(settings, tmp_path / "full")
    assert len(RunFolder(tmp_path / "full", settings).metrics()) == 1
    monkeypatch.setattr(runs, "write", write)
    run(settings, tmp_path / "full")
    assert files(settings, tmp_path / "full") == files(settings, tmp_path / "whole")


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    runs.write(tmp_path / "file", b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs.os, "fsync", full)
    with pytest.raises(RunError, match=r"cannot write .*file: No space left on device"):
        runs.write(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class TestProtocol:
    def test_the_paper_draws_mini_batches_once_and_clean_each_epoch(self, tmp_path, monkeypatch):
        patch(monkeypatch)
        seen = []
        monkeypatch.setattr("bln.experiments.training._Training.fit", lambda self, x, y: seen.append(x.clone()))
        for protocol in ("paper", "clean"):
            run(replace(TINY, task="cnn", norm="none", batch_size=10, fraction=1.0, protocol=protocol), tmp_path)

        def composition(batches):
            return frozenset(frozenset(x.flatten(1).sum(1).tolist()) for x in batches)

        assert len(seen) == 2 * 4 * 5
        epochs = [seen[at : at + 5] for at in range(0, len(seen), 5)]
        paper, clean = epochs[:4], epochs[4:]
        for batches in paper[1:]:
            assert all(torch.equal(x, y) for x, y in zip(batches, paper[0], strict=True))
        assert len(set(map(composition, clean))) == 4

    def test_twenty_percent_are_9000_and_1000_of_cifar(self):
        train, validation = tasks._divide(50_000, 0.2, 3)
        assert (len(train), len(validation)) == (9_000, 1_000)
        everything = torch.cat(tasks._divide(50_000, 1.0, 3))
        assert everything.unique().numel() == 50_000
        assert set(train.tolist()) <= set(tasks._divide(50_000, 1.0, 3)[0].tolist())
        assert not torch.equal(train, tasks._divide(50_000, 0.2, 4)[0])

    @pytest.mark.parametrize("divide", [partial(tasks._divide, 50_000), partial(tasks.split_digits, Path())])
    def test_a_fraction_that_leaves_nothing_is_refused(self, divide):
        with pytest.raises(ValueError, match=r"of 1e-05 leaves 0 samples to train on .* a larger --fraction"):
            divide(1e-5, 0)

    def test_each_input_is_standardized_over_the_training_part(self, monkeypatch):
        patch(monkeypatch)
        split = tasks.split_cifar10(Path(), 1.0, 0)
        assert len(split.train.inputs) == 50
        torch.testing.assert_close(split.train.inputs.mean(0), torch.zeros(3, 32, 32), atol=1e-5, rtol=0)
        torch.testing.assert_close(split.train.inputs.std(0, correction=0), torch.ones(3, 32, 32), atol=1e-4, rtol=0)
        assert split.validation.inputs.std(0).mean() != 1

    def test_training_is_validated_with_the_current_statistics(self, tmp_path, monkeypatch):
        seen = []
        monkeypatch.setattr(
            "bln.experiments.training._Training.evaluate",
            lambda self, x, y: seen.append(({str(layer.config) for layer in bln.layers(self.model).values()}, len(y))),
        )
        run(replace(TINY, epochs=2), tmp_path)
        split = tasks.split_digits(Path(), TINY.fraction, TINY.seed)
        assert [config for config, _ in seen[: 2 * len(split.validation.batches(25))]] == [{"FFFF"}] * 2 * len(
            split.validation.batches(25)
        )
        judged = sum(count for _, count in seen) - 2 * len(split.validation.targets)
        assert judged == len(split.test.targets)  # the test, once

    def test_population_statistics_are_those_of_one_epoch(self, tmp_path):
        run(replace(TINY, epochs=2), tmp_path)
        best = runs.read_tensors(RunFolder(tmp_path, replace(TINY, epochs=2)).path / "best.pt", CPU)
        assert best["3.population.samples"].unique().tolist() == [216]  # a fifth of 1,079

    @pytest.mark.parametrize("protocol", ["paper", "clean"])
    def test_the_configuration_is_chosen_on_validation_and_tested_once(self, tmp_path, protocol):
        settings = replace(TINY, protocol=protocol)
        run(settings, tmp_path)
        result = RunFolder(tmp_path, settings).result()
        scores = result["configurations"]["validation"]
        assert len(scores) == 16
        assert result["chosen"] == min(scores, key=scores.get)
        assert (result["configurations"]["test"] is None) == (protocol == "clean")
        if protocol == "paper":
            assert result["test"]["loss"] == result["configurations"]["test"][result["chosen"]][0]

        model = tasks.TASKS[settings.task].model(norms.NORMS["bln"])
        model.load_state_dict(runs.read_tensors(RunFolder(tmp_path, settings).path / "best.pt", CPU))
        split = tasks.split_digits(Path(), settings.fraction, settings.seed)
        bln.configure(model.eval(), result["chosen"])
        with torch.no_grad():
            outputs = [(model(x), y) for x, y in split.test.batches(25)]
        loss = sum(F.cross_entropy(o, y, reduction="sum").item() for o, y in outputs) / len(split.test.targets)
        assert result["test"]["loss"] == pytest.approx(loss, rel=1e-5)

    @pytest.mark.parametrize("task", ["cnn", "rnn"])
    @pytest.mark.parametrize("size", [1, 25])
    def test_every_task_runs_from_end_to_end(self, tmp_path, monkeypatch, task, size):
        patch(monkeypatch)
        for norm in ("bln", "bn"):
            settings = replace(TINY, task=task, norm=norm, batch_size=size, fraction=1.0, epochs=1, protocol="paper")
            assert run(settings, tmp_path) == "finished"
            result = RunFolder(tmp_path, settings).result()
            assert 0 <= result["test"]["accuracy"] <= 1
            assert (result["configurations"] is None) == (norm == "bn")
