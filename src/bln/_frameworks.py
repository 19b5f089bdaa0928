"""Tell which framework a model is made of. Imports no torch by itself."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_TOOLS = {"keras.Layer": "bln.keras", "flax.nnx.Module": "bln.flax", "torch.nn.Module": "bln._models.layers"}
"""Keras first: on the torch backend its layers are torch modules too."""


def framework(model: Any) -> ModuleType:
    """Return the module with ``layers`` and ``configure`` for models of this framework."""
    for base, tools in _TOOLS.items():
        library, _, name = base.rpartition(".")
        # The library of a model has been imported, or there would be no model.
        if library in sys.modules and isinstance(model, getattr(sys.modules[library], name)):
            return import_module(tools)
    raise TypeError(
        f"expected a torch module, a Keras layer or model, or a Flax NNX module; got {type(model).__name__}"
    )
