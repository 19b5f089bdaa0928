"""Triton kernels for a GPU: training and inference of the published form and of the grouped one.

For backward they keep the input and small statistics. In compiled graphs training is operators that a compiler sees;
inference a compiler fuses well by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._spec import Spec
from . import functions, ops, published
from .functions import infer, train, train_layer
from .launch import KINDS

__all__ = ["functions", "infer", "ops", "train", "train_layer", "usable"]

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
FEWEST_POSITIONS = 4
"""With fewer, a pair of coefficients for each sample and feature would be more to move than the input."""


def usable(x: Tensor, channel_dim: int, spec: Spec, residual: Tensor | None, *others: Tensor | None) -> bool:
    """Whether these tensors can be handled here: such as the kernels know, and not under a function transform."""
    compiling = torch.compiler.is_compiling()
    if x.dtype not in _TYPES or not (compiling or type(x) in KINDS) or x.numel() == 0:
        return False
    features, values = x.shape[channel_dim], x.numel() // x.shape[0]  # of a sample
    if spec.groups is None:
        fits = features <= published.WIDEST and values < 2**30
    else:
        fits = not spec.per_position and FEWEST_POSITIONS * features <= values < 2**31
        fits = fits and (residual is None or type(residual) in KINDS)
    if not fits:
        return False
    for other in others:
        if other is None:
            continue
        if other.dtype not in _TYPES or not other.is_contiguous() or not (compiling or type(other) in KINDS):
            return False
    return compiling or not (
        torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    )
