"""``Spec``: the options of the equations, checked and with defaults, as one tuple for all backends."""

from __future__ import annotations

import math
from operator import index
from typing import Any, NamedTuple, SupportsIndex


class Spec(NamedTuple):
    """The options of the equations, checked and with their defaults filled in.

    >>> Spec.of(groups=8)
    Spec(groups=8, per_position=False, eps=0.0001, mix_eps=0.0, dim_scale=False)
    """

    groups: int | None = None
    """Feature statistics over this many groups of features and all positions; ``None`` over features, as published."""
    per_position: bool = True
    """Batch statistics for each position instead of pooled over positions."""
    eps: float = 1e-4
    mix_eps: float = 1e-4
    dim_scale: bool = True

    @classmethod
    def of(
        cls,
        groups: int | None = None,
        per_position: bool | None = None,
        eps: float = 1e-4,
        mix_eps: float | None = None,
        dim_scale: bool | None = None,
    ) -> Spec:
        """Check the options and fill in defaults: the paper's, or with ``groups`` those of the grouped form."""
        published = groups is None
        if not published:
            groups = positive("groups must be None (as published) or", groups)
        if not (isinstance(eps, int | float) and 0 < eps < math.inf):
            raise ValueError(f"eps must be a positive number, got {eps!r}: it keeps a constant feature from 0/0")
        mixing = mix_eps if mix_eps is not None else eps if published else 0.0
        if not (isinstance(mixing, int | float) and 0 <= mixing < 1):
            raise ValueError(
                f"mix_eps must be None (which is eps, with groups 0) or in [0, 1), got {mix_eps!r} with eps={eps!r}"
            )
        by_position, scaled = (published if value is None else value for value in (per_position, dim_scale))
        return cls(groups, by_position, eps, mixing, scaled)

    @property
    def coefficients(self) -> bool:
        """Whether the layer reduces to an affine map for each sample and feature."""
        return self.groups is not None and not self.per_position

    def check_features(self, num_features: int) -> None:
        """Check that the groups divide the features."""
        if self.groups is not None and num_features % self.groups:
            divisors = [g for g in range(1, num_features + 1) if num_features % g == 0]
            nearest = sorted(divisors, key=lambda g: abs(g - self.groups))[:3]  # type: ignore[operator]
            raise ValueError(
                f"groups={self.groups} does not divide {num_features} features; try "
                + " or ".join(f"groups={g}" for g in sorted(nearest))
            )


def option(name: str) -> Any:
    """Return a property of a layer that reads one option of its ``spec``."""
    return property(lambda layer: getattr(layer.spec, name))


def positive(what: str, value: Any) -> int:
    """Return an integer of at least 1; refuse any other value in an error that ``what`` begins."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or index(value) < 1:
        raise ValueError(f"{what} an integer of at least 1, got {value!r}")
    return index(value)


def check_channel_dim(name: str, channel_dim: Any, usual: int) -> int:
    """Return the dimension of features, the layer's argument ``name``; refuse 0 and what is no integer."""
    if not isinstance(channel_dim, SupportsIndex) or index(channel_dim) == 0:
        raise ValueError(f"{name} must be {usual} or another integer, got {channel_dim!r}; 0 is that of samples")
    return index(channel_dim)


def check_momentum(momentum: Any, weighs: str) -> None:
    """Refuse a momentum outside [0, 1]; ``weighs`` says which value it is the weight of, the new or the old."""
    if momentum is not None and not (isinstance(momentum, int | float) and 0 <= momentum <= 1):
        raise ValueError(
            f"momentum must be None (plain average) or in [0, 1], got {momentum!r}; it is the weight of the {weighs} "
            "value"
        )
