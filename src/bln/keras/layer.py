"""The layer, for Keras 3 on the TensorFlow, JAX and torch backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

import keras
import numpy as np
from keras import ops

from .. import _arrays
from .._frameworks import State, as_numpy, as_tensor
from .._spec import Spec
from ..config import StatisticsConfig

if keras.backend.backend() == "torch":
    from ..population import window  # which knows what torch's compiler takes
else:
    from .._positions import window

if TYPE_CHECKING:
    from torch import Tensor


@keras.saving.register_keras_serializable(package="bln")
class BatchLayerNormalization(keras.layers.Layer):
    """Batch Layer Normalization: batch and layer normalization, mixed by the inverse of the mini-batch size.

    With sample ``n`` of ``m``, position ``p`` and feature ``k`` of ``d``, in training

        x_B = (x - mean_B) / sqrt(var_B + epsilon)
        x_F = (x - mean_F) / sqrt(var_F + epsilon)
        y   = gamma * [(1 - 1/m - mix_epsilon) * x_B + (1/m - mix_epsilon) * x_F] / sqrt(d) + beta

    where ``mean_B``, ``var_B`` are mean and biased variance over samples, one for each position and feature, and
    ``mean_F``, ``var_F`` those over features, one for each sample and position. At inference each of the four is the
    population's or the current mini-batch's, as ``config`` says. Put the layer behind the nonlinearity.

    With ``groups`` it is the form to use in convolutional nets: batch statistics are pooled over positions, as those of
    ``BatchNormalization``, and feature statistics are those of a sample over a group of features and all positions, as
    those of ``GroupNormalization``. In a sequence such statistics see later positions too: do not use them in a causal
    model.

    A mask, such as that of ``Embedding(mask_zero=True)``, marks real entries: hidden ones enter no statistic and come
    out 0, and ``m`` is counted at each position. Statistics are float32 under every dtype policy that is not float64.
    With ``trainable = False`` the layer acts as in inference, as ``keras.layers.BatchNormalization`` does.

    Args:
        axis: Where features stand; never 0, which is that of samples.
        groups: Feature statistics over this many groups of features, and over positions. ``None`` is the paper's layer.
        per_position: Batch statistics for each position, the default without ``groups``. ``False`` pools them over
            positions, as ``BatchNormalization`` does, and takes any image size or sequence length.
        position_shape: The positions (``(28, 28)``, ``80``) to keep statistics for; ``None`` takes them from the input
            shape. Shorter sequences use the first positions.
        epsilon: Added to both variances.
        mix_epsilon: The epsilon of the mixing weights; ``None`` is ``epsilon``, with ``groups`` 0.
        momentum: The weight of the *old* value in the population statistics, as Keras has it: 0.9 here is 0.1 in
            torch. The new one weighs at least ``1/updates``, so that initial values never mix in. ``None`` averages
            all mini-batches since the last reset, weighted by samples: see ``ResetStatistics``.
        center: Learn a shift, ``beta``.
        scale: Learn a scale, ``gamma``.
        config: The statistics of inference, for E_B, Std_B, E_F, Std_F: ``T`` population, ``F`` current. It can be
            assigned at any time, compiled functions follow. It is saved with the weights.
        dim_scale: Divide by the root of the number of features, as the paper does and by default the layer without
            ``groups``.
        beta_initializer: As Keras's own normalization layers take it.
        gamma_initializer: As Keras's own normalization layers take it.
        beta_regularizer: Likewise.
        gamma_regularizer: Likewise.
        beta_constraint: Likewise.
        gamma_constraint: Likewise.
        **kwargs: ``name``, ``dtype`` and so on.

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
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        beta_regularizer: Any = None,
        gamma_regularizer: Any = None,
        beta_constraint: Any = None,
        gamma_constraint: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not isinstance(axis, SupportsIndex) or index(axis) == 0:
            raise ValueError(f"axis must be -1 (features last) or another but 0, that of samples; got {axis!r}")
        spec = Spec.of(groups, per_position, epsilon, mix_epsilon, dim_scale)
        self.position_shape = _arrays.check_options(spec, momentum, position_shape)
        self.groups, self.per_position, self.epsilon, self.mix_epsilon, self.dim_scale = spec
        self.axis = index(axis)
        self.momentum = momentum
        self.center = center
        self.scale = scale
        self.beta_initializer = keras.initializers.get(beta_initializer)
        self.gamma_initializer = keras.initializers.get(gamma_initializer)
        self.beta_regularizer = keras.regularizers.get(beta_regularizer)
        self.gamma_regularizer = keras.regularizers.get(gamma_regularizer)
        self.beta_constraint = keras.constraints.get(beta_constraint)
        self.gamma_constraint = keras.constraints.get(gamma_constraint)
        self.supports_masking = True
        self.gamma = self.beta = None
        self._priors = None
        self._config = StatisticsConfig.parse(config)
        self._calibrating = self._reached = False

    # ---- configuration

    @property
    def spec(self) -> Spec:
        """What the layer computes."""
        return Spec(self.groups, self.per_position, self.epsilon, self.mix_epsilon, self.dim_scale)

    @property
    def config(self) -> StatisticsConfig:
        """The statistics of inference; assign a ``StatisticsConfig`` or four letters."""
        return self._config if self._priors is None else StatisticsConfig.of(to_numpy(self._priors))

    @config.setter
    def config(self, value: StatisticsConfig | str) -> None:
        self._config = StatisticsConfig.parse(value)
        if self._priors is not None:
            self._priors.assign(_arrays.priors_of(self._config))

    def get_config(self) -> dict[str, Any]:
        """What rebuilds the layer, the configuration of statistics as it is now."""
        plain = ["axis", "groups", "per_position", "position_shape", "epsilon", "mix_epsilon", "momentum"]
        plain += ["center", "scale", "dim_scale"]
        config = {**super().get_config(), **{name: getattr(self, name) for name in plain}, "config": str(self.config)}
        for parameter in ("beta", "gamma"):
            for kind in ("initializer", "regularizer", "constraint"):
                name = f"{parameter}_{kind}"
                config[name] = getattr(keras, f"{kind}s").serialize(getattr(self, name))
        return config

    # ---- building

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Create parameters and statistics for inputs of this shape."""
        shape, axis = tuple(input_shape), self._feature_axis(input_shape)
        features = shape[axis]
        if features is None:
            raise ValueError(f"the number of features, axis {self.axis} of the input shape {shape}, must be known")
        self.spec.check_features(features)
        self._positions = self._known_positions(shape[1:axis] + shape[axis + 1 :], shape)
        self.input_spec = keras.layers.InputSpec(ndim=len(shape), axes={axis: features})

        for name, wanted in (("gamma", self.scale), ("beta", self.center)):
            if wanted:
                weight = self.add_weight(
                    shape=(features,),
                    name=name,
                    initializer=getattr(self, f"{name}_initializer"),
                    regularizer=getattr(self, f"{name}_regularizer"),
                    constraint=getattr(self, f"{name}_constraint"),
                    autocast=False,
                )
                setattr(self, name, weight)
        dtype = _wide(self.variable_dtype)
        for name, size in _arrays.shapes(self._positions, features, self.groups).items():
            kind = "int" if name in _arrays.COUNTERS else dtype
            setattr(self, name, self._remember(name, size, _arrays.INITIAL[name], kind))
        self._priors = self._remember("config", (4,), _arrays.priors_of(self._config), "float32")

    def _remember(self, name: str, shape: tuple[int, ...], value: Any, dtype: str) -> Any:
        def initializer(shape: Any, dtype: Any = None) -> Any:
            return ops.array(np.broadcast_to(value, shape), dtype)

        return self.add_weight(
            shape=shape, name=name, initializer=initializer, dtype=dtype, trainable=False, autocast=False
        )

    def _known_positions(self, positions: tuple[int | None, ...], shape: tuple[int | None, ...]) -> tuple[int, ...]:
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

    def _feature_axis(self, input_shape: Sequence[int | None]) -> int:
        """The axis of features counted from the front."""
        rank = len(input_shape)
        if rank < 2 or not -rank < self.axis < rank:
            raise ValueError(
                f"expected an input (N, *positions, C), or with features at another axis than the last; got shape "
                f"{tuple(input_shape)} with axis={self.axis}"
            )
        return self.axis % rank

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the input's shape."""
        self._feature_axis(input_shape)
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
            mask = _boolean(mask, tuple(rows.shape[:-1]), tuple(inputs.shape))
        arrays = {name: None if v is None else _as(v, dtype, name) for name, v in self._variables().items()}
        layer = _arrays.Layer(ops, self.spec, arrays, self._length(rows))
        if training:
            y, after = layer.train(rows, mask, self.momentum)
            for name, value in after.items():
                getattr(self, name).assign(ops.stop_gradient(value))
        else:
            y = layer.infer(rows, mask, ops.convert_to_tensor(self._priors))
        # Keras has cast floats to the policy's type; integers, such as those of images, become it here.
        kept = keras.backend.is_float_dtype(keras.backend.standardize_dtype(inputs.dtype))
        return ops.cast(ops.moveaxis(y, -1, self.axis), inputs.dtype if kept else self.compute_dtype)

    def _length(self, rows: Any) -> Any:
        """How many of the known positions a shorter sequence uses; ``None`` for all."""
        positions = tuple(rows.shape[1:-1]) if self.per_position else ()
        if None in positions:  # a TensorFlow graph for any length
            return ops.shape(rows)[1] if len(positions) == 1 else None
        found = window(positions, self._positions)
        return found[0].stop if found else None

    # ---- statistics

    def _remembered(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _arrays.INITIAL}

    def _variables(self) -> dict[str, Any]:
        """All that the layer holds but the configuration, by the names of ``State``."""
        return {"scale": self.gamma, "shift": self.beta, **self._remembered()}

    def reset_statistics(self) -> None:
        """Forget the population: mean 0, variance 1."""
        if not self.built:  # TensorFlow builds a model in its first step, after the callbacks of the epoch's begin
            return
        self._restore({name: np.full(v.shape, _arrays.INITIAL[name]) for name, v in self._remembered().items()})

    def _snapshot(self) -> dict[str, Any]:
        return {name: to_numpy(variable).copy() for name, variable in self._remembered().items()}

    def _restore(self, snapshot: Mapping[str, Any]) -> None:
        for name, variable in self._remembered().items():
            variable.assign(ops.array(snapshot[name], variable.dtype))


