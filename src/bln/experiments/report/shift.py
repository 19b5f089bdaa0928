"""The report of the study of shifted data: what follows from its answers, tables and figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from .. import table as table_of_runs
from ..shift.evaluation import asked_sizes
from .markup import markdown, save
from .statistics import Estimate, mean_interval, paired_interval
from .style import FAINT, INK, Plot, look, styled

if TYPE_CHECKING:
    from rich.console import Group

BLN, OTHERS = {"bn": "BatchNorm net", "bln-grouped": "grouped BLN net"}, ("gn", "ln")
"""Nets that can take statistics from the request, and nets that cannot."""
NAMES = {"T": "`T`", "64": "k = 64", "16": "k = 16", "4": "k = 4", "F": "`F`"}
_COLOURS = {"T": INK, "64": "#332288", "16": "#0072b2", "4": "#44aa99", "F": "#d55e00"}
_MARKERS = {"T": "s", "64": "^", "16": "o", "4": "D", "F": "v"}


class Conditions(NamedTuple):
    """The conditions over which accuracies are averaged; ``None`` stands for all."""

    part: str = "test"
    arrangement: str = "shuffled"
    corrupted: bool = True
    corruption: str | None = None
    severity: int | None = None

    def include(self, line: Mapping[str, Any]) -> bool:
        """Return whether an answer is under these conditions."""
        return (
            (line["part"], line["arrangement"], line["severity"] > 0)
            == (self.part, self.arrangement, self.corrupted)
            and self.corruption in (None, line["corruption"])
            and self.severity in (None, line["severity"])
        )  # fmt: skip


CORRUPTED, CLEAN = Conditions(), Conditions(corrupted=False)
VALIDATION = Conditions("validation")


class Results(NamedTuple):
    """The answers of all nets, and the settings they have in common."""

    header: Mapping[str, Any]
    answers: Sequence[Mapping[str, Any]]

    @property
    def sizes(self) -> list[int]:
        """The request sizes."""
        return list(self.header["questions"]["sizes"])

    @property
    def configurations(self) -> dict[str, str]:
        """The configurations by their short names, those that depend least on requests first."""
        return dict(self.header["configurations"])

    @property
    def norms(self) -> list[str]:
        """The norms, in the order in which they were run."""
        return list(dict.fromkeys(line["norm"] for line in self.answers))

    @property
    def seeds(self) -> list[int]:
        """The seeds."""
        return sorted({line["seed"] for line in self.answers})

    @property
    def sorted_severity(self) -> int | None:
        """The severity at which requests came sorted; ``None`` where they did not."""
        severities = (line["severity"] for line in self.answers if line["arrangement"] == "sorted" and line["severity"])
        return next(severities, None)

    def by_seed(self, norm: str, name: str, size: int, where: Conditions = CORRUPTED) -> list[float]:
        """Return the accuracy of each seed, averaged over these conditions; NaN where there is none."""
        if size == 1:  # its arrangements do not differ
            where = where._replace(arrangement="shuffled")
        sizes = asked_sizes(self.sizes, where.arrangement)
        accuracies: dict[int, list[float]] = {seed: [] for seed in self.seeds}
        for line in self.answers:
            if line["norm"] == norm and where.include(line) and name in line["accuracy"]:
                by_size = line["accuracy"][name]
                accuracies[line["seed"]].append(by_size[0] if len(by_size) == 1 else by_size[sizes.index(size)])
        return [float(np.mean(values)) if values else float("nan") for values in accuracies.values()]

    def accuracy(self, norm: str, name: str, size: int, where: Conditions = CORRUPTED) -> Estimate:
        """Return the accuracy, mean over seeds with its interval."""
        return mean_interval(self.by_seed(norm, name, size, where))

    def gain(self, norm: str, name: str, size: int, where: Conditions = CORRUPTED) -> Estimate:
        """Return how much more accurate a configuration is than ``T``, with the interval of paired differences."""
        pairs = zip(self.by_seed(norm, name, size, where), self.by_seed(norm, "T", size, where), strict=True)
        return paired_interval([accuracy - of_population for accuracy, of_population in pairs])

    def best_on_validation(self, norm: str, size: int) -> str:
        """Return the configuration with the highest accuracy on validation corruptions."""
        means = {name: self.accuracy(norm, name, size, VALIDATION).mean for name in self.configurations}
        return max(means, key=means.__getitem__)


def read(path: Path) -> Results:
    """Read the answers of the study's nets from a table of runs."""
    rows = _rows(path)
    if not rows:
        raise ValueError(f"{path} has no results of the study: `bln reproduce shift` writes them")
    first = rows[0]
    for row, name in product(rows, ("samples", "epochs", "batch_size", "learning_rate", "questions", "configurations")):
        if row[name] != first[name]:
            raise ValueError(f"{path} has nets with {name} {first[name]} and {row[name]}; keep those of one study")
    header = {name: first[name] for name in ("questions", "configurations")}
    answers = [{"norm": row["norm"], "seed": row["seed"], **answer} for row in rows for answer in row["answers"]]
    return Results(header, answers)


