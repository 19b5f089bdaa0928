"""Functions of several kernels: Chan's formula, the weights of eq 16, eqs 18-21, averages of the population."""

from __future__ import annotations

import triton
import triton.language as tl


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
    if CHANNELS_FIRST:
        at = c * P + p
    else:
        at = p * C + c
    return at


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
def conclude(count, mean, squares, AXIS: tl.constexpr):
    """Mean and variance of all lanes along an axis."""
    total, joined, squares = gather(count, mean, squares, AXIS)
    return joined, squares / tl.maximum(total, 1.0)


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


@triton.jit
def mix(old, new, weight):
    """``torch.lerp``; exactly the new value at weight 1."""
    moved = new - old
    return tl.where(weight < 0.5, old + weight * moved, new - moved * (1 - weight))


@triton.jit
def bessel(count):
    """``count / (count - 1)``; 1 where the count is 1."""
    return count / tl.maximum(count - 1, 1.0)


@triton.jit
def newest_weight(updates, samples, m, momentum):
    """The weight of a new value that is the ``updates``-th; by samples where the momentum is negative."""
    momentum = tl.cast(momentum, tl.float32)
    weight = tl.maximum(1 / updates.to(tl.float32), momentum)
    return tl.where(momentum < 0, m / samples.to(tl.float32), weight)
