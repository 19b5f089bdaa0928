"""Batch Layer Normalization for Flax NNX, and helpers for whole models."""

try:
    import jax as _jax  # noqa: F401
    from flax import nnx as _nnx  # noqa: F401
except ImportError as error:
    from .._install import install

    raise ImportError(f"bln.flax takes Flax NNX, which is not installed: {install('flax')}") from error

from .layer import BatchLayerNorm
from .layer import read as read
from .layer import write as write
from .model import calibrate, configure, layers, reset_statistics, search

__all__ = ["BatchLayerNorm", "calibrate", "configure", "layers", "reset_statistics", "search"]
