"""Triton kernels for a GPU: training, alone or with other ranks, its statistics, and inference.

``train`` and ``infer`` do what ``bln.functional`` does with operators. For backward they keep the input and the small
statistics. Compiled graphs get the first as the operator ``bln::train``; inference a compiler fuses well by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from . import grouped, launch, synchronized
from .inference import infer
from .training import train

__all__ = ["grouped", "infer", "synchronized", "train", "usable"]

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_KINDS = (Tensor, Parameter)


def usable(x: Tensor, features: int, *parameters: Tensor | None) -> bool:
    """Whether these tensors can be handled here: such as the kernels know, and not under a function transform."""
    compiling = torch.compiler.is_compiling()
    if x.dtype not in _TYPES or features > launch.FEATURES or not (compiling or type(x) in _KINDS):
        return False
    for p in parameters:
        if p is None:
            continue
        if p.dtype not in _TYPES or not p.is_contiguous():
            return False
        if not (compiling or type(p) in _KINDS):
            return False
    return compiling or not (
        torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    )
