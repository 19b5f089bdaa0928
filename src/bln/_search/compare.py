"""How far two evaluations may differ by rounding, and whether one failed for want of memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def tolerance(device: torch.device, outputs: Any) -> float:
    """The root of the coarsest epsilon in play.

    Other batch sizes make libraries sum in another order. Differences of an epsilon then grow from layer to layer,
    most where a variance is near 0, but seldom by 1/sqrt(epsilon), 3,000 in float32; and a false alarm costs time, not
    truth. Statistics that leak from one copy to the next change outputs by as much as configurations differ.
    """
    eps = [torch.finfo(t.dtype).eps for t in pytree.tree_leaves(outputs) if _is_float(t)]
    if torch.is_autocast_enabled(device.type):
        eps.append(torch.finfo(torch.get_autocast_dtype(device.type)).eps)
    if device.type == "cuda":
        eps.append(2.0**-10)  # TF32, on for convolutions unless switched off
    return math.sqrt(max(eps, default=torch.finfo(torch.float32).eps))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "out of memory" in text
        or "can't allocate memory" in text
    )
