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


@pytest.mark.parametrize("weight", [np.full((4, 1), 5.0), None], ids=["each", "none"])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize(("xp", "asarray"), [(np, np.asarray), (torch, torch.as_tensor)])
def test_the_coefficient_form_is_that_of_the_equations(rng, xp, asarray, groups, weight):
    x, gamma, beta = rng.normal(size=(4, 5, 6)), rng.normal(size=6), rng.normal(size=6)
    options = {"eps": 1e-3, "mix_eps": 1e-4, "dim_scale": True, "per_position": False, "groups": groups}
    spec = Spec(**options)
    moments = formula.Moments(asarray(x.mean(1)), asarray(x.var(1)), None if weight is None else asarray(weight))
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


LIBRARIES = pytest.mark.parametrize(("xp", "asarray"), [(np, np.asarray), (torch, torch.as_tensor)])
FORMS = {
    "published": Spec.of(),
    "pooled": Spec.of(per_position=False),
    "grouped": Spec.of(2),
    "grouped, per position": Spec.of(2, per_position=True),
}


def fresh(xp, positions, d, groups):
    """What a layer remembers before training."""
    shapes = formula.shapes(positions, d, groups)
    *statistics, updates, samples = (
        xp.full(shape, int(name.endswith("_var")), dtype=xp.int64 if name in ("updates", "samples") else xp.float64)
        for name, shape in shapes.items()
    )
    return formula.Averages(Statistics(*statistics), updates, samples)


def assert_averages(found, expected):
    for name, theirs in oracle.NAMES.items():
        value = np.asarray(getattr(found.statistics, name))
        np.testing.assert_allclose(value, getattr(expected, theirs), atol=1e-12, err_msg=name)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spec", FORMS.values(), ids=FORMS)
@LIBRARIES
def test_mini_batches_are_measured_normalized_and_averaged_as_the_oracle_does(rng, xp, asarray, spec, masked):
    positions = (5,) if spec.per_position else ()
    found, expected = fresh(xp, positions, 4, spec.groups), oracle.Population(positions, 4, spec.groups)
    for momentum, n in ((0.1, 4), (None, 1), (0.3, 6)):
        x = rng.normal(size=(n, 5, 4)) * 3 + 1
        mask = np.cumsum(rng.random((n, 5)) < 0.4, axis=1) < 2 if masked else None  # thin tails, some empty
        given = None if mask is None else asarray(mask)
        rows = formula.hide(xp, asarray(x), given)
        batch = formula.current(xp, rows, given, spec)
        y = formula.normalize(xp, rows, batch.statistics, None, None, given, spec)
        options = {"mix_eps": spec.mix_eps, "dim_scale": spec.dim_scale, "groups": spec.groups}
        wanted = oracle.train(x, mask=mask, per_position=spec.per_position, **options)
        np.testing.assert_allclose(np.asarray(y), wanted, atol=1e-12)
        found = formula.update(xp, found, formula.estimates(xp, batch, spec), momentum, spec.groups)
        expected.update(x, momentum, mask, spec.per_position)
        assert_averages(found, expected)
    assert np.array_equal(np.broadcast_to(expected.updates, np.shape(found.updates[0])), np.asarray(found.updates[0]))


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")  # NumPy's, of what is not finite
@LIBRARIES
def test_a_mini_batch_that_is_not_finite_changes_nothing_and_samples_stop_at_the_most(rng, xp, asarray):
    spec, x = Spec.of(per_position=False), rng.normal(size=(4, 3))
    before = fresh(xp, (), 3, None)

    def updated(old, x):
        new = formula.estimates(xp, formula.current(xp, asarray(x), None, spec), spec)
        return formula.update(xp, old, new, None, None, most=6)

    once = updated(before, x)
    twice = updated(once, x)
    assert np.asarray(twice.samples).tolist() == [6] * 5
    assert np.asarray(twice.updates).tolist() == [2] * 5
    for bad in (np.nan, np.inf, 1e200):  # the last overflows as a square
        after = updated(once, np.where(np.arange(3) == 1, bad * np.arange(1, 5)[:, None], x))
        for mine, theirs in zip((*after.statistics, *after[1:]), (*once.statistics, *once[1:]), strict=True):
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


@LIBRARIES
def test_what_was_not_learned_since_and_one_over_m_come_from_before(rng, xp, asarray):
    shapes = formula.shapes((2,), 3, None)

    def remembered(updates):
        statistics = [asarray(rng.normal(size=shape)) for shape in list(shapes.values())[:5]]
        counters = np.broadcast_to(np.array(updates), (5, 2)).copy()
        return formula.Averages(Statistics(*statistics), asarray(counters), asarray(3 * counters))

    after, before = remembered([4, 0]), remembered([7, 7])
    completed = formula.complete(xp, after, before, None)
    for name in Statistics._fields:
        mine, new, old = (np.asarray(getattr(a.statistics, name)) for a in (completed, after, before))
        assert np.array_equal(mine[0], (old if name == "inverse_m" else new)[0]), name
        assert np.array_equal(mine[1], old[1]), name
    assert np.asarray(completed.updates).tolist() == [[4, 7]] * 4 + [[7, 7]]


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
