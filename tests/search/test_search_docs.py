"""The docs page runs as it stands, and its example too."""

import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/search.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) >= 10
    names = {}
    for block in blocks:
        exec(compile(block, "docs/search.md", "exec"), names)
    assert {path.name for path in tmp_path.iterdir()} == {"search.json", "search.csv", "study.db"}
    assert "E_B = F makes a prediction depend" in capsys.readouterr().out


def test_the_example_draws_its_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["search_digits.py", "--picture", str(tmp_path / "search.png")])
    runpy.run_path(str(ROOT / "examples/search_digits.py"), run_name="__main__")
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
    tested = float(capsys.readouterr().out.split("tests at ")[1])
    assert tested > 0.85  # .926 where this was written; a tenth of that is chance
