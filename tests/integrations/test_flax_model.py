"""Helpers for whole Flax NNX modules: calibration and search."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import bln
import bln.flax
import oracle
from agreement import CONFIGS

STATE = (*oracle.NAMES, "updates", "samples")
CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # values of order 1, a few float32 layers deep


class Net(nnx.Module):
    def __init__(self, rngs, **options):
        self.conv = nnx.Conv(1, 4, (3, 3), padding="VALID", rngs=rngs)
        self.first = bln.flax.BatchLayerNorm(4, **options, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.other = nnx.BatchNorm(4, rngs=rngs)
        self.dense = nnx.Linear(64, 5, rngs=rngs)
        self.second = bln.flax.BatchLayerNorm(5, **options, rngs=rngs)
        self.out = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        x = self.other(self.dropout(self.first(jnp.tanh(self.conv(x)))))
        return self.out(self.second(jnp.tanh(self.dense(x.reshape(len(x), -1)))))


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def net(**options):
    return Net(nnx.Rngs(0), **options)


def state(model):
    """All arrays of a model but random keys, and its modes."""
    arrays = {
        ".".join(map(str, path)): np.array(value[...])
        for path, value in nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngState)))
    }
    modes = {
        str((path, name)): getattr(module, name)
        for path, module in nnx.iter_modules(model)
        for name in ("deterministic", "use_running_average", "momentum", "_calibrating", "without_positions")
        if hasattr(module, name)
    }
    return arrays | modes


def assert_unchanged(model, before):
    after = state(model)
    assert after.keys() == before.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)


class TestCalibrate:
    @pytest.mark.parametrize("groups", [None, 1])
    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_it_is_the_plain_average_under_frozen_weights(self, rng, groups, mode):
        """Batches of different sizes weigh by their samples, dropout stays off, 1/m stays that of training."""
        model = net(groups=groups)
        for _ in range(3):
            model(normal(rng, 5, 6, 6, 1))
        getattr(model, mode)()
        remembered = state(model)
        batches = [normal(rng, n, 6, 6, 1) for n in (12, 7, 1, 4)]
        expected = oracle.Population((4, 4) if groups is None else (), 4, groups)
        for x in batches:
            expected.update(np.asarray(jnp.tanh(model.conv(x)), np.float64), None, None, groups is None)
        bln.flax.calibrate(model, [batches[0], (batches[1], None), [batches[2], None], {"x": batches[3]}])
        for name, theirs in oracle.NAMES.items():
            found = np.asarray(getattr(model.first, name)[...])
            wanted = remembered[f"first.{name}"] if name == "inverse_m" else getattr(expected, theirs)
            np.testing.assert_allclose(found, wanted, **CLOSE, err_msg=name)
        for layer in (model.first, model.second):
            assert (layer.updates[...][-1] == 3).all()  # the row of 1/m
            assert (layer.updates[...][0] == 4).all()
            assert (layer.samples[...][0] == 24).all()
        after = state(model)
        for key in remembered:
            if not key.startswith(("first.", "second.")):
                np.testing.assert_array_equal(after[key], remembered[key], err_msg=key)

    def test_an_untrained_model_learns_positions_and_one_over_m_from_it(self, rng):
        model = net()
        bln.flax.calibrate(model, [normal(rng, 4, 6, 6, 1), normal(rng, 4, 6, 6, 1)])
        assert model.first.position_shape == (4, 4)
        assert (model.first.inverse_m[...] == 0.25).all()

    def test_later_batches_are_compiled_and_the_step_may_be_given(self, rng):
        traced = []

        class Watched(Net):
            def __call__(self, x):
                traced.append(isinstance(x, jax.core.Tracer))
                return super().__call__(x)

        model = Watched(nnx.Rngs(0))
        batches = [{"image": normal(rng, 4, 6, 6, 1)} for _ in range(5)]
        bln.flax.calibrate(model, [batch["image"] for batch in batches])
        assert traced == [False, True]
        expected = state(model)
        bln.flax.reset_statistics(model)
        model.first.inverse_m.set_value(jnp.full_like(model.first.inverse_m[...], 0.25))
        bln.flax.calibrate(model, batches, step=nnx.jit(lambda model, batch: model(batch["image"])))
        for key, value in state(model).items():
            if value is not None:  # as where nothing calibrates
                np.testing.assert_allclose(value, expected[key], err_msg=key, **CLOSE)

    def test_a_layer_over_several_devices_is_calibrated_on_one(self, rng):
        model = net(groups=1, axis_name="devices")
        bln.flax.calibrate(model, [normal(rng, 4, 6, 6, 1)] * 2)
        assert (model.first.samples[...] == 8).all()
        assert model.first.axis_name == "devices"

    @pytest.mark.parametrize("trained", [True, False])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_interrupted_it_puts_everything_back(self, rng, error, trained):
        model = net()
        if trained:
            model(normal(rng, 8, 6, 6, 1))
        before = state(model)

        def batches():
            yield normal(rng, 8, 6, 6, 1)
            raise error("stop")

        with pytest.raises(error, match="stop"):
            bln.flax.calibrate(model, batches())
        assert_unchanged(model, before)

    def test_no_batches_and_nothing_but_nan_change_nothing(self, rng):
        model = net()
        model(normal(rng, 8, 6, 6, 1))
        before = state(model)
        with pytest.raises(ValueError, match="got no batches; was the iterable used up"):
            bln.flax.calibrate(model, iter([]))
        with pytest.raises(ValueError, match="layer 'first' never had finite statistics"):
            bln.flax.calibrate(model, [np.full((4, 6, 6, 1), np.nan, np.float32)] * 2)
        assert_unchanged(model, before)

    def test_a_layer_that_no_batch_reaches_keeps_its_statistics(self, rng):
        class Auxiliary(nnx.Module):
            def __init__(self, rngs):
                self.main, self.aux = (bln.flax.BatchLayerNorm(3, rngs=rngs) for _ in range(2))
                self.deterministic = False

            def __call__(self, x):
                return self.main(x) + (0 if self.deterministic else self.aux(x))

        model = Auxiliary(nnx.Rngs(0))
        model(normal(rng, 4, 3))
        before = np.array(model.aux.batch_mean[...])
        with pytest.warns(UserWarning, match="no batch reached layer 'aux'"):
            bln.flax.calibrate(model, [normal(rng, 4, 3)])
        np.testing.assert_array_equal(model.aux.batch_mean[...], before)

    def test_a_model_without_layers_is_refused(self):
        with pytest.raises(ValueError, match=r"Linear has no bln\.flax\.BatchLayerNorm"):
            bln.flax.calibrate(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), [])


@pytest.mark.filterwarnings("ignore:.* makes a prediction depend on the other samples")  # the winner is by chance
class TestSearch:
    @pytest.fixture(params=[None, 1])
    def trained(self, rng, request):
        model = net(groups=request.param)
        for _ in range(4):
            model(normal(rng, 8, 6, 6, 1))
        return model

    @pytest.fixture
    def batches(self, rng):
        return [(normal(rng, n, 6, 6, 1), rng.integers(0, 3, n)) for n in (10, 10, 5)]

    loss = staticmethod(optax.softmax_cross_entropy_with_integer_labels)

    def test_all_have_the_scores_of_separate_evaluations(self, trained, batches):
        result = bln.flax.search(trained, batches, loss=self.loss, metrics="accuracy", candidates=CONFIGS[16:])
        assert isinstance(result, bln.SearchResult)
        assert len(result) == len(CONFIGS)
        assert (result.samples, result.batches) == (25, 3)
        assert sorted(row.loss for row in result) == [row.loss for row in result]
        trained.eval()
        for config in CONFIGS:
            bln.flax.configure(trained, config)
            outputs = [trained(x) for x, _ in batches]
            loss = sum(float(self.loss(o, y).sum()) for (_, y), o in zip(batches, outputs, strict=True))
            right = sum(int((o.argmax(1) == y).sum()) for (_, y), o in zip(batches, outputs, strict=True))
            assert result[config].loss == pytest.approx(loss / 25, rel=1e-4)
            assert result[config].metrics["accuracy"] == pytest.approx(right / 25)
        assert "bln.flax.calibrate(model, train_batches)" in str(result)

    def test_the_model_is_left_as_found_and_apply_gives_it_the_winner(self, trained, batches):
        bln.flax.configure(trained, {"first": "FTTF"})
        before = state(trained)
        result = bln.flax.search(trained, iter(batches), loss=self.loss)
        assert_unchanged(trained, before)
        row = result.apply(trained)
        assert {layer.config for layer in bln.flax.layers(trained).values()} == {row.config}

    def test_one_function_is_compiled_for_all_configurations(self, trained, batches):
        calls = []

        def step(model, batch):
            calls.append(1)
            return model(batch["x"]), batch["y"]

        given = [{"x": x, "y": y} for x, y in batches[:2]]
        result = bln.flax.search(
            trained, given, loss=self.loss, metrics={"right": lambda o, y: o.argmax(1) == y}, step=step
        )
        assert len(calls) == 1
        expected = bln.flax.search(trained, batches[:2], loss=self.loss, metrics=["accuracy"])
        right = [row.metrics["right"] for row in result]  # a mean in float32
        assert right == pytest.approx([row.metrics["accuracy"] for row in expected], rel=1e-6)

    def test_what_cannot_be_is_refused_and_changes_nothing(self, trained, batches):
        before = state(trained)
        with pytest.raises(ValueError, match=r"expected batches of \(inputs, targets\), got .*Array"):
            bln.flax.search(trained, [batches[0], batches[0][0]], loss=self.loss)
        with pytest.raises(ValueError, match="search got no batches"):
            bln.flax.search(trained, [], loss=self.loss)
        with pytest.raises(ValueError, match="metric 'f1' is 'f1', expected a function"):
            bln.flax.search(trained, batches, loss=self.loss, metrics="f1")
        targets = [(x, np.stack([y, y], 1)) for x, y in batches]
        with pytest.raises(ValueError, match=r"'accuracy' is for outputs.*got \(10, 3\) and \(10, 2\)"):
            bln.flax.search(trained, targets, loss=lambda o, y: self.loss(o, y[:, 0]), metrics="accuracy")
        assert_unchanged(trained, before)

    def test_an_untrained_layer_is_noted(self, batches):
        assert "No training batch was seen by first, second" in str(
            bln.flax.search(net(groups=1), batches, loss=self.loss)
        )

    def test_a_single_output_is_right_by_its_sign(self, rng):
        model = nnx.Sequential(bln.flax.BatchLayerNorm(3, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1)))
        x, y = normal(rng, 20, 3), rng.integers(0, 2, 20)
        model(x)
        loss = lambda o, y: optax.sigmoid_binary_cross_entropy(o[:, 0], y)  # noqa: E731
        result = bln.flax.search(model, [(x, y)], loss=loss, metrics="accuracy")
        bln.flax.configure(model, "TTFF")
        model.eval()
        right = ((np.asarray(model(x))[:, 0] > 0) == y).mean()
        assert result["TTFF"].metrics["accuracy"] == pytest.approx(right)
