"""The report of reproduced experiments, made from a summary alone.

:func:`write` makes one HTML page that needs nothing else, and its figures as files; :func:`table` is for terminals.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from . import page, terminal
except ImportError as error:
    from ..._install import install

    raise ImportError(f"the report needs {error.name}, which is not installed: {install('experiments')}") from error
from .summary import read

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["table", "write"]


def write(summary: Mapping[str, Any], folder: Path | str) -> Path:
    """Write ``report.html`` and ``figures/`` (each figure as PNG and SVG).

    Args:
        summary: What :func:`.summary.collect` makes of a table of runs. The page says what is missing.
        folder: Where to write; it is made if it is not there.

    Returns:
        The path of ``report.html``.

    Raises:
        ValueError: If the summary is of another format, or broken; the message says where, and what to do.
    """
    runs = read(summary)
    folder = Path(folder)
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    text, plots = page.make(runs)
    for plot in plots:
        plot.save(figures)
    path = folder / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


def table(summary: Mapping[str, Any]) -> Group:
    """Results and verdicts in short, for ``rich.print``."""
    return terminal.table(read(summary))
