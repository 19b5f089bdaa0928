"""Helpers for whole Keras models."""

import keras
import numpy as np
import pytest

import bln
import bln.keras
import oracle
from agreement import CONFIGS
from bln.keras import BatchLayerNormalization
from through_numpy import numpy

STATE = (*oracle.NAMES, "updates", "samples")
CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # values of order 1, a few float32 layers deep


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def net(**options):
    return keras.Sequential([
        keras.Input((6, 6, 1)),
        keras.layers.Conv2D(4, 3, activation="tanh"),
        BatchLayerNormalization(name="first", **options),
        keras.layers.Dropout(0.5),
        keras.layers.Flatten(),
        keras.layers.Dense(5, activation="tanh"),
        BatchLayerNormalization(name="second", **options),
        keras.layers.Dense(3),
    ])  # fmt: skip


def state(model):
    found = bln.keras.layers(model)
    return {(key, name): numpy(getattr(found[key], name)).copy() for key in found for name in STATE}


def assert_unchanged(model, before):
    after = state(model)
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value, err_msg=str(key))


def hidden(model, x):
    """What reaches the first layer."""
    return numpy(model.layers[0](x)).astype(np.float64)


class TestLayers:
    def test_in_the_order_of_the_model(self):
        model = net()
        assert list(bln.keras.layers(model)) == ["first", "second"]
        assert bln.keras.layers(keras.Sequential([keras.layers.Dense(2)])) == {}

    def test_inside_other_models_and_layers_in_order_and_each_once(self):
        def block(name):
            return keras.Sequential([BatchLayerNormalization(name="a"), BatchLayerNormalization(name="b")], name=name)

        shared = BatchLayerNormalization(name="shared")
        inputs = keras.Input((3,))
        model = keras.Model(inputs, shared(block("two")(shared(block("one")(inputs)))))
        assert list(bln.keras.layers(model)) == ["a", "b", "shared", "two/a", "two/b"]

    def test_configure_all_or_by_name_and_a_mistake_changes_nothing(self):
        model = net()
        bln.keras.configure(model, "FTFF")
        bln.keras.configure(model, {"second": bln.StatisticsConfig.parse("FFFF")})
        assert [str(layer.config) for layer in bln.keras.layers(model).values()] == ["FTFF", "FFFF"]
        with pytest.raises(ValueError, match="no BatchLayerNorm named 'secnd'; did you mean 'second'"):
            bln.keras.configure(model, {"first": "TTTT", "secnd": "TTTT"})
        assert [str(layer.config) for layer in bln.keras.layers(model).values()] == ["FTFF", "FFFF"]

    def test_reset(self, rng):
        model = net()
        before = state(model)
        model(normal(rng, 4, 6, 6, 1), training=True)
        assert state(model)["first", "updates"].all()
        bln.keras.reset_statistics(model)
        assert_unchanged(model, before)

    def test_models_without_bln_and_layers_not_built_are_told_so(self):
        with pytest.raises(ValueError, match="has no BatchLayerNormalization"):
            bln.keras.reset_statistics(keras.Sequential([keras.layers.Dense(2)]))
        with pytest.raises(ValueError, match="not built"):
            bln.keras.reset_statistics(keras.Sequential([BatchLayerNormalization()]))

    @pytest.mark.parametrize("of_torch", [bln.reset_statistics, bln.freeze, lambda m: bln.calibrate(m, [])])
    def test_functions_of_torch_say_where_those_of_keras_are(self, of_torch):
        with pytest.raises(TypeError, match=r"the functions for it are in bln\.keras"):
            of_torch(keras.Sequential([keras.Input((3,)), BatchLayerNormalization()]))


