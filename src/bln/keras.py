"""Batch Layer Normalization for Keras 3, on the TensorFlow, JAX and torch backends, and functions for whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from ._install import install

try:  # before NumPy, which comes with it
    import keras
    from keras import ops
except ImportError as error:
    raise ImportError(f"bln.keras takes Keras 3, which is not installed: {install('keras')}") from error

import numpy as np

from . import _arrays, formula
from ._array_models import calibrate, configure, reset_statistics, search
from ._positions import check_shapes, sizes, window
from ._progress import check_repeatable
from ._spec import Spec, check_channel_dim, check_momentum, option
from .config import StatisticsConfig

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


_KINDS = {kind: getattr(keras, f"{kind}s") for kind in ("initializer", "regularizer", "constraint")}
"""The options of gamma and of beta, such as ``gamma_initializer``, and where Keras looks them up."""
_PARAMETER_OPTIONS = {f"{name}_{kind}": library for name in ("gamma", "beta") for kind, library in _KINDS.items()}


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
    _xp = ops
    _numpy = staticmethod(ops.convert_to_numpy)
    _tensor = staticmethod(ops.cast)
    _assign = staticmethod(lambda variable, v: variable.assign(ops.stop_gradient(ops.array(v, variable.dtype))))
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
        defaults = {"gamma_initializer": "ones", "beta_initializer": "zeros"} | kwargs
        options = {name: library.get(defaults.pop(name, None)) for name, library in _PARAMETER_OPTIONS.items()}
        super().__init__(**defaults)
        for name, value in options.items():
            setattr(self, name, value)
        self.spec = Spec.of(groups, per_position, epsilon, mix_epsilon, dim_scale)
        self.position_shape = sizes(position_shape, self.per_position)
        self.axis = check_channel_dim("axis", axis, -1)
        check_momentum(momentum, "old")
        self.momentum, self.center, self.scale = momentum, center, scale
        self.supports_masking = True
        self.gamma = self.beta = None
        self.priors = StatisticsConfig.parse(config).priors

    def get_config(self) -> dict[str, Any]:
        """Return what rebuilds the layer, with the present configuration of statistics."""
        names = ["axis", "groups", "per_position", "position_shape", "epsilon", "mix_epsilon", "momentum"]
        names += ["center", "scale", "dim_scale"]
        options = {name: library.serialize(getattr(self, name)) for name, library in _PARAMETER_OPTIONS.items()}
        own = {name: getattr(self, name) for name in names} | {"config": str(self.config)}
        return super().get_config() | own | options  # type: ignore[no-any-return]

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Create parameters and statistics for inputs of this shape."""
        shape, axis = tuple(input_shape), check_shapes("axis", self.axis, input_shape, None, None, allow_empty=True)
        features = shape[axis]
        if features is None:
            raise ValueError(f"the number of features, axis {self.axis} of the input shape {shape}, must be known")
        self.spec.check_features(features)
        positions: tuple[Any, ...] = shape[1:axis] + shape[axis + 1 :] if self.per_position else ()
        if None not in positions:
            window(positions, self.position_shape)
        elif self.position_shape is None:
            raise ValueError(
                f"batch statistics are kept for each position, but the input shape {shape} does not say how many there "
                "are. Ways out: (1) position_shape= the longest sequence there will be, shorter ones then use the "
                "first positions; (2) per_position=False, which pools batch statistics over positions; (3) a fixed "
                "input shape, as in keras.Input((80,))"
            )
        positions = positions if self.position_shape is None else self.position_shape
        self.input_spec = keras.layers.InputSpec(ndim=len(shape), axes={axis: features})
        for name, wanted in (("gamma", self.scale), ("beta", self.center)):
            if wanted:
                options = {kind: getattr(self, f"{name}_{kind}") for kind in _KINDS}
                setattr(self, name, self.add_weight((features,), name=name, autocast=False, **options))
        kept, priors = "float64" if self.variable_dtype == "float64" else "float32", self.priors
        add = partial(self.add_weight, trainable=False, autocast=False)
        for name, size in formula.shapes(positions, features, self.groups).items():
            dtype, initial = "int" if name in formula.COUNTERS else kept, "ones" if formula.INITIAL[name] else "zeros"
            setattr(self, name, add(size, initial, dtype, name=name))
        self.priors = add((4,), lambda shape, dtype: ops.array(priors, dtype), "float32", name="config")

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the input's shape."""
        check_shapes("axis", self.axis, input_shape, None, None, allow_empty=True)
        return input_shape

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Normalize; with ``mask`` true at real entries, hidden ones enter no statistic and come out 0."""
        rows = ops.moveaxis(ops.cast(inputs, self.batch_mean.dtype), self.axis, -1)
        expected = (None, *self.batch_mean.shape)
        if len(expected) > 3 and None in rows.shape:
            import tensorflow  # whose graphs alone have open sizes: a size of 1 would be stretched

            rows = tensorflow.ensure_shape(rows, expected)
        if mask is not None:
            mask = ops.convert_to_tensor(mask, "bool")
            check_shapes("axis", self.axis, inputs.shape, None, mask.shape, allow_empty=True)
        y = self._normalize(rows, mask, training and self.trainable)
        return ops.cast(ops.moveaxis(y, -1, self.axis), self.compute_dtype)


# ---- whole models


def layers(model: Any) -> dict[str, BatchLayerNormalization]:
    """Return the model's BLN layers by name, in the order of ``model.layers``; one that is used twice appears once.

    A layer inside another that has a name taken before is called by its path, as in ``"block_2/norm"``.
    """
    found: dict[str, BatchLayerNormalization] = {}
    for path, layer in _walk(model, ""):
        if isinstance(layer, BatchLayerNormalization) and layer not in found.values():
            name = path if layer.name in found else layer.name
            found[f"{path}:{len(found)}" if name in found else name] = layer
    return found


def _walk(layer: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield a layer and all inside it, each with its path."""
    yield path, layer
    for child in layer._flatten_layers(include_self=False, recursive=False):
        yield from _walk(child, f"{path}/{child.name}" if path else child.name)


