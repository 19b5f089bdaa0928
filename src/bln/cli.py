"""The command ``bln``: a demonstration, the paper's experiments, their data and their report."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

_SEVERAL = ("--batch-size", "--fraction", "--norms")
"""Options that take several values: ``--batch-size 1 25``."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; what goes wrong is one line on standard error and exit code 2."""
    try:
        app = _app()
    except ImportError as error:
        _fail(f'the command line needs {error.name}: pip install "batch-layer-norm[experiments]"')
    from .experiments.runs import RunError

    try:
        app(_spread(sys.argv[1:] if arguments is None else arguments), prog_name="bln")
    except (ValueError, RunError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or 'a file'}: {error.strerror or error}")
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


def _fail(message: str) -> None:
    print(f"bln: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _spread(arguments: Sequence[str]) -> list[str]:
    """``--norms bln bn`` as ``--norms bln --norms bn``, which the parser knows."""
    found: list[str] = []
    option = None
    for argument in arguments:
        if argument.startswith("--"):
            option = argument if argument in _SEVERAL else None
            found.append(argument)
        elif option and found[-1] != option:
            found += [option, argument]
        else:
            found.append(argument)
    return found


def _app() -> Callable[..., Any]:
    import typer

    app = typer.Typer(
        help="Batch Layer Normalization: a demonstration, and the paper's experiments.",
        no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    )  # fmt: skip
    data = typer.Typer(help="The data sets of the paper.", no_args_is_help=True)
    app.add_typer(data, name="data")

    DataDir = Annotated[Path, typer.Option(help="Where the data sets are.")]
    Workers = Annotated[int, typer.Option(help="Runs side by side.")]

    @app.command()
    def demo(
        out: Annotated[Path, typer.Option(help="Where runs and report go.")] = Path("bln-demo"),
        workers: Annotated[int | None, typer.Option(help="Runs side by side; one for each core if not said.")] = None,
    ) -> None:
        """Train BLN, BN and LN on handwritten digits at batch 1 and 25, search the 16 configurations, report."""
        from .experiments.demo import settings

        _run(settings(), out, Path(), "cpu", workers or os.cpu_count() or 1)

    @app.command()
    def reproduce(
        what: Annotated[str, typer.Argument(help="cnn, rnn, all (both), or resnet.")],
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
        epochs: Annotated[int | None, typer.Option(help="Fewer than the protocol's, for a try.")] = None,
    ) -> None:
        """Run the paper's experiments; the same command continues where it was stopped."""
        from .experiments.reproduce import plan

        if what not in ("cnn", "rnn", "all", "resnet"):
            raise ValueError(f"expected cnn, rnn, all or resnet, got {what!r}")
        settings = plan(
            ("cnn", "rnn") if what == "all" else (what,),
            batch_sizes=batch_size, fractions=fraction, norms=norms, seeds=seeds, protocol=protocol, epochs=epochs,
        )  # fmt: skip
        _run(settings, out, data_dir, device, workers)

    @app.command()
    def report(
        summary: Annotated[Path, typer.Argument(help="A summary.json, or the folder it is in.")],
        out: Annotated[Path | None, typer.Option(help="Where the report goes; beside the summary if not said.")] = None,
    ) -> None:
        """Write report.html and its figures again, from a summary."""
        from rich.console import Console

        from .experiments import report as reports

        path = summary / "summary.json" if summary.is_dir() else summary
        try:
            found = json.loads(path.read_bytes())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not a summary: {error}; `bln reproduce` writes one") from None
        Console().print(f"written: {reports.write(found, out or path.parent)}", soft_wrap=True)

    @data.command()
    def get(
        name: Annotated[str, typer.Argument(help="cifar10 or imdb.")],
        data_dir: DataDir = Path("data"),
        url: Annotated[str | None, typer.Option(help="Another place to load the same archive from.")] = None,
    ) -> None:
        """Download a data set from its publisher, check it and unpack it."""
        from .experiments import download

        download.get(name, data_dir, url=url)

    return app


def _run(settings: list[Any], out: Path, data_dir: Path, device: str, workers: int) -> None:
    from rich.console import Console

    from .experiments import report, runs
    from .experiments import reproduce as sweep

    chosen = sweep.device(device)
    runs.claim(out)
    console = Console()
    with _bar(len(settings)) as progress:
        ended = sweep.reproduce(settings, out, data_dir, device=chosen, workers=workers, progress=progress)
    summary = sweep.summarize(out)
    runs.write(out / "summary.json", (json.dumps(summary) + "\n").encode())
    console.print(report.table(summary))
    console.print(f"report: {report.write(summary, out)}", soft_wrap=True)
    failed = {each.name: status for each, status in ended.items() if status.startswith("error: ")}
    if failed:
        name, status = next(iter(failed.items()))
        raise ValueError(
            f"{len(failed)} of {len(ended)} runs could not go on; {name}: {status.removeprefix('error: ')}"
        )


@contextmanager
def _bar(total: int) -> Iterator[Callable[[float, str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.1f}/{task.total} runs"))
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("", total=total)

        def tell(done: float, text: str) -> None:
            progress.update(bar, completed=done, description=text)

        yield tell
