"""What is said of installing holds: commands, extras, versions."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import bln
from bln._install import install

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXTS = [
    path
    for folder in ("src", "docs", "examples", ".")
    for path in (ROOT / folder).glob("*" if folder == "." else "**/*")
    if path.suffix in (".py", ".md", ".ipynb")
]
COMMAND = re.compile(r"""pip install (?:-\S+ )*\\?["']?([\w.-]*)\[([\w,]+)\]""")
COMMANDS = [(path, *found) for path in TEXTS for found in COMMAND.findall(path.read_text(encoding="utf-8"))]


def test_every_command_installs_what_can_be_had():
    """A checkout, until the distribution is published."""
    source, _ = COMMAND.match(install("keras")).groups()
    assert len(COMMANDS) > 8
    for path, given, extras in COMMANDS:
        assert given == source, path
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), path


@pytest.mark.parametrize(
    "extra", ["experiments", "search", "keras", "flax", "ray", "onnx", "lightning", "transformers"]
)
def test_the_page_says_what_an_extra_takes(extra):
    assert f"| `{extra}` |" in (ROOT / "docs/install.md").read_text(encoding="utf-8")
    assert extra in PROJECT["optional-dependencies"]


@pytest.mark.parametrize(("framework", "library"), [("keras", "keras"), ("flax", "jax")])
def test_a_framework_that_is_missing_is_named_without_numpy_too(framework, library):
    """Torch alone brings no NumPy."""
    script = f"import sys; sys.modules.update(dict.fromkeys(['numpy', '{library}'])); import bln.{framework}"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].endswith(install(framework))


@pytest.mark.parametrize(
    ("file", "pattern"), [("CITATION.cff", r"^version: (\S+)$"), ("README.md", r"^  version = \{(\S+)\},$")]
)
def test_citations_name_this_version(file, pattern):
    assert re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE) == [bln.__version__]
