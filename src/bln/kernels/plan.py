"""Launches of the kernels in ``affine``: what depends on shape, type and options alone is decided once and kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

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


class Tile(NamedTuple):
    """The tiles of launches over an input, and how positions are divided."""

    constants: dict[str, Any]
    programs: int
    run: int
    splits: int


def tile(shape: Shape, itemsize: int) -> Tile:
    """Tiles of 4096 values, 128 bytes wide or more; ranges of positions of some 64 thousand values.

    Nothing here depends on the number of samples, so that a sample's bits do not, either.
    """
    n, c, p, channels_first = shape
    known = p if isinstance(p, int) else 64  # a compiler may leave it open; tiles are for any number
    vec = math.gcd((p if isinstance(p, int) else 1) if channels_first else c, 16 // itemsize)
    if channels_first:
        positions = min(power_of_two(known), 1024)
        features = min(power_of_two(c), max(1, 4096 // positions))
    else:
        features = min(power_of_two(c), 256 // itemsize)
        positions = min(power_of_two(known), 4096 // features)
    run = max(1, 2**16 // (features * positions)) * positions
    splits = -(-p // run)
    constants = {"CHANNELS_FIRST": channels_first, "BC": features, "BP": positions, "VEC": vec}
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
    """A kernel with its grid and constants, compiled by its first call and launched without binding arguments after.

    All calls must agree in whatever Triton compiles for: which arguments are ``None``, the types and the alignment
    of the others.
    """

    def __init__(self, kernel: Any, programs: int, constants: dict[str, Any], num_warps: int) -> None:
        self.kernel, self.grid = kernel, (programs,)
        self.constants, self.num_warps = constants, num_warps
        self.values = tuple(constants.values())
        self.compiled: Any = None

    def __call__(self, *arguments: Any) -> None:
        """Launch on the current stream."""
        compiled = self.compiled
        if compiled is None:
            found = self.kernel[self.grid](*arguments, **self.constants, num_warps=self.num_warps)
            if not INTERPRETED:
                self.compiled = found
            return
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        compiled.run(
            self.grid[0], 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *arguments, *self.values,
        )  # fmt: skip

    def traced(self, *arguments: Any) -> None:
        """Launch inside of a ``torch.library.triton_op``, where a compiler looks on."""
        torch.library.wrap_triton(self.kernel)[self.grid](*arguments, **self.constants, num_warps=self.num_warps)


class Plan:
    """All launches of one layer on inputs of one shape and type."""

    def __init__(self, shape: Shape, itemsize: int, groups: int, masked: bool, activation: str | None) -> None:
        n, c, p, _ = self.shape = shape
        over = tile(shape, itemsize)
        self.sizes = n, c, p, over.run, over.splits, groups
        self.partial = 2, over.splits, n, c
        self.counts = (over.splits, n) if masked else None
        self.statistics = 4 * (c + n * groups) + 3
        self.shares = 2 * (c + n * groups)
        joining, programs = joining_tile(n, c, groups)
        constants = {**over.constants, "MASKED": masked}
        activated = {**constants, "ACTIVATION": activation}
        joining["MASKED"] = masked
        self.measure = Launch(affine.measure, over.programs, constants, 4)
        self.apply = Launch(affine.apply, over.programs, activated, 4)
        self.measure_backward = Launch(affine.measure_backward, over.programs, activated, 4)
        self.apply_backward = Launch(affine.apply_backward, over.programs, activated, 4)
        self.join = Launch(affine.join, programs, joining, 4)
        self.join_updating = Launch(affine.join, programs, joining, 4)
        self.join_backward = Launch(affine.join_backward, programs, joining, 4)
        self.join_inference = [
            Launch(affine.join_inference, programs, {"CONFIG": config, **joining}, 4) for config in range(16)
        ]


_plans: dict[Any, Plan | None] = {}
_MOST = 4096


def plan(key: Any, make: Callable[[], Plan | None]) -> Plan | None:
    """The plan kept for a key."""
    found = _plans.get(key, _plans)
    if found is _plans:
        if len(_plans) >= _MOST:
            _plans.clear()
        found = _plans[key] = make()
    return found  # type: ignore[return-value]
