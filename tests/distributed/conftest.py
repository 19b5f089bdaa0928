import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def three():
    ranks = Ranks(3)
    yield ranks
    ranks.stop()
