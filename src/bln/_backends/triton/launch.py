"""The layout of an input in memory, and a faster way to launch a kernel than Triton's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from ..._activation import Activation
from ..._spec import Spec
from . import affine

INTERPRETED = not isinstance(affine.measure, triton.runtime.JITFunction)
KINDS = (Tensor, torch.nn.Parameter)
T = TypeVar("T")
Tensors = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Input, gamma, beta, a residual and a mask."""
Learning = tuple[list[Tensor], float] | None
"""The population to update, and its momentum; negative to weight values by samples."""


class Shape(NamedTuple):
    """An input seen as ``x[n, c, p]``, positions or features being contiguous in memory."""

    n: int
    c: int
    p: int
    channels_first: bool
    pooled: bool = True
    """One position has all batch statistics."""

    @classmethod
    def of(cls, x: Tensor, channel_dim: int, pooled: bool = True) -> Shape | None:
        """See an input so, if it lies so."""
        n, c = x.shape[0], x.shape[channel_dim]
        channels_first = channel_dim == 1 and x.dim() > 2 and x.is_contiguous()
        if channels_first or x.movedim(channel_dim, -1).is_contiguous():
            return cls(n, c, x.numel() // (n * c), channels_first, pooled)
        return None

    def tile(self, features: int, positions: int, itemsize: int) -> dict[str, Any]:
        """Constants of a kernel with such tiles; a thread can load ``VEC`` values at a time."""
        contiguous = self.p if self.channels_first else self.c
        vec = math.gcd(contiguous, 16 // itemsize) if isinstance(contiguous, int) else 1
        return {"CHANNELS_FIRST": self.channels_first, "BC": features, "BP": positions, "VEC": vec}

    @property
    def rows(self) -> int:
        """Samples at all positions together."""
        return self.n * self.p

    @property
    def loose(self) -> bool:
        """Whether rows follow each other whatever their positions."""
        return self.pooled and not self.channels_first

    @property
    def q(self) -> int:
        """Positions with batch statistics of their own."""
        return 1 if self.pooled else self.p


class Plan:
    """All launches of one layer on inputs of one shape and type, made once and kept: a call only looks it up."""

    channel_dim: int
    device: torch.device

    def __init__(self, shape: Shape, spec: Spec, activation: Activation | None = None) -> None:
        self.shape, self.spec, self.activation = shape, spec, activation


def known(size: Any) -> int:
    """The size; in a graph for any size, the one it is traced with."""
    return size if isinstance(size, int) else size.node.hint


def new(x: Tensor, *sizes: int) -> Tensor:
    """Float32 memory on the device of ``x``."""
    return torch.empty(sizes, dtype=torch.float32, device=x.device)


class Launch:
    """A kernel with its grid, and the ``numbers`` and ``constants`` that follow its pointers, in its order.

    It is compiled by its first call, and after that launched without Triton's binding of arguments. So all calls must
    agree in whatever Triton compiles for: which pointers are ``None``, the types and the alignment of the others.
    """

    def __init__(
        self, kernel: Any, programs: int, numbers: tuple[float, ...], constants: dict[str, Any], num_warps: int = 4,
    ) -> None:  # fmt: skip
        self.kernel, self.programs, self.numbers, self.constants = kernel, programs, numbers, constants
        self.options = {"num_warps": num_warps}
        self.rest = (*numbers, *constants.values())
        self.go: Callable[..., None] | None = None
        """Launches the compiled kernel, given a stream and addresses."""

    def __call__(self, stream: int, *pointers: Tensor | float | None) -> None:
        """Launch, given tensors, ``None`` or numbers that change; the first call takes the current stream."""
        if self.go is not None:
            self.go(stream, *[each.data_ptr() if isinstance(each, Tensor) else each for each in pointers])
            return
        compiled = self.kernel[(self.programs,)](*pointers, *self.numbers, **self.constants, **self.options)
        if not INTERPRETED:
            head = compiled.function, compiled.packed_metadata, None, None, None
            self.go = straight(compiled.run, self.programs, head, len(pointers), self.rest)


def address(value: Tensor | None) -> int | None:
    """Return where a tensor lies."""
    return None if value is None else value.data_ptr()


def beyond(at: Any, offset: int) -> Any:
    """Return what launches want for the rest of a float32 tensor, given what they want for all of it."""
    return at + 4 * offset if type(at) is int else at[offset:]


def ready(*launches: Launch) -> tuple[Callable[..., Any], Sequence[Callable[..., None]]]:
    """Return what launches want in place of tensors, and the fastest way to do them."""
    compiled = [launch.go for launch in launches]
    return (lambda value: value, launches) if None in compiled else (address, compiled)  # type: ignore[return-value]


def straight(
    run: Any, programs: int, head: tuple[Any, ...], pointers: int, rest: tuple[Any, ...]
) -> Callable[..., None]:
    """Return what launches a compiled kernel, past Triton's launcher if that only hands on its arguments.

    ``run`` takes a grid, a stream, ``head``, which is the kernel and its metadata, so many pointers, and ``rest``.
    """

    def through(stream: int, *addresses: int | None) -> None:
        run(programs, 1, 1, stream, *head, *addresses, *rest)

    if not hasattr(run, "launch") or any(getattr(run, f"{kind}_scratch_size", 0) for kind in ("global", "profile")):
        return through
    probe, given, launch = copy(run), [], run.launch
    probe.launch = lambda *arguments: given.extend(arguments)
    behind = (*range(1, pointers + 1), *rest)
    probe(programs, 1, 1, 0, *head, *behind)
    if given[:4] != [programs, 1, 1, 0]:
        return through
    if given[-1] == behind:  # from Triton 3.7 on
        middle = given[4:-1]
        return lambda stream, *addresses: launch(programs, 1, 1, stream, *middle, (*addresses, *rest))
    middle, end = given[4 : -len(behind)], given[-len(behind) :]
    if tuple(end) != behind:
        return through
    return lambda stream, *addresses: launch(programs, 1, 1, stream, *middle, *addresses, *rest)


def aligned(x: Tensor) -> Tensor:
    """A tensor whose first value lies as launches were compiled for."""
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.preserve_format)


def like(value: Tensor, x: Tensor) -> Tensor:
    """A tensor lying as ``x`` does, and aligned."""
    if value.stride() == x.stride() and value.dtype == x.dtype:
        return aligned(value)
    return torch.empty_like(x).copy_(value)


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """A mask as the kernels read it."""
    return None if mask is None else aligned(mask.contiguous().view(torch.uint8))


def stream_of(device: torch.device) -> int:
    """The stream to launch on."""
    index = device.index
    return 0 if index is None else torch._C._cuda_getCurrentRawStream(index)


def typed(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    """A gradient in its parameter's type."""
    if parameter is None:
        return None
    return gradient if parameter.dtype == torch.float32 else gradient.to(parameter.dtype)


def on_its_device(function: Callable[..., T]) -> Callable[..., T]:
    """Launch on the device of the first tensor: Triton takes the current one."""

    @wraps(function)
    def launched(x: Tensor, *rest: Any, **options: Any) -> T:
        if torch.compiler.is_compiling() or not x.is_cuda or x.device.index == torch.cuda.current_device():
            return function(x, *rest, **options)
        with torch.cuda.device(x.device):
            return function(x, *rest, **options)

    return launched
