"""The figures of the reports, drawn by matplotlib without pyplot: no global state, no display."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from ...formula import weights
from .claims import searched
from .compare import MEASURES, difference, ended
from .statistics import Estimate, mean_interval
from .style import FAINT, INK, PAIRS, Plot, look, styled
from .summary import Run, Setting, Summary, authors

_CORNERS = {"FF": "o", "FT": "s", "TF": "^", "TT": "D"}
"""Markers of E_F and Std_F."""
_MINUS = "\N{MINUS SIGN}"
_WIDTH = 5.0
"""Inches. A phone shows figures of this width whole, and their text in its size."""


def mixing() -> Plot:
    """Draw figure 2: the weights of the two normalized activations in eq 16."""
    m = np.arange(1, 51)
    lines = zip(
        (f"batch: 1 {_MINUS} (1/m + ε)", f"features: 1/m {_MINUS} ε"),
        weights(1 / m, 1e-4, 1, False),
        (look("bn"), look("ln")),
        (-18, 10),
        strict=True,
    )
    with styled():
        figure = Figure(figsize=(_WIDTH, 2.9))
        axes = figure.add_subplot()
        for label, weight, style, above in lines:
            axes.plot(m, weight, color=style.colour, marker=style.marker, markevery=[0, 1, 4, 9, 24, 49], markersize=5)
            axes.annotate(label, (27, weight[26]), (0, above), textcoords="offset points", color=style.colour)
        axes.set(xlabel="mini-batch size m", ylabel="weight", xlim=(0, 51), ylim=(-0.03, 1.03))
        axes.set_xticks([1, 5, 10, 20, 25, 30, 40, 50])
    return Plot(
        "figure-2",
        "Figure 2. The weights of eq 16 (its numerator) against the size of the mini-batch, with ε = 1e-4.",
        "Two curves against mini-batch sizes 1 to 50. The weight of batch normalization rises from 0 at size 1 to 0.96 "
        "at 25 and 0.98 at 50; the weight of feature normalization falls from 1 to 0.04 and 0.02.",
        figure,
    )


class Column(NamedTuple):
    """A column of learning curves: a title and the runs of each norm."""

    title: str
    runs: dict[str, list[Run]]


_PARTS: tuple[tuple[str, Any], ...] = (("train", "-"), ("validation", (0, (4, 1.6))))


def learning(name: str, caption: str, columns: Sequence[Column]) -> Plot:
    """Draw loss and accuracy by epoch, a column for each group of runs, on common axes."""
    runs = [run for column in columns for group in column.runs.values() for run in group]
    with styled():
        alone = len(columns) == 1  # loss and accuracy side by side
        figure = Figure(figsize=(_WIDTH, 2.9) if alone else (max(_WIDTH, 2.2 * len(columns)), 5.6))
        shape = (1, 2) if alone else (2, len(columns))
        grid = figure.subplots(*shape, sharex=True, sharey="none" if alone else "row", squeeze=False).reshape(2, -1)
        losses: list[dict[str, list[float]]] = [{} for _ in columns]
        for (above, below), column, curves in zip(grid.T, columns, losses, strict=True):
            for norm, group in column.runs.items():
                for axes, what in ((above, "loss"), (below, "accuracy")):
                    for part, dashes in _PARTS:
                        drawn = _curve(axes, norm, group, f"{part}_{what}", dashes)
                        if what == "loss" and drawn:
                            curves[f"{look(norm).name} {part}"] = drawn
                    _test_marker(axes, norm, group, what)
            above.set_title(column.title)
            for axes in (above, below) if alone else (below,):
                axes.set_xlabel("epoch")
        _log_axis(grid[0], losses)
        grid[1, 0].yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        grid[0, 0].set_xlim(0.5, max([1, *(run.epochs for run in runs)]) + 0.5)
        grid[0, 0].xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
        grid[0, 0].set_ylabel("loss")
        grid[1, 0].set_ylabel("accuracy")
        handles = _handles(list(dict.fromkeys(norm for column in columns for norm in column.runs)), runs)
        figure.legend(handles=handles, loc="outside lower center", ncols=len(columns) + 2, columnspacing=1.3)
    return Plot(name, caption, _describe(columns), figure)


def _handles(norms: Sequence[str], runs: Sequence[Run]) -> list[Line2D]:
    def handle(label: str, **how: Any) -> Line2D:
        return Line2D([], [], label=label, **{"color": INK, **how})

    handles = [handle(look(norm).name, color=look(norm).colour, marker=look(norm).marker) for norm in norms]
    handles += [handle(part.replace("train", "training"), linestyle=dashes) for part, dashes in _PARTS]
    if any(map(_tested, runs)):
        handles.append(handle("test", marker="o", markersize=8, markerfacecolor="none", linestyle=""))
    if any(run.status == "diverged" for run in runs):
        handles.append(handle("diverged", marker="x", linestyle=""))
    if any(run.status == "running" for run in runs):
        handles.append(handle("still running", linewidth=0.9))
    return handles


def _curve(axes: Axes, norm: str, runs: Sequence[Run], curve: str, dashes: Any) -> list[float]:
    """Draw the mean of the finished runs with its interval, and each other run by itself as a thin line.

    Returns:
        The values drawn that a log axis can show.
    """
    style = look(norm)
    line: dict[str, Any] = {"color": style.colour, "linestyle": dashes}
    finished = [getattr(run, curve) for run in runs if run.status == "finished" and run.epochs]
    drawn: list[float] = []
    if finished:
        longest = max(map(len, finished))
        estimates = [mean_interval([run[at] for run in finished if at < len(run)]) for at in range(longest)]
        mean, low, high = np.array([estimate[:3] for estimate in estimates]).T
        epochs = np.arange(1, longest + 1)
        every = max(1, longest // 5)
        axes.plot(epochs, mean, **line, marker=style.marker, markersize=3.6, markevery=every, zorder=3)
        if curve.endswith("loss"):
            low = np.maximum(low, mean / 3)  # a t interval may cross 0, which a log axis cannot show
        else:
            low, high = np.clip((low, high), 0, 1)  # an accuracy lies between 0 and 1
        axes.fill_between(epochs, low, high, color=style.colour, alpha=0.16, linewidth=0, zorder=2)
        drawn += mean.tolist()
    for run in runs:
        if run.status != "finished" and run.epochs:
            values = np.array(getattr(run, curve))
            axes.plot(np.arange(1, len(values) + 1), values, **line, linewidth=0.9, zorder=2)
            known = np.flatnonzero(np.isfinite(values))
            if run.status == "diverged" and len(known):
                end = known[-1]
                axes.plot(end + 1, values[end], color=style.colour, marker="x", markeredgewidth=1.6, zorder=4)
            drawn += values[known].tolist()
    return [value for value in drawn if math.isfinite(value) and value > 0]


def _tested(run: Run) -> bool:
    return run.status == "finished" and run.test is not None and run.best_epoch is not None


def _test_marker(axes: Axes, norm: str, runs: Sequence[Run], what: str) -> None:
    """Draw a hollow marker at the epoch whose weights were tested, mean over seeds."""
    tested = [run for run in runs if _tested(run)]
    estimate = mean_interval([getattr(run.test, what) for run in tested])
    if estimate.n:
        epoch = sum(run.best_epoch or 0 for run in tested) / len(tested)
        _point(axes, norm, (epoch, estimate.mean), yerr=_error(estimate), markersize=8.5, markerfacecolor="none")


def _error(estimate: Estimate) -> list[list[float]] | None:
    if not estimate.has_interval:
        return None
    return [[estimate.mean - estimate.low], [estimate.high - estimate.mean]]


def _point(axes: Axes, norm: str, at: tuple[float, float], **options: Any) -> None:
    style = look(norm)
    options = {"markeredgewidth": 1.6, "capsize": 2.5, "linewidth": 1.3, "zorder": 5, **options}
    axes.errorbar(*at, color=style.colour, marker=style.marker, **options)


_OFF_SCALE = 4
"""A curve this many times above all training losses would flatten the rest. It is named instead."""


def _log_axis(row: Sequence[Axes], losses: Sequence[dict[str, list[float]]]) -> None:
    """Make loss axes logarithmic, with ticks at round numbers close enough to be read."""
    all_curves = [(name, curve) for curves in losses for name, curve in curves.items()]
    limit = _OFF_SCALE * max((max(curve) for name, curve in all_curves if name.endswith("train")), default=math.inf)
    shown = [value for _, curve in all_curves if min(curve) <= limit for value in curve] or [0.1, 1.0]
    crowded = any(min(curve) > limit for _, curve in all_curves)
    low, high = 0.85 * min(shown), (1.35 if crowded else 1.18) * max(shown)
    ratio = high / low
    by_ratio = (5, (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7)), (40, (1, 2, 3, 5)), (1e4, (1, 3))
    steps: Sequence[float] = next((steps for most, steps in by_ratio if ratio < most), (1,))
    ticks = [step * 10.0**power for power in range(-9, 12) for step in steps if low <= step * 10.0**power <= high]
    for axes, curves in zip(row, losses, strict=True):
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        off = [f"{name} {min(c):.3g} to {max(c):.3g}" for name, c in curves.items() if min(c) > limit]
        if off:
            axes.annotate(
                "\N{UPWARDS ARROW} off the scale:\n" + "\n".join(off), (0.985, 0.985), xycoords="axes fraction",
                ha="right", va="top", fontsize=8, color=FAINT,
            )  # fmt: skip


def _describe(columns: Sequence[Column]) -> str:
    """Describe the curves in words."""
    parts = []
    for column in columns:
        ends = []
        for norm, runs in column.runs.items():
            finished = [run for run in runs if run.status == "finished" and run.epochs]
            last = mean_interval([run.train_accuracy[-1] for run in finished])
            test = mean_interval([run.test.accuracy for run in finished if run.test])
            end = f"ends at train accuracy {last.mean:.2f}" if last.n else "has no finished run"
            ends.append(f"{look(norm).name} {end}" + (f" and test accuracy {test.mean:.2f}" if test.n else ""))
        parts.append(f"{column.title}: " + ("; ".join(ends) or "no curves") + ".")
    return "Learning curves of loss and accuracy by epoch. " + " ".join(parts)


def data(fraction: float) -> str:
    """Return the share of the training data in words."""
    return "all data" if fraction == 1 else f"{100 * fraction:g} % of the data"


def differences(name: str, caption: str, summary: Summary, settings: Sequence[Setting]) -> Plot | None:
    """Draw BLN minus BN and BLN minus LN with intervals, a panel for each measure; ``None`` without a pair."""
    rows = [
        (setting, rival)
        for setting in settings
        for rival in ("bn", "ln")
        if ended(summary, setting, "bln") and ended(summary, setting, rival)
    ]
    if not rows:
        return None
    several = len({setting.fraction for setting, _ in rows}) > 1
    labels = [
        f"{look(rival).name}, batch {setting.batch_size}" + (f", {100 * setting.fraction:g} %" if several else "")
        for setting, rival in rows
    ]
    with styled():
        figure = Figure(figsize=(_WIDTH, 3.0 + 1.0 * len(rows)))
        grid = figure.subplots(len(MEASURES), 1)
        for axes, measure in zip(grid, MEASURES, strict=True):
            axes.axvline(0, color=INK, linewidth=1, zorder=1)
            estimates = [difference(summary, setting, "bln", rival, measure).estimate for setting, rival in rows]
            middle = float(np.median([abs(estimate.mean) for estimate in estimates if estimate.n] or [1.0]))
            for at, ((_, rival), estimate) in enumerate(zip(rows, estimates, strict=True)):
                if not estimate.n:
                    axes.annotate(" no pair finished", (0, at), va="center", fontsize=8, color=FAINT)
                elif abs(estimate.mean) > _FAR * middle:
                    _arrow(axes, rival, estimate.mean, at)
                else:
                    filled = look(rival).colour if estimate.has_interval else "none"
                    where = (estimate.mean, at)
                    _point(axes, rival, where, xerr=_error(estimate), markersize=6, markerfacecolor=filled)
            axes.set_title(measure.name, loc="left")
            axes.set_yticks(range(len(rows)), labels)
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.grid(axis="y", visible=False)
            axes.tick_params(axis="y", length=0)
            axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
            side = "BLN better \N{RIGHTWARDS ARROW}" if measure.better > 0 else "\N{LEFTWARDS ARROW} BLN better"
            axes.set_xlabel(side, color=FAINT)
    alt = f"BLN minus other norms, a panel for each measure: {'; '.join(labels)}. The table holds the figures."
    return Plot(name, caption, alt, figure)


_FAR = 15
"""A difference this many times the median would flatten the rest. An arrow points to it instead."""


def _arrow(axes: Axes, norm: str, value: float, at: float) -> None:
    left = value < 0
    axes.annotate(
        f"{value:+.3g}".replace("-", _MINUS), (0.015 if left else 0.985, at), (34 if left else -34, 0),
        xycoords=axes.get_yaxis_transform(), textcoords="offset points", va="center", ha="left" if left else "right",
        fontsize=8.5, color=INK, arrowprops={"arrowstyle": "-|>", "color": look(norm).colour, "linewidth": 1.6},
    )  # fmt: skip


def configurations(name: str, caption: str, summary: Summary, settings: Sequence[Setting]) -> Plot | None:
    """Draw our test loss of each configuration against the authors'; ``None`` if there is nothing to compare."""
    theirs = {setting: searched(authors(), setting._replace(protocol="paper")) for setting in settings}
    panels = [setting for setting in settings if theirs[setting] and searched(summary, setting)]
    if not panels:
        return None
    with styled():
        columns, lines = min(2, len(panels)), math.ceil(len(panels) / 2)
        figure = Figure(figsize=(_WIDTH, 2.6 * lines + 0.9))
        grid = figure.subplots(lines, columns, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for axes, setting in zip(grid.flat, panels, strict=False):
            ours = [_centred(run) for run in searched(summary, setting)]
            for config, their in theirs[setting][0].test_configurations.items():
                estimate = mean_interval([run[config] for run in ours])
                if estimate.n and not math.isnan(their.loss):
                    axes.errorbar(
                        their.loss, estimate.mean, _error(estimate), color=PAIRS[config[:2]], linewidth=0.8,
                        marker=_CORNERS[config[2:]], markersize=5.5, markerfacecolor="none", markeredgewidth=1.4,
                    )  # fmt: skip
            axes.set(title=f"{data(setting.fraction)}, batch {setting.batch_size}", xlabel="authors' test loss")
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        figure.supylabel("our test loss, minus the run's mean", fontsize=9.5)
        handles = [Line2D([], [], color=colour, linewidth=5, label=f"{pair}xx") for pair, colour in PAIRS.items()]
        for pair, marker in _CORNERS.items():
            handles.append(Line2D([], [], color=INK, marker=marker, markerfacecolor="none", ls="", label=f"xx{pair}"))
        figure.legend(handles=handles, loc="outside lower center", ncols=4, handlelength=1.3)
    where = ", ".join(f"{data(setting.fraction)} at batch {setting.batch_size}" for setting in panels)
    alt = f"Scatter plots of the test loss of the 16 configurations, ours against the authors': {where}. "
    return Plot(name, caption, alt + "The tables hold the figures.", figure)


def _centred(run: Run) -> dict[str, float]:
    """Return test losses minus their mean: how good a run's weights are shows in all its configurations alike."""
    losses = {config: score.loss for config, score in run.test_configurations.items()}
    known = [loss for loss in losses.values() if not math.isnan(loss)]
    return {config: loss - sum(known) / len(known) if known else math.nan for config, loss in losses.items()}


Points = Mapping[str, Mapping[int, Estimate]]
"""Estimates by norm and batch size."""


def sizes_of(points: Points) -> list[int]:
    """Return the batch sizes that have an estimate."""
    return sorted({size for by_size in points.values() for size in by_size})


def batch_sizes(name: str, caption: str, points: Points, names: Mapping[str, str] | None = None) -> Plot:
    """Draw test accuracy against batch size, a line for each norm; ``names`` replace those of the looks."""
    sizes, described = sizes_of(points), []
    with styled():
        figure = Figure(figsize=(_WIDTH, 3.7))
        axes = figure.add_subplot()
        for at, (norm, by_size) in enumerate(points.items()):
            style = look(norm)
            style = style._replace(name=(names or {}).get(norm, style.name))
            known = {size: estimate for size, estimate in sorted(by_size.items()) if estimate.n}
            shift = 1.03 ** (at - (len(points) - 1) / 2)  # error bars side by side
            error = [
                _error(estimate) or [[math.nan], [math.nan]] for estimate in known.values()
            ]  # no cap without a bar
            axes.errorbar(
                [size * shift for size in known], [estimate.mean for estimate in known.values()],
                np.hstack(error) if error else None, color=style.colour, marker=style.marker,
                markersize=10 if style.marker == "*" else 6, capsize=2.5, label=style.name,
                zorder=3 - at / 100,  # the first, BLN, hides what it is level with
            )  # fmt: skip
            words = ", ".join(f"{estimate.mean:.2f} at {size}" for size, estimate in known.items())
            described.append(f"{style.name}: {words or 'no finished run'}")
        _size_axis(axes, sizes)
        axes.set(xlabel="batch size", ylabel="test accuracy")
        figure.legend(loc="outside lower center", ncols=2 if len(points) < 5 else 3)
    return Plot(name, caption, "Test accuracy against batch size. " + "; ".join(described) + ".", figure)


def _size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())


