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


@pytest.fixture(autouse=True)
def one_thread():
    """Nets this small only wait for a second thread, and long where other tests have the core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
