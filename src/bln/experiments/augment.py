"""Images as nets take them: standardized, and in training cropped and mirrored, on the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Pictures:
    """Images standardized over the training set ``(N, C, H, W)``; in training cropped and, if ``mirror``, mirrored."""

    def __init__(self, images: Tensor, pad: int, mirror: bool) -> None:
        self.pad, self.mirror = pad, mirror
        self.height, self.width = images.shape[2:]
        self.padded = F.pad(images, [pad] * 4)
        self.deviation, self.mean = torch.std_mean(images.float(), (0, 2, 3), keepdim=True, correction=0)

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw how ``count`` images are varied in an epoch: where each crop begins, and whether it is mirrored."""
        up, left = torch.randint(2 * self.pad + 1, (2, count), generator=generator)
        coin = torch.rand(count, generator=generator)
        return up, left, (coin < 0.5) & self.mirror

    def varied(self, rows: Tensor, drawn: tuple[Tensor, ...]) -> Tensor:
        """Return crops of these rows ``(N, runs)`` of the training images, as the net takes them."""
        up, left, mirrored = (each[..., None] for each in drawn)
        lines = up + torch.arange(self.height, device=rows.device)
        columns = torch.arange(self.width, device=rows.device)
        columns = torch.where(mirrored, columns.flip(0), columns) + left
        channels = torch.arange(self.padded.shape[1], device=rows.device)[:, None, None]
        where = rows[..., None, None, None], channels, lines[..., None, :, None], columns[..., None, None, :]
        return self.plain(self.padded[where])

    def plain(self, samples: Tensor) -> Tensor:
        """Return images ``(N, runs, C, H, W)`` as the net takes them: ``(N, runs * C, H, W)``."""
        return ((samples.float() - self.mean) / self.deviation).flatten(1, 2)
