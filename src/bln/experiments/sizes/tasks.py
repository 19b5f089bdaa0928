"""The tasks with an ordinary recipe: data, net and recipe of each. All but `shift` vary the batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import data
from ..augment import Pictures
from ..data import DataSet
from ..tasks import cifar10
from ..tasks import imdb as every_review
from . import nets
from .transformer import transformer


def digits(folder: Path) -> DataSet:
    """scikit-learn's digits, which need no folder; the grey levels are 0 to 16."""
    found = data.digits()
    train = torch.cat([found.train_images, found.validation_images])
    labels = torch.cat([found.train_labels, found.validation_labels])
    levels = [(images * 16).to(torch.uint8) for images in (train, found.test_images)]
    return DataSet(levels[0], labels, levels[1], found.test_labels)


TESTED = 2_500
"""Test reviews that are used."""


def imdb(folder: Path) -> DataSet:
    """IMDB, with the same part of the test reviews for every run."""
    found = every_review(folder)
    part = torch.randperm(len(found.test), generator=torch.Generator().manual_seed(0))[:TESTED]
    return found._replace(test=found.test[part], test_labels=found.test_labels[part])


class Reviews:
    """Tokens as they are; one run at a time. The functions are those of `Pictures`."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw nothing."""
        return ()

    def varied(self, rows: Tensor, drawn: tuple[Tensor, ...]) -> Tensor:
        """Return the tokens of these rows."""
        return self.plain(self.tokens[rows])

    def plain(self, samples: Tensor) -> Tensor:
        """Return ``(N, length)``."""
        return samples.squeeze(1)


@dataclass(frozen=True)
class Task:
    """Data, net and recipe.

    Attributes:
        load: Reads the data from a folder.
        inputs: Makes what the net takes of the training samples, and of others.
        net: Makes the net of a norm and a number of runs.
        norms: The norms it is run with.
        batch_sizes: The batch sizes it is run at; those that say most come first.
        classes: Outputs of the net.
        samples: To train on.
        validation: Samples that are held out, to choose the learning rate with.
        epochs: Over the training samples.
        learning_rate: The middle of those tried, at batch size 32.
        seeds: Of each norm and batch size.
        tried_on: Seeds that each learning rate is tried on.
        together: Whether the runs of a norm and batch size can be one net.
    """

    load: Callable[[Path], DataSet]
    inputs: Callable[[Tensor], Pictures | Reviews]
    net: Callable[[str, int], nn.Module]
    norms: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    classes: int
    samples: int
    validation: int
    epochs: int
    learning_rate: float
    seeds: int = 5
    tried_on: int = 2
    together: bool = True


IMAGES = ("bn", "gn", "ln", "batchrenorm", "bln", "bln-grouped", "bln-g1", "bln-g4", "bln-g16", "bln-gC")
TOKENS = ("ln", "rms", "bn", "bln", "bln-pooled", "bln-grouped")

TASKS = {
    "resnet20": Task(
        cifar10, partial(Pictures, pad=4, mirror=True), partial(nets.resnet, inputs=3, widths=(16, 32, 64), blocks=3),
        norms=IMAGES, batch_sizes=(4, 32, 2, 128, 8, 1, 16), classes=10,
        samples=20_000, validation=2_000, epochs=5, learning_rate=0.004,
    ),
    "digits-resnet": Task(
        digits, partial(Pictures, pad=1, mirror=False), partial(nets.resnet, inputs=1, widths=(16, 32), blocks=1),
        norms=IMAGES, batch_sizes=(1, 4, 25), classes=10,
        samples=800, validation=359, epochs=3, learning_rate=0.025, seeds=8,
    ),
    "shift": Task(
        cifar10, partial(Pictures, pad=4, mirror=True), partial(nets.resnet, inputs=3, widths=(16, 32, 64), blocks=1),
        norms=IMAGES, batch_sizes=(32,), classes=10,
        samples=20_000, validation=1_000, epochs=8, learning_rate=0.003, seeds=3,
    ),
    "transformer": Task(
        imdb, Reviews, transformer, norms=TOKENS, batch_sizes=(4, 32, 128), classes=2,
        samples=1_500, validation=1_000, epochs=3, learning_rate=0.006, seeds=3, tried_on=1, together=False,
    ),
}  # fmt: skip


@cache
def load(task: str, folder: Path, device: torch.device) -> DataSet:
    """Return the data of a task on a device."""
    return DataSet(*(each.to(device) for each in TASKS[task].load(folder)))
