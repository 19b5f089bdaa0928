"""The one place that chooses how a call is computed.

Backends share two functions. ``train(x, gamma, beta, mask, channel_dim, spec)`` returns ``y`` and the mini-batch's own
statistics, ``infer`` normalizes by those of a configuration. ``operators`` can do everything, ``native`` is torch's own
norms for the published form, ``triton`` has kernels for a GPU.
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
from .._spec import Spec
from ..config import StatisticsConfig
from ..formula import Statistics
from . import native, operators
from .operators import Recall

if TYPE_CHECKING:
    from ..population import Population

quick: Callable[[Any, Tensor, Tensor | None], Tensor | None] | None = None
"""A layer's training call by kernels, past checks that such a call passed before; ``None`` without Triton."""


def train(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    channel_dim: int,
    spec: Spec,
    *,
    population: Population | None = None,
    momentum: float | None = None,
    residual: Tensor | None = None,
    activation: Activation | None = None,
) -> tuple[Tensor, Statistics | None]:
    """Normalize ``x``, which was checked, by its own statistics: ``g(BLN(x) + residual)``, and the statistics.

    A kernel may update the population itself; then there are no statistics to return.
    """
    kept = None if population is None else population.batch_mean
    kernels = triton_for(x, channel_dim, spec, residual, gamma, beta, kept)
    compiling = torch.compiler.is_compiling()
    if kernels is not None and compiling and spec.groups is not None and (mask is not None or population is None):
        kernels = None  # a compiler does as well with operators
    if kernels is not None:
        learning = population is not None and not recomputing()
        update = (population, momentum) if learning else None
        tensors = x, gamma, beta, mask, channel_dim, spec, update
        if not compiling:
            return kernels.train(*tensors, residual, activation)  # type: ignore[no-any-return]
        y, statistics = kernels.ops.train(*tensors)
    else:
        wide, gamma, beta = _widened(x, gamma, beta, kept)
        published = spec.groups is None and mask is None
        y, statistics = (native if published else operators).train(wide, gamma, beta, mask, channel_dim, spec)
        y = like(y, x)
    return finish(y, residual, mask, channel_dim, activation), statistics


def infer(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    channel_dim: int,
    spec: Spec,
    population: Population | Statistics,
    config: StatisticsConfig,
    *,
    recall: Recall | None = None,
    residual: Tensor | None = None,
    activation: Activation | None = None,
) -> tuple[Tensor, Statistics | None]:
    """Normalize ``x``, which was checked, by the statistics of a configuration: ``g(BLN(x) + residual)``."""
    statistics: Statistics | None = population if isinstance(population, Statistics) else None
    if x.numel() == 0:
        return x.clone(), statistics
    if not isinstance(population, Statistics):
        kept = population.batch_mean
        ready = recall is None and population.position_shape is not None and not torch.compiler.is_compiling()
        kernels = triton_for(x, channel_dim, spec, residual, gamma, beta, kept) if ready else None
        if kernels is not None:
            tensors = x, gamma, beta, mask, channel_dim, spec, population, config
            return kernels.infer(*tensors, residual, activation), None
        population = population.at_positions_of(x, mask, channel_dim, spec)
    wide, gamma, beta = _widened(x, gamma, beta, population.batch_mean)
    y, statistics = operators.infer(wide, gamma, beta, mask, channel_dim, spec, population, config, recall)
    return finish(like(y, x), residual, mask, channel_dim, activation), statistics


def like(y: Tensor, x: Tensor) -> Tensor:
    """The output in the input's type, and contiguous where the input is: people call ``.view()`` on it."""
    y = y.to(x.dtype)
    return y.contiguous() if x.is_contiguous() else y


def _widened(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Input and parameters in the type of the computation: float32, or float64 if anything given is."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    for other in (gamma, beta, kept):
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    return x.to(dtype), *(None if parameter is None else parameter.to(dtype) for parameter in (gamma, beta))  # type: ignore[return-value]


def triton_for(
    x: Tensor, channel_dim: int, spec: Spec, residual: Tensor | None, *others: Tensor | None
) -> ModuleType | None:
    """The Triton kernels, where these tensors can use them."""
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
# What torch.compiler.assume_constant_result does, which imports the whole compiler, and Triton, for it.
_has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]
