"""The launch table: tile sizes and options of kernels over an input, printed by benchmarks/tune.py on an H200."""

from __future__ import annotations

from typing import NamedTuple


class Grouped(NamedTuple):
    """A row for a kernel of ``affine``."""

    values: int  # of a tile
    width_bytes: int  # of a tile along the contiguous axis, unless the axis is shorter
    warps: int
    stages: int  # tiles loaded ahead
    chunk: int  # values of a program, rounded down to whole tiles


class Published(NamedTuple):
    """A row for a kernel of ``two_pass`` or ``persistent``."""

    values: int  # of a tile, unless its features are more
    per_thread: int  # values of a thread, which sets the warps
    stages: int  # tiles loaded ahead
    min_samples: int  # of a program


SHORT = 256
"""Inputs with fewer positions have rows of their own in the grouped form."""

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

PUBLISHED = {  # the first four of two_pass, the last two of persistent
    "measure": Published(4096, 16, 3, 8),
    "normalize": Published(4096, 16, 3, 4),
    "measure_backward": Published(2048, 8, 3, 8),
    "normalize_backward": Published(2048, 8, 3, 4),
    "forward": Published(4096, 32, 1, 0),
    "backward": Published(4096, 16, 1, 0),
}
