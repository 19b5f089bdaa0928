"""``bln convert-check``: what ``convert`` would do to a model, and the cost of its training step before and after."""

from __future__ import annotations

import copy
import inspect
import sys
import time
import warnings
from pathlib import Path
from pkgutil import resolve_name
from statistics import quantiles
from typing import Any

import torch
from torch import nn

from .convert import convert, replacements
from .run import difference, floats

_ROUNDS = 10
"""Steps of each model that are timed."""


def load(place: str) -> nn.Module:
    """Return the model at ``package.module:factory``, in the present folder too; a factory is called."""
    if not all(place.partition(":")):
        raise ValueError(f"expected MODULE:FACTORY, as in torchvision.models:resnet18, got {place!r}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        value: Any = resolve_name(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"no model at {place!r}: {error}") from None
    if not isinstance(value, nn.Module) and (needs := _arguments(value)):
        raise ValueError(f"{place} takes {needs}; write a function without arguments that calls it, and name that")
    model = value if isinstance(value, nn.Module) else value()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{place} gives a {type(model).__name__}, expected a torch module")
    return model


def _arguments(factory: Any) -> str:
    """Return the names of the arguments that a factory cannot be called without."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # not a function, or one in C
        return ""
    optional = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return ", ".join(one.name for one in parameters if one.default is one.empty and one.kind not in optional)


def check(
    model: nn.Module, input_shape: tuple[int, ...] | None = None, *, groups: int = 8, device: str | torch.device = "cpu"
) -> str:
    """Describe what ``convert(model, groups=groups)`` would do, and with an input shape its cost."""
    model = model.to(device)
    new_layers, notes = replacements(model, groups)
    lines = [f"convert replaces {len(new_layers)} norm{'s' * (len(new_layers) != 1)}"]
    if new_layers:
        norms = [(name or "the model", norm) for name, norm in model.named_modules() if norm in new_layers]
        rows = [(name, type(norm).__name__, " ".join(str(new_layers[norm]).split())) for name, norm in norms]
        rows = [("name", "class", "becomes"), *rows]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines += [f"  {name:{widths[0]}}  {kind:{widths[1]}}  {new}" for name, kind, new in rows]
    lines += notes or ["Every norm that it knows is replaced."]
    if input_shape is not None:
        lines += _compare(model, input_shape, groups) if new_layers else ["There is nothing to compare."]
    return "\n".join(lines)


def _compare(model: nn.Module, input_shape: tuple[int, ...], groups: int) -> list[str]:
    """Compare outputs and training steps of copies of the model, before and after the conversion."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those are the notes
        before, after = copy.deepcopy(model), convert(copy.deepcopy(model), groups=groups)
    x = torch.randn(input_shape, device=next(model.parameters(), torch.empty(0)).device)

    def step(model: nn.Module) -> float:
        started = time.perf_counter()
        model.zero_grad(set_to_none=True)
        torch.stack([y.float().square().mean() for y in floats(model(x))]).sum().backward()  # type: ignore[no-untyped-call]
        if x.device.type != "cpu":
            torch.accelerator.synchronize(x.device)
        return 1e3 * (time.perf_counter() - started)

    try:
        with torch.no_grad():
            moved = difference(before.eval()(x), after.eval()(x))
        before.train(), after.train()
        # In turn, so that both meet the same disturbances. In the first two, kernels are chosen and compiled.
        times = [(step(before), step(after)) for _ in range(2 + _ROUNDS)][2:]
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ValueError(f"the model cannot be run on random inputs of shape {tuple(input_shape)}: {error}") from error
    quartiles = [quantiles(column, n=4, method="inclusive") for column in zip(*times, strict=True)]
    shown = [f"{median:.2f} ms ({low:.2f} to {high:.2f})" for low, median, high in quartiles]
    return [
        f"Outputs in eval() move by {moved:.1g} of the largest.",
        f"A training step, forward and backward: {shown[0]} before, {shown[1]} after: "
        f"{quartiles[1][1] / quartiles[0][1]:.2f} times; medians and quartiles of {_ROUNDS} steps of each, in turn.",
    ]
