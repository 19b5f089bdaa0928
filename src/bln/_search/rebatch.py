"""The same samples in other mini-batches: shuffled, sorted by label, or one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from .._distributed.ranks import Ranks

ORDERS = ("shuffled", "sorted", "single")


class _Samples(Dataset[Any]):
    """All samples of some mini-batches, concatenated; some of them, by their indices, are a mini-batch."""

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
        inputs = len(pytree.tree_leaves(batches[0][0])) if is_pair(batches[0]) else 0
        if inputs and not any(held for _, held in self._leaves[:inputs]):
            raise _not_together(
                f"but no input has {lengths[0]} of them, as many as there are targets; give targets with a first "
                "dimension of samples, or"
            )
        self.number, self.size = sum(lengths), lengths[0]

    def __getitem__(self, index: Tensor) -> Any:
        leaves = [leaf[index.to(leaf.device)] if held else leaf for leaf, held in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


def _not_together(why: str) -> ValueError:
    return ValueError(f"rebatch=True puts samples of all batches together, {why} leave rebatch=False")


def reorder(ranks: Ranks, batches: Sequence[Any]) -> dict[str, Iterable[Any]]:
    """Each rank's samples in other orders, by name, in mini-batches as large as its first one.

    ``sorted`` is missing where targets on any rank do not have one value for each sample. ``single`` has the
    mini-batches' size too; its samples are evaluated one by one.
    """
    own: dict[str, Iterable[Any]] = _orders(_Samples(batches)) if batches else dict.fromkeys(ORDERS, ())
    everywhere = ranks.gather(torch.tensor([[name in own for name in ORDERS]])).all(0).tolist()
    return {name: own[name] for name, wanted in zip(ORDERS, everywhere, strict=True) if wanted}


def _orders(samples: _Samples) -> dict[str, Iterable[Any]]:
    given = torch.arange(samples.number)
    orders = {"shuffled": torch.randperm(samples.number, generator=torch.Generator().manual_seed(0)), "single": given}
    batch = samples[given]
    targets = batch[1] if is_pair(batch) else None
    if isinstance(targets, Tensor) and targets.dim() and targets.numel() == len(targets) == samples.number:
        orders["sorted"] = targets.reshape(-1).cpu().argsort(stable=True)
    return {
        name: DataLoader(samples, batch_size=None, sampler=order.split(samples.size), collate_fn=lambda batch: batch)
        for name, order in orders.items()
    }


def part(batch: Any, start: int, stop: int) -> Any:
    """Some samples of a mini-batch, as a mini-batch."""
    n = count_samples(batch)
    return pytree.tree_map(lambda leaf: leaf[start:stop] if holds_samples(leaf, n) else leaf, batch)


def count_samples(batch: Any) -> int:
    """Count the samples of a mini-batch: its targets, if it is ``(inputs, targets)``."""
    return length(batch[1], batch[0]) if is_pair(batch) else length(batch)


def length(*values: Any) -> int:
    """The length of the first tensor in ``values``, which may be nested."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise ValueError("a batch holds no tensor to tell how many samples it has")


def is_pair(value: Any) -> bool:
    """Whether a value is a tuple or list of two, as ``(inputs, targets)``."""
    return isinstance(value, tuple | list) and len(value) == 2


def holds_samples(leaf: Any, n: int) -> bool:
    """Whether a leaf of a mini-batch is a tensor with one entry for each of ``n`` samples."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == n
