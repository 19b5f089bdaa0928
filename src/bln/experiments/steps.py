"""Runs a training step over the mini-batches of an epoch; on a GPU as a CUDA graph, several runs side by side."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .tasks import Part

Step = Callable[[Tensor, Tensor], None]
"""What is done with the inputs and targets of a mini-batch. On a GPU it must not wait for the device."""

Work = Generator[float, None, Any]
"""Training that pauses after some steps, so that other runs get their turn, and says how far it is."""

_EAGER = 3
"""Steps done one operation at a time before one is captured: they compile kernels and allocate what stays."""


class Replayed:
    """A step without arguments; on a GPU it is captured as a CUDA graph after a few calls, and replayed from then on.

    A capture executes nothing, so no step is done twice, and there is nothing to put back.
    """

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self._step, self._captured = step, captured(device)
        self._eager = _EAGER
        self._graph: Any = None

    def __call__(self) -> None:
        """Take the step."""
        if self._eager or not self._captured:
            self._eager -= self._eager > 0
            self._step()
            return
        if self._graph is None:
            self._graph = capture(self._step)
        self._graph.replay()


class Steps:
    """A step on each mini-batch of a part.

    The step itself takes the next mini-batch from the part. Where it stands is on the device too, so a step that is
    captured costs the host one launch. A smaller last mini-batch is not captured.

    Args:
        step: The step.
        part: Inputs and targets, on the device.
        size: Of a mini-batch; the last one may be smaller.
    """

    def __init__(self, step: Step, part: Part, size: int) -> None:
        self.step, self.part, self.size = step, part, size
        # Rows that lie in memory as the images do, so that taking some of them keeps the layout.
        self._last = part.inputs.dim() == 4 and part.inputs.is_contiguous(memory_format=torch.channels_last)
        self._rows = part.inputs.movedim(1, -1) if self._last else part.inputs
        self._natural = torch.arange(len(part.targets), device=part.targets.device)
        self._order, self._next = self._natural.clone(), self._natural[:size].clone()
        self._advance = Replayed(self._whole, part.targets.device)

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

    def _whole(self) -> None:
        """Take the step on the next mini-batch of the whole size, with nothing from the host."""
        batch = self._take(self._order.index_select(0, self._next))
        self._next += self.size
        self.step(*batch)

    def _take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self._rows.index_select(0, index)
        return inputs.movedim(-1, 1) if self._last else inputs, self.part.targets.index_select(0, index)


def captured(device: torch.device) -> bool:
    """Return whether steps become CUDA graphs there."""
    return device.type == "cuda"


def capture(function: Callable[[], None]) -> Any:
    """Return a CUDA graph of what ``function`` does on the current stream, which must not be the default one.

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


def seconds_per_step(steps: Iterator[Any], device: torch.device, timed: int = 5) -> float:
    """Return the mean time of a few steps, after those that compile and capture."""

    def take(count: int) -> None:
        for _ in itertools.islice(steps, count):
            pass
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    take(_EAGER + 1 if captured(device) else 1)
    begun = time.perf_counter()
    take(timed)
    return (time.perf_counter() - begun) / timed
