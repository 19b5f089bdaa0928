"""What is done with a whole Keras model: find its BLN layers, configure, reset, calibrate and search them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from .. import _array_models
from .._search.result import SearchResult
from ..config import StatisticsConfig, choices, configure_layers
from .layer import BatchLayerNormalization, to_numpy

if TYPE_CHECKING:
    from collections.abc import Callable

    Configuration = StatisticsConfig | str | Mapping[str, StatisticsConfig | str]
    Metric = str | Callable[[Any, Any], Any]


def layers(model: Any) -> dict[str, BatchLayerNormalization]:
    """The model's BLN layers by name, in the order of ``model.layers``; one that is used twice appears once.

    A layer inside another that has a name taken before is called by its path, as in ``"block_2/norm"``.
    """
    found: dict[str, BatchLayerNormalization] = {}
    for path, layer in _walk(model, ()):
        if isinstance(layer, BatchLayerNormalization) and not any(layer is other for other in found.values()):
            name = next((n for at in range(len(path)) if (n := "/".join(path[-at - 1 :])) not in found), None)
            found[name or f"{'/'.join(path)}:{len(found)}"] = layer
    return found


def _walk(layer: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    path = (*path, layer.name)
    yield path, layer
    for child in layer._flatten_layers(include_self=False, recursive=False):
        yield from _walk(child, path)


def _required_layers(model: Any) -> dict[str, BatchLayerNormalization]:
    if not (found := layers(model)):
        raise ValueError(f"{type(model).__name__} {model.name!r} has no BatchLayerNormalization; add one")
    if unbuilt := [name for name, layer in found.items() if not layer.built]:
        raise ValueError(
            f"the layers {unbuilt} are not built: they do not know their input shape. Call the model on a batch, or "
            "model.build(input_shape), before"
        )
    return found


def configure(model: Any, config: Configuration) -> None:
    """Choose the statistics of inference: one configuration for all BLN layers, or one for each name.

    Compiled functions follow, so neither ``compile`` nor a new ``predict`` function is needed.

    Args:
        model: A Keras model with BLN layers.
        config: ``"TTFF"``, a ``StatisticsConfig``, or a mapping from names, as ``layers`` gives them, to such; layers
            that it does not name stay as they are.
    """
    configure_layers(_required_layers(model), config)


def reset_statistics(model: Any) -> None:
    """Forget the population statistics of all BLN layers."""
    for layer in _required_layers(model).values():
        layer.reset_statistics()


class ResetStatistics(keras.callbacks.Callback):
    """Population statistics of the epoch alone: forget them at its begin, in layers with ``momentum=None``.

    Examples:
        >>> import keras, numpy, bln.keras
        >>> model = keras.Sequential([bln.keras.BatchLayerNormalization(momentum=None)])
        >>> model.compile(loss="mse")
        >>> x = numpy.random.normal(size=(12, 3))
        >>> history = model.fit(x, x, batch_size=4, epochs=2, verbose=0, callbacks=[bln.keras.ResetStatistics()])
        >>> int(model.layers[0].updates[0])
        3
    """

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Forget."""
        for layer in layers(self.model).values():
            if layer.momentum is None:
                layer.reset_statistics()


def calibrate(model: Any, batches: Iterable[Any], *, progress: bool = True) -> None:
    """Recompute the population statistics under frozen weights (Algorithm 2), as plain averages over ``batches``.

    Only the BLN layers run as in training, also those with ``trainable = False``: dropout stays off, other norms use
    what they remember. The remembered ``1/m`` stays that of training, where there was any. If anything goes wrong, the
    statistics are as they were.

    Args:
        model: A Keras model with BLN layers.
        batches: Any iterable of training batches, composed as in training: inputs, or a tuple whose first is the
            inputs; a ``tf.data.Dataset``, a ``DataLoader``, a ``keras.utils.PyDataset``.
        progress: Show a progress bar, if rich is installed and a terminal there to see it.
    """
    found = _required_layers(model)
    compiled = model.predict_function
    try:
        model.predict_function = None  # traced anew: it has to see that these layers calibrate
        with closing(_tracked(batches, "calibrate", progress)) as tracked:
            _array_models.calibrate(
                found, tracked, lambda batch: model.predict_on_batch(batch[0] if isinstance(batch, tuple) else batch)
            )
    finally:
        model.predict_function = compiled


