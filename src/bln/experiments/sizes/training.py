"""Train runs by an ordinary recipe, those that differ in seed and learning rate alone together, as one net.

Samples are reshuffled and augmented anew each epoch. Adam's learning rate follows one cycle. The weights of the last
epoch are tested, with its averages as population statistics.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat, starmap
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import runs
from ..norms import reset_statistics
from ..steps import Replayed, seconds_per_step, step_bytes
from . import nets
from .tasks import TASKS, load

_TEST_BATCH = 250
"""Predictions do not depend on it, since they use population statistics."""


@dataclass(frozen=True)
class Run:
    """The settings that decide the numbers of a run."""

    task: str
    norm: str
    batch_size: int
    learning_rate: float
    seed: int
    samples: int
    epochs: int

    @property
    def name(self) -> str:
        """The run's name, without its task."""
        return f"{self.norm}-batch{self.batch_size}-{self.samples}-{self.epochs}-{self.learning_rate:g}-seed{self.seed}"

    @property
    def steps(self) -> int:
        """The number of training steps; an epoch leaves out samples that do not fill a mini-batch."""
        return self.samples // self.batch_size * self.epochs


_BETAS, _EPS = (0.9, 0.999), 1e-8
_WARM, _FIRST, _LAST = 0.3, 1 / 25, 1 / 25 / 1e4
"""torch's: the share of steps in which the rate rises, and its first and last value as shares of the highest."""


def one_cycle(steps: int) -> Tensor:
    """Return the learning rate of each step as a share of the highest, along half a cosine up and another down."""
    at, top = torch.arange(steps, dtype=torch.float64), max(0.0, _WARM * steps - 1)
    up = (1 - torch.cos(math.pi * at / max(top, 1))) / 2
    down = (1 + torch.cos(math.pi * (at - top) / max(steps - 1 - top, 1))) / 2
    return torch.where(at <= top, _FIRST + (1 - _FIRST) * up, _LAST + (1 - _LAST) * down) if top else down


