"""Residual nets that hold several runs: the features of run ``r`` are the ``r``-th part of every layer's features.

Convolutions have a group for each run, and normalizers keep the runs apart, so a run gives the numbers it gives alone.
Small mini-batches leave a device idle; several runs in one net cost little more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..norms import NORMS

Normalizer = Callable[[int], nn.Module]
"""Makes a normalizer from the number of features of a run, for ``(N, runs * features, H, W)``."""


def resnet(name: str, runs: int, *, inputs: int, widths: Sequence[int], blocks: int) -> nn.Module:
    """Return a residual net on ``(N, runs * inputs, H, W)`` with ten outputs for each run, ``(N, runs * 10)``.

    Widths of 16, 32 and 64 with three blocks each make ResNet-20.
    """
    norm = partial(NORMS[name], channel_dim=1, runs=runs, ordinary=True)
    parts: list[nn.Module] = [_conv(inputs, widths[0], 3, 1, runs), norm(widths[0]), nn.ReLU()]
    before = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            parts.append(_Block(before, width, 2 if stage and not block else 1, norm, runs))
            before = width
    head = nn.Conv2d(runs * before, runs * 10, 1, groups=runs)
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), head, nn.Flatten())


def _conv(inputs: int, outputs: int, kernel: int, stride: int, runs: int) -> nn.Conv2d:
    conv = nn.Conv2d(runs * inputs, runs * outputs, kernel, stride, padding=kernel // 2, bias=False, groups=runs)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


class _Block(nn.Module):
    """A residual block: two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Normalizer, runs: int) -> None:
        super().__init__()
        self.first, self.norm1 = _conv(inputs, outputs, 3, stride, runs), norm(outputs)
        self.second, self.norm2 = _conv(outputs, outputs, 3, 1, runs), norm(outputs)
        same_shape = stride == 1 and inputs == outputs
        self.around = nn.Identity() if same_shape else _conv(inputs, outputs, 1, stride, runs)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.around(x))


def together(make: Callable[[int], nn.Module], seeds: Sequence[int]) -> nn.Module:
    """Return a net of several runs, each with the initial weights of ``make(1)`` under its seed."""
    alone = []
    with torch.random.fork_rng(devices=[]):
        for seed in seeds:
            torch.manual_seed(seed)
            alone.append(make(1).parameters())
        net = make(len(seeds))
    with torch.no_grad():
        for parameter, *of_runs in zip(net.parameters(), *alone, strict=True):
            parameter.copy_(torch.cat(of_runs))
    return net
