"""Replace a model's norms by BLN layers; load a converted model of Hugging Face transformers."""

from __future__ import annotations

import warnings
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from .._spec import positive
from ..layer import BatchLayerNorm
from . import padding
from .layers import hooked, layers, swap
from .norms import build, find_rule, looks_like_a_norm, qualified_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

M = TypeVar("M", bound=nn.Module)


def convert(
    model: nn.Module, *, groups: int = 8, process_group: ProcessGroup | Literal["world"] | None = None
) -> nn.Module:
    """Replace BatchNorm, LayerNorm, GroupNorm and InstanceNorm layers by BLN, in place.

    A pretrained net gives the same outputs in ``eval()`` up to rounding:

    - BatchNorm, and InstanceNorm with running statistics, become the grouped form. It takes over the running statistics
      and starts at ``1/m = 0``.
    - GroupNorm and InstanceNorm become the grouped form with the norm's own groups, at ``1/m = 1``.
    - LayerNorm over the features of each position becomes ``groups=None``, at ``1/m = 1``.
    - A norm of another class is run on random inputs, and replaced if BLN computes the same. A ReLU, SiLU or exact
      GELU inside becomes ``activation=``; other modules inside follow the layer.

    ``mix_eps`` is 0, so that the other half has no weight; training then moves ``1/m`` to the truth. Parameters stay
    the same objects, so an optimizer keeps working. Samples must come first: build transformers with
    ``batch_first=True``. A warning names the norms that are left and why, and norms whose hooks are lost.

    Parts that are called with ``src_key_padding_mask``, ``tgt_key_padding_mask`` or, in Hugging Face's models,
    ``attention_mask`` get hooks that pass it to the BLN layers inside, see ``bln.padding``: in training padding enters
    no statistic. In ``eval()`` they do so only where a configuration takes batch statistics from the mini-batch.

    Args:
        model: Any module. If it is itself a norm, use what is returned.
        groups: As in ``BatchLayerNorm``, for each BatchNorm: the largest divisor of its features up to this.
        process_group: As in ``BatchLayerNorm``, for all BLN layers, new and old. With ``None``, those made of a
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
    positive("groups must be", groups)
    new_layers, notes = replacements(model, groups)
    swap(model, new_layers)
    converted = new_layers.get(model, model)
    if not (notes or layers(converted)):
        notes.append(
            f"{type(model).__name__} has no norms and was not changed; bln.insert(model, example) adds BLN after its "
            "nonlinearities"
        )
    for module in converted.modules():  # torch's fused encoder would run its own layer norm on the weights of ours
        if isinstance(module, nn.TransformerEncoderLayer) and isinstance(module.norm1, BatchLayerNorm):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and layers(module):
            module.use_nested_tensor = False
        elif isinstance(module, BatchLayerNorm) and process_group is not None:
            module.process_group = process_group
    padding.install_hooks(converted)
    if notes:
        warnings.warn("bln.convert:\n  " + "\n  ".join(notes), stacklevel=2)
    return converted


def replacements(
    model: nn.Module, groups: int, *, batch_norms: bool = False
) -> tuple[dict[nn.Module, nn.Module], list[str]]:
    """Build the BLN layer for each norm of a model, or for its batch norms alone; add notes on what is left or lost."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch module, got {type(model).__name__}")
    new_layers: dict[nn.Module, nn.Module] = {}
    notes, left = list[str](), dict[str, list[str]]()
    like = next(chain(model.parameters(), model.buffers()), torch.empty(0))
    for path, module in model.named_modules():
        if not looks_like_a_norm(module):
            continue
        name = path or "the model"
        rule = find_rule(module, groups)
        if isinstance(rule, str):
            left.setdefault(f"left as it is, {qualified_name(module)}: {rule}", []).append(name)
        elif rule.kind == "batch" or not batch_norms:
            new_layers[module] = build(module, rule, like)
            if hooked(module):
                notes.append(f"{name}: its hooks stay with the old {type(module).__name__}; register them anew")
    notes += [f"{padding.listed(names)}: {reason}" for reason, names in left.items()]
    second = [name for name, part in model.named_modules() if getattr(part, "batch_first", None) is False]
    if second and any(layer.channel_dim == -1 for module in new_layers.values() for layer in layers(module).values()):
        notes.append(
            f"{second[0] or 'the model'} has batch_first=False, but BLN takes the first dimension for samples; build "
            "the model with batch_first=True"
        )
    return new_layers, notes


def load_pretrained(kind: type[M], *args: Any, groups: int = 8, **kwargs: Any) -> M:
    """Load what a model converted by ``bln.convert`` saved with ``save_pretrained``.

    ``kind.from_pretrained`` builds the model with its original norms and drops the statistics of BLN. This function
    converts first and then loads, configurations included; missing, unexpected or mismatched keys are refused.

    Args:
        kind: The model's class, such as ``transformers.BertForSequenceClassification``.
        *args: Passed on to ``from_pretrained``: first of all the folder, or the name on the hub.
        groups: As it was given to ``bln.convert``.
        **kwargs: Passed on likewise.

    Returns:
        The model, in ``eval()``. Set again what a state dict does not hold, such as another ``momentum``.

    Examples:
        Needs ``pip install ".[transformers]"``::

            model = bln.convert(BertForSequenceClassification.from_pretrained(name))
            ...                                            # train
            model.save_pretrained("folder")
            model = bln.load_pretrained(BertForSequenceClassification, "folder")
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module) and hasattr(kind, "from_pretrained")):
        raise TypeError(
            f"expected a model class with from_pretrained, such as transformers.BertForSequenceClassification, got "
            f"{kind!r}; for one chosen by an Auto class, type(AutoModel.from_config(config)) is the class"
        )

    class Converted(kind):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "bln.convert")  # the first conversion gave them
                convert(self, groups=groups)

    Converted.__name__, Converted.__module__ = kind.__name__, kind.__module__  # both are saved, and looked up
    kwargs["ignore_mismatched_sizes"] = True  # they are refused below, with the ways out
    model, info = Converted.from_pretrained(*args, **kwargs, output_loading_info=True)
    wrong = {what: sorted(map(str, info[what])) for what in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()):
        shown = "; ".join(f"{len(keys)} {what}, first {keys[0]}" for what, keys in wrong.items() if keys)
        raise ValueError(
            f"this is no checkpoint of a {kind.__name__} as bln.convert makes it: {shown}. Ways out: (1) of a model "
            f"with its own norms: bln.convert({kind.__name__}.from_pretrained(...)); (2) converted with other groups "
            f"than {groups}: give groups=; (3) with other BLN layers: build the model as it was, then "
            "load_state_dict(safetensors.torch.load_file(...))"
        )
    model.__class__ = kind
    return model  # type: ignore[no-any-return]
