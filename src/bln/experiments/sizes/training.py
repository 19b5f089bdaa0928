"""Train runs that differ in seed and learning rate together, as one net, by an ordinary recipe.

Images are reshuffled each epoch, cropped and, where that keeps their meaning, mirrored. Adam's learning rate follows
one cycle. The last epoch's weights are tested, with its averages as population statistics.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import data, packed, runs
from ..augment import Crops, cut
from ..steps import capture, step_bytes
from . import nets


class Images(NamedTuple):
    """Images in uint8, ``(N, C, H, W)``, and their labels."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def cifar10(folder: Path) -> Images:
    """CIFAR-10, from its publisher's files or, where that is a file, from packed ones."""
    return Images(*(packed.read(folder) if folder.is_file() else data.cifar10(folder)))


def digits(folder: Path) -> Images:
    """scikit-learn's digits, which need no folder; the grey levels are 0 to 16."""
    found = data.digits()
    train = torch.cat([found.train_images, found.validation_images])
    labels = torch.cat([found.train_labels, found.validation_labels])
    levels = [(images * 16).to(torch.uint8) for images in (train, found.test_images)]
    return Images(levels[0], labels, levels[1], found.test_labels)


@dataclass(frozen=True)
class Task:
    """Data, net and recipe.

    Attributes:
        load: Reads the images from a folder.
        inputs: Channels of an image.
        widths: Features of the net's stages.
        blocks: Residual blocks of each stage.
        pad: Pixels around an image from which a crop is taken.
        mirror: Whether a mirror image means the same.
        images: To train on.
        validation: Images that are held out, to choose the learning rate with.
        epochs: Over these images.
        learning_rate: The middle of those tried, at batch size 32.
    """

    load: Callable[[Path], Images]
    inputs: int
    widths: tuple[int, ...]
    blocks: int
    pad: int
    mirror: bool
    images: int
    validation: int
    epochs: int
    learning_rate: float

    def net(self, norm: str, count: int) -> nn.Module:
        """The net of so many runs."""
        shape = {"inputs": self.inputs, "widths": self.widths, "blocks": self.blocks}
        return nets.resnet(nets.NORMALIZERS[norm], count, **shape)  # type: ignore[arg-type]


TASKS = {
    "resnet20": Task(cifar10, 3, (16, 32, 64), 3, 4, True, 20_000, 2_000, 5, 0.004),
    "digits-resnet": Task(digits, 1, (16, 32), 1, 1, False, 800, 359, 3, 0.025),
}
CLASSES = 10
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
    images: int
    epochs: int

    @property
    def steps(self) -> int:
        """Training steps: what is left of an epoch when the mini-batches are full is left out."""
        return self.images // self.batch_size * self.epochs


@cache
def _load(task: str, folder: Path, device: torch.device) -> Images:
    images = TASKS[task].load(folder)
    return Images(*(each.to(device) for each in images))


def tested(task: str, folder: Path, device: torch.device) -> int:
    """How many test images there are."""
    return len(_load(task, folder, device).test)


class Part(NamedTuple):
    """The images each run sees, one column for a run."""

    images: Tensor
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
"""Images of each run between two pauses, in which other nets get their turn."""

Work = Generator[float, None, Any]
"""Work that pauses now and then, and says what share of it is done."""


