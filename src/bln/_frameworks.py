"""Whose a model is, torch's, Keras's or Flax's, and what a BLN layer of each holds. Imports no torch by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from ._spec import Spec
from .config import StatisticsConfig

if TYPE_CHECKING:
    from torch import Tensor


class State(NamedTuple):
    """A layer of any framework, as torch tensors on the CPU, features last."""

    tensors: dict[str, Tensor | None]
    """``scale`` (gamma), ``shift`` (beta), the five statistics, ``updates`` and ``samples``, in the types they have."""
    positions: tuple[int, ...] | None
    """``None`` while they are unknown."""
    config: StatisticsConfig
    spec: Spec
    """What else the layer's function depends on."""
    momentum: float | None
    """The weight of the new value."""


class Framework(NamedTuple):
    """What is done with a model, in the framework it is made of."""

    layers: Callable[[Any], dict[str, Any]]
    configure: Callable[[Any, Any], None]
    read: Callable[[Any], State]
    write: Callable[[Any, State], None]
    ordered: bool
    """Whether layers come in the order in which they were defined; if not, in that of their names."""


def framework(model: Any) -> Framework:
    """Return the framework of a model or layer."""
    # Keras first: on the torch backend its layers are torch modules too.
    for name, library, base in (("keras", "keras", "Layer"), ("flax", "flax.nnx", "Module")):
        if library in sys.modules and isinstance(model, getattr(sys.modules[library], base)):
            tools = import_module(f"bln.{name}")
            return Framework(tools.layers, tools.configure, tools.read, tools.write, ordered=name != "flax")
    torch = sys.modules.get("torch")  # a model of torch cannot be there without it
    if torch is not None and isinstance(model, torch.nn.Module):
        from . import _transfer
        from . import model as models

        return Framework(models.layers, models.configure, _transfer.read, _transfer.write, ordered=True)
    raise TypeError(
        f"expected a torch module, a Keras layer or model, or a Flax NNX module; got {type(model).__name__}"
    )


# ---- arrays of other libraries


def as_tensor(array: Any, dtype: str) -> Tensor:
    """A NumPy array as a tensor of the type named; NumPy itself has no bfloat16."""
    import torch

    plain = array.astype("float32") if dtype in ("bfloat16", "float16") else array
    return torch.tensor(plain).to(getattr(torch, dtype))


def as_numpy(tensor: Tensor | None) -> Any:
    """A tensor as a NumPy array, in float32 where NumPy lacks the type."""
    import torch

    assert tensor is not None
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
