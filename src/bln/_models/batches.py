"""Batches of any structure: how many samples they hold, a part of them, and their device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset


def check_batches(batches: Any) -> None:
    """Refuse a tensor or a dataset, which iterate over samples, not over batches."""
    if isinstance(batches, Tensor):
        what, way_out = f"one tensor of shape {tuple(batches.shape)}", "[x], or x.split(25)"
    elif isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        what = f"a dataset, {type(batches).__name__}"
        way_out = "torch.utils.data.DataLoader(dataset, batch_size=25)"
    else:
        return
    raise TypeError(
        f"expected an iterable of batches, got {what}, whose samples would be taken for batches; pass {way_out}"
    )


def to_device(value: Any, device: torch.device) -> Any:
    """Move a tensor, or the tensors in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_device(item, device) for item in value]
    return value


def is_pair(value: Any) -> bool:
    """Whether a value is a tuple or list of two, as ``(inputs, targets)``."""
    return isinstance(value, tuple | list) and len(value) == 2


def count_samples(batch: Any) -> int:
    """Count the samples of a mini-batch: its targets, if it is ``(inputs, targets)``."""
    return length(batch[1], batch[0]) if is_pair(batch) else length(batch)


def length(*values: Any) -> int:
    """Return the length of the first tensor in ``values``, which may be nested."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise ValueError("a batch holds no tensor to tell how many samples it has")


def holds_samples(leaf: Any, n: int) -> bool:
    """Whether a leaf of a mini-batch is a tensor with one entry for each of ``n`` samples."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == n


def part(batch: Any, start: int, stop: int) -> Any:
    """Return some samples of a mini-batch, as a mini-batch."""
    n = count_samples(batch)
    return pytree.tree_map(lambda leaf: leaf[start:stop] if holds_samples(leaf, n) else leaf, batch)
