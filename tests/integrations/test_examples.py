"""The examples that need more than torch, from top to bottom, and what they print at the end."""

import json
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
    run_notebook(name, tmp_path, monkeypatch)
    assert re.findall(r"test accuracy ([\d.]+)", capsys.readouterr().out)[-1] == found[0]


def run_notebook(name, folder, monkeypatch):
    """Run the cells of the same program as a notebook."""
    notebook = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(folder)
    namespace = {"__name__": "notebook"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), name, "exec"), namespace)
