"""Copy BLN layers between torch, Keras and Flax: weights, statistics, counters and configuration, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._frameworks import framework
from ._spec import Spec
from .config import StatisticsConfig
from .population import expand


class State(NamedTuple):
    """What a layer of any framework holds, features last."""

    tensors: dict[str, Tensor]  # scale (gamma) and shift (beta), if there are, and the buffers of a population
    positions: tuple[int, ...] | None  # None while they are unknown
    config: StatisticsConfig
    spec: Spec


def transfer(source: Any, target: Any, names: Mapping[str, str] | None = None) -> dict[str, str]:
    """Copy all that the BLN layers of ``source`` hold to those of ``target``, whichever frameworks they are made of.

    Weights, population statistics, counters and the configuration are copied bit for bit, after all is checked. Other
    layers are not touched, nor is an ``activation`` of a torch layer: elsewhere it is a layer of its own.

    Args:
        source: A BLN layer or a model with BLN layers, of torch, Keras or Flax NNX.
        target: The same in any of the three. Layers correspond in order: that of ``named_modules`` in torch, of
            ``model.layers`` in Keras. Flax forgets the order of attributes; there it is that of names, numbers as
            numbers, and layers that could be mistaken for each other are an error without ``names``.
        names: Which layer goes where: the target's name for each of the source's, as ``layers(model)`` gives them.

    Returns:
        The target's name for each of the source's.

    Raises:
        ValueError: A value that the target's type cannot hold; layers that differ in number, shape, parameters or
            options, so that they would compute something else. ``momentum`` may differ.

    Examples:
        >>> import torch, bln
        >>> a, b = bln.BatchLayerNorm(4), bln.BatchLayerNorm(4, channel_dim=-1)
        >>> y = a(torch.randn(8, 4, 5))
        >>> bln.transfer(a, b)
        {'': ''}
        >>> torch.equal(a.population.batch_mean, b.population.batch_mean)
        True
    """
    sources, targets = framework(source).layers(source), framework(target).layers(target)
    pairs = _pairs(sources, targets, names)
    fitted: dict[str, State] = {}
    problems = []
    for name, other in pairs.items():
        fitted[other], wrong = _fit(read(sources[name]), read(targets[other]))
        problems += [f"{name!r} to {other!r}: {text}" for text in wrong]
    if problems:
        hint = "" if names is not None or len(pairs) == 1 else "; if layers were paired wrongly, pass names="
        raise ValueError(f"cannot transfer, nothing was changed. {'; '.join(problems)}{hint}")
    for other, state in fitted.items():
        write(targets[other], state)
    return pairs


def _pairs(sources: dict[str, Any], targets: dict[str, Any], names: Mapping[str, str] | None) -> dict[str, str]:
    """Return the target's name for each of the source's."""
    if names is None:
        if not sources or len(sources) != len(targets):
            raise ValueError(
                f"the source has {len(sources)} BLN layers {list(sources)}, the target {len(targets)} {list(targets)}; "
                "they must correspond. For some of them pass names="
            )
        for layers in (sources, targets):
            if _ambiguous(layers):
                raise ValueError(
                    f"the BLN layers {list(layers)} of a Flax module come in the order of their names, which need not "
                    "be that of the model, and some have the same shape. Pass names=, the target's name for each of "
                    "the source's"
                )
        return dict(zip(sources, targets, strict=True))
    for wanted, layers, side in ((names.keys(), sources, "source"), (names.values(), targets, "target")):
        if unknown := [name for name in wanted if name not in layers]:
            raise ValueError(f"the {side} has no BLN layers {unknown}; it has {list(layers)}")
    if not names or len(set(names.values())) < len(names):
        raise ValueError(f"names= must give each layer a target of its own, got {dict(names)}")
    return dict(names)


def _ambiguous(layers: dict[str, Any]) -> bool:
    """Whether there are Flax layers of one shape whose names differ in more than numbers."""
    kinds = {
        (re.sub(r"\d", "", name), layer.batch_mean.shape)
        for name, layer in layers.items()
        if type(layer).__module__ == "bln.flax"
    }
    return len(kinds) > len({shape for _, shape in kinds})


def _fit(source: State, target: State) -> tuple[State, list[str]]:
    """Return the source's state in the shapes and types of the target, and what does not fit."""
    known = source.positions if target.positions is None else target.positions
    facts: list[tuple[str, Any, Any]] = list(zip(Spec._fields, source.spec, target.spec, strict=True))
    if source.spec == target.spec:  # else shapes need not correspond
        facts.append(("positions", known if source.positions is None else source.positions, known))
        facts += [(name, name in source.tensors, name in target.tensors) for name in ("scale", "shift")]
        here, there = (state.tensors["batch_mean"].shape[-1] for state in (source, target))
        facts.append(("features", here, there))
    problems = [f"{name}={here} in the source, {there} in the target" for name, here, there in facts if here != there]
    if problems:
        return source, problems
    tensors = {}
    for name, value in source.tensors.items():
        other = target.tensors[name]
        fitted = value.to(other.dtype)
        if not torch.equal(*(torch.nan_to_num(t) for t in (fitted.to(value.dtype), value))):
            problems.append(f"{name} does not fit into the target's {str(other.dtype).removeprefix('torch.')}")
        # Only a source that does not know its positions yet has other shapes.
        tensors[name] = fitted if target.positions is None else expand(fitted, name, tuple(other.shape))
    return source._replace(tensors=tensors, positions=known), problems


# ---- reading and writing layers


def read(layer: Any) -> State:
    """Return the state of a layer, copied to the CPU."""
    if hasattr(layer, "population"):  # of torch
        held = {"scale": layer.weight, "shift": layer.bias, **dict(layer.population.named_buffers())}
        tensors = {name: t.detach().cpu().clone() for name, t in held.items() if t is not None}
        return State(tensors, layer.population.position_shape, layer.config, layer.spec)
    if not layer.built:
        raise ValueError(f"{layer!r} is not built; call it on a batch, or build its model, before")
    tensors = {name: _tensor(layer._numpy(variable)) for name, variable in layer._variables().items()}
    return State(tensors, layer._positions, layer.config, layer.spec)


@torch.no_grad()
def write(layer: Any, state: State) -> None:
    """Write a state that fits to a layer."""
    values, pooled = dict(state.tensors), state.positions == ()
    if hasattr(layer, "population"):
        for name, parameter in (("scale", layer.weight), ("shift", layer.bias)):
            if parameter is not None:
                parameter.copy_(values.pop(name))
        device = layer.population.batch_mean.device
        layer.population.restore((pooled, {name: value.to(device) for name, value in values.items()}))
    else:  # through NumPy, which lacks bfloat16
        arrays = {name: (v.float() if v.dtype is torch.bfloat16 else v).numpy() for name, v in values.items()}
        layer._restore((pooled, arrays))
    layer.config = state.config


def _tensor(array: Any) -> Tensor:
    """Return a copy of a NumPy array; torch does not read its bfloat16."""
    name = str(array.dtype)
    return torch.tensor(array.astype("float32") if name == "bfloat16" else array).to(getattr(torch, name))
