"""Time the layer on a GPU against BatchNorm, LayerNorm, the compiled formula, a copy and an addition.

    python benchmarks/layer.py [--out DIR] [--types float32 bfloat16] [--shapes 0 1 ...] [--without-compiler]

For each shape, type and layout it prints microseconds of ``y.copy_(x)`` and ``torch.add(x, dy, out=dx)``. Forward is a
multiple of the first and backward of the second, for ``BatchLayerNorm`` (its statistics update included), ``BatchNorm``
and ``LayerNorm`` in the same layout, and ``torch.compile`` of the plain formula. The time of backward is that of both
less that of forward. Sweeps are two launches that compute nothing: one reads its inputs, the other reads them again in
reverse and writes one tensor. That is the floor for a norm whose input does not fit on chip. Inference is ``TTFF``.

Calls are replayed from a CUDA graph over many random inputs, more than the L2 cache holds; medians of replays. Host
time is that of eager calls, forward plus backward, over BatchNorm's. BLN's ratios are followed by the last recorded in
``docs/results``, in brackets, to show where another compiler made a kernel slower. With ``--out`` the table is written
as CSV, and drawn; the documentation is made from ``--out docs/results``.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

import bln
from bln import formula
from bln._backends.operators import current
from bln._spec import Spec

SHAPES = [  # samples, positions, features
    (256, (56, 56), 64), (128, (56, 56), 64), (32, (112, 112), 64), (64, (28, 28), 256), (32, (14, 14), 512),
    (128, (7, 7), 2048), (32, (512,), 1024), (256, (197,), 768), (64, (80,), 128), (25, (16, 16), 6), (25, (), 120),
    (1, (16, 16), 6), (4096, (), 4096), (2, (200, 336), 256), (1, (362, 362), 64), (8, (256, 512), 32),
]  # fmt: skip
COLUMNS = [
    "shape", "layout", "type", "copy us", "grouped forward", "BLN forward", "pooled forward", "sweeps forward",
    "BN forward", "LN forward", "compiled forward", "inference", "add us", "grouped backward", "BLN backward",
    "pooled backward", "sweeps backward", "BN backward", "LN backward", "compiled backward", "host / BN",
    "grouped host / BN",
]  # fmt: skip
OURS = [column for column in COLUMNS if column.startswith(("BLN", "pooled", "grouped", "inference", "host"))]
RECORDED = Path(__file__).parents[1] / "docs" / "results" / "layer.csv"
BYTES = 300_000_000  # of inputs a graph walks through: five times an H200's L2 cache


class LayerNorm(nn.LayerNorm):
    """Layer normalization over the features, in any dimension."""

    def __init__(self, features: int, at: int) -> None:
        super().__init__(features)
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(self.at, -1)).movedim(-1, self.at)


class BatchNorm(nn.Module):
    """Batch normalization, in either layout: features last is torch's channels last, so nothing is copied."""

    def __init__(self, features: int, positions: int, at: int) -> None:
        super().__init__()
        self.at, self.norm = at, (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[positions](features)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(self.at, 1)).movedim(1, self.at)


class Plain(nn.Module):
    """The formula in plain operators, without the statistics update."""

    def __init__(self, features: int, at: int) -> None:
        super().__init__()
        self.at, self.weight, self.bias = at, nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.float().movedim(self.at, -1)
        spec = Spec()
        y = formula.transform(rows, current(rows, None, spec), self.weight, self.bias, spec=spec)
        return y.movedim(-1, self.at).to(x.dtype)


@triton.jit
def _sweep(x, dy, y, size, WRITE: tl.constexpr, BLOCK: tl.constexpr):
    """Sum ``x``, and ``dy`` if given, for each program; or with ``WRITE`` write ``x + dy``, in reverse."""
    step, first = tl.num_programs(0) * BLOCK, tl.program_id(0) * BLOCK
    steps = tl.cdiv(size - first, step)
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.range(0, steps, num_stages=4):
        at = first + (steps - 1 - number if WRITE else number) * step + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
        if dy is not None:
            values += tl.load(dy + at, mask=at < size, other=0.0).to(tl.float32)
        if WRITE:
            tl.store(y + at, values.to(y.dtype.element_ty), mask=at < size)
        else:
            total += values
    if not WRITE:
        tl.store(y + tl.program_id(0), tl.sum(total))


