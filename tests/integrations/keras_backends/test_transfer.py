"""Weights, statistics, counters and configuration from any of the three frameworks to any."""

import copy
import itertools

import jax.numpy as jnp
import keras
import numpy as np
import pytest
import torch
from flax import nnx

import bln
import bln.flax
import bln.keras
from bln._frameworks import framework
from bln._transfer import read, write
from through_numpy import numpy

FRAMEWORKS = ("torch", "keras", "flax")


def make(kind, features=3, **options):
    """A layer with features last; momentum as in torch."""
    if kind == "torch":
        return bln.BatchLayerNorm(features, channel_dim=-1, **options)
    momentum = options.pop("momentum", 0.1)
    options["momentum"] = None if momentum is None else 1 - momentum
    if kind == "flax":
        return bln.flax.BatchLayerNorm(features, **options, rngs=nnx.Rngs(0))
    renamed = {"eps": "epsilon", "mix_eps": "mix_epsilon"}
    return bln.keras.BatchLayerNormalization(**{renamed.get(name, name): value for name, value in options.items()})


def train(layer, x):
    if isinstance(layer, keras.layers.Layer):
        layer(x, training=True)
    elif isinstance(layer, bln.BatchLayerNorm):
        layer.train()(torch.tensor(x))
    else:
        layer(jnp.asarray(x))


def infer(layer, x):
    if isinstance(layer, keras.layers.Layer):
        return numpy(layer(x))
    if isinstance(layer, bln.BatchLayerNorm):
        return layer.eval()(torch.tensor(x)).detach().numpy()
    return np.asarray(layer(jnp.asarray(x), use_running_average=True))


def assert_same(a, b):
    ours, theirs = read(a), read(b)
    assert ours.config == theirs.config
    assert ours.positions == theirs.positions
    for name, value in ours.tensors.items():
        assert value.shape == theirs.tensors[name].shape, name
        assert np.array_equal(value.numpy(), theirs.tensors[name].numpy()), name


def trained(kind, rng, features=3, positions=(4,), **options):
    layer = make(kind, features, **options)
    for n in (5, 1, 6):
        train(layer, rng.normal(size=(n, *positions, features)).astype(np.float32) * 3 + 1)
    state = read(layer)
    state.tensors.update(scale=torch.randn(features), shift=torch.randn(features))
    write(layer, state._replace(config=bln.StatisticsConfig.parse("FTFT")))
    return layer


def built(kind, features=3, positions=(4,), **options):
    layer = make(kind, features, **options)
    if kind == "keras":
        layer.build((None, *positions, features))
    return layer


@pytest.mark.parametrize(("source", "target"), list(itertools.product(FRAMEWORKS, FRAMEWORKS)))
class TestLayers:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"per_position": False},
            {"momentum": None, "eps": 1e-3, "mix_eps": 1e-4},
            {"groups": 3},
            {"groups": 1, "per_position": True},
        ],
        ids=str,
    )
    def test_bit_for_bit_there_and_back(self, rng, source, target, options):
        a, b = trained(source, rng, **options), built(target, **options)
        bln.transfer(a, b)
        assert_same(a, b)
        x = rng.normal(size=(5, 4, 3)).astype(np.float32)
        np.testing.assert_allclose(infer(a, x), infer(b, x), atol=1e-5, rtol=1e-4)  # float32 in another order
        again = built(source, **options)
        bln.transfer(b, again)
        assert_same(a, again)

    def test_both_go_on_training_alike(self, rng, source, target):
        a, b = trained(source, rng, momentum=None), built(target, momentum=None)
        bln.transfer(a, b)
        x = rng.normal(size=(7, 4, 3)).astype(np.float32)
        train(a, x)
        train(b, x)
        for name, value in read(a).tensors.items():
            np.testing.assert_allclose(value, read(b).tensors[name], atol=1e-5, rtol=1e-5, err_msg=name)

    def test_dense_layers(self, rng, source, target):
        a, b = trained(source, rng, positions=()), built(target, positions=())
        bln.transfer(a, b)
        assert_same(a, b)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"features": 4}, "features=3 in the source, 4 in the target"),
            ({"eps": 1e-3}, "eps=0.0001 in the source, 0.001 in the target"),
            ({"mix_eps": 0.0}, "mix_eps=0.0001 in the source, 0.0 in the target"),
            ({"dim_scale": False}, "dim_scale=True in the source, False in the target"),
            ({"per_position": False}, "per_position=True in the source, False in the target"),
            ({"groups": 3}, "groups=None in the source, 3 in the target"),
        ],
    )
    def test_what_does_not_fit_is_told_and_changes_nothing(self, rng, source, target, options, message):
        a, b = trained(source, rng), trained(target, rng, **options)
        before = copy.deepcopy(read(b))
        with pytest.raises(ValueError, match=f"nothing was changed.*{message}"):
            bln.transfer(a, b)
        for name, value in before.tensors.items():
            assert torch.equal(value, read(b).tensors[name])

    def test_other_positions_are_refused(self, rng, source, target):
        a, b = trained(source, rng), trained(target, rng, positions=(5,))
        with pytest.raises(ValueError, match=r"positions=\(4,\) in the source, \(5,\) in the target"):
            bln.transfer(a, b)

    def test_another_momentum_is_left_as_it_is(self, rng, source, target):
        a, b = trained(source, rng), built(target, momentum=0.3)
        momentum = b.momentum
        bln.transfer(a, b)
        assert_same(a, b)
        assert b.momentum == momentum


