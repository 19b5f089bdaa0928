"""A search's result as a table: plain text, rich, HTML. Imports no torch."""

from __future__ import annotations

import html as escaping
import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .result import Row, Score, SearchResult

_SHOWN = 3
"""Combinations of layers in the table; all of them are in the exports."""
_HEADINGS = {"shuffled": "reshuffled", "sorted": "sorted by label", "single": "one at a time"}


class _Table(NamedTuple):
    title: str
    columns: list[str]
    rows: list[tuple[list[str], str]]
    """The cells and rich's style."""


def _number(value: float, error: float = math.nan) -> str:
    number = "NaN" if math.isnan(value) else f"{value:.4f}"
    return number if math.isnan(value) or math.isnan(error) else f"{number} ± {error:.4f}"


def _move(given: Score, other: Score) -> str:
    moves = [other.loss - given.loss, *(other.metrics[name] - given.metrics[name] for name in given.metrics)]
    return " / ".join(_signed(move, 3) for move in moves)


def _signed(value: float, digits: int) -> str:
    """A number with its sign; 0 has none."""
    if math.isnan(value):
        return "NaN"
    return f"{value:+.{digits}f}" if abs(value) >= 0.5 * 10**-digits else "0"


def _layout(result: SearchResult) -> tuple[list[_Table], list[str]]:
    """The tables: configurations, and each layer's choice where they have their own; and the notes."""
    metrics = list(result.rows[0].metrics)
    orders = next((list(row.rebatched) for row in result.rows if row.rebatched), [])
    calibrated = any(row.uncalibrated for row in result.rows)
    chosen = None if result.all_nan else result.best

    def cells(rank: int, row: Row) -> list[str]:
        label = "per layer" if row.per_layer and len(row.label) > 24 else row.label
        found = [f"{rank}{' *' * (row is chosen)}", label, _number(row.loss, row.loss_error)]
        found += [_number(row.metrics[name], row.metrics_error[name]) for name in metrics]
        if calibrated:
            before = row.uncalibrated
            found.append("" if before is None else f"{_number(before.loss)} ({_signed(row.loss - before.loss, 4)})")
        for name in orders:
            other = row.rebatched.get(name)
            found.append("" if other is None else _move(row.score, other) + " !" * (name in row.collapses))
        return found

    rows, combinations = [], 0
    for rank, row in enumerate(result.rows, 1):
        combinations += row.per_layer
        if not row.per_layer or combinations <= _SHOWN or row is chosen:
            ruined = math.isnan(row.loss) or row.collapses
            rows.append((cells(rank, row), "red" if ruined else "bold green" if row is chosen else ""))
    columns = ["", "config", "loss", *metrics, *["loss before calibration"] * calibrated]
    columns += [_HEADINGS.get(name, name) for name in orders]
    by = "loss of the worst order of samples" if result.robust else "loss"
    title = (
        f"Configurations E_B Std_B E_F Std_F by {by} ({result.samples} samples in {result.batches} batches, "
        f"{result.mode}; T population, F current mini-batch)"
    )
    tables = [_Table(title, columns, rows)]
    for per_layer in [row.config for row in result.rows if isinstance(row.config, dict)][:1]:
        lines = [([name, str(config)], "") for name, config in per_layer.items()]
        tables.append(_Table("The combination of layers with the lowest loss", ["layer", "config"], lines))

    notes = [result.why, *result.notes] if result.why else list(result.notes)
    if orders:
        moves = " / ".join(["loss", *metrics])
        notes.insert(0, f"The last {len(orders)} columns say how far {moves} move; ! marks a collapse.")
    if hidden := len(result) - len(rows):
        notes.append(f"{hidden} more combinations are in result.rows.")
    return tables, notes


def text(result: SearchResult) -> str:
    """Plain text, aligned."""
    tables, notes = _layout(result)
    lines = []
    for table in tables:
        rows = [table.columns, *(cells for cells, _ in table.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * width for width in widths])
        aligned = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
        lines += [table.title, "", *aligned, ""]
    return "\n".join(lines + [f"- {note}" for note in notes])


def rich(result: SearchResult) -> Any:
    """A renderable for rich."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    tables, notes = _layout(result)
    parts: list[Any] = []
    for table in tables:
        parts += [Text(table.title, style="italic"), Table(*table.columns)]  # whose own title would be wrapped
        for cells, style in table.rows:
            parts[-1].add_row(*cells, style=style)
    return Group(*parts, *(Text(f"- {note}") for note in notes))


def terminal(result: SearchResult) -> str:
    """What rich would print, if it is installed, else plain text."""
    try:
        from rich.console import Console
    except ImportError:
        return text(result)
    console = Console(force_terminal=True)
    with console.capture() as captured:
        console.print(rich(result))
    return captured.get().rstrip()


def html(result: SearchResult) -> str:
    """Tables for notebooks."""
    tables, notes = _layout(result)
    css = {"red": "color:#b00020", "bold green": "font-weight:bold;color:#1b7837", "": ""}

    def row(tag: str, cells: list[str], style: str = "") -> str:
        return f'<tr style="{style}">' + "".join(f"<{tag}>{escaping.escape(c)}</{tag}>" for c in cells) + "</tr>"

    parts = []
    for table in tables:
        body = "".join(row("td", cells, css[style]) for cells, style in table.rows)
        caption = f"<caption>{escaping.escape(table.title)}</caption>"
        parts.append(f"<table>{caption}{row('th', table.columns)}{body}</table>")
    listed = "".join(f"<li>{escaping.escape(note)}</li>" for note in notes)
    return "".join([*parts, f"<ul>{listed}</ul>"])
