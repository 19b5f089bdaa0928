"""The wheel as users get it: installed into an environment with nothing else, imported, typed."""

import email
import json
import os
import re
import subprocess
import sys
import tarfile
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
EXAMPLE = Path(__file__).with_name("typed_example.py")
# A checkout on the path would be tested in place of the wheel.
CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}


def run(*command, cwd, check=True):
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=CLEAN, text=True, capture_output=True)
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder for all test processes, so that torch is installed once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "packaging"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def built(shared):
    """The wheel, made from the sdist as an installer would, and the sdist."""
    folder = shared / "dist"
    with FileLock(shared / "dist.lock"):
        if not folder.exists():
            run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=shared)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="session")
def python(built, shared):
    """The interpreter of an environment with the wheel, torch, and nothing that torch does not need."""
    python = shared / "venv/bin/python"
    with FileLock(shared / "venv.lock"):
        if not python.exists():
            venv.create(shared / "venv", with_pip=True)
            constraints = ROOT / "constraints.txt"
            run(python, "-m", "pip", "install", "--quiet", "--constraint", constraints, built[0], cwd=shared)
    return python


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_every_module_and_the_marker_for_type_checkers(built):
    with zipfile.ZipFile(built[0]) as archive:
        names = set(archive.namelist())
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/bln").rglob("*.py")}
    assert modules <= names
    assert "bln/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"bln", *(n.split("/")[0] for n in names if ".dist-info" in n)}


def test_the_sdist_holds_the_sources_and_nothing_that_was_built(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/bln/py.typed", "tests/oracle.py", "constraints.txt"} <= names
    assert not [name for name in names if re.match(r"\.venv|site/|dist/|build/|out/|data/|\.git/", name)]


def test_it_needs_torch_alone(built):
    required = metadata(built[0]).get_all("Requires-Dist")
    assert [line for line in required if "extra ==" not in line] == ["torch>=2.6"]


def test_it_imports_in_a_clean_environment_and_brings_no_extra(python, tmp_path):
    code = textwrap.dedent(
        """
        import importlib.metadata, importlib.util, json, bln
        extras = ("rich", "pandas", "optuna", "sklearn", "scipy", "matplotlib", "keras", "jax", "onnx", "lightning")
        print(json.dumps({
            "file": bln.__file__, "version": bln.__version__,
            "metadata": importlib.metadata.version("batch-layer-norm"),
            "found": [name for name in extras if importlib.util.find_spec(name)],
            "missing": [name for name in bln.__all__ if not hasattr(bln, name)],
        }))
        """
    )
    seen = json.loads(run(python, "-c", code, cwd=tmp_path).stdout)
    assert Path(seen["file"]).is_relative_to(python.parents[1])
    assert seen["version"] == seen["metadata"]
    assert seen["found"] == seen["missing"] == []


def test_a_users_program_runs_there(python, tmp_path):
    """Training, calibration, search, conversion, insertion and freezing, with torch alone."""
    assert "bln.freeze:" in run(python, "-W", "error::DeprecationWarning", EXAMPLE, cwd=tmp_path).stdout


OPTIONAL = {
    "sampler": "bln.search(net, data, loss=loss, sampler='tpe', per_layer=True, progress=False)",
    "dataframe": "bln.search(net, data, loss=loss, progress=False).to_dataframe()",
    "lightning": "bln.callbacks.LightningReset()",
    "transformers": "bln.callbacks.TrainerReset()",
}


@pytest.mark.parametrize("part", OPTIONAL)
def test_an_optional_part_names_the_extra_to_install(part, python, built, tmp_path):
    code = textwrap.dedent(
        f"""
        import torch, bln
        from torch import nn
        net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), bln.BatchLayerNorm(3), nn.Tanh(), bln.BatchLayerNorm(3))
        net(torch.randn(5, 3))
        data, loss = [(torch.randn(4, 3), torch.randint(3, (4,)))], nn.functional.cross_entropy
        try:
            {OPTIONAL[part]}
        except ImportError as error:
            print(error)
        """
    )
    printed = run(python, "-c", code, cwd=tmp_path).stdout
    named = re.search(r'pip install "[.\w-]+\[(\w+)\]"', printed)
    assert named, printed
    assert named[1] in metadata(built[0]).get_all("Provides-Extra")


def check_types(checker, python, file):
    if checker == "mypy":
        options = ["--strict", "--python-executable", python, "--cache-dir", file.parent / "cache"]
    else:
        options = ["--pythonpath", python]
    return run(sys.executable, "-m", checker, *options, file, cwd=file.parent, check=False)


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_users_program_passes_strict_type_checks_against_the_installed_package(checker, python, tmp_path):
    file = tmp_path / "program.py"
    strict = "# pyright: strict\n" if checker == "pyright" else ""
    file.write_text(strict + EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    done = check_types(checker, python, file)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
@pytest.mark.parametrize(
    "mistake", ["bln.BatchLayerNorm('8')", "bln.freeze(torch.nn.Linear(2, 2)).report", "bln.StatisticsConfig.parse(3)"]
)
def test_mistakes_are_found(checker, mistake, python, tmp_path):
    """So the types are there: without py.typed everything would be Any."""
    file = tmp_path / "mistake.py"
    file.write_text(f"import torch\nimport bln\n\nvalue: int = {mistake}\n", encoding="utf-8")
    done = check_types(checker, python, file)
    assert done.returncode == 1
    assert "mistake.py:4" in done.stdout
