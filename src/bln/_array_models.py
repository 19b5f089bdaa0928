"""Configuration, calibration and search of whole models of Keras and Flax. Imports no torch.

What differs between the two is in their modules, ``bln.keras`` and ``bln.flax``: ``layers`` and the names with an
underscore that are called here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from types import ModuleType
from typing import Any

import numpy as np

from . import formula
from ._frameworks import framework
from ._progress import track
from ._search.result import DEPENDS_ON_BATCH, Row, SearchResult
from ._search.result import averages as scores
from .config import StatisticsConfig, choices, configure_layers
from .formula import INITIAL, Averages

Configuration = StatisticsConfig | str | Mapping[str, StatisticsConfig | str]
Metric = str | Callable[[Any, Any], Any]


def required_layers(model: Any) -> dict[str, Any]:
    """Return the BLN layers of a model by name; refuse a model without any, and layers that are not built."""
    tools = framework(model)
    if not hasattr(tools, "_LAYER"):
        raise TypeError(f"{type(model).__name__} is a torch model; what can be done with it is in bln itself")
    found: dict[str, Any] = tools.layers(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no {tools._LAYER}; add one")
    if unbuilt := [name for name, layer in found.items() if not getattr(layer, "built", True)]:
        raise ValueError(
            f"the layers {unbuilt} are not built: they do not know their input shape. Call the model on a batch, or "
            "model.build(input_shape), before"
        )
    return found


def configure(model: Any, config: Configuration) -> None:
    """Choose the statistics of inference, as ``bln.configure`` does.

    Compiled functions follow: nothing has to be compiled again.
    """
    configure_layers(required_layers(model), config)


def reset_statistics(model: Any) -> None:
    """Forget the population statistics of all BLN layers. With ``momentum=None``, call it at each epoch's start."""
    for layer in required_layers(model).values():
        layer.reset_statistics()


