"""The same samples in other mini-batches: shuffled, sorted by label, or one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._distributed.ranks import Ranks

ORDERS = ("shuffled", "sorted", "single")


class _Samples:
    """All samples of some mini-batches, concatenated, whatever the structure of a batch."""

    def __init__(self, batches: Sequence[Any]) -> None:
        flat, specs = zip(*map(pytree.tree_flatten, batches), strict=True)
        lengths = [count_samples(batch) for batch in batches]
        if any(spec != specs[0] for spec in specs):
            raise _not_together("but batches differ in structure; give them one, or")
        self._spec = specs[0]
        self._leaves: list[tuple[Any, bool]] = []  # and whether a leaf holds samples
        for leaves in zip(*flat, strict=True):
            held = all(holds_samples(leaf, n) for leaf, n in zip(leaves, lengths, strict=True))
            if held and len(shapes := {tuple(leaf.shape[1:]) for leaf in leaves}) > 1:
                raise _not_together(f"but theirs have the shapes {sorted(shapes)}; pad them to one, or")
            self._leaves.append((torch.cat(leaves) if held else leaves[0], held))
        inputs = len(pytree.tree_leaves(batches[0][0])) if _is_pair(batches[0]) else 0
        if inputs and not any(held for _, held in self._leaves[:inputs]):
            raise _not_together(
                f"but no input has {lengths[0]} of them, as many as there are targets; give targets with a first "
                "dimension of samples, or"
            )
        self.number, self.size = sum(lengths), lengths[0]

    def take(self, index: Tensor) -> Any:
        leaves = [leaf[index.to(leaf.device)] if held else leaf for leaf, held in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


class _Batches(Sequence[Any]):
    """Mini-batches of samples in some order, put together when asked for."""

    def __init__(self, samples: _Samples, order: Tensor) -> None:
        self._samples, self._parts = samples, torch.split(order, samples.size)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, at: Any) -> Any:
        return self._samples.take(self._parts[at])


def _not_together(why: str) -> ValueError:
    return ValueError(f"rebatch=True puts samples of all batches together, {why} leave rebatch=False")


def reorder_on(ranks: Ranks, batches: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """Reorder each rank's samples, in the orders that all ranks with mini-batches have."""
    own = reorder(batches) if batches else dict.fromkeys(ORDERS, ())
    everywhere = ranks.gather(torch.tensor([[name in own for name in ORDERS]])).all(0).tolist()
    return {name: own[name] for name, wanted in zip(ORDERS, everywhere, strict=True) if wanted}


def reorder(batches: Sequence[Any], seed: int = 0) -> dict[str, Sequence[Any]]:
    """The samples of ``batches`` in other orders, by name, in mini-batches as large as the first one.

    ``sorted`` is missing where targets do not have one value for each sample. ``single`` has the mini-batches' size
    too; its samples are evaluated one by one.
    """
    samples = _Samples(batches)
    shuffled = torch.randperm(samples.number, generator=torch.Generator().manual_seed(seed))
    orders = {"shuffled": shuffled, "single": torch.arange(samples.number)}
    targets = [batch[1] if _is_pair(batch) else None for batch in batches]
    if all(isinstance(t, Tensor) and t.dim() and t.numel() == len(t) for t in targets):
        labels = torch.cat([t.reshape(-1).cpu() for t in targets if t is not None])
        if len(labels) == samples.number:
            orders["sorted"] = labels.argsort(stable=True)
    return {name: _Batches(samples, orders[name]) for name in ORDERS if name in orders}


def part(batch: Any, start: int, stop: int) -> Any:
    """Some samples of a mini-batch, as a mini-batch."""
    n = count_samples(batch)
    return pytree.tree_map(lambda leaf: leaf[start:stop] if holds_samples(leaf, n) else leaf, batch)


def count_samples(batch: Any) -> int:
    """Count the samples of a mini-batch: its targets, if it is ``(inputs, targets)``."""
    return length(batch[1], batch[0]) if _is_pair(batch) else length(batch)


def length(*values: Any) -> int:
    """The length of the first tensor in ``values``, which may be nested."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise ValueError("a batch holds no tensor to tell how many samples it has")


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2


def holds_samples(leaf: Any, n: int) -> bool:
    """Whether a leaf of a mini-batch is a tensor with one entry for each of ``n`` samples."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == n
