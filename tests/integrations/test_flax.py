"""The Flax NNX layer: the numbers of the oracle and of torch, and the transformations of JAX."""

import doctest
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import bln
import bln.flax
import oracle
from agreement import CASES, CONFIGS, HISTORIES, NOT_FINITE, SHAPES, check_history, check_layer, check_not_finite
from bln.flax import BatchLayerNorm
from pages import check_lazy, check_missing, run_example

STATE = (*oracle.NAMES, "updates", "samples")
EPS = {"eps": 1e-4, "mix_eps": 1e-4}
CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # values of order 1 whose population was rounded to float32 on the way


@nnx.jit(static_argnames="infer")
def run(layer, x, mask, infer):
    return layer(x, use_running_average=infer, mask=mask)


@nnx.jit
def backward(layer, x, dy, mask):
    def loss(layer, x):
        y = layer(x, mask=mask)
        return (y * dy).sum(), y

    gradient = nnx.grad(loss, argnums=(0, 1), has_aux=True)
    return gradient(layer, x)


class Flax:
    def make(self, features, *, channel_dim, momentum=0.1, **options):
        old = None if momentum is None else 1 - momentum
        return BatchLayerNorm(features, channel_dim=channel_dim, momentum=old, **options, rngs=nnx.Rngs(0))

    def set_parameters(self, layer, gamma, beta):
        layer.scale[...], layer.bias[...] = jnp.asarray(gamma), jnp.asarray(beta)

    def train(self, layer, x, mask=None):
        call = (lambda *a: a[0](a[1], mask=a[2])) if layer.position_shape is None else (lambda *a: run(*a, False))
        return np.asarray(call(layer, jnp.asarray(x), None if mask is None else jnp.asarray(mask)))

    def infer(self, layer, x, mask=None):
        return np.asarray(run(layer, jnp.asarray(x), None if mask is None else jnp.asarray(mask), True))

    def train_backward(self, layer, x, dy, mask=None):
        mask = None if mask is None else jnp.asarray(mask)
        (parameters, dx), y = backward(layer, jnp.asarray(x), jnp.asarray(dy), mask)
        return tuple(np.asarray(v) for v in (y, dx, parameters["scale"][...], parameters["bias"][...]))

    def get(self, layer, name):
        return np.asarray(getattr(layer, name)[...])


FLAX = Flax()


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def make(features=3, **options):
    return BatchLayerNorm(features, **options, rngs=nnx.Rngs(0))


def state(layer):
    return {name: np.asarray(getattr(layer, name)[...]) for name in STATE}


def assert_same(layer, expected, **tolerance):
    for name, value in expected.items():
        np.testing.assert_allclose(np.asarray(getattr(layer, name)[...]), value, err_msg=name, **tolerance)


class TestNumbers:
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize(("shape", "form"), CASES)
    def test_it_agrees_with_the_oracle_and_with_torch(self, rng, shape, form, masked):
        check_layer(FLAX, rng, *SHAPES[shape], form, masked)

    @pytest.mark.parametrize(("momentum", "form"), HISTORIES)
    def test_the_population_after_any_history_is_the_oracles(self, rng, momentum, form):
        check_history(FLAX, rng, momentum, form)

    @pytest.mark.parametrize("masked", [True, False])
    @pytest.mark.parametrize(("bad", "form"), NOT_FINITE)
    def test_a_mini_batch_that_is_not_finite_never_enters(self, rng, bad, masked, form):
        check_not_finite(FLAX, rng, bad, masked, form)

    @pytest.mark.parametrize("options", [{}, {"per_position": False}, {"groups": 2}, {"groups": 6}], ids=str)
    def test_a_single_sample_is_finite_and_useful_in_all_16_configurations(self, rng, options):
        layer = make(6, **options)
        for _ in range(3):
            assert jnp.isfinite(layer(normal(rng, 1, 4, 6))).all()
        for config in CONFIGS:
            layer.config = config
            y = layer(normal(rng, 1, 4, 6), use_running_average=True)
            assert jnp.isfinite(y).all()
            assert jnp.abs(y).max() > 0.01

    @pytest.mark.parametrize("groups", [1, 3, 6])
    def test_grouped_it_is_flaxs_group_norm_at_a_single_sample(self, rng, groups):
        theirs = nnx.GroupNorm(6, num_groups=groups, epsilon=1e-4, use_fast_variance=False, rngs=nnx.Rngs(0))
        x = normal(rng, 1, 5, 4, 6)
        np.testing.assert_allclose(make(6, groups=groups)(x), theirs(x), **CLOSE)

    def test_grouped_it_is_flaxs_batch_norm_where_one_over_m_is_0(self, rng):
        layer = make(6, groups=3)
        theirs = nnx.BatchNorm(6, epsilon=1e-4, use_running_average=True, rngs=nnx.Rngs(0))
        theirs.mean[...], theirs.var[...] = normal(rng, 6), normal(rng, 6) ** 2 + 0.1
        layer.batch_mean[...], layer.batch_var[...] = theirs.mean[...], theirs.var[...]
        layer.updates[...] = jnp.ones_like(layer.updates[...])
        x = normal(rng, 4, 5, 6)
        np.testing.assert_allclose(layer(x, use_running_average=True), theirs(x), **CLOSE)


