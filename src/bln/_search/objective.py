"""``Objective``: the scores of assignments over all the data, each computed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from .._distributed.ranks import Ranks
from .._models.layers import Snapshots, restore
from .._progress import track
from ..config import StatisticsConfig
from .evaluate import Evaluator
from .per_layer import Assignment
from .result import Row, Score, average_scores


@dataclass
class Objective:
    """The scores of assignments over all mini-batches, and over the same samples in other orders.

    All ranks ask for the same assignments in the same order.
    """

    evaluator: Evaluator
    singles: Evaluator
    """Scores samples one at a time."""
    batches: Iterable[Any]
    names: Sequence[str]
    configs: Sequence[StatisticsConfig]
    robust: bool
    progress: bool
    ranks: Ranks
    rows: dict[Assignment, Row] = field(default_factory=dict)
    orders: dict[str, Iterable[Any]] = field(default_factory=dict)
    """The same samples in other mini-batches, by name."""

    @property
    def shared(self) -> list[Assignment]:
        """The assignments with one configuration for all layers."""
        return [(config,) * len(self.names) for config in self.configs]

    def first_pass(self, statistics: Sequence[Snapshots]) -> list[int]:
        """Score the shared configurations; return the sizes of mini-batches.

        After a calibration ``statistics`` are the calibrated ones and those before it; scores are taken with both.
        """
        shared = self.shared
        scores, samples = self._average(shared, self.batches, "search", statistics=statistics)
        if not samples:
            raise ValueError("search got no batches; was the iterable used up before?")
        before = scores[len(shared) :]
        for assignment, score, uncalibrated in zip_longest(shared, scores[: len(shared)], before):
            self.rows[assignment] = Row(**vars(score), config=assignment[0], uncalibrated=uncalibrated)
        return samples

    def costs(self, assignments: Sequence[Assignment], what: str) -> list[float]:
        """Return the loss of each assignment; if robust, that of its worst order of samples."""
        unknown = [assignment for assignment in assignments if assignment not in self.rows]
        for assignment, score in zip(unknown, self._average(unknown, self.batches, what)[0], strict=True):
            self.rows[assignment] = Row(**vars(score), config=dict(zip(self.names, assignment, strict=True)))
        if self.robust:
            self.rebatch(assignments, what)
        rows = [self.rows[assignment] for assignment in assignments]
        return [(row.worst if self.robust else row).loss for row in rows]

    def rebatch(self, assignments: Sequence[Assignment], what: str) -> None:
        """Score these assignments in every order of samples."""
        unknown = [assignment for assignment in assignments if not self.rows[assignment].rebatched]
        for name, batches in self.orders.items():
            scores, _ = self._average(unknown, batches, f"{what}, {name}", single=name == "single")
            for assignment, score in zip(unknown, scores, strict=True):
                self.rows[assignment].rebatched[name] = score

    def _average(
        self,
        assignments: Sequence[Assignment],
        batches: Iterable[Any],
        what: str,
        single: bool = False,
        statistics: Sequence[Snapshots] = ((),),
    ) -> tuple[list[Score], list[int]]:
        """Average scores over the mini-batches of all ranks, with each of these statistics; return the sizes, too."""
        if not assignments:
            return [], []
        evaluator = self.singles if single else self.evaluator
        all_scores, samples = list[list[Any]](), list[int]()
        # The progress bar is closed before an exception is printed.
        with closing(track(batches, what)) if self.progress else nullcontext(batches) as tracked:
            for batch in tracked:
                for snapshots in statistics:
                    restore(evaluator.layers, snapshots)
                    scores, number = evaluator(batch, assignments)
                    all_scores += scores
                samples.append(number)
        restore(evaluator.layers, statistics[0])
        metrics = [name for name, _ in evaluator.functions[1:]]
        values = torch.tensor(all_scores, dtype=torch.float64)  # the only place that waits for a device
        values = self.ranks.gather(values.reshape(len(samples), len(statistics) * len(assignments), 1 + len(metrics)))
        samples = self.ranks.gather(torch.tensor(samples, dtype=torch.int64)).tolist()
        return average_scores(values.tolist(), samples, metrics), samples
