"""The Keras layer: the numbers of the oracle and of torch, and what Keras asks of a layer."""

import itertools
from pathlib import Path

import keras
import numpy as np
import pytest

import bln
import oracle
from agreement import (
    CASES,
    CONFIGS,
    HISTORIES,
    NOT_FINITE,
    SHAPES,
    Window,
    check_history,
    check_layer,
    check_not_finite,
)
from bln.keras import BatchLayerNormalization
from through_numpy import Keras, double, numpy

KERAS = Keras()
STATE = (*oracle.NAMES, "updates", "samples")
EPS = {"eps": 1e-4, "mix_eps": 1e-4}
CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # values of order 1 whose population was rounded to float32 on the way


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def state(layer):
    return {name: numpy(getattr(layer, name)).copy() for name in STATE}


def assert_same_state(layer, before):
    for name, value in before.items():
        np.testing.assert_array_equal(numpy(getattr(layer, name)), value, err_msg=name)


class TestNumbers:
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize(("shape", "form"), CASES)
    def test_it_agrees_with_the_oracle_and_with_torch(self, rng, shape, form, masked):
        check_layer(KERAS, rng, *SHAPES[shape], form, masked)

    @pytest.mark.parametrize(("momentum", "form"), HISTORIES)
    def test_the_population_after_any_history_is_the_oracles(self, rng, momentum, form):
        check_history(KERAS, rng, momentum, form)

    @pytest.mark.parametrize("masked", [True, False])
    @pytest.mark.parametrize(("bad", "form"), NOT_FINITE)
    def test_a_mini_batch_that_is_not_finite_never_enters(self, rng, bad, masked, form):
        check_not_finite(KERAS, rng, bad, masked, form)

    def test_before_training_it_uses_mean_0_variance_1_and_the_current_m(self, rng):
        x = normal(rng, 4, 3)
        wanted = oracle.Population((), 3).infer(x, "TTFF", **EPS)
        np.testing.assert_allclose(numpy(BatchLayerNormalization()(x)), wanted, **CLOSE)

    @pytest.mark.parametrize("groups", [1, 3, 6])
    def test_grouped_it_is_kerass_group_normalization_at_a_single_sample(self, rng, groups):
        x = normal(rng, 1, 5, 4, 6)
        theirs = keras.layers.GroupNormalization(groups, epsilon=1e-4)
        found = KERAS.train(BatchLayerNormalization(groups=groups), x)
        np.testing.assert_allclose(found, numpy(theirs(x)), **CLOSE)

    @pytest.mark.parametrize("options", [{}, {"per_position": False}, {"groups": 3}], ids=str)
    def test_an_empty_batch_comes_out_empty_at_inference(self, rng, options):
        layer = BatchLayerNormalization(**options)
        layer(normal(rng, 4, 5, 3), training=True)
        assert layer(normal(rng, 0, 5, 3)).shape == (0, 5, 3)

    @pytest.mark.parametrize("groups", [None, 3])
    def test_options_are_those_of_torch_by_default(self, groups):
        ours, theirs = BatchLayerNormalization(groups=groups), bln.BatchLayerNorm(3, groups=groups)
        assert ours.spec == theirs.spec
        assert ours.config == theirs.config

    @pytest.mark.parametrize("groups", [None, 3])
    def test_a_mask_that_hides_everything_gives_0_and_no_update(self, rng, groups):
        layer = BatchLayerNormalization(groups=groups)
        y = KERAS.train(layer, normal(rng, 4, 5, 3), np.zeros((4, 5), bool))
        assert (y == 0).all()
        assert not numpy(layer.updates).any()

    def test_samples_are_counted_up_to_the_largest_int32(self, rng):
        layer = BatchLayerNormalization(momentum=None)
        layer(normal(rng, 4, 3), training=True)
        layer.samples.assign(np.full(5, 2**31 - 3))
        layer(normal(rng, 4, 3), training=True)
        assert (numpy(layer.samples) == 2**31 - 1).all()


BATTERY = {
    "dense": ((8, 6), {}),
    "sequence": ((8, 5, 6), {}),
    "signal": ((8, 6, 5), {"axis": 1}),
    "image": ((8, 4, 3, 6), {}),
    "volume": ((8, 2, 3, 2, 6), {}),
}
VARIANTS = {
    "as published": {},
    "pooled": {"per_position": False},
    "grouped": {"groups": 3},
    "grouped, per position": {"groups": 2, "per_position": True},
    "pooled and unscaled": {"per_position": False, "dim_scale": False},
    "plain average": {"momentum": None},
    "no shift": {"center": False},
    "no parameters": {"center": False, "scale": False},
    "published code's eps": {"epsilon": 1e-3, "mix_epsilon": 1e-4},
}


