"""Training on statistics over all ranks of a ``torch.distributed`` group.

Three ways send the same messages, so that each rank may go its own: plain operators, torch's own norms, and kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import formula
from .._autograd import recomputing
from .._backends import coefficients, like, native, operators, triton_for, widened
from .._masks import count, hide, positions_of
from .._masks import present as present_in
from ..formula import MiniBatch, Statistics
from . import messages
from .messages import Sums, Task, add_up, agree_on, conclude, fit, here, sums_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..layer import BatchLayerNorm


def train(layer: BatchLayerNorm, x: Tensor, mask: Tensor | None, channel_dim: int, group: ProcessGroup) -> Tensor:
    """Algorithm 1 of the samples of all ranks: this rank's ``y``. It may have no samples."""
    population, spec, compiling = layer.population, layer.spec, torch.compiler.is_compiling()
    positions = population.positions_for(positions_of(x, channel_dim, spec))
    if spec.per_position and not layer.agreed_on_positions and not compiling:
        agree_on(positions, group, x.device)
        layer.agreed_on_positions = True
    task = Task(channel_dim, spec, positions, group, population.batch_mean.dtype)
    # The others know no mask, refuse an empty input, and a compiler does better with plain operators.
    plain = mask is not None or x.shape[0] == 0 or compiling or spec.groups is not None
    tensors = x, layer.weight, layer.bias
    if not plain and triton_for(x, channel_dim, spec, None, *tensors[1:], population.batch_mean) is not None:
        from . import kernels

        y, joined = kernels.train(*tensors, task)
    else:
        wide = widened(*tensors, population.batch_mean)
        y, joined = _plain(*wide, mask, task) if plain else _Train.apply(*wide, task)  # type: ignore[no-untyped-call]
        y = like(y, x)
    if not recomputing():
        statistics, m, entries, present = joined
        population.update(statistics, m, entries, None, positions, layer.momentum, present)
    return y


# ---- by plain operators


class _Join(torch.autograd.Function):
    """``join``, differentiable: Chan's formula moves with a rank's mean and squares as below."""

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
        message = add_up(-torch.stack([d_mean, 2 * d_var], -2), ctx.task)
        offset, slope = (message.to(mean.dtype) / -total.clamp(min=1)[..., None]).unbind(-2)
        nothing = [None] * (1 + len(Sums._fields))
        return entries * (offset + (mean - joined_mean) * slope), 0.5 * slope, *nothing


def _plain(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, task: Task
) -> tuple[Tensor, MiniBatch]:
    spec = task.spec
    x = hide(x, mask, task.channel_dim)
    rows = native.moved(x, task.channel_dim, -1)
    own = operators.current(rows, mask, spec)
    _, entries = count(rows.shape[:-1], mask, spec.per_position)
    present, _ = count(rows.shape[:-1], mask, False)
    over: Any = 0 if spec.per_position or spec.groups is not None else tuple(range(rows.dim() - 1))
    feature_mean, feature_var = own.feature_mean.detach(), own.feature_var.detach()
    if mask is not None:
        real = mask if spec.groups is None else present_in(mask)[:, None]
        feature_mean, feature_var = (torch.where(real, value, 0) for value in (feature_mean, feature_var))
    if not isinstance(entries, Tensor):
        entries = rows.new_full(own.batch_mean.shape[:-1], entries)  # at the positions of this rank
    sums = sums_of(feature_mean.sum(over), feature_var.sum(over), entries, present, task)
    mean, var = (fit(value, task.positions) for value in (own.batch_mean, own.batch_var))
    mean, var, *total = _Join.apply(mean, var * sums.entries[..., None], task, *sums)  # type: ignore[no-untyped-call]
    joined = conclude(mean.detach(), var.detach(), Sums(*total), task)

    mean, var, inverse_m = (here(value, task.positions, rows) for value in (mean, var, joined.statistics.inverse_m))
    s = Statistics(mean, var, own.feature_mean, own.feature_var, inverse_m)
    if spec.coefficients:
        return coefficients.apply(x, s, gamma, beta, mask, task.channel_dim, spec), joined
    y = native.moved(formula.transform(rows, s, gamma, beta, spec=spec, xp=torch), -1, task.channel_dim)
    # No view of anything: the hooks of fully_shard do not survive one that is changed in place.
    return y.clone() if mask is None else hide(y, mask, task.channel_dim), joined


# ---- by torch's own norms, as in native.py


