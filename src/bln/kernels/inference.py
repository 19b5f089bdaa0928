"""Inference: Algorithm 2, batch statistics being the population's or those of ``forward``'s first sweep.

Each row is normalized by itself, and summed in an order that does not depend on the number of samples: the same bits in
any company. The derivative, seldom asked for, goes through the plain formula.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import formula
from .._autograd import differentiate
from .._spec import Spec
from ..config import CURRENT, POPULATION, StatisticsConfig
from ..formula import Statistics
from ..functional import current
from . import choices, launch, reductions, tiles
from .slabs import (
    Entries,
    Options,
    Slabs,
    as_it_came,
    chain,
    choose,
    features_last,
    given,
    on_its_device,
    options,
    transform,
    turned,
)
from .training import measure, unite

if TYPE_CHECKING:
    from ..population import Population


@on_its_device
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
    slabs = Slabs.of(x, channel_dim, per_position, training=False)
    if slabs is None:
        y = infer(
            features_last(x, channel_dim), gamma, beta, mask, channel_dim=x.dim() - 1, per_position=per_position,
            eps=eps, mix_eps=mix_eps, dim_scale=dim_scale, kept=kept, config=config,
        )  # fmt: skip
        return as_it_came(y, x, channel_dim)
    left = slabs.entries(mask, per_position)
    numbers = options(slabs.c, eps, mix_eps, dim_scale, x.shape[0])
    if not set(config.priors[2:]) <= {POPULATION, CURRENT}:  # the kernels take one or the other for each sample
        return _plain_inference(x, gamma, beta, left, slabs, channel_dim, numbers, kept, config)
    normalized: Tensor = _Infer.apply(  # type: ignore[no-untyped-call]
        x, gamma, beta, left, slabs, channel_dim, numbers, kept, config
    )
    return normalized


class _Infer(torch.autograd.Function):
    """Its derivative goes through the plain formula."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        left: Entries | None,
        slabs: Slabs,
        channel_dim: int,
        numbers: Options,
        kept: Population,
        config: StatisticsConfig,
    ) -> Tensor:
        n, p, c, _, pooled = slabs
        y = torch.empty_like(x)
        batch_mean, batch_var = _batch(x, left, slabs, numbers, kept, config)
        chosen = choices.inference(given(slabs, x.element_size(), x.device, left is not None))
        turn = chosen.turned and not pooled
        united = chosen.laps > 1 and not (config.feature_mean and config.feature_std)
        shares = _shares_of(x, slabs) if united else None
        if turn:
            batch_mean, batch_var = turned(batch_mean[None], batch_var[None], aside=united)
        rows = None if shares is None else _united(shares, slabs, chosen)
        hidden, _, own = left or (None, None, numbers.inverse_m)
        _normalize[(chosen.blocks * chosen.splits,)](
            x, y, hidden, gamma, beta, batch_mean, batch_var, kept.feature_mean, kept.feature_var, kept.inverse_m,
            kept.updates, own, rows, kept.inverse_m.numel(), n, *chosen.extents(p, c), chosen.run, chosen.splits,
            numbers.mix_eps, numbers.scale, numbers.eps, MEAN_F=config.feature_mean, VAR_F=config.feature_std,
            SWAPPED=chosen.swapped, TURNED=turn, MASKED=left is not None, POOLED=pooled, **chosen.in_laps,
            **(chain(x.device).after if united else {"CHAINED": False}), **_unfused(chosen),
        )  # fmt: skip
        ctx.rest = left, slabs, channel_dim, numbers, kept, config
        ctx.save_for_backward(x, gamma, beta, *kept.buffers())  # so that a change of the population is noticed
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, *_ = ctx.saved_tensors
        return *differentiate(_plain_inference, (x, gamma, beta), ctx, dy), *[None] * 6


def _unfused(chosen: launch.Launch) -> dict[str, Any]:
    """Constants of a launch, for the same bits however it was compiled."""
    return {**chosen.constants, "enable_fp_fusion": False}


def _shares_of(x: Tensor, slabs: Slabs) -> Tensor:
    """What laps have of the statistics of rows."""
    n, p, c = slabs[:3]
    chosen = choices.shares(given(slabs, x.element_size(), x.device, False))
    shares = torch.empty(2 * n * p * chosen.laps, dtype=torch.float32, device=x.device)
    _shares[(chosen.blocks * chosen.splits,)](
        x, shares, n, *chosen.extents(p, c), chosen.run, chosen.splits, **chosen.in_laps, **chain(x.device).begin,
        **_unfused(chosen),
    )  # fmt: skip
    return shares


def _united(shares: Tensor, slabs: Slabs, chosen: launch.Launch) -> Tensor:
    """Statistics of rows, as pairs, of those shares."""
    n, p = slabs[:2]
    rows = torch.empty(2 * n * p, dtype=torch.float32, device=shares.device)
    unite(shares, rows, None, n, p, 0, chosen)
    return rows