class Training:
    """Runs that differ in seed and learning rate alone, trained as one net.

    Random numbers depend on seed and epoch alone: whatever trains beside a run, and however often it is interrupted,
    its numbers are the same to rounding.
    """

    def __init__(self, group: Sequence[Run], folder: Path, device: torch.device) -> None:
        first = group[0]
        self.group, self.device, self.task = group, device, TASKS[first.task]
        if any((r.norm, r.batch_size, r.images, r.epochs) != (first.norm, first.batch_size, first.images, first.epochs)
               for r in group):  # fmt: skip
            raise ValueError("runs that train together differ in seed and learning rate alone")
        if first.images < first.batch_size:
            raise ValueError(f"{first.images} images do not fill a mini-batch of {first.batch_size}")
        images = _load(first.task, folder, device)
        self.size, self.count = first.batch_size, first.images
        self.height, self.width = images.train.shape[2:]
        self.padded = F.pad(images.train, [self.task.pad] * 4)
        self.labels = images.train_labels
        self._standardize_by(images.train)
        rows = [self._split(each.seed, len(images.train)) for each in group]
        self.train, held_out = (torch.stack(part, 1).to(device) for part in zip(*rows, strict=True))
        self.validation = Part(images.train, images.train_labels, held_out)
        test = torch.arange(len(images.test), device=device)[:, None].expand(-1, len(group))
        self.test = Part(images.test, images.test_labels, test)

        self.net = nets.together(partial(self.task.net, first.norm), [each.seed for each in group]).to(device)
        self.adam = Adam(self.net.parameters(), [each.learning_rate for each in group], first.steps)
        self.total = torch.zeros(2, len(group), device=device)
        self.order = self.train.clone()
        self.crops = Crops(*(torch.zeros_like(self.train, dtype=kind) for kind in (torch.long, torch.long, torch.bool)))
        self.next = torch.arange(self.size, device=device)
        self.curves: list[dict[str, list[float]]] = []
        self._eager, self._graph = _EAGER, cast(Any, None)
        self.memory: int | None = None  # known after the first step

    def _standardize_by(self, images: Tensor) -> None:
        deviation, mean = torch.std_mean(images.float(), (0, 2, 3), keepdim=True, correction=0)
        self.mean, self.deviation = mean, deviation

    def _split(self, seed: int, known: int) -> tuple[Tensor, Tensor]:
        """The images a run trains on, and those held out."""
        if self.count + self.task.validation > known:
            raise ValueError(f"expected 1 to {known - self.task.validation:,} training images, got {self.count:,}")
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
        crops = Crops(*(each.index_select(0, index) for each in self.crops))
        inputs = self._inputs(cut(self.padded, rows, crops, self.height, self.width))
        labels = self.labels[rows]
        self.net.zero_grad()
        outputs = self._outputs(inputs)
        losses = _losses(outputs, labels)
        losses.mean(0).sum().backward()  # type: ignore[no-untyped-call]
        self.adam.step()
        self._add(losses.detach(), outputs.detach(), labels)
        self.next += self.size

    def _inputs(self, images: Tensor) -> Tensor:
        """From ``(N, runs, C, H, W)`` in uint8 to what the net takes."""
        return ((images.float() - self.mean) / self.deviation).flatten(1, 2)

    def _outputs(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        return outputs.view(-1, len(self.group), CLASSES)

    def _add(self, losses: Tensor, outputs: Tensor, labels: Tensor) -> None:
        right = (outputs.argmax(2) == labels).float()
        self.total += torch.stack((losses.sum(0), right.sum(0)))

    # ---- epochs

    def run(self, checkpoint: Path | None = None) -> Work:
        """Train to the end and return what came out of each run."""
        begun = kept = time.monotonic()
        self._resume(checkpoint)
        epochs = self.group[0].epochs
        while len(self.curves) < epochs:
            yield from self.epoch()
            if checkpoint is not None and time.monotonic() - kept > _KEEP and len(self.curves) < epochs:
                runs.write_tensors(checkpoint, self._state())
                kept = time.monotonic()
        with torch.no_grad():
            test = self.evaluate(self.test)
        if checkpoint is not None:
            checkpoint.unlink(missing_ok=True)
        return self._results(test, time.monotonic() - begun)

    def _resume(self, checkpoint: Path | None) -> None:
        state = runs.read_tensors(checkpoint, self.device) if checkpoint is not None else None
        if state is not None:
            self.net.load_state_dict(state["net"])
            self.adam.load(state["adam"])
            self.curves = state["curves"]

    def _state(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "adam": self.adam.state(), "curves": self.curves}

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
        """Draw the order and the crops of an epoch, and begin new averages."""
        for column, each in enumerate(self.group):
            random = torch.Generator().manual_seed(each.seed * 10_007 + number)
            order = torch.randperm(self.count, generator=random).to(self.device)
            self.order[:, column] = self.train[order, column]
            crops = Crops.draw(self.count, self.task.pad, self.task.mirror, random)
            for mine, drawn in zip(self.crops, crops, strict=True):
                mine[:, column] = drawn.to(self.device)
        self.next.copy_(torch.arange(self.size))
        self.total.zero_()
        nets.reset_statistics(self.net)
        self.net.train()

    def evaluate(self, part: Part) -> tuple[list[float], list[float]]:
        """Loss and accuracy of each run."""
        self.net.eval()
        self.total.zero_()
        for rows in torch.split(part.rows, _TEST_BATCH):
            labels = part.labels[rows]
            outputs = self._outputs(self._inputs(part.images[rows]))
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
