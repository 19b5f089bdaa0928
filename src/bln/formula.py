"""The equations of the paper, once, in plain operators.

NumPy, torch, JAX and Keras tensors all pass through. Where a function of the library is needed, the library comes as
``xp``: ``numpy``, ``torch``, ``jax.numpy`` or ``keras.ops``. Everything is *features last*: ``x`` is ``(N, *positions,
d)``. Names follow the paper, equation numbers stand beside the lines that are the equations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ._spec import Spec
from .config import StatisticsConfig

Total = Callable[[Any], Any]
"""The sum of an array over devices."""


class Switches(NamedTuple):
    """A configuration for each of several groups of samples: boolean arrays that broadcast against the statistics."""

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
    config: StatisticsConfig | Switches, current: Statistics, population: Statistics, where: Any = None
) -> Statistics:
    """Eqs 18-21: the population's or the current mini-batch's value of each statistic.

    A current deviation is measured around the mean that was chosen. Members of ``current`` that ``config`` does not
    ask for may be ``None``. The weights are those of training: ``1/m`` is always the population's. To choose for each
    group of samples, give ``config`` as ``Switches`` and the library's own ``where(switch, yes, no)``.
    """

    def pair(mean: str, var: str, population_mean: Any, population_var: Any) -> tuple[Any, Any]:
        if where is not None and getattr(current, mean) is not None:
            chosen = where(population_mean, getattr(population, mean), getattr(current, mean))
            around = getattr(current, var) + (getattr(current, mean) - chosen) ** 2  # + 0 around its own mean
            return chosen, where(population_var, getattr(population, var), around)
        if where is not None:
            return getattr(population, mean), getattr(population, var)
        chosen = getattr(population if population_mean else current, mean)
        if population_var:
            return chosen, getattr(population, var)
        if not population_mean:
            return chosen, getattr(current, var)
        return chosen, getattr(current, var) + (getattr(current, mean) - chosen) ** 2

    return Statistics(
        *pair("batch_mean", "batch_var", config.batch_mean, config.batch_std),  # eqs 18, 19
        *pair("feature_mean", "feature_var", config.feature_mean, config.feature_std),  # eqs 20, 21
        population.inverse_m,
    )


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
    """How much a sample counts: its real positions, ``(N, ..., 1)``, or where none is hidden 1."""


def spread(xp: Any, value: Any, d: int) -> Any:
    """One value for each of ``d`` features, ``(..., d)``, from one for each group."""
    shape = value.shape
    if shape[-1] in (1, d):  # meets all features as it is
        return value
    tiled = xp.tile(value[..., None], (*[1] * len(shape), d // shape[-1]))
    return xp.reshape(tiled, (*_known(shape[:-1]), d))


def _group_mean(xp: Any, value: Any, groups: int) -> Any:
    """The mean over the features of each group, ``(..., groups)``."""
    size = value.shape[-1] // groups
    return xp.sum(xp.reshape(value, (*_known(value.shape[:-1]), groups, size)), axis=-1) / size


def _known(shape: Any) -> tuple[int, ...]:
    """A shape to ask for; TensorFlow's graphs may leave a size open."""
    return tuple(-1 if size is None else size for size in shape)


def feature_statistics(xp: Any, moments: Moments, groups: int) -> tuple[Any, Any]:
    """Eqs 12, 13 over the features of a group and all positions: mean and biased variance, ``(N, ..., groups)``."""
    mean = _group_mean(xp, moments.mean, groups)
    centred = moments.mean - spread(xp, mean, moments.mean.shape[-1])
    return mean, _group_mean(xp, moments.var + centred**2, groups)


def batch_statistics(xp: Any, moments: Moments, total: Total = _own) -> tuple[Any, Any]:
    """Eqs 10, 11 over samples and positions: mean and biased variance, ``(..., d)``."""
    return combine(xp, moments.weight, moments.mean, moments.weight * moments.var, total)


class Coefficients(NamedTuple):
    """The grouped layer with pooled batch statistics as ``y = a x + b``, one pair for each sample and feature."""

    a: Any
    b: Any


def coefficients(xp: Any, s: Statistics, gamma: Any, beta: Any, d: int, spec: Spec) -> Coefficients:
    """Eqs 14-17, or 22-25, sorted by ``x``."""
    w_B, w_F = weights(s.inverse_m, spec.mix_eps, d, spec.dim_scale)
    slope_B = w_B / (s.batch_var + spec.eps) ** 0.5
    slope_F = w_F / (s.feature_var + spec.eps) ** 0.5
    offset_F = spread(xp, slope_F * s.feature_mean, d)
    a = slope_B + spread(xp, slope_F, d)
    b = -(slope_B * s.batch_mean + offset_F)
    if gamma is not None:
        a, b = gamma * a, gamma * b
    return Coefficients(a, b if beta is None else b + beta)


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
        moments: Their origin, with ``weight`` the number of positions.
        sums: ``dy`` summed over positions, ``(N, d)``.
        dots: ``dy * (x - mean)`` summed over positions, the mean being that of ``moments``.
        gamma: The scale, or 1.
        spec: The options.
    """
    d, groups = moments.mean.shape[-1], s.feature_mean.shape[-1]
    w_B, w_F = weights(s.inverse_m, spec.mix_eps, d, spec.dim_scale)
    r_B, r_F = (s.batch_var + spec.eps) ** -0.5, (s.feature_var + spec.eps) ** -0.5
    mean_F = spread(xp, s.feature_mean, d)
    x_B = r_B * (dots + (moments.mean - s.batch_mean) * sums)  # dy * x_B, summed over positions
    x_F = spread(xp, r_F, d) * (dots + (moments.mean - mean_F) * sums)
    entries = moments.weight * (d // groups)  # behind each feature statistic
    number = xp.sum(moments.weight, axis=0)  # behind each batch statistic
    total, total_B = xp.sum(sums, axis=0), xp.sum(x_B, axis=0)
    # Each factor of r in its turn: r ** 3 would underflow where x is of order 1e15.
    scale_B = w_B * gamma * r_B / number
    slope_B = scale_B * total_B * r_B
    scale_F = w_F * r_F / entries
    slope_F = spread(xp, scale_F * _group_mean(xp, gamma * x_F, groups) * (d // groups) * r_F, d)
    offset_F = spread(xp, scale_F * _group_mean(xp, gamma * sums, groups) * (d // groups), d)
    return Gradients(
        -(slope_B + slope_F),
        slope_B * s.batch_mean - scale_B * total + (slope_F * mean_F - offset_F),
        w_B * total_B + xp.sum(w_F * x_F, axis=0),
        total,
    )
