"""The equations of the paper in plain operators, for the arrays of any library.

``xp`` is the library: ``numpy``, ``torch``, ``jax.numpy`` or ``keras.ops``. Only functions that all four have are
called, and nothing is changed in place. Everything is *features last*: ``x`` is ``(N, *positions, d)``. Names follow
the paper, and each line that is an equation carries its number.

- ``current`` measures a mini-batch (eqs 10-13); ``combine`` is Chan's formula.
- ``choose`` picks the statistics of inference (eqs 18-21).
- ``transform`` normalizes (eqs 14-17, 22-25); with pooled groups ``coefficients`` is the same as ``y = a x + b``.
- ``estimates`` and ``update`` average mini-batches into the population.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from ._spec import Spec
from .config import CURRENT, POPULATION, StatisticsConfig

Total = Callable[[Any], Any]
"""Adds up an array over devices."""


class Priors(NamedTuple):
    """A configuration as arrays: four prior strengths, infinite for the population and 0 for the mini-batch.

    Each broadcasts against the statistics, so that it may differ between copies of a mini-batch.
    """

    batch_mean: Any
    batch_std: Any
    feature_mean: Any
    feature_std: Any


class Statistics(NamedTuple):
    """The five statistics that normalize a mini-batch, as arrays of one kind.

    With ``per_position=False`` the batch statistics are pooled over positions and ``*positions`` is absent from all
    but a mini-batch's own feature statistics. With ``groups`` feature statistics have one value for each group in place
    of positions: ``(N, groups)`` of a mini-batch, ``(groups,)`` of the population.
    """

    batch_mean: Any
    """Mean over samples, ``(*positions, d)`` (eq 10)."""
    batch_var: Any
    """Biased variance over samples, ``(*positions, d)`` (eq 11, squared and without eps)."""
    feature_mean: Any
    """Mean over features: ``(N, *positions)`` of a mini-batch, ``(*positions)`` of the population (eq 12)."""
    feature_var: Any
    """Biased variance over features, shaped as ``feature_mean`` (eq 13, squared)."""
    inverse_m: Any
    """``1/m``: one over the number of samples, a scalar or one for each position."""


class MiniBatch(NamedTuple):
    """The statistics of a mini-batch and their counts, which are scalars or one for each position."""

    statistics: Statistics
    m: Any
    """Samples; under a mask, the real entries at each position, or pooled the samples with any real entry."""
    entries: Any
    """The entries that each batch statistic is taken over."""
    present: Any
    """The samples that feature statistics are averaged over: with groups those with any real entry, else ``m``."""


class Averages(NamedTuple):
    """The population of a layer: statistics averaged over training mini-batches, and how many these were."""

    statistics: Statistics
    updates: Any
    """The number of mini-batches that each statistic averages, a row for each statistic."""
    samples: Any
    """The number of samples that each statistic averages, a row for each statistic."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Averages:
        """Return the averages with these parts, given by name."""
        return cls(Statistics(*(values[name] for name in Statistics._fields)), *(values[name] for name in COUNTERS))

    def by_name(self) -> dict[str, Any]:
        """Return the parts by name."""
        return self.statistics._asdict() | {"updates": self.updates, "samples": self.samples}


COUNTERS = ("updates", "samples")
"""The parts of ``Averages`` that are integers, with a row for each statistic."""
INITIAL = {name: int(name.endswith("_var")) for name in Statistics._fields + COUNTERS}
"""The parts of ``Averages``, and the value each starts from."""


class Moments(NamedTuple):
    """Mean and biased variance over the positions of each sample and feature, ``(N, ..., d)``."""

    mean: Any
    var: Any
    weight: Any
    """The real positions of each sample, ``(N, ..., 1)``, by which it is weighted; ``None`` if all are real."""


# ---- normalizing


def weights(inverse_m: Any, mix_eps: float, d: int, dim_scale: bool) -> tuple[Any, Any]:
    """Return the factors of the batch-normalized and the feature-normalized activation (eq 16), scaled."""
    scale = d**-0.5 if dim_scale else 1.0
    return scale * (1 - (inverse_m + mix_eps)), scale * (inverse_m - mix_eps)


