"""Ranks that calibrate or search together: they share results, fail together, and merge their population statistics."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import formula
from ..layer import BatchLayerNorm
from ..population import STATISTICS
from .group import Group
from .messages import MOST_POSITIONS, exchange

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..population import Population


class OtherRankFailedError(RuntimeError):
    """Another rank raised an exception; its own error says why."""


class Ranks:
    """The ranks of a group, which meet at the same places of a program; a process alone is a group of one.

    Who comes to a meeting says first whether all is well. So a rank that failed tells the others, and nobody waits.
    """

    def __init__(self, process_group: ProcessGroup | Literal["world"] | None, model: nn.Module) -> None:
        self._group: Any = None if process_group is None else Group(process_group).resolve()
        self.size = 1 if self._group is None else self._group.size()
        self.rank = 0 if self._group is None else self._group.rank()
        self._device = torch.device("cpu")
        if self._group is not None and "cpu" not in dist.get_backend_config(self._group):
            self._device = next(chain(model.parameters(), model.buffers())).device
        self._guarded = False

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Fail the other ranks at their next meeting if this one raises an exception; all leave the block together."""
        if self._guarded or self.size == 1:
            yield
            return
        self._guarded = True
        try:
            yield
            self.meet()
        except OtherRankFailedError:
            raise
        except BaseException:  # Ctrl-C too: the others would wait for this rank
            with suppress(RuntimeError):  # they may be gone; the exception at hand is the one to tell
                self._say(0, ok=False)
            raise
        finally:
            self._guarded = False

    def meet(self, number: int = 0) -> list[int]:
        """The numbers of all ranks; an error if one of them failed."""
        said = self._say(number, ok=True)
        if failed := [rank for rank, (ok, _) in enumerate(said) if not ok]:
            raise OtherRankFailedError(
                f"rank {self.rank} of {self.size} stopped, since rank {', '.join(map(str, failed))} raised an "
                "exception; the error there says why"
            )
        return [number for _, number in said]

    def _say(self, number: int, *, ok: bool) -> list[list[int]]:
        if self.size == 1:
            return [[int(ok), number]]
        return self._all(torch.tensor([int(ok), number])).tolist()

    def _all(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, of one shape, stacked."""
        tensor = tensor.to(self._device)
        heard = [torch.empty_like(tensor) for _ in range(self.size)]
        exchange("meet the others", dist.all_gather, heard, tensor, group=self._group)
        return torch.stack(heard).cpu()

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks one after the other; they may differ in their first dimension."""
        if self.size == 1:
            return tensor
        lengths = self.meet(len(tensor))
        if max(lengths) == 0:
            return tensor
        padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        return torch.cat([part[:length] for part, length in zip(self._all(padded), lengths, strict=True)])

    def tell(self, numbers: list[int]) -> list[int]:
        """Rank 0's numbers; all give as many."""
        return self.gather(torch.tensor([numbers]))[0].tolist()

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of tensors of one shape."""
        if self.size == 1:
            return tensor
        self.meet()
        there = tensor.to(self._device)
        exchange("meet the others", dist.all_reduce, there, group=self._group)
        return there.to(tensor.device)


@torch.no_grad()
def merge(layers: Mapping[str, BatchLayerNorm], ranks: Ranks, *, share: bool) -> None:
    """Give all ranks the statistics of all: averages weighted by samples, as one process would have over all batches.

    With ``share`` each rank is left its share of the counters instead of the sum.
    """
    if ranks.size == 1:
        return
    _agree(layers, ranks)
    parts = []
    for layer in layers.values():
        samples = layer.population.samples.double()
        values = [_weighted(layer.population, name, getattr(layer.population, name), samples) for name in STATISTICS]
        parts += [samples, layer.population.updates.double(), *(value * weight for value, weight in values)]
    # Float64 keeps counters exact, and a value that all ranks share as it was.
    device = parts[0].device
    total = iter(ranks.add(torch.cat([p.reshape(-1).to(device) for p in parts])).split([p.numel() for p in parts]))  # type: ignore[no-untyped-call]
    for layer in layers.values():
        population = layer.population
        samples, updates = (next(total).reshape(c.shape).to(c.device) for c in (population.samples, population.updates))
        for name in STATISTICS:
            old = getattr(population, name)
            value, weight = _weighted(population, name, next(total).reshape(old.shape).to(old.device), samples)
            old.copy_(torch.where(weight > 0, value / weight.clamp(min=1), old))
        for counter, added in ((population.samples, samples), (population.updates, updates)):
            counter.copy_((added / ranks.size).ceil() if share else added)


def _weighted(population: Population, name: str, value: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """A statistic in float64, and its samples in a shape to multiply with."""
    return value.double(), formula.broadcast_counter(name, samples[STATISTICS.index(name)], population.groups)


def _agree(layers: Mapping[str, BatchLayerNorm], ranks: Ranks) -> None:
    """Check that ranks have the same layers, and learn the positions that any of them knows."""
    mine = zlib.crc32(repr([(name, layer.num_features, layer.groups) for name, layer in layers.items()]).encode())
    if len(set(ranks.meet(mine))) > 1:
        raise ValueError(f"ranks have models with different BatchLayerNorm layers; rank {ranks.rank} has {[*layers]}")
    rows = []
    for layer in layers.values():
        positions = layer.population.position_shape
        rows.append([-1] if positions is None else [len(positions), *positions])
        rows[-1] += [0] * (1 + MOST_POSITIONS - len(rows[-1]))
    told = ranks.gather(torch.tensor([rows])).tolist() if rows else []
    for (name, layer), *all_sizes in zip(layers.items(), *told, strict=True):
        known = {tuple(sizes[1 : 1 + sizes[0]]) for sizes in all_sizes if sizes[0] >= 0}
        if len(known) > 1:
            raise ValueError(
                f"layer {name!r} keeps statistics for different positions on different ranks: {sorted(known)}; give "
                "it position_shape= the largest, or per_position=False"
            )
        if known and layer.population.position_shape is None:
            layer.population.learn_positions(known.pop())
