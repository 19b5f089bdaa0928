"""Training on a GPU: captured is what it is eagerly, together is what it is alone, and no step waits for the device."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY, patch

from bln.experiments import runs, steps, training
from bln.experiments.runs import RunFolder
from bln.experiments.training import train, train_together

CUDA = torch.device("cuda")
RUNS = [(task, norm) for task in ("cnn", "rnn") for norm in ("bln", "bn", "ln")]
MORE = [("cnn", "bln-grouped"), ("cnn", "batchrenorm"), ("cnn", "gn"), ("cnn", "bln-half")]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """50 samples to train on: 7 mini-batches of 7 and one of 1; 10 to validate on, which is captured in epoch 4."""
    torch.manual_seed(0)
    patch(monkeypatch)
    monkeypatch.setattr(training, "_board", lambda path, metrics: _Board())


class _Board:
    def add_scalar(self, *_):
        pass

    def close(self):
        pass


def seeds(task, norm, count=3):
    given = replace(TINY, task=task, norm=norm, batch_size=7, fraction=1.0, epochs=4)
    return [replace(given, seed=seed) for seed in range(count)]


def found(settings, out):
    """What must be the same bytes; the search may take the faster of two ways, which round differently."""
    folder = RunFolder(out, settings)
    return (folder.path / "metrics.jsonl").read_text(), folder.result()["best_epoch"]


def count_graphs(monkeypatch):
    graphs, capture = [], steps.capture
    monkeypatch.setattr(steps, "capture", lambda function: (graphs.append(function), capture(function))[1])
    return graphs


@pytest.mark.parametrize(("task", "norm"), RUNS + MORE)
def test_together_and_captured_are_the_bytes_of_alone_and_eager(tmp_path, monkeypatch, task, norm):
    graphs = count_graphs(monkeypatch)
    group = seeds(task, norm)
    assert train_together(group, tmp_path / "together", Path(), CUDA) == ["finished"] * 3
    assert len(graphs) >= 6  # of training and of validation
    assert train(group[1], tmp_path / "alone", Path(), CUDA) == "finished"
    assert found(group[1], tmp_path / "alone") == found(group[1], tmp_path / "together")

    graphs.clear()
    monkeypatch.setattr(steps, "_EAGER", 10**9)
    assert train(group[2], tmp_path / "eager", Path(), CUDA) == "finished"
    assert not graphs
    assert found(group[2], tmp_path / "eager") == found(group[2], tmp_path / "together")


@pytest.mark.parametrize(("task", "norm"), [("cnn", "bln"), ("rnn", "bln"), ("cnn", "bn")])
def test_interrupted_it_ends_with_the_same_bytes(tmp_path, monkeypatch, task, norm):
    group = seeds(task, norm)
    train_together(group, tmp_path / "whole", Path(), CUDA)
    save, saved = runs.RunFolder.save, []

    def stopping(self, state, metrics, costs):
        save(self, state, metrics, costs)
        saved.append(self.settings.seed)
        if len(saved) in (2, 5):
            raise KeyboardInterrupt

    monkeypatch.setattr(runs.RunFolder, "save", stopping)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train_together(group, tmp_path / "stopped", Path(), CUDA)
    assert train_together(group, tmp_path / "stopped", Path(), CUDA) == ["finished"] * 3
    for each in group:
        assert found(each, tmp_path / "stopped") == found(each, tmp_path / "whole")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(("task", "norm"), [(task, "bln") for task in ("cnn", "rnn")] + MORE)
def test_no_step_waits_for_the_device(tmp_path, monkeypatch, task, norm):
    kind = training._Training
    for name in ("fit", "evaluate"):
        monkeypatch.setattr(kind, name, _unsynchronized(getattr(kind, name)))
    assert train(seeds(task, norm)[0], tmp_path, Path(), CUDA) == "finished"


def _unsynchronized(step):
    def wrapped(self, inputs, targets):
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(self, inputs, targets)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return wrapped


def test_dropout_masks_differ_from_step_to_step_and_seed_to_seed(tmp_path, monkeypatch):
    """A graph replays kernels; the numbers they draw must go on."""
    from bln.experiments import lstm

    drawn, mask = {}, lstm._dropout_mask

    def kept(like, shape, rate):
        found = mask(like, shape, rate)
        if shape[1:] == (128,):
            stream = torch.cuda.current_stream().stream_id
            total = drawn.setdefault(stream, torch.zeros(64, dtype=torch.float64, device=CUDA))
            weights = torch.arange(found.numel(), device=CUDA, dtype=torch.float64).view_as(found).cos()
            total.copy_(total.roll(1))
            total[:1] = (found * weights).sum()
        return found

    monkeypatch.setattr(lstm, "_dropout_mask", kept)
    train_together(seeds("rnn", "ln"), tmp_path, Path(), CUDA)
    seen = torch.cat([total[:16] for total in drawn.values()])
    assert len(drawn) == 3
    assert seen.unique().numel() == 48
