"""Draw the chart of whole nets from its committed table: ``python docs/_charts.py``, or ``make tables``."""

from __future__ import annotations

import csv
from pathlib import Path

from matplotlib.figure import Figure

from bln.experiments.report.style import INK, Plot, look, styled

FOLDER = Path(__file__).parent / "results" / "benchmarks"
COLUMNS = {"GroupNorm": "gn", "BLN grouped": "bln-grouped"}


def step_of_a_net() -> Plot:
    """Return bars: a training step of ResNet-18 with each norm, as a multiple of the step with BatchNorm."""
    with (FOLDER / "resnet18_cpu.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with styled():
        figure = Figure(figsize=(5, 2.8))
        axes = figure.add_subplot()
        for at, (column, norm) in enumerate(COLUMNS.items()):
            places = [place + 0.36 * (at - 0.5) for place in range(len(rows))]
            ratios = [float(row[column]) for row in rows]
            bars = axes.barh(places, ratios, height=0.33, color=look(norm).colour, label=column)
            axes.bar_label(bars, fmt="%.2f", label_type="center", color="white", fontsize=8.5)
        axes.axvline(1, color=INK, linewidth=1)
        axes.set_yticks(range(len(rows)), [f"batch {row['batch']}, {row['layout']}" for row in rows])
        axes.set(xlabel="time of a training step, BatchNorm = 1")
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside lower center", ncols=2)
    alt = "Bars: a training step of ResNet-18 with GroupNorm and BLN grouped, as a multiple of BatchNorm's."
    return Plot("resnet18_cpu", "", alt, figure)


if __name__ == "__main__":
    step_of_a_net().save(FOLDER)
    (FOLDER / "resnet18_cpu.svg").unlink()
