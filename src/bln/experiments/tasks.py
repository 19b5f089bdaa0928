"""The tasks of the paper's protocols, its two experiments and two small ones on digits: data, net and recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import data, models, packed
from .norms import Norm

VALIDATION = 5_000
"""Samples of the whole training set that are held out; a fraction of the data holds out that fraction of them."""


class Part(NamedTuple):
    """Inputs and targets."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Part:
        """Return the part on a device."""
        return Part(self.inputs.to(device), self.targets.to(device))

    def batches(self, size: int, order: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return mini-batches in this order."""
        part = self if order is None else Part(self.inputs[order], self.targets[order])
        return list(zip(torch.split(part.inputs, size), torch.split(part.targets, size), strict=True))


class Split(NamedTuple):
    """The data of a run."""

    train: Part
    validation: Part
    test: Part


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of right predictions, by scores of classes or by one logit."""
    right = outputs.argmax(1) == targets if outputs.dim() == 2 else (outputs > 0) == (targets > 0.5)
    return right.float().mean()


@cache
def cifar10(folder: Path) -> data.DataSet:
    """Return CIFAR-10, from the publisher's files in a folder or from a packed file."""
    return packed.read(folder) if folder.is_file() else data.cifar10(folder)


@cache
def imdb(folder: Path) -> data.DataSet:
    """Return IMDB with 20,000 words and 80 tokens."""
    return data.imdb(folder)


def split_cifar10(folder: Path, fraction: float, seed: int) -> Split:
    """Split CIFAR-10, each of the 3,072 inputs standardized over the training part."""
    split = _split(cifar10(folder), fraction, seed)
    deviation, mean = torch.std_mean(split.train.inputs.float(), 0, correction=0)

    def standardized(part: Part) -> Part:
        inputs = (part.inputs.float() - mean) / deviation.clamp(min=1e-6)
        return Part(inputs.contiguous(memory_format=torch.channels_last), part.targets)  # the faster layout

    return Split(*map(standardized, split))


def split_imdb(folder: Path, fraction: float, seed: int) -> Split:
    """Split IMDB, with targets in float for the loss of one logit."""
    return Split(*(Part(part.inputs, part.targets.float()) for part in _split(imdb(folder), fraction, seed)))


def split_digits(folder: Path, fraction: float, seed: int) -> Split:
    """Split scikit-learn's digits, which need no folder; the fraction is of the training part."""
    digits = data.digits(seed=seed)
    train = _shuffled(len(digits.train_images), seed)[: round(fraction * len(digits.train_images))]
    _check(fraction, train, digits.validation_labels)
    return Split(
        Part(digits.train_images[train], digits.train_labels[train]),
        Part(digits.validation_images, digits.validation_labels),
        Part(digits.test_images, digits.test_labels),
    )


def _split(data_set: data.DataSet, fraction: float, seed: int) -> Split:
    train, validation = _divide(len(data_set.train), fraction, seed)
    order = _shuffled(len(data_set.test), seed)
    return Split(
        Part(data_set.train[train], data_set.train_labels[train]),
        Part(data_set.train[validation], data_set.train_labels[validation]),
        Part(data_set.test[order], data_set.test_labels[order]),
    )


def _shuffled(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _divide(count: int, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the samples to train and to validate on: the validation part is taken first, then a fraction of both."""
    order = _shuffled(count, seed)
    validation, train = order[:VALIDATION], order[VALIDATION:]
    train, validation = (part[: round(fraction * len(part))] for part in (train, validation))
    _check(fraction, train, validation)
    return train, validation


def _check(fraction: float, train: Tensor, validation: Tensor) -> None:
    if not (len(train) and len(validation)):
        raise ValueError(
            f"a fraction of {fraction:g} leaves {len(train)} samples to train on and {len(validation)} to validate "
            "with; take a larger --fraction"
        )


@dataclass(frozen=True)
class Task:
    """An experiment: a net, its data, and its training."""

    model: Callable[[Norm], nn.Module]
    split: Callable[[Path, float, int], Split]
    loss: Callable[[Tensor, Tensor], Tensor]
    learning_rate: float
    epochs: int


TASKS = {
    "cnn": Task(models.lenet, split_cifar10, F.cross_entropy, 0.002, 15),
    "rnn": Task(models.sentiment, split_imdb, F.binary_cross_entropy_with_logits, 0.003, 10),
    "digits-cnn": Task(models.digits_cnn, split_digits, F.cross_entropy, 0.002, 8),
    "digits-rnn": Task(models.digits_rnn, split_digits, F.cross_entropy, 0.005, 8),
}
