"""Triton kernels for training on a GPU.

``train`` does what ``bln.native.train`` does, on a GPU. For backward it keeps the input and the statistics.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..formula import Statistics
from . import backward, forward
from .launch import Launch, cdiv

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def usable(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether these tensors can be handled here: in types the kernels know, in plain eager mode."""
    return (
        x.dtype in _TYPES
        and all(p is None or p.dtype in _TYPES for p in parameters)
        and not torch._C._are_functorch_transforms_active()
        and not torch.autograd.forward_ad._current_level >= 0
    )


def train(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    *,
    channel_dim: int,
    per_position: bool,
    eps: float,
    w_B: float,
    w_F: float,
) -> tuple[Tensor, Statistics]:
    """Algorithm 1 of ``x``, given the weights of eq 16."""
    n, d = x.shape[0], x.shape[channel_dim]
    rows = x.movedim(channel_dim, -1)
    slabs = rows.reshape(n, -1, d) if per_position else rows.reshape(-1, 1, d)
    if not (slabs.is_contiguous() or slabs.transpose(1, 2).is_contiguous()):  # gaps, or repetitions
        slabs = slabs.contiguous()
    gamma = x.new_ones(d, dtype=torch.float32) if gamma is None else gamma
    beta = x.new_zeros(d, dtype=torch.float32) if beta is None else beta
    y, batch_mean, batch_var, feature_mean, feature_var = _Train.apply(  # type: ignore[no-untyped-call]
        slabs, gamma, beta, _Mix(eps, w_B, w_F)
    )
    columns = (*rows.shape[1:-1], d) if per_position else (d,)
    return y.reshape(rows.shape).movedim(-1, channel_dim), Statistics(
        batch_mean.reshape(columns),
        batch_var.reshape(columns),
        feature_mean.T.reshape(rows.shape[:-1]),
        feature_var.T.reshape(rows.shape[:-1]),
        x.new_full((), 1 / n, dtype=torch.float32),
    )


class _Mix(NamedTuple):
    eps: float
    w_B: float
    w_F: float


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _choose(x: Tensor, backward: bool) -> Launch:
    _, stride_p, stride_c = x.stride()
    return Launch.choose(
        *x.shape,
        backward=backward,
        wide=x.dtype == torch.float32,
        positions_last=stride_p < stride_c,
        processors=_processors(x.device),
    )


class _Train(torch.autograd.Function):
    """On slabs ``x[n, p, c]``; the batch statistics are those of each slab ``x[:, p, :]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, mix: _Mix) -> tuple[Tensor, ...]:
        n, p, c = x.shape
        y = torch.empty_like(x)
        batch_mean, batch_var = torch.empty(2, p, c, dtype=torch.float32, device=x.device)
        feature_mean, feature_var = torch.empty(2, p, n, dtype=torch.float32, device=x.device)
        statistics = (batch_mean, batch_var, feature_mean, feature_var)
        chosen = _choose(x, backward=False)
        sizes, blocks = (n, p, c, *x.stride()), cdiv(p, chosen.positions)
        numbers = (mix.w_B, mix.w_F, mix.eps)
        if chosen.splits == 1:
            forward.whole[(blocks,)](x, y, gamma, beta, *statistics, *sizes, *numbers, **chosen.tile)
        else:
            run = cdiv(n, chosen.splits)
            splits = cdiv(n, run)
            partials = torch.empty(2, splits, p, c, dtype=torch.float32, device=x.device)
            forward.measure[(blocks, splits)](x, *partials, feature_mean, feature_var, *sizes, run, **chosen.tile)
            forward.merge[(cdiv(p * c, 32),)](*partials, batch_mean, batch_var, n, p * c, run, splits, BS=64, BLOCK=32)
            forward.normalize[(blocks, splits)](x, y, gamma, beta, *statistics, *sizes, run, *numbers, **chosen.tile)
        ctx.mix = mix
        ctx.save_for_backward(x, gamma, beta, *statistics)
        ctx.mark_non_differentiable(*statistics)
        return y, *statistics

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, gamma, beta, *statistics = ctx.saved_tensors
        mix: _Mix = ctx.mix
        if torch.is_grad_enabled():  # second derivatives: through the plain composition
            wanted = [t for t, want in zip((x, gamma, beta), ctx.needs_input_grad, strict=False) if want]
            y, _ = native.train(
                x.float(), gamma.float(), beta.float(), channel_dim=2, per_position=True, **mix._asdict()
            )
            found = iter(torch.autograd.grad(y, wanted, dy.to(y.dtype), create_graph=True))
            return *(next(found) if want else None for want in ctx.needs_input_grad[:3]), None

        n, p, c = x.shape
        dx = torch.empty_like(x)
        chosen = _choose(x, backward=True)
        sizes, blocks = (n, p, c, *x.stride(), *dy.stride()), cdiv(p, chosen.positions)
        numbers = (mix.w_B, mix.w_F, mix.eps)
        if chosen.splits == 1:
            programs = min(blocks, chosen.programs * _processors(x.device))
            partials = torch.empty(2, programs, c, dtype=torch.float32, device=x.device)
            backward.whole[(programs,)](x, dy, dx, gamma, *statistics, *partials, *sizes, *numbers, **chosen.tile)
            dgamma, dbeta = partials.sum(1)
        else:
            run = cdiv(n, chosen.splits)
            splits = cdiv(n, run)
            partials = torch.empty(3, splits, p, c, dtype=torch.float32, device=x.device)
            backward.sums[(blocks, splits)](x, dy, *statistics, *partials, *sizes, run, *numbers, **chosen.tile)
            total, dot, column_gamma = partials.sum(1)
            backward.differentiate[(blocks, splits)](
                x, dy, dx, gamma, *statistics, total, dot, *sizes, run, *numbers, **chosen.tile
            )
            dgamma, dbeta = column_gamma.sum(0), total.sum(0)
        return dx, dgamma.to(gamma.dtype), dbeta.to(beta.dtype), None
