"""Train runs to their end, from wherever they stand: alone, or several in turns."""

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
"""Called now and then with the share of the runs that is done."""


def train(settings: Settings, out: Path, data_dir: Path, device: torch.device, tick: Tick = lambda done: None) -> str:
    """Bring a run to its end, and return how it ended: ``finished`` or ``diverged``. A finished one is left alone."""
    (ended,) = train_together([settings], out, data_dir, device, tick)
    if isinstance(ended, RunError):
        raise ended
    return ended


def train_together(
    group: Sequence[Settings], out: Path, data_dir: Path, device: torch.device, tick: Tick = lambda done: None
) -> list[str | RunError]:
    """Bring several runs to their end, a step of each in turn, and return how each ended.

    On a GPU each works on a stream of its own, and their small kernels run side by side. Runs share nothing: one that
    cannot go on, or stands at another epoch, does not matter to the others, and the numbers are those of a run alone.
    """
    works = {each: _work(each, out, data_dir, device) for each in group}
    alone = len(works) == 1 and device.type == "cpu"
    lanes = {each: nullcontext if alone else lane(device) for each in works}
    done = dict.fromkeys(group, 0.0)
    ended: dict[Settings, str | RunError] = {}
    told = -math.inf
    try:
        while works:
            for each, work in list(works.items()):
                try:
                    with lanes[each]():
                        done[each] = next(work)
                    continue
                except StopIteration as end:
                    ended[each] = end.value
                except RunError as error:
                    ended[each] = error
                del works[each]
                done[each] = 1.0
            if time.monotonic() - told > 0.2:
                tick(sum(done.values()) / len(done))
                told = time.monotonic()
    finally:
        for work in works.values():
            work.close()
    return [ended[each] for each in group]


def _work(settings: Settings, out: Path, data_dir: Path, device: torch.device) -> Work:
    folder = RunFolder(out, settings)
    with folder.locked():
        folder.prepare(device)
        found = folder.result()
        if found is None:
            found = yield from _Training(settings, folder, data_dir, device).run()
    return found["status"]


class _Training:
    """The training of one run. Others work while it pauses, so global state must be set anew for each step."""

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
        # What is drawn depends on seed and epoch alone, so that a run that was interrupted draws the same.
        torch.manual_seed(self.settings.seed * 10_007 + number)
        for layer in bln.layers(self.model).values():
            layer.reset_statistics()
        self.model.train()
        train_loss, train_accuracy = yield from self.over(fit, self.order(len(fit.part.targets)))
        for layer in bln.layers(self.model).values():
            layer.config = "FFFF"
        self.model.eval()
        validation_loss, validation_accuracy = yield from self.over(evaluate)
        line = (number, train_loss, train_accuracy, validation_loss, validation_accuracy)
        names = ("epoch", "train_loss", "train_accuracy", "validation_loss", "validation_accuracy")
        self.metrics.append(dict(zip(names, map(_finite, line), strict=True)))
        self.costs["seconds"].append(round(time.perf_counter() - begun, 3))

        losses = [line["validation_loss"] for line in self.metrics]
        known = [loss for loss in losses if loss is not None]
        if known and losses[-1] == min(known) and not self.diverged():
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
        """The paper's mini-batches are drawn once, and come in the same order each epoch; clean ones are drawn anew."""
        return torch.randperm(count) if self.settings.protocol == "clean" else None

    def fit(self, inputs: Tensor, targets: Tensor) -> None:
        """A step of training; the first one says what memory a run needs."""
        if self.costs["memory"] is None:
            averages = 0 if self.device.type == "cuda" else 2 * sum(each.nbytes for each in self.model.parameters())
            step = partial(self._fit, inputs, targets)
            self.costs["memory"] = step_bytes(step, self.model, averages, self.device)  # a GPU's step allocates them
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

    def over(self, each: Steps, order: Tensor | None = None) -> Generator[float, None, tuple[float, float]]:
        """Go through a part; loss and accuracy are averages over its mini-batches, as Keras logs them."""
        self.total.zero_()
        for share in each(order):
            yield min(1.0, (len(self.metrics) + (share if self.model.training else 1)) / self.settings.epochs)
        loss, right = (self.total / len(each.part.targets)).tolist()
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
        if not bln.layers(self.model):  # nothing depends on the batch, so take large ones
            result["test"] = _score((yield from self.over(Steps(self.evaluate, test, 250))))
            return result
        found = self.configurations(validation)
        result["chosen"] = min(found, key=lambda config: (found[config][0] is None, found[config]))
        result["configurations"] = {"validation": found, "test": None}
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
        found = bln.search(self.model, batches, loss=self.task.loss, metrics={"accuracy": accuracy}, progress=False)
        return {str(row.config): (_finite(row.loss), _finite(row.metrics["accuracy"])) for row in found}


class Cost(NamedTuple):
    """What a run takes: seconds for an epoch of training, and bytes."""

    epoch: float
    memory: int


def measure(settings: Settings, out: Path, data_dir: Path, device: torch.device) -> Cost:
    """Time a few steps of a run, alone on this machine; nothing is written."""
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
    """TensorBoard's file of this run, from the next epoch on."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(path / "tensorboard"), purge_step=epochs + 1)
