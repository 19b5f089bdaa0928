import pytest
import torch

from bln._search.evaluate import Evaluator


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch):
    """How fast a way was depends on what else the machine does; tests that are about time bring their own clock."""
    monkeypatch.setattr(Evaluator, "_clock", lambda self: 0.0)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
