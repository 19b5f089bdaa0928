"""Triton kernels for a GPU: training, its statistics, and inference.

``train`` and ``infer`` do what ``bln.functional`` does with operators. For backward they keep the input and the small
statistics. Compiled graphs get the first as the operator ``bln::train``; inference a compiler fuses well by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .inference import infer
from .training import train

__all__ = ["infer", "train", "usable"]

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def usable(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether these tensors can be handled here: in types the kernels know, and not under a function transform."""
    if x.dtype not in _TYPES or any(p is not None and p.dtype not in _TYPES for p in parameters):
        return False
    return torch.compiler.is_compiling() or not (
        torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    )
