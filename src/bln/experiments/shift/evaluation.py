"""The accuracy of a net by request size, from passes over many requests, each with its own statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import bln

CONFIGURATIONS = {"T": "TTFF", "64": "64 64 F F", "16": "16 16 F F", "4": "4 4 F F", "F": "FFFF"}
"""Batch statistics of the population, shrunk towards it, or of the request; feature statistics of the sample."""
SIZES = (1, 4, 16, 64, 250)
"""Images in a request."""
ARRANGEMENTS = ("shuffled", "sorted")
_IMAGES_PER_PASS = 64
"""Images of one forward pass, in whole requests. The activations of more do not fit into the cache."""


def arrange(labels: Tensor, arrangement: str, seed: int) -> Tensor:
    """Return the order in which images arrive: shuffled, or sorted by label and shuffled within each label."""
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
    """Return the accuracy in each configuration at each request size; one number if requests do not matter.

    Args:
        net: A net in ``eval()``, which is left unchanged. Without BLN layers it has one accuracy, named ``net``.
        inputs: In the order of arrival. Each request takes the next ones; the last may be smaller.
        labels: The labels of the inputs.
        sizes: Images in a request.
        configurations: Configurations by the names to return them under.
    """
    layers = bln.layers(net)
    if not layers:
        return {"net": [_share(torch.cat([net(part) for part in torch.split(inputs, _IMAGES_PER_PASS)]), labels)]}
    before = {name: layer.config for name, layer in layers.items()}
    shares = {}
    try:
        for name, config in configurations.items():
            bln.configure(net, config)
            uses_batch = any(layer.config.uses_batch for layer in layers.values())
            shares[name] = [_share(answers(net, inputs, size), labels) for size in (sizes if uses_batch else sizes[:1])]
    finally:
        bln.configure(net, before)
    return shares


def answers(net: nn.Module, inputs: Tensor, size: int) -> Tensor:
    """Return the net's outputs for requests of this size, as if each went through the net alone."""
    whole = len(inputs) // size * size if size < _IMAGES_PER_PASS else 0
    outputs = [net(request) for request in torch.split(inputs[whole:], size)] if whole < len(inputs) else []
    if whole:
        requests = inputs[:whole].reshape(-1, size, *inputs.shape[1:])
        outputs.insert(0, torch.vmap(net, chunk_size=max(1, _IMAGES_PER_PASS // size))(requests).flatten(0, 1))
    return torch.cat(outputs)


def _share(outputs: Tensor, labels: Tensor) -> float:
    """Return the share of right answers."""
    return float((outputs.argmax(1) == labels).double().mean())
