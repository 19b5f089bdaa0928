"""The table of runs, ``runs.jsonl``: a line for each run of any experiment, from which all reports are made.

Every line has ``task``, ``norm``, ``batch_size``, ``seed``, ``status``, ``hours``, ``commit``, ``versions`` and
``device``. Its other settings and its results depend on the task.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import runs

Row = dict[str, Any]
NAME = "runs.jsonl"


def read(path: Path) -> list[Row]:
    """Return the lines of a table; none if the file is missing. A last line that was cut off is left out."""
    if not path.exists():
        return []
    try:
        lines = path.read_text("utf-8").splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        for row in rows:
            row["task"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a table of runs: {error}; `bln reproduce` writes one") from None
    return rows


def write(path: Path, rows: Iterable[Row]) -> Path:
    """Write a table, whole or not at all, and return its path."""
    runs.write(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return path


def distinct(values: Iterable[Any]) -> list[str]:
    """Return each value once, as sorted text; empty ones are left out."""
    return sorted({str(value) for value in values if value})
