"""``layer.memory``: batch statistics of recent requests, joined at inference with those of the current one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from . import formula
from ._backends.operators import Recall
from ._masks import counts_of
from ._spec import Spec, positive
from .formula import Statistics
from .population import Population, keep_precision, window

_lock = threading.Lock()
"""Held while a request reads and writes; a module cannot hold one itself, since it could not be copied."""


class Memory(nn.Module):
    """Mean and variance over the samples of recent requests, as if they were samples of the current one.

    Each request is joined with the remembered ones, weighted by samples, and remembered with them. Together they count
    as ``samples`` samples at most, so that older requests fade. None of this is in the state dict.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, population: Population, samples: int) -> None:
        super().__init__()
        self.samples = positive("memory must be None or", samples)
        likes = {"mean": population.batch_mean, "var": population.batch_var, "count": population.inverse_m}
        for name, like in likes.items():
            self.register_buffer(name, torch.zeros_like(like), persistent=False)

    @torch.no_grad()
    def reset(self) -> None:
        """Forget all requests."""
        for buffer in self.buffers():
            buffer.zero_()

    def recall(self, x: Tensor, mask: Tensor | None, channel_dim: int, spec: Spec) -> Recall:
        """Return the function that joins the statistics of this request with the remembered ones."""
        m, _, positions = counts_of(x, mask, channel_dim, spec)
        return partial(self._join, m=m, positions=positions)

    def _join(self, current: Statistics, m: int | Tensor, positions: tuple[int, ...]) -> Statistics:
        """Join a request with the remembered ones, and remember the result if it is finite."""
        at = window(positions, tuple(self.mean.shape[:-1]))
        with nullcontext() if torch.compiler.is_compiling() else _lock:
            mean, var, count = (value[at] if at else value for value in (self.mean, self.var, self.count))
            counts = torch.stack([count, torch.zeros_like(count) + m])
            means, variances = torch.stack([mean, current.batch_mean]), torch.stack([var, current.batch_var])
            parts, number = counts[..., None], counts.sum(0)
            batch_mean, batch_var = formula.combine(torch, parts, means, parts * variances)
            with torch.no_grad():
                finite = batch_var.isfinite().all() & batch_mean.isfinite().all()
                for buffer, new in ((mean, batch_mean), (var, batch_var), (count, number.clamp(max=self.samples))):
                    # Through an alias: compiled, torch 2.13 forgets to write to a float64 input without dimensions.
                    buffer.detach().copy_(torch.where(finite, new, buffer))
        return current._replace(batch_mean=batch_mean, batch_var=batch_var, inverse_m=1 / number.clamp(min=1))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Memory:
        super()._apply(keep_precision(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Return the most samples that are remembered."""
        return f"samples={self.samples}"
