"""The corruptions of the study of shifted data."""

import colorsys
from itertools import pairwise

import numpy as np
import pytest
import scipy.ndimage

from bln.experiments.shift import corruptions
from bln.experiments.shift.corruptions import SEVERITIES, TEST, VALIDATION, corrupt

ODD = {"elastic_transform", "frost", "glass_blur", "saturate", "spatter"}
"""Their published severities mix several strengths, and images do not move away step by step."""


@pytest.fixture(scope="module")
def images():
    """Coloured images with large shapes and fine grain."""
    rng = np.random.default_rng(0)
    coarse = scipy.ndimage.zoom(rng.random((24, 3, 5, 5)), (1, 1, 6.4, 6.4), order=1)
    return (255 * (0.1 + 0.6 * coarse + 0.2 * rng.random((24, 1, 32, 32)))).astype(np.uint8)


def distance(images, name, severity):
    return np.abs(corrupt(images, name, severity).astype(int) - images).mean()


@pytest.mark.parametrize("name", TEST + VALIDATION)
def test_same_arguments_give_the_same_bytes_and_shape(images, name):
    for severity in (1, 5):
        once = corrupt(images, name, severity)
        assert once.shape == images.shape
        assert once.dtype == np.uint8
        np.testing.assert_array_equal(once, corrupt(images.copy(), name, severity))
        assert (once != images).mean() > 0.005, "nothing happened"


@pytest.mark.parametrize("name", sorted(set(TEST + VALIDATION) - ODD))
def test_images_move_away_with_severity(images, name):
    moved = [distance(images, name, severity) for severity in SEVERITIES]
    assert moved[-1] > 1.2 * moved[0]
    assert all(b > 0.97 * a for a, b in pairwise(moved)), moved


def test_there_are_the_benchmarks_fifteen_and_four_others():
    assert len(TEST) == 15
    assert len(VALIDATION) == 4
    assert not set(TEST) & set(VALIDATION)


def test_random_corruptions_follow_the_seed(images):
    assert (corrupt(images, "fog", 3, seed=1) != corrupt(images, "fog", 3, seed=2)).any()


def test_each_image_is_corrupted_by_itself(images):
    """What is not drawn at random does not depend on the other images."""
    for name in ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "saturate"):
        np.testing.assert_array_equal(corrupt(images, name, 4)[:3], corrupt(images[:3], name, 4))


def test_brightness_and_saturation_are_those_of_hsv():
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (1, 3, 4, 4), np.uint8)
    pixels[0, :, 0, 0], pixels[0, :, 0, 1] = 0, 90  # black, grey
    for name, change in (
        ("brightness", lambda h, s, v: (h, s, min(v + 0.3, 1))),
        ("saturate", lambda h, s, v: (h, min(2.5 * s + 0.2, 1), v)),
    ):
        found = corrupt(pixels, name, 5)
        for row, column in np.ndindex(4, 4):
            rgb = colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*(pixels[0, :, row, column] / 255))))
            np.testing.assert_allclose(found[0, :, row, column], 255 * np.array(rgb), atol=1)


def test_zoom_is_scipys():
    image = np.random.default_rng(2).random((32, 32)).astype(np.float32)
    for factor in (1.0, 1.06, 1.25, 1.75, 2.25):
        kept = int(np.ceil(32 / factor))
        start = (32 - kept) // 2
        whole = scipy.ndimage.zoom(image[start : start + kept, start : start + kept], factor, order=1)
        trim = (len(whole) - 32) // 2
        expected = whole[trim : trim + 32, trim : trim + 32]
        np.testing.assert_allclose(corruptions._zoom(image[None, None], factor)[0, 0], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "rain"}, "unknown corruption 'rain'"),
        ({"severity": 6}, "a severity is 1 to 5"),
        ({"images": np.zeros((2, 32, 32, 3), np.uint8)}, "expected square images"),
        ({"images": np.zeros((2, 3, 32, 32), np.float32)}, "expected square images"),
    ],
)
def test_refusals(images, change, message):
    with pytest.raises(ValueError, match=message):
        corrupt(**{"images": images, "name": "fog", "severity": 1, **change})
