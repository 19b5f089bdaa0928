"""Replace a model's norms by BLN layers."""

from __future__ import annotations

import warnings
from itertools import chain
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from .._spec import Spec
from ..layer import BatchLayerNorm
from . import padding
from .calibrate import hooked, swap
from .norms import NORMS, bln_layers, build, find_rule, looks_like_a_norm, qualified

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def convert(
    model: nn.Module, *, groups: int = 8, process_group: ProcessGroup | Literal["world"] | None = None
) -> nn.Module:
    """Replace BatchNorm, LayerNorm, GroupNorm and InstanceNorm layers by BLN, in place.

    A pretrained net gives the same outputs in ``eval()`` up to rounding:

    - BatchNorm, and InstanceNorm with running statistics, become the grouped form. It takes over the running statistics
      and starts at ``1/m = 0``.
    - GroupNorm and InstanceNorm become the grouped form with the norm's own groups, at ``1/m = 1``.
    - LayerNorm over the features of each position becomes ``groups=None``, at ``1/m = 1``.

    ``mix_eps`` is 0, so that the other half has no weight; training then moves ``1/m`` to the truth. Parameters stay
    the same objects, so an optimizer keeps working. Where ``momentum`` is ``None``, each mini-batch that a BatchNorm
    has seen is taken to be of 32 samples, since it does not store their number. Samples must come first: build
    transformers with ``batch_first=True``.

    A norm of another class, such as a subclass with an activation, is run on random inputs. It is replaced if BLN
    computes the same, followed by the modules inside the norm: a lone ReLU, SiLU or exact GELU becomes ``activation=``,
    others follow the layer. A warning names the norms that are left and why, norms whose hooks are lost, and a module
    that takes samples second; it also says if there is nothing to convert.

    Parts that are called with ``src_key_padding_mask``, ``tgt_key_padding_mask`` or, in Hugging Face's models,
    ``attention_mask`` get hooks that pass it to the BLN layers inside, see ``bln.padding``: in training padding enters
    no statistic. In ``eval()`` they do so only where a configuration takes batch statistics from the mini-batch.
    Training warns once where such a mask does not reach what was a LayerNorm, as one outside of those parts.

    With ``process_group`` all BLN layers are synchronized over its ranks, new and old; old ones keep statistics,
    parameters and configuration.

    Args:
        model: Any module. If it is itself a norm, use what is returned.
        groups: As in ``BatchLayerNorm``, for each BatchNorm: the largest divisor of its features up to this.
        process_group: As in ``BatchLayerNorm``. ``None`` leaves BLN layers as they are; those made of a
            ``SyncBatchNorm`` get its group.

    Returns:
        The model.

    Examples:
        >>> import bln
        >>> from torch import nn
        >>> bln.convert(nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU()))
        Sequential(
          (0): Conv2d(3, 12, kernel_size=(3, 3), stride=(1, 1))
          (1): BatchLayerNorm(12, groups=6, config=TTFF, eps=1e-05)
          (2): ReLU()
        )
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch module, got {type(model).__name__}")
    if groups is None:
        raise ValueError("groups must be an integer of at least 1, got None; what is made of a BatchNorm has groups")
    Spec.of(groups)
    found, notes = replacements(model, groups)
    swap(model, found)
    converted = found.get(model, model)
    if not (notes or any(bln_layers(converted))):
        notes.append(
            f"{type(model).__name__} has no norms, and is as it was; bln.insert(model, example) puts BLN behind its "
            "nonlinearities"
        )
    for module in converted.modules():
        _leave_fast_path(module)
        if isinstance(module, BatchLayerNorm) and process_group is not None:
            module.process_group = process_group
    padding.install(converted, lambda module: isinstance(module, BatchLayerNorm))
    if notes:
        warnings.warn("bln.convert:\n  " + "\n  ".join(notes), stacklevel=2)
    return converted


def replacements(
    model: nn.Module, groups: int, *, batch_norms: bool = False
) -> tuple[dict[nn.Module, nn.Module], list[str]]:
    """Build the BLN layer for each norm of a model, or for its batch norms alone; add notes on what is left or lost."""
    found: dict[nn.Module, nn.Module] = {}
    notes: list[str] = []
    left: dict[str, list[str]] = {}
    like = next(chain(model.parameters(), model.buffers()), torch.empty(0))
    for path, module in model.named_modules():
        if not looks_like_a_norm(module):
            continue
        name = path or "the model"
        if isinstance(module, NORMS) and not module.eps > 0:
            raise ValueError(
                f"{name}: {qualified(module)} has eps={module.eps}, which BLN cannot take over: it must be positive, "
                "as it keeps a constant feature from 0/0. Set one before, as in norm.eps = 1e-5"
            )
        rule = find_rule(module, groups)
        if isinstance(rule, str):
            left.setdefault(f"left as it is, {qualified(module)}: {rule}", []).append(name)
            continue
        if batch_norms and rule.kind != "batch":
            continue
        found[module] = build(module, rule, like)
        if hooked(module):
            notes.append(f"{name}: its hooks stay with the {type(module).__name__} that was there; register them anew")
    for reason, names in left.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        notes.append(f"{', '.join(names[:3])}{more}: {reason}")
    if any(layer.channel_dim == -1 for new in found.values() for layer in bln_layers(new)):
        notes += _samples_second(model)
    return found, notes


def _samples_second(model: nn.Module) -> list[str]:
    """A note on the first module whose inputs have samples in the second dimension."""
    for name, module in model.named_modules():
        attention = getattr(module, "self_attn", module)  # which a transformer's layer asks
        if getattr(attention, "batch_first", None) is False:
            return [
                f"{name or 'the model'}: {type(module).__name__} has batch_first=False, but BLN takes the first "
                "dimension for samples; build the model with batch_first=True"
            ]
    return []


def _leave_fast_path(module: nn.Module) -> None:
    """Keep a transformer from its fused layer norm, which it would run on the weights of ours."""
    if isinstance(module, nn.TransformerEncoderLayer) and isinstance(module.norm1, BatchLayerNorm):
        module.activation_relu_or_gelu = 0
    if isinstance(module, nn.TransformerEncoder) and any(
        isinstance(getattr(layer, "norm1", None), BatchLayerNorm) for layer in module.layers
    ):
        module.use_nested_tensor = False
