"""The grouped layer with pooled batch statistics in torch: ``y = a x + b``, one pair for each sample and feature.

In plain operators for compilers and function transforms, and in few passes over memory for an eager CPU.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import formula
from .._autograd import differentiate
from .._masks import hide, is_host_readable
from .._spec import Spec
from ..formula import Moments, Statistics

_CHUNK = 2**19
"""Values that are handled at a time: what one pass over them leaves in the cache, the next finds there."""
_kept = threading.local()


def statistics(moments: Moments, spec: Spec) -> Statistics:
    """Eqs 10-13 of the grouped form, of a mini-batch with these moments."""
    assert spec.groups is not None
    if moments.weight is None:
        inverse_m = moments.mean.new_full((), 1 / moments.mean.shape[0])
    else:
        inverse_m = 1 / (moments.weight > 0).sum(0).squeeze(-1).clamp(min=1).to(moments.mean.dtype)
    return Statistics(*formula.batch_statistics(torch, moments), *feature_statistics(moments, spec.groups), inverse_m)


def feature_statistics(moments: Moments, groups: int) -> tuple[Tensor, Tensor]:
    """Eqs 12, 13 over groups; a sample's bits do not depend on the others, though torch splits a lone row otherwise."""
    lone = is_plain_cpu(moments.mean) and moments.mean.shape[0] == 1
    if lone:
        moments = Moments(torch.cat([moments.mean] * 2), torch.cat([moments.var] * 2), moments.weight)
    mean, var = formula.feature_statistics(torch, moments, groups)
    return (mean[:1], var[:1]) if lone else (mean, var)


def apply(
    x: Tensor, s: Statistics, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int,
    spec: Spec,
) -> Tensor:  # fmt: skip
    """Eqs 14-17, or 22-25, of ``x``; hidden entries come out 0."""
    pair = formula.coefficients(torch, s, gamma, beta, x.shape[channel_dim], spec)
    a, b = (broadcast(value, x, channel_dim) for value in pair)
    return hide(a * x + b, mask, channel_dim)


def broadcast(value: Tensor, x: Tensor, channel_dim: int) -> Tensor:
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
        centred = torch.where(real, x - broadcast(mean, x, channel_dim), 0).square()
        return Moments(mean, (centred.sum(over) if over else centred) / divisor, count)
    if not over:
        return Moments(x, torch.zeros_like(x), None)
    if is_plain_cpu(x) and not (x.requires_grad and torch.is_grad_enabled()):
        # A sample must give the same bits in any mini-batch, and torch may sum a lone one in another order.
        lone = x.shape[0] == 1
        mean, var = _measure(_Rows(torch.cat([x, x]) if lone else x, channel_dim))
        return Moments(mean[:1], var[:1], None) if lone else Moments(mean, var, None)
    mean = x.mean(over)
    return Moments(mean, (x - broadcast(mean, x, channel_dim)).square().mean(over), None)


# ---- on a CPU, without a compiler


def is_plain_cpu(x: Tensor) -> bool:
    """Whether ``x`` is an ordinary tensor in main memory, and nothing but autograd looks on."""
    return is_host_readable(x) and torch.autograd.forward_ad._current_level < 0


