"""Measure training steps per second of the paper's nets, against the same nets written plainly.

    python benchmarks/train.py [--threads 2] [--seconds 6] [--device cpu] [--markdown FILE]

Written plainly, BLN is a chain of operators, the LSTM a loop over time that autograd differentiates, the embedding has
a dense gradient, and there is no CUDA graph. Inputs are a random epoch: 9,000 images for the LeNet and 4,000 reviews
for the LSTM. The two take turns. On a GPU five seeds also train together.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain, count
from pathlib import Path

import torch
from torch import Tensor, nn

import bln
from bln import formula
from bln._backends import operators
from bln.experiments.lstm import LSTM
from bln.experiments.models import Words
from bln.experiments.norms import NORMS, Norm
from bln.experiments.steps import Steps, lane
from bln.experiments.tasks import TASKS, Part

EPOCH = {"cnn": 9_000, "rnn": 4_000}
SEEDS = 5


class PlainBLN(nn.Module):
    """The formula and the population's averages as plain operators."""

    def __init__(self, features: int, channel_dim: int) -> None:
        super().__init__()
        self.layer = bln.BatchLayerNorm(features, channel_dim=channel_dim, eps=1e-3, mix_eps=1e-4, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        rows = x.movedim(layer.channel_dim, -1)
        current = operators.current(rows, None, layer.spec)
        layer.population.update_from(x, None, layer.channel_dim, layer.spec, current, None)
        y: Tensor = formula.normalize(torch, rows, current, layer.weight, layer.bias, None, layer.spec)
        return y.movedim(-1, layer.channel_dim)


class PlainLSTM(LSTM):
    """The LSTM as a loop over time."""

    def forward(self, x: Tensor) -> Tensor:
        n, steps, _ = x.shape
        ones = x.new_ones(n, self.units)
        dropped = nn.functional.dropout(x.new_ones(n, 1, x.shape[2]), self.dropout, self.training)
        mask = nn.functional.dropout(ones, self.dropout, self.training)
        x, h, c, states = x * dropped, torch.zeros_like(ones), torch.zeros_like(ones), []
        for t in range(steps):
            o, i, f, g = (x[:, t] @ self.kernel + (h * mask) @ self.recurrent + self.bias).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return h if self.last else torch.stack(states, 1)


def plainly(task: str) -> nn.Module:
    norm: Norm = PlainBLN
    model = TASKS[task].model(norm)
    for at, module in enumerate(model):
        if isinstance(module, LSTM):
            module.__class__ = PlainLSTM
        if isinstance(module, Words):
            model[at] = nn.Embedding.from_pretrained(module.weight.detach().clone(), freeze=False)
    return model


def stepper(task: str, model: nn.Module, size: int, device: torch.device) -> Callable[[], None]:
    """Return a function that runs one step; ours, on a GPU, captured as a CUDA graph in a lane of its own."""
    plain = any(isinstance(module, PlainBLN) for module in model.modules())
    captured = device.type == "cuda" and not plain
    one = lane(device) if captured else nullcontext
    with one():
        model.to(device).train()
        optimizer = torch.optim.Adam(
            model.parameters(), lr=TASKS[task].learning_rate, fused=not plain, capturable=captured
        )
        if task == "cnn":
            inputs, targets = torch.randn(EPOCH[task], 3, 32, 32), torch.randint(10, (EPOCH[task],))
            if not plain:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        else:
            inputs, targets = torch.randint(20_000, (EPOCH[task], 80)), torch.rand(EPOCH[task]).round()
        part = Part(inputs, targets).to(device)

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            TASKS[task].loss(model(x), y).backward()
            optimizer.step()

        def eagerly() -> Iterator[object]:
            return (step(*batch) for batch in part.batches(size))

        walk: Callable[[], Iterator[object]] = eagerly if plain else Steps(step, part, size)

    turns = chain.from_iterable(walk() for _ in count())

    def turn() -> None:
        with one():
            next(turns)

    return turn


def together(turns: list[Callable[[], None]]) -> Callable[[], None]:
    def turn() -> None:
        for each in turns:
            each()

    return turn


def seconds(turns: list[Callable[[], None]], budget: float, device: torch.device) -> list[float]:
    """Return the median seconds of a step of each; on a GPU turns are longer, since steps queue there."""
    found: list[list[float]] = [[] for _ in turns]
    for turn in turns:
        for _ in range(6):
            turn()
    at_once = 30 if device.type == "cuda" else 3
    end = time.perf_counter() + budget
    while time.perf_counter() < end:
        for turn, times in zip(turns, found, strict=True):
            if device.type == "cuda":
                torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(at_once):
                turn()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begun) / at_once)
    return [statistics.median(times) for times in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    several = device.type == "cuda"
    columns = ["net", "batch", "ours, steps/s", "plainly, steps/s", "ratio", "an epoch, s"]
    columns += [f"{SEEDS} seeds together, steps/s each", f"time of {SEEDS} over one"] if several else []
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    print("\n".join(lines), flush=True)
    for task in EPOCH:
        for size in (25, 1):
            models = [TASKS[task].model(NORMS["bln"]) for _ in range(SEEDS if several else 1)]
            ours = [stepper(task, model, size, device) for model in models]
            turns = [ours[0], stepper(task, plainly(task), size, device), *[together(ours)] * several]
            one, plain, *five = seconds(turns, arguments.seconds, device)
            epoch = EPOCH[task] / size * one
            cells = [task, size, f"{1 / one:.1f}", f"{1 / plain:.1f}", f"{plain / one:.2f}", f"{epoch:.2f}"]
            cells += [text for each in five for text in (f"{1 / each:.1f}", f"{each / one:.2f}")]
            lines.append(f"| {' | '.join(map(str, cells))} |")
            print(lines[-1], flush=True)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
