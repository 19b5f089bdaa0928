"""Every Python block of the README and the docs runs, page by page, from top to bottom.

What is for several processes runs there, in tests/distributed.
"""

import json
import re
import warnings
from pathlib import Path

import matplotlib
import pytest

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"frameworks.md", "distributed.md"}  # tests/integrations and tests/distributed run them
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p) and p.name not in ELSEWHERE], ids=lambda p: str(p.relative_to(ROOT))
)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(blocks(page), 1):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


def test_the_notebook_runs(tmp_path, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    namespace: dict[str, object] = {"__name__": "notebook"}
    for number, cell in enumerate(cells, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")
            exec(compile(cell, f"quickstart.ipynb, cell {number}", "exec"), namespace)


def test_the_readme_example_is_short():
    (example,) = blocks(ROOT / "README.md")
    assert len(example.strip().splitlines()) <= 18
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 15


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_no_machine_paths_in_the_repository():
    tracked = [p for folder in ("src", "docs", "tests", "benchmarks", "examples") for p in (ROOT / folder).rglob("*.*")]
    for path in tracked:
        if path.suffix in (".py", ".md", ".json", ".csv", ".toml"):
            assert "/work" + "/main" not in path.read_text(encoding="utf-8"), path
