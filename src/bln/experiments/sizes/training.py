"""Train runs that differ in seed and learning rate together, as one net, by an ordinary recipe.

Samples are reshuffled each epoch and varied as their task says. Adam's learning rate follows one cycle. The last
epoch's weights are tested, with its averages as population statistics.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import runs
from ..norms import reset_statistics
from ..steps import capture, step_bytes
from . import nets
from .tasks import TASKS, load

_TEST_BATCH = 250
"""Predictions do not depend on it: population statistics are used."""


@dataclass(frozen=True)
class Run:
    """All that decides the numbers of a run."""

    task: str
    norm: str
    batch_size: int
    learning_rate: float
    seed: int
    samples: int
    epochs: int

    @property
    def steps(self) -> int:
        """Training steps: what is left of an epoch when the mini-batches are full is left out."""
        return self.samples // self.batch_size * self.epochs


class Part(NamedTuple):
    """The samples each run sees, one column for a run."""

    samples: Tensor
    labels: Tensor
    rows: Tensor


_BETAS, _EPS = (0.9, 0.999), 1e-8
_WARM, _FIRST, _LAST = 0.3, 1 / 25, 1 / 25 / 1e4
"""The share of steps in which the rate rises; its first value, and its last, as shares of the highest. As torch's."""


def one_cycle(steps: int) -> Tensor:
    """The learning rate of each step as a share of the highest: up by a half cosine, and down by another."""
    at, top = torch.arange(steps, dtype=torch.float64), max(0.0, _WARM * steps - 1)
    up = (1 - torch.cos(math.pi * at / max(top, 1))) / 2
    down = (1 + torch.cos(math.pi * (at - top) / max(steps - 1 - top, 1))) / 2
    return torch.where(at <= top, _FIRST + (1 - _FIRST) * up, _LAST + (1 - _LAST) * down) if top else down


