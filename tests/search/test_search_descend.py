"""A configuration for each layer, against all combinations."""

import itertools
from functools import partial

import pytest
import torch
from search_nets import (
    CONFIGS,
    ROUNDING,
    Residual,
    Towers,
    all_assignments,
    brute_force,
    conv,
    copies,
    data,
    deep,
    dense,
    grouped,
    trained,
)
from torch import nn
from torch.nn import functional as F

import bln

TRAIN, BATCHES = data((9, 9), seed=1), data((7, 7, 4), shift=0.3)
IMAGES = (data((9, 9), (2, 6, 6), seed=1), data((7, 7, 4), (2, 6, 6), shift=0.3))


def letters(model, row):
    if row.per_layer:
        return tuple(str(config) for config in row.config.values())
    return (str(row.config),) * len(bln.layers(model))


@pytest.mark.parametrize(
    ("make", "train", "batches"),
    [(dense, TRAIN, BATCHES), (conv, *IMAGES), (grouped, *IMAGES), (Residual, TRAIN, BATCHES)],
)
def test_against_all_256(make, train, batches):
    model = trained(make(), train)
    expected = {a: brute_force(model, batches, a) for a in all_assignments(model)}
    assert len(expected) == 256
    result = bln.search(model, batches, loss=F.cross_entropy, per_layer=True)

    tried = {letters(model, row): row.loss for row in result}
    assert set(tried) >= {(config, config) for config in CONFIGS}
    for assignment, loss in tried.items():
        assert loss == pytest.approx(expected[assignment], rel=ROUNDING)
    # Where it ends, no change of a single layer would improve, and no shared configuration is better.
    best = letters(model, result.lowest)
    around = [a for a in expected if sum(x != y for x, y in zip(a, best, strict=True)) == 1]
    assert len(around) == 30
    assert all(expected[a] >= expected[best] * (1 - 2e-6) for a in around)  # a millionth counts as rounding
    assert expected[best] <= min(expected[c, c] for c in CONFIGS)
    assert result.lowest.loss == min(tried.values())


def test_three_layers_end_where_no_single_change_improves():
    model = trained(deep(), TRAIN)
    result = bln.search(model, BATCHES, loss=F.cross_entropy, per_layer=True)
    best = letters(model, result.lowest)
    end = brute_force(model, BATCHES, best)
    assert result.lowest.loss == pytest.approx(end, rel=ROUNDING)
    assert end <= min(brute_force(model, BATCHES, (c,) * 3) for c in CONFIGS)
    for at, config in itertools.product(range(3), CONFIGS):
        assert brute_force(model, BATCHES, (*best[:at], config, *best[at + 1 :])) >= end * (1 - 2e-6)


def test_layers_before_the_one_that_changes_run_once():
    model, made = trained(deep(), TRAIN), {at: [] for at in (0, 3, 6, 9)}
    for at, seen in made.items():
        model[at].register_forward_hook(lambda module, args, output, seen=seen: seen.append(copies(output)))
    bln.search(model, data((7,) * 5, shift=0.3), loss=F.cross_entropy, per_layer=True)
    # 15 copies: the sixteenth candidate is the present combination, which is known. The last layer's are made in it.
    passes = list(zip(*made.values(), strict=True))
    assert (1, 1, 1, 15) in passes
    assert (1, 1, 15, 15) in passes


def behind_a_layer():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), bln.BatchLayerNorm(6), Residual())


class SharedTower(Towers):
    """One branch is used twice, on inputs of different lengths."""

    def forward(self, x):
        return self.head(self.left(x) + self.left(x.flip(1)) + self.right(x[:1]))


@pytest.mark.parametrize("sizes", [(7, 7, 4), (1, 7, 1, 4)], ids=["", "one sample first"])
@pytest.mark.parametrize("make", [behind_a_layer, Towers, SharedTower, partial(Towers, groups=1)])
def test_skip_connections_and_parallel_branches_equal_the_long_way(make, sizes):
    model, batches = trained(make(), TRAIN), data(sizes, shift=0.3)
    result = bln.search(model, batches, loss=F.cross_entropy, per_layer=True)
    assert result.mode == "together"
    assert len(result) > 16 + 15 * 3
    for row in result:
        assert row.loss == pytest.approx(brute_force(model, batches, letters(model, row)), rel=ROUNDING)


def test_the_table_shows_what_each_layer_chose():
    model = trained(deep(), TRAIN)
    result = bln.search(model, BATCHES, loss=F.cross_entropy, per_layer=True)
    row = next(row for row in result if row.per_layer)
    for shown in (str(result), result._repr_html_()):
        for name, config in row.config.items():
            assert any(name in line and str(config) in line for line in shown.replace("<tr", "\n").splitlines())
    record = row.record()
    assert {record[f"config[{name}]"] for name in bln.layers(model)} == {str(c) for c in row.config.values()}


@pytest.mark.filterwarnings("ignore:.*makes a prediction depend")
def test_applies_to_each_layer():
    model = trained(deep(), TRAIN)
    result = bln.search(model, BATCHES, loss=F.cross_entropy, per_layer=True)
    row = next(row for row in result if row.per_layer)
    result.apply(model, row)
    assert {name: layer.config for name, layer in bln.layers(model).items()} == row.config
    model.eval()
    with torch.no_grad():
        loss = sum(F.cross_entropy(model(x), t).item() * len(t) for x, t in BATCHES) / 18
    assert loss == pytest.approx(row.loss, rel=ROUNDING)


def test_one_layer_alone_has_nothing_to_choose_from():
    model = trained(nn.Sequential(nn.Linear(6, 6), bln.BatchLayerNorm(6), nn.Linear(6, 3)), TRAIN)
    result = bln.search(model, BATCHES, loss=F.cross_entropy, per_layer=True)
    assert len(result) == 16


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_a_report_of_other_orders_does_not_change_what_is_tried(seed):
    """Only ``robust`` ranks by them."""
    model = trained(dense(), data((9, 9), seed=seed))
    batches = data((7, 7, 4), shift=0.3, seed=seed + 10)
    search = partial(bln.search, model, batches, loss=F.cross_entropy, per_layer=True)
    plain, reported = search(), search(rebatch=True)
    assert {letters(model, row) for row in plain} == {letters(model, row) for row in reported}
