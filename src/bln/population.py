"""``Population``: the five statistics that a layer averages over its training mini-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from . import _positions, formula
from ._masks import counts_of, has_real_entry, is_host_readable
from ._spec import Spec
from .formula import COUNTERS, INITIAL, Averages, MiniBatch, Statistics

STATISTICS = Statistics._fields
Snapshot = tuple[bool, dict[str, Tensor]]


class Population(nn.Module):
    """Population statistics, features last, and the number of mini-batches and samples that each averages.

    ``position_shape`` is ``()`` without positions, and ``None`` until the first mini-batch shows them; until then the
    statistics broadcast over positions. ``dtype`` is that of the layer's parameters; statistics
    are float64 where this is, else float32. The counters have a row for each statistic, in the order of ``Statistics``.
    """

    batch_mean: Tensor
    batch_var: Tensor
    feature_mean: Tensor
    feature_var: Tensor
    inverse_m: Tensor
    updates: Tensor
    samples: Tensor
    agreed_on_positions = False
    """Whether the ranks of a synchronized layer have checked that their positions are the same."""

    def __init__(
        self,
        num_features: int,
        position_shape: tuple[int, ...] | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        groups: int | None = None,
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.groups = groups
        self.without_positions = position_shape == ()
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        for name, shape in self._shapes(position_shape or ()).items():
            kind = torch.int64 if name in COUNTERS else dtype
            self.register_buffer(name, torch.empty(shape, dtype=kind, device=device))
        self.reset()

    def _shapes(self, positions: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return formula.shapes(positions, self.num_features, self.groups)

    @property
    def position_shape(self) -> tuple[int, ...] | None:
        """The positions that have statistics; ``None`` while they are unknown."""
        positions = tuple(self.batch_mean.shape[:-1])
        return positions if positions or self.without_positions else None

    @torch.no_grad()
    def reset(self) -> None:
        """Forget: mean 0, variance 1, no mini-batch seen. Known positions stay known."""
        for name, buffer in self.named_buffers():
            buffer.fill_(INITIAL[name])

    @torch.no_grad()
    def mark_seen(self, names: list[str], updates: int | Tensor, m: int = 1) -> None:
        """Count imported statistics as the average of ``updates`` mini-batches of ``m`` samples."""
        for name in names:
            self.updates[STATISTICS.index(name)] = updates
            self.samples[STATISTICS.index(name)] = updates * m

    # ---- reading

    def statistics(self, positions: tuple[int, ...], m: int | Tensor) -> Statistics:
        """Return the statistics at these positions; where none was averaged yet, ``1/m`` is that of ``m``."""
        at = window(positions, self.position_shape)
        values = Statistics(*self._values(at))
        seen = self.updates[STATISTICS.index("inverse_m")] > 0
        if len(at) > 0:  # not "if at", of which a compiler makes a graph for each length
            seen = seen[at]
        current = 1 / (m.clamp(min=1).to(values.inverse_m.dtype) if isinstance(m, Tensor) else m)
        return values._replace(inverse_m=torch.where(seen, values.inverse_m, current))

    def _values(self, at: tuple[slice, ...]) -> list[Tensor]:
        """Return the statistics at these positions; the feature statistics of groups have none."""
        values = [getattr(self, name) for name in STATISTICS]
        if len(at) > 0:
            for row, name in enumerate(STATISTICS):  # in a comprehension, too, there would be a graph for each length
                if self.groups is None or not name.startswith("feature"):
                    values[row] = values[row][at]
        return values

    def at_positions_of(self, x: Tensor, mask: Tensor | None, channel_dim: int, spec: Spec) -> Statistics:
        """Return the statistics at the positions of an input; where none was averaged yet, ``1/m`` is the input's."""
        m, _, positions = counts_of(x, mask, channel_dim, spec)
        return self.statistics(positions, m)

    def positions_for(self, positions: tuple[int, ...]) -> tuple[int, ...]:
        """Return all positions that have statistics: those of the input while none are known. Refuse others."""
        known = self.position_shape
        window(positions, known)
        return positions if known is None else known

    # ---- learning

    def update_from(
        self, x: Tensor, mask: Tensor | None, channel_dim: int, spec: Spec, batch: Statistics, momentum: float | None
    ) -> None:
        """Average with the statistics of an input, which are those of a mini-batch by itself."""
        m, entries, positions = counts_of(x, mask, channel_dim, spec)
        present = m
        if mask is not None and spec.groups is not None and spec.per_position:
            present = has_real_entry(mask).sum()
        dtype = batch.inverse_m.dtype
        counts = (c.to(dtype) if isinstance(c, Tensor) else c for c in (m, entries, present))
        self.update(formula.estimates(torch, MiniBatch(batch, *counts), spec), positions, momentum)

    @torch.no_grad()
    def update(self, new: MiniBatch, positions: tuple[int, ...], momentum: float | None) -> None:
        """Average with the ``formula.estimates`` of a training mini-batch, unless they are not finite.

        ``positions`` are those of the input, ``()`` where statistics are pooled over them.
        """
        at = self.expect(positions)
        updates, samples, like = self.updates, self.samples, self.inverse_m
        old, values = self._values(at), new.statistics
        if values.batch_mean.dtype != like.dtype:
            values = Statistics(*(value.to(like.dtype) for value in values))
        if len(at) > 0:
            updates, samples = updates[:, *at], samples[:, *at]
        _, m, entries, present = new
        if is_host_readable(values.batch_var) and isinstance(m, int) and present == m > 0 and entries > 1:
            # As a rule all counts are equal, and one number is the weight of all: a third less time for small inputs.
            variances = values.batch_var, values.feature_var
            if not all(value.max().item() < math.inf for value in variances):  # nor NaN
                return
            least, most = (count.item() for count in (samples if momentum is None else updates).aminmax())
            if least == most:
                weight: Any = m / (least + m) if momentum is None else max(1 / (least + 1), momentum)
                torch._foreach_lerp_(old, values, weight)
                updates += 1
                samples += m
                return
        counts = (c if isinstance(c, Tensor) else like.new_full((), c) for c in (m, entries, present))
        before, new = Averages(Statistics(*old), updates, samples), MiniBatch(values, *counts)
        after = formula.update(torch, before, new, momentum, self.groups)
        for buffer, value in zip((*old, updates, samples), after.by_name().values(), strict=True):
            # Through an alias: compiled, torch 2.13 forgets to write to a float64 input without dimensions.
            buffer.detach().copy_(value)

    def expect(self, positions: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the slices of the known positions that these are; learn them while none are known, refuse others."""
        if self.position_shape is None:
            self.learn_positions(positions)
        return window(positions, self.position_shape)

    def learn_positions(self, positions: tuple[int, ...]) -> None:
        """Keep statistics for these positions from now on; each starts from the values there are."""
        if not positions:
            self.without_positions = True
            return
        # Not is_exporting(), which torch 2.11 takes to be true in whatever it compiles.
        exporting = getattr(torch.compiler, "_is_exporting_flag", False)
        if exporting or torch._C._are_functorch_transforms_active():
            raise ValueError(
                f"the layer does not know its positions yet, and cannot learn {positions} inside torch.func or "
                f"torch.export. Ways out: (1) position_shape={positions}; (2) a training batch before; "
                "(3) per_position=False"
            )
        compiling = torch.compiler.is_compiling()
        with nullcontext() if compiling else torch.inference_mode(False):
            for name, shape in self._shapes(positions).items():
                buffer = getattr(self, name)
                if compiling:
                    setattr(self, name, expand(buffer, name, shape))
                else:
                    buffer.data = expand(buffer, name, shape)  # DistributedDataParallel holds on to the tensor

    # ---- snapshots

    def snapshot(self) -> Snapshot:
        """Return a copy of everything remembered, for ``restore``."""
        with torch.inference_mode(False):
            return self.without_positions, {name: buffer.clone() for name, buffer in self.named_buffers()}

    def fits(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot's shapes are those of this layer, or become so where its positions are unknown."""
        _, values = snapshot
        known = self.position_shape
        shapes = self._shapes(tuple(values["batch_mean"].shape[:-1]) if known is None else known)
        return all(tuple(values[name].shape) == shape for name, shape in shapes.items())

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot, its positions included."""
        self.without_positions, values = snapshot
        for name, value in values.items():
            buffer = getattr(self, name)
            if buffer.shape == value.shape:
                buffer.copy_(value)
            else:
                buffer.data = value.clone()

    @torch.no_grad()
    def complete(self, snapshot: Snapshot) -> None:
        """Take from the snapshot the statistics that have no mini-batch since, and each ``1/m`` that was known."""
        shapes = self._shapes(self.position_shape or ())
        old = {name: expand(snapshot[1][name], name, shape) for name, shape in shapes.items()}
        after, before = Averages.of(dict(self.named_buffers())), Averages.of(old)
        for name, value in formula.complete(torch, after, before, self.groups).by_name().items():
            getattr(self, name).copy_(value)

    # ---- moving and loading

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Population:
        super()._apply(keep_precision(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    def refusal(self, state_dict: dict[str, Any], prefix: str) -> str:
        """Return why the statistics of a state dict do not fit this layer; empty if they do."""
        saved = self._saved(state_dict, prefix)
        if "batch_mean" not in saved:
            return ""
        positions, known = tuple(saved["batch_mean"].shape[:-1]), self.position_shape
        expected = self._shapes(positions)
        wrong = {name: tuple(t.shape) for name, t in saved.items() if tuple(t.shape) != expected[name]}
        sizes = wrong.get("feature_mean", ())
        if wrong.keys() == {"feature_mean", "feature_var"} and len(sizes) < 2:
            groups = None if sizes == positions else sizes[0] if sizes else None
            return f"saved with groups={groups}, but this layer has groups={self.groups}; build it as it was when saved"
        if wrong:
            shapes = ", ".join(f"{name} {shape}" for name, shape in wrong.items())
            return f"{shapes} in the state dict do not fit a layer of {self.num_features} features"
        if positions and known is not None and positions != known:
            return (
                f"saved with statistics for positions {positions}, but this layer keeps them for "
                f"{known or 'none (per_position=False)'}; build it as it was when saved"
            )
        return ""

    def _saved(self, state_dict: dict[str, Any], prefix: str) -> dict[str, Tensor]:
        """Return the statistics and counters of a state dict, by name."""
        saved = {name: state_dict.get(prefix + name) for name in INITIAL}
        return {name: value for name, value in saved.items() if isinstance(value, Tensor)}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load all or nothing; where only one side knows its positions, the other takes them over first."""
        if reason := self.refusal(state_dict, prefix):
            args[-1].append(f"size mismatch for {prefix}: {reason}")
            return
        saved = self._saved(state_dict, prefix)
        if "batch_mean" in saved:
            positions, known = tuple(saved["batch_mean"].shape[:-1]), self.position_shape
            if positions and known is None:
                self.learn_positions(positions)
            elif known and not positions:
                shapes = self._shapes(known)
                state_dict.update({prefix + name: expand(t, name, shapes[name]) for name, t in saved.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name in INITIAL:  # assign=True takes the tensors of the dict as they are
            value = getattr(self, name)
            setattr(self, name, (value.float() if _narrow(value) else value).contiguous())


def window(positions: tuple[int, ...], known: tuple[int, ...] | None) -> tuple[slice, ...]:
    """Return the slices of the known positions that an input uses, as ``_positions.window`` does for torch."""
    return _positions.window(positions, known, torch.compiler.is_compiling())


def keep_precision(move: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap ``move``: a tensor that it would narrow below float32 changes its device alone, and layouts stay.

    A memory format is meant for convolutions, and that of four dimensions would be an error in five.
    """

    def move_precisely(tensor: Tensor) -> Tensor:
        flat = tensor.flatten()  # torch gives formats to tensors of four and five dimensions
        moved = move(flat)
        if moved is flat:
            return tensor
        return tensor.to(moved.device) if _narrow(moved) else moved.view(tensor.shape)

    return move_precisely


def _narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4


def expand(value: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Repeat a statistic or counter for each position of ``shape``; return a copy, also where it has that shape."""
    expanded: Tensor = formula.expand(torch, name, value, shape)
    return expanded.clone()
