"""CIFAR-10, or the first of its training images, in one small file: lossless, with nothing but NumPy.

Each channel is predicted from its neighbours above and to the left, red and blue from what is left of green; the
differences are Huffman coded. An image takes 1.7 kB instead of 3.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from . import runs
from .data import CIFAR, DataError

_MAGIC = b"bln packed images 1\n"
_Bytes = NDArray[np.uint8]


def write(found: CIFAR, path: Path, train: int) -> None:
    """Write the first ``train`` training images, and all test images."""
    if not 1 <= train <= len(found.train_images):
        raise ValueError(f"expected 1 to {len(found.train_images):,} training images, got {train:,}")
    images = torch.cat([found.train_images[:train], found.test_images]).numpy()
    labels = torch.cat([found.train_labels[:train], found.test_labels]).numpy().astype(np.uint8)
    parts = [labels.tobytes(), *(_coded(plane) for plane in _planes(images))]
    head = {
        "train": train, "images": len(images), "sizes": [len(part) for part in parts],
        "sha256": hashlib.sha256(images.tobytes()).hexdigest(),
    }  # fmt: skip
    runs.write(path, _MAGIC + json.dumps(head).encode() + b"\n" + b"".join(parts))


def read(path: Path) -> CIFAR:
    """Read what :func:`write` has written, checked by its hash."""
    content = path.read_bytes()
    try:
        if not content.startswith(_MAGIC):
            raise ValueError("its first line is another")
        line, _, rest = content[len(_MAGIC) :].partition(b"\n")
        head = json.loads(line)
        ends = np.cumsum(head["sizes"]).tolist()
        labels, *coded = (rest[end - size : end] for end, size in zip(ends, head["sizes"], strict=True))
        images = _images([_decoded(part, head["images"]) for part in coded])
        if hashlib.sha256(images.tobytes()).hexdigest() != head["sha256"]:
            raise ValueError("its hash is another")
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise DataError(f"{path} is not a file of packed images: {error}; write it again with: bln data pack") from None
    every, answers = torch.from_numpy(images), torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()
    train = head["train"]
    return CIFAR(every[:train], answers[:train], every[train:], answers[train:])


def _planes(images: _Bytes) -> list[_Bytes]:
    """Return green, red minus green and blue minus green, modulo 256."""
    red, green, blue = images[:, 0], images[:, 1], images[:, 2]
    return [green, red - green, blue - green]


def _images(planes: list[_Bytes]) -> _Bytes:
    green, red, blue = planes
    return np.stack([red + green, green, blue + green], 1)


def _prediction(left: _Bytes, above: _Bytes, corner: _Bytes) -> _Bytes:
    """Return the median of left, above, and left + above - corner."""
    low, high = np.minimum(left, above), np.maximum(left, above)
    plane = left + above - corner
    found: _Bytes = np.where(corner >= high, low, np.where(corner <= low, high, plane))
    return found


def _coded(plane: _Bytes) -> bytes:
    padded = np.pad(plane, ((0, 0), (1, 0), (1, 0)))
    rest = plane - _prediction(padded[:, 1:, :-1], padded[:, :-1, 1:], padded[:, :-1, :-1])
    coder = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(np.ascontiguousarray(rest.transpose(1, 2, 0)).tobytes()) + coder.flush()


def _decoded(coded: bytes, count: int) -> _Bytes:
    rest = np.frombuffer(zlib.decompress(coded), np.uint8).reshape(32, 32, count)
    padded = np.zeros((33, 33, count), np.uint8)
    for row in range(32):  # pixel by pixel, for all images together
        for column in range(32):
            left, above, corner = padded[row + 1, column], padded[row, column + 1], padded[row, column]
            padded[row + 1, column + 1] = rest[row, column] + _prediction(left, above, corner)
    return np.ascontiguousarray(padded[1:, 1:].transpose(2, 0, 1))
