"""Write the examples as notebooks: ``python docs/_notebooks.py``, or ``make tables``.

The docstring becomes text. Imports and constants, each function, and each paragraph of ``main`` become cells. A test
compares the notebooks with the programs.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("finetune_resnet", "timm_net", "padded_transformer", "adapt_to_shift", "freeze_and_export")


def notebook(source: str) -> str:
    """Return the notebook of a program."""
    title, _, text = ast.get_docstring(ast.parse(source)).partition("\n")
    text = re.sub(r"^ +python .*\n", "", text, flags=re.MULTILINE)
    cells = [{"cell_type": "markdown", "source": f"# {title.rstrip('.')}\n\n{text.strip()}"}]
    cells += [{"cell_type": "code", "execution_count": None, "outputs": [], "source": code} for code in _code(source)]
    for number, cell in enumerate(cells):
        cell |= {"id": f"cell-{number}", "metadata": {}, "source": cell["source"].splitlines(keepends=True)}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _code(source: str) -> Iterator[str]:
    """Yield the cells of code."""
    body = ast.parse(source).body
    lines = source.splitlines()
    first = next(at for at, node in enumerate(body) if not isinstance(node, ast.Expr)) + 1  # after __future__
    starts = [_start(node) for node in body[first:]]
    statements: list[str] = []  # outside of functions
    for node, (begin, end) in zip(body[first:], pairwise([*starts, len(lines)]), strict=True):
        text = "\n".join(lines[begin:end]).rstrip()
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If):
            statements.append("\n".join(lines[begin:end]))
            continue
        if statements:
            yield "\n".join(statements).strip()
            statements = []
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            yield from _main(node, source)
        elif not isinstance(node, ast.If):  # the one that calls main
            yield text


def _start(node: ast.stmt) -> int:
    """Return the first line of a statement, its decorators included."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))]) - 1


def _main(node: ast.FunctionDef, source: str) -> Iterator[str]:
    """Yield the values of the arguments of ``main``, then its paragraphs."""
    for argument, value in zip(node.args.args, node.args.defaults, strict=True):
        yield f"{argument.arg} = {ast.get_source_segment(source, value)}"
    text = textwrap.dedent("\n".join(source.splitlines()[node.body[0].lineno - 1 : node.end_lineno]))
    yield from re.split(r"\n\n(?=\S)", text)


if __name__ == "__main__":
    for name in NAMES:
        text = notebook((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
        (EXAMPLES / f"{name}.ipynb").write_text(text, encoding="utf-8")