class Calibrate(keras.callbacks.Callback):
    """Calibrate before each evaluation, that of ``fit(validation_data=...)`` or ``evaluate``.

    Args:
        batches: As ``calibrate`` takes them; gone through at each evaluation.
        progress: Likewise.

    Examples:
        >>> import keras, numpy, bln.keras
        >>> model = keras.Sequential([bln.keras.BatchLayerNormalization()])
        >>> model.compile(loss="mse")
        >>> x = numpy.random.normal(size=(12, 3))
        >>> each_time = bln.keras.Calibrate([x[:6], x[6:]])
        >>> history = model.fit(x, x, epochs=2, verbose=0, validation_data=(x, x), callbacks=[each_time])
        >>> int(model.layers[0].updates[0])
        2
    """

    def __init__(self, batches: Iterable[Any], *, progress: bool = False) -> None:
        super().__init__()
        if isinstance(batches, Iterator):
            raise TypeError(
                f"{type(batches).__name__} can be gone through once only, and each evaluation needs it; give a "
                "tf.data.Dataset, a DataLoader or a list"
            )
        self.batches, self.progress = batches, progress

    def on_test_begin(self, logs: Any = None) -> None:
        """Calibrate."""
        calibrate(self.model, self.batches, progress=self.progress)


def _tracked(batches: Iterable[Any], what: str, progress: bool) -> Generator[Any]:
    """Batches as NumPy arrays, with a progress bar."""
    if isinstance(batches, keras.utils.PyDataset):
        batches = [batches[index] for index in range(batches.num_batches)]

    def convert(batch: Any) -> Any:
        return keras.tree.map_structure(to_numpy, tuple(batch) if isinstance(batch, list) else batch)

    return _array_models.tracked(batches, what, progress, convert)


# ---- search


def search(
    model: Any,
    batches: Iterable[Any],
    *,
    loss: Any,
    metrics: Metric | Sequence[Metric] | Mapping[str, Metric] | None = None,
    candidates: Iterable[StatisticsConfig | str] = (),
    progress: bool = True,
) -> SearchResult:
    """Find the configuration of statistics that suits a trained model: all 16 on held-out batches.

    Search on **validation** data. Each batch is loaded once, and predicted in all configurations by one compiled
    function. The model is left as it was found; ``SearchResult.apply`` gives it the winner.

    Args:
        model: A trained Keras model with BLN layers; it need not be compiled.
        batches: Any iterable of ``(inputs, targets)``, in batches composed as requests will be.
        loss: As for ``compile``: a name, a ``keras.losses.Loss``, or a function ``loss(targets, outputs)``.
        metrics: ``"accuracy"``, other names Keras knows, ``keras.metrics.Metric``, or functions ``metric(targets,
            outputs)``; several in a list, or by name. Higher is better, and the first breaks ties. Values are those of
            a batch, averaged by samples.
        candidates: Configurations to compare beside the 16, such as ``StatisticsConfig.shrunk(4, 16, 64)``.
        progress: Show a progress bar, if rich is installed and a terminal there to see it.

    Returns:
        A ``SearchResult``: a table that prints, exports, iterates best first, and applies to the model.
    """
    found = _required_layers(model)
    functions = {"loss": keras.losses.get(loss), **_named(metrics)}

    def score(batch: Any) -> tuple[list[float], int]:
        if not isinstance(batch, tuple) or len(batch) != 2:
            what = f"{len(batch)} parts" if isinstance(batch, tuple) else type(batch).__name__
            raise ValueError(f"expected batches of (inputs, targets), got {what}")
        inputs, targets = batch
        outputs = model.predict_on_batch(inputs)
        values = [_score(function, targets, outputs) for function in functions.values()]
        return values, len(keras.tree.flatten(targets)[0])

    with closing(_tracked(batches, "search", progress)) as tracked:
        return _array_models.search(
            found, tracked, score, [name for name in functions if name != "loss"], choices(candidates),
            calibrate="bln.keras.calibrate(model, train_batches)",
        )  # fmt: skip


def _named(metrics: Any) -> dict[str, Any]:
    if isinstance(metrics, Mapping):
        named = dict(metrics)
    else:
        given = metrics if isinstance(metrics, list | tuple) else [] if metrics is None else [metrics]
        named = {m if isinstance(m, str) else getattr(m, "name", None) or m.__name__: m for m in given}
    return {name: _accuracy if m in ("accuracy", "acc") else keras.metrics.get(m) for name, m in named.items()}


def _accuracy(targets: Any, outputs: Any) -> Any:
    """The accuracy ``compile(metrics=["accuracy"])`` would choose for these shapes."""
    if outputs.shape[-1] == 1:
        return keras.metrics.binary_accuracy(targets.reshape(outputs.shape), outputs)
    if targets.shape == outputs.shape:
        return keras.metrics.categorical_accuracy(targets, outputs)
    return keras.metrics.sparse_categorical_accuracy(targets, outputs)


def _score(function: Any, targets: Any, outputs: Any) -> float:
    if isinstance(function, keras.metrics.Metric):
        function.reset_state()
        function.update_state(targets, outputs)
        return float(function.result())
    return float(np.mean(to_numpy(ops.convert_to_numpy(function(targets, outputs)))))
