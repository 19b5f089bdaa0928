"""Configure, calibrate and search whole models of Keras and Flax. Imports no torch.

``tools`` is ``bln.keras`` or ``bln.flax``. Each has ``layers`` and the private functions in which the two differ.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from . import formula
from ._frameworks import framework
from ._progress import track
from ._search.result import DEPENDS_ON_BATCH, Row, SearchResult, average_scores, notes_on_population
from .config import StatisticsConfig, choices, configure_layers
from .formula import Averages

Configuration = StatisticsConfig | str | Mapping[str, StatisticsConfig | str]
Metric = str | Callable[[Any, Any], Any]


def required_layers(model: Any) -> dict[str, Any]:
    """Return the BLN layers of a model by name; refuse a model without any, and layers that are not built."""
    tools = framework(model)
    if not hasattr(tools, "_LAYER"):
        raise TypeError(f"{type(model).__name__} is a torch model; the functions for it are in bln itself")
    found: dict[str, Any] = tools.layers(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no {tools._LAYER}; add one")
    if unbuilt := [name for name, layer in found.items() if not layer.built]:
        raise ValueError(
            f"the layers {unbuilt} are not built: they do not know their input shape. Call the model on a batch, or "
            "model.build(input_shape), first"
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


def _converted(tools: ModuleType, batches: Iterable[Any], what: str, progress: bool) -> Iterator[Any]:
    """Yield the batches as arrays of the framework; a list becomes a tuple."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(batches, keras.utils.PyDataset):  # endless before Keras 3.11
        batches = map(batches.__getitem__, range(batches.num_batches))
    for batch in track(batches, what) if progress else batches:
        yield tools._convert(tuple(batch) if isinstance(batch, list) else batch)


@contextmanager
def _restored(attributes: Iterable[tuple[Any, str]]) -> Iterator[None]:
    """Restore attributes, given as owners and names, at the end."""
    before = [(owner, name, getattr(owner, name)) for owner, name in attributes]
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


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
        step: ``step(model, batch)``, to run the model on other batches.
        progress: Show a progress bar, if rich is installed and standard error is a terminal.
    """
    layers, tools = required_layers(model), framework(model)
    before = {name: layer._snapshot() for name, layer in layers.items()}
    settings = [(layer, name) for layer in layers.values() for name in ("momentum", "_calibrating")]
    reached: set[str] = set()
    with _restored([*settings, *tools._modes(model)]):
        try:
            for name, layer in layers.items():
                layer._calibrating, layer.momentum = partial(reached.add, name), None
                layer.reset_statistics()
            run, count = tools._runner(model, step, calibrating=True), 0
            for batch in _converted(tools, batches, "calibrate", progress):
                run(batch[0] if step is None and isinstance(batch, tuple) else batch)
                count += 1
            if count == 0:
                raise ValueError("calibrate got no batches; was the iterable used up before?")
            for name, layer in layers.items():
                known, new = layer._snapshot()
                if name not in reached:
                    layer._restore(before[name])
                    warnings.warn(f"calibrate: no batch reached layer {name!r}, its statistics stay", stacklevel=2)
                elif not new["updates"].any():
                    raise ValueError(
                        f"layer {name!r} never had finite statistics in {count} batches; is its input NaN?"
                    )
                else:
                    old = {key: formula.expand(np, key, before[name][1][key], new[key].shape) for key in new}
                    after = formula.complete(np, Averages.of(new), Averages.of(old), layer.groups)
                    layer._restore((known, after.by_name()))
        except BaseException:
            for name, layer in layers.items():
                layer._restore(before[name])
            raise


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
        progress: Show a progress bar, if rich is installed and standard error is a terminal.
    """
    layers, tools, configs = required_layers(model), framework(model), choices(candidates)
    named = _named(metrics)
    functions = [tools._metric("loss", loss)]
    for name, metric in named.items():
        functions.append(partial(_accuracy, tools) if metric in ("accuracy", "acc") else tools._metric(name, metric))
    values, samples = [], []
    with _restored([*((layer, "config") for layer in layers.values()), *tools._modes(model)]):
        run = tools._runner(model, step, calibrating=False)
        for batch in _converted(tools, batches, "search", progress):
            if step is None and not (isinstance(batch, tuple) and len(batch) == 2):
                what = f"{len(batch)} parts" if isinstance(batch, tuple) else type(batch).__name__
                raise ValueError(f"expected batches of (inputs, targets), got {what}")
            of_batch = []
            for config in configs:
                configure_layers(layers, config)
                outputs, targets = run(batch) if step is not None else (run(batch[0]), batch[1])
                of_batch.append([function(outputs, targets) for function in functions])
            values.append(of_batch)
            samples.append(len(tools._leaves(targets)[0]))
    if not samples:
        raise ValueError("search got no batches; was the iterable used up before?")
    scores = average_scores(values, samples, [*named])
    rows = [Row(**vars(score), config=config) for config, score in zip(configs, scores, strict=True)]
    untrained = [name for name, layer in layers.items() if not layer._snapshot()[1]["updates"].any()]
    notes = notes_on_population(f"{tools.__name__}.calibrate(model, train_batches)", untrained)
    return SearchResult(rows, "separate", (DEPENDS_ON_BATCH, *notes), sum(samples), len(samples))


def _accuracy(tools: ModuleType, outputs: Any, targets: Any) -> float:
    """Return the share of samples whose largest output is the target's; a single output is 1 above the threshold."""
    outputs, targets = (np.asarray(tools._convert(value)) for value in (outputs, targets))
    if outputs.ndim == 1 or outputs.shape[-1] == 1:
        predicted = outputs > tools._ACCURACY_THRESHOLD
    else:
        predicted = outputs.argmax(-1)
        targets = targets.argmax(-1) if targets.shape == outputs.shape else targets
    if predicted.size != targets.size:
        raise ValueError(
            "'accuracy' is for outputs (N, ..., classes) and class targets (N, ...), or outputs (N,) or (N, 1) and "
            f"targets of 0 and 1; got {outputs.shape} and {targets.shape}. Pass a function instead"
        )
    return float((predicted.reshape(targets.shape) == targets).mean())


def _named(metrics: Any) -> dict[str, Any]:
    """Return the metrics by name: one, several in a list, or a mapping."""
    if isinstance(metrics, Mapping):
        return dict(metrics)
    several = metrics if isinstance(metrics, list | tuple) else [] if metrics is None else [metrics]
    return {m if isinstance(m, str) else getattr(m, "name", None) or m.__name__: m for m in several}
