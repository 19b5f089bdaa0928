"""Which statistics should inference use? Handwritten digits, a small convolutional net, batches of 25.

    python examples/search_digits.py [--picture docs/img/search.png]

Trains for a few epochs, searches all 16 configurations on validation data, again for each layer, draws the scores (the
JSON beside the picture holds them), and reports the test set once, for the winner.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import bln

ARRIVALS = {"shuffled": ("reshuffled", "o"), "sorted": ("sorted by label", "s"), "single": ("one at a time", "D")}


def digits(batch_size=25, seed=0):
    """Training, validation and test batches of 8x8 images."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = order[:800], order[800:1300], order[1300:]
    return [[(images[i], labels[i]) for i in part.split(batch_size)] for part in parts]


def net():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), bln.BatchLayerNorm(8),
        nn.Conv2d(8, 16, 3), nn.Tanh(), bln.BatchLayerNorm(16), nn.Flatten(),
        nn.Linear(64, 32), nn.Tanh(), bln.BatchLayerNorm(32), nn.Linear(32, 10),
    )  # fmt: skip


def train(model, batches, epochs, optimizer):
    for _ in range(epochs):
        for x, targets in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), targets).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model, batches):
    model.eval()
    return sum((model(x).argmax(1) == t).sum().item() for x, t in batches) / sum(len(t) for _, t in batches)


def draw(result, path):
    """The 16 losses and accuracies with their standard errors, and where they go when requests arrive otherwise."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    calm, alarm = "#1f4e79", "#b3402f"
    rows = [row for row in result if not row.per_layer]
    figure, axes = plt.subplots(1, 2, figsize=(5, 6), sharey=True, layout="constrained")
    scores = {
        "loss": lambda score: (score.loss, score.loss_error),
        "accuracy": lambda score: (score.metrics["accuracy"], score.metrics_error["accuracy"]),
    }
    for axis, (name, of) in zip(axes, scores.items(), strict=True):
        for place, row in enumerate(rows):
            colour = alarm if row.collapses else calm
            value, error = of(row)
            others = {arrival: of(score)[0] for arrival, score in row.rebatched.items()}
            reach = [value, *others.values()]
            axis.hlines(place, min(reach), max(reach), color=colour, alpha=0.22, linewidth=6)
            for arrival, moved in others.items():
                axis.plot(moved, place, ARRIVALS[arrival][1], color="white", markeredgecolor=colour, markersize=4.5)
            axis.errorbar(value, place, xerr=error, fmt="none", ecolor=colour, elinewidth=1.5, capsize=3, zorder=4)
            axis.plot(value, place, "|", color=colour, markersize=11, markeredgewidth=2.5, zorder=5)
        axis.set_xlabel(f"validation {name}")
        axis.grid(axis="x", color="#e3e3e3")
        axis.set_axisbelow(True)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[0].set_xscale("log")
    ticks = [tick for tick in (0.1, 0.2, 0.3, 0.5, 1, 2, 3, 5, 10) if tick > 0.8 * min(row.loss for row in rows)]
    ticks = [tick for tick in ticks if tick < 1.1 * max(row.worst.loss for row in rows)]
    axes[0].set_xticks(ticks, map(str, ticks))
    axes[0].set_xticks([], minor=True)
    axes[0].set_yticks(range(len(rows)), [row.label for row in rows], family="monospace")
    axes[0].invert_yaxis()

    def key(label, **style):
        return plt.Line2D(
            [], [], **{"color": "white", "markeredgecolor": "#444444", "linestyle": ""} | style, label=label
        )

    handles = [key("as given, with its standard error", marker="|", markersize=14, markeredgewidth=3)]
    handles += [key(label, marker=marker) for label, marker in ARRIVALS.values()]
    handles.append(key("collapses", color=alarm, linestyle="-", linewidth=6, alpha=0.5))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(
        f"The 16 configurations on {result.samples} images in batches\nof 25, and in other batches", fontsize=11
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--picture", default="out/search.png")
    picture = parser.parse_args().picture

    torch.manual_seed(0)
    training, validation, test = digits()
    model = net()
    train(model, training, 3, torch.optim.Adam(model.parameters(), 0.01))

    result = bln.search(
        model, validation, loss=F.cross_entropy, metrics="accuracy", calibrate=training, rebatch=True, per_layer=True
    )
    print(result)
    draw(result, picture)
    figures = Path(picture).with_suffix(".json")
    replace(result, rows=[row for row in result if not row.per_layer]).to_json(figures)
    print(f"\nwritten: {picture}, {figures}")

    robust = bln.search(
        model, validation, loss=F.cross_entropy, metrics="accuracy", calibrate=training, robust=True, progress=False
    )
    winner = robust.apply(model)
    print(f"the best in the worst case, {winner.label}, tests at {accuracy(model, test):.3f}")


if __name__ == "__main__":
    main()
