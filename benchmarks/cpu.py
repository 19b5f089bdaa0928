"""Time forward plus backward of the layer on a CPU, against the two native norms it is built from.

    python benchmarks/cpu.py [--threads 2] [--seconds 4] [--markdown FILE]

For each shape it prints milliseconds of ``F.batch_norm(x.reshape(N, -1))`` plus ``F.layer_norm(x)``; for the grouped
form, those of ``BatchNorm2d``. The times of ``BatchLayerNorm`` (twice, to show the spread), its plain formula,
``BatchNorm2d``, ``GroupNorm`` and a copy are multiples of that. Each is the 20th percentile, since other work on the
machine only adds time. The layer is called as a user does: parameters have gradients and the population is updated.
Variants take turns in random order. Inputs are random and change from call to call, and do not fit in the cache.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bln
from bln import formula
from bln._backends import operators

CACHE = 64 * 2**20  # bytes: twice the last-level cache of most machines

FORMS = {"per position": {}, "pooled": {"per_position": False}, "grouped": {"groups": 8}}
SHAPES = [  # shape, channel_dim, form
    ((25, 80, 128), -1, "per position"),
    ((64, 28, 28, 64), -1, "per position"),
    ((32, 56, 56, 64), -1, "per position"),
    ((25, 16, 16, 6), -1, "per position"),
    ((64, 28, 28, 64), -1, "pooled"),
    ((25, 16, 16, 6), -1, "pooled"),
    ((64, 64, 28, 28), 1, "per position"),
    ((64, 64, 28, 28), 1, "pooled"),
    ((64, 64, 28, 28), 1, "grouped"),
    ((64, 28, 28, 64), -1, "grouped"),
    ((32, 64, 56, 56), 1, "grouped"),
    ((32, 56, 56, 64), -1, "grouped"),
    ((32, 256, 14, 14), 1, "grouped"),
    ((32, 14, 14, 256), -1, "grouped"),
]

Step = Callable[[Tensor, Tensor], object]


def stepper(function: Callable[[Tensor], Tensor], parameters: list[Tensor]) -> Step:
    def step(x: Tensor, dy: Tensor) -> object:
        return torch.autograd.grad(function(x), [x, *parameters], dy)

    return step


def plain(layer: bln.BatchLayerNorm) -> Callable[[Tensor], Tensor]:
    """Return the formula as a chain of operators."""

    def function(x: Tensor) -> Tensor:
        rows = x.movedim(layer.channel_dim, -1)
        current = operators.current(rows, None, layer.spec)
        y = formula.transform(rows, current, layer.weight, layer.bias, spec=layer.spec, xp=torch)
        return y.movedim(-1, layer.channel_dim)

    return function


def variants(shape: tuple[int, ...], channel_dim: int, form: str) -> dict[str, Step]:
    n, d = shape[0], shape[channel_dim]
    layer = bln.BatchLayerNorm(d, channel_dim=channel_dim, **FORMS[form])
    group_norm = nn.GroupNorm(math.gcd(8, d), d)
    norm = (nn.BatchNorm1d if len(shape) == 3 else nn.BatchNorm2d)(d)

    def layer_norm(x: Tensor) -> Tensor:
        return F.layer_norm(x.movedim(channel_dim, -1), (d,)).movedim(-1, channel_dim)

    def batch_norm_module(x: Tensor) -> Tensor:
        return norm(x.movedim(channel_dim, 1))  # features last is torch's channels last: no copy

    return {
        "batch_norm": stepper(lambda x: F.batch_norm(x.reshape(n, -1), None, None, training=True).view(shape), []),
        "layer_norm": stepper(layer_norm, []),
        "BLN": stepper(layer, list(layer.parameters())),
        "BLN again": stepper(layer, list(layer.parameters())),
        "plain formula": stepper(plain(layer), list(layer.parameters())),
        "BatchNorm": lambda x, dy: torch.autograd.grad(
            batch_norm_module(x), [x, *norm.parameters()], dy.movedim(channel_dim, 1)
        ),
        "GroupNorm": lambda x, dy: torch.autograd.grad(
            group_norm(x.movedim(channel_dim, 1)), [x, *group_norm.parameters()], dy.movedim(channel_dim, 1)
        ),
        "copy": lambda x, dy: x.detach().clone(),
    }


def measure(shape: tuple[int, ...], channel_dim: int, form: str, seconds: float) -> dict[str, float]:
    """Return the milliseconds of each variant."""
    steps = variants(shape, channel_dim, form)
    bytes_each = 2 * 4 * torch.Size(shape).numel()
    inputs = [
        (torch.randn(shape, requires_grad=True), torch.randn(shape)) for _ in range(max(2, CACHE // bytes_each + 1))
    ]
    times: dict[str, list[float]] = {name: [] for name in steps}
    start, source = time.perf_counter(), cycle(inputs)
    while time.perf_counter() - start < seconds or len(times["BLN"]) < 5:
        for name, step in random.sample(sorted(steps.items()), len(steps)):  # no variant always follows the same other
            x, dy = next(source)
            before = time.perf_counter()
            step(x, dy)
            times[name].append(time.perf_counter() - before)
    return {name: 1e3 * statistics.quantiles(values[1:], n=5)[0] for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each shape")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    columns = ("BLN", "BLN again", "plain formula", "BatchNorm", "GroupNorm", "copy")
    lines = [
        "| shape | features | statistics | torch, ms | " + " | ".join(columns) + " |",
        "|---|---|---|---|" + "---|" * len(columns),
    ]
    print(f"torch {torch.__version__}, {arguments.threads} threads, float32, forward plus backward")
    print("\n".join(lines), flush=True)
    for shape, channel_dim, form in SHAPES:
        found = measure(shape, channel_dim, form, arguments.seconds)
        base = found["BatchNorm"] if form == "grouped" else found["batch_norm"] + found["layer_norm"]
        ratios = " | ".join(f"{found[name] / base:.2f}" for name in columns)
        where = "last" if channel_dim == -1 else "second"
        lines.append(f"| {', '.join(map(str, shape))} | {where} | {form} | {base:.2f} | {ratios} |")
        print(lines[-1], flush=True)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