class TestModes:
    def test_train_eval_view_constructor_and_call(self, rng):
        layer = make()
        x = normal(rng, 6, 3)
        layer(x)
        trained = layer(x, use_running_average=False)
        inferred = layer(x, use_running_average=True)
        assert jnp.abs(trained - inferred).max() > 1e-3
        before = state(layer)
        model = nnx.Sequential(layer)
        model.eval()
        assert jnp.array_equal(model(x), inferred)
        assert jnp.array_equal(nnx.view(layer, use_running_average=True)(x), inferred)
        assert_same(layer, before)
        model.train()
        assert jnp.array_equal(model(x), trained)
        assert (layer.updates[...] == 3).all()
        assert jnp.array_equal(make(use_running_average=True)(x), make()(x, True))
        with pytest.raises(ValueError, match="use_running_average is not known"):
            make(use_running_average=None)(x)

    def test_a_configuration_takes_effect_in_a_compiled_function(self, rng):
        layer = make()
        x = normal(rng, 6, 4, 3)
        layer(x)
        layer(x * 2 + 1)
        population = oracle.Population((4,), 3)
        for name, theirs in oracle.NAMES.items():
            setattr(population, theirs, np.asarray(getattr(layer, name)[...], np.float64))
        population.updates[...] = 1
        traces = []

        @nnx.jit
        def predict(layer, x):
            traces.append(1)
            return layer(x, use_running_average=True)

        for config in CONFIGS:
            layer.config = config
            assert str(layer.config) == config
            np.testing.assert_allclose(predict(layer, x), population.infer(x, config, **EPS), **CLOSE)
        assert len(traces) == 1

    def test_the_state_holds_statistics_and_configuration(self, rng):
        layer, other = make(config="FTTF"), make(position_shape=4)
        layer(normal(rng, 6, 4, 3))
        graph, parameters, statistics = nnx.split(layer, nnx.Param, nnx.BatchStat)
        assert len(jax.tree.leaves(parameters)) == 2
        assert len(jax.tree.leaves(statistics)) == 8
        nnx.update(other, parameters, statistics)
        assert str(other.config) == "FTTF"
        assert_same(other, state(layer))
        again = nnx.merge(graph, parameters, statistics)
        x = normal(rng, 2, 4, 3)
        assert jnp.array_equal(again(x, True), layer(x, True))

    @pytest.mark.parametrize("options", [{}, {"groups": 5, "per_position": True}], ids=str)
    def test_positions_come_with_the_state_of_another_layer(self, rng, options):
        """They once stayed unknown, and an input of one position was stretched to all: (6, 7, 5) for (6, 1, 5)."""
        old, new = make(5, **options), make(5, **options)
        old(normal(rng, 6, 7, 5))
        nnx.update(new, nnx.state(old))
        assert new.position_shape == (7,)
        x = normal(rng, 6, 1, 5)
        assert jnp.array_equal(new(x, use_running_average=True), old(x, use_running_average=True))
        with pytest.raises(ValueError, match=r"positions \(8,\), but statistics are kept for positions \(7,\)"):
            new(normal(rng, 6, 8, 5))
        new.reset_statistics()
        assert new.position_shape == (7,)

    def test_no_parameters(self, rng):
        layer = make(use_bias=False, use_scale=False)
        x = normal(rng, 4, 3)
        np.testing.assert_allclose(layer(x), oracle.train(x), **CLOSE)
        assert not jax.tree.leaves(nnx.state(layer, nnx.Param))

    def test_helpers_for_whole_models(self, rng):
        class Net(nnx.Module):
            def __init__(self):
                self.zeroth, self.layers = make(), nnx.List([make() for _ in range(11)])

        model = Net()
        assert list(bln.flax.layers(model)) == [*(f"layers.{i}" for i in range(11)), "zeroth"]
        assert list(bln.flax.layers(nnx.clone(model))) == list(bln.flax.layers(model))
        bln.flax.configure(model, {"zeroth": "FFFF"})
        assert str(model.zeroth.config) == "FFFF"
        with pytest.raises(ValueError, match="no BatchLayerNorm named 'zero'"):
            bln.flax.configure(model, {"zero": "FFFF"})
        fresh = state(model.zeroth)
        model.zeroth(normal(rng, 4, 3))
        bln.flax.reset_statistics(model)
        assert_same(model.zeroth, fresh)
        with pytest.raises(ValueError, match=r"Linear has no bln\.flax.BatchLayerNorm"):
            bln.flax.configure(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "FFFF")


