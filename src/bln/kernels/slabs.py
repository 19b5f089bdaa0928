"""How the kernels see an input, and what they are told about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import formula
from .._spec import Spec
from ..formula import Statistics
from ..functional import at_least_one, count
from . import choices, launch, tiles
from .launch import Given

T = TypeVar("T")


class Options(NamedTuple):
    """The numbers of eqs 14-16."""

    eps: float
    mix_eps: float
    scale: float
    inverse_m: float


def options(features: int, eps: float, mix_eps: float, dim_scale: bool, m: int) -> Options:
    """With the scale of eq 16, given the samples of a mini-batch."""
    return Options(eps, mix_eps, formula.weights(0.0, 0.0, features, dim_scale)[0], 1 / m)


class Entries(NamedTuple):
    """What a mask leaves of slabs ``x[n, p, c]``."""

    hidden: Tensor  # [N, P], uint8
    real: Tensor  # [P], their number
    inverse_m: Tensor  # [P]


class Slabs(NamedTuple):
    """An input seen as ``x[n, p, c]``, as it lies in memory."""

    n: int
    p: int
    c: int
    across: bool  # positions, not features, lie side by side
    pooled: bool  # batch statistics are those of all positions together

    @classmethod
    def of(cls, x: Tensor, channel_dim: int, per_position: bool, training: bool = True) -> Slabs | None:
        """Nothing for what lies otherwise. Pooled, features that lie last are one position with more samples."""
        n, c = x.shape[0], x.shape[channel_dim]
        p = x.numel() // (n * c)
        last = channel_dim == x.dim() - 1
        across = p > 1 and not last and x.is_contiguous()
        if across:
            if channel_dim != 1 or not launch.across(p, c, training):
                return None
        elif not (x if last else x.movedim(channel_dim, -1)).is_contiguous():
            return None
        if per_position or across:
            return cls(n, p, c, across, not per_position)
        return cls(n * p, 1, c, False, False)

    def entries(self, mask: Tensor | None, per_position: bool) -> Entries | None:
        """What the mask ``(N, *positions)`` leaves."""
        if mask is None:
            return None
        m, real = (at_least_one(c) for c in count(mask.shape, mask, per_position))
        hidden = (~mask).reshape(self.n, self.p).to(torch.uint8).contiguous()
        return Entries(hidden, real.reshape(-1).float(), (1 / m).reshape(-1).float())  # type: ignore[union-attr]

    def rows(self, x: Tensor, channel_dim: int) -> Tensor:
        """``x[n, p, c]`` in float32, differentiable."""
        return x.movedim(channel_dim, -1).reshape(self.n, self.p, self.c).float()

    def restore(self, rows: Tensor, like: Tensor, channel_dim: int) -> Tensor:
        """Back to the shape it came in."""
        shape = [*like.shape]
        shape.append(shape.pop(channel_dim))
        return rows.reshape(shape).movedim(-1, channel_dim)


def features_last(x: Tensor, channel_dim: int) -> Tensor:
    """A contiguous copy with features last, differentiable."""
    rows = x.movedim(channel_dim, -1)
    if channel_dim != 1 or not x.is_contiguous() or torch.compiler.is_compiling():
        return rows.contiguous()
    copied: Tensor = _Turned.apply(x.flatten(2))  # type: ignore[no-untyped-call]
    return copied.view(rows.shape)


def as_it_came(y: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    """The way back of ``features_last``: contiguous where ``x`` was, differentiable."""
    if not x.is_contiguous():
        return y.movedim(-1, channel_dim)
    if channel_dim != 1 or torch.compiler.is_compiling():
        return y.movedim(-1, channel_dim).contiguous()
    copied: Tensor = _Turned.apply(y.flatten(1, -2))  # type: ignore[no-untyped-call]
    return copied.view(x.shape)


def beside(dy: Tensor, x: Tensor, slabs: Slabs, channel_dim: int) -> Tensor:
    """Gradients, lying as the input does."""
    if dy.stride() == x.stride():
        return dy
    second, last = dy.movedim(channel_dim, 1), dy.movedim(channel_dim, -1)
    if (second if slabs.across else last).is_contiguous():
        return dy
    if (last if slabs.across else second).is_contiguous():
        return turned(last.flatten(1, -2) if slabs.across else second.flatten(2))
    return torch.empty_like(x).copy_(dy)


def turned(x: Tensor, second: Tensor | None = None, aside: bool = False) -> Tensor:
    """``x[n, a, b]``, contiguous, as a contiguous ``[n, b, a]``; torch takes up to three times as long.

    A ``second`` tensor of one sample is turned with a first one; ``aside``, while the launch before still works, which
    must let this one begin.
    """
    n, c, p = x.shape
    n = n if second is None else 2
    y = torch.empty(n, p, c, dtype=x.dtype, device=x.device)
    most = 16 // x.element_size()
    tiles.turn[(n * launch.cdiv(p, 64) * launch.cdiv(c, 64),)](
        x, second, y, p, c, SIDE_P=math.gcd(p, most), SIDE_C=math.gcd(c, most), BLOCK=64, num_warps=4,
        **(chain(x.device).after if aside else {"CHAINED": False}),
    )  # fmt: skip
    return y


class _Turned(torch.autograd.Function):
    """Its gradient need not be turned: autograd takes any strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return turned(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.transpose(1, 2)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors there."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of it that a program may have there."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    size: int = getattr(properties, "shared_memory_per_block_optin", 48 * 1024)  # older versions of torch do not say
    return size


class Chain(NamedTuple):
    """Options for launches."""

    begin: dict[str, bool]  # one that begins when all before it is done
    after: dict[str, bool]  # one that may begin a little earlier


@cache
def chain(device: torch.device) -> Chain:
    """Where a device can, from Hopper on, a launch begins when all programs of the one before let it, and waits for
    them: see ``tiles``. Between sweeps over few values they do so at once: (64, 80, 128) in bfloat16, pooled, takes 2.8
    times an addition backward so, else 3.3. Else they do so at their end: the programs of a large sweep would settle
    where there is room just then, more on one multiprocessor than on another, and (32, 512, 1024) would take 2.8 times
    a copy, where it takes 2.0.
    """
    nvidia = device.type == "cuda" and torch.version.hip is None and tiles.VERSION >= (3, 5)
    if nvidia and torch.cuda.get_device_capability(device) >= (9, 0):
        return Chain({"CHAINED": True}, {"CHAINED": True, "launch_pdl": True})
    return Chain({"CHAINED": False}, {"CHAINED": False})


def on_its_device(function: Callable[..., T]) -> Callable[..., T]:
    """Launch on the device of the first tensor: Triton takes the current one."""

    @wraps(function)
    def launched(x: Tensor, *rest: Any, **options: Any) -> T:
        if torch.compiler.is_compiling() or not x.is_cuda or x.device.index == torch.cuda.current_device():
            return function(x, *rest, **options)
        with torch.cuda.device(x.device):
            return function(x, *rest, **options)

    return launched


def given(slabs: Slabs, itemsize: int, device: torch.device, masked: bool) -> Given:
    """What launches are chosen for."""
    n, p, c, across, pooled = slabs
    return Given(n, p, c, itemsize, across, masked, pooled, processors(device), shared_memory(device))


@lru_cache(maxsize=4096)
def choose(
    slabs: Slabs, itemsize: int, device: torch.device, masked: bool, backward: bool, hold: bool = True
) -> launch.Launch:
    """How to launch a training kernel."""
    return choices.training(given(slabs, itemsize, device, masked), backward=backward, hold=hold)


def transform(
    rows: Tensor, statistics: Statistics, gamma: Tensor | None, beta: Tensor | None, numbers: Options
) -> Tensor:
    """Eqs 14-17 in operators."""
    gamma, beta = (None if parameter is None else parameter.float() for parameter in (gamma, beta))
    spec = Spec(eps=numbers.eps, mix_eps=numbers.mix_eps, dim_scale=numbers.scale != 1.0)
    y: Tensor = formula.transform(rows, statistics, gamma, beta, spec=spec)
    return y
