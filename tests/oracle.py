"""Batch Layer Normalization in float64 NumPy, written from the paper's equations alone.

Everything is features last: ``x`` is ``(N, *positions, d)``, ``mask`` is ``(N, *positions)``. Every path of the library
is compared with this, so it imports nothing from it.
"""

from __future__ import annotations

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


def measure(x, mask=None, per_position=True) -> MiniBatch:
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
    clean = np.where(real[..., None], x, 0.0)
    mean_F = clean.sum(-1) / d  # eq 12
    var_F = ((clean - mean_F[..., None]) ** 2).sum(-1) / d  # eq 13
    return MiniBatch(mean_B, var_B, mean_F, var_F, m, entries)


def normalize(x, mean_B, var_B, mean_F, var_F, inverse_m, gamma=1.0, beta=0.0, *, eps, mix_eps, dim_scale=True):
    d = x.shape[-1]
    x_B = (x - mean_B) / np.sqrt(var_B + eps)  # eq 14
    x_F = (x - mean_F[..., None]) / np.sqrt(var_F[..., None] + eps)  # eq 15
    w_B = 1 - (np.asarray(inverse_m)[..., None] + mix_eps)
    w_F = np.asarray(inverse_m)[..., None] - mix_eps
    z = (w_B * x_B + w_F * x_F) / (np.sqrt(d) if dim_scale else 1.0)  # eq 16
    return gamma * z + beta  # eq 17


def train(x, gamma=1.0, beta=0.0, *, mask=None, per_position=True, eps=1e-4, mix_eps=1e-4, dim_scale=True):
    """Algorithm 1."""
    x = np.asarray(x, np.float64)
    s = measure(x, mask, per_position)
    clean = x if mask is None else np.where(np.asarray(mask)[..., None], x, 0.0)
    y = normalize(
        clean, s.mean_B, s.var_B, s.mean_F, s.var_F, 1 / np.maximum(s.m, 1), gamma, beta,
        eps=eps, mix_eps=mix_eps, dim_scale=dim_scale,
    )  # fmt: skip
    return y if mask is None else np.where(np.asarray(mask)[..., None], y, 0.0)


def train_backward(x, dy, gamma=1.0, *, mask=None, per_position=True, eps=1e-4, mix_eps=1e-4, dim_scale=True):
    """The chain rule through Algorithm 1: gradients for x, gamma and beta."""
    x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    d = x.shape[-1]
    s = measure(x, mask, per_position)
    real = np.ones(x.shape[:-1], bool) if mask is None else np.asarray(mask, bool)
    x = np.where(real[..., None], x, 0.0)
    dy = np.where(real[..., None], dy, 0.0)
    scale = 1 / np.sqrt(d) if dim_scale else 1.0
    inverse_m = 1 / np.maximum(s.m, 1)
    w_B, w_F = scale * (1 - inverse_m - mix_eps)[..., None], scale * (inverse_m - mix_eps)[..., None]
    r_B, r_F = 1 / np.sqrt(s.var_B + eps), 1 / np.sqrt(s.var_F + eps)[..., None]
    x_B = np.where(real[..., None], (x - s.mean_B) * r_B, 0.0)
    x_F = (x - s.mean_F[..., None]) * r_F
    z = w_B * x_B + w_F * x_F
    g = dy * gamma
    over = 0 if per_position else tuple(range(x.ndim - 1))
    count = np.maximum(s.entries, 1)[..., None]

    def average(a):
        return a.sum(over, keepdims=True).reshape(s.mean_B.shape) / count

    dx = w_B * r_B * (g - average(g) - x_B * average(g * x_B))
    dx += w_F * r_F * (g - g.mean(-1, keepdims=True) - x_F * (g * x_F).mean(-1, keepdims=True))
    rows = tuple(range(x.ndim - 1))
    return np.where(real[..., None], dx, 0.0), (dy * z).sum(rows), dy.sum(rows)


class Population:
    """The five population statistics and their averages over mini-batches."""

    def __init__(self, positions, d):
        self.mean_B, self.var_B = np.zeros((*positions, d)), np.ones((*positions, d))
        self.mean_F, self.var_F = np.zeros(positions), np.ones(positions)
        self.inverse_m = np.zeros(positions)
        self.updates, self.samples = np.zeros(positions), np.zeros(positions)
        self.var_updates, self.var_samples = np.zeros(positions), np.zeros(positions)

    def update(self, x, momentum, mask=None, per_position=True):
        """Let a mini-batch in, position by position."""
        s = measure(x, mask, per_position)
        real = np.ones(s.mean_F.shape, bool) if mask is None else np.asarray(mask, bool)
        for p in np.ndindex(s.m.shape):
            m, entries = s.m[p], s.entries[p]
            if m == 0:
                continue
            at = (slice(None), *p)
            self.updates[p] += 1
            self.samples[p] += m
            f = m / self.samples[p] if momentum is None else max(momentum, 1 / self.updates[p])
            new_mean_F = s.mean_F[at][real[at]].mean()
            new_var_F = s.var_F[at][real[at]].mean() * (m / (m - 1) if m > 1 else 1)
            self.mean_B[p] += f * (s.mean_B[p] - self.mean_B[p])
            self.mean_F[p] += f * (new_mean_F - self.mean_F[p])
            self.var_F[p] += f * (new_var_F - self.var_F[p])
            self.inverse_m[p] += f * (1 / m - self.inverse_m[p])
            if entries > 1:
                self.var_updates[p] += 1
                self.var_samples[p] += m
                f = m / self.var_samples[p] if momentum is None else max(momentum, 1 / self.var_updates[p])
                self.var_B[p] += f * (s.var_B[p] * entries / (entries - 1) - self.var_B[p])

    def infer(self, x, config, gamma=1.0, beta=0.0, *, mask=None, per_position=True, eps, mix_eps, dim_scale=True):
        """Algorithm 2: eqs 18-25."""
        x = np.asarray(x, np.float64)
        s = measure(x, mask, per_position)
        if mask is not None:
            x = np.where(np.asarray(mask)[..., None], x, 0.0)
        E_B, Std_B, E_F, Std_F = (letter == "T" for letter in config)
        mean_B = self.mean_B if E_B else s.mean_B  # eq 18
        var_B = self.var_B if Std_B else s.var_B + (s.mean_B - mean_B) ** 2  # eq 19: around the chosen mean
        mean_F = self.mean_F if E_F else s.mean_F  # eq 20
        var_F = self.var_F if Std_F else s.var_F + (s.mean_F - mean_F) ** 2  # eq 21
        inverse_m = np.where(self.updates > 0, self.inverse_m, 1 / np.maximum(s.m, 1))
        y = normalize(
            x, mean_B, var_B, mean_F, var_F, inverse_m, gamma, beta, eps=eps, mix_eps=mix_eps, dim_scale=dim_scale
        )
        return y if mask is None else np.where(np.asarray(mask)[..., None], y, 0.0)