class TestUnknownPositions:
    @pytest.mark.parametrize("options", [{}, {"groups": 3, "per_position": True}], ids=str)
    @pytest.mark.parametrize("source", ["torch", "flax"])
    @pytest.mark.parametrize("target", FRAMEWORKS)
    def test_a_layer_before_its_first_batch_is_spread(self, source, target, options):
        a, b = make(source, config="FFFF", **options), built(target, **options)
        if target != "keras":
            b = make(target, position_shape=4, **options)
        bln.transfer(a, b)
        assert read(b).positions == (4,)
        assert str(b.config) == "FFFF"
        assert not read(b).tensors["updates"].any()

    def test_a_keras_layer_that_is_not_built_is_told_so(self):
        with pytest.raises(ValueError, match="is not built; call it on a batch"):
            bln.transfer(make("torch"), make("keras"))


class TestTypes:
    def test_what_a_narrower_type_cannot_hold_is_refused(self, rng):
        a = bln.BatchLayerNorm(3, channel_dim=-1, dtype=torch.float64)
        a(torch.randn(6, 4, 3, dtype=torch.float64))
        with pytest.raises(ValueError, match="batch_mean does not fit into the target's float32"):
            bln.transfer(a, built("flax"))
        bln.transfer(a.float(), target := built("flax"))
        assert_same(a, target)
        with pytest.raises(ValueError, match="scale does not fit into the target's bfloat16"):
            bln.transfer(trained("torch", rng), built("flax", param_dtype=jnp.bfloat16))

    def test_bfloat16_parameters_travel(self, rng):
        a = trained("torch", rng).bfloat16()
        for kind, options in (("flax", {"param_dtype": jnp.bfloat16}), ("keras", {"dtype": "bfloat16"})):
            b, again = built(kind, **options), make("torch").bfloat16()
            bln.transfer(a, b)
            bln.transfer(b, again)
            assert torch.equal(again.weight, a.weight)
            assert torch.equal(again.population.batch_var, a.population.batch_var)

    def test_counts_beyond_int32_are_refused_where_there_is_no_int64(self, rng):
        a = trained("torch", rng)
        a.population.samples += 2**40
        with pytest.raises(ValueError, match="samples does not fit into the target's int32"):
            bln.transfer(a, built("flax"))


class TestModels:
    def torch_model(self):
        return torch.nn.Sequential(torch.nn.Linear(3, 3), make("torch"), torch.nn.Tanh(), make("torch"))

    def keras_model(self):
        return keras.Sequential([keras.Input((4, 3)), make("keras"), keras.layers.Dense(3), make("keras")])

    def flax_model(self):
        return nnx.Sequential(make("flax"), nnx.Linear(3, 3, rngs=nnx.Rngs(0)), make("flax"))

    @pytest.mark.parametrize(("source", "target"), list(itertools.permutations(FRAMEWORKS, 2)))
    def test_layers_correspond_in_order(self, rng, source, target):
        a, b = (getattr(self, f"{kind}_model")() for kind in (source, target))
        ours = framework(a).layers(a)
        for layer in ours.values():
            train(layer, rng.normal(size=(5, 4, 3)).astype(np.float32))
        theirs = framework(b).layers(b)
        assert bln.transfer(a, b) == dict(zip(ours, theirs, strict=True))
        for mine, other in zip(ours.values(), theirs.values(), strict=True):
            assert_same(mine, other)

    def test_another_number_of_layers_is_refused(self):
        with pytest.raises(ValueError, match=r"source has 2 BLN layers \['1', '3'\], the target 1 \[''\]"):
            bln.transfer(self.torch_model(), make("flax"))

    def test_one_layer_that_does_not_fit_leaves_all_as_they_were(self, rng):
        a, b = self.torch_model(), torch.nn.Sequential(make("torch"), make("torch", 5))
        train(a[1], rng.normal(size=(5, 4, 3)).astype(np.float32))
        with pytest.raises(ValueError, match=r"'3' to '1': features=3 in the source, 5 in the target.*pass names="):
            bln.transfer(a, b)
        assert not b[0].population.updates.any()

    def test_flax_layers_whose_order_is_not_known_want_names(self, rng):
        class Net(nnx.Module):
            def __init__(self):
                self.stem, self.body = make("flax"), make("flax")

        a, b = self.torch_model(), Net()
        train(a[1], rng.normal(size=(5, 4, 3)).astype(np.float32))
        with pytest.raises(ValueError, match=r"\['body', 'stem'\].*order of their names.*Pass names="):
            bln.transfer(a, b)
        assert bln.transfer(a, b, names={"1": "stem", "3": "body"}) == {"1": "stem", "3": "body"}
        assert_same(a[1], b.stem)
        for names, message in (
            ({"1": "head"}, r"target has no BLN layers \['head'\]"),
            ({"2": "stem"}, r"source has no BLN layers \['2'\]"),
            ({"1": "stem", "3": "stem"}, "a target of its own"),
        ):
            with pytest.raises(ValueError, match=message):
                bln.transfer(a, b, names=names)

    def test_parameters_only_one_side_has_are_refused(self):
        a, b = bln.BatchLayerNorm(3, channel_dim=-1, bias=False), built("keras")
        with pytest.raises(ValueError, match="shift=False in the source, True in the target"):
            bln.transfer(a, b)
        with pytest.raises(ValueError, match="shift=True in the source, False in the target"):
            bln.transfer(b, a)

    def test_other_things_are_refused(self):
        with pytest.raises(TypeError, match="expected a torch module, a Keras layer or model, or a Flax NNX module"):
            bln.transfer(make("torch"), "model.keras")
