"""Which statistics inference uses: the hyper-parameter of Algorithm 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import product


@dataclass(frozen=True)
class StatisticsConfig:
    """For each of the four statistics, in the paper's order: population (``True``) or current mini-batch (``False``).

    Written as four letters, ``T`` for population: ``TTFF`` normalizes with the population's batch statistics and each
    sample's own feature statistics.

    Examples:
        >>> config = StatisticsConfig.parse("TTFF")
        >>> config.batch_mean, config.feature_mean
        (True, False)
        >>> str(config)
        'TTFF'
        >>> len(list(StatisticsConfig.all()))
        16
    """

    batch_mean: bool
    batch_std: bool
    feature_mean: bool
    feature_std: bool

    def __post_init__(self) -> None:
        if not all(isinstance(switch, bool) for switch in astuple(self)):
            raise TypeError(
                f"each statistic is True (population) or False (current mini-batch), got {astuple(self)}; letters are "
                "read by StatisticsConfig.parse('TTFF')"
            )

    @classmethod
    def parse(cls, value: str | StatisticsConfig) -> StatisticsConfig:
        """Read four letters such as ``"TTFF"``; a ``StatisticsConfig`` passes through."""
        if isinstance(value, StatisticsConfig):
            return value
        if not isinstance(value, str):
            raise TypeError(f"a configuration is a StatisticsConfig or a string such as 'TTFF', not {value!r}")
        if len(value) != 4 or not set(value) <= set("TF"):
            raise ValueError(
                f"{value!r} is not a configuration: expected four letters, each T (population) or F (current "
                "mini-batch), for E_B, Std_B, E_F, Std_F, such as 'TTFF'"
            )
        return cls(*(letter == "T" for letter in value))

    @classmethod
    def all(cls) -> Iterator[StatisticsConfig]:
        """The 16 configurations, from ``TTTT`` to ``FFFF``."""
        return (cls(*switches) for switches in product((True, False), repeat=4))

    @property
    def uses_batch(self) -> bool:
        """Whether a prediction depends on the other samples of its mini-batch."""
        return not (self.batch_mean and self.batch_std)

    @property
    def uses_features(self) -> bool:
        """Whether a prediction depends on the sample's own feature statistics."""
        return not (self.feature_mean and self.feature_std)

    def __str__(self) -> str:
        return "".join("T" if switch else "F" for switch in astuple(self))