def _batch(
    x: Tensor, left: Entries | None, slabs: Slabs, numbers: Options, kept: Population, config: StatisticsConfig
) -> tuple[Tensor, Tensor]:
    """Eqs 18, 19, ``[P, C]``."""
    _, p, c, across, pooled = slabs
    q = 1 if pooled else p
    mean, var = kept.batch_mean.view(-1, c)[:q], kept.batch_var.view(-1, c)[:q]
    if config.uses_batch:
        chosen = choose(slabs, x.element_size(), x.device, left is not None, False, hold=False)
        joined, _ = measure(x, None, left, slabs, numbers, chosen, most=1)
        own_mean, square, real, _ = torch.split(joined, [q * c, q * c, q, 2 * q])
        shape = (c, q) if across else (q, c)
        own_mean, square = (t.view(shape).T if across else t.view(shape) for t in (own_mean, square))
        inverse_m = own_mean.new_full((), numbers.inverse_m) if left is None else left.inverse_m
        own = Statistics(own_mean, square / real.clamp(min=1)[:, None], None, None, inverse_m)
        batch_only = StatisticsConfig(config.batch_mean, config.batch_std, True, True)
        mean, var, *_ = formula.choose(batch_only, own, Statistics(mean, var, None, None, None))
    return mean.contiguous(), var.contiguous()


def _plain_inference(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    left: Entries | None,
    slabs: Slabs,
    channel_dim: int,
    numbers: Options,
    kept: Population,
    config: StatisticsConfig,
) -> Tensor:
    """The formula, in float32."""
    rows, mask = slabs.rows(x, channel_dim), None
    if left is not None:
        mask = left.hidden == 0
        rows = torch.where(mask[..., None], rows, 0)
    p, c = slabs.p, slabs.c
    seen = kept.updates.view(5, -1)[4, :p] > 0
    own = numbers.inverse_m if left is None else left.inverse_m
    population = Statistics(
        kept.batch_mean.view(-1, c)[:p],
        kept.batch_var.view(-1, c)[:p],
        kept.feature_mean.view(-1)[:p],
        kept.feature_var.view(-1)[:p],
        torch.where(seen, kept.inverse_m.view(-1)[:p], own),
    )
    found = current(rows, mask, Spec(per_position=not slabs.pooled), config)
    y = transform(rows, formula.choose(config, found, population), gamma, beta, numbers)
    return slabs.restore(y if mask is None else torch.where(mask[..., None], y, 0), x, channel_dim)


