"""``bln.search``: score configurations of statistics over all the data, and rank them (step 12 of the paper)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from .._distributed.ranks import Ranks
from .._models.batches import check_batches
from .._models.calibrate import calibrate_on
from .._models.layers import Snapshots, required_layers, restore, snapshots
from .._models.run import Step, preserved, uncompiled, unwrapped
from ..config import StatisticsConfig, choices
from ..layer import BatchLayerNorm
from .evaluate import Evaluator, assigned
from .metrics import Function, Metrics, named_functions
from .objective import Objective
from .per_layer import search_layers
from .rebatch import reorder
from .result import DEPENDS_ON_BATCH, SearchResult, notes_on_population

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@torch.no_grad()
def search(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Function,
    metrics: Metrics | None = None,
    per_layer: bool = False,
    calibrate: Iterable[Any] | None = None,
    rebatch: bool = False,
    robust: bool = False,
    candidates: Iterable[StatisticsConfig | str] = (),
    sampler: Any = None,
    storage: Any = None,
    study: str = "bln.search",
    trials: int | None = None,
    step: Step | None = None,
    process_group: ProcessGroup | Literal["world"] | None = None,
    progress: bool = True,
) -> SearchResult:
    """Compare all 16 configurations of statistics of a trained model on held-out batches, in one pass.

    Search on **validation** data; keep the test set for the one configuration that is chosen. The model is always left
    as it was; ``SearchResult.apply`` gives it the winner.

    Args:
        model: A trained model with BLN layers, on the device it should run on.
        batches: Any iterable of ``(inputs, targets)``, inputs being a tensor, a tuple or a dict, in batches composed
            like requests. One pass is made; ``per_layer`` and ``rebatch`` keep the batches in memory.
        loss: ``loss(outputs, targets)``, the mean over the batch, such as ``F.cross_entropy``.
        metrics: ``"accuracy"``, or functions like ``loss`` by name; higher is better, the first breaks ties.
        per_layer: Search a configuration for each layer, starting from the best shared one.
        calibrate: Training batches to recompute population statistics on, under frozen weights. The result shows the
            gain, and ``apply`` puts them in place.
        rebatch: Report how far scores move when the same samples come reshuffled, sorted by label, and one at a time.
        robust: Rank by the worst of these orders.
        candidates: Configurations to compare in addition to the 16, such as ``StatisticsConfig.shrunk(4, 16, 64)``.
        sampler: With ``per_layer``, ``"tpe"``, ``"random"``, ``"grid"`` or an Optuna sampler in place of coordinate
            descent.
        storage: Where Optuna keeps the study: a URL, such as ``"sqlite:///study.db"``, or a storage object. The same
            call resumes an interrupted study; several processes or machines can make it at the same time.
        study: The study's name in the storage.
        trials: The number of trials the study should have in the end; by default one per layer and configuration.
        step: ``step(model, batch) -> (outputs, targets)`` for batches or models unlike these.
        process_group: Ranks that share the work, ``"world"`` for the default group. Each calls this with any number of
            batches of its own, and all end with the same result, that of all batches; ``rebatch`` reorders samples
            within each rank. If one rank fails, all do.
        progress: Show a progress bar, if rich is installed and standard error is a terminal.

    Examples:
        >>> import torch, bln
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), bln.BatchLayerNorm(8), nn.Linear(8, 3))
        >>> train, validation = ([(torch.randn(10, 4), torch.randint(3, (10,))) for _ in range(5)] for _ in range(2))
        >>> result = bln.search(model, validation, loss=nn.functional.cross_entropy, calibrate=train)
        >>> row = result.apply(model)
        >>> len(result), model[2].config == row.config
        (16, True)
    """
    by_name = required_layers(model)
    scored = named_functions(loss, metrics)
    configs = choices(candidates)
    check_batches(batches)
    if sampler is not None and not per_layer:
        raise ValueError("sampler= looks for a configuration of each layer; pass per_layer=True with it")
    if sampler is None and (storage is not None or trials is not None):
        raise ValueError("storage= and trials= are Optuna's; pass sampler='tpe' and per_layer=True with them")
    _warn_of_leak(batches, calibrate)
    rebatch = rebatch or robust
    ranks = Ranks(process_group, model)
    progress = progress and ranks.rank == 0
    layers = list(by_name.values())

    with ranks.guard(), uncompiled(), _as_found(model, layers):
        model.eval()
        statistics: list[Snapshots] = [snapshots(layers)]
        if calibrate is not None:
            calibrate_on(ranks, model, calibrate, step, progress)
            statistics.insert(0, snapshots(layers))
        evaluator = Evaluator(unwrapped(model), layers, scored, step, single=False)
        singles = replace(evaluator, single=True)
        held = list(batches) if per_layer or rebatch else batches
        objective = Objective(evaluator, singles, held, list(by_name), configs, robust, progress, ranks)
        samples = objective.first_pass(statistics)
        if rebatch:
            objective.orders = reorder(ranks, list(held))
            objective.rebatch(objective.shared, "rebatch")
        if per_layer:
            search_layers(objective, sampler, storage, study, trials)
        mode = "separate" if evaluator.why else "together"
        calibrated = None if calibrate is None else dict(zip(by_name, statistics[0], strict=True))
        rows = list(objective.rows.values())
        result = SearchResult(rows, mode, (), sum(samples), len(samples), robust, calibrated)
        if rebatch and not result.all_nan:
            leading = [a for a, row in objective.rows.items() if row is result.best or row is result.lowest]
            objective.rebatch(leading, "rebatch the best")

    notes = [DEPENDS_ON_BATCH if rebatch else f"{DEPENDS_ON_BATCH} rebatch=True shows how far they move."]
    if calibrate is not None:
        notes.append("Population statistics were recomputed under frozen weights. apply() puts them in place.")
    else:
        untrained = [name for name, layer in by_name.items() if not layer.population.updates.any()]
        notes += notes_on_population("calibrate=train_batches", untrained)
    if any(layer.memory is not None for layer in layers):
        notes.append("Each mini-batch was scored by itself, without the requests that layers remember.")
    if useless := sum(math.isnan(row.loss) for row in result):
        notes.append(f"{useless} configurations have a NaN loss and come last.")
    for what, why in (("The configurations", evaluator.why), ("Single samples", singles.why)):
        if why:
            notes.append(f"{what} ran separately, since the model does not run them together: {why}.")
    if rebatch and "sorted" not in objective.orders:
        notes.append("Not sorted by label: targets do not hold one value for each sample.")
    if collapsing := [f"{row.label} ({', '.join(row.collapses)})" for row in result if row.collapses]:
        notes.append(f"These collapse when the same samples are batched differently: {'; '.join(collapsing)}.")
    return replace(result, notes=tuple(notes))


def _warn_of_leak(batches: Any, train: Any) -> None:
    """Warn if the search data are the training data."""
    dataset = getattr(batches, "dataset", None)
    if batches is train or (dataset is not None and dataset is getattr(train, "dataset", None)):
        warnings.warn(
            "bln.search was given the same object as search data and as training data: the choice will favour what "
            "the model has already seen. Search on validation data, and report the test set once",
            stacklevel=4,
        )


@contextmanager
def _as_found(model: nn.Module, layers: list[BatchLayerNorm]) -> Iterator[None]:
    """Restore modes, random state, configurations, statistics and every other buffer, whatever happens inside.

    Memories of requests are set aside: what one configuration leaves there would enter the statistics of the next.
    """
    populations, memories = snapshots(layers), [layer.memory for layer in layers]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with preserved(model), assigned(layers, tuple(layer.config for layer in layers)):
        try:
            for layer in layers:
                layer.memory = None
            yield
        finally:
            for layer, memory in zip(layers, memories, strict=True):
                layer._memory = memory
            restore(layers, populations)
            for buffer, value in buffers:
                buffer.copy_(value)
