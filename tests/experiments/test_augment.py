"""Crops and mirror images show what was in the image."""

import torch
from torch import nn

from bln.experiments.augment import Crops, cut


def test_crops_are_windows_of_the_padded_image():
    images = torch.arange(2 * 3 * 4 * 4).view(2, 3, 4, 4)
    padded = nn.functional.pad(images, [1] * 4)
    rows = torch.tensor([[0, 1], [1, 1]])
    still = Crops(torch.ones(2, 2).long(), torch.ones(2, 2).long(), torch.tensor([[False, True], [False, True]]))
    found = cut(padded, rows, still, 4, 4)
    assert found.shape == (2, 2, 3, 4, 4)
    assert torch.equal(found[0, 0], images[0])
    assert torch.equal(found[0, 1], images[1].flip(-1))
    corner = Crops(torch.zeros(1).long(), torch.full((1,), 2), torch.tensor([False]))
    assert torch.equal(cut(padded, torch.tensor([0]), corner, 4, 4)[0], padded[0, :, 0:4, 2:6])
    drawn = Crops.draw(1000, 2, True, torch.Generator().manual_seed(0))
    assert set(drawn.up.tolist()) == set(drawn.left.tolist()) == set(range(5))
    assert 400 < drawn.mirrored.sum() < 600
    assert not Crops.draw(1000, 2, False).mirrored.any()