def transform(x: Any, s: Statistics, gamma: Any = None, beta: Any = None, *, spec: Spec, xp: Any = None) -> Any:
    """Normalize ``x`` with the statistics ``s``, mix, scale and shift: eqs 14-17 in training, 22-25 at inference.

    With groups, ``xp`` is needed.
    """
    d = x.shape[-1]
    if spec.groups is None:
        mean_F, var_F = _per_feature(s.feature_mean), _per_feature(s.feature_var)
    else:
        mean_F, var_F = (at_positions(_repeat_groups(xp, v, d), len(x.shape)) for v in (s.feature_mean, s.feature_var))
    x_B = (x - s.batch_mean) / (s.batch_var + spec.eps) ** 0.5  # eqs 14, 22
    x_F = (x - mean_F) / (var_F + spec.eps) ** 0.5  # eqs 15, 23
    w_B, w_F = weights(_per_feature(s.inverse_m), spec.mix_eps, d, spec.dim_scale)
    z = w_B * x_B + w_F * x_F  # eqs 16, 24
    y = z if gamma is None else gamma * z  # eqs 17, 25
    return y if beta is None else y + beta


def normalize(xp: Any, x: Any, s: Statistics, gamma: Any, beta: Any, mask: Any, spec: Spec) -> Any:
    """Apply eqs 14-17, or 22-25, in the form that ``spec`` allows; hidden entries come out 0."""
    if not spec.coefficients:
        return hide(xp, transform(x, s, gamma, beta, spec=spec, xp=xp), mask)
    a, b = (at_positions(v, len(x.shape)) for v in coefficients(xp, s, gamma, beta, x.shape[-1], spec))
    return hide(xp, a * x + b, mask)


def hide(xp: Any, x: Any, mask: Any) -> Any:
    """Return ``x`` with 0 at hidden entries, whatever stands there, NaN included."""
    return x if mask is None else xp.where(mask[..., None], x, 0.0)


def _per_feature(value: Any) -> Any:
    """Add an axis for features. Numbers and scalars need none, and AOTInductor cannot add one to a scalar."""
    return value if is_number(value) or not len(value.shape) else value[..., None]


def at_positions(value: Any, rank: int) -> Any:
    """Add axes to ``(..., d)`` for the positions of an input of ``rank`` axes."""
    while 1 < len(value.shape) < rank:
        value = value[..., None, :]
    return value


# ---- choosing


def choose(
    config: StatisticsConfig | Priors, current: Statistics, population: Statistics, where: Any = None
) -> Statistics:
    """Return the population's value of each statistic, the current mini-batch's, or a mean of both (eqs 18-21).

    A current deviation is measured around the mean that was chosen. Members of ``current`` that ``config`` does not
    ask for may be ``None``. The weights are those of training: ``1/m`` is always the population's. To choose by
    arrays, give ``Priors`` and the library's own ``where(condition, yes, no)``.
    """
    priors = Priors(*config.priors) if isinstance(config, StatisticsConfig) else config
    select = partial(_chosen, None if isinstance(config, StatisticsConfig) else where)

    def pair(mean: str, var: str, prior_mean: Any, prior_var: Any, inverse_m: Any) -> tuple[Any, Any]:
        own_mean, own_var = getattr(current, mean), getattr(current, var)
        chosen = select(prior_mean, getattr(population, mean), own_mean, inverse_m)
        other_mean = own_mean is not None and chosen is not own_mean
        around_chosen = own_var + (own_mean - chosen) ** 2 if other_mean else own_var
        return chosen, select(prior_var, getattr(population, var), around_chosen, inverse_m)

    inverse_m = None if current.inverse_m is None else _per_feature(current.inverse_m)
    return Statistics(
        *pair("batch_mean", "batch_var", priors.batch_mean, priors.batch_std, inverse_m),  # eqs 18, 19
        *pair("feature_mean", "feature_var", priors.feature_mean, priors.feature_std, 1.0),  # eqs 20, 21
        population.inverse_m,
    )


def _chosen(where: Any, prior: Any, population: Any, current: Any, inverse_m: Any) -> Any:
    """Return the value at a prior strength, which is a number, or with ``where`` an array."""
    if where is None and prior in (POPULATION, CURRENT):  # nothing is computed
        return population if prior == POPULATION else current
    # An infinite prior is replaced: inf / inf is NaN, which would enter derivatives.
    finite = prior if where is None else where(prior < POPULATION, prior, 0.0)
    share = finite * inverse_m / (1 + finite * inverse_m)  # k / (k + m), the population's
    mixed = share * population + (1 - share) * current
    if where is None:
        return mixed
    return where(prior == POPULATION, population, where(prior == CURRENT, current, mixed))


