"""Helpers for whole models."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bln
from bln import BatchLayerNorm


def net(**kwargs):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), BatchLayerNorm(4, **kwargs), nn.Dropout(0.5), nn.Flatten(),
        nn.Linear(4 * 16, 6), nn.Tanh(), BatchLayerNorm(6, **kwargs), nn.Linear(6, 3),
    )  # fmt: skip


FORMS = {
    "per position": {},
    "pooled": {"per_position": False},
    "grouped": {"groups": 2},
    "grouped, per position": {"groups": 2, "per_position": True},
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def images(n=12):
    return torch.randn(n, 1, 6, 6)


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_unchanged(model, before):
    after = model.state_dict()
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def test_layers_are_found_by_name():
    model = net()
    assert bln.layers(model) == {"2": model[2], "7": model[7]}
    assert bln.layers(nn.Linear(2, 2)) == {}
    assert bln.layers(torch.compile(model)) == {"2": model[2], "7": model[7]}


class TestConfigure:
    @every_form
    def test_all_layers_at_once(self, form):
        model = net(**form)
        bln.configure(model, "FTFF")
        assert [str(layer.config) for layer in bln.layers(model).values()] == ["FTFF", "FTFF"]

    def test_by_name(self):
        model = net()
        bln.configure(model, {"7": bln.StatisticsConfig.parse("FFFF")})
        assert [str(layer.config) for layer in bln.layers(model).values()] == ["TTFF", "FFFF"]

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"2": "FTFF", "7": "FT"}, "'FT' is not a configuration"),
            ({"2": "FTFF", "77": "FFFF"}, "no BatchLayerNorm named '77'; did you mean '7'"),
            ({"first": "FFFF"}, "It has '2', '7'"),
            ({7: "FFFF"}, "no BatchLayerNorm named 7; did you mean '7'"),
        ],
    )
    def test_a_mistake_changes_nothing(self, config, message):
        model = net()
        with pytest.raises(ValueError, match=message):
            bln.configure(model, config)
        assert {str(layer.config) for layer in bln.layers(model).values()} == {"TTFF"}


@every_form
def test_reset_statistics(form):
    model = net(**form)
    model(images())
    bln.reset_statistics(model)
    assert not any(layer.population.updates.any() for layer in bln.layers(model).values())


@pytest.mark.parametrize(
    "helper", [bln.reset_statistics, lambda m: bln.configure(m, "FFFF"), lambda m: bln.calibrate(m, [1])]
)
def test_a_model_without_bln_is_told_the_ways_out(helper):
    with pytest.raises(ValueError, match=r"Linear has no BatchLayerNorm; bln.convert.*bln.insert"):
        helper(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="expected a torch module with BLN layers, got str"):
        helper("model")
    with pytest.raises(TypeError, match="expected a torch module with BLN layers, got NoneType"):
        bln.layers(None)


class TestCalibrate:
    @every_form
    def test_it_is_the_plain_average_under_frozen_weights(self, form):
        """Against a by-hand pass: batches of different sizes weigh by their samples, dropout stays off."""
        model = net(**form).double()
        per_position = model[2].per_position
        for _ in range(3):
            model(images().double())
        batches = [images(n).double() for n in (12, 7, 1, 4)]
        expected = copy.deepcopy(model).eval()
        first, second = expected[2], expected[7]
        first.train().momentum = second.train().momentum = None
        remembered = [first.population.inverse_m.clone(), second.population.inverse_m.clone()]
        bln.reset_statistics(expected)
        with torch.no_grad():  # as calibrate runs: with gradients, sums are taken in another order
            for batch in batches:
                expected(batch)

        bln.calibrate(model, batches)
        for layer, by_hand, inverse_m in zip((model[2], model[7]), (first, second), remembered, strict=True):
            for name, value in by_hand.population.named_buffers():
                found = getattr(layer.population, name)
                if name == "inverse_m":
                    value = inverse_m
                elif name in ("updates", "samples"):  # the last row is that of 1/m, which stays that of training
                    found, value = found[:-1], value[:-1]
                assert torch.equal(found, value), name
            assert (layer.population.updates[-1] == 3).all()
            assert layer.momentum == 0.1
        mean = torch.cat([torch.tanh(model[0](batch)) for batch in batches]).mean(0 if per_position else (0, 2, 3))
        wanted = mean.movedim(0, -1) if per_position else mean
        torch.testing.assert_close(first.population.batch_mean, wanted)
        if first.groups is not None:
            sizes = [len(batch) for batch in batches]
            grouped = [torch.tanh(model[0](batch)).unflatten(1, (2, -1)).flatten(2) for batch in batches]
            torch.testing.assert_close(first.population.feature_mean, torch.cat(grouped).mean((0, 2)))
            wanted = sum(
                x.var(2, correction=0).mean(0) * n * (n / (n - 1) if n > 1 else 1)
                for x, n in zip(grouped, sizes, strict=True)
            ) / sum(sizes)
            torch.testing.assert_close(first.population.feature_var, wanted)

    @every_form
    def test_an_untrained_model_learns_one_over_m_from_it(self, form):
        model = net(**form)
        bln.calibrate(model, [images(4), images(4)])
        assert model[7].population.inverse_m.item() == 0.25

    def test_it_mends_averages_taken_while_weights_moved(self):
        model = nn.Sequential(nn.Linear(4, 4), BatchLayerNorm(4))
        model(torch.randn(64, 4))
        model[0].weight.data *= 30
        x = torch.randn(64, 4)
        bln.calibrate(model, [x])
        torch.testing.assert_close(model[1].population.batch_mean, model[0](x).mean(0))

    def test_mode_weights_and_random_state_are_left_as_they_were(self):
        model = net()
        model(images())
        model.train()
        model[7].eval()
        modes = [module.training for module in model.modules()]
        weights = {name: value.clone() for name, value in model.named_parameters()}
        loader = DataLoader(TensorDataset(images(20), torch.zeros(20)), batch_size=4, shuffle=True)

        def noisy_batches():
            for batch in loader:
                random.random(), np.random.rand()  # noqa: NPY002
                yield batch

        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]  # noqa: NPY002
        bln.calibrate(model, noisy_batches())
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert np.array_equal(np.random.get_state()[1], states[2])  # noqa: NPY002
        assert [module.training for module in model.modules()] == modes
        for name, value in model.named_parameters():
            assert torch.equal(value, weights[name])
            assert value.grad is None

    @pytest.mark.parametrize("trained", [True, False])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, StopIteration])
    @every_form
    def test_interrupted_it_puts_everything_back(self, error, trained, form):
        model = net(**form)
        if trained:
            model(images())
        before, shapes = snapshot(model), [layer.population.position_shape for layer in bln.layers(model).values()]
        modes = [module.training for module in model.modules()]

        def step(model, batch):
            model(batch)
            raise error("stop")

        with pytest.raises(error, match="stop"):
            bln.calibrate(model, [images()], step=step)
        assert_unchanged(model, before)
        assert [layer.population.position_shape for layer in bln.layers(model).values()] == shapes
        assert [module.training for module in model.modules()] == modes
        assert model[2].momentum == 0.1

    def test_a_tensor_is_no_iterable_of_batches(self):
        with pytest.raises(TypeError, match=r"got one tensor of shape \(12, 1, 6, 6\).*pass \[x\], or x\.split\(25\)"):
            bln.calibrate(net(), images())

    def test_no_batches(self):
        model = net()
        model(images())
        before = snapshot(model)
        with pytest.raises(ValueError, match="got no batches; was the iterable used up"):
            bln.calibrate(model, iter([]))
        assert_unchanged(model, before)

    @every_form
    def test_nothing_but_nan(self, form):
        model = net(**form)
        model(images())
        before = snapshot(model)
        with pytest.raises(ValueError, match="layer '2' never had finite statistics"):
            bln.calibrate(model, [torch.full((4, 1, 6, 6), float("nan"))])
        assert_unchanged(model, before)

    def test_a_layer_that_no_batch_reaches_keeps_its_statistics(self):
        class Auxiliary(nn.Module):
            def __init__(self):
                super().__init__()
                self.main, self.aux = BatchLayerNorm(3), BatchLayerNorm(3)

            def forward(self, x):
                return self.main(x) + (self.aux(x) if self.training else 0)

        model = Auxiliary()
        model(torch.randn(4, 3))
        before = snapshot(model.aux)
        with pytest.warns(UserWarning, match="no batch reached layer 'aux'"):
            bln.calibrate(model, [torch.randn(4, 3)])
        assert_unchanged(model.aux, before)

    @pytest.mark.parametrize("groups", [None, 3])
    def test_single_samples_leave_the_batch_variance_of_training(self, groups):
        model = nn.Sequential(BatchLayerNorm(3, groups=groups))
        model(torch.randn(8, 3) * 5)
        before = model[0].population.batch_var.clone()
        bln.calibrate(model, [torch.randn(1, 3) for _ in range(4)])
        assert torch.equal(model[0].population.batch_var, before)
        assert model[0].population.updates.tolist() == [4, 1, 4, 4, 1]

    def test_batches_of_many_kinds(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = BatchLayerNorm(3)

            def forward(self, a, b):
                return self.norm(a + b)

        a, b = torch.randn(4, 3), torch.randn(4, 3)
        means = []
        for batch in (((a, b), None), ({"a": a, "b": b}, None), {"a": a, "b": b}, [[a, b]]):
            model = Two()
            bln.calibrate(model, [batch])
            means.append(model.norm.population.batch_mean)
        for mean in means:
            torch.testing.assert_close(mean, (a + b).mean(0))


def test_progress_is_shown_on_a_terminal_and_nowhere_else(monkeypatch, capsys):
    from bln._progress import track

    assert list(track(iter(range(3)), "work")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert list(track([1, 2], "work")) == [1, 2]
    assert "work" in capsys.readouterr().err
