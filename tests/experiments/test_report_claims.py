"""Verdicts follow the figures."""

import math
import re

import pytest

from bln.experiments.report.claims import CLAIMS, Verdict, decide, judge, overall
from bln.experiments.report.compare import TEST_LOSS, difference, pairs
from bln.experiments.report.statistics import mean_interval
from bln.experiments.report.summary import authors, read
from report_runs import like_authors, run, summary, world

YES, NO, OPEN = Verdict.REPRODUCED, Verdict.NOT, Verdict.UNDECIDED


def verdicts(runs, protocol="paper"):
    return {(part.row, part.column): part for part in judge(read(summary(runs)), protocol)}


@pytest.mark.parametrize("protocol", ["paper", "clean"])
def test_every_part_holds_where_the_paper_is_right_and_none_where_it_is_wrong(rng, protocol):
    for right, expected in ((True, YES), (False, NO)):
        parts = judge(read(summary(world(rng, right, protocol=protocol))), protocol)
        assert len(parts) == len(judge(authors()))
        assert {part.claim for part in parts} == set(CLAIMS)
        assert [part for part in parts if part.verdict is not expected] == []
        assert overall(parts) == expected.value


def test_nothing_run_is_undecided_everywhere():
    parts = judge(read(summary([])))
    assert {part.verdict for part in parts} == {OPEN}
    assert {part.note for part in parts} == {"not run"}
    assert not any(part.effect for part in parts)


def test_another_protocols_runs_do_not_count(rng):
    assert {part.verdict for part in verdicts(world(rng, protocol="clean")).values()} == {OPEN}


def test_running_runs_do_not_count(rng):
    runs = [one | {"status": "running"} for one in world(rng)]
    assert {part.verdict for part in verdicts(runs).values()} == {OPEN}


@pytest.mark.parametrize("sign", [1, -1])
def test_an_interval_on_one_side_decides_and_one_that_holds_0_does_not(sign):
    expected = YES if sign > 0 else NO
    assert decide([sign * gain for gain in (0.010, 0.011, 0.012, 0.011)], 0.05) == (expected, "")
    assert decide([sign * gain for gain in (0.010, 0.011, -0.012, 0.011)], 0.05)[0] is OPEN


def test_the_wider_of_both_intervals_decides():
    """The bootstrap of three positive values never reaches 0; the t interval of these does: 1.2 ± 3.0."""
    assert decide([0.1, 1.0, 2.5], 0.0)[0] is OPEN


def test_differences_are_shown_with_the_interval_that_decides(rng):
    found = read(summary(world(rng)))
    for setting in found.settings("cnn", "paper"):
        gains = [TEST_LOSS.of(a) - TEST_LOSS.of(b) for a, b in pairs(found, setting, "bln", "bn")]
        shown = difference(found, setting, "bln", "bn", TEST_LOSS).estimate
        assert shown.n == len(gains)
        assert shown.low <= mean_interval(gains).low < shown.mean < mean_interval(gains).high <= shown.high


@pytest.mark.parametrize("gains", [[0.06], [0.055, 0.06]])
def test_with_few_seeds_an_assumed_margin_decides_and_is_named(gains):
    assert decide(gains, 0.05)[0] is YES
    assert "assumed" in decide(gains, 0.05)[1]
    assert decide([-gain for gain in gains], 0.05)[0] is NO
    assert decide(gains, 0.07)[0] is OPEN
    assert decide([0.3, -0.1], 0.05)[0] is OPEN


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([math.inf], YES),
        ([-math.inf], NO),
        ([math.inf, 0.001, 0.002], YES),
        ([math.inf, 0.5, -0.001], OPEN),
        ([-math.inf, -0.5, -0.001], NO),
        ([math.inf, math.nan, 0.5], OPEN),
    ],
)
def test_where_a_run_diverged_all_seeds_must_agree(gains, expected):
    assert decide(gains, 0.05) == (expected, "a run diverged")


def diverge(one):
    empty = {name: [*curve[:2], *[None] * (len(curve) - 2)] for name, curve in one["curves"].items()}
    return one | {"status": "diverged", "test": None, "curves": empty, "chosen": None, "configurations": None}


def test_a_diverged_rival_loses_and_counts_as_chance(rng):
    runs = [diverge(one) if (one["norm"], one["batch_size"]) == ("bn", 1) else one for one in world(rng)]
    found = verdicts(runs)
    assert {part.verdict for part in found.values()} == {YES}
    assert found["CNN, batch 1: BLN better than BN", "test loss"].note == "a run diverged"
    assert found["CNN, batch 1: BN fails", "test accuracy"].note == "4 of 4 diverged"
    assert found["batch 1: BN reaches 0.09", "train accuracy, last epoch"].effect == "0.100 [0.100, 0.100]"


def test_a_diverged_bln_refutes(rng):
    runs = [diverge(one) if (one["norm"], one["task"]) == ("bln", "cnn") else one for one in world(rng)]
    found = verdicts(runs)
    assert found["batch 25: BLN reaches 0.87", "train accuracy, last epoch"].verdict is NO
    for measure in ("training loss, mean over epochs", "test accuracy", "test loss"):
        assert found["CNN, batch 25: BLN better than LN", measure].verdict is NO
    assert found["CNN, 20 % of the data: TTxx leads", "test loss, best inside minus best outside"].verdict is OPEN