# ---- measuring


def alone(value: Any) -> Any:
    """Return the sum over this device alone, the default ``total``."""
    return value


def clamp(xp: Any, value: Any, least: float = 1) -> Any:
    """Raise values to ``least``. In Keras on torch, ``maximum`` would turn float64 into float32."""
    return max(value, least) if is_number(value) else xp.where(value > least, value, least)


def is_number(value: Any) -> bool:
    """Whether this is a number and no array. To Dynamo an open size is an int, elsewhere it is a type of torch's."""
    return isinstance(value, int | float) or not hasattr(value, "shape")


def current(xp: Any, x: Any, mask: Any, spec: Spec, total: Total = alone) -> MiniBatch:
    """Measure a mini-batch by eqs 10-13, with the batch statistics and counts of all devices.

    Hidden entries of ``x`` must be 0.
    """
    ones = xp.ones_like(x[..., :1])
    real = ones if mask is None else xp.where(mask[..., None], ones, 0.0)
    own: Any = moments(xp, x, real) if spec.groups or not spec.per_position else None
    present = None if own is None else total(xp.sum(xp.where(own.weight > 0, xp.ones_like(own.weight), 0.0)))
    parts = Moments(x, 0.0, real) if spec.per_position else own
    entries = total(xp.sum(parts.weight, axis=0))[..., 0]
    m = entries if spec.per_position else present
    batch = batch_statistics(xp, parts, total)
    features = feature_statistics(xp, own, spec.groups) if spec.groups else over_features(xp, x)
    s = Statistics(*batch, *features, 1 / clamp(xp, m))
    return MiniBatch(s, m, entries, m if spec.groups is None else present)


def moments(xp: Any, x: Any, real: Any) -> Moments:
    """Measure each sample and feature over positions.

    ``real`` is 1 at real entries and 0 at hidden ones, where ``x`` must be 0; ``None`` says that none are hidden.
    """
    rank = len(x.shape)

    def over_positions(value: Any) -> Any:
        return xp.sum(value, axis=tuple(range(1, rank - 1))) if rank > 2 else value

    weight = None if real is None else over_positions(real)
    number = math.prod(x.shape[1:-1]) if real is None else clamp(xp, weight)
    mean = over_positions(x) / number
    centred = x - at_positions(mean, rank)
    centred = centred if real is None else xp.where(real > 0, centred, 0.0)
    return Moments(mean, over_positions(centred * centred) / number, weight)


def over_features(xp: Any, x: Any) -> tuple[Any, Any]:
    """Return mean and biased variance over the features at each position (eqs 12, 13)."""
    d = x.shape[-1]
    mean = xp.sum(x, axis=-1) / d  # Keras computes a mean in float32
    centred = x - mean[..., None]
    return mean, xp.sum(centred * centred, axis=-1) / d


def feature_statistics(xp: Any, moments: Moments, groups: int) -> tuple[Any, Any]:
    """Return mean and biased variance over a group of features and all positions (eqs 12, 13), ``(N, ..., groups)``."""
    means, variances = (_split_groups(xp, value, groups) for value in (moments.mean, moments.var))
    size = means.shape[-1]
    mean = xp.sum(means, axis=-1) / size
    return mean, xp.sum(variances + (means - mean[..., None]) ** 2, axis=-1) / size


def batch_statistics(xp: Any, moments: Moments, total: Total = alone) -> tuple[Any, Any]:
    """Return mean and biased variance over samples and the positions of ``moments`` (eqs 10, 11), ``(..., d)``."""
    if moments.weight is not None:
        return combine(xp, moments.weight, moments.mean, moments.weight * moments.var, total)
    number = clamp(xp, moments.mean.shape[0])
    mean = xp.sum(moments.mean, axis=0) / number
    return mean, xp.sum(moments.var + (moments.mean - mean) ** 2, axis=0) / number


