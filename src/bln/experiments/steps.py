"""A training step applied to all mini-batches of an epoch: on a GPU as a CUDA graph, with several runs side by side."""

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
"""A function of the inputs and targets of a mini-batch. On a GPU it must not wait for the device."""

Work = Generator[float, None, Any]
"""Training that pauses after some steps, so that other runs get their turn, and yields the share that is done."""

_EAGER = 3
"""Steps taken eagerly before one is captured: they compile kernels and allocate memory that stays."""


class Replayed:
    """A step without arguments. On a GPU it is captured as a CUDA graph after a few calls, then replayed.

    A capture executes nothing, so no step is taken twice, and there is no state to restore.
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

    A step selects its mini-batch itself, by a position kept on the device, so a captured step costs the host a single
    launch. A smaller last mini-batch is not captured.

    Args:
        step: The step.
        part: Inputs and targets, on the device.
        size: Samples of a mini-batch; the last one may be smaller.
    """

    def __init__(self, step: Step, part: Part, size: int) -> None:
        self.step, self.part, self.size = step, part, size
        # Selecting rows keeps the layout only if the dimensions are in the order of memory.
        self._channels_last = part.inputs.dim() == 4 and part.inputs.is_contiguous(memory_format=torch.channels_last)
        self._rows = part.inputs.movedim(1, -1) if self._channels_last else part.inputs
        self._unshuffled = torch.arange(len(part.targets), device=part.targets.device)
        self._order, self._next = self._unshuffled.clone(), self._unshuffled[:size].clone()
        self._advance = Replayed(self._step_full_batch, part.targets.device)

    def __call__(self, order: Tensor | None = None) -> Iterator[float]:
        """Go through the part in this order; after each step, yield the share of it that is done."""
        self._order.copy_(self._unshuffled if order is None else order)
        self._next.copy_(self._unshuffled[: self.size])
        count = len(self._order)
        for end in range(self.size, count + 1, self.size):
            self._advance()
            yield end / count
        if rest := count % self.size:
            self.step(*self._select(self._order[-rest:]))
            yield 1.0

    def _step_full_batch(self) -> None:
        """Take the step on the next full mini-batch, with nothing from the host."""
        batch = self._select(self._order.index_select(0, self._next))
        self._next += self.size
        self.step(*batch)

    def _select(self, index: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self._rows.index_select(0, index)
        return inputs.movedim(-1, 1) if self._channels_last else inputs, self.part.targets.index_select(0, index)


def captured(device: torch.device) -> bool:
    """Return whether steps become CUDA graphs on this device."""
    return device.type == "cuda"


def capture(function: Callable[[], None]) -> Any:
    """Capture ``function`` as a CUDA graph on the current stream, which must not be the default one.

    A stream of its own gives a run its own cuBLAS workspace, which graphs that run side by side must not share.
    """
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(torch.cuda.default_generators[torch.cuda.current_device()])  # that of this lane
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        function()
    return graph


Lane = Callable[[], AbstractContextManager[None]]
"""Makes a context in which to do some of a run's work; leave it before another run's turn."""


def lane(device: torch.device) -> Lane:
    """Return the lane of one of several runs in a process: its own random numbers and, on a GPU, its own stream."""
    if device.type != "cuda":
        state = torch.get_rng_state()

        @contextmanager
        def own_numbers() -> Iterator[None]:
            nonlocal state
            outside = torch.get_rng_state()
            torch.set_rng_state(state)
            try:
                yield
            finally:
                state = torch.get_rng_state()
                torch.set_rng_state(outside)

        return own_numbers

    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    default, generator = torch.cuda.default_generators[stream.device_index], torch.Generator(device)

    @contextmanager
    def own_numbers_and_stream() -> Iterator[None]:
        outside, deterministic = default.graphsafe_get_state(), torch.backends.cudnn.deterministic
        default.graphsafe_set_state(generator)  # a graph captured in here draws from it, wherever it is replayed
        torch.backends.cudnn.deterministic = True  # so that a run ends with the same bytes each time
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            default.graphsafe_set_state(outside)
            torch.backends.cudnn.deterministic = deterministic

    return own_numbers_and_stream


def step_bytes(step: Callable[[], None], net: nn.Module, other: int, device: torch.device) -> int:
    """Take a step and return the bytes a run needs: on a GPU the peak, elsewhere weights, gradients and activations.

    Args:
        step: A step of training.
        net: The net it trains.
        other: Bytes of the run that a step does not allocate, such as the optimizer's.
        device: The device it trains on.
    """
    weights = sum(parameter.nbytes for parameter in net.parameters())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before + weights + other
    of_parameters = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    activations: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in of_parameters:
            activations[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        step()
    return 2 * weights + other + sum(activations.values())  # weights and their gradients


def seconds_per_step(steps: Iterator[Any], device: torch.device, timed: int = 5) -> float:
    """Return the mean time of a few steps, after others that compile and capture."""

    def take(count: int) -> None:
        for _ in itertools.islice(steps, count):
            pass
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    take(_EAGER + 1 if captured(device) else 1)
    begun = time.perf_counter()
    take(timed)
    return (time.perf_counter() - begun) / timed
