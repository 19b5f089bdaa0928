"""The figures the paper's authors' own layer gives, recorded from their code: eps 1e-3, mix_eps 1e-4, features last.

Three things differ there on purpose (docs/method.md): population feature statistics are one per batch slot, deviations
are always around the current mean, and a batch of 1 gives NaN. So inference is compared in the configurations where the
definitions agree: the batch statistics TT, FT and FF, the feature statistics FF.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from bln import BatchLayerNorm

RECORDED = np.load(Path(__file__).parent / "data" / "authors_layer.npz")
CASES = ("dense", "sequence", "image", "pair", "single")

# They computed in float32, and so do we: a few roundings of values of order 1 over deviations of order 1. A single
# sample's batch deviation is sqrt(eps) = 0.03, and a pair's may be as small.
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def recorded(case: str, name: str) -> torch.Tensor:
    return torch.tensor(RECORDED[f"{case}/{name}"])


@pytest.fixture(params=CASES)
def case(request):
    return request.param


@pytest.fixture
def layer(case):
    gamma = recorded(case, "gamma")
    layer = BatchLayerNorm(len(gamma), channel_dim=-1, eps=1e-3, mix_eps=1e-4, momentum=None)
    layer.weight.data, layer.bias.data = gamma, recorded(case, "beta")
    return layer


def test_training_forward_and_backward(case, layer):
    x = recorded(case, "train_x")[0].requires_grad_()
    y = layer(x)
    torch.testing.assert_close(y, recorded(case, "train_y0"), **CLOSE)
    y.backward(recorded(case, "dy"))
    torch.testing.assert_close(layer.bias.grad, recorded(case, "dbeta0"), **CLOSE)
    torch.testing.assert_close(layer.weight.grad, recorded(case, "dgamma0"), **CLOSE)
    torch.testing.assert_close(x.grad, recorded(case, "dx0"), **CLOSE)


def test_population_statistics(case, layer):
    for x in recorded(case, "train_x"):
        layer(x)
    population = layer.population
    torch.testing.assert_close(population.batch_mean, recorded(case, "population_batch_mean")[0], **CLOSE)
    feature_mean = recorded(case, "population_feature_mean_by_slot")[..., 0]
    torch.testing.assert_close(population.feature_mean, feature_mean.mean(0), **CLOSE)
    if case == "single":
        return  # theirs divides by m - 1 = 0
    torch.testing.assert_close(population.batch_var, recorded(case, "population_batch_var")[0], **CLOSE)
    feature_var = recorded(case, "population_feature_var_by_slot")[..., 0]
    torch.testing.assert_close(population.feature_var, feature_var.mean(0), **CLOSE)


@pytest.mark.parametrize("config", ["TTFF", "FTFF", "FFFF"])
def test_inference_where_the_definitions_agree(case, layer, config):
    for x in recorded(case, "train_x"):
        layer(x)
    layer.eval()
    layer.config = config
    theirs, ours = recorded(case, f"infer_y_{config}"), layer(recorded(case, "infer_x"))
    if case == "single" and config != "FFFF":
        assert theirs.isnan().any(), "their m / (m - 1) is 1 / 0"
        assert ours.isfinite().all()
    else:
        torch.testing.assert_close(ours, theirs, **CLOSE)
