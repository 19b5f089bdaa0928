"""Format the result of a search as a table of plain text. Imports no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .result import Row, SearchResult

_SHOWN = 3
"""Combinations of layers in the table; all of them are in the exports."""
_HEADINGS = {"shuffled": "reshuffled", "sorted": "sorted by label", "single": "one at a time"}


def text(result: SearchResult) -> str:
    """Return a title, a line of aligned cells for each row, and the notes."""
    metrics = list(result.rows[0].metrics)
    orders = next((list(row.rebatched) for row in result.rows if row.rebatched), [])
    calibrated = any(row.uncalibrated for row in result.rows)
    best = None if result.all_nan else result.best

    def cells(rank: int, row: Row) -> list[str]:
        label = "per layer" if row.per_layer and len(row.label) > 24 else row.label
        row_cells = [f"{rank}{' *' * (row is best)}", label, _number(row.loss, row.loss_error)]
        row_cells += [_number(row.metrics[name], row.metrics_error[name]) for name in metrics]
        if calibrated:
            before = row.uncalibrated
            row_cells.append(f"{before.loss:.4f} ({row.loss - before.loss:+z.4f})" if before else "")
        for name in orders:
            row_cells.append(_moves(row, name) + " !" * (name in row.collapses) if row.rebatched else "")
        return row_cells

    columns = ["", "config", "loss", *metrics, *["loss before calibration"] * calibrated]
    lines, combinations = [columns + [_HEADINGS[name] for name in orders]], 0
    for rank, row in enumerate(result.rows, 1):
        combinations += row.per_layer
        if not row.per_layer or combinations <= _SHOWN or row is best:
            lines.append(cells(rank, row))
    hidden = len(result) - len(lines) + 1

    by = "loss of the worst order of samples" if result.robust else "loss"
    title = (
        f"Configurations E_B Std_B E_F Std_F by {by} ({result.samples} samples in {result.batches} batches, "
        f"{result.mode}; T population, F current mini-batch)"
    )
    notes = [result.why, *result.notes] if result.why else list(result.notes)
    if orders:
        moves = " / ".join(["loss", *metrics])
        notes.insert(0, f"The last {len(orders)} columns say how far {moves} move; ! marks a collapse.")
    for config in [row.config for row in result.rows if isinstance(row.config, dict)][:1]:
        chosen = ", ".join(f"{name} {of_layer}" for name, of_layer in config.items())
        notes.append(f"The combination of layers with the lowest loss: {chosen}.")
    if hidden:
        notes.append(f"{hidden} more combinations are in result.rows.")

    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    aligned = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([title, "", *aligned, "", *(f"- {note}" for note in notes)])


def _number(value: float, error: float) -> str:
    return f"{value:.4f}" if math.isnan(error) else f"{value:.4f} ± {error:.4f}"


def _moves(row: Row, order: str) -> str:
    """Return how far loss and metrics move in another order of samples."""
    other = row.rebatched[order]
    moves = [other.loss - row.loss, *(other.metrics[name] - value for name, value in row.metrics.items())]
    return " / ".join(f"{move:+z.3f}" for move in moves)
