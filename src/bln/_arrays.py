"""The base of the Keras and Flax layers, and a call of such a layer as a pure function of its arrays.

``xp`` is ``keras.ops`` or ``jax.numpy``. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import formula
from ._spec import Spec, option
from .formula import COUNTERS, INITIAL, Averages, Priors, Statistics, Total

_MOST_SAMPLES = 2**31 - 1
"""Samples are counted up to this: JAX has int32 unless told otherwise. The average then forgets very slowly."""
_INVERSE_M = Statistics._fields.index("inverse_m")


class Layer:
    """The base of both layers: reads and writes what they hold, as NumPy arrays.

    Besides the methods below, a layer has ``config``, ``momentum`` (the weight of the old value), a variable for each
    name in ``INITIAL``, and ``_positions``, which is ``None`` while they are unknown. Where ``_calibrating`` is true it
    runs as in training, and a call that nothing has compiled sets ``_reached``.
    """

    spec: Spec
    groups, per_position, dim_scale = option("groups"), option("per_position"), option("dim_scale")
    _affine: tuple[str, str]
    """The attributes that hold gamma and beta."""

    def _numpy(self, variable: Any) -> Any:
        """Return a variable's value as a NumPy array."""
        raise NotImplementedError

    def _assign(self, variable: Any, value: Any) -> None:
        """Write a NumPy array to a variable."""
        raise NotImplementedError

    def _remembered(self) -> dict[str, Any]:
        """Return the statistics and counters by name."""
        return {name: getattr(self, name) for name in INITIAL}

    def _variables(self) -> dict[str, Any]:
        """Return all that the layer holds but the configuration, by the names that ``transfer`` uses."""
        scale, shift = (getattr(self, name) for name in self._affine)
        return {"scale": scale, "shift": shift, **self._remembered()}

    def reset_statistics(self) -> None:
        """Forget the population: mean 0, variance 1. Known positions stay known."""
        import numpy as np  # not above: bln.transfer imports this module, and torch comes without NumPy

        for name, variable in self._remembered().items():
            self._assign(variable, np.full(variable.shape, INITIAL[name]))

    def _snapshot(self) -> dict[str, Any]:
        return {name: self._numpy(variable).copy() for name, variable in self._remembered().items()}

    def _restore(self, snapshot: Mapping[str, Any]) -> None:
        for name, variable in self._variables().items():
            if variable is not None and name in snapshot:
                self._assign(variable, snapshot[name])


class Call(NamedTuple):
    """A call of a layer, on features-last ``x``."""

    xp: Any
    spec: Spec
    arrays: Mapping[str, Any]
    """The values of ``_variables``, floats in the type to compute in."""
    length: Any = None
    """How many of the known positions a shorter sequence uses; ``None`` for all."""

    def train(self, x: Any, mask: Any, momentum: float | None, total: Total = formula.alone) -> tuple[Any, Any]:
        """Normalize ``x`` by its own statistics; return it and what the layer then remembers, by name.

        ``momentum`` is the weight of the old value. ``total`` adds up what several devices have.
        """
        x = formula.hide(self.xp, x, mask)
        batch = formula.current(self.xp, x, mask, self.spec, total)
        new = formula.estimates(self.xp, batch, self.spec, total)
        after = formula.update(self.xp, self._known(), new, new_weight(momentum), self.spec.groups, _MOST_SAMPLES)
        return self._normalize(x, mask, batch.statistics), self._whole(after)

    def infer(self, x: Any, mask: Any, priors: Any) -> Any:
        """Normalize ``x`` by the statistics that ``priors``, an array of four, choose (Algorithm 2).

        Priors are data, so that one compiled function serves all configurations.
        """
        xp = self.xp
        x = formula.hide(xp, x, mask)
        own = formula.current(xp, x, mask, self.spec).statistics
        known = self._known()
        # Where nothing was seen yet, m is the mini-batch's.
        inverse_m = xp.where(known.updates[_INVERSE_M] > 0, known.statistics.inverse_m, own.inverse_m)
        priors = xp.array(priors, own.inverse_m.dtype)
        config = Priors(*(priors[at] for at in range(4)))
        s = formula.choose(config, own, known.statistics._replace(inverse_m=inverse_m), xp.where)
        return self._normalize(x, mask, s)

    def _normalize(self, x: Any, mask: Any, s: Statistics) -> Any:
        return formula.normalize(self.xp, x, s, self.arrays["scale"], self.arrays["shift"], mask, self.spec)

    def _index(self, name: str, part: slice) -> Any:
        """Return what selects a part of the positions of a statistic or counter, of all where it has none."""
        if self.length is None or (self.spec.groups and name.startswith("feature")):
            return ...
        return (slice(None), part) if name in COUNTERS else (part,)

    def _known(self) -> Averages:
        """Return what is remembered, at the positions of the input."""
        if self.length is None:
            return Averages.of(self.arrays)
        return Averages.of({name: self.arrays[name][self._index(name, slice(self.length))] for name in INITIAL})

    def _whole(self, after: Averages) -> dict[str, Any]:
        """Return ``after`` by name, with the old values at positions beyond the input's."""
        values = after.by_name()
        for name, value in values.items():
            old, beyond = self.arrays[name], self._index(name, slice(self.length, None))
            if beyond is not ...:
                joined = self.xp.concatenate([value, old[beyond]], axis=len(beyond) - 1)
                values[name] = self.xp.reshape(joined, old.shape)
        return values


def new_weight(momentum: float | None) -> float | None:
    """Return the weight of the new value, as torch has it, from that of the old one."""
    return None if momentum is None else 1 - momentum
