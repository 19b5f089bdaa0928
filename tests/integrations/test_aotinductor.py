"""Compiled ahead of time by AOTInductor, and loaded as a library."""

import shutil

import pytest
import torch
from torch import nn
from torch._inductor import aoti_compile_and_package, aoti_load_package

import bln
from bln import BatchLayerNorm, StatisticsConfig

CONFIGS = [*map(str, StatisticsConfig.all()), "16 4 F 2"]
FORMS = ({}, {"per_position": False}, {"groups": 2}, {"groups": 3, "per_position": True})


class EveryConfiguration(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(BatchLayerNorm(6, config=config, **form) for config in CONFIGS for form in FORMS)

    def forward(self, x):
        return [layer(x) for layer in self.layers]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's exporter, of torch itself
@pytest.mark.parametrize("frozen", [False, True])
def test_compiled_ahead_of_time_at_any_batch_size(tmp_path, frozen):
    """Every configuration of every form in one library; the other is what bln.freeze leaves."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.fail("AOTInductor takes a C++ compiler, and there is none: apt-get install g++")
    model = EveryConfiguration()
    for _ in range(3):
        model(torch.randn(5, 6, 4))
    model.eval()
    if frozen:
        bln.configure(model, "TTTT")
        bln.freeze(model)
        assert not bln.layers(model)
    program = torch.export.export(model, (torch.randn(3, 6, 4),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    library = aoti_load_package(aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2")))
    for n in (1, 2, 9):
        x = torch.randn(n, 6, 4)
        for config, y, expected in zip([c for c in CONFIGS for _ in FORMS], library(x), model(x), strict=True):
            # fused in another order, sums of up to 36 terms
            torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5, msg=lambda text, c=config: f"{c}: {text}")