class _Rows:
    """A tensor seen as ``(N, C, P)`` or ``(N, P, C)``, whichever lies so in memory, else as a copy."""

    def __init__(self, x: Tensor, channel_dim: int) -> None:
        self.pairs = n, c = x.shape[0], x.shape[channel_dim]
        self.channel_dim = channel_dim
        moved = x.movedim(channel_dim, -1)
        self.channels_first = not moved.is_contiguous()
        self.shape, self.over, self.at = (n, -1, c), 1, -1
        if self.channels_first:
            self.shape, self.over, self.at = (n, c, -1), 2, 1
            moved = x.movedim(channel_dim, 1)
        self.moved = moved.shape
        self.x = moved.contiguous().view(self.shape)

    def view(self, like: Tensor) -> Tensor:
        """Another tensor of the shape of ``x``, seen and lying as it does."""
        return like.movedim(self.channel_dim, self.at).contiguous().view(self.shape)

    def restore(self, y: Tensor) -> Tensor:
        """Return rows in the shape of the input."""
        return y.view(self.moved).movedim(self.at, self.channel_dim)

    def scratch(self) -> Iterator[tuple[slice, Tensor]]:
        """Ranges of samples that fit in the cache, with memory of their shape.

        A thread keeps its memory: fresh pages from the system would take longer than what is computed in them.
        """
        known: dict[torch.dtype, Tensor] = _kept.__dict__.setdefault("memory", {})
        step = max(1, _CHUNK // max(1, self.x[0].numel()))
        for start in range(0, len(self.x), step):
            at = slice(start, start + step)
            part = self.x[at]
            memory = known.get(part.dtype)
            if memory is None or memory.numel() < part.numel():
                with torch.inference_mode(False):
                    memory = torch.empty(part.numel(), dtype=part.dtype)
                if part.numel() <= _CHUNK:
                    known[part.dtype] = memory
            yield at, memory[: part.numel()].view(part.shape)


def _measure(rows: _Rows) -> tuple[Tensor, Tensor]:
    """Mean and variance over positions, ``(N, C)``."""
    mean, var = torch.empty((2, *rows.pairs), dtype=rows.x.dtype)
    for at, centred in rows.scratch():
        part = rows.x[at]
        torch.mean(part, rows.over, out=mean[at])
        torch.sub(part, mean[at].unsqueeze(rows.over), out=centred)
        torch.mean(centred.square_(), rows.over, out=var[at])
    return mean, var


class Train(torch.autograd.Function):
    """Normalize ``x``, for which ``is_plain_cpu``, by its own statistics; return them too.

    It keeps the input and the statistics for backward. A second derivative goes through plain operators.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, channel_dim: int, spec: Spec
    ) -> tuple[Tensor, ...]:
        rows = _Rows(x, channel_dim)
        mean, var = _measure(rows) if x.dim() > 2 else (x, torch.zeros_like(x))
        s = statistics(Moments(mean, var, None), spec)
        by_number = s._replace(inverse_m=1 / x.shape[0])  # which takes no operators
        a, b = formula.coefficients(torch, by_number, gamma, beta, x.shape[channel_dim], spec)
        y = torch.empty_like(x)  # no view of anything: what follows may change it in place
        seen = _affine(rows, rows.x, a, b, out=rows.view(y))
        if seen.data_ptr() != y.data_ptr():
            y.copy_(rows.restore(seen))
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
        s = Statistics(*saved)._replace(inverse_m=1 / x.shape[0])
        moments = Moments(mean, None, math.prod(x.shape[1:]) // x.shape[channel_dim])
        c1, c0, d_gamma, d_beta = formula.gradients(torch, s, moments, sums, dots, gamma, spec)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(rows.x)
            for at, product in rows.scratch():
                _affine(rows, rows.x[at], c1[at], c0[at], out=dx[at])
                factor = a[at].unsqueeze(rows.over)
                if rows.channels_first:  # where a row has one factor, addcmul takes three times as long
                    dx[at].add_(torch.mul(dy_rows[at], factor, out=product))
                else:
                    dx[at].addcmul_(dy_rows[at], factor)
            dx = rows.restore(dx)
        return dx, None if gamma is None else d_gamma, None if beta is None else d_beta, None, None


def _plain(x: Tensor, gamma: Tensor | None, beta: Tensor | None, channel_dim: int, spec: Spec) -> Tensor:
    s = statistics(measure(x, None, channel_dim), spec)
    return apply(x, s, gamma, beta, None, channel_dim, spec)


def _affine(rows: _Rows, x: Tensor, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """``a x + b`` of some samples."""
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
    sums, dots = torch.empty((2, *rows.pairs), dtype=dy.dtype)
    for at, product in rows.scratch():
        torch.sum(dy[at], 1, out=sums[at])
        torch.sub(rows.x[at], mean[at, None], out=product)
        torch.sum(product.mul_(dy[at]), 1, out=dots[at])
    return sums, dots
