"""Population statistics, updated in one launch where operators take thirty: ``Population.update`` without a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles

if TYPE_CHECKING:
    from ..population import Population


def buffers(kept: Population) -> list[Tensor]:
    """In the order of the kernels; ``Population.buffers()`` takes as long as a launch."""
    return [value for value in kept._buffers.values() if value is not None]


def written(changed: list[Tensor]) -> None:
    """Tell autograd, which does not see what a kernel writes."""
    for buffer in changed:
        if not buffer.is_inference():
            torch.autograd.graph.increment_version(buffer)


@triton.jit
def mix(old, new, weight):
    """``torch.lerp``; exactly the new value at weight 1."""
    moved = new - old
    return tl.where(weight < 0.5, old + weight * moved, new - moved * (1 - weight))


@triton.jit
def weight_of(count, total, m, momentum, AVERAGE: tl.constexpr):
    """Of the new value of a statistic that now stands for so many mini-batches and samples."""
    if AVERAGE:
        weight = m / total.to(tl.float32)
    else:
        weight = tl.maximum(1 / count.to(tl.float32), momentum)
    return weight


@triton.jit(do_not_specialize=["programs", "N", "P", "C", "positions", "known", "m"])
def enter(
    statistics, finite, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples,
    programs, N, P, C, positions, known, m, entries_factor, m_factor, momentum,
    ACROSS: tl.constexpr, SIDE: tl.constexpr, AVERAGE: tl.constexpr, SPREAD: tl.constexpr, CHAINED: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Let the statistics of some positions in, if those of all positions are finite.

    Waiting for memory is what takes time here. So all is loaded at once: the population while ``forward`` still works,
    the rest when it is done.

    Args:
        statistics: What ``forward`` wrote.
        finite: What ``programs`` wrote there: 1 where they met only finite variances.
        batch_mean, ...: The population, for ``known`` positions, of which the first ``positions`` are met here.
        entries_factor, m_factor: Make variances unbiased.
        ACROSS: Positions lie side by side in the statistics, as in the input.
        SIDE: The number of features is a multiple of it: so many are read at once.
        AVERAGE: Weigh by samples; else by ``momentum``.
        SPREAD: There are two entries or more behind a batch variance.
    """
    _, C = tiles.sides(P, C, False, SIDE)
    p, c = (tl.program_id(0) * BP + tl.arange(0, BP))[:, None], tl.arange(0, BC)[None, :]
    real, in_column = p < positions, (p < positions) & (c < C)
    at = p.to(tl.int64) * C + c
    count_mean = tl.load(updates + p, mask=real, other=0) + 1
    count_var = tl.load(updates + known + p, mask=real, other=0) + 1
    count_mean_F = tl.load(updates + 2 * known + p, mask=real, other=0) + 1
    count_var_F = tl.load(updates + 3 * known + p, mask=real, other=0) + 1
    count_m = tl.load(updates + 4 * known + p, mask=real, other=0) + 1
    total_mean = tl.load(samples + p, mask=real, other=0) + m
    total_var = tl.load(samples + known + p, mask=real, other=0) + m
    total_mean_F = tl.load(samples + 2 * known + p, mask=real, other=0) + m
    total_var_F = tl.load(samples + 3 * known + p, mask=real, other=0) + m
    total_m = tl.load(samples + 4 * known + p, mask=real, other=0) + m
    old_mean, old_var = tl.load(batch_mean + at, mask=in_column), tl.load(batch_var + at, mask=in_column)
    old_mean_F, old_var_F = tl.load(feature_mean + p, mask=real), tl.load(feature_var + p, mask=real)
    old_m = tl.load(inverse_m + p, mask=real)

    tiles.wait_for_previous(CHAINED)
    column = at
    if ACROSS:
        column = c.to(tl.int64) * P + p
    mean = tl.load(statistics + column, mask=in_column)
    var = tl.load(statistics + positions.to(tl.int64) * C + column, mask=in_column)
    mean_F, var_F = tiles.load_pair(statistics, P.to(tl.int64) * (C + N) + p, real)
    program = tl.arange(0, BF)
    bad = tl.sum(1.0 - tl.load(finite + program, mask=program < programs, other=1.0))
    tl.debug_barrier()  # every warp holds a copy of the counters, and must have read before one writes

    entering = p < tl.where(bad == 0, positions, 0)
    in_column = entering & (c < C)
    weight = weight_of(count_mean, total_mean, m, momentum, AVERAGE)
    tl.store(batch_mean + at, mix(old_mean, mean, weight), mask=in_column)
    tl.store(updates + p, count_mean, mask=entering)
    tl.store(samples + p, total_mean, mask=entering)
    if SPREAD:
        weight = weight_of(count_var, total_var, m, momentum, AVERAGE)
        tl.store(batch_var + at, mix(old_var, var * entries_factor, weight), mask=in_column)
        tl.store(updates + known + p, count_var, mask=entering)
        tl.store(samples + known + p, total_var, mask=entering)
    weight = weight_of(count_mean_F, total_mean_F, m, momentum, AVERAGE)
    tl.store(feature_mean + p, mix(old_mean_F, mean_F, weight), mask=entering)
    tl.store(updates + 2 * known + p, count_mean_F, mask=entering)
    tl.store(samples + 2 * known + p, total_mean_F, mask=entering)
    weight = weight_of(count_var_F, total_var_F, m, momentum, AVERAGE)
    tl.store(feature_var + p, mix(old_var_F, var_F * m_factor, weight), mask=entering)
    tl.store(updates + 3 * known + p, count_var_F, mask=entering)
    tl.store(samples + 3 * known + p, total_var_F, mask=entering)
    weight = weight_of(count_m, total_m, m, momentum, AVERAGE)
    tl.store(inverse_m + p, mix(old_m, 1.0 / m, weight), mask=entering)
    tl.store(updates + 4 * known + p, count_m, mask=entering)
    tl.store(samples + 4 * known + p, total_m, mask=entering)
