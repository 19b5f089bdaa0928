"""The page on deployment, from top to bottom, with the blocks that need more than torch."""

import re
import warnings
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/deployment.md"


def test_every_block_runs_also_those_that_need_an_extra(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^```python( title=[^\n]*)?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert sum(bool(title) for title, _ in found) == 6
    namespace: dict[str, object] = {"__name__": "page"}
    for number, (title, block) in enumerate(found, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("default" if title else "error")  # other packages warn of each other
            exec(compile(block, f"{PAGE.name}, block {number}", "exec"), namespace)
