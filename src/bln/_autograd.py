"""Gradients of fast paths, taken through the plain operators they replace; whether a forward runs inside a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def differentiate(plain: Callable[..., Tensor], tensors: tuple[Tensor | None, ...], ctx: Any, dy: Tensor) -> list[Any]:
    """Gradients of ``plain(*tensors, *ctx.rest)`` for those that want one; differentiable again where that is asked."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [t if t is None or again else t.detach().requires_grad_() for t in tensors]
        y = plain(*inputs, *ctx.rest)
        wanted = [t if want else None for t, want in zip(inputs, ctx.needs_input_grad, strict=False)]
        given = [t for t in wanted if t is not None]
        found = iter(torch.autograd.grad(y, given, dy.to(y.dtype), create_graph=again))
    return [None if t is None else next(found) for t in wanted]


def recomputing() -> bool:
    """Whether this forward runs inside a backward, as activation checkpointing does to recompute what it dropped."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