def margins(
    name: str, caption: str, norm: str, differences: Mapping[int, tuple[str, Estimate]], margin: float, norm_name: str
) -> Plot:
    """Draw differences to rivals in test accuracy, in points, against batch size; dotted lines mark the margin."""
    described = []
    with styled():
        figure = Figure(figsize=(_WIDTH, 2.9))
        axes = figure.add_subplot()
        axes.axhline(0, color=INK, linewidth=1, zorder=1)
        for bound in (-margin, margin):
            axes.axhline(100 * bound, color=FAINT, linewidth=1, linestyle=":", zorder=1)
        for size, (rival, estimate) in differences.items():
            points = estimate.times(100)
            _point(axes, norm, (size, points.mean), yerr=_error(points), markersize=7)
            axes.annotate(
                look(rival).name, (size, 1), (0, 2), xycoords=axes.get_xaxis_transform(),
                textcoords="offset points", ha="center", va="bottom", fontsize=8.5, color=INK,
            )  # fmt: skip
            described.append(f"{points.mean:+.1f} against {look(rival).name} at {size}".replace("-", _MINUS))
        _size_axis(axes, sorted(differences))
        if len(differences) > 1:
            axes.set_xlim(min(differences) / 1.4, max(differences) * 1.4)
        axes.set(xlabel="batch size", ylabel=f"{norm_name}\nminus the best other, points")
    return Plot(name, caption, f"Differences in test accuracy, in points: {'; '.join(described)}.", figure)
