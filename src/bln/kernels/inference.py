"""Inference: Algorithm 2, batch statistics being the population's or those of ``forward``'s first sweep.

Each row is normalized by itself, in tiles whose shape does not depend on the number of samples: the same bits in any
company. The derivative, seldom asked for, goes through the plain formula.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import formula
from ..config import StatisticsConfig
from ..formula import Statistics
from ..functional import current
from . import forward, launch, tiles
from .slabs import Entries, Options, Slabs, choose, gradients, options, processors, transform
from .training import statistics_size

if TYPE_CHECKING:
    from ..population import Population


def infer(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None = None,
    *,
    channel_dim: int,
    per_position: bool,
    eps: float,
    mix_eps: float,
    dim_scale: bool,
    kept: Population,
    config: StatisticsConfig,
) -> Tensor:
    """Algorithm 2 of ``x``, given a population that knows its positions, in any configuration."""
    slabs = Slabs.of(x, channel_dim, per_position)
    left = slabs.entries(mask, per_position)
    numbers = options(slabs.x.shape[2], eps, mix_eps, dim_scale, 1 / x.shape[0], slabs.pooled)
    y = _Infer.apply(slabs.x, gamma, beta, left, numbers, kept, config)  # type: ignore[no-untyped-call]
    return slabs.back(y, channel_dim)


class _Infer(torch.autograd.Function):
    """On slabs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        left: Entries | None,
        numbers: Options,
        kept: Population,
        config: StatisticsConfig,
    ) -> Tensor:
        n, p, c = x.shape
        y = torch.empty_like(x)
        batch_mean, batch_var = _batch(x, left, numbers, kept, config)
        _, stride_p, stride_c = x.stride()
        chosen = launch.inference(
            n, p, c, positions_last=stride_p < stride_c, masked=left is not None, processors=processors(x.device)
        )
        hidden, _, own = left or (None, None, numbers.inverse_m)
        _normalize[(chosen.blocks, chosen.splits)](
            x, y, hidden, gamma, beta, batch_mean, batch_var, kept.feature_mean, kept.feature_var, kept.inverse_m,
            kept.updates, own, kept.inverse_m.numel(), n, p, c, *x.stride(), chosen.run,
            numbers.mix_eps, numbers.scale, numbers.eps, MEAN_F=config.feature_mean, VAR_F=config.feature_std,
            MASKED=left is not None, POOLED=numbers.pooled, **chosen.tile,
        )  # fmt: skip
        ctx.rest = left, numbers, kept, config
        ctx.save_for_backward(x, gamma, beta, *kept.buffers())  # so that a change of the population is noticed
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, *_ = ctx.saved_tensors
        return *gradients(_plain_inference, (x, gamma, beta), ctx, dy), None, None, None, None


def _batch(
    x: Tensor, left: Entries | None, numbers: Options, kept: Population, config: StatisticsConfig
) -> tuple[Tensor, Tensor]:
    """Eqs 18, 19."""
    if not config.uses_batch:
        return kept.batch_mean, kept.batch_var
    n, p, c = x.shape
    chosen = choose(x, True, numbers.pooled, backward=False)  # as for a mask: swept over, not held
    statistics, columns = torch.empty(statistics_size(n, p, c), dtype=torch.float32, device=x.device), p * (2 * c + 3)
    partials = torch.empty(chosen.splits * columns, dtype=torch.float32, device=x.device)
    hidden, _, weight = left or (None, None, numbers.inverse_m)
    forward.sweep[(chosen.blocks * chosen.splits,)](
        x, x, hidden, None, None, statistics, partials, None, weight, n, p, c, *x.stride(),
        chosen.run, chosen.splits, 1,
        numbers.mix_eps, numbers.scale, numbers.eps, FOLD=chosen.fold, MASKED=left is not None, POOLED=numbers.pooled,
        MEASURE=True, NORMALIZE=False, WAIT=False, **chosen.tile,
    )  # fmt: skip
    q, parts = (1, chosen.splits * p) if numbers.pooled else (p, chosen.splits)
    joined = torch.empty(q * (2 * c + 3), dtype=torch.float32, device=x.device)
    forward.merge[(launch.cdiv(q * c, 32),)](partials, joined, q, c, parts, BS=64, BLOCK=32)
    mean, square, real = joined[: q * c], joined[q * c : 2 * q * c], joined[2 * q * c : 2 * q * c + q]
    var = square.view(q, c) / real.clamp(min=1)[:, None]
    known_mean, known_var = kept.batch_mean.view(-1, c)[:q], kept.batch_var.view(-1, c)[:q]
    found, known = (Statistics(*pair, None, None, None) for pair in ((mean.view(q, c), var), (known_mean, known_var)))
    batch_only = StatisticsConfig(config.batch_mean, config.batch_std, True, True)
    chosen_statistics = formula.choose(batch_only, found, known)
    return chosen_statistics.batch_mean.contiguous(), chosen_statistics.batch_var.contiguous()


