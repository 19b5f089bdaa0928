"""Models of Hugging Face transformers with their norms converted: train, evaluate, save and load again."""

import itertools
import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
)

import bln

BERT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 20,
    "num_labels": 3,
}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic", "num_labels": 3}


def bert(**options):
    tokens = torch.randint(50, (12, 9))
    return BertForSequenceClassification(BertConfig(**BERT, **options)), {
        "input_ids": tokens,
        "attention_mask": (torch.rand(12, 9) < 0.8).long().index_fill(1, torch.tensor([0]), 1),
    }


def resnet():
    return ResNetForImageClassification(ResNetConfig(**RESNET)), {"pixel_values": torch.randn(12, 3, 32, 32)}


def train(model, inputs, steps=8):
    labels = torch.arange(12) % 3
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(steps):
        loss = model.train()(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(params=[bert, resnet], ids=["bert", "resnet"])
def client(request):
    return request.param()


def test_conversion_finds_every_norm_and_keeps_the_function(client):
    model, inputs = client
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm | nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            if isinstance(norm, nn.BatchNorm2d):
                norm.running_mean.normal_(0, 0.1)
                norm.running_var.uniform_(0.5, 2)
        before = model.eval()(**inputs).logits
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            bln.convert(model)
        after = model(**inputs).logits
    assert len(bln.layers(model)) == len(norms) > 0
    # mix_eps, 1e-5 or 1e-12, of each part of each layer; the rest is float32 rounding through a dozen layers
    torch.testing.assert_close(after, before, atol=2e-3, rtol=2e-3)


def test_a_converted_model_trains_in_a_plain_loop(client):
    model, inputs = client
    losses = train(bln.convert(model), inputs)
    assert losses[-1] < losses[0]
    for name, layer in bln.layers(model).items():
        assert (layer.population.updates > 0).all(), name
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters()), name


def test_saved_and_loaded_again_outputs_are_equal(client, tmp_path):
    model, inputs = client
    train(bln.convert(model), inputs, steps=3)
    names = list(bln.layers(model))
    bln.configure(model, {names[0]: "FTFF", names[-1]: "TTTT"})
    expected = model.eval()(**inputs).logits
    model.save_pretrained(tmp_path)

    again = bln.load_pretrained(type(model), tmp_path)
    assert type(again) is type(model)
    assert not again.training
    assert torch.equal(again(**inputs).logits, expected)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name

    again.save_pretrained(tmp_path / "again")
    half = bln.load_pretrained(type(model), tmp_path / "again", dtype=torch.float16)
    assert next(half.parameters()).dtype == torch.float16
    for name, layer in bln.layers(half).items():
        assert torch.equal(layer.population.batch_var, bln.layers(model)[name].population.batch_var), name

    by_hand = bln.convert(type(model)(type(model).config_class.from_pretrained(tmp_path)))
    by_hand.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(by_hand.eval()(**inputs).logits, expected)


def test_other_groups_are_given_again_when_loading(tmp_path):
    model, inputs = resnet()
    train(bln.convert(model, groups=4), inputs, steps=3)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="converted with other groups than 8: give groups="):
        bln.load_pretrained(type(model), tmp_path)
    again = bln.load_pretrained(type(model), tmp_path, groups=4)
    assert {layer.groups for layer in bln.layers(again).values()} == {4}
    assert torch.equal(again(**inputs).logits, model.eval()(**inputs).logits)


def test_sharded_files_and_tied_weights(tmp_path):
    model = bln.convert(BertForMaskedLM(BertConfig(**BERT)))
    tokens = torch.randint(50, (4, 9))
    model(tokens)
    expected = model.eval()(tokens).logits
    model.save_pretrained(tmp_path, max_shard_size="10kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = bln.load_pretrained(BertForMaskedLM, tmp_path)
    assert torch.equal(again(tokens).logits, expected)
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight


def test_a_checkpoint_of_other_norms_is_refused_with_the_way_out(client, tmp_path):
    """``from_pretrained`` would leave statistics in memory nobody wrote to."""
    model, _ = client
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"no checkpoint of a \w+ as bln.convert makes it.*missing_keys.*from_pretrained"
    ):
        bln.load_pretrained(type(model), tmp_path)
    with pytest.raises(TypeError, match="expected a model class with from_pretrained"):
        bln.load_pretrained(model, tmp_path)


class Rows(torch.utils.data.Dataset):
    def __init__(self, inputs):
        self.inputs = inputs

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return {**{name: value[i] for name, value in self.inputs.items()}, "labels": i % 3}


def test_the_trainer_resets_statistics_at_each_epoch_and_resumes(client, tmp_path):
    model, inputs = client
    bln.convert(model)
    for layer in bln.layers(model).values():
        layer.momentum = None
        layer.reset_statistics()
    arguments = TrainingArguments(
        tmp_path, num_train_epochs=3, per_device_train_batch_size=4, per_device_eval_batch_size=5, report_to=[],
        eval_strategy="epoch", save_strategy="epoch", disable_tqdm=True, use_cpu=True, logging_strategy="epoch",
        load_best_model_at_end=True,
    )  # fmt: skip
    data = Rows(inputs)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=[bln.callbacks.TrainerReset()])
    trainer.train()
    layer = next(iter(bln.layers(model).values()))
    assert layer.population.updates.max() == 3  # of one epoch, not of three
    assert torch.isfinite(torch.tensor(trainer.evaluate()["eval_loss"]))
    best = bln.load_pretrained(type(model), trainer.state.best_model_checkpoint)
    assert torch.equal(best(**inputs).logits, model.eval()(**inputs).logits)


def test_a_converted_resnet_is_frozen_by_an_example():
    """Its forward branches, so torch.fx traces its parts: each norm goes into the convolution before it."""
    model, inputs = resnet()
    train(bln.convert(model), inputs, steps=3)
    bln.configure(model, "TTTT")
    with torch.no_grad():
        expected = model.eval()(**inputs).logits
        model, report = bln.freeze(model, inputs, report=True)
        assert report.folded
        assert not report.kept
        assert not report.left
        # Convolutions with other weights round otherwise: float32 through nine of them.
        torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-4, rtol=1e-4)
    assert report.difference < 1e-4


@pytest.mark.parametrize("evaluations", ["no", "epoch", "steps"])
def test_the_trainer_calibrates_before_each_evaluation_and_at_the_end(tmp_path, evaluations, monkeypatch):
    model, inputs = resnet()
    bln.convert(model)
    data = [{"pixel_values": x, "labels": at % 3} for at, x in enumerate(inputs["pixel_values"])]
    batches = [{"pixel_values": x} for x in inputs["pixel_values"].split(4)]
    seen = []
    calibrate = bln.callbacks.calibrate
    monkeypatch.setattr(
        bln.callbacks, "calibrate", lambda *a, **options: (seen.append("calibrate"), calibrate(*a, **options))
    )
    monkeypatch.setattr(Trainer, "evaluate", lambda self, *a, **options: (seen.append("evaluate"), {})[1])
    arguments = TrainingArguments(
        tmp_path, per_device_train_batch_size=4, num_train_epochs=2, eval_strategy=evaluations, eval_steps=4,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    callback = bln.callbacks.TrainerCalibrate(batches)
    Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=[callback]).train()
    pairs = ["calibrate", "evaluate"]
    seen = [each for each, _ in itertools.groupby(seen)]  # the last step may be evaluated twice, as the epoch's end too
    assert seen == {"no": ["calibrate"], "epoch": pairs * 2, "steps": pairs * 2}[evaluations]
    layer = next(iter(bln.layers(model).values()))
    assert layer.population.updates[0] == len(batches)
