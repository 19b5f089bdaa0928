"""The corruptions of CIFAR-10-C (Hendrycks and Dietterich 2019), vectorized over images.

They follow the published definitions and severities for images of 32 x 32, in NumPy, SciPy and Pillow. Differences to
the published images:

- Random numbers differ. They depend on the seed, the corruption and the severity alone.
- *Frost* overlays a rough fractal in the colours of ice in place of photographs of frost, with the same strength.
- *Spatter* has flat drops of water, without the edges of the published ones. It is used for validation only.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.ndimage  # type: ignore[import-untyped]
from numpy.typing import NDArray
from PIL import Image

Images = Any
"""Arrays ``(N, 3, H, W)`` in float32 from 0 to 1; untyped, since NumPy's operators lose the type."""
Bytes = NDArray[np.uint8]

SEVERITIES = (1, 2, 3, 4, 5)


def corrupt(images: Bytes, name: str, severity: int, seed: int = 0) -> Bytes:
    """Corrupt images ``(N, 3, H, W)``; the same arguments give the same bytes.

    Args:
        images: Square images in uint8.
        name: One of ``TEST`` or ``VALIDATION``.
        severity: From 1 to 5.
        seed: The seed of the random numbers.
    """
    if name not in _CORRUPTIONS:
        raise ValueError(f"unknown corruption {name!r}; known: {', '.join(_CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise ValueError(f"a severity is 1 to 5, got {severity!r}")
    if images.ndim != 4 or images.shape[1] != 3 or images.shape[2] != images.shape[3] or images.dtype != np.uint8:
        raise ValueError(f"expected square images (N, 3, H, H) in uint8, got {images.shape} in {images.dtype}")
    rng = np.random.default_rng([seed, zlib.crc32(name.encode()), severity])
    corrupted = _CORRUPTIONS[name](images.astype(np.float32) / 255, severity - 1, rng)
    # Fractions are cut off, as published; 0.01 keeps rounding from cutting a whole number to the one below.
    pixels: Bytes = (np.clip(corrupted, 0, 1) * 255 + 0.01).astype(np.uint8)
    return pixels


# ---- noise


def _gaussian_noise(x: Images, at: int, rng: np.random.Generator) -> Images:
    return x + (0.04, 0.06, 0.08, 0.09, 0.10)[at] * rng.standard_normal(x.shape, np.float32)


def _shot_noise(x: Images, at: int, rng: np.random.Generator) -> Images:
    photons = (500, 250, 100, 75, 50)[at]
    return (rng.poisson(x * photons) / photons).astype(np.float32)


def _impulse_noise(x: Images, at: int, rng: np.random.Generator) -> Images:
    hit = rng.random(x.shape, np.float32) <= (0.01, 0.02, 0.03, 0.05, 0.07)[at]
    return np.where(hit, rng.integers(0, 2, x.shape).astype(np.float32), x)


def _speckle_noise(x: Images, at: int, rng: np.random.Generator) -> Images:
    return x + x * (0.06, 0.1, 0.12, 0.16, 0.2)[at] * rng.standard_normal(x.shape, np.float32)


# ---- blur


def _defocus_blur(x: Images, at: int, rng: np.random.Generator) -> Images:
    radius, alias = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))[at]
    grid = np.arange(-3, 4)
    disk = (grid[:, None] ** 2 + grid**2 <= radius**2).astype(np.float32)
    taps = np.exp(-(np.arange(-1, 2) ** 2) / (2 * alias**2)).astype(np.float32)
    taps /= taps.sum()
    kernel = scipy.ndimage.convolve(disk / disk.sum(), np.outer(taps, taps), mode="constant")
    return scipy.ndimage.convolve(x, kernel[None, None], mode="mirror")


def _gaussian_blur(x: Images, at: int, rng: np.random.Generator) -> Images:
    return _smooth(x, (0.4, 0.6, 0.7, 0.8, 1)[at])


