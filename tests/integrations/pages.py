"""Running what users would run, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _run(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_example(name: str) -> None:
    shown = _run(str(ROOT / "examples" / name))
    accuracy = re.search(r"test accuracy ([\d.]+)", shown)
    assert accuracy, shown
    assert float(accuracy[1]) > 0.9  # of ten digits


def check_lazy(name: str) -> None:
    _run("-c", f"import sys, bln; assert {name!r} not in sys.modules; bln.{name}; assert {name!r} in sys.modules")


def check_missing(name: str, missing: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
import bln, bln._install
try:
    bln.{name}
except ImportError as error:
    assert bln._install.install({name!r}) in str(error), error
else:
    raise AssertionError
"""
    _run("-c", code)
