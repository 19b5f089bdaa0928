"""Score many configurations on one mini-batch: in one pass where the model allows it, else one after the other.

In one pass ``torch.vmap`` tracks which values differ between configurations. What precedes the first BLN layer that
differs is computed once. After it, every configuration has a copy of the mini-batch, with statistics of its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._models.batches import count_samples, holds_samples, is_pair, length, part, to_device
from .._models.run import Step, run_batch
from ..formula import Priors
from ..layer import BatchLayerNorm
from .metrics import Function, score
from .per_layer import Assignment

RawScores = list[list[Any]]
"""The loss and the metrics of each assignment: numbers, or tensors without dimensions, left on their device."""

_PROBES = 4
"""Single samples for the check that one pass gives the same losses."""
_CPU_NUMBERS, _CPU_COPIES = 2**21, 4
"""On a CPU: the most values that the copies of a layer's output may have in all, and the copies that are always made.

Larger tensors leave the cache. Of a (32, 64, 28, 28) input, 4 copies take the time of separate evaluations, 16 take 1.7
times as long."""


@dataclass
class Evaluator:
    """Score assignments on mini-batches, or if ``single`` on each of their samples alone.

    The first mini-batch is evaluated in both ways. If the losses are the same, assignments run together from there on.
    """

    model: nn.Module
    layers: Sequence[BatchLayerNorm]
    functions: Sequence[tuple[str, Function]]
    step: Step | None
    single: bool
    why: str | None = None
    """Why assignments run separately; empty if together, ``None`` before the first mini-batch."""
    width: int | None = None
    """The most assignments in one pass; ``None`` for all."""

    def __post_init__(self) -> None:
        self._device = next(chain(self.model.parameters(), self.model.buffers())).device

    def __call__(self, batch: Any, assignments: Sequence[Assignment]) -> tuple[RawScores, int]:
        """Score assignments on a mini-batch; return the number of samples, too."""
        if self.step is None:
            if not is_pair(batch):
                raise ValueError(
                    f"expected batches of (inputs, targets), got a {type(batch).__name__}; for others pass step=, such "
                    "as step=lambda model, batch: (model(batch['inputs']), batch['labels'])"
                )
            batch = to_device(batch, self._device)  # once for all assignments
        if self.why is None:
            checked = self._check(part(batch, 0, _PROBES) if self.single else batch, assignments)
            if not self.single:
                return checked
        if not self.why:
            try:
                results = self._together(batch, assignments)
            except Exception as error:  # a model that cannot be vectorized can still run separately
                self.why = _headline(error)
            else:
                return self._scores(results, batch)
        return self._separately(batch, assignments)

    def _check(self, batch: Any, assignments: Sequence[Assignment]) -> tuple[RawScores, int]:
        """Evaluate in both ways, note whether one pass will do, and return the scores of separate evaluations."""
        sizes = [1]
        hooks = [layer.register_forward_hook(lambda _, __, y: sizes.append(y.numel())) for layer in self.layers]
        try:
            expected, samples = self._separately(batch, assignments)
        finally:
            for hook in hooks:
                hook.remove()
        if self._device.type == "cpu":
            self.width = max(_CPU_COPIES, _CPU_NUMBERS // max(sizes))
        try:
            results = self._together(batch, assignments)
            together, _ = self._scores(results, batch)
            within = _tolerance(self._device, [outputs for outputs, _ in results])
            losses, others = (torch.tensor(scores, dtype=torch.float64)[:, 0] for scores in (together, expected))
            alike = torch.allclose(losses, others, rtol=within, atol=within, equal_nan=True)
            self.why = "" if alike else "together they have other losses"
        except Exception as error:
            self.why = _headline(error)
        return expected, samples

    def _together(self, batch: Any, assignments: Sequence[Assignment]) -> list[tuple[Any, Any]]:
        run = partial(_one_at_a_time, self._run, batch) if self.single else partial(self._run, batch)
        return _in_one_pass(run, self.layers, assignments, self.width)

    def _separately(self, batch: Any, assignments: Sequence[Assignment]) -> tuple[RawScores, int]:
        def results(batch: Any) -> Iterator[tuple[Any, Any]]:
            for assignment in assignments:
                with assigned(self.layers, assignment):
                    yield self._run(batch)

        if not self.single:
            return self._scores(results(batch), batch)
        samples = [part(batch, at, at + 1) for at in range(count_samples(batch))]
        scores = [self._scores(results(sample), sample)[0] for sample in samples]
        return torch.tensor(scores, dtype=torch.float64).mean(0).tolist(), len(samples)

    def _run(self, batch: Any) -> tuple[Any, Any]:
        if self.step is None:
            return run_batch(self.model, batch), batch[1]
        result = self.step(self.model, batch)
        if not is_pair(result):
            raise ValueError(f"step(model, batch) must return (outputs, targets), got {type(result).__name__}")
        return result[0], result[1]

    def _scores(self, results: Iterable[tuple[Any, Any]], batch: Any) -> tuple[RawScores, int]:
        scores, samples = [], 0
        for outputs, targets in results:
            scores.append([score(name, function, outputs, targets) for name, function in self.functions])
            samples = samples or length(targets, outputs, batch)
        return scores, samples


def _tolerance(device: torch.device, outputs: Any) -> float:
    """Return the root of the coarsest epsilon of the outputs' types, autocast and TF32.

    With another batch size libraries sum in another order. Differences of an epsilon then grow from layer to layer,
    most where a variance is near 0, but seldom by 1/sqrt(epsilon), 3,000 in float32; and a false alarm costs time, not
    truth. Statistics that leak from one copy to the next change outputs by as much as configurations differ.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    types = {leaf.dtype for leaf in leaves} or {torch.float32}
    if torch.is_autocast_enabled(device.type):
        types.add(torch.get_autocast_dtype(device.type))
    tf32 = 2.0**-10 if device.type == "cuda" else 0.0  # on for convolutions unless switched off
    return math.sqrt(max(tf32, *(torch.finfo(dtype).eps for dtype in types)))


