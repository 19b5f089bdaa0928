"""Start population statistics anew at each epoch, in a plain loop, in Lightning and in the transformers Trainer.

With ``momentum=None`` a layer averages all mini-batches since the last reset, so that without a reset the early weights
are never forgotten. All of these reset the layers with ``momentum=None`` and leave the others alone.

``LightningReset`` and ``TrainerReset`` are made when they are asked for: neither package is needed to import this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from importlib import import_module
from typing import Any, Generic, TypeVar

from torch import nn

from ._install import install
from .model import required_layers

T = TypeVar("T")


class reset_each_epoch(Generic[T]):
    """The same batches; each time they are gone through, statistics start anew.

    Args:
        model: A model with BLN layers; those with ``momentum=None`` are reset.
        batches: A ``DataLoader``, a list, anything that can be gone through several times.

    Examples:
        >>> import torch, bln
        >>> layer = bln.BatchLayerNorm(4, momentum=None)
        >>> batches = bln.callbacks.reset_each_epoch(layer, [torch.randn(8, 4), torch.randn(8, 4)])
        >>> for epoch in range(3):
        ...     for x in batches:
        ...         y = layer(x)
        >>> layer.population.updates[0].item()
        2
    """

    def __init__(self, model: nn.Module, batches: Iterable[T]) -> None:
        required_layers(model)
        if isinstance(batches, Iterator):
            raise TypeError(
                f"{type(batches).__name__} can be gone through once only, so it has no epochs; give a DataLoader, a "
                "list, or call bln.reset_statistics(model) at each epoch's start"
            )
        self.model, self.batches = model, batches

    def __iter__(self) -> Iterator[T]:
        _reset(self.model)
        return iter(self.batches)

    def __len__(self) -> int:
        if not isinstance(self.batches, Sized):
            raise TypeError(f"{type(self.batches).__name__} has no length")
        return len(self.batches)


def _reset(model: nn.Module) -> None:
    for layer in required_layers(model).values():
        if layer.momentum is None:
            layer.reset_statistics()


def __getattr__(name: str) -> Any:
    """The callbacks, as classes of this module, so that they can be pickled."""
    if name == "LightningReset":
        base = _import("lightning.pytorch", "lightning").Callback

        class LightningReset(base):  # type: ignore[misc, valid-type]
            """``Trainer(callbacks=[bln.callbacks.LightningReset()])``."""

            def on_train_epoch_start(self, trainer: Any, pl_module: nn.Module) -> None:
                _reset(pl_module)

        made: Any = LightningReset
    elif name == "TrainerReset":
        base = _import("transformers", "transformers").TrainerCallback

        class TrainerReset(base):  # type: ignore[misc, valid-type]
            """``transformers.Trainer(..., callbacks=[bln.callbacks.TrainerReset()])``."""

            def on_epoch_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
                _reset(model)

        made = TrainerReset
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made.__qualname__ = name
    globals()[name] = made
    return made


def _import(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"this callback takes {extra}, which is not installed: {install(extra)}") from error
