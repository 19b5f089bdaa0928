"""Training on statistics over all ranks of a ``torch.distributed`` group: one collective forward, one backward.

Forward, a rank sends for each position (pooled: once) the mean and the centred sum of squares of each feature, its
entries, the sums of its feature means and variances, which the population wants, and pooled its samples ``m``, which
else are its entries. Backward, it sends what its part of the loss says of the joined mean and variance. Both
messages have the shape of the statistics, not that of the input: ranks may hold any number of samples, none included,
and nobody waits for a count. Three ways send the same messages, so that each rank may go its own: plain operators,
torch's own norms, and kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _coefficients, formula, functional, native
from ._spec import Spec
from .formula import Statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .population import Population


class Group:
    """The process group a layer was given: copies of the layer share it, and only the world can be pickled."""

    def __init__(self, given: ProcessGroup | Literal["world"]) -> None:
        if dist.is_available() and dist.is_initialized() and given is dist.group.WORLD:
            given = "world"
        self.given: ProcessGroup | Literal["world"] = given
        if isinstance(given, str):
            if given != "world":
                raise ValueError(f"process_group must be a ProcessGroup, 'world' or None, got {given!r}")
        elif not (dist.is_available() and isinstance(given, dist.ProcessGroup)):
            raise TypeError(
                f"process_group must be a torch.distributed ProcessGroup, 'world' or None, got {given!r}; new_group "
                "gives none to a process that is no member"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.given, str):
            return Group, (self.given,)
        raise TypeError(
            "a layer with a process group of its own cannot be pickled, since the group lives in this process. Ways "
            "out: (1) save model.state_dict(); (2) layer.process_group = 'world' or None before, the group again after"
        )

    def __repr__(self) -> str:
        if isinstance(self.given, str):
            return repr(self.given)
        return f"<{self.given.size()} ranks>"

    def resolve(self) -> ProcessGroup | None:
        """The group as it is now; ``None`` while the world is this process alone."""
        if not isinstance(self.given, str):
            return self.given
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


class _Joined(NamedTuple):
    """What all ranks together say of a mini-batch, the same everywhere, for the population."""

    statistics: Statistics
    """At the positions statistics are kept for; the feature statistics averaged already, as of a single row."""
    m: int | Tensor
    """Samples, for each position; a number where it is the same for all and can be looked at."""
    entries: int | Tensor
    present: int | Tensor
    """Samples with any real entry."""


class Task(NamedTuple):
    """All that normalizing takes but tensors."""

    channel_dim: int
    """Counted from the front."""
    spec: Spec
    positions: tuple[int, ...]
    """Those that statistics are kept for, the same on all ranks; sequences may be shorter."""
    group: ProcessGroup
    dtype: torch.dtype
    """That of the population, which messages have on all ranks."""

    @property
    def sends_samples(self) -> bool:
        """Whether samples are counted apart from the entries at each position."""
        return self.spec.groups is not None or not self.spec.per_position

    @property
    def known(self) -> int:
        """How many positions statistics are kept for."""
        return math.prod(self.positions)

    def size(self, d: int) -> int:
        """The length of a message forward, in the published form."""
        return self.known * (2 * d + (3 if self.spec.per_position else 4))


def train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    task: Task,
    *,
    population: Population,
    momentum: float | None,
    learning: bool,
) -> Tensor:
    """Algorithm 1 of the samples of all ranks: this rank's ``y``.

    Args:
        x: This rank's samples, checked; possibly none.
        weight: Gamma.
        bias: Beta.
        mask: True at this rank's real entries.
        task: What to compute, and with whom.
        population: Averaged with the mini-batch.
        momentum: Of the population.
        learning: False where the mini-batch has been seen already.
    """
    # The others know no mask, refuse an empty input, and a compiler does better with plain operators.
    plain = mask is not None or x.shape[0] == 0 or torch.compiler.is_compiling() or task.spec.groups is not None
    features = x.shape[task.channel_dim]
    kernels = None
    if not plain:
        kernels = functional.kernels_for(x, task.spec, features, weight, bias, population.batch_mean)
    y: Tensor
    if kernels is not None:
        y = kernels.synchronized.train(x, weight, bias, task, (population, momentum) if learning else None)
        return y
    wide = torch.promote_types(x.dtype, task.dtype)
    gamma, beta = (None if p is None else p.to(wide) for p in (weight, bias))
    if plain:
        y, joined = _plain(x.to(wide), gamma, beta, mask, task)
    else:
        y, joined = _native(x.to(wide), gamma, beta, task)
    if learning:
        population.update(joined.statistics, joined.m, joined.entries, None, task.positions, momentum, joined.present)
    y = y.to(x.dtype)
    return y.contiguous() if x.is_contiguous() else y


# ---- messages


def agree_on(positions: tuple[int, ...], group: ProcessGroup, device: torch.device) -> None:
    """Refuse positions that are not those of all ranks, before the first message: messages would not fit together."""
    sizes = (*positions, *[0] * 8)[:8]
    everyones = gather(torch.tensor(sizes, device=device), group).view(-1, len(sizes)).tolist()
    if any(other != everyones[0] for other in everyones):
        known = [tuple(size for size in sizes if size) for sizes in everyones]
        raise ValueError(
            f"the layer keeps statistics for each position, and ranks have different positions: {known}. Ways out: (1) "
            "position_shape= the longest sequence there will be, on all ranks; (2) per_position=False; (3) pad to one "
            "shape"
        )


def fit(value: Tensor, positions: tuple[int, ...]) -> Tensor:
    """Pad with zeros where a sequence has fewer positions than statistics are kept for."""
    if not positions or value.shape[0] == positions[0]:
        return value
    return torch.cat([value, value.new_zeros(positions[0] - value.shape[0], *value.shape[1:])])


def _here(value: Tensor, positions: tuple[int, ...], rows: Tensor) -> Tensor:
    """Cut to the positions of the input."""
    return value[: rows.shape[1]] if positions and rows.shape[1] < positions[0] else value


class _Sums(NamedTuple):
    """What ranks only have to add."""

    entries: Tensor
    """For each position."""
    feature_mean: Tensor
    """Summed over samples: for each position, pooled over positions, or for each group."""
    feature_var: Tensor
    present: Tensor
    """Samples with any real entry."""


def _sums(feature_mean: Tensor, feature_var: Tensor, entries: int | Tensor, present: int | Tensor, task: Task) -> _Sums:
    """Sums of feature statistics and counts, as tensors at the positions statistics are kept for."""
    if isinstance(entries, Tensor):
        entries = entries.to(feature_var.dtype)
    else:
        entries = feature_var.new_full(feature_var.shape, entries)
    if task.spec.groups is None:
        feature_mean, feature_var = (fit(value, task.positions) for value in (feature_mean, feature_var))
    present = present.to(feature_var.dtype) if isinstance(present, Tensor) else feature_var.new_full((), present)
    return _Sums(fit(entries, task.positions), feature_mean, feature_var, present)


def _exchange(collective: Any, *tensors: Tensor, group: ProcessGroup) -> None:
    """A collective, with an error that says what may have happened."""
    if torch.compiler.is_compiling():
        collective(*tensors, group=group)
        return
    try:
        collective(*tensors, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {group.rank()} of {group.size()} could not exchange statistics in a synchronized BatchLayerNorm. "
            "Another rank has died, takes longer than the group's timeout, or does not call the layer as often as this "
            f"one: ranks that run out of data must feed empty batches. The error was: {error}"
        ) from error


def gather(message: Tensor, group: ProcessGroup) -> Tensor:
    """The messages of all ranks, one behind the other."""
    gathered = message.new_empty(group.size() * len(message))
    # torch renamed it in 2.13.
    collective = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    _exchange(collective, gathered, message, group=group)
    return gathered


def _join(mean: Tensor, squares: Tensor, sums: _Sums, task: Task) -> tuple[Tensor, Tensor, _Sums]:
    """Batch mean and variance over all ranks, and the ranks' sums: the collective of forward."""
    # For each position samples are its entries: only groups need to know them as a whole.
    parts = [mean, squares, *sums] if task.sends_samples else [mean, squares, *sums[:-1]]
    message = torch.cat([value.reshape(-1) for value in parts])
    gathered = gather(message.to(task.dtype), task.group).to(message.dtype).view(-1, len(message))
    means, centred, *totals = (
        value.view(-1, *part.shape)
        for value, part in zip(gathered.split_with_sizes([p.numel() for p in parts], 1), parts, strict=True)
    )
    joined = formula.combine(torch, totals[0][..., None], means, centred)
    added = [value.sum(0) for value in totals]
    return *joined, _Sums(*added, *([] if task.sends_samples else [sums.present]))


