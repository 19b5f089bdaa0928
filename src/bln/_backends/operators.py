"""Both forms in plain torch operators, for any device, type, mask, compiler and function transform."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import formula
from .._masks import clamp_count, count, hide
from .._spec import Spec
from ..config import StatisticsConfig
from ..formula import Statistics
from . import coefficients

Recall = Callable[[Statistics], Statistics]
"""Joins the mini-batch's statistics with those of earlier ones, at inference."""


def train(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec
) -> tuple[Tensor, Statistics]:
    """Normalize ``x``, float32 or float64, by its own statistics, and return them, detached."""
    if spec.coefficients and mask is None and coefficients.is_plain_cpu(x):
        y, *s = coefficients.Train.apply(x, gamma, beta, channel_dim, spec)  # type: ignore[no-untyped-call]
        return y, Statistics(*s)
    return normalize(x, gamma, beta, mask, channel_dim, spec)


def normalize(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    population: Statistics | None = None, config: StatisticsConfig | None = None, recall: Recall | None = None,
) -> tuple[Tensor, Statistics]:  # fmt: skip
    """Normalize ``x``, float32 or float64, by its own statistics, or by a configuration's; return them, detached."""
    x = hide(x, mask, channel_dim)
    if spec.coefficients:
        if config is None or config.uses_batch or config.uses_features:
            own = coefficients.statistics(coefficients.measure(x, mask, channel_dim), spec)
        else:
            own = Statistics(*[None] * 5)
    else:
        x = x.movedim(channel_dim, -1)
        own = current(x, mask, spec, config)
    if recall is not None and config is not None and config.uses_batch:
        own = recall(own)
    s = own if population is None or config is None else formula.choose(config, own, population, torch.where)
    if spec.coefficients:
        y = coefficients.apply(x, s, gamma, beta, mask, channel_dim, spec)
    else:
        y = formula.transform(x, s, gamma, beta, spec=spec, xp=torch)
        y = hide(y.movedim(-1, channel_dim), mask, channel_dim)
    return y, Statistics(*(value.detach() for value in s))


def current(rows: Tensor, mask: Tensor | None, spec: Spec, config: StatisticsConfig | None = None) -> Statistics:
    """Eqs 10-13, of features-last ``rows`` whose hidden entries are 0; only what ``config`` asks for."""
    m, entries = (clamp_count(c) for c in count(rows.shape[:-1], mask, spec.per_position))
    batch_mean = batch_var = feature_mean = feature_var = None

    if config is None or config.uses_batch:
        over = (0,) if spec.per_position else tuple(range(rows.dim() - 1))
        divisor = entries[..., None] if isinstance(entries, Tensor) else entries
        batch_mean = rows.sum(over) / divisor
        centred = hide(rows - batch_mean, mask, -1)
        batch_var = centred.square().sum(over) / divisor

    if config is None or config.uses_features:
        feature_mean, feature_var = _features(rows, mask, spec)

    inverse_m = 1 / m.to(rows.dtype) if isinstance(m, Tensor) else rows.new_full((), 1 / m)
    return Statistics(batch_mean, batch_var, feature_mean, feature_var, inverse_m)


def _features(rows: Tensor, mask: Tensor | None, spec: Spec) -> tuple[Tensor, Tensor]:
    """Eqs 12, 13: over the features of each position, or over groups of features and all positions."""
    if spec.groups is not None:
        return coefficients.feature_statistics(coefficients.measure(rows, mask, rows.dim() - 1), spec.groups)
    # A row must give the same bits in any mini-batch. Torch sums rows that lie in memory one by one, each in the same
    # order. A lone row it splits over threads, so that one gets company.
    lone = rows.numel() == rows.shape[-1]
    rows = torch.cat([rows, rows]) if lone else rows.contiguous()
    mean = rows.mean(-1, keepdim=True)
    var = (rows - mean).square().mean(-1)
    mean = mean.squeeze(-1)
    return (mean[:1], var[:1]) if lone else (mean, var)
