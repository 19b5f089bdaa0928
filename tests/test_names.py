"""What ``import bln`` gives: names that are looked up when they are asked for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bln


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_type_checkers_are_told_what_python_finds():
    tree = ast.parse(Path(bln.__file__).read_text(encoding="utf-8"))
    (told,) = [node for node in tree.body if isinstance(node, ast.If)]
    found = {alias.name: node.module for node in told.body for alias in node.names}
    submodules = {name for name, module in found.items() if module is None}
    assert submodules == {"callbacks", "functional"}
    assert {name: module for name, module in found.items() if module} == bln._MODULE_OF
    assert sorted(found) == sorted(bln.__all__)
    assert set(bln.__all__) <= set(dir(bln))


def test_importing_bln_imports_neither_torch_nor_numpy_and_a_name_does():
    assert run(
        "import sys, bln; print({'torch', 'numpy'} & sys.modules.keys());"
        "bln.StatisticsConfig.parse('TTFF'); print('torch' in sys.modules);"
        "layer = bln.BatchLayerNorm(2); print('torch' in sys.modules, type(layer).__module__)"
    ).split("\n")[:3] == ["set()", "False", "True bln.layer"]


def test_every_name_can_be_imported_at_once():
    run("from bln import *; convert, search, callbacks.reset_each_epoch, StatisticsConfig")


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'bln' has no attribute 'BatchLayerNrom'"):
        bln.BatchLayerNrom  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'BatchLayerNrom'"):
        from bln import BatchLayerNrom  # noqa: F401


def test_a_module_that_fails_to_import_says_so_itself(monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text("import a_module_that_nobody_has\n", encoding="utf-8")
    monkeypatch.setattr(bln, "__path__", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        bln.broken  # noqa: B018


def test_a_compiled_function_may_be_the_first_to_ask():
    run(
        "import torch, bln\n"
        "@torch.compile(fullgraph=True, backend='eager')\n"
        "def f(x): return bln.functional.batch_layer_norm(x)\n"
        "x = torch.randn(4, 3)\n"
        "torch.testing.assert_close(f(x), bln.functional.batch_layer_norm(x))\n"
    )
