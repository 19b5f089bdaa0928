"""The published form on a GPU: training and inference by the kernels in ``persistent`` and ``two_pass``."""

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
from . import population as kernels_of_population
from .launch import Launch, Learning, Shape, Tensors, aligned, as_bytes, new

if TYPE_CHECKING:
    from ...population import Population

PROGRAMS = 1024
"""At most, where each leaves partial results."""
HELD, HELD_BACKWARD = 16384, 8192
"""Values of a tile that registers hold: of one tensor, and of two."""
WIDEST, WIDEST_FIRST = 16384, 8192
"""Values of a tile of the two passes, which has all features; and with channels first, where more would spill."""
SHARED = 98304
"""Bytes of shared memory for tiles that are loaded ahead."""


def shape_of(x: Tensor, channel_dim: int, spec: Spec) -> Shape | None:
    """See an input as the kernels do; ``None`` if none reads it as it lies in memory."""
    shape = Shape.of(x, channel_dim, not spec.per_position)
    if shape is None or shape.p == 1:
        return shape and shape._replace(channels_first=False, pooled=True)
    least = least_width(shape, x.element_size())
    wide = next_power_of_2(shape.c) * least > WIDEST_FIRST
    many = shape.pooled and cdiv(shape.p, least) > 8 * PROGRAMS  # parts to join
    return None if shape.channels_first and (wide or many) else shape