COMBINED = [
    *itertools.product(BATTERY, ("as published", "pooled", "grouped")),
    *itertools.product(["sequence"], list(VARIANTS)[3:]),
]


@pytest.mark.parametrize(("shape", "variant"), COMBINED)
class TestBattery:
    """What Keras's own run_layer_test asks of every layer."""

    @pytest.fixture
    def sizes(self, shape):
        return BATTERY[shape][0]

    @pytest.fixture
    def arguments(self, shape, variant):
        return {**BATTERY[shape][1], **VARIANTS[variant]}

    @pytest.fixture
    def x(self, rng, sizes):
        return normal(rng, *sizes)

    def test_shapes_and_weights(self, sizes, arguments):
        layer = BatchLayerNormalization(**arguments)
        symbolic = layer(keras.KerasTensor((None, *sizes[1:]), dtype="float32"))
        assert symbolic.shape == (None, *sizes[1:])
        assert layer.compute_output_shape(sizes) == sizes
        assert len(layer.trainable_weights) == layer.scale + layer.center
        assert len(layer.non_trainable_weights) == 8  # five statistics, two counters, the configuration
        assert layer.losses == []
        assert layer.supports_masking

    def test_types(self, x, arguments):
        """The output has the compute type, the statistics are float32."""
        policies = {
            "float32": "float32",
            "mixed_bfloat16": "bfloat16",
            "mixed_float16": "float16",
            "bfloat16": "bfloat16",
        }
        for policy, output in policies.items():
            layer = BatchLayerNormalization(**arguments, dtype=policy)
            for training in (True, False):
                y = layer(x, training=training)
                assert keras.backend.standardize_dtype(y.dtype) == output
                assert np.isfinite(numpy(keras.ops.cast(y, "float32"))).all()
            assert keras.backend.standardize_dtype(layer.batch_var.dtype) == "float32"

    def test_its_configuration_builds_the_same_layer(self, x, arguments):
        layer = BatchLayerNormalization(**arguments)
        layer(x, training=True)
        layer.config = "FTTF"
        rebuilt = BatchLayerNormalization.from_config(layer.get_config())
        assert rebuilt.get_config() == layer.get_config()
        assert str(rebuilt.config) == "FTTF"
        rebuilt.build(x.shape)
        rebuilt.set_weights(layer.get_weights())
        np.testing.assert_array_equal(numpy(rebuilt(x)), numpy(layer(x)))

    def test_a_model_takes_a_step_and_is_saved_and_loaded_as_it_was(self, rng, tmp_path, x, arguments):
        inputs = keras.Input(x.shape[1:])
        layer = BatchLayerNormalization(**arguments)
        model = keras.Model(inputs, layer(inputs))
        model.compile(keras.optimizers.SGD(0.1), loss="mse")
        before = [numpy(weight).copy() for weight in layer.trainable_weights]
        model.train_on_batch(x, normal(rng, *x.shape)) if before else layer(x, training=True)
        for old, new in zip(before, layer.trainable_weights, strict=True):
            assert not np.array_equal(old, numpy(new))
        assert (numpy(layer.updates) == 1).all()
        layer.config = "FFTF"
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        twin = loaded.layers[1]
        assert str(twin.config) == "FFTF"
        assert_same_state(twin, state(layer))
        np.testing.assert_array_equal(loaded.predict_on_batch(x), model.predict_on_batch(x))
        twin(x, training=True)
        assert (numpy(twin.updates) == 2).all()

    def test_a_mask_hides_what_it_hides_and_a_full_one_nothing(self, rng, x, arguments):
        axis = arguments.get("axis", -1)
        layer = BatchLayerNormalization(**arguments)
        real = rng.random(np.moveaxis(x, axis, -1).shape[:-1]) < 0.7
        real.flat[0] = True
        hidden = np.broadcast_to(~np.expand_dims(real, axis), x.shape)
        for call in (KERAS.train, KERAS.infer):
            assert (call(layer, np.where(hidden, np.float32(np.nan), x), real)[hidden] == 0).all()
            np.testing.assert_allclose(call(layer, x, np.ones_like(real)), call(layer, x), atol=1e-5, rtol=1e-4)

    def test_a_single_sample_in_training_and_after_it_in_all_16_configurations(self, rng, sizes, arguments):
        layer = BatchLayerNormalization(**arguments)
        for _ in range(3):
            assert np.isfinite(KERAS.train(layer, normal(rng, 1, *sizes[1:]))).all()
        for config in CONFIGS:
            layer.config = config
            y = KERAS.infer(layer, normal(rng, 1, *sizes[1:]))
            assert np.isfinite(y).all()
            assert np.abs(y).max() > 0.01, f"{config} maps a single sample to nothing"


