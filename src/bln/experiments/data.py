"""The data sets: CIFAR-10 and IMDB from their publishers' files, digits from scikit-learn.

Nothing here is shuffled, and nothing is loaded that could run code.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._install import install
from .._progress import track
from . import words as keras_words

PathLike = str | os.PathLike[str]


class DataError(ValueError):
    """A data set that is not there, or not what its publisher made."""


class CIFAR(NamedTuple):
    """Images ``(N, 3, 32, 32)`` in uint8, labels ``(N,)`` from 0 to 9 in int64."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


class IMDB(NamedTuple):
    """Tokens ``(N, length)`` and labels ``(N,)``, 1 for praise, both in int64. The positive reviews come first."""

    train_tokens: Tensor
    train_labels: Tensor
    test_tokens: Tensor
    test_labels: Tensor


class Digits(NamedTuple):
    """Images ``(N, 1, 8, 8)`` in float32 from 0 to 1, labels ``(N,)`` from 0 to 9 in int64."""

    train_images: Tensor
    train_labels: Tensor
    validation_images: Tensor
    validation_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class _CIFARFiles:
    images: int
    """In each file: a byte for the label, then 32 x 32 bytes for each of red, green and blue."""
    train: dict[str, str]
    test: dict[str, str]
    """md5 of each file."""


@dataclass(frozen=True)
class _IMDBFiles:
    reviews: int
    """In each of the four folders."""
    words: int
    """Different ones in the training reviews, as in Keras's word index."""


_CIFAR10 = _CIFARFiles(
    images=10_000,
    train={
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    },
    test={"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"},
)
_IMDB = _IMDBFiles(reviews=12_500, words=88_584)

TOP = {"cifar10": "cifar-10-batches-bin", "imdb": "aclImdb"}
"""The folder of a data set in its publisher's archive."""
_SIGN = {"cifar10": "data_batch_1.bin", "imdb": "train/pos"}

_PIXELS = 3 * 32 * 32
_RATINGS = {"pos": range(7, 11), "neg": range(1, 5)}
_REVIEW = re.compile(r"\d+_(\d+)\.txt")
_CACHE = 1
"""Bump when the same reviews are encoded differently."""


def cifar10(folder: PathLike) -> CIFAR:
    """CIFAR-10 from the publisher's binary version, each file checked by its md5.

    Args:
        folder: Holds ``cifar-10-batches-bin``, or is that folder.

    Raises:
        DataError: Where files are missing or differ from the published ones.
    """
    place = _find("cifar10", folder)
    train = [_cifar_file(place / name, md5) for name, md5 in _CIFAR10.train.items()]
    test = [_cifar_file(place / name, md5) for name, md5 in _CIFAR10.test.items()]
    return CIFAR(
        torch.cat([images for images, _ in train]), torch.cat([labels for _, labels in train]),
        torch.cat([images for images, _ in test]), torch.cat([labels for _, labels in test]),
    )  # fmt: skip


def imdb(folder: PathLike, *, words: int = 20_000, length: int = 80) -> IMDB:
    """IMDB reviews as Keras numbers and cuts them: ``load_data(num_words=words)``, ``pad_sequences(maxlen=length)``.

    0 is padding, 1 the start of a review, 2 a word that is too rare, 3 is not used; the others are words, the most
    frequent first. Long reviews keep their end, short ones are padded in front. Reviews come sorted by folder and file
    name, so all positive ones first: shuffle them. The result is kept in the folder, if that can be written, and made
    anew when a file changes.

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
    files = _imdb_files(place)
    cache = place / f"bln-imdb-{words}-{length}.npz"
    key = _fingerprint(files, words, length)
    arrays = _read_cache(cache, key, words, length)
    if arrays is None:
        arrays = _encode(files, words, length, place)
        _write_cache(cache, key, *arrays)
    labels = torch.arange(2 * _IMDB.reviews) < _IMDB.reviews
    train, test = (torch.from_numpy(tokens.astype(np.int64)) for tokens in arrays)
    return IMDB(train, labels.long(), test, labels.long())


def digits(*, seed: int = 0) -> Digits:
    """scikit-learn's 1,797 digits, which come with it: a fifth of each class to test, a fifth to validate.

    Args:
        seed: Of the permutation of each class that splits it, by NumPy's RandomState, whose numbers never change.

    >>> [len(part) for part in digits()[::2]]
    [1079, 359, 359]
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"digits come with scikit-learn: {install('experiments')}") from error
    found = load_digits()
    images = torch.from_numpy(found.images / 16).float().unsqueeze(1)
    labels = torch.from_numpy(found.target).long()
    random = np.random.RandomState(seed)
    part = np.empty(len(labels), int)
    for label in range(10):
        members = random.permutation(np.flatnonzero(found.target == label))
        fifth = round(len(members) / 5)
        part[members] = np.repeat([0, 1, 2], [len(members) - 2 * fifth, fifth, fifth])
    train, validation, test = (torch.from_numpy(part == which) for which in range(3))
    return Digits(
        images[train], labels[train], images[validation], labels[validation], images[test], labels[test]
    )  # fmt: skip


# ---- CIFAR-10