class TestTypes:
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
    def test_statistics_are_float32_and_the_output_as_asked(self, rng, dtype):
        x = normal(rng, 8, 3).astype(dtype)
        for options, wanted in (({"dtype": dtype}, dtype), ({}, jnp.float32), ({"param_dtype": dtype}, dtype)):
            layer = make(**options)
            for infer in (False, True):
                assert layer(x, infer).dtype == wanted
            assert layer.batch_var[...].dtype == jnp.float32

    def test_values_whose_squares_overflow_float16_do_enter(self, rng):
        layer = make(dtype=jnp.float16)
        x = (normal(rng, 8, 3) * 10000).astype(jnp.float16)
        assert jnp.isfinite(layer(x)).all()
        np.testing.assert_allclose(layer.batch_var[...], np.asarray(x, np.float64).var(0, ddof=1), rtol=1e-5)

    def test_double(self, rng):
        with jax.enable_x64(True):
            layer = make(param_dtype=jnp.float64)
            x = rng.normal(size=(6, 4, 3))
            np.testing.assert_allclose(layer(jnp.asarray(x)), oracle.train(x), atol=1e-12)
            population = oracle.Population((4,), 3)
            population.update(x, 0.1)
            np.testing.assert_allclose(layer.feature_var[...], population.var_F, rtol=1e-12)
            grouped = oracle.train(x, groups=1, per_position=False, mix_eps=0, dim_scale=False)
            layer = make(groups=1, param_dtype=jnp.float64)
            np.testing.assert_allclose(layer(jnp.asarray(x)), grouped, atol=1e-12)


class TestTransformations:
    def test_positions_are_learned_outside_and_refused_inside(self, rng):
        x = normal(rng, 6, 4, 3)
        step = nnx.jit(lambda layer, x: layer(x))
        with pytest.raises(ValueError, match=r"position_shape=\(4,\).*per_position=False"):
            step(make(), x)
        with pytest.raises(ValueError, match="inside jit, grad"):
            nnx.grad(lambda layer, x: layer(x).sum(), argnums=1)(make(), x)
        ways_out = [make(position_shape=4), make(per_position=False), make()]
        ways_out[2](x, use_running_average=True)
        assert ways_out[2].position_shape == (4,)
        for layer in ways_out:
            wanted = oracle.train(x, per_position=layer.per_position)
            np.testing.assert_allclose(step(layer, x), wanted, **CLOSE)
            assert (layer.updates[...] == 1).all()
        dense = make()
        step(dense, x[:, 0])
        assert (dense.updates[...] == 1).all()

    def test_a_training_step(self, rng):
        class Net(nnx.Module):
            def __init__(self, rngs):
                self.inner = nnx.Linear(4, 16, rngs=rngs)
                self.norm = BatchLayerNorm(16, rngs=rngs)
                self.outer = nnx.Linear(16, 1, rngs=rngs)

            def __call__(self, x):
                return self.outer(self.norm(jnp.tanh(self.inner(x))))

        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x, y):
            loss, gradients = nnx.value_and_grad(lambda model: ((model(x) - y) ** 2).mean())(model)
            optimizer.update(model, gradients)
            return loss

        x = normal(rng, 64, 4)
        y = x.prod(1, keepdims=True)
        scale = model.norm.scale[...]
        losses = [float(step(model, optimizer, x, y)) for _ in range(60)]
        assert losses[-1] < losses[0] / 2
        assert not jnp.array_equal(model.norm.scale[...], scale)
        assert (model.norm.updates[...] == 60).all()

    def test_vmap_over_an_ensemble(self, rng):
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(key):
            return BatchLayerNorm(3, position_shape=4, rngs=nnx.Rngs(key))

        ensemble = create(jax.random.split(jax.random.key(0), 5))
        x = normal(rng, 5, 6, 4, 3)
        y = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, 0))(ensemble, x)
        for member in range(5):
            alone = make(position_shape=4)
            np.testing.assert_allclose(y[member], alone(x[member]), **CLOSE)
            for name in STATE:
                mine = getattr(ensemble, name)[...][member]
                np.testing.assert_allclose(mine, getattr(alone, name)[...], **CLOSE, err_msg=name)

    def test_remat_counts_once(self, rng):
        layer = make(position_shape=4)
        nnx.grad(lambda layer, x: nnx.remat(lambda layer, x: layer(x))(layer, x).sum())(layer, normal(rng, 6, 4, 3))
        assert (layer.updates[...] == 1).all()


