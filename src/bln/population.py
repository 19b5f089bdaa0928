"""What the layer remembers of its training: five statistics, averaged over mini-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import formula
from .formula import Statistics

STATISTICS = Statistics._fields
_COUNTERS = ("updates", "samples")
Snapshot = tuple[tuple[int, ...] | None, dict[str, Tensor]]


class Population(nn.Module):
    """Population statistics, features last, and how many mini-batches and samples they stand for.

    Args:
        num_features: ``C``.
        position_shape: Positions with statistics of their own, ``()`` for none, ``None`` while they are unknown: then
            the statistics, broadcast over all positions, wait for the first mini-batch to say.

    The counters have two rows: all mini-batches, and those whose batch variance entered (which takes two entries).
    """

    batch_mean: Tensor
    batch_var: Tensor
    feature_mean: Tensor
    feature_var: Tensor
    inverse_m: Tensor
    updates: Tensor
    samples: Tensor

    def __init__(
        self,
        num_features: int,
        position_shape: tuple[int, ...] | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.position_shape = position_shape
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        for name, shape in self._shapes(position_shape or ()).items():
            kind = torch.int64 if name in _COUNTERS else dtype
            self.register_buffer(name, torch.empty(shape, dtype=kind, device=device))
        self.reset()

    def _shapes(self, positions: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        batch = (*positions, self.num_features)
        shapes = (batch, batch, positions, positions, positions, (2, *positions), (2, *positions))
        return dict(zip(STATISTICS + _COUNTERS, shapes, strict=True))

    @torch.no_grad()
    def reset(self) -> None:
        """Forget: mean 0, variance 1, no mini-batch seen. Known positions stay known."""
        for name, buffer in self.named_buffers():
            buffer.fill_(1 if name.endswith("_var") else 0)

    def snapshot(self) -> Snapshot:
        """Everything remembered, for ``restore``."""
        return self.position_shape, {name: buffer.clone() for name, buffer in self.named_buffers()}

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Put back what ``snapshot`` found, the positions too."""
        self.position_shape, values = snapshot
        for name, value in values.items():
            buffer = getattr(self, name)
            if buffer.shape == value.shape:
                buffer.copy_(value)
            else:
                buffer.data = value

    @torch.no_grad()
    def restore_inverse_m(self, snapshot: Snapshot) -> None:
        """Take ``1/m`` from the snapshot, wherever that had seen a mini-batch."""
        _, values = snapshot
        shape = tuple(self.inverse_m.shape)
        seen = _spread(values["updates"][0], "inverse_m", shape) > 0
        self.inverse_m.copy_(torch.where(seen, _spread(values["inverse_m"], "inverse_m", shape), self.inverse_m))

    # ---- reading

    def statistics(self, positions: tuple[int, ...], m: int | Tensor) -> Statistics:
        """The statistics at the input's positions; where nothing was seen yet, ``m`` is that of the input."""
        window = self._window(positions)
        values = Statistics(*(getattr(self, name)[window] for name in STATISTICS))
        current = 1 / (m.clamp(min=1).to(values.inverse_m.dtype) if isinstance(m, Tensor) else m)
        return values._replace(inverse_m=torch.where(self.updates[0][window] > 0, values.inverse_m, current))

    def _window(self, positions: tuple[int, ...]) -> tuple[slice, ...]:
        """Which of the known positions an input uses: all, or the first ones for a shorter sequence."""
        known = self.position_shape
        if known is None or positions == known:
            return ()
        if len(positions) == len(known) == 1 and positions[0] <= known[0]:
            return (slice(positions[0]),)
        raise ValueError(
            f"the input has positions {positions}, but statistics are kept for positions {known}. Ways out: "
            "(1) position_shape= the longest sequence there will be, shorter ones then use the first positions; "
            "(2) per_position=False, which pools batch statistics over positions and takes any; "
            "(3) pad or crop inputs to one shape"
        )

    # ---- learning

    @torch.no_grad()
    def update(
        self,
        batch: Statistics,
        m: int | Tensor,
        entries: int | Tensor,
        mask: Tensor | None,
        positions: tuple[int, ...],
        momentum: float | None,
    ) -> None:
        """Let a training mini-batch in, unless its statistics are not finite.

        Args:
            batch: The mini-batch's own statistics.
            m, entries: Its samples, and the entries behind each batch statistic; under a mask, at each position.
            mask: True at real entries.
            positions: The input's positions, ``()`` where statistics are pooled over them.
            momentum: The weight of the new value; never less than ``1/updates``, so that initial values do not mix
                in. ``None`` averages all mini-batches since the last reset, weighted by their samples.
        """
        if self.position_shape is None:
            self._learn_positions(positions)
        window = self._window(positions)
        new = self._estimates(batch, m, entries, mask, positions)
        # One NaN or infinity, in the input or from an overflow, is in its variances, and makes their total one.
        finite = (new.batch_var.sum() + new.feature_var.sum()).isfinite()
        if isinstance(m, Tensor):
            seen = finite & torch.stack([m > 0, entries > 1])  # type: ignore[list-item]
        else:
            seen = torch.stack([finite, finite if entries > 1 else torch.zeros_like(finite)])

        updates, samples = (counter[(slice(None), *window)] for counter in (self.updates, self.samples))
        seen = seen.reshape(*seen.shape, *[1] * (updates.dim() - seen.dim()))
        updates += seen
        samples += seen * m
        dtype = self.inverse_m.dtype
        if momentum is None:
            weight = m / samples.clamp(min=1).to(dtype)
        else:
            weight = (1 / updates.clamp(min=1).to(dtype)).clamp(min=momentum)

        mean, var = zip(seen[..., None], weight[..., None], strict=True)  # the two rows, of the batch statistics
        others = seen[0], weight[0]
        for name, (enters, by) in zip(STATISTICS, (mean, var, others, others, others), strict=True):
            old, value = getattr(self, name)[window], getattr(new, name).to(dtype)
            old.lerp_(torch.where(enters, value, old), by)

    def _estimates(
        self, batch: Statistics, m: int | Tensor, entries: int | Tensor, mask: Tensor | None, positions: tuple[int, ...]
    ) -> Statistics:
        """What one mini-batch says of the population: variances unbiased, feature statistics averaged over samples."""
        if mask is None:

            def average(value: Tensor) -> Tensor:
                return value.mean(0) if self.position_shape else value.mean()
        else:
            m, entries = (torch.as_tensor(c).clamp(min=1).to(batch.inverse_m.dtype) for c in (m, entries))

            def average(value: Tensor) -> Tensor:
                real = torch.where(mask, value, 0)
                return (real.sum(0) if self.position_shape else real.sum()) / entries

        factor = formula.bessel(entries)
        return Statistics(
            batch.batch_mean,
            batch.batch_var * (factor[..., None] if isinstance(factor, Tensor) else factor),  # eqs 5, 19
            average(batch.feature_mean),
            average(batch.feature_var) * formula.bessel(m),  # eq 21
            batch.inverse_m,
        )

    def _learn_positions(self, positions: tuple[int, ...]) -> None:
        for name, shape in self._shapes(positions).items():
            buffer = getattr(self, name)
            if torch.compiler.is_compiling():
                setattr(self, name, _spread(buffer, name, shape))
            else:
                buffer.data = _spread(buffer, name, shape)  # DistributedDataParallel holds on to the tensor itself
        self.position_shape = positions

    # ---- moving and loading

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Population:
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrowed = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if narrowed else moved

        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load, agreeing on positions first where only one side knows them."""
        saved = state_dict.get(prefix + "batch_mean")
        fits = isinstance(saved, Tensor) and tuple(saved.shape[-1:]) == (self.num_features,)
        positions = tuple(saved.shape[:-1]) if isinstance(saved, Tensor) and fits else ()
        if positions and self.position_shape is None:
            self._learn_positions(positions)
        elif fits and not positions and self.position_shape:
            for name, shape in self._shapes(self.position_shape).items():
                if isinstance(value := state_dict.get(prefix + name), Tensor):
                    state_dict[prefix + name] = _spread(value, name, shape)
        elif positions and positions != self.position_shape:
            error_msgs.append(
                f"{prefix}: saved with statistics for positions {positions}, but this layer keeps them for "
                f"{self.position_shape or 'none (per_position=False)'}; build it as it was when saved"
            )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _spread(value: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """A statistic or counter without positions, given to each position of ``shape``."""
    if not name.startswith("batch"):
        value = value.reshape((*value.shape, *[1] * (len(shape) - value.dim())))
    return value.expand(shape).clone()
