"""Batch Layer Normalization as a stateless, differentiable torch function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from operator import index
from types import ModuleType
from typing import Any, Literal, SupportsIndex, overload

import torch
from torch import Tensor, fx

from . import _coefficients, formula, native
from ._activation import Activation, check_activation, check_residual, finish
from ._spec import Spec
from .config import CURRENT, POPULATION, StatisticsConfig
from .formula import Statistics

Recall = Callable[[Statistics], Statistics]

__all__ = ["Statistics", "batch_layer_norm"]


@overload
def batch_layer_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    *,
    channel_dim: int = ...,
    groups: int | None = ...,
    per_position: bool | None = ...,
    mask: Tensor | None = ...,
    eps: float = ...,
    mix_eps: float | None = ...,
    dim_scale: bool | None = ...,
    population: Statistics | None = ...,
    config: StatisticsConfig | str = ...,
    residual: Tensor | None = ...,
    activation: Activation | None = ...,
    return_statistics: Literal[False] = ...,
) -> Tensor: ...
@overload
def batch_layer_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    *,
    channel_dim: int = ...,
    groups: int | None = ...,
    per_position: bool | None = ...,
    mask: Tensor | None = ...,
    eps: float = ...,
    mix_eps: float | None = ...,
    dim_scale: bool | None = ...,
    population: Statistics | None = ...,
    config: StatisticsConfig | str = ...,
    residual: Tensor | None = ...,
    activation: Activation | None = ...,
    return_statistics: Literal[True],
) -> tuple[Tensor, Statistics]: ...
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

    Args:
        x: ``(N, C)``, ``(N, C, *positions)``, or with ``channel_dim=-1`` ``(N, *positions, C)``. Floating point.
        weight: Gamma, ``(C,)``.
        bias: Beta, ``(C,)``.
        channel_dim: The dimension of features; never 0, which is that of samples.
        groups: Take feature statistics over this many groups of features and all positions, as GroupNorm does.
            ``None`` takes them over the features of each position, as published.
        per_position: Batch statistics for each position, as published; ``False`` pools them over positions, and is
            the default with ``groups``.
        mask: ``(N, *positions)``, boolean, true at real entries. Hidden entries enter no statistic and come out 0.
        eps: Added to both variances.
        mix_eps: The epsilon in the weights of eq 16; ``None`` is ``eps``, with ``groups`` 0.
        dim_scale: Divide by the root of the number of features (eq 16); ``None`` does so without ``groups``.
        population: Statistics to choose from, features last, as ``Statistics`` says. Without them the mini-batch
            is normalized by its own, as in training.
        config: With ``population``, where each of the four statistics comes from.
        residual: Added to what was normalized, of ``x``'s shape.
        activation: Applied last: ``"relu"``, ``"silu"`` or ``"gelu"``, the exact one.
        return_statistics: Return ``(y, statistics)``; the statistics that were used, detached.

    Returns:
        ``y``, of ``x``'s shape and type. Statistics are computed in float32 (float64 if anything given is).
    """
    spec = Spec.of(groups, per_position, eps, mix_eps, dim_scale)
    if not isinstance(channel_dim, SupportsIndex):
        raise TypeError(f"channel_dim must be an integer, 1 or -1 for features last, got {channel_dim!r}")
    channel_dim = check(x, mask, index(channel_dim), empty=population is not None)
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

    if population is not None:
        _check_population(population, x, channel_dim, spec)
    if x.numel() == 0 and population is not None:
        return (x.clone(), population) if return_statistics else x.clone()
    y, statistics = normalize(x, weight, bias, mask, channel_dim, spec, population=population, config=config)
    y = finish(y, residual, mask, channel_dim, activation)
    return (y, statistics) if return_statistics else y


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    channel_dim: int,
    spec: Spec,
    *,
    population: Statistics | None = None,
    config: StatisticsConfig | str = "TTFF",
    recall: Recall | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Statistics]:
    """``batch_layer_norm`` of what was checked, computed in ``dtype`` at least.

    ``recall`` joins the mini-batch's statistics with those of earlier ones, at inference.
    """
    dtype = torch.promote_types(x.dtype, dtype)
    for other in (weight, bias, population and population.batch_mean):
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    gamma, beta = (None if p is None else p.to(dtype) for p in (weight, bias))

    kernels = None
    if population is None and dtype == torch.float32:
        kernels = kernels_for(x, spec, x.shape[channel_dim], weight, bias)
    if kernels is not None and spec.groups is None:
        y, statistics = kernels.train(x, weight, bias, mask, channel_dim=channel_dim, **published(spec))
    elif kernels is not None and not torch.compiler.is_compiling() and kernels.grouped.usable(x, channel_dim):
        y, statistics = kernels.grouped.train_with_statistics(x, weight, bias, mask, channel_dim, spec)
    elif spec.coefficients:
        tensors = x.to(dtype), gamma, beta, mask
        if population is None:
            y, statistics = _coefficients.train(*tensors, channel_dim, spec)
        else:
            config = StatisticsConfig.parse(config)
            y, statistics = _coefficients.infer(*tensors, channel_dim, spec, population, config, recall)
    elif population is None and mask is None and spec.groups is None:
        w_B, w_F = formula.weights(1 / x.shape[0], spec.mix_eps, x.shape[channel_dim], spec.dim_scale)
        y, statistics = native.train(
            x.to(dtype), gamma, beta,
            channel_dim=channel_dim, per_position=spec.per_position, eps=spec.eps, w_B=w_B, w_F=w_F,
        )  # fmt: skip
    else:
        rows = x.to(dtype).movedim(channel_dim, -1)
        if mask is not None:
            rows = torch.where(mask[..., None], rows, 0)  # whatever hides there, NaN included, is gone
        if population is None:
            statistics = current(rows, mask, spec)
        else:
            config = StatisticsConfig.parse(config)
            own = current(rows, mask, spec, config)
            own = recall(own) if recall is not None and config.uses_batch else own
            statistics = formula.choose(config, own, population)
        y = formula.transform(rows, statistics, gamma, beta, spec=spec, xp=torch)
        if mask is not None:
            y = torch.where(mask[..., None], y, 0)
        y = y.movedim(-1, channel_dim)
        statistics = Statistics(*(s.detach() for s in statistics))

    y = y.to(x.dtype)
    y = y.contiguous() if x.is_contiguous() else y  # as it came: people call .view() on it
    return y, statistics