def _glass_blur(x: Images, at: int, rng: np.random.Generator) -> Images:
    sigma, rounds = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[at]
    pixels = _smooth(x, sigma)
    count, _, height, width = x.shape
    which = np.arange(count)[:, None, None]
    for _ in range(rounds):
        # The published code goes through the pixels from the last, and gives each the colour of a neighbour before it.
        rows, columns = (np.broadcast_to(grid, (count, height, width)).copy() for grid in np.mgrid[:height, :width])
        inside = (slice(None), slice(2, None), slice(2, None))
        rows[inside] -= rng.integers(0, 2, rows[inside].shape)
        columns[inside] -= rng.integers(0, 2, rows[inside].shape)
        pixels = pixels.transpose(0, 2, 3, 1)[which, rows, columns].transpose(0, 3, 1, 2)
    return _smooth(pixels, sigma)


def _motion_blur(x: Images, at: int, rng: np.random.Generator) -> Images:
    radius, sigma = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))[at]
    return _move(x, radius, sigma, rng.uniform(-45, 45, len(x)))


def _zoom_blur(x: Images, at: int, rng: np.random.Generator) -> Images:
    factors = np.arange(1, (1.06, 1.11, 1.16, 1.21, 1.26)[at], 0.01)
    total = x.copy()
    for factor in factors:
        total += _zoom(x, float(factor))
    return total / (len(factors) + 1)


# ---- weather


def _snow(x: Images, at: int, rng: np.random.Generator) -> Images:
    mean, std, factor, threshold, radius, sigma, opacity = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.1, 0.2, 1, 0.5, 10, 4, 0.9), (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85), (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[at]  # fmt: skip
    flakes = mean + std * rng.standard_normal((len(x), 1, *x.shape[2:]), np.float32)
    flakes = _zoom(flakes, factor)
    flakes = np.clip(np.where(flakes < threshold, 0, flakes), 0, 1)
    flakes = _move(flakes, radius, sigma, rng.uniform(-135, -45, len(x)))
    grey = np.tensordot(x, np.array((0.299, 0.587, 0.114), np.float32), (1, 0))[:, None]
    pale = opacity * x + (1 - opacity) * np.maximum(x, grey * 1.5 + 0.5)
    return np.clip(pale, 0, 1) + flakes + np.rot90(flakes, 2, (2, 3))


def _frost(x: Images, at: int, rng: np.random.Generator) -> Images:
    opacity, strength = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[at]
    ridges = 1 - np.abs(2 * _plasma(len(x), x.shape[2], 1.6, rng) - 1)
    colour = np.array((0.85, 0.95, 1), np.float32)[:, None, None]
    return opacity * x + strength * (0.1 + 0.9 * ridges[:, None] ** 2) * colour


def _fog(x: Images, at: int, rng: np.random.Generator) -> Images:
    strength, decay = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))[at]
    brightest = x.max((1, 2, 3), keepdims=True)
    foggy = x + strength * _plasma(len(x), x.shape[2], decay, rng)[:, None]
    return foggy * brightest / (brightest + strength)


def _spatter(x: Images, at: int, rng: np.random.Generator) -> Images:
    mean, std, sigma, threshold, strength, mud = (
        (0.62, 0.1, 0.7, 0.7, 0.5, 0), (0.65, 0.1, 0.8, 0.7, 0.5, 0), (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1), (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    )[at]  # fmt: skip
    liquid = _smooth(mean + std * rng.standard_normal((len(x), 1, *x.shape[2:]), np.float32), sigma)
    drops = (liquid > threshold).astype(np.float32)
    if mud:
        drops = _smooth(drops, strength)
        drops[drops < 0.8] = 0
        return x * (1 - drops) + drops * np.array((63, 42, 20), np.float32)[:, None, None] / 255
    return x + strength * drops * np.array((175, 238, 238), np.float32)[:, None, None] / 255


# ---- colour


def _brightness(x: Images, at: int, rng: np.random.Generator) -> Images:
    value = x.max(1, keepdims=True)
    brighter = np.minimum(value + (0.05, 0.1, 0.15, 0.2, 0.3)[at], 1)
    # At constant hue and saturation a colour is proportional to its value; black has neither, and becomes grey.
    return np.where(value > 0, x * (brighter / np.maximum(value, 1e-6)), brighter)


def _contrast(x: Images, at: int, rng: np.random.Generator) -> Images:
    mean = x.mean((2, 3), keepdims=True)
    return (x - mean) * (0.75, 0.5, 0.4, 0.3, 0.15)[at] + mean


def _saturate(x: Images, at: int, rng: np.random.Generator) -> Images:
    factor, offset = ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))[at]
    value = x.max(1, keepdims=True)
    spread = value - x.min(1, keepdims=True)
    saturation = np.clip(spread / np.maximum(value, 1e-6) * factor + offset, 0, 1)
    # The hue is how far each channel lies below the value, as a share of the spread. Grey counts as red.
    red = np.array((0, 1, 1), np.float32)[:, None, None]
    hue = np.where(spread > 0, (value - x) / np.maximum(spread, 1e-6), red)
    return value * (1 - saturation * hue)