def _converted(tools: ModuleType, batches: Any, what: str, progress: bool) -> Generator[Any]:
    """Yield the batches as arrays of the framework, with a progress bar."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(batches, keras.utils.PyDataset):  # it may go on for ever
        batches = [batches[at] for at in range(batches.num_batches)]
    for batch in track(batches, what) if progress else batches:
        yield tools._convert(tuple(batch) if isinstance(batch, list) else batch)


def calibrate(
    model: Any, batches: Iterable[Any], *, step: Callable[[Any, Any], Any] | None = None, progress: bool = True
) -> None:
    """Recompute the population statistics under frozen weights, as ``bln.calibrate`` does.

    Only the BLN layers run as in training, whether they are trainable or not. In Flax, the first batch runs as it is,
    where layers may learn their positions, the others under ``nnx.jit``; with ``axis_name`` each batch is a mini-batch
    by itself.

    Args:
        model: A model with BLN layers.
        batches: Any iterable of training batches, composed as in training: inputs, or a tuple whose first are the
            inputs. In Flax, inputs that are themselves a tuple or a dict are unpacked.
        step: How to run the model on a batch, ``step(model, batch)``, where that is not right.
        progress: Show a progress bar, if rich is installed and a terminal there to see it.
    """
    found, tools = required_layers(model), framework(model)
    before = {name: layer._snapshot() for name, layer in found.items()}
    momenta = {name: layer.momentum for name, layer in found.items()}
    try:
        for layer in found.values():
            layer._calibrating, layer._reached, layer.momentum = True, False, None
            layer.reset_statistics()
        count = 0
        tracked = closing(_converted(tools, batches, "calibrate", progress))
        with tools._evaluating(model, calibrating=True), tracked as converted:
            run = tools._runner(model, step, calibrating=True)
            for batch in converted:
                run(batch if step is not None or not isinstance(batch, tuple) else batch[0])
                count += 1
        if count == 0:
            raise ValueError("calibrate got no batches; was the iterable used up before?")
        for name, layer in found.items():
            after = layer._snapshot()
            learned = after["updates"].any()
            if not (layer._reached or learned):
                layer._restore(before[name])
                warnings.warn(f"calibrate: no batch reached layer {name!r}, its statistics stay", stacklevel=2)
            elif not learned:
                raise ValueError(f"layer {name!r} never had finite statistics in {count} batches; is its input NaN?")
            else:
                old = {key: formula.expand(np, key, before[name][key], after[key].shape) for key in INITIAL}
                layer._restore(formula.complete(np, Averages.of(after), Averages.of(old), layer.groups).by_name())
    except BaseException:
        for name, layer in found.items():
            layer._restore(before[name])
        raise
    finally:
        for name, layer in found.items():
            layer._calibrating, layer.momentum = False, momenta[name]


def search(
    model: Any,
    batches: Iterable[Any],
    *,
    loss: Any,
    metrics: Metric | Sequence[Metric] | Mapping[str, Metric] | None = None,
    candidates: Iterable[StatisticsConfig | str] = (),
    step: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    progress: bool = True,
) -> SearchResult:
    """Find the configuration of statistics that suits a trained model, as ``bln.search`` does.

    Args:
        model: A trained model with BLN layers; in Keras, it need not be compiled.
        batches: **Validation** data: any iterable of ``(inputs, targets)``, in batches composed as requests will be.
        loss: In Keras, as for ``compile``: a name, a ``keras.losses.Loss``, or a function ``loss(targets, outputs)``.
            In Flax, a function ``loss(outputs, targets)`` of one number or one for each sample.
        metrics: ``"accuracy"`` or functions like ``loss``, and in Keras whatever else ``compile`` takes; several in a
            list, or by name. Higher is better, and the first breaks ties. Values are those of a batch, averaged by
            samples.
        candidates: Configurations to compare with the 16, such as ``StatisticsConfig.shrunk(4, 16, 64)``.
        step: ``step(model, batch)``, which returns ``(outputs, targets)``, where ``model(inputs)`` is not right. In
            Flax it is compiled by ``nnx.jit``.
        progress: Show a progress bar, if rich is installed and a terminal there to see it.
    """
    found, tools, configs = required_layers(model), framework(model), choices(candidates)
    before = {name: layer.config for name, layer in found.items()}
    named = _named(metrics)
    functions = [tools._function(name, function) for name, function in ({"loss": loss} | named).items()]
    values, samples = [], []
    try:
        with tools._evaluating(model), closing(_converted(tools, batches, "search", progress)) as converted:
            run = tools._runner(model, step)
            for batch in converted:
                of_batch = []
                for config in configs:
                    configure_layers(found, config)
                    outputs, targets = run(batch) if step is not None else _predicted(run, batch)
                    of_batch.append([tools._evaluate(function, outputs, targets) for function in functions])
                values.append(of_batch)
                samples.append(_count(targets))
    finally:
        configure_layers(found, before)
    if not samples:
        raise ValueError("search got no batches; was the iterable used up before?")
    found_scores = scores(values, samples, [*named])
    rows = [Row(**vars(score), config=config) for config, score in zip(configs, found_scores, strict=True)]
    notes = [
        DEPENDS_ON_BATCH,
        "Population statistics averaged while the weights still moved can ruin rows with T; "
        f"{tools.__name__}.calibrate(model, train_batches) recomputes them under frozen weights.",
    ]
    if untrained := [name for name, layer in found.items() if not layer._snapshot()["updates"].any()]:
        notes.append(f"No training batch was seen by {', '.join(untrained)}: T there means mean 0, variance 1.")
    return SearchResult(rows, "separate", tuple(notes), sum(samples), len(samples))


def _predicted(run: Callable[[Any], Any], batch: Any) -> tuple[Any, Any]:
    """Return outputs and targets of a batch of inputs and targets."""
    if not (isinstance(batch, tuple) and len(batch) == 2):
        what = f"{len(batch)} parts" if isinstance(batch, tuple) else type(batch).__name__
        raise ValueError(f"expected batches of (inputs, targets), got {what}")
    return run(batch[0]), batch[1]


def _count(targets: Any) -> int:
    """Return the number of samples of a batch."""
    while isinstance(targets, list | tuple | Mapping):
        targets = next(iter(targets.values() if isinstance(targets, Mapping) else targets))
    return len(targets)


def _named(metrics: Any) -> dict[str, Any]:
    """Return the metrics, one, several in a list, or a mapping, by name."""
    if isinstance(metrics, Mapping):
        return dict(metrics)
    given = metrics if isinstance(metrics, list | tuple) else [] if metrics is None else [metrics]
    return {m if isinstance(m, str) else getattr(m, "name", None) or m.__name__: m for m in given}
