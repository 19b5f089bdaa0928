"""The accuracy of a net by request: a forward pass over many requests, each with statistics of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import bln

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


def asked_sizes(sizes: Sequence[int], arrangement: str) -> list[int]:
    """Return the request sizes of an arrangement. Requests of one image need no second arrangement."""
    return [size for size in sizes if size > 1 or arrangement == "shuffled"]


@torch.no_grad()
def accuracies(
    net: nn.Module, inputs: Tensor, labels: Tensor, sizes: Sequence[int], configurations: Mapping[str, str]
) -> dict[str, list[float]]:
    """The accuracy in each configuration at each request size; one number where requests do not matter.

    Args:
        net: In ``eval()``; it is left as it was. Without BLN layers it has one accuracy, named ``net``.
        inputs: In the order of arrival. Each request takes the next ones; the last may be smaller.
        labels: Theirs.
        sizes: Images in a request.
        configurations: By the name under which they are returned.
    """
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
    whole = len(inputs) // size * size if size < _TOGETHER else 0
    outputs = [net(request) for request in torch.split(inputs[whole:], size)] if whole < len(inputs) else []
    if whole:
        requests = inputs[:whole].reshape(-1, size, *inputs.shape[1:])
        outputs.insert(0, torch.vmap(net, chunk_size=max(1, _TOGETHER // size))(requests).flatten(0, 1))
    return torch.cat(outputs)


def _share(outputs: Tensor, labels: Tensor) -> float:
    return float((outputs.argmax(1) == labels).double().mean())
