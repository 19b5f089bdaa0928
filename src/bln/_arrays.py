"""What Keras and Flax share around the formula: a mini-batch's statistics, and how they enter the population.

``xp`` is the library, ``keras.ops`` or ``jax.numpy``: only functions that both have are called, and
``xp.array(value, dtype)`` is how both convert a type. Arrays are features last, nothing is changed in place, counts are
arrays of floats. The numbers are those of ``functional`` and ``population`` for torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import formula
from ._positions import sizes
from ._spec import Spec
from .config import StatisticsConfig
from .formula import Moments, Priors, Statistics, Total, at_positions

COUNTERS = ("updates", "samples")
"""They hold integers, with a row for each statistic."""
INITIAL = {name: int(name.endswith("_var")) for name in Statistics._fields + COUNTERS}
"""What a layer remembers, and the value each starts from."""
_LARGEST = 2**31 - 1
"""Samples are counted up to this: JAX has int32 unless told otherwise. The average then forgets very slowly."""
_INVERSE_M = Statistics._fields.index("inverse_m")


def shapes(positions: tuple[int, ...], features: int, groups: int | None) -> dict[str, tuple[int, ...]]:
    """The shape of each statistic and counter."""
    batch, counters = (*positions, features), (len(Statistics._fields), *positions)
    feature = positions if groups is None else (groups,)
    return dict(zip(INITIAL, (batch, batch, feature, feature, positions, counters, counters), strict=True))


class MiniBatch(NamedTuple):
    """A mini-batch's own statistics and its counts, scalars or one for each position."""

    statistics: Statistics
    m: Any
    entries: Any
    """The entries that each batch statistic is taken over."""
    present: Any
    """Samples with any real entry, which is what grouped feature statistics are averaged over; else ``None``."""