class ResetStatistics(keras.callbacks.Callback):
    """Forget the population when an epoch begins, in layers with ``momentum=None``, so that they average one epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Forget the population."""
        for layer in layers(self.model).values():
            if layer.momentum is None:
                layer.reset_statistics()


class Calibrate(keras.callbacks.Callback):
    """Calibrate before each evaluation by ``fit(validation_data=...)`` or ``evaluate``.

    Args:
        batches: What ``calibrate`` takes; each evaluation goes through them.
        progress: Show a progress bar, if rich is installed and standard error is a terminal.
    """

    def __init__(self, batches: Iterable[Any], *, progress: bool = False) -> None:
        super().__init__()
        check_repeatable(batches, "each evaluation needs it; give a tf.data.Dataset, a DataLoader or a list")
        self.batches, self.progress = batches, progress

    def on_test_begin(self, logs: Any = None) -> None:
        """Calibrate the model."""
        calibrate(self.model, self.batches, progress=self.progress)


# ---- what _array_models.py needs of a framework

_LAYER = "BatchLayerNormalization"
_ACCURACY_THRESHOLD = 0.5  # of probabilities, as in compile(metrics=["accuracy"])
_convert, _leaves = partial(keras.tree.map_structure, ops.convert_to_numpy), keras.tree.flatten


def _modes(model: Any) -> list[tuple[Any, str]]:
    """Return what ``_runner`` changes: owners and names of attributes."""
    return [(model, "predict_function")]


def _runner(model: Any, step: Callable[[Any, Any], Any] | None, calibrating: bool) -> Callable[[Any], Any]:
    """Return the function that runs the model on inputs, or ``step`` on a batch."""
    if calibrating:  # a function traced before would not calibrate
        model.predict_function = None
    return model.predict_on_batch if step is None else partial(step, model)


def _metric(name: str, metric: Any) -> Callable[[Any, Any], float]:
    """Return the mean over a batch of the loss, or of the metric of this name, for what ``compile`` would take."""
    function = (keras.losses if name == "loss" else keras.metrics).get(metric)

    def mean(outputs: Any, targets: Any) -> float:
        if isinstance(function, keras.metrics.Metric):
            function.reset_state()
        return float(np.mean(ops.convert_to_numpy(function(targets, outputs))))

    return mean
