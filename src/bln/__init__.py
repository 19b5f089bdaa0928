"""Batch Layer Normalization: batch and layer normalization, mixed by the inverse of the mini-batch size.

>>> import torch, bln
>>> layer = bln.BatchLayerNorm(16)
>>> layer(torch.randn(25, 16, 8, 8)).shape
torch.Size([25, 16, 8, 8])
"""

from importlib import import_module
from typing import Any

from . import callbacks, functional
from ._adapt import Adaptation, adapt
from ._padding import padding
from ._search import SearchResult, search
from ._transfer import transfer
from .affine import Affine
from .config import StatisticsConfig
from .conversion import convert
from .formula import Statistics
from .freezing import FreezeReport, freeze
from .insertion import insert
from .layer import BatchLayerNorm
from .model import average_statistics, calibrate, configure, layers, reset_statistics
from .pretrained import load_pretrained

__version__ = "0.1.0"

__all__ = [
    "Adaptation",
    "Affine",
    "BatchLayerNorm",
    "FreezeReport",
    "SearchResult",
    "Statistics",
    "StatisticsConfig",
    "adapt",
    "average_statistics",
    "calibrate",
    "callbacks",
    "configure",
    "convert",
    "freeze",
    "functional",
    "insert",
    "layers",
    "load_pretrained",
    "padding",
    "reset_statistics",
    "search",
    "transfer",
]


def __getattr__(name: str) -> Any:
    if name in ("keras", "flax"):  # extras: imported when asked for
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
