"""Autograd for fast paths: gradients through the plain operators they replace, and the forward of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def differentiate(plain: Callable[..., Tensor], tensors: tuple[Tensor | None, ...], ctx: Any, dy: Tensor) -> list[Any]:
    """Return the gradients of ``plain(*tensors, *ctx.rest)`` that are needed, differentiable where autograd records."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [t if t is None or again else t.detach().requires_grad_() for t in tensors]
        y = plain(*inputs, *ctx.rest)
        wanted = [t if want else None for t, want in zip(inputs, ctx.needs_input_grad, strict=False)]
        leaves = [t for t in wanted if t is not None]
        gradients = iter(torch.autograd.grad(y, leaves, dy.to(y.dtype), create_graph=again))
    return [None if t is None else next(gradients) for t in wanted]


def recomputing() -> bool:
    """Whether this forward runs inside a backward, where activation checkpointing recomputes what it dropped."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