def add_up(message: Tensor, task: Task) -> Tensor:
    """Over ranks, what the loss says of mean and variance, ``(*positions, 2, d)``: the collective of backward."""
    flat = message.to(task.dtype).reshape(-1)  # the same on all ranks, whatever way they go
    _exchange(dist.all_reduce, flat, group=task.group)
    return flat.view(message.shape)


def _number(count: Tensor) -> int | None:
    """The count, where it is the same at all positions and can be looked at: that saves operations."""
    if not functional.can_look(count):
        return None
    if not count.dim():
        return int(count)
    least, most = (int(bound) for bound in count.aminmax())
    return least if least == most else None


def _joined(mean: Tensor, var: Tensor, sums: _Sums, task: Task) -> _Joined:
    """For the population, from what ``_join`` gave."""
    m = sums.entries if task.spec.per_position else sums.present
    same = _number(m)
    divisor: int | Tensor
    if same is None:
        counts: tuple[int | Tensor, int | Tensor] = m.long(), sums.entries.long()
        divisor, inverse_m = sums.entries.clamp(min=1), 1 / m.clamp(min=1)
    else:
        counts = same, same if m.dim() else int(sums.entries)
        divisor, inverse_m = functional.at_least_one(counts[1]), m.new_full(m.shape, 1 / max(same, 1))
    present: int | Tensor = counts[0]
    if task.spec.groups is not None:
        number = _number(sums.present)
        present = sums.present.long() if number is None else number
        divisor = functional.at_least_one(present)
    statistics = Statistics(mean, var, sums.feature_mean / divisor, sums.feature_var / divisor, inverse_m)
    return _Joined(statistics, *counts, present)


