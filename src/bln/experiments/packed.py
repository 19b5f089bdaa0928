"""CIFAR-10, with all or fewer training images, in one small lossless file.

Red and blue are stored as differences to green. Each pixel is predicted from its neighbours above and to the left, and
the errors are Huffman coded. An image takes 1.7 kB instead of 3.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import runs
from .data import DataError, DataSet

_Bytes = NDArray[np.uint8]


def write(cifar: DataSet, path: Path, train: int) -> None:
    """Write the first ``train`` training images and all test images."""
    if not 1 <= train <= len(cifar.train):
        raise ValueError(f"expected 1 to {len(cifar.train):,} training images, got {train:,}")
    images = torch.cat([cifar.train[:train], cifar.test]).numpy()
    red, green, blue = images[:, 0], images[:, 1], images[:, 2]
    planes = [_encode(plane) for plane in (green, red - green, blue - green)]  # modulo 256
    labels = cifar.train_labels[:train].byte(), cifar.test_labels.byte()
    runs.write_tensors(path, {"planes": planes, "labels": labels})


def read(path: Path) -> DataSet:
    """Read a file written by :func:`write`, checked by its hash."""
    packed = runs.read_tensors(path, torch.device("cpu"))
    if packed is None:
        raise DataError(f"{path} is not a file of packed images, or was harmed; write it again with: bln data pack")
    train, test = (labels.long() for labels in packed["labels"])
    green, red, blue = (_decode(plane, len(train) + len(test)) for plane in packed["planes"])
    images = torch.from_numpy(np.stack([red + green, green, blue + green], 1))
    return DataSet(images[: len(train)], train, images[len(train) :], test)


def _prediction(left: _Bytes, above: _Bytes, corner: _Bytes) -> _Bytes:
    """Return the median of left, above, and left + above - corner, as in JPEG-LS."""
    low, high = np.minimum(left, above), np.maximum(left, above)
    prediction: _Bytes = np.where(corner >= high, low, np.where(corner <= low, high, left + above - corner))
    return prediction


def _encode(plane: _Bytes) -> Tensor:
    padded = np.pad(plane, ((0, 0), (1, 0), (1, 0)))
    errors = plane - _prediction(padded[:, 1:, :-1], padded[:, :-1, 1:], padded[:, :-1, :-1])
    coder = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    coded = coder.compress(np.ascontiguousarray(errors.transpose(1, 2, 0)).tobytes()) + coder.flush()
    return torch.frombuffer(bytearray(coded), dtype=torch.uint8)


def _decode(coded: Tensor, count: int) -> _Bytes:
    errors = np.frombuffer(zlib.decompress(coded.numpy().tobytes()), np.uint8).reshape(32, 32, count)
    padded = np.zeros((33, 33, count), np.uint8)
    for row in range(32):  # pixel by pixel, for all images together
        for column in range(32):
            left, above, corner = padded[row + 1, column], padded[row, column + 1], padded[row, column]
            padded[row + 1, column + 1] = errors[row, column] + _prediction(left, above, corner)
    return np.ascontiguousarray(padded[1:, 1:].transpose(2, 0, 1))
