"""What ``convert`` would do to a model, and what a training step costs before and after: ``bln convert-check``."""

from __future__ import annotations

import copy
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .conversion import convert, replacements

_ROUNDS, _SECONDS = 20, 20.0
"""A step of each model is timed so many times in turn, or until so much time has passed, but three times at least."""


def load(place: str) -> nn.Module:
    """Return the model at ``package.module:factory``, in the present folder too; a factory is called."""
    module, _, attribute = place.partition(":")
    if not (module and attribute):
        raise ValueError(f"expected MODULE:FACTORY, as in torchvision.models:resnet18, got {place!r}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"no model at {place!r}: {error}") from None
    model = found if isinstance(found, nn.Module) else found()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{place} gives a {type(model).__name__}, expected a torch module")
    return model


@dataclass(frozen=True)
class Step:
    """What a step took, in seconds: medians, and the first and third quartile of all steps."""

    before: tuple[float, float, float]
    after: tuple[float, float, float]
    rounds: int

    def __str__(self) -> str:
        def shown(times: tuple[float, float, float]) -> str:
            median, low, high = (f"{1e3 * v:.3g}" if v < 0.1 else f"{1e3 * v:.0f}" for v in times)
            return f"{median} ms ({low} to {high})"

        return (
            f"{shown(self.before)} before, {shown(self.after)} after: {self.after[0] / self.before[0]:.2f} times; "
            f"medians and quartiles of {self.rounds} steps of each, in turn"
        )


@dataclass(frozen=True)
class Check:
    """What ``convert`` does to a model.

    Attributes:
        replaced: For each norm that it replaces its name, its class, and what takes its place.
        notes: What is left, and why; what is lost.
        difference: By how much outputs in ``eval()`` move, as a share of the largest; ``None`` without an input.
        step: What a training step costs; ``None`` without an input.
    """

    replaced: list[tuple[str, str, str]]
    notes: list[str]
    difference: float | None = None
    step: Step | None = None

    def __str__(self) -> str:
        lines = [f"convert replaces {len(self.replaced)} norms"]
        if self.replaced:
            rows = [("name", "class", "becomes"), *self.replaced]
            widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
            lines += [f"  {name:{widths[0]}}  {kind:{widths[1]}}  {new}" for name, kind, new in rows]
        lines += self.notes or ["No norm is left."]
        if self.difference is not None:
            lines.append(f"Outputs in eval() move by {self.difference:.1g} of the largest.")
        if self.step is not None:
            lines.append(f"A training step, forward and backward: {self.step}.")
        return "\n".join(lines)


def check(
    model: nn.Module, input_shape: tuple[int, ...] | None = None, *, groups: int = 8, device: str | torch.device = "cpu"
) -> Check:
    """Try ``convert(model, groups=groups)`` on copies.

    Args:
        model: Any module.
        input_shape: Of the random inputs, samples first, to compare outputs and time training steps on.
        groups: As in ``convert``.
        device: Where to run it.
    """
    model = model.to(device)
    found, notes = replacements(model, groups)
    replaced = [
        (name or "the model", type(module).__name__, " ".join(str(found[module]).split()))
        for name, module in model.named_modules()
        if module in found
    ]
    if input_shape is None:
        return Check(replaced, notes)
    if not replaced:
        return Check(replaced, [*notes, "There is nothing to compare."])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those are the notes
        before, after = copy.deepcopy(model), convert(copy.deepcopy(model), groups=groups)
    x = torch.randn(input_shape, device=device)
    try:
        with torch.no_grad():
            pairs = list(zip(_tensors(before.eval()(x)), _tensors(after.eval()(x)), strict=True))
        step = _time(before.train(), after.train(), x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ValueError(f"the model cannot be run on random inputs of shape {tuple(input_shape)}: {error}") from error
    moved = [((new - old).abs().max() / old.abs().max()).item() for old, new in pairs]
    return Check(replaced, notes, max(moved), step)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating point tensors of a model's output."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _time(before: nn.Module, after: nn.Module, x: Tensor) -> Step:
    """Time steps of two models in turn, so that both meet the same disturbances."""
    times: dict[nn.Module, list[float]] = {before: [], after: []}
    for model in (before, after) * 2:  # kernels are chosen and compiled, memory is taken
        _step(model, x)
    begun = time.perf_counter()
    for done in range(_ROUNDS):
        if done >= 3 and time.perf_counter() - begun > _SECONDS:
            break
        for model, found in times.items():
            started = time.perf_counter()
            _step(model, x)
            found.append(time.perf_counter() - started)
    return Step(_spread(times[before]), _spread(times[after]), len(times[before]))


def _step(model: nn.Module, x: Tensor) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    torch.stack([y.float().square().mean() for y in _tensors(model(x))]).sum().backward()  # type: ignore[no-untyped-call]
    if x.device.type != "cpu":
        torch.accelerator.synchronize(x.device)


def _spread(times: list[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return median, low, high
