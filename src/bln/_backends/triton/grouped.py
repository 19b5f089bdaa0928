"""The grouped form with pooled batch statistics on a GPU: the plan of its launches.

What depends on shape, type and options alone is decided once and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from ... import formula
from ..._activation import Activation
from ..._spec import Spec
from ...config import StatisticsConfig
from ...formula import Statistics
from . import affine, launch, table
from .launch import Launch, Learning, Shape, Tensors, as_bytes, beyond, known, new, ready


def tile(shape: Shape, itemsize: int, row: table.Grouped) -> tuple[int, int, int]:
    """Features and positions of a tile, and positions that a program handles, for an input and a row of the table.

    Nothing here depends on the number of samples, so that a sample's bits do not, either.
    """
    all_features, all_positions = next_power_of_2(known(shape.c)), next_power_of_2(known(shape.p))
    if shape.channels_first:
        features = min(all_features, max(1, row.values // min(all_positions, row.width // itemsize)))
    else:
        features = min(all_features, row.width // itemsize)
    positions = min(all_positions, max(1, row.values // features))
    tiles = cdiv(known(shape.p), positions)
    run = cdiv(tiles, cdiv(tiles, max(1, row.run // (features * positions)))) * positions  # the last may be shorter
    return features, positions, run


class Over(Launch):
    """A launch over an input."""

    def __init__(self, name: str, shape: Shape, itemsize: int, groups: int, **constants: Any) -> None:
        row = table.GROUPED[name, shape.channels_first, known(shape.p) < table.SHORT]
        features, positions, run = tile(shape, itemsize, row)
        n, c, p, *_ = shape
        self.splits = cdiv(p, run)
        self.sizes = n, c, p, run, self.splits, groups
        constants = {**shape.tile(features, positions, itemsize), "STAGES": row.stages, **constants}
        numbers = self.sizes[:-1] if name == "measure" else self.sizes
        super().__init__(getattr(affine, name), n * self.splits * cdiv(c, features), numbers, constants, row.warps)


def joining_tile(n: int, c: int, groups: int) -> tuple[dict[str, Any], int]:
    """Tiles of the launches that join, 64 by 32 features and 2048 values of samples and groups, and their programs."""
    size = min(256, next_power_of_2(c // groups))
    rows = max(1, 2048 // size)
    return {"BR": 64, "BA": 32, "BQ": rows, "BK": size}, cdiv(c, 32) + cdiv(n * groups, rows)


def joining(name: str, spec: Spec, n: int, c: int, *sizes: int) -> Launch:
    """A launch that joins parts."""
    assert spec.groups is not None
    constants, programs = joining_tile(n, c, spec.groups)
    numbers = float(spec.mix_eps), formula.weights(0.0, 0.0, c, spec.dim_scale)[0], float(spec.eps)
    return Launch(getattr(affine, name), programs, (n, c, *sizes, spec.groups, *numbers), constants)


class Plan(launch.Plan):
    """The launches of the grouped form, three each way."""

    def __init__(self, shape: Shape, itemsize: int, spec: Spec, masked: bool, activation: Activation | None) -> None:
        super().__init__(shape, spec, activation)
        n, c, p, *_ = shape
        assert spec.groups is not None
        given = shape, itemsize, spec.groups
        self.measure = Over("measure", *given)
        self.apply = Over("apply", *given, ACTIVATION=activation)
        self.measure_backward = Over("measure_backward", *given, ACTIVATION=activation)
        self.apply_backward = Over("apply_backward", *given, ACTIVATION=activation)

        run, splits = self.measure.sizes[3:5]
        self.join, self.join_updating = (joining("join", spec, n, c, p, run, splits) for _ in range(2))
        self.join_inference = joining("join_inference", spec, n, c, p, run, splits)
        self.join_backward = joining("join_backward", spec, n, c, p, self.measure_backward.splits, splits)

        # One piece of memory forward and one backward, where parts of results follow what is made of them.
        self.counts_size = (splits, n) if masked else None
        self.partial = 4 + 4 * (c + n * spec.groups)
        self.statistics_size = self.partial + 2 * splits * n * c
        size = 4 * cdiv(self.measure_backward.splits * n * c, 4)  # kernels are compiled for 16 bytes
        self.sums = 4 * cdiv(c + n * spec.groups, 2)
        self.dots = self.sums + size
        self.shares_size = self.dots + size

    def train(self, stream: int, tensors: Tensors, learning: Learning) -> tuple[Tensor, tuple[Any, ...]]:
        """``y``, and what backward needs besides the input."""
        x, gamma, beta, residual, mask = tensors
        at, launches = ready(self.measure, self.join if learning is None else self.join_updating, self.apply)
        measure, join, apply = launches
        found = new(x, self.statistics_size)
        real, counts = as_bytes(mask), None if self.counts_size is None else new(x, *self.counts_size)
        at_x, at_real, at_found, at_counts = at(x), at(real), at(found), at(counts)
        at_partial = beyond(at_found, self.partial)
        measure(stream, at_x, at_real, at_found, at_partial, at_counts)
        population = NO_POPULATION if learning is None else (*map(at, learning[0]), learning[1])
        join(stream, at_found, at_partial, at_counts, *population)
        y = torch.empty_like(x)
        apply(stream, at_x, at(y), at(residual), at_real, at_found, at(gamma), at(beta))
        return y, (found, counts)

    def backward(
        self, stream: int, dy: Tensor, tensors: Tensors, kept: Sequence[Any]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of the input, of gamma and beta as two rows, and of a residual before an activation."""
        x, gamma, beta, residual, mask = tensors
        (found, counts), real = kept, as_bytes(mask)
        at, (measure, join, apply) = ready(self.measure_backward, self.join_backward, self.apply_backward)
        shares, gradients = new(x, self.shares_size), new(x, 2, self.shape.c)
        at_x, at_dy, at_residual, at_real, at_found = at(x), at(dy), at(residual), at(real), at(found)
        at_gamma, at_beta, at_shares = at(gamma), at(beta), at(shares)
        at_sums, at_dots = beyond(at_shares, self.sums), beyond(at_shares, self.dots)
        measure(stream, at_x, at_dy, at_residual, at_real, at_found, at_gamma, at_beta, at_sums, at_dots)
        join(stream, at_shares, at_sums, at_dots, at(counts), at_found, at_gamma, at(gradients))
        dx = torch.empty_like(x)
        d_residual = None if residual is None else torch.empty_like(x)  # wanted or not: the launch is for both
        at_dx, at_d_residual = at(dx), at(d_residual)
        apply(stream, at_x, at_dy, at_residual, at_dx, at_d_residual, at_real, at_found, at_gamma, at_beta, at_shares)
        return dx, gradients, d_residual

    @staticmethod
    def statistics(x: Tensor, mask: Tensor | None, channel_dim: int, spec: Spec, kept: Sequence[Tensor]) -> Statistics:
        """The mini-batch's own statistics."""
        features, groups = parts(kept[0][4:], 4, x.shape[0], x.shape[channel_dim], spec.groups)  # type: ignore[arg-type]
        return Statistics(features[0], features[1], groups[0], groups[1], kept[0][0])

    def infer(self, stream: int, tensors: Tensors, population: Any, config: StatisticsConfig) -> Tensor:
        """``y`` by the statistics of a configuration."""
        x, gamma, beta, residual, mask = tensors
        real, found, counts, y = as_bytes(mask), new(x, self.statistics_size), None, torch.empty_like(x)
        if config.uses_batch or config.uses_features or real is not None:
            counts = None if self.counts_size is None else new(x, *self.counts_size)
            self.measure(stream, x, real, found, found[self.partial :], counts)
        self.join_inference(stream, found, counts, *list(population._buffers.values())[:6], *config.priors)
        self.apply(stream, x, y, residual, real, found, gamma, beta)
        return y


NO_POPULATION: Any = (*[None] * 7, 0.0)


def parts(buffer: Tensor, count: int, n: int, c: int, groups: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A few values for each feature, and for each sample and group, from a buffer where they stand in this order."""
    features, rest = buffer[: count * c], buffer[count * c : count * (c + n * groups)]
    return features.view(count, c).unbind(), rest.view(count, n, groups).unbind()
