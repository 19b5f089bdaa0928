"""The one place that chooses how a call is computed.

Backends share two functions. ``train(x, gamma, beta, mask, channel_dim, spec)`` returns ``y`` and the mini-batch's own
statistics, ``infer`` normalizes by those of a configuration. ``operators`` can do everything, ``native`` is torch's own
norms for the published form, ``triton`` has kernels for a GPU. ``synchronized`` trains on statistics over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._activation import Activation, finish
from .._autograd import recomputing
from .._distributed import messages
from .._spec import Spec
from ..config import StatisticsConfig
from ..formula import Statistics
from . import native, operators, synchronized
from .operators import Recall

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..layer import BatchLayerNorm
    from ..population import Population

quick: Callable[[Any, Tensor, Tensor | None], Tensor | None] | None = None
"""``train_layer`` of the kernels; ``None`` without Triton."""


def train_quickly(layer: BatchLayerNorm, x: Tensor, residual: Tensor | None) -> Tensor | None:
    """Train a layer by kernels without the checks, if a call of the same kind has passed them before; else ``None``."""
    if torch.compiler.is_compiling() or quick is None:  # a trace would guard quick, and may set it later
        return None
    return quick(layer, x, residual)


def train(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    population: Population | None = None, momentum: float | None = None, *, group: ProcessGroup | None = None,
    residual: Tensor | None = None, activation: Activation | None = None,
) -> tuple[Tensor, Statistics | None]:  # fmt: skip
    """Return ``g(BLN(x) + residual)`` of a checked ``x`` by its own statistics, and update the population.

    With a group the statistics are those of all its ranks. The statistics of the mini-batch are returned, too, unless
    the backend has updated the population with them.
    """
    statistic = None if population is None else population.batch_mean
    update = None if population is None or recomputing() else (population, momentum)
    kernels = triton_for(x, channel_dim, spec, residual, gamma, beta, statistic)
    compiling = torch.compiler.is_compiling()
    statistics: Statistics | None = None
    if group is not None and population is not None:
        task = messages.task_of(x, channel_dim, spec, population, group)
        # The kernels know no mask and no groups here, and a compiler does better with plain operators.
        if kernels is None or compiling or mask is not None or spec.groups is not None:
            y, new = synchronized.train(*widened(x, gamma, beta, statistic), mask, task)
            y = like(y, x)
        else:
            from .._distributed import kernels as over_ranks

            y, new = over_ranks.train(x, gamma, beta, task)
        if update is not None:
            population.update(new, task.positions, momentum)
    elif kernels is None or (compiling and spec.groups is not None and (mask is not None or population is None)):
        backend = native if spec.groups is None and mask is None else operators
        y, statistics = backend.train(*widened(x, gamma, beta, statistic), mask, channel_dim, spec)
        y = like(y, x)
    elif compiling:  # it does as well with operators where there is a mask, or nothing to update
        y, statistics = kernels.ops.train(x, gamma, beta, mask, channel_dim, spec, update)
    else:
        y, statistics = kernels.train(x, gamma, beta, mask, channel_dim, spec, update, residual, activation)
        residual = activation = None
    if population is not None and update is not None and statistics is not None:
        population.update_from(x, mask, channel_dim, spec, statistics, momentum)
    return finish(y, residual, mask, channel_dim, activation), statistics


def infer(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    population: Population | Statistics, config: StatisticsConfig, recall: Recall | None = None, *,
    residual: Tensor | None = None, activation: Activation | None = None,
) -> tuple[Tensor, Statistics | None]:  # fmt: skip
    """Return ``g(BLN(x) + residual)`` of a checked ``x`` by the statistics of a configuration, and these, if known."""
    if x.numel() == 0:
        return x.clone(), population if isinstance(population, Statistics) else None
    if not isinstance(population, Statistics):
        ready = recall is None and population.position_shape is not None and not torch.compiler.is_compiling()
        kernels = triton_for(x, channel_dim, spec, residual, gamma, beta, population.batch_mean) if ready else None
        if kernels is not None:
            tensors = x, gamma, beta, mask, channel_dim, spec, population, config
            return kernels.infer(*tensors, residual, activation), None
        population = population.at_positions_of(x, mask, channel_dim, spec)
    wide = widened(x, gamma, beta, population.batch_mean)
    y, statistics = operators.normalize(*wide, mask, channel_dim, spec, population, config, recall)
    return finish(like(y, x), residual, mask, channel_dim, activation), statistics


def like(y: Tensor, x: Tensor) -> Tensor:
    """Return the output in the input's type, and contiguous where the input is: people call ``.view()`` on it."""
    y = y.to(x.dtype)
    return y.contiguous() if x.is_contiguous() else y


def widened(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, statistic: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return input and parameters in the type of the computation: float32, or float64 if any argument is."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    for other in (gamma, beta, statistic):
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    return x.to(dtype), *(None if parameter is None else parameter.to(dtype) for parameter in (gamma, beta))  # type: ignore[return-value]


def triton_for(
    x: Tensor, channel_dim: int, spec: Spec, residual: Tensor | None, *others: Tensor | None
) -> ModuleType | None:
    """Return the Triton kernels, if these tensors can use them."""
    if (spec.groups is not None and spec.per_position) or not (_on_gpu(x) and _has_triton()):
        return None
    from . import triton

    return triton if triton.usable(x, channel_dim, spec, residual, *others) else None


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _has_triton() -> bool:
    global _triton, quick
    if _triton is None:
        _triton = find_spec("triton") is not None
        if _triton:  # a compiler cannot import
            version: str = import_module("triton").__version__
            _triton = tuple(map(int, version.split(".")[:2])) >= (3, 4)
        if _triton:
            quick = import_module("bln._backends.triton").train_layer
    return _triton


_triton: bool | None = None
# As torch.compiler.assume_constant_result does, but that imports the whole compiler, and Triton.
_has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]
