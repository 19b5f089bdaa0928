"""Normalizers by name. To add one: ``NORMS["mine"] = lambda features, channel_dim: MyNorm(features)``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from ..layer import BatchLayerNorm

Norm = Callable[[int, int], nn.Module]
"""A normalizer of so many features at that dimension: 1, or -1 for sequences."""


def norm(name: str) -> Norm:
    """The normalizer of that name, or at that place: ``package.module:function``."""
    if name in NORMS:
        return NORMS[name]
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found: Norm = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"no normalizer at {name!r}: {error}") from None
        return found
    near = difflib.get_close_matches(name, NORMS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown normalizer {name!r}; {hint}known: {', '.join(NORMS)}, or package.module:function")


class EqualWeights(BatchLayerNorm):
    """BLN whose weights do not know the batch size: one half each."""

    def forward(self, x: Tensor, mask: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Normalize ``x``."""
        if not self.training:
            return super().forward(x, mask, residual)
        shape = list(x.shape)
        shape.pop(self.channel_dim)
        positions = tuple(shape[1:]) if self.per_position else ()
        m, entries = functional.count(shape, mask, self.per_position)
        half = self.population.statistics(positions, 2)._replace(inverse_m=x.new_full((), 0.5))
        y, statistics = functional.batch_layer_norm(
            x, self.weight, self.bias, channel_dim=self.channel_dim, per_position=self.per_position, mask=mask,
            eps=self.eps, mix_eps=self.mix_eps, dim_scale=self.dim_scale, population=half, config="FFFF",
            residual=residual, activation=self.activation, return_statistics=True,
        )  # fmt: skip
        self.population.update(statistics, m, entries, mask, positions, self.momentum)
        return y


class _FeaturesLast(nn.Module):
    """Something that wants features last, wherever they stand."""

    def __init__(self, inner: nn.Module, channel_dim: int) -> None:
        super().__init__()
        self.inner = inner
        self.channel_dim = channel_dim

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.movedim(self.channel_dim, -1))
        return y.movedim(-1, self.channel_dim)


class _FeaturesSecond(nn.Module):
    """Something that wants features second, wherever they stand."""

    def __init__(self, inner: nn.Module, channel_dim: int) -> None:
        super().__init__()
        self.inner = inner
        self.channel_dim = channel_dim

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.movedim(self.channel_dim, 1))
        return y.movedim(1, self.channel_dim)


class BatchNorm(nn.Module):
    """BatchNorm of any rank which, given one value for each feature, does what Keras does: the output is ``beta``."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, features: int, eps: float = 1e-3, momentum: float = 0.01) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``."""
        if self.training and x.numel() == x.shape[1]:
            with torch.no_grad():
                self.running_mean.lerp_(x.reshape(-1), self.momentum)
                self.running_var.mul_(1 - self.momentum)  # the variance of one value
            shape = (1, -1, *[1] * (x.dim() - 2))
            return (x - x) * self.weight.reshape(shape) + self.bias.reshape(shape)
        running = self.running_mean, self.running_var
        return F.batch_norm(x, *running, self.weight, self.bias, self.training, self.momentum, self.eps)


class BatchRenorm(BatchNorm):
    """Batch Renormalization (Ioffe 2017): BatchNorm corrected towards its running statistics.

    The correction's limits grow from BatchNorm's (r = 1, d = 0) to r = 3 and d = 5 while the statistics settle, as in
    the paper, over fewer steps since these runs are shorter.
    """

    steps: Tensor

    def __init__(self, features: int, *, warm: int = 500, ramp: int = 2000) -> None:
        super().__init__(features)
        self.warm, self.ramp = warm, ramp
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``."""
        if not self.training:
            return super().forward(x)
        over = [0, *range(2, x.dim())]
        var, mean = torch.var_mean(x, over, correction=0)
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


class InstanceNorm(nn.Module):
    """InstanceNorm; a dense layer has no positions to average over, and is only scaled and shifted."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``."""
        if x.dim() == 2:
            return x * self.weight + self.bias
        return F.instance_norm(x, weight=self.weight, bias=self.bias, eps=1e-3)


def _bln(
    features: int,
    channel_dim: int,
    *,
    kind: type[BatchLayerNorm] = BatchLayerNorm,
    dim_scale: bool = True,
) -> nn.Module:
    """BLN with the authors' epsilons; population statistics are averaged over an epoch."""
    return kind(
        features, channel_dim=channel_dim, dim_scale=dim_scale,
        eps=1e-3, mix_eps=1e-4, momentum=None,
    )  # fmt: skip


GROUPS = {"bln-grouped": 8, "bln-g1": 1, "bln-g4": 4, "bln-g16": 16, "bln-gC": None}
"""Groups of features of BLN's grouped form, by name; ``None`` is a group for each feature. Eight are recommended."""


def groups_of(name: str, features: int) -> int:
    """The number of groups of so many features."""
    groups = GROUPS[name]
    return features if groups is None else math.gcd(groups, features)


def _grouped(name: str, features: int, channel_dim: int) -> nn.Module:
    return BatchLayerNorm(features, groups=groups_of(name, features), channel_dim=channel_dim, eps=1e-3, momentum=None)


def _second(make: Callable[[int], nn.Module]) -> Norm:
    return lambda features, channel_dim: (
        make(features) if channel_dim == 1 else _FeaturesSecond(make(features), channel_dim)
    )


def _last(make: Callable[[int], nn.Module]) -> Norm:
    return lambda features, channel_dim: (
        make(features) if channel_dim == -1 else _FeaturesLast(make(features), channel_dim)
    )


NORMS: dict[str, Norm] = {
    "bln": _bln,
    "bn": _second(BatchNorm),
    "ln": _last(partial(nn.LayerNorm, eps=1e-3)),
    "gn": _second(lambda features: nn.GroupNorm(math.gcd(8, features), features, eps=1e-3)),
    "in": _second(InstanceNorm),
    "rms": _last(partial(nn.RMSNorm, eps=1e-3)),
    "batchrenorm": _second(BatchRenorm),
    "none": lambda features, channel_dim: nn.Identity(),
    **{name: partial(_grouped, name) for name in GROUPS},
    "bln-no-scale": partial(_bln, dim_scale=False),
    "bln-half": partial(_bln, kind=EqualWeights),
}
