"""Train a small convolutional net on scikit-learn's digits with BLN, BatchNorm and LayerNorm, at two batch sizes.

    python examples/digits.py [--seeds 3] [--epochs 4] [--batch-sizes 2 25]

Everything is chosen on the training part; the test part is looked at once, at the end.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import bln


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the features of an image, at each position."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


pooled = partial(bln.BatchLayerNorm, per_position=False, dim_scale=False)

NORMS = {
    "BLN as published": (bln.BatchLayerNorm, bln.BatchLayerNorm),
    "BLN pooled, unscaled": (pooled, pooled),
    "BN": (nn.BatchNorm2d, nn.BatchNorm1d),
    "LN": (LayerNorm2d, nn.LayerNorm),
}


def build(norm: str) -> nn.Sequential:
    image, dense = NORMS[norm]
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), image(6),
        nn.Conv2d(6, 16, 3), nn.Tanh(), image(16), nn.Flatten(),
        nn.Linear(64, 48), nn.Tanh(), dense(48), nn.Linear(48, 10),
    )  # fmt: skip


def train(norm: str, batch_size: int, seed: int, epochs: int, progress: Progress) -> tuple[float, float]:
    """Final training loss and test accuracy."""
    images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    images = (images.float() / 8 - 1).reshape(-1, 1, 8, 8)
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.4, random_state=seed, stratify=labels)
    torch.manual_seed(seed)
    model = build(norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    task = progress.add_task(f"{norm}, batch {batch_size}, seed {seed}", total=epochs * (len(x) // batch_size))
    for _ in range(epochs):
        losses = []
        for chosen in torch.randperm(len(x)).split(batch_size)[: len(x) // batch_size]:
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            progress.advance(task)
    progress.remove_task(task)
    if bln.layers(model):  # population statistics of the final weights
        bln.calibrate(model, x.split(batch_size)[: len(x) // batch_size], progress=False)
    with torch.no_grad():
        accuracy = (model.eval()(x_test).argmax(1) == y_test).float().mean().item()
    return statistics.mean(losses), accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[2, 25])
    arguments = parser.parse_args()
    if min(arguments.batch_sizes) < 2:
        parser.error("BatchNorm1d refuses a single sample in training: take batch sizes from 2 on")

    torch.set_num_threads(1)  # a net this small waits for its threads more than they help
    console = Console()
    table = Table(title="Handwritten digits, 1,078 to train on, 719 to test")
    for heading in ("batch size", "norm", "training loss", "test accuracy"):
        table.add_column(heading, justify="left" if heading == "norm" else "right")
    with Progress(console=console, transient=True) as progress:
        runs = progress.add_task("all runs", total=len(arguments.batch_sizes) * len(NORMS) * arguments.seeds)
        for batch_size in arguments.batch_sizes:
            for norm in NORMS:
                found = []
                for seed in range(arguments.seeds):
                    found.append(train(norm, batch_size, seed, arguments.epochs, progress))
                    progress.advance(runs)
                cells = (f"{statistics.mean(v):.3f} ± {statistics.pstdev(v):.3f}" for v in zip(*found, strict=True))
                table.add_row(str(batch_size), norm, *cells)
            table.add_section()
    console.print(table)
    console.print(f"Mean and deviation over {arguments.seeds} seeds, {arguments.epochs} epochs. BLN infers with TTFF.")


if __name__ == "__main__":
    main()