def published(spec: Spec) -> dict[str, Any]:
    """The options that the kernels of the published form take."""
    options = spec._asdict()
    del options["groups"]
    return options


def kernels_for(x: Tensor, spec: Spec, features: int, *others: Tensor | None) -> ModuleType | None:
    """The Triton kernels, where these tensors can use them."""
    if (spec.groups is not None and spec.per_position) or not (_on_gpu(x) and _has_triton()):
        return None
    from . import kernels

    return kernels if kernels.usable(x, features, *others) else None


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _has_triton() -> bool:
    global _triton
    if _triton is None:
        _triton = find_spec("triton") is not None
        if _triton:  # a compiler cannot import
            version: str = import_module("triton").__version__
            _triton = tuple(map(int, version.split(".")[:2])) >= (3, 4)
        if _triton:
            import_module("bln.kernels")
    return _triton


_triton: bool | None = None
# What torch.compiler.assume_constant_result does, which imports the whole compiler, and Triton, for it.
_has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check(x: Tensor, mask: Tensor | None, channel_dim: int, *, empty: bool = False, hidden: bool = False) -> int:
    """Refuse what cannot be normalized; returns the dimension of features counted from the front.

    ``empty`` allows inputs without samples, ``hidden`` masks that hide everything: other ranks may have more.
    """
    if not isinstance(x, Tensor):
        way = "; torch.fx wants a Tracer whose is_leaf_module is true of the layer" if isinstance(x, fx.Proxy) else ""
        raise TypeError(f"expected a torch.Tensor as input, got {type(x).__name__}{way}")
    shape = tuple(x.shape)
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise TypeError(
            f"expected a real floating point input of 16 bits or more, got {x.dtype}; convert it first, as in x.float()"
        )
    if not (len(shape) >= 2 and -len(shape) < channel_dim < len(shape) and channel_dim != 0):
        raise ValueError(
            f"expected an input (N, C), (N, C, *positions) or, with channel_dim=-1, (N, *positions, C); "
            f"got shape {shape} with channel_dim={channel_dim}. A single sample needs its own dimension: x[None]"
        )
    if x.numel() == 0 and not (empty and 0 not in shape[1:]):
        raise ValueError(f"cannot train on an empty input, got shape {shape}; skip empty batches")
    channel_dim %= len(shape)
    if mask is None:
        return channel_dim
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        way = "mask.bool()" if isinstance(mask, Tensor) else "torch.tensor(mask)"
        raise TypeError(f"expected a boolean mask, true at real entries, got {given}; try {way}")
    expected = shape[:channel_dim] + shape[channel_dim + 1 :]
    if tuple(mask.shape) != expected:
        raise ValueError(
            f"expected a mask of shape {expected}, (N, *positions) of the input {shape} with features at dimension "
            f"{channel_dim}; got {tuple(mask.shape)}"
        )
    if not hidden and mask.numel() and can_look(mask) and not mask.any():
        raise ValueError("the mask hides every entry; at least one must be real. Skip such a batch")
    return channel_dim


