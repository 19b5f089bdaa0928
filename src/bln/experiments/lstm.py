"""An LSTM with recurrent dropout, which torch's own lacks: one mask for all time steps, as Keras has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class LSTM(nn.Module):
    """An LSTM over ``(N, T, inputs)``; returns ``(N, T, units)``, or ``(N, units)`` with ``last``.

    In training, dropout hides features of the input and of the hidden state; a mask is drawn for each sample and holds
    for the whole sequence. Weights are Glorot uniform over the four gates together, the forget gate's bias is 1.
    """

    def __init__(self, inputs: int, units: int, *, dropout: float = 0.0, last: bool = False) -> None:
        super().__init__()
        self.dropout, self.last, self.units = dropout, last, units
        self.kernel = nn.Parameter(torch.empty(inputs, 4 * units))
        self.recurrent = nn.Parameter(torch.empty(units, 4 * units))
        self.bias = nn.Parameter(torch.zeros(4 * units))
        nn.init.xavier_uniform_(self.kernel)
        nn.init.xavier_uniform_(self.recurrent)
        with torch.no_grad():
            self.bias[2 * units : 3 * units] = 1  # gates stand as output, input, forget, candidate

    def forward(self, x: Tensor) -> Tensor:
        """Run over the sequence."""
        n = x.shape[0]
        hidden_mask = x.new_ones(n, self.units)
        if self.training and self.dropout:
            x = x * _dropout_mask(x, (n, 1, x.shape[2]), self.dropout)
            hidden_mask = _dropout_mask(x, (n, self.units), self.dropout)
        driven = torch.addmm(self.bias, x.transpose(0, 1).flatten(0, 1), self.kernel).view(-1, n, 4 * self.units)
        states: Tensor = _Recurrence.apply(driven, self.recurrent, hidden_mask)[0][1:]  # type: ignore[no-untyped-call]
        return states[-1] if self.last else states.transpose(0, 1)


def _dropout_mask(like: Tensor, shape: tuple[int, ...], rate: float) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - rate).div_(1 - rate)


class _Recurrence(torch.autograd.Function):
    """The loop over time, by hand: what does not depend on the step before is taken out and done once for all.

    Returns the states, from the initial one on, and the gates and cells, which the backward needs.
    """

    @staticmethod
    def forward(driven: Tensor, recurrent: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steps, n, width = driven.shape
        units = width // 4
        gates = torch.empty_like(driven)
        cells, states = driven.new_zeros(2, steps + 1, n, units).unbind(0)
        for t in range(steps):
            gate = torch.addmm(driven[t], states[t] * mask, recurrent, out=gates[t])
            gate[:, : 3 * units].sigmoid_()
            gate[:, 3 * units :].tanh_()
            output, entering, forget, candidate = gate.chunk(4, 1)
            torch.mul(forget, cells[t], out=cells[t + 1]).addcmul_(entering, candidate)
            torch.tanh(cells[t + 1], out=states[t + 1]).mul_(output)
        return states, gates, cells

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        _, recurrent, mask = inputs
        states, gates, cells = output
        ctx.mark_non_differentiable(gates, cells)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gates, cells, states, recurrent, mask)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Copies are more samples: they share the recurrent weights."""
        copies = info.batch_size

        def fold(value: Tensor, at: int | None, samples: int) -> Tensor:
            value = value.expand(copies, *value.shape).movedim(0, samples) if at is None else value.movedim(at, samples)
            return value.flatten(samples, samples + 1)

        driven, mask = fold(inputs[0], in_dims[0], 1), fold(inputs[2], in_dims[2], 0)
        results = _Recurrence.apply(driven, inputs[1], mask)  # type: ignore[no-untyped-call]
        return tuple(value.unflatten(1, (copies, -1)) for value in results), (1, 1, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_states: Tensor | None, *_: None) -> tuple[Tensor | None, Tensor | None, None]:
        if d_states is None:
            return None, None, None
        gates, cells, states, recurrent, mask = ctx.saved_tensors
        d_states = d_states[1:]
        steps, units = cells.shape[0] - 1, cells.shape[2]
        output, entering, forget, candidate = gates.unflatten(2, (4, units)).unbind(2)
        active = cells[1:].tanh()
        # Derivatives of cell and gates, for all steps together; the loop only multiplies them.
        through = output * (1 - active * active)
        slopes = torch.stack(
            (
                output * (1 - output) * active,
                entering * (1 - entering) * candidate,
                forget * (1 - forget) * cells[:-1],
                (1 - candidate * candidate) * entering,
            ),
            2,
        )
        d_gates = torch.empty_like(slopes)
        transposed = recurrent.t().contiguous()
        d_cell = torch.zeros_like(mask)
        for t in reversed(range(steps)):
            d_state = d_states[t]
            if t < steps - 1:
                d_state = torch.addcmul(d_state, d_gates[t + 1].flatten(1) @ transposed, mask)
                d_cell = d_cell * forget[t + 1]
            d_cell = torch.addcmul(d_cell, d_state, through[t])
            torch.mul(slopes[t, :, 0], d_state, out=d_gates[t, :, 0])
            torch.mul(slopes[t, :, 1:], d_cell[:, None], out=d_gates[t, :, 1:])
        d_driven = d_gates.flatten(2)
        d_recurrent = (states[:-1] * mask).flatten(0, 1).t() @ d_driven.flatten(0, 1)
        return d_driven, d_recurrent, None
