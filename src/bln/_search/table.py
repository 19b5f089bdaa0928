"""A search's result as a table: plain text, rich, HTML."""

from __future__ import annotations

import html as escaping
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import StatisticsConfig

if TYPE_CHECKING:
    from .result import Row, SearchResult
    from .score import Score

_SHOWN = 3
"""Combinations of layers in the table; all of them are in the exports."""
_HEADINGS = {"shuffled": "reshuffled", "sorted": "sorted by label", "single": "one at a time"}


class _Line(NamedTuple):
    cells: list[str]
    style: str  # of rich


class _Layout(NamedTuple):
    title: str
    columns: list[str]
    lines: list[_Line]
    notes: list[str]


def _number(value: float, error: float = math.nan) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value:.4f}" if math.isnan(error) else f"{value:.4f} ± {error:.4f}"


def _move(given: Score, other: Score) -> str:
    moves = [other.loss - given.loss, *(other.metrics[name] - given.metrics[name] for name in given.metrics)]
    return " / ".join(_signed(move, 3) for move in moves)


def _signed(value: float, digits: int) -> str:
    """With its sign, but a 0 without."""
    if math.isnan(value):
        return "NaN"
    return f"{value:+.{digits}f}" if abs(value) >= 0.5 * 10**-digits else "0"


def _layout(result: SearchResult) -> _Layout:
    metrics = list(result.rows[0].metrics)
    arrangements = next((list(row.rebatched) for row in result.rows if row.rebatched), [])
    calibrated = any(row.uncalibrated for row in result.rows)
    columns = ["", "config", "loss", *metrics]
    columns += ["loss before calibration"] if calibrated else []
    columns += [_HEADINGS.get(name, name) for name in arrangements]

    def line(rank: int, row: Row) -> _Line:
        best = row is chosen
        cells = [f"{rank}{' *' * best}", "per layer" if row.per_layer and len(row.label) > 24 else row.label]
        cells.append(_number(row.loss, row.loss_error))
        cells += [_number(row.metrics[name], row.metrics_error[name]) for name in metrics]
        if calibrated:
            before = row.uncalibrated
            cells.append("" if before is None else f"{_number(before.loss)} ({_signed(row.loss - before.loss, 4)})")
        for name in arrangements:
            other = row.rebatched.get(name)
            cells.append("" if other is None else _move(row.score, other) + " !" * (name in row.collapses))
        ruined = math.isnan(row.loss) or bool(row.collapses)
        return _Line(cells, "red" if ruined else "bold green" if best else "")

    shown, combinations, hidden = [], 0, 0
    chosen = None if math.isnan(result.rows[0].loss) else result.best
    for rank, row in enumerate(result.rows, 1):
        combinations += row.per_layer
        if not row.per_layer or combinations <= _SHOWN or row is chosen:
            shown.append(line(rank, row))
        else:
            hidden += 1
    notes = [result.why, *result.notes] if result.why else list(result.notes)
    if arrangements:
        moves = " / ".join(["loss", *metrics])
        notes.insert(0, f"The last {len(arrangements)} columns say how far {moves} move; ! marks a collapse.")
    if hidden:
        notes.append(f"{hidden} more combinations are in result.rows.")
    by = "loss of the worst arrangement" if result.robust else "loss"
    title = (
        f"Configurations E_B Std_B E_F Std_F by {by} ({result.samples} samples in {result.batches} batches, "
        f"{result.mode}; T population, F current mini-batch)"
    )
    return _Layout(title, columns, shown, notes)


def _choices(result: SearchResult) -> list[tuple[str, str]]:
    """What each layer chose, of the best row that has a choice for each."""
    for row in result.rows:
        if not isinstance(row.config, StatisticsConfig):
            return [(name, str(config)) for name, config in row.config.items()]
    return []


def text(result: SearchResult) -> str:
    """Plain text, aligned."""
    layout = _layout(result)
    lines = [layout.title, "", *_aligned([layout.columns, *(line.cells for line in layout.lines)])]
    if choices := _choices(result):
        lines += [
            "",
            "The combination of layers with the lowest loss:",
            *_aligned([["layer", "config"], *map(list, choices)]),
        ]
    return "\n".join([*lines, "", *(f"- {note}" for note in layout.notes)])


def _aligned(cells: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def rich(result: SearchResult) -> Any:
    """Something for rich to print."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    layout = _layout(result)
    grid = Table(*layout.columns)  # titles stand above: a table's own is wrapped to its width
    for cells, style in layout.lines:
        grid.add_row(*cells, style=style)
    parts: list[Any] = [Text(layout.title, style="italic"), grid]
    if choices := _choices(result):
        chosen = Table("layer", "config")
        for choice in choices:
            chosen.add_row(*choice)
        parts += [Text("The combination of layers with the lowest loss", style="italic"), chosen]
    return Group(*parts, *(Text(f"- {note}") for note in layout.notes))


def terminal(result: SearchResult) -> str:
    """What rich would print, if it is installed; plain text elsewhere."""
    try:
        from rich.console import Console
    except ImportError:
        return text(result)
    console = Console(force_terminal=True)
    with console.capture() as captured:
        console.print(rich(result))
    return captured.get().rstrip()


def html(result: SearchResult) -> str:
    """A table for notebooks."""
    layout = _layout(result)
    css = {"red": "color:#b00020", "bold green": "font-weight:bold;color:#1b7837", "": ""}

    def row(tag: str, cells: list[str], style: str = "") -> str:
        return f'<tr style="{style}">' + "".join(f"<{tag}>{escaping.escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = [row("td", line.cells, css[line.style]) for line in layout.lines]
    parts = [f"<caption>{escaping.escape(layout.title)}</caption>", row("th", layout.columns), *body]
    pages = [f"<table>{''.join(parts)}</table>"]
    if choices := _choices(result):
        lines = "".join(row("td", list(choice)) for choice in choices)
        caption = "<caption>The combination of layers with the lowest loss</caption>"
        pages.append(f"<table>{caption}{row('th', ['layer', 'config'])}{lines}</table>")
    notes = "".join(f"<li>{escaping.escape(note)}</li>" for note in layout.notes)
    return "".join([*pages, f"<ul>{notes}</ul>"])
