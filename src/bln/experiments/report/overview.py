"""The table of results: a line for each norm in each setting, and the runs that are missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from .compare import TEST_ACCURACY, TEST_LOSS, TRAIN_ACCURACY
from .statistics import mean_interval
from .style import look
from .summary import TASKS, Run, Setting, Summary, authors

TITLES = {
    "cnn": "CNN on CIFAR-10",
    "rnn": "RNN on IMDB",
    "resnet": "Residual net on CIFAR-10",
    "digits-cnn": "CNN on handwritten digits",
    "digits-rnn": "RNN on handwritten digits",
}
PAPER = {(0.2, 25): ("bln", "bn", "ln"), (0.2, 1): ("bln", "bn", "ln"), (1.0, 25): ("bln",)}
"""The runs of the paper, of each of its two tasks: norms by share of the data and batch size."""


class Line(NamedTuple):
    """The cells of a line, as text."""

    task: str
    protocol: str
    data: str
    batch: str
    norm: str
    runs: str
    train_accuracy: str
    test_accuracy: str
    authors: str
    test_loss: str
    chosen: str
    seconds: str
    minutes: str
    memory: str


HEADINGS = Line(
    "task", "protocol", "data", "batch", "norm", "runs", "train accuracy", "test accuracy", "authors' test accuracy",
    "test loss", "chosen", "s / epoch", "minutes a run", "MiB a run",
)  # fmt: skip


def lines(summary: Summary, *tasks: str) -> Iterator[Line]:
    """Yield the lines of these tasks; of all tasks if none is named."""
    for task in tasks or TASKS:
        for setting in summary.settings(task):
            for norm in summary.norms(setting):
                yield _line(summary.select(setting, norm))


def _line(runs: list[Run]) -> Line:
    setting, norm = runs[0].setting, runs[0].norm
    finished = [run for run in runs if run.status == "finished"]
    train, test, loss = (
        mean_interval([measure.of(run) for run in finished]) for measure in (TRAIN_ACCURACY, TEST_ACCURACY, TEST_LOSS)
    )
    theirs = authors().select(setting._replace(protocol="paper"), norm)
    seconds = [second for run in runs for second in run.seconds if second == second]
    memory = [run.memory_mib for run in runs if run.memory_mib == run.memory_mib]
    return Line(
        kind(setting.task),
        setting.protocol,
        f"{100 * setting.fraction:g} %",
        str(setting.batch_size),
        look(norm).name,
        state(runs),
        train.plus_minus() if train.n else "",
        test.plus_minus() if test.n else "",
        f"{theirs[0].test.accuracy:.3f}" if theirs and theirs[0].test else "",
        loss.plus_minus() if loss.n else "",
        chosen(finished),
        f"{median(seconds):.3g}" if seconds else "",
        f"{median(sum(run.seconds) for run in runs) / 60:.3g}" if seconds else "",
        f"{median(memory):.3g}" if memory else "",
    )


def kind(task: str) -> str:
    """Return the kind of net of a task."""
    return TITLES[task].partition(" on ")[0]


def state(runs: list[Run]) -> str:
    """Count runs by status: ``4 finished, 1 diverged, 1 running (epoch 3)``."""
    counts = Counter(run.status for run in runs)
    parts = [f"{counts[status]} {status}" for status in ("finished", "diverged") if counts[status]]
    running = [str(run.epochs) for run in runs if run.status == "running"]
    if running:
        parts.append(f"{len(running)} running (epoch {', '.join(running)})")
    return ", ".join(parts)


def chosen(runs: list[Run]) -> str:
    """Count the configurations chosen on validation, the most frequent first: ``TTFF 3, FTFF 2``."""
    counts = Counter(run.chosen for run in runs if run.chosen).most_common()
    if len(counts) == 1:
        return str(counts[0][0])
    return ", ".join(f"{config} {count}" for config, count in counts)


def missing(summary: Summary) -> list[str]:
    """Return a phrase for each setting of the paper with norms that this summary lacks."""
    gaps = []
    for task in ("cnn", "rnn"):
        for protocol in summary.protocols(task) or ["paper"]:
            for (fraction, batch), norms in PAPER.items():
                setting = Setting(task, protocol, fraction, batch)
                states = {norm: {run.status for run in summary.select(setting, norm)} for norm in norms}
                absent = [look(norm).name for norm, statuses in states.items() if not statuses]
                pending = [look(norm).name for norm, statuses in states.items() if statuses == {"running"}]
                where = f"{TITLES[task]}, {100 * fraction:g} % of the data, batch {batch}, protocol {protocol}"
                if absent:
                    gaps.append(f"{where}: {', '.join(absent)} not run")
                if pending:
                    gaps.append(f"{where}: {', '.join(pending)} still running")
    return gaps
