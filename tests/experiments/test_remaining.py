"""The time left, where runs take steps of different number and length."""

from itertools import pairwise

import pytest

from bln.experiments.remaining import Forecast, TimeLeft
from bln.experiments.runs import Settings

FEW = [("a", 25, 1.0), ("a", 1, 0.25), ("b", 25, 1.0), ("b", 1, 0.25)]
SETTINGS = [Settings(task, "bln", size, fraction, seed, "clean", 4) for task, size, fraction in FEW for seed in (0, 1)]
TRUE = {("a", 25): 8.0, ("a", 1): 60.0, ("b", 25): 20.0, ("b", 1): 100.0}  # seconds of a run; 6.25 times the steps


def told():
    """What is said after each epoch: runs done, the time left in truth, and as estimated."""
    now = 0.0
    left = TimeLeft(SETTINGS, lambda: now)
    total = sum(TRUE[each.task, each.batch_size] for each in SETTINGS)
    for at, each in enumerate(SETTINGS):
        for epoch in range(1, 5):
            now += TRUE[each.task, each.batch_size] / 4
            left.update(at + epoch / 4)
            yield at + epoch / 4, total - now, left.seconds()


def test_nothing_is_said_before_each_task_was_seen_and_then_it_is_nearly_right():
    for done, truth, estimate in told():
        if done <= 4:
            assert estimate is None
        else:
            assert estimate == pytest.approx(truth, rel=0.3, abs=1e-6)
    assert estimate == 0


def test_runs_that_were_finished_before_do_not_count():
    now = 0.0
    left = TimeLeft(SETTINGS[:4], lambda: now)
    left.update(1)
    assert left.seconds() is None
    now += 8.0
    left.update(1.5)
    now += 8.0
    left.update(1.99)
    assert left.seconds() == pytest.approx(2 * 6.25 * 16 / 0.99, rel=0.01)


def test_it_runs_down_between_updates():
    now = 0.0
    left = TimeLeft(SETTINGS[:2], lambda: now)
    now = 4.0
    left.update(0.5)
    assert left.seconds() == 12
    now = 7.0
    assert left.seconds() == 9
    now = 70.0
    assert left.seconds() == 0


def test_a_forecast_is_believed_until_some_of_the_work_is_done_and_then_the_pace():
    now = 0.0
    left = Forecast([0.0, 600.0, 300.0, 100.0], 50.0, lambda: now)
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
    left = Forecast([100.0], 100.0, lambda: now)
    for step in range(1, 100):
        now = 10.0 * step
        left.update(step / 100)
        told.append(left.seconds())
    assert max(after - before for before, after in pairwise(told)) < 60
    assert told[-1] == pytest.approx(10)
    assert told[30] == pytest.approx(1000 - 310)


def test_without_a_forecast_nothing_is_said_before_some_work_is_done():
    now = 0.0
    left = Forecast([10.0, 10.0], clock=lambda: now)
    assert left.seconds() is None
    now = 4.0
    left.update(0.5)
    assert left.seconds() == pytest.approx(12)
