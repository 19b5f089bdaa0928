"""Which way the configurations are run, and that it is found by comparing."""

import itertools
from typing import NamedTuple

import pytest
import torch
from search_nets import CONFIGS, ROUNDING, Residual, brute_force, data, dense, lenet, trained
from torch import Tensor, nn
from torch.nn import functional as F

import bln
from bln._search.evaluate import Evaluator

TRAIN, BATCHES = data((9, 9), seed=1), data((7, 7, 4), shift=0.3)


def check(model, batches=BATCHES, loss=F.cross_entropy, **kwargs):
    """Search, compare with the long way, and return the mode."""
    result = bln.search(model, batches, loss=loss, **kwargs)
    for row in result:
        expected = brute_force(model, batches, [str(row.config)] * len(bln.layers(model)), loss)
        assert row.loss == pytest.approx(expected, rel=ROUNDING)
    assert len({round(row.loss, 9) for row in result}) == 16
    return result.mode


def test_lenet_is_grouped():
    shape = (3, 32, 32)
    model = trained(lenet(), data((5, 5), shape, seed=1))
    assert check(model, data((5, 5), shape, 10, shift=0.2)) == "grouped"


def test_residual_net_is_tiled():
    assert check(trained(Residual(), TRAIN)) == "tiled"


def test_copies_are_made_before_a_skip_connection_where_there_is_a_layer():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), bln.BatchLayerNorm(6), Residual())
    assert check(trained(model, TRAIN)) == "grouped"


class Branches(nn.Module):
    """Two branches from one input, each with its own layer: copies are made in both."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), bln.BatchLayerNorm(5)) for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        return self.head(torch.cat([self.left(x), self.right(x)], 1))


def test_branches_are_grouped():
    assert check(trained(Branches(), TRAIN)) == "grouped"


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.head = bln.BatchLayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(self.inner(self.norm(x))))


def test_a_layer_used_twice_is_grouped():
    assert check(trained(Twice(), TRAIN)) == "grouped"


class CentreOfTheBatch(nn.Module):
    def forward(self, x):
        return x - 0.5 * x.mean(0)


class Branching(nn.Module):
    """Control flow that depends on all samples together."""

    def forward(self, x):
        return x * 1.7 if x.sum() > self.threshold else x * 0.6


@pytest.mark.parametrize("other", ["batch norm without running statistics", "mean over the batch", "control flow"])
def test_other_modules_that_couple_samples_are_separate(other):
    coupling = {
        "batch norm without running statistics": nn.BatchNorm1d(8, track_running_stats=False),
        "mean over the batch": CentreOfTheBatch(),
        "control flow": Branching(),
    }[other]
    model = nn.Sequential(*dense()[:6], coupling, nn.Linear(8, 3))
    if isinstance(coupling, Branching):  # a sum that some configurations of the first batch exceed, and some do not
        coupling.threshold = 0
        trained(model, TRAIN)
        sums = []
        handle = coupling.register_forward_pre_hook(lambda module, args: sums.append(args[0].sum().item()))
        for config in CONFIGS:
            brute_force(model, BATCHES[:1], [config] * 2)
        handle.remove()
        coupling.threshold = sorted(sums)[8]
    else:
        trained(model, TRAIN)
    assert check(model) == "separate"
    notes = bln.search(model, BATCHES, loss=F.cross_entropy).notes
    assert any("something else in the model depends on the batch" in note for note in notes)


class Stored(nn.Module):
    """Keeps the length of its input for a later view, which no copy survives."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = bln.BatchLayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        n = len(x)
        return self.head(self.norm(x).reshape(n, 6))


def test_an_exception_with_copies_means_the_next_mode():
    assert check(trained(Stored(), TRAIN)) == "tiled"


def test_a_model_that_returns_nothing_is_separate():
    model = trained(dense(), TRAIN)

    def step(model, batch):
        x, targets = batch
        return None, F.cross_entropy(model(x), targets)

    result = bln.search(model, BATCHES[:1], loss=lambda outputs, targets: targets, step=step)
    assert result.mode == "separate"
    assert result["FTFF"].loss == pytest.approx(brute_force(model, BATCHES[:1], ["FTFF"] * 2), rel=ROUNDING)


def test_the_clock_decides_where_the_first_batches_show_no_gain(monkeypatch):
    """Every look at this clock takes a second, and copies take a hundred."""
    now = itertools.count()
    together = Evaluator._copied

    def slow(self, *args):
        for _ in range(100):
            next(now)
        return together(self, *args)

    monkeypatch.setattr(Evaluator, "_clock", lambda self: float(next(now)))
    model = trained(dense(), TRAIN)
    assert check(model) == "grouped"
    monkeypatch.setattr(Evaluator, "_copied", slow)
    result = bln.search(model, BATCHES, loss=F.cross_entropy)
    assert result.mode == "separate"
    assert any("no faster on the first batches" in note for note in result.notes)
    for row in result:
        assert row.loss == pytest.approx(brute_force(model, BATCHES, [str(row.config)] * 2), rel=ROUNDING)


