"""Launches of the kernels in ``affine``: what depends on shape, type and options alone is decided once and kept."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
from torch import Tensor

from .. import formula
from .._spec import Spec
from . import affine

INTERPRETED = not isinstance(affine.measure, triton.runtime.JITFunction)


class Shape(NamedTuple):
    """An input seen as ``x[n, c, p]``, positions or features being contiguous in memory."""

    n: int
    c: int
    p: int
    channels_first: bool

    @classmethod
    def of(cls, x: Tensor, channel_dim: int) -> Shape | None:
        """See an input so, if it lies so."""
        n, c = x.shape[0], x.shape[channel_dim]
        p = x.numel() // (n * c)
        if channel_dim == x.dim() - 1:
            return cls(n, c, p, False) if x.is_contiguous() else None
        if channel_dim == 1 and x.is_contiguous():
            return cls(n, c, p, True)
        return cls(n, c, p, False) if x.movedim(channel_dim, -1).is_contiguous() else None


class Row(NamedTuple):
    """A row of the launch table: the tile and the options of a launch over an input."""

    values: int
    """In a tile."""
    width: int
    """Of a tile along the contiguous axis, in bytes, unless the axis is shorter."""
    warps: int
    stages: int
    """Tiles under way at a time."""
    run: int
    """Values that a program handles: whole tiles, as many as there are positions for."""


TABLE = {
    # kernel, channels first, fewer than SHORT positions: as benchmarks/tune.py prints it on an H200
    ("measure", False, False): Row(2048, 128, 4, 3, 65536),
    ("measure", False, True): Row(4096, 128, 4, 1, 65536),
    ("measure", True, False): Row(4096, 256, 4, 1, 65536),
    ("measure", True, True): Row(2048, 256, 4, 1, 65536),
    ("apply", False, False): Row(8192, 256, 8, 3, 16384),
    ("apply", False, True): Row(4096, 256, 4, 3, 16384),
    ("apply", True, False): Row(8192, 512, 4, 3, 16384),
    ("apply", True, True): Row(2048, 256, 4, 3, 65536),
    ("measure_backward", False, False): Row(2048, 128, 4, 3, 65536),
    ("measure_backward", False, True): Row(2048, 256, 4, 3, 16384),
    ("measure_backward", True, False): Row(4096, 256, 4, 3, 16384),
    ("measure_backward", True, True): Row(1024, 256, 4, 3, 16384),
    ("apply_backward", False, False): Row(8192, 256, 8, 3, 16384),
    ("apply_backward", False, True): Row(4096, 256, 4, 3, 16384),
    ("apply_backward", True, False): Row(8192, 512, 8, 3, 16384),
    ("apply_backward", True, True): Row(1024, 256, 4, 3, 65536),
}
SHORT = 256


class Tile(NamedTuple):
    """The tile of a launch over an input, and how positions are divided."""

    constants: dict[str, Any]
    programs: int
    run: int
    splits: int


def tile(shape: Shape, itemsize: int, row: Row) -> Tile:
    """Fit a row of the launch table to an input.

    Nothing here depends on the number of samples, so that a sample's bits do not, either.
    """
    n, c, p, channels_first = shape
    vec = math.gcd(p if channels_first else c, 16 // itemsize)
    if channels_first:
        positions = min(power_of_two(p), row.width // itemsize)
        features = min(power_of_two(c), max(1, row.values // positions))
        positions = min(power_of_two(p), max(1, row.values // features))
    else:
        features = min(power_of_two(c), row.width // itemsize)
        positions = min(power_of_two(p), max(1, row.values // features))
    tiles = -(-p // positions)
    splits = -(-tiles // max(1, row.run // (features * positions)))
    run = -(-tiles // splits) * positions  # ranges of one length, but for the last
    splits = -(-p // run)
    constants = {"CHANNELS_FIRST": channels_first, "BC": features, "BP": positions, "VEC": vec, "STAGES": row.stages}
    return Tile(constants, n * splits * -(-c // features), run, splits)


def joining_tile(n: int, c: int, groups: int) -> tuple[dict[str, Any], int]:
    """Tiles of the launches that join, 64 by 32 features and 2048 values of samples and groups, and their programs."""
    size = min(256, power_of_two(c // groups))
    rows = max(1, 2048 // size)
    constants = {"BR": 64, "BA": 32, "BQ": rows, "BK": size}
    return constants, -(-c // 32) + -(-n * groups // rows)


def power_of_two(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << (number - 1).bit_length()


class Launch:
    """A kernel with its grid, numbers and constants, compiled by its first call.

    After that it is launched without Triton's binding of arguments. All calls must agree in whatever Triton compiles
    for: which pointers are ``None``, the types and the alignment of the others.

    Args:
        kernel: The kernel: pointers first, then what is decided here.
        programs: How many programs to launch.
        numbers: The arguments behind pointers.
        constants: The constants behind those, in the order of the kernel.
        num_warps: Warps in a program.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: tuple[float, ...],
        constants: dict[str, Any],
        num_warps: int = 4,
    ) -> None:
        self.kernel, self.programs, self.numbers, self.constants = kernel, programs, numbers, constants
        self.options = {"num_warps": num_warps}
        self.rest = (*numbers, *constants.values())
        self.run: Any = None

    def __call__(self, stream: int, *pointers: Any) -> None:
        """Launch, given tensors or ``None``; the first call takes the current stream."""
        if self.run is None:
            compiled = self.kernel[(self.programs,)](*pointers, *self.numbers, **self.constants, **self.options)
            if not INTERPRETED:
                self.function, self.metadata, self.run = compiled.function, compiled.packed_metadata, compiled.run
        else:
            # Triton's launcher takes an address as it is, and asks a tensor and the driver for one.
            given = [each.data_ptr() if isinstance(each, Tensor) else each for each in pointers]
            self.run(self.programs, 1, 1, stream, self.function, self.metadata, None, None, None, *given, *self.rest)