@triton.jit(do_not_specialize=["N", "P", "C", "run", "splits"])
def _shares(
    x, rows, N, P, C, run, splits,
    TILE: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr,
    LONG: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, FEATURES: tl.constexpr, STAGES: tl.constexpr,
    LAPS: tl.constexpr, TOUCHED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Of rows, the shares that laps have in their statistics: see ``forward``."""
    tiles.begin_next(CHAINED)
    ns, ps, c, _ = tiles.indices(TILE, ACROSS, SIDE)
    P, C = tiles.sides(P, C, ACROSS, SIDE)
    positions = tiles.positions(P, SIDE, LAPS, TOUCHED)
    p = tiles.position(tl.program_id(0) // splits, P, positions, BP, ACROSS, SIDE, EVEN, LAPS, TOUCHED) + ps
    first, last, _ = tiles.samples_of(tl.program_id(0) % splits, splits, run, N, BN, LONG)
    at, row = tiles.offset(ns, p, c, P, C, ACROSS, LONG), tiles.row_offset(ns, p, N, P, ACROSS, LONG)
    step, row_step = P.to(tl.int64) * C, tiles.row_stride(P, ACROSS)
    for start in tl.range(first, last, BN, num_stages=STAGES):
        in_row = tiles.real_rows(start + ns, p, last, P, None, p, P, EVEN, False)
        real = tiles.real_values(in_row, c, C, FULL, FEATURES)
        v = tiles.fetch(x + start * step + at, real, FULL).to(tl.float32)
        mean, var = reductions.feature_statistics(v, real, C, TILE, ACROSS, SIDE, FEATURES)
        tiles.store_pair(rows + start * row_step, row, mean, var, in_row, EVEN)


@triton.jit(do_not_specialize=["N", "P", "C", "run", "splits", "known"])
def _normalize(
    x, y, hidden, gamma, beta, batch_mean, batch_var, feature_mean, feature_var, inverse_m, updates, own_inverse_m,
    rows, known, N, P, C, run, splits, mix_eps, scale, eps, MEAN_F: tl.constexpr, VAR_F: tl.constexpr,
    TILE: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr,
    LONG: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, FEATURES: tl.constexpr, STAGES: tl.constexpr,
    SWAPPED: tl.constexpr, TURNED: tl.constexpr, MASKED: tl.constexpr, POOLED: tl.constexpr, LAPS: tl.constexpr,
    TOUCHED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Eqs 20-25 of a run of samples of some positions.

    Args:
        batch_mean, batch_var: Those chosen, ``[P, C]``, or ``TURNED``, ``[C, P]`` (eqs 18, 19).
        feature_mean, feature_var: The population's, ``[P]``.
        inverse_m, updates: The population's ``1/m`` and counters, for ``known`` positions.
        own_inverse_m: The input's, a number or under a mask ``[P]``, for positions that saw no mini-batch.
        rows: In several ``LAPS``, pairs of the mean and the variance of each row.
        MEAN_F, VAR_F: Take the feature mean, the feature deviation from the population.
        SWAPPED: The rows of a tile are positions, not samples.
    """
    tiles.wait_for_previous(CHAINED)
    SHORT: tl.constexpr = x.dtype.element_ty.primitive_bitwidth < 32
    ns, ps, c, folded = tiles.indices(TILE, ACROSS, SIDE)
    P, C = tiles.sides(P, C, ACROSS, SIDE)
    if SWAPPED:
        ns, ps = ps, ns
    positions = tiles.positions(P, SIDE, LAPS, TOUCHED)
    first_p = tiles.position(tl.program_id(0) // splits, P, positions, BP, ACROSS, SIDE, EVEN, LAPS, TOUCHED)
    p = first_p + ps
    row = tiles.row_position(p, first_p, P, positions, LAPS, TOUCHED)
    first, last, _ = tiles.samples_of(tl.program_id(0) % splits, splits, run, N, BN, LONG)
    at, row_at = tiles.offset(ns, p, c, P, C, ACROSS, LONG), tiles.row_offset(ns, row, N, positions, ACROSS, LONG)
    step, row_step = P.to(tl.int64) * C, tiles.row_stride(positions, ACROSS)
    g = tiles.of_features(gamma, first_p, p, folded, P, C, LAPS, TOUCHED, 1.0)
    b = tiles.of_features(beta, first_p, p, folded, P, C, LAPS, TOUCHED, 0.0)
    q, Q = row, positions  # where the statistics of a position are, and for how many there are some
    if POOLED:
        q, Q = tl.zeros([1, 1, 1, 1], tl.int32), P * 0 + 1
    if MASKED:
        own_inverse_m = tl.load(own_inverse_m + q, mask=q < Q, other=1.0)
    seen = tl.load(updates + 4 * known + q, mask=q < Q, other=0) > 0
    w_B, w_F = tiles.weights(
        tl.where(seen, tl.load(inverse_m + q, mask=q < Q, other=1.0), own_inverse_m), mix_eps, scale
    )
    if POOLED and LAPS > 1:
        mean_B = tiles.of_features(batch_mean, first_p, p, folded, P, C, LAPS, TOUCHED, 0.0)
        var_B = tiles.of_features(batch_var, first_p, p, folded, P, C, LAPS, TOUCHED, 0.0)
    else:
        column, in_column = tiles.column(p, folded, P, C, TURNED, POOLED)
        mean_B = tl.load(batch_mean + column, mask=in_column, other=0.0)
        var_B = tl.load(batch_var + column, mask=in_column, other=1.0)
    s_B = w_B * g * tl.rsqrt(var_B + eps)
    if MEAN_F:
        mean_F = tl.load(feature_mean + q, mask=q < Q, other=0.0)
    if VAR_F:
        var_F = tl.load(feature_var + q, mask=q < Q, other=1.0)
    for start in tl.range(first, last, BN, num_stages=STAGES):
        n = start + ns
        in_row = tiles.real_rows(n, p, last, P, hidden, row, positions, EVEN, MASKED)
        real = tiles.real_values(in_row, c, C, FULL, FEATURES)
        if rows is not None:
            mean, var = tiles.load_pair(rows + start * row_step, row_at, in_row, EVEN)
        v = tiles.fetch(x + start * step + at, real, FULL).to(tl.float32)
        if rows is not None:
            if not MEAN_F:
                mean_F = mean
            if not VAR_F:  # around the mean that was chosen
                var_F = var + (mean - mean_F) * (mean - mean_F)
        elif not (MEAN_F or VAR_F):
            mean_F, var_F = reductions.feature_statistics(v, real, C, TILE, ACROSS, SIDE, FEATURES)
        elif not MEAN_F:
            mean_F = reductions.over_features(v, TILE, ACROSS, SIDE) * (1.0 / C)  # eq 20
        elif not VAR_F:  # around the mean that was chosen
            u = tl.where(real, v - mean_F, 0.0)
            var_F = reductions.over_features(u * u, TILE, ACROSS, SIDE) * (1.0 / C)  # eq 21
        out = tiles.transform(v, mean_B, s_B, mean_F, w_F * tl.rsqrt(var_F + eps), g, b, SHORT)
        if MASKED:
            out = tl.where(in_row, out, 0.0)
        there = tiles.real_values(
            tiles.real_rows(n, p, last, P, None, row, positions, EVEN, False), c, C, FULL, FEATURES
        )
        tiles.put(y + start * step + at, out, there, FULL)
