"""Functions of several kernels: addresses, Chan's formula, the weights of eq 16, eqs 18-21."""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

POPULATION = ("batch_mean", "batch_var", "feature_mean", "feature_var", "inverse_m", "updates", "samples")

# One compiled kernel is for all sizes, and for parameters and populations that lie anywhere in memory.
kernel = partial(
    triton.jit,
    do_not_specialize=[
        "N", "C", "P", "R", "W", "Q", "S", "M", "m", "entries", "known", "programs", "run", "splits", "count_splits",
        "groups",
    ],
    do_not_specialize_on_alignment=[*POPULATION, "gamma", "beta"],
)  # fmt: skip


@triton.jit
def load(pointers, mask, other=0.0):
    """Load in float32."""
    return tl.load(pointers, mask=mask, other=other).to(tl.float32)


@triton.jit
def indices(block, BC: tl.constexpr, BP: tl.constexpr, CHANNELS_FIRST: tl.constexpr):
    """Features and positions of a tile, the contiguous ones along its last axis."""
    if CHANNELS_FIRST:
        c, p = block * BC + tl.arange(0, BC)[:, None], tl.arange(0, BP)[None, :]
    else:
        c, p = block * BC + tl.arange(0, BC)[None, :], tl.arange(0, BP)[:, None]
    return c, p


@triton.jit
def extents(C, P, CHANNELS_FIRST: tl.constexpr, VEC: tl.constexpr):
    """``C`` and ``P``; the compiler learns that the contiguous one is a multiple of ``VEC``."""
    if CHANNELS_FIRST:
        P = P // VEC * VEC
    else:
        C = C // VEC * VEC
    return C, P


@triton.jit
def offsets(c, p, C, P, CHANNELS_FIRST: tl.constexpr):
    """Offsets of values inside a sample."""
    return c * P + p if CHANNELS_FIRST else p * C + c


@triton.jit
def is_real(mask, row, exists):
    """Mark the rows, each a sample at a position, that exist and are not hidden."""
    if mask is not None:
        exists = exists & (tl.load(mask + row, mask=exists, other=0) != 0)
    return exists


@triton.jit
def counted(counts, n, real, N, splits):
    """Real positions of samples, counted in each of several ranges."""
    size = tl.zeros(n.shape, tl.float32)
    for split in range(splits):
        size += load(counts + split * N + n, real)
    return size


@triton.jit
def absorb(count, mean, squares, part_count, part_mean, part_squares):
    """Chan's formula: what lanes have seen so far, together with another part each."""
    total = count + part_count
    share = part_count / tl.maximum(total, 1.0)
    moved = part_mean - mean
    return total, mean + moved * share, squares + part_squares + moved * moved * count * share


@triton.jit
def gather(count, mean, squares, AXIS: tl.constexpr):
    """Count, mean and squares of all lanes along an axis together, by Chan's formula."""
    total = tl.sum(count, AXIS)
    joined = tl.sum(count * mean, AXIS) / tl.maximum(total, 1.0)
    apart = mean - tl.expand_dims(joined, AXIS)
    return total, joined, tl.sum(squares + count * apart * apart, AXIS)


@triton.jit
def mixing(inverse, mix_eps, scale):
    """The weights of eqs 16 and 24; a compiler may hand on numbers as float64."""
    mix_eps, scale = tl.cast(mix_eps, tl.float32), tl.cast(scale, tl.float32)
    return scale * (1 - (inverse + mix_eps)), scale * (inverse - mix_eps)


@triton.jit
def between(prior, kept, own, m):
    """The population's value, the current one, or a mean of both; the population's share is ``k / (k + m)``."""
    finite = tl.where(prior < float("inf"), tl.cast(prior, tl.float32), 0.0)
    share = finite / (finite + m)
    mixed = share * kept + (1 - share) * own
    return tl.where(prior < float("inf"), tl.where(prior > 0, mixed, own), kept)


@triton.jit
def shrink(prior_mean, prior_var, kept_mean, kept_var, own_mean, own_var, m):
    """Eqs 18-21: a mean and a variance of inference; a current variance is around the mean that was chosen."""
    mean = between(prior_mean, kept_mean, own_mean, m)
    own_var += (own_mean - mean) * (own_mean - mean)
    return mean, between(prior_var, kept_var, own_var, m)
