"""Draw charts of the training time of whole nets: ``python docs/_charts.py``, or ``make tables``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from _measured import LAYOUTS, MAIN, MODES, RESULTS, STEP_NAMES, gpu_steps, read_csv, step_norms
from matplotlib.figure import Figure

from bln.experiments.report.style import INK, Plot, look, styled

COLOURS = {
    "GroupNorm": look("gn").colour, "LayerNorm": look("ln").colour, "BLN grouped": look("bln-grouped").colour,
    "BLN grouped, fused": look("bln-gC").colour, "BLN pooled": look("bln-pooled").colour,
    "BLN as published": look("bln").colour,
}  # fmt: skip


def cpu_steps(results: Path = RESULTS) -> Plot:
    """Draw the time of a training step of ResNet-18 on a CPU with each norm."""
    rows = read_csv(results / "benchmarks" / "resnet18_cpu.csv")
    labels = [f"batch {row['batch']}, {LAYOUTS.get(row['layout'], row['layout'])}" for row in rows]
    bars = [{norm: float(row[norm]) for norm in ("GroupNorm", "BLN grouped")} for row in rows]
    return _bars("resnet18_cpu", "ResNet-18", labels, bars)


def gpu_chart(results: Path = RESULTS) -> Plot | None:
    """Draw the time of a training step of ResNet-50 on a GPU with each norm; ``None`` if it is not measured."""
    steps = {at: step for at, step in gpu_steps(results).items() if at[1:3] == MAIN}
    if not steps:
        return None
    labels = [f"batch {batch}, {MODES.get(mode, mode)}" for batch, _, _, mode in steps]
    norms = [norm for norm in step_norms(steps) if norm != "bn"]
    bars = [{STEP_NAMES[norm]: float(step[norm]["ratio"]) for norm in norms if norm in step} for step in steps.values()]
    return _bars("resnet50_gpu", "ResNet-50", labels, bars)


def _bars(name: str, net: str, labels: Sequence[str], bars: Sequence[Mapping[str, float]]) -> Plot:
    """Draw a group of bars for each label: the times of norms as multiples of BatchNorm's."""
    places: dict[str, list[float]] = {norm: [] for norm in COLOURS}
    middles, at = [], 0.0
    for group in bars:
        middles.append(at + (len(group) - 1) / 2)
        for norm in group:
            places[norm].append(at)
            at += 1
        at += 0.6
    with styled():
        figure = Figure(figsize=(5, 1.1 + 0.23 * at))
        axes = figure.add_subplot()
        for norm, heights in places.items():
            if heights:
                values = [group[norm] for group in bars if norm in group]
                axes.barh(heights, values, height=0.9, color=COLOURS[norm], label=norm)
                for place, value in zip(heights, values, strict=True):  # the text stands left of the line at 1
                    axes.text(0.03, place, f"{value:.2f}", color="white", fontsize=8.5, va="center_baseline")
        axes.axvline(1, color=INK, linewidth=1)
        axes.set_yticks(middles, labels)
        axes.set(xlabel="time of a training step, BatchNorm = 1")
        axes.set_ylim(at - 0.8, -0.8)
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside lower center", ncols=2)
    norms = " and ".join(norm for norm, heights in places.items() if heights)
    alt = f"Bars: a training step of {net} with {norms}, as a multiple of BatchNorm's."
    return Plot(name, "", alt, figure)


if __name__ == "__main__":
    folder = RESULTS / "benchmarks"
    for plot in (cpu_steps(), gpu_chart()):
        if plot is not None:
            plot.save(folder)
            (folder / f"{plot.name}.svg").unlink()
