"""How the kernels see an input, and what they are told about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import formula
from ..formula import Statistics
from ..functional import at_least_one, count
from . import launch, tiles

T = TypeVar("T")


class Options(NamedTuple):
    """The numbers of eqs 14-16, and whether statistics are pooled."""

    eps: float
    mix_eps: float
    scale: float
    inverse_m: float
    pooled: bool


def options(features: int, eps: float, mix_eps: float, dim_scale: bool, inverse_m: float, pooled: bool) -> Options:
    """With the scale of eq 16."""
    return Options(eps, mix_eps, formula.weights(0.0, 0.0, features, dim_scale)[0], inverse_m, pooled)


class Entries(NamedTuple):
    """What a mask leaves of slabs ``x[n, p, c]``."""

    hidden: Tensor  # [N, P], uint8
    real: Tensor  # [P], their number
    inverse_m: Tensor  # [P]


class Slabs(NamedTuple):
    """An input seen as ``x[n, p, c]``: features last, or second; what lies otherwise in memory is copied."""

    x: Tensor
    rows: torch.Size  # of the input with features last
    pooled: bool  # batch statistics are those of all positions together
    turned: bool  # features came second

    @classmethod
    def of(cls, x: Tensor, channel_dim: int, per_position: bool) -> Slabs:
        """Pooled statistics of features that lie last are those of one position with more samples."""
        rows = x if channel_dim == x.dim() - 1 else x.movedim(channel_dim, -1)
        n, d = rows.shape[0], rows.shape[-1]
        slabs = rows.reshape(n, -1, d)
        second = not slabs.is_contiguous() and slabs.transpose(1, 2).is_contiguous()
        taken = second and launch.across(*slabs.shape[1:])
        if not (slabs.is_contiguous() or taken):
            slabs = features_last(slabs)
        if not per_position and slabs.is_contiguous():
            slabs = slabs.view(-1, 1, d)
        return cls(slabs, rows.shape, not per_position and slabs.shape[1] > 1, second and not taken)

    def back(self, y: Tensor, channel_dim: int) -> Tensor:
        """Slabs in the shape the input came in, and laid out as it was."""
        if self.turned:
            y = features_last(y.view(self.rows[0], -1, self.rows[-1]).transpose(1, 2)).transpose(1, 2)
        return y.view(self.rows) if channel_dim == len(self.rows) - 1 else y.reshape(self.rows).movedim(-1, channel_dim)

    def entries(self, mask: Tensor | None, per_position: bool) -> Entries | None:
        """What the mask ``(N, *positions)`` leaves."""
        if mask is None:
            return None
        m, real = (at_least_one(c) for c in count(self.rows[:-1], mask, per_position))
        hidden = (~mask).reshape(self.x.shape[:2]).to(torch.uint8)
        return Entries(hidden, real.reshape(-1).float(), (1 / m).reshape(-1).float())  # type: ignore[union-attr]


def features_last(x: Tensor) -> Tensor:
    """A contiguous copy of slabs, differentiable; of positions side by side, by a kernel that is faster at it."""
    if torch.compiler.is_compiling() or not x.transpose(1, 2).is_contiguous():
        return x.contiguous()
    copied: Tensor = _FeaturesLast.apply(x)  # type: ignore[no-untyped-call]
    return copied


def turned(x: Tensor) -> Tensor:
    """``[N, P, C]`` whose positions lie side by side, with features side by side."""
    n, p, c = x.shape
    y = torch.empty(n, p, c, dtype=x.dtype, device=x.device)
    most = 16 // x.element_size()
    tiles.turn[(n * launch.cdiv(p, 64) * launch.cdiv(c, 64),)](
        x, y, p, c, SIDE_P=math.gcd(p, most), SIDE_C=math.gcd(c, most), BLOCK=64, num_warps=4
    )
    return y


class _FeaturesLast(torch.autograd.Function):
    """Its gradient comes features last, and may stay so: autograd takes any strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return turned(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


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


@cache
def chain(device: torch.device) -> tuple[dict[str, bool], dict[str, bool]]:
    """Options for the first of several launches, and for those after it.

    Where a device can, from Hopper on, those begin while the launch before comes to its end.
    """
    nvidia = device.type == "cuda" and torch.version.hip is None
    able = nvidia and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"CHAINED": able}, {"CHAINED": able, "launch_pdl": able}


def on_its_device(function: Callable[..., T]) -> Callable[..., T]:
    """Launch on the device of the first tensor: Triton takes the current one."""

    @wraps(function)
    def launched(x: Tensor, *rest: Any, **options: Any) -> T:
        if torch.compiler.is_compiling() or not x.is_cuda or x.device.index == torch.cuda.current_device():
            return function(x, *rest, **options)
        with torch.cuda.device(x.device):
            return function(x, *rest, **options)

    return launched


def across(x: Tensor) -> bool:
    """Whether positions, not features, lie side by side in memory."""
    return not x.is_contiguous()


def choose(x: Tensor, masked: bool, pooled: bool, backward: bool, alone: bool = True) -> launch.Launch:
    """How to launch a training kernel on slabs."""
    return launch.training(
        *x.shape,
        backward=backward,
        itemsize=x.element_size(),
        across=across(x),
        masked=masked,
        pooled=pooled,
        processors=processors(x.device),
        shared=shared_memory(x.device),
        alone=alone,
    )


def gradients(plain: Callable[..., Tensor], tensors: tuple[Tensor | None, ...], ctx: Any, dy: Tensor) -> list[Any]:
    """Gradients of ``plain(*tensors, *ctx.rest)`` for those that want one; differentiable again where that is asked."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [t if t is None or again else t.detach().requires_grad_() for t in tensors]
        y = plain(*inputs, *ctx.rest)
        wanted = [t if want else None for t, want in zip(inputs, ctx.needs_input_grad, strict=False)]
        given = [t for t in wanted if t is not None]
        found = iter(torch.autograd.grad(y, given, dy.to(y.dtype), create_graph=again))
    return [None if t is None else next(found) for t in wanted]


def transform(
    rows: Tensor, statistics: Statistics, gamma: Tensor | None, beta: Tensor | None, numbers: Options
) -> Tensor:
    """Eqs 14-17 in operators."""
    gamma, beta = (None if parameter is None else parameter.float() for parameter in (gamma, beta))
    dim_scale = numbers.scale != 1.0
    y: Tensor = formula.transform(
        rows, statistics, gamma, beta, eps=numbers.eps, mix_eps=numbers.mix_eps, dim_scale=dim_scale
    )
    return y