def read_choices(path: Path) -> list[Mapping[str, Any]]:
    """Read the priors that were chosen without labels, and how well signs tell arrangements apart."""
    return [{"seed": row["seed"], **choice} for row in _rows(path) for choice in row["choices"]]


def _rows(path: Path) -> list[table_of_runs.Row]:
    return [row for row in table_of_runs.read(path) if row["task"] == "shift"]


def write(results: Results, folder: Path) -> Path:
    """Write ``shift.md`` with all tables, and its figures; return the path of the tables."""
    drawn = list(plots(results))
    parts = ["# When the data changes"]
    parts += [f"![{plot.alt}](figures/{plot.name}.png)\n\n{plot.caption}" for plot in drawn]
    for norm in bln_norms(results):
        tables = by_request(results, norm), by_severity(results, norm), when_sorted(results, norm)
        parts += [f"## The {BLN[norm]}", *(markdown(*table) for table in tables)]
    parts += ["## By norm", markdown(*by_norm(results)), "## By corruption", markdown(*by_corruption(results))]
    return save(folder / "shift.md", "\n\n".join(parts) + "\n", drawn)


def bln_norms(results: Results) -> list[str]:
    """Return the norms whose nets can take statistics from requests."""
    return [norm for norm in results.norms if norm in BLN]


# ---- tables


Table = tuple[list[str], list[list[str]]]
"""The head and the rows of a table."""


def by_request(results: Results, norm: str, *, digits: int = 3) -> Table:
    """Return the accuracy by request size and configuration on corrupted, then on clean images."""
    rows = [
        [images, str(size), *_by_configuration(results, norm, size, where, digits)]
        for where, images in ((CORRUPTED, "corrupted"), (CLEAN, "clean"))
        for size in results.sizes
    ]
    return ["images", "request", *_configuration_names(results)], rows


def when_sorted(results: Results, norm: str) -> Table:
    """Return the accuracy by request size and configuration where requests come sorted by label."""
    kinds = [("clean", Conditions("test", "sorted", False))]
    if (severity := results.sorted_severity) is not None:
        kinds.append((f"corrupted, severity {severity}", Conditions("test", "sorted", severity=severity)))
    rows = [
        [images, str(size), *_by_configuration(results, norm, size, where)]
        for images, where in kinds
        for size in asked_sizes(results.sizes, "sorted")
    ]
    return ["images, sorted by label", "request", *_configuration_names(results)], rows


def _configuration_names(results: Results) -> list[str]:
    return [NAMES.get(name, name) for name in results.configurations]


def _by_configuration(results: Results, norm: str, size: int, where: Conditions, digits: int = 3) -> list[str]:
    """Return the cells of a row: the accuracy in each configuration."""
    return _cells([results.accuracy(norm, name, size, where) for name in results.configurations], digits)


