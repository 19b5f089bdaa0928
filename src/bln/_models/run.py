"""Run a model on a batch or an example, without a compiler or wrapper around it, and leave it as it was."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .batches import to_device

Step = Callable[[nn.Module, Any], Any]
"""How to run a model on a batch, ``step(model, batch)``."""


def run_batch(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch's inputs, moved to its device."""
    inputs = batch[0] if isinstance(batch, tuple | list) and len(batch) > 0 else batch
    inputs = to_device(inputs, next(chain(model.parameters(), model.buffers())).device)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def run_example(function: Callable[..., Any], example: Any) -> Any:
    """Call a model, or a function that runs one, on an input, a tuple of inputs or a dict of arguments."""
    try:
        with torch.no_grad():
            if isinstance(example, Mapping):
                return function(**example)
            return function(*example) if isinstance(example, tuple) else function(example)
    except Exception as error:
        arguments = example if isinstance(example, tuple) else (example,)
        shapes = ", ".join(str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in arguments)
        raise ValueError(
            f"the example does not run through the model ({error.__cause__ or error}). It was {shapes}; pass an input, "
            "a tuple of inputs or a dict of arguments"
        ) from error


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside ``torch.compile`` and inside ``DistributedDataParallel``, which waits for other ranks."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled models eagerly: the compiler would make a graph for each mode and configuration."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes a second
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore every module's mode, and the random state of torch, Python and NumPy, at the end."""
    modes = [(module, module.training) for module in model.modules()]
    python_state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    devices = {t.device.index for t in model.parameters() if t.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        for module, training in modes:
            module.training = training
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


def difference(before: Any, after: Any) -> float:
    """Return the largest difference of two outputs, relative to the largest value."""
    zero = torch.zeros(1, dtype=torch.float64)  # for outputs without a value
    a, b = (torch.cat([zero, *(t.cpu().double().flatten() for t in floats(each))]) for each in (before, after))
    return (a - b).abs().max().item() / (a.abs().max().item() or 1.0)


def floats(outputs: Any) -> list[Tensor]:
    """Return the floating point tensors of a model's outputs."""
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
