"""How requests arrive, and where population statistics come from."""

import copy
import math

import pytest
import torch
from search_nets import (
    CONFIGS,
    ROUNDING,
    Residual,
    brute_force,
    copies,
    data,
    deep,
    dense,
    grouped,
    labelled,
    sided,
    trained,
)
from torch import nn
from torch.nn import functional as F

import bln
from bln._search.result import Row, Score

TRAIN, BATCHES = data((9, 9), seed=1), data((7, 7, 4), shift=0.3)


def joined(batches):
    return torch.cat([x for x, _ in batches]), torch.cat([t for _, t in batches])


def batched(x, targets, order, size):
    return [(x[part], targets[part]) for part in torch.split(order, size)]


IMAGES = data((9, 9), (2, 6, 6), seed=1), data((7, 7, 4), (2, 6, 6), shift=0.3)


@pytest.mark.parametrize("make", [dense, deep, Residual, grouped])
def test_arrangements_equal_the_long_way(make):
    train, given = IMAGES if make is grouped else (TRAIN, BATCHES)
    model = trained(make(), train)
    result = bln.search(model, given, loss=F.cross_entropy, metrics="accuracy", rebatch=True)
    x, targets = joined(given)
    shuffled = torch.randperm(18, generator=torch.Generator().manual_seed(0))
    ways = {
        "shuffled": batched(x, targets, shuffled, 7),
        "sorted": batched(x, targets, targets.argsort(stable=True), 7),
        "single": batched(x, targets, torch.arange(18), 1),
    }
    for row in result:
        assert list(row.rebatched) == list(ways)
        for name, batches in ways.items():
            expected = brute_force(model, batches, [str(row.config)] * len(bln.layers(model)))
            assert row.rebatched[name].loss == pytest.approx(expected, rel=ROUNDING)
    assert result["FFFF"].rebatched["single"].loss != pytest.approx(result["FFFF"].loss, rel=1e-3)


@pytest.mark.parametrize("make", [dense, Residual, grouped])
def test_single_samples_run_together(make):
    train, given = IMAGES if make is grouped else (TRAIN, BATCHES)
    model, made = trained(make(), train), []
    last = list(model.modules())[-1]
    last.register_forward_hook(lambda module, args, output: made.append((len(output), copies(output))))
    bln.search(model, given, loss=F.cross_entropy, rebatch=True)
    assert made.count((1, 1)) == 4 * 16  # the samples by which that is tried
    assert made[-3:] == [(1, 16 * 7), (1, 16 * 7), (1, 16 * 4)]


class LooksAtItsInput(nn.Module):
    def forward(self, x):
        return x if x.sum() > -1e9 else -x


def test_single_samples_that_cannot_run_together_leave_whole_batches_together():
    model = trained(nn.Sequential(LooksAtItsInput(), *dense()), TRAIN)  # its input is the same for all configurations
    result = bln.search(model, BATCHES, loss=F.cross_entropy, rebatch=True)
    assert result.mode == "together"
    assert any(note.startswith("Single samples ran separately") for note in result.notes)
    x, targets = joined(BATCHES)
    singles = batched(x, targets, torch.arange(18), 1)
    for row in result:
        expected = brute_force(model, singles, [str(row.config)] * 2)
        assert row.rebatched["single"].loss == pytest.approx(expected, rel=ROUNDING)


