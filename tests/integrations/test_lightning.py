"""PyTorch Lightning: training with validation, checkpoints, and statistics that start anew at each epoch."""

import pickle

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bln

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning asks torch in a way torch gave up
]


class Classifier(L.LightningModule):
    def __init__(self, momentum=None):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv1d(3, 6, 3), nn.Tanh(), bln.BatchLayerNorm(6, momentum=momentum), nn.Flatten(), nn.Linear(36, 12),
            nn.Tanh(), bln.BatchLayerNorm(12, momentum=momentum, groups=4), nn.Linear(12, 3),
        )  # fmt: skip

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        self.log("validation", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


def samples():
    y = torch.arange(40) % 3
    return TensorDataset(torch.randn(40, 3, 8) + y[:, None, None], y)


@pytest.fixture
def data():
    return samples()


def trainer(tmp_path, *callbacks, epochs=3):
    return L.Trainer(
        max_epochs=epochs, callbacks=list(callbacks), default_root_dir=tmp_path, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    )  # fmt: skip


def updates(model):
    return [layer.population.updates.max().item() for layer in bln.layers(model).values()]


def test_statistics_start_anew_at_each_epoch_where_momentum_is_none(tmp_path, data):
    loader = DataLoader(data, 8, shuffle=True)
    model = Classifier()
    trainer(tmp_path, bln.callbacks.LightningReset()).fit(model, loader, DataLoader(data, 16))
    assert updates(model) == [5, 5]  # the batches of one epoch, not of three

    kept = Classifier(momentum=0.1)
    trainer(tmp_path, bln.callbacks.LightningReset()).fit(kept, loader, DataLoader(data, 16))
    assert updates(kept) == [15, 15]


def test_the_best_checkpoint_is_loaded_as_it_was(tmp_path, data):
    best = ModelCheckpoint(tmp_path, monitor="validation", save_last=True)
    model = Classifier()
    run = trainer(tmp_path, best, bln.callbacks.LightningReset())
    bln.configure(model, {"net.6": "FTFF"})
    run.fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 16))
    again = Classifier.load_from_checkpoint(best.last_model_path, weights_only=True).eval()
    x = torch.randn(5, 3, 8)
    assert torch.equal(again(x), model.eval()(x))
    assert str(again.net[6].config) == "FTFF"
    (score,) = run.validate(Classifier.load_from_checkpoint(best.best_model_path), DataLoader(data, 16), verbose=False)
    assert score["validation"] == pytest.approx(best.best_model_score.item(), rel=1e-5)


def test_training_goes_on_from_a_checkpoint(tmp_path, data):
    def run(model, epochs, **options):
        checkpoint = ModelCheckpoint(tmp_path, save_last=True)
        running = trainer(tmp_path, checkpoint, bln.callbacks.LightningReset(), epochs=epochs)
        running.fit(model, DataLoader(data, 8), DataLoader(data, 8), **options)
        return running.current_epoch, checkpoint.last_model_path

    _, last = run(Classifier(), 1)
    model = Classifier()
    epoch, _ = run(model, 2, ckpt_path=last)
    assert epoch == 2
    assert updates(model) == [5, 5]


@pytest.mark.parametrize(("name", "arguments"), [("LightningReset", []), ("LightningCalibrate", [[1, 2]])])
def test_callbacks_can_be_sent_to_another_process(name, arguments):
    kind = getattr(bln.callbacks, name)
    callback = pickle.loads(pickle.dumps(kind(*arguments)))
    assert type(callback) is kind
    assert getattr(callback, "batches", [1, 2]) == [1, 2]


def test_each_validation_is_preceded_by_a_calibration(tmp_path, data):
    """So the statistics are those of the weights at the end, and training goes on from there."""
    batches = [data[8 * at : 8 * at + 8] for at in range(5)]
    model, checked = Classifier(momentum=0.1), []

    class Check(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                found = {name: layer.population.snapshot() for name, layer in bln.layers(pl_module).items()}
                bln.calibrate(pl_module, batches, progress=False)
                checked.append((found, {n: layer.population.snapshot() for n, layer in bln.layers(pl_module).items()}))

    run = trainer(tmp_path, bln.callbacks.LightningCalibrate(batches), Check())
    run.fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 16))
    assert len(checked) == 3
    for found, again in checked:
        for name, (_, values) in found.items():
            for key, value in values.items():
                torch.testing.assert_close(value, again[name][1][key], msg=f"{name}.{key}")
    assert model.training
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run.validate(model, DataLoader(data, 16), verbose=False)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_what_can_be_gone_through_once_is_refused(data):
    with pytest.raises(TypeError, match="list_iterator can be gone through once only, and each evaluation needs it"):
        bln.callbacks.LightningCalibrate(iter([data[:8]]))


def test_search_and_calibration_take_the_module_and_its_loaders(tmp_path, data):
    model = Classifier(momentum=0.1)
    trainer(tmp_path, epochs=1).fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 8))
    validation = DataLoader(samples(), 8)
    result = bln.search(model, validation, loss=nn.functional.cross_entropy, calibrate=DataLoader(data, 8))
    assert len(result.rows) == 16
