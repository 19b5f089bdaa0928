"""``StatisticsConfig``: which statistics inference uses, the hyper-parameter of Algorithm 2."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from numbers import Real
from typing import Any

POPULATION, CURRENT = math.inf, 0.0
"""The prior strengths of ``T`` and ``F``."""


@dataclass(frozen=True, eq=False)
class StatisticsConfig:
    """For each of the four statistics: population (``True``), current mini-batch (``False``), or a prior strength.

    Written as four letters, ``T`` for population: ``TTFF`` normalizes with the population's batch statistics and each
    sample's own feature statistics.

    A prior strength ``k`` shrinks the current statistic towards the population's, whose share is ``k / (k + m)`` for a
    current statistic of ``m`` samples. ``T`` is an infinite ``k``, ``F`` is 0. Written with numbers, as in
    ``16 16 F F``; six significant digits are kept.

    Examples:
        >>> config = StatisticsConfig.parse("TTFF")
        >>> config.batch_mean, config.feature_mean
        (True, False)
        >>> str(config)
        'TTFF'
        >>> len(list(StatisticsConfig.all()))
        16
        >>> StatisticsConfig(16, 16, False, False)
        StatisticsConfig('16 16 F F')
    """

    batch_mean: bool | float
    batch_std: bool | float
    feature_mean: bool | float
    feature_std: bool | float

    def __post_init__(self) -> None:
        for name in ("batch_mean", "batch_std", "feature_mean", "feature_std"):
            object.__setattr__(self, name, _check_source(getattr(self, name), name))

    @classmethod
    def parse(cls, value: str | StatisticsConfig) -> StatisticsConfig:
        """Read four letters such as ``"TTFF"``, or letters and numbers such as ``"16 16 F F"``.

        A ``StatisticsConfig`` passes through.
        """
        if isinstance(value, StatisticsConfig):
            return value
        if not isinstance(value, str):
            raise TypeError(f"a configuration is a StatisticsConfig or a string such as 'TTFF', not {value!r}")
        entries = value.split()
        if len(entries) == 1 and set(value) <= {"T", "F"}:
            entries = list(value)
        try:
            a, b, c, d = (entry == "T" if entry in ("T", "F") else float(entry) for entry in entries)
        except ValueError:
            raise ValueError(
                f"{value!r} is not a configuration: expected four letters for E_B, Std_B, E_F, Std_F, each T "
                "(population) or F (current mini-batch), such as 'TTFF'; or, with spaces between, prior strengths too, "
                "such as '16 16 F F'"
            ) from None
        return cls(a, b, c, d)

    @classmethod
    def of(cls, priors: Any) -> StatisticsConfig:
        """Return the configuration with these four prior strengths, infinite for the population."""
        return cls(*(_switch(float(prior)) for prior in priors))

    @classmethod
    def all(cls) -> Iterator[StatisticsConfig]:
        """Iterate over the 16 configurations, from ``TTTT`` to ``FFFF``."""
        return (cls(*switches) for switches in product((True, False), repeat=4))

    @classmethod
    def shrunk(cls, *priors: float) -> list[StatisticsConfig]:
        """Return configurations with batch statistics shrunk by each of these priors: ``k k F F``.

        >>> StatisticsConfig.shrunk(4, 16)
        [StatisticsConfig('4 4 F F'), StatisticsConfig('16 16 F F')]
        """
        return [cls(prior, prior, False, False) for prior in priors]

    @property
    def priors(self) -> tuple[float, float, float, float]:
        """The four prior strengths: infinite for the population, 0 for the current mini-batch."""
        switches = self.batch_mean, self.batch_std, self.feature_mean, self.feature_std
        a, b, c, d = (POPULATION if s is True else CURRENT if s is False else s for s in switches)
        return a, b, c, d

    @property
    def uses_batch(self) -> bool:
        """Whether a prediction depends on the other samples of its mini-batch."""
        return self.batch_dependence > 0

    @property
    def uses_features(self) -> bool:
        """Whether a prediction depends on the sample's own feature statistics."""
        return min(self.priors[2:]) < POPULATION

    @property
    def batch_dependence(self) -> float:
        """The mini-batch's share in both batch statistics, summed, for one sample: from 0 to 2."""
        return sum(1 / (1 + prior) for prior in self.priors[:2])

    def __eq__(self, other: object) -> bool:
        return self.priors == other.priors if isinstance(other, StatisticsConfig) else NotImplemented

    def __hash__(self) -> int:  # of the priors, since True and a prior of 1 are equal in Python
        return hash(self.priors)

    def __str__(self) -> str:
        letters = ["T" if p == POPULATION else "F" if p == CURRENT else f"{p:g}" for p in self.priors]
        return ("" if set(letters) <= {"T", "F"} else " ").join(letters)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


def configure_layers(
    layers: Mapping[str, Any], config: StatisticsConfig | str | Mapping[str, StatisticsConfig | str]
) -> None:
    """Configure layers of any framework, all or after an error none."""
    chosen = config if isinstance(config, Mapping) else dict.fromkeys(layers, config)
    for name in chosen:
        if name not in layers:
            near = difflib.get_close_matches(str(name), layers, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f". It has {', '.join(map(repr, layers))}"
            raise ValueError(f"the model has no BatchLayerNorm named {name!r}{hint}")
    parsed = {name: StatisticsConfig.parse(value) for name, value in chosen.items()}
    for name, value in parsed.items():
        layers[name].config = value


def choices(candidates: Iterable[StatisticsConfig | str]) -> list[StatisticsConfig]:
    """Return the configurations to compare: the 16, then ``candidates``, each once."""
    if isinstance(candidates, str | StatisticsConfig):
        raise TypeError(f"candidates must be several configurations, as [{str(candidates)!r}]; got one")
    return list(dict.fromkeys([*StatisticsConfig.all(), *map(StatisticsConfig.parse, candidates)]))


def _switch(prior: float) -> bool | float:
    """Return a prior strength as ``True`` or ``False`` where it is that of ``T`` or ``F``."""
    return True if prior == POPULATION else False if prior == CURRENT else prior


def _check_source(value: Any, name: str) -> bool | float:
    """Return the source of a statistic; refuse what is no switch and no prior strength."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, Real):
        raise TypeError(
            f"{name} must be True (population), False (current mini-batch) or a prior strength, a number above 0; got "
            f"{value!r}. Letters are read by StatisticsConfig.parse('TTFF')"
        )
    prior = float(value)
    if not prior >= 0:
        raise ValueError(
            f"{name} has a prior strength of {prior:g}; it counts samples, so it must be a number above 0. T (True) is "
            "the population alone, F (False) the current mini-batch alone"
        )
    return _switch(float(f"{prior:.6g}"))
