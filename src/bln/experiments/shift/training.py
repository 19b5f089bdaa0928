"""An ordinary recipe for the nets of the study: reshuffled images, flips and crops, Adam, a one-cycle learning rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bln

from .. import models
from ..augment import Crops, cut
from ..data import CIFAR
from ..norms import norm
from ..runs import RunError, RunFolder
from ..tasks import Part, accuracy

HELD_OUT = 1_000
"""The last images of the training set: no net sees them in training, choices are made on them."""
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of the three channels over the training set, as commonly used."""
_PAD = 4
"""Pixels around an image from which a crop is taken."""

Tick = Callable[[float], None]
"""Called with the share of the training that is done."""


@dataclass(frozen=True)
class Recipe:
    """The settings that decide the weights of a net."""

    norm: str
    seed: int
    samples: int = 20_000
    epochs: int = 8
    batch_size: int = 32
    learning_rate: float = 0.003

    @property
    def name(self) -> str:
        """The net's folder."""
        return f"{self.norm}-{self.samples}-batch{self.batch_size}-{self.epochs}-{self.learning_rate:g}-seed{self.seed}"


def standardize(images: Tensor) -> Tensor:
    """Return images in uint8 as the nets take them."""
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (_MEAN, _STD))
    whole = (images.float() / 255 - mean) / std
    return whole.contiguous(memory_format=torch.channels_last)


def build(name: str) -> nn.Module:
    """Return the study's net, the small residual net."""
    return models.resnet(norm(name)).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def held_out(cifar: CIFAR) -> Part:
    """Return the images of the training set that choices are made on."""
    return Part(cifar.train_images[-HELD_OUT:], cifar.train_labels[-HELD_OUT:])


def train(recipe: Recipe, out: Path, cifar: CIFAR, tick: Tick = lambda done: None) -> nn.Module:
    """Return the trained net in ``eval()``, from wherever its folder stands; a finished one is read."""
    folder = RunFolder(out, recipe)
    with folder.locked():
        folder.prepare()
        net = build(recipe.norm)
        if folder.result() is None:
            _Training(recipe, folder, net, cifar).run(tick)
        state = folder.best()
        if state is None:
            raise RunError(f"{folder.path} has lost its weights; delete that folder, and it is trained again")
        net.load_state_dict(state)
    return net.eval()


class _Training:
    """The training of one net. Random numbers depend on seed and epoch alone, so an interrupted run draws the same."""

    def __init__(self, recipe: Recipe, folder: RunFolder[Recipe], net: nn.Module, cifar: CIFAR) -> None:
        self.recipe, self.folder = recipe, folder
        torch.manual_seed(recipe.seed)
        self.net = build(recipe.norm)
        net.load_state_dict(self.net.state_dict())
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=recipe.learning_rate, fused=True)
        known = len(cifar.train_images) - HELD_OUT
        if not 0 < recipe.samples <= known:
            raise ValueError(f"expected 1 to {known:,} training images, got {recipe.samples:,}")
        chosen = torch.randperm(known, generator=torch.Generator().manual_seed(recipe.seed))[: recipe.samples]
        self.images, self.size = F.pad(cifar.train_images[chosen], [_PAD] * 4), cifar.train_images.shape[2:]
        self.labels = cifar.train_labels[chosen]
        self.validation = held_out(cifar)
        steps = -(-recipe.samples // recipe.batch_size) * recipe.epochs
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, recipe.learning_rate, steps)
        self.metrics: list[dict[str, Any]] = []
        self.seconds: list[float] = []

    def run(self, tick: Tick) -> None:
        state = self.folder.load(torch.device("cpu"))
        if state is not None:
            self.net.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.load_state_dict(state["schedule"])
            self.metrics, self.seconds = state["metrics"], state["seconds"]
        while len(self.metrics) < self.recipe.epochs:
            self.epoch(tick)
        self.folder.finish({"status": "finished", **self.metrics[-1]}, self.net.state_dict())

    def epoch(self, tick: Tick) -> None:
        begun, before = time.perf_counter(), len(self.metrics)
        torch.manual_seed(self.recipe.seed * 10_007 + before + 1)
        if bln.layers(self.net):  # their statistics are plain averages over the epoch
            bln.reset_statistics(self.net)
        self.net.train()
        total = torch.zeros(2)
        order = torch.split(torch.randperm(len(self.labels)), self.recipe.batch_size)
        for number, rows in enumerate(order, 1):
            labels = self.labels[rows]
            self.optimizer.zero_grad()
            crops = Crops.draw(len(rows), _PAD, mirror=True)
            outputs = self.net(standardize(cut(self.images, rows, crops, *self.size)))
            loss = F.cross_entropy(outputs, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.schedule.step()
            total += torch.stack((loss.detach(), accuracy(outputs.detach(), labels))) * len(rows)
            if number % 16 == 0:
                tick((before + number / len(order)) / self.recipe.epochs)
        train_loss, train_accuracy = (total / len(self.labels)).tolist()
        self.net.eval()
        with torch.no_grad():
            parts = self.validation.batches(250)
            right = sum(float(accuracy(self.net(standardize(x)), y)) * len(y) for x, y in parts)
        line = {"epoch": before + 1, "train_loss": train_loss, "train_accuracy": train_accuracy}
        self.metrics.append({**line, "validation_accuracy": right / len(self.validation.targets)})
        self.seconds.append(round(time.perf_counter() - begun, 3))
        state = {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        self.folder.save(state, self.metrics, self.seconds)
