"""The shapes that inputs and masks may have, and the positions that a layer keeps statistics for. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, SupportsIndex

Shape = Sequence[int | None]
"""Sizes, which a TensorFlow graph may leave open as ``None``."""


def check_shapes(
    name: str, channel_dim: int, shape: Shape, features: int | None, mask: Shape | None, allow_empty: bool = False
) -> int:
    """Return the dimension of features counted from the front; refuse shapes that do not fit.

    ``name`` is the layer's argument for that dimension, ``mask`` the shape of the mask; ``allow_empty`` is for
    inputs without samples.
    """
    rank = len(shape)
    if not (rank >= 2 and -rank < channel_dim < rank and channel_dim != 0):
        raise ValueError(
            f"expected an input (N, C), (N, C, *positions) or, with {name}=-1, (N, *positions, C); got shape "
            f"{tuple(shape)} with {name}={channel_dim}. A single sample needs its own dimension: x[None]"
        )
    channel_dim %= rank
    # One by one: ``in`` does not find the symbolic sizes of a compiler.
    if features is not None and shape[channel_dim] != features:
        raise ValueError(
            f"expected {features} features along dimension {channel_dim}, got {shape[channel_dim]} in an input of "
            f"shape {tuple(shape)}. If features stand elsewhere, pass {name}="
        )
    if any(size == 0 for size in (shape[1:] if allow_empty else shape)):
        raise ValueError(f"cannot train on an empty input, got shape {tuple(shape)}; skip empty batches")
    if mask is None:
        return channel_dim
    expected = *shape[:channel_dim], *shape[channel_dim + 1 :]
    if len(mask) != rank - 1 or any(
        a is not None and b is not None and a != b for a, b in zip(mask, expected, strict=True)
    ):
        raise ValueError(
            f"expected a mask of shape {expected}, (N, *positions) of the input {tuple(shape)} with features at "
            f"dimension {channel_dim}; got {tuple(mask)}"
        )
    return channel_dim


def sizes(position_shape: Any, per_position: bool) -> tuple[int, ...] | None:
    """Return the positions that get statistics, from one size or several; ``None`` if they are to be learned."""
    if position_shape is None:
        return None
    if not per_position:
        raise ValueError("position_shape goes with per_position=True; pooled statistics have no positions")
    several = (position_shape,) if isinstance(position_shape, SupportsIndex) else position_shape
    chosen: list[Any] = list(several) if isinstance(several, Iterable) else [None]
    if not all(isinstance(size, SupportsIndex) and index(size) >= 1 for size in chosen):
        raise ValueError(f"position_shape must hold positive sizes, as 80 or (28, 28) do, got {position_shape!r}")
    return tuple(map(index, chosen))


def window(positions: tuple[int, ...], known: tuple[int, ...] | None, compiling: bool = False) -> tuple[slice, ...]:
    """Return the slices of the known positions that an input uses: all, or the first ones for a shorter sequence.

    While torch compiles, the longest sequence is treated as shorter ones are, so that one graph serves all lengths.
    """
    if known is None:
        return ()
    sequence = len(positions) == len(known) == 1
    if not (sequence and compiling) and positions == known:
        return ()
    if sequence and positions[0] <= known[0]:
        return (slice(positions[0]),)
    alike = len(positions) == len(known)
    ways = [
        "per_position=False, which pools batch statistics over positions and takes any; so does groups=8, the form for "
        "convolutional nets",
        "pad or crop inputs to one shape" if alike else "a layer of its own for inputs of each kind",
    ]
    if alike and len(known) == 1:
        ways.insert(0, "position_shape= the longest sequence there will be, shorter ones then use the first positions")
    raise ValueError(
        f"the input has positions {positions}, but statistics are kept for "
        f"{f'positions {known}' if known else 'inputs without positions, (N, C)'}. Ways out: "
        + "; ".join(f"({number}) {way}" for number, way in enumerate(ways, 1))
    )
