"""Several configurations in one pass: the model is vectorized over them.

``torch.vmap`` follows which values differ between configurations. What precedes the first BLN layer that differs is
computed once. After it, every configuration has a copy of the mini-batch, with statistics of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..formula import Priors
from ..layer import BatchLayerNorm
from .per_layer import Assignment
from .rebatch import count_samples, holds_samples


@contextmanager
def assigned(layers: Sequence[BatchLayerNorm], configs: Sequence[Any]) -> Iterator[None]:
    """Run the layers with these configurations, or with stacked ones."""
    before = [layer.config for layer in layers]
    try:
        for layer, config in zip(layers, configs, strict=True):
            layer._config = config
        yield
    finally:
        for layer, config in zip(layers, before, strict=True):
            layer._config = config


class _Stacked(Priors):
    """The configurations of all copies: prior strengths in tensors, by which ``formula.choose`` selects."""

    uses_batch = uses_features = True


def together(
    function: Callable[[], Any], layers: Sequence[BatchLayerNorm], assignments: Sequence[Assignment], width: int | None
) -> list[Any]:
    """Call ``function``, which runs the model, with up to ``width`` assignments in each pass; return its results."""
    if len(assignments) == 1:
        with assigned(layers, assignments[0]):
            return [function()]
    changing = [at for at, configs in enumerate(zip(*assignments, strict=True)) if len(set(configs)) > 1]
    priors = [[assignment[at].priors for at in changing] for assignment in assignments]

    def run(rows: Tensor) -> Any:
        configs: list[Any] = list(assignments[0])
        for at, row in zip(changing, rows, strict=True):
            configs[at] = _Stacked(*row.unbind())
        with assigned(layers, configs):
            return function()

    stacked = _vectorized(run, torch.tensor(priors, device=layers[0].population.batch_mean.device), 0, width)
    return [pytree.tree_map_only(Tensor, itemgetter(at), stacked) for at in range(len(assignments))]


def one_at_a_time(function: Callable[[Any], Any], batch: Any) -> Any:
    """Call ``function`` on each sample of a mini-batch, as a mini-batch of its own, in one pass."""
    n = count_samples(batch)
    dims = pytree.tree_map(lambda leaf: 0 if holds_samples(leaf, n) else None, batch)

    def run(sample: Any) -> Any:
        return function(pytree.tree_map(lambda leaf, dim: leaf if dim is None else leaf[None], sample, dims))

    return pytree.tree_map_only(Tensor, lambda leaf: leaf.flatten(0, 1), _vectorized(run, batch, dims))


def _vectorized(function: Callable[[Any], Any], values: Any, dims: Any, width: int | None = None) -> Any:
    """Call ``function`` on each entry of the values' first dimension; return its result, its tensors stacked."""
    known: list[Any] = []

    def tensors(value: Any) -> tuple[Tensor, ...]:
        leaves, spec = pytree.tree_flatten(function(value))
        if odd := [leaf for leaf in leaves if not isinstance(leaf, Tensor | str | int | float | None)]:
            raise TypeError(f"{type(odd[0]).__name__} may hold tensors that cannot be told apart")
        known[:] = leaves, spec
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    with warnings.catch_warnings():  # where an operator has no rule, it runs once for each copy
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
        stacked = iter(torch.vmap(tensors, (dims,), chunk_size=width)(values))
    leaves, spec = known
    return pytree.tree_unflatten([next(stacked) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
