"""The grouped form with pooled batch statistics on a GPU: its launch table, and the plan of its launches.

What depends on shape, type and options alone is decided once and kept.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ... import formula
from ..._activation import Activation
from ..._spec import Spec
from ...config import StatisticsConfig
from ...formula import Statistics
from . import affine
from .launch import KINDS, Launch, Shape, as_bytes, known, power_of_two, ready

if TYPE_CHECKING:
    from .functions import Update

FEWEST_POSITIONS = 4
"""With fewer, a pair of coefficients for each sample and feature would be more to move than the input."""


def usable(x: Tensor, channel_dim: int, residual: Tensor | None = None) -> bool:
    """Whether the kernels are for inputs of this shape, and such a residual."""
    values = x.numel() // x.shape[0]
    fits = FEWEST_POSITIONS * x.shape[channel_dim] <= values < 2**31
    return fits and (residual is None or type(residual) in KINDS)


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
    fixed_c, fixed_p = known(c), known(p)
    contiguous = p if channels_first else c
    vec = math.gcd(contiguous, 16 // itemsize) if isinstance(contiguous, int) else 1
    if channels_first:
        positions = min(power_of_two(fixed_p), row.width // itemsize)
        features = min(power_of_two(fixed_c), max(1, row.values // positions))
        positions = min(power_of_two(fixed_p), max(1, row.values // features))
    else:
        features = min(power_of_two(fixed_c), row.width // itemsize)
        positions = min(power_of_two(fixed_p), max(1, row.values // features))
    tiles = -(-fixed_p // positions)
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


class Over(Launch):
    """A launch over an input."""

    def __init__(self, name: str, shape: Shape, itemsize: int, groups: int, constants: dict[str, Any]) -> None:
        n, c, p, channels_first = shape
        row = TABLE[name, channels_first, known(p) < SHORT]
        over = tile(shape, itemsize, row)
        self.splits, self.sizes = over.splits, (n, c, p, over.run, over.splits, groups)
        constants = {**over.constants, **constants}
        super().__init__(getattr(affine, name), over.programs, self.sizes, constants, row.warps)


class Plan:
    """All launches of one layer on inputs of one shape and type."""

    fuses = True
    updates_masked = True

    @classmethod
    def of(cls, x: Tensor, channel_dim: int, spec: Spec, masked: bool, activation: Activation | None) -> Plan | None:
        """The plan for inputs that lie as ``x`` does; ``None`` where no kernel reads it so."""
        shape = Shape.of(x, channel_dim)
        return None if shape is None else cls(shape, x.element_size(), spec, masked, activation)

    def __init__(self, shape: Shape, itemsize: int, spec: Spec, masked: bool, activation: str | None) -> None:
        n, c, p, _ = shape
        groups = spec.groups
        assert groups is not None
        given = shape, itemsize, groups
        self.measure = Over("measure", *given, {})
        activated = {"ACTIVATION": activation}
        self.apply = Over("apply", *given, activated)
        self.measure_backward = Over("measure_backward", *given, activated)
        self.apply_backward = Over("apply_backward", *given, activated)

        joining, programs = joining_tile(n, c, groups)
        numbers = float(spec.mix_eps), formula.weights(0.0, 0.0, c, spec.dim_scale)[0], float(spec.eps)
        sizes = *self.measure.sizes, *numbers
        self.join = Launch(affine.join, programs, sizes, joining)
        self.join_updating = Launch(affine.join, programs, sizes, joining)
        self.join_inference = Launch(affine.join_inference, programs, sizes, joining)
        sizes = n, c, p, self.measure_backward.splits, self.measure.splits, groups, *numbers
        self.join_backward = Launch(affine.join_backward, programs, sizes, joining)

        self.counts = (self.measure.splits, n) if masked else None
        self.statistics_size = 4 * (c + n * groups) + 4 + 2 * self.measure.splits * n * c
        self.shares = 2 * (c + n * groups) + 2 * self.measure_backward.splits * n * c
        self.features = c
        self.groups = groups

    def _room(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Room for statistics, followed by partial results, and for counts under a mask."""
        found = torch.empty(self.statistics_size, dtype=torch.float32, device=x.device)
        counts = None if self.counts is None else torch.empty(self.counts, dtype=torch.float32, device=x.device)
        return found, counts

    def train(
        self, stream: int, x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None,
        mask: Tensor | None, update: Update, spec: Spec,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """``y``, and what backward needs besides the input."""
        at, launches = ready(self.measure, self.join if update is None else self.join_updating, self.apply)
        measure, join, apply = launches
        real, (found, counts) = as_bytes(mask), self._room(x)
        at_x, at_real, at_found, at_counts = at(x), at(real), at(found), at(counts)
        measure(stream, at_x, at_real, at_found, None, at_counts)
        if update is None:
            join(stream, at_found, None, at_counts, *_NO_POPULATION)
        else:
            population: list[Any] = list(update[0]._buffers.values())
            torch.autograd.graph.increment_version(population)
            momentum = -1.0 if update[1] is None else float(update[1])
            join(stream, at_found, None, at_counts, *map(at, population), momentum)
        y = torch.empty_like(x)
        apply(stream, at_x, at(y), at(residual), at_real, at_found, at(gamma), at(beta))
        return y, (found,) if counts is None else (found, counts)

    def backward(
        self, stream: int, x: Tensor, dy: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None,
        mask: Tensor | None, kept: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Gradients of the input, of gamma and beta as two rows, and of a residual before an activation."""
        found, counts, real = kept[0], kept[1] if len(kept) > 1 else None, as_bytes(mask)
        at, (measure, join, apply) = ready(self.measure_backward, self.join_backward, self.apply_backward)
        shares = torch.empty(self.shares, dtype=torch.float32, device=x.device)
        gradients = torch.empty((2, self.features), dtype=torch.float32, device=x.device)
        at_x, at_dy, at_residual, at_real, at_found = at(x), at(dy), at(residual), at(real), at(found)
        at_gamma, at_beta, at_shares = at(gamma), at(beta), at(shares)
        measure(stream, at_x, at_dy, at_residual, at_real, at_found, at_gamma, at_beta, at_shares)
        join(stream, at_shares, None, None, at(counts), at_found, at_gamma, at(gradients))
        dx = torch.empty_like(x)
        d_residual = None if residual is None else torch.empty_like(x)  # wanted or not: the launch is for both
        at_dx, at_d_residual = at(dx), at(d_residual)
        apply(stream, at_x, at_dy, at_residual, at_dx, at_d_residual, at_real, at_found, at_gamma, at_beta, at_shares)
        return dx, gradients, d_residual

    def statistics(
        self, x: Tensor, mask: Tensor | None, channel_dim: int, spec: Spec, kept: tuple[Tensor, ...]
    ) -> Statistics:
        """The mini-batch's own statistics."""
        found, (n, c) = kept[0], (x.shape[0], self.features)
        features, groups = _parts(found, 4, n, c, self.groups)
        return Statistics(features[0], features[1], groups[0], groups[1], found[4 * (c + n * self.groups)])

    def infer(
        self, stream: int, x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None,
        mask: Tensor | None, population: Any, config: StatisticsConfig, spec: Spec,
    ) -> Tensor:  # fmt: skip
        """``y`` by the statistics of a configuration."""
        real = as_bytes(mask)
        if config.uses_batch or config.uses_features or real is not None:
            found, counts = self._room(x)
            self.measure(stream, x, real, found, None, counts)
        else:
            found, counts = torch.empty(self.statistics_size, dtype=torch.float32, device=x.device), None
        self.join_inference(stream, found, counts, *list(population._buffers.values())[:6], *config.priors)
        y = torch.empty_like(x)
        self.apply(stream, x, y, residual, real, found, gamma, beta)
        return y


_NO_POPULATION = (*[None] * 7, 0.0)


def _parts(found: Tensor, count: int, n: int, c: int, groups: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A few values for each feature, and for each sample and group, from a buffer where they stand in this order."""
    features, rest = found[: count * c], found[count * c : count * (c + n * groups)]
    return features.view(count, c).unbind(), rest.view(count, n, groups).unbind()
