"""The grouped form with pooled batch statistics on a GPU: the plan of its launches, and their buffers."""

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
from .launch import Gradients, Launch, PopulationBuffers, Shape, Tensors, advance, as_bytes, fast_path, new, size_hint


def tile_sizes(shape: Shape, itemsize: int, row: table.Grouped) -> tuple[int, int, int]:
    """Return the features and the positions of a tile, and the positions of a chunk, by a row of the table.

    Nothing here depends on the number of samples, so neither do the bits of a sample.
    """
    all_features, all_positions = next_power_of_2(size_hint(shape.c)), next_power_of_2(size_hint(shape.p))
    if shape.channels_first:
        features = min(all_features, max(1, row.values // min(all_positions, row.width_bytes // itemsize)))
    else:
        features = min(all_features, row.width_bytes // itemsize)
    positions = min(all_positions, max(1, row.values // features))
    tiles = cdiv(size_hint(shape.p), positions)
    chunk = cdiv(tiles, cdiv(tiles, max(1, row.chunk // (features * positions)))) * positions
    return features, positions, chunk


class TiledLaunch(Launch):
    """A launch of a kernel over the input."""

    def __init__(self, name: str, shape: Shape, itemsize: int, groups: int, **constexprs: Any) -> None:
        row = table.GROUPED[name, shape.channels_first, size_hint(shape.p) < table.SHORT]
        features, positions, chunk = tile_sizes(shape, itemsize, row)
        n, c, p, *_ = shape
        self.chunk, self.splits = chunk, cdiv(p, chunk)
        scalars = (n, c, p, chunk, self.splits) if name == "measure" else (n, c, p, chunk, self.splits, groups)
        constexprs = {**shape.tile_constexprs(features, positions, itemsize), "STAGES": row.stages, **constexprs}
        super().__init__(getattr(affine, name), n * self.splits * cdiv(c, features), scalars, constexprs, row.warps)


def join_tile(n: int, c: int, groups: int) -> tuple[dict[str, Any], int]:
    """Return the constexprs of a kernel that joins, with 64 x 32 and about 2048 values in a tile, and its programs."""
    features = min(256, next_power_of_2(c // groups))
    pairs = max(1, 2048 // features)
    return {"BR": 64, "BC": 32, "BG": pairs, "BK": features}, cdiv(c, 32) + cdiv(n * groups, pairs)


def join_launch(name: str, spec: Spec, n: int, c: int, *sizes: int) -> Launch:
    """Return the launch of a kernel that joins."""
    assert spec.groups is not None
    constexprs, programs = join_tile(n, c, spec.groups)
    scalars = float(spec.mix_eps), formula.weights(0.0, 0.0, c, spec.dim_scale)[0], float(spec.eps)
    return Launch(getattr(affine, name), programs, (n, c, *sizes, spec.groups, *scalars), constexprs)


class Plan(launch.Plan):
    """The launches of the grouped form, three forward and three backward."""

    def __init__(self, shape: Shape, itemsize: int, spec: Spec, masked: bool, activation: Activation | None) -> None:
        super().__init__(shape, spec, activation)
        n, c, p, *_ = shape
        assert spec.groups is not None
        common = shape, itemsize, spec.groups
        self.measure = TiledLaunch("measure", *common)
        self.apply = TiledLaunch("apply", *common, ACTIVATION=activation)
        self.measure_backward = TiledLaunch("measure_backward", *common, ACTIVATION=activation)
        self.apply_backward = TiledLaunch("apply_backward", *common, ACTIVATION=activation)

        chunk, splits, backward_splits = self.measure.chunk, self.measure.splits, self.measure_backward.splits
        # Two of a kind: the population's pointers are None in the first.
        self.join, self.join_updating = (join_launch("join", spec, n, c, p, chunk, splits) for _ in range(2))
        self.join_inference = join_launch("join_inference", spec, n, c, p, chunk, splits)
        self.join_backward = join_launch("join_backward", spec, n, c, p, backward_splits, splits)

        # One allocation forward holds statistics, then partial; one backward dx_terms, then sums, then dots.
        self.counts_shape = (splits, n) if masked else None
        self.partial_at = 4 + 4 * (c + n * spec.groups)
        self.forward_size = self.partial_at + 2 * splits * n * c
        size = 4 * cdiv(backward_splits * n * c, 4)  # each part begins at a multiple of 16 bytes, as kernels expect
        self.sums_at = 4 * cdiv(c + n * spec.groups, 2)
        self.dots_at = self.sums_at + size
        self.backward_size = self.dots_at + size

    def train(self, stream: int, tensors: Tensors, population: PopulationBuffers) -> tuple[Tensor, tuple[Any, ...]]:
        """Return ``y``, and what backward needs besides the input; update the population if it is given."""
        x, gamma, beta, residual, mask = tensors
        ptr, launches = fast_path(self.measure, self.join if population is None else self.join_updating, self.apply)
        measure, join, apply = launches
        statistics = new(x, self.forward_size)
        mask, counts = as_bytes(mask), None if self.counts_shape is None else new(x, *self.counts_shape)
        x_ptr, mask_ptr, stats_ptr, counts_ptr = ptr(x), ptr(mask), ptr(statistics), ptr(counts)
        partial_ptr = advance(stats_ptr, self.partial_at)
        measure(stream, x_ptr, mask_ptr, stats_ptr, partial_ptr, counts_ptr)
        update = NO_POPULATION if population is None else (*map(ptr, population[0]), population[1])
        join(stream, stats_ptr, partial_ptr, counts_ptr, *update)
        y = torch.empty_like(x)
        apply(stream, x_ptr, ptr(y), ptr(residual), mask_ptr, stats_ptr, ptr(gamma), ptr(beta))
        return y, (statistics, counts)

    def backward(self, stream: int, dy: Tensor, tensors: Tensors, saved: Sequence[Any]) -> Gradients:
        """Return gradients, of the residual if ``tensors`` has one; with ReLU, that is ``y``."""
        x, gamma, beta, residual, mask = tensors
        (statistics, counts), mask = saved, as_bytes(mask)
        ptr, (measure, join, apply) = fast_path(self.measure_backward, self.join_backward, self.apply_backward)
        dx_terms, gradients = new(x, self.backward_size), new(x, 2, self.shape.c)
        x_ptr, dy_ptr, res_ptr, mask_ptr, stats_ptr = ptr(x), ptr(dy), ptr(residual), ptr(mask), ptr(statistics)
        gamma_ptr, beta_ptr, terms_ptr = ptr(gamma), ptr(beta), ptr(dx_terms)
        sums_ptr, dots_ptr = advance(terms_ptr, self.sums_at), advance(terms_ptr, self.dots_at)
        measure(stream, x_ptr, dy_ptr, res_ptr, mask_ptr, stats_ptr, gamma_ptr, beta_ptr, sums_ptr, dots_ptr)
        join(stream, terms_ptr, sums_ptr, dots_ptr, ptr(counts), stats_ptr, gamma_ptr, ptr(gradients))
        dx = torch.empty_like(x)
        d_residual = None if residual is None else torch.empty_like(x)  # even if not wanted: one launch for both
        dx_ptr, d_res_ptr = ptr(dx), ptr(d_residual)
        apply(stream, x_ptr, dy_ptr, res_ptr, dx_ptr, d_res_ptr, mask_ptr, stats_ptr, gamma_ptr, beta_ptr, terms_ptr)
        return dx, gradients, d_residual

    @staticmethod
    def statistics(x: Tensor, mask: Tensor | None, channel_dim: int, spec: Spec, saved: Sequence[Any]) -> Statistics:
        """Return the mini-batch's own statistics, from what ``train`` saved."""
        features, pairs = split_values(saved[0][4:], 4, x.shape[0], x.shape[channel_dim], spec.groups)  # type: ignore[arg-type]
        return Statistics(features[0], features[1], pairs[0], pairs[1], saved[0][0])

    def infer(self, stream: int, tensors: Tensors, population: Any, config: StatisticsConfig) -> Tensor:
        """Return ``y`` by the statistics of a configuration."""
        x, gamma, beta, residual, mask = tensors
        mask, statistics, counts, y = as_bytes(mask), new(x, self.forward_size), None, torch.empty_like(x)
        if config.uses_batch or config.uses_features or mask is not None:
            counts = None if self.counts_shape is None else new(x, *self.counts_shape)
            self.measure(stream, x, mask, statistics, statistics[self.partial_at :], counts)
        self.join_inference(stream, statistics, counts, *list(population._buffers.values())[:6], *config.priors)
        self.apply(stream, x, y, residual, mask, statistics, gamma, beta)
        return y


NO_POPULATION: Any = (*[None] * 7, 0.0)


def split_values(buffer: Tensor, count: int, n: int, c: int, groups: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return views of ``count`` values of each feature, ``[C]``, and of each sample and group, ``[N, groups]``."""
    features, pairs = buffer[: count * c], buffer[count * c : count * (c + n * groups)]
    return features.view(count, c).unbind(), pairs.view(count, n, groups).unbind()
