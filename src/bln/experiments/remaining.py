"""Progress of work in parts of different size, and an estimate of the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

Progress = Callable[[float, str], None]
"""Called with the number of parts done, fractions included, and the name of what is under way."""

_KNOWN = 0.05
"""The share of the work from which on the pace is known. Before, most of the time goes into loading data."""
_TRUSTED = 0.2
"""The share of the work from which on the pace replaces the forecast."""


class TimeLeft:
    """The time left of work whose parts end in any order, several at a time, by the share of the work done.

    The estimate moves from the forecast to the pace so far without a jump.

    Args:
        amounts: The work in each part, in the order in which they begin; 0 if it was done before.
        seconds: A forecast for all parts.
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
        if self._share < (_KNOWN if forecast is None else 1e-3):
            return forecast
        pace = max(0.0, (self._at - self._start) * (1 - self._share) / self._share - (now - self._at))
        trust = 1.0 if forecast is None else min(1.0, self._share / _TRUSTED)
        return trust * pace + (1 - trust) * (forecast or 0.0)
