"""Batch Layer Normalization as a stateless, differentiable torch function."""

from __future__ import annotations

from operator import index
from typing import Any, Literal, SupportsIndex, TypedDict, Unpack, overload

import torch
from torch import Tensor, fx

from . import _backends, formula
from ._activation import Activation, check_activation, check_residual
from ._masks import is_host_readable, not_a_mask
from ._positions import check_shapes
from ._spec import Spec
from .config import CURRENT, POPULATION, StatisticsConfig
from .formula import Statistics

__all__ = ["Statistics", "batch_layer_norm"]


class Options(TypedDict, total=False):
    """The keyword arguments of a call but ``return_statistics``, by which the type of the result differs."""

    channel_dim: int
    groups: int | None
    per_position: bool | None
    mask: Tensor | None
    eps: float
    mix_eps: float | None
    dim_scale: bool | None
    population: Statistics | None
    config: StatisticsConfig | str
    residual: Tensor | None
    activation: Activation | None


@overload
def batch_layer_norm(
    x: Tensor, weight: Tensor | None = ..., bias: Tensor | None = ..., *, return_statistics: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def batch_layer_norm(
    x: Tensor, weight: Tensor | None = ..., bias: Tensor | None = ..., *, return_statistics: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Statistics]: ...  # fmt: skip
def batch_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    channel_dim: int = 1,
    groups: int | None = None,
    per_position: bool | None = None,
    mask: Tensor | None = None,
    eps: float = 1e-4,
    mix_eps: float | None = None,
    dim_scale: bool | None = None,
    population: Statistics | None = None,
    config: StatisticsConfig | str = "TTFF",
    residual: Tensor | None = None,
    activation: Activation | None = None,
    return_statistics: bool = False,
) -> Tensor | tuple[Tensor, Statistics]:
    """Normalize over the mini-batch and over features, mixed by ``1/m`` (eqs 10-17, or 18-25 given a population).

    ``groups``, ``per_position``, ``eps``, ``mix_eps`` and ``dim_scale`` are those of ``bln.BatchLayerNorm``.

    Args:
        x: ``(N, C)``, ``(N, C, *positions)``, or with ``channel_dim=-1`` ``(N, *positions, C)``. Floating point.
        weight: Gamma, ``(C,)``.
        bias: Beta, ``(C,)``.
        channel_dim: The dimension of features; never 0, which is that of samples.
        mask: ``(N, *positions)``, boolean, true at real entries. Hidden entries enter no statistic and come out 0.
        population: Statistics to choose from, features last, as ``Statistics`` says. Without them the mini-batch
            is normalized by its own, as in training.
        config: With ``population``, where each of the four statistics comes from.
        residual: Added to what was normalized, of ``x``'s shape.
        activation: Applied last: ``"relu"``, ``"silu"`` or ``"gelu"``, the exact one.
        return_statistics: Return ``(y, statistics)``; the statistics that were used, detached.

    Returns:
        ``y``, of ``x``'s shape and type. Statistics are computed in float32 (float64 if any argument is).
    """
    spec = Spec.of(groups, per_position, eps, mix_eps, dim_scale)
    if not isinstance(channel_dim, SupportsIndex):
        raise TypeError(f"channel_dim must be an integer, 1 or -1 for features last, got {channel_dim!r}")
    channel_dim = check(x, mask, index(channel_dim), allow_empty=population is not None)
    activation = check_activation(activation)
    check_residual(residual, x)
    spec.check_features(x.shape[channel_dim])
    config = StatisticsConfig.parse(config)
    if population is None and not set(config.priors) <= {POPULATION, CURRENT}:
        raise ValueError(
            f"config={str(config)!r} has prior strengths, which shrink statistics towards a population, but none is "
            "given: pass population=, or leave config away to normalize by the mini-batch's own statistics"
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if not (parameter is None or isinstance(parameter, Tensor)):
            raise TypeError(f"{name} must be a torch.Tensor or None, got {type(parameter).__name__}")
        if parameter is not None and tuple(parameter.shape) != (x.shape[channel_dim],):
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}, expected ({x.shape[channel_dim]},): one value for each "
                f"feature along dimension {channel_dim} of the input {tuple(x.shape)}"
            )

    tensors = x, weight, bias, mask, channel_dim, spec
    after: Any = {"residual": residual, "activation": activation}
    if population is None:
        y, statistics = _backends.train(*tensors, **after)
    else:
        _check_population(population, x, channel_dim, spec)
        y, statistics = _backends.infer(*tensors, population, config, **after)
    return (y, statistics) if return_statistics else y  # type: ignore[return-value]


def check(
    x: Tensor, mask: Tensor | None, channel_dim: int, features: int | None = None, *, allow_empty: bool = False,
    allow_hidden: bool = False,
) -> int:  # fmt: skip
    """Return the dimension of features counted from the front; refuse an input or mask that cannot be normalized.

    ``allow_empty`` is for inputs without samples, ``allow_hidden`` for masks that hide everything: other ranks may have
    samples.
    """
    if not isinstance(x, Tensor):
        way = "; torch.fx wants a Tracer whose is_leaf_module is true of the layer" if isinstance(x, fx.Proxy) else ""
        raise TypeError(f"expected a torch.Tensor as input, got {type(x).__name__}{way}")
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise TypeError(
            f"expected a real floating point input of 16 bits or more, got {x.dtype}; convert it first, as in x.float()"
        )
    if mask is None:
        return check_shapes("channel_dim", channel_dim, x.shape, features, None, allow_empty)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise not_a_mask(mask)
    channel_dim = check_shapes("channel_dim", channel_dim, x.shape, features, mask.shape, allow_empty)
    if not allow_hidden and mask.numel() and is_host_readable(mask) and not mask.any():
        raise ValueError("the mask hides every entry; at least one must be real. Skip such a batch")
    return channel_dim


def _check_population(population: Statistics, x: Tensor, channel_dim: int, spec: Spec) -> None:
    """Refuse statistics that do not fit the input."""
    if not isinstance(population, Statistics) or not all(isinstance(value, Tensor) for value in population):
        kinds = ", ".join(type(v).__name__ for v in population) if isinstance(population, tuple) else ""
        raise TypeError(
            f"population must be a bln.functional.Statistics of five tensors, got {type(population).__name__}"
            + (f" of {kinds}" if kinds else "")
        )
    n, *positions, d = x.movedim(channel_dim, -1).shape
    wanted = formula.shapes(() if spec.coefficients else tuple(positions), d, spec.groups)
    for name, value in population._asdict().items():
        whole = n, *wanted[name]  # of a mini-batch, or with any part of it missing or 1
        fits = all(size in (1, there) for size, there in zip(value.shape[::-1], whole[::-1], strict=False))
        if value.dim() > len(whole) or not fits:
            raise ValueError(
                f"population.{name} has shape {tuple(value.shape)}, expected {wanted[name]}, or one that spreads to "
                f"it, for the input {tuple(x.shape)} with features at dimension {channel_dim}"
            )
