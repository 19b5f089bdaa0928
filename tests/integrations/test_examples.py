"""The examples that need more than torch, from top to bottom, and what they print at the end."""

import re
import runpy
import sys
from pathlib import Path

import pytest

import timm_models  # timm_net.py then finds timm, also without torchvision

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize(
    ("name", "least", "shown"),
    [("finetune_resnet", 0.9, 2), ("timm_net", 0.9, 1), ("freeze_and_export", 0.9, 1)],
)
def test_an_example_ends_with_its_result(name, least, shown, tmp_path, monkeypatch, capsys):
    assert timm_models.timm
    monkeypatch.setattr(sys, "argv", [name, *(["--folder", str(tmp_path)] if name == "freeze_and_export" else [])])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    found = re.findall(r"test accuracy ([\d.]+)", printed.strip().splitlines()[-1])
    assert len(found) == 1
    assert len(re.findall("test accuracy", printed)) == shown
    assert float(found[0]) > least
