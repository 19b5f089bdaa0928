"""A configuration for each layer, by Optuna: resumable, and shared by as many processes as there are."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from .._install import install
from ..config import StatisticsConfig
from ..progress import track
from .descent import Costs
from .vectorized import Assignment

_LARGEST_GRID = 4
"""Layers. Optuna writes the whole grid down first."""
_SAME = 1e-3
"""The best shared cost may differ by this share between the machines that work on one study."""


def explore(
    shared: Mapping[Assignment, float],
    names: Sequence[str],
    configs: Sequence[StatisticsConfig],
    costs: Costs,
    *,
    sampler: Any,
    storage: Any,
    study: str,
    trials: int,
    progress: bool,
) -> tuple[Assignment, int]:
    """Run a study until it has as many finished trials as wanted, and return its best and the trials found there.

    The shared configurations go in as finished trials: they cost nothing more, the sampler learns from them, and the
    best of the study is never worse than they are.
    """
    optuna, choices = _optuna(), [str(config) for config in configs]
    with _quiet(optuna), _opened(optuna, storage) as opened:
        the = optuna.create_study(
            study_name=study,
            storage=opened,
            sampler=_sampler(optuna, sampler, names, choices, storage),
            load_if_exists=True,
        )
        _claim(the, names, min(shared.values(), key=lambda cost: (math.isnan(cost), cost)))
        _give(optuna, the, shared, names, choices)
        found = _finished(optuna, the)
        left = range(trials - found)
        bar = track(left, f"study {study}") if progress else (at for at in left)

        def objective(trial: Any) -> float:
            trial.set_user_attr("worker", f"{platform.node()}:{os.getpid()}")
            chosen = tuple(StatisticsConfig.parse(trial.suggest_categorical(name, choices)) for name in names)
            [cost] = costs([chosen], f"trial {trial.number}")
            return math.inf if math.isnan(cost) else cost  # a NaN would fail the trial, and another be asked for

        def count(the: Any, trial: Any) -> None:  # the trials of all processes
            next(bar, None)
            if _finished(optuna, the) >= trials:
                the.stop()

        if left:
            with closing(bar):
                next(bar)
                the.optimize(objective, callbacks=[count])
        best = the.best_trial.params
    return tuple(StatisticsConfig.parse(best[name]) for name in names), found


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ImportError(f"sampler= takes Optuna, which is not installed: {install('search')}") from error
    return optuna


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Keep Optuna from a line for each trial; there is a progress bar and a table."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def _no_storage(given: Any) -> ValueError:
    return ValueError(f"storage must be a URL such as 'sqlite:///study.db', or an Optuna storage; got {given!r}")


def _not_opened(storage: Any, error: Exception) -> ValueError:
    """Say what the database said, without the password in its URL."""
    from sqlalchemy.engine import make_url

    name = make_url(storage).render_as_string() if isinstance(storage, str) else repr(storage)
    cause = getattr(error, "orig", None) or error
    return ValueError(
        f"storage {name!r} cannot be opened: {cause}. The folder of an SQLite file must exist and be writable, as for "
        "'sqlite:////absolute/path/study.db' or 'sqlite:///relative/path/study.db'; a database server must be "
        "reachable under that URL"
    )


@contextmanager
def _opened(optuna: Any, storage: Any) -> Iterator[Any]:
    """The storage behind a URL, let go of afterwards."""
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    if not (storage is None or isinstance(storage, str | optuna.storages.BaseStorage)):
        raise _no_storage(storage)
    for wait in (0.1, 0.5, 2.0, None):
        try:
            opened = optuna.storages.get_storage(storage)
            break
        except ArgumentError as error:
            raise _no_storage(storage) from error
        except SQLAlchemyError as error:  # two processes that create its tables at once: one finds them half made
            if wait is None:
                raise _not_opened(storage, error) from error
            time.sleep(wait)
    try:
        yield opened
    finally:
        opened.remove_session()


def _sampler(optuna: Any, sampler: Any, names: Sequence[str], choices: Sequence[str], storage: Any) -> Any:
    samplers = optuna.samplers
    if isinstance(sampler, samplers.BaseSampler):
        return sampler
    # A study that others work on, or that is resumed, must not be given the same draws again.
    seed = 0 if storage is None else None
    if sampler == "tpe":
        return samplers.TPESampler(seed=seed)
    if sampler == "random":
        return samplers.RandomSampler(seed=seed)
    if sampler == "grid":
        if len(names) > _LARGEST_GRID:
            raise ValueError(
                f"a grid over {len(names)} layers has {len(choices)}^{len(names)} points; take sampler='tpe'"
            )
        return samplers.GridSampler(dict.fromkeys(names, choices), seed=seed)
    raise ValueError(f"sampler must be 'tpe', 'random', 'grid' or an Optuna sampler, got {sampler!r}")


def _claim(the: Any, names: Sequence[str], cost: float) -> None:
    """Refuse a study of another model, other weights or other data; its costs could not be compared."""
    known = the.user_attrs
    ways_out = f"pass another study= than {the.study_name!r}, or another storage="
    if "layers" in known and known["layers"] != list(names):
        raise ValueError(
            f"the study {the.study_name!r} is about the layers {known['layers']}, this model has {list(names)}; "
            f"{ways_out}"
        )
    if "shared" in known and not math.isclose(known["shared"], cost, rel_tol=_SAME):
        raise ValueError(
            f"the study {the.study_name!r} was made with other weights, data or loss: its best shared configuration "
            f"had {known['shared']:.6g}, now it has {cost:.6g}; {ways_out}"
        )
    the.set_user_attr("layers", list(names))
    the.set_user_attr("shared", cost)


def _give(
    optuna: Any, the: Any, shared: Mapping[Assignment, float], names: Sequence[str], choices: Sequence[str]
) -> None:
    distributions = dict.fromkeys(names, optuna.distributions.CategoricalDistribution(choices))
    there = [trial.params for trial in the.get_trials(deepcopy=False) if trial.user_attrs.get("shared")]
    for assignment, cost in shared.items():
        params = dict(zip(names, map(str, assignment), strict=True))
        if params not in there and not math.isnan(cost):
            the.add_trial(
                optuna.trial.create_trial(
                    params=params, distributions=distributions, value=cost, user_attrs={"shared": True}
                )
            )


def _finished(optuna: Any, the: Any) -> int:
    complete = the.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])
    return sum(not trial.user_attrs.get("shared") for trial in complete)
