"""What the tests have ranks do together. Data is drawn with one seed on all ranks; each takes its part of it."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

import bln
import oracle
import tolerance

NAMES = {
    "batch_mean": "mean_B",
    "batch_var": "var_B",
    "feature_mean": "mean_F",
    "feature_var": "var_F",
    "inverse_m": "inverse_m",
}


def total(tensor: torch.Tensor) -> torch.Tensor:
    """Summed over ranks."""
    tensor = tensor.detach().clone()
    dist.all_reduce(tensor)
    return tensor


def assert_population(layer, expected: oracle.Population, size: float, roundings: float) -> None:
    """Statistics as the oracle's, to roundings of the input's size; counters exactly."""
    unit = roundings * torch.finfo(layer.population.batch_mean.dtype).eps
    bounds = {"batch_var": unit * (size**2 + 1), "feature_var": unit * (size**2 + 1), "inverse_m": unit}
    for name, theirs in NAMES.items():
        tolerance.close(getattr(layer.population, name), getattr(expected, theirs), bounds.get(name, unit * size), name)
    for row, name in enumerate(NAMES):
        updates, samples = ("var_updates", "var_samples") if name == "batch_var" else ("updates", "samples")
        assert (layer.population.updates[row].numpy() == getattr(expected, updates)).all(), f"updates of {name}"
        assert (layer.population.samples[row].numpy() == getattr(expected, samples)).all(), f"samples of {name}"


def against_the_oracle(
    seed: int,
    shares: list[list[int]],
    dtype: str,
    positions: list[int],
    channel_dim: int,
    per_position: bool,
    masked: bool,
    momentum: float | None,
    compiled: bool = False,
    affine: bool = True,
) -> None:
    """Mini-batches of unequal parts: outputs, gradients and population are those of one process with all samples."""
    torch.manual_seed(seed)
    kind, d = getattr(torch, dtype), 5
    wide = torch.promote_types(kind, torch.float32)
    layer = bln.BatchLayerNorm(
        d, channel_dim=channel_dim, per_position=per_position, momentum=momentum, affine=affine, process_group="world",
        dtype=wide,
    )  # fmt: skip
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    gamma, beta = (p.detach().double().numpy() for p in layer.parameters()) if affine else (1.0, 0.0)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    options = {"eps": 1e-4, "mix_eps": 1e-4, "dim_scale": True}
    expected = oracle.Population(tuple(positions) if per_position else (), d)
    largest = 1.0
    for parts in shares:
        shape = [sum(parts), *positions]
        mask = (torch.rand(shape) < 0.6) if masked else None
        if masked:
            mask.view(-1)[0] = True
        shape.insert(channel_dim if channel_dim > 0 else len(shape), d)
        x = (torch.randn(shape, dtype=torch.float64) * 2 + 3).to(kind)
        if masked:
            x = torch.where(mask.unsqueeze(channel_dim), x, float("nan"))
        dy = torch.randn(shape, dtype=torch.float64).to(kind)

        own = slice(sum(parts[: dist.get_rank()]), sum(parts[: dist.get_rank() + 1]))
        mine = x[own].clone().requires_grad_()
        layer.zero_grad()
        y = run(mine, *([mask[own]] if masked else []))
        assert y.dtype == kind
        assert y.shape == mine.shape
        y.backward(dy[own])

        rows, rows_dy = (t.movedim(channel_dim, -1).double().numpy() for t in (x, dy))
        real = None if mask is None else mask.numpy()
        clean = rows if mask is None else np.where(real[..., None], rows, 0.0)
        largest = max(largest, np.abs(clean).max())
        s = oracle.measure(rows, real, per_position)
        spread = s.var_B, s.var_F, 1 / np.maximum(s.m, 1)
        wanted = oracle.train(rows, gamma, beta, mask=real, per_position=per_position, **options)
        dx, dgamma, dbeta = oracle.train_backward(
            rows, rows_dy, gamma, mask=real, per_position=per_position, **options
        )
        bound = tolerance.output(rows, wanted, *spread, gamma, beta, kind, **options)
        if len(mine):
            tolerance.close(y.movedim(channel_dim, -1), wanted[own], bound[own], "y")
        for_x, for_gamma, for_beta = tolerance.gradient(rows, dx, rows_dy, *spread, gamma, kind, **options)
        if len(mine):
            tolerance.close(mine.grad.movedim(channel_dim, -1), dx[own], for_x[own], "dx")
        if affine:
            tolerance.close(total(layer.weight.grad), dgamma, for_gamma, "dgamma")
            tolerance.close(total(layer.bias.grad), dbeta, for_beta, "dbeta")
        expected.update(clean, momentum, real, per_position)
    assert_population(layer, expected, largest, tolerance.ROUNDINGS)
