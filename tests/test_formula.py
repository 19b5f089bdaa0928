"""The one formula, through NumPy and torch."""

import numpy as np
import pytest
import torch

import oracle
from bln import Statistics, StatisticsConfig, formula
from bln._spec import Spec


@pytest.mark.parametrize("dim_scale", [True, False])
@pytest.mark.parametrize("asarray", [np.asarray, torch.as_tensor])
def test_transform_is_eqs_14_to_17(rng, asarray, dim_scale):
    x, gamma, beta = rng.normal(size=(4, 3, 5)), rng.normal(size=5), rng.normal(size=5)
    s = oracle.measure(x)
    statistics = Statistics(*map(asarray, (s.mean_B, s.var_B, s.mean_F, s.var_F, 1 / s.m)))
    options = {"eps": 1e-3, "mix_eps": 1e-4, "dim_scale": dim_scale}
    y = formula.transform(asarray(x), statistics, asarray(gamma), asarray(beta), spec=Spec(**options))
    np.testing.assert_allclose(np.asarray(y), oracle.train(x, gamma, beta, **options), atol=1e-12)


@pytest.mark.parametrize("weight", [np.full((4, 1), 5.0), 5, None], ids=["each", "all", "none"])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize(("xp", "asarray"), [(np, np.asarray), (torch, torch.as_tensor)])
def test_the_coefficient_form_and_its_derivative_are_those_of_the_equations(rng, xp, asarray, groups, weight):
    x, dy, gamma, beta = rng.normal(size=(4, 5, 6)), rng.normal(size=(4, 5, 6)), rng.normal(size=6), rng.normal(size=6)
    options = {"eps": 1e-3, "mix_eps": 1e-4, "dim_scale": True, "per_position": False, "groups": groups}
    spec = Spec(**options)
    mean, var = asarray(x.mean(1)), asarray(x.var(1))
    moments = formula.Moments(mean, var, asarray(weight) if isinstance(weight, np.ndarray) else None)
    if weight is None:
        gamma = np.ones(6)
    s = Statistics(
        *formula.batch_statistics(xp, moments),
        *formula.feature_statistics(xp, moments, groups),
        asarray(np.array(0.25)),
    )
    a, b = formula.coefficients(xp, s, None if weight is None else asarray(gamma), asarray(beta), 6, spec)
    y = np.asarray(a)[:, None] * x + np.asarray(b)[:, None]
    np.testing.assert_allclose(y, oracle.train(x, gamma, beta, **options), atol=1e-12)

    sums, dots = asarray(dy.sum(1)), asarray((dy * (x - x.mean(1, keepdims=True))).sum(1))
    moments = moments._replace(weight=5 if moments.weight is None else moments.weight)
    scale = None if weight is None else asarray(gamma)
    c1, c0, d_gamma, d_beta = formula.gradients(xp, s, moments, sums, dots, scale, spec)
    dx = np.asarray(a)[:, None] * dy + np.asarray(c1)[:, None] * x + np.asarray(c0)[:, None]
    for ours, theirs in zip((dx, d_gamma, d_beta), oracle.train_backward(x, dy, gamma, **options), strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-12)


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


@pytest.mark.parametrize(("xp", "asarray"), [(np, np.asarray), (torch, torch.as_tensor)])
def test_parts_are_combined_without_cancellation(rng, xp, asarray):
    """A large mean, and parts without entries."""
    sizes = [3, 0, 1, 7]
    x = rng.normal(size=(sum(sizes), 4)) + 1e8
    parts = np.split(x, np.cumsum(sizes)[:-1])
    means = [part.mean(0) if len(part) else np.zeros(4) for part in parts]
    squares = [((part - mean) ** 2).sum(0) for part, mean in zip(parts, means, strict=True)]
    counts = np.array(sizes, float)[:, None]
    mean, var = formula.combine(xp, *(asarray(np.array(value)) for value in (counts, means, squares)))
    np.testing.assert_allclose(np.asarray(mean), x.mean(0), rtol=1e-15)
    np.testing.assert_allclose(np.asarray(var), x.var(0), rtol=1e-6)  # the means round to 1e-8 of a deviation
    nothing = asarray(np.zeros((2, 1)))
    assert [float(value[0]) for value in formula.combine(xp, nothing, nothing, nothing)] == [0, 0]


def test_configurations_read_as_they_are_written():
    configs = list(StatisticsConfig.all())
    assert len(set(configs)) == 16
    assert [str(StatisticsConfig.parse(str(config))) for config in configs] == [str(config) for config in configs]
    assert str(configs[0]) == "TTTT"
    assert StatisticsConfig.parse("TFFT") == StatisticsConfig(True, False, False, True)
    for text in ("16 16 F F", "T 0.25 F 64", "1e+06 4 T T"):
        assert str(StatisticsConfig.parse(text)) == text
        assert StatisticsConfig.of(np.float32(StatisticsConfig.parse(text).priors)) == StatisticsConfig.parse(text)
    assert StatisticsConfig.parse("inf 0 T F") == StatisticsConfig.parse("TFTF")
    assert StatisticsConfig(1, 1, False, False) != StatisticsConfig(True, True, False, False)
    assert len({StatisticsConfig(1, 1, False, False), StatisticsConfig.parse("TTFF")}) == 2
    with pytest.raises(AttributeError):
        configs[0].batch_mean = False
