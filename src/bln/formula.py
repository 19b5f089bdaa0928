"""The equations of the paper, once, in plain operators.

NumPy, torch, JAX and Keras tensors all pass through. Where a function of the library is needed, the library comes as
``xp``: ``numpy``, ``torch``, ``jax.numpy`` or ``keras.ops``. Everything is *features last*: ``x`` is ``(N, *positions,
d)``. Names follow the paper, equation numbers stand beside the lines that are the equations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ._spec import Spec
from .config import CURRENT, POPULATION, StatisticsConfig

Total = Callable[[Any], Any]
"""The sum of an array over devices."""


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


def weights(inverse_m: Any, mix_eps: float, d: int, dim_scale: bool) -> tuple[Any, Any]:
    """Eq 16: what multiplies the batch-normalized and the feature-normalized activation, ``1/sqrt(d)`` included."""
    scale = d**-0.5 if dim_scale else 1.0
    return scale * (1 - (inverse_m + mix_eps)), scale * (inverse_m - mix_eps)


def transform(x: Any, s: Statistics, gamma: Any = None, beta: Any = None, *, spec: Spec, xp: Any = None) -> Any:
    """Normalize ``x`` with the statistics ``s``, mix, scale and shift: eqs 14-17 in training, 22-25 at inference.

    With groups, ``xp`` is needed.
    """
    d = x.shape[-1]
    if spec.groups is None:
        mean_F, var_F = _each(s.feature_mean), _each(s.feature_var)
    else:
        mean_F, var_F = (at_positions(spread(xp, v, d), len(x.shape)) for v in (s.feature_mean, s.feature_var))
    x_B = (x - s.batch_mean) / (s.batch_var + spec.eps) ** 0.5  # eqs 14, 22
    x_F = (x - mean_F) / (var_F + spec.eps) ** 0.5  # eqs 15, 23
    w_B, w_F = weights(_each(s.inverse_m), spec.mix_eps, d, spec.dim_scale)
    z = w_B * x_B + w_F * x_F  # eqs 16, 24
    y = z if gamma is None else gamma * z  # eqs 17, 25
    return y if beta is None else y + beta


def _each(value: Any) -> Any:
    """The same for each feature. One value for everything needs no axis; AOTInductor cannot give it one."""
    return value[..., None] if len(value.shape) else value


def at_positions(value: Any, rank: int) -> Any:
    """``(..., d)`` with axes for the positions of an input of ``rank`` axes."""
    while 1 < len(value.shape) < rank:
        value = value[..., None, :]
    return value


def choose(
    config: StatisticsConfig | Priors, current: Statistics, population: Statistics, where: Any = None
) -> Statistics:
    """Eqs 18-21: the population's or the current mini-batch's value of each statistic, or a mean of both.

    A current deviation is measured around the mean that was chosen. Members of ``current`` that ``config`` does not
    ask for may be ``None``. The weights are those of training: ``1/m`` is always the population's. To choose by
    arrays, give ``Priors`` and the library's own ``where(condition, yes, no)``.
    """
    priors = Priors(*config.priors) if isinstance(config, StatisticsConfig) else config
    select = partial(_selected, where) if where is not None else _shrunk

    def pair(mean: str, var: str, prior_mean: Any, prior_var: Any, inverse_m: Any) -> tuple[Any, Any]:
        own_mean, own_var = getattr(current, mean), getattr(current, var)
        chosen = select(prior_mean, getattr(population, mean), own_mean, inverse_m)
        elsewhere = own_mean is not None and chosen is not own_mean
        around = own_var + (own_mean - chosen) ** 2 if elsewhere else own_var
        return chosen, select(prior_var, getattr(population, var), around, inverse_m)

    inverse_m = None if current.inverse_m is None else _each(current.inverse_m)
    return Statistics(
        *pair("batch_mean", "batch_var", priors.batch_mean, priors.batch_std, inverse_m),  # eqs 18, 19
        *pair("feature_mean", "feature_var", priors.feature_mean, priors.feature_std, 1.0),  # eqs 20, 21
        population.inverse_m,
    )


def population_share(prior: Any, inverse_m: Any) -> Any:
    """``k / (k + m)``: the weight of the population beside a statistic of ``m`` samples."""
    return prior * inverse_m / (1 + prior * inverse_m)


def _shrunk(prior: float, population: Any, current: Any, inverse_m: Any) -> Any:
    """The value at a prior strength that is known: where it is infinite or 0, nothing is computed."""
    if prior == POPULATION:
        return population
    if prior == CURRENT:
        return current
    return _mixed(population_share(prior, inverse_m), population, current)


def _mixed(share: Any, population: Any, current: Any) -> Any:
    return share * population + (1 - share) * current


def _selected(where: Any, prior: Any, population: Any, current: Any, inverse_m: Any) -> Any:
    """The value at prior strengths in an array."""
    finite = where(prior < POPULATION, prior, 0.0)  # else inf / inf, whose NaN would enter derivatives
    mixed = _mixed(population_share(finite, inverse_m), population, current)
    return where(prior == POPULATION, population, where(prior == CURRENT, current, mixed))


def bessel(count: Any) -> Any:
    """The factor ``count / (count - 1)`` of eqs 5, 19 and 21, for counts from 1 on; 1 where the count is 1."""
    return count / (abs(count - 1.5) + 0.5)  # max(count - 1, 1) in operators: booleans and 0 ** 0 are not for all


def _own(value: Any) -> Any:
    """A device by itself."""
    return value


def combine(xp: Any, counts: Any, means: Any, squares: Any, total: Total = _own) -> tuple[Any, Any]:
    """Chan's formula: mean and biased variance of several parts together, no two large numbers subtracted.

    ``counts``, ``means`` and ``squares``, the sums of squares around each part's own mean, have parts along their first
    axis; a part without entries holds zeros. ``total`` adds up what several devices have.
    """
    number = total(xp.sum(counts, axis=0))
    number = xp.where(number > 1, number, 1)
    mean = total(xp.sum(counts * means, axis=0)) / number
    return mean, total(xp.sum(squares + counts * (means - mean) ** 2, axis=0)) / number


# ---- the grouped form: feature statistics over a group of features and all positions


class Moments(NamedTuple):
    """Mean and biased variance over the positions of each sample and feature, ``(N, ..., d)``."""

    mean: Any
    var: Any
    weight: Any
    """How much a sample counts: its real positions, ``(N, ..., 1)``; ``None`` where all count the same."""


def spread(xp: Any, value: Any, d: int) -> Any:
    """One value for each of ``d`` features, ``(..., d)``, from one for each group."""
    shape = value.shape
    if shape[-1] in (1, d):  # meets all features as it is
        return value
    tiled = xp.tile(value[..., None], (*[1] * len(shape), d // shape[-1]))
    return xp.reshape(tiled, (*_known(shape[:-1]), d))


def _by_group(xp: Any, value: Any, groups: int) -> Any:
    """One value for each feature as ``(..., groups, d / groups)``, which meets ``(..., groups, 1)``."""
    return xp.reshape(value, (*_known(value.shape[:-1]), groups, value.shape[-1] // groups))


def _flat(xp: Any, value: Any) -> Any:
    """``(..., groups, d / groups)`` as ``(..., d)``."""
    return xp.reshape(value, (*_known(value.shape[:-2]), value.shape[-2] * value.shape[-1]))


def _known(shape: Any) -> tuple[int, ...]:
    """A shape to ask for; TensorFlow's graphs may leave a size open."""
    return tuple(-1 if size is None else size for size in shape)


