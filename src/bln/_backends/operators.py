"""Both forms in plain torch operators, for any device, type, mask, compiler and function transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import formula
from .._masks import clamp_count, count, hide
from .._spec import Spec
from ..config import StatisticsConfig
from ..formula import Moments, Statistics
from . import coefficients

Recall = Callable[[Statistics], Statistics]
"""A function that joins the statistics of a request with those of earlier ones."""


def train(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec
) -> tuple[Tensor, Statistics]:
    """Normalize ``x``, float32 or float64, by its own statistics, and return them, detached."""
    if spec.coefficients and mask is None and coefficients.is_plain_cpu(x):
        y, *s = coefficients.Train.apply(x, gamma, beta, channel_dim, spec)  # type: ignore[no-untyped-call]
        return y, Statistics(*[*s, x.new_full((), 1 / len(x))])
    return normalize(x, gamma, beta, mask, channel_dim, spec)


def normalize(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mask: Tensor | None, channel_dim: int, spec: Spec,
    population: Statistics | None = None, config: StatisticsConfig | None = None, recall: Recall | None = None,
) -> tuple[Tensor, Statistics]:  # fmt: skip
    """Normalize ``x``, float32 or float64, by its own statistics, or by a configuration's; return them, detached."""
    rows = hide(x, mask, channel_dim).movedim(channel_dim, -1)
    s = current(rows, mask, spec, config)
    if population is not None and config is not None:
        s = recall(s) if recall is not None and config.uses_batch else s
        s = formula.choose(config, s, population, torch.where)
    y = formula.normalize(torch, rows, s, gamma, beta, mask, spec).movedim(-1, channel_dim)
    return y, Statistics(*(value.detach() for value in s))


def current(rows: Tensor, mask: Tensor | None, spec: Spec, config: StatisticsConfig | None = None) -> Statistics:
    """Measure features-last ``rows`` whose hidden entries are 0 by eqs 10-13; only what ``config`` asks for."""
    m = clamp_count(count(rows.shape[:-1], mask, spec.per_position)[0])
    inverse_m = 1 / m.to(rows.dtype) if isinstance(m, Tensor) else rows.new_full((), 1 / m)
    real = None if mask is None else mask[..., None].to(rows.dtype)
    of_batch, of_features = config is None or config.uses_batch, config is None or config.uses_features
    batch: Any = None, None
    features: Any = None, None
    moments: Any = None
    if (of_batch and not spec.per_position) or (of_features and spec.groups is not None):
        moments = coefficients.measure(rows, real)
    if of_batch:
        batch = formula.batch_statistics(torch, Moments(rows, 0.0, real) if spec.per_position else moments)
    if of_features:
        features = feature_statistics(rows, moments, spec.groups)
    return Statistics(*[*batch, *features, inverse_m])


def feature_statistics(rows: Tensor, moments: Any, groups: int | None) -> tuple[Tensor, Tensor]:
    """Return feature statistics (eqs 12, 13) whose bits do not depend on the mini-batch.

    Torch sums each of several contiguous rows in one order. It splits a single row over threads, so that is doubled.
    """
    pair = not torch.compiler.is_compiling() and rows.shape[0] == 1
    if groups is None:
        mean, var = formula.over_features(torch, torch.cat([rows, rows]) if pair else rows.contiguous())
    else:
        mean, var = (torch.cat([v, v]) for v in moments[:2]) if pair else moments[:2]
        mean, var = formula.feature_statistics(torch, Moments(mean, var, None), groups)
    return (mean[:1], var[:1]) if pair else (mean, var)
