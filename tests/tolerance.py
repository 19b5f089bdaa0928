"""How far from float64 a result may be: the type's epsilon times the problem's conditioning, value by value.

``(x - mean) / deviation`` rounds the mean, and the products and sums on the way, by ``epsilon * |x|`` each, so the
quotient moves by ``epsilon * |x| / deviation``: a large mean over a small deviation is ill-conditioned whoever computes
it. A gradient carries one deviation more, and two factors that moved. Sums of n terms are taken pairwise, in vector
lanes or in double, so that their error grows as log n at most; ROUNDINGS bounds that and the number of roundings that
meet in a value.
"""

from __future__ import annotations

import numpy as np
import torch

import oracle

ROUNDINGS = 16


def epsilon(dtype: torch.dtype) -> float:
    """Of the arithmetic: low precision is computed in float32."""
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def _parts(x, y, var_B, var_F, inverse_m, *, eps, mix_eps, dim_scale, groups=None):
    """|weight| and 1/deviation of the batch and of the feature part, and the largest input."""
    d = y.shape[-1]
    scale = d**-0.5 if dim_scale else 1.0
    inverse_m = np.asarray(inverse_m, np.float64)[..., None]
    w_B, w_F = np.abs(1 - inverse_m - mix_eps) * scale, np.abs(inverse_m - mix_eps) * scale
    r_B, r_F = 1 / np.sqrt(var_B + eps), 1 / np.sqrt(oracle.at_features(np.asarray(var_F), y, groups) + eps)
    x = np.asarray(x, np.float64)
    return w_B, r_B, w_F, r_F, np.abs(x[np.isfinite(x)]).max()


def output(x, y, var_B, var_F, inverse_m, gamma, beta, dtype, **options):
    """A bound for each value of ``y``, an array ``(N, *positions, d)``."""
    w_B, r_B, w_F, r_F, size = _parts(x, y, var_B, var_F, inverse_m, **options)
    moved = np.abs(gamma) * (w_B * (1 + 2 * size * r_B) + w_F * (1 + 2 * size * r_F)) + np.abs(beta)
    least = torch.finfo(dtype).smallest_normal  # below it values are spaced as at it
    return ROUNDINGS * epsilon(dtype) * moved + torch.finfo(dtype).eps * np.maximum(np.abs(y), least)


def gradient(x, dx, dy, var_B, var_F, inverse_m, gamma, dtype, **options):
    """Bounds for the gradients of x, gamma and beta."""
    w_B, r_B, w_F, r_F, size = _parts(x, dx, var_B, var_F, inverse_m, **options)
    largest = np.abs(dy * gamma).max()
    moved = w_B * r_B * (1 + 2 * size * r_B) ** 2 + w_F * r_F * (1 + 2 * size * r_F) ** 2
    for_x = ROUNDINGS * epsilon(dtype) * largest * moved + torch.finfo(dtype).eps * np.abs(dx)
    rows = tuple(range(dx.ndim - 1))
    moved = np.abs(dy) * (w_B * (1 + 2 * size * r_B) + w_F * (1 + 2 * size * r_F))
    return for_x, ROUNDINGS * epsilon(dtype) * moved.sum(rows), ROUNDINGS * epsilon(dtype) * np.abs(dy).sum(rows)


def close(actual, expected, bound, what: str) -> None:
    """Assert ``|actual - expected| <= bound`` everywhere, and say where and by how much it is not."""
    actual = actual.detach().double().cpu().numpy() if isinstance(actual, torch.Tensor) else np.asarray(actual)
    assert actual.shape == np.shape(expected), f"{what}: shape {actual.shape}, expected {np.shape(expected)}"
    error = np.abs(actual - expected)
    excess = error / np.broadcast_to(bound, error.shape)
    assert not np.isnan(error).any(), f"{what}: NaN"
    worst = np.unravel_index(excess.argmax(), excess.shape)
    assert excess[worst] <= 1, f"{what}: off by {error[worst]:.3g} at {worst}, {excess[worst]:.3g} times the bound"
