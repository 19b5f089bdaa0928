"""What ranks tell each other of a mini-batch: one collective forward, one backward.

Forward, a rank sends for each position (pooled: once) the mean and the centred sum of squares of each feature, its
entries, the sums of its feature means and variances, which the population wants, and pooled its samples, which else
are its entries. Backward, it sends what its part of the loss says of the joined mean and variance. Both messages have
the shape of the statistics, not that of the input: ranks may hold any number of samples, none included, and nobody
waits for a count.
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
    def known(self) -> int:
        """How many positions statistics are kept for."""
        return math.prod(self.positions)


def task_of(x: Tensor, channel_dim: int, spec: Spec, population: Population, group: ProcessGroup) -> Task:
    """The task of normalizing ``x``; refuses positions that are not those of all ranks, when ranks first meet.

    Messages of different positions would not fit together.
    """
    positions = population.positions_for(positions_of(x, channel_dim, spec))
    if spec.per_position and not population.agreed_on_positions and not torch.compiler.is_compiling():
        known = everyones(positions, group, x.device)
        if len(set(known)) > 1:
            raise ValueError(
                f"the layer keeps statistics for each position, and ranks have different positions: {known}. Ways out: "
                "(1) position_shape= the longest sequence there will be, on all ranks; (2) per_position=False; (3) pad "
                "to one shape"
            )
        population.agreed_on_positions = True
    return Task(channel_dim, spec, positions, group, population.batch_mean.dtype)


def everyones(value: Any, group: ProcessGroup, device: torch.device) -> list[Any]:
    """What each rank says: anything that can be pickled. NCCL sends by way of ``device``."""
    said: list[Any] = [None] * group.size()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _exchange("meet the others", dist.all_gather_object, said, value, group=group)
    return said


def fit(value: Tensor, positions: tuple[int, ...]) -> Tensor:
    """Pad with zeros where a sequence has fewer positions than statistics are kept for."""
    if not positions or value.shape[0] == positions[0]:
        return value
    return torch.cat([value, value.new_zeros(positions[0] - value.shape[0], *value.shape[1:])])


def here(value: Tensor, positions: tuple[int, ...], rows: Tensor) -> Tensor:
    """Cut to the positions of the input."""
    return value[: rows.shape[1]] if positions and rows.shape[1] < positions[0] else value


class Sums(NamedTuple):
    """What ranks only have to add."""

    entries: Tensor
    """For each position."""
    feature_mean: Tensor
    """Summed over samples: for each position, pooled over positions, or for each group."""
    feature_var: Tensor
    present: Tensor
    """Samples with any real entry."""


def sums_of(
    feature_mean: Tensor, feature_var: Tensor, entries: int | Tensor, present: int | Tensor, task: Task
) -> Sums:
    """Sums of feature statistics and counts, as tensors at the positions statistics are kept for."""
    entries, present = (
        count.to(feature_var.dtype) if isinstance(count, Tensor) else feature_var.new_full(shape, count)
        for count, shape in ((entries, feature_var.shape), (present, ()))
    )
    if task.spec.groups is None:
        feature_mean, feature_var = (fit(value, task.positions) for value in (feature_mean, feature_var))
    return Sums(fit(entries, task.positions), feature_mean, feature_var, present)


def _exchange(what: str, collective: Any, *arguments: Any, group: ProcessGroup) -> None:
    """Run a collective, with an error that says what may have happened; ``what`` begins it."""
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
    """Batch mean and variance over all ranks, and the ranks' sums: the collective of forward."""
    # For each position samples are its entries: only groups need to know them as a whole.
    sends_samples = task.spec.groups is not None or not task.spec.per_position
    parts = [mean, squares, *sums] if sends_samples else [mean, squares, *sums[:-1]]
    message = torch.cat([value.reshape(-1) for value in parts])
    gathered = message.new_empty(task.group.size() * len(message), dtype=task.dtype)
    # torch renamed it in 2.13.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    _exchange(_STATISTICS, gather, gathered, message.to(task.dtype), group=task.group)
    gathered = gathered.to(message.dtype).view(-1, len(message))
    means, centred, *totals = (
        value.view(-1, *part.shape)
        for value, part in zip(gathered.split_with_sizes([p.numel() for p in parts], 1), parts, strict=True)
    )
    joined = formula.combine(torch, totals[0][..., None], means, centred)
    return *joined, Sums(*(value.sum(0) for value in totals), *([] if sends_samples else [sums.present]))


def add_up(message: Tensor, task: Task) -> Tensor:
    """Over ranks, what the loss says of mean and variance, ``(*positions, 2, d)``: the collective of backward."""
    flat = message.to(task.dtype).reshape(-1)  # the same on all ranks, whatever way they go
    _exchange(_STATISTICS, dist.all_reduce, flat, group=task.group)
    return flat.view(message.shape)


def conclude(mean: Tensor, var: Tensor, sums: Sums, task: Task) -> MiniBatch:
    """What the mini-batch of all ranks says of the population, as ``formula.estimates``, from what ``join`` gave."""
    grouped = task.spec.groups is not None
    m = sums.entries if task.spec.per_position else sums.present
    present = sums.present if grouped else m
    number = (sums.present if grouped else sums.entries).clamp(min=1)
    s = Statistics(mean, var, sums.feature_mean / number, sums.feature_var / number, 1 / m.clamp(min=1))
    s = formula.unbiased(s, sums.entries.clamp(min=1), present.clamp(min=1))
    return MiniBatch(s, m, sums.entries, present)
