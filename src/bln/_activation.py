"""The end of a layer: a residual that is added to the normalized input, and an activation."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ._masks import hide

Activation = Literal["relu", "silu", "gelu"]
"""The names of activations in ``torch.nn.functional``; ``gelu`` is the exact one. All of them map 0 to 0."""

MODULES: dict[Activation, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU}


def check_activation(activation: Any) -> Activation | None:
    """Return the activation; refuse an unknown one."""
    if activation is None or (isinstance(activation, str) and activation in MODULES):
        return activation
    names = ", ".join(map(repr, MODULES))
    raise ValueError(
        f"activation must be None or one of {names}, got {activation!r}. For another, put its module after the layer, "
        "as in nn.Sequential(layer, nn.Tanh())"
    )


def check_residual(residual: Any, x: Tensor) -> None:
    """Refuse what cannot be added to the normalized ``x``."""
    if residual is None:
        return
    if not isinstance(residual, Tensor):
        raise TypeError(f"residual must be a torch.Tensor or None, got {type(residual).__name__}")
    if not residual.is_floating_point():
        raise TypeError(f"residual must be of a floating point type, got {residual.dtype}; a mask goes to mask=")
    if residual.shape != x.shape:
        raise ValueError(
            f"residual must have the shape of the input, {tuple(x.shape)}, got {tuple(residual.shape)}; expand one "
            "that is to be broadcast, as in residual.expand_as(x)"
        )
    if residual.device != x.device:
        raise ValueError(f"residual is on {residual.device}, the input on {x.device}; move it first")


def finish(
    y: Tensor, residual: Tensor | None, mask: Tensor | None, channel_dim: int, activation: Activation | None
) -> Tensor:
    """Add the residual to a normalized ``y``, then apply the activation; ``y`` keeps its type.

    Hidden entries of ``y`` are 0 and stay so, since the residual is hidden first: whatever stands there, NaN included,
    enters no gradient.
    """
    if residual is not None:
        y = y + hide(residual, mask, channel_dim).to(y.dtype)
    if activation is None:
        return y
    result: Tensor = getattr(torch.nn.functional, activation)(y)
    return result
