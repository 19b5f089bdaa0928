"""Synchronized statistics: ranks together do what one process with all samples does."""

import random

import pytest

SHARES = {
    "two": [[4, 4], [1, 6], [0, 5], [7, 0], [1, 1]],
    "three": [[2, 3, 4], [0, 5, 1], [6, 0, 0], [1, 0, 1]],
}


@pytest.fixture(params=["two", "three"])
def ranks(request):
    return request.getfixturevalue(request.param)


def against_the_oracle(ranks, **case):
    name = "two" if ranks.world == 2 else "three"
    defaults = {
        "seed": random.randrange(2**31), "shares": SHARES[name], "dtype": "float32", "positions": [3, 2],
        "channel_dim": 1, "per_position": True, "masked": False, "momentum": 0.3,
    }  # fmt: skip
    ranks.check("against_the_oracle", **{**defaults, **case})


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("per_position", [True, False], ids=["per position", "pooled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_gradients_and_population_are_those_of_one_process(ranks, dtype, per_position, masked):
    against_the_oracle(ranks, dtype=dtype, per_position=per_position, masked=masked)