# ---- by plain operators


class _Join(torch.autograd.Function):
    """``_join``, differentiable: Chan's formula moves with a rank's mean and squares as below."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, squares: Tensor, task: Task, *sums: Tensor) -> tuple[Tensor, ...]:
        joined_mean, joined_var, total = _join(mean, squares, _Sums(*sums), task)
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
        nothing = [None] * (1 + len(_Sums._fields))
        return entries * (offset + (mean - joined_mean) * slope), 0.5 * slope, *nothing


def _plain(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, task: Task
) -> tuple[Tensor, _Joined]:
    spec = task.spec
    x = _coefficients.hide(x, mask, task.channel_dim)
    rows = native.moved(x, task.channel_dim, -1)
    own = functional.current(rows, mask, spec)
    _, entries = functional.count(rows.shape[:-1], mask, spec.per_position)
    present, _ = functional.count(rows.shape[:-1], mask, False)
    over: Any = 0 if spec.per_position or spec.groups is not None else tuple(range(rows.dim() - 1))
    feature_mean, feature_var = own.feature_mean.detach(), own.feature_var.detach()
    if mask is not None:
        real = mask if spec.groups is None else functional.present(mask)[:, None]
        feature_mean, feature_var = (torch.where(real, value, 0) for value in (feature_mean, feature_var))
    if not isinstance(entries, Tensor):
        entries = rows.new_full(own.batch_mean.shape[:-1], entries)  # at the positions of this rank
    sums = _sums(feature_mean.sum(over), feature_var.sum(over), entries, present, task)
    mean, var = (fit(value, task.positions) for value in (own.batch_mean, own.batch_var))
    mean, var, *total = _Join.apply(mean, var * sums.entries[..., None], task, *sums)  # type: ignore[no-untyped-call]
    joined = _joined(mean.detach(), var.detach(), _Sums(*total), task)

    mean, var, inverse_m = (_here(value, task.positions, rows) for value in (mean, var, joined.statistics.inverse_m))
    s = Statistics(mean, var, own.feature_mean, own.feature_var, inverse_m)
    if spec.coefficients:
        return _coefficients.apply(x, s, gamma, beta, mask, task.channel_dim, spec), joined
    y = native.moved(formula.transform(rows, s, gamma, beta, spec=spec, xp=torch), -1, task.channel_dim)
    # No view of anything: the hooks of fully_shard do not survive one that is changed in place.
    return y.clone() if mask is None else _coefficients.hide(y, mask, task.channel_dim), joined


# ---- by torch's own norms, as in native.py


def _native(x: Tensor, gamma: Tensor | None, beta: Tensor | None, task: Task) -> tuple[Tensor, _Joined]:
    d = x.shape[task.channel_dim]
    gamma = x.new_ones(d) if gamma is None else gamma
    beta = x.new_zeros(d) if beta is None else beta
    y, joined = _Train.apply(x, gamma, beta, task)  # type: ignore[no-untyped-call]
    return y, joined


class _Train(torch.autograd.Function):
    """Batch norm with statistics from outside, plus layer norm; keeps the input and the statistics for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, task: Task) -> tuple[Tensor, _Joined]:
        rows = native.moved(x, task.channel_dim, -1)
        n, d = rows.shape[0], rows.shape[-1]
        spec = task.spec
        columns = native.Columns(x, task.channel_dim, spec.per_position)
        seen = columns.of(x)
        own_mean, own_var = (columns.features_last(s) for s in torch.batch_norm_update_stats(seen, None, None, 0.0))
        # A scale makes it twice as fast on a CPU, and saves one further down.
        y_F, feature_mean, feature_rstd = torch.native_layer_norm(rows, (d,), gamma, None, spec.eps)

        entries = n if spec.per_position else rows.numel() // d
        over = 0 if spec.per_position else tuple(range(rows.dim() - 1))
        feature_var = native.variance(feature_rstd, spec.eps).squeeze(-1).sum(over)
        sums = _sums(feature_mean.squeeze(-1).sum(over), feature_var, entries, n, task)
        own_mean, squares = (fit(value, task.positions) for value in (own_mean, own_var * entries))
        joined_mean, joined_var, total = _join(own_mean, squares, sums, task)

        joined = _joined(joined_mean, joined_var, total, task)
        mean, var = (_here(value, task.positions, rows) for value in (joined_mean, joined_var))
        inverse_m: Any
        count: Any
        if isinstance(joined.m, Tensor):
            inverse_m = _here(joined.statistics.inverse_m, task.positions, rows)[..., None]
            count = _here(total.entries, task.positions, rows)[..., None].clamp(min=1)
        else:
            inverse_m, count = 1 / joined.m, joined.entries
        w_B, w_F = formula.weights(inverse_m, spec.mix_eps, d, spec.dim_scale)
        gamma_B = gamma * w_B
        y = columns.empty(x)  # no view of another tensor: those cannot be changed in place, as a ReLU behind may want
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
        if not ctx.needs_input_grad[0]:
            return None, d_gamma, d_beta, None

        total, dot = _here(message, task.positions, rows).to(x.dtype).unbind(-2)
        # Of the batch part, scale * dy - total / count - (x - mean) * dot / count, sorted by x and dy:
        slope = dot / -count
        offset = torch.addcmul(total / -count, slope, mean, value=-1)
        slope, offset, scale = (columns.beside(value) for value in (slope, offset, scale))
        dx_F = native.moved(dx_F, -1, task.channel_dim)
        if rows.is_contiguous():  # into memory that is there: a new page costs more than what fills it
            columns.of(dx_F).addcmul_(seen, slope).addcmul_(dy_seen, scale).add_(offset)
            return dx_F, d_gamma, d_beta, None
        dx = torch.addcmul(offset, seen, slope).addcmul_(dy_seen, scale)
        return columns.restore(dx).add_(dx_F), d_gamma, d_beta, None
