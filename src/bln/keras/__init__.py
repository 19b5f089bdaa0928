"""Batch Layer Normalization for Keras 3, on the TensorFlow, JAX and torch backends, and helpers for whole models."""

try:
    import keras as _keras  # noqa: F401
except ImportError as error:
    from .._install import install

    raise ImportError(f"bln.keras takes Keras 3, which is not installed: {install('keras')}") from error

from .layer import BatchLayerNormalization
from .layer import read as read
from .layer import write as write
from .model import Calibrate, ResetStatistics, calibrate, configure, layers, reset_statistics, search

__all__ = [
    "BatchLayerNormalization",
    "Calibrate",
    "ResetStatistics",
    "calibrate",
    "configure",
    "layers",
    "reset_statistics",
    "search",
]