def two_sweeps(x: Tensor, dy: Tensor | None, y: Tensor, sums: Tensor) -> None:
    """Read the inputs twice, and write one tensor."""
    for to in (sums, y):
        _sweep[(len(sums),)](x, dy, to, x.numel(), WRITE=to is y, BLOCK=2048, num_warps=4)


def replay(calls: list[Callable[[], object]]) -> float:
    """Return the median microseconds of a call, with all calls replayed from one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[1:])


def host(modules: list[nn.Module], x: Tensor, dy: Tensor) -> list[float]:
    """Return the host's seconds for an eager forward and backward of each module, without waiting for the device."""
    inputs = [[x, *module.parameters()] for module in modules]
    times: list[list[float]] = [[] for _ in modules]
    for at in range(300):
        for module, given, taken in zip(modules, inputs, times, strict=True):
            start = time.perf_counter()
            torch.autograd.grad(module(x), given, dy)
            taken.append(time.perf_counter() - start)
        if at % 5 == 4:
            torch.cuda.synchronize()
    return [statistics.median(taken[50:]) for taken in times]


Case = tuple[int, tuple[int, ...], int, torch.dtype, bool]
"""Samples, positions, features, type, and whether features are last."""


def measure(case: Case, compiler: bool) -> dict[str, object]:
    n, positions, c, dtype, last = case
    at = len(positions) + 1 if last else 1
    shape = [n, *positions]
    shape.insert(at, c)
    size = torch.Size(shape).numel() * dtype.itemsize
    count = max(3, min(64, BYTES // size))
    xs = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for _ in range(count)]
    dys = [torch.randn(shape, device="cuda").to(dtype) for _ in range(count)]
    out = torch.empty(shape, device="cuda", dtype=dtype)
    copy = replay([lambda x=x: out.copy_(x.detach()) for x in xs])
    add = replay([lambda x=x, dy=dy: torch.add(x.detach(), dy, out=out) for x, dy in zip(xs, dys, strict=True)])
    row: dict[str, object] = {
        "shape": f"{n}, {'x'.join(map(str, positions)) or '-'}, {c}", "layout": "features last" if last else "NCHW",
        "type": str(dtype)[6:], "copy us": round(copy, 1), "add us": round(add, 1),
    }  # fmt: skip
    sums = torch.empty(3 * torch.cuda.get_device_properties("cuda").multi_processor_count, device="cuda")
    forward = replay([lambda x=x: two_sweeps(x.detach(), None, out, sums) for x in xs])
    backward = replay([lambda x=x, dy=dy: two_sweeps(x.detach(), dy, out, sums) for x, dy in zip(xs, dys, strict=True)])
    row |= {"sweeps forward": round(forward / copy, 2), "sweeps backward": round(backward / add, 2)}
    modules: dict[str, nn.Module] = {
        "BLN": bln.BatchLayerNorm(c, channel_dim=at), "BN": BatchNorm(c, len(positions), at), "LN": LayerNorm(c, at),
    }  # fmt: skip
    if positions:
        modules["grouped"] = grouped(c, at)
        modules["pooled"] = bln.BatchLayerNorm(c, channel_dim=at, per_position=False)
    if compiler:
        torch._dynamo.reset()
        modules["compiled"] = torch.compile(Plain(c, at).cuda(), fullgraph=True)
    for name, module in modules.items():
        if name == "BN" and n == 1 and not positions:
            continue
        module.to("cuda", dtype if name == "LN" else None)  # torch's LayerNorm wants parameters of the input's type
        parameters = list(module.parameters())
        forward = replay([lambda x=x, m=module: m(x) for x in xs])
        both = replay(
            [
                lambda x=x, dy=dy, m=module, p=parameters: torch.autograd.grad(m(x), [x, *p], dy)
                for x, dy in zip(xs, dys, strict=True)
            ]
        )
        row |= {f"{name} forward": round(forward / copy, 2), f"{name} backward": round((both - forward) / add, 2)}
    with torch.no_grad():
        evaluated = modules["BLN"].eval()
        row["inference"] = round(replay([lambda x=x: evaluated(x) for x in xs]) / copy, 2)
    if size < 1_000_000:  # beyond that the device is slower than the host
        theirs, *ours = host(
            [modules[name].train() for name in ("BN", "BLN", "grouped") if name in modules], xs[0], dys[0]
        )
        for column, each in zip(("host / BN", "grouped host / BN"), ours, strict=False):
            row[column] = round(each / theirs, 2)
    return row


def grouped(c: int, at: int) -> nn.Module:
    return bln.BatchLayerNorm(c, groups=math.gcd(8, c), channel_dim=at)


def warm(case: Case) -> None:
    """Compile the kernels of a case into Triton's cache."""
    n, positions, c, dtype, last = case
    at = len(positions) + 1 if last else 1
    x = torch.randn([n, *positions, c], device="cuda").movedim(-1, at).contiguous().to(dtype).requires_grad_()
    norms = [bln.BatchLayerNorm(c, channel_dim=at)]
    if positions:
        norms += [grouped(c, at), bln.BatchLayerNorm(c, channel_dim=at, per_position=False)]
    for norm in norms:
        norm.cuda()(x).sum().backward()
        norm.eval()(x.detach())


def draw(rows: list[dict[str, object]], path: Path) -> None:
    """Plot forward and backward of each norm, features last, as multiples of a copy and of an addition."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {
        "BLN": ("BLN", "#0072b2", "o"), "BN": ("BatchNorm", "#d55e00", "s"), "LN": ("LayerNorm", "#009e73", "^"),
        "compiled": ("BLN's formula, compiled", "#999999", "D"),
    }  # fmt: skip
    types = [name for name in ("float32", "bfloat16") if any(row["type"] == name for row in rows)]
    panels = [(*each, kind) for each in (("forward", "a copy"), ("backward", "an addition")) for kind in types]
    figure, axes = pyplot.subplots(  # one below the other, for phones
        len(panels), 1, figsize=(5, 3.3 * len(panels)), sharex=True, squeeze=False, layout="constrained"
    )
    for axis, (direction, unit, kind) in zip(axes[:, 0], panels, strict=True):
        shown = [row for row in rows if row["type"] == kind and row["layout"] == "features last"]
        places = range(len(shown))
        for name, (label, colour, marker) in names.items():
            found = [row.get(f"{name} {direction}") for row in shown]
            times = [float(value) if value else float("nan") for value in found]  # type: ignore[arg-type]
            axis.plot(times, places, marker, color=colour, label=label, markersize=7 if name == "BLN" else 5)
        axis.set_yticks(places, [str(row["shape"]) for row in shown])
        axis.invert_yaxis()
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.grid(alpha=0.4)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(f"{direction}, {kind}, times {unit}", fontsize=10)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=200)


def recorded(path: Path = RECORDED) -> dict[str, dict[str, str]]:
    """Return the rows of the last run, by shape, layout and type; none if there was no run."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {_about(row): row for row in csv.DictReader(file)}


def _about(row: Mapping[str, object]) -> str:
    return ", ".join(str(row[column]) for column in COLUMNS[:3])


def line(row: Mapping[str, object], before: Mapping[str, Mapping[str, str]]) -> str:
    """Return a row of the printed table."""
    last = before.get(_about(row), {})
    cells = []
    for column in COLUMNS:
        value = str(row.get(column, ""))
        cells.append(f"{value} ({last[column]})" if value and column in OURS and last.get(column) else value)
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", type=int, default=range(len(SHAPES)), help="which, counted from 0")
    parser.add_argument("--without-compiler", action="store_true", help="leave the compiled formula out: faster")
    parser.add_argument("--processes", type=int, default=8, help="processes that compile kernels first; 0 for none")
    parser.add_argument("--out", type=Path, help="a folder for layer.csv and figures/layer.png")
    arguments = parser.parse_args()
    torch.compiler.config.force_disable_caches = True  # do not reuse a launch chosen while other programs ran
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device; benchmarks/cpu.py does not")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    cases: list[Case] = [
        (*SHAPES[number], getattr(torch, name), last)
        for name in arguments.types
        for number in arguments.shapes
        for last in ((True, False) if len(SHAPES[number][1]) == 2 else (True,))
    ]
    if arguments.processes:
        with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
            list(pool.map(warm, cases))
    rows, before = [], recorded()
    for case in cases:
        rows.append(measure(case, case[-1] and not arguments.without_compiler))
        print(line(rows[-1], before), flush=True)
        if arguments.out:
            write(rows, arguments.out)
        torch.cuda.empty_cache()
    if arguments.out:
        draw(rows, arguments.out / "figures" / "layer.png")


def write(rows: list[dict[str, object]], folder: Path) -> None:
    """Write the rows so far, so that an interrupted run keeps them."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    with (folder / "layer.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({column: row.get(column, "") for column in COLUMNS} for row in rows)


if __name__ == "__main__":
    main()
