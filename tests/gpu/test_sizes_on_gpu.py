"""Accuracy against batch size on a GPU: captured is what it is eagerly, and side by side what it is alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bln.experiments import steps, table
from bln.experiments.sizes import study
from bln.experiments.sizes.study import Cell
from bln.experiments.sizes.tasks import IMAGES
from bln.experiments.sizes.training import Run, Training, finish

CUDA = torch.device("cuda")
RUN = Run("digits-resnet", "bn", 8, 0.005, 0, 80, 2)
ROUNDING = 1e-3
"""Of losses after twenty steps: TF32 convolutions differ with the algorithm that is taken."""


def losses(rows):
    return torch.tensor([row["curves"]["train_loss"] for row in rows])


def in_lane(group):
    with study.lane(CUDA)():
        return finish(Training(group, Path(), CUDA).run())


@pytest.mark.parametrize("norm", IMAGES)
def test_captured_is_eager_and_together_is_alone(monkeypatch, norm):
    group = [replace(RUN, norm=norm, seed=seed) for seed in range(3)]
    captured = in_lane(group)
    alone = [in_lane([each])[0] for each in group]
    torch.testing.assert_close(losses(captured), losses(alone), atol=ROUNDING, rtol=ROUNDING)
    monkeypatch.setattr(steps, "_EAGER", 10**9)
    torch.testing.assert_close(losses(captured), losses(in_lane(group)), atol=ROUNDING, rtol=ROUNDING)
    assert all(row["memory_mib"] > 0 for row in captured)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("norm", IMAGES)
def test_no_step_waits_for_the_device(norm):
    with study.lane(CUDA)():
        work = Training([replace(RUN, norm=norm)], Path(), CUDA)
        work.begin(1)
        work.advance()  # compiles kernels
        torch.cuda.set_sync_debug_mode("error")
        try:
            work._step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_study_side_by_side(tmp_path):
    cells = [Cell("digits-resnet", norm, size, 80, 1, 2, 1) for norm in ("bn", "bln-grouped") for size in (1, 8)]
    found = study.estimate(cells, tmp_path, Path(), CUDA)
    assert found.memory > 0
    rows = table.read(study.study(cells, tmp_path, Path(), device=CUDA))
    assert len(rows) == 4 * 4
    assert {row["status"] for row in rows} == {"finished"}
