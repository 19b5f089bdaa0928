"""What ranks tell each other of a mini-batch: one collective forward, one backward.

Forward, a rank sends for each position (pooled: once) the mean and the centred sum of squares of each feature, its
entries, the sums of its feature means and variances, which the population wants, and pooled its samples, which else
are its entries. Backward, it sends what its part of the loss says of the joined mean and variance. Both messages have
the shape of the statistics, not that of the input: ranks may hold any number of samples, none included, and nobody
waits for a count.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import formula
from .._masks import clamp_count, is_host_readable
from .._spec import Spec
from ..formula import MiniBatch, Statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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


MOST_POSITIONS = 8
"""Dimensions of positions a layer may have, where ranks tell each other."""


def agree_on(positions: tuple[int, ...], group: ProcessGroup, device: torch.device) -> None:
    """Refuse positions that are not those of all ranks, before the first message: messages would not fit together."""
    sizes = (*positions, *[0] * MOST_POSITIONS)[:MOST_POSITIONS]
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


def exchange(what: str, collective: Any, *tensors: Any, group: ProcessGroup) -> None:
    """Run a collective, with an error that says what may have happened; ``what`` begins it."""
    if torch.compiler.is_compiling():
        collective(*tensors, group=group)
        return
    try:
        collective(*tensors, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {group.rank()} of {group.size()} could not {what}. Another rank has died, takes longer than the "
            "group's timeout, or does not do so as often as this one: ranks that run out of data must feed empty "
            f"batches. The error was: {error}"
        ) from error


_STATISTICS = "exchange statistics in a synchronized BatchLayerNorm"


def gather(message: Tensor, group: ProcessGroup) -> Tensor:
    """The messages of all ranks, one after the other."""
    gathered = message.new_empty(group.size() * len(message))
    # torch renamed it in 2.13.
    collective = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    exchange(_STATISTICS, collective, gathered, message, group=group)
    return gathered


def join(mean: Tensor, squares: Tensor, sums: Sums, task: Task) -> tuple[Tensor, Tensor, Sums]:
    """Batch mean and variance over all ranks, and the ranks' sums: the collective of forward."""
    # For each position samples are its entries: only groups need to know them as a whole.
    sends_samples = task.spec.groups is not None or not task.spec.per_position
    parts = [mean, squares, *sums] if sends_samples else [mean, squares, *sums[:-1]]
    message = torch.cat([value.reshape(-1) for value in parts])
    gathered = gather(message.to(task.dtype), task.group).to(message.dtype).view(-1, len(message))
    means, centred, *totals = (
        value.view(-1, *part.shape)
        for value, part in zip(gathered.split_with_sizes([p.numel() for p in parts], 1), parts, strict=True)
    )
    joined = formula.combine(torch, totals[0][..., None], means, centred)
    return *joined, Sums(*(value.sum(0) for value in totals), *([] if sends_samples else [sums.present]))


def add_up(message: Tensor, task: Task) -> Tensor:
    """Over ranks, what the loss says of mean and variance, ``(*positions, 2, d)``: the collective of backward."""
    flat = message.to(task.dtype).reshape(-1)  # the same on all ranks, whatever way they go
    exchange(_STATISTICS, dist.all_reduce, flat, group=task.group)
    return flat.view(message.shape)


def _count(count: Tensor) -> int | Tensor:
    """The count; as a number where it is the same at all positions and can be looked at, which saves operations."""
    if is_host_readable(count):
        least, most = (int(bound) for bound in count.aminmax())
        if least == most:
            return least
    return count.long()


def conclude(mean: Tensor, var: Tensor, sums: Sums, task: Task) -> MiniBatch:
    """The mini-batch of all ranks, from what ``join`` gave; its feature statistics are averaged already."""
    samples = sums.entries if task.spec.per_position else sums.present
    m, entries, present = _count(samples), _count(sums.entries), _count(sums.present)
    if task.spec.groups is None:
        present = m
    divisor = clamp_count(entries if task.spec.groups is None else present)
    features = sums.feature_mean / divisor, sums.feature_var / divisor
    return MiniBatch(Statistics(mean, var, *features, 1 / samples.clamp(min=1)), m, entries, present)
