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
        """Crops of so many images that were padded by ``pad`` pixels; with ``mirror`` every other one is mirrored."""
        up, left = torch.randint(2 * pad + 1, (2, count), generator=generator)
        coin = torch.rand(count, generator=generator)
        return cls(up, left, (coin < 0.5) & mirror)


def cut(padded: Tensor, rows: Tensor, crops: Crops, height: int, width: int) -> Tensor:
    """The windows of these rows of ``(N, C, H, W)``: ``(*rows.shape, C, height, width)``."""
    down = crops.up[..., None] + torch.arange(height, device=rows.device)
    across = torch.arange(width, device=rows.device)
    across = torch.where(crops.mirrored[..., None], across.flip(0), across) + crops.left[..., None]
    channels = torch.arange(padded.shape[1], device=rows.device)[:, None, None]
    return padded[rows[..., None, None, None], channels, down[..., None, :, None], across[..., None, None, :]]
