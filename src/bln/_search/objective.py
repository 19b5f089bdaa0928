"""The scores of assignments on all the data, remembered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ..config import StatisticsConfig
from ..population import Snapshot
from ..progress import track
from ..ranks import Ranks
from .arrange import Arrangement
from .evaluate import Evaluator
from .result import Row
from .score import Score
from .scores import Tally
from .vectorized import Assignment


@dataclass
class Outcome:
    """What is known of an assignment."""

    score: Score
    rebatched: dict[str, Score] = field(default_factory=dict)
    uncalibrated: Score | None = None


class Objective:
    """Evaluates assignments over mini-batches and their arrangements.

    Args:
        evaluator: Scores a mini-batch.
        names: The names of the BLN layers.
        configs: The configurations to choose from.
        robust: The cost of an assignment is that of the worst arrangement.
        progress: Show progress bars.
        ranks: Who else has mini-batches. All ask for the same assignments in the same order.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        names: Sequence[str],
        configs: Sequence[StatisticsConfig],
        robust: bool,
        progress: bool,
        ranks: Ranks,
    ) -> None:
        self.evaluator = evaluator
        self.ranks = ranks
        self.names = tuple(names)
        self.configs = tuple(configs)
        self.outcomes: dict[Assignment, Outcome] = {}
        self.held: list[Any] = []
        self.arrangements: list[Arrangement] = []
        self._robust = robust
        self.progress = progress

    @property
    def shared(self) -> list[Assignment]:
        """The assignments with one configuration for all layers."""
        return [(config,) * len(self.names) for config in self.configs]

    def first_pass(
        self, batches: Iterable[Any], hold: bool, found: Sequence[Snapshot], calibrated: Sequence[Snapshot] | None
    ) -> Tally:
        """Score the shared configurations while the batches come in, each loaded once; keep them if asked.

        After a calibration each mini-batch is scored with the statistics as found, too.
        """
        tally, before = self._tally(len(self.shared)), self._tally(len(self.shared))
        with self._tracked(batches, "search") as tracked:
            for batch in tracked:
                tally.add(*self.evaluator(batch, self.shared))
                if calibrated is not None:
                    self._restore(found)
                    before.add(*self.evaluator(batch, self.shared))
                    self._restore(calibrated)
                if hold:
                    self.held.append(batch)
        tally.join(self.ranks)
        if calibrated is not None:
            before.join(self.ranks)
        if not tally.batches:
            raise ValueError("search got no batches; was the iterable used up before?")
        old = before.scores() if calibrated is not None else [None] * len(self.shared)
        for assignment, score, uncalibrated in zip(self.shared, tally.scores(), old, strict=True):
            self.outcomes[assignment] = Outcome(score, uncalibrated=uncalibrated)
        return tally

    def _restore(self, snapshots: Sequence[Snapshot]) -> None:
        for layer, snapshot in zip(self.evaluator.layers, snapshots, strict=True):
            layer.population.restore(snapshot)

    def costs(self, assignments: Sequence[Assignment], what: str) -> list[float]:
        """The loss of each, or the worst of its arrangements."""
        unknown = [assignment for assignment in assignments if assignment not in self.outcomes]
        for assignment, score in zip(unknown, self._scores(unknown, self.held, False, what), strict=True):
            self.outcomes[assignment] = Outcome(score)
        if self._robust:
            self.rebatch(assignments, what)
        return [self.row(assignment).worst.loss for assignment in assignments]

    def rebatch(self, assignments: Sequence[Assignment], what: str) -> None:
        """Score every arrangement."""
        unknown = [a for a in assignments if not self.outcomes[a].rebatched]
        for arrangement in self.arrangements:
            scores = self._scores(unknown, arrangement.batches, arrangement.single, f"{what}, {arrangement.name}")
            for assignment, score in zip(unknown, scores, strict=True):
                self.outcomes[assignment].rebatched[arrangement.name] = score

    def _scores(
        self, assignments: Sequence[Assignment], batches: Iterable[Any], single: bool, what: str
    ) -> list[Score]:
        if not assignments:
            return []
        tally = self._tally(len(assignments))
        with self._tracked(batches, what) as tracked:
            for batch in tracked:
                tally.add(*self.evaluator(batch, assignments, single=single))
        tally.join(self.ranks)
        return tally.scores()

    def _tally(self, assignments: int) -> Tally:
        return Tally(self.evaluator.measure.metrics, assignments)

    def _tracked(self, batches: Iterable[Any], what: str) -> AbstractContextManager[Iterable[Any]]:
        """With a progress bar, which is gone before an exception is printed."""
        return closing(track(batches, what)) if self.progress else nullcontext(batches)

    def row(self, assignment: Assignment) -> Row:
        """What is known of an assignment, for the result."""
        known = self.outcomes[assignment]
        alike = len(set(assignment)) == 1
        config: Any = assignment[0] if alike else dict(zip(self.names, assignment, strict=True))
        return Row(config, known.score, dict(known.rebatched), known.uncalibrated)

    def assignment(self, row: Row) -> Assignment:
        """The assignment of a row."""
        config: StatisticsConfig | Mapping[str, StatisticsConfig] = row.config
        if isinstance(config, StatisticsConfig):
            return (config,) * len(self.names)
        return tuple(config[name] for name in self.names)