def _cifar_file(path: Path, md5: str) -> tuple[Tensor, Tensor]:
    with _reading("cifar10", path.parent):
        content = path.read_bytes()
    if len(content) != _CIFAR10.images * (1 + _PIXELS):
        raise DataError(
            f"{path} has {len(content):,} bytes, expected {_CIFAR10.images * (1 + _PIXELS):,}; "
            f"{_again('cifar10', path.parent)}"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(_CIFAR10.images, 1 + _PIXELS)
    labels = records[:, 0].long()
    if int(labels.max()) > 9:
        raise DataError(f"{path} has a label {int(labels.max())}, expected 0 to 9; {_again('cifar10', path.parent)}")
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise DataError(f"{path} has the md5 {found}, published is {md5}; {_again('cifar10', path.parent)}")
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


# ---- IMDB


def _imdb_files(place: Path) -> dict[str, list[os.DirEntry[str]]]:
    """The reviews by ``train/pos``, ``train/neg``, ``test/pos``, ``test/neg``, sorted by name."""
    found: dict[str, list[os.DirEntry[str]]] = {}
    for split in ("train", "test"):
        for label, ratings in _RATINGS.items():
            part = f"{split}/{label}"
            with _reading("imdb", place), os.scandir(place / split / label) as entries:
                reviews = sorted((e for e in entries if e.name.endswith(".txt") and e.name[0] != "."), key=_name)
            if len(reviews) != _IMDB.reviews:
                raise DataError(
                    f"{place / part} has {len(reviews):,} reviews, expected {_IMDB.reviews:,}; {_again('imdb', place)}"
                )
            for review in reviews:
                match = _REVIEW.fullmatch(review.name)
                if match is None or int(match[1]) not in ratings:
                    raise DataError(
                        f"{review.path} does not belong there, expected ID_RATING.txt with ratings "
                        f"{ratings[0]} to {ratings[-1]}; {_again('imdb', place)}"
                    )
            found[part] = reviews
    return found


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _encode(
    files: dict[str, list[os.DirEntry[str]]], words: int, length: int, place: Path
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    # Sorted by name, positive ones first: ties of Keras's numbers depend on this order.
    reviews = [review for part in files.values() for review in part]
    with _reading("imdb", place):
        split = [keras_words.split(Path(review).read_bytes()) for review in track(reviews, "Reading reviews")]
    number = len(split) // 2
    ranks = keras_words.rank(split[:number])
    if len(ranks) != _IMDB.words:
        raise DataError(
            f"{place / 'train'} has {len(ranks):,} different words, the published reviews have {_IMDB.words:,}; "
            f"{_again('imdb', place)}"
        )
    tokens = np.array([keras_words.encode(review, ranks, words=words, length=length) for review in split], np.int32)
    return tokens[:number], tokens[number:]


def _fingerprint(files: dict[str, list[os.DirEntry[str]]], words: int, length: int) -> str:
    """Return a hash that changes with any name, size or time of a review."""
    digest = hashlib.sha256(f"{_CACHE} {words} {length}\n".encode())
    for part, reviews in files.items():
        for review in reviews:
            status = review.stat()
            digest.update(f"{part}/{review.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _read_cache(path: Path, key: str, words: int, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    """Return the cached tokens, or ``None`` where they are missing, damaged, or of other reviews."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
            if str(kept["key"]) != key:
                return None
            train, test = kept["train"], kept["test"]
    except Exception:  # a damaged file makes its readers raise many kinds, and the reviews are still there
        return None
    for tokens in (train, test):
        if tokens.shape != (2 * _IMDB.reviews, length) or tokens.dtype != np.int32:
            return None
        if tokens.min() < 0 or tokens.max() >= words:
            return None
    return train, test


def _write_cache(path: Path, key: str, train: NDArray[np.int32], test: NDArray[np.int32]) -> None:
    """Cache the tokens, whole or not at all. A folder that cannot be written is no error."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        try:
            with new.open("xb") as file:
                np.savez(file, key=np.array(key), train=train, test=test)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except OSError:
        pass


# ---- folders


def locate(name: str, folder: PathLike) -> Path | None:
    """Return where ``cifar10`` or ``imdb`` lies, complete or not: in ``folder``, or ``folder`` itself."""
    given = Path(folder).expanduser()
    top, sign = TOP[name], _SIGN[name]
    if (given / top).is_dir():
        return given / top
    if (given / sign).exists() or (given.name == top and given.is_dir()):
        return given
    return None


def check(name: str, place: Path) -> None:
    """Raise a `DataError` unless all files of ``cifar10`` or ``imdb`` are at ``place``."""
    if name == "imdb":
        _imdb_files(place)
        return
    for file, md5 in (_CIFAR10.train | _CIFAR10.test).items():
        _cifar_file(place / file, md5)


def _find(name: str, folder: PathLike) -> Path:
    place = locate(name, folder)
    if place is not None:
        return place
    given = Path(folder).expanduser()
    if not given.is_dir():
        what = f"{given} is not a folder" if given.exists() else f"there is no folder {given}"
    else:
        what = f"{given} has no folder {TOP[name]}"
        if (given / "cifar-10-batches-py").is_dir() and name == "cifar10":
            what += " (the Python version is there, but that is pickled; the binary version is needed)"
    raise DataError(
        f"{what}; get it with: bln data get {name} --data-dir {given}, "
        f"or point --data-dir at the folder that holds {TOP[name]}"
    )


@contextmanager
def _reading(name: str, place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename or place}: {error.strerror or error}; {_again(name, place)}"
        ) from error


def _again(name: str, place: Path) -> str:
    return f"remove {place} and get it again with: bln data get {name} --data-dir {place.parent}"
