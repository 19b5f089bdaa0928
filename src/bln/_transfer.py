"""Moving BLN layers between torch, Keras and Flax: weights, statistics, counters and configuration, bit for bit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._frameworks import State, framework
from ._spec import Spec
from .population import spread

if TYPE_CHECKING:
    from .layer import BatchLayerNorm


def transfer(source: Any, target: Any, names: Mapping[str, str] | None = None) -> dict[str, str]:
    """Give the BLN layers of ``target`` all that those of ``source`` hold, whichever frameworks they are made of.

    Weights, population statistics, counters and the configuration are copied bit for bit. Everything is checked before
    anything is written. Other layers are not touched: copy their weights by the means of their frameworks. Nor is an
    ``activation`` of a torch layer: elsewhere it stands behind the layer.

    Args:
        source: A BLN layer or a model with BLN layers, of torch, Keras or Flax NNX.
        target: The same in any of the three. Layers correspond in order: that of ``named_modules`` in torch, of
            ``model.layers`` in Keras. Flax forgets the order of attributes; there it is that of names, numbers as
            numbers, and layers that could be mistaken for each other are an error without ``names``.
        names: Which layer goes where: the target's name for each of the source's, as ``layers(model)`` gives them.

    Returns:
        The target's name for each of the source's.

    Raises:
        ValueError: A value that the target's type cannot hold; layers that differ in number, shape or parameters, or
            in ``groups``, ``per_position``, ``eps``, ``mix_eps`` or ``dim_scale``, so that they would compute
            something else.

    Warns:
        UserWarning: ``momentum`` differs: the target will average otherwise when it is trained on.

    Examples:
        >>> import torch, bln
        >>> a, b = bln.BatchLayerNorm(4), bln.BatchLayerNorm(4, channel_dim=-1)
        >>> y = a(torch.randn(8, 4, 5))
        >>> bln.transfer(a, b)
        {'': ''}
        >>> torch.equal(a.population.batch_mean, b.population.batch_mean)
        True
    """
    ours, theirs = framework(source), framework(target)
    sources, targets = ours.layers(source), theirs.layers(target)
    pairs = _pairs(sources, targets) if names is None else _named_pairs(sources, targets, names)
    states = {name: ours.read(sources[name]) for name in pairs}
    wanted = {name: theirs.read(targets[name]) for name in pairs.values()}
    if names is None and len(pairs) > 1:
        for side, found in ((ours, states), (theirs, wanted)):
            if not side.ordered:
                _refuse_ambiguous(found)
    fitted, problems, momenta = {}, [], []
    for name, other in pairs.items():
        where = f"{name!r} to {other!r}"
        fitted[other], wrong = _fit(states[name], wanted[other])
        problems += [f"{where}: {text}" for text in wrong]
        if not _same_momentum(states[name].momentum, wanted[other].momentum):
            momenta.append(f"{where}: {states[name].momentum}, {wanted[other].momentum}")
    if problems:
        hint = "" if names is not None or len(pairs) == 1 else "; if layers were paired wrongly, pass names="
        raise ValueError(f"cannot transfer, nothing was changed. {'; '.join(problems)}{hint}")
    for other, state in fitted.items():
        theirs.write(targets[other], state)
    if momenta:
        warnings.warn(
            f"momentum (the weight of the new value) of source and target differ: {'; '.join(momenta)}. Predictions "
            "are the same; further training will average statistics otherwise",
            stacklevel=2,
        )
    return pairs


def _pairs(sources: dict[str, Any], targets: dict[str, Any]) -> dict[str, str]:
    if not sources or len(sources) != len(targets):
        raise ValueError(
            f"the source has {len(sources)} BLN layers {list(sources)}, the target {len(targets)} {list(targets)}; "
            "they must correspond. For some of them pass names="
        )
    return dict(zip(sources, targets, strict=True))


def _named_pairs(sources: dict[str, Any], targets: dict[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    for given, found, side in ((names.keys(), sources, "source"), (names.values(), targets, "target")):
        if unknown := [name for name in given if name not in found]:
            raise ValueError(f"the {side} has no BLN layers {unknown}; it has {list(found)}")
    if not names or len(set(names.values())) < len(names):
        raise ValueError(f"names= must give each layer a target of its own, got {dict(names)}")
    return dict(names)


def _refuse_ambiguous(found: dict[str, State]) -> None:
    """Layers in the order of names, where another order would fit as well."""
    seen: dict[Any, str] = {}
    for name, state in found.items():
        mean = state.tensors["batch_mean"]
        assert mean is not None
        unnumbered = "".join(c for c in name if not c.isdigit())
        if seen.setdefault(tuple(mean.shape), unnumbered) != unnumbered:
            raise ValueError(
                f"the BLN layers {list(found)} of a Flax module come in the order of their names, which need not be "
                "that of the model, and some have the same shape. Pass names=, the target's name for each of the "
                "source's"
            )


def _same_momentum(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None else math.isclose(a, b, abs_tol=1e-9)


def _fit(source: State, target: State) -> tuple[State, list[str]]:
    """The source's state in the shapes and types of the target, and what does not fit."""
    problems = [
        f"{name}={value} in the source, {other} in the target"
        for name, value, other in zip(Spec._fields, source.spec, target.spec, strict=True)
        if value != other
    ]
    if problems:  # nor need the shapes correspond
        return source, problems
    known = source.positions if target.positions is None else target.positions
    if source.positions not in (None, known):
        problems.append(f"statistics for positions {source.positions} in the source, {known} in the target")
    tensors: dict[str, Tensor | None] = {}
    for name, value in source.tensors.items():
        other = target.tensors[name]
        if value is None or other is None:
            if value is not other:
                holder = "source" if other is None else "target"
                problems.append(f"only the {holder} has a {name} parameter")
            tensors[name] = None
            continue
        if name in ("scale", "shift", "batch_mean") and value.shape[-1] != other.shape[-1]:
            problems.append(f"{value.shape[-1]} features in the source, {other.shape[-1]} in the target")
            break
        there = value.to(other.dtype)
        if not torch.equal(*(torch.nan_to_num(t) for t in (there.to(value.dtype), value))):
            problems.append(f"{name} does not fit into the target's {str(other.dtype).removeprefix('torch.')}")
        if source.positions is None and known is not None and name not in ("scale", "shift"):
            there = spread(there, name, tuple(other.shape))
        tensors[name] = there
    return source._replace(tensors=tensors, positions=known), problems


# ---- torch


def read(layer: BatchLayerNorm) -> State:
    """Everything of a layer."""
    tensors = {"scale": layer.weight, "shift": layer.bias, **dict(layer.population.named_buffers())}
    return State(
        tensors={name: None if t is None else t.detach().cpu().clone() for name, t in tensors.items()},
        positions=layer.population.position_shape,
        config=layer.config,
        spec=layer.spec,
        momentum=layer.momentum,
    )


@torch.no_grad()
def write(layer: BatchLayerNorm, state: State) -> None:
    """Give a layer the state of another, which fits."""
    values = {name: value for name, value in state.tensors.items() if value is not None}
    for name, parameter in (("scale", layer.weight), ("shift", layer.bias)):
        if parameter is not None:
            parameter.copy_(values.pop(name))
    device = layer.population.batch_mean.device
    layer.population.restore((state.positions == (), {name: value.to(device) for name, value in values.items()}))
    layer.config = state.config
