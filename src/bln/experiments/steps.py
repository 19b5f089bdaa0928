"""Runs a training step over the mini-batches of an epoch; on a GPU as a CUDA graph, several runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .tasks import Part

Step = Callable[[Tensor, Tensor], None]
"""What is done with the inputs and targets of a mini-batch. On a GPU it must not wait for the device."""

_EAGER = 3
"""Steps done one operation at a time before one is captured: they compile kernels and allocate what stays."""


class Steps:
    """A step on each mini-batch of a part.

    Args:
        step: The step.
        part: Inputs and targets, on the device.
        size: Of a mini-batch; the last one may be smaller.
    """

    def __init__(self, step: Step, part: Part, size: int) -> None:
        self.step, self.part, self.size = step, part, size

    def __call__(self, order: Tensor | None = None) -> Iterator[float]:
        """Go through the part in this order; after each step, the share of it that is done."""
        batches = self.part.batches(self.size, order)
        for number, (inputs, targets) in enumerate(batches, 1):
            self.step(inputs, targets)
            yield number / len(batches)


class CapturedSteps(Steps):
    """The same on a GPU: after a few steps one is captured as a CUDA graph, and replayed from then on.

    A capture executes nothing, so no step is done twice, and there is nothing to put back. The graph itself takes the
    next mini-batch from the part: where it stands is on the device too, and a step costs the host one launch. A smaller
    last mini-batch is not captured.
    """

    def __init__(self, step: Step, part: Part, size: int) -> None:
        super().__init__(step, part, size)
        count = len(part.targets)
        # Rows that lie in memory as the images do, so that taking some of them keeps the layout.
        self._last = part.inputs.dim() == 4 and part.inputs.is_contiguous(memory_format=torch.channels_last)
        self._rows = part.inputs.movedim(1, -1) if self._last else part.inputs
        self._natural = torch.arange(count, device=part.targets.device)
        self._order, self._next = self._natural.clone(), self._natural[:size].clone()
        self._eager = _EAGER
        self._graph: Any = None

    def __call__(self, order: Tensor | None = None) -> Iterator[float]:
        """Go through the part in this order; after each step, the share of it that is done."""
        self._order.copy_(self._natural if order is None else order)
        self._next.copy_(self._natural[: self.size])
        count = len(self._order)
        for end in range(self.size, count + 1, self.size):
            self._advance()
            yield end / count
        if rest := count % self.size:
            self.step(*self._take(self._order[-rest:]))
            yield 1.0

    def _advance(self) -> None:
        if self._eager:
            self._eager -= 1
            self._whole()
            return
        if self._graph is None:
            self._graph = capture(self._whole)
        self._graph.replay()

    def _whole(self) -> None:
        """The step on the next mini-batch of the whole size, with nothing from the host."""
        batch = self._take(self._order.index_select(0, self._next))
        self._next += self.size
        self.step(*batch)

    def _take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self._rows.index_select(0, index)
        return inputs.movedim(-1, 1) if self._last else inputs, self.part.targets.index_select(0, index)


def steps(step: Step, part: Part, size: int) -> Steps:
    """Return a step on each mini-batch of a part, captured where it is on a GPU."""
    return (CapturedSteps if part.targets.is_cuda else Steps)(step, part, size)


def capture(function: Callable[[], None]) -> Any:
    """A CUDA graph of what ``function`` does on the current stream, which must not be the default one.

    The stream is the one it ran on before: cuBLAS has a workspace for each, and graphs that run side by side must not
    share one.
    """
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(torch.cuda.default_generators[torch.cuda.current_device()])  # as it is in this lane
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        function()
    return graph


Lane = Callable[[], AbstractContextManager[None]]
"""Enter it for each piece of a run's work, and leave it before another run's."""


def lane(device: torch.device) -> Lane:
    """Return a context for one run of several in a process: its own random numbers and, on a GPU, its own stream."""
    if device.type != "cuda":
        state = torch.get_rng_state()

        @contextmanager
        def numbers() -> Iterator[None]:
            nonlocal state
            before = torch.get_rng_state()
            torch.set_rng_state(state)
            try:
                yield
            finally:
                state = torch.get_rng_state()
                torch.set_rng_state(before)

        return numbers

    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    default, own = torch.cuda.default_generators[stream.device_index], torch.Generator(device)

    @contextmanager
    def numbers_and_stream() -> Iterator[None]:
        before = default.graphsafe_get_state(), torch.backends.cudnn.deterministic
        default.graphsafe_set_state(own)  # a graph captured in here draws from it, wherever it is replayed
        torch.backends.cudnn.deterministic = True  # the same bytes each time
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            default.graphsafe_set_state(before[0])
            torch.backends.cudnn.deterministic = before[1]

    return numbers_and_stream


def step_bytes(step: Callable[[], None], net: nn.Module, other: int, device: torch.device) -> int:
    """Take a step and return the bytes a run needs: on a GPU the peak, elsewhere those of weights and activations.

    Args:
        step: A step of training.
        net: What it trains.
        other: Bytes of the run, such as the optimizer's, that a step does not allocate.
        device: Where it trains.
    """
    weights = sum(each.nbytes for each in net.parameters())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before + weights + other
    own = {each.untyped_storage().data_ptr() for each in net.parameters()}
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        step()
    return 2 * weights + other + sum(kept.values())  # weights and their gradients
