"""Give a model BLN layers in place of its norms."""

from __future__ import annotations

import math
import re
import warnings
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .layer import BatchLayerNorm
from .model import HOOKS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (*_BATCH_NORMS, *_INSTANCE_NORMS, nn.LayerNorm, nn.GroupNorm)


def convert(
    model: nn.Module,
    *,
    per_position: bool = False,
    process_group: ProcessGroup | Literal["world"] | None = None,
) -> nn.Module:
    """Replace BatchNorm, LayerNorm, GroupNorm and InstanceNorm layers by BLN, in place.

    The function is kept where BLN can express it, so a pretrained net gives the same outputs in ``eval()`` up to
    rounding: a BatchNorm hands over its running statistics and starts at ``1/m = 0``, a LayerNorm at ``1/m = 1``, both
    with ``mix_eps=0``, so that the other half has no weight. Training then moves ``1/m`` to the truth. Parameters are
    the same objects as before, so an optimizer keeps working. Where ``momentum`` is ``None``, each mini-batch that a
    BatchNorm has seen counts as one of 32 samples, since it does not say how many there were. Samples must come first,
    as ever with BLN: build transformers with ``batch_first=True``.

    GroupNorm and InstanceNorm (without running statistics) normalize each sample over positions, which BLN does
    not: they are replaced too, but their function changes until the net is trained. A warning names those, the layers
    that look like norms and could not be converted, subclasses of norms among them, norms whose hooks are gone, and a
    module that takes samples second; and says so if there is nothing to convert.

    With ``process_group`` all BLN layers are synchronized over its ranks: those made here, and those that were there,
    which keep statistics, parameters and configuration.

    Args:
        model: Any module. If it is itself a norm, use what is returned.
        per_position: As in ``BatchLayerNorm``. The default pools batch statistics over positions, as BatchNorm
            does; converted layers never divide by the root of the number of features (``dim_scale=False``).
        process_group: As in ``BatchLayerNorm``. ``None`` leaves BLN layers as they are, and gives those made of a
            ``SyncBatchNorm`` its group.

    Returns:
        The model.

    Examples:
        >>> import bln
        >>> from torch import nn
        >>> bln.convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): BatchLayerNorm(8, per_position=False, config=TTFF, eps=1e-05, mix_eps=0.0, dim_scale=False)
          (2): ReLU()
        )
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch module, got {type(model).__name__}")
    replacements: dict[nn.Module, BatchLayerNorm] = {}
    notes: list[str] = []
    like = next(chain(model.parameters(), model.buffers()), torch.empty(0))
    for path, module in model.named_modules():
        name, kind = path or "the model", type(module)
        if isinstance(module, BatchLayerNorm):
            continue
        if kind in _NORMS and not all(p is None or isinstance(p, nn.Parameter) for p in (module.weight, module.bias)):
            notes.append(f"{name}: left as it is, its weight or bias is computed, as by pruning; make that permanent")
        elif kind in _BATCH_NORMS:
            replacements[module] = _from_batch_norm(module, like, per_position)
            if kind is nn.SyncBatchNorm:
                replacements[module].process_group = module.process_group or "world"
            if per_position and module.running_mean is None:
                notes.append(f"{name}: its function changes, {module} pooled a mini-batch over positions; train it")
        elif kind in _INSTANCE_NORMS and module.running_mean is not None:
            replacements[module] = _from_batch_norm(module, like, per_position)
        elif kind is nn.LayerNorm and len(module.normalized_shape) == 1:
            replacements[module] = _from_layer_norm(module, like, per_position)
        elif kind is nn.GroupNorm or kind in _INSTANCE_NORMS:
            features = module.num_channels if kind is nn.GroupNorm else module.num_features
            replacements[module] = _like(module, like, features, per_position=per_position)
            notes.append(f"{name}: its function changes, {module} normalized each sample over positions; train it")
        elif kind is nn.LayerNorm:
            notes.append(f"{name}: left as it is, {module} spans more than the last axis")
        elif isinstance(module, _NORMS) or re.search(r"Norm(\dd)?$", kind.__name__):
            notes.append(f"{name}: left as it is, there is no rule for {kind.__name__}")
        if module in replacements and any(getattr(module, hooks) for hooks in HOOKS):
            notes.append(f"{name}: its hooks stay with the {kind.__name__} that was there; register them anew")
    if any(type(module) is nn.LayerNorm for module in replacements):
        notes += _samples_second(model)

    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                setattr(parent, name, replacements[child])
    converted = replacements.get(model, model)
    if not (notes or any(isinstance(module, BatchLayerNorm) for module in converted.modules())):
        notes.append(
            f"{type(model).__name__} has no norms, and is as it was; bln.insert(model, example) puts BLN behind its "
            "nonlinearities"
        )
    for module in converted.modules():
        _leave_fast_path(module)
        if isinstance(module, BatchLayerNorm) and process_group is not None:
            module.process_group = process_group
    if notes:
        warnings.warn("bln.convert:\n  " + "\n  ".join(notes), stacklevel=2)
    return converted


def _like(norm: Any, like: Tensor, num_features: int, **kwargs: Any) -> BatchLayerNorm:
    """A BLN layer with the old norm's parameters, eps and mode; where it has no tensor, as the model's first."""
    own = (t for t in (norm.weight, getattr(norm, "running_mean", None)) if t is not None)
    tensor = next(own, like if like.is_floating_point() else torch.empty(0, device=like.device))
    layer = BatchLayerNorm(
        num_features,
        eps=norm.eps,
        mix_eps=0.0,
        affine=norm.weight is not None,
        bias=norm.bias is not None,
        dim_scale=False,
        device=tensor.device,
        dtype=tensor.dtype,
        **kwargs,
    )
    layer.weight, layer.bias = norm.weight, norm.bias
    return layer.train(norm.training)


@torch.no_grad()
def _from_batch_norm(norm: Any, like: Tensor, per_position: bool) -> BatchLayerNorm:
    """Running statistics become the population's, and ``1/m = 0`` gives them all the weight.

    The next mini-batch weighs ``momentum`` against them, as it did before: nothing if that is 0. If it is ``None``,
    they are the average of so many mini-batches, whose sizes nobody wrote down: they are taken to be of 32 samples.
    """
    momentum = norm.momentum
    if isinstance(norm, _INSTANCE_NORMS):
        momentum = momentum or 0.0  # as torch takes None there
    layer = _like(norm, like, norm.num_features, per_position=per_position, momentum=momentum)
    forgotten = math.ceil(1 / max(momentum or 0.0, 2**-50))  # after so many mini-batches
    layer.population.mark_seen(["inverse_m"], forgotten if momentum else 1)
    if norm.running_mean is None:
        layer.config = "FFFF"
        return layer
    layer.population.batch_mean.copy_(norm.running_mean)
    layer.population.batch_var.copy_(norm.running_var)
    updates, m = (norm.num_batches_tracked, 32) if momentum is None else (forgotten, 1)
    layer.population.mark_seen(["batch_mean", "batch_var"], updates, m)
    return layer


@torch.no_grad()
def _from_layer_norm(norm: nn.LayerNorm, like: Tensor, per_position: bool) -> BatchLayerNorm:
    """``1/m = 1`` gives all the weight to each sample's own feature statistics."""
    layer = _like(norm, like, norm.normalized_shape[0], channel_dim=-1, per_position=per_position)
    layer.population.inverse_m.fill_(1)
    layer.population.mark_seen(["inverse_m"], 1)
    return layer


def _samples_second(model: nn.Module) -> list[str]:
    """A note on the first module whose inputs have samples in the second dimension, if there is one."""
    for name, module in model.named_modules():
        attention = getattr(module, "self_attn", module)  # which a transformer's layer asks
        if getattr(attention, "batch_first", None) is False:
            return [
                f"{name or 'the model'}: {type(module).__name__} has batch_first=False, but BLN takes the first "
                "dimension for samples; build the model with batch_first=True"
            ]
    return []


def _leave_fast_path(module: nn.Module) -> None:
    """Keep a transformer from computing its fused layer norm in place of ours: it asks for weights, not for types."""
    if isinstance(module, nn.TransformerEncoderLayer) and isinstance(module.norm1, BatchLayerNorm):
        module.activation_relu_or_gelu = 0
    if isinstance(module, nn.TransformerEncoder) and any(
        isinstance(getattr(layer, "norm1", None), BatchLayerNorm) for layer in module.layers
    ):
        module.use_nested_tensor = False