class Over(Launch):
    """A launch over an input."""

    def __init__(self, name: str, shape: Shape, itemsize: int, groups: int, constants: dict[str, Any]) -> None:
        n, c, p, channels_first = shape
        row = TABLE[name, channels_first, p < SHORT]
        over = tile(shape, itemsize, row)
        self.splits, self.sizes = over.splits, (n, c, p, over.run, over.splits, groups)
        constants = {**over.constants, **constants}
        super().__init__(getattr(affine, name), over.programs, self.sizes, constants, row.warps)


class Plan:
    """All launches of one layer on inputs of one shape and type."""

    def __init__(self, shape: Shape, itemsize: int, spec: Spec, masked: bool, activation: str | None) -> None:
        n, c, p, _ = shape
        groups = spec.groups
        assert groups is not None
        given = shape, itemsize, groups
        self.measure = Over("measure", *given, {"MASKED": masked})
        activated = {"MASKED": masked, "ACTIVATION": activation}
        self.apply = Over("apply", *given, activated)
        self.measure_backward = Over("measure_backward", *given, activated)
        self.apply_backward = Over("apply_backward", *given, activated)

        joining, programs = joining_tile(n, c, groups)
        joining["MASKED"] = masked
        numbers = float(spec.mix_eps), formula.weights(0.0, 0.0, c, spec.dim_scale)[0], float(spec.eps)
        sizes = *self.measure.sizes, *numbers
        self.join = Launch(affine.join, programs, sizes, joining)
        self.join_updating = Launch(affine.join, programs, sizes, joining)
        self.join_inference = Launch(affine.join_inference, programs, sizes, joining)
        sizes = n, c, p, self.measure_backward.splits, self.measure.splits, groups, *numbers
        self.join_backward = Launch(affine.join_backward, programs, sizes, joining)

        self.counts = (self.measure.splits, n) if masked else None
        self.statistics = 4 * (c + n * groups) + 4 + 2 * self.measure.splits * n * c
        self.shares = 2 * (c + n * groups) + 2 * self.measure_backward.splits * n * c
        self.features = c