class _Train(torch.autograd.Function):
    """Batch norm with statistics from outside, plus layer norm; keeps the input and the statistics for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, task: Task) -> tuple[Tensor, MiniBatch]:
        rows, spec = native.moved(x, task.channel_dim, -1), task.spec
        n, d = rows.shape[0], rows.shape[-1]
        gamma = x.new_ones(d) if gamma is None else gamma
        beta = x.new_zeros(d) if beta is None else beta
        columns = native.Columns(x, task.channel_dim, spec.per_position)
        seen = columns.of(x)
        own_mean, own_var = (columns.features_last(s) for s in torch.batch_norm_update_stats(seen, None, None, 0.0))
        # A scale makes it twice as fast on a CPU, and saves one further down.
        y_F, feature_mean, feature_rstd = torch.native_layer_norm(rows, (d,), gamma, None, spec.eps)

        entries = n if spec.per_position else rows.numel() // d
        over = 0 if spec.per_position else tuple(range(rows.dim() - 1))
        feature_var = native.variance(feature_rstd, spec.eps).squeeze(-1).sum(over)
        sums = sums_of(feature_mean.squeeze(-1).sum(over), feature_var, entries, n, task)
        own_mean, squares = (fit(value, task.positions) for value in (own_mean, own_var * entries))
        joined_mean, joined_var, total = messages.join(own_mean, squares, sums, task)

        joined = conclude(joined_mean, joined_var, total, task)
        mean, var = (here(value, task.positions, rows) for value in (joined_mean, joined_var))
        inverse_m: Any = 1 / joined.m
        count: Any = joined.entries
        if isinstance(joined.m, Tensor):
            inverse_m = here(joined.statistics.inverse_m, task.positions, rows)[..., None]
            count = here(total.entries, task.positions, rows)[..., None].clamp(min=1)
        w_B, w_F = formula.weights(inverse_m, spec.mix_eps, d, spec.dim_scale)
        gamma_B = gamma * w_B
        # No view of another tensor: those cannot be changed in place, as a following ReLU may want.
        y = columns.empty(x)
        torch.native_batch_norm(
            seen, columns.spread(gamma_B), columns.spread(beta), columns.spread(mean), columns.spread(var),
            False, 0.0, spec.eps, out=(columns.of(y), x.new_empty(0), x.new_empty(own_var.numel())),
        )  # fmt: skip
        y_rows = native.moved(y, task.channel_dim, -1)
        y_rows.addcmul_(y_F, w_F) if isinstance(w_F, Tensor) else y_rows.add_(y_F, alpha=w_F)
        ctx.task, ctx.columns, ctx.numbers = task, columns, (w_B, w_F, count)
        ctx.save_for_backward(x, gamma, gamma_B, mean, var, feature_mean, feature_rstd)
        return y, joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, gamma, gamma_B, mean, var, feature_mean, feature_rstd = ctx.saved_tensors
        task: Task = ctx.task
        columns: native.Columns = ctx.columns
        w_B, w_F, count = ctx.numbers
        d = len(gamma)
        seen, dy_seen = columns.of(x), columns.of(dy)
        r = (var + task.spec.eps).rsqrt()
        scale = gamma_B * r
        around, rstd = columns.spread(mean), columns.spread(r)
        # On a CPU it reads the variance, on a GPU the inverse deviation; a scale must be there, but does not matter.
        _, dot, total = torch.ops.aten.native_batch_norm_backward.default(
            dy_seen, seen, rstd, around, columns.spread(var), around, rstd, False, task.spec.eps, [False, True, True]
        )
        dot, total = columns.features_last(dot), columns.features_last(total)  # sums of dy * x_B, and of dy

        if ctx.needs_input_grad[0]:
            message = torch.stack([total, r * dot], -2) * scale.unsqueeze(-2)  # as _Join's
            message = add_up(fit(message, task.positions), task)
        rows, dy_rows = (native.moved(value, task.channel_dim, -1) for value in (x, dy))
        if isinstance(w_F, Tensor) and w_F.numel() > 1:  # one for each position: layer norm's scale has none
            dy_rows, w_F = dy_rows * w_F, 1
        dx_F, scale_F, _ = torch.ops.aten.native_layer_norm_backward.default(
            dy_rows, rows, (d,), feature_mean, feature_rstd, gamma * w_F, None, [True, True, False]
        )
        positions = tuple(range(mean.dim() - 1))
        d_gamma = (w_B * dot).sum(positions) + w_F * scale_F if positions else w_B * dot + w_F * scale_F
        d_beta = total.sum(positions) if positions else total
        wanted = [
            value if wants else None for value, wants in zip((d_gamma, d_beta), ctx.needs_input_grad[1:], strict=False)
        ]
        if not ctx.needs_input_grad[0]:
            return None, *wanted, None

        total, dot = here(message, task.positions, rows).to(x.dtype).unbind(-2)
        # Of the batch part, scale * dy - total / count - (x - mean) * dot / count, sorted by x and dy:
        slope = dot / -count
        offset = torch.addcmul(total / -count, slope, mean, value=-1)
        slope, offset, scale = (columns.broadcast(value) for value in (slope, offset, scale))
        dx_F = native.moved(dx_F, -1, task.channel_dim)
        if rows.is_contiguous():  # into memory that is there: a new page costs more than what fills it
            columns.of(dx_F).addcmul_(seen, slope).addcmul_(dy_seen, scale).add_(offset)
            return dx_F, *wanted, None
        dx = torch.addcmul(offset, seen, slope).addcmul_(dy_seen, scale)
        return columns.restore(dx).add_(dx_F), *wanted, None