def _headline(error: Exception) -> str:
    """Return an error's type and the first sentence of its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text.split('. ')[0]}" if text else type(error).__name__


# ---- one pass for many


@contextmanager
def assigned(layers: Sequence[BatchLayerNorm], configs: Sequence[Any]) -> Iterator[None]:
    """Set these configurations, or stacked ones, and restore those before at the end."""
    before = [layer.config for layer in layers]
    try:
        for layer, config in zip(layers, configs, strict=True):
            layer._config = config
        yield
    finally:
        for layer, config in zip(layers, before, strict=True):
            layer._config = config


class _Stacked(Priors):
    """The configurations of all copies, as ``formula.choose`` takes them: prior strengths in tensors."""

    uses_batch = uses_features = True


def _in_one_pass(
    function: Callable[[], Any], layers: Sequence[BatchLayerNorm], assignments: Sequence[Assignment], width: int | None
) -> list[Any]:
    """Call ``function``, which runs the model, with up to ``width`` assignments in each pass; return its results."""
    if len(assignments) == 1:
        with assigned(layers, assignments[0]):
            return [function()]
    changing = [at for at, configs in enumerate(zip(*assignments, strict=True)) if len(set(configs)) > 1]
    priors = [[assignment[at].priors for at in changing] for assignment in assignments]

    def run(rows: Tensor) -> Any:
        configs: list[Any] = list(assignments[0])
        for at, row in zip(changing, rows, strict=True):
            configs[at] = _Stacked(*row.to(layers[at].population.batch_mean.device).unbind())
        with assigned(layers, configs):
            return function()

    stacked = _vectorized(run, torch.tensor(priors, device=layers[0].population.batch_mean.device), 0, width)
    return [pytree.tree_map(itemgetter(at), stacked) for at in range(len(assignments))]


def _one_at_a_time(function: Callable[[Any], Any], batch: Any) -> Any:
    """Call ``function`` on each sample of a mini-batch, as a mini-batch of its own, in one pass."""
    n = count_samples(batch)
    dims = pytree.tree_map(lambda leaf: 0 if holds_samples(leaf, n) else None, batch)

    def run(sample: Any) -> Any:
        return function(pytree.tree_map(lambda leaf, dim: leaf if dim is None else leaf[None], sample, dims))

    return pytree.tree_map(lambda leaf: leaf.flatten(0, 1), _vectorized(run, batch, dims))


def _vectorized(function: Callable[[Any], Any], values: Any, dims: Any, width: int | None = None) -> Any:
    """Call ``function`` on each entry of the values' first dimension; return its result, its tensors stacked."""
    with warnings.catch_warnings():  # where an operator has no rule, it runs once for each copy
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
        return torch.vmap(function, (dims,), chunk_size=width)(values)