def _cells(estimates: Sequence[Estimate], digits: int = 3) -> list[str]:
    """Return the cells of a row, the highest mean in bold."""
    best = max(estimate.mean for estimate in estimates)
    cells = [(_cell(estimate, digits), estimate.mean == best) for estimate in estimates]
    return [f"**{text}**" if bold else text for text, bold in cells]


def _cell(estimate: Estimate, digits: int = 3) -> str:
    return estimate.plus_minus(digits).replace("0.", ".")


def when_chosen(results: Results, choices: Sequence[Mapping[str, Any]], norm: str) -> Table:
    """Return the accuracy with ``T``, with a prior of 16, and with the prior that unlabelled requests choose."""
    rows = []
    for corrupted, arrangement in ((True, "shuffled"), (True, "sorted"), (False, "shuffled"), (False, "sorted")):
        severity = results.sorted_severity if corrupted else None
        where = Conditions("test", arrangement, corrupted, severity=severity)
        lines = [
            line for line in choices
            if line.get("arrangement") == arrangement and (line["corruption"] != "none") == corrupted
        ]  # fmt: skip
        for size in sorted({line["size"] for line in lines}):
            seeds: dict[int, list[float]] = {}
            for line in lines:
                if line["size"] == size:
                    seeds.setdefault(line["seed"], []).append(line["accuracy"])
            estimates = [results.accuracy(norm, name, size, where) for name in ("T", "16")]
            estimates.append(mean_interval([float(np.mean(values)) for values in seeds.values()]))
            images = f"corrupted, severity {severity}" if corrupted else "clean"
            rows.append([images, arrangement, str(size), *_cells(estimates)])
    return ["images", "arriving", "request", "`T`", "k = 16", "chosen"], rows


def told_apart(choices: Sequence[Mapping[str, Any]]) -> Table:
    """Return how often a request sorted by label has the larger sign than a shuffled one, by request size."""
    separations: dict[int, list[Mapping[str, float]]] = {}
    for line in choices:
        if "separation" in line:
            separations.setdefault(line["size"], []).append(line["separation"])
    rows = []
    for size, shares in sorted(separations.items()):
        rows.append(
            [str(size), *(_cell(mean_interval([share[name] for share in shares])) for name in ("sum", "depth"))]
        )
    return ["request", "summed over layers", "share of the last layer"], rows


def by_norm(results: Results) -> Table:
    """Return clean and corrupted accuracy of each norm, with population statistics and with the chosen ones."""
    sizes = results.sizes
    rows = []
    for norm in results.norms:
        if norm in BLN:
            cells = [_cell(results.accuracy(norm, "T", 1, where)) for where in (CLEAN, CORRUPTED)]
            for size in sizes:
                name = results.best_on_validation(norm, size)
                cells.append(f"{_cell(results.accuracy(norm, name, size))} ({NAMES.get(name, name)})")
        else:
            cells = [_cell(results.accuracy(norm, "net", 1, where)) for where in (CLEAN, CORRUPTED)]
            cells += [cells[1]] * len(sizes)
        rows.append([look(norm).name, *cells])
    return ["net", "clean, `T`", "corrupted, `T`", *(f"chosen, request {size}" for size in sizes)], rows


def by_corruption(results: Results, size: int = 16) -> Table:
    """Return the accuracy under each corruption at one request size."""
    norms, names = bln_norms(results), list(results.configurations)
    size = size if size in results.sizes else results.sizes[-1]
    head = ["corruption", *(f"{look(norm).name}, {NAMES.get(name, name)}" for norm in norms for name in names)]
    others = [norm for norm in OTHERS if norm in results.norms]
    rows = []
    for corruption in corruptions(results):
        where = CORRUPTED._replace(corruption=corruption)
        estimates = [results.accuracy(norm, name, size, where) for norm in norms for name in names]
        estimates += [results.accuracy(norm, "net", size, where) for norm in others]
        rows.append([corruption.replace("_", " "), *(f"{estimate.mean:.3f}" for estimate in estimates)])
    return [*head, *(look(norm).name for norm in others)], rows


