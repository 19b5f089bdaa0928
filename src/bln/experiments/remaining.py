"""An estimate of the time that runs of different lengths still take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .runs import Settings

_SEEN = 0.05
"""The share of a run after which its speed says something; before that it is mostly loading data."""


_TRUSTED = 0.2
"""The share of the work after which the pace alone is believed."""


class TimeLeft:
    """An estimate of the time left, from what runs of each task and batch size took.

    Single samples take many times the steps of batches of 25, so runs per second so far say little of those to come.
    Nothing is said before a run of each task has been seen: a step of one says nothing of a step of another.

    Args:
        settings: The runs, in the order in which they are done.
        clock: Returns seconds.
    """

    def __init__(self, settings: Sequence[Settings], clock: Callable[[], float] = time.monotonic) -> None:
        self._kinds = [(each.task, each.batch_size) for each in settings]
        self._steps = {
            kind: each.fraction * each.epochs / each.batch_size
            for kind, each in zip(self._kinds, settings, strict=True)
        }
        self._clock = clock
        self._spent: dict[tuple[str, int], tuple[float, float]] = {}
        self._done = 0.0
        self._at = clock()

    def update(self, done: float) -> None:
        """Note that ``done`` runs are done; parts of runs count."""
        now, advance = self._clock(), done - self._done
        if advance <= 0:
            return
        if advance < 1 and int(self._done) < len(self._kinds):  # a jump of a whole run was finished earlier
            kind = self._kinds[int(self._done)]
            seconds, runs = self._spent.get(kind, (0.0, 0.0))
            self._spent[kind] = seconds + now - self._at, runs + advance
        self._done, self._at = done, now

    def seconds(self) -> float | None:
        """Return the time left since the last update, or ``None`` while it is not known."""
        whole = int(self._done)
        to_come = self._kinds[whole:]
        total = 0.0
        for at, kind in enumerate(to_come):
            each = self._seconds_of(kind)
            if each is None:
                return None
            total += each * (1 - (self._done - whole) if at == 0 else 1)
        return max(0.0, total - (self._clock() - self._at))

    def _seconds_of(self, kind: tuple[str, int]) -> float | None:
        """Return what a run of this kind takes: as seen, or scaled by steps from another batch size of its task."""
        seen = {other: s / n for other, (s, n) in self._spent.items() if n >= _SEEN and other[0] == kind[0]}
        if kind in seen:
            return seen[kind]
        for other, seconds in seen.items():
            return seconds * self._steps[kind] / self._steps[other]
        return None


class Forecast:
    """An estimate of the time left where parts end in any order, several at a time: by the share of the work done.

    What is told passes from the forecast to the pace so far without a jump, as the first of the work is done.

    Args:
        amounts: The work in each part, in the order in which they begin; 0 if it was done before.
        seconds: A forecast of the whole.
        clock: Returns seconds.
    """

    def __init__(
        self, amounts: Sequence[float], seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._amounts, self._forecast, self._clock = amounts, seconds, clock
        self._share = 0.0
        self._at = self._start = clock()

    def update(self, done: float) -> None:
        """Note that ``done`` parts are done; fractions of parts count."""
        whole = int(done)
        amount = sum(self._amounts[:whole]) + sum(self._amounts[whole : whole + 1]) * (done - whole)
        share = amount / (sum(self._amounts) or 1.0)
        if share > self._share:
            self._share, self._at = share, self._clock()

    def seconds(self) -> float | None:
        """Return the time left, or ``None`` while it is not known."""
        now = self._clock()
        forecast = None if self._forecast is None else max(0.0, self._forecast - (now - self._start))
        if self._share < (_SEEN if forecast is None else 1e-3):
            return forecast
        pace = max(0.0, (self._at - self._start) * (1 - self._share) / self._share - (now - self._at))
        trust = 1.0 if forecast is None else min(1.0, self._share / _TRUSTED)
        return trust * pace + (1 - trust) * (forecast or 0.0)
