"""The model is left as it was found, and bad input is told so."""

import copy
import random
import re
import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from search_nets import ROUNDING, Residual, copies, data, dense, trained
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bln
from bln._install import install

TRAIN, BATCHES = data((9, 9), seed=1), data((7, 7, 4), shift=0.3)


def odd_model(make=dense):
    """A model whose every part is in a state of its own."""
    model = trained(make(), TRAIN)
    layers = list(bln.layers(model).values())
    layers[0].config, layers[1].config = "FTFT", "TFTF"
    layers[0].eval()
    return model


def state(model):
    return {
        "weights and statistics": {name: value.clone() for name, value in model.state_dict().items()},
        "modes": [module.training for module in model.modules()],
        "configurations": [layer.config for layer in bln.layers(model).values()],
        "positions": [layer.population.position_shape for layer in bln.layers(model).values()],
        "momenta": [layer.momentum for layer in bln.layers(model).values()],
        "attributes": [sorted(module.__dict__) for module in model.modules()],
        "hooks": [len(module._forward_pre_hooks) for module in model.modules()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "gradients": torch.is_grad_enabled(),
    }


def assert_same(before, after):
    for key, value in before.items():
        if key == "weights and statistics":
            assert value.keys() == after[key].keys()
            assert all(torch.equal(v, after[key][name]) for name, v in value.items())
        elif key == "torch":
            assert torch.equal(value, after[key])
        else:
            assert value == after[key], key


def drawing(batches):
    """Batches that use up random numbers, as a shuffling loader does."""
    for batch in batches:
        torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
        yield batch


WAYS = {
    "shared": {},
    "per layer": {"per_layer": True},
    "rebatched": {"rebatch": True},
    "robust": {"robust": True, "per_layer": True},
    "calibrated": {"calibrate": data((9, 9), seed=3)},
    "optuna": {"per_layer": True, "sampler": "random", "trials": 3},
}


@pytest.mark.parametrize("make", [dense, Residual])
@pytest.mark.parametrize("way", WAYS)
def test_the_model_is_left_as_found(way, make):
    model = odd_model(make)
    before = state(model)
    bln.search(model, drawing(BATCHES), loss=F.cross_entropy, metrics="accuracy", **WAYS[way])
    assert_same(before, state(model))


class Bomb:
    """A loss that goes off at a given call."""

    def __init__(self, at, error):
        self.left, self.error = at, error

    def __call__(self, outputs, targets):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return F.cross_entropy(outputs, targets)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError("mine")])
@pytest.mark.parametrize("at", [1, 40, 60])
@pytest.mark.parametrize("way", WAYS)
def test_the_model_is_left_as_found_when_interrupted(way, at, error):
    model = odd_model()
    before = state(model)
    calls = Bomb(10**9, None)
    bln.search(model, BATCHES, loss=calls, **WAYS[way])
    last = 10**9 - calls.left  # the last pass of all: deep inside the per-layer search, or the study
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else ValueError):
        bln.search(model, BATCHES, loss=Bomb(last if at == 60 else at, error), **WAYS[way])
    assert_same(before, state(model))


def test_the_model_is_left_as_found_when_interrupted_inside_a_layer():
    model = odd_model()
    before, calls = state(model), []

    def stop(module, args):
        calls.append(copies(args[0]))
        if calls[-1] == 16:
            raise KeyboardInterrupt

    handle = model[4].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        bln.search(model, BATCHES, loss=F.cross_entropy)
    handle.remove()
    assert 16 in calls
    assert_same(before, state(model))


def test_buffers_of_other_modules_are_put_back():
    norm = nn.BatchNorm1d(8)
    norm.train = lambda mode=True: norm  # stays in training, and would go on averaging
    model = nn.Sequential(*dense()[:6], norm, nn.Linear(8, 3))
    trained(model, TRAIN)
    before = copy.deepcopy(norm.state_dict())
    result = bln.search(model, BATCHES, loss=F.cross_entropy)
    assert result.mode == "separate"
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_requests_that_layers_remember_enter_no_score_and_stay():
    model = trained(dense(), TRAIN)
    expected = bln.search(model, BATCHES, loss=F.cross_entropy)
    for layer in bln.layers(model).values():
        layer.memory = 50
    model.eval()
    bln.configure(model, "FFFF")
    model(BATCHES[0][0])
    before = [buffer.clone() for layer in bln.layers(model).values() for buffer in layer.memory.buffers()]
    result = bln.search(model, BATCHES, loss=F.cross_entropy)
    for row in result:
        assert row.loss == pytest.approx(expected[str(row.config)].loss, rel=ROUNDING)
    assert any("without the requests that layers remember" in note for note in result.notes)
    after = [buffer for layer in bln.layers(model).values() for buffer in layer.memory.buffers()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


# ---- bad input


def test_no_batches():
    model = odd_model()
    before = state(model)
    used_up = iter(BATCHES)
    list(used_up)
    for empty in ([], used_up):
        with pytest.raises(ValueError, match="search got no batches; was the iterable used up before"):
            bln.search(model, empty, loss=F.cross_entropy)
    with pytest.raises(ValueError, match="calibrate got no batches"):
        bln.search(model, BATCHES, loss=F.cross_entropy, calibrate=[])
    assert_same(before, state(model))


def compiled_in_place(model):
    model.compile(fullgraph=True, backend="eager")
    return model


@pytest.mark.filterwarnings("ignore:.*makes a prediction depend")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, fullgraph=True, backend="eager"),
        lambda model: nn.Sequential(torch.compile(model, fullgraph=True, backend="eager")),
        compiled_in_place,
    ],
    ids=["whole", "part", "in place"],
)
def test_a_compiled_model_is_searched_as_the_plain_one(wrap):
    """Not as compiled: each configuration would be a graph of its own, and of a whole graph there may be eight."""
    model = trained(dense(), TRAIN)
    options = {"loss": F.cross_entropy, "per_layer": True, "calibrate": [x for x, _ in TRAIN]}
    expected, compiled = bln.search(model, BATCHES, **options), wrap(copy.deepcopy(model))
    result = bln.search(compiled, BATCHES, **options)
    assert [row.loss for row in result] == [row.loss for row in expected]
    result.apply(compiled, result.lowest)
    found = [str(layer.config) for layer in bln.layers(compiled).values()]
    assert found == [str(config) for config in result.lowest.config.values()]
    if list(bln.layers(compiled)) == list(bln.layers(model)):
        result.apply(model)