# ---- digital


def _elastic_transform(x: Images, at: int, rng: np.random.Generator) -> Images:
    count, _, size, _ = x.shape
    strength, sigma, max_shift = (
        size * share for share in ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05),
        (0.1, 0.03, 0.03))[at]
    )  # fmt: skip
    middle, reach = size // 2, size // 3
    before = np.array([(1, 1), (1, -1), (-1, -1)]) * reach + middle
    after = before + rng.uniform(-max_shift, max_shift, (count, 3, 2))
    # The affine map from the points after to those before, (x, y, 1) times (3, 2), says where each pixel comes from.
    back = np.linalg.solve(np.concatenate([after, np.ones((count, 3, 1))], 2), np.broadcast_to(before, (count, 3, 2)))
    rows, columns = np.mgrid[:size, :size]
    from_columns, from_rows = (
        columns * back[:, 0, axis, None, None] + rows * back[:, 1, axis, None, None] + back[:, 2, axis, None, None]
        for axis in (0, 1)
    )
    warped = _sample(x, from_rows, from_columns)
    if not strength:
        return warped
    right, down = (
        strength * scipy.ndimage.gaussian_filter(rng.uniform(-1, 1, (count, size, size)), (0, sigma, sigma), truncate=3)
        for _ in range(2)
    )
    return _sample(warped, rows + down, columns + right)


def _pixelate(x: Images, at: int, rng: np.random.Generator) -> Images:
    size = x.shape[2]
    small = int(size * (0.95, 0.9, 0.85, 0.75, 0.65)[at])

    def resized(image: Image.Image) -> Image.Image:
        box = Image.Resampling.BOX
        return image.resize((small, small), box).resize((size, size), box)

    return _by_pillow(x, resized)


def _jpeg_compression(x: Images, at: int, rng: np.random.Generator) -> Images:
    def compressed(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=(80, 65, 58, 50, 40)[at])
        return Image.open(file)

    return _by_pillow(x, compressed)


_CORRUPTIONS: dict[str, Callable[[Images, int, np.random.Generator], Images]] = {
    "gaussian_noise": _gaussian_noise, "shot_noise": _shot_noise, "impulse_noise": _impulse_noise,
    "defocus_blur": _defocus_blur, "glass_blur": _glass_blur, "motion_blur": _motion_blur, "zoom_blur": _zoom_blur,
    "snow": _snow, "frost": _frost, "fog": _fog, "brightness": _brightness, "contrast": _contrast,
    "elastic_transform": _elastic_transform, "pixelate": _pixelate, "jpeg_compression": _jpeg_compression,
    "speckle_noise": _speckle_noise, "gaussian_blur": _gaussian_blur, "spatter": _spatter, "saturate": _saturate,
}  # fmt: skip
TEST, VALIDATION = tuple(_CORRUPTIONS)[:15], tuple(_CORRUPTIONS)[15:]
"""The benchmark's 15 corruptions, and the 4 that its authors reserve for validation."""


# ---- tools


