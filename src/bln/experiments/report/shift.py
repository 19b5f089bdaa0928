"""The report of the study of corrupted images, made from its results alone: tables, and figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from .. import table as table_of_runs
from .statistics import Estimate, mean_interval, paired_interval
from .style import FAINT, INK, Plot, look, styled

if TYPE_CHECKING:
    from rich.console import Group

BLN, OTHERS = {"bn": "BatchNorm net", "bln-grouped": "grouped BLN net"}, ("gn", "ln")
"""Nets whose statistics can come from the request, and nets whose cannot."""
NAMES = {"T": "`T`", "64": "k = 64", "16": "k = 16", "4": "k = 4", "F": "`F`"}
_COLOURS = {"T": INK, "64": "#332288", "16": "#0072b2", "4": "#44aa99", "F": "#d55e00"}
_MARKERS = {"T": "s", "64": "^", "16": "o", "4": "D", "F": "v"}


class Where(NamedTuple):
    """Conditions over which accuracies are averaged."""

    part: str = "test"
    arrangement: str = "shuffled"
    corrupted: bool = True
    corruption: str | None = None
    """This one alone."""
    severity: int | None = None
    """This one alone."""

    def holds(self, line: Mapping[str, Any]) -> bool:
        """Whether a line of results is of these conditions."""
        return (
            (line["part"], line["arrangement"], line["severity"] > 0)
            == (self.part, self.arrangement, self.corrupted)
            and self.corruption in (None, line["corruption"])
            and self.severity in (None, line["severity"])
        )  # fmt: skip


SHIFTED, CLEAN = Where(), Where(corrupted=False)
VALIDATION = Where("validation")


class Results(NamedTuple):
    """All answers, and what they have in common."""

    header: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]

    @property
    def sizes(self) -> list[int]:
        """The request sizes."""
        return list(self.header["questions"]["sizes"])

    @property
    def configurations(self) -> dict[str, str]:
        """The configurations by their short names, the least dependent on requests first."""
        return dict(self.header["configurations"])

    @property
    def norms(self) -> list[str]:
        """The norms, in the order in which they were run."""
        return list(dict.fromkeys(line["norm"] for line in self.lines))

    @property
    def seeds(self) -> list[int]:
        """The seeds."""
        return sorted({line["seed"] for line in self.lines})

    @property
    def severity(self) -> int | None:
        """The severity at which requests came sorted; ``None`` where they did not."""
        found = (line["severity"] for line in self.lines if line["arrangement"] == "sorted" and line["severity"])
        return next(found, None)

    def each(self, norm: str, name: str, size: int, where: Where = SHIFTED) -> list[float]:
        """The accuracy of each seed, averaged over these conditions; NaN where there is none."""
        known = self._places(where.arrangement)
        if size == 1:  # arrangements do not differ
            where = where._replace(arrangement="shuffled")
            known = self._places("shuffled")
        found: dict[int, list[float]] = {seed: [] for seed in self.seeds}
        for line in self.lines:
            if line["norm"] == norm and where.holds(line) and name in line["accuracy"]:
                values = line["accuracy"][name]
                found[line["seed"]].append(values[0] if len(values) == 1 else values[known[size]])
        return [float(np.mean(values)) if values else float("nan") for values in found.values()]

    def accuracy(self, norm: str, name: str, size: int, where: Where = SHIFTED) -> Estimate:
        """The mean over seeds with its interval."""
        return mean_interval(self.each(norm, name, size, where))

    def gain(self, norm: str, name: str, size: int, where: Where = SHIFTED) -> Estimate:
        """How much more accurate a configuration is than ``T``, with the interval of paired differences."""
        pairs = zip(self.each(norm, name, size, where), self.each(norm, "T", size, where), strict=True)
        return paired_interval([mine - other for mine, other in pairs])

    def chosen(self, norm: str, size: int) -> str:
        """The configuration that is the most accurate on validation corruptions."""
        found = {name: self.accuracy(norm, name, size, VALIDATION).mean for name in self.configurations}
        return max(found, key=found.__getitem__)

    def _places(self, arrangement: str) -> dict[int, int]:
        sizes = [size for size in self.sizes if size > 1 or arrangement == "shuffled"]
        return {size: at for at, size in enumerate(sizes)}


def read(path: Path) -> Results:
    """Read the nets of the study in a table of runs."""
    rows = _rows(path)
    if not rows:
        raise ValueError(f"{path} has no results of the study: `bln reproduce shift` writes them")
    common = ("samples", "epochs", "batch_size", "learning_rate"), ("questions", "configurations")
    first = rows[0]
    for row in rows:
        for name in (*common[0], *common[1]):
            if row[name] != first[name]:
                raise ValueError(f"{path} has nets with {name} {first[name]} and {row[name]}; keep those of one study")
    header: dict[str, Any] = {
        "recipe": {name: first[name] for name in common[0]},
        **{name: first[name] for name in common[1]},
    }
    header["hours"] = sum(row["hours"] for row in rows)
    header["commit"] = ", ".join(sorted({str(row["commit"])[:10] for row in rows}))
    lines = [{"norm": row["norm"], "seed": row["seed"], **answer} for row in rows for answer in row["answers"]]
    return Results(header, lines)


def read_choices(path: Path) -> list[Mapping[str, Any]]:
    """Read what was chosen without labels, and how well signs tell kinds of requests apart."""
    return [{"seed": row["seed"], **choice} for row in _rows(path) for choice in row["choices"]]


def _rows(path: Path) -> list[table_of_runs.Row]:
    return [row for row in table_of_runs.read(path) if row["task"] == "shift"]


def write(results: Results, folder: Path) -> Path:
    """Write ``shift.md`` with all tables, and ``figures/`` as PNG and SVG; returns the path of the tables."""
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    parts = ["# When the data changes"]
    for plot in plots(results):
        plot.save(figures)
        parts.append(f"![{plot.alt}](figures/{plot.name}.png)\n\n{plot.caption}")
    for norm in shown(results):
        tables = by_request(results, norm), by_severity(results, norm), when_sorted(results, norm)
        parts += [f"## The {BLN[norm]}", *(markdown(*each) for each in tables)]
    parts += ["## By norm", markdown(*by_norm(results)), "## By corruption", markdown(*by_corruption(results))]
    path = folder / "shift.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def shown(results: Results) -> list[str]:
    """The norms whose nets can take statistics from requests."""
    return [norm for norm in results.norms if norm in BLN]


# ---- tables: their head, and their rows


Table = tuple[list[str], list[list[str]]]


def by_request(results: Results, norm: str, *, digits: int = 3) -> Table:
    """The accuracy by request size and configuration under shift, then without; the best under shift is bold."""
    names = list(results.configurations)
    rows = []
    for where, words in ((SHIFTED, "corrupted"), (CLEAN, "clean")):
        for size in results.sizes:
            cells = [results.accuracy(norm, name, size, where) for name in names]
            best = max(cell.mean for cell in cells)
            texts = [_cell(cell, cell.mean == best, digits) for cell in cells]
            rows.append([words, str(size), *texts])
    return ["images", "request", *(NAMES.get(name, name) for name in names)], rows


def when_sorted(results: Results, norm: str) -> Table:
    """The accuracy by request size and configuration where requests come sorted by label."""
    names = list(results.configurations)
    rows = []
    for corrupted in (False, True):
        where = Where("test", "sorted", corrupted)
        if corrupted and results.severity is None:
            continue
        words = f"corrupted, severity {results.severity}" if corrupted else "clean"
        where = where._replace(severity=results.severity if corrupted else None)
        for size in results.sizes:
            if size > 1:
                cells = [results.accuracy(norm, name, size, where) for name in names]
                best = max(cell.mean for cell in cells)
                rows.append([words, str(size), *(_cell(cell, cell.mean == best) for cell in cells)])
    return ["images, sorted by label", "request", *(NAMES.get(name, name) for name in names)], rows


def when_chosen(results: Results, choices: Sequence[Mapping[str, Any]], norm: str) -> Table:
    """The accuracy with ``T``, with a prior of 16, and with the prior that unlabelled requests choose."""
    rows = []
    for corrupted, arrangement in ((True, "shuffled"), (True, "sorted"), (False, "shuffled"), (False, "sorted")):
        severity = results.severity if corrupted else None
        where = Where("test", arrangement, corrupted, severity=severity)
        lines = [
            line for line in choices
            if line.get("arrangement") == arrangement and (line["corruption"] != "none") == corrupted
        ]  # fmt: skip
        for size in sorted({line["size"] for line in lines}):
            seeds: dict[int, list[float]] = {}
            for line in lines:
                if line["size"] == size:
                    seeds.setdefault(line["seed"], []).append(line["accuracy"])
            cells = [results.accuracy(norm, name, size, where) for name in ("T", "16")]
            cells.append(mean_interval([float(np.mean(values)) for values in seeds.values()]))
            best = max(cell.mean for cell in cells)
            words = f"corrupted, severity {severity}" if corrupted else "clean"
            rows.append([words, arrangement, str(size), *(_cell(cell, cell.mean == best) for cell in cells)])
    return ["images", "arriving", "request", "`T`", "k = 16", "chosen"], rows


def told_apart(choices: Sequence[Mapping[str, Any]]) -> Table:
    """How often a request sorted by label has the larger sign than a shuffled one, by request size."""
    rows = []
    for size in sorted({line["size"] for line in choices if "separation" in line}):
        found = [line["separation"] for line in choices if line["size"] == size and "separation" in line]
        cells = [mean_interval([each[name] for each in found]) for name in ("sum", "depth")]
        rows.append([str(size), *(_cell(cell, False) for cell in cells)])
    return ["request", "summed over layers", "share of the last layer"], rows


def by_norm(results: Results) -> Table:
    """Clean and corrupted accuracy of each norm, with the population's statistics and with those chosen."""
    sizes = results.sizes
    rows = []
    for norm in results.norms:
        if norm in BLN:
            cells = [_cell(results.accuracy(norm, "T", 1, where)) for where in (CLEAN, SHIFTED)]
            for size in sizes:
                name = results.chosen(norm, size)
                cells.append(f"{_cell(results.accuracy(norm, name, size))} ({NAMES.get(name, name)})")
        else:
            cells = [_cell(results.accuracy(norm, "net", 1, where)) for where in (CLEAN, SHIFTED)]
            cells += [cells[1]] * len(sizes)
        rows.append([look(norm).name, *cells])
    return ["net", "clean, `T`", "corrupted, `T`", *(f"chosen, request {size}" for size in sizes)], rows


