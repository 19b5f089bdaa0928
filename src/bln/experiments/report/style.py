"""The style of figures: colours and markers of norms, fonts; figures as files and inside a page."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure


class Look(NamedTuple):
    """The name, colour and marker of a norm, the same in every figure."""

    name: str
    colour: str
    dark: str
    """The colour on a dark page."""
    marker: str


LOOKS = {
    # Okabe and Ito's palette, which colour-blind readers can tell apart; markers differ, too.
    "bln": Look("BLN", "#0072b2", "#4aa8e0", "o"),
    "bln-grouped": Look("BLN grouped", "#5b2a86", "#c39bea", "h"),
    "bln-g1": Look("BLN, 1 group", "#3b0f70", "#d9b8ff", "<"),
    "bln-g4": Look("BLN, 4 groups", "#8c2981", "#e07fd6", ">"),
    "bln-g16": Look("BLN, 16 groups", "#de4968", "#ff8fa6", "d"),
    "bln-gC": Look("BLN, a group each", "#b8860b", "#f0c75e", "p"),
    "bln-pooled": Look("BLN pooled", "#56b4e9", "#93d0f5", "v"),
    "bn": Look("BatchNorm", "#d55e00", "#f08a3c", "s"),
    "ln": Look("LayerNorm", "#009e73", "#2bc79a", "^"),
    "gn": Look("GroupNorm", "#cc79a7", "#e39bc4", "D"),
    "batchrenorm": Look("Batch Renormalization", "#e69f00", "#f2b733", "P"),
    "rms": Look("RMSNorm", "#117733", "#4fb870", "<"),
    "none": Look("no norm", "#6e6e76", "#a0a0a8", "X"),
}
INK, FAINT, GRID = "#1f2328", "#636c76", "#d5d9de"
PAIRS = {"TT": "#332288", "FT": "#44aa99", "FF": "#999933", "TF": "#882255"}
"""Colours of the choices of E_B and Std_B, none of them a norm's."""
_DARK = {
    **{INK: "#e6e9ee", FAINT: "#9aa4af", GRID: "#3a4048"},
    **dict(zip(PAIRS.values(), ("#a596f5", "#5fd0bd", "#cfcf55", "#e07aa8"), strict=True)),
    **{look.colour: look.dark for look in LOOKS.values()},
}
"""The colours of a dark page by those of a light one."""

_STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9.5, "axes.titlesize": 10, "axes.labelsize": 9.5, "legend.fontsize": 9,
    "xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK,
    "xtick.color": FAINT, "ytick.color": FAINT, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "axes.edgecolor": FAINT, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8,
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.6, "axes.axisbelow": True, "lines.linewidth": 1.7,
    "legend.frameon": False, "figure.facecolor": "white", "savefig.facecolor": "white",
    "axes.facecolor": "none", "axes.unicode_minus": True,
    "svg.fonttype": "path",  # looks the same whatever fonts a machine has
    "figure.constrained_layout.use": True,
}  # fmt: skip


def look(norm: str) -> Look:
    """Return the look of a norm; grey, under its own name, if it has none."""
    return LOOKS.get(norm, LOOKS["none"]._replace(name=norm))


@dataclass(frozen=True)
class Plot:
    """A figure with the name of its files, a caption, and a description for screen readers."""

    name: str
    caption: str
    alt: str
    figure: Figure

    def save(self, folder: Path) -> None:
        """Write the figure as PNG and SVG, on white."""
        (folder / f"{self.name}.svg").write_text(self._svg, encoding="utf-8")
        with self._style():
            self.figure.savefig(folder / f"{self.name}.png", dpi=200, metadata={"Software": None})

    def inline(self) -> str:
        """Return an ``<svg>`` that follows a page from light to dark, if its style sheet has :func:`variables`."""
        svg = self._svg[self._svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)
        svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # no reference needs these
        prefix = f"f{zlib.crc32(self.name.encode()):x}-"  # ids must be unique on a page of several figures
        svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
        svg = svg.replace("fill: #ffffff", "fill: none")
        svg = re.sub("#[0-9a-f]{6}", lambda match: f"var(--c{match[0][1:]})" if match[0] in _DARK else match[0], svg)
        return svg.rstrip()

    @cached_property
    def _svg(self) -> str:
        text = io.StringIO()
        with self._style():
            self.figure.savefig(text, format="svg", metadata={"Date": None})
        self.figure.set_layout_engine("none")  # a second layout would move things
        return text.getvalue()

    @contextmanager
    def _style(self) -> Iterator[None]:
        with styled({"svg.hashsalt": self.name}):  # ids, and so the file, are the same each time
            yield


@contextmanager
def styled(settings: Mapping[str, object] | None = None) -> Iterator[None]:
    """Draw in the report's style with these further settings, and restore matplotlib's."""
    with matplotlib.rc_context({**_STYLE, **(settings or {})}):  # type: ignore[dict-item]
        yield


def variables(dark: bool) -> str:
    """Return the colours of figures as variables of a style sheet, for a light or a dark page."""
    return "".join(f"--c{light[1:]}:{on_dark if dark else light};" for light, on_dark in _DARK.items())
