"""The example behind the picture of the docs page; the page itself runs in tests/test_docs.py."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_draws_its_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["search_digits.py", "--picture", str(tmp_path / "search.png")])
    runpy.run_path(str(ROOT / "examples/search_digits.py"), run_name="__main__")
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
    tested = float(capsys.readouterr().out.split("tests at ")[1])
    assert tested > 0.85  # .926 where this was written; a tenth of that is chance
