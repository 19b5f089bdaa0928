"""Time training steps of whole nets with each norm, as a user sees them.

    python benchmarks/model.py                                  # ResNet-50 on a GPU, a small net on a CPU
    python benchmarks/model.py --nets resnet50 --batch 128 32 --modes eager graph compiled reduce-overhead

Inputs are random and change from step to step. A row has the time of a step (back to back, as in a training loop), the
host's part of it (until the last launch is queued), images per second and peak memory. ``graph`` replays the eager step
as one CUDA graph, which is the GPU's time alone. Each variant runs in its own process, and they take turns. Figures are
medians; the ratio is to BatchNorm in the same mode.
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bln
from bln.experiments import models

# ---- norms


class BatchNorm(nn.BatchNorm2d):
    """torch's BatchNorm for inputs of any rank."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


class Transposed(nn.Module):
    """A norm, with dimensions 1 and -1 of its input exchanged."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.movedim(1, -1)).movedim(-1, 1)
        return y


Norm = Callable[[int, int], nn.Module]
"""A function of the number of features and their dimension (1, or -1 for sequences) that makes a layer."""


def channels_first(make: Callable[[int], nn.Module]) -> Norm:
    """Extend a norm of features in dimension 1 to features in the last."""
    return lambda c, dim: make(c) if dim == 1 else Transposed(make(c))


def grouped(c: int, dim: int, activation: str | None = None) -> nn.Module:
    return bln.BatchLayerNorm(c, groups=math.gcd(8, c), channel_dim=dim, activation=activation)


NORMS: dict[str, Norm] = {
    "bn": channels_first(BatchNorm),
    "gn": channels_first(lambda c: nn.GroupNorm(math.gcd(32, c), c)),
    "ln": lambda c, dim: nn.LayerNorm(c) if dim == -1 else Transposed(nn.LayerNorm(c)),
    "bln grouped": grouped,
    "bln fused": grouped,  # in residual nets, fused with the activation and the residual
    "bln pooled": lambda c, dim: bln.BatchLayerNorm(c, per_position=False, dim_scale=False, channel_dim=dim),
    "bln published": lambda c, dim: bln.BatchLayerNorm(c, channel_dim=dim),
}

# ---- nets


class Activated(nn.Module):
    """``relu(norm(x) + residual)``, in place, as in torchvision's blocks."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y: Tensor = self.norm(x)
        return F.relu_(y if residual is None else y.add_(residual))


def activated(norm: str, c: int) -> nn.Module:
    """Return the norm followed by a ReLU."""
    return grouped(c, 1, "relu") if norm == "bln fused" else Activated(NORMS[norm](c, 1))


class Bottleneck(nn.Module):
    """A block of ResNet-50: 1x1, 3x3 and 1x1 convolutions and a shortcut."""

    def __init__(self, inside: int, width: int, stride: int, norm: str, expansion: int = 4) -> None:
        super().__init__()
        out = expansion * width
        kernels = (1, 3, 1) if expansion == 4 else (3, 3)
        widths = (inside, *[width] * (len(kernels) - 1), out)
        strides = (1, stride, 1) if expansion == 4 else (stride, 1)
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, k, s, k // 2, bias=False)
            for a, b, k, s in zip(widths, widths[1:], kernels, strides, strict=False)
        )
        self.norms = nn.ModuleList(activated(norm, b) for b in widths[1:])
        self.shortcut = None
        if stride > 1 or inside != out:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), NORMS[norm](out, 1))

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.shortcut is None else self.shortcut(x)
        *firsts, last = zip(self.convs, self.norms, strict=True)
        for conv, norm in firsts:
            x = norm(conv(x))
        out: Tensor = last[1](last[0](x), residual=residual)
        return out


