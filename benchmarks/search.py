"""Time all 16 configurations in one pass against 16 evaluations: the paper's LeNet, batches of 25.

    python benchmarks/search.py [--device cuda] [--batches 40] [--rounds 9]

Both run twice in every round, in turn, so that drift of the machine affects them alike; the two medians of one version
show how far a ratio can be trusted. The time of the search is that of the whole call, its check included.
"""

from __future__ import annotations

import argparse
import platform
import time
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

import bln


def lenet() -> nn.Module:
    norm = bln.BatchLayerNorm
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), norm(6),
        nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), norm(16), nn.Flatten(),
        nn.Linear(576, 120), nn.Tanh(), norm(120), nn.Linear(120, 84), nn.Tanh(), norm(84), nn.Linear(84, 10),
    )  # fmt: skip


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).float().mean()


@torch.no_grad()
def sixteen(model, batches, device):
    """Return the loss of each configuration as one would write it without ``bln.search``."""
    losses = {}
    for config in bln.StatisticsConfig.all():
        bln.configure(model, config)
        total = torch.zeros(2, device=device)
        for x, targets in batches:
            x, targets = x.to(device), targets.to(device)
            outputs = model(x)
            total += len(x) * torch.stack([F.cross_entropy(outputs, targets), accuracy(outputs, targets)])
        losses[str(config)] = total.tolist()[0] / sum(len(x) for x, _ in batches)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    device = torch.device(options.device)

    torch.manual_seed(0)
    model = lenet().to(device)
    for _ in range(20):
        model(torch.randn(25, 3, 32, 32, device=device))
    model.eval()
    batches = [(1.2 * torch.randn(25, 3, 32, 32) + 0.1, torch.randint(10, (25,))) for _ in range(options.batches)]
    modes = set()

    def one_pass():
        result = bln.search(model, batches, loss=F.cross_entropy, metrics={"accuracy": accuracy}, progress=False)
        modes.add(result.mode)
        return {str(row.config): row.loss for row in result}

    versions = {
        "16 evaluations": lambda: sixteen(model, batches, device),
        "bln.search": one_pass,
        "16 evaluations, again": lambda: sixteen(model, batches, device),
        "bln.search, again": one_pass,
    }
    found = {name: version() for name, version in versions.items()}  # this also warms up
    apart = max(abs(found["bln.search"][c] - loss) for c, loss in found["16 evaluations"].items())
    times: dict[str, list[float]] = {name: [] for name in versions}
    for _ in range(options.rounds):
        for name, version in versions.items():
            start = time.perf_counter()
            version()
            times[name].append(time.perf_counter() - start)

    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(
        f"LeNet, {options.batches} batches of 25, float32, {device.type} ({where}), torch {torch.__version__}, ", end=""
    )
    print(f"Python {platform.python_version()}, mode {'/'.join(sorted(modes))}, losses apart by {apart:.1e}")
    base = median(times["16 evaluations"])
    print(f"\n{'version':24} {'ms':>8} {'ratio':>7}   median of {options.rounds}, interleaved")
    for name, taken in times.items():
        print(f"{name:24} {1e3 * median(taken):8.1f} {base / median(taken):7.2f}")


if __name__ == "__main__":
    main()
