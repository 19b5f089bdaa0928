"""The table of runs, ``runs.jsonl``: a line for each run of any experiment. Reports are made from it alone.

Every line has ``task``, ``norm``, ``batch_size``, ``seed``, ``status``, ``hours``, ``commit``, ``versions`` and
``device``. What else decides the run and what came out of it depends on the task.
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
    """Return the lines of a table; none if there is none yet. A last line that was cut off is left out."""
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
