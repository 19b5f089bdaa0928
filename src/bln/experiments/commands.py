"""The commands of ``bln`` and their options."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Column
from rich.text import Text

from .. import __version__
from .._models.check import check, load
from . import data as datasets
from . import demo as demonstration
from . import download, packed, processes, runs, table
from . import report as reports
from . import reproduce as sweep
from .remaining import Progress, TimeLeft
from .report import shift as shift_report
from .report import sizes as sizes_report
from .report.sizes import WORDING
from .report.summary import TASKS as PAPERS
from .report.summary import collect
from .shift import study as shifts
from .sizes import study
from .sizes.tasks import IMAGES, TOKENS

app = typer.Typer(
    help="Batch Layer Normalization: a demonstration, and the paper's experiments.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip
data = typer.Typer(help="The data sets of the paper.", no_args_is_help=True)
app.add_typer(data, name="data")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"bln {__version__}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Accept the options that stand before a command."""


DataDir = Annotated[Path, typer.Option(help="Folder of the data sets.")]
Out = Annotated[Path, typer.Option(help="Folder for runs and report.")]
BatchSizes = Annotated[list[int] | None, typer.Option(help="One or more, as in 1 4 32; by default those of the task.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, ...")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print an estimate of time and memory, and stop.")]
Workers = Annotated[int, typer.Option(help="Number of processes.")]
Minutes = Annotated[float | None, typer.Option(min=0.0, help="Time limit; the most informative runs come first.")]

_SHIFT = (
    "Train small nets, corrupt test images, and vary the size of requests: which statistics hold when data change?\n\n"
    "This needs CIFAR-10 and trains twelve nets, two to three minutes each on one CPU core. Nets with batch statistics "
    "answer 15 corruptions at five severities, which takes five to ten minutes each. In all that is one to two hours "
    "with --workers 1. The same command continues where it was stopped."
)


@app.command()
def demo(
    out: Out = Path("bln-demo"),
    workers: Annotated[
        int | None, typer.Option(help="Number of processes; on a CPU, by default one for each core.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help=f"Seeds of each norm and batch size; {demonstration.SEEDS} by default.")
    ] = None,
    device: Device = "cpu",
) -> None:
    """Train BatchNorm, GroupNorm and BLN on handwritten digits at batch sizes 1, 4 and 25, and compare them."""
    if workers is None:
        workers = (os.cpu_count() or 1) if sweep.device(device).type == "cpu" else 1
    _run_sizes(demonstration.cells(seeds), out, Path(), device, workers)


@app.command()
def reproduce(
    what: Annotated[
        str,
        typer.Argument(
            help="cnn, rnn or all. resnet, transformer and shift have options of their own: `resnet --help`."
        ),
    ],
    data_dir: DataDir = Path("data"),
    out: Out = Path("results"),
    batch_size: BatchSizes = None,
    fraction: Annotated[list[float] | None, typer.Option(help="Shares of the training data, as in 0.2 1.0.")] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 5,
    norms: Annotated[list[str] | None, typer.Option(help="Names, or package.module:function.")] = None,
    protocol: Annotated[str, typer.Option(help="paper, or clean: reshuffled each epoch, chosen on validation.")] = (
        "paper"
    ),
    device: Device = "auto",
    workers: Workers = 1,
    backend: Annotated[str, typer.Option(help="local processes, or ray for a Ray cluster.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster; without one, Ray starts on this machine.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Fewer than the protocol's, to try things out.")] = None,
) -> None:
    """Run the paper's experiments; the same command continues where it was stopped."""
    if what in ("resnet", "shift", "transformer"):
        raise ValueError(f"`bln reproduce {what}` has options of its own; write them behind it")
    if what not in ("cnn", "rnn", "all"):
        raise ValueError(f"expected cnn, rnn, all, resnet, transformer or shift, got {what!r}")
    settings = sweep.plan(
        ("cnn", "rnn") if what == "all" else (what,),
        batch_sizes=batch_size, fractions=fraction, norms=norms, seeds=seeds, protocol=protocol, epochs=epochs,
    )  # fmt: skip
    chosen, console = _prepare(out, device, workers), Console()
    seconds = None
    if backend == "local":  # a cluster has other machines
        estimate = sweep.estimate(settings, out, data_dir, chosen, workers)
        seconds = estimate.seconds
        console.print(estimate.text(), soft_wrap=True)
    with _resumable(TimeLeft(sweep.work_left(settings, out), seconds), len(settings), "runs") as progress:
        statuses = sweep.reproduce(
            settings, out, data_dir, device=chosen, workers=workers, backend=backend, address=address, progress=progress
        )
    _report_paper(table.write(out / table.NAME, sweep.rows(out)), out)
    failed = {run.name: status for run, status in statuses.items() if status.startswith("error: ")}
    if failed:
        name, status = next(iter(failed.items()))
        raise ValueError(
            f"{len(failed)} of {len(statuses)} runs could not go on; {name}: {status.removeprefix('error: ')}"
        )


@app.command("reproduce shift", help=_SHIFT)
def shift(
    data_dir: DataDir = Path("data"),
    out: Out = Path("results/shift"),
    seeds: Annotated[int, typer.Option(help="Nets of each norm.")] = 3,
    norms: Annotated[list[str] | None, typer.Option(help="Names; bn, bln-grouped, gn and ln by default.")] = None,
    images: Annotated[int, typer.Option(help="Test images for each net under each condition.")] = 500,
    severities: Annotated[list[int] | None, typer.Option(help="Of corruptions, as in 1 3 5; all by default.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Fewer than the recipe's, to try things out.")] = None,
    workers: Workers = 1,
) -> None:
    """Run the study of shifted data."""
    recipes = shifts.plan(norms, seeds, epochs)
    questions = shifts.Questions(images, tuple(severities or shifts.Questions.severities))
    runs.claim(out)
    with _resumable(TimeLeft([1.0] * len(recipes)), len(recipes), "nets") as progress:
        path = shifts.study(recipes, questions, out, data_dir, workers=workers, progress=progress)
    _report_shift(path, out)


@app.command("reproduce resnet")
def resnet(
    data_dir: DataDir = Path("data"),
    out: Out = Path("results/resnet"),
    batch_size: BatchSizes = None,
    norms: Annotated[list[str] | None, typer.Option(help=f"Some of {', '.join(IMAGES)}; all by default.")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds, five by default; at batch size 1 at most three.")
    ] = None,
    images: Annotated[int | None, typer.Option(help="Number of training samples.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs over the training images.")] = None,
    device: Device = "auto",
    workers: Workers = 1,
    minutes: Minutes = None,
    dry_run: DryRun = False,
) -> None:
    """Train ResNet-20 on CIFAR-10 with every norm at every batch size; the same command continues where it was stopped.

    Learning rates are chosen for each norm and batch size on validation data. Runs of a norm and batch size train as
    one net; on a GPU several nets train side by side.
    """
    cells = study.plan(
        "resnet20", norms=norms, batch_sizes=batch_size, seeds=seeds, samples=images, epochs=epochs,
        by_importance=minutes is not None,
    )  # fmt: skip
    _run_sizes(cells, out, data_dir, device, workers, minutes, dry_run)


@app.command("reproduce transformer")
def transformer(
    data_dir: DataDir = Path("data"),
    out: Out = Path("results/transformer"),
    batch_size: BatchSizes = None,
    norms: Annotated[list[str] | None, typer.Option(help=f"Some of {', '.join(TOKENS)}; all by default.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds; three by default.")] = None,
    reviews: Annotated[int | None, typer.Option(help="Number of training samples.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs over the training reviews.")] = None,
    device: Device = "auto",
    workers: Workers = 1,
    minutes: Minutes = None,
    dry_run: DryRun = False,
) -> None:
    """Train a small transformer on IMDB with every norm; the same command continues where it was stopped.

    Learning rates are chosen for each norm and batch size on validation data. Norms with statistics over tokens leave
    padding out of them.
    """
    cells = study.plan(
        "transformer", norms=norms, batch_sizes=batch_size, seeds=seeds, samples=reviews, epochs=epochs,
        by_importance=minutes is not None,
    )  # fmt: skip
    _run_sizes(cells, out, data_dir, device, workers, minutes, dry_run)


@app.command()
def report(
    runs_table: Annotated[Path, typer.Argument(metavar="TABLE", help="A runs.jsonl, or its folder.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the report; by default that of the table.")] = None,
) -> None:
    """Write report and figures again, from a table of runs.

    If the table holds several experiments, those beyond the paper get a folder each.
    """
    path = runs_table / table.NAME if runs_table.is_dir() else runs_table
    if not path.exists():
        raise ValueError(f"there is no table of runs at {path}; `bln reproduce` and `bln demo` write one")
    tasks, out = {row["task"] for row in table.read(path)}, out or path.parent
    writers: dict[str, Callable[[Path, Path], None]] = {}
    if tasks & set(PAPERS):
        writers[""] = _report_paper
    writers |= {words.folder: partial(_report_sizes, task=name) for name, words in WORDING.items() if name in tasks}
    if "shift" in tasks:
        writers["shift"] = _report_shift
    if not writers:
        raise ValueError(f"{path} has no runs that are known here; `bln reproduce` makes some")
    for folder, write in writers.items():
        write(path, out / folder if len(writers) > 1 else out)


@app.command()
def convert_check(
    place: Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help="As in torchvision.models:resnet18.")],
    shape: Annotated[
        str | None, typer.Option("--input", help="The shape of random inputs to time a step on, as in 2,3,224,224.")
    ] = None,
    groups: Annotated[int, typer.Option(min=1, help="As in bln.convert.")] = 8,
    device: Device = "cpu",
) -> None:
    """Print what bln.convert would do to a model, and what a training step costs before and after."""
    sizes = None
    if shape is not None:
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)+", shape):
            raise ValueError(f"--input must be sizes with commas between, samples first, as 2,3,224,224; got {shape!r}")
        sizes = tuple(map(int, shape.split(",")))
    print(check(load(place), sizes, groups=groups, device=sweep.device(device)))


