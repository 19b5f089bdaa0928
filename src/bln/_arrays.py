"""The base of the Keras and Flax layers: a call in the operators of either library, and their state as NumPy arrays.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import formula
from ._positions import window
from ._spec import Spec, option
from .config import StatisticsConfig
from .formula import COUNTERS, INITIAL, Averages, Priors, Statistics, Total

Snapshot = tuple[bool, dict[str, Any]]
"""``without_positions``, and NumPy arrays by name."""

_MOST_SAMPLES = 2**31 - 1
"""Samples are counted up to this, since JAX has int32 by default. Beyond it the average forgets very slowly."""
_INVERSE_M = Statistics._fields.index("inverse_m")


class Layer:
    """The base of both layers. Besides what is named here, they have a variable for each name in ``INITIAL``."""

    spec: Spec
    groups, per_position, dim_scale = option("groups"), option("per_position"), option("dim_scale")
    momentum: float | None  # the weight of the old value
    priors: Any  # the variable of the configuration; its four numbers while the layer is not built
    built = True
    without_positions = True  # whether a layer whose statistics show no positions is known to have none
    _affine: tuple[str, str]  # the attributes that hold gamma and beta
    _calibrating: Callable[[], object] | None = None  # called by a call, which then runs as in training
    _xp: Any  # keras.ops or jax.numpy
    _numpy: Callable[[Any], Any]  # returns a copy of a variable as a NumPy array
    _tensor: Callable[[Any, Any], Any]  # returns the value of a variable in a type
    _assign: Callable[[Any, Any], None]  # writes an array, of NumPy too, to a variable; no gradient goes through

    @property
    def config(self) -> StatisticsConfig:
        """The statistics of inference; assign a ``StatisticsConfig`` or four letters."""
        return StatisticsConfig.of(self._numpy(self.priors))

    @config.setter
    def config(self, value: StatisticsConfig | str) -> None:
        priors = StatisticsConfig.parse(value).priors
        if self.built:
            self._assign(self.priors, priors)
        else:
            self.priors = priors

    @property
    def _positions(self) -> tuple[int, ...] | None:
        """The positions statistics are kept for, which their own shape says; ``None`` while they are unknown."""
        positions = tuple(self.batch_mean.shape[:-1])  # type: ignore[attr-defined]
        return positions if positions or self.without_positions else None

    # ---- a call

    def _normalize(self, x: Any, mask: Any, training: bool | None, total: Total = formula.alone) -> Any:
        """Normalize ``x``, with features last and in the type of the computation; in training, update the population.

        ``total`` adds up over devices.
        """
        if self._calibrating is not None:
            self._calibrating()
            training, total = True, formula.alone
        xp, spec, used = self._xp, self.spec, self._used(x)
        arrays = {
            name: self._tensor(variable, variable.dtype if name in COUNTERS else x.dtype)
            for name, variable in self._variables().items()
        }
        known = Averages.of({name: arrays[name][self._index(name, used)] for name in INITIAL})
        x = formula.hide(xp, x, mask)
        batch = formula.current(xp, x, mask, spec, total)
        s = batch.statistics
        if training:
            new = formula.estimates(xp, batch, spec, total)
            momentum = None if self.momentum is None else 1 - self.momentum
            after = formula.update(xp, known, new, momentum, spec.groups, _MOST_SAMPLES)
            for name, value in after.by_name().items():
                beyond = self._index(name, used and slice(used.stop, None))
                if beyond is not ...:  # positions that the input does not have stay as they were
                    value = xp.concatenate([value, arrays[name][beyond]], axis=int(name in COUNTERS))
                self._assign(getattr(self, name), xp.reshape(value, arrays[name].shape))
        else:
            # Where nothing was seen yet, m is the mini-batch's.
            inverse_m = xp.where(known.updates[_INVERSE_M] > 0, known.statistics.inverse_m, s.inverse_m)
            # Priors are data, so that one compiled function serves all configurations.
            priors = self._tensor(self.priors, x.dtype)
            config = Priors(*(priors[at] for at in range(4)))
            s = formula.choose(config, s, known.statistics._replace(inverse_m=inverse_m), xp.where)
        return formula.normalize(xp, x, s, arrays.get("scale"), arrays.get("shift"), mask, spec)

    def _used(self, x: Any) -> slice | None:
        """Return which of the known positions a shorter sequence uses; ``None`` for all."""
        positions = tuple(x.shape[1:-1]) if self.per_position else ()
        if positions == (None,):  # a TensorFlow graph for any length
            return slice(self._xp.shape(x)[1])
        return next(iter(window(positions, self._positions)), None)

    def _index(self, name: str, positions: slice | None) -> Any:
        """Return the index of these positions in a statistic or counter; all of it, if it has no positions."""
        if positions is None or (self.groups and name.startswith("feature")):
            return ...
        return (slice(None), positions) if name in COUNTERS else positions

    # ---- state

    def _variables(self) -> dict[str, Any]:
        """Return all variables but the configuration, by the names that ``transfer`` uses."""
        named = zip(("scale", "shift", *INITIAL), (*self._affine, *INITIAL), strict=True)
        held = ((name, getattr(self, attribute)) for name, attribute in named)
        return {name: variable for name, variable in held if variable is not None}

    def reset_statistics(self) -> None:
        """Forget the population: mean 0, variance 1. Known positions stay known."""
        # TensorFlow builds a model in its first step, after the callbacks of the epoch's begin.
        for name, value in INITIAL.items() if self.built else ():
            variable = getattr(self, name)
            self._assign(variable, np.full(variable.shape, value))

    def _snapshot(self) -> Snapshot:
        """Return the population as NumPy arrays."""
        return self.without_positions, {name: self._numpy(getattr(self, name)) for name in INITIAL}

    def _restore(self, snapshot: Snapshot) -> None:
        """Write values by name to the variables."""
        self.without_positions, values = snapshot
        variables = self._variables()
        for name, value in values.items():
            self._assign(variables[name], value)
