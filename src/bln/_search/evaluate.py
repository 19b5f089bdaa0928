"""Many configurations on one mini-batch: in one pass where the model allows it, else one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._models import calibrate as models
from ..layer import BatchLayerNorm
from .measure import Measure
from .per_layer import Assignment
from .rebatch import count_samples, length, part
from .vectorize import assigned, differing, one_at_a_time, together

_PROBES = 4
"""Single samples for the check that one pass gives the same losses."""
_CPU_NUMBERS, _CPU_COPIES = 2**21, 4
"""On a CPU: the most values the copies of a layer's input may have, and the copies that are always made.

Larger tensors leave the cache. Of LeNet at batch 25 all 16 copies fit; of a (32, 64, 28, 28) input, 4 copies take the
time of separate evaluations and 16 take 1.7 times as long."""


@dataclass
class Evaluator:
    """Scores assignments on mini-batches.

    The first mini-batch is evaluated in both ways. If the losses are the same, assignments run together from there on.

    Args:
        model: The model, in ``eval()``.
        layers: Its BLN layers.
        measure: The loss and metrics.
        step: ``step(model, batch) -> (outputs, targets)``, or ``None`` for batches of ``(inputs, targets)``.
        single: Each sample of a mini-batch is one of its own.

    Attributes:
        why: Why assignments run separately; empty if together, ``None`` before the first mini-batch.
        width: How many assignments fit in memory together, once more did not.
        sizes: The most values of each layer's output, in the first mini-batch.
    """

    model: nn.Module
    layers: Sequence[BatchLayerNorm]
    measure: Measure
    step: models.Step | None
    single: bool = False
    why: str | None = None
    width: int | None = None
    sizes: dict[nn.Module, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._device = next(chain(self.model.parameters(), self.model.buffers())).device

    def of_samples(self) -> Evaluator:
        """Score single samples; where mini-batches run separately, so do they."""
        return replace(self, single=True, why=self.why or None)

    @property
    def mode(self) -> str:
        """How mini-batches run: ``together`` or ``separate``; a rank without any is ``idle``."""
        return "idle" if self.why is None else "separate" if self.why else "together"

    def __call__(self, batch: Any, assignments: Sequence[Assignment]) -> tuple[Tensor, int]:
        """Score different assignments on a mini-batch.

        Returns:
            Scores ``(assignments, 1 + metrics)``, left on the device, and the number of samples.
        """
        batch = self._on_device(batch)
        if len(assignments) == 1 and not self.single:
            return self._separately(batch, assignments)
        if self.why is None:
            scores = self._check(part(batch, 0, _PROBES) if self.single else batch, assignments)
            if not self.single:
                return scores
        if not self.why:
            try:
                results = self._together(batch, assignments)
            except Exception as error:  # whatever the model cannot do vectorized, it can do without
                self.why = _headline(error)
            else:
                return self._scores(results, batch)
        return self._separately(batch, assignments)

    def _check(self, batch: Any, assignments: Sequence[Assignment]) -> tuple[Tensor, int]:
        """Return the scores of separate evaluations, and note whether one pass gives other losses."""

        def measure(layer: nn.Module, _: Any, y: Tensor) -> None:
            self.sizes[layer] = max(self.sizes.get(layer, 0), y.numel())

        hooks = [layer.register_forward_hook(measure) for layer in self.layers]
        try:
            scores = self._separately(batch, assignments)
        finally:
            for hook in hooks:
                hook.remove()
        self.why = ""
        try:
            results = self._together(batch, assignments)
            losses, expected = (found[:, 0].cpu().double() for found, _ in (self._scores(results, batch), scores))
            within = _tolerance(self._device, [outputs for outputs, _ in results])
            if not torch.allclose(losses, expected, rtol=within, atol=within, equal_nan=True):
                self.why = "together they have other losses"
        except Exception as error:
            self.why = _headline(error)
        return scores

    def _on_device(self, batch: Any) -> Any:
        """Move a batch of ``(inputs, targets)``, once for all assignments."""
        if self.step is not None:
            return batch
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return models.to_device(batch, self._device)
        what, step = type(batch).__name__, "(model(batch), targets)"
        if isinstance(batch, Mapping):
            what += f" with {', '.join(map(repr, batch))}"
            step = "(model(batch['inputs']), batch['labels'])"
        elif isinstance(batch, tuple | list):
            what += f" of {len(batch)}"
            step = "(model(*batch[:-1]), batch[-1])"
        raise ValueError(
            f"expected batches of (inputs, targets), got a {what}; inputs may be a tensor, a tuple or a dict. For "
            "other batches pass step=, a function step(model, batch) that returns (outputs, targets), such as "
            f"step=lambda model, batch: {step}"
        )

    def _run(self, batch: Any) -> tuple[Any, Any]:
        if self.step is None:
            return models.run(self.model, batch), batch[1]
        result = self.step(self.model, batch)
        if not (isinstance(result, tuple | list) and len(result) == 2):
            raise ValueError(f"step(model, batch) must return (outputs, targets), got {type(result).__name__}")
        return result[0], result[1]

    def _separately(self, batch: Any, assignments: Sequence[Assignment]) -> tuple[Tensor, int]:
        def results(batch: Any) -> Iterator[tuple[Any, Any]]:
            for assignment in assignments:
                with assigned(self.layers, assignment):
                    yield self._run(batch)

        if not self.single:
            return self._scores(results(batch), batch)
        samples = [part(batch, at, at + 1) for at in range(count_samples(batch))]
        values = [self._scores(results(sample), sample)[0] for sample in samples]
        return torch.stack(values).cpu().double().mean(0), len(values)

    def _together(self, batch: Any, assignments: Sequence[Assignment]) -> list[tuple[Any, Any]]:
        """Outputs and targets of each assignment; as many in one pass as fit in memory."""
        results: list[tuple[Any, Any]] = []
        while len(results) < len(assignments):
            chunk = assignments[len(results) : len(results) + self._copies(assignments)]
            try:
                results += self._pass(batch, chunk)
                continue
            except (RuntimeError, MemoryError) as error:
                if not _out_of_memory(error) or len(chunk) == 1:
                    raise
            # Here and not above, where the exception still keeps the failed pass's tensors alive.
            self.width = len(chunk) // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return results

    def _pass(self, batch: Any, assignments: Sequence[Assignment]) -> list[tuple[Any, Any]]:
        if self.single or self.step is not None:
            run = partial(one_at_a_time, self._run, batch) if self.single else partial(self._run, batch)
            return together(run, self.model, self.layers, assignments)
        outputs = together(partial(models.run, self.model, batch), self.model, self.layers, assignments)
        return [(output, batch[1]) for output in outputs]  # targets are not the model's, and may be anything

    def _copies(self, assignments: Sequence[Assignment]) -> int:
        """How many assignments run in one pass."""
        copies = self.width or len(assignments)
        if self._device.type == "cpu" and (changing := differing(assignments)):
            largest = max(1, *(self.sizes.get(layer, 0) for layer in self.layers[changing[0] :]))
            copies = min(copies, max(_CPU_COPIES, _CPU_NUMBERS // largest))
        return math.ceil(len(assignments) / math.ceil(len(assignments) / copies))  # passes of about one size

    def _scores(self, results: Iterable[tuple[Any, Any]], batch: Any) -> tuple[Tensor, int]:
        values, samples = list[Tensor](), 0
        for outputs, targets in results:
            values += self.measure(outputs, targets, batch)
            samples = samples or length(targets, outputs, batch)
        if len({(value.device, value.dtype) for value in values}) > 1:
            values = [value.cpu().double() for value in values]
        return torch.stack(values).reshape(-1, 1 + len(self.measure.metrics)), samples


def _tolerance(device: torch.device, outputs: Any) -> float:
    """The root of the coarsest epsilon of the outputs' types, autocast and TF32.

    With another batch size libraries sum in another order. Differences of an epsilon then grow from layer to layer,
    most where a variance is near 0, but seldom by 1/sqrt(epsilon), 3,000 in float32; and a false alarm costs time, not
    truth. Statistics that leak from one copy to the next change outputs by as much as configurations differ.
    """
    types = {
        leaf.dtype for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    }
    types |= {torch.get_autocast_dtype(device.type)} if torch.is_autocast_enabled(device.type) else set()
    tf32 = 2.0**-10 if device.type == "cuda" else 0.0  # on for convolutions unless switched off
    return math.sqrt(max(tf32, *(torch.finfo(dtype).eps for dtype in types or {torch.float32})))


def _out_of_memory(error: BaseException) -> bool:
    said = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in said or "can't allocate memory" in said


def _headline(error: Exception) -> str:
    """An error's type and the first sentence of its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text.split('. ')[0]}" if text else type(error).__name__
