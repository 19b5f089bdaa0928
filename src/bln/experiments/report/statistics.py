"""Intervals over seeds, the seeds that a verdict takes, and the agreement of rankings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats  # type: ignore[import-untyped]

LEVEL = 0.95
_RESAMPLES = 10_000
_SEED = 2022
"""Fixed, so that the same runs give the same report."""


class Estimate(NamedTuple):
    """A mean over ``n`` seeds with its 95 % interval; the bounds are NaN where there is none."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def has_interval(self) -> bool:
        """Whether there is an interval, which takes two seeds."""
        return not math.isnan(self.low)

    def times(self, factor: float) -> Estimate:
        """Return the estimate in another unit."""
        return Estimate(self.mean * factor, self.low * factor, self.high * factor, self.n)

    def text(self, *, signed: bool = False, digits: int = 3) -> str:
        """Return the mean and, with two seeds or more, the interval: ``0.871 [0.866, 0.876]``.

        >>> Estimate(-0.1234, -0.2, -0.05, 5).text(signed=True)
        '−0.123 [−0.200, −0.050]'
        """
        mean = number(self.mean, signed=signed, digits=digits)
        if not self.has_interval:
            return mean
        low, high = (number(bound, signed=signed, digits=digits) for bound in (self.low, self.high))
        return f"{mean} [{low}, {high}]"

    def plus_minus(self, digits: int = 3) -> str:
        """Return the mean and the half-width of a t interval: ``0.871 ± 0.005``."""
        mean = number(self.mean, digits=digits)
        return f"{mean} ± {number(self.high - self.mean, digits=digits)}" if self.has_interval else mean


def number(value: float, *, signed: bool = False, digits: int = 3) -> str:
    """Format a number with a typographic minus; NaN is ``NaN``."""
    if math.isnan(value):
        return "NaN"
    return f"{value:{'+' if signed else ''}.{digits}f}".replace("-", "\N{MINUS SIGN}")


def mean_interval(values: Sequence[float]) -> Estimate:
    """Return the mean of values of independent seeds with its t interval. NaN values are left out."""
    known = np.array([value for value in values if not math.isnan(value)])
    n = len(known)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = float(known.mean())
    if n == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    half = float(scipy.stats.t.ppf((1 + LEVEL) / 2, n - 1) * known.std(ddof=1) / math.sqrt(n))
    return Estimate(mean, mean - half, mean + half, n)


def bootstrap_interval(values: Sequence[float]) -> Estimate:
    """Return the mean with its percentile bootstrap interval, from fixed random numbers.

    Applied to paired differences this is the paired bootstrap, which draws both members of a pair together. With few
    seeds it is too narrow, since it never leaves the range of the values.
    """
    sample = np.array(values, dtype=float)
    n = len(sample)
    if n < 2:
        return Estimate(float(sample.mean()) if n else math.nan, math.nan, math.nan, n)
    draws = np.random.default_rng(_SEED).integers(n, size=(_RESAMPLES, n))
    low, high = np.quantile(sample[draws].mean(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(sample.mean()), float(low), float(high), n)


def paired_interval(values: Sequence[float]) -> Estimate:
    """Return the mean of paired differences with the wider bound, at either end, of bootstrap and t interval."""
    bootstrap, t = bootstrap_interval(values), mean_interval(values)
    return Estimate(bootstrap.mean, min(bootstrap.low, t.low), max(bootstrap.high, t.high), bootstrap.n)


def seeds_to_decide(values: Sequence[float], margin: float = 0.0) -> int | None:
    """Return how many seeds would decide the sign of a mean, if mean and spread stay; ``None`` beyond 1,000.

    With a margin, an interval that lies within it on both sides decides, too.

    >>> seeds_to_decide([0.01, 0.03, -0.02]), seeds_to_decide([0.01, 0.03, -0.02], margin=0.05)
    (58, 4)
    """
    if len(values) < 2:
        return None
    mean, deviation = abs(float(np.mean(values))), float(np.std(values, ddof=1))
    n = np.arange(len(values) + 1, _MOST_SEEDS + 1)
    half = scipy.stats.t.ppf((1 + LEVEL) / 2, n - 1) * deviation / np.sqrt(n)
    decides = (half < mean) | (mean + half < margin)
    return int(n[decides][0]) if decides.any() else None


_MOST_SEEDS = 1_000


def seeds_in_words(seeds: int | None) -> str:
    """Put the result of :func:`seeds_to_decide` in words.

    >>> seeds_in_words(58), seeds_in_words(None)
    ('about 58 seeds would decide', 'more than 1,000 seeds would be needed')
    """
    return f"about {seeds} seeds would decide" if seeds else f"more than {_MOST_SEEDS:,} seeds would be needed"


class Agreement(NamedTuple):
    """Rank correlations, from -1 to 1, and the number of pairs; NaN where one side has no two different values."""

    spearman: float
    kendall: float
    n: int


def agreement(ours: Sequence[float], theirs: Sequence[float]) -> Agreement:
    """Return Spearman's and Kendall's rank correlation of the pairs in which both are numbers."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if not (math.isnan(a) or math.isnan(b))]
    if len({a for a, _ in pairs}) < 2 or len({b for _, b in pairs}) < 2:
        return Agreement(math.nan, math.nan, len(pairs))
    a, b = zip(*pairs, strict=True)
    return Agreement(
        float(scipy.stats.spearmanr(a, b).statistic), float(scipy.stats.kendalltau(a, b).statistic), len(pairs)
    )


def runs_to_decide(hits: int, n: int) -> int | None:
    """Return how many runs would tell a share from one half, if it stays; ``None`` beyond 1,000.

    >>> runs_to_decide(6, 10), runs_to_decide(5, 10)
    (93, None)
    """
    share = hits / n
    if share == 0.5:
        return None
    needed = math.ceil(scipy.stats.norm.ppf((1 + LEVEL) / 2) ** 2 * share * (1 - share) / (share - 0.5) ** 2)
    return max(n + 1, needed) if needed <= _MOST_SEEDS else None


def share_interval(hits: int, n: int) -> Estimate:
    """Return a share with its exact (Clopper-Pearson) interval."""
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    low, high = scipy.stats.binomtest(hits, n).proportion_ci(LEVEL)
    return Estimate(hits / n, float(low), float(high), n)
