"""Training on statistics over all ranks of a ``torch.distributed`` group, in plain operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import formula
from .._distributed import messages
from .._distributed.messages import Sums, Task, crop_positions, pad_positions
from .._masks import count, hide
from ..formula import MiniBatch, Statistics
from . import operators


def train(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, task: Task
) -> tuple[Tensor, MiniBatch]:
    """Normalize this rank's ``x`` by the statistics of all ranks; return their estimates for the population, too.

    This rank may have no samples.
    """
    spec = task.spec
    rows = hide(x, mask, task.channel_dim).movedim(task.channel_dim, -1)
    own = operators.current(rows, mask, spec)
    _, entries = count(rows.shape[:-1], mask, spec.per_position)
    present, _ = count(rows.shape[:-1], mask, False)
    over: Any = 0 if spec.per_position or spec.groups is not None else tuple(range(rows.dim() - 1))
    feature_mean, feature_var = (value.detach().sum(over) for value in (own.feature_mean, own.feature_var))
    if not isinstance(entries, Tensor):
        entries = rows.new_full(own.batch_mean.shape[:-1], entries)  # at the positions of this rank
    sums = messages.sums_of(feature_mean, feature_var, entries, present, task)
    mean, var = (pad_positions(value, task.positions) for value in (own.batch_mean, own.batch_var))
    mean, var, *total = _Join.apply(mean, var * sums.entries[..., None], task, *sums)  # type: ignore[no-untyped-call]
    new = messages.joined_estimates(mean.detach(), var.detach(), Sums(*total), task)

    mean, var, inverse_m = (
        crop_positions(value, task.positions, rows) for value in (mean, var, new.statistics.inverse_m)
    )
    s = Statistics(mean, var, own.feature_mean, own.feature_var, inverse_m)
    y = formula.normalize(torch, rows, s, gamma, beta, mask, spec).movedim(-1, task.channel_dim)
    return y.clone(), new  # a view that is changed in place would lose the hooks of fully_shard


class _Join(torch.autograd.Function):
    """``messages.join`` with the derivative of Chan's formula by this rank's mean and squares."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, squares: Tensor, task: Task, *sums: Tensor) -> tuple[Tensor, ...]:
        joined_mean, joined_var, total = messages.join(mean, squares, Sums(*sums), task)
        ctx.task = task
        ctx.save_for_backward(mean, sums[0][..., None], joined_mean, total.entries[..., None])
        ctx.mark_non_differentiable(*total)
        return joined_mean, joined_var, *total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mean: Tensor, d_var: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        mean, entries, joined_mean, total = ctx.saved_tensors
        message = messages.sum_gradients(-torch.stack([d_mean, 2 * d_var], -2), ctx.task)
        offset, slope = (message.to(mean.dtype) / -total.clamp(min=1)[..., None]).unbind(-2)
        nothing = [None] * (1 + len(Sums._fields))
        return entries * (offset + (mean - joined_mean) * slope), 0.5 * slope, *nothing
