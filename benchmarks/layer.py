"""The layer on a GPU beside BatchNorm, LayerNorm, a copy and an addition.

    python benchmarks/layer.py [--out DIR] [--types float32 bfloat16]

Prints, for each shape and type, microseconds of ``y.copy_(x)`` and ``torch.add(x, dy, out=dx)``, and as multiples of
the first the forward, of the second the backward of ``BatchLayerNorm`` (statistics update included), ``BatchNorm2d``
(channels last) and ``LayerNorm``. The backward is what forward and backward take together, less the forward. Calls are
replayed from a CUDA graph over many random inputs, more than the L2 cache holds; medians of replays. Host time is that
of eager calls, forward plus backward, beside BatchNorm. With ``--out`` the table is written there as CSV and Markdown.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import bln

SHAPES = [  # samples, positions, features
    (256, (56, 56), 64), (128, (56, 56), 64), (32, (112, 112), 64), (64, (28, 28), 256), (32, (14, 14), 512),
    (128, (7, 7), 2048), (32, (512,), 1024), (256, (197,), 768), (64, (80,), 128), (25, (16, 16), 6), (25, (), 120),
    (1, (16, 16), 6), (4096, (), 4096),
]  # fmt: skip
BYTES = 300_000_000  # of inputs a graph walks through: five times an H200's L2 cache


class Norm2d(nn.Module):
    """BatchNorm on features-last inputs; to it they are channels last, so nothing is copied."""

    def __init__(self, features: int, positions: int) -> None:
        super().__init__()
        self.norm = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[positions](features)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(-1, 1)).movedim(1, -1)


def replay(calls: list[Callable[[], object]]) -> float:
    """Median microseconds of a call, replayed from a graph that makes them all."""
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


def host(module: nn.Module, x: Tensor, dy: Tensor) -> float:
    """Microseconds the host takes for an eager forward and backward, the device not waited for."""
    for _ in range(10):
        torch.autograd.grad(module(x), [x, *module.parameters()], dy)
    torch.cuda.synchronize()
    times = []
    for _ in range(50):
        start = time.perf_counter()
        torch.autograd.grad(module(x), [x, *module.parameters()], dy)
        times.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


def measure(n: int, positions: tuple[int, ...], c: int, dtype: torch.dtype) -> dict[str, object]:
    shape = (n, *positions, c)
    size = torch.Size(shape).numel() * dtype.itemsize
    count = max(3, min(64, BYTES // size))
    xs = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for _ in range(count)]
    dys = [torch.randn(shape, device="cuda").to(dtype) for _ in range(count)]
    out = torch.empty(shape, device="cuda", dtype=dtype)
    copy = replay([lambda x=x: out.copy_(x.detach()) for x in xs])
    add = replay([lambda x=x, dy=dy: torch.add(x.detach(), dy, out=out) for x, dy in zip(xs, dys, strict=True)])
    row: dict[str, object] = {
        "shape": f"{n}, {'x'.join(map(str, positions)) or '-'}, {c}", "type": str(dtype)[6:], "copy us": round(copy, 1),
        "add us": round(add, 1),
    }  # fmt: skip
    modules = {
        "BLN": bln.BatchLayerNorm(c, channel_dim=-1),
        "BN": Norm2d(c, len(positions)),
        "LN": nn.LayerNorm(c, dtype=dtype),
    }
    forward, backward = {}, {}
    for name, module in modules.items():
        if name == "BN" and n == 1 and not positions:
            continue
        module.cuda()
        parameters = list(module.parameters())
        forward[name] = replay([lambda x=x, m=module: m(x) for x in xs])
        both = replay(
            [
                lambda x=x, dy=dy, m=module, p=parameters: torch.autograd.grad(m(x), [x, *p], dy)
                for x, dy in zip(xs, dys, strict=True)
            ]
        )
        backward[name] = both - forward[name]
    row |= {f"{name} forward": round(value / copy, 2) for name, value in forward.items()}
    row |= {f"{name} backward": round(value / add, 2) for name, value in backward.items()}
    if size < 1_000_000:
        row["BLN host / BN"] = round(host(modules["BLN"], xs[0], dys[0]) / host(modules["BN"], xs[0], dys[0]), 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, help="a folder for layer.csv and layer.md")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device; benchmarks/cpu.py does not")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    columns = [
        "shape", "type", "copy us", "BLN forward", "BN forward", "LN forward", "add us", "BLN backward", "BN backward",
        "LN backward", "BLN host / BN",
    ]  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    print("\n".join(lines))
    rows = []
    for name in arguments.types:
        for n, positions, c in SHAPES:
            rows.append(measure(n, positions, c, getattr(torch, name)))
            lines.append("| " + " | ".join(str(rows[-1].get(column, "")) for column in columns) + " |")
            print(lines[-1], flush=True)
            torch.cuda.empty_cache()
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "layer.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        with (arguments.out / "layer.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows({column: row.get(column, "") for column in columns} for row in rows)


if __name__ == "__main__":
    main()
