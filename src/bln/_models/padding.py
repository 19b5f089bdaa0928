"""Masks of padded sequences: given around the call of a model, used by the BLN layers inside."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from .._autograd import recomputing

if TYPE_CHECKING:
    from ..layer import BatchLayerNorm


def padding(mask: Tensor) -> AbstractContextManager[None]:
    """Give ``mask`` to the BLN layers that run inside the ``with`` block.

    A layer uses it if it is called without a mask of its own and its input has the mask's shape ``(N, *positions)``,
    apart from features; other layers run without a mask. Hidden entries enter no statistic and come out 0. Transformers
    of torch and Hugging Face, once converted by ``bln.convert``, do this by themselves.

    Args:
        mask: ``(N, *positions)``, boolean, true at real entries.

    Examples:
        >>> import torch, bln
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), bln.BatchLayerNorm(8, channel_dim=-1, per_position=False))
        >>> with bln.padding(torch.tensor([[True, True, True], [True, False, False]])):
        ...     y = net(torch.randn(2, 3, 4))
        >>> y[1, 1:].abs().max().item()
        0.0
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"expected a boolean mask, true at real entries, got {given}; try mask.bool()")
    return _Given(mask)


class _Given(AbstractContextManager[None]):
    """A mask, or ``None``, for the layers that run while it is the innermost; without an owner, the user's."""

    def __init__(self, mask: Tensor | None, owner: nn.Module | None = None) -> None:
        self.mask, self.owner = mask, owner  # the module whose hook gave it

    def __enter__(self) -> None:
        _here.given.append(self)

    def __exit__(self, *_: object) -> None:
        _here.given.pop()

    def mask_for(self, layer: BatchLayerNorm, x: Tensor) -> Tensor | None:
        """The mask, if the layer uses it for this input.

        In ``eval()`` a hook's mask is used only where it changes a statistic. So a converted model keeps its function
        at padded entries too, which convolutions and poolings see.
        """
        if self.mask is None or not (self.owner is None or layer.training or layer.config.uses_batch):
            return None
        features = layer.channel_dim, layer.channel_dim + x.dim()
        fits = list(self.mask.shape) == [size for dim, size in enumerate(x.shape) if dim not in features]
        return self.mask.to(x.device) if fits else None


class _Here(threading.local):
    """The masks given in this thread, the innermost last: a list, since torch.compile cannot trace a ContextVar."""

    def __init__(self) -> None:
        self.given: list[_Given] = []


class _Used:
    """The masks of a layer's forwards that a checkpoint may recompute in backward."""

    def __init__(self) -> None:
        self.graphs: WeakSet[_Given] = WeakSet()  # each lives as long as the graph of its forward
        self.recalled: WeakSet[_Given] = WeakSet()
        self.without_graph: _Given | None = None


_here = _Here()
_used: WeakKeyDictionary[nn.Module, _Used] = WeakKeyDictionary()


def known() -> bool:
    """Whether a mask may be there for a layer that got none."""
    return bool(_here.given) or (not torch.compiler.is_compiling() and bool(_used) and recomputing())