def _smooth(x: Images, sigma: float) -> Images:
    """Blur by a Gaussian; pixels at the edge continue beyond it."""
    return scipy.ndimage.gaussian_filter(x, (0, 0, sigma, sigma), mode="nearest")


def _zoom(x: Images, factor: float) -> Images:
    """Enlarge the middle of images to the size of the whole, by linear interpolation."""
    size = x.shape[2]
    cropped = int(np.ceil(size / factor))
    enlarged = round(cropped * factor)
    start = (size - cropped) // 2
    place = (np.arange(size) + (enlarged - size) // 2) * ((cropped - 1) / max(enlarged - 1, 1)) + start
    low = np.clip(np.floor(place).astype(int), 0, size - 2)
    share = (place - low).astype(np.float32)
    interpolate = np.zeros((size, size), np.float32)
    interpolate[np.arange(size), low] = 1 - share
    interpolate[np.arange(size), low + 1] += share
    return np.matmul(np.matmul(interpolate, x), interpolate.T)


def _move(x: Images, radius: int, sigma: float, degrees: NDArray[np.float64]) -> Images:
    """Blur each image along its direction by half a Gaussian, as ImageMagick does."""
    count, _, height, width = x.shape
    steps = np.arange(2 * radius + 1)
    taps = np.exp(-(steps**2) / (2 * sigma**2)).astype(np.float32)
    taps /= taps.sum()
    angles = np.deg2rad(degrees)[:, None]
    right, down = (np.ceil(steps * side(angles) - 0.5).astype(int) for side in (np.cos, np.sin))
    pixels = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    total = np.zeros_like(pixels)
    which = np.arange(count)[:, None, None]
    for step, tap in enumerate(taps):
        rows = np.clip(np.arange(height) + down[:, step, None], 0, height - 1)
        columns = np.clip(np.arange(width) + right[:, step, None], 0, width - 1)
        total += tap * pixels[which, rows[:, :, None], columns[:, None, :]]
    return total.transpose(0, 3, 1, 2)


def _plasma(count: int, size: int, decay: float, rng: np.random.Generator) -> Images:
    """Draw fractals ``(count, size, size)`` from 0 to 1 by the diamond-square algorithm, on a torus."""
    side = 1 << (size - 1).bit_length()
    field = np.zeros((count, side, side))
    step, wibble = side, 100.0

    def varied(total: NDArray[np.float64]) -> NDArray[np.float64]:
        return total / 4 + wibble * rng.uniform(-wibble, wibble, total.shape)

    while step >= 2:
        half = step // 2
        corners = field[:, ::step, ::step]
        squares = corners + np.roll(corners, -1, 1)
        field[:, half::step, half::step] = varied(squares + np.roll(squares, -1, 2))
        centres = field[:, half::step, half::step]
        above_below, left_right = (corners + np.roll(corners, -1, axis) for axis in (1, 2))
        field[:, ::step, half::step] = varied(centres + np.roll(centres, 1, 1) + left_right)
        field[:, half::step, ::step] = varied(centres + np.roll(centres, 1, 2) + above_below)
        step, wibble = half, wibble / decay
    field -= field.min((1, 2), keepdims=True)
    field /= field.max((1, 2), keepdims=True)
    return field[:, :size, :size].astype(np.float32)


def _sample(x: Images, rows: NDArray[np.float64], columns: NDArray[np.float64]) -> Images:
    """Interpolate images linearly at these places ``(N, H, W)``, mirrored at the edges."""

    def sampled(image: Images, *places: NDArray[np.float64]) -> Images:
        return [scipy.ndimage.map_coordinates(channel, places, order=1, mode="mirror") for channel in image]

    return np.stack([sampled(*image_and_places) for image_and_places in zip(x, rows, columns, strict=True)])


def _by_pillow(x: Images, change: Callable[[Image.Image], Image.Image]) -> Images:
    """Apply a function of Pillow's images to each image."""
    pixels = np.rint(x * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    changed = np.stack([np.asarray(change(Image.fromarray(image))) for image in pixels])
    return changed.transpose(0, 3, 1, 2).astype(np.float32) / 255
