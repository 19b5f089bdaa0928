"""Batch Layer Normalization for Keras 3, on the TensorFlow, JAX and torch backends, and functions for whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from . import _arrays, formula
from ._array_models import calibrate, configure, reset_statistics, search
from ._install import install
from ._positions import check_shapes, sizes
from ._progress import check_repeatable
from ._spec import Spec, check_layer, option
from .config import StatisticsConfig

try:
    import keras
    from keras import ops
except ImportError as error:
    raise ImportError(f"bln.keras takes Keras 3, which is not installed: {install('keras')}") from error

if keras.backend.backend() == "torch":
    from .population import window  # which knows what torch's compiler takes
else:
    from ._positions import window

__all__ = [
    "BatchLayerNormalization",
    "Calibrate",
    "ResetStatistics",
    "calibrate",
    "configure",
    "layers",
    "reset_statistics",
    "search",
]


_PARAMETER_OPTIONS = {
    f"{parameter}_{kind}": (getattr(keras, f"{kind}s"), initial if kind == "initializer" else None)
    for parameter, initial in (("beta", "zeros"), ("gamma", "ones"))
    for kind in ("initializer", "regularizer", "constraint")
}
"""Where Keras looks up the options of the parameters, and their defaults."""


@keras.saving.register_keras_serializable(package="bln")
class BatchLayerNormalization(_arrays.Layer, keras.layers.Layer):
    """Batch Layer Normalization, as ``bln.BatchLayerNorm`` computes it; options are named and counted as in Keras.

    Put the layer after the nonlinearity. A mask, such as that of ``Embedding(mask_zero=True)``, marks real entries:
    hidden ones enter no statistic and come out 0. Statistics are float32 unless the dtype policy is float64. With
    ``trainable = False`` the layer acts as in inference, as ``keras.layers.BatchNormalization`` does. ``groups``,
    ``per_position`` and ``dim_scale`` are those of ``bln.BatchLayerNorm``.

    Args:
        axis: The axis of features; never 0, which is that of samples.
        position_shape: The positions to keep statistics for, such as ``(28, 28)`` or ``80``. ``None`` takes them from
            the input shape. Shorter sequences use the first positions.
        epsilon: Added to both variances.
        mix_epsilon: The epsilon of the mixing weights; ``None`` is ``epsilon``, with ``groups`` 0.
        momentum: The weight of the *old* value in the population statistics: 0.9 here is 0.1 in torch. ``None``
            averages all mini-batches since the last reset: see ``ResetStatistics``.
        center: Learn a shift, ``beta``.
        scale: Learn a scale, ``gamma``.
        config: The statistics of inference, for E_B, Std_B, E_F, Std_F: ``T`` population, ``F`` current. Assign it at
            any time: compiled functions follow. It is saved with the weights.
        **kwargs: ``beta_initializer``, ``gamma_regularizer``, ``beta_constraint`` and so on, as Keras's own
            normalization layers take them; ``name``, ``dtype`` and what else any layer takes.

    Shape:
        ``(N, *positions, C)``, or features at ``axis``; the output has the input's shape. ``mask``:
        ``(N, *positions)``.

    Examples:
        >>> import keras, numpy, bln.keras
        >>> layer = bln.keras.BatchLayerNormalization()
        >>> y = layer(numpy.random.normal(size=(25, 8, 8, 16)), training=True)
        >>> layer.config = "FTFF"
        >>> layer(numpy.random.normal(size=(1, 8, 8, 16))).shape[1:] == (8, 8, 16)
        True
    """

    epsilon, mix_epsilon = option("eps"), option("mix_eps")
    _affine = ("gamma", "beta")

    def __init__(
        self,
        axis: int = -1,
        groups: int | None = None,
        per_position: bool | None = None,
        position_shape: int | Sequence[int] | None = None,
        epsilon: float = 1e-4,
        mix_epsilon: float | None = None,
        momentum: float | None = 0.9,
        center: bool = True,
        scale: bool = True,
        config: StatisticsConfig | str = "TTFF",
        dim_scale: bool | None = None,
        **kwargs: Any,
    ) -> None:
        options = {
            name: library.get(kwargs.pop(name, default)) for name, (library, default) in _PARAMETER_OPTIONS.items()
        }
        super().__init__(**kwargs)
        for name, value in options.items():
            setattr(self, name, value)
        self.spec = Spec.of(groups, per_position, epsilon, mix_epsilon, dim_scale)
        self.position_shape = sizes(position_shape, self.per_position)
        self.axis = check_layer("axis", axis, -1, momentum, "old")
        self.momentum, self.center, self.scale = momentum, center, scale
        self.supports_masking = True
        self.gamma = self.beta = None
        self._priors = None
        self._config = StatisticsConfig.parse(config)
        self._calibrating = self._reached = False

    # ---- configuration

    @property
    def config(self) -> StatisticsConfig:
        """The statistics of inference; assign a ``StatisticsConfig`` or four letters."""
        return self._config if self._priors is None else StatisticsConfig.of(_to_numpy(self._priors))

    @config.setter
    def config(self, value: StatisticsConfig | str) -> None:
        self._config = StatisticsConfig.parse(value)
        if self._priors is not None:
            self._priors.assign(self._config.priors)

    def get_config(self) -> dict[str, Any]:
        """Return what rebuilds the layer, with the present configuration of statistics."""
        plain = ["axis", "groups", "per_position", "position_shape", "epsilon", "mix_epsilon", "momentum"]
        plain += ["center", "scale", "dim_scale"]
        config = {**super().get_config(), **{name: getattr(self, name) for name in plain}, "config": str(self.config)}
        options = {name: lib.serialize(getattr(self, name)) for name, (lib, _) in _PARAMETER_OPTIONS.items()}
        return config | options

    # ---- building

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Create parameters and statistics for inputs of this shape."""
        shape, axis = tuple(input_shape), check_shapes("axis", self.axis, input_shape, None, None, empty=True)
        features = shape[axis]
        if features is None:
            raise ValueError(f"the number of features, axis {self.axis} of the input shape {shape}, must be known")
        self.spec.check_features(features)
        self._positions = self._positions_of(shape[1:axis] + shape[axis + 1 :], shape)
        self.input_spec = keras.layers.InputSpec(ndim=len(shape), axes={axis: features})

        def add(name: str, shape: tuple[int, ...], value: Any = None, **options: Any) -> Any:
            if value is not None:
                options["initializer"] = lambda shape, dtype: ops.array(np.broadcast_to(value, shape), dtype)
            return self.add_weight(shape=shape, name=name, autocast=False, trainable=value is None, **options)

        for name, wanted in (("gamma", self.scale), ("beta", self.center)):
            if wanted:
                of_name = [option for option in _PARAMETER_OPTIONS if option.startswith(name)]
                options = {option.removeprefix(f"{name}_"): getattr(self, option) for option in of_name}
                setattr(self, name, add(name, (features,), **options))
        for name, size in formula.shapes(self._positions, features, self.groups).items():
            kind = "int" if name in formula.COUNTERS else _wide(self.variable_dtype)
            setattr(self, name, add(name, size, formula.INITIAL[name], dtype=kind))
        self._priors = add("config", (4,), self._config.priors, dtype="float32")

    def _positions_of(self, positions: tuple[int | None, ...], shape: tuple[int | None, ...]) -> tuple[int, ...]:
        """Return the positions to keep statistics for."""
        if not self.per_position:
            return ()
        fixed = tuple(size for size in positions if size is not None)
        if self.position_shape is not None:
            if len(fixed) == len(positions) or len(positions) != len(self.position_shape):
                window(fixed, self.position_shape)
            return self.position_shape
        if len(fixed) < len(positions):
            raise ValueError(
                f"batch statistics are kept for each position, but the input shape {shape} does not say how many there "
                "are. Ways out: (1) position_shape= the longest sequence there will be, shorter ones then use the "
                "first positions; (2) per_position=False, which pools batch statistics over positions; (3) a fixed "
                "input shape, as in keras.Input((80,))"
            )
        return fixed

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the input's shape."""
        check_shapes("axis", self.axis, input_shape, None, None, empty=True)
        return input_shape

    # ---- calling

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Normalize; with ``mask`` true at real entries, hidden ones enter no statistic and come out 0."""
        training = self._calibrating or (training and self.trainable)
        self._reached = True
        dtype = _wide(inputs.dtype, self.batch_mean.dtype)
        rows = ops.moveaxis(ops.cast(inputs, dtype), self.axis, -1)
        if self.per_position and len(self._positions) > 1 and None in rows.shape:
            import tensorflow  # whose graphs alone have open sizes: a size of 1 would be stretched

            rows = tensorflow.ensure_shape(rows, (None, *self._positions, rows.shape[-1]))
        if mask is not None:
            mask = mask if hasattr(mask, "shape") else np.asarray(mask)
            check_shapes("axis", self.axis, inputs.shape, None, mask.shape, empty=True)
            mask = ops.cast(mask, "bool")
        values = {
            name: v if v is None else ops.convert_to_tensor(v) if name in formula.COUNTERS else ops.cast(v, dtype)
            for name, v in self._variables().items()
        }
        call = _arrays.Call(ops, self.spec, values, self._length(rows))
        if training:
            y, after = call.train(rows, mask, self.momentum)
            for name, value in after.items():
                getattr(self, name).assign(ops.stop_gradient(value))
        else:
            y = call.infer(rows, mask, ops.convert_to_tensor(self._priors))
        # Keras has cast floats to the policy's type; integers, such as those of images, become it here.
        kept = keras.backend.is_float_dtype(keras.backend.standardize_dtype(inputs.dtype))
        return ops.cast(ops.moveaxis(y, -1, self.axis), inputs.dtype if kept else self.compute_dtype)

    def _length(self, rows: Any) -> Any:
        """Return how many of the known positions a shorter sequence uses; ``None`` for all."""
        positions = tuple(rows.shape[1:-1]) if self.per_position else ()
        if None in positions:  # a TensorFlow graph for any length
            return ops.shape(rows)[1] if len(positions) == 1 else None
        found = window(positions, self._positions)
        return found[0].stop if found else None

    # ---- variables, as NumPy arrays

    def reset_statistics(self) -> None:
        """Forget the population: mean 0, variance 1."""
        if self.built:  # TensorFlow builds a model in its first step, after the callbacks of the epoch's begin
            super().reset_statistics()

    def _numpy(self, variable: Any) -> Any:
        return _to_numpy(variable)

    def _assign(self, variable: Any, value: Any) -> None:
        variable.assign(ops.array(value, variable.dtype))


def _wide(*dtypes: Any) -> str:
    """Return the type to compute in. ``keras.backend.result_type`` knows no float64 on JAX and torch."""
    return "float64" if "float64" in map(keras.backend.standardize_dtype, dtypes) else "float32"


def _to_numpy(value: Any) -> Any:
    """Return a NumPy array of whatever tensor a data loader or a backend has."""
    if isinstance(value, keras.Variable):
        return np.asarray(ops.convert_to_numpy(value))
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)  # torch's, or another's


# ---- whole models


def layers(model: Any) -> dict[str, BatchLayerNormalization]:
    """Return the model's BLN layers by name, in the order of ``model.layers``; one that is used twice appears once.

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


