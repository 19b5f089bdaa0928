"""Losses and metrics, from outputs to means over samples with their standard errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..functional import can_look
from ..ranks import Ranks
from .score import Score, averages

Function = Callable[[Any, Any], Any]
"""``f(outputs, targets)``, the mean over the mini-batch's samples."""
Metrics = str | Sequence[str] | Mapping[str, Function | str]


def accuracy(outputs: Any, targets: Any) -> Tensor:
    """The share of samples whose largest output is the target's; of a single output, whose sign is, targets being 0
    and 1, which is checked on a CPU.

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
    if single and can_look(targets) and not ((targets == 0) | (targets == 1)).all():
        raise ValueError("'accuracy' of a single output is for targets of 0 and 1, got others; pass a function instead")
    return (predicted == targets).float().mean()


_NAMED: dict[str, Function] = {"accuracy": accuracy}


class Measure:
    """The loss and the metrics of outputs, as a list of scalars."""

    def __init__(self, loss: Function, metrics: Metrics | None) -> None:
        if not callable(loss):
            raise TypeError(f"loss must be a function loss(outputs, targets), such as F.cross_entropy; got {loss!r}")
        if isinstance(metrics, str):
            metrics = [metrics]
        if callable(metrics):
            raise TypeError(
                f"metrics must be 'accuracy', or functions by name, as in {{'share': share}}; got {metrics!r}"
            )
        named: Mapping[str, Function | str]
        named = metrics if isinstance(metrics, Mapping) else {name: name for name in metrics or ()}
        self.metrics = tuple(named)
        self._functions = [loss, *(self._function(name, given) for name, given in named.items())]

    @staticmethod
    def _function(name: str, given: Function | str) -> Function:
        if isinstance(given, str) and given in _NAMED:
            return _NAMED[given]
        if callable(given):
            return given
        raise ValueError(
            f"metric {name!r} is {given!r}, expected a function metric(outputs, targets) or one of "
            f"{', '.join(map(repr, _NAMED))}"
        )

    def __call__(self, outputs: Any, targets: Any, batch: Any = None) -> list[Tensor]:
        names = ("loss", *self.metrics)
        values = [_call(f, name, outputs, targets, batch) for f, name in zip(self._functions, names, strict=True)]
        return [_scalar(value, name) for value, name in zip(values, names, strict=True)]


def _call(function: Function, name: str, outputs: Any, targets: Any, batch: Any) -> Any:
    try:
        return function(outputs, targets)
    except (TypeError, AttributeError) as error:
        if isinstance(outputs, Tensor):
            raise
        inputs = batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else None
        stars = "**" if isinstance(inputs, Mapping) else "*" if isinstance(inputs, tuple | list) else ""
        parts, part = "", "[0]"
        if isinstance(outputs, Mapping):
            parts = f" with {', '.join(map(repr, outputs))}"
            part = f"[{'logits' if 'logits' in outputs else next(iter(outputs), '...')!r}]"
        elif isinstance(getattr(outputs, "logits", None), Tensor):
            part = ".logits"
        call = f"model({stars}batch[0]){part}"
        raise TypeError(
            f"{name} was given the model's output, a {type(outputs).__name__}{parts}, and failed: {error}. If it takes "
            f"a tensor, pass step=, which returns (outputs, targets): step=lambda model, batch: ({call}, batch[1])"
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
    scalar: Tensor = value.detach() if value.requires_grad else value
    return scalar.reshape(()) if scalar.dim() else scalar


class Tally:
    """Adds up the scores of ``assignments`` configurations, mini-batch by mini-batch."""

    def __init__(self, metrics: Sequence[str], assignments: int) -> None:
        self._metrics = tuple(metrics)
        self._shape = assignments, 1 + len(self._metrics)
        self._values: list[Tensor] = []
        self._samples: list[int] = []

    def add(self, values: Tensor, samples: int) -> None:
        """Take the scores of a mini-batch, ``(configurations, 1 + metrics)``."""
        self._values.append(values)
        self._samples.append(samples)

    def join(self, ranks: Ranks) -> None:
        """Take the mini-batches of the other ranks too: from here on the same on all."""
        if ranks.size == 1:
            return
        values = torch.stack(self._values).cpu().double() if self._values else torch.empty(0, *self._shape).double()
        self._values = list(ranks.gather(values))
        self._samples = ranks.gather(torch.tensor(self._samples, dtype=torch.int64)).tolist()

    @property
    def batches(self) -> int:
        """How many mini-batches were added."""
        return len(self._samples)

    @property
    def samples(self) -> int:
        """How many samples they held."""
        return sum(self._samples)

    def scores(self) -> list[Score]:
        """Means over samples; a mini-batch weighs as much as it has samples, in the standard error too."""
        return averages(torch.stack(self._values).cpu().double().tolist(), self._samples, self._metrics)


def length(*values: Any) -> int:
    """The number of samples: the length of the first tensor in ``values``, which may be nested."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise ValueError("a batch holds no tensor to tell how many samples it has")
