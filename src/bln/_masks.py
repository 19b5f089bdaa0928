"""Masks of padded inputs: hide entries, and count the samples and entries that are left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._spec import Spec


def not_a_mask(mask: Any) -> TypeError:
    """Return the error for a mask that is no boolean tensor."""
    got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
    way_out = "mask.bool()" if isinstance(mask, Tensor) else "torch.tensor(mask)"
    return TypeError(f"expected a boolean mask, true at real entries, got {got}; try {way_out}")


def hide(x: Tensor, mask: Tensor | None, channel_dim: int) -> Tensor:
    """Return ``x`` with 0 at hidden entries, whatever stands there, NaN included."""
    return x if mask is None else torch.where(mask.unsqueeze(channel_dim), x, 0)


def is_host_readable(value: Tensor) -> bool:
    """Whether Python may read the values: that takes no synchronization and breaks no graph."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return not traced and type(value) in (Tensor, nn.Parameter) and value.device.type == "cpu"


def count(shape: Sequence[int], mask: Tensor | None, per_position: bool) -> tuple[int | Tensor, int | Tensor]:
    """Return ``m`` and the number of entries of each batch statistic, for an input ``(N, *positions)`` and features.

    Under a mask both are tensors, with ``per_position`` one value for each position.
    """
    if mask is None:
        return shape[0], shape[0] if per_position else math.prod(shape)
    if per_position:
        m = mask.sum(0)
        return m, m
    return has_real_entry(mask).sum(), mask.sum()


def counts_of(
    x: Tensor, mask: Tensor | None, channel_dim: int, spec: Spec
) -> tuple[int | Tensor, int | Tensor, tuple[int, ...]]:
    """Return ``count`` of an input, and the positions that have statistics of their own."""
    shape = list(x.shape)
    del shape[channel_dim]
    return *count(shape, mask, spec.per_position), tuple(shape[1:]) if spec.per_position else ()


def positions_of(x: Tensor, channel_dim: int, spec: Spec) -> tuple[int, ...]:
    """Return the positions of an input that have statistics of their own."""
    return counts_of(x, None, channel_dim, spec)[2]


def has_real_entry(mask: Tensor) -> Tensor:
    """Return for each sample whether it has any real entry."""
    return mask.reshape(mask.shape[0], math.prod(mask.shape[1:])).any(1)


def clamp_count(count: int | Tensor) -> int | Tensor:
    """Clamp a count to 1, for use as a divisor."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
