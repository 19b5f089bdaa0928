"""What a BLN layer is in eval when all its statistics are the population's: one multiplication and addition."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from . import functional
from ._activation import Activation, check_activation, check_residual, finish
from ._scripting import refuse_scripting
from .population import keep_precision, window


class Affine(nn.Module):
    """A fixed scale and shift, ``y = scale * x + shift``, in one operation. ``bln.freeze`` leaves it behind.

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
            raise ValueError(
                f"scale and shift must have one shape, (C,) or that of a sample; got {tuple(scale.shape)} and "
                f"{tuple(shift.shape)}"
            )
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
        expected = known.pop(0 if len(known) == 1 else self._axis)
        if features != expected:
            raise ValueError(
                f"expected {expected} features along dimension {channel_dim}, got {features} in an input of shape "
                f"{shape}. If features stand elsewhere, pass channel_dim="
            )
        if not known:
            return value.reshape(-1, *[1] * (len(shape) - 1 - channel_dim))
        first = window(tuple(positions), tuple(known))
        return value[(slice(None), *first) if channel_dim == 1 else first] if first else value

    @property
    def _axis(self) -> int:
        """The axis of features in a sample."""
        return self.channel_dim - 1 if self.channel_dim > 0 else self.channel_dim

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Affine:
        super()._apply(keep_precision(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    __prepare_scriptable__ = refuse_scripting

    def extra_repr(self) -> str:
        """The shape of the map, and whatever is not a default."""
        shown = [str(tuple(self.scale.shape)), *[f"channel_dim={self.channel_dim}"] * (self.channel_dim != 1)]
        return ", ".join([*shown, *[f"activation={self.activation}"] * (self.activation is not None)])
