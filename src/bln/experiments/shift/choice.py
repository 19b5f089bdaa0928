"""Priors chosen without labels, and how well a request tells a shift of labels from a shift of inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from scipy.stats import rankdata  # type: ignore[import-untyped]
from torch import Tensor, nn

import bln

from ...config import POPULATION
from .evaluation import answers

SIZES = (4, 16, 64)
"""Images in a request: one image has no spread to measure, and hundreds are enough under any prior."""
SIGNS = ("sum", "depth")


@torch.no_grad()
def chosen(net: nn.Module, inputs: Tensor, labels: Tensor, size: int) -> dict[str, float | str]:
    """The prior that ``bln.adapt`` chooses for these requests without their labels, and its accuracy."""
    adaptation = bln.adapt(net, torch.split(inputs, size))
    try:
        right = (answers(net, inputs, size).argmax(1) == labels).double().mean()
    finally:
        adaptation.undo()
    return {
        "prior": "T" if adaptation.prior == POPULATION else f"{adaptation.prior:g}",
        "accuracy": round(float(right), 4),
    }


@torch.no_grad()
def signs(net: nn.Module, inputs: Tensor, size: int) -> Tensor:
    """How far each request's means lie from the population's, in squared standard errors, ``(requests, 2)``.

    The standard error is that of the request's own samples. The first number is the sum over layers, of the median over
    features. The second says how much of it is in the last layer, where activations hold classes rather than pixels.
    """
    layers = list(bln.layers(net).values())
    means: list[list[Tensor]] = [[] for _ in layers]

    def keep(kept: list[Tensor], _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        kept.append(arguments[0].flatten(2).mean(2))

    hooks = [layer.register_forward_pre_hook(partial(keep, kept)) for layer, kept in zip(layers, means, strict=True)]
    try:
        for part in torch.split(inputs, 64):
            net(part)
    finally:
        for hook in hooks:
            hook.remove()
    whole = len(inputs) // size * size
    found = []
    for layer, kept in zip(layers, means, strict=True):
        each = torch.cat(kept)[:whole].reshape(-1, size, layer.num_features)
        distance = (each.mean(1) - layer.population.batch_mean).square()
        # Features that are the same in all of a few samples have no standard error; the median leaves them out.
        found.append((distance / (each.var(1) / size).clamp(min=1e-12)).median(1).values)
    by_layer = torch.stack(found, 1)
    return torch.stack([by_layer.sum(1), by_layer[:, -1] / by_layer.mean(1)], 1)


def separation(sorted_by_label: Tensor, shuffled: Tensor) -> float:
    """The share of pairs, one request of each kind, in which the sorted one has the larger sign: 0.5 tells nothing."""
    ranks = rankdata(torch.cat([sorted_by_label, shuffled]).numpy())[: len(sorted_by_label)]
    pairs = len(sorted_by_label) * len(shuffled)
    return float((ranks.sum() - len(ranks) * (len(ranks) + 1) / 2) / pairs)


def compare(net: nn.Module, conditions: Sequence[tuple[str, str, Tensor, Tensor]]) -> Iterator[dict[str, Any]]:
    """Yield a line for each condition and request size, and one for each size with how well signs tell kinds apart.

    Args:
        net: With BLN layers, in ``eval()`` and with population statistics.
        conditions: Corruption, arrangement, inputs in their order of arrival, and labels.
    """
    sizes = [size for size in SIZES if size <= len(conditions[0][3])]
    kinds: dict[tuple[int, str], list[Tensor]] = {}
    for corruption, arrangement, inputs, labels in conditions:
        for size in sizes:
            about = {"corruption": corruption, "arrangement": arrangement, "size": size}
            yield {**about, **chosen(net, inputs, labels, size)}
            kinds.setdefault((size, arrangement), []).append(signs(net, inputs, size))
    for size in sizes:
        both = [torch.cat(kinds[size, arrangement]) for arrangement in ("sorted", "shuffled")]
        found = {name: round(separation(*(each[:, at] for each in both)), 4) for at, name in enumerate(SIGNS)}
        yield {"size": size, "separation": found}
