"""``bln.Affine``, a fixed scale and shift, and the fixed map that a ``TTTT`` layer computes in eval."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import formula, functional
from .._activation import Activation, check_activation, check_residual, finish
from .._masks import hide
from .._scripting import refuse_scripting
from ..layer import BatchLayerNorm
from ..population import keep_precision, window


class Affine(nn.Module):
    """A fixed scale and shift, ``y = scale * x + shift``, in one operation; made by ``bln.freeze``.

    Nothing in it is trained: ``scale`` and ``shift`` are buffers, and ``train()`` changes nothing. They stay float32
    (or float64) when the model is moved to a lower precision; the output has the input's type.

    Args:
        scale: One value for each feature, ``(C,)``, or for each entry of a sample, laid out as the input is:
            ``(C, *positions)``, or with ``channel_dim=-1`` ``(*positions, C)``.
        shift: Shaped as ``scale``.
        channel_dim: The dimension of features in the input; never 0, which is that of samples.
        activation: What follows, as in ``BatchLayerNorm``.

    Shape:
        As ``BatchLayerNorm``; the output has the input's shape and type. With one axis of positions, shorter
        sequences use the first ones. ``mask``: ``(N, *positions)``, boolean; hidden entries come out 0. ``residual``:
        the input's shape.

    Examples:
        >>> import torch, bln
        >>> layer = bln.Affine(torch.tensor([1.0, 2.0]), torch.tensor([0.0, -1.0]))
        >>> layer(torch.ones(1, 2))
        tensor([[1., 1.]])
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self, scale: Tensor, shift: Tensor, *, channel_dim: int = 1, activation: Activation | None = None
    ) -> None:
        super().__init__()
        if scale.shape != shift.shape or scale.dim() == 0:
            shapes = f"{tuple(scale.shape)} and {tuple(shift.shape)}"
            raise ValueError(f"scale and shift must have one shape, (C,) or that of a sample; got {shapes}")
        self.channel_dim = channel_dim
        self.activation = check_activation(activation)
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor, mask: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Scale and shift ``x``; with ``mask`` true at real entries, hidden ones come out 0."""
        features = self.scale.shape[0 if self.scale.dim() == 1 else self.channel_dim - (self.channel_dim > 0)]
        channel_dim = functional.check(x, mask, self.channel_dim, features, allow_empty=True)
        check_residual(residual, x)
        scale, shift = (self._at_positions_of(x, value, channel_dim) for value in (self.scale, self.shift))
        dtype = torch.promote_types(x.dtype, scale.dtype)
        y = torch.addcmul(shift.to(dtype), x.to(dtype), scale.to(dtype)).to(x.dtype)
        return finish(hide(y, mask, channel_dim), residual, mask, channel_dim, self.activation)

    def _at_positions_of(self, x: Tensor, value: Tensor, channel_dim: int) -> Tensor:
        if value.dim() == 1:
            return value.reshape(-1, *[1] * (x.dim() - 1 - channel_dim))
        axis = channel_dim - 1  # in a sample
        value = value.movedim(axis, -1)
        positions = (*x.shape[1:channel_dim], *x.shape[channel_dim + 1 :])
        return value[window(positions, tuple(value.shape[:-1]))].movedim(-1, axis)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Affine:
        super()._apply(keep_precision(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    __prepare_scriptable__ = refuse_scripting

    def extra_repr(self) -> str:
        """The shape of the map, and whatever is not a default."""
        options = [("channel_dim", self.channel_dim, 1), ("activation", self.activation, None)]
        shown = [f"{name}={value}" for name, value, default in options if value != default]
        return ", ".join([str(tuple(self.scale.shape)), *shown])


def fixed_map(layer: BatchLayerNorm) -> Tensor:
    """Return scale and shift of a ``TTTT`` layer in ``eval()``, in float64, features last: ``(2, *positions, C)``.

    Where all positions agree it is ``(2, C)``.
    """
    population = layer.population
    s = formula.Statistics(*(value.double() for value in population.statistics(population.position_shape or (), 1)))
    gamma, beta = (None if p is None else p.double() for p in (layer.weight, layer.bias))
    centred = s._replace(batch_mean=0 * s.batch_mean, feature_mean=0 * s.feature_mean)
    one = torch.ones_like(s.batch_mean)
    scale = formula.transform(one, centred, gamma, spec=layer.spec, xp=torch)
    shift = formula.transform(0 * one, s, gamma, beta, spec=layer.spec, xp=torch)
    values = torch.stack([scale, shift])
    rows = values.reshape(2, -1, layer.num_features)
    return rows[:, 0] if (rows == rows[:, :1]).all() else values


def as_affine(layer: BatchLayerNorm, values: Tensor) -> Affine:
    """Return the module that computes a layer's fixed map."""
    values = values if values.dim() == 2 else values.movedim(-1, layer.channel_dim).contiguous()
    scale, shift = values.to(layer.population.batch_mean.dtype)
    return Affine(scale, shift, channel_dim=layer.channel_dim, activation=layer.activation)


def flattened(values: Tensor, channel_dim: int, size: int) -> Tensor | None:
    """Return a fixed map for a flattened sample of ``size`` entries, ``(2, size)``; ``None`` if it does not fit."""
    sequence = size // values.shape[-1]
    if values.dim() == 2 and channel_dim in (1, -1):
        values = values[:, None].expand(2, sequence, -1)
    elif values.dim() == 3:
        values = values[:, :sequence]  # a shorter one uses the first positions
    elif values.dim() == 2:
        return None
    sample = values.movedim(-1, channel_dim).flatten(1)
    return sample if sample.shape[1] == size else None
