"""What `benchmarks/layer.py` does besides measuring."""

import importlib.util
from pathlib import Path

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def layer():
    path = Path(__file__).parents[1] / "benchmarks" / "layer.py"
    spec = importlib.util.spec_from_file_location("layer_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("size", [3000, 20000])  # fewer values than the programs have room for, and more
def test_two_sweeps_read_and_write_everything(layer, size):
    x, dy = torch.randn(2, size, device=DEVICE)
    y, sums = torch.full_like(x, torch.nan), torch.full((4,), torch.nan, device=DEVICE)
    for gradient, expected in ((None, x), (dy, x + dy)):
        layer.two_sweeps(x, gradient, y, sums)
        assert torch.equal(y, expected)
        bound = size * torch.finfo(torch.float32).eps * expected.abs().sum().item()  # in whatever order
        assert abs(sums.sum().item() - expected.double().sum().item()) <= bound


def test_ratios_stand_beside_the_last_recorded_ones(layer, tmp_path):
    row = {"shape": "4, -, 8", "layout": "features last", "type": "float32", "BLN forward": 1.5, "BN forward": 3.0}
    layer.write([row], tmp_path)
    before = layer.recorded(tmp_path / "layer.csv")
    again = layer.line(row | {"BLN forward": 1.25, "BN forward": 2.0, "inference": 1.1}, before)
    assert "| 1.25 (1.5) |" in again
    assert "| 2.0 |" in again  # not ours
    assert "| 1.1 |" in again  # not there before
    assert "(" not in layer.line(row | {"type": "bfloat16"}, before)
    assert layer.recorded(tmp_path / "none.csv") == {}


def test_recorded_rows_are_shapes_of_the_benchmark(layer):
    shapes = {f"{n}, {'x'.join(map(str, positions)) or '-'}, {c}" for n, positions, c in layer.SHAPES}
    recorded = layer.recorded()
    assert recorded
    assert {row["shape"] for row in recorded.values()} <= shapes
