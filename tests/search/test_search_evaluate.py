"""Which way the configurations are run, and that it is found by comparing."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest
import torch
from search_nets import (
    CONFIGS,
    ROUNDING,
    Masked,
    Residual,
    Towers,
    brute_force,
    copies,
    data,
    dense,
    lenet,
    trained,
)
from torch import Tensor, nn
from torch.nn import functional as F

import bln
from bln._search import evaluate

TRAIN, BATCHES = data((9, 9), seed=1), data((7, 7, 4), shift=0.3)


def check(model, batches=BATCHES, loss=F.cross_entropy, **kwargs):
    """Search, compare with the long way, and return the mode."""
    result = bln.search(model, batches, loss=loss, **kwargs)
    for row in result:
        expected = brute_force(model, batches, [str(row.config)] * len(bln.layers(model)), loss)
        assert row.loss == pytest.approx(expected, rel=ROUNDING)
    assert len({round(row.loss, 9) for row in result}) == 16
    return result.mode


@pytest.mark.parametrize("groups", [None, 2])
def test_lenet_runs_together(groups):
    shape = (3, 32, 32)
    model = trained(lenet(groups), data((5, 5), shape, seed=1))
    assert check(model, data((5, 5), shape, 10, shift=0.2)) == "together"


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.head = bln.BatchLayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(self.inner(self.norm(x))))


class Stored(nn.Module):
    """Keeps the length of its input for a later view."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = bln.BatchLayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        n = len(x)
        return self.head(self.norm(x).reshape(n, 6))


@pytest.mark.parametrize("make", [Residual, partial(Residual, groups=4), Towers, Twice, Stored])
def test_skips_branches_and_layers_used_twice_run_together(make):
    assert check(trained(make(), TRAIN)) == "together"


class OverTime(nn.Module):
    """Layers over samples, and one whose first dimension is that of time."""

    def __init__(self, groups):
        super().__init__()
        self.first, self.second, self.time = (
            bln.BatchLayerNorm(4, channel_dim=-1, per_position=False, groups=groups) for _ in range(3)
        )
        self.embed, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.second(torch.tanh(self.first(self.embed(x)))).transpose(0, 1)
        return self.head(self.time(x).sum(0))


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("lengths", [(12, 16), (12, 15), (16, 12)])
def test_a_length_like_the_number_of_configurations_is_not_taken_for_copies(lengths, groups):
    model = trained(OverTime(groups), data((9, 9), (12, 2), seed=1))
    model.eval()
    inputs = [data((12,), (length, 2), shift=0.3)[0][0] for length in lengths]
    batches = [(x, model(x).detach()) for x in inputs]  # TTFF is best
    result = bln.search(model, batches, loss=F.mse_loss, per_layer=True)
    assert str(result.lowest.config) == "TTFF"
    assert result.mode == "together"
    for row in result:
        assignment = [str(config) for config in row.config.values()] if row.per_layer else [str(row.config)] * 3
        expected = brute_force(model, batches, assignment, F.mse_loss)
        assert row.loss == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)


class CentreOfTheBatch(nn.Module):
    def forward(self, x):
        return x - 0.5 * x.mean(0)


class Branching(nn.Module):
    """Control flow that depends on all samples together."""

    def forward(self, x):
        return x * 1.7 if x.sum() > self.threshold else x * 0.6


@pytest.mark.parametrize("coupling", [nn.BatchNorm1d(8, track_running_stats=False), CentreOfTheBatch()])
def test_other_modules_that_couple_samples_run_together(coupling):
    model = nn.Sequential(*dense()[:6], coupling, nn.Linear(8, 3))
    assert check(trained(model, TRAIN)) == "together"


