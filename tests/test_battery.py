"""One battery that every variant of the layer passes, after Keras's run_layer_test."""

import copy
import itertools
import pickle

import pytest
import torch

import bln
from bln import BatchLayerNorm, StatisticsConfig

SHAPES = {
    "dense": ((), {}),
    "sequence": ((6,), {"channel_dim": -1}),
    "signal": ((6,), {}),
    "image": ((4, 3), {}),
    "image, features last": ((4, 3), {"channel_dim": -1}),
    "volume": ((2, 3, 2), {}),
}
OPTIONS = {
    "as published": {},
    "grouped": {"groups": 3},
    "one group": {"groups": 1},
    "grouped, per position": {"groups": 2, "per_position": True},
    "pooled": {"per_position": False},
    "pooled and unscaled": {"per_position": False, "dim_scale": False},
    "plain average": {"momentum": None},
    "no bias": {"bias": False},
    "no parameters": {"affine": False},
    "published code's eps": {"eps": 1e-3, "mix_eps": 1e-4},
}
FEATURES = 6


def variant(shape, option):
    return BatchLayerNorm(FEATURES, **SHAPES[shape][1], **OPTIONS[option])


def batch(shape, n=8):
    positions, arguments = SHAPES[shape]
    return torch.randn((n, *positions, FEATURES) if arguments else (n, FEATURES, *positions))


@pytest.mark.parametrize(("shape", "option"), list(itertools.product(SHAPES, OPTIONS)))
def test_battery(shape, option):
    layer = variant(shape, option)
    x = batch(shape)
    positions = SHAPES[shape][0]

    # Shape and type, in both modes, in every type.
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for training in (True, False):
            y = copy.deepcopy(layer).train(training)(x.to(dtype))
            assert y.shape == x.shape
            assert y.dtype == dtype
            assert y.isfinite().all()

    # A training step changes the parameters and the population, and nothing is left without a gradient.
    before = [p.detach().clone() for p in layer.parameters()]
    optimizer = torch.optim.SGD([*layer.parameters(), leaf := x.clone().requires_grad_()], lr=0.1)
    (layer(leaf) ** 3).sum().backward()
    optimizer.step()
    assert leaf.grad.abs().sum() > 0
    assert all(not torch.equal(old, new) for old, new in zip(before, layer.parameters(), strict=True))
    assert (layer.population.updates == 1).all()

    # Mixed precision: the same numbers as without, in the input's type.
    low = x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = copy.deepcopy(layer)(low)
    assert torch.equal(mixed, copy.deepcopy(layer)(low))

    # A mask hides what it hides, in both modes; a full one hides nothing.
    real = torch.rand(len(x), *positions) < 0.7
    real.view(-1)[0] = True
    hidden = ~real.unsqueeze(layer.channel_dim if layer.channel_dim > 0 else -1).expand(x.shape)
    for training in (True, False):
        twin = copy.deepcopy(layer).train(training)
        assert (twin(x.masked_fill(hidden, float("nan")), real)[hidden] == 0).all()
        torch.testing.assert_close(twin(x, torch.ones_like(real)), twin(x), atol=1e-5, rtol=1e-5)

    # Saved, pickled, copied and rebuilt, it is the same layer.
    rebuilt = variant(shape, option)
    rebuilt.load_state_dict(layer.state_dict())
    for other in (rebuilt, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        for config in StatisticsConfig.all():
            layer.config = other.config = config
            assert torch.equal(other.eval()(x), layer.eval()(x))
        assert torch.equal(other.train()(x), copy.deepcopy(layer).train()(x))
    layer.config = "TTFF"

    # A single sample, in training and after it, in all 16 configurations.
    lonely = variant(shape, option)
    for _ in range(3):
        assert lonely(batch(shape, n=1)).isfinite().all()
    lonely.eval()
    for config in StatisticsConfig.all():
        lonely.config = config
        y = lonely(batch(shape, n=1))
        assert y.isfinite().all()
        assert y.abs().max() > 0.01, f"{config} maps a single sample to nothing"

    # Traced by a compiler whole, it computes the same, up to the order of sums of a few units in float32.
    torch.compiler.reset()
    traced = torch.compile(copy.deepcopy(layer).train(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(traced(x), copy.deepcopy(layer).train()(x), atol=1e-5, rtol=1e-5)

    # Reset, it is as new.
    layer.reset_parameters()
    fresh = variant(shape, option)
    fresh(x)
    bln.reset_statistics(fresh)
    for name, value in fresh.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value), name
