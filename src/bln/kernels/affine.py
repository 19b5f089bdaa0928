"""Kernels of the grouped layer with pooled batch statistics: ``y = a x + b``, one pair for each sample and feature.

An input is seen as ``x[n, c, p]``: sample, feature, position. ``CHANNELS_FIRST`` says whether positions or features are
contiguous in memory. Forward is three launches: ``measure`` finds mean and squares over positions, ``join`` makes
coefficients of them, ``apply`` is the map. Backward is three more: ``measure_backward``, ``join_backward``,
``apply_backward``. A range of positions of a sample is always handled by one program, in an order that does not
depend on the number of samples.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate(C, P, run, splits, BC: tl.constexpr):
    """Split the program's number into a block of features, a range of positions and a sample."""
    blocks = tl.cdiv(C, BC)
    program = tl.program_id(0)
    block, rest = program % blocks, program // blocks
    first = rest % splits * run
    return block, rest // splits, first, tl.minimum(first + run, P)


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
def is_real(mask, n, p, last, P, MASKED: tl.constexpr):
    """Which positions of a tile are in range and not hidden."""
    real = p < last
    if MASKED:
        real = real & (tl.load(mask + n.to(tl.int64) * P + p, mask=real, other=0) != 0)
    return real


# ---- forward


@triton.jit(do_not_specialize=["N", "C", "P", "run", "splits"])
def measure(
    x, mask, partial, counts, N, C, P, run, splits,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Mean and squares around it, over a range of the positions of a sample.

    Each lane of a tile follows its own positions by Welford's recurrence; lanes are joined at the end by Chan's formula.
    So nothing cancels, and threads wait for each other once.

    Args:
        x: The input.
        mask: Where ``MASKED``, nonzero at real entries, ``[N, P]``.
        partial: Means and squares are written here, ``[2, splits, N, C]``.
        counts: Where ``MASKED``, real positions are written here, ``[splits, N]``.
        N, C, P: Samples, features, positions.
        run, splits: Positions in a range, and how many ranges there are.
    """
    AXIS: tl.constexpr = 1 if CHANNELS_FIRST else 0
    C, P = extents(C, P, CHANNELS_FIRST, VEC)
    block, n, first, last = locate(C, P, run, splits, BC)
    c, lane = indices(block, BC, BP, CHANNELS_FIRST)
    sample = x + n.to(tl.int64) * C * P
    mean = tl.zeros([BC, BP] if CHANNELS_FIRST else [BP, BC], tl.float32)
    squares = tl.zeros([BC, BP] if CHANNELS_FIRST else [BP, BC], tl.float32)
    count = tl.zeros([1, BP] if CHANNELS_FIRST else [BP, 1], tl.float32)
    full = 0  # tiles without a bound to look at
    if not MASKED:
        full = (last - first) // BP
        for tile in range(full):
            at = offsets(c, first + tile * BP + lane, C, P, CHANNELS_FIRST)
            v = tl.load(sample + at, mask=c < C, other=0.0).to(tl.float32)
            moved = v - mean
            mean += moved * (1.0 / (tile + 1))
            squares += moved * (v - mean)
        count += full
    for start in range(first + full * BP, last, BP):
        p = start + lane
        real = is_real(mask, n, p, last, P, MASKED)
        v = tl.load(sample + offsets(c, p, C, P, CHANNELS_FIRST), mask=real & (c < C), other=0.0).to(tl.float32)
        count += tl.where(real, 1.0, 0.0)
        moved = tl.where(real, v - mean, 0.0)
        mean += moved / tl.maximum(count, 1.0)
        squares += tl.where(real, moved * (v - mean), 0.0)
    total = tl.sum(count, AXIS)
    joined = tl.sum(mean * count, AXIS) / tl.maximum(total, 1.0)
    apart = mean - tl.expand_dims(joined, AXIS)
    squares = tl.sum(squares + count * apart * apart, AXIS)

    c = block * BC + tl.arange(0, BC)
    split = first // run
    row = (split.to(tl.int64) * N + n) * C + c
    tl.store(partial + row, joined, mask=c < C)
    tl.store(partial + splits.to(tl.int64) * N * C + row, squares, mask=c < C)
    if MASKED:
        if block == 0:
            tl.store(counts + split * N + n + tl.arange(0, 1), total)


@triton.jit
def merged(partial, counts, n, c, real, N, C, P, run, splits, MASKED: tl.constexpr):
    """Real positions, mean and variance of samples and features, their ranges joined by Chan's formula."""
    planes = splits.to(tl.int64) * N * C
    count = (n * 0).to(tl.float32)
    mean = tl.zeros(real.shape, tl.float32)
    squares = tl.zeros(real.shape, tl.float32)
    for split in range(splits):
        if MASKED:
            part = tl.load(counts + split * N + n, mask=n < N, other=0.0)
        else:
            part = (n * 0 + tl.minimum(run, P - split * run)).to(tl.float32)
        row = (split * N + n).to(tl.int64) * C + c
        own_mean = tl.load(partial + row, mask=real, other=0.0)
        own_squares = tl.load(partial + planes + row, mask=real, other=0.0)
        total = count + part
        share = part / tl.maximum(total, 1.0)
        moved = own_mean - mean
        mean += moved * share
        squares += own_squares + moved * moved * count * share
        count = total
    return tl.where(n < N, count, 0.0), mean, squares / tl.maximum(count, 1.0)


@triton.jit
def over_group(value, inside, K):
    """The mean over the features of each group, the last axis of a tile."""
    return tl.expand_dims(tl.sum(tl.where(inside, value, 0.0), 2), 2) / K


@triton.jit
def over_samples(value):
    """The sum over samples, the first axis of a tile."""
    return tl.expand_dims(tl.sum(value, 0), 0)


@triton.jit
def features_of(mean, var, inside, K):
    """Eqs 12, 13 over the features of each group: mean and variance."""
    mean_F = over_group(mean, inside, K)
    apart = mean - mean_F
    return mean_F, over_group(var + apart * apart, inside, K)


@triton.jit
def group_tile(K, groups, BN: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr):
    """Samples, groups, features and which of them there are: a tile ``[BN, BG, BK]`` of whole groups."""
    n = tl.arange(0, BN)[:, None, None]
    g = tl.program_id(0) * BG + tl.arange(0, BG)[None, :, None]
    k = tl.arange(0, BK)[None, None, :]
    return n, g, g * K + k, (g < groups) & (k < K)


@triton.jit(
    do_not_specialize=["N", "C", "P", "run", "splits", "groups"], do_not_specialize_on_alignment=["gamma", "beta"]
)
def join(
    partial, counts, gamma, beta, planes, batch, features, N, C, P, run, splits, groups, mix_eps, scale, eps,
    BN: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Statistics of a training mini-batch and coefficients, of all samples and some groups (eqs 10-17).

    Args:
        partial, counts: What ``measure`` wrote.
        gamma, beta: The parameters, or nothing.
        planes: Mean and variance over positions, ``a`` and ``b`` are written here, ``[4, N, C]``.
        batch: Batch mean and variance are written here, ``[2, C]``.
        features: Feature statistics, averaged over samples, are written here, ``[2, groups]``.
        groups: How many groups there are.
        mix_eps, scale, eps: As in the formula.
    """
    K = C // groups
    first, g, c, inside = group_tile(K, groups, BN, BG, BK)
    plane = N.to(tl.int64) * C
    entries = tl.zeros([1, 1, 1], tl.float32)
    m = tl.zeros([1, 1, 1], tl.float32)
    total = tl.zeros([1, BG, BK], tl.float32)
    for start in range(0, N, BN):
        n = start + first
        real = inside & (n < N)
        count, mean, var = merged(partial, counts, n, c, real, N, C, P, run, splits, MASKED)
        at = planes + n.to(tl.int64) * C + c
        tl.store(at, mean, mask=real)
        tl.store(at + plane, var, mask=real)
        entries += over_samples(count)
        m += over_samples(tl.where(count > 0, 1.0, 0.0))
        total += over_samples(count * mean)
    entries, m = tl.maximum(entries, 1.0), tl.maximum(m, 1.0)
    mean_B = total / entries
    tl.debug_barrier()  # what was written above is read below

    squares = tl.zeros([1, BG, BK], tl.float32)
    mean_sum = tl.zeros([1, BG, 1], tl.float32)
    var_sum = tl.zeros([1, BG, 1], tl.float32)
    for start in range(0, N, BN):
        n = start + first
        count, mean, var, real = reread(planes, counts, n, c, inside, N, C, P, splits, MASKED)
        apart = mean - mean_B
        squares += over_samples(tl.where(real, count * (var + apart * apart), 0.0))
        mean_F, var_F = features_of(mean, var, inside, K)
        mean_sum += over_samples(tl.where(count > 0, mean_F, 0.0))
        var_sum += over_samples(tl.where(count > 0, var_F, 0.0))
    var_B = squares / entries
    tl.store(batch + c, mean_B, mask=inside)
    tl.store(batch + C + c, var_B, mask=inside)
    tl.store(features + g, mean_sum / m, mask=g < groups)
    tl.store(features + groups + g, var_sum / m, mask=g < groups)

    w_B, w_F = scale * (1 - (1 / m + mix_eps)), scale * (1 / m - mix_eps)  # eq 16
    slope_B = w_B / tl.sqrt(var_B + eps)
    for start in range(0, N, BN):
        n = start + first
        count, mean, var, real = reread(planes, counts, n, c, inside, N, C, P, splits, MASKED)
        mean_F, var_F = features_of(mean, var, inside, K)
        store_coefficients(planes + 2 * plane, gamma, beta, n, c, real, N, C, slope_B, mean_B, w_F, mean_F, var_F, eps)


@triton.jit
def reread(planes, counts, n, c, inside, N, C, P, splits, MASKED: tl.constexpr):
    """Real positions, mean and variance as ``join`` wrote them."""
    real = inside & (n < N)
    at = planes + n.to(tl.int64) * C + c
    mean = tl.load(at, mask=real, other=0.0)
    var = tl.load(at + N.to(tl.int64) * C, mask=real, other=0.0)
    count = tl.where(n < N, P, 0).to(tl.float32)
    if MASKED:
        count = (n * 0).to(tl.float32)
        for split in range(splits):
            count += tl.load(counts + split * N + n, mask=n < N, other=0.0)
    return count, mean, var, real


@triton.jit
def store_coefficients(to, gamma, beta, n, c, real, N, C, slope_B, mean_B, w_F, mean_F, var_F, eps):
    """Eqs 14-17 sorted by ``x``: ``a`` and ``b``."""
    slope_F = w_F / tl.sqrt(var_F + eps)
    a = slope_B + slope_F
    b = -(slope_B * mean_B + slope_F * mean_F)
    if gamma is not None:
        scale = tl.load(gamma + c, mask=real, other=0.0).to(tl.float32)
        a, b = scale * a, scale * b
    if beta is not None:
        b += tl.load(beta + c, mask=real, other=0.0).to(tl.float32)
    at = to + n.to(tl.int64) * C + c
    tl.store(at, a, mask=real)
    tl.store(at + N.to(tl.int64) * C, b, mask=real)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """The nonlinearity behind the layer, if there is one."""
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)  # hands on NaN
    elif ACTIVATION == "silu":
        z = z * tl.sigmoid(z)
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    return z


@triton.jit
def slope(z, ACTIVATION: tl.constexpr):
    """The derivative of the nonlinearity."""
    if ACTIVATION == "relu":
        found = tl.where(z > 0, 1.0, 0.0)
    elif ACTIVATION == "silu":
        s = tl.sigmoid(z)
        found = s * (1 + z * (1 - s))
    elif ACTIVATION == "gelu":
        found = 0.5 * (1 + tl.erf(z * 0.7071067811865476)) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    else:
        found = z * 0 + 1.0
    return found


@triton.jit
def affine_of(planes, n, c, N, C):
    """``a`` and ``b`` of a sample's features."""
    at = planes + (2 * N.to(tl.int64) + n) * C + c
    return tl.load(at, mask=c < C, other=0.0), tl.load(at + N.to(tl.int64) * C, mask=c < C, other=0.0)


@triton.jit(do_not_specialize=["N", "C", "P", "run", "splits"])
def apply(
    x, y, residual, mask, planes, N, C, P, run, splits,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, MASKED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """``y = g(a x + b + residual)`` at a range of the positions of a sample; hidden entries come out 0."""
    C, P = extents(C, P, CHANNELS_FIRST, VEC)
    block, n, first, last = locate(C, P, run, splits, BC)
    n = N - 1 - n  # what was measured last may still be in the cache
    c, lane = indices(block, BC, BP, CHANNELS_FIRST)
    sample = n.to(tl.int64) * C * P
    a, b = affine_of(planes, n, c, N, C)
    for start in range(first, last, BP):
        p = start + lane
        inside = (p < last) & (c < C)
        at = sample + offsets(c, p, C, P, CHANNELS_FIRST)
        z = a * tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + b
        if residual is not None:
            z += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        z = activate(z, ACTIVATION)
        if MASKED:
            z = tl.where(is_real(mask, n, p, last, P, True), z, 0.0)
        tl.store(y + at, z.to(y.dtype.element_ty), mask=inside)


@triton.jit
def mix(old, new, weight):
    """``torch.lerp``; exactly the new value at weight 1."""
    moved = new - old
    return tl.where(weight < 0.5, old + weight * moved, new - moved * (1 - weight))


@triton.jit
def bessel(count):
    """``count / (count - 1)``; 1 where the count is 1."""
    return count / tl.maximum(count - 1, 1.0)


@triton.jit(
    do_not_specialize=["N", "C", "P", "splits", "groups"],
    do_not_specialize_on_alignment=[
        "batch_mean", "batch_var", "feature_mean", "feature_var", "inverse_m", "updates", "samples"
    ],
)  # fmt: skip
def update(
    batch, features, counts, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples,
    N, C, P, splits, groups, momentum, AVERAGE: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Average the population with a mini-batch, unless its statistics are not finite: ``Population.update``.

    Args:
        batch, features, counts: What ``join`` and ``measure`` wrote.
        batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, samples: The population.
        momentum: The least weight of the new values; ``AVERAGE`` weights by samples instead.
    """
    lane = tl.arange(0, BLOCK)
    m, entries = N.to(tl.float32), N.to(tl.float32) * P
    if MASKED:
        m, entries = 0.0, 0.0
        for start in range(0, N, BLOCK):
            n = start + lane
            count = tl.zeros([BLOCK], tl.float32)
            for split in range(splits):
                count += tl.load(counts + split * N + n, mask=n < N, other=0.0)
            m += tl.sum(tl.where(count > 0, 1.0, 0.0), 0)
            entries += tl.sum(count, 0)
    bad = 0.0
    for start in range(0, C, BLOCK):
        var = tl.load(batch + C + start + lane, mask=start + lane < C, other=0.0)
        bad += tl.sum(tl.where(var < float("inf"), 0.0, 1.0), 0)  # NaN is not less, either
    for start in range(0, groups, BLOCK):
        var = tl.load(features + groups + start + lane, mask=start + lane < groups, other=0.0)
        bad += tl.sum(tl.where(var < float("inf"), 0.0, 1.0), 0)
    if (bad == 0) & (m > 0):
        row = tl.arange(0, 8)
        enters = (row < 5) & (tl.where(row == 1, entries, 2.0) > 1)  # a variance takes two entries
        count = tl.load(updates + row, mask=enters, other=0) + 1
        total = tl.load(samples + row, mask=enters, other=0) + m.to(tl.int64)
        tl.debug_barrier()  # every warp has read the counters
        tl.store(updates + row, count, mask=enters)
        tl.store(samples + row, total, mask=enters)
        if AVERAGE:
            weights = m / total.to(tl.float32)
        else:
            weights = tl.maximum(1 / count.to(tl.float32), momentum)
        weights = tl.where(enters, weights, 0.0)
        for start in range(0, C, BLOCK):
            c = start + lane
            blend(batch_mean, batch, c, C, tl.sum(tl.where(row == 0, weights, 0.0), 0), 1.0)
            blend(batch_var, batch + C, c, C, tl.sum(tl.where(row == 1, weights, 0.0), 0), bessel(entries))
        for start in range(0, groups, BLOCK):
            g = start + lane
            blend(feature_mean, features, g, groups, tl.sum(tl.where(row == 2, weights, 0.0), 0), 1.0)
            blend(feature_var, features + groups, g, groups, tl.sum(tl.where(row == 3, weights, 0.0), 0), bessel(m))
        old = tl.load(inverse_m)
        tl.debug_barrier()
        tl.store(inverse_m, mix(old, 1 / m, tl.sum(tl.where(row == 4, weights, 0.0), 0)))


@triton.jit
def blend(kept, new, at, size, weight, factor):
    """Mix statistics of a mini-batch into those kept."""
    old = tl.load(kept + at, mask=at < size, other=0.0)
    tl.store(kept + at, mix(old, factor * tl.load(new + at, mask=at < size, other=0.0), weight), mask=at < size)


# ---- inference


@triton.jit(
    do_not_specialize=["N", "C", "P", "run", "splits", "groups"],
    do_not_specialize_on_alignment=[
        "gamma", "beta", "batch_mean", "batch_var", "feature_mean", "feature_var", "inverse_m", "updates"
    ],
)  # fmt: skip
def join_inference(
    partial, counts, gamma, beta, planes, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates,
    N, C, P, run, splits, groups, mix_eps, scale, eps,
    CONFIG: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Coefficients of inference in a configuration, four bits of ``CONFIG``, 1 for population (eqs 18-25).

    Args:
        partial, counts: What ``measure`` wrote; not read where all comes from the population.
        gamma, beta, planes: As in ``join``.
        batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates: The population.
    """
    E_B: tl.constexpr = CONFIG // 8 % 2 == 1
    STD_B: tl.constexpr = CONFIG // 4 % 2 == 1
    E_F: tl.constexpr = CONFIG // 2 % 2 == 1
    STD_F: tl.constexpr = CONFIG % 2 == 1
    K = C // groups
    first, g, c, inside = group_tile(K, groups, BN, BG, BK)
    mean_B = tl.load(batch_mean + c, mask=inside, other=0.0)
    var_B = tl.load(batch_var + c, mask=inside, other=1.0)
    m = N.to(tl.float32)
    if MASKED or not (E_B and STD_B):
        entries = tl.zeros([1, 1, 1], tl.float32)
        samples = tl.zeros([1, 1, 1], tl.float32)
        total = tl.zeros([1, BG, BK], tl.float32)
        for start in range(0, N, BN):
            n = start + first
            count, mean, _ = merged(partial, counts, n, c, inside & (n < N), N, C, P, run, splits, MASKED)
            entries += over_samples(count)
            samples += over_samples(tl.where(count > 0, 1.0, 0.0))
            total += over_samples(count * mean)
        entries, m = tl.maximum(entries, 1.0), tl.maximum(samples, 1.0)
        if not E_B:
            mean_B = total / entries  # eq 18
        if not STD_B:  # eq 19, around the mean that was chosen
            squares = tl.zeros([1, BG, BK], tl.float32)
            for start in range(0, N, BN):
                n = start + first
                count, mean, var = merged(partial, counts, n, c, inside & (n < N), N, C, P, run, splits, MASKED)
                squares += over_samples(count * (var + (mean - mean_B) * (mean - mean_B)))
            var_B = squares / entries
    seen = tl.load(updates + 4) > 0
    own = tl.where(seen, tl.load(inverse_m), 1 / m)
    w_B, w_F = scale * (1 - (own + mix_eps)), scale * (own - mix_eps)  # eq 24
    slope_B = w_B / tl.sqrt(var_B + eps)
    kept_F = tl.load(feature_mean + g, mask=g < groups, other=0.0)
    kept_var = tl.load(feature_var + g, mask=g < groups, other=1.0)
    plane = N.to(tl.int64) * C
    for start in range(0, N, BN):
        n = start + first
        real = inside & (n < N)
        mean_F, var_F = kept_F, kept_var
        if not (E_F and STD_F):
            _, mean, var = merged(partial, counts, n, c, real, N, C, P, run, splits, MASKED)
            own_mean, own_var = features_of(mean, var, inside, K)
            if not E_F:
                mean_F = own_mean  # eq 20
            if not STD_F:
                var_F = own_var + (own_mean - mean_F) * (own_mean - mean_F)  # eq 21
        store_coefficients(planes + 2 * plane, gamma, beta, n, c, real, N, C, slope_B, mean_B, w_F, mean_F, var_F, eps)


# ---- backward


@triton.jit
def incoming(x, dy, residual, at, inside, a, b, ACTIVATION: tl.constexpr):
    """``x`` and the gradient before the nonlinearity."""
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        z = a * v + b
        if residual is not None:
            z += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        g = g * slope(z, ACTIVATION)
    return v, g


@triton.jit(do_not_specialize=["N", "C", "P", "run", "splits"])
def measure_backward(
    x, dy, residual, mask, planes, partial, N, C, P, run, splits,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, MASKED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Sums of ``dy`` and of ``dy (x - mean)`` over a range of positions, written to ``partial[2, splits, N, C]``."""
    AXIS: tl.constexpr = 1 if CHANNELS_FIRST else 0
    C, P = extents(C, P, CHANNELS_FIRST, VEC)
    block, n, first, last = locate(C, P, run, splits, BC)
    c, lane = indices(block, BC, BP, CHANNELS_FIRST)
    sample = n.to(tl.int64) * C * P
    mean = tl.load(planes + n.to(tl.int64) * C + c, mask=c < C, other=0.0)
    a, b = affine_of(planes, n, c, N, C)
    sums = tl.zeros([BC, BP] if CHANNELS_FIRST else [BP, BC], tl.float32)
    dots = tl.zeros([BC, BP] if CHANNELS_FIRST else [BP, BC], tl.float32)
    for start in range(first, last, BP):
        p = start + lane
        inside = is_real(mask, n, p, last, P, MASKED) & (c < C)
        at = sample + offsets(c, p, C, P, CHANNELS_FIRST)
        v, g = incoming(x, dy, residual, at, inside, a, b, ACTIVATION)
        g = tl.where(inside, g, 0.0)
        sums += g
        dots += g * tl.where(inside, v - mean, 0.0)
    c = block * BC + tl.arange(0, BC)
    row = ((first // run).to(tl.int64) * N + n) * C + c
    tl.store(partial + row, tl.sum(sums, AXIS), mask=c < C)
    tl.store(partial + splits.to(tl.int64) * N * C + row, tl.sum(dots, AXIS), mask=c < C)


@triton.jit
def products(partial, planes, counts, n, c, inside, mean_B, r_B, N, C, P, splits, K, eps, MASKED: tl.constexpr):
    """What backward needs of some samples: the sums, their products with ``x_B`` and ``x_F``, and feature statistics."""
    count, mean, var, real = reread(planes, counts, n, c, inside, N, C, P, splits, MASKED)
    mean_F, var_F = features_of(mean, var, inside, K)
    r_F = 1 / tl.sqrt(var_F + eps)
    sums = tl.zeros(real.shape, tl.float32)
    dots = tl.zeros(real.shape, tl.float32)
    for split in range(splits):
        at = partial + (split * N + n).to(tl.int64) * C + c
        sums += tl.load(at, mask=real, other=0.0)
        dots += tl.load(at + splits.to(tl.int64) * N * C, mask=real, other=0.0)
    x_B = tl.where(real, r_B * (dots + (mean - mean_B) * sums), 0.0)
    x_F = tl.where(real, r_F * (dots + (mean - mean_F) * sums), 0.0)
    return count, sums, x_B, x_F, mean_F, r_F, real


@triton.jit(do_not_specialize=["N", "C", "P", "splits", "groups"], do_not_specialize_on_alignment=["gamma"])
def join_backward(
    partial, counts, gamma, planes, batch, coefficients, gradients, N, C, P, splits, groups, mix_eps, scale, eps,
    BN: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The chain rule through ``join``: ``c1`` and ``c0`` of ``dx = a dy + c1 x + c0``, gradients of gamma and beta.

    Args:
        partial: What ``measure_backward`` wrote.
        counts, gamma, planes, batch: As in ``join``.
        coefficients: ``c1`` and ``c0`` are written here, ``[2, N, C]``.
        gradients: Those of gamma and beta are written here, ``[2, C]``.
    """
    K = C // groups
    first, g, c, inside = group_tile(K, groups, BN, BG, BK)
    mean_B = tl.load(batch + c, mask=inside, other=0.0)
    r_B = 1 / tl.sqrt(tl.load(batch + C + c, mask=inside, other=1.0) + eps)
    gain = tl.where(inside, 1.0, 0.0)
    if gamma is not None:
        gain = tl.load(gamma + c, mask=inside, other=0.0).to(tl.float32)

    entries = tl.zeros([1, 1, 1], tl.float32)
    m = tl.zeros([1, 1, 1], tl.float32)
    total = tl.zeros([1, BG, BK], tl.float32)
    total_B = tl.zeros([1, BG, BK], tl.float32)
    total_F = tl.zeros([1, BG, BK], tl.float32)
    for start in range(0, N, BN):
        count, sums, x_B, x_F, mean_F, r_F, real = products(
            partial, planes, counts, start + first, c, inside, mean_B, r_B, N, C, P, splits, K, eps, MASKED
        )
        entries += over_samples(count)
        m += over_samples(tl.where(count > 0, 1.0, 0.0))
        total += over_samples(sums)
        total_B += over_samples(x_B)
        total_F += over_samples(x_F)
    entries, m = tl.maximum(entries, 1.0), tl.maximum(m, 1.0)
    w_B, w_F = scale * (1 - (1 / m + mix_eps)), scale * (1 / m - mix_eps)  # eq 16
    tl.store(gradients + c, w_B * total_B + w_F * total_F, mask=inside)
    tl.store(gradients + C + c, total, mask=inside)

    # Each factor of r in its turn: r ** 3 would underflow where x is of order 1e15.
    scale_B = w_B * gain * r_B / entries
    slope_B = scale_B * total_B * r_B
    for start in range(0, N, BN):
        n = start + first
        count, sums, x_B, x_F, mean_F, r_F, real = products(
            partial, planes, counts, n, c, inside, mean_B, r_B, N, C, P, splits, K, eps, MASKED
        )
        scale_F = w_F * r_F / tl.maximum(count, 1.0)
        slope_F = scale_F * over_group(gain * x_F, inside, K) * r_F
        offset_F = scale_F * over_group(gain * sums, inside, K)
        at = coefficients + n.to(tl.int64) * C + c
        tl.store(at, -(slope_B + slope_F), mask=real)
        c0 = slope_B * mean_B - scale_B * total + (slope_F * mean_F - offset_F)
        tl.store(at + N.to(tl.int64) * C, c0, mask=real)


@triton.jit(do_not_specialize=["N", "C", "P", "run", "splits"])
def apply_backward(
    x, dy, residual, dx, d_residual, mask, planes, coefficients, N, C, P, run, splits,
    CHANNELS_FIRST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, VEC: tl.constexpr, MASKED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """``dx = a dy + c1 x + c0`` at a range of the positions of a sample, ``dy`` taken before the nonlinearity."""
    C, P = extents(C, P, CHANNELS_FIRST, VEC)
    block, n, first, last = locate(C, P, run, splits, BC)
    n = N - 1 - n  # what was measured last may still be in the cache
    c, lane = indices(block, BC, BP, CHANNELS_FIRST)
    sample = n.to(tl.int64) * C * P
    a, b = affine_of(planes, n, c, N, C)
    row = coefficients + n.to(tl.int64) * C + c
    c1 = tl.load(row, mask=c < C, other=0.0)
    c0 = tl.load(row + N.to(tl.int64) * C, mask=c < C, other=0.0)
    for start in range(first, last, BP):
        p = start + lane
        inside = (p < last) & (c < C)
        at = sample + offsets(c, p, C, P, CHANNELS_FIRST)
        v, g = incoming(x, dy, residual, at, inside, a, b, ACTIVATION)
        d = a * g + c1 * v + c0
        if MASKED:
            real = is_real(mask, n, p, last, P, True)
            d, g = tl.where(real, d, 0.0), tl.where(real, g, 0.0)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
        if d_residual is not None:
            tl.store(d_residual + at, g.to(d_residual.dtype.element_ty), mask=inside)
