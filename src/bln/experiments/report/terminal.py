"""The report of the paper's experiments in short, for a terminal."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from .claims import CLAIMS, judge, overall, tally
from .overview import HEADINGS, TITLES, lines, missing
from .summary import TASKS, Summary

if TYPE_CHECKING:
    from rich.console import Group

_SHOWN = ("batch", "norm", "runs", "train_accuracy", "test_accuracy", "chosen")
"""The columns that fit into 80 characters; the page has the rest."""
_STYLES = {"reproduced": "green", "not reproduced": "red", "in part": "yellow", "undecided": "dim"}


def table(summary: Summary) -> Group:
    """Return results and, where the paper's tasks were run, verdicts, for rich to print."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table_lines = [(task, line) for task in TASKS for line in lines(summary, task)]
    parts: list[Table | Text] = [] if table_lines else [Text("No runs yet: `bln reproduce cnn` makes some.")]
    for heading, group in groupby(table_lines, key=lambda item: (item[0], item[1].protocol, item[1].data)):
        task, protocol, data = heading
        results = Table(title=f"{TITLES[task]}, {data} of the data, protocol {protocol}", title_justify="left")
        for name in _SHOWN:
            results.add_column(getattr(HEADINGS, name))
        for _, line in group:
            results.add_row(*(Text(getattr(line, name)) for name in _SHOWN), style="red" * ("diverged" in line.runs))
        parts.append(results)
    if table_lines:
        parts.append(Text("Mean over seeds ± 95 % interval. Configurations were chosen on validation.", style="dim"))
    for protocol in summary.protocols("cnn", "rnn"):
        judged = judge(summary, protocol)
        verdicts = Table(title=f"The paper's claims, protocol {protocol}", title_justify="left")
        for column in ("", "claim", "verdict", "parts"):
            verdicts.add_column(column)
        for number, text in CLAIMS.items():
            parts_of_claim = [part for part in judged if part.claim == number]
            word = overall(parts_of_claim)
            verdicts.add_row(str(number), Text(text), Text(word, style=_STYLES[word]), Text(tally(parts_of_claim)))
        parts.append(verdicts)
    if summary.protocols("cnn", "rnn"):
        parts += [Text(f"- {line}", style="dim") for line in missing(summary)]
    return Group(*parts)
