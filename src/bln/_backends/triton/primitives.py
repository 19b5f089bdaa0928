"""Functions shared by the kernels: tiles, masks, Chan's formula, eq 16's weights, eqs 18-21; names used by all.

- ``N``, ``C``, ``P``: samples, features and positions; ``n``, ``c``, ``p`` index them, shaped to broadcast in a tile.
- ``BN``, ``BC``, ``BP``: how many of them a tile has. Each thread can load ``VEC`` values at a time.
- ``inside``: within bounds; ``valid``: within bounds and not hidden by the mask. ``offs``: offsets to a pointer.
- ``count``, ``mean``, ``squares``: moments of a set; ``squares`` sums squared deviations from the mean (Welford's M2).
- ``_B``, ``_F``: of batch and of feature statistics: ``mean_B``, ``w_F`` (eq 16), ``r_B = 1 / sqrt(var_B + eps)``.
- ``v``, ``g``: values of ``x`` and of ``dy``, in float32; ``wdy`` is ``gamma * dy``.
"""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

POPULATION = ("batch_mean", "batch_var", "feature_mean", "feature_var", "inverse_m", "updates", "samples")

# Without specialization one compiled kernel serves all sizes, and parameters and populations of any alignment.
kernel = partial(
    triton.jit,
    do_not_specialize=[
        "N", "C", "P", "R", "W", "Q", "S", "M", "m", "entries", "positions", "programs", "chunk", "splits",
        "count_splits", "groups",
    ],
    do_not_specialize_on_alignment=[*POPULATION, "gamma", "beta"],
)  # fmt: skip


@triton.jit
def load(pointers, mask, other=0.0):
    """Load as float32."""
    return tl.load(pointers, mask=mask, other=other).to(tl.float32)


@triton.jit
def indices(block, BC: tl.constexpr, BP: tl.constexpr, CHANNELS_FIRST: tl.constexpr):
    """Return the features of a block and positions from 0; the contiguous ones run along the last axis."""
    if CHANNELS_FIRST:
        c, p = block * BC + tl.arange(0, BC)[:, None], tl.arange(0, BP)[None, :]
    else:
        c, p = block * BC + tl.arange(0, BC)[None, :], tl.arange(0, BP)[:, None]
    return c, p


@triton.jit
def divisible(C, P, CHANNELS_FIRST: tl.constexpr, VEC: tl.constexpr):
    """Return ``C`` and ``P`` unchanged, but tell the compiler that the contiguous one is a multiple of ``VEC``."""
    if CHANNELS_FIRST:
        P = P // VEC * VEC
    else:
        C = C // VEC * VEC
    return C, P


@triton.jit
def offsets(c, p, C, P, CHANNELS_FIRST: tl.constexpr):
    """Return offsets within a sample."""
    return c * P + p if CHANNELS_FIRST else p * C + c


@triton.jit
def is_valid(mask, row, inside):
    """Return which rows, each a sample at a position, are inside and not hidden; ``mask`` is ``[N * P]`` bytes."""
    if mask is not None:
        inside = inside & (tl.load(mask + row, mask=inside, other=0) != 0)
    return inside


@triton.jit
def sum_counts(counts, n, inside, N, splits):
    """Return how many valid positions samples have; ``counts`` is ``[splits, N]``."""
    count = tl.zeros(n.shape, tl.float32)
    for split in range(splits):
        count += load(counts + split * N + n, inside)
    return count


@triton.jit
def combine(count, mean, squares, other_count, other_mean, other_squares):
    """Combine two sets of moments elementwise, by Chan's formula."""
    total = count + other_count
    share = other_count / tl.maximum(total, 1.0)
    delta = other_mean - mean
    return total, mean + delta * share, squares + other_squares + delta * delta * count * share


@triton.jit
def reduce(count, mean, squares, AXIS: tl.constexpr):
    """Combine all moments along an axis, by Chan's formula."""
    total = tl.sum(count, AXIS)
    common = tl.sum(count * mean, AXIS) / tl.maximum(total, 1.0)
    delta = mean - tl.expand_dims(common, AXIS)
    return total, common, tl.sum(squares + count * delta * delta, AXIS)


@triton.jit
def mixing(inv_m, mix_eps, scale):
    """Return ``w_B`` and ``w_F`` (eqs 16 and 24). The casts are for compilers that pass numbers as float64."""
    mix_eps, scale = tl.cast(mix_eps, tl.float32), tl.cast(scale, tl.float32)
    return scale * (1 - (inv_m + mix_eps)), scale * (inv_m - mix_eps)


@triton.jit
def chosen(prior, population, current, m):
    """Return one statistic at a prior strength ``k``: the population's share is ``k / (k + m)``."""
    finite = tl.where(prior < float("inf"), tl.cast(prior, tl.float32), 0.0)
    share = finite / (finite + m)
    mixed = share * population + (1 - share) * current
    return tl.where(prior < float("inf"), tl.where(prior > 0, mixed, current), population)


@triton.jit
def choose(prior_mean, prior_var, population_mean, population_var, current_mean, current_var, m):
    """Return mean and variance of inference (eqs 18-21); a current variance is taken around the chosen mean."""
    mean = chosen(prior_mean, population_mean, current_mean, m)
    current_var += (current_mean - mean) * (current_mean - mean)
    return mean, chosen(prior_var, population_var, current_var, m)
