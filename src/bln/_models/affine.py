"""``bln.Affine``, a fixed scale and shift, and the map of a frozen layer: ``TTTT`` in eval."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import formula, functional
from .._activation import Activation, check_activation, check_residual, finish
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
        channel_dim = functional.check(x, mask, self.channel_dim, empty=True)
        check_residual(residual, x)
        scale, shift = (self._at(tuple(x.shape), value, channel_dim) for value in (self.scale, self.shift))
        dtype = torch.promote_types(x.dtype, scale.dtype)
        y = torch.addcmul(shift.to(dtype), x.to(dtype), scale.to(dtype)).to(x.dtype)
        y = y if mask is None else torch.where(mask.unsqueeze(channel_dim), y, 0)
        return finish(y, residual, mask, channel_dim, self.activation)

    def _at(self, shape: tuple[int, ...], value: Tensor, channel_dim: int) -> Tensor:
        """The value at each of the input's positions, for any sample."""
        positions = list(shape[1:])
        features = positions.pop(channel_dim - 1)
        known = list(value.shape)
        # The axis of features in a sample, which has no first dimension.
        axis = self.channel_dim - (self.channel_dim > 0)
        expected = known.pop(0 if len(known) == 1 else axis)
        if features != expected:
            raise ValueError(
                f"expected {expected} features along dimension {channel_dim}, got {features} in an input of shape "
                f"{shape}. If features stand elsewhere, pass channel_dim="
            )
        if not known:
            return value.reshape(-1, *[1] * (len(shape) - 1 - channel_dim))
        first = window(tuple(positions), tuple(known))
        return value[(slice(None), *first) if channel_dim == 1 else first] if first else value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Affine:
        super()._apply(keep_precision(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    __prepare_scriptable__ = refuse_scripting

    def extra_repr(self) -> str:
        """The shape of the map, and whatever is not a default."""
        shown = [str(tuple(self.scale.shape)), *[f"channel_dim={self.channel_dim}"] * (self.channel_dim != 1)]
        return ", ".join([*shown, *[f"activation={self.activation}"] * (self.activation is not None)])


class FixedMap:
    """``y = scale * x + shift`` in float64, features last: ``(2, *positions, C)``."""

    def __init__(self, layer: BatchLayerNorm) -> None:
        self.channel_dim, self.dtype = layer.channel_dim, layer.population.batch_mean.dtype
        self.activation = layer.activation
        known = layer.population.position_shape
        s = formula.Statistics(*(value.double() for value in layer.population.statistics(known or (), 1)))
        gamma, beta = (None if p is None else p.double() for p in (layer.weight, layer.bias))
        centred = s._replace(batch_mean=0 * s.batch_mean, feature_mean=0 * s.feature_mean)
        one = torch.ones_like(s.batch_mean)
        scale = formula.transform(one, centred, gamma, spec=layer.spec, xp=torch)
        shift = formula.transform(0 * one, s, gamma, beta, spec=layer.spec, xp=torch)
        self.values = torch.stack([scale, shift])
        rows = self.values.reshape(2, -1, layer.num_features)
        self.uniform = rows[:, 0] if (rows == rows[:, :1]).all() else None  # (2, C), where all positions agree
        self.rank = 2 + len(known) if known is not None and layer.per_position else None

    def affine(self) -> Affine:
        scale, shift = self._as_input(self.values).to(self.dtype)
        return Affine(scale, shift, channel_dim=self.channel_dim, activation=self.activation)

    def flattened(self, size: int) -> Tensor | None:
        """Scale and shift of a whole sample of ``size`` entries, ``(2, size)``; ``None`` where they do not fit."""
        count, rest = divmod(size, self.values.shape[-1])
        if rest:
            return None
        if self.uniform is not None and self.channel_dim in (1, -1):
            return self.uniform.repeat(1, count) if self.channel_dim == -1 else self.uniform.repeat_interleave(count, 1)
        values = self.values[:, :count] if self.values.dim() == 3 else self.values  # a shorter sequence
        sample = self._as_input(values).flatten(1)
        return sample if sample.shape[1] == size else None

    def _as_input(self, values: Tensor) -> Tensor:
        """The values in the input's layout."""
        return values if values.dim() == 2 else values.movedim(-1, self.channel_dim).contiguous()
