"""The grouped layer with pooled batch statistics in torch: ``y = a x + b``, one pair for each sample and feature.

In plain operators for compilers and function transforms, and in few passes over memory for an eager CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import formula
from ._autograd import differentiate
from ._spec import Spec
from .config import StatisticsConfig
from .formula import Moments, Statistics

_CHUNK = 2**18
"""Values that are handled at a time: what one pass over them leaves in the cache, the next finds there."""


def train(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec
) -> tuple[Tensor, Statistics]:
    """Normalize ``x``, float32 or float64, by its own statistics, and return them, detached."""
    if mask is None and _plain_cpu(x):
        y, *statistics = _Train.apply(x, gamma, beta, channel_dim, spec)  # type: ignore[no-untyped-call]
        return y, Statistics(*statistics)
    return _train(x, gamma, beta, mask, channel_dim, spec)


def infer(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    channel_dim: int,
    spec: Spec,
    population: Statistics,
    config: StatisticsConfig,
    recall: Callable[[Statistics], Statistics] | None = None,
) -> tuple[Tensor, Statistics]:
    """Normalize ``x``, float32 or float64, by the statistics of a configuration, and return them, detached."""
    x = hide(x, mask, channel_dim)
    found = population
    if config.uses_batch or config.uses_features:
        own = statistics(measure(x, mask, channel_dim), spec)
        own = recall(own) if recall is not None and config.uses_batch else own
        found = formula.choose(config, own, population)
    y = apply(x, found, gamma, beta, mask, channel_dim, spec)
    return y, Statistics(*(value.detach() for value in found))


def _train(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec
) -> tuple[Tensor, Statistics]:
    x = hide(x, mask, channel_dim)
    s = statistics(measure(x, mask, channel_dim), spec)
    y = apply(x, s, gamma, beta, mask, channel_dim, spec)
    return y, Statistics(*(value.detach() for value in s))


def statistics(moments: Moments, spec: Spec) -> Statistics:
    """Eqs 10-13 of the grouped form, of a mini-batch with these moments."""
    assert spec.groups is not None
    mean, weight = moments.mean, moments.weight
    if weight is None:
        weight, inverse_m = torch.ones_like(mean[..., :1]), mean.new_full((), 1 / mean.shape[0])
    else:
        inverse_m = 1 / (weight > 0).sum(0).squeeze(-1).clamp(min=1).to(mean.dtype)
    weighted = Moments(mean, moments.var, weight)
    return Statistics(*formula.batch_statistics(torch, weighted), *feature_statistics(moments, spec.groups), inverse_m)


def feature_statistics(moments: Moments, groups: int) -> tuple[Tensor, Tensor]:
    """Eqs 12, 13 over groups; a sample's bits do not depend on the others, though torch splits a lone row otherwise."""
    lone = _plain_cpu(moments.mean) and moments.mean.shape[0] == 1
    if lone:
        moments = Moments(torch.cat([moments.mean] * 2), torch.cat([moments.var] * 2), moments.weight)
    mean, var = formula.feature_statistics(torch, moments, groups)
    return (mean[:1], var[:1]) if lone else (mean, var)


def apply(
    x: Tensor,
    s: Statistics,
    gamma: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    channel_dim: int,
    spec: Spec,
) -> Tensor:
    """Eqs 14-17, or 22-25, of ``x``; hidden entries come out 0."""
    a, b = (_beside(v, x, channel_dim) for v in formula.coefficients(torch, s, gamma, beta, x.shape[channel_dim], spec))
    y: Tensor = a * x + b
    return hide(y, mask, channel_dim)


def hide(x: Tensor, mask: Tensor | None, channel_dim: int) -> Tensor:
    """0 at hidden entries: whatever stands there, NaN included, is gone."""
    return x if mask is None else torch.where(mask.unsqueeze(channel_dim), x, 0)


