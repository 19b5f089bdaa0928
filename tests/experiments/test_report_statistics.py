"""Intervals and rank correlations against scipy and hand computation."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats

from bln.experiments.report.statistics import (
    Estimate,
    agreement,
    bootstrap_interval,
    mean_interval,
    number,
    paired_interval,
    share_interval,
)


def test_t_interval_is_the_one_of_the_t_test(rng):
    values = rng.normal(3, 2, int(rng.integers(2, 9)))
    found = mean_interval(values)
    low, high = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert found.n == len(values)
    assert (found.mean, found.low, found.high) == pytest.approx((values.mean(), low, high))  # float64, same formula


def test_t_interval_of_two_by_hand():
    """Half-width of 1 and 3: t(0.975, 1) = 12.706 times sqrt(2) / sqrt(2)."""
    assert mean_interval([1, 3])[:3] == pytest.approx((2, 2 - 12.7062, 2 + 12.7062), abs=1e-4)


def test_one_value_has_no_interval_and_none_has_no_mean():
    assert not mean_interval([0.5]).has_interval
    assert mean_interval([0.5]).mean == 0.5
    assert math.isnan(mean_interval([]).mean)
    assert mean_interval([math.nan, 0.5]) == mean_interval([0.5])
    assert not bootstrap_interval([0.5]).has_interval


def test_bootstrap_covers_what_all_resamples_cover(rng):
    """Of four values there are 256 resamples: their exact quantiles, up to the 10,000 draws' error."""
    values = rng.normal(0, 1, 4)
    means = np.array([np.mean(drawn) for drawn in itertools.product(values, repeat=4)])
    found = bootstrap_interval(values)
    for bound, share in ((found.low, 0.025), (found.high, 0.975)):
        # A drawn quantile lies between the exact ones half a percent away: three times sqrt(.025 * .975 / 10,000).
        assert np.quantile(means, share - 0.005) - 1e-12 <= bound <= np.quantile(means, share + 0.005) + 1e-12


def test_paired_differences_have_the_wider_interval(rng):
    few, many = rng.normal(size=3), np.append(np.zeros(300), [50.0] * 3)  # t is wider here, and at one end there
    for values in (few, many):
        found, both = paired_interval(values), (bootstrap_interval(values), mean_interval(values))
        assert found.mean == pytest.approx(values.mean())
        assert (found.low, found.high) == (min(e.low for e in both), max(e.high for e in both))
    assert paired_interval(many).high == bootstrap_interval(many).high > mean_interval(many).high
    assert paired_interval(few).high == mean_interval(few).high > bootstrap_interval(few).high
    assert not paired_interval([0.5]).has_interval


def test_bootstrap_is_the_same_each_time_and_never_leaves_the_values(rng):
    values = rng.normal(0, 1, 5)
    found = bootstrap_interval(values)
    assert found == bootstrap_interval(values)
    assert values.min() <= found.low <= found.mean <= found.high <= values.max()


def test_rank_correlations_by_hand(rng):
    ours, theirs = rng.normal(size=(2, 16))
    found = agreement(ours, theirs)
    ranks = np.argsort(np.argsort([ours, theirs]))
    assert found.spearman == pytest.approx(np.corrcoef(ranks)[0, 1])
    pairs = list(itertools.combinations(range(16), 2))
    signs = [np.sign(ours[i] - ours[j]) * np.sign(theirs[i] - theirs[j]) for i, j in pairs]
    assert found.kendall == pytest.approx(np.sum(signs) / len(pairs))


def test_rank_correlation_leaves_out_what_is_not_a_number(rng):
    ours, theirs = rng.normal(size=(2, 16))
    theirs[3:7] = math.nan
    kept = [0, 1, 2, *range(7, 16)]
    assert agreement(ours, theirs) == agreement(ours[kept], theirs[kept])
    assert agreement(ours, theirs).n == 12
    assert math.isnan(agreement(ours, np.full(16, math.nan)).spearman)
    assert math.isnan(agreement(np.ones(16), theirs).kendall)


@pytest.mark.parametrize(("hits", "n"), [(0, 3), (3, 3), (5, 9)])
def test_share_interval_is_clopper_and_pearsons(hits, n):
    low = scipy.stats.beta.ppf(0.025, hits, n - hits + 1) if hits else 0
    high = scipy.stats.beta.ppf(0.975, hits + 1, n - hits) if hits < n else 1
    assert share_interval(hits, n)[:3] == pytest.approx((hits / n, low, high))


def test_texts():
    assert Estimate(0.5, 0.25, 0.75, 3).text() == "0.500 [0.250, 0.750]"
    assert Estimate(0.5, 0.25, 0.75, 3).plus_minus() == "0.500 ± 0.250"
    assert Estimate(0.5, math.nan, math.nan, 1).plus_minus() == "0.500"
    assert number(-0.5, signed=True, digits=1) == "\N{MINUS SIGN}0.5"
    assert number(math.nan) == "NaN"
