"""Batch Layer Normalization for Flax NNX, and functions for whole models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from . import _arrays, formula
from ._array_models import calibrate, configure, reset_statistics, search
from ._install import install
from ._positions import check_shapes, sizes, window
from ._spec import Spec, check_layer, option, positive
from .config import StatisticsConfig

try:
    import jax
    import jax.numpy as jnp
    from flax import nnx
except ImportError as error:
    raise ImportError(f"bln.flax takes Flax NNX, which is not installed: {install('flax')}") from error

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
        self.channel_dim = check_layer("channel_dim", channel_dim, -1, momentum, "old")
        positions = sizes(position_shape, self.per_position)
        self.without_positions = not self.per_position
        self.use_running_average, self.momentum = use_running_average, momentum
        self.axis_name, self.axis_index_groups = axis_name, axis_index_groups
        self.dtype, self.param_dtype = dtype, param_dtype
        self._calibrating = self._reached = False
        shape = (self.num_features,)
        self.scale = nnx.Param(scale_init(rngs.params(), shape, param_dtype)) if use_scale else nnx.data(None)
        self.bias = nnx.Param(bias_init(rngs.params(), shape, param_dtype)) if use_bias else nnx.data(None)
        self.priors = nnx.BatchStat(_priors(config))
        kept = jnp.promote_types(param_dtype, jnp.float32)
        for name, size in formula.shapes(positions or (), *shape, self.groups).items():
            kind = jnp.int32 if name in formula.COUNTERS else kept
            setattr(self, name, nnx.BatchStat(jnp.full(size, formula.INITIAL[name], kind)))

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
        self.priors.set_value(_priors(value))

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
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"expected a real floating point input, got {x.dtype}; convert it first")
        if mask is not None and mask.dtype != bool:
            raise TypeError(f"expected a boolean mask, true at real entries, got {mask.dtype}")
        given = None if mask is None else mask.shape
        channel_dim = check_shapes("channel_dim", self.channel_dim, x.shape, self.num_features, given, empty=infer)
        dtype = self.dtype or jnp.result_type(x, *(p[...] for p in (self.scale, self.bias) if p is not None))
        if x.shape[0] == 0:
            return x.astype(dtype)
        rows = jnp.moveaxis(x.astype(jnp.promote_types(x.dtype, self.batch_mean.dtype)), channel_dim, -1)
        positions = rows.shape[1:-1] if self.per_position else ()
        self._learn(positions, x, infer)
        used = window(positions, self.position_shape)
        values = {name: None if v is None else v[...] for name, v in self._variables().items()}
        call = _arrays.Call(jnp, self.spec, values, used[0].stop if used else None)
        if infer:
            y = call.infer(rows, mask, self.priors[...])
        else:
            psum = partial(jax.lax.psum, axis_name=self.axis_name, axis_index_groups=self.axis_index_groups)
            across = [] if self.axis_name is None or self._calibrating else [psum]
            y, after = call.train(rows, mask, self.momentum, *across)
            for name, value in after.items():
                variable = getattr(self, name)
                variable[...] = jax.lax.stop_gradient(value.astype(variable.dtype))
        return jnp.moveaxis(y, -1, channel_dim).astype(dtype)

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
            for name, shape in formula.shapes(positions, self.num_features, self.groups).items():
                variable = getattr(self, name)
                variable.set_value(formula.expand(jnp, name, variable[...], shape))
            self.without_positions = not positions

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Change the mode, as ``nnx.view`` asks for."""
        if use_running_average is not None:
            self.use_running_average = use_running_average

    # ---- variables, as NumPy arrays

    _positions = position_shape

    def _numpy(self, variable: Any) -> Any:
        return np.asarray(variable[...])

    def _assign(self, variable: Any, value: Any) -> None:
        variable.set_value(jnp.array(value, variable.dtype))

    def _snapshot(self) -> dict[str, Any]:
        return super()._snapshot() | {"without_positions": self.without_positions}

    def _restore(self, snapshot: Mapping[str, Any]) -> None:
        super()._restore(snapshot)
        self.without_positions = snapshot.get("without_positions", self.without_positions)


def _priors(config: StatisticsConfig | str) -> Any:
    """Return a configuration as an array of four prior strengths."""
    return jnp.array(StatisticsConfig.parse(config).priors, jnp.float32)


# ---- whole models


def layers(model: Any) -> dict[str, BatchLayerNorm]:
    """Return the model's BLN layers by path, in the order of names, numbers as numbers.

    Flax does not keep the order in which attributes were assigned.
    """
    found = {".".join(map(str, path)): m for path, m in nnx.iter_modules(model) if isinstance(m, BatchLayerNorm)}
    return dict(sorted(found.items(), key=lambda item: [_natural(part) for part in item[0].split(".")]))


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts norm2 before norm10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


# ---- what _array_models.py takes of a framework

_LAYER = "bln.flax.BatchLayerNorm"


def _convert(batch: Any) -> Any:
    """Return a batch as JAX arrays, whatever tensors it has."""
    return jax.tree.map(lambda v: jnp.asarray(v.detach().cpu().numpy() if hasattr(v, "detach") else v), batch)


@contextmanager
def _evaluating(model: Any, calibrating: bool = False) -> Iterator[None]:
    """Call ``model.eval()``, and afterwards give each module the mode it had."""
    modes = [
        (module, name, getattr(module, name))
        for _, module in nnx.iter_modules(model)
        for name in ("deterministic", "use_running_average")
        if hasattr(module, name)
    ]
    try:
        model.eval()
        yield
    finally:
        for module, name, value in modes:
            setattr(module, name, value)


def _runner(model: Any, step: Callable[[Any, Any], Any] | None, calibrating: bool = False) -> Callable[[Any], Any]:
    """Return the function that runs the model on inputs, or ``step`` on a batch.

    The first batch of a calibration runs as it is: layers may learn their positions from it.
    """
    if step is not None:
        return partial(step if calibrating else nnx.jit(step), model)
    compiled, first = nnx.jit(_call), [_call] if calibrating else []
    return lambda inputs: (first.pop() if first else compiled)(model, inputs)


def _call(model: Any, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _function(name: str, given: Any) -> Any:
    """Return the loss, or the metric of this name."""
    if callable(given):
        return given
    if name != "loss" and given == "accuracy":
        return _accuracy
    raise ValueError(f"metric {name!r} is {given!r}, expected a function metric(outputs, targets) or 'accuracy'")


def _evaluate(function: Any, outputs: Any, targets: Any) -> float:
    """Return the mean of a loss or metric over a batch."""
    return float(jnp.mean(function(outputs, targets)))


def _accuracy(outputs: Any, targets: Any) -> Any:
    """Return the share of samples whose largest output is the target's; of a single output, whose sign is."""
    single = outputs.ndim == 1 or outputs.shape[-1] == 1
    predicted = (outputs > 0).reshape(targets.shape) if single else outputs.argmax(-1)
    if predicted.shape != targets.shape:
        raise ValueError(
            f"'accuracy' is for outputs (N, ..., classes) and class targets (N, ...), or outputs (N,) or (N, 1) and "
            f"targets of 0 and 1; got {outputs.shape} and {targets.shape}. Pass a function instead"
        )
    return predicted == targets
