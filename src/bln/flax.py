"""Batch Layer Normalization for Flax NNX, and functions for whole models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

from ._install import install

try:  # before NumPy, which comes with it
    import jax
    import jax.numpy as jnp
    from flax import nnx
except ImportError as error:
    raise ImportError(f"bln.flax takes Flax NNX, which is not installed: {install('flax')}") from error

import numpy as np

from . import _arrays, formula
from ._array_models import calibrate, configure, reset_statistics, search
from ._positions import check_shapes, sizes
from ._spec import Spec, check_channel_dim, check_momentum, option, positive
from .config import StatisticsConfig

__all__ = ["BatchLayerNorm", "calibrate", "configure", "layers", "reset_statistics", "search"]


class BatchLayerNorm(_arrays.Layer, nnx.Module):
    """Batch Layer Normalization, as ``bln.BatchLayerNorm`` computes it; options are named and counted as in Flax.

    Put the layer after the nonlinearity. Statistics, counters and the configuration are ``nnx.BatchStat``, so that
    ``nnx.split(model, nnx.Param, nnx.BatchStat)`` and checkpoints hold all of it. ``model.train()``, ``model.eval()``
    and ``nnx.view`` act as on ``nnx.BatchNorm``. ``groups``, ``per_position``, ``eps``, ``mix_eps`` and ``dim_scale``
    are those of ``bln.BatchLayerNorm``; ``bias_init``, ``scale_init`` and ``rngs`` those of ``nnx.BatchNorm``.

    Args:
        num_features: The number of features (the paper's d).
        channel_dim: The dimension of features: last, as everywhere in Flax. (The torch layer has them at 1.)
        position_shape: The positions to keep statistics for, such as ``(28, 28)`` or ``80``. ``None`` learns them from
            the first call outside of ``jit``, ``grad`` and the like; a first training call inside is an error. Shorter
            sequences use the first positions.
        use_running_average: Infer instead of train, unless the call says otherwise.
        momentum: The weight of the *old* value in the population statistics: 0.9 here is 0.1 in torch. ``None``
            averages all mini-batches since the last ``reset_statistics``.
        use_bias: Learn a shift, ``bias``.
        use_scale: Learn a scale, ``scale``.
        config: The statistics of inference, for E_B, Std_B, E_F, Std_F: ``T`` population, ``F`` current. Assign it at
            any time outside of ``jit``: compiled functions follow, since it is data.
        axis_name: The axis of ``pmap``, ``shard_map`` or ``vmap`` whose shards are one training mini-batch. Counts and
            sums are added up, so that a shard weighs as much as it has real entries. Inference stays local.
        axis_index_groups: Groups of indices along that axis, each with statistics of its own.
        dtype: The type of the output; ``None`` infers it from input and parameters. Statistics are computed in float32
            at least.
        param_dtype: The type of the parameters. Statistics are float64 where this is, else float32.

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

    eps, mix_eps = option("eps"), option("mix_eps")
    position_shape = _arrays.Layer._positions
    _xp = jnp
    _numpy = staticmethod(lambda variable: np.array(variable[...]))
    _tensor = staticmethod(lambda variable, dtype: variable[...].astype(dtype))
    _assign = staticmethod(lambda variable, v: variable.set_value(jax.lax.stop_gradient(jnp.array(v, variable.dtype))))
    _affine = ("scale", "bias")

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
        self.num_features = positive("num_features must be", num_features)
        self.spec = Spec.of(groups, per_position, eps, mix_eps, dim_scale)
        self.spec.check_features(self.num_features)
        self.channel_dim = check_channel_dim("channel_dim", channel_dim, -1)
        check_momentum(momentum, "old")
        positions = sizes(position_shape, self.per_position)
        self.without_positions = not self.per_position
        self.use_running_average, self.momentum = use_running_average, momentum
        self.axis_name, self.axis_index_groups = axis_name, axis_index_groups
        self.dtype, self.param_dtype = dtype, param_dtype
        self._calibrating = None
        shape, statistics = (self.num_features,), jnp.promote_types(param_dtype, jnp.float32)
        self.scale = nnx.Param(scale_init(rngs.params(), shape, param_dtype)) if use_scale else nnx.data(None)
        self.bias = nnx.Param(bias_init(rngs.params(), shape, param_dtype)) if use_bias else nnx.data(None)
        self.priors = nnx.BatchStat(jnp.array(StatisticsConfig.parse(config).priors, jnp.float32))
        for name, size in formula.shapes(positions or (), *shape, self.groups).items():
            kind = jnp.int32 if name in formula.COUNTERS else statistics
            setattr(self, name, nnx.BatchStat(jnp.full(size, formula.INITIAL[name], kind)))

    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
        """Normalize ``x``; with ``mask`` true at real entries, hidden ones enter no statistic and come out 0."""
        infer = self.use_running_average if use_running_average is None else use_running_average
        if infer is None:
            raise ValueError(
                "use_running_average is not known. Ways out: (1) pass it to the constructor; (2) pass it to the call; "
                "(3) model.train() or model.eval()"
            )
        x, mask = jnp.asarray(x), None if mask is None else jnp.asarray(mask)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"expected a real floating point input, got {x.dtype}; convert it first")
        if mask is not None and mask.dtype != bool:
            raise TypeError(f"expected a boolean mask, true at real entries, got {mask.dtype}")
        mask_shape = None if mask is None else mask.shape
        channel_dim = check_shapes(
            "channel_dim", self.channel_dim, x.shape, self.num_features, mask_shape, allow_empty=infer
        )
        rows = jnp.moveaxis(x.astype(jnp.promote_types(x.dtype, self.batch_mean.dtype)), channel_dim, -1)
        self._learn(rows, infer)
        total = formula.alone
        if self.axis_name is not None and not infer:
            total = partial(jax.lax.psum, axis_name=self.axis_name, axis_index_groups=self.axis_index_groups)
        y = jnp.moveaxis(self._normalize(rows, mask, not infer, total), -1, channel_dim)
        affine = (p[...] for p in (self.scale, self.bias) if p is not None)
        return y.astype(self.dtype or jnp.result_type(x, *affine))

    def _learn(self, rows: Any, infer: bool) -> None:
        """Take the positions of the first call, where an array may still change its shape."""
        if self.position_shape is not None:
            return
        positions = rows.shape[1:-1]
        if not isinstance(rows, jax.core.Tracer):
            for name, shape in formula.shapes(positions, self.num_features, self.groups).items():
                variable = getattr(self, name)
                self._assign(variable, formula.expand(jnp, name, variable[...], shape))
            self.without_positions = not positions
        elif positions and (self._calibrating or not infer):
            raise ValueError(
                f"the layer does not know its positions yet, and cannot learn {positions} inside jit, grad or another "
                f"transformation. Ways out: (1) position_shape={positions}; (2) a call outside before, such as "
                "model.eval(); model(x); (3) per_position=False"
            )

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Change the mode, as ``nnx.view`` asks for."""
        if use_running_average is not None:
            self.use_running_average = use_running_average


# ---- whole models


def layers(model: Any) -> dict[str, BatchLayerNorm]:
    """Return the model's BLN layers by path, in the order of names, numbers as numbers.

    Flax does not keep the order in which attributes were assigned.
    """
    found = {".".join(map(str, path)): m for path, m in nnx.iter_modules(model) if isinstance(m, BatchLayerNorm)}
    # Text and numbers take turns in what split returns.
    names = sorted(found, key=lambda name: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", name)])
    return {name: found[name] for name in names}


# ---- what _array_models.py needs of a framework

_LAYER = "bln.flax.BatchLayerNorm"
_ACCURACY_THRESHOLD = 0.0  # of logits
_convert, _leaves = partial(jax.tree.map, jnp.asarray), jax.tree.leaves


def _modes(model: Any) -> list[tuple[Any, str]]:
    """Return what ``_runner`` changes: owners and names of attributes."""
    names = ("deterministic", "use_running_average")
    return [(module, name) for _, module in nnx.iter_modules(model) for name in names if hasattr(module, name)]


def _runner(model: Any, step: Callable[[Any, Any], Any] | None, calibrating: bool) -> Callable[[Any], Any]:
    """Return the function that runs the model in ``eval()`` on inputs, or ``step`` on a batch.

    The first batch of a calibration runs as it is: layers may learn their positions from it.
    """
    model.eval()
    plain = step or _call
    functions = chain([plain] if calibrating else [], repeat(step if step and calibrating else nnx.jit(plain)))
    return lambda batch: next(functions)(model, batch)


def _call(model: Any, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _metric(name: str, metric: Any) -> Callable[[Any, Any], float]:
    """Return the mean over a batch of the loss, or of the metric of this name."""
    if not callable(metric):
        raise ValueError(f"metric {name!r} is {metric!r}, expected a function metric(outputs, targets) or 'accuracy'")
    return lambda outputs, targets: float(jnp.mean(metric(outputs, targets)))