def by_corruption(results: Results, size: int = 16) -> Table:
    """The accuracy under each corruption at one request size."""
    norms, names = shown(results), list(results.configurations)
    size = size if size in results.sizes else results.sizes[-1]
    head = ["corruption", *(f"{look(norm).name}, {NAMES.get(name, name)}" for norm in norms for name in names)]
    others = [norm for norm in OTHERS if norm in results.norms]
    rows = []
    for corruption in corruptions(results):
        where = SHIFTED._replace(corruption=corruption)
        cells = [results.accuracy(norm, name, size, where) for norm in norms for name in names]
        cells += [results.accuracy(norm, "net", size, where) for norm in others]
        rows.append([corruption.replace("_", " "), *(f"{cell.mean:.3f}" for cell in cells)])
    return [*head, *(look(norm).name for norm in others)], rows


def by_severity(results: Results, norm: str, sizes: Sequence[int] = (1, 16, 250)) -> Table:
    """The accuracy at each severity of corruptions, at some request sizes."""
    names = list(results.configurations)
    sizes = [size for size in sizes if size in results.sizes] or results.sizes[-1:]
    rows = []
    for size in sizes:
        for severity in sorted(results.header["questions"]["severities"]):
            where = SHIFTED._replace(severity=severity)
            cells = [results.accuracy(norm, name, size, where) for name in names]
            best = max(cell.mean for cell in cells)
            rows.append([str(size), str(severity), *(_cell(cell, cell.mean == best) for cell in cells)])
    return ["request", "severity", *(NAMES.get(name, name) for name in names)], rows