def _plain_inference(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    left: Entries | None,
    numbers: Options,
    kept: Population,
    config: StatisticsConfig,
) -> Tensor:
    """The formula, on slabs in float32."""
    rows, mask = x.float(), None
    if left is not None:
        mask = left.hidden == 0
        rows = torch.where(mask[..., None], rows, 0)
    p, c = x.shape[1:]
    seen = kept.updates.view(5, -1)[4, :p] > 0
    own = numbers.inverse_m if left is None else left.inverse_m
    population = Statistics(
        kept.batch_mean.view(-1, c)[:p],
        kept.batch_var.view(-1, c)[:p],
        kept.feature_mean.view(-1)[:p],
        kept.feature_var.view(-1)[:p],
        torch.where(seen, kept.inverse_m.view(-1)[:p], own),
    )
    found = current(rows, mask, not numbers.pooled, config)
    y = transform(rows, formula.choose(config, found, population), gamma, beta, numbers)
    return y if mask is None else torch.where(mask[..., None], y, 0)


@triton.jit(do_not_specialize=["N", "P", "C", "run", "known"])
def _normalize(
    x, y, hidden, gamma, beta, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, own_inverse_m,
    known, N, P, C, stride_n, stride_p, stride_c, run, mix_eps, scale, eps,
    MEAN_F: tl.constexpr, VAR_F: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    EVEN: tl.constexpr, MASKED: tl.constexpr, POOLED: tl.constexpr,
):  # fmt: skip
    """Eqs 20-25 of a run of samples of some positions.

    Args:
        batch_mean, batch_var: Those chosen, ``[P, C]`` (eqs 18, 19).
        feature_mean, feature_var: The population's, ``[P]``.
        inverse_m, updates: The population's ``1/m`` and counters, for ``known`` positions.
        own_inverse_m: The input's, a number or under a mask ``[P]``, for positions that saw no mini-batch.
        MEAN_F, VAR_F: Take the feature mean, the feature deviation from the population.
    """
    NARROW: tl.constexpr = x.dtype.element_ty.primitive_bitwidth < 32
    p, ns, cs = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BN), tl.arange(0, BC)
    first = tl.program_id(1) * run
    last = tl.minimum(N, first + run)
    g = tiles.parameter(gamma, cs, C, 1.0, BC)
    b = tiles.parameter(beta, cs, C, 0.0, BC)
    q = p  # where the statistics of a position are
    if POOLED:
        q = p * 0
    if MASKED:
        own_inverse_m = tl.load(own_inverse_m + q, mask=p < P, other=1.0)
    seen = tl.load(updates + 4 * known + q, mask=p < P, other=0) > 0
    w_B, w_F = tiles.weights(
        tl.where(seen, tl.load(inverse_m + q, mask=p < P, other=1.0), own_inverse_m), mix_eps, scale
    )
    column, in_column = q.to(tl.int64)[:, None] * C + cs[None, :], (p < P)[:, None] & (cs < C)[None, :]
    mean_B = tl.load(batch_mean + column, mask=in_column, other=0.0)
    s_B = w_B[:, None] * g * tl.rsqrt(tl.load(batch_var + column, mask=in_column, other=1.0) + eps)
    base = p.to(tl.int64)[None, :, None] * stride_p + cs[None, None, :] * stride_c
    for start in range(first, last, BN):
        n = start + ns
        real = tiles.real_entries(n, p, cs, last, P, C, hidden, N, MASKED)
        at = base + n.to(tl.int64)[:, None, None] * stride_n
        v = tiles.load(x + at, real, EVEN)
        if MEAN_F:
            mean_F = tl.load(feature_mean + q, mask=p < P, other=0.0)[None, :] + tl.zeros([BN, BP], tl.float32)
        else:
            mean_F = tl.sum(v, 2) * (1.0 / C)  # eq 20
        if VAR_F:
            var_F = tl.load(feature_var + q, mask=p < P, other=1.0)[None, :] + tl.zeros([BN, BP], tl.float32)
        else:  # around the mean that was chosen
            u = v - mean_F[:, :, None]
            if not EVEN:
                u = tl.where(real, u, 0.0)
            var_F = tl.sum(u * u, 2) * (1.0 / C)  # eq 21
        s_F = w_F[None, :] * tl.rsqrt(var_F + eps)
        out = tiles.transform(v, v - mean_B[None, :, :], mean_B, s_B, mean_F, s_F, g, b, NARROW)
        if MASKED:
            out = tl.where(real, out, 0.0)
            real = tiles.real_entries(n, p, cs, last, P, C, hidden, N, False)
        tiles.store(y + at, out, real, EVEN)
