"""The data sets: CIFAR-10 and IMDB from their publishers' files, digits from scikit-learn.

Samples keep their published order. No file is read in a format that could run code.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._install import install
from .._progress import track
from . import runs
from . import words as keras_words

PathLike = str | os.PathLike[str]


class DataError(ValueError):
    """A data set that is missing, or differs from the published one."""


class DataSet(NamedTuple):
    """Samples ``(N, ...)`` and their labels ``(N,)`` in int64."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


class Digits(NamedTuple):
    """Images ``(N, 1, 8, 8)`` in float32 from 0 to 1, labels ``(N,)`` from 0 to 9 in int64."""

    train_images: Tensor
    train_labels: Tensor
    validation_images: Tensor
    validation_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


_CIFAR10 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
"""The md5 of each file; the last one is the test set."""
_REVIEWS, _WORDS = 12_500, 88_584
"""The reviews in each of the four folders, and the different words of the training reviews, as in Keras's index."""

TOP = {"cifar10": "cifar-10-batches-bin", "imdb": "aclImdb"}
"""The top folder of each publisher's archive."""
_MARKER = {"cifar10": "data_batch_1.bin", "imdb": "train/pos"}
"""A path by which this folder is recognized."""


def cifar10(folder: PathLike) -> DataSet:
    """Read CIFAR-10, images ``(N, 3, 32, 32)`` in uint8, from the publisher's binary files, checked by their md5.

    Args:
        folder: Holds ``cifar-10-batches-bin``, or is that folder.

    Raises:
        DataError: Where files are missing or differ from the published ones.
    """
    place = _find("cifar10", folder)
    records = [_cifar_file(place / name, md5) for name, md5 in _CIFAR10.items()]
    train, test = torch.cat(records[:-1]), records[-1]
    return DataSet(
        train[:, 1:].reshape(-1, 3, 32, 32), train[:, 0].long(), test[:, 1:].reshape(-1, 3, 32, 32), test[:, 0].long()
    )  # fmt: skip


def imdb(folder: PathLike, *, words: int = 20_000, length: int = 80) -> DataSet:
    """Read IMDB as Keras does: ``load_data(num_words=words)``, then ``pad_sequences(maxlen=length)``.

    Tokens are ``(N, length)`` in int64: 0 is padding, 1 the start of a review, 2 a word that is too rare, 3 is not
    used; the others are words, the most frequent first. Long reviews keep their end, short ones are padded in front.
    Labels are 1 for positive reviews. Reviews are sorted by folder and file name, so all positive ones come first:
    shuffle them. The tokens are cached in the folder, if that can be written.

    Args:
        folder: Holds ``aclImdb``, or is that folder.
        words: All tokens are below this number.
        length: Tokens of a review.

    Raises:
        DataError: Where reviews are missing or are not the published ones.
    """
    if words <= keras_words.OFFSET or length < 1:
        raise ValueError(f"expected words > {keras_words.OFFSET} and length > 0, got words={words}, length={length}")
    place = _find("imdb", folder)
    cache = place / f"bln-imdb-{words}-{length}.pt"
    cached = runs.read_tensors(cache, torch.device("cpu"))
    if cached is None:
        cached = {"tokens": _encode(place, words, length)}
        with suppress(runs.RunError):  # a folder that cannot be written
            runs.write_tensors(cache, cached)
    train, test = cached["tokens"].long().chunk(2)
    labels = torch.ones(len(train), dtype=torch.int64)
    labels[len(train) // 2 :] = 0
    return DataSet(train, labels, test, labels)


def digits(*, seed: int = 0) -> Digits:
    """Return the 1,797 digits that come with scikit-learn: a fifth of each class to test, a fifth to validate.

    Args:
        seed: Of the permutation that splits each class, by NumPy's RandomState, whose numbers never change.

    >>> [len(part) for part in digits()[::2]]
    [1079, 359, 359]
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"digits come with scikit-learn: {install('experiments')}") from error
    published = load_digits()
    images = torch.from_numpy(published.images / 16).float().unsqueeze(1)
    labels = torch.from_numpy(published.target).long()
    random = np.random.RandomState(seed)
    part = np.empty(len(labels), int)
    for label in range(10):
        members = random.permutation(np.flatnonzero(published.target == label))
        fifth = round(len(members) / 5)
        part[members] = np.repeat([0, 1, 2], [len(members) - 2 * fifth, fifth, fifth])
    train, validation, test = (torch.from_numpy(part == which) for which in range(3))
    return Digits(images[train], labels[train], images[validation], labels[validation], images[test], labels[test])


def _cifar_file(path: Path, md5: str) -> Tensor:
    """Return a row for each image: a byte for the label, then 32 x 32 bytes for each of red, green and blue."""
    with _reading("cifar10", path.parent):
        content = path.read_bytes()
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != md5:
        raise DataError(f"{path} has the md5 {digest}, published is {md5}; {_again('cifar10', path.parent)}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, 1 + 3 * 32 * 32)


def _reviews(place: Path) -> list[Path]:
    """Return the reviews of train/pos, train/neg, test/pos and test/neg, each folder sorted by name."""
    reviews = []
    for part in ("train/pos", "train/neg", "test/pos", "test/neg"):
        paths = sorted((place / part).glob("[!.]*.txt"))
        if len(paths) != _REVIEWS:
            raise DataError(
                f"{place / part} has {len(paths):,} reviews, expected {_REVIEWS:,}; {_again('imdb', place)}"
            )
        reviews += paths
    return reviews


def _encode(place: Path, words: int, length: int) -> Tensor:
    reviews = _reviews(place)  # ties of Keras's numbers depend on this order
    with _reading("imdb", place):
        split = [keras_words.split(review.read_bytes()) for review in track(reviews, "Reading reviews")]
    ranks = keras_words.rank(split[: len(split) // 2])
    if len(ranks) != _WORDS:
        raise DataError(
            f"{place / 'train'} has {len(ranks):,} different words, the published reviews have {_WORDS:,}; "
            f"{_again('imdb', place)}"
        )
    tokens = [keras_words.encode(review, ranks, words=words, length=length) for review in split]
    return torch.tensor(tokens, dtype=torch.int32)


# ---- folders


def locate(name: str, folder: PathLike) -> Path | None:
    """Return the folder of ``cifar10`` or ``imdb``, complete or not: ``folder`` or one in it; ``None`` without one."""
    folder = Path(folder).expanduser()
    if (folder / TOP[name]).is_dir():
        return folder / TOP[name]
    return folder if (folder / _MARKER[name]).exists() else None


def check(name: str, place: Path) -> None:
    """Raise a `DataError` unless all files of ``cifar10`` or ``imdb`` are at ``place``."""
    if name == "imdb":
        _reviews(place)
    else:
        cifar10(place)


def _find(name: str, folder: PathLike) -> Path:
    place = locate(name, folder)
    if place is None:
        raise DataError(
            f"there is no folder {TOP[name]} in {folder}; get it with: bln data get {name} --data-dir {folder}, or "
            "point --data-dir at the folder that holds it"
        )
    return place


@contextmanager
def _reading(name: str, place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}; {_again(name, place)}") from error


def _again(name: str, place: Path) -> str:
    return f"remove {place} and get it again with: bln data get {name} --data-dir {place.parent}"
