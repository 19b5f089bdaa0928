"""The same samples in other mini-batches: shuffled otherwise, sorted by label, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..ranks import Ranks
from .scores import length

NAMES = ("shuffled", "sorted", "single")


@dataclass(frozen=True)
class Arrangement:
    """A way for samples to arrive: its name, its mini-batches, and whether each sample is one by itself."""

    name: str
    batches: Iterable[Any]
    single: bool = False


class _Batches(Sequence[Any]):
    """Mini-batches of given samples, put together when asked for."""

    def __init__(self, samples: _Samples, order: Tensor, size: int) -> None:
        self._samples = samples
        self._parts = torch.split(order, size)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, at: Any) -> Any:
        return self._samples.take(self._parts[at])


class _Samples:
    """All samples of some mini-batches, one after the other, whatever the structure of a batch."""

    def __init__(self, batches: Sequence[Any]) -> None:
        flat, specs = zip(*map(pytree.tree_flatten, batches), strict=True)
        lengths = [samples_in(batch) for batch in batches]
        if any(spec != specs[0] for spec in specs):
            raise ValueError("rebatch=True puts samples of all batches together, but batches differ in structure")
        self._spec = specs[0]
        self._leaves: list[Any] = []
        self._held: list[bool] = []
        for leaves in zip(*flat, strict=True):
            held = all(holds_samples(leaf, n) for leaf, n in zip(leaves, lengths, strict=True))
            if held and len({leaf.shape[1:] for leaf in leaves}) > 1:
                raise ValueError(
                    "rebatch=True puts samples of all batches together, but theirs have the shapes "
                    f"{sorted({tuple(leaf.shape[1:]) for leaf in leaves})}; pad them to one, or leave rebatch=False"
                )
            self._leaves.append(torch.cat(leaves) if held else leaves[0])
            self._held.append(held)
        if _is_pair(batches[0]) and not any(self._held[: len(pytree.tree_leaves(batches[0][0]))]):
            raise ValueError(
                f"rebatch=True puts samples of all batches together, but no input has {lengths[0]} of them, as many as "
                "there are targets; give targets with a first dimension of samples, or leave rebatch=False"
            )
        self.number = sum(lengths)

    def take(self, index: Tensor) -> Any:
        """A mini-batch of these samples."""
        leaves = [
            leaf[index.to(leaf.device)] if held else leaf for leaf, held in zip(self._leaves, self._held, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self._spec)


def arrangements_on(ranks: Ranks, batches: Sequence[Any]) -> list[Arrangement]:
    """Each rank's samples arrive otherwise, in the ways that all ranks with mini-batches have."""
    own = {arrangement.name: arrangement for arrangement in arrangements(batches)} if batches else None
    has = [own is None or name in own for name in NAMES]
    everywhere = ranks.gather(torch.tensor([has])).all(0).tolist()
    names = [name for name, wanted in zip(NAMES, everywhere, strict=True) if wanted]
    return [own[name] if own else Arrangement(name, [], name == "single") for name in names]


def arrangements(batches: Sequence[Any], seed: int = 0) -> list[Arrangement]:
    """The other ways for the samples of ``batches`` to arrive, in mini-batches as large as the first one.

    Sorting by label takes targets with one value for each sample; others are not sorted.
    """
    samples = _Samples(batches)
    size = samples_in(batches[0])
    shuffled = torch.randperm(samples.number, generator=torch.Generator().manual_seed(seed))
    found = [Arrangement("shuffled", _Batches(samples, shuffled, size))]
    labels = _labels(batches)
    if labels is not None and len(labels) == samples.number:
        found.append(Arrangement("sorted", _Batches(samples, labels.argsort(stable=True), size)))
    found.append(Arrangement("single", _Batches(samples, torch.arange(samples.number), size), single=True))
    return found


def _labels(batches: Sequence[Any]) -> Tensor | None:
    targets = [batch[1] if _is_pair(batch) else None for batch in batches]
    if all(isinstance(t, Tensor) and t.dim() and t.numel() == len(t) for t in targets):
        return torch.cat([t.reshape(-1).cpu() for t in targets if t is not None])
    return None


def first(batch: Any, number: int) -> Any:
    """The first samples of a mini-batch."""
    n = samples_in(batch)
    return pytree.tree_map(lambda leaf: leaf[:number] if holds_samples(leaf, n) else leaf, batch)


def one_by_one(batch: Any) -> Iterator[Any]:
    """The samples of a mini-batch, each as a mini-batch of its own."""
    n = samples_in(batch)
    for at in range(n):
        yield pytree.tree_map(lambda leaf, at=at: leaf[at : at + 1] if holds_samples(leaf, n) else leaf, batch)


def samples_in(batch: Any) -> int:
    """How many samples a mini-batch has: as many as targets, if it is ``(inputs, targets)``."""
    return length(batch[1], batch[0]) if _is_pair(batch) else length(batch)


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2


def holds_samples(leaf: Any, n: int) -> bool:
    """Whether a leaf of a mini-batch is a tensor with one entry for each of ``n`` samples."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == n