def corruptions(results: Results) -> list[str]:
    """The corruptions that are reported on."""
    return list(dict.fromkeys(line["corruption"] for line in results.lines if SHIFTED.holds(line)))


def _cell(estimate: Estimate, best: bool = False, digits: int = 3) -> str:
    text = estimate.plus_minus(digits).replace("0.", ".")
    return f"**{text}**" if best else text


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a page."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def table(results: Results) -> Group:
    """The accuracies under shift, for rich to print."""
    from rich.console import Group
    from rich.table import Table as Rich
    from rich.text import Text

    parts: list[Rich | Text] = []
    for norm in shown(results):
        head, rows = by_request(results, norm)
        found = Rich(title=f"Accuracy, {BLN[norm]}", title_justify="left")
        for name in head:
            found.add_column(name.replace("`", ""))
        for row in rows:
            means = (cell.strip("*").partition(" ±")[0] for cell in row)  # there is no room for intervals
            styles = ("bold" * cell.startswith("**") for cell in row)
            found.add_row(*(Text(mean, style=style) for mean, style in zip(means, styles, strict=True)))
        parts.append(found)
    for norm in (norm for norm in OTHERS if norm in results.norms):
        clean, shifted = (results.accuracy(norm, "net", 1, where).plus_minus() for where in (CLEAN, SHIFTED))
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
    """All figures of the study."""
    norms = shown(results)
    if not norms:
        return
    yield lines(results, norms)
    yield heat_map(results, norms[0])
    if any(line["arrangement"] == "sorted" for line in results.lines):
        yield arrivals(results, norms[0])


