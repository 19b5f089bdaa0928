"""Many configurations on one mini-batch: together in one pass where the model allows it, else one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .. import model as models
from ..layer import BatchLayerNorm
from .arrange import first, one_by_one
from .compare import out_of_memory, tolerance
from .scores import Measure, length
from .vectorized import Assignment, assigned, differing, one_at_a_time, together

_PROBES = 4
"""Samples that are evaluated one by one, to see whether they give the same scores in one pass."""
_CPU_NUMBERS, _CPU_COPIES = 2**21, 4
"""On a CPU: how many numbers the copies of a layer's input may have, and the copies that are always made.

Larger tensors leave the cache. Of LeNet at batch 25 all 16 copies fit; of a (32, 64, 28, 28) input, 4 copies take the
time of separate evaluations and 16 take 1.7 times as much."""


class Evaluator:
    """Scores assignments on mini-batches.

    Args:
        model: The model, in ``eval()``.
        layers: Its BLN layers.
        measure: The loss and metrics.
        step: ``step(model, batch) -> (outputs, targets)``, or ``None`` for batches of ``(inputs, targets)``.

    Attributes:
        why: Why assignments run separately: whole mini-batches (``False``), or single samples (``True``).
        width: How many assignments fit in memory together, once more did not.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[BatchLayerNorm],
        measure: Measure,
        step: models.Step | None,
    ) -> None:
        self.model = model
        self.layers = layers
        self.measure = measure
        self.why: dict[bool, str] = {}
        self.width: int | None = None
        self._step = step
        self._device = next(chain(model.parameters(), model.buffers())).device
        self._tried: set[bool] = set()  # whole mini-batches, single samples
        self._numbers = [0] * len(layers)  # in the largest input of each layer, in the first mini-batch

    @property
    def mode(self) -> str:
        """How whole mini-batches run: ``together`` or ``separate``; a rank without any is ``idle``."""
        return "idle" if not self._tried else "separate" if False in self.why else "together"

    def __call__(self, batch: Any, assignments: Sequence[Assignment], *, single: bool = False) -> tuple[Tensor, int]:
        """Scores ``(assignments, 1 + metrics)`` on a mini-batch, and its samples.

        Args:
            batch: The mini-batch.
            assignments: Different from each other.
            single: Every sample comes as a mini-batch of its own.
        """
        batch = self._prepared(batch)
        if len(assignments) == 1 and not single:
            return self._separate_scores(batch, assignments, single)
        if single not in self._tried and not self.why:
            self._tried.add(single)
            scores = self._try(first(batch, _PROBES) if single else batch, assignments, single)
            if not single:
                return scores
        if not self.why.keys() & {False, single}:
            try:
                results = list(self._together(batch, assignments, single))
            except Exception as error:  # whatever the model cannot do vectorized, it can do without
                self.why[single] = _headline(error)
            else:
                return self._scores(results, batch)
        return self._separate_scores(batch, assignments, single)

    def _try(self, batch: Any, assignments: Sequence[Assignment], single: bool) -> tuple[Tensor, int]:
        """Scores of separate evaluations; run together from here on if that gives the same losses."""
        with self._counted():
            scores = self._separate_scores(batch, assignments, single)
        try:
            results = list(self._together(batch, assignments, single))
            ours, theirs = (values[:, 0].cpu().double() for values in (self._scores(results, batch)[0], scores[0]))
        except Exception as error:
            self.why[single] = _headline(error)
            return scores
        within = tolerance(self._device, [outputs for outputs, _ in results])
        if not torch.allclose(ours, theirs, rtol=within, atol=within, equal_nan=True):
            self.why[single] = "together they have other losses"
        return scores

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Note how many numbers the layers' inputs, and so their outputs, have."""

        def count(at: int, y: Tensor) -> None:
            self._numbers[at] = max(self._numbers[at], y.numel())

        hooks = [
            layer.register_forward_hook(lambda _, args, y, at=at: count(at, y)) for at, layer in enumerate(self.layers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _prepared(self, batch: Any) -> Any:
        """Move a batch of ``(inputs, targets)``, once for all assignments."""
        if self._step is not None:
            return batch
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
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
        return models.to_device(batch, self._device)

    def _forward(self, batch: Any) -> tuple[Any, Any]:
        if self._step is None:
            return models.run(self.model, batch), batch[1]
        result = self._step(self.model, batch)
        if not (isinstance(result, tuple | list) and len(result) == 2):
            raise ValueError(f"step(model, batch) must return (outputs, targets), got {type(result).__name__}")
        return result[0], result[1]

    def _separately(self, batch: Any, assignments: Sequence[Assignment]) -> Iterator[tuple[Any, Any]]:
        for assignment in assignments:
            with assigned(self.layers, assignment):
                yield self._forward(batch)

    def _together(self, batch: Any, assignments: Sequence[Assignment], single: bool) -> Iterator[tuple[Any, Any]]:
        """Outputs and targets of each assignment; as many at once as fit in memory."""
        done = 0
        while done < len(assignments):
            chunk = assignments[done : done + self._copies(assignments)]
            fits = True
            try:
                results = self._pass(batch, chunk, single)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) or len(chunk) == 1:
                    raise
                fits = False
            if not fits:  # here and not above, where the exception still keeps the failed pass's tensors alive
                self.width = len(chunk) // 2
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                continue
            yield from results
            done += len(chunk)

    def _pass(self, batch: Any, assignments: Sequence[Assignment], single: bool) -> list[tuple[Any, Any]]:
        if single:
            return together(lambda: one_at_a_time(self._forward, batch), self.model, self.layers, assignments)
        if self._step is None:  # targets are not the model's, and may be anything
            outputs = together(lambda: models.run(self.model, batch), self.model, self.layers, assignments)
            return [(output, batch[1]) for output in outputs]
        return together(lambda: self._forward(batch), self.model, self.layers, assignments)

    def _copies(self, assignments: Sequence[Assignment]) -> int:
        """How many assignments run in one pass."""
        copies = self.width or len(assignments)
        if self._device.type == "cpu" and (changing := differing(assignments)):
            largest = max(1, *self._numbers[changing[0] :])
            copies = min(copies, max(_CPU_COPIES, _CPU_NUMBERS // largest))
        return math.ceil(len(assignments) / math.ceil(len(assignments) / copies))  # passes of about one size

    def _separate_scores(self, batch: Any, assignments: Sequence[Assignment], single: bool) -> tuple[Tensor, int]:
        if not single:
            return self._scores(self._separately(batch, assignments), batch)
        values = [self._scores(self._separately(sample, assignments), sample)[0] for sample in one_by_one(batch)]
        return torch.stack(values).cpu().double().mean(0), len(values)

    def _scores(self, results: Iterable[tuple[Any, Any]], batch: Any) -> tuple[Tensor, int]:
        """Left on the device: waiting for it is for the end."""
        rows, samples = [], 0
        for outputs, targets in results:
            rows.append(self.measure(outputs, targets, batch))
            samples = samples or length(targets, outputs, batch)
        flat = [value for row in rows for value in row]
        if len({(value.device, value.dtype) for value in flat}) > 1:
            flat = [value.cpu().double() for value in flat]
        return torch.stack(flat).reshape(len(rows), -1), samples


def _headline(error: Exception) -> str:
    """An error's type and the first sentence of its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text.split('. ')[0]}" if text else type(error).__name__
