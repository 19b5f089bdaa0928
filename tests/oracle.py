"""Batch Layer Normalization in float64 NumPy, written from the paper's equations alone.

Everything is features last: ``x`` is ``(N, *positions, d)``, ``mask`` is ``(N, *positions)``. Every path of the library
is compared with this, so it imports nothing from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

NAMES = {
    "batch_mean": "mean_B",
    "batch_var": "var_B",
    "feature_mean": "mean_F",
    "feature_var": "var_F",
    "inverse_m": "inverse_m",
}
"""The library's names of the five statistics, and those here."""


@dataclass
class MiniBatch:
    """Eqs 10-13 of a mini-batch, and how many samples and entries each position has."""

    mean_B: np.ndarray
    var_B: np.ndarray
    mean_F: np.ndarray
    var_F: np.ndarray
    m: np.ndarray
    entries: np.ndarray


def measure(x, mask=None, per_position=True, groups=None) -> MiniBatch:
    x = np.asarray(x, np.float64)
    n, *positions, d = x.shape
    real = np.ones((n, *positions), bool) if mask is None else np.asarray(mask, bool)
    shape = tuple(positions) if per_position else ()
    mean_B, var_B = np.zeros((*shape, d)), np.zeros((*shape, d))
    m, entries = np.zeros(shape, int), np.zeros(shape, int)
    for p in np.ndindex(shape):
        values = x[(slice(None), *p)][real[(slice(None), *p)]]  # (entries, d)
        entries[p] = len(values)
        m[p] = len(values) if per_position else real.reshape(n, -1).any(1).sum()
        if len(values):
            mean_B[p] = values.sum(0) / len(values)  # eq 10
            var_B[p] = ((values - mean_B[p]) ** 2).sum(0) / len(values)  # eq 11
    if groups is not None:
        mean_F, var_F = _grouped(x, real, groups)
        return MiniBatch(mean_B, var_B, mean_F, var_F, m, entries)
    clean = np.where(real[..., None], x, 0.0)
    mean_F = clean.sum(-1) / d  # eq 12
    var_F = ((clean - mean_F[..., None]) ** 2).sum(-1) / d  # eq 13
    return MiniBatch(mean_B, var_B, mean_F, var_F, m, entries)