class TestCalibrate:
    @pytest.mark.parametrize(("per_position", "groups"), [(True, None), (False, None), (False, 1), (True, 1)], ids=str)
    def test_it_is_the_plain_average_under_frozen_weights(self, rng, per_position, groups):
        """Batches of different sizes weigh by their samples, dropout stays off, 1/m stays that of training."""
        model = net(per_position=per_position, groups=groups)
        numbers = {} if groups is None else {"groups": groups, "mix_eps": 0.0, "dim_scale": False}
        for _ in range(3):
            model(normal(rng, 5, 6, 6, 1), training=True)
        remembered = state(model)
        batches = [normal(rng, n, 6, 6, 1) for n in (12, 7, 1, 4)]
        expected = [oracle.Population((4, 4) if per_position else (), 4, groups), oracle.Population((), 5, groups)]
        for x in batches:
            rows = hidden(model, x)
            expected[0].update(rows, None, None, per_position)
            first = oracle.train(rows, per_position=per_position, **numbers)
            dense = model.layers[4]
            rows = np.tanh(first.reshape(len(x), -1) @ numpy(dense.kernel) + numpy(dense.bias))
            expected[1].update(rows, None, None, per_position)
        bln.keras.calibrate(model, batches)
        found = state(model)
        for key, population in zip(("first", "second"), expected, strict=True):
            for name, theirs in oracle.NAMES.items():
                wanted = remembered[key, name] if name == "inverse_m" else getattr(population, theirs)
                np.testing.assert_allclose(found[key, name], wanted, **CLOSE, err_msg=name)
            assert (found[key, "updates"][-1] == 3).all()  # the row of 1/m
            assert (found[key, "updates"][0] == 4).all()
            assert (found[key, "samples"][0] == 24).all()
        assert [layer.momentum for layer in bln.keras.layers(model).values()] == [0.9, 0.9]

    def test_an_untrained_model_learns_one_over_m_from_it(self, rng):
        model = net()
        bln.keras.calibrate(model, [(normal(rng, 4, 6, 6, 1), None), (normal(rng, 4, 6, 6, 1), None)])
        assert (state(model)["first", "inverse_m"] == 0.25).all()

    def test_afterwards_inference_is_inference_again(self, rng):
        model = net()
        x = normal(rng, 8, 6, 6, 1)
        before = model.predict(x, verbose=0)
        bln.keras.calibrate(model, [x])
        calibrated, after = state(model), model.predict(x, verbose=0)
        assert_unchanged(model, calibrated)
        assert np.abs(after - before).max() > 1e-3
        np.testing.assert_allclose(model.predict(x[:1], verbose=0), after[:1], **CLOSE)

    def test_frozen_layers_are_calibrated_too(self, rng):
        model = net()
        model.trainable = False
        bln.keras.calibrate(model, [normal(rng, 8, 6, 6, 1)])
        assert (state(model)["first", "updates"] == 1).all()

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_interrupted_it_puts_everything_back(self, rng, error):
        model = net()
        x = normal(rng, 8, 6, 6, 1)
        model(x, training=True)
        before, prediction = state(model), model.predict(x, verbose=0)

        def batches():
            yield normal(rng, 8, 6, 6, 1)
            raise error("stop")

        with pytest.raises(error, match="stop"):
            bln.keras.calibrate(model, batches())
        assert_unchanged(model, before)
        np.testing.assert_array_equal(model.predict(x, verbose=0), prediction)
        assert bln.keras.layers(model)["first"].momentum == 0.9

    def test_no_batches_and_nothing_but_nan_change_nothing(self, rng):
        model = net()
        model(normal(rng, 8, 6, 6, 1), training=True)
        before = state(model)
        with pytest.raises(ValueError, match="got no batches; was the iterable used up"):
            bln.keras.calibrate(model, iter([]))
        with pytest.raises(ValueError, match="layer 'first' never had finite statistics"):
            bln.keras.calibrate(model, [np.full((4, 6, 6, 1), np.nan, np.float32)])
        assert_unchanged(model, before)

    def test_a_layer_that_no_batch_reaches_keeps_its_statistics(self, rng):
        @keras.saving.register_keras_serializable("test")
        class Auxiliary(keras.Model):
            def __init__(self):
                super().__init__()
                self.main, self.aux = BatchLayerNormalization(name="main"), BatchLayerNormalization(name="aux")

            def call(self, x, training=False):
                return self.main(x) + (self.aux(x) if training else 0)

        model = Auxiliary()
        model(normal(rng, 4, 3), training=True)
        before = {key: value for key, value in state(model).items() if key[0] == "aux"}
        with pytest.warns(UserWarning, match="no batch reached layer 'aux'"):
            bln.keras.calibrate(model, [normal(rng, 4, 3)])
        assert_unchanged(model, before)

    def test_batches_of_a_py_dataset(self, rng):
        x = normal(rng, 12, 6, 6, 1)

        class Batches(keras.utils.PyDataset):
            def __len__(self):
                return 3

            def __getitem__(self, at):
                return x[4 * at : 4 * at + 4], None

        model = net()
        bln.keras.calibrate(model, Batches())
        assert (state(model)["first", "samples"] == 12).all()


