"""The one formula, through NumPy and torch."""

import numpy as np
import pytest
import torch

import oracle
from bln import Statistics, StatisticsConfig, formula


@pytest.mark.parametrize("dim_scale", [True, False])
@pytest.mark.parametrize("asarray", [np.asarray, torch.as_tensor])
def test_transform_is_eqs_14_to_17(rng, asarray, dim_scale):
    x, gamma, beta = rng.normal(size=(4, 3, 5)), rng.normal(size=5), rng.normal(size=5)
    s = oracle.measure(x)
    statistics = Statistics(*map(asarray, (s.mean_B, s.var_B, s.mean_F, s.var_F, 1 / s.m)))
    options = {"eps": 1e-3, "mix_eps": 1e-4, "dim_scale": dim_scale}
    y = formula.transform(asarray(x), statistics, asarray(gamma), asarray(beta), **options)
    np.testing.assert_allclose(np.asarray(y), oracle.train(x, gamma, beta, **options), atol=1e-12)


def test_weights_lean_on_features_as_the_mini_batch_shrinks():
    for m in (1, 2, 25, 256):
        w_B, w_F = formula.weights(1 / m, 1e-4, 9, dim_scale=False)
        assert w_B == pytest.approx(1 - 1 / m - 1e-4)
        assert w_F == pytest.approx(1 / m - 1e-4)
        assert formula.weights(1 / m, 1e-4, 9, dim_scale=True) == pytest.approx((w_B / 3, w_F / 3))


def test_bessel_is_one_for_a_single_sample():
    assert formula.bessel(1) == 1
    assert formula.bessel(5) == 1.25
    assert formula.bessel(np.array([1.0, 2.0, 4.0])).tolist() == [1, 2, 4 / 3]
    assert formula.bessel(torch.tensor([1.0, 2.0])).tolist() == [1, 2]


@pytest.mark.parametrize("asarray", [np.asarray, torch.as_tensor])
def test_parts_are_combined_without_cancellation(rng, asarray):
    """A large mean, and parts without entries."""
    sizes = [3, 0, 1, 7]
    x = rng.normal(size=(sum(sizes), 4)) + 1e8
    parts = np.split(x, np.cumsum(sizes)[:-1])
    means = [part.mean(0) if len(part) else np.zeros(4) for part in parts]
    squares = [((part - mean) ** 2).sum(0) for part, mean in zip(parts, means, strict=True)]
    counts = np.array(sizes, float)[:, None]
    mean, var = formula.combine(*(asarray(np.array(value)) for value in (counts, means, squares)))
    np.testing.assert_allclose(np.asarray(mean), x.mean(0), rtol=1e-15)
    np.testing.assert_allclose(np.asarray(var), x.var(0), rtol=1e-6)  # the means round to 1e-8 of a deviation
    nothing = asarray(np.zeros((2, 1)))
    assert [float(value[0]) for value in formula.combine(nothing, nothing, nothing)] == [0, 0]


def test_configurations_read_as_they_are_written():
    configs = list(StatisticsConfig.all())
    assert len(set(configs)) == 16
    assert [str(StatisticsConfig.parse(str(config))) for config in configs] == [str(config) for config in configs]
    assert str(configs[0]) == "TTTT"
    assert StatisticsConfig.parse("TFFT") == StatisticsConfig(True, False, False, True)
    with pytest.raises(AttributeError):
        configs[0].batch_mean = False