def lines(results: Results, norms: Sequence[str]) -> Plot:
    """Accuracy under shift against request size, a panel for each net."""
    told = []
    with styled():
        figure = Figure(figsize=(5, 2.7 * len(norms) + 0.8))
        panels = figure.subplots(len(norms), 1, sharex=True, squeeze=False)[:, 0]
        for axes, norm in zip(panels, norms, strict=True):
            told.append(f"{BLN[norm]}: {_draw(axes, results, norm, SHIFTED)}")
            axes.set_title(BLN[norm])
        for norm in OTHERS:
            if norm in results.norms:
                style, value = look(norm), results.accuracy(norm, "net", 1).mean
                for axes in panels:
                    axes.axhline(value, color=style.colour, linewidth=1.1, linestyle=(0, (4, 2)), zorder=1)
                panels[0].plot([], [], color=style.colour, linestyle=(0, (4, 2)), label=f"{style.name} net")
                told.append(f"{style.name} net {value:.2f}")
        _label(figure, list(panels), "accuracy on corrupted images")
    return Plot(
        "requests",
        "Accuracy on corrupted images, mean of 15 corruptions and their severities, against the size of a request.",
        "Line charts of accuracy on corrupted images against request size. " + "; ".join(told) + ".",
        figure,
    )


def arrivals(results: Results, norm: str) -> Plot:
    """Accuracy on clean images against request size, where requests come shuffled and sorted by label."""
    told = []
    with styled():
        figure = Figure(figsize=(5, 6.2))
        panels = figure.subplots(2, 1, sharex=True)
        for axes, arrangement in zip(panels, ("shuffled", "sorted"), strict=True):
            where = Where("test", arrangement, False)
            told.append(f"{arrangement}: {_draw(axes, results, norm, where)}")
            axes.set_title("shuffled" if arrangement == "shuffled" else "sorted by label")
        _label(figure, panels, "accuracy on clean images")
    return Plot(
        "arrivals",
        f"Accuracy of the {BLN[norm]} on clean images against the size of a request, by how images arrive.",
        "Line charts of accuracy on clean images against request size. " + "; ".join(told) + ".",
        figure,
    )


def _label(figure: Figure, panels: Sequence[Axes], height: str) -> None:
    """Name both axes, and what the lines are."""
    for axes in panels:
        axes.set_ylabel(height)
    panels[-1].set_xlabel("images in a request")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, columnspacing=1.2)


def _draw(axes: Axes, results: Results, norm: str, where: Where) -> str:
    """A line for each configuration with its interval; what they show, in words."""
    told = []
    for name in results.configurations:
        colour = _COLOURS.get(name, FAINT)
        estimates = [results.accuracy(norm, name, size, where) for size in results.sizes]
        means, low, high = np.array([estimate[:3] for estimate in estimates]).T
        label = NAMES.get(name, name).strip("`")
        axes.plot(results.sizes, means, color=colour, marker=_MARKERS.get(name, "o"), markersize=4.5, label=label)
        axes.fill_between(results.sizes, low, np.minimum(high, 1), color=colour, alpha=0.13, linewidth=0)
        told.append(f"{label} from {means[0]:.2f} at {results.sizes[0]} to {means[-1]:.2f} at {results.sizes[-1]}")
    axes.set_xscale("log")
    axes.set_xticks(results.sizes, [str(size) for size in results.sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    return ", ".join(told)


def heat_map(results: Results, norm: str, sizes: Sequence[int] = (1, 16, 250)) -> Plot:
    """What each configuration gains over ``T`` under each corruption, a panel for each request size."""
    names, rows = list(results.configurations), corruptions(results)
    sizes = [size for size in sizes if size in results.sizes] or results.sizes[-1:]
    with styled():
        figure = Figure(figsize=(5, len(sizes) * (0.22 * len(rows) + 0.35) + 0.9))
        panels = figure.subplots(len(sizes), 1, squeeze=False)[:, 0]
        for axes, size in zip(panels, sizes, strict=True):
            wheres = [SHIFTED._replace(corruption=corruption) for corruption in rows]
            found = np.array([[results.accuracy(norm, name, size, w).mean for name in names] for w in wheres])
            gains = found - found[:, [names.index("T")]]
            drawn = axes.imshow(gains, cmap="RdBu", vmin=-0.4, vmax=0.4, aspect="auto")
            for (row, column), value in np.ndenumerate(found):
                ink = "white" if abs(gains[row, column]) > 0.28 else INK
                axes.text(column, row, f"{value:.2f}".lstrip("0"), ha="center", va="center", fontsize=8.5, color=ink)
            axes.set_xticks(range(len(names)), names)
            axes.set_yticks(range(len(rows)), [row.replace("_", " ") for row in rows])
            axes.set_title(f"{size} in a request")
            axes.grid(visible=False)
            axes.tick_params(length=0)
        figure.colorbar(
            drawn,
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