class ResetStatistics(keras.callbacks.Callback):
    """Forget the population when an epoch begins, in layers with ``momentum=None``: theirs is then of the epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Forget the population."""
        for layer in layers(self.model).values():
            if layer.momentum is None:
                layer.reset_statistics()


class Calibrate(keras.callbacks.Callback):
    """Calibrate before each evaluation by ``fit(validation_data=...)`` or ``evaluate``.

    Args:
        batches: What ``calibrate`` takes; each evaluation goes through them.
        progress: Show a progress bar, if rich is installed and a terminal there to see it.
    """

    def __init__(self, batches: Iterable[Any], *, progress: bool = False) -> None:
        super().__init__()
        check_repeatable(batches, "each evaluation needs it; give a tf.data.Dataset, a DataLoader or a list")
        self.batches, self.progress = batches, progress

    def on_test_begin(self, logs: Any = None) -> None:
        """Calibrate the model."""
        calibrate(self.model, self.batches, progress=self.progress)


# ---- what _array_models.py takes of a framework

_LAYER = "BatchLayerNormalization"


def _convert(batch: Any) -> Any:
    """Return a batch as NumPy arrays."""
    return keras.tree.map_structure(_to_numpy, batch)


@contextmanager
def _evaluating(model: Any, calibrating: bool = False) -> Iterator[None]:
    """Retrace ``predict`` for a calibration: a function traced before would not calibrate."""
    compiled = model.predict_function
    try:
        model.predict_function = None if calibrating else compiled
        yield
    finally:
        if calibrating:
            model.predict_function = compiled