def feature_statistics(xp: Any, moments: Moments, groups: int) -> tuple[Any, Any]:
    """Eqs 12, 13 over the features of a group and all positions: mean and biased variance, ``(N, ..., groups)``."""
    means, variances = (_by_group(xp, value, groups) for value in (moments.mean, moments.var))
    size = means.shape[-1]
    mean = xp.sum(means, axis=-1) / size
    return mean, xp.sum(variances + (means - mean[..., None]) ** 2, axis=-1) / size


def batch_statistics(xp: Any, moments: Moments, total: Total = _own) -> tuple[Any, Any]:
    """Eqs 10, 11 over samples and positions: mean and biased variance, ``(..., d)``."""
    if moments.weight is not None:
        return combine(xp, moments.weight, moments.mean, moments.weight * moments.var, total)
    number = moments.mean.shape[0]
    mean = xp.sum(moments.mean, axis=0) / number
    return mean, xp.sum(moments.var + (moments.mean - mean) ** 2, axis=0) / number


class Coefficients(NamedTuple):
    """The grouped layer with pooled batch statistics as ``y = a x + b``, one pair for each sample and feature."""

    a: Any
    b: Any


def coefficients(xp: Any, s: Statistics, gamma: Any, beta: Any, d: int, spec: Spec) -> Coefficients:
    """Eqs 14-17, or 22-25, sorted by ``x``."""
    assert spec.groups is not None
    w_B, w_F = weights(s.inverse_m, spec.mix_eps, d, spec.dim_scale)
    slope_B = w_B / (s.batch_var + spec.eps) ** 0.5
    slope_F = w_F / (s.feature_var + spec.eps) ** 0.5
    offset_B, offset_F = slope_B * s.batch_mean, slope_F * s.feature_mean
    a, b = (
        _flat(xp, _by_group(xp, of_batch, spec.groups) + of_features[..., None])
        for of_batch, of_features in ((slope_B, slope_F), (offset_B, offset_F))
    )
    if gamma is not None:
        a, b = gamma * a, gamma * b
    return Coefficients(a, -b if beta is None else beta - b)