class Adam:
    """Adam with one-cycle learning rates, for a net of several runs, each with its own highest rate."""

    def __init__(self, parameters: Iterable[nn.Parameter], highest: Sequence[float], steps: int) -> None:
        self.parameters: list[Tensor] = list(parameters)
        device = self.parameters[0].device
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.squares = [torch.zeros_like(parameter) for parameter in self.parameters]
        rates = torch.tensor(highest, device=device)
        self.rates = [  # the runs of a parameter lie one after the other
            rates.repeat_interleave(len(p) // len(rates)).view(-1, *[1] * (p.dim() - 1)).expand_as(p).clone()
            for p in self.parameters
        ]
        number = torch.arange(1, steps + 1, dtype=torch.float64)
        first, second = (1 - beta**number for beta in _BETAS)
        self.factors = torch.stack([-one_cycle(steps) / first, second.sqrt()]).float().to(device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters, with nothing from the host."""
        gradients = [cast(Tensor, parameter.grad) for parameter in self.parameters]
        factor, root = self.factors.index_select(1, self.at).unbind()
        torch._foreach_lerp_(self.means, gradients, 1 - _BETAS[0])
        torch._foreach_mul_(self.squares, _BETAS[1])
        torch._foreach_addcmul_(self.squares, gradients, gradients, 1 - _BETAS[1])
        deviations = torch._foreach_sqrt(self.squares)
        torch._foreach_div_(deviations, root[0])
        torch._foreach_add_(deviations, _EPS)
        updates = torch._foreach_mul(self.means, self.rates)
        torch._foreach_div_(updates, deviations)
        torch._foreach_mul_(updates, factor[0])
        torch._foreach_add_(self.parameters, updates)
        self.at += 1

    @property
    def nbytes(self) -> int:
        """The bytes of averages and rates."""
        return sum(tensor.nbytes for tensor in (*self.means, *self.squares, *self.rates))

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"means": self.means, "squares": self.squares, "at": self.at}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        with torch.no_grad():
            torch._foreach_copy_([*self.means, *self.squares], [*state["means"], *state["squares"]])
            self.at.copy_(state["at"])


_TURN = 64
"""Samples of each run between two pauses, in which other nets train."""

CountedWork = Generator[int, None, Any]
"""Training that pauses regularly, and yields the number of steps since the last pause."""


def finish(work: CountedWork, tick: Callable[[int], None] = lambda steps: None) -> Any:
    """Run work to its end, report its steps so far at each pause, and return its result."""
    steps = 0
    while True:
        try:
            steps += next(work)
        except StopIteration as end:
            return end.value
        tick(steps)


def split(run: Run, known: int) -> tuple[Tensor, Tensor]:
    """Return the samples that a run trains on, and those it holds out to choose the learning rate with."""
    validation = TASKS[run.task].validation
    if not 0 < run.samples <= known - validation:
        raise ValueError(f"expected 1 to {known - validation:,} training samples, got {run.samples:,}")
    order = torch.randperm(known, generator=torch.Generator().manual_seed(run.seed))
    return order[validation:][: run.samples], order[:validation]


class Training:
    """The training of runs that differ in seed and learning rate alone, as one net.

    Random numbers depend on seed and epoch alone. So a run gives the same numbers, up to rounding, whatever trains with
    it and however often it is interrupted.
    """

    def __init__(self, group: Sequence[Run], folder: Path, device: torch.device) -> None:
        first = group[0]
        self.group, self.device, self.task = group, device, TASKS[first.task]
        if len({replace(run, seed=0, learning_rate=0.0) for run in group}) > 1:
            raise ValueError("runs that train together differ in seed and learning rate alone")
        if first.samples < first.batch_size:
            raise ValueError(f"{first.samples} samples do not fill a mini-batch of {first.batch_size}")
        data = load(first.task, folder, device)
        self.size, self.count = first.batch_size, first.samples
        self.inputs, self.labels = self.task.inputs(data.train), data.train_labels
        rows = [split(run, len(data.train)) for run in group]
        self.train, held_out = (torch.stack(part, 1).to(device) for part in zip(*rows, strict=True))
        self.validation = data.train, data.train_labels, held_out
        test = torch.arange(len(data.test), device=device)[:, None].expand(-1, len(group))
        self.test = data.test, data.test_labels, test

        self.net = nets.together(partial(self.task.net, first.norm), [run.seed for run in group]).to(device)
        self.adam = Adam(self.net.parameters(), [run.learning_rate for run in group], first.steps)
        self.total = torch.zeros(2, len(group), device=device)
        self.order = self.train.clone()
        drawn = self.inputs.draw(1, torch.Generator())
        self.drawn = tuple(torch.zeros_like(self.train, dtype=values.dtype) for values in drawn)
        self.next = torch.arange(self.size, device=device)
        self.curves: list[dict[str, list[float]]] = []
        self.memory: int | None = None  # known after the first step
        self.advance = Replayed(self._measured_step, device)

    # ---- a step

    def _measured_step(self) -> None:
        if self.memory is None:
            self.memory = step_bytes(self._step, self.net, self.adam.nbytes, self.device)
        else:
            self._step()

    def _step(self) -> None:
        index = self.next
        rows = self.order.index_select(0, index)
        inputs = self.inputs.augmented(rows, tuple(values.index_select(0, index) for values in self.drawn))
        labels = self.labels[rows]
        self.net.zero_grad()
        outputs = self._outputs(inputs)
        losses = _losses(outputs, labels)
        losses.mean(0).sum().backward()  # type: ignore[no-untyped-call]
        self.adam.step()
        self._add(losses.detach(), outputs.detach(), labels)
        self.next += self.size

    def _outputs(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        return outputs.view(-1, len(self.group), self.task.classes)

    def _add(self, losses: Tensor, outputs: Tensor, labels: Tensor) -> None:
        right = (outputs.argmax(2) == labels).float()
        self.total += torch.stack((losses.sum(0), right.sum(0)))

    # ---- epochs

    def run(self, checkpoint: Path | None = None) -> CountedWork:
        """Train to the end, and return the results of each run."""
        begun = time.monotonic() - self._resume(checkpoint)
        saved = time.monotonic()
        while len(self.curves) < self.group[0].epochs:
            yield from self.epoch()
            if checkpoint is not None and time.monotonic() - saved > _SAVE_EVERY:
                saved = time.monotonic()
                state = {"net": self.net.state_dict(), "adam": self.adam.state(), "curves": self.curves}
                runs.write_tensors(checkpoint, {**state, "seconds": saved - begun})
        test = self.evaluate(*self.test)
        if checkpoint is not None:
            checkpoint.unlink(missing_ok=True)
        return self._results(test, time.monotonic() - begun)

    def _resume(self, checkpoint: Path | None) -> float:
        """Load a checkpoint, if it exists, and return the seconds spent before."""
        state = runs.read_tensors(checkpoint, self.device) if checkpoint is not None else None
        if state is None:
            return 0.0
        self.net.load_state_dict(state["net"])
        self.adam.load(state["adam"])
        self.curves = state["curves"]
        seconds: float = state["seconds"]
        return seconds

    def epoch(self) -> CountedWork:
        """Train an epoch, and validate."""
        steps, turn = self.count // self.size, max(1, _TURN // self.size)
        self.begin(len(self.curves) + 1)
        for start in range(0, steps, turn):
            now = min(turn, steps - start)
            for _ in range(now):
                self.advance()
            yield now
        loss, accuracy = (self.total / (steps * self.size)).tolist()
        validation_loss, validation_accuracy = self.evaluate(*self.validation)
        self.curves.append(
            {
                "train_loss": loss, "train_accuracy": accuracy,
                "validation_loss": validation_loss, "validation_accuracy": validation_accuracy,
            }
        )  # fmt: skip

    def begin(self, number: int) -> None:
        """Draw the order and the augmentation of an epoch, and restart all averages."""
        for column, run in enumerate(self.group):
            random = torch.Generator().manual_seed(run.seed * 10_007 + number)
            order = torch.randperm(self.count, generator=random).to(self.device)
            self.order[:, column] = self.train[order, column]
            for of_group, of_run in zip(self.drawn, self.inputs.draw(self.count, random), strict=True):
                of_group[:, column] = of_run.to(self.device)
        self.next.copy_(torch.arange(self.size))
        self.total.zero_()
        reset_statistics(self.net)
        self.net.train()

    @torch.no_grad()
    def evaluate(self, samples: Tensor, labels: Tensor, rows: Tensor) -> tuple[list[float], list[float]]:
        """Return loss and accuracy of each run on its own rows of these samples."""
        self.net.eval()
        self.total.zero_()
        for batch in torch.split(rows, _TEST_BATCH):
            outputs = self._outputs(self.inputs.prepared(samples[batch]))
            self._add(_losses(outputs, labels[batch]), outputs, labels[batch])
        loss, accuracy = (self.total / len(rows)).tolist()
        return loss, accuracy

    def _results(self, test: tuple[list[float], list[float]], seconds: float) -> list[dict[str, Any]]:
        results = []
        for column in range(len(self.group)):
            curves = {name: [_finite(epoch[name][column]) for epoch in self.curves] for name in self.curves[0]}
            loss, accuracy = (_finite(values[column]) for values in test)
            diverged = None in (loss, curves["train_loss"][-1])
            results.append(
                {
                    "status": "diverged" if diverged else "finished", "curves": curves,
                    "test": {"loss": loss, "accuracy": accuracy},
                    "hours": _finite(seconds / 3600 / len(self.group)),
                    "memory_mib": None if self.memory is None else round(self.memory / 2**20 / len(self.group), 3),
                }
            )  # fmt: skip
        return results


_SAVE_EVERY = 15.0
"""The fewest seconds between checkpoints."""


def _losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


class Cost(NamedTuple):
    """The cost of a net of several runs: seconds for a step, and bytes."""

    step: float
    memory: int


def measure(group: Sequence[Run], folder: Path, device: torch.device) -> Cost:
    """Time a few steps of these runs by themselves."""
    training = Training(group, folder, device)
    training.begin(1)

    def step() -> None:
        training.next.copy_(torch.arange(training.size))  # the first mini-batch again: an epoch may have fewer steps
        training.adam.at.zero_()
        training.advance()

    return Cost(seconds_per_step(starmap(step, repeat(())), device), cast(int, training.memory))