def combine(xp: Any, counts: Any, means: Any, squares: Any, total: Total = alone) -> tuple[Any, Any]:
    """Join mean and biased variance of several parts by Chan's formula, which subtracts no two large numbers.

    ``counts``, ``means`` and ``squares``, the sums of squares around each part's own mean, have parts along their first
    axis; a part without entries holds zeros. ``total`` adds up over devices.
    """
    number = clamp(xp, total(xp.sum(counts, axis=0)))
    mean = total(xp.sum(counts * means, axis=0)) / number
    return mean, total(xp.sum(squares + counts * (means - mean) ** 2, axis=0)) / number


# ---- the population


def shapes(positions: tuple[int, ...], features: int, groups: int | None) -> dict[str, tuple[int, ...]]:
    """Return the shape of each statistic and counter of a population."""
    batch, counters = (*positions, features), (len(Statistics._fields), *positions)
    feature = positions if groups is None else (groups,)
    values = batch, batch, feature, feature, positions, counters, counters
    return dict(zip(INITIAL, values, strict=True))


def bessel(count: Any) -> Any:
    """Return the factor ``count / (count - 1)`` of eqs 5, 19 and 21, for counts from 1 on; 1 where the count is 1."""
    return count / (abs(count - 1.5) + 0.5)  # max(count - 1, 1), in operators that all libraries share


def unbiased(s: Statistics, entries: Any, present: Any) -> Statistics:
    """Multiply variances by ``m/(m-1)``; counts are 1 or more."""
    return s._replace(
        batch_var=s.batch_var * _per_feature(bessel(entries)),  # eqs 5, 19
        feature_var=s.feature_var * bessel(present),  # eq 21
    )


def estimates(xp: Any, batch: MiniBatch, spec: Spec, total: Total = alone) -> MiniBatch:
    """Estimate the population from a mini-batch: unbiased variances, feature statistics averaged over samples."""
    s, entries, present = batch.statistics, clamp(xp, batch.entries), clamp(xp, batch.present)
    over, number = (0, present) if spec.groups is not None else (0 if spec.per_position else None, entries)
    # The feature statistics of hidden positions are 0, so a plain sum leaves them out.
    mean, var = (total(xp.sum(value, axis=over)) / number for value in (s.feature_mean, s.feature_var))
    averaged = s._replace(feature_mean=mean, feature_var=var)
    return batch._replace(statistics=unbiased(averaged, entries, present))


def update(
    xp: Any, old: Averages, new: MiniBatch, momentum: float | None, groups: int | None, most: int | None = None
) -> Averages:
    """Average the population, at the positions of a training mini-batch, with the ``estimates`` from it.

    A mini-batch whose statistics are not finite is left out. ``momentum`` is the weight of the new value, which is at
    least ``1/updates``, so that initial values do not mix in; ``None`` averages all mini-batches, weighted by their
    samples. Samples are counted up to ``most``.
    """
    s, names = new.statistics, Statistics._fields
    # NaN and infinity, in the input or from an overflow, show in the variances.
    finite = xp.all(xp.isfinite(s.batch_var)) & xp.all(xp.isfinite(s.feature_var))
    here = old.statistics.inverse_m  # one value for each position
    m, entries, present = (
        n if len(n.shape) == len(here.shape) else n + xp.zeros_like(here) for n in (new.m, new.entries, new.present)
    )
    rows = [present if name.startswith("feature") else m for name in names]
    counts = xp.stack(rows)
    # A variance needs two entries.
    needed = xp.stack([entries - 1 if name == "batch_var" else row for name, row in zip(names, rows, strict=True)])
    enters = finite & (needed > 0)

    added = _cast(xp, counts, old.samples.dtype)
    if most is not None:
        added = xp.where(added < most - old.samples, added, most - old.samples)
    updates = xp.where(enters, old.updates + 1, old.updates)
    samples = xp.where(enters, old.samples + added, old.samples)
    if momentum is None:
        weights = counts / _cast(xp, clamp(xp, samples), here.dtype)
    else:
        weights = clamp(xp, 1 / _cast(xp, clamp(xp, updates), here.dtype), momentum)
    lerp = getattr(xp, "lerp", partial(_lerp, xp))
    values = []
    for row, (name, before, value) in enumerate(zip(names, old.statistics, s, strict=True)):
        takes, weight = (broadcast_counter(name, of_all[row], groups) for of_all in (enters, weights))
        values.append(lerp(before, xp.where(takes, value, before), weight))
    return Averages(Statistics(*values), updates, samples)


