"""Evaluate losses and metrics on a model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .._masks import is_host_readable

Function = Callable[[Any, Any], Any]
"""A loss or metric: ``f(outputs, targets)``, the mean over the samples of a mini-batch."""
Metrics = str | Mapping[str, Function]


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of samples whose predicted class is the target.

    The class is the largest output; a single output predicts class 1 where it is positive. Targets other than 0 and 1
    are then refused on a CPU.

    >>> import torch
    >>> accuracy(torch.tensor([[0.1, 2.0], [3.0, 1.0]]), torch.tensor([1, 1]))
    tensor(0.5000)
    >>> accuracy(torch.tensor([[0.3], [-2.0]]), torch.tensor([1.0, 0.0]))
    tensor(1.)
    """
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


def named_functions(loss: Function, metrics: Metrics | None) -> list[tuple[str, Function]]:
    """Return the loss and the metrics, each with its name."""
    named = {"accuracy": accuracy} if metrics == "accuracy" else metrics or {}
    if not callable(loss):
        raise TypeError(f"loss must be a function loss(outputs, targets), such as F.cross_entropy; got {loss!r}")
    if not (isinstance(named, Mapping) and all(map(callable, named.values()))):
        raise TypeError(
            "metrics must be 'accuracy', or functions metric(outputs, targets) by name, as in {'share': share}; got "
            f"{metrics!r}"
        )
    return [("loss", loss), *named.items()]


def score(name: str, function: Function, outputs: Any, targets: Any) -> Any:
    """Return a loss or metric as a number or a tensor without dimensions."""
    try:
        value = function(outputs, targets)
    except (TypeError, AttributeError) as error:
        if not isinstance(outputs, Tensor):
            error.add_note(
                f"{name} was given the model's output, a {type(outputs).__name__}. If it takes a tensor, pass step=, "
                "which returns (outputs, targets): step=lambda model, batch: (model(batch[0]).logits, batch[1])"
            )
        raise
    if isinstance(value, int | float):
        return value
    if not (isinstance(value, Tensor) and value.numel() == 1):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise ValueError(
            f"{name} must return a scalar, the mean over the batch, got a {type(value).__name__}{shape}; "
            "try reduction='mean', or .mean() at its end"
        )
    return value.reshape(())
