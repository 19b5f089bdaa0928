"""The tasks of the two studies: data, net and an ordinary recipe of each. All but ``shift`` vary the batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import data
from ..augment import ImageInputs
from ..data import DataSet
from ..tasks import cifar10
from ..tasks import imdb as every_review
from . import nets
from .transformer import transformer


def digits(folder: Path) -> DataSet:
    """Return scikit-learn's digits, which need no folder, in grey levels from 0 to 16."""
    digits = data.digits()
    images = torch.cat([digits.train_images, digits.validation_images])
    labels = torch.cat([digits.train_labels, digits.validation_labels])
    train, test = ((part * 16).to(torch.uint8) for part in (images, digits.test_images))
    return DataSet(train, labels, test, digits.test_labels)


TEST_REVIEWS = 2_500
"""The number of test reviews used."""


def imdb(folder: Path) -> DataSet:
    """Return IMDB with a part of the test reviews, the same for every run."""
    reviews = every_review(folder)
    part = torch.randperm(len(reviews.test), generator=torch.Generator().manual_seed(0))[:TEST_REVIEWS]
    return reviews._replace(test=reviews.test[part], test_labels=reviews.test_labels[part])


class TokenInputs:
    """Make a net's inputs of tokens, which are not augmented; for one run at a time. See `ImageInputs`."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return nothing, since tokens are not augmented."""
        return ()

    def augmented(self, rows: Tensor, drawn: tuple[Tensor, ...]) -> Tensor:
        """Return the tokens of training samples, by their rows ``(N, 1)``."""
        return self.prepared(self.tokens[rows])

    def prepared(self, tokens: Tensor) -> Tensor:
        """Return tokens ``(N, length)`` from ``(N, 1, length)``."""
        return tokens.squeeze(1)


@dataclass(frozen=True)
class Task:
    """Data, net and recipe.

    Attributes:
        load: Reads the data from a folder.
        inputs: Makes inputs of samples, from the training samples.
        net: Makes a net from the name of a norm and a number of runs.
        norms: The norms it is run with.
        batch_sizes: The batch sizes it is run at, the most informative first.
        classes: The number of classes.
        samples: The number of training samples.
        validation: The number of samples held out to choose the learning rate with.
        epochs: The number of epochs.
        learning_rate: The middle one of those tried, at batch size 32.
        seeds: The number of seeds of each norm and batch size.
        tried_on: The number of seeds that each learning rate is tried on.
        together: Whether several runs can train as one net.
    """

    load: Callable[[Path], DataSet]
    inputs: Callable[[Tensor], ImageInputs | TokenInputs]
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
        cifar10,
        partial(ImageInputs, pad=4, mirror=True),
        partial(nets.resnet, inputs=3, widths=(16, 32, 64), blocks=3),
        norms=IMAGES, batch_sizes=(4, 32, 2, 128, 8, 1, 16), classes=10,
        samples=20_000, validation=2_000, epochs=5, learning_rate=0.004,
    ),
    "digits-resnet": Task(
        digits,
        partial(ImageInputs, pad=1, mirror=False),
        partial(nets.resnet, inputs=1, widths=(16, 32), blocks=1),
        norms=IMAGES, batch_sizes=(1, 4, 25), classes=10,
        samples=800, validation=359, epochs=3, learning_rate=0.025, seeds=8,
    ),
    "shift": Task(
        cifar10,
        partial(ImageInputs, pad=4, mirror=True),
        partial(nets.resnet, inputs=3, widths=(16, 32, 64), blocks=1),
        norms=IMAGES, batch_sizes=(32,), classes=10,
        samples=20_000, validation=1_000, epochs=8, learning_rate=0.003, seeds=3,
    ),
    "transformer": Task(
        imdb, TokenInputs, transformer, norms=TOKENS, batch_sizes=(4, 32, 128), classes=2,
        samples=1_500, validation=1_000, epochs=3, learning_rate=0.006, seeds=3, tried_on=1, together=False,
    ),
}  # fmt: skip


@cache
def load(task: str, folder: Path, device: torch.device) -> DataSet:
    """Return the data of a task on a device."""
    return DataSet(*(tensor.to(device) for tensor in TASKS[task].load(folder)))