def resnet(norm: str, blocks: tuple[int, ...], expansion: int, classes: int = 1000) -> nn.Module:
    """Return the standard residual net for images of 224 pixels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), activated(norm, 64), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for stage, count in enumerate(blocks):
        for at in range(count):
            layers.append(Bottleneck(inside, 64 * 2**stage, 2 if stage and not at else 1, norm, expansion))
            inside = expansion * 64 * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


class ConvNextBlock(nn.Module):
    """Depthwise convolution, norm, and two dense layers on each position."""

    def __init__(self, width: int, norm: str) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), NORMS[norm](width, 1)
        self.up, self.down = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(self.depthwise(x)))))


def convnext(norm: str, width: int = 192, depth: int = 9) -> nn.Module:
    """Return a stack of ConvNeXt blocks on patches."""
    blocks = [ConvNextBlock(width, norm) for _ in range(depth)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))
    return nn.Sequential(nn.Conv2d(3, width, 8, 8), *blocks, head)


def images(size: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, 3, size, size)


def words(batch: int) -> Tensor:
    return torch.randint(20_000, (batch, 80))


NETS: dict[str, tuple[Callable[[str], nn.Module], Callable[[int], Tensor]]] = {
    "resnet50": (partial(resnet, blocks=(3, 4, 6, 3), expansion=4), images(224)),
    "resnet18": (partial(resnet, blocks=(2, 2, 2, 2), expansion=1), images(224)),
    "resnet18-small": (partial(resnet, blocks=(2, 2, 2, 2), expansion=1), images(64)),
    "convnext": (convnext, images(224)),
    "lenet": (lambda norm: models.lenet(NORMS[norm]), images(32)),  # the paper's two nets
    "lstm": (lambda norm: models.sentiment(NORMS[norm]), words),
}
"""Each net's maker, and its random inputs of a batch size."""

# ---- measuring


class Step:
    """A training step of one variant."""

    def __init__(self, net: str, norm: str, mode: str, batch: int, dtype: torch.dtype, last: bool, device: str) -> None:
        make, draw = NETS[net]
        torch.manual_seed(0)
        self.device, self.dtype, self.batch, self.mode = device, dtype, batch, mode
        layout = torch.channels_last if last else torch.contiguous_format
        self.model = make(norm).to(device).to(memory_format=layout)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.inputs = [draw(batch).to(device) for _ in range(3)]
        if self.inputs[0].dim() == 4:
            self.inputs = [x.to(memory_format=layout) for x in self.inputs]
        self.targets = torch.randint(2, (batch,), device=device)
        self.count = 0
        compiled = {"compiled": {}, "reduce-overhead": {"mode": "reduce-overhead"}}.get(mode)
        self.call = self.model if compiled is None else torch.compile(self.model, **compiled)
        self.graph: Any = None
        if mode == "graph":
            self._capture()

    def _run(self, x: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=self.mode != "graph")
        with torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32):
            outputs = self.call(x)
        outputs = outputs.float()
        if outputs.dim() == 1:
            loss = F.binary_cross_entropy_with_logits(outputs, self.targets.float())
        else:
            loss = F.cross_entropy(outputs, self.targets)
        loss.backward()
        self.optimizer.step()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._run(self.inputs[0])
        torch.cuda.current_stream().wait_stream(stream)
        self.static = self.inputs[0].clone(memory_format=torch.preserve_format)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run(self.static)

    def __call__(self) -> None:
        self.count += 1
        x = self.inputs[self.count % 3]
        if self.graph is None:
            self._run(x)
        else:
            self.static.copy_(x)
            self.graph.replay()

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def times(step: Step, count: int) -> tuple[float, float]:
    """Return the seconds of a step, back to back, and of the host's part of one."""
    step.sync()
    start = time.perf_counter()
    for _ in range(count):
        step()
    step.sync()
    whole = (time.perf_counter() - start) / count
    start = time.perf_counter()
    step()
    host = time.perf_counter() - start
    step.sync()
    return whole, host


@dataclass(frozen=True)
class Variant:
    """A row of the table: a net with a norm, and how its steps are run."""

    net: str
    batch: int
    type: str
    layout: str
    mode: str
    norm: str


