"""The accuracy of a net by request: a forward pass over many requests, each with statistics of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

import bln

from ... import formula
from ..._backends import coefficients, operators
from ...formula import Moments, Statistics
from ...layer import BatchLayerNorm
from .training import standardize

CONFIGURATIONS = {"T": "TTFF", "64": "64 64 F F", "16": "16 16 F F", "4": "4 4 F F", "F": "FFFF"}
"""Batch statistics of the population, shrunk towards it, or of the request; a sample's own feature statistics."""
SIZES = (1, 4, 16, 64, 250)
"""Images in a request."""
ARRANGEMENTS = ("shuffled", "sorted")
_TOGETHER = 64
"""Images that go through a net at a time, in whole requests; the activations of more do not fit the cache."""


def arrange(labels: Tensor, arrangement: str, seed: int) -> Tensor:
    """The order in which images arrive: shuffled, or sorted by label and shuffled within each label."""
    if arrangement not in ARRANGEMENTS:
        raise ValueError(f"an arrangement is shuffled or sorted, got {arrangement!r}")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return order if arrangement == "shuffled" else order[labels[order].argsort(stable=True)]


@torch.no_grad()
def accuracies(
    net: nn.Module, images: Tensor, labels: Tensor, sizes: Sequence[int], configurations: Mapping[str, str]
) -> dict[str, list[float]]:
    """The accuracy in each configuration at each request size; one number where requests do not matter.

    Args:
        net: In ``eval()``; it is left as it was. Without BLN layers it has one accuracy, named ``net``.
        images: In uint8, in the order of arrival. Each request takes the next ones; the last may be smaller.
        labels: Theirs.
        sizes: Images in a request.
        configurations: By the name under which they are returned.
    """
    inputs = standardize(images)
    layers = bln.layers(net)
    if not layers:
        return {"net": [_share(torch.cat([net(part) for part in torch.split(inputs, _TOGETHER)]), labels)]}
    before = {name: layer.config for name, layer in layers.items()}
    found = {}
    try:
        for name, config in configurations.items():
            bln.configure(net, config)
            alone = not any(layer.config.uses_batch for layer in layers.values())
            found[name] = [_share(answers(net, inputs, size), labels) for size in (sizes[:1] if alone else sizes)]
    finally:
        bln.configure(net, before)
    return found


def answers(net: nn.Module, inputs: Tensor, size: int) -> Tensor:
    """Return the net's answers to requests of this size, as if each went through it alone."""
    if not all(map(_is_plain, bln.layers(net).values())):
        return torch.cat([net(request) for request in torch.split(inputs, size)])
    whole = len(inputs) // size * size
    step = max(1, _TOGETHER // size) * size
    outputs = []
    for start in range(0, whole, step):
        with _by_request(net, size):
            outputs.append(net(inputs[start : min(start + step, whole)]))
    if whole < len(inputs):
        outputs.append(net(inputs[whole:]))
    return torch.cat(outputs)


def _is_plain(layer: BatchLayerNorm) -> bool:
    """Whether a layer is of the grouped form with nothing added, so that requests can share a pass."""
    added = layer.activation is not None or layer.memory is not None
    return layer.groups is not None and not layer.per_position and not added


@contextmanager
def _by_request(net: nn.Module, size: int) -> Iterator[None]:
    """Make each BLN layer take batch statistics over every ``size`` samples of its input."""
    layers = bln.layers(net).values()
    try:
        for layer in layers:
            layer.forward = partial(_forward, layer, size)  # type: ignore[method-assign]
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _forward(layer: BatchLayerNorm, size: int, x: Tensor) -> Tensor:
    """The grouped layer's inference, by its coefficient form."""
    assert layer.groups is not None
    rows = x.movedim(1, -1)
    moments = coefficients.measure(rows, None)
    mean, var = (value.reshape(-1, size, value.shape[1]).movedim(1, 0) for value in moments[:2])
    batch = formula.batch_statistics(torch, Moments(mean, var, torch.ones_like(mean[..., :1])))  # (requests, C)
    feature = operators.feature_statistics(rows, moments, layer.groups)
    current = Statistics(*batch, *feature, mean.new_full((), 1 / size))
    s = formula.choose(layer.config, current, layer.population.statistics((), size))
    each = [v.repeat_interleave(size, 0) if v.dim() == 2 else v for v in (s.batch_mean, s.batch_var)]
    s = s._replace(batch_mean=each[0], batch_var=each[1])
    y: Tensor = formula.normalize(torch, rows, s, layer.weight, layer.bias, None, layer.spec)
    return y.movedim(-1, 1)


def _share(outputs: Tensor, labels: Tensor) -> float:
    return float((outputs.argmax(1) == labels).double().mean())
