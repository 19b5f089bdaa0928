"""Triton kernels for a GPU: training, its statistics, and inference.

``train`` and ``infer`` do what ``bln.functional`` does with operators. For backward they keep the input and the small
statistics. Compiled graphs get the first as the operator ``bln::train``; inference a compiler fuses well by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from . import synchronized
from .inference import infer
from .training import train

__all__ = ["infer", "synchronized", "train", "usable"]

_FEATURES = 2**15  # all of them are in a tile
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def usable(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether these tensors can be handled here: such as the kernels know, and not under a function transform."""
    given = [p for p in parameters if p is not None]
    if not all(t.dtype in _TYPES for t in (x, *given)):
        return False
    if not all(p.is_contiguous() and p.shape[-1] <= _FEATURES for p in given):
        return False
    if torch.compiler.is_compiling():
        return True
    return all(type(t) in (Tensor, Parameter) for t in (x, *given)) and not (
        torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    )
