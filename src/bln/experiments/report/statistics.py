"""Intervals over seeds, and how far two rankings agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats  # type: ignore[import-untyped]

LEVEL = 0.95
_RESAMPLES = 10_000
_SEED = 2022
"""The same summary gives the same report."""


class Estimate(NamedTuple):
    """A mean over ``n`` seeds with its 95 % interval; the bounds are NaN where there is none."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def has_interval(self) -> bool:
        """Whether there is an interval: it takes two seeds."""
        return not math.isnan(self.low)

    def times(self, factor: float) -> Estimate:
        """The estimate in another unit."""
        return Estimate(self.mean * factor, self.low * factor, self.high * factor, self.n)

    def text(self, *, signed: bool = False, digits: int = 3) -> str:
        """The mean and, where there is one, the interval: ``0.871 [0.866, 0.876]``.

        >>> Estimate(-0.1234, -0.2, -0.05, 5).text(signed=True)
        '−0.123 [−0.200, −0.050]'
        """
        mean = number(self.mean, signed=signed, digits=digits)
        if not self.has_interval:
            return mean
        low, high = (number(bound, signed=signed, digits=digits) for bound in (self.low, self.high))
        return f"{mean} [{low}, {high}]"

    def plus_minus(self, digits: int = 3) -> str:
        """The mean and half the interval, which is a t interval: ``0.871 ± 0.005``."""
        mean = number(self.mean, digits=digits)
        return f"{mean} ± {number(self.high - self.mean, digits=digits)}" if self.has_interval else mean


def number(value: float, *, signed: bool = False, digits: int = 3) -> str:
    """A number with a real minus; ``NaN`` where it is none."""
    if math.isnan(value):
        return "NaN"
    return f"{value:{'+' if signed else ''}.{digits}f}".replace("-", "\N{MINUS SIGN}")


def mean_interval(values: Sequence[float]) -> Estimate:
    """The t interval of the mean, for values of independent seeds. NaN values are left out."""
    kept = np.array([value for value in values if not math.isnan(value)])
    n = len(kept)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = float(kept.mean())
    if n == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    half = float(scipy.stats.t.ppf((1 + LEVEL) / 2, n - 1) * kept.std(ddof=1) / math.sqrt(n))
    return Estimate(mean, mean - half, mean + half, n)


def bootstrap_interval(values: Sequence[float]) -> Estimate:
    """The percentile bootstrap of the mean, with fixed random numbers.

    Of paired differences this is the paired bootstrap: both members of a pair are drawn together. With few seeds it
    is too narrow, since it never leaves the range of the values.
    """
    kept = np.array(values, dtype=float)
    n = len(kept)
    if n < 2:
        return Estimate(float(kept.mean()) if n else math.nan, math.nan, math.nan, n)
    draws = np.random.default_rng(_SEED).integers(n, size=(_RESAMPLES, n))
    low, high = np.quantile(kept[draws].mean(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(kept.mean()), float(low), float(high), n)


def paired_interval(values: Sequence[float]) -> Estimate:
    """The mean of paired differences with the wider interval, at either end, of the bootstrap and of t."""
    bootstrap, t = bootstrap_interval(values), mean_interval(values)
    return Estimate(bootstrap.mean, min(bootstrap.low, t.low), max(bootstrap.high, t.high), bootstrap.n)


def seeds_to_decide(values: Sequence[float], margin: float = 0.0) -> int | None:
    """How many seeds would decide on the sign of a mean, if mean and spread stay as they are; ``None`` beyond 1,000.

    With a margin, an interval that lies within it on both sides decides too.

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
    """What :func:`seeds_to_decide` has found.

    >>> seeds_in_words(58), seeds_in_words(None)
    ('about 58 seeds would decide', 'more than 1,000 seeds would be needed')
    """
    return f"about {seeds} seeds would decide" if seeds else f"more than {_MOST_SEEDS:,} seeds would be needed"


class Agreement(NamedTuple):
    """How far two rankings of the same things agree, from -1 to 1; NaN where one of them ranks nothing."""

    spearman: float
    kendall: float
    n: int


def agreement(ours: Sequence[float], theirs: Sequence[float]) -> Agreement:
    """Spearman's and Kendall's rank correlation of the pairs in which both are numbers."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if not (math.isnan(a) or math.isnan(b))]
    if len({a for a, _ in pairs}) < 2 or len({b for _, b in pairs}) < 2:
        return Agreement(math.nan, math.nan, len(pairs))
    a, b = zip(*pairs, strict=True)
    return Agreement(
        float(scipy.stats.spearmanr(a, b).statistic), float(scipy.stats.kendalltau(a, b).statistic), len(pairs)
    )


def runs_to_decide(hits: int, n: int) -> int | None:
    """How many runs would tell a share from one half, if it stays as it is; ``None`` beyond 1,000.

    >>> runs_to_decide(6, 10), runs_to_decide(5, 10)
    (93, None)
    """
    share = hits / n
    if share == 0.5:
        return None
    needed = math.ceil(scipy.stats.norm.ppf((1 + LEVEL) / 2) ** 2 * share * (1 - share) / (share - 0.5) ** 2)
    return max(n + 1, needed) if needed <= _MOST_SEEDS else None


def share_interval(hits: int, n: int) -> Estimate:
    """The exact (Clopper and Pearson) interval of a share."""
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    low, high = scipy.stats.binomtest(hits, n).proportion_ci(LEVEL)
    return Estimate(hits / n, float(low), float(high), n)
