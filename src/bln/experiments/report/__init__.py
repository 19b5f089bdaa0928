"""Reports: of the paper's experiments here, of the study of batch sizes in `sizes`, of shifted data in `shift`.

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
from .markup import save
from .summary import read

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["table", "write"]


def write(summary: Mapping[str, Any], folder: Path | str) -> Path:
    """Write ``report.html`` and its ``figures/``, each as PNG and SVG.

    Args:
        summary: From :func:`.summary.collect`. The page lists the runs that are missing.
        folder: Where to write; created where missing.

    Returns:
        The path of ``report.html``.

    Raises:
        ValueError: If the summary is of another format, or broken; the message says where, and what to do.
    """
    text, plots = page.make(read(summary))
    return save(Path(folder) / "report.html", text, plots)


def table(summary: Mapping[str, Any]) -> Group:
    """Return results and verdicts in short, for ``rich.print``."""
    return terminal.table(read(summary))