RECORDED = np.load(Path(__file__).parents[2] / "data" / "authors_layer.npz")


@pytest.mark.parametrize("case", ["dense", "sequence", "image", "pair"])
def test_the_authors_layer_computes_the_same_where_definitions_agree(case):
    """As docs/frameworks.md says to build it; they computed in float32 too."""
    layer = BatchLayerNormalization(epsilon=1e-3, mix_epsilon=1e-4, momentum=None)
    batches = RECORDED[f"{case}/train_x"]
    layer.build(batches[0].shape)
    KERAS.set_parameters(layer, RECORDED[f"{case}/gamma"], RECORDED[f"{case}/beta"])
    found = KERAS.train_backward(layer, batches[0], RECORDED[f"{case}/dy"])
    for name, mine in zip(("train_y0", "dx0", "dgamma0", "dbeta0"), found, strict=True):
        np.testing.assert_allclose(mine, RECORDED[f"{case}/{name}"], atol=2e-5, rtol=2e-5, err_msg=name)
    for x in batches[1:]:
        KERAS.train(layer, x)
    for config in ("TTFF", "FTFF", "FFFF"):
        layer.config = config
        y = KERAS.infer(layer, RECORDED[f"{case}/infer_x"])
        np.testing.assert_allclose(y, RECORDED[f"{case}/infer_y_{config}"], atol=2e-5, rtol=2e-5, err_msg=config)


class TestPrecision:
    def test_mixed_precision_computes_in_float32(self, rng):
        """Squares of 10,000 overflow float16; the statistics do not."""
        layer = BatchLayerNormalization(dtype="mixed_float16")
        x = (normal(rng, 8, 3) * 10000).astype(np.float16)
        y = layer(x, training=True)
        wanted = oracle.train(x.astype(np.float64))
        assert np.abs(numpy(y) - wanted).max() < 2 * np.finfo(np.float16).eps
        np.testing.assert_allclose(numpy(layer.batch_var), x.astype(np.float64).var(0, ddof=1), rtol=1e-5)

    def test_integers_come_out_in_the_policys_type(self, rng):
        """As of Keras's own norms; in their own type nothing would be left of them."""
        x = rng.integers(0, 255, (9, 4, 3)).astype(np.uint8)
        y = BatchLayerNormalization()(x, training=True)
        assert keras.backend.standardize_dtype(y.dtype) == "float32"
        np.testing.assert_allclose(numpy(y), oracle.train(x.astype(np.float64)), **CLOSE)

    def test_double_layers_keep_double_statistics(self, rng):
        with double():
            layer = BatchLayerNormalization(dtype="float64")
            x = rng.normal(size=(6, 4, 3))
            np.testing.assert_allclose(numpy(layer(x, training=True)), oracle.train(x), atol=1e-12)
            population = oracle.Population((4,), 3)
            population.update(x, 0.1)
            np.testing.assert_allclose(numpy(layer.batch_var), population.var_B, rtol=1e-12)
            wanted = population.infer(x, "TTFF", **EPS)
            np.testing.assert_allclose(numpy(layer(x)), wanted, atol=1e-12)
            grouped = oracle.train(x, groups=3, per_position=False, mix_eps=0, dim_scale=False)
            layer = BatchLayerNormalization(groups=3, dtype="float64")
            np.testing.assert_allclose(numpy(layer(x, training=True)), grouped, atol=1e-12)


