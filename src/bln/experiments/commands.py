"""The commands of ``bln``."""

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
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from .. import __version__
from .._models.check import check, load
from . import data as datasets
from . import demo as demonstration
from . import download, packed, processes, runs, table
from . import report as reports
from . import reproduce as sweep
from .remaining import TimeLeft
from .report import shift as shift_report
from .report import sizes as sizes_report
from .report.sizes import WORDING
from .report.summary import TASKS as PAPERS
from .report.summary import collect
from .runs import Settings
from .shift import study as shifts
from .sizes import study
from .sizes.tasks import IMAGES, TOKENS

app = typer.Typer(
    help="Batch Layer Normalization: a demonstration, and the paper's experiments.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip
data = typer.Typer(help="The data sets of the paper.", no_args_is_help=True)
app.add_typer(data, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"bln {__version__}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options before a command."""


DataDir = Annotated[Path, typer.Option(help="Where the data sets are.")]
Workers = Annotated[int, typer.Option(help="Processes side by side.")]
Minutes = Annotated[float | None, typer.Option(min=0.0, help="Stop in time; what says most comes first.")]

_SHIFT = (
    "Corrupt test images and vary the size of requests: which statistics hold when the data changes?\n\n"
    "It needs CIFAR-10, and trains twelve small nets, two to three minutes each on one CPU core. Those with batch "
    "statistics are asked about 15 corruptions at five severities, five to ten minutes each. That is one to two hours "
    "with --workers 1. The same command continues where it was stopped."
)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where runs and report go.")] = Path("bln-demo"),
    workers: Annotated[int | None, typer.Option(help="Runs side by side; on a CPU one for each core.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many; the demonstration's own if not said.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "cpu",
) -> None:
    """Train BatchNorm, GroupNorm and BLN on handwritten digits at batch 1, 4 and 25, and say which is better."""
    if workers is None:
        workers = os.cpu_count() or 1 if sweep.device(device).type == "cpu" else 1
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
    out: Annotated[Path, typer.Option(help="Where runs and report go.")] = Path("results"),
    batch_size: Annotated[list[int] | None, typer.Option(help="One or more, as in 1 25.")] = None,
    fraction: Annotated[list[float] | None, typer.Option(help="Of the training data, as in 0.2 1.0.")] = None,
    seeds: Annotated[int, typer.Option(help="How many.")] = 5,
    norms: Annotated[list[str] | None, typer.Option(help="By name, or package.module:function.")] = None,
    protocol: Annotated[str, typer.Option(help="paper, or clean: reshuffled each epoch, chosen on validation.")] = (
        "paper"
    ),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    workers: Workers = 1,
    backend: Annotated[str, typer.Option(help="local processes, or ray for a Ray cluster.")] = "local",
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster; without one it starts here.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Fewer than the protocol's, for a try.")] = None,
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
    _run(settings, out, data_dir, device, workers, backend, address)


@app.command("reproduce shift", help=_SHIFT)
def shift(
    data_dir: DataDir = Path("data"),
    out: Annotated[Path, typer.Option(help="Where nets, answers and report go.")] = Path("results/shift"),
    seeds: Annotated[int, typer.Option(help="How many nets of each norm.")] = 3,
    norms: Annotated[list[str] | None, typer.Option(help="By name; bn, bln-grouped, gn and ln if not said.")] = None,
    images: Annotated[int, typer.Option(help="Test images for each net, under each condition.")] = 500,
    severities: Annotated[list[int] | None, typer.Option(help="Of the corruptions, as in 1 3 5; all if not said.")] = (
        None
    ),
    epochs: Annotated[int | None, typer.Option(help="Fewer than the recipe's, for a try.")] = None,
    workers: Workers = 1,
) -> None:
    """Train nets, corrupt test images, vary the size of requests; the same command continues where it was stopped."""
    recipes = shifts.plan(norms, seeds, epochs)
    questions = shifts.Questions(images, tuple(severities or shifts.Questions.severities))
    runs.claim(out)
    with _resumable(TimeLeft([1.0] * len(recipes)), len(recipes), "nets") as progress:
        path = shifts.study(recipes, questions, out, data_dir, workers=workers, progress=progress)
    _report_shift(path, out)


@app.command("reproduce resnet")
def resnet(
    data_dir: DataDir = Path("data"),
    out: Annotated[Path, typer.Option(help="Where the table of runs and the report go.")] = Path("results/resnet"),
    batch_size: Annotated[list[int] | None, typer.Option(help="One or more, as in 1 4 32; 1 to 128 if not said.")] = (
        None
    ),
    norms: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(IMAGES)}; all if not said.")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="How many, five if not said; at batch size 1 at most three.")
    ] = None,
    images: Annotated[int | None, typer.Option(help="To train on.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Over these images.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    workers: Workers = 1,
    minutes: Minutes = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it takes, and stop.")] = False,
) -> None:
    """Train ResNet-20 on CIFAR-10 with every norm at every batch size; the same command continues where it was stopped.

    Learning rates are chosen for each norm and batch size on validation data. On a GPU all runs of a norm and batch
    size are one net, and several nets train side by side.
    """
    cells = study.plan(
        "resnet20", norms=norms, batch_sizes=batch_size, seeds=seeds, samples=images, epochs=epochs,
        by_importance=minutes is not None,
    )  # fmt: skip
    _run_sizes(cells, out, data_dir, device, workers, minutes, dry_run)


@app.command("reproduce transformer")
def transformer(
    data_dir: DataDir = Path("data"),
    out: Annotated[Path, typer.Option(help="Where the table of runs and the report go.")] = Path("results/transformer"),
    batch_size: Annotated[
        list[int] | None, typer.Option(help="One or more, as in 4 32; 4, 32 and 128 if not said.")
    ] = (None),
    norms: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(TOKENS)}; all if not said.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many; three if not said.")] = None,
    reviews: Annotated[int | None, typer.Option(help="To train on.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Over these reviews.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    workers: Workers = 1,
    minutes: Minutes = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it takes, and stop.")] = False,
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
    out: Annotated[Path | None, typer.Option(help="Where the report goes; beside the table if not said.")] = None,
) -> None:
    """Write a report and its figures again, from the table of runs that a command has written.

    Of several experiments, those beyond the paper get a folder each.
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
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "cpu",
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
    url: Annotated[str | None, typer.Option(help="Another place to load the same archive from.")] = None,
) -> None:
    """Download a data set from its publisher, check it and unpack it."""
    download.get(name, data_dir, url=url)


@data.command()
def pack(
    to: Annotated[Path, typer.Argument(help="The file to write; pass it as --data-dir to bln reproduce resnet.")],
    data_dir: DataDir = Path("data"),
    train: Annotated[int, typer.Option(help="Training images; all test images go with them.")] = 22_000,
) -> None:
    """Pack CIFAR-10, or a part of it, into one small file, for machines it has to be carried to."""
    packed.write(datasets.cifar10(data_dir), to, train)
    Console().print(f"written: {to}, {to.stat().st_size / 2**20:.1f} MiB", soft_wrap=True)


def _run(
    settings: list[Settings],
    out: Path,
    data_dir: Path,
    device: str,
    workers: int,
    backend: str = "local",
    address: str | None = None,
) -> None:
    chosen = sweep.device(device)
    runs.claim(out)
    console = Console()
    if chosen.type == "cpu":
        torch.set_num_threads(processes.threads(workers))
    seconds = None
    if backend == "local":  # a cluster's machines are others
        estimate = sweep.estimate(settings, out, data_dir, chosen, workers)
        seconds = estimate.seconds
        console.print(estimate.text(), soft_wrap=True)
    with _resumable(TimeLeft(sweep.work_left(settings, out), seconds), len(settings), "runs") as progress:
        ended = sweep.reproduce(
            settings,
            out,
            data_dir,
            device=chosen,
            workers=workers,
            backend=backend,
            address=address,
            progress=progress,
        )
    _report_paper(table.write(out / table.NAME, sweep.rows(out)), out)
    failed = {each.name: status for each, status in ended.items() if status.startswith("error: ")}
    if failed:
        name, status = next(iter(failed.items()))
        raise ValueError(
            f"{len(failed)} of {len(ended)} runs could not go on; {name}: {status.removeprefix('error: ')}"
        )


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
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    chosen, console = sweep.device(device), Console()
    runs.claim(out)
    if chosen.type == "cpu":
        torch.set_num_threads(processes.threads(workers))
    seconds = None
    if minutes is None or dry_run:  # measuring takes time, too
        estimate = study.estimate(cells, out, data_dir, chosen, workers)
        seconds = estimate.seconds
        console.print(estimate.text(), soft_wrap=True)
    if dry_run:
        return
    left = TimeLeft(study.steps_left(cells, out), seconds)
    with _resumable(left, len(cells), "norms and sizes") as progress:
        path = study.study(
            cells, out, data_dir, device=chosen, workers=workers, minutes=minutes, progress=progress
        )  # fmt: skip
    if unfinished := study.unfinished(cells, out):
        console.print(
            f"{unfinished} of {len(cells)} norms and batch sizes are left; the same command goes on", soft_wrap=True
        )
    _report_sizes(path, out)


def _report_sizes(path: Path, out: Path, task: str | None = None) -> None:
    found, console = [each for each in sizes_report.read(path) if task in (None, each.task)], Console()
    page = sizes_report.write(found, out)
    console.print(sizes_report.rich_table(found))
    console.print(f"report: {page}", soft_wrap=True)


@contextmanager
def _resumable(left: TimeLeft, total: int, what: str) -> Iterator[Callable[[float, str], None]]:
    """Show a bar; an interruption says that nothing is lost."""
    try:
        with _bar(left, total, what) as progress:
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
def _bar(left: TimeLeft, total: int, what: str) -> Iterator[Callable[[float, str], None]]:
    counted = TextColumn("{task.completed:.1f}/{task.total} " + what)
    named = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns = (named, BarColumn(bar_width=16), counted, _Left(left))  # in 80 columns
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as progress:
        bar = progress.add_task("", total=total)

        def tell(done: float, text: str) -> None:
            left.update(done)
            progress.update(bar, completed=done, description=text)

        yield tell
