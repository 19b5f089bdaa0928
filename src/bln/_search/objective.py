"""The scores of assignments over all the data, remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._distributed.ranks import Ranks
from .._progress import track
from ..config import StatisticsConfig
from ..layer import BatchLayerNorm
from ..population import Snapshot
from .descend import Assignment
from .evaluate import Evaluator
from .score import Row, Score, averages


@dataclass
class Objective:
    """The scores of assignments over all mini-batches, and over the same samples in other orders.

    All ranks ask for the same assignments in the same order.
    """

    evaluator: Evaluator
    names: Sequence[str]
    configs: Sequence[StatisticsConfig]
    robust: bool
    progress: bool
    ranks: Ranks
    rows: dict[Assignment, Row] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)
    """The mini-batches, if they are kept."""
    orders: dict[str, Sequence[Any]] = field(default_factory=dict)
    """The same samples in other mini-batches, by name."""

    @property
    def shared(self) -> list[Assignment]:
        """The assignments with one configuration for all layers."""
        return [(config,) * len(self.names) for config in self.configs]

    def first_pass(
        self, batches: Iterable[Any], hold: bool, found: Sequence[Snapshot], calibrated: Sequence[Snapshot] | None
    ) -> list[int]:
        """Score the shared configurations, each mini-batch being loaded once and kept if asked; return the sizes.

        After a calibration each mini-batch is scored with the statistics as found, too.
        """

        def score(batch: Any) -> tuple[list[Tensor], int]:
            values, samples = self.evaluator(batch, self.shared)
            parts = [values]
            if calibrated is not None:
                restore(self.evaluator.layers, found)
                parts.append(self.evaluator(batch, self.shared)[0])
                restore(self.evaluator.layers, calibrated)
            if hold:
                self.held.append(batch)
            return parts, samples

        shared = self.shared
        number = len(shared)
        scores, samples = self._average(batches, "search", score, number if calibrated is None else 2 * number)
        if not samples:
            raise ValueError("search got no batches; was the iterable used up before?")
        before: Sequence[Score | None] = scores[number:] or [None] * number
        for assignment, score_, uncalibrated in zip(shared, scores[:number], before, strict=True):
            self.rows[assignment] = Row(assignment[0], score_, uncalibrated=uncalibrated)
        return samples

    def costs(self, assignments: Sequence[Assignment], what: str) -> list[float]:
        """The loss of each, of the worst order of samples if robust."""
        unknown = [assignment for assignment in assignments if assignment not in self.rows]
        for assignment, score in zip(unknown, self._score(unknown, self.held, what), strict=True):
            alike = len(set(assignment)) == 1
            config = assignment[0] if alike else dict(zip(self.names, assignment, strict=True))
            self.rows[assignment] = Row(config, score)
        if self.robust:
            self.rebatch(assignments, what)
            return [self.rows[assignment].worst.loss for assignment in assignments]
        return [self.rows[assignment].loss for assignment in assignments]

    def rebatch(self, assignments: Sequence[Assignment], what: str) -> None:
        """Score every order of samples."""
        unknown = [assignment for assignment in assignments if not self.rows[assignment].rebatched]
        for name, batches in self.orders.items():
            scores = self._score(unknown, batches, f"{what}, {name}", single=name == "single")
            for assignment, score in zip(unknown, scores, strict=True):
                self.rows[assignment].rebatched[name] = score

    def _score(
        self, assignments: Sequence[Assignment], batches: Iterable[Any], what: str, *, single: bool = False
    ) -> list[Score]:
        if not assignments:
            return []

        def score(batch: Any) -> tuple[list[Tensor], int]:
            values, samples = self.evaluator(batch, assignments, single=single)
            return [values], samples

        return self._average(batches, what, score, len(assignments))[0]

    def _average(
        self, batches: Iterable[Any], what: str, score: Callable[[Any], tuple[list[Tensor], int]], number: int
    ) -> tuple[list[Score], list[int]]:
        """Average ``number`` scores over the mini-batches of all ranks; also return the mini-batches' sizes."""
        metrics = self.evaluator.measure.metrics
        found, sizes = [], []
        # The progress bar is closed before an exception is printed.
        with closing(track(batches, what)) if self.progress else nullcontext(batches) as tracked:
            for batch in tracked:
                parts, samples = score(batch)
                found.append(parts)
                sizes.append(samples)
        values = torch.empty(len(found), number, 1 + len(metrics), dtype=torch.float64)
        for row, parts in zip(values, found, strict=True):  # only here is a device waited for
            torch.cat([part.cpu().double() for part in parts], out=row)
        values = self.ranks.gather(values)
        sizes = self.ranks.gather(torch.tensor(sizes, dtype=torch.int64)).tolist()
        return averages(values.tolist(), sizes, metrics), sizes


def restore(layers: Sequence[BatchLayerNorm], snapshots: Sequence[Snapshot]) -> None:
    """Put statistics back."""
    for layer, snapshot in zip(layers, snapshots, strict=True):
        layer.population.restore(snapshot)
