"""The registry of normalizers, by name, for all experiments.

    NORMS["mine"] = lambda features, channel_dim: MyNorm(features)

The functions here take two more arguments. With ``ordinary`` a layer has its library's epsilon, and plain averages as
population statistics; without it, the values of the paper's authors. ``runs`` makes one layer for several runs, which
it keeps apart. Their features lie one run after the other in ``(N, runs * features, *positions)``, and so do their
parameters.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from .._masks import positions_of
from ..layer import BatchLayerNorm

Norm = Callable[..., nn.Module]
"""Makes a normalizer from the number of features and their dimension: 1, or -1 for sequences."""


def norm(name: str) -> Norm:
    """Return a normalizer of the registry, or one at ``package.module:function``."""
    if name in NORMS:
        return NORMS[name]
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            imported: Norm = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"no normalizer at {name!r}: {error}") from None
        return imported
    similar = difflib.get_close_matches(name, NORMS, n=1)
    hint = f"did you mean {similar[0]!r}? " if similar else ""
    raise ValueError(f"unknown normalizer {name!r}; {hint}known: {', '.join(NORMS)}, or package.module:function")


class EqualWeights(BatchLayerNorm):
    """BLN that weights batch and feature statistics by one half each, whatever the batch size."""

    def forward(self, x: Tensor, mask: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Normalize ``x``."""
        if not self.training:
            return super().forward(x, mask, residual)
        positions = positions_of(x, self.channel_dim, self.spec)
        half = self.population.statistics(positions, 2)._replace(inverse_m=x.new_full((), 0.5))
        y, statistics = functional.batch_layer_norm(
            x, self.weight, self.bias, channel_dim=self.channel_dim, per_position=self.per_position, mask=mask,
            eps=self.eps, mix_eps=self.mix_eps, dim_scale=self.dim_scale, population=half, config="FFFF",
            residual=residual, activation=self.activation, return_statistics=True,
        )  # fmt: skip
        self.population.update_from(x, mask, self.channel_dim, self.spec, statistics, self.momentum)
        return y


class _FeaturesMoved(nn.Module):
    """A layer that takes features in one dimension, applied to inputs that have them in another."""

    def __init__(self, inner: nn.Module, takes: int, channel_dim: int) -> None:
        super().__init__()
        self.inner, self.takes, self.channel_dim = inner, takes, channel_dim

    def forward(self, x: Tensor, *mask: Tensor) -> Tensor:
        y: Tensor = self.inner(x.movedim(self.channel_dim, self.takes), *mask)
        return y.movedim(self.takes, self.channel_dim)


