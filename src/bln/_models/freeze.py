"""Prepare a model for deployment: fold layers that have become a fixed map into their neighbours."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import torch
from torch import nn

from .._activation import MODULES
from ..layer import BatchLayerNorm
from ..population import STATISTICS
from .affine import as_affine, fixed_map
from .layers import hooked, required_layers, swap
from .neighbours import TRANSPOSED, Fold, Neighbours, watch
from .run import difference, run_example, unwrapped


@dataclass(frozen=True)
class FreezeReport:
    """The result for each BLN layer, by name; prints as a list."""

    folded: dict[str, str] = field(default_factory=dict)
    """Layers that were removed, and the layer that each was folded into."""
    kept: dict[str, str] = field(default_factory=dict)
    """Layers that became one multiply-add, a ``bln.Affine``, and why they could not be folded."""
    left: dict[str, str] = field(default_factory=dict)
    """Layers that are still BLN, and why."""
    difference: float | None = None
    """How far the example's outputs moved, relative to their largest value; ``None`` without an example."""

    def __str__(self) -> str:
        groups = {"folded": self.folded, "kept": self.kept, "left": self.left}
        lines = [
            f"bln.freeze: {len(self.folded)} folded away, {len(self.kept)} kept as one multiply-add, "
            f"{len(self.left)} left as they are"
        ]
        width = max((len(name) for group in groups.values() for name in group), default=0)
        for what, group in groups.items():
            lines += [f"  {what:6}  {name or 'the model':{width}}  {why}" for name, why in group.items()]
        if self.difference is not None:
            lines.append(f"  outputs of the example moved by {self.difference:.1g} of their largest value")
        return "\n".join(lines)


@overload
def freeze(model: nn.Module, example: Any = ..., *, report: Literal[False] = ...) -> nn.Module: ...
@overload
def freeze(model: nn.Module, example: Any = ..., *, report: Literal[True]) -> tuple[nn.Module, FreezeReport]: ...
def freeze(
    model: nn.Module, example: Any = None, *, report: bool = False
) -> nn.Module | tuple[nn.Module, FreezeReport]:
    """Put the model into ``eval()`` and replace its ``TTTT`` layers by what they then compute: a fixed scale and shift.

    With all four statistics from the population, BLN is ``y = scale * x + shift`` for each position and feature. Where
    that is exact, it is folded into the layer before or after: ``nn.Linear``, a convolution, or a linear layer after a
    flatten. Elsewhere it becomes one operation, ``bln.Affine``, which keeps the layer's activation. Layers with another
    configuration are left as they are. Outputs stay the same up to rounding.

    Nothing is folded across a nonlinearity or other operations. A layer that is used twice, shares weights, has hooks,
    parametrizations or less than float32 precision absorbs nothing (freeze first, then ``.half()``). A convolution
    that pads with zeros absorbs no shift. Neighbours are found by ``torch.fx``, outside of modules with hooks.

    The model is changed in place and is for inference from then on: ``train()`` brings back dropout, but no mini-batch
    statistics. Save the state dict before freezing, and freeze after loading. Call it as a whole: a part that is called
    by itself may give other results.

    Args:
        model: A trained model with BLN layers, compiled or wrapped or not. If it is itself one, use what is returned.
        example: An input, a tuple of inputs or a dict of arguments, run through the model before and after. It shows
            what ``torch.fx`` cannot: the rank of inputs, which optional arguments are given, and the parts that are
            called by a model that cannot be traced as a whole. Other calls are then not considered.
        report: Return ``(model, report)``; the report has the result for each layer.

    Returns:
        The model, and the ``FreezeReport`` if asked for.

    Examples:
        >>> import torch, bln
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), bln.BatchLayerNorm(8, config="TTTT"), nn.Linear(8, 2))
        >>> _ = net(torch.randn(16, 4))
        >>> net, report = bln.freeze(net, report=True)
        >>> print(report)
        bln.freeze: 1 folded away, 0 kept as one multiply-add, 0 left as they are
          folded  2  into 3
    """
    layers, wrapper, model = required_layers(model), model.eval(), unwrapped(model)
    calls, before = (None, None) if example is None else watch(model, example)
    done, replacements, folds = FreezeReport(), dict[nn.Module, nn.Module](), list[Fold]()
    with torch.inference_mode(False), torch.no_grad():
        neighbours = Neighbours(model, calls)
        for name, layer in layers.items():
            if why := _not_fixed(layer):
                done.left[name] = why
                continue
            values = fixed_map(layer)
            fold = neighbours.find(layer, values)
            if isinstance(fold, str):
                replacements[layer], done.kept[name] = as_affine(layer, values), fold
            else:
                replacements[layer] = nn.Identity() if layer.activation is None else MODULES[layer.activation]()
                done.folded[name] = f"into {neighbours.names[fold.module]}"
                folds.append(fold)
        for fold in folds:  # only now, when all is decided
            _fold_in(fold)
    swap(model, replacements)
    frozen = replacements.get(model, model).eval()

    if not replacements:
        reasons = "".join(f"\n  {name or 'the model'}: {why}" for name, why in done.left.items())
        warnings.warn(f"bln.freeze: every layer is left as it is:{reasons}", stacklevel=2)
    if before is not None:
        done = replace(done, difference=difference(before, run_example(frozen, example)))
    frozen = wrapper if frozen is model else frozen
    return (frozen, done) if report else frozen


def _not_fixed(layer: BatchLayerNorm) -> str | None:
    """Return why a layer does not compute a fixed scale and shift; ``None`` if it does."""
    if type(layer) is not BatchLayerNorm or "forward" in vars(layer):
        return f"{type(layer).__name__} may compute something else than BatchLayerNorm"
    if hooked(layer):
        return "it has hooks"
    if str(layer.config) != "TTTT":
        return f"{layer.config} looks at the current input; with TTTT alone it is a fixed map"
    if not (layer.population.updates[STATISTICS.index("inverse_m")] > 0).all():
        return "it has not been trained or calibrated yet, at some position: m would be that of each input"
    return None


def _fold_in(fold: Fold) -> None:
    """Fold a map into a module, in float64. Its parameters become new objects: older references keep the old values."""
    module: Any = fold.module
    weight, bias, groups = module.weight, module.bias, getattr(module, "groups", 1)
    scale, shift = fold.values.to(weight.device)
    # (groups, outputs, inputs, taps); a transposed convolution has inputs first
    taps = weight.double().reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    taps = taps.transpose(1, 2) if isinstance(module, TRANSPOSED) else taps
    new_bias = torch.zeros_like(taps[:, :, 0, 0]).flatten() if bias is None else bias.double()
    if fold.side == "before":
        taps = taps * scale.reshape(groups, -1, 1, 1)
        new_bias = scale * new_bias + shift
    else:
        new_bias = new_bias + (taps.sum(-1) @ shift.reshape(groups, -1, 1)).flatten()
        taps = taps * scale.reshape(groups, 1, -1, 1)
    taps = (taps.transpose(1, 2) if isinstance(module, TRANSPOSED) else taps).reshape(weight.shape)
    module.weight = nn.Parameter(torch.empty_like(weight).copy_(taps), requires_grad=weight.requires_grad)
    if bias is not None or new_bias.any():
        like = weight if bias is None else bias
        module.bias = nn.Parameter(new_bias.to(like.dtype), requires_grad=like.requires_grad)
