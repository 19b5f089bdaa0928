"""Tells which framework a model is made of. Imports no torch by itself."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def framework(model: Any) -> ModuleType:
    """Return the module with ``layers`` and ``configure`` for models of this framework."""
    # Keras first: on the torch backend its layers are torch modules too.
    for library, base, name in (
        ("keras", "Layer", "bln.keras"),
        ("flax.nnx", "Module", "bln.flax"),
        ("torch", "nn.Module", "bln._models.calibrate"),
    ):
        found: Any = sys.modules.get(library)  # a model cannot be there without it
        for part in base.split(".") if found is not None else ():
            found = getattr(found, part)
        if found is not None and isinstance(model, found):
            return import_module(name)
    raise TypeError(
        f"expected a torch module, a Keras layer or model, or a Flax NNX module; got {type(model).__name__}"
    )