def by_severity(results: Results, norm: str, sizes: Sequence[int] = (1, 16, 250)) -> Table:
    """Return the accuracy at each severity of corruptions, at some request sizes."""
    rows = [
        [str(size), str(severity), *_by_configuration(results, norm, size, CORRUPTED._replace(severity=severity))]
        for size in _known(sizes, results)
        for severity in sorted(results.header["questions"]["severities"])
    ]
    return ["request", "severity", *_configuration_names(results)], rows


def _known(sizes: Sequence[int], results: Results) -> Sequence[int]:
    """Return those of the request sizes that were asked about, or else the largest one that was."""
    return [size for size in sizes if size in results.sizes] or results.sizes[-1:]


def corruptions(results: Results) -> list[str]:
    """Return the corruptions of the test images."""
    return list(dict.fromkeys(line["corruption"] for line in results.answers if CORRUPTED.include(line)))


def rich_table(results: Results) -> Group:
    """Return the accuracies by request size, for rich to print."""
    from rich.console import Group
    from rich.table import Table as Rich
    from rich.text import Text

    parts: list[Rich | Text] = []
    for norm in bln_norms(results):
        head, rows = by_request(results, norm)
        accuracies = Rich(title=f"Accuracy, {BLN[norm]}", title_justify="left")
        for name in head:
            accuracies.add_column(name.replace("`", ""))
        for row in rows:
            means = (cell.strip("*").partition(" ±")[0] for cell in row)  # there is no room for intervals
            styles = ("bold" * cell.startswith("**") for cell in row)
            accuracies.add_row(*(Text(mean, style=style) for mean, style in zip(means, styles, strict=True)))
        parts.append(accuracies)
    for norm in (norm for norm in OTHERS if norm in results.norms):
        clean, shifted = (results.accuracy(norm, "net", 1, where).plus_minus() for where in (CLEAN, CORRUPTED))
        parts.append(Text(f"{look(norm).name}: clean {clean}, corrupted {shifted}, whatever the request"))
    parts.append(
        Text(
            "Means over seeds; corrupted: of corruptions and severities, too. The report has the intervals.",
            style="dim",
        )
    )
    return Group(*parts)


# ---- figures


def plots(results: Results) -> Iterator[Plot]:
    """Draw all figures of the study."""
    norms = bln_norms(results)
    if not norms:
        return
    yield lines(results, norms)
    yield heat_map(results, norms[0])
    if any(line["arrangement"] == "sorted" for line in results.answers):
        yield arrivals(results, norms[0])


def lines(results: Results, norms: Sequence[str]) -> Plot:
    """Draw the accuracy under shift against request size, a panel for each net."""
    described = []
    with styled():
        figure = Figure(figsize=(5, 2.7 * len(norms) + 0.8))
        panels = figure.subplots(len(norms), 1, sharex=True, squeeze=False)[:, 0]
        for axes, norm in zip(panels, norms, strict=True):
            described.append(f"{BLN[norm]}: {_draw(axes, results, norm, CORRUPTED)}")
            axes.set_title(BLN[norm])
        for norm in OTHERS:
            if norm in results.norms:
                style, value = look(norm), results.accuracy(norm, "net", 1).mean
                for axes in panels:
                    axes.axhline(value, color=style.colour, linewidth=1.1, linestyle=(0, (4, 2)), zorder=1)
                panels[0].plot([], [], color=style.colour, linestyle=(0, (4, 2)), label=f"{style.name} net")
                described.append(f"{style.name} net {value:.2f}")
        _label(figure, list(panels), "accuracy on corrupted images")
    return Plot(
        "requests",
        "Accuracy on corrupted images, mean of 15 corruptions and their severities, against the size of a request.",
        "Line charts of accuracy on corrupted images against request size. " + "; ".join(described) + ".",
        figure,
    )


