"""Batch Layer Normalization: batch and layer normalization, mixed by the inverse of the mini-batch size.

>>> import torch, bln
>>> layer = bln.BatchLayerNorm(16)
>>> layer(torch.randn(25, 16, 8, 8)).shape
torch.Size([25, 16, 8, 8])
"""

from . import callbacks, functional
from ._search import SearchResult, search
from .affine import Affine
from .config import StatisticsConfig
from .conversion import convert
from .formula import Statistics
from .freezing import FreezeReport, freeze
from .insertion import insert
from .layer import BatchLayerNorm
from .model import calibrate, configure, layers, reset_statistics
from .pretrained import load_pretrained

__version__ = "0.1.0"

__all__ = [
    "Affine",
    "BatchLayerNorm",
    "FreezeReport",
    "SearchResult",
    "Statistics",
    "StatisticsConfig",
    "calibrate",
    "callbacks",
    "configure",
    "convert",
    "freeze",
    "functional",
    "insert",
    "layers",
    "load_pretrained",
    "reset_statistics",
    "search",
]
