"""Several configurations in one pass: the model is vectorized over them.

``torch.vmap`` follows which values differ between configurations. What precedes the first BLN layer that differs is
computed once. After it, every configuration has a copy of the mini-batch, with statistics of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..config import StatisticsConfig
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


def differing(assignments: Sequence[Assignment]) -> list[int]:
    """The indices of layers whose configuration is not the same in all assignments."""
    return [at for at, configs in enumerate(zip(*assignments, strict=True)) if len(set(configs)) > 1]


def together(
    function: Callable[[], Any], model: nn.Module, layers: Sequence[BatchLayerNorm], assignments: Sequence[Assignment]
) -> list[Any]:
    """Call ``function``, which runs the model, with each assignment in one pass; return its results."""
    if len(assignments) == 1:
        with assigned(layers, assignments[0]):
            return [function()]
    changing = differing(assignments)
    tables = [
        _priors(tuple(assignment[at] for assignment in assignments), layers[at].population.batch_mean.device)
        for at in changing
    ]
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]

    def run(*rows: Tensor) -> Any:
        configs: list[Any] = list(assignments[0])
        for at, row in zip(changing, rows, strict=True):
            configs[at] = _Stacked(*row.unbind())
        with assigned(layers, configs), _folding(recurrent):
            return function()

    stacked = _vectorized(run, tables)
    return [pytree.tree_map_only(Tensor, itemgetter(at), stacked) for at in range(len(assignments))]


class _Stacked(Priors):
    """The configurations of all copies: prior strengths in tensors, by which ``formula.choose`` selects."""

    uses_batch = uses_features = True


def one_at_a_time(function: Callable[[Any], Any], batch: Any) -> Any:
    """Call ``function`` on each sample of a mini-batch, as a mini-batch of its own, in one pass."""
    leaves, spec = pytree.tree_flatten(batch)
    n = count_samples(batch)
    held = [at for at, leaf in enumerate(leaves) if holds_samples(leaf, n)]

    def run(*samples: Tensor) -> Any:
        parts = list(leaves)
        for at, sample in zip(held, samples, strict=True):
            parts[at] = sample[None]
        return function(pytree.tree_unflatten(parts, spec))

    stacked = _vectorized(run, [leaves[at] for at in held])
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.flatten(0, 1), stacked)


def _vectorized(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    """Call ``function`` on each entry of the inputs' first dimension; return its result, its tensors stacked."""
    known: list[Any] = []

    def tensors(*values: Tensor) -> tuple[Tensor, ...]:
        leaves, spec = pytree.tree_flatten(function(*values))
        if odd := [leaf for leaf in leaves if not isinstance(leaf, Tensor | str | int | float | None)]:
            raise TypeError(f"{type(odd[0]).__name__} may hold tensors that cannot be told apart")
        known[:] = leaves, spec
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    with warnings.catch_warnings():  # where an operator has no rule, it runs once for each copy
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
        stacked = iter(torch.vmap(tensors)(*inputs))
    leaves, spec = known
    return pytree.tree_unflatten([next(stacked) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


@lru_cache(256)  # else a device waits for the copy each time
def _priors(configs: tuple[StatisticsConfig, ...], device: torch.device) -> Tensor:
    """The prior strengths of each copy, ``(copies, 4)``."""
    return torch.tensor([config.priors for config in configs], device=device)


# ---- a rule for torch.vmap that recurrent modules lack


@contextmanager
def _folding(modules: Sequence[nn.RNNBase]) -> Iterator[None]:
    """Give recurrent modules a ``forward`` with the rule."""
    before = [(vars(module), vars(module).copy()) for module in modules]
    try:
        for module in modules:
            module.forward = partial(_recur, module.forward, 0 if module.batch_first else 1)
        yield
    finally:
        for attributes, kept in before:
            attributes.pop("forward")
            attributes |= kept


def _recur(forward: Callable[..., Any], samples: int, x: Any, hx: Any = None) -> Any:
    """Run a recurrent ``forward`` on an input with samples along the dimension ``samples``."""
    if not isinstance(x, Tensor) or x.dim() != 3:  # a packed sequence or a single sample: no rule for those
        return forward(x, hx)
    states = hx if isinstance(hx, tuple) else () if hx is None else (hx,)
    output, *states = _Recurrence.apply(forward, samples, x, *states)  # type: ignore[no-untyped-call]
    return output, tuple(states) if len(states) > 1 else states[0]


class _Recurrence(torch.autograd.Function):
    """A recurrent module to which copies of a mini-batch are more samples. It has no backward."""

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
        """Concatenate the copies along the dimension of samples, which is 1 in all states."""
        folded = []
        for tensor, copies, at in zip(tensors, in_dims[2:], (samples, 1, 1), strict=False):
            if copies is None:
                tensor, copies = tensor.expand(info.batch_size, *tensor.shape), 0
            folded.append(tensor.movedim(copies, at).flatten(at, at + 1))
        results = _Recurrence.apply(forward, samples, *folded)  # type: ignore[no-untyped-call]
        dims = samples, 1, 1
        unfolded = tuple(r.unflatten(at, (info.batch_size, -1)) for r, at in zip(results, dims, strict=False))
        return unfolded, dims[: len(results)]
