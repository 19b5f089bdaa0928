"""Crops and mirror images, drawn beforehand and cut on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Crops(NamedTuple):
    """For each image, where its window begins in the padded image, and whether it is mirrored."""

    up: Tensor
    left: Tensor
    mirrored: Tensor

    @classmethod
    def draw(cls, count: int, pad: int, mirror: bool, generator: torch.Generator | None = None) -> Crops:
        """Draw crops of ``count`` images padded by ``pad`` pixels; with ``mirror`` half of them are mirrored."""
        up, left = torch.randint(2 * pad + 1, (2, count), generator=generator)
        coin = torch.rand(count, generator=generator)
        return cls(up, left, (coin < 0.5) & mirror)


def cut(padded: Tensor, rows: Tensor, crops: Crops, height: int, width: int) -> Tensor:
    """Return the windows of these rows of ``(N, C, H, W)``: ``(*rows.shape, C, height, width)``."""
    lines = crops.up[..., None] + torch.arange(height, device=rows.device)
    columns = torch.arange(width, device=rows.device)
    columns = torch.where(crops.mirrored[..., None], columns.flip(0), columns) + crops.left[..., None]
    channels = torch.arange(padded.shape[1], device=rows.device)[:, None, None]
    return padded[rows[..., None, None, None], channels, lines[..., None, :, None], columns[..., None, None, :]]
