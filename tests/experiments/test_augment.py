"""Crops and mirror images show what was in the image."""

import torch
from torch import nn

from bln.experiments.augment import ImageInputs


def test_crops_are_windows_of_the_padded_image():
    images = torch.arange(2 * 3 * 4 * 4).view(2, 3, 4, 4)
    inputs = ImageInputs(images, 1, True)
    plain = inputs.prepared(images[:, None]).view(2, 3, 4, 4)
    torch.testing.assert_close(plain.mean((0, 2, 3)), torch.zeros(3), atol=1e-6, rtol=0)
    rows, middle = torch.tensor([[0, 1], [1, 1]]), torch.ones(2, 2).long()
    found = inputs.augmented(rows, (middle, middle, torch.tensor([[False, True], [False, True]])))
    assert found.shape == (2, 2 * 3, 4, 4)  # two runs
    assert torch.equal(found[0], torch.cat([plain[0], plain[1].flip(-1)]))
    corner = torch.zeros(1, 1).long(), torch.full((1, 1), 2), torch.tensor([[False]])
    window = nn.functional.pad(images, [1] * 4)[:1, :, 0:4, 2:6]
    assert torch.equal(inputs.augmented(torch.tensor([[0]]), corner), inputs.prepared(window[:, None]))


def test_crops_are_drawn_everywhere_and_half_of_them_mirrored():
    images = torch.arange(48).view(1, 3, 4, 4)
    up, left, mirrored = ImageInputs(images, 2, True).draw(1000, torch.Generator().manual_seed(0))
    assert set(up.tolist()) == set(left.tolist()) == set(range(5))
    assert 400 < mirrored.sum() < 600
    assert not ImageInputs(images, 2, False).draw(1000, torch.Generator())[2].any()
