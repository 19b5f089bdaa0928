"""Find the rows of the launch table in ``bln/kernels/plan.py`` for this GPU, and print them.

    python benchmarks/tune.py                      # every kernel, both layouts: some minutes
    python benchmarks/tune.py --kernels measure

Each candidate is compiled by several processes first, then timed on inputs that the cache does not hold. A row's score
is the mean, over shapes and types, of its time in copies of the input.
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

from bln.kernels import plan
from bln.kernels.plan import Over, Row, Shape

KERNELS = ("measure", "apply", "measure_backward", "apply_backward")
SHAPES = [(128, 64, 56 * 56), (128, 256, 28 * 28), (128, 512, 14 * 14), (128, 2048, 7 * 7), (32, 256, 14 * 14)]
GROUPS = 8
WIDTHS = {False: (128, 256), True: (256, 512)}  # channels first


def rows(channels_first: bool, short: bool) -> list[Row]:
    """The candidates."""
    values = (1024, 2048, 4096) if short else (2048, 4096, 8192)
    options = values, WIDTHS[channels_first], (4, 8), (1, 3), (2**14, 2**16)
    return [Row(*row) for row in product(*options)]


def over(name: str, row: Row, shape: Shape, itemsize: int) -> Over:
    """The launch of a kernel with another row than the table's."""
    plan.TABLE[name, shape.channels_first, shape.p < plan.SHORT] = row
    constants: dict[str, Any] = {"MASKED": False}
    if name != "measure":
        constants["ACTIVATION"] = None
    return Over(name, shape, itemsize, GROUPS, constants)


def arguments(name: str, shape: Shape, dtype: torch.dtype, launch: Over) -> tuple[Any, ...]:
    """Random arguments of a kernel."""
    n, c, p, _ = shape
    x, dy = (torch.randn(n * c * p, dtype=dtype, device="cuda") for _ in range(2))
    gamma, beta = (torch.randn(c, device="cuda") for _ in range(2))
    behind = 2 * launch.splits * n * c
    found = torch.rand(4 * (c + n * GROUPS) + 4 + behind, device="cuda") + 0.5
    shares = torch.randn(2 * (c + n * GROUPS) + behind, device="cuda")
    y = torch.empty_like(x)
    return {
        "measure": (x, None, found, None),
        "apply": (x, y, None, None, found, gamma, beta),
        "measure_backward": (x, dy, None, None, found, gamma, beta, shares),
        "apply_backward": (x, dy, None, y, None, None, found, gamma, beta, shares),
    }[name]


def compile_some(work: list[tuple[str, Row, Shape, torch.dtype]]) -> None:
    """Compile these, so that they are in Triton's cache."""
    for name, row, shape, dtype in work:
        small = shape._replace(n=1)
        launch = over(name, row, small, dtype.itemsize)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--types", nargs="+", default=["bfloat16"])
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--best", type=int, default=4, help="how many rows of each kernel to print")
    options = parser.parse_args()
    types = [getattr(torch, name) for name in options.types]
    kinds = list(product(options.kernels, (False, True), (False, True)))
    work = [
        (name, row, Shape(*shape, channels_first), dtype)
        for (name, channels_first, short), dtype in product(kinds, types)
        for shape in shapes(short)
        for row in rows(channels_first, short)
        if row.run == 2**16  # it does not matter to the compiler
    ]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_some, [work[at :: options.processes * 4] for at in range(options.processes * 4)]))
    flush = torch.empty(64 * 2**20, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    for name, channels_first, short in kinds:
        scores: dict[Row, list[float]] = {}
        for shape, dtype in product(shapes(short), types):
            lying = Shape(*shape, channels_first)
            x, y = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2))
            copy = microseconds(lambda x=x, y=y: y.copy_(x), flush)
            for row in rows(channels_first, short):
                launch = over(name, row, lying, dtype.itemsize)
                given = arguments(name, lying, dtype, launch)
                call = partial(launch, stream, *given)
                call()
                scores.setdefault(row, []).append(microseconds(call, flush) / copy)
        ranked = sorted(scores, key=lambda row: statistics.mean(scores[row]))
        for row in ranked[: options.best]:
            each = " ".join(f"{score:5.2f}" for score in scores[row])
            print(f'    ("{name}", {channels_first}, {short}): Row{tuple(row)},  # {each}', flush=True)


def shapes(short: bool) -> list[tuple[int, int, int]]:
    """Those of a class of the table."""
    return [shape for shape in SHAPES if (shape[2] < plan.SHORT) == short]


if __name__ == "__main__":
    main()
