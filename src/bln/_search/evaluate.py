"""Many configurations on one mini-batch: together where that gives the same, one after the other elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import model as models
from ..layer import BatchLayerNorm
from .arrange import first, one_by_one
from .compare import equal, out_of_memory, tolerance
from .groups import Assignment, apart, assigned, tiling
from .scores import Measure, length

_PROBES = 4
"""Samples that are evaluated one by one to see whether the same can be had in a large batch."""


@dataclass
class Way:
    """How to run several assignments: the mode, and what the first mini-batch showed of inputs and outputs."""

    mode: str
    early: bool = False
    """Make the copies in the first layer called, not in the first that differs."""
    inputs: dict[str, set[int]] = field(default_factory=dict)
    """Tiled: which arguments of the model hold samples."""
    outputs: tuple[bool, ...] = ()
    """Which tensors of the output hold copies; the others are the same for all."""
    on_trial: bool = False
    """No faster on the first mini-batch; the second decides."""


class Evaluator:
    """Scores assignments on mini-batches, and finds the way to run them.

    Args:
        model: The model, in ``eval()``.
        layers: Its BLN layers.
        measure: The loss and metrics.
        step: ``step(model, batch) -> (outputs, targets)``, or ``None`` for batches of ``(inputs, targets)``.
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
        self.width: int | None = None  # assignments that fit in memory together, once more did not
        self.slower = False  # together than separately, on the first batches
        self._step = step
        self._device = next(chain(model.parameters(), model.buffers())).device
        self._ways: dict[tuple[int, bool], Way] = {}

    @property
    def mode(self) -> str:
        """How the first assignments were run; a rank without a mini-batch was idle."""
        return next((way.mode for way in self._ways.values()), "idle")

    def __call__(self, batch: Any, assignments: Sequence[Assignment], *, single: bool = False) -> tuple[Tensor, int]:
        """Scores ``(assignments, 1 + metrics)`` on a mini-batch, and its samples.

        Args:
            batch: The mini-batch.
            assignments: Different from each other.
            single: Every sample comes as a mini-batch of its own.
        """
        batch = self._prepared(batch)
        if len(assignments) == 1 and not single:
            return self._scores(self._separately(batch, assignments), batch)
        columns = zip(*assignments, strict=True)
        key = next((at for at, configs in enumerate(columns) if len(set(configs)) > 1), 0), single
        if key not in self._ways:
            way, values = self._find(batch, assignments, single)
            self._ways[key] = way
            if values is not None:
                return values
        way = self._ways[key]
        if way.on_trial:
            return self._second_trial(way, batch, assignments)
        return self._run(way, batch, assignments, single)

    def _prepared(self, batch: Any) -> Any:
        """Move a batch of ``(inputs, targets)``, once for all assignments."""
        if self._step is not None:
            return batch
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            kind = type(batch).__name__
            what = f"{kind} of {len(batch)}" if isinstance(batch, tuple | list | dict) else kind
            raise ValueError(
                f"expected batches of (inputs, targets), got a {what}; inputs may be a tensor, a tuple or a dict. For "
                "other batches pass step=, a function step(model, batch) that returns (outputs, targets)"
            )
        return models.to_device(batch, self._device)

    def _forward(self, batch: Any) -> tuple[Any, Any]:
        if self._step is None:
            return models.run(self.model, batch), batch[1]
        result = self._step(self.model, batch)
        if not (isinstance(result, tuple | list) and len(result) == 2):
            raise ValueError(f"step(model, batch) must return (outputs, targets), got {type(result).__name__}")
        return result[0], result[1]

    # ---- running

    def _run(self, way: Way, batch: Any, assignments: Sequence[Assignment], single: bool) -> tuple[Tensor, int]:
        if way.mode != "separate":
            return self._scores(self._together(way, batch, assignments, single), batch)
        if not single:
            return self._scores(self._separately(batch, assignments), batch)
        values = [self._scores(self._separately(sample, assignments), sample)[0] for sample in one_by_one(batch)]
        return torch.stack(values).cpu().double().mean(0), len(values)

    def _separately(self, batch: Any, assignments: Sequence[Assignment]) -> Iterator[tuple[Any, Any]]:
        for assignment in assignments:
            with assigned(self.layers, assignment):
                yield self._forward(batch)

    def _together(
        self, way: Way, batch: Any, assignments: Sequence[Assignment], single: bool
    ) -> Iterator[tuple[Any, Any]]:
        """Outputs and targets of each assignment; as many at once as fit in memory."""
        done = 0
        while done < len(assignments):
            chunk = assignments[done : done + (self.width or len(assignments))]
            fits = True
            try:
                outputs, targets = self._pass(way, batch, chunk, single)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) or len(chunk) == 1:
                    raise
                fits = False
            if not fits:  # here and not above, where the exception still keeps the failed pass's tensors alive
                self._split(len(chunk))
                continue
            yield from ((output, targets) for output in outputs)
            done += len(chunk)

    def _pass(self, way: Way, batch: Any, assignments: Sequence[Assignment], single: bool) -> tuple[list[Any], Any]:
        """One pass over copies of the mini-batch, its outputs taken apart."""
        (leaves, spec), targets = self._copied(way, batch, assignments, single)
        copies = len(assignments)
        parts = [
            leaf.unflatten(0, (copies, -1)).unbind() if held else [leaf] * copies
            for leaf, held in zip(leaves, way.outputs, strict=True)
        ]
        return [pytree.tree_unflatten(list(part), spec) for part in zip(*parts, strict=True)], targets

    def _copied(
        self, way: Way, batch: Any, assignments: Sequence[Assignment], single: bool
    ) -> tuple[tuple[list[Any], Any], Any]:
        tiled = way.mode == "tiled"
        with (
            apart(self.layers, assignments, tiled=tiled, early=way.early, single=single),
            tiling(self.model, len(assignments), way.inputs) if tiled else nullcontext(),
        ):
            outputs, targets = self._forward(batch)
        return pytree.tree_flatten(outputs), targets

    def _split(self, tried: int) -> None:
        self.width = tried // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _scores(self, results: Iterator[tuple[Any, Any]], batch: Any) -> tuple[Tensor, int]:
        """Left on the device: waiting for it is for the end."""
        rows, samples = [], 0
        for outputs, targets in results:
            rows.append(self.measure(outputs, targets))
            samples = samples or length(targets, outputs, batch)
        flat = [value for row in rows for value in row]
        if len({(value.device, value.dtype) for value in flat}) > 1:
            flat = [value.cpu().double() for value in flat]
        return torch.stack(flat).reshape(len(rows), -1), samples

    # ---- finding the way

    def _find(
        self, batch: Any, assignments: Sequence[Assignment], single: bool
    ) -> tuple[Way, tuple[Tensor, int] | None]:
        """The first way whose outputs and losses equal those of separate evaluations, and the scores seen there."""
        if single:
            return self._find_single(first(batch, _PROBES), assignments), None
        results: list[tuple[Any, Any]] = []
        times = []
        for assignment in assignments:
            start = self._clock()
            results += self._separately(batch, [assignment])
            times.append(self._clock() - start)
        values = self._scores(iter(results), batch)
        way = self._equal_way(batch, assignments, single, [outputs for outputs, _ in results], values[0])
        if way.mode != "separate":  # the check was the first pass and warmed up; as the median leaves out a first run
            together = min(self._time(self._together(way, batch, assignments, single)) for _ in range(2))
            way.on_trial = together > len(times) * median(times)
        return way, values

    def _find_single(self, probes: Any, assignments: Sequence[Assignment]) -> Way:
        parts = [list(self._separately(sample, assignments)) for sample in one_by_one(probes)]
        values = torch.stack([self._scores(iter(part), probes)[0] for part in parts]).cpu().double().mean(0)
        try:
            outputs = [
                pytree.tree_map(lambda *leaves: torch.cat(leaves), *(output for output, _ in results))
                for results in zip(*parts, strict=True)
            ]
        except Exception:  # outputs that cannot be put together cannot be taken apart either
            return Way("separate")
        return self._equal_way(probes, assignments, True, outputs, values)

    def _equal_way(
        self, batch: Any, assignments: Sequence[Assignment], single: bool, outputs: list[Any], values: Tensor
    ) -> Way:
        prefix = any(len(set(configs)) == 1 for configs in zip(*assignments, strict=True))
        for way in (Way("grouped"), *([Way("grouped", early=True)] if prefix else []), Way("tiled")):
            try:
                way.outputs = self._held(way, batch, assignments, single, outputs)
                ours = list(self._together(way, batch, assignments, single))
                scores = self._scores(iter(ours), batch)[0].cpu().double()
            except Exception:  # whatever the model cannot do with copies, it can do without
                continue
            within = tolerance(self._device, outputs)
            alike = all(equal(our, their, within) for (our, _), their in zip(ours, outputs, strict=True))
            if alike and torch.allclose(
                scores[:, 0], values[:, 0].cpu().double(), rtol=within, atol=within, equal_nan=True
            ):
                return way
        return Way("separate")

    def _held(
        self, way: Way, batch: Any, assignments: Sequence[Assignment], single: bool, outputs: list[Any]
    ) -> tuple[bool, ...]:
        """Which tensors of the output hold copies, told by their length in a pass of two."""
        (leaves, _), _ = self._copied(way, batch, assignments[:2], single)
        if not leaves:
            raise ValueError("there is no output to take apart")
        lengths = [
            (len(ours), len(theirs)) for ours, theirs in zip(leaves, pytree.tree_leaves(outputs[0]), strict=True)
        ]
        if any(ours not in (theirs, 2 * theirs) for ours, theirs in lengths):
            raise ValueError("an output's length does not follow that of the batch")
        return tuple(ours != theirs for ours, theirs in lengths)

    def _second_trial(self, way: Way, batch: Any, assignments: Sequence[Assignment]) -> tuple[Tensor, int]:
        together = min(self._time(self._together(way, batch, assignments, False)) for _ in range(2))
        separately = self._time(self._separately(batch, assignments))
        way.on_trial = False
        if together > separately:
            way.mode, self.slower = "separate", True
        return self._run(way, batch, assignments, False)

    def _time(self, results: Iterator[tuple[Any, Any]]) -> float:
        """Seconds to compute the outputs; what comes after them is the same for all ways."""
        start = self._clock()
        deque(results, maxlen=0)
        return self._clock() - start

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
