"""What ``convert`` would do to a model, and what a training step costs before and after: ``bln convert-check``."""

from __future__ import annotations

import copy
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor, nn

from .convert import convert, replacements
from .freeze import difference, floats

_ROUNDS = 10
"""Steps of each model that are timed."""


def load(place: str) -> nn.Module:
    """Return the model at ``package.module:factory``, in the present folder too; a factory is called."""
    if not all(place.partition(":")):
        raise ValueError(f"expected MODULE:FACTORY, as in torchvision.models:resnet18, got {place!r}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = resolve_name(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"no model at {place!r}: {error}") from None
    model = found if isinstance(found, nn.Module) else found()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{place} gives a {type(model).__name__}, expected a torch module")
    return model


@dataclass(frozen=True)
class Check:
    """What ``convert`` does to a model.

    Attributes:
        replaced: The name, class and replacement of each norm that is replaced.
        notes: What is left or lost, and why.
        difference: How far outputs in ``eval()`` move, over their largest value; ``None`` without an input.
        steps: Seconds of a training step before and after, as first quartile, median and third quartile.
    """

    replaced: list[tuple[str, str, str]]
    notes: list[str]
    difference: float | None = None
    steps: tuple[list[float], list[float]] | None = None

    def __str__(self) -> str:
        lines = [f"convert replaces {len(self.replaced)} norm{'s' * (len(self.replaced) != 1)}"]
        if self.replaced:
            rows = [("name", "class", "becomes"), *self.replaced]
            widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
            lines += [f"  {name:{widths[0]}}  {kind:{widths[1]}}  {new}" for name, kind, new in rows]
        lines += self.notes or ["Every norm that it knows is replaced."]
        if self.difference is not None:
            lines.append(f"Outputs in eval() move by {self.difference:.1g} of the largest.")
        if self.steps is not None:
            before, after = ([f"{1e3 * t:.2f}" for t in times] for times in self.steps)
            lines.append(
                f"A training step, forward and backward: {before[1]} ms ({before[0]} to {before[2]}) before, "
                f"{after[1]} ms ({after[0]} to {after[2]}) after: {self.steps[1][1] / self.steps[0][1]:.2f} times; "
                f"medians and quartiles of {_ROUNDS} steps of each, in turn."
            )
        return "\n".join(lines)


def check(
    model: nn.Module, input_shape: tuple[int, ...] | None = None, *, groups: int = 8, device: str | torch.device = "cpu"
) -> Check:
    """Try ``convert(model, groups=groups)`` on copies, and on random inputs of a shape, samples first."""
    model = model.to(device)
    found, notes = replacements(model, groups)
    norms = [(name or "the model", module) for name, module in model.named_modules() if module in found]
    replaced = [(name, type(norm).__name__, " ".join(str(found[norm]).split())) for name, norm in norms]
    if input_shape is None or not replaced:
        return Check(replaced, notes + ["There is nothing to compare."] * (input_shape is not None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those are the notes
        before, after = copy.deepcopy(model), convert(copy.deepcopy(model), groups=groups)
    x = torch.randn(input_shape, device=device)
    try:
        with torch.no_grad():
            moved = difference(before.eval()(x), after.eval()(x))
        return Check(replaced, notes, moved, _time(before.train(), after.train(), x))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ValueError(f"the model cannot be run on random inputs of shape {tuple(input_shape)}: {error}") from error


def _time(before: nn.Module, after: nn.Module, x: Tensor) -> tuple[list[float], list[float]]:
    """Time training steps of two models in turn, so that both meet the same disturbances."""

    def step(model: nn.Module) -> float:
        started = time.perf_counter()
        model.zero_grad(set_to_none=True)
        torch.stack([y.float().square().mean() for y in floats(model(x))]).sum().backward()  # type: ignore[no-untyped-call]
        if x.device.type != "cpu":
            torch.accelerator.synchronize(x.device)
        return time.perf_counter() - started

    times = [(step(before), step(after)) for _ in range(2 + _ROUNDS)]
    # In the first two, kernels are chosen and compiled, memory is allocated.
    first, second = (quantiles(found, n=4, method="inclusive") for found in zip(*times[2:], strict=True))
    return first, second
