"""The published form on a GPU: training and inference by the kernels in ``persistent`` and ``two_pass``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ... import formula
from ..._masks import clamp_count, count
from ..._spec import Spec
from ...config import StatisticsConfig
from ...formula import Statistics
from . import persistent, two_pass
from . import population as kernels_of_population
from .launch import Launch, Shape, aligned, as_bytes, cdiv, power_of_two

if TYPE_CHECKING:
    from ...population import Population
    from .functions import Update

PROGRAMS = 1024
"""At most, where each leaves partial results."""
HELD, HELD_BACKWARD = 16384, 8192
"""Values of a tile that registers hold: of one tensor, and of two."""
WIDEST, WIDEST_FIRST = 16384, 8192
"""Values of a tile of the two passes, which has all features; and with channels first, where more would spill."""
SHARED = 98304
"""Bytes of shared memory for tiles that are loaded ahead."""


class Row(NamedTuple):
    """A row of the launch table."""

    values: int
    """In a tile, if there are so few features."""
    each: int
    """Values for a thread."""
    stages: int
    """Tiles under way at a time."""
    samples: int
    """A program handles at least so many samples."""


TABLE = {
    "measure": Row(4096, 16, 3, 8),
    "normalize": Row(4096, 16, 3, 4),
    "measure_backward": Row(2048, 8, 3, 8),
    "differentiate": Row(2048, 8, 3, 4),
    "forward": Row(4096, 32, 1, 0),
    "backward": Row(4096, 16, 1, 0),
}


class View(NamedTuple):
    """An input as the kernels see it."""

    n: int
    c: int
    p: int
    channels_first: bool
    pooled: bool
    """One position has all batch statistics."""

    @classmethod
    def of(cls, x: Tensor, channel_dim: int, spec: Spec) -> View | None:
        """See an input so; ``None`` if no kernel reads it as it lies in memory."""
        shape = Shape.of(x, channel_dim)
        if shape is None:
            return None
        n, c, p, channels_first = shape
        least = least_width(p, x.element_size())
        if channels_first and p > 1 and power_of_two(c) * least > WIDEST_FIRST:
            return None
        if channels_first and p > 1 and not spec.per_position and cdiv(p, least) > 8 * PROGRAMS:
            return None  # too many parts to join
        return cls(n, c, p, channels_first and p > 1, not spec.per_position or p == 1)

    @property
    def rows(self) -> int:
        """Samples at a position, all together."""
        return self.n * self.p

    @property
    def loose(self) -> bool:
        """Whether rows follow each other whatever their positions."""
        return self.pooled and not self.channels_first

    @property
    def q(self) -> int:
        """Positions with batch statistics of their own."""
        return 1 if self.pooled else self.p

    @property
    def entries(self) -> int:
        """Entries that a batch statistic averages, if none is hidden."""
        return self.rows // self.q


def least_width(p: int, itemsize: int) -> int:
    """Positions that a tile with channels first has at least: 32 bytes are read at a time, whatever is asked for."""
    return min(power_of_two(p), 32 // itemsize)


class Sweep(Launch):
    """A launch of a kernel of ``two_pass`` over an input."""

    def __init__(self, name: str, view: View, itemsize: int, numbers: tuple[float, ...]) -> None:
        row, features = TABLE[name], power_of_two(view.c)
        least = least_width(view.p, itemsize) if view.channels_first else 1
        positions = max(least, row.values // features)
        positions = positions if view.loose else min(power_of_two(view.p), positions)
        p = positions if view.loose else view.p
        blocks, samples = cdiv(p, positions), cdiv(view.rows, p)
        self.splits = max(1, min(samples // row.samples, PROGRAMS // blocks))
        self.parts = blocks * self.splits if view.pooled else self.splits
        read = 2 if "backward" in name or name == "differentiate" else 1
        stages = max(1, min(row.stages, SHARED // (read * features * positions * itemsize)))
        constants = {
            "CHANNELS_FIRST": view.channels_first, "BC": features, "BP": positions,
            "VEC": math.gcd(view.p if view.channels_first else view.c, 16 // itemsize), "STAGES": stages,
            "POOLED": view.pooled,
        }  # fmt: skip
        kernel, sizes = getattr(two_pass, name), (p, view.c, view.rows)
        warps = warps_for(features * positions, row)
        super().__init__(kernel, blocks * self.splits, (*sizes, *numbers), constants, warps)


def warps_for(values: int, row: Row) -> int:
    """Warps that leave each thread the values that the row says."""
    return max(1, min(16, values // (32 * row.each)))


def held(name: str, view: View, itemsize: int, numbers: tuple[float, ...], most: int) -> Launch | None:
    """A launch of a kernel of ``persistent``; ``None`` where a tile would be too large, or too few would be busy."""
    row, features = TABLE[name], power_of_two(view.c)
    n, p = (view.rows, 1) if view.loose else (view.n, view.p)
    samples = power_of_two(n)
    positions = least_width(p, itemsize) if view.channels_first else 1
    values = samples * features * positions
    if values > most or (view.pooled and view.channels_first):
        return None
    while values < row.values and positions < p:
        positions, values = 2 * positions, 2 * values
    blocks = cdiv(p, positions)
    if blocks < 64 and view.rows * view.c > 2**18:
        return None
    constants = {
        "CHANNELS_FIRST": view.channels_first, "BN": samples, "BC": features, "BP": positions,
        "VEC": math.gcd(view.p if view.channels_first else view.c, 16 // itemsize),
    }  # fmt: skip
    kernel = getattr(persistent, name)
    return Launch(kernel, min(blocks, PROGRAMS), (n, p, view.c, *numbers), constants, warps_for(values, row))


def joining(kernel: Any, view: View, parts: int, numbers: tuple[float, ...], most: int) -> Launch:
    """A launch that joins the parts of all columns."""
    rows = min(64, power_of_two(parts))
    constants = {"BS": rows, "BA": 1024 // rows}
    programs = min(most, cdiv(view.q * view.c, constants["BA"]))
    return Launch(kernel, programs, (view.q, view.c, parts, *numbers), constants)


class Plan:
    """All launches of one layer on inputs of one shape and type."""

    fuses = False
    updates_masked = False

    @classmethod
    def of(cls, x: Tensor, channel_dim: int, spec: Spec, masked: bool, _: Any = None) -> Plan | None:
        """The plan for inputs that lie as ``x`` does; ``None`` where no kernel reads it so."""
        view = View.of(x, channel_dim, spec)
        return None if view is None else cls(view, x.element_size(), spec, masked)

    def __init__(self, view: View, itemsize: int, spec: Spec, masked: bool) -> None:
        self.view, self.features = view, view.c
        eps = float(spec.eps)
        w_B, w_F = (float(w) for w in formula.weights(1 / view.n, spec.mix_eps, view.c, spec.dim_scale))
        over = view, itemsize
        self.forward = None if masked else held("forward", *over, (w_B, w_F, eps, 1 / view.entries), HELD)
        self.held_backward = None if masked else held("backward", *over, (w_B, w_F, eps), HELD_BACKWARD)
        self.measure = Sweep("measure", *over, ())
        numbers = w_B, w_F, 1 / view.entries
        self.join = joining(two_pass.join, view, self.measure.parts, numbers, PROGRAMS)
        self.normalize = Sweep("normalize", *over, (eps,))
        self.normalize_chosen = Sweep("normalize", *over, (eps,))
        self.normalize_chosen.options["enable_fp_fusion"] = False  # the same bits with a mask and without
        scale = float(formula.weights(0.0, 0.0, view.c, spec.dim_scale)[0])
        self.weigh = Launch(two_pass.weigh, cdiv(view.q, 128), (view.q, float(spec.mix_eps), scale), {"B": 128})
        self.measure_backward = Sweep("measure_backward", *over, (eps,))
        columns = view.q * view.c
        self.join_backward = joining(two_pass.join_backward, view, self.measure_backward.parts, (eps,), columns)
        self.differentiate = Sweep("differentiate", *over, (eps,))
        self.programs = self.join.programs if self.forward is None else self.forward.programs
        features = min(1024, power_of_two(view.c))
        positions = min(max(1, 2048 // features), power_of_two(view.q))
        self.update = Launch(
            kernels_of_population.update, cdiv(view.q, positions),
            (view.n, view.entries, view.q, view.c, self.programs), {"BQ": positions, "BC": features, "BF": 1024},
        )  # fmt: skip

    def train(
        self, stream: int, x: Tensor, gamma: Tensor | None, beta: Tensor | None, _: Tensor | None,
        mask: Tensor | None, update: Update, spec: Spec,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """``y``, and what backward needs besides the input."""
        q, c, rows = self.view.q, self.view.c, new(x, 2, self.view.rows)
        y, mean, var, features = torch.empty_like(x), new(x, q, c), new(x, q, c), new(x, 2, q)
        flags, weights = new(x, self.programs), self._weights(x, mask, spec)
        if self.forward is not None:
            self.forward(stream, x, y, gamma, beta, mean, var, rows, features, flags, weights)
        else:
            real, W = as_bytes(mask), weights.shape[1]
            partial, sums = self.parts(stream, x, real, rows)
            self.join(stream, partial, sums, mean, var, features, flags, weights if mask is None else None)
            self.normalize(stream, x, y, real, gamma, beta, mean, var, None, None, weights, W, 0.0, 0.0)
        if update is not None:
            population: list[Any] = list(update[0]._buffers.values())
            torch.autograd.graph.increment_version(population)
            momentum = -1.0 if update[1] is None else float(update[1])
            self.update(stream, mean, var, features, flags, *population, momentum, population[4].numel())
        return y, (mean, var, rows, weights)

    def _weights(self, x: Tensor, mask: Tensor | None, spec: Spec) -> Tensor:
        """The weights of eq 16 and one over entries, ``[3, W]``; without a mask a kernel writes them."""
        if mask is None:
            return new(x, 3, 1)
        m, entries = _counts(mask, spec)
        return torch.stack([*formula.weights(1 / m, spec.mix_eps, self.view.c, spec.dim_scale), 1 / entries])

    def parts(self, stream: int, x: Tensor, real: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What ``measure`` finds in each part."""
        parts, q = self.measure.parts, self.view.q
        partial, sums = new(x, 2, parts, q, self.view.c), new(x, 3, parts, q)
        self.measure(stream, x, real, rows, partial, sums)
        return partial, sums

    def backward(
        self, stream: int, x: Tensor, dy: Tensor, gamma: Tensor | None, _: Any, __: Any, mask: Tensor | None,
        kept: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, None]:  # fmt: skip
        """Gradients of the input, and of gamma and beta as two rows."""
        mean, var, rows, weights = kept
        dx, q, c = torch.empty_like(x), self.view.q, self.view.c
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

    def statistics(
        self, x: Tensor, mask: Tensor | None, channel_dim: int, spec: Spec, kept: Sequence[Tensor]
    ) -> Statistics:
        """The mini-batch's own statistics, features last and in the shapes of the input."""
        shape = list(x.shape)
        c = shape.pop(channel_dim)
        positions = shape[1:] if spec.per_position else []
        mean, var = (value.view(*positions, c) for value in kept[:2])
        if mask is None:
            inverse_m = x.new_full((), 1 / x.shape[0], dtype=torch.float32)
        else:
            inverse_m = 1 / _counts(mask, spec)[0].view(positions)
        mean_F, var_F = kept[2].view(2, *shape)
        return Statistics(mean, var, mean_F, var_F, inverse_m)

    def infer(
        self, stream: int, x: Tensor, gamma: Tensor | None, beta: Tensor | None, _: Tensor | None,
        mask: Tensor | None, population: Population, config: StatisticsConfig, spec: Spec,
    ) -> Tensor:  # fmt: skip
        """``y`` by the statistics of a configuration."""
        q, c, real = self.view.q, self.view.c, as_bytes(mask)
        inverse_m = new(x, 1).fill_(1 / self.view.n) if mask is None else 1 / _counts(mask, spec)[0]
        mean, var = population.batch_mean.view(-1, c)[:q], population.batch_var.view(-1, c)[:q]
        if config.uses_batch:
            own = new(x, q, c), new(x, q, c)
            partial, sums = self.parts(stream, x, real, new(x, 2, self.view.rows))
            weights = new(x, 3, 1) if mask is None else None
            self.join(stream, partial, sums, *own, new(x, 2, q), new(x, self.join.programs), weights)
            known = Statistics(mean, var, None, None, None)
            of_batch = StatisticsConfig(config.batch_mean, config.batch_std, False, False)
            chosen = formula.choose(of_batch, Statistics(*own, None, None, inverse_m), known)
            mean, var = chosen.batch_mean.contiguous(), chosen.batch_var.contiguous()
        weights, y = new(x, 2, q), torch.empty_like(x)
        updates = population.updates.view(5, -1)[4]
        self.weigh(stream, population.inverse_m, updates, inverse_m, weights, len(inverse_m))
        feature = aligned(population.feature_mean), aligned(population.feature_var)
        batch, priors = (aligned(mean), aligned(var)), config.priors[2:]
        self.normalize_chosen(stream, x, y, real, gamma, beta, *batch, *feature, weights, q, *priors)
        return y


def new(x: Tensor, *sizes: int) -> Tensor:
    """Float32 memory on the device of ``x``."""
    return torch.empty(sizes, dtype=torch.float32, device=x.device)


def _counts(mask: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Real samples, and the entries that a batch statistic averages, ``[Q]``; 1 where there is none."""
    m, entries = (clamp_count(number) for number in count(mask.shape, mask, spec.per_position))
    return m.reshape(-1).float(), entries.reshape(-1).float()  # type: ignore[union-attr]
