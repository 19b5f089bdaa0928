"""The grouped layer with pooled batch statistics on an eager CPU, in few passes over memory: ``y = a x + b``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import formula
from .._autograd import differentiate
from .._masks import is_host_readable
from .._spec import Spec
from ..formula import Moments, Statistics

_CHUNK = 2**19
"""Values that are handled at a time: few enough that the next pass finds them in the cache."""
_thread = threading.local()


def measure(rows: Tensor, real: Tensor | None) -> Moments:
    """Return ``formula.moments``, on a CPU in few passes over memory; a sample has the same bits in any mini-batch."""
    needs_graph = rows.requires_grad and torch.is_grad_enabled()
    if real is None and rows.dim() > 2 and is_plain_cpu(rows) and rows.numel() > 0 and not needs_graph:
        view, n = _Rows(rows, rows.dim() - 1), len(rows)
        if n == 1:  # torch may sum it in another order than several
            view.x = torch.cat([view.x, view.x])
        mean, var = _measure(view)
        return Moments(mean[:n], var[:n], None)
    return formula.moments(torch, rows, real)


def broadcast(value: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    """Reshape ``(N, C)`` or ``(C,)`` to broadcast against ``x``."""
    return value.reshape(
        *value.shape[:-1], *[1] * (channel_dim - 1), value.shape[-1], *[1] * (x.dim() - 1 - channel_dim)
    )


def is_plain_cpu(x: Tensor) -> bool:
    """Whether ``x`` is an ordinary tensor on a CPU, in no transform but reverse-mode autograd."""
    return is_host_readable(x) and torch.autograd.forward_ad._current_level < 0


class _Rows:
    """A tensor viewed as ``(N, C, P)`` or ``(N, P, C)``, as its memory allows; else a copy of this shape."""

    def __init__(self, x: Tensor, channel_dim: int) -> None:
        n, self.features, self.channel_dim = x.shape[0], x.shape[channel_dim], channel_dim
        moved = x.movedim(channel_dim, -1)
        self.channels_first = not moved.is_contiguous()
        self.shape, self.position_dim, self.feature_dim = (n, -1, self.features), 1, -1
        if self.channels_first:
            self.shape, self.position_dim, self.feature_dim = (n, self.features, -1), 2, 1
            moved = x.movedim(channel_dim, 1)
        self.moved = moved.shape
        self.x = moved.contiguous().view(self.shape)

    def view(self, like: Tensor) -> Tensor:
        """Return another tensor of the shape of the input with the view and the memory layout of ``x``."""
        return like.movedim(self.channel_dim, self.feature_dim).contiguous().view(self.shape)

    def restore(self, y: Tensor) -> Tensor:
        """Return rows in the shape of the input."""
        return y.view(self.moved).movedim(self.feature_dim, self.channel_dim)

    def scratch(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield ranges of samples that fit in the cache, each with a scratch tensor of its shape.

        A thread reuses its scratch: fresh pages from the system would take longer than the computation in them.
        """
        scratch: dict[torch.dtype, Tensor] = _thread.__dict__.setdefault("scratch", {})
        step = max(1, _CHUNK // max(1, self.x[0].numel()))
        for start in range(0, len(self.x), step):
            at = slice(start, start + step)
            part = self.x[at]
            memory = scratch.get(part.dtype)
            if memory is None or memory.numel() < part.numel():
                with torch.inference_mode(False):
                    memory = torch.empty(part.numel(), dtype=part.dtype)
                if part.numel() <= _CHUNK:
                    scratch[part.dtype] = memory
            yield at, memory[: part.numel()].view(part.shape)


def _measure(rows: _Rows) -> tuple[Tensor, Tensor]:
    """Return mean and variance over positions, ``(N, C)``."""
    mean, var = torch.empty((2, len(rows.x), rows.features), dtype=rows.x.dtype)
    for at, centred in rows.scratch():
        part = rows.x[at]
        torch.mean(part, rows.position_dim, out=mean[at])
        torch.sub(part, mean[at].unsqueeze(rows.position_dim), out=centred)
        torch.mean(centred.square_(), rows.position_dim, out=var[at])
    return mean, var


class Train(torch.autograd.Function):
    """Normalize ``x``, for which ``is_plain_cpu`` holds, by its own statistics; return all of them but ``1/m``, too.

    The input and the statistics are saved for backward. A second derivative goes through plain operators.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, channel_dim: int, spec: Spec
    ) -> tuple[Tensor, ...]:
        rows = _Rows(x, channel_dim)
        mean, var = _measure(rows) if x.dim() > 2 else (x, torch.zeros_like(x))
        s = _statistics(Moments(mean, var, None), spec)
        a, b = formula.coefficients(torch, s, gamma, beta, x.shape[channel_dim], spec)
        y = torch.empty_like(x)  # not a view: later layers may change it in place
        view = _affine(rows, rows.x, a, b, out=rows.view(y))
        if view.data_ptr() != y.data_ptr():
            y.copy_(rows.restore(view))
        ctx.rest = channel_dim, spec
        ctx.save_for_backward(x, gamma, beta, mean, a, *s[:4])
        ctx.mark_non_differentiable(*s[:4])
        return y, *s[:4]

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, gamma, beta, mean, a, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiate(_plain, (x, gamma, beta), ctx, dy), None, None
        channel_dim, spec = ctx.rest
        rows = _Rows(x, channel_dim)
        dy_rows = rows.view(dy)
        sums, dots = _sums(rows, dy_rows, mean)
        s = Statistics(*[*saved, 1 / len(x)])
        c1, c0, d_gamma, d_beta = _gradients(s, mean, rows.x[0].numel() // rows.features, sums, dots, gamma, spec)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(rows.x)
            for at, product in rows.scratch():
                _affine(rows, rows.x[at], c1[at], c0[at], out=dx[at])
                factor = a[at].unsqueeze(rows.position_dim)
                if rows.channels_first:  # where a row has one factor, addcmul takes three times as long
                    dx[at].add_(torch.mul(dy_rows[at], factor, out=product))
                else:
                    dx[at].addcmul_(dy_rows[at], factor)
            dx = rows.restore(dx)
        return dx, None if gamma is None else d_gamma, None if beta is None else d_beta, None, None


def _statistics(moments: Moments, spec: Spec) -> Statistics:
    """Return the statistics of a mini-batch (eqs 10-13), with ``1/m`` as a number, which takes no operators."""
    assert spec.groups is not None
    batch, features = formula.batch_statistics(torch, moments), formula.feature_statistics(torch, moments, spec.groups)
    return Statistics(*batch, *features, 1 / len(moments.mean))


def _gradients(
    s: Statistics, mean: Tensor, positions: int, sums: Tensor, dots: Tensor, gamma: Tensor | None, spec: Spec
) -> tuple[Tensor, ...]:
    """Return ``c1`` and ``c0`` of ``dx = a dy + c1 x + c0``, and the gradients of gamma and beta.

    This is the chain rule through ``formula.coefficients`` and the statistics, from sums over positions alone: ``sums``
    of ``dy`` and ``dots`` of ``dy * (x - mean)``, both ``(N, C)``.
    """
    n, d = mean.shape
    assert spec.groups is not None
    by_group = spec.groups, -1
    w_B, w_F = formula.weights(s.inverse_m, spec.mix_eps, d, spec.dim_scale)
    r_B, r_F = (s.batch_var + spec.eps) ** -0.5, ((s.feature_var + spec.eps) ** -0.5)[..., None]
    mean_F = s.feature_mean[..., None]
    g_mean, g_sums, g_dots = (value.view(n, *by_group) for value in (mean, sums, dots))
    x_B = r_B * (dots + (mean - s.batch_mean) * sums).sum(0)  # dy * x_B, summed over all
    x_F = r_F * (g_dots + (g_mean - mean_F) * g_sums)  # dy * x_F, summed over positions
    total = sums.sum(0)
    d_gamma = w_B * x_B + (w_F * x_F).sum(0).flatten()
    # One factor of r at a time: r ** 3 would underflow where x is of order 1e15.
    scale_B, scale_F = w_B * r_B / (n * positions), w_F * r_F / (g_mean.shape[-1] * positions)
    if gamma is not None:
        scale_B, g_gamma = scale_B * gamma, gamma.view(by_group)
        g_sums, x_F = g_gamma * g_sums, g_gamma * x_F
    slope_B = scale_B * x_B * r_B
    slope_F = scale_F * x_F.sum(-1, keepdim=True) * r_F
    offset_B = slope_B * s.batch_mean - scale_B * total
    offset_F = slope_F * mean_F - scale_F * g_sums.sum(-1, keepdim=True)
    c1, c0 = -(slope_B.view(by_group) + slope_F), offset_B.view(by_group) + offset_F
    return c1.flatten(1), c0.flatten(1), d_gamma, total


def _plain(x: Tensor, gamma: Tensor | None, beta: Tensor | None, channel_dim: int, spec: Spec) -> Tensor:
    """Compute the same in plain operators, for a second derivative."""
    rows = x.movedim(channel_dim, -1)
    s = _statistics(formula.moments(torch, rows, None), spec)
    y: Tensor = formula.normalize(torch, rows, s, gamma, beta, None, spec)
    return y.movedim(-1, channel_dim)


def _affine(rows: _Rows, x: Tensor, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Write ``a x + b`` of some samples to ``out``."""
    if not rows.channels_first:
        return torch.addcmul(b.unsqueeze(1), x, a.unsqueeze(1), out=out)
    # Batch norm with mean 0 and deviation 1: where a row has one pair, twice as fast as addcmul.
    none, a, b = x.new_empty(0), a.reshape(-1), b.reshape(-1)
    shape = 1, len(a), -1
    zero, one = torch.zeros_like(a), torch.ones_like(a)
    torch.native_batch_norm(x.view(shape), a, b, zero, one, False, 0.0, 0.0, out=(out.view(shape), none, none.clone()))
    return out


def _sums(rows: _Rows, dy: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over positions of ``dy`` and of ``dy * (x - mean)``, ``(N, C)``."""
    if rows.channels_first:  # batch norm's derivative has both, in one pass
        shape, flat = (1, mean.numel(), -1), mean.reshape(-1)
        one = torch.ones_like(flat)
        _, dots, sums = torch.ops.aten.native_batch_norm_backward.default(
            dy.view(shape), rows.x.view(shape), one, flat, one, flat, one, False, 0.0, [False, True, True]
        )
        return sums.view(mean.shape), dots.view(mean.shape)
    sums, dots = torch.empty((2, *mean.shape), dtype=dy.dtype)
    for at, product in rows.scratch():
        torch.sum(dy[at], 1, out=sums[at])
        torch.sub(rows.x[at], mean[at, None], out=product)
        torch.sum(product.mul_(dy[at]), 1, out=dots[at])
    return sums, dots
