"""The equations of the paper, once, in plain operators.

NumPy, torch, JAX and Keras tensors all pass through: nothing here calls a library. Everything is *features last*:
``x`` is ``(N, *positions, d)``. Names follow the paper, equation numbers stand beside the lines that are the equations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .config import StatisticsConfig


class Switches(NamedTuple):
    """A configuration for each of several groups of samples: boolean arrays that broadcast against the statistics."""

    batch_mean: Any
    batch_std: Any
    feature_mean: Any
    feature_std: Any


class Statistics(NamedTuple):
    """The five statistics that normalize a mini-batch, as arrays of one kind.

    With ``per_position=False`` the batch statistics are pooled over positions and ``*positions`` is absent from all
    but a mini-batch's own feature statistics.
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


def transform(
    x: Any, s: Statistics, gamma: Any = None, beta: Any = None, *, eps: float, mix_eps: float, dim_scale: bool = True
) -> Any:
    """Normalize ``x`` with the statistics ``s``, mix, scale and shift: eqs 14-17 in training, 22-25 at inference."""
    x_B = (x - s.batch_mean) / (s.batch_var + eps) ** 0.5  # eqs 14, 22
    x_F = (x - _each(s.feature_mean)) / (_each(s.feature_var) + eps) ** 0.5  # eqs 15, 23
    w_B, w_F = weights(_each(s.inverse_m), mix_eps, x.shape[-1], dim_scale)
    z = w_B * x_B + w_F * x_F  # eqs 16, 24
    y = z if gamma is None else gamma * z  # eqs 17, 25
    return y if beta is None else y + beta


def _each(value: Any) -> Any:
    """The same for each feature. One value for everything needs no axis; AOTInductor cannot give it one."""
    return value[..., None] if len(value.shape) else value


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


def combine(counts: Any, means: Any, squares: Any) -> tuple[Any, Any]:
    """Chan's formula: mean and biased variance of several parts together, no two large numbers subtracted.

    ``counts``, ``means`` and ``squares``, the sums of squares around each part's own mean, have parts along their first
    axis; a part without entries holds zeros.
    """
    total = counts.sum(0).clip(min=1)
    mean = (counts * means).sum(0) / total
    return mean, (squares + counts * (means - mean) ** 2).sum(0) / total