def arrivals(results: Results, norm: str) -> Plot:
    """Draw the accuracy on clean images against request size, of shuffled requests and of those sorted by label."""
    described = []
    with styled():
        figure = Figure(figsize=(5, 6.2))
        panels = figure.subplots(2, 1, sharex=True)
        for axes, arrangement in zip(panels, ("shuffled", "sorted"), strict=True):
            where = Conditions("test", arrangement, False)
            described.append(f"{arrangement}: {_draw(axes, results, norm, where)}")
            axes.set_title("shuffled" if arrangement == "shuffled" else "sorted by label")
        _label(figure, panels, "accuracy on clean images")
    return Plot(
        "arrivals",
        f"Accuracy of the {BLN[norm]} on clean images against the size of a request, by how images arrive.",
        "Line charts of accuracy on clean images against request size. " + "; ".join(described) + ".",
        figure,
    )


def _label(figure: Figure, panels: Sequence[Axes], accuracy: str) -> None:
    """Label both axes, and add a legend."""
    for axes in panels:
        axes.set_ylabel(accuracy)
    panels[-1].set_xlabel("images in a request")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, columnspacing=1.2)


def _draw(axes: Axes, results: Results, norm: str, where: Conditions) -> str:
    """Draw a line with its interval for each configuration, and return a description."""
    described = []
    for name in results.configurations:
        colour = _COLOURS.get(name, FAINT)
        estimates = [results.accuracy(norm, name, size, where) for size in results.sizes]
        means, low, high = np.array([estimate[:3] for estimate in estimates]).T
        label = NAMES.get(name, name).strip("`")
        axes.plot(results.sizes, means, color=colour, marker=_MARKERS.get(name, "o"), markersize=4.5, label=label)
        axes.fill_between(results.sizes, low, np.minimum(high, 1), color=colour, alpha=0.13, linewidth=0)
        described.append(f"{label} from {means[0]:.2f} at {results.sizes[0]} to {means[-1]:.2f} at {results.sizes[-1]}")
    axes.set_xscale("log")
    axes.set_xticks(results.sizes, [str(size) for size in results.sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    return ", ".join(described)


def heat_map(results: Results, norm: str, sizes: Sequence[int] = (1, 16, 250)) -> Plot:
    """Draw what each configuration gains over ``T`` under each corruption, a panel for each request size."""
    names, rows, sizes = list(results.configurations), corruptions(results), _known(sizes, results)
    with styled():
        figure = Figure(figsize=(5, len(sizes) * (0.22 * len(rows) + 0.35) + 0.9))
        panels = figure.subplots(len(sizes), 1, squeeze=False)[:, 0]
        for axes, size in zip(panels, sizes, strict=True):
            wheres = [CORRUPTED._replace(corruption=corruption) for corruption in rows]
            accuracies = np.array([[results.accuracy(norm, name, size, w).mean for name in names] for w in wheres])
            gains = accuracies - accuracies[:, [names.index("T")]]
            image = axes.imshow(gains, cmap="RdBu", vmin=-0.4, vmax=0.4, aspect="auto")
            for (row, column), value in np.ndenumerate(accuracies):
                ink = "white" if abs(gains[row, column]) > 0.28 else INK
                axes.text(column, row, f"{value:.2f}".lstrip("0"), ha="center", va="center", fontsize=8.5, color=ink)
            axes.set_xticks(range(len(names)), names)
            axes.set_yticks(range(len(rows)), [row.replace("_", " ") for row in rows])
            axes.set_title(f"{size} in a request")
            axes.grid(visible=False)
            axes.tick_params(length=0)
        figure.colorbar(
            image,
            ax=list(panels),
            location="bottom",
            label="accuracy minus that of T; columns: T, prior strengths, F",
            shrink=0.7,
            aspect=30,
            pad=0.02,
        )
    return Plot(
        "corruptions",
        f"Accuracy of the {BLN[norm]} under each corruption, mean of severities; blue gains over `T`, red loses.",
        "A heat map of accuracy by corruption and configuration; the table by corruption holds figures.",
        figure,
    )
