"""Training and inference of both forms by Triton kernels on a GPU.

In compiled graphs, training is the operators of ``ops``, and inference the plain formula, which compilers fuse well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._spec import Spec
from . import functions, ops, published
from .functions import infer, train, train_layer
from .launch import PLAIN_TYPES

__all__ = ["functions", "infer", "ops", "train", "train_layer", "usable"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_POSITIONS = 4
"""With fewer, the coefficients of each sample and feature would be more bytes than the input."""


def usable(x: Tensor, channel_dim: int, spec: Spec, residual: Tensor | None, *others: Tensor | None) -> bool:
    """Whether the kernels can take these tensors: their types, sizes and layout, outside of function transforms."""
    compiling = torch.compiler.is_compiling()
    if x.dtype not in _DTYPES or not (compiling or type(x) in PLAIN_TYPES) or x.numel() == 0:
        return False
    features, values = x.shape[channel_dim], x.numel() // x.shape[0]  # values of a sample
    if spec.groups is None:
        fits = features <= published.MAX_FEATURES and values < 2**30
    else:
        fits = not spec.per_position and MIN_POSITIONS * features <= values < 2**31
        fits = fits and (residual is None or type(residual) in PLAIN_TYPES)
    if not fits:
        return False
    for other in others:
        if other is None:
            continue
        if other.dtype not in _DTYPES or not other.is_contiguous() or not (compiling or type(other) in PLAIN_TYPES):
            return False
    return compiling or not (
        torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    )