SHARDS = 4


class TestShards:
    """Four shards with different numbers of real entries are one mini-batch."""

    OPTIONS = (
        {"position_shape": 5},
        {"per_position": False},
        {"groups": 3},
        {"groups": 3, "per_position": True, "position_shape": 5},
    )

    @pytest.fixture(params=itertools.product([False, True], OPTIONS), ids=str)
    def case(self, request, rng):
        masked, options = request.param
        x, dy = normal(rng, 8, 5, 3), normal(rng, 8, 5, 3)
        # The first shard has next to nothing, the second nothing at some positions.
        mask = jnp.asarray(rng.random((8, 5)) < np.repeat([0.1, 0.4, 0.9, 1.0], 2)[:, None]) if masked else None
        whole = make(**options)
        expected = FLAX.train_backward(whole, x, dy, mask)
        return x, dy, mask, options, whole, expected

    @staticmethod
    def split(array, groups=SHARDS):
        return None if array is None else array.reshape(groups, -1, *array.shape[1:])

    def check(self, case, sharded):
        """``sharded(part, statistics, x, dy, mask)`` runs ``part`` on each shard and returns loss, y, statistics."""
        x, dy, mask, options, whole, expected = case
        layer = make(**options, axis_name="shards")
        graph, parameters, statistics = nnx.split(layer, nnx.Param, nnx.BatchStat)

        def part(parameters, statistics, x, dy, mask):
            layer = nnx.merge(graph, parameters, statistics)
            y = layer(x, mask=mask)
            return (y * dy).sum(), y, nnx.state(layer, nnx.BatchStat)

        def loss(parameters, x):
            value, y, after = sharded(part, parameters, statistics, x, dy, mask)
            return value, (y, after)

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
        (for_parameters, dx), (y, after) = gradient(parameters, x)
        found = (y, dx, for_parameters["scale"][...], for_parameters["bias"][...])
        for name, mine, theirs in zip(("y", "dx", "dscale", "dbias"), found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, **CLOSE, err_msg=name)
        nnx.update(layer, after)
        assert_same(layer, state(whole), **CLOSE)
        assert layer(x, use_running_average=True).shape == x.shape, "inference needs no axis"

    def test_vmap(self, case):
        def sharded(part, parameters, statistics, x, dy, mask):
            axes = (None, None, 0, 0, None if mask is None else 0)
            arrays = map(self.split, (x, dy, mask))
            loss, y, after = jax.vmap(part, in_axes=axes, axis_name="shards")(parameters, statistics, *arrays)
            return loss.sum(), y.reshape(x.shape), jax.tree.map(lambda leaf: leaf[0], after)

        self.check(case, sharded)

    def test_shard_map(self, case):
        mesh = Mesh(np.array(jax.devices()[:SHARDS]), ("shards",))
        whole, parts = PartitionSpec(), PartitionSpec("shards")

        def sharded(part, parameters, statistics, x, dy, mask):
            def shard(*arrays):
                loss, y, after = part(*arrays)
                return jax.lax.psum(loss, "shards"), y, after

            specs = {"in_specs": (whole, whole, parts, parts, parts), "out_specs": (whole, parts, whole)}
            return jax.shard_map(shard, mesh=mesh, **specs)(parameters, statistics, x, dy, mask)

        self.check(case, sharded)

    def test_pmap(self, case):
        """Outputs and statistics; pmap leaves adding up gradients to its caller."""
        x, _, mask, options, whole, expected = case
        layer = make(**options, axis_name="shards")
        graph, variables = nnx.split(layer)

        def part(variables, x, mask):
            layer = nnx.merge(graph, variables)
            return layer(x, mask=mask), nnx.state(layer)

        run_parts = jax.pmap(part, axis_name="shards", in_axes=(None, 0, 0), devices=jax.devices()[:SHARDS])
        y, after = run_parts(variables, self.split(x), self.split(mask))
        np.testing.assert_allclose(y.reshape(x.shape), expected[0], **CLOSE)
        for shard in range(SHARDS):
            nnx.update(layer, jax.tree.map(lambda leaf, shard=shard: leaf[shard], after))
            assert_same(layer, state(whole), **CLOSE)

    def test_groups_of_shards_are_apart(self, rng):
        x = normal(rng, 8, 5, 3)
        layer = make(position_shape=5, axis_name="shards", axis_index_groups=((0, 1), (2, 3)))
        graph, variables = nnx.split(layer)
        part = jax.pmap(lambda v, x: nnx.merge(graph, v)(x), axis_name="shards", in_axes=(None, 0))
        y = part(variables, self.split(x))
        for half, rows in zip(y.reshape(2, 4, 5, 3), x.reshape(2, 4, 5, 3), strict=True):
            np.testing.assert_allclose(half, oracle.train(rows), **CLOSE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"channel_dim": 0}, "channel_dim must be -1"),
        ({"features": 0}, "num_features must be an integer of at least 1"),
        ({"features": 3.0}, "num_features must be an integer of at least 1"),
        ({"groups": 2}, "groups=2 does not divide 3 features; try groups=1 or groups=3"),
        ({"groups": 3, "position_shape": 4}, "goes with per_position=True"),
        ({"eps": 0}, "must be a positive number"),
        ({"momentum": -0.1}, "weight of the old value"),
        ({"position_shape": (3, 0)}, "must hold positive sizes"),
        ({"config": "TT"}, "is not a configuration"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


@pytest.mark.parametrize(
    ("x", "mask", "error", "message"),
    [
        (jnp.ones((4, 3), int), None, TypeError, "floating point"),
        (jnp.ones(3), None, ValueError, r"x\[None\]"),
        (jnp.ones((4, 5)), None, ValueError, "expected 3 features along dimension 1, got 5"),
        (jnp.ones((0, 3)), None, ValueError, r"cannot train on an empty input, got shape \(0, 3\)"),
        (jnp.ones((4, 3)), jnp.ones(4), TypeError, "boolean mask"),
        (jnp.ones((4, 3)), jnp.ones((4, 3), bool), ValueError, r"mask of shape \(4,\), \(N, \*positions\)"),
    ],
)
def test_inputs_that_cannot_be_are_refused(x, mask, error, message):
    with pytest.raises(error, match=message):
        make()(x, mask=mask)


@pytest.mark.parametrize("options", [{}, {"per_position": False}, {"groups": 3}], ids=str)
def test_an_empty_batch_comes_out_empty_at_inference(rng, options):
    layer = make(**options, dtype=jnp.bfloat16)
    for _ in range(2):  # before training and after
        y = layer(jnp.ones((0, 4, 3)), use_running_average=True, mask=jnp.ones((0, 4), bool))
        assert y.shape == (0, 4, 3)
        assert y.dtype == jnp.bfloat16
        layer(normal(rng, 2, 4, 3))


def test_the_number_of_features_may_be_an_integer_of_numpy(rng):
    layer = make(np.int64(3), groups=np.int64(3), channel_dim=np.int64(1))
    assert layer(normal(rng, 2, 3)).shape == (2, 3)
    assert {type(value) for value in (layer.num_features, layer.groups, layer.channel_dim)} == {int}


def test_a_mask_may_be_a_list(rng):
    x, mask = normal(rng, 2, 3, 4), [[True, True, False], [True, False, False]]
    wanted = oracle.train(np.asarray(x, np.float64), mask=np.array(mask))
    np.testing.assert_allclose(make(4)(x, mask=mask), wanted, atol=1e-5)  # float32, of order 1


def test_other_positions_are_refused_with_the_ways_out(rng):
    layer = make()
    layer(normal(rng, 2, 4, 4, 3))
    with pytest.raises(ValueError, match=r"positions \(5, 4\), but statistics are kept for positions \(4, 4\)"):
        layer(normal(rng, 2, 5, 4, 3))


@pytest.mark.parametrize("groups", [None, 3])
def test_options_are_those_of_torch_by_default(groups):
    ours, theirs = make(groups=groups), bln.BatchLayerNorm(3, groups=groups)
    for name in ("groups", "per_position", "eps", "mix_eps", "dim_scale", "config"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert 1 - ours.momentum == pytest.approx(theirs.momentum)
    assert list(itertools.chain(ours.scale[...].tolist(), ours.bias[...].tolist())) == [1] * 3 + [0] * 3


def test_docstrings():
    failed, attempted = doctest.testmod(bln.flax)
    assert attempted > 0
    assert failed == 0


def test_the_example_runs_as_it_is():
    run_example("flax_digits.py")


def test_importing_bln_imports_no_flax_and_the_attribute_does():
    check_lazy("flax")


@pytest.mark.parametrize("missing", ["flax", "jax"])
def test_a_missing_flax_is_named(missing):
    check_missing("flax", missing)
