"""Draw the charts of whole nets from their committed tables: ``python docs/_charts.py``, or ``make tables``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from _measured import LAYOUTS, MAIN, MODES, RESULTS, STEP_NAMES, _rows, gpu_steps, step_norms
from matplotlib.figure import Figure

from bln.experiments.report.style import INK, Plot, look, styled

COLOURS = {
    "GroupNorm": look("gn").colour, "LayerNorm": look("ln").colour, "BLN grouped": look("bln-grouped").colour,
    "BLN grouped, fused": look("bln-gC").colour, "BLN pooled": look("bln-pooled").colour,
    "BLN as published": look("bln").colour,
}  # fmt: skip


def cpu_steps(results: Path = RESULTS) -> Plot:
    """Return bars: a training step of ResNet-18 on a CPU with each norm."""
    rows = _rows(results / "benchmarks" / "resnet18_cpu.csv")
    labels = [f"batch {row['batch']}, {LAYOUTS.get(row['layout'], row['layout'])}" for row in rows]
    ratios = {name: [float(row[name]) for row in rows] for name in ("GroupNorm", "BLN grouped")}
    return _bars("resnet18_cpu", "ResNet-18", labels, ratios)


def gpu_chart(results: Path = RESULTS) -> Plot | None:
    """Return bars: a training step of ResNet-50 on a GPU with each norm; ``None`` if it is not measured."""
    steps = {at: step for at, step in gpu_steps(results).items() if at[1:3] == MAIN}
    if not steps:
        return None
    labels = [f"batch {batch}, {MODES.get(mode, mode)}" for batch, _, _, mode in steps]
    norms = [norm for norm in step_norms(steps) if norm != "bn"]
    ratios = {
        STEP_NAMES[norm]: [float(step[norm]["ratio"]) if norm in step else math.nan for step in steps.values()]
        for norm in norms
    }
    return _bars("resnet50_gpu", "ResNet-50", labels, ratios)


def _bars(name: str, net: str, labels: Sequence[str], ratios: Mapping[str, Sequence[float]]) -> Plot:
    """Return bars for each label, as multiples of BatchNorm's time."""
    width = 0.8 / len(ratios)
    with styled():
        figure = Figure(figsize=(5, 1.1 + 0.23 * len(labels) * (len(ratios) + 0.5)))
        axes = figure.add_subplot()
        for at, (norm, values) in enumerate(ratios.items()):
            places = [place + width * (at - (len(ratios) - 1) / 2) for place in range(len(labels))]
            axes.barh(places, values, height=0.9 * width, color=COLOURS[norm], label=norm)
            for place, value in zip(places, values, strict=True):
                text = "not run" if math.isnan(value) else f"{value:.2f}"
                ink = INK if math.isnan(value) else "white"
                axes.text(0.03, place, text, color=ink, fontsize=8.5, va="center_baseline")  # left of the line at 1
        axes.axvline(1, color=INK, linewidth=1)
        axes.set_yticks(range(len(labels)), labels)
        axes.set(xlabel="time of a training step, BatchNorm = 1")
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside lower center", ncols=2)
    alt = f"Bars: a training step of {net} with {' and '.join(ratios)}, as a multiple of BatchNorm's."
    return Plot(name, "", alt, figure)


if __name__ == "__main__":
    folder = RESULTS / "benchmarks"
    for plot in (cpu_steps(), gpu_chart()):
        if plot is not None:
            plot.save(folder)
            (folder / f"{plot.name}.svg").unlink()
