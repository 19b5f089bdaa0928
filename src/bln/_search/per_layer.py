"""A configuration for each layer: by coordinate descent, or by an Optuna study that can be resumed and shared."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from .._install import install
from .._progress import track
from ..config import StatisticsConfig
from .result import nan_last

if TYPE_CHECKING:
    from .objective import Objective

Assignment = tuple[StatisticsConfig, ...]
"""One configuration for each BLN layer, in the order of ``bln.layers``."""
Costs = Callable[[Sequence[Assignment], str], list[float]]
"""The costs of assignments, lower is better, NaN the worst; the text describes the step for a progress bar."""

_ROUNDING = 1e-6
"""An improvement by less than this share of the cost is rounding: float32 sums in another order differ by less."""


def search_layers(objective: Objective, sampler: Any, storage: Any, study: str, trials: int | None) -> list[str]:
    """Look for configurations of single layers, from the shared ones on; return what to know about that."""
    shared = dict(zip(objective.shared, objective.costs(objective.shared, "search"), strict=True))
    if sampler is None:
        best = min(shared, key=lambda assignment: nan_last(shared[assignment]))
        descend(best, objective.names, objective.configs, objective.costs)
        return []
    trials = len(objective.configs) * len(objective.names) if trials is None else trials
    if objective.ranks.rank > 0:
        known = _follow(objective)
    else:
        known = _explore(objective, shared, sampler, storage, study, trials)
    return [f"The study {study!r} was resumed: it had {known} finished trials of {trials}."] if known else []


def descend(start: Assignment, names: Sequence[str], configs: Sequence[StatisticsConfig], costs: Costs) -> Assignment:
    """Change one layer at a time to its best configuration until no change of a single layer improves.

    Only a lower cost is accepted, so the cost never rises and the descent ends.
    """
    best, unchanged, at = start, 0, 0
    while unchanged < len(names):
        candidates = [(*best[:at], config, *best[at + 1 :]) for config in configs]
        found = costs(candidates, names[at])
        now, lowest = found[candidates.index(best)], min(found, key=nan_last)
        if lowest < now - _ROUNDING * abs(now) or (math.isnan(now) and not math.isnan(lowest)):
            best, unchanged = candidates[found.index(lowest)], 0
        unchanged += 1  # the layer just changed is at its best
        at = (at + 1) % len(names)
    return best


# ---- by Optuna

_LARGEST_GRID = 4
"""Layers. Optuna writes the whole grid down first."""
_SAME = 1e-3
"""The best shared cost may differ by this share between the machines that work on one study."""


def _lead(objective: Objective, assignment: Assignment, what: str) -> float:
    """Return the cost of an assignment, and tell the other ranks of it: rank 0 alone talks to the study."""
    objective.ranks.tell([1, *map(objective.configs.index, assignment)])
    return objective.costs([assignment], what)[0]


def _follow(objective: Objective) -> int:
    """Evaluate what rank 0 asks for until its study is done; return how many trials that had before."""
    while True:
        go_on, *numbers = objective.ranks.tell([0] * (1 + len(objective.names)))
        if go_on < 0:
            return numbers[0]
        objective.costs([tuple(objective.configs[number] for number in numbers)], "study")


def _explore(
    objective: Objective, shared: Mapping[Assignment, float], sampler: Any, storage: Any, name: str, trials: int
) -> int:
    """Run the study until it has ``trials`` finished trials; return how many it had before.

    The shared configurations are added as finished trials: they cost nothing more, the sampler learns from them, and
    the best of the study is never worse than they are.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError(f"sampler= takes Optuna, which is not installed: {install('search')}") from error
    names, choices = objective.names, [str(config) for config in objective.configs]
    progress, objective.progress = objective.progress, False  # the study has a bar of its own

    def read(params: Mapping[str, str]) -> Assignment:
        return tuple(StatisticsConfig.parse(params[layer]) for layer in names)

    def cost(trial: Any) -> float:
        trial.set_user_attr("worker", f"{platform.node()}:{os.getpid()}")
        chosen = read({layer: trial.suggest_categorical(layer, choices) for layer in names})
        found = _lead(objective, chosen, f"trial {trial.number}")
        return math.inf if math.isnan(found) else found  # a NaN would fail the trial, and another be asked for

    with _quiet(optuna), _opened(optuna, storage) as opened:
        chosen = _sampler(optuna, sampler, names, choices, storage)
        study = optuna.create_study(study_name=name, storage=opened, sampler=chosen, load_if_exists=True)
        _claim(study, names, min(shared.values(), key=nan_last))
        _add_shared(optuna, study, shared, names, choices)
        known = _finished(study)
        left = range(trials - known)
        bar = track(left, f"study {name}") if progress else (at for at in left)

        def count(study: Any, _: Any) -> None:  # the trials of all processes
            next(bar, None)
            if _finished(study) >= trials:
                study.stop()

        if left:
            with closing(bar):
                next(bar)
                study.optimize(cost, callbacks=[count])
        best = read(study.best_trial.params)
    _lead(objective, best, "the best of the study")  # another process may have found it
    objective.ranks.tell([-1, known] + [0] * (len(names) - 1))
    return known


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Suppress Optuna's line for each trial; there is a progress bar and a table."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def _opened(optuna: Any, storage: Any) -> Iterator[Any]:
    """Open the storage at a URL, and release it afterwards."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    no_storage = ValueError(
        f"storage must be a URL such as 'sqlite:///study.db', or an Optuna storage; got {storage!r}"
    )
    if not (storage is None or isinstance(storage, str | optuna.storages.BaseStorage)):
        raise no_storage
    for wait in (0.1, 0.5, 2.0, None):
        try:
            opened = optuna.storages.get_storage(storage)
            break
        except ArgumentError as error:
            raise no_storage from error
        except SQLAlchemyError as error:  # another process may be creating the tables
            if wait is None:
                # make_url hides a password.
                name = make_url(storage).render_as_string() if isinstance(storage, str) else repr(storage)
                raise ValueError(
                    f"storage {name!r} cannot be opened: {getattr(error, 'orig', None) or error}. The folder of an "
                    "SQLite file must exist and be writable, as for 'sqlite:////absolute/path/study.db' or "
                    "'sqlite:///relative/path/study.db'; a database server must be reachable under that URL"
                ) from error
            time.sleep(wait)
    try:
        yield opened
    finally:
        opened.remove_session()


def _sampler(optuna: Any, sampler: Any, names: Sequence[str], choices: Sequence[str], storage: Any) -> Any:
    samplers = optuna.samplers
    if isinstance(sampler, samplers.BaseSampler):
        return sampler
    if sampler == "grid" and len(names) > _LARGEST_GRID:
        raise ValueError(f"a grid over {len(names)} layers has {len(choices)}^{len(names)} points; take sampler='tpe'")
    known = {
        "tpe": samplers.TPESampler,
        "random": samplers.RandomSampler,
        "grid": partial(samplers.GridSampler, dict.fromkeys(names, choices)),
    }
    if not (isinstance(sampler, str) and sampler in known):
        raise ValueError(f"sampler must be 'tpe', 'random', 'grid' or an Optuna sampler, got {sampler!r}")
    # A study that is resumed or shared must not get the same draws again.
    return known[sampler](seed=0 if storage is None else None)


def _claim(study: Any, names: Sequence[str], cost: float) -> None:
    """Refuse a study of another model, other weights or other data; its costs could not be compared."""
    known, name = study.user_attrs, study.study_name
    ways_out = f"pass another study= than {name!r}, or another storage="
    if "layers" in known and known["layers"] != list(names):
        raise ValueError(
            f"the study {name!r} is about the layers {known['layers']}, this model has {list(names)}; {ways_out}"
        )
    if "shared" in known and not math.isclose(known["shared"], cost, rel_tol=_SAME):
        raise ValueError(
            f"the study {name!r} was made with other weights, data or loss: its best shared configuration had "
            f"{known['shared']:.6g}, now it has {cost:.6g}; {ways_out}"
        )
    study.set_user_attr("layers", list(names))
    study.set_user_attr("shared", cost)


def _add_shared(
    optuna: Any, study: Any, shared: Mapping[Assignment, float], names: Sequence[str], choices: Sequence[str]
) -> None:
    """Add the shared configurations as finished trials, once."""
    distributions = dict.fromkeys(names, optuna.distributions.CategoricalDistribution(choices))
    there = [trial.params for trial in study.get_trials(deepcopy=False) if trial.user_attrs.get("shared")]
    for assignment, cost in shared.items():
        params = dict(zip(names, map(str, assignment), strict=True))
        if params not in there and not math.isnan(cost):
            known = {"params": params, "distributions": distributions, "value": cost, "user_attrs": {"shared": True}}
            study.add_trial(optuna.trial.create_trial(**known))


def _finished(study: Any) -> int:
    """Count the finished trials of all processes."""
    trials = study.get_trials(deepcopy=False)
    return sum(trial.state.name == "COMPLETE" and not trial.user_attrs.get("shared") for trial in trials)
