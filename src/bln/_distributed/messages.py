"""What ranks tell each other of a mini-batch: one collective forward, one backward.

Forward, a rank sends for each position (pooled: once) the mean and the centred sum of squares of each feature, its
entries, the sums of its feature means and variances, which the population wants, and pooled its samples ``m``, which
else are its entries. Backward, it sends what its part of the loss says of the joined mean and variance. Both
messages have the shape of the statistics, not that of the input: ranks may hold any number of samples, none included,
and nobody waits for a count.
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
from ..formula import Statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..population import Population


class Joined(NamedTuple):
    """What all ranks together say of a mini-batch, the same everywhere, for the population."""

    statistics: Statistics
    """At the positions statistics are kept for; the feature statistics averaged already, as of a single row."""
    m: int | Tensor
    """Samples, for each position; a number where it is the same for all and can be looked at."""
    entries: int | Tensor
    present: int | Tensor
    """Samples with any real entry."""

    def update(self, population: Population, momentum: float | None, task: Task) -> None:
        """Average the population with the mini-batch."""
        population.update(self.statistics, self.m, self.entries, None, task.positions, momentum, self.present)


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
    if isinstance(entries, Tensor):
        entries = entries.to(feature_var.dtype)
    else:
        entries = feature_var.new_full(feature_var.shape, entries)
    if task.spec.groups is None:
        feature_mean, feature_var = (fit(value, task.positions) for value in (feature_mean, feature_var))
    present = present.to(feature_var.dtype) if isinstance(present, Tensor) else feature_var.new_full((), present)
    return Sums(fit(entries, task.positions), feature_mean, feature_var, present)


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
    """The messages of all ranks, one after the other."""
    gathered = message.new_empty(group.size() * len(message))
    # torch renamed it in 2.13.
    collective = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    _exchange(collective, gathered, message, group=group)
    return gathered


def join(mean: Tensor, squares: Tensor, sums: Sums, task: Task) -> tuple[Tensor, Tensor, Sums]:
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
    return *joined, Sums(*added, *([] if task.sends_samples else [sums.present]))


def add_up(message: Tensor, task: Task) -> Tensor:
    """Over ranks, what the loss says of mean and variance, ``(*positions, 2, d)``: the collective of backward."""
    flat = message.to(task.dtype).reshape(-1)  # the same on all ranks, whatever way they go
    _exchange(dist.all_reduce, flat, group=task.group)
    return flat.view(message.shape)


def _number(count: Tensor) -> int | None:
    """The count, where it is the same at all positions and can be looked at: that saves operations."""
    if not is_host_readable(count):
        return None
    if not count.dim():
        return int(count)
    least, most = (int(bound) for bound in count.aminmax())
    return least if least == most else None


def conclude(mean: Tensor, var: Tensor, sums: Sums, task: Task) -> Joined:
    """For the population, from what ``join`` gave."""
    m = sums.entries if task.spec.per_position else sums.present
    same = _number(m)
    divisor: int | Tensor
    if same is None:
        counts: tuple[int | Tensor, int | Tensor] = m.long(), sums.entries.long()
        divisor, inverse_m = sums.entries.clamp(min=1), 1 / m.clamp(min=1)
    else:
        counts = same, same if m.dim() else int(sums.entries)
        divisor, inverse_m = clamp_count(counts[1]), m.new_full(m.shape, 1 / max(same, 1))
    present: int | Tensor = counts[0]
    if task.spec.groups is not None:
        number = _number(sums.present)
        present = sums.present.long() if number is None else number
        divisor = clamp_count(present)
    statistics = Statistics(mean, var, sums.feature_mean / divisor, sums.feature_var / divisor, inverse_m)
    return Joined(statistics, *counts, present)
