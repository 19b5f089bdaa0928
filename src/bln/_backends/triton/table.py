"""The launch table: tiles and options of the kernels over an input, as benchmarks/tune.py prints them on an H200."""

from __future__ import annotations

from typing import NamedTuple


class Grouped(NamedTuple):
    """A row for a kernel of ``affine``."""

    values: int
    """In a tile."""
    width: int
    """Of a tile along the contiguous axis, in bytes, unless the axis is shorter."""
    warps: int
    stages: int
    """Tiles under way at a time."""
    run: int
    """Values that a program handles: whole tiles, as many as there are positions for."""


class Published(NamedTuple):
    """A row for a kernel of ``two_pass`` or ``persistent``."""

    values: int
    """In a tile, if there are so few features."""
    each: int
    """Values for a thread."""
    stages: int
    """Tiles under way at a time."""
    samples: int
    """A program handles at least so many samples."""


SHORT = 256
"""An input with fewer positions has rows of its own in the grouped form."""

GROUPED = {
    # kernel, channels first, fewer than SHORT positions
    ("measure", False, False): Grouped(2048, 128, 4, 3, 65536),
    ("measure", False, True): Grouped(4096, 128, 4, 1, 65536),
    ("measure", True, False): Grouped(4096, 256, 4, 1, 65536),
    ("measure", True, True): Grouped(2048, 256, 4, 1, 65536),
    ("apply", False, False): Grouped(8192, 256, 8, 3, 16384),
    ("apply", False, True): Grouped(4096, 256, 4, 3, 16384),
    ("apply", True, False): Grouped(8192, 512, 4, 3, 16384),
    ("apply", True, True): Grouped(2048, 256, 4, 3, 65536),
    ("measure_backward", False, False): Grouped(2048, 128, 4, 3, 65536),
    ("measure_backward", False, True): Grouped(2048, 256, 4, 3, 16384),
    ("measure_backward", True, False): Grouped(4096, 256, 4, 3, 16384),
    ("measure_backward", True, True): Grouped(1024, 256, 4, 3, 16384),
    ("apply_backward", False, False): Grouped(8192, 256, 8, 3, 16384),
    ("apply_backward", False, True): Grouped(4096, 256, 4, 3, 16384),
    ("apply_backward", True, False): Grouped(8192, 512, 8, 3, 16384),
    ("apply_backward", True, True): Grouped(1024, 256, 4, 3, 65536),
}

PUBLISHED = {
    "measure": Published(4096, 16, 3, 8),
    "normalize": Published(4096, 16, 3, 4),
    "measure_backward": Published(2048, 8, 3, 8),
    "differentiate": Published(2048, 8, 3, 4),
    "forward": Published(4096, 32, 1, 0),
    "backward": Published(4096, 16, 1, 0),
}