def test_a_model_without_layers():
    with pytest.raises(ValueError, match=r"Sequential has no BatchLayerNorm; bln\.convert"):
        bln.search(nn.Sequential(nn.Linear(6, 3)), BATCHES, loss=F.cross_entropy)


def test_a_loss_that_is_not_a_scalar():
    model = odd_model()
    before = state(model)
    with pytest.raises(ValueError, match=r"loss must return a scalar.* got a Tensor of shape \(7,\); try reduction"):
        bln.search(model, BATCHES, loss=nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(ValueError, match="loss must return a scalar, the mean over the batch, got a str"):
        bln.search(model, BATCHES, loss=lambda outputs, targets: "low")
    with pytest.raises(ValueError, match=r"share must return a scalar.* got a Tensor of shape \(7, 3\)"):
        bln.search(model, BATCHES, loss=F.cross_entropy, metrics={"share": lambda outputs, targets: outputs})
    with pytest.raises(TypeError, match="loss must be a function"):
        bln.search(model, BATCHES, loss="cross_entropy")
    assert_same(before, state(model))


def test_metrics_that_do_not_exist():
    with pytest.raises(TypeError, match=r"functions metric\(outputs, targets\) by name, .* got 'f1'"):
        bln.search(odd_model(), BATCHES, loss=F.cross_entropy, metrics="f1")
    with pytest.raises(TypeError, match="by name"):
        bln.search(odd_model(), BATCHES, loss=F.cross_entropy, metrics=F.cross_entropy)
    regression = [(x, torch.randn(len(x), 3, dtype=torch.float64)) for x, _ in BATCHES]
    with pytest.raises(ValueError, match=r"'accuracy' is for outputs .* got \(7, 3\) and \(7, 3\)"):
        bln.search(odd_model(), regression, loss=F.mse_loss, metrics="accuracy")
    single = trained(nn.Sequential(dense(), nn.Linear(3, 1).double()), TRAIN)
    regression = [(x, torch.randn(len(x), 1, dtype=torch.float64)) for x, _ in BATCHES]
    with pytest.raises(ValueError, match="'accuracy' of a single output is for targets of 0 and 1, got others"):
        bln.search(single, regression, loss=F.mse_loss, metrics="accuracy")


def test_batches_of_another_kind():
    for batches, what in (
        ([x for x, _ in BATCHES], "Tensor"),
        ([(x, t, t) for x, t in BATCHES], "tuple"),
        ([{"image": x, "label": t} for x, t in BATCHES], "dict"),
    ):
        message = rf"expected batches of \(inputs, targets\), got a {what}; .* step=lambda model, batch: \(model\("
        with pytest.raises(ValueError, match=message):
            bln.search(odd_model(), batches, loss=F.cross_entropy)
    with pytest.raises(ValueError, match=r"must return \(outputs, targets\), got Tensor"):
        bln.search(odd_model(), BATCHES, loss=F.cross_entropy, step=lambda model, batch: model(batch[0]))


def test_a_dataset_in_place_of_a_loader():
    dataset = TensorDataset(*(torch.cat(parts) for parts in zip(*BATCHES, strict=True)))
    message = r"got a dataset, TensorDataset, .* pass torch\.utils\.data\.DataLoader\(dataset, batch_size=25\)"
    with pytest.raises(TypeError, match=message):
        bln.search(odd_model(), dataset, loss=F.cross_entropy)
    with pytest.raises(TypeError, match=message):
        bln.search(odd_model(), BATCHES, loss=F.cross_entropy, calibrate=dataset)
    with pytest.raises(TypeError, match=message):
        bln.calibrate(odd_model(), dataset)
    with pytest.raises(TypeError, match=r"got one tensor of shape \(7, 6\)"):
        bln.search(odd_model(), BATCHES[0][0], loss=F.cross_entropy)


class ModelOutput(OrderedDict):
    """What models of Hugging Face return, attributes left out."""


class Wrapped(nn.Sequential):
    def forward(self, input):
        return ModelOutput(logits=super().forward(input))


def test_an_output_that_the_loss_cannot_take():
    model = trained(Wrapped(*dense()), TRAIN)
    for loss in (F.cross_entropy, F.mse_loss):
        with pytest.raises((TypeError, AttributeError)) as caught:
            bln.search(model, BATCHES, loss=loss)
        assert "loss was given the model's output, a ModelOutput" in caught.value.__notes__[0]
        assert "step=lambda model, batch: (model(batch[0]).logits, batch[1])" in caught.value.__notes__[0]
    result = bln.search(model, BATCHES, loss=F.cross_entropy, step=lambda m, batch: (m(batch[0])["logits"], batch[1]))
    assert result.mode == "together"


def test_nan_losses_come_last_and_are_marked():
    model = odd_model()
    with torch.no_grad():
        next(iter(bln.layers(model).values())).population.batch_mean.fill_(torch.nan)
    result = bln.search(model, BATCHES, loss=F.cross_entropy, metrics="accuracy", per_layer=True, rebatch=True)
    shared = [row for row in result if not row.per_layer]
    assert all(str(row.config).startswith("F") for row in shared[:8])
    assert all(np.isnan(row.loss) for row in shared[8:])
    assert str(result.best.config)[0] == "F" or not np.isnan(result.best.loss)
    assert any("NaN loss and come last" in note for note in result.notes)
    assert "NaN" in str(result)
    assert '"loss": null' in result.to_json()


def test_every_loss_nan_has_no_best():
    model = odd_model()
    result = bln.search(model, BATCHES, loss=lambda outputs, targets: outputs.sum() * torch.nan, per_layer=True)
    for use in (lambda: result.best, lambda: result.apply(model)):
        with pytest.raises(ValueError, match=r"every configuration has a NaN loss.* calibrate=train_batches"):
            use()
    result.apply(model, "TTFF")  # by name it can be had


def test_batches_of_different_sizes_weigh_by_their_samples():
    model = odd_model()
    whole = data((12,), shift=0.3)[0]
    pieces = [(whole[0][:9], whole[1][:9]), (whole[0][9:11], whole[1][9:11]), (whole[0][11:], whole[1][11:])]
    together = bln.search(model, [whole], loss=F.cross_entropy)
    apart = bln.search(model, pieces, loss=F.cross_entropy)
    for config in ("TTTT", "TTTF", "TTFT", "TTFF"):  # of which a batch's composition is no part
        assert apart[config].loss == pytest.approx(together[config].loss, rel=1e-12)


def test_search_data_that_is_training_data_is_warned_of():
    model = odd_model()
    with pytest.warns(UserWarning, match="same object as search data and as training data") as caught:
        bln.search(model, BATCHES, loss=F.cross_entropy, calibrate=BATCHES)
    assert caught[0].filename == __file__
    dataset = TensorDataset(*(torch.cat(parts) for parts in zip(*BATCHES, strict=True)))
    with pytest.warns(UserWarning, match="report the test set once"):
        bln.search(model, DataLoader(dataset, 6), loss=F.cross_entropy, calibrate=DataLoader(dataset, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bln.search(model, DataLoader(dataset, 6), loss=F.cross_entropy, calibrate=TRAIN)


def test_options_that_do_not_go_together():
    model = odd_model()
    for options, message in (
        ({"sampler": "tpe"}, "pass per_layer=True with it"),
        ({"per_layer": True, "storage": "sqlite://"}, "pass sampler='tpe'"),
        ({"per_layer": True, "trials": 5}, "pass sampler='tpe'"),
        ({"per_layer": True, "sampler": "tpe", "storage": "here"}, "it must be a URL such as 'sqlite:///study.db'"),
        ({"per_layer": True, "sampler": "tpe", "storage": Path("x.db")}, "it must be a URL such as"),
        ({"per_layer": True, "sampler": "best"}, "sampler must be 'tpe', 'random', an Optuna sampler .* got 'best'"),
    ):
        with pytest.raises(ValueError, match=message):
            bln.search(model, BATCHES, loss=F.cross_entropy, **options)


def test_importing_bln_imports_no_extra():
    code = "import sys, bln; print({'optuna', 'pandas', 'rich', 'matplotlib', 'scipy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_missing_extra_is_named(monkeypatch):
    model = odd_model()
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=re.escape(install("search"))):
        bln.search(model, BATCHES, loss=F.cross_entropy, per_layer=True, sampler="tpe")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=re.escape(install("search"))):
        bln.search(model, BATCHES, loss=F.cross_entropy).to_dataframe()
