"""The published form on a GPU: the plan of its launches, by the kernels of ``persistent`` or ``two_pass``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from ... import formula
from ..._masks import clamp_count, count
from ..._spec import Spec
from ...config import StatisticsConfig
from ...formula import Statistics
from . import launch, persistent, table, two_pass
from . import population as population_kernels
from .launch import Gradients, Launch, PopulationBuffers, Shape, Tensors, aligned, as_bytes, new

if TYPE_CHECKING:
    from ...population import Population

MAX_PROGRAMS = 1024
"""Programs that leave partial results, at most, unless there are more blocks of positions."""
MAX_PERSISTENT, MAX_PERSISTENT_BACKWARD = 16384, 8192
"""Values of a tile in ``persistent``, at most: of one tensor in registers, and of two."""
MAX_FEATURES, MAX_CHANNELS_FIRST = 16384, 8192
"""Features in ``two_pass``, whose tiles have all; with channels first, values of its least tile. More would spill."""
SHARED_BYTES = 98304
"""Shared memory for tiles that are loaded ahead."""


def shape_of(x: Tensor, channel_dim: int, spec: Spec) -> Shape | None:
    """Return the shape of an input as the kernels see it; ``None`` if they cannot read its layout."""
    shape = Shape.of(x, channel_dim, not spec.per_position)
    if shape is None or shape.p == 1:
        return shape and shape._replace(channels_first=False, pooled=True)
    positions = min_positions(shape, x.element_size())
    wide = next_power_of_2(shape.c) * positions > MAX_CHANNELS_FIRST
    many = shape.pooled and cdiv(shape.p, positions) > 8 * MAX_PROGRAMS  # partial results to join
    return None if shape.channels_first and (wide or many) else shape


def min_positions(shape: Shape, itemsize: int) -> int:
    """Return the fewest positions of a tile. Where they are contiguous, memory delivers at least 32 bytes of them."""
    return min(int(next_power_of_2(shape.p)), 32 // itemsize) if shape.channels_first else 1


def warps_for(values: int, row: table.Published) -> int:
    """Return the warps that give each thread as many values as the row says."""
    return max(1, min(16, values // (32 * row.per_thread)))


class TwoPassLaunch(Launch):
    """A launch of a kernel of ``two_pass`` over the input."""

    def __init__(self, name: str, shape: Shape, itemsize: int, scalars: tuple[float, ...]) -> None:
        row, features = table.PUBLISHED[name], next_power_of_2(shape.c)
        p = positions = max(min_positions(shape, itemsize), row.values // features)
        if not shape.is_matrix:
            positions, p = min(next_power_of_2(shape.p), positions), shape.p
        blocks, samples = cdiv(p, positions), cdiv(shape.rows, p)
        self.splits = max(1, min(samples // row.min_samples, MAX_PROGRAMS // blocks))
        self.parts = blocks * self.splits if shape.pooled else self.splits
        inputs = 2 if "backward" in name else 1
        stages = max(1, min(row.stages, SHARED_BYTES // (inputs * features * positions * itemsize)))
        constexprs = {**shape.tile_constexprs(features, positions, itemsize), "STAGES": stages, "POOLED": shape.pooled}
        warps, scalars = warps_for(features * positions, row), (p, shape.c, shape.rows, *scalars)
        super().__init__(getattr(two_pass, name), blocks * self.splits, scalars, constexprs, warps)


def persistent_launch(name: str, shape: Shape, itemsize: int, scalars: tuple[float, ...]) -> Launch | None:
    """Return the launch of a kernel of ``persistent``; ``None`` if its tile is too large, or its programs too few."""
    row, features = table.PUBLISHED[name], next_power_of_2(shape.c)
    n, p = (shape.rows, 1) if shape.is_matrix else (shape.n, shape.p)
    samples, positions = next_power_of_2(n), min_positions(shape, itemsize)
    values = samples * features * positions
    most = MAX_PERSISTENT if name == "forward" else MAX_PERSISTENT_BACKWARD
    if values > most or (shape.pooled and shape.channels_first):
        return None
    while values < row.values and positions < p:
        positions, values = 2 * positions, 2 * values
    blocks = cdiv(p, positions)
    if blocks < 64 and shape.rows * shape.c > 2**18:
        return None
    constexprs = {**shape.tile_constexprs(features, positions, itemsize), "BN": samples}
    programs, scalars = min(blocks, MAX_PROGRAMS), (n, p, shape.c, *scalars)
    return Launch(getattr(persistent, name), programs, scalars, constexprs, warps_for(values, row))


def join_launch(kernel: Any, shape: Shape, parts: int, scalars: tuple[float, ...], max_programs: int) -> Launch:
    """Return the launch of a kernel that joins the partial results of all columns."""
    rows = min(64, next_power_of_2(parts))
    constexprs = {"BS": rows, "BQC": 1024 // rows}
    programs = min(max_programs, cdiv(shape.q * shape.c, constexprs["BQC"]))
    return Launch(kernel, programs, (shape.q, shape.c, parts, *scalars), constexprs)


class Plan(launch.Plan):
    """The launches of the published form, one or three in each direction."""

    def __init__(self, shape: Shape, itemsize: int, spec: Spec, masked: bool, _: Any = None) -> None:
        super().__init__(shape, spec)
        q, c, eps, common = shape.q, shape.c, float(spec.eps), (shape, itemsize)
        entries = shape.rows // q  # of a batch statistic without a mask
        w_B, w_F = (float(w) for w in formula.weights(1 / shape.n, spec.mix_eps, c, spec.dim_scale))
        scalars = w_B, w_F, eps
        self.persistent_forward = None if masked else persistent_launch("forward", *common, (*scalars, 1 / entries))
        self.persistent_backward = None if masked else persistent_launch("backward", *common, scalars)
        self.measure = TwoPassLaunch("measure", *common, ())
        self.join = join_launch(two_pass.join, shape, self.measure.parts, (w_B, w_F, 1 / entries), MAX_PROGRAMS)
        self.normalize = TwoPassLaunch("normalize", *common, (eps,))
        self.normalize_inference = TwoPassLaunch("normalize", *common, (eps,))
        self.normalize_inference.options["enable_fp_fusion"] = False  # the same bits with a mask and without
        mixing = q, float(spec.mix_eps), float(formula.weights(0.0, 0.0, c, spec.dim_scale)[0])
        self.inference_weights = Launch(two_pass.inference_weights, cdiv(q, 128), mixing, {"BQ": 128})
        self.measure_backward = TwoPassLaunch("measure_backward", *common, (eps,))
        self.join_backward = join_launch(two_pass.join_backward, shape, self.measure_backward.parts, (eps,), q * c)
        self.normalize_backward = TwoPassLaunch("normalize_backward", *common, (eps,))
        features = min(1024, next_power_of_2(c))
        positions = min(max(1, 2048 // features), next_power_of_2(q))
        constexprs = {"BQ": positions, "BC": features, "BF": MAX_PROGRAMS}
        sizes = shape.n, entries, q, c, (self.persistent_forward or self.join).programs
        self.update = Launch(population_kernels.update, cdiv(q, positions), sizes, constexprs)

    def train(self, stream: int, tensors: Tensors, population: PopulationBuffers) -> tuple[Tensor, tuple[Any, ...]]:
        """Return ``y``, and what backward needs besides the input; update the population if it is given."""
        x, gamma, beta, _, mask = tensors
        y = torch.empty_like(x)
        if self.persistent_forward is not None:
            outputs = mean, var, row_stats, feature_stats, nonfinite, weights = self.empty(x)
            self.persistent_forward(stream, x, y, gamma, beta, *outputs)
        else:
            mask_bytes = as_bytes(mask)
            mean, var, row_stats, feature_stats, nonfinite, weights = self.measured(stream, x, mask_bytes)
            if mask is not None:
                m, entries = _counts(mask, self.spec)
                w_B, w_F = formula.weights(1 / m, self.spec.mix_eps, self.shape.c, self.spec.dim_scale)
                weights = torch.stack([w_B, w_F, 1 / entries])
            statistics = mean, var, None, None, weights, weights.shape[1]
            self.normalize(stream, x, y, mask_bytes, gamma, beta, *statistics, 0.0, 0.0)
        if population is not None:
            buffers, momentum = population
            self.update(stream, mean, var, feature_stats, nonfinite, *buffers, momentum, buffers[4].numel())
        return y, (mean, var, row_stats, weights)

    def empty(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return ``mean``, ``var``, ``row_stats``, ``feature_stats``, ``nonfinite`` and ``weights``, uninitialized."""
        q, c = self.shape.q, self.shape.c
        row_stats = new(x, 2, self.shape.rows)
        return new(x, q, c), new(x, q, c), row_stats, new(x, 2, q), new(x, MAX_PROGRAMS), new(x, 3, 1)

    def measured(self, stream: int, x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """Return the same, written by the first two of three launches; ``weights`` are those without a mask."""
        parts, q = self.measure.parts, self.shape.q
        mean, var, row_stats, *others = buffers = self.empty(x)
        partial, row_sums = new(x, 2, parts, q, self.shape.c), new(x, 3, parts, q)
        self.measure(stream, x, mask, row_stats, partial, row_sums)
        self.join(stream, partial, row_sums, mean, var, *others)
        return buffers

    def backward(self, stream: int, dy: Tensor, tensors: Tensors, saved: Sequence[Any]) -> Gradients:
        """Return gradients; there is no residual."""
        x, gamma, _, _, mask = tensors
        mean, var, row_stats, weights = saved
        dx, q, c = torch.empty_like(x), self.shape.q, self.shape.c
        if self.persistent_backward is not None:
            gradients = new(x, self.persistent_backward.programs, 2, c)
            self.persistent_backward(stream, x, dy, dx, gamma, mean, var, row_stats, gradients)
            return dx, gradients[0] if len(gradients) == 1 else gradients.sum(0), None
        mask, W = as_bytes(mask), weights.shape[1]
        partial, terms = new(x, 3, self.measure_backward.parts, q, c), new(x, 4, q, c)
        self.measure_backward(stream, x, dy, mask, mean, row_stats, partial)
        self.join_backward(stream, partial, gamma, var, weights, terms, W)
        self.normalize_backward(stream, x, dy, dx, mask, gamma, mean, var, row_stats, terms, weights, W)
        return dx, terms[2:].sum(1) if q > 1 else terms[2:].squeeze(1), None

    @staticmethod
    def statistics(x: Tensor, mask: Tensor | None, channel_dim: int, spec: Spec, saved: Sequence[Any]) -> Statistics:
        """Return the mini-batch's own statistics from what ``train`` saved, features last, in the input's shapes."""
        shape = list(x.shape)
        c = shape.pop(channel_dim)
        positions = shape[1:] if spec.per_position else []
        if mask is None:
            inverse_m = x.new_full((), 1 / x.shape[0], dtype=torch.float32)
        else:
            inverse_m = 1 / _counts(mask, spec)[0].view(positions)
        mean_F, var_F = saved[2].view(2, *shape)
        return Statistics(saved[0].view(*positions, c), saved[1].view(*positions, c), mean_F, var_F, inverse_m)

    def infer(self, stream: int, tensors: Tensors, population: Population, config: StatisticsConfig) -> Tensor:
        """Return ``y`` by the statistics of a configuration."""
        x, gamma, beta, _, mask = tensors
        q, c, mask_bytes = self.shape.q, self.shape.c, as_bytes(mask)
        inverse_m = new(x, 1).fill_(1 / self.shape.n) if mask is None else 1 / _counts(mask, self.spec)[0]
        mean, var = population.batch_mean.view(-1, c)[:q], population.batch_var.view(-1, c)[:q]
        if config.uses_batch:
            current_mean, current_var, *_ = self.measured(stream, x, mask_bytes)
            current = Statistics(current_mean, current_var, None, None, inverse_m)
            batch_config = StatisticsConfig(config.batch_mean, config.batch_std, False, False)
            chosen = formula.choose(batch_config, current, Statistics(mean, var, None, None, None))
            mean, var = chosen.batch_mean.contiguous(), chosen.batch_var.contiguous()
        weights, y = new(x, 2, q), torch.empty_like(x)
        self.inference_weights(stream, population.inverse_m, population.updates[4], inverse_m, weights, len(inverse_m))
        statistics = aligned(mean), aligned(var), population.feature_mean, population.feature_var
        self.normalize_inference(stream, x, y, mask_bytes, gamma, beta, *statistics, weights, q, *config.priors[2:])
        return y


def _counts(mask: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return valid samples, and the entries of a batch statistic, ``[Q]``; 1 where there is none."""
    m, entries = (clamp_count(number) for number in count(mask.shape, mask, spec.per_position))
    return m.reshape(-1).float(), entries.reshape(-1).float()  # type: ignore[union-attr]