def _grouped(x, real, groups):
    """Eqs 12, 13 of each sample, over a group of features and all its real positions: ``(N, groups)``."""
    n, d = len(x), x.shape[-1]
    mean_F, var_F = np.zeros((n, groups)), np.zeros((n, groups))
    for i in range(n):
        for g in range(groups):
            values = x[i].reshape(-1, d)[real[i].reshape(-1)][:, [k for k in range(d) if k // (d // groups) == g]]
            if values.size:
                mean_F[i, g] = values.sum() / values.size
                var_F[i, g] = ((values - mean_F[i, g]) ** 2).sum() / values.size
    return mean_F, var_F


def at_features(value, x, groups):
    """A feature statistic in a shape that meets ``x``: for each position, or for the features of each group."""
    if groups is None:
        return value[..., None]
    each = np.repeat(value, x.shape[-1] // groups, axis=-1)
    return each if each.ndim == 1 else each.reshape(len(each), *[1] * (x.ndim - 2), -1)


def normalize(
    x, mean_B, var_B, mean_F, var_F, inverse_m, gamma=1.0, beta=0.0, *, eps, mix_eps, dim_scale=True, groups=None
):
    d = x.shape[-1]
    mean_F, var_F = at_features(mean_F, x, groups), at_features(var_F, x, groups)
    x_B = (x - mean_B) / np.sqrt(var_B + eps)  # eq 14
    x_F = (x - mean_F) / np.sqrt(var_F + eps)  # eq 15
    w_B = 1 - (np.asarray(inverse_m)[..., None] + mix_eps)
    w_F = np.asarray(inverse_m)[..., None] - mix_eps
    z = (w_B * x_B + w_F * x_F) / (np.sqrt(d) if dim_scale else 1.0)  # eq 16
    return gamma * z + beta  # eq 17


def train(x, gamma=1.0, beta=0.0, *, mask=None, per_position=True, eps=1e-4, mix_eps=1e-4, dim_scale=True, groups=None):
    """Algorithm 1."""
    x = np.asarray(x, np.float64)
    s = measure(x, mask, per_position, groups)
    clean = x if mask is None else np.where(np.asarray(mask)[..., None], x, 0.0)
    y = normalize(
        clean, s.mean_B, s.var_B, s.mean_F, s.var_F, 1 / np.maximum(s.m, 1), gamma, beta,
        eps=eps, mix_eps=mix_eps, dim_scale=dim_scale, groups=groups,
    )  # fmt: skip
    return y if mask is None else np.where(np.asarray(mask)[..., None], y, 0.0)


def train_backward(
    x, dy, gamma=1.0, *, mask=None, per_position=True, eps=1e-4, mix_eps=1e-4, dim_scale=True, groups=None
):
    """The chain rule through Algorithm 1: gradients for x, gamma and beta."""
    x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    d = x.shape[-1]
    s = measure(x, mask, per_position, groups)
    real = np.ones(x.shape[:-1], bool) if mask is None else np.asarray(mask, bool)
    x = np.where(real[..., None], x, 0.0)
    dy = np.where(real[..., None], dy, 0.0)
    scale = 1 / np.sqrt(d) if dim_scale else 1.0
    inverse_m = 1 / np.maximum(s.m, 1)
    w_B, w_F = scale * (1 - inverse_m - mix_eps)[..., None], scale * (inverse_m - mix_eps)[..., None]
    mean_F, var_F = at_features(s.mean_F, x, groups), at_features(s.var_F, x, groups)
    r_B, r_F = 1 / np.sqrt(s.var_B + eps), 1 / np.sqrt(var_F + eps)
    x_B = np.where(real[..., None], (x - s.mean_B) * r_B, 0.0)
    x_F = np.where(real[..., None], (x - mean_F) * r_F, 0.0)
    z = w_B * x_B + w_F * x_F
    g = dy * gamma
    over = 0 if per_position else tuple(range(x.ndim - 1))
    count = np.maximum(s.entries, 1)[..., None]

    def average(a):
        return a.sum(over, keepdims=True).reshape(s.mean_B.shape) / count

    dx = w_B * r_B * (g - average(g) - x_B * average(g * x_B))

    def over_features(a):
        if groups is None:
            return a.mean(-1, keepdims=True)
        by_group = a.reshape(len(a), -1, groups, d // groups).sum((1, 3))  # of real entries: others are 0
        number = np.maximum(real.reshape(len(a), -1).sum(1), 1)[:, None] * (d // groups)
        return at_features(by_group / number, a, groups)

    # With groups w_F may differ between the positions a statistic is taken over.
    weighted = w_F * g
    dx += r_F * (weighted - over_features(weighted) - x_F * over_features(weighted * x_F))
    rows = tuple(range(x.ndim - 1))
    return np.where(real[..., None], dx, 0.0), (dy * z).sum(rows), dy.sum(rows)


def shrink(source, m, population, current):
    """The population's value under T, the current one under F, else their mean with ``k`` samples beside ``m``."""
    if source in ("T", "F"):
        return population if source == "T" else current
    share = float(source) / (float(source) + m)
    return share * population + (1 - share) * current


class Population:
    """The five population statistics and their averages over mini-batches."""

    def __init__(self, positions, d, groups=None):
        self.groups = groups
        self.mean_B, self.var_B = np.zeros((*positions, d)), np.ones((*positions, d))
        feature = positions if groups is None else (groups,)
        self.mean_F, self.var_F = np.zeros(feature), np.ones(feature)
        self.group_updates, self.group_samples = np.zeros(()), np.zeros(())
        self.inverse_m = np.zeros(positions)
        self.updates, self.samples = np.zeros(positions), np.zeros(positions)
        self.var_updates, self.var_samples = np.zeros(positions), np.zeros(positions)

    def update(self, x, momentum, mask=None, per_position=True):
        """Average with a mini-batch, position by position; grouped feature statistics have none."""
        s = measure(x, mask, per_position, self.groups)
        if self.groups is not None:
            present = np.ones(len(x), bool) if mask is None else np.asarray(mask).reshape(len(x), -1).any(1)
            m = present.sum()
            self.group_updates += 1
            self.group_samples += m
            f = m / self.group_samples if momentum is None else max(momentum, 1 / self.group_updates)
            self.mean_F += f * (s.mean_F[present].mean(0) - self.mean_F)
            self.var_F += f * (s.var_F[present].mean(0) * (m / (m - 1) if m > 1 else 1) - self.var_F)
        real = np.ones(np.shape(x)[:-1], bool) if mask is None else np.asarray(mask, bool)
        for p in np.ndindex(s.m.shape):
            m, entries = s.m[p], s.entries[p]
            if m == 0:
                continue
            at = (slice(None), *p)
            self.updates[p] += 1
            self.samples[p] += m
            f = m / self.samples[p] if momentum is None else max(momentum, 1 / self.updates[p])
            self.mean_B[p] += f * (s.mean_B[p] - self.mean_B[p])
            if self.groups is None:
                new_mean_F = s.mean_F[at][real[at]].mean()
                new_var_F = s.var_F[at][real[at]].mean() * (m / (m - 1) if m > 1 else 1)
                self.mean_F[p] += f * (new_mean_F - self.mean_F[p])
                self.var_F[p] += f * (new_var_F - self.var_F[p])
            self.inverse_m[p] += f * (1 / m - self.inverse_m[p])
            if entries > 1:
                self.var_updates[p] += 1
                self.var_samples[p] += m
                f = m / self.var_samples[p] if momentum is None else max(momentum, 1 / self.var_updates[p])
                self.var_B[p] += f * (s.var_B[p] * entries / (entries - 1) - self.var_B[p])

    def choose(self, s, config):
        """Eqs 18-21."""
        E_B, Std_B, E_F, Std_F = config.split() if " " in config else config
        m = s.m[..., None]
        mean_B = shrink(E_B, m, self.mean_B, s.mean_B)  # eq 18
        var_B = shrink(Std_B, m, self.var_B, s.var_B + (s.mean_B - mean_B) ** 2)  # eq 19: around the chosen mean
        mean_F = shrink(E_F, 1, self.mean_F, s.mean_F)  # eq 20
        var_F = shrink(Std_F, 1, self.var_F, s.var_F + (s.mean_F - mean_F) ** 2)  # eq 21
        return mean_B, var_B, mean_F, var_F

    def infer(
        self, x, config, gamma=1.0, beta=0.0, *, mask=None, per_position=True, eps, mix_eps, dim_scale=True, groups=None
    ):
        """Algorithm 2: eqs 18-25."""
        assert groups in (None, self.groups)
        x = np.asarray(x, np.float64)
        s = measure(x, mask, per_position, self.groups)
        if mask is not None:
            x = np.where(np.asarray(mask)[..., None], x, 0.0)
        mean_B, var_B, mean_F, var_F = self.choose(s, config)
        inverse_m = np.where(self.updates > 0, self.inverse_m, 1 / np.maximum(s.m, 1))
        y = normalize(
            x,
            mean_B,
            var_B,
            mean_F,
            var_F,
            inverse_m,
            gamma,
            beta,
            eps=eps,
            mix_eps=mix_eps,
            dim_scale=dim_scale,
            groups=self.groups,
        )
        return y if mask is None else np.where(np.asarray(mask)[..., None], y, 0.0)


def _normal(z):
    return np.vectorize(math.erf, otypes=[np.float64])(z / math.sqrt(2)) / 2 + 0.5


def _sigmoid(z):
    return np.exp(-np.logaddexp(0, -z))


ACTIVATIONS = {
    None: (lambda z: z, np.ones_like),
    "relu": (lambda z: np.maximum(z, 0.0), lambda z: (z > 0) * 1.0),
    "silu": (lambda z: z * _sigmoid(z), lambda z: _sigmoid(z) * (1 + z * (1 - _sigmoid(z)))),
    "gelu": (
        lambda z: z * _normal(z),
        lambda z: _normal(z) + z * np.exp(-z * z / 2) / math.sqrt(2 * math.pi),
    ),
}
"""What may follow the layer, and the derivative."""
