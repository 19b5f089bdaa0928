"""Priors chosen without labels, and signs by which requests sorted by label differ from shuffled ones."""

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
"""Images in a request. A single one has no spread to measure; with hundreds any prior does."""
SIGNS = ("sum", "depth")


@torch.no_grad()
def chosen(net: nn.Module, inputs: Tensor, labels: Tensor, size: int) -> dict[str, float | str]:
    """Return the prior that ``bln.adapt`` chooses for these requests without their labels, and its accuracy."""
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
    """Measure how far each request's means lie from the population's, in squared standard errors: ``(requests, 2)``.

    Standard errors are those of the request's samples. The first number is the median over features, summed over
    layers. The second is the last layer's share of it, times the number of layers: there activations stand for classes
    rather than pixels.
    """
    layers = list(bln.layers(net).values())
    means: list[list[Tensor]] = [[] for _ in layers]

    def note(of_layer: list[Tensor], _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        of_layer.append(arguments[0].flatten(2).mean(2))

    hooks = [
        layer.register_forward_pre_hook(partial(note, of_layer)) for layer, of_layer in zip(layers, means, strict=True)
    ]
    try:
        for part in torch.split(inputs, 64):
            net(part)
    finally:
        for hook in hooks:
            hook.remove()
    whole = len(inputs) // size * size
    distances = []
    for layer, of_layer in zip(layers, means, strict=True):
        requests = torch.cat(of_layer)[:whole].reshape(-1, size, layer.num_features)
        distance = (requests.mean(1) - layer.population.batch_mean).square()
        # Features that are the same in all of a few samples have no standard error; the median leaves them out.
        distances.append((distance / (requests.var(1) / size).clamp(min=1e-12)).median(1).values)
    by_layer = torch.stack(distances, 1)
    return torch.stack([by_layer.sum(1), by_layer[:, -1] / by_layer.mean(1)], 1)


def separation(sorted_by_label: Tensor, shuffled: Tensor) -> float:
    """Return the share of pairs in which the sorted request has the larger sign; 0.5 means that it tells nothing."""
    ranks = rankdata(torch.cat([sorted_by_label, shuffled]).numpy())[: len(sorted_by_label)]
    pairs = len(sorted_by_label) * len(shuffled)
    return float((ranks.sum() - len(ranks) * (len(ranks) + 1) / 2) / pairs)


def compare(net: nn.Module, conditions: Sequence[tuple[str, str, Tensor, Tensor]]) -> Iterator[dict[str, Any]]:
    """Yield a line for each condition and request size, then one for each size with the separation by each sign.

    Args:
        net: A net with BLN layers, in ``eval()`` and with population statistics.
        conditions: Corruption, arrangement, inputs in the order of arrival, and labels.
    """
    sizes = [size for size in SIZES if size <= len(conditions[0][3])]
    signs_of: dict[tuple[int, str], list[Tensor]] = {}
    for corruption, arrangement, inputs, labels in conditions:
        for size in sizes:
            settings = {"corruption": corruption, "arrangement": arrangement, "size": size}
            yield {**settings, **chosen(net, inputs, labels, size)}
            signs_of.setdefault((size, arrangement), []).append(signs(net, inputs, size))
    for size in sizes:
        sorted_by_label, shuffled = (torch.cat(signs_of[size, arrangement]) for arrangement in ("sorted", "shuffled"))
        separations = {
            name: round(separation(sorted_by_label[:, at], shuffled[:, at]), 4) for at, name in enumerate(SIGNS)
        }
        yield {"size": size, "separation": separations}