def test_control_flow_that_depends_on_data_is_separate():
    model = nn.Sequential(*dense()[:6], Branching(), nn.Linear(8, 3))
    model[6].threshold = 0
    trained(model, TRAIN)
    sums = []
    handle = model[6].register_forward_pre_hook(lambda module, args: sums.append(args[0].sum().item()))
    for config in CONFIGS:
        brute_force(model, BATCHES[:1], [config] * 2)
    handle.remove()
    model[6].threshold = sorted(sums)[8]  # some configurations of the first batch exceed it, and some do not
    assert check(model) == "separate"
    notes = bln.search(model, BATCHES, loss=F.cross_entropy).notes
    assert any("ran separately" in note and "data-dependent control flow" in note for note in notes)


def test_a_later_batch_that_cannot_run_together_is_run_separately():
    class Short(nn.Module):
        def forward(self, x):
            return x if len(x) > 4 or x.sum() > 0 else -x

    model = nn.Sequential(*dense()[:6], Short(), nn.Linear(8, 3))
    batches = data((7, 4, 7), shift=0.3)
    assert check(trained(model, TRAIN), batches[:1]) == "together"
    assert check(model, batches) == "separate"


def test_other_losses_in_one_pass_mean_separate():
    class Counting(nn.Module):
        """Gives the first sixteen calls and those after them other outputs."""

        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * (1 if self.calls <= 16 else 2)

    model = nn.Sequential(*dense()[:6], Counting(), nn.Linear(8, 3))
    trained(model, TRAIN)[6].calls = 0
    result = bln.search(model, BATCHES[:1], loss=F.cross_entropy)
    assert result.mode == "separate"
    assert any("other losses" in note for note in result.notes)


def test_a_step_without_outputs():
    model = trained(dense(), TRAIN)

    def step(model, batch):
        x, targets = batch
        return None, F.cross_entropy(model(x), targets)

    result = bln.search(model, BATCHES[:1], loss=lambda outputs, targets: targets, step=step)
    assert result["FTFF"].loss == pytest.approx(brute_force(model, BATCHES[:1], ["FTFF"] * 2), rel=ROUNDING)


@dataclass
class Opaque:
    """Tensors in it cannot be seen from outside."""

    logits: Tensor


def test_outputs_of_an_unknown_class_are_separate():
    class Model(nn.Sequential):
        def forward(self, x):
            return Opaque(super().forward(x))

    model = trained(Model(*dense()), TRAIN)
    result = bln.search(model, BATCHES, loss=lambda outputs, targets: F.cross_entropy(outputs.logits, targets))
    assert result.mode == "separate"
    assert any("Opaque" in note for note in result.notes)


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
            "tuple": (logits, x),  # x is the same for all configurations
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
    assert check(model, batches, of_kind) == "together"


@pytest.mark.filterwarnings("ignore:.*makes a prediction depend")
def test_a_step_of_ones_own_runs_unusual_models():
    model = trained(dense(), TRAIN)
    odd = [{"features": x, "labels": t, "note": "x"} for x, t in BATCHES]

    def step(model, batch):
        return {"out": model(batch["features"])}, batch["labels"]

    result = bln.search(model, odd, loss=lambda o, t: F.cross_entropy(o["out"], t), step=step, calibrate=odd[:2])
    assert result.mode == "together"
    result.apply(model, "FTFF")
    assert result["FTFF"].loss == pytest.approx(brute_force(model, BATCHES, ["FTFF"] * 2), rel=ROUNDING)