class Layer(NamedTuple):
    """A layer in the middle of a call."""

    xp: Any
    spec: Spec
    arrays: Mapping[str, Any]
    """``scale`` and ``shift``, or ``None`` for them; the five statistics and their counters."""
    length: Any = None
    """How many of the known positions a shorter sequence uses; ``None`` for all."""

    def train(self, rows: Any, mask: Any, momentum: float | None, total: Total | None = None) -> tuple[Any, Any]:
        """Normalize ``rows`` by their own statistics; returns them and what the layer then remembers.

        ``momentum`` is the weight of the old value. ``total`` adds up what several devices have.
        """
        rows = self._hide(rows, mask)
        batch = self._measure(rows, mask, total or _own)
        return self._transform(rows, mask, batch.statistics), self._updated(batch, new_weight(momentum), total or _own)

    def infer(self, rows: Any, mask: Any, priors: Any) -> Any:
        """Normalize ``rows`` by the statistics chosen by ``priors``, an array of four."""
        rows = self._hide(rows, mask)
        return self._transform(rows, mask, self._chosen(self._measure(rows, mask, _own), priors))

    # ---- a mini-batch

    def _hide(self, rows: Any, mask: Any) -> Any:
        """0 at hidden entries: whatever stands there, NaN included, is gone."""
        return rows if mask is None else self.xp.where(mask[..., None], rows, 0.0)

    def _transform(self, rows: Any, mask: Any, s: Statistics) -> Any:
        gamma, beta = self.arrays["scale"], self.arrays["shift"]
        if self.spec.coefficients:
            pair = formula.coefficients(self.xp, s, gamma, beta, rows.shape[-1], self.spec)
            a, b = (at_positions(value, len(rows.shape)) for value in pair)
            return self._hide(a * rows + b, mask)
        return self._hide(formula.transform(rows, s, gamma, beta, spec=self.spec, xp=self.xp), mask)

    def _measure(self, rows: Any, mask: Any, total: Total) -> MiniBatch:
        """Eqs 10-13, the batch statistics and counts over all devices; hidden entries of ``rows`` are 0."""
        xp, spec = self.xp, self.spec
        present = None
        if spec.groups is not None or not spec.per_position:
            moments = self._moments(rows, mask)
            present = total(xp.sum(xp.array(moments.weight > 0, rows.dtype)))
        if spec.per_position:
            if mask is None:
                real = xp.ones_like(rows[(slice(None), *[slice(1)] * (len(rows.shape) - 1))])
            else:
                real = xp.array(mask, rows.dtype)[..., None]
            batch = formula.combine(xp, real, rows, 0.0, total)
            m = entries = total(xp.sum(real, axis=0))[..., 0]
        else:
            batch = formula.batch_statistics(xp, moments, total)
            m, entries = present, total(xp.sum(moments.weight))
        if spec.groups is None:
            features = _over_features(xp, rows)
        else:
            features = formula.feature_statistics(xp, moments, spec.groups)
        return MiniBatch(Statistics(*batch, *features, 1 / _at_least(xp, m, 1)), m, entries, present)

    def _moments(self, rows: Any, mask: Any) -> Moments:
        """Mean and variance over the positions of each sample and feature."""
        xp, rank = self.xp, len(rows.shape)

        def over_positions(value: Any) -> Any:
            return xp.sum(value, axis=tuple(range(1, rank - 1))) if rank > 2 else value

        sums = over_positions(rows)
        if mask is None:
            weight = xp.ones_like(sums[..., :1]) * xp.array(math.prod(xp.shape(rows)[1:-1]), rows.dtype)
        else:
            weight = over_positions(xp.array(mask, rows.dtype)[..., None])
        number = _at_least(xp, weight, 1)
        mean = sums / number
        centred = self._hide(rows - at_positions(mean, rank), mask)
        return Moments(mean, over_positions(centred * centred) / number, weight)

    # ---- the population

    def _chosen(self, batch: MiniBatch, priors: Any) -> Statistics:
        """Algorithm 2: the statistics of inference.

        Where nothing was seen yet, ``m`` is the mini-batch's. Which is chosen is data, so that a compiled function
        serves all configurations.
        """
        xp = self.xp
        population = Statistics(*(self._first(name, self.arrays[name]) for name in Statistics._fields))
        seen = self._first("inverse_m", self.arrays["updates"][_INVERSE_M]) > 0
        inverse_m = xp.where(seen, population.inverse_m, batch.statistics.inverse_m)
        priors = xp.array(priors, batch.statistics.inverse_m.dtype)
        config = Priors(*(priors[at] for at in range(4)))
        return formula.choose(config, batch.statistics, population._replace(inverse_m=inverse_m), xp.where)

    def _without_positions(self, name: str) -> bool:
        return self.spec.groups is not None and name.startswith("feature")

    def _first(self, name: str, value: Any) -> Any:
        """A statistic at the positions of the input."""
        return value if self.length is None or self._without_positions(name) else value[: self.length]

    def _whole(self, name: str, value: Any) -> Any:
        """A value at the positions of the input, with 0 at those beyond."""
        xp, old = self.xp, self.arrays[name]
        here = value + xp.zeros_like(self._first(name, old))
        if self.length is None or self._without_positions(name):
            return here
        return xp.reshape(xp.concatenate([here, xp.zeros_like(old[self.length :])]), old.shape)

    def _updated(self, batch: MiniBatch, momentum: float | None, total: Total) -> dict[str, Any]:
        """What is remembered after a training mini-batch, unless its statistics are not finite.

        ``momentum`` is the weight of the new value, as in torch: never less than ``1/updates``; ``None`` is the plain
        average, weighted by samples.
        """
        xp, names, before = self.xp, Statistics._fields, self.arrays
        new = {name: self._whole(name, v) for name, v in self._estimates(batch, total)._asdict().items()}
        m, entries = (self._whole("inverse_m", count) for count in (batch.m, batch.entries))
        of_features = m if self.spec.groups is None else batch.present + xp.zeros_like(m)
        counts = [of_features if name.startswith("feature") else m for name in names]
        enough = [entries > 1 if name == "batch_var" else n > 0 for name, n in zip(names, counts, strict=True)]
        finite = xp.all(xp.isfinite(new["batch_var"])) & xp.all(xp.isfinite(new["feature_var"]))
        seen, counts = finite & xp.stack(enough), xp.stack(counts)

        entered = xp.array(seen, before["updates"].dtype)
        updates = before["updates"] + entered
        samples = before["samples"] + xp.minimum(
            entered * xp.array(counts, entered.dtype), _LARGEST - before["samples"]
        )
        if momentum is None:
            weights = counts / xp.array(_at_least(xp, samples, 1), counts.dtype)
        else:
            weights = _at_least(xp, 1 / xp.array(_at_least(xp, updates, 1), counts.dtype), momentum)
        after = {"updates": updates, "samples": samples}
        for row, name in enumerate(names):
            enters, weight = (broadcastable(name, value[row], self.spec.groups) for value in (seen, weights))
            old = before[name]
            value = xp.where(enters, new[name], old)
            # From the nearer end, as torch.lerp: weight 1 leaves nothing of the old value, not even its rounding.
            after[name] = xp.where(weight < 0.5, old + weight * (value - old), value - (1 - weight) * (value - old))
        return after

    def _estimates(self, batch: MiniBatch, total: Total) -> Statistics:
        """What one mini-batch says of the population: variances unbiased, feature statistics averaged over samples."""
        xp, s = self.xp, batch.statistics
        m, entries = _at_least(xp, batch.m, 1), _at_least(xp, batch.entries, 1)
        over, number = (0 if self.spec.per_position else None), entries
        if self.spec.groups is not None:
            over, number = 0, _at_least(xp, batch.present, 1)
        # Statistics of hidden features are 0: there is nothing to leave out.
        mean, var = (total(xp.sum(value, axis=over)) / number for value in (s.feature_mean, s.feature_var))
        return Statistics(
            s.batch_mean,
            s.batch_var * formula.bessel(entries)[..., None],  # eqs 5, 19
            mean,
            var * formula.bessel(m if self.spec.groups is None else number),  # eq 21
            s.inverse_m,
        )


