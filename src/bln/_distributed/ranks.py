"""Ranks that calibrate or search together: they exchange results, fail together, and merge population statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import formula
from ..formula import COUNTERS, Statistics
from .group import Group
from .messages import gather_objects

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..layer import BatchLayerNorm


class OtherRankFailedError(RuntimeError):
    """Another rank raised an exception; its own error says why."""


class Ranks:
    """The ranks of a group, which make the same exchanges in the same order; a process alone is a group of one.

    Each exchange also says whether a rank has failed. So if one fails, the others stop instead of waiting for it.
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
        """Stop the other ranks at their next exchange if this one raises an exception; all leave the block together."""
        if self._guarded or self.size == 1:
            yield
            return
        self._guarded = True
        try:
            yield
            self.exchange()
        except OtherRankFailedError:
            raise
        except BaseException:  # Ctrl-C too: the others would wait for this rank
            with suppress(RuntimeError):  # they may be gone; the exception at hand is the one to show
                gather_objects((False, None), self._group, self._device)
            raise
        finally:
            self._guarded = False

    def exchange(self, value: Any = None) -> list[Any]:
        """Return the values of all ranks, of anything that can be pickled; raise an error if one of them failed."""
        if self.size == 1:
            return [value]
        answers = gather_objects((True, value), self._group, self._device)
        if failed := [rank for rank, (succeeded, _) in enumerate(answers) if not succeeded]:
            raise OtherRankFailedError(
                f"rank {self.rank} of {self.size} stopped, since rank {', '.join(map(str, failed))} raised an "
                "exception; the error there says why"
            )
        return [value for _, value in answers]

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the tensors of all ranks, which may differ in their first dimension."""
        return tensor if self.size == 1 else torch.cat(self.exchange(tensor.cpu()))

    def broadcast(self, numbers: list[int]) -> list[int]:
        """Return the numbers of rank 0."""
        numbers = self.exchange(numbers)[0]
        return numbers


@torch.no_grad()
def merge(layers: Mapping[str, BatchLayerNorm], ranks: Ranks, *, share: bool) -> None:
    """Average population statistics over ranks, weighted by samples, as one process would over all batches.

    Counters are added up; with ``share`` each rank gets its share of the sum instead.
    """
    if ranks.size == 1:
        return
    _agree(layers, ranks)
    own = [{name: buffer.cpu() for name, buffer in layer.population.named_buffers()} for layer in layers.values()]
    for layer, *parts in zip(layers.values(), *ranks.exchange(own), strict=True):
        population = layer.population
        for row, name in enumerate(Statistics._fields):
            weights = [formula.broadcast_counter(name, part["samples"][row], population.groups) for part in parts]
            # In float64 a value that all ranks share stays as it was.
            total: Any = sum(weight * part[name].double() for weight, part in zip(weights, parts, strict=True))
            number: Any = sum(weights)
            old = getattr(population, name)
            old.copy_(torch.where(number > 0, total / number.clamp(min=1), old.cpu()))
        for name in COUNTERS:
            added: Any = sum(part[name] for part in parts)
            getattr(population, name).copy_((added / ranks.size).ceil() if share else added)


def _agree(layers: Mapping[str, BatchLayerNorm], ranks: Ranks) -> None:
    """Check that ranks have the same layers, and learn the positions that any of them knows."""
    signatures = ranks.exchange([(name, layer.num_features, layer.groups) for name, layer in layers.items()])
    if any(other != signatures[0] for other in signatures):
        raise ValueError(f"ranks have models with different BatchLayerNorm layers; rank {ranks.rank} has {[*layers]}")
    positions = ranks.exchange([layer.population.position_shape for layer in layers.values()])
    for (name, layer), *shapes in zip(layers.items(), *positions, strict=True):
        known = {shape for shape in shapes if shape is not None}
        if len(known) > 1:
            raise ValueError(
                f"layer {name!r} keeps statistics for different positions on different ranks: {sorted(known)}; give "
                "it position_shape= the largest, or per_position=False"
            )
        if known and layer.population.position_shape is None:
            layer.population.learn_positions(known.pop())