def complete(xp: Any, after: Averages, before: Averages, groups: int | None) -> Averages:
    """Complete ``after`` by ``before``: with statistics that have no mini-batch yet, and each ``1/m`` known before."""
    known, unlearned = before.updates > 0, after.updates == 0
    take = xp.stack([(known if name == "inverse_m" else unlearned)[at] for at, name in enumerate(Statistics._fields)])
    pairs = zip(Statistics._fields, take, before.statistics, after.statistics, strict=True)
    values = (xp.where(broadcast_counter(name, row, groups), old, new) for name, row, old, new in pairs)
    counters = (xp.where(take, *pair) for pair in zip(before[1:], after[1:], strict=True))
    return Averages(Statistics(*values), *counters)


def expand(xp: Any, name: str, value: Any, shape: tuple[int, ...]) -> Any:
    """Repeat a statistic or counter without positions for each position of ``shape``."""
    if not name.startswith("batch"):
        value = xp.reshape(value, (*value.shape, *[1] * (len(shape) - len(value.shape))))
    return xp.broadcast_to(value, shape)


def broadcast_counter(name: str, row: Any, groups: int | None) -> Any:
    """Reshape a counter's row, or weights computed from it, to broadcast against its statistic."""
    if groups is not None and name.startswith("feature"):  # the same at all positions
        while len(row.shape) > 0:
            row = row[0]
        return row
    return row[..., None] if name.startswith("batch") else row


def _lerp(xp: Any, old: Any, new: Any, weight: Any) -> Any:
    """Interpolate from the nearer end, as ``torch.lerp`` does, so that weight 1 gives exactly the new value."""
    return xp.where(weight < 0.5, old + weight * (new - old), new - (1 - weight) * (new - old))


def _cast(xp: Any, value: Any, dtype: Any) -> Any:
    """Convert to a type; Keras has no ``asarray``, torch no ``array``."""
    return (xp.asarray if hasattr(xp, "asarray") else xp.array)(value, dtype=dtype)


# ---- the grouped form with pooled batch statistics: one affine map for each sample and feature


def _repeat_groups(xp: Any, value: Any, d: int) -> Any:
    """Repeat the value of each group for its features: ``(..., groups)`` to ``(..., d)``."""
    shape = value.shape
    if shape[-1] in (1, d):  # broadcasts as it is
        return value
    tiled = xp.tile(value[..., None], (*[1] * len(shape), d // shape[-1]))
    return xp.reshape(tiled, (*_open_sizes(shape[:-1]), d))


def _split_groups(xp: Any, value: Any, groups: int) -> Any:
    """Reshape ``(..., d)`` to ``(..., groups, d / groups)``, which broadcasts against ``(..., groups, 1)``."""
    return xp.reshape(value, (*_open_sizes(value.shape[:-1]), groups, value.shape[-1] // groups))


def _flatten_groups(xp: Any, value: Any) -> Any:
    """Reshape ``(..., groups, d / groups)`` to ``(..., d)``."""
    return xp.reshape(value, (*_open_sizes(value.shape[:-2]), value.shape[-2] * value.shape[-1]))


def _open_sizes(shape: Any) -> tuple[int, ...]:
    """Replace a size that a TensorFlow graph leaves open by -1, for ``reshape``."""
    return tuple(-1 if size is None else size for size in shape)


def coefficients(xp: Any, s: Statistics, gamma: Any, beta: Any, d: int, spec: Spec) -> tuple[Any, Any]:
    """Return ``a`` and ``b`` of ``y = a x + b``: eqs 14-17, or 22-25, with the terms collected."""
    assert spec.groups is not None
    w_B, w_F = weights(s.inverse_m, spec.mix_eps, d, spec.dim_scale)
    slope_B = w_B / (s.batch_var + spec.eps) ** 0.5
    slope_F = w_F / (s.feature_var + spec.eps) ** 0.5
    offset_B, offset_F = slope_B * s.batch_mean, slope_F * s.feature_mean
    a, b = (
        _flatten_groups(xp, _split_groups(xp, of_batch, spec.groups) + of_features[..., None])
        for of_batch, of_features in ((slope_B, slope_F), (offset_B, offset_F))
    )
    if gamma is not None:
        a, b = gamma * a, gamma * b
    return a, -b if beta is None else beta - b
