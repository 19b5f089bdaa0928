"""Several mini-batches in one large batch, their statistics kept apart.

A batch of ``G`` copies of ``N`` samples, copy after copy, goes through the model once. Each copy has its own
configuration in every BLN layer. To such a layer the copies are one more axis of positions: viewed as
``(N, G, *positions, C)``, its statistics over samples are those of each copy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import formula, functional
from ..config import StatisticsConfig
from ..formula import Statistics, Switches
from ..layer import BatchLayerNorm

Assignment = tuple[StatisticsConfig, ...]
"""One configuration for each BLN layer, in the order of ``bln.layers``."""

_BATCH_ONLY = StatisticsConfig.parse("FFTT")
_CPU_SLICE = 2**17
"""Numbers in a temporary tensor on the CPU. Larger ones leave the cache, and the allocator hands them back to the
system and takes them again, page by page, at every operation."""


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


@contextmanager
def apart(
    layers: Sequence[BatchLayerNorm],
    assignments: Sequence[Assignment],
    *,
    tiled: bool = False,
    early: bool = False,
    single: bool = False,
) -> Iterator[None]:
    """Run the layers on copies of a mini-batch, one for each assignment.

    Args:
        layers: All BLN layers of the model.
        assignments: The configurations of each copy.
        tiled: The input holds the copies already. Otherwise they are made in the first layer whose configuration is
            not the same in all assignments; what comes before it runs once.
        early: Make the copies in the first layer that is called.
        single: Every sample is a mini-batch of its own.
    """
    copies = _Copies(len(assignments), tiled, early, single)
    forwards = [layer.__dict__.get("forward") for layer in layers]
    try:
        with assigned(layers, assignments[0]):
            for at, layer in enumerate(layers):
                configs = [assignment[at] for assignment in assignments]
                layer.forward = copies.forward(layer, configs)  # type: ignore[method-assign]
            yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.__dict__["forward"] = forward


@contextmanager
def tiling(model: nn.Module, copies: int, known: dict[str, set[int]]) -> Iterator[None]:
    """Repeat what the model is given.

    Args:
        model: The model.
        copies: How often.
        known: Which of its arguments hold samples, found at the first call: those as long as the first. Later calls
            follow it, so that a last batch whose size happens to be that of another argument changes nothing.
    """

    def tile(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        sizes = [leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves]
        n = next((size for size in sizes if size is not None), None)
        if n is None:
            raise ValueError("the model takes no tensor that could be repeated")
        at = known.setdefault(str(spec), {i for i, size in enumerate(sizes) if size == n})
        repeated = [repeat(leaf, copies) if i in at else leaf for i, leaf in enumerate(leaves)]
        args, kwargs = pytree.tree_unflatten(repeated, spec)
        return args, kwargs

    handle = model.register_forward_pre_hook(tile, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def repeat(value: Tensor, copies: int) -> Tensor:
    """``copies`` of a tensor, one after the other along the dimension of samples."""
    return value.repeat(copies, *[1] * (value.dim() - 1))


class _Copies:
    """Where the copies are made, and how a layer treats them."""

    def __init__(self, number: int, tiled: bool, early: bool, single: bool) -> None:
        self.number = number
        self.tiled = tiled
        self.early = early
        self.single = single
        self.length: int | None = None  # of the input where the copies were made

    def forward(self, layer: BatchLayerNorm, configs: Sequence[StatisticsConfig]) -> Callable[..., Tensor]:
        """The layer's forward during the pass."""
        original = layer.forward
        alike = len(set(configs)) == 1

        def forward(x: Tensor, mask: Tensor | None = None) -> Tensor:
            # An input as long as the one the copies were made of is another branch's: it holds none yet.
            copied = self.tiled or (self.length is not None and len(x) != self.length)
            if not copied and (self.number == 1 or (alike and not self.early)):
                return _normalize(layer, x, mask, configs[:1], 1, self.single) if self.single else original(x, mask)
            if not copied:
                self.length = len(x)
            elif mask is not None and len(mask) * self.number == len(x):
                mask = repeat(mask, self.number)
            return _normalize(layer, x, mask, configs, self.number if copied else 1, self.single)

        return forward


