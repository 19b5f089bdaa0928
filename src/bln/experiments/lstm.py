"""An LSTM with Keras's recurrent dropout, one mask for all time steps, which torch's own LSTM lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class LSTM(nn.Module):
    """An LSTM over ``(N, T, inputs)``, whose output is ``(N, T, units)``, or ``(N, units)`` with ``last``.

    In training, dropout hides features of the input and of the hidden state. Each sample has one mask for the whole
    sequence. Weights are Glorot uniform over the four gates together, the forget gate's bias is 1.
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
        """Return the hidden state of each time step, or the last one."""
        n = x.shape[0]
        hidden_mask = x.new_ones(n, self.units)
        if self.training and self.dropout:
            x = x * _dropout_mask(x, (n, 1, x.shape[2]), self.dropout)
            hidden_mask = _dropout_mask(x, (n, self.units), self.dropout)
        from_inputs = torch.addmm(self.bias, x.transpose(0, 1).flatten(0, 1), self.kernel).view(-1, n, 4 * self.units)
        states: Tensor = _Recurrence.apply(from_inputs, self.recurrent, hidden_mask)[0][1:]  # type: ignore[no-untyped-call]
        return states[-1] if self.last else states.transpose(0, 1)


def _dropout_mask(like: Tensor, shape: tuple[int, ...], rate: float) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - rate).div_(1 - rate)


class _Recurrence(torch.autograd.Function):
    """The loop over time, with a backward that computes outside of the loop what needs no earlier step.

    It takes the part of the gates that comes from the inputs, ``(T, N, 4 * units)``. It returns the states from the
    initial one on, and gates and cells for the backward.
    """

    @staticmethod
    def forward(from_inputs: Tensor, recurrent: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steps, n, width = from_inputs.shape
        units = width // 4
        gates = torch.empty_like(from_inputs)
        cells, states = from_inputs.new_zeros(2, steps + 1, n, units).unbind(0)
        for t in range(steps):
            gate = torch.addmm(from_inputs[t], states[t] * mask, recurrent, out=gates[t])
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
        """Fold the vmapped dimension into the samples, since all share the recurrent weights."""
        copies = info.batch_size

        def fold(value: Tensor, at: int | None, samples: int) -> Tensor:
            value = value.expand(copies, *value.shape).movedim(0, samples) if at is None else value.movedim(at, samples)
            return value.flatten(samples, samples + 1)

        from_inputs, mask = fold(inputs[0], in_dims[0], 1), fold(inputs[2], in_dims[2], 0)
        results = _Recurrence.apply(from_inputs, inputs[1], mask)  # type: ignore[no-untyped-call]
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
        # Derivatives for all steps together, so that the loop only multiplies.
        d_state_by_cell = output * (1 - active * active)
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
            d_cell = torch.addcmul(d_cell, d_state, d_state_by_cell[t])
            torch.mul(slopes[t, :, 0], d_state, out=d_gates[t, :, 0])
            torch.mul(slopes[t, :, 1:], d_cell[:, None], out=d_gates[t, :, 1:])
        d_from_inputs = d_gates.flatten(2)
        d_recurrent = (states[:-1] * mask).flatten(0, 1).t() @ d_from_inputs.flatten(0, 1)
        return d_from_inputs, d_recurrent, None
