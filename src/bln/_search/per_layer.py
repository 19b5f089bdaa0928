"""Search a configuration for each layer: by coordinate descent, or by an Optuna study to resume and share."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .._install import install
from ..config import StatisticsConfig
from .result import nan_last

if TYPE_CHECKING:
    from .objective import Objective

Assignment = tuple[StatisticsConfig, ...]
"""One configuration for each BLN layer, in the order of ``bln.layers``."""

_ROUNDING = 1e-6
"""An improvement by less than this share of the cost is rounding: float32 sums in another order differ by less."""
_LARGEST_GRID = 4
"""Layers. Optuna writes the whole grid down first."""
_SAME = 1e-3
"""The best shared cost may differ by this share between the machines that work on one study."""


def search_layers(objective: Objective, sampler: Any, storage: Any, study: str, trials: int | None) -> None:
    """Search a configuration for each layer, starting from those that all layers share."""
    shared = dict(zip(objective.shared, objective.costs(objective.shared, "search"), strict=True))
    if sampler is None:
        _descend(objective, min(shared, key=lambda assignment: nan_last(shared[assignment])))
    elif objective.ranks.rank == 0:  # the only rank that uses the study
        trials = len(objective.configs) * len(objective.names) if trials is None else trials
        _run_study(objective, shared, sampler, storage, study, trials)
    else:
        _follow(objective)


def _descend(objective: Objective, best: Assignment) -> None:
    """Change one layer at a time to its best configuration until no change of a single layer improves.

    Only a lower cost is accepted, so the cost never rises and the descent ends.
    """
    names, unchanged, at = objective.names, 0, 0
    while unchanged < len(names):
        candidates = [(*best[:at], config, *best[at + 1 :]) for config in objective.configs]
        costs = objective.costs(candidates, names[at])
        now, lowest = costs[candidates.index(best)], min(costs, key=nan_last)
        if lowest < now - _ROUNDING * abs(now) or (math.isnan(now) and not math.isnan(lowest)):
            best, unchanged = candidates[costs.index(lowest)], 0
        unchanged += 1  # the layer just changed is at its best
        at = (at + 1) % len(names)


# ---- by Optuna


def _cost_on_all_ranks(objective: Objective, assignment: Assignment, what: str) -> float:
    """Return the cost of an assignment, which the other ranks evaluate too, in ``_follow``."""
    objective.ranks.broadcast([*map(objective.configs.index, assignment)])
    return objective.costs([assignment], what)[0]


def _follow(objective: Objective) -> None:
    """Evaluate the assignments that rank 0 broadcasts, until it broadcasts none."""
    nothing = [-1] * len(objective.names)
    while (indices := objective.ranks.broadcast(nothing)) != nothing:
        objective.costs([tuple(objective.configs[at] for at in indices)], "study")


def _run_study(
    objective: Objective, shared: Mapping[Assignment, float], sampler: Any, storage: Any, name: str, trials: int
) -> None:
    """Run the study until it has ``trials`` finished trials.

    The shared configurations are added as finished trials, which do not count: they cost nothing more, the sampler
    learns from them, and the best of the study is never worse than they are.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError(f"sampler= takes Optuna, which is not installed: {install('search')}") from error
    names, choices = list(objective.names), [str(config) for config in objective.configs]
    distributions = dict.fromkeys(names, optuna.distributions.CategoricalDistribution(choices))

    def read(params: Mapping[str, str]) -> Assignment:
        return tuple(StatisticsConfig.parse(params[layer]) for layer in names)

    def cost(trial: Any) -> float:
        trial.set_user_attr("worker", f"{platform.node()}:{os.getpid()}")
        chosen = read({layer: trial.suggest_categorical(layer, choices) for layer in names})
        value = _cost_on_all_ranks(objective, chosen, f"trial {trial.number}")
        return math.inf if math.isnan(value) else value  # NaN would fail the trial, and Optuna would run another

    with _opened(optuna, storage) as opened:
        chosen = _sampler(optuna, sampler, names, choices, storage)
        study = optuna.create_study(study_name=name, storage=opened, sampler=chosen, load_if_exists=True)
        _check_study(study, names, min(shared.values(), key=nan_last))
        added = [trial.params for trial in study.get_trials() if trial.user_attrs.get("shared")]
        for assignment, value in shared.items():
            params = dict(zip(names, map(str, assignment), strict=True))
            if params not in added and not math.isnan(value):
                known: Any = {"params": params, "distributions": distributions, "user_attrs": {"shared": True}}
                study.add_trial(optuna.trial.create_trial(value=value, **known))

        def is_complete() -> bool:  # shared trials do not count: processes that start together each add them
            done = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
            return sum("shared" not in trial.user_attrs for trial in done) >= trials

        if not is_complete():
            study.optimize(cost, callbacks=[lambda study, _: study.stop() if is_complete() else None])
        best = read(study.best_trial.params)
    _cost_on_all_ranks(objective, best, "the best of the study")  # whose trial another process may have run
    objective.ranks.broadcast([-1] * len(names))


@contextmanager
def _opened(optuna: Any, storage: Any) -> Iterator[Any]:
    """Open the storage with Optuna silenced, and release it afterwards."""
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

    if not (storage is None or isinstance(storage, optuna.storages.BaseStorage)):
        storage = str(storage)
    for wait in (0.1, 0.5, 2.0, None):
        try:
            opened = optuna.storages.get_storage(storage)
            break
        except SQLAlchemyError as error:
            if wait is None or not isinstance(error, DBAPIError):
                raise ValueError(
                    f"storage cannot be opened, {error}; it must be a URL such as 'sqlite:///study.db', whose folder "
                    "must exist, or an Optuna storage"
                ) from error
            time.sleep(wait)  # another process may be creating the tables
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield opened
    finally:
        optuna.logging.set_verbosity(verbosity)
        opened.remove_session()


def _sampler(optuna: Any, sampler: Any, names: list[str], choices: list[str], storage: Any) -> Any:
    """Return the Optuna sampler of this name, or the sampler itself."""
    samplers = optuna.samplers
    seed = 0 if storage is None else None  # with one seed, all who share a study would draw the same trials
    if isinstance(sampler, samplers.BaseSampler):
        return sampler
    if sampler == "tpe":
        return samplers.TPESampler(seed=seed)
    if sampler == "random":
        return samplers.RandomSampler(seed=seed)
    if sampler == "grid" and len(names) <= _LARGEST_GRID:
        return samplers.GridSampler(dict.fromkeys(names, choices), seed=seed)
    raise ValueError(
        f"sampler must be 'tpe', 'random', an Optuna sampler or, for up to {_LARGEST_GRID} layers, 'grid'; got "
        f"{sampler!r} for {len(names)} layers"
    )


def _check_study(study: Any, names: list[str], cost: float) -> None:
    """Refuse a study of another model, other weights or other data; its costs could not be compared."""
    known = study.user_attrs
    if "shared" in known and (known["layers"] != names or not math.isclose(known["shared"], cost, rel_tol=_SAME)):
        raise ValueError(
            f"the study {study.study_name!r} was made with another model, weights, data or loss: the best shared "
            f"configuration of its layers {known['layers']} had {known['shared']:.6g}, that of {names} here has "
            f"{cost:.6g}; pass another study= or storage="
        )
    study.set_user_attr("layers", names)
    study.set_user_attr("shared", cost)
