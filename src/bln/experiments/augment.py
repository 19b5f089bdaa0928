"""Standardized images, in training randomly cropped and mirrored, on the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class ImageInputs:
    """Make a net's inputs of images.

    Args:
        images: Those of the training set, ``(N, C, H, W)``; inputs are standardized by their mean and deviation.
        pad: Zeros at each side, of which crops take some.
        mirror: Whether half of the training inputs are mirrored.
    """

    def __init__(self, images: Tensor, pad: int, mirror: bool) -> None:
        self.pad, self.mirror = pad, mirror
        self.height, self.width = images.shape[2:]
        self.padded = F.pad(images, [pad] * 4)
        self.deviation, self.mean = torch.std_mean(images.float(), (0, 2, 3), keepdim=True, correction=0)

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw the augmentation of ``count`` images: where each crop begins, and whether it is mirrored."""
        up, left = torch.randint(2 * self.pad + 1, (2, count), generator=generator)
        coin = torch.rand(count, generator=generator)
        return up, left, (coin < 0.5) & self.mirror

    def augmented(self, rows: Tensor, drawn: tuple[Tensor, ...]) -> Tensor:
        """Return inputs from augmented training images, by their rows ``(N, runs)``."""
        up, left, mirrored = (values[..., None] for values in drawn)
        lines = up + torch.arange(self.height, device=rows.device)
        columns = torch.arange(self.width, device=rows.device)
        columns = torch.where(mirrored, columns.flip(0), columns) + left
        channels = torch.arange(self.padded.shape[1], device=rows.device)[:, None, None]
        index = rows[..., None, None, None], channels, lines[..., None, :, None], columns[..., None, None, :]
        return self.prepared(self.padded[index])

    def prepared(self, images: Tensor) -> Tensor:
        """Return standardized inputs ``(N, runs * C, H, W)`` from images ``(N, runs, C, H, W)``."""
        return ((images.float() - self.mean) / self.deviation).flatten(1, 2)
