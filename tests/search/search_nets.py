"""Nets to search, and the search done the long way."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import bln

CONFIGS = [str(config) for config in bln.StatisticsConfig.all()]
# float64 rounding, 2e-16, grows by at most 1/sqrt(eps) = 100 in each of three layers where a variance is near 0.
ROUNDING = 2e-16 * 100**3


def dense():
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), bln.BatchLayerNorm(9), nn.Linear(9, 8), nn.Tanh(), bln.BatchLayerNorm(8),
        nn.Linear(8, 3),
    )  # fmt: skip


def deep():
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), bln.BatchLayerNorm(9), nn.Linear(9, 8), nn.Tanh(), bln.BatchLayerNorm(8),
        nn.Linear(8, 7), nn.ReLU(), bln.BatchLayerNorm(7, affine=False, dim_scale=False), nn.Linear(7, 3),
    )  # fmt: skip


def conv(**options):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Tanh(), bln.BatchLayerNorm(4, **options), nn.Conv2d(4, 6, 2), nn.ReLU(),
        bln.BatchLayerNorm(6, mix_eps=0.01, **options), nn.Flatten(), nn.Linear(6 * 9, 3),
    )  # fmt: skip


def grouped():
    return conv(groups=2)


def lenet(groups=None):
    norm = partial(bln.BatchLayerNorm, groups=groups)
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), norm(6),
        nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), norm(16), nn.Flatten(),
        nn.Linear(576, 120), nn.Tanh(), norm(120), nn.Linear(120, 84), nn.Tanh(), norm(84), nn.Linear(84, 10),
    )  # fmt: skip


class Residual(nn.Module):
    """The first BLN layer stands inside a skip connection."""

    def __init__(self, **options):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), bln.BatchLayerNorm(8, **options), nn.Linear(8, 8))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Masked(nn.Module):
    """Both layers are given the same mask: one before and one behind the first copies."""

    def __init__(self, **options):
        super().__init__()
        make = lambda: bln.BatchLayerNorm(4, channel_dim=-1, **options)  # noqa: E731
        self.first, self.second = make(), make()
        self.embed, self.mix, self.head = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, mask=None):
        x = self.first(torch.tanh(self.embed(x)), mask)
        x = self.second(torch.relu(self.mix(x)), mask)
        return self.head(x.sum(1))


class Towers(nn.Module):
    """Two branches of two BLN layers each, added up."""

    def __init__(self, **options):
        super().__init__()
        norm = partial(bln.BatchLayerNorm, 5, **options)
        self.left, self.right = (
            nn.Sequential(nn.Linear(6, 5), nn.Tanh(), norm(), nn.Linear(5, 5), norm()) for _ in range(2)
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.left(x) + self.right(x))


def copies(tensor):
    """How many copies of a tensor the model is running on."""
    physical = tensor
    while torch._C._functorch.is_batchedtensor(physical):
        physical = torch._C._functorch.get_unwrapped(physical)
    return physical.numel() // tensor.numel()


def trained(model, batches, dtype=torch.float64):
    """Population statistics from some batches, unlike those searched, so that configurations differ."""
    model.to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        for inputs, _ in batches:
            run(model, inputs)
    return model


def run(model, inputs):
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def data(sizes, shape=(6,), classes=3, shift=0.0, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, *shape, generator=generator, dtype=dtype) * (1 + shift) + shift,
            torch.randint(classes, (n,), generator=generator),
        )
        for n in sizes
    ]


def brute_force(model, batches, assignment, loss=F.cross_entropy):
    """One assignment, the long way: the loss of each mini-batch, weighed by its samples."""
    names = list(bln.layers(model))
    before, mode = {name: layer.config for name, layer in bln.layers(model).items()}, model.training
    bln.configure(model, dict(zip(names, assignment, strict=True)))
    model.eval()
    with torch.no_grad():
        losses = [loss(run(model, inputs), targets).item() * len(targets) for inputs, targets in batches]
    bln.configure(model, before)
    model.train(mode)
    return sum(losses) / sum(len(targets) for _, targets in batches)


def all_assignments(model):
    return list(itertools.product(CONFIGS, repeat=len(bln.layers(model))))


def labelled(sizes, seed):
    """Two classes on either side of 0: in a batch of one class the batch's mean is the label."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for n in sizes:
        targets = torch.randint(2, (n,), generator=generator)
        x = torch.randn(n, 4, generator=generator) * 0.5 + (2 * targets[:, None] - 1)
        batches.append((x, targets))
    return batches


def sided(groups=None):
    """Tells the classes by the sign of the normalized features."""
    norm = bln.BatchLayerNorm(4, groups=groups, dim_scale=False, momentum=None)
    model = nn.Sequential(norm, nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[-1.0] * 4, [1.0] * 4]))
        model[1].bias.zero_()
        for x, _ in labelled((25,) * 40, 1):
            model(x)
    return model
