"""Find, configure and reset the BLN layers of a model; save and restore their statistics; replace modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from .._frameworks import framework
from ..config import StatisticsConfig, configure_layers
from ..layer import BatchLayerNorm
from ..population import Snapshot
from .run import unwrapped

Snapshots = Sequence[Snapshot]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def layers(model: nn.Module) -> dict[str, BatchLayerNorm]:
    """Return the model's BLN layers by name, each once, in the order of ``named_modules``.

    Names are those of the model itself, also where it is compiled or wrapped in ``DistributedDataParallel``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(_no_torch_module(model))
    modules = unwrapped(model).named_modules()
    return {name: module for name, module in modules if isinstance(module, BatchLayerNorm)}


def required_layers(model: nn.Module) -> dict[str, BatchLayerNorm]:
    """Return the model's BLN layers by name; refuse a model without any."""
    if found := layers(model):
        return found
    if framework(model).__name__ != __name__:  # on the torch backend Keras models are torch modules too
        raise TypeError(_no_torch_module(model))
    raise ValueError(
        f"{type(model).__name__} has no BatchLayerNorm; bln.convert(model) replaces other norms, "
        "bln.insert(model, example) adds one after each nonlinearity"
    )


def _no_torch_module(model: Any) -> str:
    """Return the error for a model of another framework, or for what is no model."""
    with suppress(TypeError):
        return f"{type(model).__name__} is no torch model; the functions for it are in {framework(model).__name__}"
    return f"expected a torch module with BLN layers, got {type(model).__name__}"


def configure(model: nn.Module, config: StatisticsConfig | str | Mapping[str, StatisticsConfig | str]) -> None:
    """Choose the statistics ``eval()`` uses: one configuration for all BLN layers, or one for each name.

    Args:
        model: A model with BLN layers.
        config: ``"TTFF"``, a ``StatisticsConfig``, or a mapping from names, as in ``bln.layers``, to such; layers
            that it does not name stay as they are.
    """
    configure_layers(required_layers(model), config)


def reset_statistics(model: nn.Module) -> None:
    """Forget the population statistics of all BLN layers. With ``momentum=None``, call it at each epoch's start."""
    for layer in required_layers(model).values():
        layer.reset_statistics()


def snapshots(layers: Iterable[BatchLayerNorm]) -> Snapshots:
    """Return the statistics of layers, for ``restore``."""
    return [layer.population.snapshot() for layer in layers]


def restore(layers: Iterable[BatchLayerNorm], snapshots: Snapshots) -> None:
    """Return layers to their snapshots; with no snapshots, do nothing."""
    for layer, snapshot in zip(layers, snapshots, strict=False):
        layer.population.restore(snapshot)


def swap(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules inside a model, wherever they are used."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in others:
                setattr(parent, name, others[child])


def hooked(module: nn.Module) -> bool:
    """Whether a module has hooks of its own."""
    return any(getattr(module, hooks) for hooks in HOOKS)