def test_a_slow_first_batch_is_given_a_second_chance(monkeypatch):
    now, delays = itertools.count(), iter([100] * 3)
    together = Evaluator._copied

    def slow_at_first(self, *args):
        for _ in range(next(delays, 0)):
            next(now)
        return together(self, *args)

    monkeypatch.setattr(Evaluator, "_clock", lambda self: float(next(now)))
    monkeypatch.setattr(Evaluator, "_copied", slow_at_first)
    assert bln.search(trained(dense(), TRAIN), BATCHES, loss=F.cross_entropy).mode == "grouped"


# ---- inputs and outputs of other kinds


class Pair(NamedTuple):
    logits: Tensor
    extra: Tensor


class Kinds(nn.Module):
    """Takes two inputs and a table that holds no samples; returns what it is told to."""

    def __init__(self, returns, skip):
        super().__init__()
        self.norm, self.head, self.returns, self.skip = bln.BatchLayerNorm(6), nn.Linear(6, 3), returns, skip

    def forward(self, x, scale, table=None):
        y = self.norm(x * scale)
        y = y + x if self.skip else y
        if table is not None:
            y = y + table.sum()
        logits = self.head(y)
        return {
            "tensor": logits,
            "tuple": (logits, x),  # x holds no copies where they are made later
            "dict": {"logits": logits, "nested": [y]},
            "named tuple": Pair(logits, y),
        }[self.returns]


def of_kind(outputs, targets):
    logits = outputs if isinstance(outputs, Tensor) else outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    extra = outputs.extra.mean() if isinstance(outputs, Pair) else 0
    extra = outputs[1].mean() if isinstance(outputs, tuple) else extra
    return F.cross_entropy(logits, targets) + extra


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("returns", ["tensor", "tuple", "dict", "named tuple"])
@pytest.mark.parametrize("given", ["tuple", "dict"])
def test_tuples_and_dicts_go_in_and_come_out(given, returns, skip):
    model = Kinds(returns, skip).double()
    for x, _ in TRAIN:
        model(x, torch.ones(len(x), 1))
    # The last batch has as many samples as the table has entries; that must not make it a batch.
    table = torch.arange(4.0, dtype=torch.float64) / 10
    batches = []
    for x, targets in BATCHES:
        scale = torch.linspace(0.5, 2, len(x), dtype=torch.float64)[:, None]
        inputs = (x, scale, table) if given == "tuple" else {"x": x, "scale": scale, "table": table}
        batches.append((inputs, targets))
    assert check(model, batches, of_kind) == ("tiled" if skip else "grouped")


def test_a_step_of_ones_own_runs_unusual_models():
    model = trained(dense(), TRAIN)
    odd = [{"features": x, "labels": t, "note": "x"} for x, t in BATCHES]

    def step(model, batch):
        return {"out": model(batch["features"])}, batch["labels"]

    result = bln.search(model, odd, loss=lambda o, t: F.cross_entropy(o["out"], t), step=step, calibrate=odd[:2])
    assert result.mode == "grouped"
    result.apply(model, "FTFF")
    assert result["FTFF"].loss == pytest.approx(brute_force(model, BATCHES, ["FTFF"] * 2), rel=ROUNDING)


def test_under_autocast():
    model = trained(dense(), data((9, 9), dtype=torch.float32, seed=1), torch.float32)
    batches = data((7, 7, 4), shift=0.3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        result = bln.search(model, batches, loss=F.cross_entropy)
        assert result.mode == "grouped"
        for row in result:
            # bfloat16 rounding, 2^-8, of the activations.
            assert row.loss == pytest.approx(brute_force(model, batches, [str(row.config)] * 2), rel=2**-8)


# ---- memory


class Small(nn.Module):
    """A device with room for so many rows."""

    def __init__(self, rows, error):
        super().__init__()
        self.rows, self.error = rows, error

    def forward(self, x):
        if len(x) > self.rows:
            raise self.error
        return x


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_sixteen_copies_larger_than_memory_are_split_over_configurations(error):
    model = nn.Sequential(*dense()[:6], Small(30, error), nn.Linear(8, 3))
    trained(model, TRAIN)
    result = bln.search(model, BATCHES, loss=F.cross_entropy)
    assert result.mode == "grouped"
    assert any("did not fit in memory: 4 configurations" in note for note in result.notes)  # 4 * 7 <= 30 < 8 * 7
    for row in result:
        assert row.loss == pytest.approx(brute_force(model, BATCHES, [str(row.config)] * 2), rel=ROUNDING)


def test_a_later_batch_may_be_the_one_too_large():
    model = nn.Sequential(*dense()[:6], Small(16 * 5, torch.OutOfMemoryError("out of memory")), nn.Linear(8, 3))
    trained(model, TRAIN)
    batches = data((5, 9, 5), shift=0.3)
    assert check(model, batches) == "grouped"


def test_one_copy_too_large_is_the_users_error():
    model = nn.Sequential(*dense()[:6], Small(9, torch.OutOfMemoryError("out of memory")), nn.Linear(8, 3))
    trained(model, TRAIN)
    with pytest.raises(torch.OutOfMemoryError):
        bln.search(model, data((9, 10)), loss=F.cross_entropy)
