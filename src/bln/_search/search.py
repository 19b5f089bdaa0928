"""Step 12 of the paper: which statistics inference should use."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import torch
from torch import nn

from .. import model as models
from ..config import StatisticsConfig, choices
from ..layer import BatchLayerNorm
from ..population import Population
from ..ranks import Ranks
from .arrange import arrangements_on
from .descent import descend
from .evaluate import Evaluator
from .objective import Objective
from .result import DEPENDS_ON_BATCH, SearchResult, preferred, ranked
from .scores import Function, Measure, Metrics, Tally
from .study import explore
from .vectorized import Assignment

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
    step: models.Step | None = None,
    process_group: ProcessGroup | Literal["world"] | None = None,
    progress: bool = True,
) -> SearchResult:
    """Find the configuration of statistics that suits a trained model: all 16 on held-out batches, in one pass.

    Search on **validation** data. The test set is for the one configuration that was chosen. The model is left as it
    was found, whatever happens; ``SearchResult.apply`` gives it the winner.

    Args:
        model: A trained model with BLN layers, on the device it should run on.
        batches: Any iterable of ``(inputs, targets)``, inputs being a tensor, a tuple or a dict, in batches composed
            as requests will be. One pass is made; ``per_layer`` and ``rebatch`` keep the batches in memory.
        loss: ``loss(outputs, targets)``, the mean over the batch, such as ``F.cross_entropy``.
        metrics: ``"accuracy"``, or functions like ``loss`` by name. Higher is better, and the first breaks ties.
        per_layer: Look for a configuration of each layer, from the best shared one on.
        calibrate: Training batches. Population statistics are recomputed on them under frozen weights first; the
            result shows what that gained, and ``apply`` puts them in place.
        rebatch: Report how far scores move when the same samples come shuffled otherwise, sorted by label, and one at
            a time.
        robust: Rank by the worst of these cases.
        candidates: Configurations to compare beside the 16, such as ``StatisticsConfig.shrunk(4, 16, 64)``.
        sampler: With ``per_layer``, ``"tpe"``, ``"random"``, ``"grid"`` or an Optuna sampler in place of coordinate
            descent.
        storage: Where Optuna keeps the study: any URL it takes, such as ``"sqlite:///study.db"`` or one of a database
            server, or a storage object. The same call again resumes it after a kill, and several processes or
            machines can make it at once.
        study: The study's name in the storage.
        trials: How many trials the study should have in the end; ``None`` is one for each layer and configuration.
        step: ``step(model, batch) -> (outputs, targets)`` for batches or models unlike these.
        process_group: Ranks that share the work, ``"world"`` for the default group: each calls this with batches of
            its own, as many as it has, and all end with the same result, that of all batches; ``rebatch`` rearranges
            each rank's samples among themselves. If one rank fails, all do.
        progress: Show a progress bar, if rich is installed and a terminal there to see it.

    Returns:
        A ``SearchResult``: a table that prints, exports, iterates best first, and applies to the model.

    Examples:
        >>> import torch, bln
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), bln.BatchLayerNorm(8), nn.Linear(8, 3))
        >>> train, validation = ([(torch.randn(10, 4), torch.randint(3, (10,))) for _ in range(5)] for _ in range(2))
        >>> for x, _ in train:
        ...     y = model(x)
        >>> result = bln.search(model, validation, loss=nn.functional.cross_entropy, metrics="accuracy")
        >>> len(result)
        16
        >>> row = result.apply(model)
        >>> model[2].config == row.config
        True
    """
    found = models.required_layers(model)
    measure = Measure(loss, metrics)
    configs = choices(candidates)
    models.check_batches(batches)
    _check(per_layer, sampler, storage, trials)
    _warn_of_leak(batches, calibrate)
    rebatch = rebatch or robust
    notes: list[str] = [DEPENDS_ON_BATCH if rebatch else f"{DEPENDS_ON_BATCH} rebatch=True shows how far they move."]
    ranks = Ranks(process_group, model)
    progress = progress and ranks.rank == 0

    with ranks.guard(), models.uncompiled(), _as_found(model, list(found.values())):
        model.eval()
        as_found = [layer.population.snapshot() for layer in found.values()]
        calibrated = None
        if calibrate is not None:
            models.calibrate_on(ranks, model, calibrate, step, progress)
            calibrated = [layer.population.snapshot() for layer in found.values()]

        evaluator = Evaluator(models.unwrapped(model), list(found.values()), measure, step)
        objective = Objective(evaluator, list(found), configs, robust, progress, ranks)
        tally = objective.first_pass(batches, per_layer or rebatch, as_found, calibrated)
        if rebatch:
            objective.arrangements = arrangements_on(ranks, objective.held)
            objective.rebatch(objective.shared, "rebatch")
        if per_layer:
            _search_layers(objective, sampler, storage, study, trials, progress, notes)
            if rebatch:
                rows = ranked([objective.row(a) for a in objective.outcomes], robust)
                leading = [objective.assignment(row) for row in (rows[0], preferred(rows, robust))]
                objective.rebatch(list(dict.fromkeys(leading)), "rebatch the best")

    statistics = dict(zip(found, calibrated, strict=True)) if calibrated is not None else None
    return _result(objective, tally, robust, notes, statistics)


def _search_layers(
    objective: Objective, sampler: Any, storage: Any, study: str, trials: int | None, progress: bool, notes: list[str]
) -> None:
    names = objective.names
    shared = dict(zip(objective.shared, objective.costs(objective.shared, "search"), strict=True))
    if sampler is None:
        start = min(shared, key=lambda assignment: (math.isnan(shared[assignment]), shared[assignment]))
        descend(start, names, objective.configs, objective.costs)
        return
    wanted = len(objective.configs) * len(names) if trials is None else trials
    objective.progress = False  # the study has a bar of its own
    if objective.ranks.rank > 0:
        known = _follow(objective)
    else:
        best, known = explore(
            shared,
            names,
            objective.configs,
            lambda assignments, what: _lead(objective, assignments, what),
            sampler=sampler,
            storage=storage,
            study=study,
            trials=wanted,
            progress=progress,
        )
        _lead(objective, [best], "the best of the study")  # another process may have found it
        objective.ranks.tell([-1, known] + [0] * (len(names) - 1))
    if known:
        notes.append(f"The study {study!r} was resumed: it had {known} finished trials of {wanted}.")


def _lead(objective: Objective, assignments: Sequence[Assignment], what: str) -> list[float]:
    """The costs of assignments, the other ranks being told of each: rank 0 alone talks to the study."""
    for assignment in assignments:
        objective.ranks.tell([1, *map(objective.configs.index, assignment)])
        objective.costs([assignment], what)
    return objective.costs(assignments, what)


def _follow(objective: Objective) -> int:
    """Evaluate what rank 0 asks for, until its study is done; how many trials that had before."""
    while True:
        go_on, *numbers = objective.ranks.tell([0] * (1 + len(objective.names)))
        if go_on < 0:
            return numbers[0]
        objective.costs([tuple(objective.configs[number] for number in numbers)], "study")


def _result(objective: Objective, tally: Tally, robust: bool, notes: Sequence[str], statistics: Any) -> SearchResult:
    rows = ranked([objective.row(assignment) for assignment in objective.outcomes], robust)
    evaluator = objective.evaluator
    said = list(notes)
    if statistics is None:
        said.append(
            "Population statistics averaged while the weights still moved can ruin rows with T; "
            "calibrate=train_batches recomputes them under frozen weights."
        )
        untrained = [
            name
            for name, layer in zip(objective.names, evaluator.layers, strict=True)
            if not layer.population.updates.any()
        ]
        if untrained:
            said.append(f"No training batch was seen by {', '.join(untrained)}: T there means mean 0, variance 1.")
    else:
        gains = [row for row in rows if row.uncalibrated is not None]
        most = max(gains, key=lambda row: _gain(row))
        assert most.uncalibrated is not None
        said.append(
            f"Population statistics were recomputed under frozen weights; most is gained by {most.label}: loss "
            f"{most.uncalibrated.loss:.4f} before, {most.loss:.4f} now. apply() puts them in place."
        )
    if useless := sum(math.isnan(row.loss) for row in rows):
        said.append(f"{useless} configurations have a NaN loss and come last.")
    if evaluator.width is not None:
        said.append(
            f"{len(objective.shared)} copies of a batch did not fit in memory: {evaluator.width} configurations ran "
            "together. Samples were not split, since they share statistics."
        )
    for single, why in evaluator.why.items():
        what = "Single samples" if single else "The configurations"
        said.append(f"{what} ran separately, since the model does not run them together: {why}.")
    if objective.arrangements and not any(a.name == "sorted" for a in objective.arrangements):
        said.append("Not sorted by label: targets do not hold one value for each sample.")
    if collapsing := [f"{row.label} ({', '.join(row.collapses)})" for row in rows if row.collapses]:
        said.append(f"They collapse when samples arrive otherwise: {'; '.join(collapsing)}.")
    return SearchResult(rows, evaluator.mode, tuple(said), tally.samples, tally.batches, robust, statistics)


def _gain(row: Any) -> float:
    gain = row.uncalibrated.loss - row.loss
    return -math.inf if math.isnan(gain) else gain


def _check(per_layer: bool, sampler: Any, storage: Any, trials: int | None) -> None:
    if sampler is not None and not per_layer:
        raise ValueError("sampler= looks for a configuration of each layer; pass per_layer=True with it")
    if sampler is None and (storage is not None or trials is not None):
        raise ValueError("storage= and trials= are Optuna's; pass sampler='tpe' and per_layer=True with them")
    if trials is not None and not (isinstance(trials, SupportsIndex) and index(trials) >= 1):
        raise ValueError(f"trials must be an integer of at least 1, got {trials!r}")


def _warn_of_leak(batches: Any, train: Any) -> None:
    if train is None:
        return
    dataset = getattr(batches, "dataset", None)
    if batches is train or (dataset is not None and dataset is getattr(train, "dataset", None)):
        warnings.warn(
            "bln.search was given the same object as search data and as training data: the choice will favour what "
            "the model has already seen. Search on validation data, and report the test set once",
            stacklevel=4,
        )


@contextmanager
def _as_found(model: nn.Module, layers: list[BatchLayerNorm]) -> Iterator[None]:
    """Put back modes, random state, configurations, statistics and every other buffer, whatever happens inside."""
    configs = [layer.config for layer in layers]
    populations = [layer.population.snapshot() for layer in layers]
    ours = {id(b) for module in model.modules() if isinstance(module, Population) for b in module.buffers()}
    others = [(buffer, buffer.clone()) for buffer in model.buffers() if id(buffer) not in ours]
    with models.preserved(model):
        try:
            yield
        finally:
            for layer, config, population in zip(layers, configs, populations, strict=True):
                layer.config = config
                layer.population.restore(population)
            for buffer, value in others:
                buffer.copy_(value)
