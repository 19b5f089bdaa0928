"""Batch Layer Normalization: batch and layer normalization, mixed by the inverse of the mini-batch size.

>>> import torch, bln
>>> layer = bln.BatchLayerNorm(16)
>>> layer(torch.randn(25, 16, 8, 8)).shape
torch.Size([25, 16, 8, 8])
"""

from . import functional
from ._search import SearchResult, search
from .config import StatisticsConfig
from .conversion import convert
from .formula import Statistics
from .insertion import insert
from .layer import BatchLayerNorm
from .model import average_statistics, calibrate, configure, layers, reset_statistics

__version__ = "0.1.0"

__all__ = [
    "BatchLayerNorm",
    "SearchResult",
    "Statistics",
    "StatisticsConfig",
    "average_statistics",
    "calibrate",
    "configure",
    "convert",
    "functional",
    "insert",
    "layers",
    "reset_statistics",
    "search",
]