class Gradients(NamedTuple):
    """The derivative of the grouped layer: ``dx = a dy + c1 x + c0``, and the gradients of gamma and beta."""

    c1: Any
    c0: Any
    gamma: Any
    beta: Any


def gradients(xp: Any, s: Statistics, moments: Moments, sums: Any, dots: Any, gamma: Any, spec: Spec) -> Gradients:
    """The chain rule through ``coefficients`` and the statistics of training, from sums over positions alone.

    Args:
        xp: The library.
        s: The statistics of the mini-batch.
        moments: Their origin, with ``weight`` the number of positions: of each sample, or a number for all.
        sums: ``dy`` summed over positions, ``(N, d)``.
        dots: ``dy * (x - mean)`` summed over positions, the mean being that of ``moments``.
        gamma: The scale, or ``None``.
        spec: The options.
    """
    assert spec.groups is not None
    d, positions = moments.mean.shape[-1], moments.weight
    w_B, w_F = weights(s.inverse_m, spec.mix_eps, d, spec.dim_scale)
    r_B, r_F = (s.batch_var + spec.eps) ** -0.5, ((s.feature_var + spec.eps) ** -0.5)[..., None]
    means, g_sums, g_dots = (_by_group(xp, value, spec.groups) for value in (moments.mean, sums, dots))
    mean_F = s.feature_mean[..., None]
    x_B = r_B * xp.sum(dots + (moments.mean - s.batch_mean) * sums, axis=0)  # dy * x_B, summed over all
    x_F = r_F * (g_dots + (means - mean_F) * g_sums)  # dy * x_F, summed over positions
    total = xp.sum(sums, axis=0)
    d_gamma = w_B * x_B + _flat(xp, xp.sum(w_F * x_F, axis=0))
    scale = 1.0
    if gamma is not None:
        scale, by_group = gamma, _by_group(xp, gamma, spec.groups)
        g_sums, x_F = by_group * g_sums, by_group * x_F
    # Entries behind each batch statistic and, up to the size of a group, behind each feature statistic.
    uniform = isinstance(positions, int | float)
    entries_B = positions * moments.mean.shape[0] if uniform else xp.sum(positions, axis=0)
    entries_F = (positions if uniform else positions[..., None]) * (d // spec.groups)
    # Each factor of r in its turn: r ** 3 would underflow where x is of order 1e15.
    scale_B, scale_F = w_B * scale * r_B / entries_B, w_F * r_F / entries_F
    slope_B = scale_B * x_B * r_B
    slope_F = scale_F * xp.sum(x_F, axis=-1, keepdims=True) * r_F
    offset_B = slope_B * s.batch_mean - scale_B * total
    offset_F = slope_F * mean_F - scale_F * xp.sum(g_sums, axis=-1, keepdims=True)
    return Gradients(
        -_flat(xp, _by_group(xp, slope_B, spec.groups) + slope_F),
        _flat(xp, _by_group(xp, offset_B, spec.groups) + offset_F),
        d_gamma,
        total,
    )
