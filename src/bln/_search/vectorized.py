"""Several configurations in one pass: the model is vectorized over them.

``torch.vmap`` follows which values differ between configurations. What comes before the first BLN layer that differs is
computed once; behind it every configuration has a copy of the mini-batch, with statistics of its own.
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

from .. import _coefficients, _padding, formula, functional
from .._activation import check_residual, finish
from ..config import StatisticsConfig
from ..formula import Priors
from ..layer import BatchLayerNorm
from . import recurrent
from .arrange import holds_samples, samples_in

Assignment = tuple[StatisticsConfig, ...]
"""One configuration for each BLN layer, in the order of ``bln.layers``."""


@contextmanager
def assigned(layers: Sequence[BatchLayerNorm], assignment: Assignment) -> Iterator[None]:
    """Run the layers with these configurations."""
    before = [layer.config for layer in layers]
    try:
        for layer, config in zip(layers, assignment, strict=True):
            layer.config = config
        yield
    finally:
        for layer, config in zip(layers, before, strict=True):
            layer.config = config


def differing(assignments: Sequence[Assignment]) -> list[int]:
    """The layers whose configuration is not the same in all assignments."""
    return [at for at, configs in enumerate(zip(*assignments, strict=True)) if len(set(configs)) > 1]


def together(
    function: Callable[[], Any], model: nn.Module, layers: Sequence[BatchLayerNorm], assignments: Sequence[Assignment]
) -> list[Any]:
    """What ``function``, which calls the model, returns with each assignment, computed in one pass."""
    if len(assignments) == 1:
        with assigned(layers, assignments[0]):
            return [function()]
    changing = [layers[at] for at in differing(assignments)]
    tables = [
        _table(tuple(assignment[at] for assignment in assignments), layer.population.batch_mean.device)
        for at, layer in zip(differing(assignments), changing, strict=True)
    ]

    def run(*rows: Tensor) -> Any:
        forwards: dict[nn.Module, Callable[..., Any]] = {
            layer: partial(_forward, layer, Priors(*row.unbind())) for layer, row in zip(changing, rows, strict=True)
        }
        with _replaced(forwards | recurrent.forwards(model)):
            return function()

    with assigned(layers, assignments[0]):
        stacked = _vectorized(run, tables)
    return [pytree.tree_map_only(Tensor, itemgetter(at), stacked) for at in range(len(assignments))]


def one_at_a_time(function: Callable[[Any], Any], batch: Any) -> Any:
    """What ``function`` returns for a mini-batch whose samples are each a mini-batch of their own, in one pass."""
    leaves, spec = pytree.tree_flatten(batch)
    n = samples_in(batch)
    held = [at for at, leaf in enumerate(leaves) if holds_samples(leaf, n)]

    def run(*samples: Tensor) -> Any:
        own = dict(zip(held, samples, strict=True))
        parts = [own[at][None] if at in own else leaf for at, leaf in enumerate(leaves)]
        return function(pytree.tree_unflatten(parts, spec))

    stacked = _vectorized(run, [leaves[at] for at in held])
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.flatten(0, 1), stacked)


def _vectorized(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    """What ``function`` returns, its tensors stacked over the first dimension of the inputs."""
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


@contextmanager
def _replaced(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Give these modules another ``forward``."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, own in before.items():
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own


def _forward(
    layer: BatchLayerNorm, priors: Priors, x: Tensor, mask: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """The layer's ``forward``, which asks for a mask given around the model."""
    normalize = partial(_normalize, layer, priors, residual=residual)
    if mask is None and _padding.known():
        return _padding.normalize(layer, x, normalize)
    return normalize(x, mask)


def _normalize(
    layer: BatchLayerNorm, priors: Priors, x: Tensor, mask: Tensor | None, residual: Tensor | None
) -> Tensor:
    """The layer's inference (eqs 18-25) with a configuration of tensors."""
    spec, channel_dim = layer.spec, functional.check(x, mask, layer.channel_dim)
    check_residual(residual, x)
    dtype = torch.promote_types(torch.promote_types(x.dtype, torch.float32), layer.population.batch_mean.dtype)
    gamma, beta = (None if p is None else p.to(dtype) for p in (layer.weight, layer.bias))
    rows = x.to(dtype).movedim(channel_dim, -1)
    if mask is not None:
        rows = torch.where(mask[..., None], rows, 0)
    m, _ = functional.count(rows.shape[:-1], mask, spec.per_position)
    population = layer.population.statistics(tuple(rows.shape[1:-1]) if spec.per_position else (), m)
    s = formula.choose(priors, functional.current(rows, mask, spec), population, torch.where)
    if spec.coefficients:
        y = _coefficients.apply(rows, s, gamma, beta, mask, rows.dim() - 1, spec)
    else:
        y = formula.transform(rows, s, gamma, beta, spec=spec, xp=torch)
        y = y if mask is None else torch.where(mask[..., None], y, 0)
    y = y.movedim(-1, channel_dim).to(x.dtype)
    y = y.contiguous() if x.is_contiguous() else y
    return finish(y, residual, mask, channel_dim, layer.activation)


@lru_cache(256)  # a device would have to wait for them each time
def _table(configs: tuple[StatisticsConfig, ...], device: torch.device) -> Tensor:
    """The prior strengths of each copy, ``(copies, 4)``."""
    return torch.tensor([config.priors for config in configs], device=device)