@pytest.mark.parametrize(("shift", "expected"), [(0.0, YES), (0.049, OPEN), (-0.049, OPEN), (0.08, NO), (-0.08, NO)])
def test_a_printed_accuracy_is_matched_within_the_tolerance(rng, shift, expected):
    runs = []
    for seed, noise in enumerate((-0.004, 0.001, 0.003)):
        one = run(rng, "cnn", "bln", 25, 0.2, seed)
        one["curves"]["train_accuracy"][-1] = 0.87 + shift + noise
        runs.append(one)
    assert verdicts(runs)["batch 25: BLN reaches 0.87", "train accuracy, last epoch"].verdict is expected


def test_one_seed_can_refute_a_printed_accuracy_and_not_confirm_it(rng):
    one = run(rng, "cnn", "bln", 25, 0.2)
    for reached, expected in ((0.87, OPEN), (0.7, NO)):
        one["curves"]["train_accuracy"][-1] = reached
        part = verdicts([one])["batch 25: BLN reaches 0.87", "train accuracy, last epoch"]
        assert (part.verdict, part.note) == (expected, "one seed, interval assumed; a spread takes 3")


def test_one_epoch_above_refutes_lower_at_each_epoch(rng):
    runs = world(rng)
    for one in runs:
        if (one["task"], one["norm"], one["batch_size"]) == ("cnn", "bln", 25):
            one["curves"]["train_loss"][2] += 1
    part = verdicts(runs)["CNN, batch 25: BLN better than BN", "training loss, each epoch"]
    assert part.verdict is NO
    assert part.effect.startswith("lower in 4 of 5, at worst +")


def test_seeds_are_paired(rng):
    """Seeds differ far more than norms do; only pairing sees the difference."""
    runs = []
    for seed in range(4):
        for norm, gap in (("bn", 0.0), ("bln", 0.02)):
            one = run(rng, "cnn", norm, 25, 0.2, seed)
            one["test"]["accuracy"] = 0.4 + 0.1 * seed + gap + rng.normal(0, 1e-4)
            runs.append(one)
    key = ("CNN, batch 25: BLN better than BN", "test accuracy")
    assert verdicts(runs)[key].verdict is YES
    for one in runs:
        one["seed"] += 10 * (one["norm"] == "bn")
    assert verdicts(runs)[key].note == "not run"


def test_configurations_are_chosen_on_validation_and_compared_on_test(rng):
    """Validation prefers another one in each setting, but the test set prefers the first's in both."""
    runs = world(rng)
    key = ("depends on data size: CNN, batch 25, 20 % or all data", "configurations")
    assert verdicts(runs)[key].effect.split(":")[0] == "TTFF / FTFF"
    for one in runs:
        if (one["task"], one["norm"], one["fraction"]) == ("cnn", "bln", 1.0):
            test = one["configurations"]["test"]
            test["TTFF"], test["FTFF"] = test["FTFF"], test["TTFF"]
    assert verdicts(runs)[key].effect.split(":")[0] == "TTFF / FTFF"
    assert verdicts(runs)[key].verdict is NO


def test_configurations_without_a_loss_decide_nothing(rng):
    runs = world(rng)
    for one in runs:
        for part in (one["configurations"] or {}).values():
            part |= {config: [None, 0.1] for config in part}
    found = [part for part in verdicts(runs).values() if part.claim >= 4]
    assert {part.verdict for part in found} == {OPEN}


def test_mixed_parts_are_in_part(rng):
    yes, no = (judge(read(summary(world(rng, right))))[0] for right in (True, False))
    undecided = judge(read(summary([])))[0]
    assert overall([yes, no]) == overall([yes, no, undecided]) == "in part"
    assert overall([yes, undecided]) == overall([no, undecided]) == "undecided"


def test_what_is_undecided_says_how_many_seeds_would_decide(rng):
    """Means that differ by less than their seeds do."""
    near = [run(rng, "cnn", norm, level=0.0, seed=seed) for norm in ("bln", "bn", "ln") for seed in range(4)]
    for one in near:
        one["test"]["accuracy"] = 0.6 + 0.02 * rng.normal()
    parts = [part for part in judge(read(summary(near))) if part.verdict is Verdict.UNDECIDED and part.effect]
    assert len(parts) > 4
    for part in parts:
        assert re.search(r"(about \d+|more than 1,000) (seeds|runs) would", part.note), part
    few = [one for one in near if one["seed"] < 2]
    assert not any("would" in part.note for part in judge(read(summary(few))) if part.claim < 5)


def test_what_is_undecided_says_what_would_decide_and_how_large_the_effect_is(rng):
    """Of seeds with a spread, a number follows from it; of fewer, that more are needed to have one."""
    for seeds, expected in ((4, r"(seeds|runs) would|same is chosen"), (1, "a spread takes 3|(seeds|runs) would")):
        parts = judge(read(summary(like_authors(rng, seeds, noise=0.3))))
        undecided = [part for part in parts if part.verdict is OPEN]
        assert len(undecided) > 3
        for part in undecided:
            assert re.search(expected, part.note), part
            assert re.search(r"\d", part.effect), part
            if seeds > 1 and " / " not in part.effect:
                assert "[" in part.effect, part