def broadcastable(name: str, row: Any, groups: int | None) -> Any:
    """A counter's row, or what was made of one, in a shape that meets its statistic."""
    if groups is not None and name.startswith("feature"):  # the same at all positions
        while len(row.shape) > 0:
            row = row[0]
        return row
    return row[..., None] if name.startswith("batch") else row


def _over_features(xp: Any, rows: Any) -> tuple[Any, Any]:
    """Eqs 12, 13 at each position."""
    d = rows.shape[-1]  # Keras computes a mean in float32
    mean = xp.sum(rows, axis=-1) / d
    centred = rows - mean[..., None]
    return mean, xp.sum(centred * centred, axis=-1) / d


def _at_least(xp: Any, value: Any, least: float) -> Any:
    """``maximum``, which makes float32 of float64 in Keras on torch."""
    return xp.where(value > least, value, least)


def _own(value: Any) -> Any:
    """A device by itself."""
    return value


# ---- arguments


def check_options(spec: Spec, momentum: float | None, position_shape: Any) -> tuple[int, ...] | None:
    """Refuse a momentum or positions that cannot be; returns the positions as a tuple."""
    if momentum is not None and not (isinstance(momentum, int | float) and 0 <= momentum <= 1):
        raise ValueError(
            f"momentum must be None (plain average) or in [0, 1], the weight of the old value; got {momentum!r}"
        )
    return sizes(position_shape, spec.per_position)


def new_weight(momentum: float | None) -> float | None:
    """The weight of the new value, as torch has it, from that of the old one."""
    return None if momentum is None else 1 - momentum


def priors_of(config: StatisticsConfig | str) -> list[float]:
    """A configuration as four prior strengths."""
    return list(StatisticsConfig.parse(config).priors)
