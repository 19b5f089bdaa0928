"""Hypothesis strategies: inputs of every rank, layout and type."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

import oracle

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Case:
    """An input in a user's layout, and all that normalizing it needs."""

    x: torch.Tensor
    mask: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    channel_dim: int
    per_position: bool
    eps: float
    mix_eps: float
    dim_scale: bool
    groups: int | None = None

    @property
    def rows(self) -> np.ndarray:
        """Features last, float64."""
        return self.x.detach().double().movedim(self.channel_dim, -1).numpy()

    @property
    def options(self) -> dict[str, float | bool | int | None]:
        return {"eps": self.eps, "mix_eps": self.mix_eps, "dim_scale": self.dim_scale, "groups": self.groups}

    @property
    def affine(self) -> tuple[np.ndarray | float, np.ndarray | float]:
        gamma = 1.0 if self.weight is None else self.weight.detach().double().numpy()
        return gamma, 0.0 if self.bias is None else self.bias.detach().double().numpy()

    @property
    def numpy_mask(self) -> np.ndarray | None:
        return None if self.mask is None else self.mask.numpy()

    def to_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.movedim(self.channel_dim, -1)


@st.composite
def cases(draw, dtypes=DTYPES, features=None, rank=None, masked=None, grouped=None):
    """A case with fresh numbers: shapes from 1 on, deviations and means over some orders of magnitude."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    n, d = draw(st.integers(1, 7)), features or draw(st.integers(1, 9))
    rank = draw(st.integers(0, 3)) if rank is None else rank
    positions = [draw(st.integers(1, 5)) for _ in range(rank)]
    channel_dim = draw(st.integers(1, len(positions) + 1))
    dtype = draw(st.sampled_from(dtypes))
    shape = [n, *positions]
    shape.insert(channel_dim, d)

    mean, deviation = draw(st.sampled_from([(0.0, 1.0), (3.0, 0.5), (-20.0, 4.0), (0.01, 0.02)]))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * deviation + mean
    x = _lay(x.to(dtype), draw(st.sampled_from(["contiguous", "features last", "strided", "flipped"])), channel_dim)

    def parameter():
        return torch.randn(d, generator=generator, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))

    mask = None
    if draw(st.booleans()) if masked is None else masked:
        mask = torch.rand([n, *positions], generator=generator) < draw(st.sampled_from([0.3, 0.8]))
        mask.view(-1)[draw(st.integers(0, mask.numel() - 1))] = True
        hidden = ~mask.unsqueeze(channel_dim).expand(shape)
        x = torch.where(hidden, torch.full_like(x, draw(st.sampled_from([0.0, float("nan"), float("inf")]))), x)
        mask = _lay(mask, draw(st.sampled_from(["contiguous", "strided", "flipped"])), 0)
    return Case(
        x=x,
        mask=mask,
        weight=parameter() if draw(st.booleans()) else None,
        bias=parameter() if draw(st.booleans()) else None,
        channel_dim=channel_dim - len(shape) if draw(st.booleans()) else channel_dim,
        per_position=draw(st.booleans()),
        eps=draw(st.sampled_from([1e-4, 1e-3, 1e-5])),
        mix_eps=draw(st.sampled_from([1e-4, 0.0, 0.01])),
        dim_scale=draw(st.booleans()),
        groups=draw(st.sampled_from([g for g in range(1, d + 1) if d % g == 0]))
        if (draw(st.booleans()) if grouped is None else grouped)
        else None,
    )


def _lay(x: torch.Tensor, layout: str, channel_dim: int) -> torch.Tensor:
    """The same values otherwise in memory."""
    if layout == "features last":
        return x.movedim(channel_dim, -1).contiguous().movedim(-1, channel_dim)
    if layout == "strided":
        wide = torch.full([2 * size for size in x.shape], float("nan"), dtype=x.dtype)
        every_other = wide[tuple(slice(None, None, 2) for _ in x.shape)]
        return every_other.copy_(x)
    if layout == "flipped":
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    return x


def remembered(layer):
    """What the layer remembers, for the oracle."""
    population = oracle.Population((), layer.num_features, layer.groups)
    names = {"mean_B": "batch_mean", "var_B": "batch_var", "mean_F": "feature_mean", "var_F": "feature_var"}
    for name, ours in (*names.items(), ("inverse_m", "inverse_m")):
        setattr(population, name, getattr(layer.population, ours).double().numpy())
    population.updates = layer.population.updates[-1].numpy()
    return population