class TestConfiguration:
    def test_it_takes_effect_after_predict_was_compiled(self, rng):
        model = keras.Sequential([keras.Input((4, 3)), BatchLayerNormalization()])
        model.compile(loss="mse")
        x = normal(rng, 6, 4, 3)
        model.fit(x, x, verbose=0, batch_size=3)
        layer = model.layers[0]
        population = oracle.Population((4,), 3)
        for name, theirs in oracle.NAMES.items():
            setattr(population, theirs, numpy(getattr(layer, name)).astype(np.float64))
        population.updates[...] = 1
        affine = [numpy(p).astype(np.float64) for p in (layer.gamma, layer.beta)]
        function = None
        for config in CONFIGS:
            layer.config = config
            assert layer.config == bln.StatisticsConfig.parse(config)
            wanted = population.infer(x, config, *affine, **EPS)
            np.testing.assert_allclose(model.predict(x, verbose=0), wanted, **CLOSE)
            function = function or model.predict_function
            assert model.predict_function is function, "one compiled function serves all 16"

    def test_it_is_saved_with_the_weights_too(self, tmp_path):
        model, other = (keras.Sequential([keras.Input((3,)), BatchLayerNormalization()]) for _ in range(2))
        model.layers[0].config = bln.StatisticsConfig.parse("FFTT")
        model.save_weights(tmp_path / "it.weights.h5")
        other.load_weights(tmp_path / "it.weights.h5")
        assert str(other.layers[0].config) == "FFTT"

    def test_it_can_be_changed_before_the_layer_is_built(self):
        layer = BatchLayerNormalization()
        layer.config = "FFFF"
        layer.build((None, 3))
        assert str(layer.config) == "FFFF"

    @pytest.mark.parametrize("bad", ["TT", "TTXX", "ttff"])
    def test_a_mistake_changes_nothing(self, bad):
        layer = BatchLayerNormalization()
        layer.build((None, 3))
        with pytest.raises(ValueError, match="is not a configuration"):
            layer.config = bad
        assert str(layer.config) == "TTFF"


class TestPositions:
    def test_an_unknown_length_is_refused_with_the_ways_out(self):
        with pytest.raises(ValueError, match=r"does not say how many.*position_shape=.*per_position=False"):
            BatchLayerNormalization()(keras.Input((None, 4)))

    @pytest.mark.parametrize("groups", [None, 2])
    @pytest.mark.parametrize("per_position", [True, False])
    def test_any_length_goes_through_one_model(self, rng, per_position, groups):
        layer = BatchLayerNormalization(
            groups=groups, per_position=per_position, position_shape=8 if per_position else None
        )
        model = keras.Sequential([keras.Input((None, 4)), layer])
        model.compile(keras.optimizers.SGD(0.0), loss="mse")
        expected = oracle.Population((8,) if per_position else (), 4, groups)

        def window(length):
            return Window(expected, (length,) if per_position else ())

        for length in (8, 3, 5):
            x = normal(rng, 6, length, 4)
            model.train_on_batch(x, x)
            window(length).update(x, 0.1, None, per_position)
        for name, theirs in oracle.NAMES.items():
            np.testing.assert_allclose(numpy(getattr(layer, name)), getattr(expected, theirs), **CLOSE, err_msg=name)
        numbers = {"eps": 1e-4, "mix_eps": layer.mix_epsilon, "dim_scale": layer.dim_scale}
        for length in (2, 8):
            x = normal(rng, 3, length, 4)
            wanted = window(length).infer(x, "TTFF", per_position=per_position, **numbers)
            np.testing.assert_allclose(model.predict_on_batch(x), wanted, **CLOSE)

    def test_other_positions_are_refused_with_the_ways_out(self, rng):
        layer = BatchLayerNormalization()
        layer(normal(rng, 2, 4, 4, 3))
        with pytest.raises(ValueError, match=r"positions \(5, 4\), but statistics are kept for positions \(4, 4\)"):
            layer(normal(rng, 2, 5, 4, 3))
        with pytest.raises(ValueError, match=r"positions \(9,\), but statistics are kept for positions \(8,\)"):
            BatchLayerNormalization(position_shape=8)(normal(rng, 2, 9, 3))

    @pytest.mark.parametrize("training", [True, False])
    def test_images_of_another_size_are_refused_in_a_graph_for_any_size(self, rng, training):
        """A size of 1 is not stretched to the one known. TensorFlow's graphs do not know sizes when they are made."""
        layer = BatchLayerNormalization(position_shape=(4, 5))
        model = keras.Sequential([keras.Input((None, None, 3)), layer])

        def call(x):
            return model(x, training=training)

        refused = ValueError
        if keras.backend.backend() == "tensorflow":
            import tensorflow

            call = tensorflow.function(call, input_signature=[tensorflow.TensorSpec((None, None, None, 3))])
            refused = tensorflow.errors.InvalidArgumentError
        call(normal(rng, 6, 4, 5, 3))
        before = state(layer)
        for sizes in ((1, 5), (4, 1), (5, 4)):
            with pytest.raises(refused):
                call(normal(rng, 6, *sizes, 3))
        assert_same_state(layer, before)