def _runner(model: Any, step: Callable[[Any, Any], Any] | None, calibrating: bool = False) -> Callable[[Any], Any]:
    """Return the function that runs the model on inputs, or ``step`` on a batch."""
    return model.predict_on_batch if step is None else partial(step, model)


def _function(name: str, given: Any) -> Any:
    """Return the loss, or the metric of this name, for what ``compile`` would take."""
    if name == "loss":
        return keras.losses.get(given)
    return _accuracy if given in ("accuracy", "acc") else keras.metrics.get(given)


def _accuracy(targets: Any, outputs: Any) -> Any:
    """Return the accuracy that ``compile(metrics=["accuracy"])`` would choose for these shapes."""
    if outputs.shape[-1] == 1:
        return keras.metrics.binary_accuracy(targets.reshape(outputs.shape), outputs)
    if targets.shape == outputs.shape:
        return keras.metrics.categorical_accuracy(targets, outputs)
    return keras.metrics.sparse_categorical_accuracy(targets, outputs)


def _evaluate(function: Any, outputs: Any, targets: Any) -> float:
    """Return the mean of a loss or metric over a batch."""
    if isinstance(function, keras.metrics.Metric):
        function.reset_state()
        function.update_state(targets, outputs)
        return float(function.result())
    return float(np.mean(ops.convert_to_numpy(function(targets, outputs))))