def serve(variant: Variant, device: str, pipe: Connection) -> None:
    """Prepare a variant in this process, then time as many steps as each message asks for."""
    pipe.recv()
    try:
        dtype, last = getattr(torch, variant.type), variant.layout == "last"
        step = Step(variant.net, variant.norm, variant.mode, variant.batch, dtype, last, device)
        for _ in range(4):
            step()
        step.sync()
        pipe.send(torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    while (count := pipe.recv()) is not None:
        pipe.send(times(step, count))


class Worker:
    """A variant in its own process: compilers run in parallel, and no variant shares memory with another.

    The process does its imports, then waits for :meth:`begin`.
    """

    def __init__(self, variant: Variant, device: str) -> None:
        self.variant = variant
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(variant, device, other), daemon=True)
        self.process.start()
        other.close()
        self.peak = 0.0
        self.found: list[tuple[float, float]] = []

    def begin(self) -> None:
        """Tell the process to prepare its variant."""
        with suppress(OSError):
            self.pipe.send(None)

    def ready(self) -> bool:
        """Wait until the variant is prepared, and return whether it runs."""
        try:
            answer = self.pipe.recv()
        except EOFError:
            answer = "its process ended"
        if isinstance(answer, str):
            print(f"{self.variant}: {answer}", file=sys.stderr)
            return False
        self.peak = answer
        return True

    def time(self, count: int) -> None:
        """Time ``count`` steps."""
        self.pipe.send(count)
        self.found.append(self.pipe.recv())

    def end(self) -> None:
        """End the process."""
        with suppress(OSError):  # it may have ended already
            self.pipe.send(None)
        self.process.join()


def measure(workers: list[Worker], repeats: int, steps: int) -> list[dict[str, Any]]:
    """Time variants in turns, so that drift of the machine affects all alike, and return a row for each."""
    for worker in workers:
        worker.begin()
    running = [worker for worker in workers if worker.ready()]
    for _ in range(repeats):
        for worker in running:
            worker.time(steps)
    for worker in workers:
        worker.end()
    medians = {worker: [statistics.median(each) for each in zip(*worker.found, strict=True)] for worker in running}
    plain = {
        replace(worker.variant, norm=""): whole for worker, (whole, _) in medians.items() if worker.variant.norm == "bn"
    }
    rows = []
    for worker, (whole, host) in medians.items():
        reference = plain.get(replace(worker.variant, norm=""))
        rows.append(
            {
                **asdict(worker.variant), "ms": round(1e3 * whole, 3),
                "ratio": round(whole / reference, 3) if reference else "", "host ms": round(1e3 * host, 3),
                "images/s": round(worker.variant.batch / whole), "peak MiB": round(worker.peak),
            }
        )  # fmt: skip
        print(" ".join(f"{value!s:>9}" for value in rows[-1].values()), flush=True)
    return rows


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=["resnet50"] if gpu else ["resnet18-small"])
    parser.add_argument("--norms", nargs="+", choices=NORMS, default=["bn", "gn", "bln grouped", "bln fused"])
    parser.add_argument("--modes", nargs="+", default=["eager", "graph"] if gpu else ["eager"])
    parser.add_argument("--batch", nargs="+", type=int, default=[128, 32] if gpu else [16])
    parser.add_argument("--types", nargs="+", default=["bfloat16"] if gpu else ["float32"])
    parser.add_argument("--layouts", nargs="+", choices=["last", "NCHW"], default=["last"] if gpu else ["NCHW"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10 if gpu else 2)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--out", type=Path, help="a CSV file for the rows")
    options = parser.parse_args()
    settings = product(options.nets, options.batch, options.types, options.layouts)
    waiting = [[Variant(*each, *way) for way in product(options.modes, options.norms)] for each in settings]
    ahead = [Worker(variant, options.device) for variant in waiting.pop(0)]
    rows: list[dict[str, Any]] = []
    while ahead:
        workers, ahead = ahead, [Worker(variant, options.device) for variant in (waiting.pop(0) if waiting else [])]
        rows += measure(workers, options.repeats, options.steps)
        if options.out is not None and rows:
            with options.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
