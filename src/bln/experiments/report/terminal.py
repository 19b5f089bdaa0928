"""The report's short form, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .claims import CLAIMS, Verdict, judge, overall
from .overview import HEADINGS, lines, missing
from .summary import Summary

if TYPE_CHECKING:
    from rich.console import Group

_STYLES = {"reproduced": "green", "not reproduced": "red", "in part": "yellow", "undecided": "dim"}


def table(summary: Summary) -> Group:
    """Results and, where the paper's tasks were run, verdicts, for rich to print."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    results = Table(title="Results (mean over seeds ± 95 % interval)", title_justify="left")
    table_lines = list(lines(summary))
    shown = [at for at in range(len(HEADINGS)) if any(line[at] for line in table_lines)]
    for at in shown:
        results.add_column(HEADINGS[at], overflow="fold")
    for line in table_lines:
        results.add_row(*(Text(line[at]) for at in shown), style="red" if "diverged" in line.runs else "")
    parts: list[Table | Text] = [results if table_lines else Text("No runs yet: `bln reproduce cnn` makes some.")]
    for protocol in summary.protocols("cnn", "rnn"):
        judged = judge(summary, protocol)
        verdicts = Table(title=f"The paper's claims, protocol {protocol}", title_justify="left")
        for heading in ("", "claim", "verdict", *(verdict.value for verdict in Verdict)):
            verdicts.add_column(heading)
        for number, text in CLAIMS.items():
            own = [part for part in judged if part.claim == number]
            word = overall(own)
            counts = [str(sum(part.verdict is verdict for part in own)) for verdict in Verdict]
            verdicts.add_row(str(number), Text(text), Text(word, style=_STYLES[word]), *counts)
        parts.append(verdicts)
    if summary.protocols("cnn", "rnn"):
        parts += [Text(f"- {line}", style="dim") for line in missing(summary)]
    return Group(*parts)
