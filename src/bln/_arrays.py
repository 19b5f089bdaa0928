"""What Keras and Flax share around the formula: a mini-batch's statistics, and how they enter the population.

``xp`` is the library, ``keras.ops`` or ``jax.numpy``: only functions that both have are called, and
``xp.array(value, dtype)`` is how both convert a type. Arrays are features last, nothing is changed in place, counts are
arrays of floats. What ``functional.current`` and ``population.Population`` are for torch, with the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from . import formula
from .config import StatisticsConfig
from .formula import Statistics, Switches
from .functional import check_eps
from .population import sizes

_LARGEST = 2**31 - 1
"""Samples are counted up to this: JAX has int32 unless told otherwise. The average then forgets very slowly."""
Total = Callable[[Any], Any]
"""The sum of an array over devices."""


def _own(value: Any) -> Any:
    """A device by itself."""
    return value


class MiniBatch(NamedTuple):
    """A mini-batch's own statistics, its samples and entries (scalars; under a mask, at each position)."""

    statistics: Statistics
    m: Any
    entries: Any


class Population(NamedTuple):
    """What a layer remembers: the five statistics, and a row for each in the counters."""

    batch_mean: Any
    batch_var: Any
    feature_mean: Any
    feature_var: Any
    inverse_m: Any
    updates: Any
    samples: Any

    @classmethod
    def shapes(cls, positions: tuple[int, ...], features: int) -> Population:
        """The shape of each."""
        batch, counters = (*positions, features), (len(Statistics._fields), *positions)
        return cls(batch, batch, positions, positions, positions, counters, counters)

    @classmethod
    def initial(cls) -> Population:
        """The value each starts from: mean 0, variance 1."""
        return cls(0, 1, 0, 1, 0, 0, 0)

    @classmethod
    def counters(cls) -> tuple[str, ...]:
        """The names of those that hold integers."""
        return cls._fields[len(Statistics._fields) :]

    @property
    def statistics(self) -> Statistics:
        """The five without their counters."""
        return Statistics(*self[: len(Statistics._fields)])

    def first(self, length: Any) -> Population:
        """Those of the first ``length`` positions; ``None`` is all."""
        if length is None:
            return self
        return Population(*(v[:, :length] if n in self.counters() else v[:length] for n, v in self._asdict().items()))


# ---- reading


def measure(xp: Any, rows: Any, mask: Any, per_position: bool, total: Total = _own) -> MiniBatch:
    """Eqs 10-13 of ``rows``, whose hidden entries are 0.

    Over several devices counts and sums are those of all: sums first, then squares around the common mean. So a device
    weighs as much as it has real entries, and nothing cancels.
    """
    shape, dtype = xp.shape(rows), rows.dtype
    if mask is None:
        m = total(xp.array(shape[0], dtype))
        entries = m if per_position else m * xp.array(math.prod(shape[1:-1]), dtype)
    else:
        real = xp.array(mask, dtype)
        if per_position:
            m = entries = total(xp.sum(real, axis=0))
        else:
            positions = tuple(range(1, len(shape) - 1))
            present = xp.array(xp.sum(real, axis=positions) > 0, dtype) if positions else real
            m, entries = total(xp.sum(present)), total(xp.sum(real))

    over = 0 if per_position else tuple(range(len(shape) - 1))
    divisor = _at_least(xp, entries, 1)[..., None]
    batch_mean = total(xp.sum(rows, axis=over)) / divisor
    centred = rows - batch_mean
    if mask is not None:
        centred = xp.where(mask[..., None], centred, 0.0)
    batch_var = total(xp.sum(centred * centred, axis=over)) / divisor

    d = rows.shape[-1]  # Keras's mean is one of float32
    feature_mean = xp.sum(rows, axis=-1) / d
    centred = rows - feature_mean[..., None]
    feature_var = xp.sum(centred * centred, axis=-1) / d
    return MiniBatch(Statistics(batch_mean, batch_var, feature_mean, feature_var, 1 / _at_least(xp, m, 1)), m, entries)


def chosen(xp: Any, switches: Any, batch: MiniBatch, population: Population) -> Statistics:
    """Algorithm 2: the statistics of inference. ``switches`` is an array of four, 1 for population.

    Where nothing was seen yet, ``m`` is the mini-batch's. Which is chosen is data, so that a compiled function serves
    all 16 configurations.
    """
    seen = population.updates[Statistics._fields.index("inverse_m")] > 0
    inverse_m = xp.where(seen, population.inverse_m, batch.statistics.inverse_m)
    flags = xp.array(switches, "bool")
    config = Switches(*(flags[i] for i in range(4)))
    return formula.choose(config, batch.statistics, population.statistics._replace(inverse_m=inverse_m), xp.where)


