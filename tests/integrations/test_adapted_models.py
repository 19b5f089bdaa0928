"""Pretrained nets of timm and Hugging Face transformers, adapted to the request and put back."""

import math

import pytest
import torch
from torch import nn

import bln
from test_converted_models import MODELS, output, pictured

NETS = {
    name: MODELS[name] for name in ("resnet18", "efficientnet_b0", "mobilenetv3_small", "regnet", "densenet", "Bit")
}
NETS["ResNet"] = (None, *pictured("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"))


def net(name):
    """A net whose running statistics are those of some inputs."""
    _, build, inputs = NETS[name]
    torch.manual_seed(0)
    model = build()
    for _ in range(3):
        model.train()(**inputs())
    return model.eval(), inputs()


def batch_norms(model):
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


@pytest.mark.parametrize("name", NETS)
def test_a_pretrained_net_fits_its_statistics_to_the_request_and_is_put_back(name):
    model, inputs = net(name)
    key, x = next(iter(inputs.items()))
    norms = len(batch_norms(model))
    if not norms:
        with pytest.raises(ValueError, match="no norm with batch statistics"):
            bln.adapt(model)
        return
    before = dict(model.named_modules())
    with torch.no_grad():
        expected = output(model(**inputs))
        adaptation = bln.adapt(model, prior=math.inf)
        assert len(adaptation.layers) == norms
        # Float32 through up to fifty norms, each of which rounds otherwise than the one before.
        torch.testing.assert_close(output(model(**inputs)), expected, atol=1e-5 * expected.abs().max(), rtol=1e-4)

        adaptation.set_prior(4)
        darker = {key: 0.5 * x - 0.3}
        for module in batch_norms(model):
            raise AssertionError(f"{module} was left")
        shrunk = output(model(**darker))
        assert shrunk.isfinite().all()
        adaptation.undo()
        assert (shrunk - output(model(**darker))).abs().max() > 0.01 * expected.abs().max()

        def run(model, batch):
            return model(**batch)

        chosen = bln.adapt(model, [darker] * 2, step=run)
        assert chosen.prior in chosen.agreement
        chosen.undo()
        assert dict(model.named_modules()) == before
        assert torch.equal(output(model(**inputs)), expected)