class TestMasks:
    def test_an_embeddings_mask_arrives_and_goes_on(self, rng):
        """Padding is 0: what stands there enters no statistic, comes out 0, and is hidden from what follows."""
        tokens = keras.Input((7,), dtype="int32")
        embedded = keras.layers.Embedding(20, 4, mask_zero=True)(tokens)
        hidden = keras.layers.LSTM(5, return_sequences=True)(embedded)
        layer = BatchLayerNormalization(config="TTTT")
        normed = layer(hidden)
        last = keras.layers.LSTM(3)(normed)
        model = keras.Model(tokens, [hidden, normed, last])
        ids = rng.integers(1, 20, (6, 7))
        lengths = rng.integers(2, 7, (6, 1))
        ids[np.arange(7) >= lengths] = 0
        rows, y, _ = (numpy(output) for output in model(ids, training=True))
        np.testing.assert_allclose(y, oracle.train(rows, mask=ids != 0), **CLOSE)
        assert (y[ids == 0] == 0).all()
        # A longer input would end otherwise if the padding reached the last layer.
        cell = keras.Model(tokens, last)
        shortest = int(lengths.min())
        padded = np.where(np.arange(7) < shortest, ids, 0)
        ends = model.layers[-1](numpy(model(padded)[1])[:, :shortest])
        np.testing.assert_allclose(cell.predict_on_batch(padded), numpy(ends), **CLOSE)

    @pytest.mark.parametrize("options", [{"position_shape": 7}, {"groups": 2}], ids=str)
    def test_fit_and_predict_with_a_mask(self, rng, options):
        model = keras.Sequential([
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(20, 4, mask_zero=True),
            BatchLayerNormalization(**options),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ])  # fmt: skip
        model.compile("adam", loss="mse")
        ids = rng.integers(1, 20, (12, 7))
        ids[:, 5:] *= rng.random((12, 2)) < 0.5
        ids[0] = 3
        model.fit(ids, normal(rng, 12, 1), batch_size=12, verbose=0)
        samples = 12 if "groups" in options else (ids != 0).sum(0)
        np.testing.assert_allclose(numpy(model.layers[1].inverse_m), 1 / samples, rtol=1e-6)
        assert np.isfinite(model.predict(ids[:, :5], verbose=0)).all()

    @pytest.mark.parametrize("per_position", [True, False])
    @pytest.mark.parametrize("shape", [(4, 5, 3), (4,), (4, 6), (4, 1), (1, 5)])
    def test_a_mask_of_another_shape_is_refused(self, rng, shape, per_position):
        """Also one that could be broadcast: ``m`` would be counted wrongly."""
        layer = BatchLayerNormalization(per_position=per_position)
        with pytest.raises(ValueError, match=r"expected a mask of shape \(4, 5\), \(N, \*positions\)"):
            layer(normal(rng, 4, 5, 3), mask=keras.ops.ones(shape, "bool"), training=True)

    def test_a_mask_may_be_a_list(self, rng):
        x, mask = normal(rng, 2, 3, 4), [[True, True, False], [True, False, False]]
        y = BatchLayerNormalization()(x, mask=mask, training=True)
        wanted = oracle.train(x.astype(np.float64), mask=np.array(mask))
        np.testing.assert_allclose(numpy(y), wanted, **CLOSE)


