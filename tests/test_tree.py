"""The list of files in CONTRIBUTING.md. ``python tests/test_tree.py`` writes it anew."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BLOCK = re.compile(r"(?<=<!-- files -->\n\n```\n).*?(?=```\n)", re.S)


def files() -> str:
    """Each file with the first line of its docstring, files before folders."""
    package = ROOT / "src" / "bln"
    found = sorted(path.relative_to(package) for path in package.rglob("*.py"))
    lines = []
    for path in sorted(found, key=lambda path: (len(path.parts) > 1, path.as_posix())):
        told = ast.get_docstring(ast.parse((package / path).read_text(encoding="utf-8")))
        assert told, f"{path} has no docstring"
        lines.append(f"{path.as_posix():36} {told.splitlines()[0].replace('``', '')}\n")
    return "".join(lines)


def test_contributing_lists_every_file():
    (listed,) = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert listed == files(), "CONTRIBUTING.md is out of date: run python tests/test_tree.py"


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: files(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
