"""The time left of work in parts of different size."""

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


def test_without_a_forecast_nothing_is_said_before_some_work_is_done():
    now = 0.0
    left = TimeLeft([10.0, 10.0], clock=lambda: now)
    assert left.seconds() is None
    now = 4.0
    left.update(0.5)
    assert left.seconds() == pytest.approx(12)
