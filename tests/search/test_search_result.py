"""What a search returns, and what one does with it."""

import csv
import io
import json
import math
import os
import pty
import re
import subprocess
import sys

import pytest
import torch
from search_nets import CONFIGS, data, dense, trained
from torch import nn
from torch.nn import functional as F

import bln

TRAIN, BATCHES = data((9, 9), seed=1), data((7, 7, 4), shift=0.3)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return trained(dense(), TRAIN)


@pytest.fixture(scope="module")
def result(model):
    return bln.search(model, BATCHES, loss=F.cross_entropy, metrics="accuracy", rebatch=True)


def test_iterates_best_first(result):
    rows = list(result)
    assert len(rows) == len(result) == 16
    assert rows[0] is result.lowest is result[0]
    assert [row.loss for row in rows] == sorted(row.loss for row in rows)
    assert isinstance(rows[0].config, bln.StatisticsConfig)
    assert set(rows[0].metrics) == set(rows[0].metrics_error) == {"accuracy"}
    with pytest.raises(KeyError):
        result[{"2": "TTTT", "5": "FFFF"}]


def test_prints_as_a_table(result):
    lines = str(result).splitlines()
    assert lines[0].startswith("Configurations E_B Std_B E_F Std_F by loss (18 samples in 3 batches")
    assert repr(result) == str(result)
    best = next(line for line in lines if " * " in line)
    assert str(result.best.config) in best
    assert f"{result.best.loss:.4f} ± {result.best.loss_error:.4f}" in best
    assert all(any(config in line for line in lines) for config in CONFIGS)


def test_html_holds_the_table_as_it_is_printed():
    named = bln.search(trained(dense(), TRAIN), BATCHES, loss=F.cross_entropy, metrics={"<b>": lambda o, t: 1.0})
    html = named._repr_html_()
    assert "<b>" not in html
    assert html == f"<pre>{str(named).replace('<', '&lt;').replace('>', '&gt;')}</pre>"


