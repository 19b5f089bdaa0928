"""Reset and calibrate population statistics in a plain loop, in Lightning and in the transformers Trainer.

With ``momentum=None`` a layer averages all mini-batches since the last reset, so that without one the early weights are
never forgotten. ``reset_each_epoch``, ``LightningReset`` and ``TrainerReset`` reset such layers and leave the others
alone. ``LightningCalibrate(train_batches)`` and ``TrainerCalibrate(train_batches)`` run ``bln.calibrate`` before each
evaluation during training; the latter at the end of training too. A checkpoint written afterwards holds those
statistics.

Keras has ``bln.keras.ResetStatistics`` and ``bln.keras.Calibrate``. The classes for Lightning and transformers are
made on first use, so that importing this module needs neither package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ._install import install
from ._models.calibrate import calibrate
from ._models.layers import required_layers
from ._progress import check_repeatable

T = TypeVar("T")


class reset_each_epoch(Generic[T]):
    """Batches that reset the statistics of a model at the start of each iteration over them.

    Args:
        model: A model with BLN layers; those with ``momentum=None`` are reset.
        batches: A ``DataLoader``, a list, or anything else that can be iterated several times.

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
        check_repeatable(
            batches, "it has no epochs; give a DataLoader, a list, or call bln.reset_statistics(model) at each start"
        )
        self.model, self.batches = model, batches

    def __iter__(self) -> Iterator[T]:
        _reset(self.model)
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]  # its own error where it has none


def _reset(model: nn.Module) -> None:
    """Reset the layers with ``momentum=None``."""
    for layer in required_layers(model).values():
        if layer.momentum is None:
            layer.reset_statistics()


class _Calibration:
    """The base of the callbacks that calibrate; its arguments are those of ``bln.calibrate``."""

    def __init__(
        self, batches: Iterable[Any], *, step: Callable[[nn.Module, Any], Any] | None = None, progress: bool = False
    ) -> None:
        super().__init__()
        check_repeatable(batches, "each evaluation needs it; give a DataLoader or a list")
        self.batches, self.step, self.progress = batches, step, progress

    def calibrate(self, model: nn.Module, several: bool) -> None:
        """Calibrate, over all ranks if there are ``several``."""
        with torch.inference_mode(False):  # statistics made in inference mode could not be trained on
            calibrate(
                model, self.batches, step=self.step, process_group="world" if several else None, progress=self.progress
            )


class _LightningReset:
    """``Trainer(callbacks=[bln.callbacks.LightningReset()])``."""

    def on_train_epoch_start(self, trainer: Any, pl_module: nn.Module) -> None:
        _reset(pl_module)


class _LightningCalibrate(_Calibration):
    """``Trainer(callbacks=[bln.callbacks.LightningCalibrate(train_batches)])``."""

    def on_validation_start(self, trainer: Any, pl_module: nn.Module) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:  # validate() takes a model as it is
            self.calibrate(pl_module, trainer.world_size > 1)


class _TrainerReset:
    """``transformers.Trainer(..., callbacks=[bln.callbacks.TrainerReset()])``."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        _reset(model)


class _TrainerCalibrate(_Calibration):
    """``transformers.Trainer(..., callbacks=[bln.callbacks.TrainerCalibrate(train_batches)])``."""

    _at = -1

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if control.should_evaluate:  # the trainer's own callback, which decides, is called first
            self.on_train_end(args, state, control, model)

    on_epoch_end = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if self._at != state.global_step:
            self.calibrate(model, args.world_size > 1)
            self._at = state.global_step


_BASES = {"Lightning": ("lightning.pytorch", "Callback"), "Trainer": ("transformers", "TrainerCallback")}


def __getattr__(name: str) -> Any:
    """Define the callbacks as classes of this module on first use, so that they can be pickled."""
    for prefix, (module, base) in _BASES.items():
        if name in (f"{prefix}Calibrate", f"{prefix}Reset"):
            try:
                library = import_module(module)
            except ImportError as error:
                extra = module.split(".")[0]
                raise ImportError(f"this callback takes {extra}, which is not installed: {install(extra)}") from error
            ours = globals()[f"_{name}"]
            made = type(name, (ours, getattr(library, base)), {"__doc__": ours.__doc__, "__module__": __name__})
            return globals().setdefault(name, made)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
