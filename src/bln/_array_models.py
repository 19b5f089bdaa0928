"""What Keras and Flax share about whole models: calibration and search. Imports no torch.

A layer of either has ``momentum``, ``config``, ``groups`` and ``reset_statistics()``, and for calibration

- ``_snapshot()``, all that it remembers as NumPy arrays by name, and ``_restore(snapshot)``;
- ``_calibrating``, to run as in training whatever the model does, and ``_reached``, which a call then makes true,
  if nothing has compiled it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from . import _arrays
from ._search.result import DEPENDS_ON_BATCH, Row, SearchResult, ranked
from ._search.score import averages
from .config import StatisticsConfig, configure_layers
from .formula import Statistics
from .progress import track

_INVERSE_M = Statistics._fields.index("inverse_m")


def tracked(batches: Iterable[Any], what: str, progress: bool, convert: Callable[[Any], Any]) -> Generator[Any]:
    """Each batch as ``convert`` makes it, with a progress bar."""
    for batch in track(batches, what) if progress else batches:
        yield convert(batch)


def calibrate(found: Mapping[str, Any], batches: Iterable[Any], run: Callable[[Any], Any]) -> None:
    """Recompute the statistics of the layers ``found`` as plain averages over ``batches``, each given to ``run``."""
    before = {name: layer._snapshot() for name, layer in found.items()}
    momenta = {name: layer.momentum for name, layer in found.items()}
    try:
        for layer in found.values():
            layer._calibrating, layer._reached, layer.momentum = True, False, None
            layer.reset_statistics()
        count = 0
        for batch in batches:
            run(batch)
            count += 1
        if count == 0:
            raise ValueError("calibrate got no batches; was the iterable used up before?")
        for name, layer in found.items():
            after = layer._snapshot()
            learned = after["updates"].any()
            if not (layer._reached or learned):
                layer._restore(before[name])
                warnings.warn(f"calibrate: no batch reached layer {name!r}, its statistics stay", stacklevel=3)
            elif not learned:
                raise ValueError(f"layer {name!r} never had finite statistics in {count} batches; is its input NaN?")
            else:
                layer._restore(_completed(after, before[name], layer.groups))
    except BaseException:
        for name, layer in found.items():
            layer._restore(before[name])
        raise
    finally:
        for name, layer in found.items():
            layer._calibrating, layer.momentum = False, momenta[name]


def _completed(after: Mapping[str, Any], before: Mapping[str, Any], groups: int | None) -> dict[str, Any]:
    """Take from ``before`` what was not learned since, and ``1/m`` wherever it was known."""
    old = {name: _spread(name, value, np.shape(after[name])) for name, value in before.items()}
    take = after["updates"] == 0
    take[_INVERSE_M] = old["updates"][_INVERSE_M] > 0
    new = {
        name: np.where(_arrays.broadcastable(name, wanted, groups), old[name], after[name])
        for name, wanted in zip(Statistics._fields, take, strict=True)
    }
    return new | {name: np.where(take, old[name], after[name]) for name in _arrays.COUNTERS}


def _spread(name: str, value: Any, shape: tuple[int, ...]) -> Any:
    """A value from before positions were learned, at each of them."""
    if not name.startswith("batch"):
        value = value.reshape(value.shape + (1,) * (len(shape) - value.ndim))
    return np.broadcast_to(value, shape)


def search(
    found: Mapping[str, Any],
    batches: Iterable[Any],
    score: Callable[[Any], tuple[list[float], int]],
    metrics: Sequence[str],
    configs: Sequence[StatisticsConfig],
    *,
    calibrate: str,
) -> SearchResult:
    """Compare ``configs`` on ``batches``; the layers ``found`` are left as they were.

    Args:
        found: The BLN layers by name.
        batches: What ``score`` takes, one after the other.
        score: The loss and the metrics of a batch under the present configuration, and its number of samples.
        metrics: Their names.
        configs: The configurations.
        calibrate: How users calibrate, for the notes.
    """
    before = {name: layer.config for name, layer in found.items()}
    values, samples = [], []
    try:
        for batch in batches:
            of_batch = []
            for config in configs:
                configure_layers(found, config)
                numbers, size = score(batch)
                of_batch.append(numbers)
            values.append(of_batch)
            samples.append(size)
    finally:
        configure_layers(found, before)
    if not samples:
        raise ValueError("search got no batches; was the iterable used up before?")
    rows = [Row(config, each) for config, each in zip(configs, averages(values, samples, metrics), strict=True)]
    notes = [
        DEPENDS_ON_BATCH,
        f"Population statistics averaged while the weights still moved can ruin rows with T; {calibrate} recomputes "
        "them under frozen weights.",
    ]
    if untrained := [name for name, layer in found.items() if not layer._snapshot()["updates"].any()]:
        notes.append(f"No training batch was seen by {', '.join(untrained)}: T there means mean 0, variance 1.")
    return SearchResult(ranked(rows, robust=False), "separate", tuple(notes), sum(samples), len(samples))
