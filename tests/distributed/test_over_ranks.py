"""Averaging, calibrating and searching with several processes."""

import random

import pytest


@pytest.mark.parametrize("options", [{}, {"groups": 3}, {"groups": 1, "per_position": True}], ids=str)
def test_averaged_statistics_are_those_of_one_process(two_or_three, options):
    two_or_three.check("averages", seed=random.randrange(2**31), options=options)


def test_ranks_with_different_models_are_told(two):
    for texts in two.check("averages_of_different_models"):
        assert all("different BatchLayerNorm layers" in text for text in texts)


def test_ranks_with_different_positions_are_told(two):
    assert all("[(5,), (6,)]" in text for text in two.check("averages_of_different_positions"))


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "in DDP"])
@pytest.mark.parametrize("synchronized", [False, True], ids=["local", "synchronized"])
@pytest.mark.parametrize("grouped", [False, True], ids=["published", "grouped"])
def test_calibrated_statistics_are_those_of_one_process(two_or_three, wrapped, synchronized, grouped):
    """One rank has no batches at all."""
    case = {"wrapped": wrapped, "synchronized": synchronized, "grouped": grouped}
    two_or_three.check("calibrated", seed=random.randrange(2**31), **case)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"calibrate": True},
        {"per_layer": True},
        {"rebatch": True},
        {"grouped": True},
        {"grouped": True, "calibrate": True},
        {"grouped": True, "per_layer": True},
        {"grouped": True, "rebatch": True},
    ],
    ids=str,
)
def test_all_ranks_find_what_one_process_finds(three, how):
    all_find(three, how)


@pytest.mark.parametrize(
    "how",
    [
        {"per_layer": True, "sampler": "random", "trials": 3},
        {"per_layer": True, "robust": True, "sampler": "tpe", "trials": 2},
        {"grouped": True, "per_layer": True, "robust": True, "sampler": "tpe", "trials": 2},
    ],
    ids=str,
)
def test_all_ranks_follow_the_study_of_rank_0(three_on_cpu, how):
    all_find(three_on_cpu, how)


def all_find(ranks, how):
    first, *others = ranks.check("searched", seed=random.randrange(2**31), how=how)
    assert len(first) >= 16
    assert all(other == first for other in others)


@pytest.mark.parametrize("what", ["calibrate", "search", "calibrate in search"])
@pytest.mark.parametrize("interrupted", [False, True])
def test_an_exception_on_one_rank_fails_the_others(three, what, interrupted):
    first, *others = three.check("fails_on_one_rank", what=what, interrupted=interrupted)
    assert first == ("KeyboardInterrupt: " if interrupted else "OSError: the disk is gone")
    assert all("rank 0 raised an exception" in other for other in others)


def test_no_batches_on_any_rank_is_an_error(two):
    assert all("calibrate got no batches" in text for text in two.check("no_batches_anywhere"))