def normalize(layer: BatchLayerNorm, x: Tensor, forward: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
    """Call the layer's ``forward`` with the mask given around it, if that fits."""
    given = _here.given[-1] if _here.given else None
    again = recomputing()
    if again and (given is None or given.owner is None):
        given = _recall(layer) or given
    mask = None if given is None else given.mask_for(layer, x)
    y = forward(x, mask)
    if given is not None and mask is not None and layer.training and not (again or torch.compiler.is_compiling()):
        _remember(layer, given, y)
    return y


# ---- activation checkpointing, which repeats a forward outside the block that gave the mask


def _remember(layer: BatchLayerNorm, given: _Given, y: Tensor) -> None:
    """Keep a mask as long as the graph of this forward."""
    used = _used.setdefault(layer, _Used())
    used.graphs -= used.recalled
    if y.grad_fn is None:  # as in the first forward of a reentrant checkpoint
        used.without_graph = given
    else:
        used.graphs.add(given)
        y.grad_fn.metadata["bln.padding"] = given  # type: ignore[index]  # a dict, whatever its stub says


def _recall(layer: BatchLayerNorm) -> _Given | None:
    """The mask of the forward that is recomputed."""
    used = _used.get(layer)
    if used is None:
        return None
    found: list[_Given | None] = list(used.graphs) or [used.without_graph]
    masks = [given.mask for given in found if given is not None and given.mask is not None]
    if not all(torch.equal(mask, masks[0]) for mask in masks[1:]):
        raise RuntimeError(
            "activation checkpointing recomputes a BatchLayerNorm that got several padding masks since the last "
            "backward, and does not say which one belongs here. Ways out: (1) backward after each forward; (2) pass "
            "the mask to the layer, layer(x, mask)"
        )
    used.recalled.update(used.graphs)
    return found[0]


# ---- hooks that pass on the mask a model is called with

_PADDED = ("src_key_padding_mask", "tgt_key_padding_mask")
"""Arguments of torch's transformers, true (or minus infinity) where a sequence is padded."""


def install(model: nn.Module) -> None:
    """Add hooks to each part of ``model`` that takes a padding mask; they pass it to the BLN layers inside."""
    from .calibrate import layers  # which imports this module

    found = set(layers(model).values())
    modules = [m for m in model.modules() if layers(m) and m not in found]
    pretrained = [m for m in modules if hasattr(m, "config") and hasattr(m, "get_input_embeddings")]
    hooked: dict[nn.Module, str] = {}
    if any("attention_mask" in _arguments(m) for m in pretrained):
        hooked |= dict.fromkeys(pretrained, "attention_mask")  # one without the argument: a mask around is not its own
    for module in modules:
        names = [name for name in _PADDED if name in _arguments(module)]
        first = all(getattr(part, "batch_first", True) for part in module.modules())
        if len(names) == 1 and first:  # with both, as nn.Transformer, its parts are called with one each
            hooked[module] = names[0]
    inside = {part for module in hooked for part in module.modules()}
    # A BatchNorm took padding for data before, too; a norm over the features of each position did not.
    outside = [name for name, layer in layers(model).items() if layer not in inside and layer.channel_dim == -1]
    if outside:  # attention that is called with a mask shows that their inputs are padded
        attention = (m for m in model.modules() if isinstance(m, nn.MultiheadAttention) and m.batch_first)
        hooked |= dict.fromkeys((m for m in attention if m not in inside), "key_padding_mask")
    for module, name in hooked.items():
        if not any(hook is _leave for hook in module._forward_hooks.values()):
            arguments = _arguments(module)
            at = arguments.index(name) if name in arguments else len(arguments)
            module.register_forward_pre_hook(partial(_enter, name=name, at=at, outside=outside), with_kwargs=True)
            module.register_forward_hook(_leave, always_call=True)


def _arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def listed(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _enter(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, at: int, outside: list[str]
) -> None:
    """Give the layers of ``module`` its mask, or else the user's mask, but not one for a module around it."""
    mask = args[at] if at < len(args) else kwargs.get(name)
    if isinstance(mask, Tensor) and mask.dim() <= 2:
        if not (torch.compiler.is_compiling() or _here.given) and outside and module.training:
            warnings.warn(
                f"{type(module).__name__} was called with a padding mask, which BLN layers outside of it do not get: "
                f"{listed(outside)}. Where their inputs are padded, padding enters their batch statistics. Call the "
                "model inside of `with bln.padding(mask):`, mask being true at real entries",
                stacklevel=2,
            )
            outside.clear()  # it is said once
        hidden = name != "attention_mask"
        mask = mask != (-torch.inf if hidden and mask.is_floating_point() else int(hidden))
        _here.given.append(_Given(mask, module))
    elif _here.given and _here.given[-1].owner is not None:
        _here.given.append(_Given(None, module))


def _leave(module: nn.Module, *_: Any) -> None:
    if _here.given and _here.given[-1].owner is module:
        _here.given.pop()
