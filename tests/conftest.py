import os
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; Triton reads it when it is imported

settings.register_profile(
    "bln", deadline=None, max_examples=int(os.environ.get("BLN_EXAMPLES", "60")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
settings.load_profile("bln")
torch.set_num_threads(1)  # two test processes on two cores


@pytest.fixture(autouse=True)
def fresh_random_numbers(record_property):
    """New numbers each run; a failure shows the seed, BLN_SEED sets it."""
    seed = int(os.environ.get("BLN_SEED", random.SystemRandom().randrange(2**31)))
    print(f"BLN_SEED={seed}")
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


@pytest.fixture
def rng():
    return np.random.default_rng(torch.randint(2**31, ()).item())
