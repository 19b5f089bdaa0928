"""Training by the paper's protocols: runs go on from their checkpoints to their end, alone or in turns."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, repeat, starmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bln

from .norms import norm
from .runs import RunError, RunFolder, Settings
from .steps import Steps, Work, lane, seconds_per_step, step_bytes
from .tasks import TASKS, Part, Task, accuracy

Tick = Callable[[float], None]
"""Called repeatedly with the share of the work that is done."""


def train(settings: Settings, out: Path, data_dir: Path, device: torch.device, tick: Tick = lambda done: None) -> str:
    """Train a run to its end, and return its status: ``finished`` or ``diverged``. A finished run stays as it is."""
    (ended,) = train_together([settings], out, data_dir, device, tick)
    if isinstance(ended, RunError):
        raise ended
    return ended


def train_together(
    group: Sequence[Settings], out: Path, data_dir: Path, device: torch.device, tick: Tick = lambda done: None
) -> list[str | RunError]:
    """Train several runs to their end, a step of each in turn, and return the status or error of each.

    On a GPU each has a stream of its own, so that their small kernels run side by side. Runs share nothing: each gives
    the numbers it gives alone, even if others fail or resume at another epoch.
    """
    works = {settings: _work(settings, out, data_dir, device) for settings in group}
    alone = len(works) == 1 and device.type == "cpu"
    lanes = {settings: nullcontext if alone else lane(device) for settings in works}
    done = dict.fromkeys(group, 0.0)
    ended: dict[Settings, str | RunError] = {}
    last_tick = -math.inf
    try:
        while works:
            for settings, work in list(works.items()):
                try:
                    with lanes[settings]():
                        done[settings] = next(work)
                    continue
                except StopIteration as end:
                    ended[settings] = end.value
                except RunError as error:
                    ended[settings] = error
                del works[settings]
                done[settings] = 1.0
            if time.monotonic() - last_tick > 0.2:
                tick(sum(done.values()) / len(done))
                last_tick = time.monotonic()
    finally:
        for work in works.values():
            work.close()
    return [ended[settings] for settings in group]


def _work(settings: Settings, out: Path, data_dir: Path, device: torch.device) -> Work:
    folder = RunFolder(out, settings)
    with folder.locked():
        folder.prepare(device)
        result = folder.result()
        if result is None:
            result = yield from _Training(settings, folder, data_dir, device).run()
    return result["status"]


class _Training:
    """The training of one run. Others train while it pauses, so it must not rely on global state between steps."""

    def __init__(self, settings: Settings, folder: RunFolder, data_dir: Path, device: torch.device) -> None:
        self.settings, self.folder, self.device = settings, folder, device
        self.task: Task = TASKS[settings.task]
        self.split = self.task.split(data_dir, settings.fraction, settings.seed)
        torch.manual_seed(settings.seed)
        self.model = self.task.model(norm(settings.norm)).to(device)
        if self.split.train.inputs.dim() == 4:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=self.task.learning_rate, fused=True, capturable=device.type == "cuda"
        )
        self.total = torch.zeros(2, device=device)
        self.metrics: list[dict[str, Any]] = []
        self.costs: dict[str, Any] = {"seconds": [], "memory": None}
        self.best: dict[str, Any] | None = None
        self.best_epoch: int | None = None

    def run(self) -> Work:
        self.resume()
        training, validation = (part.to(self.device) for part in (self.split.train, self.split.validation))
        size = self.settings.batch_size
        fit, evaluate = Steps(self.fit, training, size), Steps(self.evaluate, validation, size)
        board = _board(self.folder.path, len(self.metrics))
        while len(self.metrics) < self.settings.epochs and not self.diverged():
            yield from self.epoch(fit, evaluate)
            for name, value in self.metrics[-1].items():
                if name != "epoch" and value is not None:
                    board.add_scalar(name, value, len(self.metrics))
        board.close()
        result = yield from self.judge(validation)
        self.folder.finish(result, self.best)
        return result

    def resume(self) -> None:
        state = self.folder.load(self.device)
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:  # the checkpoint may come from another device
            group["capturable"] = self.optimizer.defaults["capturable"]
        self.metrics, self.costs = state["metrics"], state["costs"]
        self.best, self.best_epoch = state["best"], state["best_epoch"]

    def epoch(self, fit: Steps, evaluate: Steps) -> Work:
        begun, number = time.perf_counter(), len(self.metrics) + 1
        # Random numbers depend on seed and epoch alone, so that an interrupted run draws the same.
        torch.manual_seed(self.settings.seed * 10_007 + number)
        for layer in bln.layers(self.model).values():
            layer.reset_statistics()
        self.model.train()
        train_loss, train_accuracy = yield from self.over(fit, self.order(len(fit.part.targets)))
        for layer in bln.layers(self.model).values():
            layer.config = "FFFF"
        self.model.eval()
        validation_loss, validation_accuracy = yield from self.over(evaluate)
        self.metrics.append(
            {
                "epoch": number,
                "train_loss": _finite(train_loss), "train_accuracy": _finite(train_accuracy),
                "validation_loss": _finite(validation_loss), "validation_accuracy": _finite(validation_accuracy),
            }
        )  # fmt: skip
        self.costs["seconds"].append(round(time.perf_counter() - begun, 3))

        losses = [line["validation_loss"] for line in self.metrics]
        finite = [loss for loss in losses if loss is not None]
        if finite and losses[-1] == min(finite) and not self.diverged():
            self.best_epoch = number
            self.best = copy.deepcopy(self.model.state_dict())
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": self.best,
            "best_epoch": self.best_epoch,
        }
        self.folder.save(state, self.metrics, self.costs)

    def order(self, count: int) -> Tensor | None:
        """Return the order of an epoch: always the same in the paper's protocol, drawn anew in the clean one."""
        return torch.randperm(count) if self.settings.protocol == "clean" else None

    def fit(self, inputs: Tensor, targets: Tensor) -> None:
        """Take a step of training; the first one measures the memory of the run."""
        if self.costs["memory"] is None:
            # Adam's averages; on a GPU the step allocates them, and its peak includes them.
            averages = 0 if self.device.type == "cuda" else 2 * sum(p.nbytes for p in self.model.parameters())
            step = partial(self._fit, inputs, targets)
            self.costs["memory"] = step_bytes(step, self.model, averages, self.device)
        else:
            self._fit(inputs, targets)

    def _fit(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        loss = self.task.loss(outputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.add(loss.detach(), outputs.detach(), targets)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> None:
        outputs = self.model(inputs)
        self.add(self.task.loss(outputs, targets), outputs, targets)

    def add(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> None:
        self.total += torch.stack((loss, accuracy(outputs, targets))) * len(targets)

    def over(self, steps: Steps, order: Tensor | None = None) -> Generator[float, None, tuple[float, float]]:
        """Go through a part, and return loss and accuracy averaged over its mini-batches, as Keras logs them."""
        self.total.zero_()
        for share in steps(order):
            yield min(1.0, (len(self.metrics) + (share if self.model.training else 1)) / self.settings.epochs)
        loss, right = (self.total / len(steps.part.targets)).tolist()
        return loss, right

    def diverged(self) -> bool:
        return bool(self.metrics) and self.metrics[-1]["train_loss"] is None

    def judge(self, validation: Part) -> Work:
        """Test the weights of the best epoch; with BLN, in the configuration that validates best."""
        result: dict[str, Any] = {
            "status": "diverged" if self.diverged() else "finished",
            "best_epoch": self.best_epoch,
            "test": None,
            "chosen": None,
            "configurations": None,
        }
        if self.best is None or self.diverged():
            return result
        self.model.load_state_dict(self.best)
        self.model.eval()
        size = self.settings.batch_size
        test = self.split.test.to(self.device)
        if not bln.layers(self.model):  # predictions do not depend on the batch, so take large ones
            result["test"] = _score((yield from self.over(Steps(self.evaluate, test, 250))))
            return result
        scores = self.configurations(validation)
        result["chosen"] = min(scores, key=lambda config: (scores[config][0] is None, scores[config]))
        result["configurations"] = {"validation": scores, "test": None}
        if self.settings.protocol == "paper":  # the paper ranks all 16 on the test set
            result["configurations"]["test"] = self.configurations(test)
            result["test"] = _score(result["configurations"]["test"][result["chosen"]])
        else:
            bln.configure(self.model, result["chosen"])
            result["test"] = _score((yield from self.over(Steps(self.evaluate, test, size))))
        self.best = copy.deepcopy(self.model.state_dict())
        return result

    def configurations(self, part: Part) -> dict[str, tuple[float | None, float | None]]:
        """Return loss and accuracy of all 16 configurations."""
        batches = part.batches(self.settings.batch_size)
        ranking = bln.search(self.model, batches, loss=self.task.loss, metrics={"accuracy": accuracy}, progress=False)
        return {str(row.config): (_finite(row.loss), _finite(row.metrics["accuracy"])) for row in ranking}


class Cost(NamedTuple):
    """The cost of a run: seconds for an epoch of training, and bytes."""

    epoch: float
    memory: int


def measure(settings: Settings, out: Path, data_dir: Path, device: torch.device) -> Cost:
    """Time a few steps of a run by itself, and write nothing."""
    with lane(device)():
        run = _Training(settings, RunFolder(out, settings), data_dir, device)
        run.model.train()
        fit = Steps(run.fit, run.split.train.to(device), settings.batch_size)
        epochs: Iterable[Iterable[float]] = starmap(fit, repeat(()))
        step = seconds_per_step(chain.from_iterable(epochs), device)
        return Cost(step * math.ceil(len(fit.part.targets) / fit.size), run.costs["memory"])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _score(pair: Sequence[float | None]) -> dict[str, float | None]:
    return dict(zip(("loss", "accuracy"), pair, strict=True))


def _board(path: Path, epochs: int) -> Any:
    """Return a TensorBoard writer for the epochs that follow."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(path / "tensorboard"), purge_step=epochs + 1)