class Adam:
    """Adam over one cycle, for a net of several runs with a highest learning rate each."""

    def __init__(self, parameters: Iterable[nn.Parameter], highest: Sequence[float], steps: int) -> None:
        self.parameters: list[Tensor] = list(parameters)
        device = self.parameters[0].device
        self.means = [torch.zeros_like(each) for each in self.parameters]
        self.squares = [torch.zeros_like(each) for each in self.parameters]
        rates = torch.tensor(highest, device=device)
        self.rates = [  # the runs of a parameter lie one after the other
            rates.repeat_interleave(len(each) // len(rates)).view(-1, *[1] * (each.dim() - 1)).expand_as(each).clone()
            for each in self.parameters
        ]
        number = torch.arange(1, steps + 1, dtype=torch.float64)
        first, second = (1 - beta**number for beta in _BETAS)
        self.factors = torch.stack([-one_cycle(steps) / first, second.sqrt()]).float().to(device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters, with nothing from the host."""
        gradients = [cast(Tensor, each.grad) for each in self.parameters]
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
        """Bytes of the averages and the rates."""
        return sum(each.nbytes for each in (*self.means, *self.squares, *self.rates))

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"means": self.means, "squares": self.squares, "at": self.at}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        with torch.no_grad():
            torch._foreach_copy_([*self.means, *self.squares], [*state["means"], *state["squares"]])
            self.at.copy_(state["at"])


_EAGER = 3
"""Steps done one operation at a time before one is captured: they compile kernels and allocate what stays."""
_TURN = 64
"""Samples of each run between two pauses, in which other nets get their turn."""

Work = Generator[float, None, Any]
"""Work that pauses now and then, and says what share of it is done."""


class Training:
    """Runs that differ in seed and learning rate alone, trained as one net.

    Random numbers depend on seed and epoch alone. So a run gives the same numbers to rounding, whatever trains with it
    and however often it is interrupted.
    """

    def __init__(self, group: Sequence[Run], folder: Path, device: torch.device) -> None:
        first = group[0]
        self.group, self.device, self.task = group, device, TASKS[first.task]
        if len({replace(run, seed=0, learning_rate=0.0) for run in group}) > 1:
            raise ValueError("runs that train together differ in seed and learning rate alone")
        if first.samples < first.batch_size:
            raise ValueError(f"{first.samples} samples do not fill a mini-batch of {first.batch_size}")
        found = load(first.task, folder, device)
        self.size, self.count = first.batch_size, first.samples
        self.inputs, self.labels = self.task.inputs(found.train), found.train_labels
        rows = [self._split(each.seed, len(found.train)) for each in group]
        self.train, held_out = (torch.stack(part, 1).to(device) for part in zip(*rows, strict=True))
        self.validation = Part(found.train, found.train_labels, held_out)
        test = torch.arange(len(found.test), device=device)[:, None].expand(-1, len(group))
        self.test = Part(found.test, found.test_labels, test)

        self.net = nets.together(partial(self.task.net, first.norm), [each.seed for each in group]).to(device)
        self.adam = Adam(self.net.parameters(), [each.learning_rate for each in group], first.steps)
        self.total = torch.zeros(2, len(group), device=device)
        self.order = self.train.clone()
        drawn = self.inputs.draw(1, torch.Generator())
        self.drawn = tuple(torch.zeros_like(self.train, dtype=each.dtype) for each in drawn)
        self.next = torch.arange(self.size, device=device)
        self.curves: list[dict[str, list[float]]] = []
        self._eager, self._graph = _EAGER, cast(Any, None)
        self.memory: int | None = None  # known after the first step

    def _split(self, seed: int, known: int) -> tuple[Tensor, Tensor]:
        """Return the rows a run trains on, and those held out."""
        if self.count + self.task.validation > known:
            raise ValueError(f"expected 1 to {known - self.task.validation:,} training samples, got {self.count:,}")
        order = torch.randperm(known, generator=torch.Generator().manual_seed(seed))
        return order[self.task.validation :][: self.count], order[: self.task.validation]

    # ---- a step

    def advance(self) -> None:
        """Take the next step; on a GPU it is a CUDA graph after the first few."""
        if self._eager or not _has_graphs(self.device):
            self._eager -= self._eager > 0
            if self.memory is None:
                self.memory = step_bytes(self._step, self.net, self.adam.nbytes, self.device)
            else:
                self._step()
            return
        if self._graph is None:
            self._graph = capture(self._step)
        self._graph.replay()

    def _step(self) -> None:
        index = self.next
        rows = self.order.index_select(0, index)
        inputs = self.inputs.varied(rows, tuple(each.index_select(0, index) for each in self.drawn))
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

    def run(self, checkpoint: Path | None = None) -> Work:
        """Train to the end and return what came out of each run."""
        begun = time.monotonic() - self._resume(checkpoint)
        kept = time.monotonic()
        epochs, unwritten = self.group[0].epochs, None
        try:
            while len(self.curves) < epochs:
                yield from self.epoch()
                if checkpoint is None or len(self.curves) == epochs:
                    continue
                unwritten = copy.deepcopy(self._state(time.monotonic() - begun))
                if time.monotonic() - kept > _KEEP:
                    runs.write_tensors(checkpoint, unwritten)
                    kept, unwritten = time.monotonic(), None
        except GeneratorExit:  # cut off: what is whole is kept
            if checkpoint is not None and unwritten is not None:
                runs.write_tensors(checkpoint, unwritten)
            raise
        with torch.no_grad():
            test = self.evaluate(self.test)
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

    def _state(self, seconds: float) -> dict[str, Any]:
        return {
            "net": self.net.state_dict(), "adam": self.adam.state(), "curves": self.curves, "seconds": seconds,
        }  # fmt: skip

    def epoch(self) -> Work:
        """One epoch, and its validation."""
        before, steps = len(self.curves), self.count // self.size
        turn = max(1, _TURN // self.size)
        self.begin(before + 1)
        for step in range(1, steps + 1):
            self.advance()
            if step % turn == 0 or step == steps:
                yield (before + step / steps) / self.group[0].epochs
        loss, accuracy = (self.total / (steps * self.size)).tolist()
        with torch.no_grad():
            validation_loss, validation_accuracy = self.evaluate(self.validation)
        self.curves.append(
            {
                "train_loss": loss, "train_accuracy": accuracy,
                "validation_loss": validation_loss, "validation_accuracy": validation_accuracy,
            }
        )  # fmt: skip

    def begin(self, number: int) -> None:
        """Draw the order and the variations of an epoch, and begin new averages."""
        for column, each in enumerate(self.group):
            random = torch.Generator().manual_seed(each.seed * 10_007 + number)
            order = torch.randperm(self.count, generator=random).to(self.device)
            self.order[:, column] = self.train[order, column]
            for mine, drawn in zip(self.drawn, self.inputs.draw(self.count, random), strict=True):
                mine[:, column] = drawn.to(self.device)
        self.next.copy_(torch.arange(self.size))
        self.total.zero_()
        reset_statistics(self.net)
        self.net.train()

    def evaluate(self, part: Part) -> tuple[list[float], list[float]]:
        """Loss and accuracy of each run."""
        self.net.eval()
        self.total.zero_()
        for rows in torch.split(part.rows, _TEST_BATCH):
            labels = part.labels[rows]
            outputs = self._outputs(self.inputs.plain(part.samples[rows]))
            self._add(_losses(outputs, labels), outputs, labels)
        loss, accuracy = (self.total / len(part.rows)).tolist()
        return loss, accuracy

    def _results(self, test: tuple[list[float], list[float]], seconds: float) -> list[dict[str, Any]]:
        found = []
        for column in range(len(self.group)):
            curves = {name: [_finite(epoch[name][column]) for epoch in self.curves] for name in self.curves[0]}
            loss, accuracy = (_finite(values[column]) for values in test)
            diverged = None in (loss, curves["train_loss"][-1])
            found.append(
                {
                    "status": "diverged" if diverged else "finished", "curves": curves,
                    "test": {"loss": loss, "accuracy": accuracy},
                    "hours": _finite(seconds / 3600 / len(self.group)),
                    "memory_mib": None if self.memory is None else round(self.memory / 2**20 / len(self.group), 3),
                }
            )  # fmt: skip
        return found


_KEEP = 60.0
"""Seconds between checkpoints."""


def _losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def _has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


@dataclass(frozen=True)
class Cost:
    """What a net of several runs takes: seconds for a step, and bytes."""

    step: float
    memory: int


def measure(group: Sequence[Run], folder: Path, device: torch.device, steps: int = 5) -> Cost:
    """Time a few steps of these runs, alone on this machine."""
    training = Training(group, folder, device)
    training.begin(1)
    few = max(1, min(steps, training.count // training.size - _EAGER - 1))
    for _ in range(_EAGER + 1 if _has_graphs(device) else 1):
        training.advance()
    _wait(device)
    begun = time.perf_counter()
    for _ in range(few):
        training.next.copy_(torch.arange(training.size))  # a tiny part may have fewer mini-batches
        training.advance()
    _wait(device)
    return Cost((time.perf_counter() - begun) / few, training.memory or 0)


def _wait(device: torch.device) -> None:
    if _has_graphs(device):
        torch.cuda.synchronize(device)