@pytest.mark.parametrize("make", [dense, partial(Residual, groups=4)])
def test_under_autocast(make):
    model = trained(make(), data((9, 9), dtype=torch.float32, seed=1), torch.float32)
    batches = data((7, 7, 4), shift=0.3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        result = bln.search(model, batches, loss=F.cross_entropy)
        assert result.mode == "together"
        for row in result:
            # bfloat16 rounding, 2^-8, of the activations.
            assert row.loss == pytest.approx(brute_force(model, batches, [str(row.config)] * 2), rel=2**-8)


@pytest.mark.parametrize("options", [{}, {"per_position": False}, {"groups": 2}], ids=str)
def test_a_mask_given_by_padding_is_used_by_all_configurations(options):
    """Padded entries hold NaN: without the mask no loss would be finite."""
    model = Masked(**options).double()

    def batch(n, seed):
        ((x, targets),) = data((n,), (5, 2), shift=0.3, seed=seed)
        mask = torch.arange(5) < torch.arange(n)[:, None] % 5 + 1
        return torch.where(mask[..., None], x, torch.nan), mask, targets

    for seed in (1, 2):
        x, mask, _ = batch(9, seed)
        model(x, mask)
    batches = [batch(n, seed) for seed, n in enumerate((7, 7, 4), 3)]

    def step(model, batch):
        x, mask, targets = batch
        with bln.padding(mask):
            return model(x), targets

    explicit = [((x, mask), targets) for x, mask, targets in batches]
    for more in ({}, {"per_layer": True}, {"calibrate": batches[:2]}):
        result = bln.search(model, batches, loss=F.cross_entropy, step=step, **more)
        assert result.mode == "together"
        if "calibrate" in more:
            result.apply(model)
        for row in result:
            assignment = list(map(str, row.config.values())) if row.per_layer else [str(row.config)] * 2
            assert row.loss == pytest.approx(brute_force(model, explicit, assignment), rel=ROUNDING)


# ---- memory


class Small(nn.Module):
    """A device with room for so many rows, those of all copies."""

    def __init__(self, rows, error):
        super().__init__()
        self.rows, self.error = rows, error

    def forward(self, x):
        if len(x) * copies(x) > self.rows:
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
def test_copies_larger_than_memory_are_run_separately(error):
    model = nn.Sequential(*dense()[:6], Small(30, error), nn.Linear(8, 3))
    assert check(trained(model, TRAIN)) == "separate"


def test_on_a_cpu_copies_are_limited_to_what_a_cache_holds(monkeypatch):
    model, made = trained(dense(), TRAIN), []
    model[3].register_forward_hook(lambda module, args, output: made.append(copies(output)))
    monkeypatch.setattr(evaluate, "_CPU_NUMBERS", 5 * 7 * 9)  # five copies of the larger layer's input
    assert check(model) == "together"
    assert made[16:20] == [5, 5, 5, 1]
    made.clear()
    monkeypatch.setattr(evaluate, "_CPU_COPIES", 1)
    monkeypatch.setattr(evaluate, "_CPU_NUMBERS", 1)
    assert check(model) == "together"
    assert set(made) == {1}


def test_a_later_batch_may_be_the_one_too_large():
    model = nn.Sequential(*dense()[:6], Small(16 * 5, torch.OutOfMemoryError("out of memory")), nn.Linear(8, 3))
    trained(model, TRAIN)
    assert check(model, data((5, 5), shift=0.3)) == "together"
    assert check(model, data((5, 9, 5), shift=0.3)) == "separate"


def test_one_copy_too_large_is_the_users_error():
    model = nn.Sequential(*dense()[:6], Small(9, torch.OutOfMemoryError("out of memory")), nn.Linear(8, 3))
    trained(model, TRAIN)
    with pytest.raises(torch.OutOfMemoryError):
        bln.search(model, data((9, 10)), loss=F.cross_entropy)


def test_masks_that_a_converted_transformer_passes_on_reach_all_configurations():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dropout=0)
    model = bln.convert(nn.ModuleDict({"encoder": encoder, "head": nn.Linear(6, 3)})).double()
    mask = torch.arange(5) >= torch.arange(7)[:, None] % 5 + 1  # true where padded

    def run(model, batch):
        x, targets = batch
        y = model["encoder"](x, src_key_padding_mask=mask[: len(x)])
        return model["head"](y[:, 0]), targets

    for batch in data((7, 7), (5, 6), seed=1):
        run(model.train(), batch)
    batches = data((7, 7), (5, 6), shift=0.3)
    result = bln.search(model, batches, loss=F.cross_entropy, step=run)
    assert result.mode == "together"
    model.eval()
    for row in result:
        bln.configure(model, row.config)
        expected = sum(F.cross_entropy(*run(model, batch)).item() for batch in batches) / len(batches)
        assert row.loss == pytest.approx(expected, rel=ROUNDING)