def _beside(value: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    """``(N, C)`` or ``(C,)`` in a shape that meets ``x``."""
    return value.reshape(
        *value.shape[:-1], *[1] * (channel_dim - 1), value.shape[-1], *[1] * (x.dim() - 1 - channel_dim)
    )


def measure(x: Tensor, mask: Tensor | None, channel_dim: int) -> Moments:
    """Mean and variance over the positions of each sample and feature, ``(N, C)``; hidden entries of ``x`` are 0."""
    over = tuple(at for at in range(1, x.dim()) if at != channel_dim)
    if mask is not None:
        real = mask.unsqueeze(channel_dim)
        count = (real.sum(over) if over else real).to(x.dtype)
        divisor = count.clamp(min=1)
        mean = (x.sum(over) if over else x) / divisor
        centred = torch.where(real, x - _beside(mean, x, channel_dim), 0).square()
        return Moments(mean, (centred.sum(over) if over else centred) / divisor, count)
    if not over:
        return Moments(x, torch.zeros_like(x), None)
    if _plain_cpu(x) and not (x.requires_grad and torch.is_grad_enabled()):
        # A sample must give the same bits whatever stands beside it, and torch may sum a lone one in another order.
        lone = x.shape[0] == 1
        mean, var = _measure(_Rows(torch.cat([x, x]) if lone else x, channel_dim))
        return Moments(mean[:1], var[:1], None) if lone else Moments(mean, var, None)
    mean = x.mean(over)
    return Moments(mean, (x - _beside(mean, x, channel_dim)).square().mean(over), None)


# ---- on a CPU, without a compiler


def _plain_cpu(x: Tensor) -> bool:
    """Whether ``x`` is an ordinary tensor in main memory, and nothing but autograd looks on."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, torch.nn.Parameter)
        and x.device.type == "cpu"
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
    )


class _Rows:
    """A tensor seen as ``(N, C, P)`` or ``(N, P, C)``, whichever lies so in memory, else as a copy."""

    def __init__(self, x: Tensor, channel_dim: int) -> None:
        n, c = x.shape[0], x.shape[channel_dim]
        last = x.movedim(channel_dim, -1)
        self.channels_first = not last.is_contiguous()
        self.shape = (n, c, -1) if self.channels_first else (n, -1, c)
        self.over = 2 if self.channels_first else 1
        self.channel_dim = channel_dim
        self.x = self.view(x)

    def view(self, like: Tensor) -> Tensor:
        """Another tensor of the shape of ``x``, seen and lying as it does."""
        moved = like.movedim(self.channel_dim, 1 if self.channels_first else -1)
        return moved.contiguous().view(self.shape)

    def beside(self, value: Tensor) -> Tensor:
        """``(N, C)`` in a shape that meets it."""
        return value.unsqueeze(self.over)

    def restore(self, y: Tensor, like: Tensor) -> Tensor:
        """Return rows in the shape of ``like``."""
        shape = like.movedim(self.channel_dim, 1 if self.channels_first else -1).shape
        return y.view(shape).movedim(1 if self.channels_first else -1, self.channel_dim)

    @property
    def large(self) -> bool:
        """Whether a sample is so large that it pays to call torch's batch norm for each."""
        return self.x[0].numel() >= _CHUNK // 4

    def chunks(self) -> Iterator[slice]:
        """Ranges of samples that fit in the cache."""
        step = max(1, _CHUNK // max(1, self.x[0].numel()))
        return (slice(start, start + step) for start in range(0, len(self.x), step))

    def scratch(self) -> Iterator[tuple[slice, Tensor]]:
        """Ranges of samples, with memory of their size that is the same each time."""
        memory = None
        for at in self.chunks():
            memory = torch.empty_like(self.x[at]) if memory is None else memory
            yield at, memory[: len(self.x[at])]


def _measure(rows: _Rows) -> tuple[Tensor, Tensor]:
    """Mean and variance over positions, ``(N, C)``."""
    x = rows.x
    if rows.channels_first:  # batch norm's statistics, of as many features as there are rows
        mean, var = torch.batch_norm_update_stats(x.view(1, -1, x.shape[2]), None, None, 0.0)
        return mean.view(x.shape[:2]), var.view(x.shape[:2])
    if rows.large:
        each = [torch.batch_norm_update_stats(sample, None, None, 0.0) for sample in x]
        return torch.stack([mean for mean, _ in each]), torch.stack([var for _, var in each])
    mean = x.mean(1)
    var = torch.empty_like(mean)
    for at, centred in rows.scratch():
        torch.sub(x[at], mean[at, None], out=centred)
        torch.mean(centred.square_(), 1, out=var[at])
    return mean, var


class _Train(torch.autograd.Function):
    """Keeps the input and the statistics for backward; a second derivative goes through plain operators."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, channel_dim: int, spec: Spec
    ) -> tuple[Tensor, ...]:
        rows = _Rows(x, channel_dim)
        mean, var = _measure(rows) if x.dim() > 2 else (x, torch.zeros_like(x))
        s = statistics(Moments(mean, var, None), spec)
        a, b = formula.coefficients(torch, s, gamma, beta, x.shape[channel_dim], spec)
        y = torch.empty_like(x)  # no view of anything: what follows may change it in place
        seen = _affine(rows, rows.x, a, b, out=rows.view(y))
        if seen.data_ptr() != y.data_ptr():
            y.copy_(rows.restore(seen, x))
        ctx.rest = channel_dim, spec
        ctx.save_for_backward(x, gamma, beta, mean, a, *s)
        ctx.mark_non_differentiable(*s)
        return y, *s

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, gamma, beta, mean, a, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiate(_plain, (x, gamma, beta), ctx, dy), None, None
        channel_dim, spec = ctx.rest
        rows = _Rows(x, channel_dim)
        dy_rows = rows.view(dy)
        sums, dots = _sums(rows, dy_rows, mean)
        positions = math.prod(x.shape[1:]) // x.shape[channel_dim]
        moments = Moments(mean, None, torch.full_like(mean[:, :1], positions))
        scale = x.new_ones(()) if gamma is None else gamma
        c1, c0, d_gamma, d_beta = formula.gradients(torch, Statistics(*saved), moments, sums, dots, scale, spec)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(rows.x)
            for at in rows.chunks():
                _affine(rows, dy_rows[at], a[at], c0[at], out=dx[at]).addcmul_(rows.x[at], rows.beside(c1[at]))
            dx = rows.restore(dx, x)
        return dx, None if gamma is None else d_gamma, None if beta is None else d_beta, None, None


def _plain(x: Tensor, gamma: Tensor | None, beta: Tensor | None, channel_dim: int, spec: Spec) -> Tensor:
    return _train(x, gamma, beta, None, channel_dim, spec)[0]


def _affine(rows: _Rows, x: Tensor, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``a x + b`` of some samples."""
    out = torch.empty_like(x) if out is None else out
    if not rows.channels_first:
        return torch.addcmul(b.unsqueeze(1), x, a.unsqueeze(1), out=out)
    # Batch norm with mean 0 and deviation 1: where a row has one pair, twice as fast as addcmul.
    none, a, b = x.new_empty(0), a.reshape(-1), b.reshape(-1)
    shape = 1, len(a), -1
    zero, one = torch.zeros_like(a), torch.ones_like(a)
    torch.native_batch_norm(x.view(shape), a, b, zero, one, False, 0.0, 0.0, out=(out.view(shape), none, none.clone()))
    return out


def _sums(rows: _Rows, dy: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over positions of ``dy`` and of ``dy * (x - mean)``, ``(N, C)``."""
    if rows.channels_first:  # batch norm's derivative has both, in one pass
        shape, flat = (1, mean.numel(), -1), mean.reshape(-1)
        one = torch.ones_like(flat)
        _, dots, sums = torch.ops.aten.native_batch_norm_backward.default(
            dy.view(shape), rows.x.view(shape), one, flat, one, flat, one, False, 0.0, [False, True, True]
        )
        return sums.view(mean.shape), dots.view(mean.shape)
    if rows.large:
        one = torch.ones_like(mean[0])
        both = [
            torch.ops.aten.native_batch_norm_backward.default(
                g, v, one, u, one, u, one, False, 0.0, [False, True, True]
            )
            for g, v, u in zip(dy, rows.x, mean, strict=True)
        ]
        return torch.stack([sums for _, _, sums in both]), torch.stack([dots for _, dots, _ in both])
    sums, dots = dy.sum(1), torch.empty_like(mean)
    for at, product in rows.scratch():
        torch.sub(rows.x[at], mean[at, None], out=product)
        torch.sum(product.mul_(dy[at]), 1, out=dots[at])
    return sums, dots
