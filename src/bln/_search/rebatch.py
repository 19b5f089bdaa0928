"""Put the same samples into other mini-batches: shuffled, sorted by label, or one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from .._distributed.ranks import Ranks
from .._models.batches import count_samples, holds_samples, is_pair

ORDERS = ("shuffled", "sorted", "single")


class _Samples(Dataset[Any]):
    """The samples of several mini-batches, concatenated; indexing by several samples gives a mini-batch of these."""

    def __init__(self, batches: Sequence[Any]) -> None:
        lengths = [count_samples(batch) for batch in batches]
        self.number, self.size = sum(lengths), lengths[0]
        try:
            self._held = pytree.tree_map(lambda *leaves: all(map(holds_samples, leaves, lengths)), *batches)
            concatenate = lambda held, *leaves: torch.cat(leaves) if held else leaves[0]  # noqa: E731
            self._joined = pytree.tree_map(concatenate, self._held, *batches)
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"rebatch=True puts samples of all batches together, but they differ in structure or shape: {error} "
                "Pad them to one shape, or leave rebatch=False"
            ) from error
        if is_pair(batches[0]) and not any(pytree.tree_leaves(self._held[0])):
            raise ValueError(
                f"rebatch=True takes as many samples as there are targets, {lengths[0]}, and no input has that many; "
                "give targets with a first dimension of samples, or leave rebatch=False"
            )

    def __getitem__(self, index: Tensor) -> Any:
        take = lambda held, leaf: leaf[index.to(leaf.device)] if held else leaf  # noqa: E731
        return pytree.tree_map(take, self._held, self._joined)

    def orders(self) -> dict[str, Iterable[Any]]:
        """Return the samples in other orders, in mini-batches as large as the first one."""
        in_order, random = torch.arange(self.number), torch.Generator().manual_seed(0)
        orders = {"shuffled": torch.randperm(self.number, generator=random), "single": in_order}
        targets = self._joined[1] if is_pair(self._joined) else None
        if isinstance(targets, Tensor) and targets.dim() and targets.numel() == len(targets) == self.number:
            orders["sorted"] = targets.reshape(-1).cpu().argsort(stable=True)
        return {
            name: DataLoader(
                self, batch_size=None, sampler=torch.split(order, self.size), collate_fn=lambda batch: batch
            )
            for name, order in orders.items()
        }


def reorder(ranks: Ranks, batches: Sequence[Any]) -> dict[str, Iterable[Any]]:
    """Return each rank's samples in other orders, by name; those of ``single`` are to be evaluated one by one.

    ``sorted`` is missing where targets on any rank do not have one value for each sample.
    """
    own = _Samples(batches).orders() if batches else dict[str, Iterable[Any]].fromkeys(ORDERS, ())
    everywhere = ranks.gather(torch.tensor([[name in own for name in ORDERS]])).all(0).tolist()
    return {name: own[name] for name, wanted in zip(ORDERS, everywhere, strict=True) if wanted}