class TestResetStatistics:
    def test_the_population_is_that_of_the_last_epoch(self, rng):
        inputs = keras.Input((3,))
        plain, moving = BatchLayerNormalization(momentum=None), BatchLayerNormalization()
        model = keras.Model(inputs, plain(inputs) + moving(inputs))
        model.compile(keras.optimizers.SGD(0.0), loss="mse")
        x = normal(rng, 10, 3)
        model.fit(x, x, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[bln.keras.ResetStatistics()])
        expected = oracle.Population((), 3)
        for at in (0, 4, 8):
            expected.update(x[at : at + 4], None)
        np.testing.assert_allclose(numpy(plain.batch_mean), expected.mean_B, **CLOSE)
        np.testing.assert_allclose(numpy(plain.batch_var), expected.var_B, **CLOSE)
        assert numpy(plain.updates).tolist() == [3] * 5
        assert numpy(moving.updates).tolist() == [9] * 5, "an exponential average goes on"

    def test_a_model_that_is_built_by_its_first_step(self, rng):
        layer = BatchLayerNormalization(momentum=None)
        model = keras.Sequential([layer])
        model.compile(loss="mse")
        x = normal(rng, 8, 3)
        model.fit(x, x, batch_size=4, epochs=2, verbose=0, callbacks=[bln.keras.ResetStatistics()])
        assert numpy(layer.updates).tolist() == [2] * 5


class TestCalibrateCallback:
    def test_each_evaluation_is_preceded_by_a_calibration(self, rng):
        model = net()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = normal(rng, 24, 6, 6, 1), rng.integers(0, 3, 24)
        batches = [x[:12], x[12:]]
        seen = []

        class Check(keras.callbacks.Callback):
            def on_test_end(self, logs=None):
                seen.append(state(self.model))

        callbacks = [bln.keras.Calibrate(batches), Check()]
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y), callbacks=callbacks)
        assert len(seen) == 2
        assert (seen[0]["first", "updates"][0] == 2).all()
        assert np.abs(seen[0]["first", "batch_mean"] - seen[1]["first", "batch_mean"]).max() > 0
        loss = model.evaluate(x, y, verbose=0, callbacks=callbacks)
        after = state(model)
        bln.keras.calibrate(model, batches)
        for key, value in state(model).items():
            np.testing.assert_allclose(after[key], value, err_msg=str(key), **CLOSE)
        assert model.evaluate(x, y, verbose=0) == pytest.approx(loss, rel=1e-4)

    def test_training_changes_weights_all_the_same(self, rng):
        model = net()
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = normal(rng, 24, 6, 6, 1), rng.integers(0, 3, 24)
        before = numpy(model.layers[0].kernel).copy()
        calibrate = bln.keras.Calibrate([x])
        model.fit(x, y, batch_size=8, epochs=1, verbose=0, validation_data=(x, y), callbacks=[calibrate])
        middle = numpy(model.layers[0].kernel).copy()
        model.fit(x, y, batch_size=8, epochs=1, verbose=0, validation_data=(x, y), callbacks=[calibrate])
        assert np.abs(middle - before).max() > 0
        assert np.abs(numpy(model.layers[0].kernel) - middle).max() > 0

    def test_what_can_be_gone_through_once_is_refused(self):
        with pytest.raises(TypeError, match="list_iterator can be gone through once only"):
            bln.keras.Calibrate(iter([]))