def _wide(*dtypes: Any) -> str:
    """The type to compute in. ``keras.backend.result_type`` knows no float64 on JAX and torch."""
    return "float64" if "float64" in map(keras.backend.standardize_dtype, dtypes) else "float32"


def _boolean(mask: Any, expected: tuple[int | None, ...], shape: tuple[int | None, ...]) -> Any:
    """The mask as a tensor; sizes that do not fit are refused, where a broadcast would count wrongly."""
    mask = mask if hasattr(mask, "shape") else np.asarray(mask)
    given = tuple(mask.shape)
    fits = len(given) == len(expected) and all(a == b or None in (a, b) for a, b in zip(given, expected, strict=True))
    if not fits:
        raise ValueError(
            f"expected a mask (N, *positions), {expected} for an input of shape {shape}; got shape {given}"
        )
    return ops.cast(mask, "bool")


def _as(value: Any, dtype: str, name: str) -> Any:
    return ops.convert_to_tensor(value) if name in _arrays.COUNTERS else ops.cast(value, dtype)


def to_numpy(value: Any) -> Any:
    """Whatever tensor a data loader or a backend has."""
    if isinstance(value, keras.Variable):
        return np.asarray(ops.convert_to_numpy(value))
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)  # torch's, or another's


# ---- moving to and from other frameworks


def read(layer: BatchLayerNormalization) -> State:
    """Everything of a layer, for ``bln.transfer``."""
    if not layer.built:
        raise ValueError(f"layer {layer.name!r} is not built; call it on a batch, or build its model, before")

    def tensor(variable: Any) -> Tensor:
        return as_tensor(to_numpy(variable), keras.backend.standardize_dtype(variable.dtype))

    tensors = {name: None if v is None else tensor(v) for name, v in layer._variables().items()}
    return State(tensors, layer._positions, layer.config, layer.spec, _arrays.new_weight(layer.momentum))


def write(layer: BatchLayerNormalization, state: State) -> None:
    """Give a layer the state of another, which fits."""
    for name, variable in layer._variables().items():
        if variable is not None:
            variable.assign(ops.array(as_numpy(state.tensors[name]), variable.dtype))
    layer.config = state.config