def _normalize(
    layer: BatchLayerNorm,
    x: Tensor,
    mask: Tensor | None,
    configs: Sequence[StatisticsConfig],
    copies: int,
    single: bool,
) -> Tensor:
    """BLN of ``copies`` copies in ``x``, each mini-batch by itself; from one, a copy for each configuration."""
    channel_dim = functional.check(x, mask, layer.channel_dim)
    dtype = torch.promote_types(torch.promote_types(x.dtype, torch.float32), layer.population.batch_mean.dtype)
    # (N, copies, mini-batches, *positions, C): all but the first and the last are positions to the formula.
    parts = (copies, -1, 1) if single else (copies, 1, -1)
    rows = x.to(dtype).movedim(channel_dim, -1)
    rows = rows.reshape(*parts, *rows.shape[1:]).movedim(2, 0)
    if mask is not None:
        mask = mask.reshape(*parts, *mask.shape[1:]).movedim(2, 0)
        rows = torch.where(mask[..., None], rows, 0)

    n, _, batches = rows.shape[:3]
    result = rows.new_empty(len(configs), batches, n, *x.shape[1:])
    y = result.movedim(2 + channel_dim, -1).movedim(2, 0)
    some = len(configs) if rows.device.type != "cpu" else max(1, _CPU_SLICE // y[:, 0].numel())
    everything = _current(rows, mask, layer.per_position, _asked(configs)) if copies == 1 else None
    for start in range(0, len(configs), some):
        at = slice(start, start + some)
        of = slice(None) if copies == 1 else at
        y[:, at] = _transform(
            layer, rows[:, of], None if mask is None else mask[:, of], configs[at], everything, channel_dim
        )
    return result.flatten(0, 2).to(x.dtype)


def _transform(
    layer: BatchLayerNorm,
    rows: Tensor,
    mask: Tensor | None,
    configs: Sequence[StatisticsConfig],
    current: Statistics | None,
    channel_dim: int,
) -> Tensor:
    """Eqs 18-25 of some copies."""
    positions = tuple(rows.shape[3:-1])
    if current is None:
        current = _current(rows, mask, layer.per_position, _asked(configs))
    population = layer.population.statistics(positions if layer.per_position else (), _count(rows, mask, layer))
    if len(set(configs)) == 1:
        s = formula.choose(configs[0], current, population)
    else:
        s = formula.choose(_as_tensors(configs, rows), current, population, torch.where)
    if layer.per_position and s.batch_mean.dim() > len(positions):
        # In the order of the input's memory, else each operation walks through it in strides.
        at = channel_dim - 2 - len(positions)
        mean, var = (v.movedim(-1, at).contiguous().movedim(at, -1) for v in (s.batch_mean, s.batch_var))
        s = s._replace(batch_mean=mean, batch_var=var)
    gamma, beta = (None if p is None else p.to(rows.dtype) for p in (layer.weight, layer.bias))
    mix_eps = layer.eps if layer.mix_eps is None else layer.mix_eps
    y: Tensor = formula.transform(rows, s, gamma, beta, eps=layer.eps, mix_eps=mix_eps, dim_scale=layer.dim_scale)
    return y if mask is None else torch.where(mask[..., None], y, 0)


def _asked(configs: Sequence[StatisticsConfig]) -> StatisticsConfig:
    """Current where any asks for it."""
    return StatisticsConfig(*(all(switches) for switches in zip(*map(_switches, configs), strict=True)))


def _switches(config: StatisticsConfig) -> tuple[bool, bool, bool, bool]:
    return config.batch_mean, config.batch_std, config.feature_mean, config.feature_std


def _as_tensors(configs: Sequence[StatisticsConfig], rows: Tensor) -> Switches:
    """The switches of each copy, shaped to meet the statistics of ``rows``."""
    table = _table(tuple(configs), rows.device)
    ones = [1] * (rows.dim() - 3)  # mini-batches and positions
    return Switches(*(s.reshape(-1, *ones, 1) for s in table[:2]), *(s.reshape(-1, *ones) for s in table[2:]))


@lru_cache(256)  # a device would have to wait for them each time
def _table(configs: tuple[StatisticsConfig, ...], device: torch.device) -> tuple[Tensor, ...]:
    return torch.tensor([_switches(config) for config in configs], device=device).unbind(1)


def _current(rows: Tensor, mask: Tensor | None, per_position: bool, asked: StatisticsConfig) -> Statistics:
    """The current statistics of each mini-batch in ``rows``, shaped to be broadcast against it."""
    if per_position:
        return functional.current(rows, mask, True, asked)
    statistics = functional.current(rows, None, True, StatisticsConfig(True, True, *_switches(asked)[2:]))
    if asked.uses_batch:  # pooled: positions count as samples, copies and mini-batches stay apart
        positions = rows.dim() - 4

        def pool(value: Tensor) -> Tensor:
            return value.movedim(list(range(3, 3 + positions)), list(range(1, 1 + positions))).flatten(0, positions)

        batch = functional.current(pool(rows), None if mask is None else pool(mask), True, _BATCH_ONLY)
        mean, var = (s.reshape(*s.shape[:2], *[1] * positions, -1) for s in (batch.batch_mean, batch.batch_var))
        statistics = statistics._replace(batch_mean=mean, batch_var=var)
    return statistics


def _count(rows: Tensor, mask: Tensor | None, layer: BatchLayerNorm) -> int | Tensor:
    """``m`` of each mini-batch, shaped as ``1/m`` is used."""
    if mask is None:
        return rows.shape[0]
    if layer.per_position:
        return mask.sum(0)
    m = mask.reshape(*mask.shape[:3], -1).any(-1).sum(0)
    return m.reshape(*m.shape, *[1] * (mask.dim() - 3))
