"""Exported to ONNX and run by onnxruntime, the layer computes what it does in torch, at any batch size."""

import io
import runpy
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.export import Dim

import bln
from bln import BatchLayerNorm, StatisticsConfig
from cases import remembered
from tolerance import close, output

CONFIGS = [*map(str, StatisticsConfig.all()), "16 4 F 2"]
NEWEST = 23  # the newest opset torch.onnx writes
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # torch's exporter, of torch itself
    pytest.mark.filterwarnings("ignore:# The axis name. batch will not be used:UserWarning"),  # two inputs share it
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # onnxscript and torch's exporter, of each other
]


class EveryConfiguration(nn.Module):
    """A layer for each, side by side, so that one export covers them all."""

    def __init__(self, features, **options):
        super().__init__()
        self.layers = nn.ModuleList(BatchLayerNorm(features, config=config, **options) for config in CONFIGS)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x, mask=None):
        return tuple(layer(x, mask) for layer in self.layers)


def exported(model, args, dynamic_shapes, **options):
    """An onnxruntime session, and the kinds of nodes it runs."""
    program = torch.onnx.export(model, args, dynamo=True, dynamic_shapes=dynamic_shapes, verbose=False, **options)
    file = io.BytesIO()
    program.save(file)
    proto = onnx.load_from_string(file.getvalue())
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])

    def run(*inputs):
        names = [value.name for value in session.get_inputs()]
        return session.run(None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)})

    return run, proto


def masks(n, *positions):
    mask = torch.rand(n, *positions) < 0.7
    mask[0] = True
    return mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("per_position", [True, False])
@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("positions", [(), (4,), (3, 2)], ids=str)
def test_every_configuration_at_batch_sizes_other_than_the_exported_one(per_position, groups, masked, positions):
    channel_dim = -1 if len(positions) == 1 else 1
    axes = (*positions, 6) if channel_dim == -1 else (6, *positions)
    model = EveryConfiguration(6, groups=groups, per_position=per_position, channel_dim=channel_dim)
    for _ in range(3):
        model(torch.randn(5, *axes) * 2 + 1)
    model.eval()
    batch = Dim("batch")
    args = (torch.randn(3, *axes), masks(3, *positions)) if masked else (torch.randn(3, *axes),)
    run, proto = exported(model, args, tuple({0: batch} for _ in args))
    assert not any("Normalization" in node.op_type for node in proto.graph.node)  # nothing that could be in training

    for n in (1, 2, 7):
        x = torch.randn(n, *axes) * 2 + 1
        mask = masks(n, *positions) if masked else None
        with torch.no_grad():
            ours = model(x, mask)
        theirs = run(x, mask) if masked else run(x)
        rows = x.double().movedim(channel_dim, -1).numpy()
        for config, layer, y, expected in zip(CONFIGS, model.layers, theirs, ours, strict=True):
            population = remembered(layer)
            gamma, beta = layer.weight.detach().double().numpy(), layer.bias.detach().double().numpy()
            options = {"eps": 1e-4, "mix_eps": layer.mix_eps, "dim_scale": layer.dim_scale, "groups": groups}
            truth = population.infer(
                rows,
                config,
                gamma,
                beta,
                mask=None if mask is None else mask.numpy(),
                per_position=per_position,
                **options,
            )
            # A current variance may be next to 0, the population's never is: eps bounds both.
            var_F = np.zeros(groups or ())
            bound = output(rows, truth, 0, var_F, population.inverse_m, gamma, beta, torch.float32, **options)
            y = np.moveaxis(y, channel_dim, -1)
            close(y, truth, bound, f"{config}, {n} samples, against the oracle")
            close(y, expected.double().movedim(channel_dim, -1).numpy(), 2 * bound, f"{config}, {n} samples")