@data.command()
def get(
    name: Annotated[str, typer.Argument(help="cifar10 or imdb.")],
    data_dir: DataDir = Path("data"),
    url: Annotated[str | None, typer.Option(help="Another address of the same archive.")] = None,
) -> None:
    """Download a data set from its publisher, check it and unpack it."""
    download.get(name, data_dir, url=url)


@data.command()
def pack(
    to: Annotated[Path, typer.Argument(help="The file to write; pass it as --data-dir to bln reproduce resnet.")],
    data_dir: DataDir = Path("data"),
    train: Annotated[int, typer.Option(help="Training images; all test images go with them.")] = 22_000,
) -> None:
    """Pack CIFAR-10, or a part of it, into one small file, for machines without a network."""
    packed.write(datasets.cifar10(data_dir), to, train)
    Console().print(f"written: {to}, {to.stat().st_size / 2**20:.1f} MiB", soft_wrap=True)


def _prepare(out: Path, device: str, workers: int) -> torch.device:
    """Check the options of all runs, claim the folder, and return the device."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    chosen = sweep.device(device)
    runs.claim(out)
    if chosen.type == "cpu":
        torch.set_num_threads(processes.threads(workers))
    return chosen


def _report_paper(path: Path, out: Path) -> None:
    summary, console = collect(table.read(path)), Console()
    console.print(reports.table(summary))
    console.print(f"report: {reports.write(summary, out)}", soft_wrap=True)


def _report_shift(path: Path, out: Path) -> None:
    results = shift_report.read(path)
    console = Console()
    console.print(shift_report.rich_table(results))
    console.print(f"report: {shift_report.write(results, out)}", soft_wrap=True)


def _run_sizes(
    cells: list[study.Cell],
    out: Path,
    data_dir: Path,
    device: str,
    workers: int,
    minutes: float | None = None,
    dry_run: bool = False,
) -> None:
    chosen, console = _prepare(out, device, workers), Console()
    seconds = None
    if minutes is None or dry_run:  # an estimate takes time, too
        estimate = study.estimate(cells, out, data_dir, chosen, workers)
        seconds = estimate.seconds
        console.print(estimate.text(), soft_wrap=True)
    if dry_run:
        return
    left = TimeLeft(study.steps_left(cells, out), seconds)
    with _resumable(left, len(cells), "norms and sizes") as progress:
        path = study.study(cells, out, data_dir, device=chosen, workers=workers, minutes=minutes, progress=progress)
    if unfinished := study.unfinished(cells, out):
        console.print(
            f"{unfinished} of {len(cells)} norms and batch sizes are left; the same command goes on", soft_wrap=True
        )
    _report_sizes(path, out)


def _report_sizes(path: Path, out: Path, task: str | None = None) -> None:
    results, console = [net for net in sizes_report.read(path) if task in (None, net.task)], Console()
    page = sizes_report.write(results, out)
    console.print(sizes_report.rich_table(results))
    console.print(f"report: {page}", soft_wrap=True)


@contextmanager
def _resumable(left: TimeLeft, total: int, unit: str) -> Iterator[Progress]:
    """Show a progress bar; on an interruption, say that nothing is lost."""
    try:
        with _bar(left, total, unit) as progress:
            yield progress
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; the same command goes on from here")
        raise typer.Exit(130) from None


class _Left(ProgressColumn):
    """The time left, as a column of a bar."""

    def __init__(self, left: TimeLeft) -> None:
        super().__init__()
        self._left = left

    def render(self, task: Task) -> Text:
        seconds = self._left.seconds()
        if seconds is None:
            return Text("time left not known yet")
        return Text(f"{timedelta(seconds=round(seconds))} left")


@contextmanager
def _bar(left: TimeLeft, total: int, unit: str) -> Iterator[Progress]:
    counted = TextColumn("{task.completed:.1f}/{task.total} " + unit)
    named = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns = (named, BarColumn(bar_width=16), counted, _Left(left))  # in 80 columns
    with ProgressBar(*columns, console=Console(stderr=True), transient=True, expand=True) as progress:
        bar = progress.add_task("", total=total)

        def update(done: float, text: str) -> None:
            left.update(done)
            progress.update(bar, completed=done, description=text)

        yield update
