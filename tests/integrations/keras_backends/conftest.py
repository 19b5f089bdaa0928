import os

import pytest

BACKENDS = ("tensorflow", "jax", "torch")


def pytest_configure(config):
    if os.environ.get("KERAS_BACKEND") not in BACKENDS:
        raise pytest.UsageError(
            f"set KERAS_BACKEND to one of {', '.join(BACKENDS)}: Keras takes one for each process. "
            "make test-integrations runs all three"
        )


@pytest.fixture(scope="session", autouse=True)
def the_backend_asked_for():
    import keras

    assert keras.backend.backend() == os.environ["KERAS_BACKEND"]
