"""Pass the mask of padded sequences to the BLN layers inside a model: ``bln.padding``, and hooks of transformers."""

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
from .._masks import not_a_mask

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
        raise not_a_mask(mask)
    return _Block(mask)


class _Block(AbstractContextManager[None]):
    """A block whose layers use this mask, or none. Its owner is the module whose hook opened it; ``None``, the user."""

    def __init__(self, mask: Tensor | None, owner: nn.Module | None = None) -> None:
        self.mask, self.owner = mask, owner

    def __enter__(self) -> None:
        _active.blocks.append(self)

    def __exit__(self, *_: object) -> None:
        _active.blocks.pop()

    def mask_for(self, layer: BatchLayerNorm, x: Tensor) -> Tensor | None:
        """Return the mask, if the layer uses it for this input.

        In ``eval()`` a hook's mask is used only where it changes a statistic. So a converted model keeps its function
        at padded entries too, which convolutions and poolings see.
        """
        if self.mask is None or not (self.owner is None or layer.training or layer.config.uses_batch):
            return None
        features = layer.channel_dim, layer.channel_dim + x.dim()
        fits = list(self.mask.shape) == [size for dim, size in enumerate(x.shape) if dim not in features]
        return self.mask.to(x.device) if fits else None


class _Active(threading.local):
    """The blocks that this thread is in, the innermost last: a list, since torch.compile cannot trace a ContextVar."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []


class _Forwards:
    """The blocks in which a layer ran forward; a checkpoint may recompute them in backward."""

    def __init__(self) -> None:
        self.with_graph: WeakSet[_Block] = WeakSet()  # each lives as long as the graph of its forward
        self.recalled: WeakSet[_Block] = WeakSet()
        self.without_graph: _Block | None = None


_active = _Active()
_forwards: WeakKeyDictionary[nn.Module, _Forwards] = WeakKeyDictionary()


def is_active() -> bool:
    """Whether a block may have a mask for a layer that was called without one."""
    return bool(_active.blocks) or (not torch.compiler.is_compiling() and bool(_forwards) and recomputing())


def call_with_mask(layer: BatchLayerNorm, x: Tensor, forward: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
    """Call the layer's ``forward`` with the mask of the innermost block, if that fits."""
    block = _active.blocks[-1] if _active.blocks else None
    again = recomputing()
    if again and (block is None or block.owner is None):
        block = _recomputed_block(layer) or block
    mask = None if block is None else block.mask_for(layer, x)
    y = forward(x, mask)
    if block is not None and mask is not None and layer.training and not (again or torch.compiler.is_compiling()):
        _store_block(layer, block, y)
    return y


# ---- activation checkpointing, which repeats a forward outside the block that gave the mask


def _store_block(layer: BatchLayerNorm, block: _Block, y: Tensor) -> None:
    """Keep a block as long as the graph of this forward."""
    forwards = _forwards.setdefault(layer, _Forwards())
    forwards.with_graph -= forwards.recalled
    if y.grad_fn is None:  # as in the first forward of a reentrant checkpoint
        forwards.without_graph = block
    else:
        forwards.with_graph.add(block)
        y.grad_fn.metadata["bln.padding"] = block  # type: ignore[index]  # a dict, whatever its stub says


def _recomputed_block(layer: BatchLayerNorm) -> _Block | None:
    """Return the block of the forward that is recomputed."""
    forwards = _forwards.get(layer)
    if forwards is None:
        return None
    blocks: list[_Block | None] = list(forwards.with_graph) or [forwards.without_graph]
    masks = [block.mask for block in blocks if block is not None and block.mask is not None]
    if not all(torch.equal(mask, masks[0]) for mask in masks[1:]):
        raise RuntimeError(
            "activation checkpointing recomputes a BatchLayerNorm that got several padding masks since the last "
            "backward, and does not say which one belongs here. Ways out: (1) backward after each forward; (2) pass "
            "the mask to the layer, layer(x, mask)"
        )
    forwards.recalled.update(forwards.with_graph)
    return blocks[0]


# ---- hooks that pass on the mask a model is called with

_PADDED = ("src_key_padding_mask", "tgt_key_padding_mask")
"""Arguments of torch's transformers, true (or minus infinity) where a sequence is padded."""


def install_hooks(model: nn.Module) -> None:
    """Add hooks to each part of ``model`` that takes a padding mask; they pass it to the BLN layers inside."""
    from .layers import layers  # which imports this module

    own = set(layers(model).values())
    modules = [m for m in model.modules() if layers(m) and m not in own]
    pretrained = [m for m in modules if hasattr(m, "config") and hasattr(m, "get_input_embeddings")]
    hooked: dict[nn.Module, str] = {}
    if any("attention_mask" in _arguments(m) for m in pretrained):
        # Also those without the argument: they must not take the mask of the model around them.
        hooked |= dict.fromkeys(pretrained, "attention_mask")
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
    """Open a block with the mask that ``module`` is called with; without one, hide the mask of a module around it."""
    mask = args[at] if at < len(args) else kwargs.get(name)
    if isinstance(mask, Tensor) and mask.dim() <= 2:
        if not (torch.compiler.is_compiling() or _active.blocks) and outside and module.training:
            warnings.warn(
                f"{type(module).__name__} was called with a padding mask, which BLN layers outside of it do not get: "
                f"{listed(outside)}. Where their inputs are padded, padding enters their batch statistics. Call the "
                "model inside of `with bln.padding(mask):`, mask being true at real entries",
                stacklevel=2,
            )
            outside.clear()  # warn once
        hidden = name != "attention_mask"
        mask = mask != (-torch.inf if hidden and mask.is_floating_point() else int(hidden))
        _active.blocks.append(_Block(mask, module))
    elif _active.blocks and _active.blocks[-1].owner is not None:
        _active.blocks.append(_Block(None, module))


def _leave(module: nn.Module, *_: Any) -> None:
    """Close the block that ``_enter`` opened, if it did."""
    if _active.blocks and _active.blocks[-1].owner is module:
        _active.blocks.pop()
