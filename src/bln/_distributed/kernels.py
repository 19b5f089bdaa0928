"""Training over ranks by the Triton kernels of the published form; small tensors are joined by operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import formula
from .._backends.triton.functions import prepared
from .._backends.triton.launch import like, new, on_its_device, stream_of, typed
from .._backends.triton.published import Plan
from ..formula import MiniBatch
from . import messages
from .messages import Task


@on_its_device
def train(x: Tensor, gamma: Tensor | None, beta: Tensor | None, task: Task) -> tuple[Tensor, MiniBatch]:
    """Normalize this rank's ``x`` by the statistics of all ranks; return their estimates for the population, too."""
    seen, _, plan = prepared(x, gamma, beta, None, task.channel_dim, task.spec)
    y, joined = _Train.apply(seen, gamma, beta, plan, task)  # type: ignore[no-untyped-call]
    return (y.contiguous() if seen is not x and x.is_contiguous() else y), joined


class _Train(torch.autograd.Function):
    """Normalize by joined statistics; the input and small statistics are kept for backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, plan: Plan, task: Task
    ) -> tuple[Tensor, MiniBatch]:
        stream, lying = stream_of(plan.device), plan.shape
        q, c, entries = lying.q, lying.c, lying.rows // lying.q
        mean, var, rows, features, *_ = plan.measured(stream, x, None)

        shape = [size for at, size in enumerate(x.shape) if at != task.channel_dim]
        here = shape[1:] if task.spec.per_position else []
        mean_F, var_F = (entries * features).view(2, *here)
        own_mean, squares = (
            messages.pad_positions(value.view(*here, c), task.positions) for value in (mean, entries * var)
        )
        sums_here = messages.sums_of(mean_F, var_F, entries, lying.n, task)
        joined_mean, joined_var, total = messages.join(own_mean, squares, sums_here, task)
        joined = messages.joined_estimates(joined_mean, joined_var, total, task)

        w_B, w_F = formula.weights(joined.statistics.inverse_m, task.spec.mix_eps, c, task.spec.dim_scale)
        inverse_entries = 1 / total.entries.clamp(min=1)
        weights = torch.stack(
            [value.expand(inverse_entries.shape).reshape(-1)[:q] for value in (w_B, w_F, inverse_entries)]
        )
        mean, var = (value.reshape(-1, c)[:q].contiguous() for value in (joined_mean, joined_var))
        y = torch.empty_like(x)
        plan.normalize(stream, x, y, None, gamma, beta, mean, var, None, None, weights, q, 0.0, 0.0)
        ctx.plan, ctx.task = plan, task
        ctx.save_for_backward(x, gamma, beta, mean, var, rows, weights)
        return y, joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        plan, task = ctx.plan, ctx.task
        x, gamma, beta, mean, var, rows, weights = ctx.saved_tensors
        stream, q, c = stream_of(plan.device), plan.shape.q, plan.shape.c
        dy = like(dy, x)
        partial = new(x, 3, plan.measure_backward.parts, q, c)
        plan.measure_backward(stream, x, dy, None, mean, rows, partial)
        total, dot_B, dot_F = partial.sum(1)
        w_B, w_F, inverse_entries = weights[..., None].unbind()
        r_B = (var + task.spec.eps).rsqrt()
        d_gamma = typed((w_B * r_B * dot_B + w_F * dot_F).sum(0), gamma)
        d_beta = typed(total.sum(0), beta)
        if not ctx.needs_input_grad[0]:
            return None, d_gamma, d_beta, None, None
        scale = w_B * r_B if gamma is None else gamma.float() * (w_B * r_B)
        message = (torch.stack([total, r_B * (r_B * dot_B)], -2) * scale.unsqueeze(-2)).view(q, 2, c)
        message = messages.sum_gradients(messages.pad_positions(message, (task.num_positions,)), task).view(-1, 2, c)[
            :q
        ]
        shares = (message * inverse_entries.unsqueeze(-1)).transpose(0, 1).contiguous()
        dx = torch.empty_like(x)
        plan.differentiate(stream, x, dy, dx, None, gamma, mean, var, rows, shares, weights, q)
        return dx, d_gamma, d_beta, None, None