@pytest.mark.parametrize("config", ["TTTT", "TTFF", "FFFF"])
@pytest.mark.parametrize("options", [{"position_shape": 9}, {"groups": 2}], ids=["published", "grouped"])
def test_the_newest_opset_and_the_length_of_sequences(config, options):
    """Shorter sequences use the first positions, in onnxruntime too."""
    layer = BatchLayerNorm(6, config=config, channel_dim=-1, **options)
    layer(torch.randn(5, 9, 6))
    layer.eval()
    shapes = ({0: Dim("batch"), 1: Dim("length", max=9)},)
    run, proto = exported(layer, (torch.randn(3, 7, 6),), shapes, opset_version=NEWEST)
    assert proto.opset_import[0].version == NEWEST
    for n, length in ((1, 9), (4, 2), (2, 7)):
        x = torch.randn(n, length, 6)
        torch.testing.assert_close(torch.from_numpy(run(x)[0]), layer(x).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("groups", [None, 2], ids=["published", "grouped"])
def test_a_frozen_net_is_exported_without_a_trace_of_the_layer(groups):
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Tanh(), BatchLayerNorm(4, groups=groups), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(),
        BatchLayerNorm(8, groups=groups), nn.Linear(8, 2),
    )  # fmt: skip
    net(torch.randn(5, 3, 6, 6))
    bln.configure(net, "TTTT")
    x = torch.randn(7, 3, 6, 6)
    expected = net.eval()(x).detach()
    example = torch.randn(3, 3, 6, 6)
    run, proto = exported(bln.freeze(net, example), (example,), ({0: Dim("batch")},))
    assert {node.op_type for node in proto.graph.node} <= {"Conv", "Tanh", "Reshape", "Flatten", "Gemm"}
    torch.testing.assert_close(torch.from_numpy(run(x)[0]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_a_map_that_was_kept_is_a_product_and_a_sum(masked):
    layer = BatchLayerNorm(4, config="TTTT", channel_dim=-1)
    layer(torch.randn(5, 6, 4))
    affine = bln.freeze(layer)
    batch = Dim("batch")
    args = (torch.randn(3, 6, 4), masks(3, 6)) if masked else (torch.randn(3, 6, 4),)
    run, proto = exported(affine, args, tuple({0: batch} for _ in args))
    assert [node.op_type for node in proto.graph.node if node.op_type in ("Mul", "Add", "Sub", "Div")] == ["Mul", "Add"]
    for n in (1, 5):
        x, mask = torch.randn(n, 6, 4), masks(n, 6)
        y = run(x, mask) if masked else run(x)
        torch.testing.assert_close(torch.from_numpy(y[0]), affine(x, mask if masked else None), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("groups", [None, 2])
def test_residuals_and_activations(activation, groups):
    layer = BatchLayerNorm(6, groups=groups, activation=activation)
    layer(torch.randn(5, 6, 4))
    layer.eval()
    batch = Dim("batch")
    args = (torch.randn(3, 6, 4), masks(3, 4), torch.randn(3, 6, 4))
    run, _ = exported(layer, args, tuple({0: batch} for _ in args))
    for n in (1, 7):
        given = torch.randn(n, 6, 4), masks(n, 4), torch.randn(n, 6, 4)
        with torch.no_grad():
            expected = layer(*given)
        # A dozen operations in float32, on values of a few units.
        torch.testing.assert_close(torch.from_numpy(run(*given)[0]), expected, atol=1e-5, rtol=1e-5)


def test_the_example_writes_a_file_that_takes_any_batch_size(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["freeze_and_export.py", "--folder", str(tmp_path)])
    runpy.run_path(str(Path(__file__).parents[2] / "examples/freeze_and_export.py"), run_name="__main__")
    session = onnxruntime.InferenceSession(tmp_path / "digits.onnx", providers=["CPUExecutionProvider"])
    program = torch.export.load(tmp_path / "digits.pt2").module()
    for n in (1, 9):
        x = torch.randn(n, 1, 8, 8)
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), program(x).detach(), atol=1e-5, rtol=1e-5)
