"""Batch Layer Normalization: batch and layer normalization, mixed by the inverse of the mini-batch size.

>>> import torch, bln
>>> layer = bln.BatchLayerNorm(16)
>>> layer(torch.randn(25, 16, 8, 8)).shape
torch.Size([25, 16, 8, 8])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of _HOME once more; a test compares the two lists
    from . import callbacks, functional
    from ._models.adapt import Adaptation, adapt
    from ._models.affine import Affine
    from ._models.calibrate import average_statistics, calibrate
    from ._models.convert import convert, load_pretrained
    from ._models.freeze import FreezeReport, freeze
    from ._models.insert import insert
    from ._models.layers import configure, layers, reset_statistics
    from ._models.padding import padding
    from ._search.rank import search
    from ._search.result import SearchResult
    from ._transfer import transfer
    from .config import StatisticsConfig
    from .formula import Statistics
    from .layer import BatchLayerNorm

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

_HOME = {
    "_models.adapt": ["Adaptation", "adapt"],
    "_models.affine": ["Affine"],
    "_models.calibrate": ["average_statistics", "calibrate"],
    "_models.convert": ["convert", "load_pretrained"],
    "_models.freeze": ["FreezeReport", "freeze"],
    "_models.insert": ["insert"],
    "_models.layers": ["configure", "layers", "reset_statistics"],
    "_models.padding": ["padding"],
    "_search.rank": ["search"],
    "_search.result": ["SearchResult"],
    "_transfer": ["transfer"],
    "config": ["StatisticsConfig"],
    "formula": ["Statistics"],
    "layer": ["BatchLayerNorm"],
}
"""Where each name is defined. A module is imported when one of its names is first used: most need torch, which users of
``bln.keras`` and ``bln.flax`` may not have."""
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        return value
    try:  # modules of this package, bln.keras and bln.flax among them
        if not name.startswith("_"):
            return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