class TestSearch:
    @pytest.fixture(params=[None, 1])
    def trained(self, rng, request):
        model = net(groups=request.param)
        x, y = normal(rng, 40, 6, 6, 1), rng.integers(0, 3, 40)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(x, y, batch_size=8, verbose=0)
        return model

    @pytest.fixture
    def batches(self, rng):
        return [(normal(rng, n, 6, 6, 1), rng.integers(0, 3, n)) for n in (10, 10, 5)]

    def test_all_have_the_scores_of_separate_evaluations(self, trained, batches):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        result = bln.keras.search(trained, batches, loss=loss, metrics="accuracy", candidates=CONFIGS[16:])
        assert isinstance(result, bln.SearchResult)
        assert len(result) == len(CONFIGS)
        assert (result.samples, result.batches) == (25, 3)
        assert sorted(row.loss for row in result) == [row.loss for row in result]
        for config in CONFIGS:
            bln.keras.configure(trained, config)
            outputs = [trained.predict_on_batch(x) for x, _ in batches]
            losses = [float(loss(y, o)) * len(y) for (_, y), o in zip(batches, outputs, strict=True)]
            right = sum((o.argmax(1) == y).sum() for (_, y), o in zip(batches, outputs, strict=True))
            assert result[config].loss == pytest.approx(sum(losses) / 25, rel=1e-5)
            assert result[config].metrics["accuracy"] == pytest.approx(right / 25)
        assert "TTFF" in str(result)

    @pytest.mark.filterwarnings("ignore:.* makes a prediction depend on the other samples")  # the winner is by chance
    def test_the_model_is_left_as_found_and_apply_gives_it_the_winner(self, trained, batches):
        bln.keras.configure(trained, {"first": "FTTF"})
        before, prediction = state(trained), trained.predict_on_batch(batches[0][0])
        result = bln.keras.search(trained, iter(batches), loss="sparse_categorical_crossentropy")
        assert_unchanged(trained, before)
        np.testing.assert_array_equal(trained.predict_on_batch(batches[0][0]), prediction)
        assert [str(layer.config) for layer in bln.keras.layers(trained).values()] == ["FTTF", "TTFF"]
        row = result.apply(trained)
        assert {layer.config for layer in bln.keras.layers(trained).values()} == {row.config}

    def test_it_is_left_as_found_when_a_batch_fails(self, trained, batches):
        bln.keras.configure(trained, "FFFF")
        with pytest.raises(ValueError, match=r"expected batches of \(inputs, targets\), got ndarray"):
            bln.keras.search(trained, [batches[0], batches[0][0]], loss="sparse_categorical_crossentropy")
        with pytest.raises(ValueError, match="got no batches"):
            bln.keras.search(trained, [], loss="mse")
        assert {str(layer.config) for layer in bln.keras.layers(trained).values()} == {"FFFF"}

    def test_the_step_may_be_given(self, trained, batches):
        def step(model, batch):
            return model.predict_on_batch(batch["x"]), batch["y"]

        given = [{"x": x, "y": y} for x, y in batches]
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        bln.keras.calibrate(trained, given, step=step)
        calibrated = state(trained)
        bln.keras.calibrate(trained, batches)
        for key, value in state(trained).items():
            np.testing.assert_allclose(calibrated[key], value, err_msg=str(key), **CLOSE)
        found, expected = (
            bln.keras.search(trained, each, loss=loss, metrics="accuracy", **options)
            for each, options in ((given, {"step": step}), (batches, {}))
        )
        assert [(row.config, row.loss, row.metrics) for row in found] == [
            (row.config, row.loss, row.metrics) for row in expected
        ]

    def test_metrics_of_every_kind(self, rng):
        model = keras.Sequential([keras.Input((3,)), BatchLayerNormalization(), keras.layers.Dense(1)])
        batches = [(normal(rng, 6, 3), rng.integers(0, 2, (6, 1)).astype("float32"))]
        metrics = ["accuracy", keras.metrics.MeanAbsoluteError(name="mae"), keras.metrics.mean_squared_error]
        result = bln.keras.search(model, batches, loss="binary_crossentropy", metrics=metrics)
        output = model.predict_on_batch(batches[0][0])
        row, targets = result["TTFF"], batches[0][1]
        assert row.metrics["mae"] == pytest.approx(np.abs(output - targets).mean(), rel=1e-5)
        assert row.metrics["mean_squared_error"] == pytest.approx(((output - targets) ** 2).mean(), rel=1e-5)
        assert row.metrics["accuracy"] == pytest.approx(((output > 0.5) == targets).mean())
        named = bln.keras.search(model, batches, loss="mse", metrics={"far": lambda y, p: np.abs(y - p).max()})
        assert named["TTFF"].metrics["far"] == pytest.approx(np.abs(output - targets).max(), rel=1e-5)