class Attention(nn.Module):
    """An operator of which torch.vmap makes one call for each copy, and warns."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = bln.BatchLayerNorm(8, channel_dim=-1), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        y = self.norm(x)
        return self.head(self.attention(y, y, y, need_weights=False)[0].mean(1))


def test_operators_without_a_batching_rule_give_no_warning():
    model = trained(Attention(), data((9, 9), (5, 8), seed=1))
    batches = data((7, 4), (5, 8), shift=0.3)
    result = bln.search(model, batches, loss=F.cross_entropy)
    assert result.mode == "together"
    for row in result:
        assert row.loss == pytest.approx(brute_force(model, batches, [str(row.config)]), rel=ROUNDING)


@pytest.mark.parametrize("make", [dense, grouped])
def test_population_batch_statistics_do_not_move(make):
    train, given = IMAGES if make is grouped else (TRAIN, BATCHES)
    result = bln.search(trained(make(), train), given, loss=F.cross_entropy, rebatch=True)
    for row in result:
        moved = [abs(score.loss - row.loss) > 1e-9 for score in row.rebatched.values()]
        assert not any(moved) if not row.depends_on_batch else any(moved)


def test_arrangements_of_a_model_that_couples_samples_otherwise():
    model = nn.Sequential(*dense()[:6], nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))
    trained(model, TRAIN)

    def single_works(batch):  # torch's batch norm refuses a single sample
        return batch if len(batch) > 1 else batch.repeat(2, 1)

    model[6].register_forward_pre_hook(lambda module, args: (single_works(args[0]),))
    model[6].register_forward_hook(lambda module, args, out: out)
    loss = lambda outputs, targets: F.cross_entropy(outputs[: len(targets)], targets)  # noqa: E731
    result = bln.search(model, BATCHES, loss=loss, rebatch=True)
    assert result.mode == "together"
    x, targets = joined(BATCHES)
    singles = batched(x, targets, torch.arange(18), 1)
    for row in result:
        expected = brute_force(model, singles, [str(row.config)] * 2, loss)
        assert row.rebatched["single"].loss == pytest.approx(expected, rel=ROUNDING)


def test_the_batch_mean_is_the_label_where_requests_come_sorted():
    model, batches = sided(), labelled((25,) * 8, 0)
    plain = bln.search(model, batches, loss=F.cross_entropy, metrics="accuracy")
    assert all(row.metrics["accuracy"] > 0.95 for row in plain)  # nothing to be seen in shuffled batches
    assert "makes a prediction depend on the other samples" in str(plain)

    result = bln.search(model, batches, loss=F.cross_entropy, metrics="accuracy", rebatch=True)
    for row in result:
        assert row.depends_on_batch == (not str(row.config).startswith("TT"))
        if row.config.batch_mean:
            assert row.collapses == ()
            continue
        # The current mean takes the label away. Alone, a sample is its own mean; then only x_F is left to tell, and
        # it does if it is measured from the population's mean.
        assert row.collapses == (("sorted",) if row.config.feature_mean else ("sorted", "single"))
        # One of the eight batches holds both classes; the others are chance, give or take three deviations.
        assert row.rebatched["sorted"].metrics["accuracy"] < 1 / 8 + 7 / 8 * 0.5 + 3 * (0.25 / 175) ** 0.5
    shown = str(result)
    assert "makes a prediction depend on the other samples" in shown
    assert "FFFF (sorted, single)" in shown
    assert shown.split("\n- ")[0].count(" !") == 12  # in the table: eight sorted, four one at a time


@pytest.mark.parametrize(
    ("metric", "error", "moved", "collapses"),
    [(0.9, 0.01, 0.7, True), (0.9, 0.01, 0.8, False), (0.9, 0.1, 0.7, False), (0.9, math.nan, 0.7, True)],
)
def test_a_collapse_is_a_fifth_of_the_first_metric_beyond_noise(metric, error, moved, collapses):
    given = Score(0.3, 0.01, {"accuracy": metric, "other": 1.0}, {"accuracy": error, "other": 0.0})
    other = Score(0.3, 0.01, {"accuracy": moved, "other": 0.0}, {"accuracy": error, "other": 0.0})
    row = Row(**vars(given), config=bln.StatisticsConfig.parse("FFFF"), rebatched={"sorted": other})
    assert row.collapses == (("sorted",) if collapses else ())


@pytest.mark.parametrize(("moved", "collapses"), [(0.4, False), (0.5, True), (math.nan, True)])
def test_without_metrics_a_collapse_is_half_the_loss_on_top(moved, collapses):
    row = Row(0.3, 0.01, config=bln.StatisticsConfig.parse("FFFF"), rebatched={"single": Score(moved, 0.01)})
    assert bool(row.collapses) == collapses


@pytest.mark.parametrize("groups", [None, 2])
def test_robust_ranks_by_the_worst_case(groups):
    model, batches = sided(groups), labelled((25,) * 8, 0)
    plain = bln.search(model, batches, loss=F.cross_entropy)
    robust = bln.search(model, batches, loss=F.cross_entropy, robust=True)
    worst = [row.worst.loss for row in robust]
    assert worst == sorted(worst)
    assert not robust.best.collapses
    assert [row.config for row in plain] != [row.config for row in robust]
    assert {str(row.config)[0] for row in robust.rows[:8]} == {"T"}


@pytest.mark.parametrize("make", [dense, grouped])
def test_robust_per_layer_is_never_worse_than_robust_shared(make):
    train, given = IMAGES if make is grouped else (TRAIN, BATCHES)
    model = trained(make(), train)
    shared = bln.search(model, given, loss=F.cross_entropy, robust=True)
    layers = bln.search(model, given, loss=F.cross_entropy, robust=True, per_layer=True)
    assert layers.best.worst.loss <= shared.best.worst.loss
    tried = [row for row in layers if row.per_layer]
    assert all(set(row.rebatched) == {"shuffled", "sorted", "single"} for row in tried)


def test_the_best_combination_of_layers_is_rebatched_too():
    model = trained(dense(), TRAIN)
    result = bln.search(model, BATCHES, loss=F.cross_entropy, per_layer=True, rebatch=True)
    assert set(result.best.rebatched) == {"shuffled", "sorted", "single"}


def test_targets_that_cannot_be_sorted_are_said():
    model = trained(dense(), TRAIN)
    batches = [(x, torch.randn(len(x), 3, dtype=torch.float64)) for x, _ in BATCHES]
    result = bln.search(model, batches, loss=F.mse_loss, rebatch=True)
    assert set(result.best.rebatched) == {"shuffled", "single"}
    assert any("Not sorted by label" in note for note in result.notes)


def test_samples_that_cannot_be_put_together_are_refused():
    model = nn.Sequential(nn.Conv1d(2, 3, 1), bln.BatchLayerNorm(3, per_position=False), nn.AdaptiveAvgPool1d(1))
    model.append(nn.Flatten()).double()
    batches = [(torch.randn(4, 2, n, dtype=torch.float64), torch.zeros(4).long()) for n in (5, 6)]
    with pytest.raises(ValueError, match=r"differ in structure or shape: .* Pad them to one shape"):
        bln.search(model, batches, loss=F.cross_entropy, rebatch=True)
    assert len(bln.search(model, batches, loss=F.cross_entropy)) == 16


# ---- calibration


def stale(groups=None):
    """A net whose population statistics are not those of its weights: what reaches the layer was larger before."""
    model = sided(groups)
    with torch.no_grad():
        for x, _ in labelled((25,) * 40, 1):
            model(3 * x + 4)
    return model.eval()


FRESH = labelled((25,) * 6, 2)


@pytest.mark.parametrize("groups", [None, 2])
def test_calibration_is_shown_with_what_it_gained(groups):
    model, batches = stale(groups), labelled((25,) * 4, 0)
    before = copy.deepcopy(model.state_dict())
    plain = bln.search(model, batches, loss=F.cross_entropy)
    result = bln.search(model, batches, loss=F.cross_entropy, metrics="accuracy", calibrate=FRESH)
    rounding = 1.2e-7 * 25 * 10  # float32, sums over 25 samples, a deviation of a tenth
    for row in result:
        assert row.uncalibrated.loss == pytest.approx(plain[str(row.config)].loss, rel=rounding)
    ruined, mended = result["TTFF"].uncalibrated, result["TTFF"]
    assert ruined.metrics["accuracy"] < 0.6
    assert mended.metrics["accuracy"] > 0.95
    assert mended.loss < ruined.loss / 2
    assert result["FFFF"].loss == pytest.approx(result["FFFF"].uncalibrated.loss, rel=rounding)
    assert "loss before calibration" in str(result)
    assert f"{result['TTFF'].uncalibrated.loss:.4f}" in str(result)
    assert any("recomputed under frozen weights. apply() puts them in place" in note for note in result.notes)
    assert any("calibrate=train_batches" in note for note in plain.notes)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    calibrated = copy.deepcopy(model)
    bln.calibrate(calibrated, FRESH)
    for config in CONFIGS:
        assert result[config].loss == pytest.approx(brute_force(calibrated, batches, [config]), rel=rounding)


@pytest.mark.parametrize("groups", [None, 2])
def test_apply_puts_the_calibrated_statistics_in_place(groups):
    model, batches = stale(groups), labelled((25,) * 4, 0)
    result = bln.search(model, batches, loss=F.cross_entropy, calibrate=FRESH)
    result.apply(model, "TTFF")
    assert brute_force(model, batches, ["TTFF"]) == pytest.approx(result["TTFF"].loss, rel=1e-6)
    # What the result remembers is its own: training on does not change it.
    for x, _ in FRESH:
        model.train()(x + 5)
    assert brute_force(model, batches, ["TTFF"]) > 1.1 * result["TTFF"].loss
    result.apply(model, "TTFF")
    assert brute_force(model, batches, ["TTFF"]) == pytest.approx(result["TTFF"].loss, rel=1e-6)


@pytest.mark.parametrize("groups", [None, 3])
def test_calibration_of_a_net_that_knows_no_positions_yet(groups):
    norm = bln.BatchLayerNorm(3, groups=groups, per_position=True)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), norm, nn.Flatten(), nn.Linear(48, 3)).double()
    images = data((7, 7), (2, 6, 6), seed=1)
    result = bln.search(model, data((7, 5), (2, 6, 6)), loss=F.cross_entropy, calibrate=images)
    assert model[1].population.position_shape is None
    result.apply(model)
    assert model[1].population.position_shape == (4, 4)
    assert not math.isnan(result.best.loss)


@pytest.mark.parametrize(
    "other",
    [
        lambda: bln.BatchLayerNorm(3, position_shape=(5, 4)),
        lambda: bln.BatchLayerNorm(3, per_position=False),
        lambda: bln.BatchLayerNorm(4),
        lambda: bln.BatchLayerNorm(3, groups=1),
    ],
)
def test_apply_refuses_calibrated_statistics_of_another_shape_and_changes_nothing(other):
    first = lambda: bln.BatchLayerNorm(2)  # noqa: E731
    model = nn.Sequential(first(), nn.Conv2d(2, 3, 3), bln.BatchLayerNorm(3), nn.Flatten(), nn.Linear(48, 3)).double()
    images = data((7, 7), (2, 6, 6), seed=1)
    result = bln.search(model, data((7, 5), (2, 6, 6)), loss=F.cross_entropy, calibrate=images)
    unlike = nn.Sequential(first(), nn.Identity(), other()).double()
    before = copy.deepcopy(unlike.state_dict())
    with pytest.raises(ValueError, match=r"no statistics that fit the layer '2'.*bln\.calibrate it"):
        result.apply(unlike, "FFFF")
    after = unlike.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("per_position", [True, False])
def test_apply_refuses_calibrated_statistics_of_other_groups(per_position):
    model, other = (
        nn.Sequential(bln.BatchLayerNorm(6, groups=groups, per_position=per_position), nn.Linear(6, 3)).double()
        for groups in (2, 3)
    )
    result = bln.search(model, BATCHES, loss=F.cross_entropy, calibrate=TRAIN)
    with pytest.raises(ValueError, match="no statistics that fit the layer '0'"):
        result.apply(other)


class WithTable(nn.Module):
    """The first argument holds no samples."""

    def __init__(self):
        super().__init__()
        self.net = dense()

    def forward(self, table, x):
        return self.net(x + table.mean())


def test_an_argument_without_samples_stays_as_it_is():
    table = torch.ones(3, dtype=torch.float64)
    model = WithTable().double()
    model.net = trained(model.net, TRAIN)
    batches = [({"table": table, "x": x}, targets) for x, targets in BATCHES]
    ours = bln.search(model, batches, loss=F.cross_entropy, rebatch=True)
    plain = bln.search(model.net, [(x + 1, t) for x, t in BATCHES], loss=F.cross_entropy, rebatch=True)
    for row in ours:
        for name, score in row.rebatched.items():
            assert score.loss == pytest.approx(plain[str(row.config)].rebatched[name].loss, rel=ROUNDING)


def test_targets_without_samples_cannot_be_rebatched():
    model = trained(dense(), TRAIN)
    batches = [(x, torch.arange(3 * len(x)) % 3) for x, _ in BATCHES]  # three for each sample
    loss = lambda outputs, targets: F.cross_entropy(outputs.repeat_interleave(3, 0), targets)  # noqa: E731
    assert len(bln.search(model, batches, loss=loss)) == 16
    with pytest.raises(ValueError, match="as many samples as there are targets, 21, and no input has that many"):
        bln.search(model, batches, loss=loss, rebatch=True)
