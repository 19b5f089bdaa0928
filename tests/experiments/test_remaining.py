"""The time left of work in parts of different size."""

from itertools import pairwise

import pytest

from bln.experiments.remaining import TimeLeft


def test_a_forecast_is_believed_until_some_of_the_work_is_done_and_then_the_pace():
    now = 0.0
    left = TimeLeft([0.0, 600.0, 300.0, 100.0], 50.0, lambda: now)
    assert left.seconds() == 50
    now = 10.0
    left.update(1)  # was done before
    assert left.seconds() == 40
    now = 60.0
    left.update(2)
    assert left.seconds() == pytest.approx(40)  # 600 of 1,000 steps in 60 seconds
    now = 70.0
    assert left.seconds() == pytest.approx(30)
    left.update(4)
    assert left.seconds() == 0


def test_a_wrong_forecast_gives_way_to_the_pace_without_a_jump():
    """The machine is ten times slower than the forecast says."""
    now, told = 0.0, []
    left = TimeLeft([100.0], 100.0, lambda: now)
    for step in range(1, 100):
        now = 10.0 * step
        left.update(step / 100)
        told.append(left.seconds())
    assert max(after - before for before, after in pairwise(told)) < 60
    assert told[-1] == pytest.approx(10)
    assert told[30] == pytest.approx(1000 - 310)


def test_without_a_forecast_nothing_is_said_before_some_work_is_done():
    now = 0.0
    left = TimeLeft([10.0, 10.0], clock=lambda: now)
    assert left.seconds() is None
    now = 4.0
    left.update(0.5)
    assert left.seconds() == pytest.approx(12)
