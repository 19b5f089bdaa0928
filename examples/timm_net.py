"""Convert a net of timm, train it at batch 4, and say what each norm became.

    python examples/timm_net.py

Runs offline: weights start random, and images are coloured patterns in noise. ``pretrained=True`` gives real weights.
"""

from __future__ import annotations

from collections import Counter

import timm
import torch
from torch import nn

import bln

SIZE, CLASSES = 32, 4


def images(count, generator):
    """Return batches of four noisy patterns."""
    patterns = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(7))
    patterns = nn.functional.interpolate(patterns, SIZE)
    labels = torch.arange(count) % CLASSES
    pixels = patterns[labels] + torch.randn(count, 3, SIZE, SIZE, generator=generator)
    return list(zip(pixels.split(4), labels.split(4), strict=True))


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    net = timm.create_model("resnet10t", pretrained=False, num_classes=CLASSES)
    before = Counter(type(module).__name__ for module in net.modules() if "Norm" in type(module).__name__)
    bln.convert(net)  # timm's norms have the activation in them; so have the layers that take their place
    print(f"{dict(before)} became {len(bln.layers(net))} BLN layers")

    train, test = images(240, generator), images(80, generator)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    net.train()
    for x, y in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    bln.calibrate(net, train)

    net.eval()
    with torch.no_grad():
        right = sum((net(x).argmax(1) == y).sum().item() for x, y in test)
    print(f"timm: test accuracy {right / 80:.3f} at batch 4")


if __name__ == "__main__":
    main()
