"""A rule for ``torch.vmap`` that torch's recurrent modules lack: copies of a mini-batch are more samples to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def forwards(model: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
    """A ``forward`` that can be vectorized, for each recurrent module of the model."""
    found = (module for module in model.modules() if isinstance(module, nn.RNNBase))
    return {module: partial(_forward, module.forward, 0 if module.batch_first else 1) for module in found}


def _forward(forward: Callable[..., Any], samples: int, x: Any, hx: Any = None) -> Any:
    """Run ``forward`` on an input with samples along the dimension ``samples``."""
    if not isinstance(x, Tensor) or x.dim() != 3:  # packed, or a single sample: for those there is no rule
        return forward(x, hx)
    states = hx if isinstance(hx, tuple) else () if hx is None else (hx,)
    output, *states = _Recurrence.apply(forward, samples, x, *states)  # type: ignore[no-untyped-call]
    return output, tuple(states) if len(states) > 1 else states[0]


class _Recurrence(torch.autograd.Function):
    """Input and states in, output and states out; the search differentiates nothing."""

    @staticmethod
    def forward(forward: Callable[..., Any], samples: int, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        output, after = forward(x, states if len(states) > 1 else states[0] if states else None)
        return (output, *after) if isinstance(after, tuple) else (output, after)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], forward: Callable[..., Any], samples: int, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Lay the copies beside each other along the dimension of samples, which is 1 in all states."""
        folded = []
        for tensor, copies, at in zip(tensors, in_dims[2:], (samples, 1, 1), strict=False):
            if copies is None:
                tensor, copies = tensor.expand(info.batch_size, *tensor.shape), 0
            folded.append(tensor.movedim(copies, at).flatten(at, at + 1))
        results = _Recurrence.apply(forward, samples, *folded)  # type: ignore[no-untyped-call]
        dims = samples, 1, 1
        unfolded = tuple(r.unflatten(at, (info.batch_size, -1)) for r, at in zip(results, dims, strict=False))
        return unfolded, dims[: len(results)]
