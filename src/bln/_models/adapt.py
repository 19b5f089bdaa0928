"""Fit a pretrained net's batch statistics to the data of each request, without training."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..config import CURRENT, POPULATION, StatisticsConfig
from ..layer import BatchLayerNorm
from .batches import check_batches, count_samples
from .convert import replacements
from .layers import layers, swap
from .run import Step, preserved, run_batch, uncompiled, unwrapped

CANDIDATES: tuple[float, ...] = (POPULATION, 64.0, 16.0, 4.0)
"""The prior strengths to choose from. Among equals the first is chosen, which depends least on its batch."""
_ROUNDS = 3
"""Passes over all batches until their joint statistics settle: those of a layer depend on the layers before."""


class Adaptation:
    """The changes ``bln.adapt`` made to a model; ``undo()`` takes them back.

    Attributes:
        prior: The prior strength of all layers; infinite where the population was the best choice.
        agreement: For each candidate, how well its answers agree with those of all batches together; empty without
            batches.
        layers: The adapted layers by name.
        notes: Norms that were left as they are, and why.
    """

    def __init__(self, model: nn.Module) -> None:
        new_layers, self.notes = replacements(model, groups=1, batch_norms=True)
        if model in new_layers:
            raise ValueError(f"a {type(model).__name__} cannot be replaced in place; put it in nn.Sequential")
        self._model = model
        swap(model, new_layers)
        self._norms = {new: old for old, new in new_layers.items()}
        self.prior, self.agreement = POPULATION, dict[float, float]()
        self.layers = {name: layer for name, layer in layers(model).items() if _uses_batch_statistics(layer)}
        for name in [name for name, layer in self.layers.items() if not layer.population.updates[:2].any()]:
            del self.layers[name]
            self.notes.append(f"{name}: left as it is, it has no population statistics to mix with those of a request")
        self._before = {layer: (layer.config, layer.memory) for layer in self.layers.values()}

    def set_prior(self, prior: float) -> None:
        """Give all layers this prior strength for batch statistics; feature statistics stay as configured."""
        for layer, (config, _) in self._before.items():
            layer.config = StatisticsConfig.of([prior, prior, *config.priors[2:]])
        self.prior = prior

    def forget(self) -> None:
        """Forget the requests that are remembered."""
        for layer in self.layers.values():
            if layer.memory is not None:
                layer.memory.reset()

    def undo(self) -> None:
        """Put back the norms, configurations and memories that were there before."""
        for layer, (config, memory) in self._before.items():
            layer.config = config
            layer._memory = memory
        for new, old in self._norms.items():
            old.train(new.training)
        swap(self._model, self._norms)
        self._before, self._norms, self.layers = {}, {}, {}

    def _memory_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of the layers' memories, by name."""
        memories = ((name, layer.memory) for name, layer in self.layers.items() if layer.memory is not None)
        return {f"{name}.{part}": buffer for name, memory in memories for part, buffer in memory.named_buffers()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory of recent requests, which the model's own state dict does not hold."""
        return {name: buffer.clone() for name, buffer in self._memory_buffers().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the memory of a net with the same layers."""
        own = self._memory_buffers()
        if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in state.items()}:
            raise ValueError(
                f"expected the memory of {len(own)} tensors, {', '.join(list(own)[:3])} ..., got {len(state)}, "
                f"{', '.join(list(state)[:3])} ..., or others of another shape; adapt the same net with memory= first"
            )
        for name, buffer in own.items():
            buffer.copy_(state[name])

    def __repr__(self) -> str:
        named = {prior: "T" if prior == POPULATION else f"{prior:g}" for prior in (self.prior, *self.agreement)}
        agreement = ", ".join(f"{named[prior]}: {share:.3f}" for prior, share in self.agreement.items())
        chosen = f", agreement={{{agreement}}}" if agreement else ""
        return f"Adaptation(prior={named[self.prior]}, {len(self.layers)} layers{chosen})"


def adapt(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    prior: float = 16,
    memory: int | None = None,
    step: Step | None = None,
) -> Adaptation:
    """Make a pretrained BatchNorm net fit its statistics to the data of each request, in place and without training.

    Population statistics describe the training data. Where a deployed net meets other data, such as blurred or darker
    images, the statistics of the request serve better, the more samples it has. Batch norms become BLN layers with one
    difference: in ``eval()`` batch statistics are shrunk from the request's towards the population's, whose share is
    ``prior / (prior + samples of the request)``. BLN layers of the model get the same prior.

    With batches of the new data, unlabelled and composed as requests will be, the prior is chosen: its answers to
    single batches agree best with the answers to all batches together. For batches sorted by class, whose statistics
    differ from those of the data, that is a larger prior or the population, which limits the harm.

    Args:
        model: A model with BatchNorm or BLN layers. Put it into ``eval()``: in training nothing changes.
        batches: Unlabelled batches to choose the prior by: a tensor, a tuple whose first element is the input, or a
            dict. A few hundred samples are enough. They are kept in memory.
        prior: The prior strength, in samples, where there are no batches.
        memory: The most samples of recent requests to count as samples of the current one. Requests of one sample
            then adapt too, after some time.
        step: ``step(model, batch) -> outputs``, for batches or models unlike these.

    Returns:
        An ``Adaptation``, whose ``undo()`` restores the net.

    Examples:
        >>> import torch, bln
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()).eval()
        >>> adaptation = bln.adapt(net, prior=16)
        >>> net[1].config
        StatisticsConfig('16 16 F F')
        >>> adaptation.undo()
        >>> net[1].__class__.__name__
        'BatchNorm2d'
    """
    StatisticsConfig(prior, prior, True, True)  # refuses a wrong prior
    model = unwrapped(model)
    if batches is not None:
        check_batches(batches)
        batches = list(batches)
        if not batches:
            raise ValueError("adapt got no batches to choose by; was the iterable used up before?")
    adaptation = Adaptation(model)
    try:
        if not adaptation.layers:
            raise ValueError(
                f"{type(model).__name__} has no norm with batch statistics, so there is nothing to adapt: those of "
                "GroupNorm, LayerNorm and InstanceNorm are each sample's own"
                + "".join(f"\n  {note}" for note in adaptation.notes)
            )
        for layer in adaptation.layers.values():
            layer.memory = memory
        if batches is not None:
            adaptation.agreement = _agreement(adaptation, model, batches, step or run_batch)
            prior = max(adaptation.agreement, key=lambda k: adaptation.agreement[k])
            adaptation.forget()
        adaptation.set_prior(prior)
    except BaseException:
        adaptation.undo()
        raise
    if adaptation.notes:
        warnings.warn("bln.adapt:\n  " + "\n  ".join(adaptation.notes), stacklevel=2)
    return adaptation


def _uses_batch_statistics(layer: BatchLayerNorm) -> bool:
    """Whether batch statistics have any weight; after a conversion from GroupNorm or LayerNorm they have none."""
    population = layer.population
    known = population.updates[-1] > 0
    return not bool((known & (1 - population.inverse_m - layer.mix_eps == 0)).all())


@torch.no_grad()
def _agreement(adaptation: Adaptation, model: nn.Module, batches: list[Any], step: Step) -> dict[float, float]:
    """Return for each candidate how well its answers to single batches agree with those to all batches together."""
    memories = {layer: layer.memory for layer in adaptation.layers.values()}
    samples = [count_samples(batch) for batch in batches]

    def answers(prior: float) -> list[Tensor]:
        adaptation.set_prior(prior)
        return [_tensor(step(model, batch)) for batch in batches]

    with preserved(model), uncompiled():
        model.eval()
        for layer in memories:
            layer.memory = sum(samples)
        for _ in range(_ROUNDS):
            joint = answers(CURRENT)
        for layer, memory in memories.items():
            layer._memory = memory
        agreement = {}
        for prior in CANDIDATES:
            adaptation.forget()
            shares = map(_similarity, answers(prior), joint)
            agreement[prior] = sum(share * n for share, n in zip(shares, samples, strict=True)) / sum(samples)
    return agreement


def _tensor(outputs: Any) -> Tensor:
    """Return the tensor of answers in a model's output: its logits, or its first element."""
    answers = getattr(outputs, "logits", outputs)
    answers = answers[0] if isinstance(answers, tuple | list) and answers else answers
    if not isinstance(answers, Tensor) or not answers.dim():
        raise TypeError(
            f"adapt compares answers, and was given a {type(outputs).__name__} of the model; pass step=, a function "
            "step(model, batch) that returns a tensor of them, one for each sample"
        )
    return answers.float()


def _similarity(answers: Tensor, joint: Tensor) -> float:
    """Return the share of equal classes; for a single number per sample, minus the squared difference."""
    if answers.dim() > 1 and answers.shape[1] > 1:
        return float((answers.argmax(1) == joint.argmax(1)).float().mean())
    return -float((answers - joint).square().mean())