class _RunsApart(nn.Module):
    """A layer with statistics of its own at each position, for several runs: they become a dimension of positions."""

    def __init__(self, inner: nn.Module, features: int, runs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.inner, self.runs = inner, runs
        self.weight = nn.Parameter(torch.ones(runs * features))
        self.bias = nn.Parameter(torch.zeros(runs * features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.reshape(len(x), self.runs, -1, *x.shape[2:]).transpose(1, 2)).transpose(1, 2).flatten(1, 2)
        shape = (-1, *[1] * (x.dim() - 2))
        y = y * self.weight.view(shape)
        return cast(Tensor, y if self.bias is None else y + self.bias.view(shape))


class BatchNorm(nn.Module):
    """BatchNorm for inputs of any rank; for a single value of each feature it returns ``beta``, as Keras does.

    With a momentum of ``None`` population statistics are plain averages since the last reset. ``nn.BatchNorm2d``
    computes the same, but reads a counter on the host, which CUDA graphs cannot do. A mask marks real entries.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, features: int, eps: float = 1e-3, momentum: float | None = 0.01) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))
        self.register_buffer("num_batches_tracked", torch.zeros(()), persistent=momentum is None)

    def reset_statistics(self) -> None:
        """Begin a new plain average."""
        self.num_batches_tracked.zero_()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize ``x``."""
        shape = (1, -1, *[1] * (x.dim() - 2))
        weight, bias = self.weight, self.bias
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, False, 0.0, self.eps)
        if x.numel() == x.shape[1]:
            self._update(x.detach().reshape(-1), torch.zeros_like(self.running_var))  # the variance of one value
            return (x - x) * weight.reshape(shape) + bias.reshape(shape)
        if mask is None:
            mean, var = (
                torch.zeros_like(self.running_mean),
                torch.ones_like(self.running_var),
            )  # F.batch_norm fills them in
            y = F.batch_norm(x, mean, var, weight, bias, True, 1.0, self.eps)
            self._update(mean, var)
            return y
        real, dims = mask.unsqueeze(1), [0, *range(2, x.dim())]
        count = mask.sum()
        mean = (x * real).sum(dims) / count
        centred = (x - mean.reshape(shape)) * real
        var = centred.square().sum(dims) / count
        self._update(mean.detach(), var.detach() * (count / (count - 1).clamp(min=1)))
        return centred * (weight * (var + self.eps).rsqrt()).reshape(shape) + bias.reshape(shape)

    @torch.no_grad()
    def _update(self, mean: Tensor, var: Tensor) -> None:
        self.num_batches_tracked += 1
        weight = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(var, weight)


class BatchRenorm(BatchNorm):
    """Batch Renormalization (Ioffe 2017): BatchNorm corrected towards its running statistics.

    The limits of the correction grow from BatchNorm's (r = 1, d = 0) to r = 3 and d = 5. In its paper they grow over
    more steps, since runs are longer there.
    """

    momentum: float
    steps: Tensor

    def __init__(self, features: int, *, warm: int = 500, ramp: int = 2000) -> None:
        super().__init__(features)
        self.warm, self.ramp = warm, ramp
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize ``x``; masks are refused."""
        if mask is not None:
            raise ValueError("batchrenorm got a mask, and has none; leave it out of the norms of a padded task")
        if not self.training:
            return super().forward(x)
        var, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
        shape = (1, -1, *[1] * (x.dim() - 2))
        with torch.no_grad():
            grown = ((self.steps - self.warm) / self.ramp).clamp(0, 1)
            r_max, d_max = 1 + 2 * grown, 5 * grown
            std, running_std = (var + self.eps).sqrt(), (self.running_var + self.eps).sqrt()
            r = torch.clamp(std / running_std, 1 / r_max, r_max)
            d = torch.clamp((mean - self.running_mean) / running_std, -d_max, d_max)
            entries = x.numel() // x.shape[1]
            unbiased = var * (entries / (entries - 1)) if entries > 1 else self.running_var
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
            self.steps += 1
        normalized = (x - mean.reshape(shape)) / (var + self.eps).sqrt().reshape(shape)
        corrected = normalized * r.reshape(shape) + d.reshape(shape)
        return corrected * self.weight.reshape(shape) + self.bias.reshape(shape)


class InstanceNorm(nn.GroupNorm):
    """InstanceNorm; dense inputs have no positions to average over, and are only scaled and shifted."""

    def __init__(self, features: int, eps: float) -> None:
        super().__init__(features, features, eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``."""
        return x * self.weight + self.bias if x.dim() == 2 else super().forward(x)


GROUPS = {"bln-grouped": 8, "bln-g1": 1, "bln-g4": 4, "bln-g16": 16, "bln-gC": None}
"""The number of groups of BLN's grouped form, by name; ``None`` is a group for each feature. Eight is recommended."""


def _bln(
    features: int,
    channel_dim: int,
    *,
    runs: int = 1,
    ordinary: bool = False,
    kind: type[BatchLayerNorm] = BatchLayerNorm,
    **options: Any,
) -> nn.Module:
    if not ordinary:
        options |= {"eps": 1e-3, "mix_eps": 1e-4}
    if runs == 1:
        return kind(features, channel_dim=channel_dim, momentum=None, **options)
    return _RunsApart(kind(features, affine=False, momentum=None, **options), features, runs)


def _pooled(features: int, channel_dim: int, *, runs: int = 1, **options: Any) -> nn.Module:
    if runs != 1:
        raise ValueError("bln-pooled would pool batch statistics over runs; train them one at a time")
    return _bln(features, channel_dim, per_position=False, **options)


def _grouped(name: str, features: int, channel_dim: int, *, runs: int = 1, ordinary: bool = False) -> nn.Module:
    groups = math.gcd(GROUPS[name] or features, features)
    eps = 1e-4 if ordinary else 1e-3
    return BatchLayerNorm(runs * features, groups=runs * groups, channel_dim=channel_dim, momentum=None, eps=eps)


def _channels_first(make: Callable[[int, int, bool], nn.Module]) -> Norm:
    """Return a normalizer from a function of ``(runs * features, features, ordinary)`` for channels-first layers."""

    def place(features: int, channel_dim: int, *, runs: int = 1, ordinary: bool = False) -> nn.Module:
        layer = make(runs * features, features, ordinary)
        return layer if channel_dim == 1 else _FeaturesMoved(layer, 1, channel_dim)

    return place


def _channels_last(make: Callable[..., nn.Module]) -> Norm:
    """Return a normalizer from a channels-last layer that sees one position at a time, and so needs no mask."""

    def place(features: int, channel_dim: int, *, runs: int = 1, ordinary: bool = False) -> nn.Module:
        layer = make(features, elementwise_affine=runs == 1, **({} if ordinary else {"eps": 1e-3}))
        placed = layer if channel_dim == -1 else _FeaturesMoved(layer, -1, channel_dim)
        return placed if runs == 1 else _RunsApart(placed, features, runs, bias=make is nn.LayerNorm)

    return place


def _eps(ordinary: bool) -> float:
    return 1e-5 if ordinary else 1e-3


NORMS: dict[str, Norm] = {
    "bln": _bln,
    "bn": _channels_first(lambda whole, one, ordinary: BatchNorm(whole, _eps(ordinary), None if ordinary else 0.01)),
    "ln": _channels_last(nn.LayerNorm),
    "gn": _channels_first(
        lambda whole, one, ordinary: nn.GroupNorm(whole // one * math.gcd(8, one), whole, _eps(ordinary))
    ),
    "in": _channels_first(lambda whole, one, ordinary: InstanceNorm(whole, _eps(ordinary))),
    "rms": _channels_last(nn.RMSNorm),
    "batchrenorm": _channels_first(lambda whole, one, ordinary: BatchRenorm(whole)),
    "none": lambda features, channel_dim, **options: nn.Identity(),
    **{name: partial(_grouped, name) for name in GROUPS},
    "bln-no-scale": partial(_bln, dim_scale=False),
    "bln-half": partial(_bln, kind=EqualWeights),
    "bln-pooled": _pooled,
}


def reset_statistics(net: nn.Module) -> None:
    """Restart the population statistics of BLN, and of BatchNorm where they are plain averages."""
    for module in net.modules():
        if isinstance(module, BatchLayerNorm) or (isinstance(module, BatchNorm) and module.momentum is None):
            module.reset_statistics()