def least_width(shape: Shape, itemsize: int) -> int:
    """Positions that a tile has at least: where they are contiguous, 32 bytes are read whatever is asked for."""
    return min(int(next_power_of_2(shape.p)), 32 // itemsize) if shape.channels_first else 1


class Sweep(Launch):
    """A launch of a kernel of ``two_pass`` over an input."""

    def __init__(self, name: str, shape: Shape, itemsize: int, numbers: tuple[float, ...]) -> None:
        row, features = table.PUBLISHED[name], next_power_of_2(shape.c)
        p = positions = max(least_width(shape, itemsize), row.values // features)
        if not shape.loose:
            positions, p = min(next_power_of_2(shape.p), positions), shape.p
        blocks, samples = cdiv(p, positions), cdiv(shape.rows, p)
        self.splits = max(1, min(samples // row.samples, PROGRAMS // blocks))
        self.parts = blocks * self.splits if shape.pooled else self.splits
        read = 2 if "backward" in name or name == "differentiate" else 1
        stages = max(1, min(row.stages, SHARED // (read * features * positions * itemsize)))
        constants = {**shape.tile(features, positions, itemsize), "STAGES": stages, "POOLED": shape.pooled}
        warps, numbers = warps_for(features * positions, row), (p, shape.c, shape.rows, *numbers)
        super().__init__(getattr(two_pass, name), blocks * self.splits, numbers, constants, warps)


def warps_for(values: int, row: table.Published) -> int:
    """Warps that leave each thread the values that the row says."""
    return max(1, min(16, values // (32 * row.each)))


def held(name: str, shape: Shape, itemsize: int, numbers: tuple[float, ...], most: int) -> Launch | None:
    """A launch of a kernel of ``persistent``; ``None`` where a tile would be too large, or too few would be busy."""
    row, features = table.PUBLISHED[name], next_power_of_2(shape.c)
    n, p = (shape.rows, 1) if shape.loose else (shape.n, shape.p)
    samples, positions = next_power_of_2(n), least_width(shape, itemsize)
    values = samples * features * positions
    if values > most or (shape.pooled and shape.channels_first):
        return None
    while values < row.values and positions < p:
        positions, values = 2 * positions, 2 * values
    blocks = cdiv(p, positions)
    if blocks < 64 and shape.rows * shape.c > 2**18:
        return None
    constants, numbers = {**shape.tile(features, positions, itemsize), "BN": samples}, (n, p, shape.c, *numbers)
    return Launch(getattr(persistent, name), min(blocks, PROGRAMS), numbers, constants, warps_for(values, row))


def joining(kernel: Any, shape: Shape, parts: int, numbers: tuple[float, ...], most: int) -> Launch:
    """A launch that joins the parts of all columns."""
    rows = min(64, next_power_of_2(parts))
    constants = {"BS": rows, "BA": 1024 // rows}
    programs = min(most, cdiv(shape.q * shape.c, constants["BA"]))
    return Launch(kernel, programs, (shape.q, shape.c, parts, *numbers), constants)


class Plan(launch.Plan):
    """The launches of the published form, one or three each way."""

    def __init__(self, shape: Shape, itemsize: int, spec: Spec, masked: bool, _: Any = None) -> None:
        super().__init__(shape, spec)
        q, c, eps, over = shape.q, shape.c, float(spec.eps), (shape, itemsize)
        entries = shape.rows // q  # of a batch statistic, if none is hidden
        w_B, w_F = (float(w) for w in formula.weights(1 / shape.n, spec.mix_eps, c, spec.dim_scale))
        self.forward = None if masked else held("forward", *over, (w_B, w_F, eps, 1 / entries), HELD)
        self.held_backward = None if masked else held("backward", *over, (w_B, w_F, eps), HELD_BACKWARD)
        self.measure = Sweep("measure", *over, ())
        numbers = w_B, w_F, 1 / entries
        self.join = joining(two_pass.join, shape, self.measure.parts, numbers, PROGRAMS)
        self.normalize = Sweep("normalize", *over, (eps,))
        self.normalize_chosen = Sweep("normalize", *over, (eps,))
        self.normalize_chosen.options["enable_fp_fusion"] = False  # the same bits with a mask and without
        scale = float(formula.weights(0.0, 0.0, c, spec.dim_scale)[0])
        self.weigh = Launch(two_pass.weigh, cdiv(q, 128), (q, float(spec.mix_eps), scale), {"B": 128})
        self.measure_backward = Sweep("measure_backward", *over, (eps,))
        self.join_backward = joining(two_pass.join_backward, shape, self.measure_backward.parts, (eps,), q * c)
        self.differentiate = Sweep("differentiate", *over, (eps,))
        self.programs = self.join.programs if self.forward is None else self.forward.programs
        features = min(1024, next_power_of_2(c))
        positions = min(max(1, 2048 // features), next_power_of_2(q))
        sizes, tile = (shape.n, entries, q, c, self.programs), {"BQ": positions, "BC": features, "BF": PROGRAMS}
        self.update = Launch(kernels_of_population.update, cdiv(q, positions), sizes, tile)

    def train(self, stream: int, tensors: Tensors, learning: Learning) -> tuple[Tensor, tuple[Any, ...]]:
        """``y``, and what backward needs besides the input."""
        x, gamma, beta, _, mask = tensors
        y = torch.empty_like(x)
        if self.forward is not None:
            found = mean, var, rows, features, flags, weights = self.empty(x)
            self.forward(stream, x, y, gamma, beta, *found)
        else:
            real = as_bytes(mask)
            mean, var, rows, features, flags, weights = self.measured(stream, x, real)
            if mask is not None:
                m, entries = _counts(mask, self.spec)
                w_B, w_F = formula.weights(1 / m, self.spec.mix_eps, self.shape.c, self.spec.dim_scale)
                weights = torch.stack([w_B, w_F, 1 / entries])
            given = gamma, beta, mean, var, None, None, weights, weights.shape[1]
            self.normalize(stream, x, y, real, *given, 0.0, 0.0)
        if learning is not None:
            population, momentum = learning
            self.update(stream, mean, var, features, flags, *population, momentum, population[4].numel())
        return y, (mean, var, rows, weights)

    def empty(self, x: Tensor) -> tuple[Tensor, ...]:
        """Memory for ``mean``, ``var``, ``rows``, ``features``, ``flags`` and ``weights``, as in ``two_pass``."""
        q, c = self.shape.q, self.shape.c
        rows = new(x, 2, self.shape.rows)
        return new(x, q, c), new(x, q, c), rows, new(x, 2, q), new(x, PROGRAMS), new(x, 3, 1)

    def measured(self, stream: int, x: Tensor, real: Tensor | None) -> tuple[Tensor, ...]:
        """What the first of two passes finds; the weights are those without a mask."""
        parts, q = self.measure.parts, self.shape.q
        mean, var, rows, *others = found = self.empty(x)
        partial, sums = new(x, 2, parts, q, self.shape.c), new(x, 3, parts, q)
        self.measure(stream, x, real, rows, partial, sums)
        self.join(stream, partial, sums, mean, var, *others)
        return found

    def backward(
        self, stream: int, dy: Tensor, tensors: Tensors, kept: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, None]:
        """Gradients of the input, and of gamma and beta as two rows."""
        x, gamma, _, _, mask = tensors
        mean, var, rows, weights = kept
        dx, q, c = torch.empty_like(x), self.shape.q, self.shape.c
        if self.held_backward is not None:
            gradients = new(x, self.held_backward.programs, 2, c)
            self.held_backward(stream, x, dy, dx, gamma, mean, var, rows, gradients)
            return dx, gradients[0] if len(gradients) == 1 else gradients.sum(0), None
        real, W = as_bytes(mask), weights.shape[1]
        partial, shares = new(x, 3, self.measure_backward.parts, q, c), new(x, 4, q, c)
        self.measure_backward(stream, x, dy, real, mean, rows, partial)
        self.join_backward(stream, partial, gamma, var, weights, shares, W)
        self.differentiate(stream, x, dy, dx, real, gamma, mean, var, rows, shares, weights, W)
        return dx, shares[2:].sum(1) if q > 1 else shares[2:].squeeze(1), None

    @staticmethod
    def statistics(x: Tensor, mask: Tensor | None, channel_dim: int, spec: Spec, kept: Sequence[Tensor]) -> Statistics:
        """The mini-batch's own statistics, features last and in the shapes of the input."""
        shape = list(x.shape)
        c = shape.pop(channel_dim)
        positions = shape[1:] if spec.per_position else []
        if mask is None:
            inverse_m = x.new_full((), 1 / x.shape[0], dtype=torch.float32)
        else:
            inverse_m = 1 / _counts(mask, spec)[0].view(positions)
        mean_F, var_F = kept[2].view(2, *shape)
        return Statistics(kept[0].view(*positions, c), kept[1].view(*positions, c), mean_F, var_F, inverse_m)

    def infer(self, stream: int, tensors: Tensors, population: Population, config: StatisticsConfig) -> Tensor:
        """``y`` by the statistics of a configuration."""
        x, gamma, beta, _, mask = tensors
        q, c, real = self.shape.q, self.shape.c, as_bytes(mask)
        inverse_m = new(x, 1).fill_(1 / self.shape.n) if mask is None else 1 / _counts(mask, self.spec)[0]
        mean, var = population.batch_mean.view(-1, c)[:q], population.batch_var.view(-1, c)[:q]
        if config.uses_batch:
            own_mean, own_var, *_ = self.measured(stream, x, real)
            known = Statistics(mean, var, None, None, None)
            of_batch = StatisticsConfig(config.batch_mean, config.batch_std, False, False)
            chosen = formula.choose(of_batch, Statistics(own_mean, own_var, None, None, inverse_m), known)
            mean, var = chosen.batch_mean.contiguous(), chosen.batch_var.contiguous()
        weights, y = new(x, 2, q), torch.empty_like(x)
        self.weigh(stream, population.inverse_m, population.updates[4], inverse_m, weights, len(inverse_m))
        statistics = aligned(mean), aligned(var), population.feature_mean, population.feature_var
        self.normalize_chosen(stream, x, y, real, gamma, beta, *statistics, weights, q, *config.priors[2:])
        return y


def _counts(mask: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Real samples, and the entries that a batch statistic averages, ``[Q]``; 1 where there is none."""
    m, entries = (clamp_count(number) for number in count(mask.shape, mask, spec.per_position))
    return m.reshape(-1).float(), entries.reshape(-1).float()  # type: ignore[union-attr]