def test_exports_agree(result, tmp_path):
    frame = result.to_dataframe()
    records = list(csv.DictReader(io.StringIO(result.to_csv())))
    loaded = json.loads(result.to_json())
    assert loaded["mode"] == result.mode
    assert loaded["notes"] == list(result.notes)
    for at, row in enumerate(result):
        assert frame.loc[at, "config"] == records[at]["config"] == loaded["rows"][at]["config"] == str(row.config)
        assert frame.loc[at, "rank"] == loaded["rows"][at]["rank"] == at + 1
        for name, value in (
            ("loss", row.loss),
            ("loss_error", row.loss_error),
            ("accuracy", row.metrics["accuracy"]),
            ("accuracy_error", row.metrics_error["accuracy"]),
            ("sorted_loss", row.rebatched["sorted"].loss),
            ("single_accuracy", row.rebatched["single"].metrics["accuracy"]),
        ):
            assert frame.loc[at, name] == value
            assert float(records[at][name]) == value
            assert loaded["rows"][at][name] == value
        assert bool(frame.loc[at, "depends_on_batch"]) == row.config.uses_batch
    for name in ("json", "csv"):
        written = getattr(result, f"to_{name}")(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8") == written


def test_applies_the_best_or_any(result, model):
    layers = bln.layers(model)
    for which, expected in (
        (None, result.best.config),
        (result[5], result[5].config),
        ("TFTF", bln.StatisticsConfig.parse("TFTF")),
        (bln.StatisticsConfig.parse("FTFT"), bln.StatisticsConfig.parse("FTFT")),
    ):
        row = result.apply(model, which)
        assert row.config == expected
        assert all(layer.config == expected for layer in layers.values())
    assert result.apply(model, {"2": "FFFF"}) is None
    assert [str(layer.config) for layer in layers.values()] == ["FFFF", "FTFT"]
    with pytest.raises(ValueError, match="is not a configuration"):
        result.apply(model, "XX")


def spirals(n, seed):
    """Two arms of a spiral, in batches of 25."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(2, (n,), generator=generator)
    radius = torch.rand(n, generator=generator) * 2.5 + 0.3
    angle = 1.6 * radius + math.pi * targets
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], 1) + 0.12 * torch.randn(n, 2, generator=generator)
    return [(x[i : i + 25], targets[i : i + 25]) for i in range(0, n, 25)]


def loss_of(model, batches):
    model.eval()
    with torch.no_grad():
        return sum(F.cross_entropy(model(x), t).item() for x, t in batches) / len(batches)


def test_training_continues_with_the_winner():
    """Step 13: train, search on validation, apply, fine-tune with the BLN layers in eval(), report the test set."""
    train, validation, test = spirals(500, 0), spirals(250, 1), spirals(250, 2)
    model = nn.Sequential(
        nn.Linear(2, 24), nn.Tanh(), bln.BatchLayerNorm(24), nn.Linear(24, 24), nn.Tanh(), bln.BatchLayerNorm(24),
        nn.Linear(24, 2),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def epoch():
        for x, targets in train:
            optimizer.zero_grad()
            F.cross_entropy(model(x), targets).backward()
            optimizer.step()

    for _ in range(4):
        model.train()
        epoch()

    result = bln.search(model, validation, loss=F.cross_entropy, metrics="accuracy", calibrate=train)
    result.apply(model)
    assert loss_of(model, validation) == pytest.approx(result.best.loss, rel=1e-5)

    # Validating with the winner while training goes on: training itself never looks at the configuration.
    model.train()
    epoch()
    assert all(layer.config == result.best.config for layer in bln.layers(model).values())

    # Fine-tuning with the layers as they will be used.
    result = bln.search(model, validation, loss=F.cross_entropy, calibrate=train)
    result.apply(model)
    layers = bln.layers(model)
    statistics = {name: layer.population.batch_mean.clone() for name, layer in layers.items()}
    before = loss_of(model, validation)
    for _ in range(8):
        model.train()
        for layer in layers.values():
            layer.eval()
        epoch()
    assert all(torch.equal(layer.population.batch_mean, statistics[name]) for name, layer in layers.items())
    assert loss_of(model, validation) < 0.8 * before
    assert loss_of(model, test) < 0.8 * before

    # Saved and loaded, the winner comes along.
    other = nn.Sequential(
        nn.Linear(2, 24), nn.Tanh(), bln.BatchLayerNorm(24), nn.Linear(24, 24), nn.Tanh(), bln.BatchLayerNorm(24),
        nn.Linear(24, 2),
    )  # fmt: skip
    other.load_state_dict(model.state_dict())
    assert loss_of(other, test) == loss_of(model, test)


def test_a_calibrated_result_is_for_the_layers_it_knows(model):
    calibrated = bln.search(model, BATCHES, loss=F.cross_entropy, calibrate=TRAIN)
    with pytest.raises(ValueError, match="no statistics that fit the layer '0'; apply to the model that was searched"):
        calibrated.apply(nn.Sequential(bln.BatchLayerNorm(3)))


TERMINAL = """
import torch, bln
from search_nets import data, dense, trained
torch.manual_seed(0)
model = trained(dense(), data((9, 9), seed=1))
loss = torch.nn.functional.cross_entropy
options = {"per_layer": True, "rebatch": True, "calibrate": data((9, 9), seed=3)}
print(bln.search(model, data((7,) * 9, shift=0.3), loss=loss, **options))
bln.search(model, data((7,) * 9, shift=0.3), loss=loss, per_layer=True, sampler="random", trials=4)
"""


def test_a_terminal_sees_a_progress_bar():
    ours, theirs = pty.openpty()
    folder = os.path.dirname(__file__)
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "160", "PYTHONPATH": folder}
    process = subprocess.Popen([sys.executable, "-c", TERMINAL], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # that is how a terminal ends
            break
    os.close(ours)
    assert process.wait() == 0, shown.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert text != shown.decode()  # there was colour
    assert "search" in text
    assert "trial 16" in text  # after the shared ones
    assert "━" in text  # the bar
    assert "0:00:00" in text  # the time left
    assert "combination of layers with the lowest loss" in text  # the table
