"""The layer, for Flax NNX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import index
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .. import _arrays
from .._frameworks import State, as_numpy, as_tensor
from .._positions import window
from .._spec import Spec
from ..config import StatisticsConfig


class BatchLayerNorm(nnx.Module):
    """Batch Layer Normalization: batch and layer normalization, mixed by the inverse of the mini-batch size.

    With sample ``n`` of ``m``, position ``p`` and feature ``k`` of ``d``, in training

        x_B = (x - mean_B) / sqrt(var_B + eps)
        x_F = (x - mean_F) / sqrt(var_F + eps)
        y   = scale * [(1 - 1/m - mix_eps) * x_B + (1/m - mix_eps) * x_F] / sqrt(d) + bias

    where ``mean_B``, ``var_B`` are mean and biased variance over samples, one for each position and feature, and
    ``mean_F``, ``var_F`` those over features, one for each sample and position. With running averages each of the
    four is the population's or the current mini-batch's, as ``config`` says. Put the layer behind the nonlinearity.

    With ``groups`` it is the form to use in convolutional nets: batch statistics are pooled over positions, as those of
    ``nnx.BatchNorm``, and feature statistics are those of a sample over a group of features and all positions, as those
    of ``nnx.GroupNorm``. In a sequence such statistics see later positions too: do not use them in a causal model.

    Statistics, counters and the configuration are ``nnx.BatchStat``, so that ``nnx.split(model, nnx.Param,
    nnx.BatchStat)`` and checkpoints hold all of it. ``model.train()``, ``model.eval()`` and ``nnx.view`` act as on
    ``nnx.BatchNorm``.

    Args:
        num_features: The number of features (the paper's d).
        groups: Feature statistics over this many groups of features, and over positions. ``None`` is the paper's layer.
        channel_dim: Where features stand: last, as everywhere in Flax. (The torch layer has them at 1.)
        per_position: Batch statistics for each position, the default without ``groups``. ``False`` pools them over
            positions, as ``nnx.BatchNorm`` does, and takes any image size or sequence length.
        position_shape: The positions (``(28, 28)``, ``80``) to keep statistics for. ``None`` learns them from the
            first call outside of ``jit``, ``grad`` and the like; a first training call inside is an error. Shorter
            sequences use the first positions.
        use_running_average: Infer instead of train; the argument of the call goes first.
        eps: Added to both variances.
        mix_eps: The epsilon of the mixing weights; ``None`` is ``eps``, with ``groups`` 0.
        momentum: The weight of the *old* value in the population statistics, as in ``nnx.BatchNorm``: 0.9 here is 0.1
            in torch. The new one weighs at least ``1/updates``, so that initial values never mix in. ``None`` averages
            all mini-batches since the last ``reset_statistics``, weighted by samples.
        use_bias: Learn a shift, ``bias``.
        use_scale: Learn a scale, ``scale``.
        config: The statistics of inference, for E_B, Std_B, E_F, Std_F: ``T`` population, ``F`` current. It can be
            assigned at any time outside of ``jit``; compiled functions follow, since it is data.
        dim_scale: Divide by the root of ``num_features``, as the paper does and, by default, the layer without
            ``groups``.
        bias_init: Initializers, as in ``nnx.BatchNorm``.
        scale_init: Likewise.
        axis_name: Inside ``pmap``, ``shard_map`` or ``vmap``, the axis over which training mini-batches are one: counts
            and sums are added up, so that shards weigh as much as they have real entries. Inference stays local.
        axis_index_groups: Groups of indices along that axis, each with statistics of its own.
        dtype: Of the output; ``None`` infers it from input and parameters, as Flax does. Statistics are computed in
            float32 at least.
        param_dtype: Of the parameters. Statistics are float64 where this is, else float32.
        rngs: For the initializers.

    Shape:
        ``(N, *positions, C)``, or features at ``channel_dim``; the output has the input's shape. ``mask``:
        ``(N, *positions)``, boolean, true at real entries.

    Examples:
        >>> import jax, bln.flax
        >>> from flax import nnx
        >>> layer = bln.flax.BatchLayerNorm(16, rngs=nnx.Rngs(0))
        >>> y = layer(jax.random.normal(jax.random.key(0), (25, 8, 8, 16)))
        >>> layer.config = "FTFF"
        >>> layer.eval()
        >>> layer(jax.random.normal(jax.random.key(1), (1, 8, 8, 16))).shape
        (1, 8, 8, 16)
    """

    def __init__(
        self,
        num_features: int,
        *,
        groups: int | None = None,
        channel_dim: int = -1,
        per_position: bool | None = None,
        position_shape: int | Sequence[int] | None = None,
        use_running_average: bool | None = False,
        eps: float = 1e-4,
        mix_eps: float | None = None,
        momentum: float | None = 0.9,
        use_bias: bool = True,
        use_scale: bool = True,
        config: StatisticsConfig | str = "TTFF",
        dim_scale: bool | None = None,
        bias_init: Any = jax.nn.initializers.zeros,
        scale_init: Any = jax.nn.initializers.ones,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        if not isinstance(num_features, SupportsIndex) or index(num_features) < 1:
            raise ValueError(f"num_features must be an integer of at least 1, got {num_features!r}")
        if not isinstance(channel_dim, SupportsIndex) or index(channel_dim) == 0:
            raise ValueError(
                f"channel_dim must be -1 (features last) or another but 0, that of samples; got {channel_dim!r}"
            )
        spec = Spec.of(groups, per_position, eps, mix_eps, dim_scale)
        positions = _arrays.check_options(spec, momentum, position_shape)
        self.num_features = index(num_features)
        spec.check_features(self.num_features)
        self.groups, self.per_position, self.eps, self.mix_eps, self.dim_scale = spec
        self.channel_dim = index(channel_dim)
        self.without_positions = not self.per_position
        self.use_running_average = use_running_average
        self.momentum = momentum
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.dtype = dtype
        self.param_dtype = param_dtype
        self._calibrating = self._reached = False
        shape = (self.num_features,)
        self.scale = nnx.Param(scale_init(rngs.params(), shape, param_dtype)) if use_scale else nnx.data(None)
        self.bias = nnx.Param(bias_init(rngs.params(), shape, param_dtype)) if use_bias else nnx.data(None)
        self.priors = nnx.BatchStat(jnp.array(_arrays.priors_of(config), jnp.float32))
        kept = jnp.promote_types(param_dtype, jnp.float32)
        for name, size in _arrays.shapes(positions or (), *shape, self.groups).items():
            kind = jnp.int32 if name in _arrays.COUNTERS else kept
            setattr(self, name, nnx.BatchStat(jnp.full(size, _arrays.INITIAL[name], kind)))

    @property
    def spec(self) -> Spec:
        """What the layer computes."""
        return Spec(self.groups, self.per_position, self.eps, self.mix_eps, self.dim_scale)

    @property
    def position_shape(self) -> tuple[int, ...] | None:
        """The positions statistics are kept for, which their own shape says; ``None`` while they are unknown."""
        positions = tuple(self.batch_mean.shape[:-1])
        return positions if positions or self.without_positions else None

    @property
    def config(self) -> StatisticsConfig:
        """The statistics of inference; assign a ``StatisticsConfig`` or four letters."""
        return StatisticsConfig.of(np.asarray(self.priors[...]))

    @config.setter
    def config(self, value: StatisticsConfig | str) -> None:
        self.priors.set_value(jnp.array(_arrays.priors_of(value), jnp.float32))

    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
        """Normalize ``x``; with ``mask`` true at real entries, hidden ones enter no statistic and come out 0."""
        infer = self.use_running_average if use_running_average is None else use_running_average
        infer = infer and not self._calibrating
        if infer is None:
            raise ValueError(
                "use_running_average is not known. Ways out: (1) pass it to the constructor; (2) pass it to the call; "
                "(3) model.train() or model.eval()"
            )
        x, mask = jnp.asarray(x), None if mask is None else jnp.asarray(mask)
        if self._calibrating and not isinstance(x, jax.core.Tracer):
            self._reached = True
        channel_dim = self._check(x, mask, infer)
        given = self.dtype or jnp.result_type(x, *(p[...] for p in (self.scale, self.bias) if p is not None))
        if x.shape[0] == 0:
            return x.astype(given)
        rows = jnp.moveaxis(x.astype(jnp.promote_types(x.dtype, self.batch_mean.dtype)), channel_dim, -1)
        positions = rows.shape[1:-1] if self.per_position else ()
        self._learn(positions, x, infer)
        used = window(positions, self.position_shape)
        arrays = {name: None if v is None else v[...] for name, v in variables(self).items()}
        layer = _arrays.Layer(jnp, self.spec, arrays, used[0].stop if used else None)
        if infer:
            y = layer.infer(rows, mask, self.priors[...])
        else:
            psum = partial(jax.lax.psum, axis_name=self.axis_name, axis_index_groups=self.axis_index_groups)
            y, after = layer.train(
                rows, mask, self.momentum, None if self.axis_name is None or self._calibrating else psum
            )
            for name, value in after.items():
                variable = getattr(self, name)
                variable[...] = jax.lax.stop_gradient(value.astype(variable.dtype))
        return jnp.moveaxis(y, -1, channel_dim).astype(given)

    def _check(self, x: Any, mask: Any, infer: bool) -> int:
        """Refuse what cannot be normalized; returns the dimension of features counted from the front."""
        shape = x.shape
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"expected a real floating point input, got {x.dtype}; convert it first")
        if not (len(shape) >= 2 and -len(shape) < self.channel_dim < len(shape)):
            raise ValueError(
                f"expected an input (N, *positions, C), or with features at another dimension than the last; got shape "
                f"{shape} with channel_dim={self.channel_dim}. A single sample needs its own dimension: x[None]"
            )
        channel_dim = self.channel_dim % len(shape)
        if shape[channel_dim] != self.num_features:
            raise ValueError(
                f"expected {self.num_features} features along dimension {channel_dim}, got {shape[channel_dim]} in an "
                f"input of shape {shape}. If features stand elsewhere, pass channel_dim="
            )
        if x.size == 0 and not (infer and 0 not in shape[1:]):
            raise ValueError(f"cannot train on an empty input, got shape {shape}; skip empty batches")
        if mask is not None:
            if mask.dtype != bool:
                raise TypeError(f"expected a boolean mask, true at real entries, got {mask.dtype}")
            expected = shape[:channel_dim] + shape[channel_dim + 1 :]
            if mask.shape != expected:
                raise ValueError(f"expected a mask (N, *positions) of shape {expected}, got {mask.shape}")
        return channel_dim

    def _learn(self, positions: tuple[int, ...], x: Any, infer: bool) -> None:
        """Take the positions of the first call, where an array may still change its shape."""
        if self.position_shape is not None:
            return
        traced = isinstance(x, jax.core.Tracer)
        if traced and positions and not infer:
            raise ValueError(
                f"the layer does not know its positions yet, and cannot learn {positions} inside jit, grad or another "
                f"transformation. Ways out: (1) position_shape={positions}; (2) a call outside before, such as "
                "model.eval(); model(x); (3) per_position=False"
            )
        if not traced:
            for name, shape in _arrays.shapes(positions, self.num_features, self.groups).items():
                variable = getattr(self, name)
                old = variable[...]
                if not name.startswith("batch"):
                    old = old.reshape(old.shape + (1,) * (len(shape) - old.ndim))
                variable.set_value(jnp.broadcast_to(old, shape))
            self.without_positions = not positions

    def set_view(self, use_running_average: bool | None = None) -> None:
        """What ``nnx.view`` calls."""
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def reset_statistics(self) -> None:
        """Forget the population: mean 0, variance 1. Positions stay known."""
        for name, value in _arrays.INITIAL.items():
            variable = getattr(self, name)
            variable.set_value(jnp.full_like(variable[...], value))

    def _snapshot(self) -> dict[str, Any]:
        return {name: np.array(getattr(self, name)[...]) for name in _arrays.INITIAL}

    def _restore(self, snapshot: Mapping[str, Any]) -> None:
        for name, value in snapshot.items():
            variable = getattr(self, name)
            variable.set_value(jnp.asarray(value, variable.dtype))


# ---- moving to and from other frameworks


def variables(layer: BatchLayerNorm) -> dict[str, Any]:
    """All that a layer holds but the configuration, by the names of ``State``."""
    return {"scale": layer.scale, "shift": layer.bias, **{name: getattr(layer, name) for name in _arrays.INITIAL}}


def read(layer: BatchLayerNorm) -> State:
    """Everything of a layer, for ``bln.transfer``."""
    found = variables(layer).items()
    tensors = {name: None if v is None else as_tensor(np.asarray(v[...]), str(v.dtype)) for name, v in found}
    return State(tensors, layer.position_shape, layer.config, layer.spec, _arrays.new_weight(layer.momentum))


def write(layer: BatchLayerNorm, state: State) -> None:
    """Give a layer the state of another, which fits."""
    for name, variable in variables(layer).items():
        if variable is not None:
            variable.set_value(jnp.array(as_numpy(state.tensors[name]), variable.dtype))
    layer.without_positions = state.positions == ()
    layer.config = state.config
