"""Population statistics, updated in a launch at most where operators take thirty: ``Population.update`` with no mask.

A kernel of ``forward`` that has all statistics of a mini-batch lets them in itself; of others, ``enter`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import formula
from . import tiles

if TYPE_CHECKING:
    from ..population import Population

    Remembered = tuple[Population, float | None] | None  # a population and its momentum


def buffers(kept: Population) -> list[Tensor]:
    """In the order of the kernels; ``Population.buffers()`` takes as long as a launch."""
    return [value for value in kept._buffers.values() if value is not None]


def written(changed: list[Tensor]) -> None:
    """Tell autograd, which does not see what a kernel writes."""
    torch.autograd.graph.increment_version(changed)


class Memory(NamedTuple):
    """What a kernel that updates the population is given: its buffers, numbers and constants."""

    buffers: list[Any]
    numbers: tuple[float, ...]
    constants: dict[str, bool]


NOTHING = Memory([None] * 7, (0, 0, 0.0, 0.0, 0.0), {"AVERAGE": False, "SPREAD": False})


def memory(remember: Remembered, entries: int, m: int) -> Memory:
    """For statistics of so many entries and samples."""
    if remember is None:
        return NOTHING
    kept, momentum = remember
    numbers = kept.inverse_m.numel(), m, formula.bessel(entries), formula.bessel(m), momentum or 0.0
    given: list[Any] = buffers(kept)
    written(given)
    return Memory(given, numbers, {"AVERAGE": momentum is None, "SPREAD": entries > 1})


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


@triton.jit
def recall(kept, updates, samples, p, c, positions, known, C, m):
    """What its counters will be, and what is ``kept`` of the five statistics, at some positions."""
    real, column = p < positions, p.to(tl.int64) * C + c
    in_column = real & (c < C)
    counts = (
        tl.load(updates + p, mask=real, other=0) + 1,
        tl.load(updates + known + p, mask=real, other=0) + 1,
        tl.load(updates + 2 * known + p, mask=real, other=0) + 1,
        tl.load(updates + 3 * known + p, mask=real, other=0) + 1,
        tl.load(updates + 4 * known + p, mask=real, other=0) + 1,
    )
    totals = (
        tl.load(samples + p, mask=real, other=0) + m,
        tl.load(samples + known + p, mask=real, other=0) + m,
        tl.load(samples + 2 * known + p, mask=real, other=0) + m,
        tl.load(samples + 3 * known + p, mask=real, other=0) + m,
        tl.load(samples + 4 * known + p, mask=real, other=0) + m,
    )
    old = (
        tl.load(kept[0] + column, mask=in_column),
        tl.load(kept[1] + column, mask=in_column),
        tl.load(kept[2] + p, mask=real),
        tl.load(kept[3] + p, mask=real),
        tl.load(kept[4] + p, mask=real),
    )
    return counts, totals, old


@triton.jit
def let_in(
    kept, updates, samples, counts, totals, old, new, p, c, entering, in_column, known, C, m, momentum,
    AVERAGE: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """``new`` statistics, mixed with ``old`` ones, of those positions and columns that are entering."""
    tl.debug_barrier()  # every warp holds a copy of the counters, and must have read before one writes
    column = p.to(tl.int64) * C + c
    for row in tl.static_range(5):
        if SPREAD or row != 1:
            mixed = mix(old[row], new[row], weight_of(counts[row], totals[row], m, momentum, AVERAGE))
            if row < 2:
                tl.store(kept[row] + column, mixed, mask=in_column)
            else:
                tl.store(kept[row] + p, mixed, mask=entering)
            tl.store(updates + row * known + p, counts[row], mask=entering)
            tl.store(samples + row * known + p, totals[row], mask=entering)


@triton.jit(do_not_specialize=["programs", "N", "P", "C", "known", "m"])
def enter(
    statistics, finite, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples,
    programs, N, P, C, known, m, entries_factor, m_factor, momentum,
    ACROSS: tl.constexpr, SIDE: tl.constexpr, AVERAGE: tl.constexpr, SPREAD: tl.constexpr, CHAINED: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Let the statistics of some positions in, if those of all positions are finite.

    Waiting for memory is what takes time here. So all is loaded at once: the population while ``forward`` still works,
    the rest when it is done.

    Args:
        statistics: What ``forward`` wrote.
        finite: What ``programs`` wrote: 1 where they met only finite variances. By default at the end of the
            statistics.
        batch_mean, ...: The population, for ``known`` positions, of which the first ``P`` are met here.
        entries_factor, m_factor: Make variances unbiased.
        ACROSS: Positions lie side by side in the statistics, as in the input.
        SIDE: The number of features is a multiple of it: so many are read at once.
        AVERAGE: Weigh by samples; else by ``momentum``.
        SPREAD: There are two entries or more behind a batch variance.
    """
    _, C = tiles.sides(P, C, False, SIDE)
    p, c = (tl.program_id(0) * BP + tl.arange(0, BP))[:, None], tl.arange(0, BC)[None, :]
    kept = batch_mean, batch_var, feature_mean, feature_var, inverse_m
    counts, totals, old = recall(kept, updates, samples, p, c, P, known, C, m)
    tiles.wait_for_previous(CHAINED)
    real, in_column = p < P, (p < P) & (c < C)
    column = tiles.column_offset(p, c, P, C, ACROSS)
    mean = tl.load(statistics + column, mask=in_column)
    var = tl.load(statistics + P.to(tl.int64) * C + column, mask=in_column)
    mean_F, var_F = tiles.load_pair(statistics, P.to(tl.int64) * (C + N) + p, real)
    program = tl.arange(0, BF)
    if finite is None:
        program_flags = statistics + 2 * P.to(tl.int64) * (C + N + 1)
    else:
        program_flags = finite
    bad = tl.sum(1.0 - tl.load(program_flags + program, mask=program < programs, other=1.0))
    new = mean, var * entries_factor, mean_F, var_F * m_factor, 1.0 / m
    entering = p < tl.where(bad == 0, P, 0)
    let_in(
        kept, updates, samples, counts, totals, old, new, p, c, entering, entering & (c < C), known, C, m, momentum,
        AVERAGE, SPREAD,
    )  # fmt: skip
