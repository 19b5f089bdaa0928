"""Residual nets for several runs at once: the features of run ``r`` are the ``r``-th part of every layer's features.

Convolutions have a group for each run, and normalizers keep the runs apart, so each run is what it is alone. Small
mini-batches leave a device idle; several runs in one net cost little more than one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layer import BatchLayerNorm
from ..norms import GROUPS, BatchRenorm, groups_of

Normalizer = Callable[[int, int], nn.Module]
"""A normalizer of so many features on ``(N, runs * features, H, W)``, for so many runs."""


class BatchNorm(nn.Module):
    """torch's BatchNorm whose population statistics are plain averages since the last reset, as BLN's are here.

    ``nn.BatchNorm2d(momentum=None)`` computes the same, but reads a counter on the host, which no CUDA graph can.
    """

    latest: Tensor
    total: Tensor
    count: Tensor

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.register_buffer("latest", torch.zeros(2, features))  # mean and variance of the last mini-batch
        self.register_buffer("total", torch.zeros(2, features))
        self.register_buffer("count", torch.zeros(()))

    def reset_statistics(self) -> None:
        """Begin a new average."""
        self.total.zero_()
        self.count.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``."""
        affine = self.weight, self.bias
        if not self.training:
            mean, var = self.total / self.count
            return F.batch_norm(x, mean, var, *affine, False, 0.0, self.eps)
        y = F.batch_norm(x, self.latest[0], self.latest[1], *affine, True, 1.0, self.eps)
        with torch.no_grad():
            self.total += self.latest
            self.count += 1
        return y


def _apart(x: Tensor, runs: int) -> Tensor:
    """``(N, runs, features, H, W)``."""
    return x.reshape(len(x), runs, -1, *x.shape[2:])


class LayerNorm(nn.Module):
    """LayerNorm over the features of a run, at each position."""

    def __init__(self, features: int, runs: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.features, self.runs, self.eps = features, runs, eps
        self.weight, self.bias = (nn.Parameter(make(runs * features, 1, 1)) for make in (torch.ones, torch.zeros))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``."""
        rows = _apart(x, self.runs).movedim(2, -1)
        y = F.layer_norm(rows, (self.features,), eps=self.eps).movedim(-1, 2).flatten(1, 2)
        return y * self.weight + self.bias


class PublishedBLN(nn.Module):
    """BLN as published. Its statistics never leave a position, so runs can be one more dimension of positions."""

    def __init__(self, features: int, runs: int) -> None:
        super().__init__()
        self.features, self.runs = features, runs
        self.layer = BatchLayerNorm(features, affine=False, momentum=None)
        self.weight, self.bias = (nn.Parameter(make(runs * features, 1, 1)) for make in (torch.ones, torch.zeros))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``."""
        y: Tensor = self.layer(_apart(x, self.runs).transpose(1, 2))
        return y.transpose(1, 2).flatten(1, 2) * self.weight + self.bias


def _group_norm(features: int, runs: int) -> nn.Module:
    return nn.GroupNorm(runs * math.gcd(8, features), runs * features)


def _grouped(name: str, features: int, runs: int) -> nn.Module:
    return BatchLayerNorm(runs * features, groups=runs * groups_of(name, features), momentum=None)


NORMALIZERS: dict[str, Normalizer] = {
    "bn": lambda features, runs: BatchNorm(runs * features),
    "gn": _group_norm,
    "ln": LayerNorm,
    "batchrenorm": lambda features, runs: BatchRenorm(runs * features),
    "bln": PublishedBLN,
    **{name: partial(_grouped, name) for name in GROUPS},
}
"""Normalizers by name, each with its library's epsilon. ``bln-grouped`` has the groups of ``gn``, eight."""


def reset_statistics(net: nn.Module) -> None:
    """Begin new averages of population statistics; Batch Renormalization corrects by its own, which go on."""
    for module in net.modules():
        if isinstance(module, BatchNorm | BatchLayerNorm):
            module.reset_statistics()


def resnet(norm: Normalizer, runs: int, *, inputs: int, widths: Sequence[int], blocks: int) -> nn.Module:
    """A residual net on ``(N, runs * inputs, H, W)`` with ten classes: ``(N, runs * 10)``.

    With widths of 16, 32 and 64, and three blocks of each, it is ResNet-20.
    """
    parts: list[nn.Module] = [_conv(inputs, widths[0], 3, 1, runs), norm(widths[0], runs), nn.ReLU()]
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
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Normalizer, runs: int) -> None:
        super().__init__()
        self.first, self.norm1 = _conv(inputs, outputs, 3, stride, runs), norm(outputs, runs)
        self.second, self.norm2 = _conv(outputs, outputs, 3, 1, runs), norm(outputs, runs)
        alike = stride == 1 and inputs == outputs
        self.around = nn.Identity() if alike else _conv(inputs, outputs, 1, stride, runs)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.around(x))


def together(make: Callable[[int], nn.Module], seeds: Sequence[int]) -> nn.Module:
    """A net of several runs, each with the weights that ``make(1)`` draws under its seed."""
    drawn = []
    with torch.random.fork_rng(devices=[]):
        for seed in seeds:
            torch.manual_seed(seed)
            drawn.append(dict(make(1).named_parameters()))
        net = make(len(seeds))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(torch.cat([each[name] for each in drawn]))
    return net