class TestTraining:
    def test_fit_updates_the_population_as_the_oracle_does(self, rng):
        layer = BatchLayerNormalization(momentum=0.8)
        model = keras.Sequential([keras.Input((4, 3)), layer])
        model.compile(keras.optimizers.SGD(0.0), loss="mse")
        x = normal(rng, 10, 4, 3)
        model.fit(x, x, batch_size=4, epochs=2, shuffle=False, verbose=0)
        expected = oracle.Population((4,), 3)
        for _ in range(2):
            for at in (0, 4, 8):
                expected.update(x[at : at + 4], 0.2)
        for name, theirs in oracle.NAMES.items():
            np.testing.assert_allclose(numpy(getattr(layer, name)), getattr(expected, theirs), **CLOSE, err_msg=name)
        before = state(layer)
        model.evaluate(x, x, verbose=0)
        model.predict(x, verbose=0)
        assert_same_state(layer, before)

    def test_a_small_net_learns_and_evaluates(self, rng):
        x = normal(rng, 256, 6, 6, 1)
        y = (x.mean((1, 2, 3)) > 0).astype("int32")
        model = keras.Sequential([
            keras.Input((6, 6, 1)),
            keras.layers.Conv2D(4, 3, activation="tanh"), BatchLayerNormalization(),
            keras.layers.Flatten(), keras.layers.Dense(8, activation="tanh"), BatchLayerNormalization(),
            keras.layers.Dense(2, activation="softmax"),
        ])  # fmt: skip
        model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(x, y, batch_size=16, epochs=6, verbose=0)
        _, accuracy = model.evaluate(x, y, verbose=0)
        assert accuracy > 0.75  # chance is 0.5, four standard errors 0.125

    def test_not_trainable_acts_as_inference(self, rng):
        layer = BatchLayerNormalization()
        layer(normal(rng, 8, 3), training=True)
        layer.trainable = False
        x, before = normal(rng, 4, 3), state(layer)
        np.testing.assert_array_equal(KERAS.train(layer, x), KERAS.infer(layer, x))
        assert_same_state(layer, before)
        assert layer.trainable_weights == []

    def test_regularizers_and_constraints(self, rng):
        layer = BatchLayerNormalization(
            gamma_regularizer=keras.regularizers.L2(0.5), beta_regularizer="l1", gamma_initializer="random_normal",
            beta_initializer=keras.initializers.Constant(2.0), gamma_constraint="non_neg",
            beta_constraint=keras.constraints.MaxNorm(1.0),
        )  # fmt: skip
        model = keras.Sequential([keras.Input((3,)), layer])
        wanted = [0.5 * (numpy(layer.gamma) ** 2).sum(), 0.01 * 6]
        np.testing.assert_allclose([numpy(loss) for loss in layer.losses], wanted, rtol=1e-5)
        model.compile(keras.optimizers.SGD(1.0), loss="mse")
        model.train_on_batch(normal(rng, 8, 3), normal(rng, 8, 3))
        assert (numpy(layer.gamma) >= 0).all()
        assert np.linalg.norm(numpy(layer.beta)) <= 1 + 1e-5
        again = BatchLayerNormalization.from_config(layer.get_config())
        assert isinstance(again.gamma_regularizer, keras.regularizers.L2)
        assert isinstance(again.beta_constraint, keras.constraints.MaxNorm)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis": 0}, "axis must be -1"),
        ({"epsilon": 0}, "must be a positive number"),
        ({"mix_epsilon": 1.0}, "must be None .* or in"),
        ({"momentum": 1.5}, "got 1.5; it is the weight of the old value"),
        ({"position_shape": 0}, "must hold positive sizes"),
        ({"position_shape": 3, "per_position": False}, "goes with per_position=True"),
        ({"config": "TTF"}, "is not a configuration"),
        ({"groups": 0}, "groups must be None .* or an integer of at least 1"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BatchLayerNormalization(**arguments)


@pytest.mark.parametrize("shape", [(4,), (4, 3, None)])
def test_inputs_that_cannot_be_are_refused(shape):
    with pytest.raises(ValueError, match=r"expected an input|must be known"):
        BatchLayerNormalization().build(shape)


@pytest.mark.parametrize("method", ["build", "compute_output_shape"])
@pytest.mark.parametrize("axis", [3, -3, -4])
def test_an_axis_out_of_bounds_is_refused(method, axis):
    with pytest.raises(ValueError, match=rf"got shape \(None, 4, 3\) with axis={axis}"):
        getattr(BatchLayerNormalization(axis), method)((None, 4, 3))


def test_integers_of_numpy_are_written_to_a_file_as_integers():
    config = BatchLayerNormalization(np.int64(1), groups=np.int64(2)).get_config()
    assert {type(config[name]) for name in ("axis", "groups")} == {int}


def test_groups_that_do_not_divide_the_features_are_refused():
    with pytest.raises(ValueError, match="groups=4 does not divide 6 features; try groups=2 or groups=3 or groups=6"):
        BatchLayerNormalization(groups=4).build((None, 6))
