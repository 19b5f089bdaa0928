"""Several runs in one process, and steps that are captured and replayed: here with a stand-in for the CUDA graph."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY, patch
from torch import nn

from bln.experiments import norms, reproduce, runs, steps, training
from bln.experiments.runs import RunError, RunFolder
from bln.experiments.tasks import Part
from bln.experiments.training import train, train_together

CPU = torch.device("cpu")
SEEDS = [replace(TINY, seed=seed) for seed in range(3)]


class Recorded:
    """What a CUDA graph is: recorded without being done, then done again and again."""

    def __init__(self, function):
        self.replay = function


@pytest.fixture
def captured(monkeypatch):
    """Steps as on a GPU, and what was captured."""
    found = []
    monkeypatch.setattr(steps, "capture", lambda function: (found.append(function), Recorded(function))[1])
    monkeypatch.setattr(steps, "captured", lambda device: True)
    return found


def files(settings, out):
    folder = RunFolder(out, settings).path
    return {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "result.json")}


@pytest.mark.parametrize("count", [2, 12, 15, 30])
@pytest.mark.parametrize("layout", ["rows", "images", "channels last"])
def test_captured_steps_see_the_same_mini_batches(captured, count, layout):
    inputs = torch.randn(count, 7) if layout == "rows" else torch.randn(count, 3, 4, 5)
    if layout == "channels last":
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    part = Part(inputs, torch.arange(count))
    seen, expected = [], []
    walk = steps.Steps(lambda x, y: seen.append((x, y)), part, 5)
    for order in (None, torch.randperm(count), torch.randperm(count), None):
        shares = list(walk(order))
        assert shares == sorted(shares)
        assert shares[-1] == 1
        expected += part.batches(5, order)
    for (x, y), (other_x, other_y) in zip(seen, expected, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)
        assert x.stride() == other_x.stride()
    assert len(captured) == (4 * (count // 5) > 3)  # once, when a few steps were done


@pytest.mark.parametrize("task", ["digits-cnn", "rnn"])  # the second draws numbers in each step
@pytest.mark.parametrize("norm", ["bln", "bn"])
def test_seeds_together_end_with_the_bytes_of_each_alone(tmp_path, monkeypatch, captured, task, norm):
    patch(monkeypatch)
    size = 25 if task == "digits-cnn" else 8  # the last mini-batch is smaller
    group = [replace(each, task=task, norm=norm, batch_size=size, fraction=1.0, epochs=2) for each in SEEDS]
    torch.manual_seed(1)
    assert train_together(group, tmp_path / "together", Path(), CPU) == ["finished"] * 3
    assert captured
    monkeypatch.setattr(steps, "captured", lambda device: False)
    for each in group:
        assert train(each, tmp_path / "alone", Path(), CPU) == "finished"
        assert files(each, tmp_path / "together") == files(each, tmp_path / "alone")
    assert len({files(each, tmp_path / "alone")["metrics.jsonl"] for each in group}) == 3


def test_seeds_that_were_stopped_at_different_epochs_go_on_together(tmp_path, monkeypatch, captured):
    assert train_together(SEEDS, tmp_path / "whole", Path(), CPU) == ["finished"] * 3
    save, saved, out = runs.RunFolder.save, [], tmp_path / "stopped"

    def stopping(self, state, metrics, costs):
        save(self, state, metrics, costs)
        saved.append(self.settings.seed)
        if len(saved) in (2, 6):  # while others are in the middle of an epoch
            raise KeyboardInterrupt

    monkeypatch.setattr(runs.RunFolder, "save", stopping)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train_together(SEEDS, out, Path(), CPU)
    assert len({len(RunFolder(out, each).metrics()) for each in SEEDS}) > 1
    assert train_together(SEEDS, out, Path(), CPU) == ["finished"] * 3
    for each in SEEDS:
        assert files(each, out) == files(each, tmp_path / "whole")


def test_one_that_cannot_go_on_does_not_keep_the_others(tmp_path, monkeypatch):
    save = runs.RunFolder.save

    def full(self, state, metrics, costs):
        if self.settings.seed == 1 and len(metrics) == 2:
            raise RunError("cannot write: No space left on device")
        save(self, state, metrics, costs)

    monkeypatch.setattr(runs.RunFolder, "save", full)
    with RunFolder(tmp_path, SEEDS[0]).locked():
        first, second, third = train_together(SEEDS, tmp_path, Path(), CPU)
    assert isinstance(first, RunError)
    assert "another process works on" in str(first)
    assert isinstance(second, RunError)
    assert "No space left" in str(second)
    assert third == "finished"
    assert train_together(SEEDS[:1], tmp_path, Path(), CPU) == ["finished"]  # its lock is free again


class Fragile(nn.Module):
    """Gives NaN once its weights, of one seed alone, have moved."""

    def __init__(self, features):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features))
        self.breaks = torch.initial_seed() == 1

    def forward(self, x):
        moved = (self.scale - 1).abs().amax() > 0.02
        return x * torch.where(moved & self.breaks, torch.nan, self.scale)[:, *[None] * (x.dim() - 2)]


def test_one_that_diverges_does_not_keep_the_others(tmp_path, monkeypatch, captured):
    monkeypatch.setitem(norms.NORMS, "fragile", lambda features, channel_dim: Fragile(features))
    group = [replace(each, norm="fragile") for each in SEEDS]
    assert train_together(group, tmp_path, Path(), CPU) == ["finished", "diverged", "finished"]
    assert len(RunFolder(tmp_path, group[0]).metrics()) == 4


def test_an_error_frees_every_run(tmp_path, monkeypatch):
    def fails(self, *_):
        raise ValueError("no such data")

    monkeypatch.setattr(training._Training, "order", fails)
    with pytest.raises(ValueError, match="no such data"):
        train_together(SEEDS, tmp_path, Path(), CPU)
    monkeypatch.undo()
    assert train_together(SEEDS, tmp_path, Path(), CPU) == ["finished"] * 3


def test_a_checkpoint_of_another_device_takes_this_ones_way_of_stepping(tmp_path, monkeypatch):
    """``capturable`` stands in the optimizer's state, and a captured step needs it as its device does."""
    settings = replace(TINY, epochs=2)
    loaded = []
    load = runs.RunFolder.load

    def elsewhere(self, device):
        state = load(self, device)
        if state is not None:
            state["optimizer"]["param_groups"][0]["capturable"] = True
        return state

    resume = training._Training.resume
    monkeypatch.setattr(runs.RunFolder, "load", elsewhere)
    monkeypatch.setattr(
        training._Training, "resume", lambda self: (resume(self), loaded.append(self.optimizer.param_groups))
    )
    monkeypatch.setattr(runs.RunFolder, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train(settings, tmp_path, Path(), CPU)
    assert [group["capturable"] for groups in loaded for group in groups] == [False, False]


def test_groups_are_runs_that_differ_in_the_seed_alone():
    settings = [replace(TINY, norm=norm, seed=seed) for seed in range(5) for norm in ("bln", "bn")]
    groups = reproduce._groups(settings, 3)
    assert [[(each.norm, each.seed) for each in group] for group in groups] == [
        [("bln", 0), ("bln", 1), ("bln", 2)],
        [("bln", 3), ("bln", 4)],
        [("bn", 0), ("bn", 1), ("bn", 2)],
        [("bn", 3), ("bn", 4)],
    ]
    assert [group for (group,) in reproduce._groups(settings, 1)] == settings[::2] + settings[1::2]


def test_on_a_gpu_seeds_are_reproduced_together(tmp_path, monkeypatch, captured):
    trained, told = [], []
    monkeypatch.setattr(
        reproduce,
        "train_together",
        lambda group, out, data, device, tick: (trained.append(group), train_together(group, out, data, CPU, tick))[1],
    )
    settings = [replace(each, norm=norm, epochs=1) for norm in ("bln", "ln") for each in SEEDS]
    ended = reproduce.reproduce(
        settings, tmp_path, Path(), device=torch.device("cuda"), progress=lambda done, text: told.append((done, text))
    )
    assert ended == dict.fromkeys(settings, "finished")
    assert trained == [settings[:3], settings[3:]]
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[0] == (0, f"{settings[0].name} and 2 more seeds")
    assert json.loads(json.dumps(reproduce.rows(tmp_path)))[0]["status"] == "finished"