def _check_population(population: Statistics, x: Tensor, channel_dim: int, spec: Spec) -> None:
    """Refuse statistics that are not those of such inputs."""
    if not isinstance(population, Statistics) or not all(isinstance(value, Tensor) for value in population):
        kinds = ", ".join(type(v).__name__ for v in population) if isinstance(population, tuple) else ""
        raise TypeError(
            f"population must be a bln.functional.Statistics of five tensors, got {type(population).__name__}"
            + (f" of {kinds}" if kinds else "")
        )
    rows = tuple(x.movedim(channel_dim, -1).shape)
    for name, value in zip(Statistics._fields, population, strict=True):
        whole = rows if name.startswith("batch") else rows[:-1]
        if spec.coefficients:  # nothing has positions
            whole = (rows[0], *rows[-1:]) if name.startswith("batch") else (rows[0],)
        if spec.groups is not None and name.startswith("feature"):
            whole = (rows[0], spec.groups)
        fits = all(size in (1, there) for size, there in zip(value.shape[::-1], whole[::-1], strict=False))
        if value.dim() > len(whole) or not fits:
            raise ValueError(
                f"population.{name} has shape {tuple(value.shape)}, expected {tuple(whole[1:])}, or one that spreads "
                f"to it, for the input {tuple(x.shape)} with features at dimension {channel_dim}"
            )


def can_look(value: Tensor) -> bool:
    """Whether its values may be looked at: where that costs no synchronization and breaks no graph."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or type(value) is not Tensor
    return not traced and value.device.type == "cpu"


def count(shape: Sequence[int], mask: Tensor | None, per_position: bool) -> tuple[int | Tensor, int | Tensor]:
    """``m``, and the entries behind each batch statistic, of ``(N, *positions)``: under a mask, at each position."""
    if mask is None:
        return shape[0], shape[0] if per_position else math.prod(shape)
    if per_position:
        m = mask.sum(0)
        return m, m
    return present(mask).sum(), mask.sum()


def present(mask: Tensor) -> Tensor:
    """Find the samples that have any real entry."""
    return mask.reshape(mask.shape[0], math.prod(mask.shape[1:])).any(1)


def at_least_one(count: int | Tensor) -> int | Tensor:
    """Clamp a count to 1, for use as a divisor."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def current(rows: Tensor, mask: Tensor | None, spec: Spec, config: StatisticsConfig | None = None) -> Statistics:
    """Eqs 10-13, of features-last ``rows`` whose hidden entries are 0; only what ``config`` asks for."""
    m, entries = count(rows.shape[:-1], mask, spec.per_position)
    m, entries = (at_least_one(c) for c in (m, entries))
    batch_mean = batch_var = feature_mean = feature_var = None

    if config is None or config.uses_batch:
        over = (0,) if spec.per_position else tuple(range(rows.dim() - 1))
        divisor = entries[..., None] if isinstance(entries, Tensor) else entries
        batch_mean = rows.sum(over) / divisor
        centred = rows - batch_mean
        if mask is not None:
            centred = torch.where(mask[..., None], centred, 0)
        batch_var = centred.square().sum(over) / divisor

    if config is None or config.uses_features:
        feature_mean, feature_var = _features(rows, mask, spec)

    inverse_m = 1 / m.to(rows.dtype) if isinstance(m, Tensor) else rows.new_full((), 1 / m)
    return Statistics(batch_mean, batch_var, feature_mean, feature_var, inverse_m)


def _features(rows: Tensor, mask: Tensor | None, spec: Spec) -> tuple[Tensor, Tensor]:
    """Eqs 12, 13: over the features of each position, or over groups of features and all positions."""
    if spec.groups is not None:
        return _coefficients.feature_statistics(_coefficients.measure(rows, mask, rows.dim() - 1), spec.groups)
    # A row must give the same bits whatever stands beside it. Torch sums rows that lie in memory one by one, in the
    # same order each; only a lone row it splits over threads: so that one gets company.
    lone = rows.numel() == rows.shape[-1]
    rows = torch.cat([rows, rows]) if lone else rows.contiguous()
    mean = rows.mean(-1, keepdim=True)
    var = (rows - mean).square().mean(-1)
    mean = mean.squeeze(-1)
    return (mean[:1], var[:1]) if lone else (mean, var)
