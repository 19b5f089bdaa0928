"""Losses and metrics of a model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._masks import is_host_readable

Function = Callable[[Any, Any], Any]
"""``f(outputs, targets)``, the mean over the mini-batch's samples."""
Metrics = str | Sequence[str] | Mapping[str, Function | str]


def accuracy(outputs: Any, targets: Any) -> Tensor:
    """The share of samples whose predicted class is the target.

    The class is the largest output; a single output predicts class 1 where it is positive. Targets other than 0 and 1
    are then refused on a CPU.

    >>> accuracy(torch.tensor([[0.1, 2.0], [3.0, 1.0]]), torch.tensor([1, 1]))
    tensor(0.5000)
    >>> accuracy(torch.tensor([[0.3], [-2.0]]), torch.tensor([1.0, 0.0]))
    tensor(1.)
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        raise TypeError(
            f"'accuracy' is for a tensor of outputs and one of targets, got {type(outputs).__name__} and "
            f"{type(targets).__name__}; pass a function, metrics={{'accuracy': lambda outputs, targets: ...}}"
        )
    single = outputs.dim() == 1 or outputs.shape[1] == 1
    predicted = (outputs > 0).reshape(targets.shape) if single else outputs.argmax(1)
    if predicted.shape != targets.shape:
        raise ValueError(
            f"'accuracy' is for outputs (N, classes, ...) and class targets (N, ...), or outputs (N,) or (N, 1) and "
            f"targets of 0 and 1; got {tuple(outputs.shape)} and {tuple(targets.shape)}. Pass a function instead"
        )
    if single and is_host_readable(targets) and not ((targets == 0) | (targets == 1)).all():
        raise ValueError("'accuracy' of a single output is for targets of 0 and 1, got others; pass a function instead")
    return (predicted == targets).float().mean()


class Measure:
    """The loss and the metrics of outputs, as a list of scalars.

    Attributes:
        metrics: The names of the metrics.
    """

    def __init__(self, loss: Function, metrics: Metrics | None) -> None:
        if not callable(loss):
            raise TypeError(f"loss must be a function loss(outputs, targets), such as F.cross_entropy; got {loss!r}")
        if callable(metrics):
            raise TypeError(
                f"metrics must be 'accuracy', or functions by name, as in {{'share': share}}; got {metrics!r}"
            )
        names = [metrics] if isinstance(metrics, str) else metrics or ()
        named = names if isinstance(names, Mapping) else {name: name for name in names}
        self.metrics = tuple(named)
        self._functions = {"loss": loss}
        for name, given in named.items():
            function = accuracy if given == "accuracy" else given
            if not callable(function):
                raise ValueError(
                    f"metric {name!r} is {given!r}, expected a function metric(outputs, targets) or one of 'accuracy'"
                )
            self._functions[name] = function

    def __call__(self, outputs: Any, targets: Any, batch: Any = None) -> list[Tensor]:
        return [_scalar(_call(f, name, outputs, targets, batch), name) for name, f in self._functions.items()]


def _call(function: Function, name: str, outputs: Any, targets: Any, batch: Any) -> Any:
    """Call a loss or metric; where it fails on an output that is no tensor, show the ``step=`` that picks one."""
    try:
        return function(outputs, targets)
    except (TypeError, AttributeError) as error:
        if isinstance(outputs, Tensor):
            raise
        inputs = batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else None
        stars = "**" if isinstance(inputs, Mapping) else "*" if isinstance(inputs, tuple | list) else ""
        parts, part = "", ".logits" if isinstance(getattr(outputs, "logits", None), Tensor) else "[0]"
        if isinstance(outputs, Mapping):
            parts = f" with {', '.join(map(repr, outputs))}"
            part = f"[{'logits' if 'logits' in outputs else next(iter(outputs), '...')!r}]"
        raise TypeError(
            f"{name} was given the model's output, a {type(outputs).__name__}{parts}, and failed: {error}. If it takes "
            "a tensor, pass step=, which returns (outputs, targets): "
            f"step=lambda model, batch: (model({stars}batch[0]){part}, batch[1])"
        ) from error


def _scalar(value: Any, name: str) -> Tensor:
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.float64)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must return a scalar, got {type(value).__name__}")
    if value.numel() != 1:
        raise ValueError(
            f"{name} must return a scalar, the mean over the batch, got a tensor of shape {tuple(value.shape)}; "
            "try reduction='mean', or .mean() at its end"
        )
    return value.detach().reshape(())