# ---- learning


def updated(
    xp: Any, population: Population, batch: MiniBatch, mask: Any, momentum: float | None, total: Total = _own
) -> Population:
    """The population after a training mini-batch, unless its statistics are not finite.

    ``momentum`` is the weight of the new value, as in torch: never less than ``1/updates``; ``None`` is the plain
    average, weighted by samples.
    """
    dtype = population.inverse_m.dtype
    at_positions = xp.zeros_like(population.inverse_m)
    m, entries = batch.m + at_positions, batch.entries + at_positions
    new = _estimates(xp, batch, mask, m, entries, total)
    finite = xp.all(xp.isfinite(new.batch_var)) & xp.all(xp.isfinite(new.feature_var))
    anything, spread = finite & (m > 0), finite & (entries > 1)  # a variance takes two entries
    seen = xp.stack([spread if name == "batch_var" else anything for name in Statistics._fields])

    entered = xp.array(seen, population.updates.dtype)
    updates = population.updates + entered
    added = entered * xp.array(m, entered.dtype)
    samples = population.samples + xp.minimum(added, _LARGEST - population.samples)
    if momentum is None:
        weights = m / xp.array(_at_least(xp, samples, 1), dtype)
    else:
        weights = _at_least(xp, 1 / xp.array(_at_least(xp, updates, 1), dtype), momentum)

    values = {}
    for row, name in enumerate(Statistics._fields):
        enters, weight, old = seen[row], weights[row], getattr(population, name)
        if name.startswith("batch"):
            enters, weight = enters[..., None], weight[..., None]
        value = xp.where(enters, getattr(new, name), old)
        # From the nearer end, as torch.lerp: weight 1 leaves nothing of the old value, not even its rounding.
        values[name] = xp.where(weight < 0.5, old + weight * (value - old), value - (1 - weight) * (value - old))
    return Population(**values, updates=updates, samples=samples)


def _estimates(xp: Any, batch: MiniBatch, mask: Any, m: Any, entries: Any, total: Total) -> Statistics:
    """What one mini-batch says of the population: variances unbiased, feature statistics averaged over samples."""
    m, entries = _at_least(xp, m, 1), _at_least(xp, entries, 1)
    s = batch.statistics
    over = tuple(range(len(s.feature_mean.shape) - len(m.shape)))  # samples alone, or positions too

    def average(value: Any) -> Any:
        real = value if mask is None else xp.where(mask, value, 0.0)
        return total(xp.sum(real, axis=over)) / entries

    return Statistics(
        s.batch_mean,
        s.batch_var * formula.bessel(entries)[..., None],  # eqs 5, 19
        average(s.feature_mean),
        average(s.feature_var) * formula.bessel(m),  # eq 21
        s.inverse_m + xp.zeros_like(m),
    )


def put_back(xp: Any, whole: Population, part: Population, length: Any) -> Population:
    """The first positions replaced by ``part``; the others as they were."""
    if length is None:
        return part
    joined = []
    for name, old, new in zip(Population._fields, whole, part, strict=True):
        axis = int(name in Population.counters())
        rest = old[:, length:] if axis else old[length:]
        joined.append(xp.reshape(xp.concatenate([new, rest], axis=axis), old.shape))
    return Population(*joined)


def _at_least(xp: Any, value: Any, least: float) -> Any:
    """``maximum``, which makes float32 of float64 in Keras on torch."""
    return xp.where(value > least, value, least)


# ---- arguments


def check_options(
    eps: float, mix_eps: float | None, momentum: float | None, per_position: bool, position_shape: Any
) -> tuple[int, ...] | None:
    """Refuse values outside of what the equations allow; returns the positions as a tuple."""
    check_eps(eps, mix_eps)
    if momentum is not None and not (isinstance(momentum, int | float) and 0 <= momentum <= 1):
        raise ValueError(
            f"momentum must be None (plain average) or in [0, 1], the weight of the old value; got {momentum!r}"
        )
    return sizes(position_shape, per_position)


def switches_of(config: StatisticsConfig | str) -> list[int]:
    """A configuration as four numbers, 1 for population."""
    return [int(letter == "T") for letter in str(StatisticsConfig.parse(config))]


def config_of(switches: Any) -> StatisticsConfig:
    """Four numbers as a configuration."""
    return StatisticsConfig(*(bool(switch) for switch in switches))
