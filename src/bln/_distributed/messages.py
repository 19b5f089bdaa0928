"""The two collectives of synchronized training: statistics in the forward pass, their gradients in the backward pass.

Forward, a rank sends the mean and the centred sum of squares of each feature, the number of entries, and the sums of
its feature means and variances: for each position, or once where statistics are pooled. It sends the number of samples
too, where that is not the number of entries. Backward, it sends the gradient of its loss with respect to the joined
mean and variance.

Both messages have the shape of the statistics, not that of the input. So ranks may hold any number of samples, none
included, and no rank waits for a count.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import formula
from .._masks import positions_of
from .._spec import Spec
from ..formula import MiniBatch, Statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..population import Population


class Task(NamedTuple):
    """What a synchronized call takes besides its tensors."""

    channel_dim: int
    """Counted from the front."""
    spec: Spec
    positions: tuple[int, ...]
    """The positions that have statistics, the same on all ranks; sequences may be shorter."""
    group: ProcessGroup
    dtype: torch.dtype
    """The type of the population, and of messages on all ranks."""

    @property
    def num_positions(self) -> int:
        """The number of positions that have statistics."""
        return math.prod(self.positions)


def task_of(x: Tensor, channel_dim: int, spec: Spec, population: Population, group: ProcessGroup) -> Task:
    """Return the task of normalizing ``x``; in the first call, check that all ranks have the same positions.

    Messages of different positions would not fit together.
    """
    positions = population.positions_for(positions_of(x, channel_dim, spec))
    if spec.per_position and not population.agreed_on_positions and not torch.compiler.is_compiling():
        known = gather_objects(positions, group, x.device)
        if len(set(known)) > 1:
            raise ValueError(
                f"the layer keeps statistics for each position, and ranks have different positions: {known}. Ways out: "
                "(1) position_shape= the longest sequence there will be, on all ranks; (2) per_position=False; (3) pad "
                "to one shape"
            )
        population.agreed_on_positions = True
    return Task(channel_dim, spec, positions, group, population.batch_mean.dtype)


def gather_objects(value: Any, group: ProcessGroup, device: torch.device) -> list[Any]:
    """Return the values of all ranks, of anything that can be pickled. NCCL sends them by way of ``device``."""
    values: list[Any] = [None] * group.size()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _run_collective("exchange values with the others", dist.all_gather_object, values, value, group=group)
    return values


def pad_positions(value: Tensor, positions: tuple[int, ...]) -> Tensor:
    """Pad the values of a shorter sequence with zeros, up to the positions that have statistics."""
    if not positions or value.shape[0] == positions[0]:
        return value
    return torch.cat([value, value.new_zeros(positions[0] - value.shape[0], *value.shape[1:])])


def crop_positions(value: Tensor, positions: tuple[int, ...], rows: Tensor) -> Tensor:
    """Cut a statistic to the positions of a shorter sequence, ``rows``."""
    return value[: rows.shape[1]] if positions and rows.shape[1] < positions[0] else value


class Sums(NamedTuple):
    """Sums over samples, which add up over ranks."""

    entries: Tensor
    """The number of entries at each position."""
    feature_mean: Tensor
    """The sum of feature means: at each position, over all positions, or for each group."""
    feature_var: Tensor
    present: Tensor
    """The number of samples with any real entry."""


def sums_of(
    feature_mean: Tensor, feature_var: Tensor, entries: int | Tensor, present: int | Tensor, task: Task
) -> Sums:
    """Return the sums of feature statistics and the counts as tensors, at all positions that have statistics."""
    entries, present = (
        count.to(feature_var.dtype) if isinstance(count, Tensor) else feature_var.new_full(shape, count)
        for count, shape in ((entries, feature_var.shape), (present, ()))
    )
    if task.spec.groups is None:
        feature_mean, feature_var = (pad_positions(value, task.positions) for value in (feature_mean, feature_var))
    return Sums(pad_positions(entries, task.positions), feature_mean, feature_var, present)


def _run_collective(what: str, collective: Any, *arguments: Any, group: ProcessGroup) -> None:
    """Run a collective; if it fails, say that a rank ``could not {what}``, and why that may be."""
    if torch.compiler.is_compiling():
        collective(*arguments, group=group)
        return
    try:
        collective(*arguments, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {group.rank()} of {group.size()} could not {what}. Another rank has died, takes longer than the "
            "group's timeout, or does not do so as often as this one: ranks that run out of data must feed empty "
            f"batches. The error was: {error}"
        ) from error


_STATISTICS = "exchange statistics in a synchronized BatchLayerNorm"


def join(mean: Tensor, squares: Tensor, sums: Sums, task: Task) -> tuple[Tensor, Tensor, Sums]:
    """Return batch mean and variance over all ranks, and the sums of all ranks: the collective of the forward pass."""
    # With statistics for each position, entries are samples; only groups take the number of all samples.
    sends_samples = task.spec.groups is not None or not task.spec.per_position
    parts = [mean, squares, *sums] if sends_samples else [mean, squares, *sums[:-1]]
    message = torch.cat([value.reshape(-1) for value in parts])
    gathered = message.new_empty(task.group.size() * len(message), dtype=task.dtype)
    # torch renamed it in 2.13.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    _run_collective(_STATISTICS, gather, gathered, message.to(task.dtype), group=task.group)
    gathered = gathered.to(message.dtype).view(-1, len(message))
    means, centred, *totals = (
        value.view(-1, *part.shape)
        for value, part in zip(gathered.split_with_sizes([p.numel() for p in parts], 1), parts, strict=True)
    )
    joined = formula.combine(torch, totals[0][..., None], means, centred)
    return *joined, Sums(*(value.sum(0) for value in totals), *([] if sends_samples else [sums.present]))


def sum_gradients(message: Tensor, task: Task) -> Tensor:
    """Sum gradients of mean and variance, ``(*positions, 2, d)``, over ranks: the collective of the backward pass."""
    flat = message.to(task.dtype).reshape(-1)  # the type on all ranks, whichever backend they use
    _run_collective(_STATISTICS, dist.all_reduce, flat, group=task.group)
    return flat.view(message.shape)


def joined_estimates(mean: Tensor, var: Tensor, sums: Sums, task: Task) -> MiniBatch:
    """Return ``formula.estimates`` of the mini-batch of all ranks, from the results of ``join``."""
    grouped = task.spec.groups is not None
    m = sums.entries if task.spec.per_position else sums.present
    present = sums.present if grouped else m
    number = (sums.present if grouped else sums.entries).clamp(min=1)
    s = Statistics(mean, var, sums.feature_mean / number, sums.feature_var / number, 1 / m.clamp(min=1))
    s = formula.unbiased(s, sums.entries.clamp(min=1), present.clamp(min=1))
    return MiniBatch(s, m, sums.entries, present)
