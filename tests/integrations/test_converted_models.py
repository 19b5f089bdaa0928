"""Models of timm and Hugging Face transformers, converted: same outputs, a training step, a state dict, an export."""

import copy
import warnings
from functools import partial

import pytest
import torch
import transformers
from torch import nn

import bln
from timm_models import timm

SMALL = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 20,
}  # fmt: skip
SMALL_VISION = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


def image(name="pixel_values"):
    return {name: torch.randn(4, 3, 32, 32)}


def text(**more):
    tokens = torch.randint(3, 50, (4, 9))
    real = torch.arange(9) < torch.tensor([9, 6, 4, 8])[:, None]
    return {"input_ids": tokens, "attention_mask": real.long(), **more}


def from_timm(name, **options):
    return partial(timm.create_model, name, num_classes=5, **options), partial(image, name="x")


def from_transformers(name, task, inputs, **config):
    model, kind = getattr(transformers, name + task), getattr(transformers, name + "Config")
    return (lambda: model(kind(**config))), inputs


classified = partial(from_transformers, task="ForSequenceClassification", inputs=text)
pictured = partial(from_transformers, task="ForImageClassification", inputs=image)

# Each with the number of norms that become BLN.
MODELS = {
    "resnet18": (20, *from_timm("resnet18")),
    "efficientnet_b0": (49, *from_timm("efficientnet_b0")),
    "mobilenetv3_small": (34, *from_timm("mobilenetv3_small_050")),
    "vit_tiny": (5, *from_timm("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24)),
    "convnext": (9, *from_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32))),
    "regnet": (44, *from_timm("regnetx_002")),
    "densenet": (11, *from_timm("densenet121", block_config=(2, 2), growth_rate=8)),
    "poolformer": (29, *from_timm("poolformerv2_s12")),
    "resnetv2_groups": (49, *from_timm("resnetv2_50x1_bit")),
    "mixer": (17, *from_timm("mixer_s32_224", img_size=32)),
    "Bert": (5, *classified("Bert", **SMALL)),
    "DistilBert": (5, *classified("DistilBert", vocab_size=50, dim=16, n_layers=2, n_heads=2, hidden_dim=32)),
    "Albert": (3, *classified("Albert", **SMALL, embedding_size=8)),
    "DebertaV2": (5, *classified("DebertaV2", **SMALL)),
    "GPT2": (
        5,
        *from_transformers(
            "GPT2", "LMHeadModel", text, vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=20,
            use_cache=False, bos_token_id=1, eos_token_id=2,
        ),
    ),
    "Bart": (
        7,
        *from_transformers(
            "Bart", "ForConditionalGeneration", lambda: text(decoder_input_ids=torch.randint(3, 50, (4, 9))),
            vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, use_cache=False, dropout=0.0,
        ),
    ),
    "ViT": (5, *pictured("ViT", **SMALL_VISION)),
    "Swin": (
        7, *pictured("Swin", image_size=32, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4)
    ),
    "ConvNext": (5, *pictured("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)),
    "Bit": (7, *pictured("Bit", embedding_size=32, hidden_sizes=[128, 256], depths=[1, 1])),
    "Wav2Vec2": (
        7,
        *from_transformers(
            "Wav2Vec2", "ForSequenceClassification", lambda: {"input_values": torch.randn(4, 400)}, hidden_size=16,
            num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8), conv_stride=(5, 4),
            conv_kernel=(10, 4), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, apply_spec_augment=False,
            classifier_proj_size=8, layerdrop=0.0,  # a layer that is left out in training learns nothing
        ),
    ),
}  # fmt: skip


def output(result):
    return result if isinstance(result, torch.Tensor) else result.logits


def quietly(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return bln.convert(model)


@torch.no_grad()
def predictions(model, inputs):
    """Convert the model; return what it predicts then, and what it predicted before."""
    before = output(model(**inputs))
    return output(quietly(model)(**inputs)), before


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_predicts_the_same_trains_loads_and_is_exported(name):
    count, build, inputs = MODELS[name]
    model, inputs = build().eval(), inputs()
    for norm in model.modules():  # statistics and parameters far from their initial ones
        if getattr(norm, "running_var", None) is not None:
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 2)
        if isinstance(norm, nn.BatchNorm2d | nn.LayerNorm | nn.GroupNorm) and norm.weight is not None:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            if norm.bias is not None:
                nn.init.normal_(norm.bias, 0, 0.1)
    exact = copy.deepcopy(model).double()
    actual, expected = predictions(
        exact, {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    )
    # Float64 shows what convert changes, not how fifty norms round: it leaves six digits for their amplification.
    torch.testing.assert_close(actual, expected, atol=1e-10 * expected.abs().max().item(), rtol=0)
    # Float32 shows that its paths are the same function, with as much room.
    actual, expected = predictions(model, inputs)
    torch.testing.assert_close(actual, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)
    assert len(bln.layers(model)) == count

    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    output(model.train()(**inputs)).square().mean().backward()
    optimizer.step()
    for at, layer in bln.layers(model).items():
        assert (layer.population.updates[0] > 0).all(), at
        assert all(p.grad.isfinite().all() for p in layer.parameters()), at
    expected = output(model.eval()(**inputs))

    again = quietly(build()).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(output(again(**inputs)), expected)

    exported = torch.export.export(model, (), inputs)
    # Other operations for the same function: float32 through fifty norms again, which amplify how each one rounds.
    actual = output(exported.module()(**inputs))
    torch.testing.assert_close(actual, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize(
    ("name", "checkpointing"), [("Bert", False), ("Bert", True), ("Albert", False), ("Bart", False), ("Bart", True)]
)
def test_padding_enters_no_statistic_of_a_model_that_is_called_with_an_attention_mask(name, checkpointing):
    """Nor with activation checkpointing, which runs a layer again outside of the call that had the mask."""
    _, build, inputs = MODELS[name]
    torch.manual_seed(0)
    model, inputs = quietly(build()), inputs()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.use_cache = False
    plain = gradients(model, inputs)
    if checkpointing:
        model.gradient_checkpointing_enable()
    padded = inputs["attention_mask"] == 0
    one = gradients(model, inputs)
    other = gradients(model, {**inputs, "input_ids": inputs["input_ids"].where(~padded, 7)})
    for actual, expected in zip(one, other, strict=True):
        torch.testing.assert_close(actual, expected)
    for actual, expected in zip(one, plain, strict=True):
        torch.testing.assert_close(actual, expected)


def gradients(model, inputs):
    """The outputs and the gradients of what is behind the embeddings, whose rows belong to tokens."""
    model.zero_grad()
    y = output(model.train()(**inputs))
    y.square().sum().backward()
    return y, *(p.grad for name, p in model.named_parameters() if p.dim() == 1 and p.grad is not None)


def test_norms_that_subtract_no_mean_are_named():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=1))
    reason = r"left as it is, transformers\.models\.llama\.modeling_llama\.LlamaRMSNorm: it subtracts no mean"
    with pytest.warns(UserWarning, match=reason):
        bln.convert(model)
    assert not bln.layers(model)


FIRST = [
    "BatchNormAct2d", "GroupNorm", "GroupNorm1", "GroupNorm1Act", "GroupNormAct", "LayerNorm2d", "LayerNorm2dFp32",
    "LayerNormAct2d", "LayerNormAct2dFp32", "SyncBatchNormAct",
]  # fmt: skip
LAST = ["LayerNorm", "LayerNormAct", "LayerNormActFp32", "LayerNormFp32"]
LEFT = {
    "RmsNorm": "it subtracts no mean", "RmsNorm2d": "it subtracts no mean", "RmsNormAct2d": "it subtracts no mean",
    "SimpleNorm": "it subtracts no mean", "FrozenBatchNormAct2d": "its weight is a buffer, so it is frozen",
    "EvoNorm2dS0": "it computes no batch, layer, group or instance normalization",
}  # fmt: skip


@pytest.mark.parametrize("name", [*FIRST, *LAST])
def test_norms_of_timm_are_known_by_what_they_compute(name):
    norm, x = getattr(timm.layers, name)(32).eval(), torch.randn(4, 32, 6, 5)
    x = x.movedim(1, -1) if name in LAST else x
    expected = norm(x.clone())
    new = quietly(norm)
    assert len(bln.layers(new)) == 1
    # One norm in float32, of values of a few units.
    torch.testing.assert_close(new(x.clone()), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["BatchNormAct2d", "GroupNormAct"])
@pytest.mark.parametrize(
    ("act", "activation"), [("relu", "relu"), ("silu", "silu"), ("swish", "silu"), ("gelu", "gelu")]
)
def test_a_norm_of_timm_with_a_known_activation_becomes_one_layer(name, act, activation):
    norm = getattr(timm.layers, name)(32, act_layer=act)
    names = [key for key, _ in norm.named_parameters()]
    new = quietly(norm)
    assert isinstance(new, bln.BatchLayerNorm)
    assert new.activation == activation
    assert [key for key, _ in new.named_parameters()] == names


def test_a_norm_of_timm_with_another_activation_keeps_its_module():
    for act in ("gelu_tanh", "hard_swish", "leaky_relu"):
        new = quietly(timm.layers.BatchNormAct2d(32, act_layer=act))
        assert new.norm.activation is None
        assert len(new) == 2


@pytest.mark.parametrize("name", LEFT)
def test_norms_of_timm_that_are_something_else_are_left_with_the_reason(name):
    kind = getattr(timm.layers, name)
    with pytest.warns(UserWarning, match=rf"left as it is, {kind.__module__}\.{name}: {LEFT[name]}"):
        bln.convert(kind(32))
