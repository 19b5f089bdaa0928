"""Adapt a trained BatchNorm net to data unlike its training data, without labels and without training.

    python examples/adapt_to_shift.py

Handwritten digits of scikit-learn. The test images are faded and grey, as a dirty lens would make them.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

import bln


def digits():
    """Return training batches, test batches, and the same test batches faded."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = ([(images[i], labels[i]) for i in part.split(25)] for part in (order[:1297], order[1297:]))
    return train, test, [(0.5 * x + 0.2, y) for x, y in test]


@torch.no_grad()
def accuracy(net, batches):
    return sum((net(x).argmax(1) == y).sum().item() for x, y in batches) / sum(len(y) for _, y in batches)


def main() -> None:
    torch.manual_seed(0)
    train, test, faded = digits()
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), 0.003)
    for _ in range(4):
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    net.eval()
    print(f"as trained: {accuracy(net, test):.3f} of clean images, {accuracy(net, faded):.3f} of faded ones")

    adaptation = bln.adapt(net, prior=16)  # each request of 25 images is normalized by its own statistics, mostly
    print(f"prior=16: {accuracy(net, test):.3f} of clean images, {accuracy(net, faded):.3f} of faded ones")
    adaptation.undo()

    adaptation = bln.adapt(net, [x for x, _ in faded])  # unlabelled requests choose the prior
    print(f"adapted with prior {adaptation.prior:g} chosen by the requests: test accuracy {accuracy(net, faded):.3f}")


if __name__ == "__main__":
    main()
