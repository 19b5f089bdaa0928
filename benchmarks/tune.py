"""Find the best rows of bln/_backends/triton/table.py on this GPU, and print them.

    python benchmarks/tune.py                      # every kernel of both forms and layouts: some minutes
    python benchmarks/tune.py --forms grouped --kernels measure

Candidates of the grouped form are compiled by several processes first, then timed with a cold cache. A row's score is
its time as a multiple of a copy of the input, averaged over shapes and types; in the published form, that of a whole
forward and backward.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

import bln
from bln._backends.triton import functions, table
from bln._backends.triton.grouped import TiledLaunch
from bln._backends.triton.launch import Shape

KERNELS = ("measure", "apply", "measure_backward", "apply_backward")
SHAPES = [(128, 64, 56 * 56), (128, 256, 28 * 28), (128, 512, 14 * 14), (128, 2048, 7 * 7), (32, 256, 14 * 14)]
GROUPS = 8
WIDTHS = {False: (128, 256), True: (256, 512)}  # channels first


def candidates(channels_first: bool, short: bool) -> list[table.Grouped]:
    """Return the rows to try for a class of shapes."""
    values = (1024, 2048, 4096) if short else (2048, 4096, 8192)
    options = values, WIDTHS[channels_first], (4, 8), (1, 3), (2**14, 2**16)
    return [table.Grouped(*row) for row in product(*options)]


def launch_with(name: str, row: table.Grouped, shape: Shape, itemsize: int) -> TiledLaunch:
    """Return the launch of a kernel with this row, which replaces the table's."""
    table.GROUPED[name, shape.channels_first, shape.p < table.SHORT] = row
    return TiledLaunch(name, shape, itemsize, GROUPS, **{} if name == "measure" else {"ACTIVATION": None})


def arguments(name: str, shape: Shape, dtype: torch.dtype, launch: TiledLaunch) -> tuple[Any, ...]:
    """Return random arguments for a kernel."""
    n, c, p, *_ = shape
    x, dy = (torch.randn(n * c * p, dtype=dtype, device="cuda") for _ in range(2))
    gamma, beta = (torch.randn(c, device="cuda") for _ in range(2))
    buffer = torch.rand(4 * (c + n * GROUPS) + 4, device="cuda") + 0.5
    dx_terms = torch.randn(2 * (c + n * GROUPS), device="cuda")
    sums = torch.empty((2, launch.splits, n, c), device="cuda")
    y = torch.empty_like(x)
    return {
        "measure": (x, None, buffer, sums, None),
        "apply": (x, y, None, None, buffer, gamma, beta),
        "measure_backward": (x, dy, None, None, buffer, gamma, beta, *sums),
        "apply_backward": (x, dy, None, y, None, None, buffer, gamma, beta, dx_terms),
    }[name]


def compile_some(work: list[tuple[str, table.Grouped, Shape, torch.dtype]]) -> None:
    """Compile candidates into Triton's cache."""
    for name, row, shape, dtype in work:
        small = shape._replace(n=1)
        launch = launch_with(name, row, small, dtype.itemsize)
        launch(0, *arguments(name, small, dtype, launch))


def microseconds(function: Any, flush: torch.Tensor, repeats: int = 9) -> float:
    times = []
    for _ in range(repeats):
        flush.fill_(1.0)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


PUBLISHED = [
    ((64, 784, 256), -1),
    ((128, 3136, 64), -1),
    ((256, 197, 768), -1),
    ((64, 256, 784), 1),
    ((4, 3136, 64), -1),
]


def show(key: str, scores: dict[Any, list[float]], best: int) -> None:
    """Print the best rows as the table writes them, with their time on each input as a multiple of a copy."""
    for row in sorted(scores, key=lambda row: statistics.mean(scores[row]))[:best]:
        ratios = " ".join(f"{score:5.2f}" for score in scores[row])
        print(f"    {key}: {type(row).__name__}{tuple(row)},  # {ratios}", flush=True)


def tune_published(types: list[torch.dtype], best: int, flush: torch.Tensor) -> None:
    """Try rows for each kernel of the published form, with the table's for the others."""
    for name, current in list(table.PUBLISHED.items()):
        scores: dict[table.Published, list[float]] = {}
        values, per_thread = ((number // 2, number, 2 * number) for number in current[:2])
        tried = [current._replace(values=v, per_thread=t, stages=s) for v, t, s in product(values, per_thread, (1, 3))]
        for (shape, channel_dim), dtype in product(PUBLISHED, types):
            layer = bln.BatchLayerNorm(shape[channel_dim], channel_dim=channel_dim).cuda()
            x, dy = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2))
            copy = microseconds(lambda x=x, dy=dy: dy.copy_(x), flush)
            x.requires_grad_()
            for row in tried:
                table.PUBLISHED[name] = row
                functions._plans.clear()
                step = partial(_step, layer, x, dy)
                step()
                scores.setdefault(row, []).append(microseconds(step, flush) / copy)
        table.PUBLISHED[name] = current
        show(f'"{name}"', scores, best)


def _step(layer: bln.BatchLayerNorm, x: torch.Tensor, dy: torch.Tensor) -> None:
    torch.autograd.grad(layer(x), x, dy)


def tune_grouped(names: list[str], types: list[torch.dtype], best: int, flush: torch.Tensor, processes: int) -> None:
    """Try rows for each kernel of the grouped form, launched alone."""
    kinds = list(product(names, (False, True), (False, True)))
    work = [
        (name, row, Shape(*shape, channels_first), dtype)
        for (name, channels_first, short), dtype in product(kinds, types)
        for shape in shapes(short)
        for row in candidates(channels_first, short)
        if row.chunk == 2**16  # the compiled kernel is the same for any chunk
    ]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_some, [work[at :: processes * 4] for at in range(processes * 4)]))
    stream = torch.cuda.current_stream().cuda_stream
    for name, channels_first, short in kinds:
        scores: dict[table.Grouped, list[float]] = {}
        for shape, dtype in product(shapes(short), types):
            view = Shape(*shape, channels_first)
            x, y = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2))
            copy = microseconds(lambda x=x, y=y: y.copy_(x), flush)
            for row in candidates(channels_first, short):
                launch = launch_with(name, row, view, dtype.itemsize)
                call = partial(launch, stream, *arguments(name, view, dtype, launch))
                call()
                scores.setdefault(row, []).append(microseconds(call, flush) / copy)
        show(f'("{name}", {channels_first}, {short})', scores, best)


def shapes(short: bool) -> list[tuple[int, int, int]]:
    """Return the shapes of a class of the table."""
    return [shape for shape in SHAPES if (shape[2] < table.SHORT) == short]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=("grouped", "published"), default=("grouped", "published"))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS, help="of the grouped form")
    parser.add_argument("--types", nargs="+", default=["bfloat16"])
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--best", type=int, default=4, help="rows of each kernel to print")
    options = parser.parse_args()
    types = [getattr(torch, name) for name in options.types]
    flush = torch.empty(64 * 2**20, device="cuda")
    if "grouped" in options.forms:
        tune_grouped(options.kernels, types, options.best, flush, options.processes)
    if "published" in options.forms:
        tune_published(types, options.best, flush)


if __name__ == "__main__":
    main()
