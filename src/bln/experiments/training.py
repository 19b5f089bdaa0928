"""Train one run to its end, from wherever it stands."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bln

from .norms import norm
from .runs import RunFolder, Settings
from .tasks import TASKS, Part, Task, accuracy

Batches = Sequence[tuple[Tensor, Tensor]]
Tick = Callable[[float], None]
"""Told how far the run has come, from 0 to 1, every now and then."""


def train(settings: Settings, out: Path, data_dir: Path, device: torch.device, tick: Tick = lambda done: None) -> str:
    """Bring a run to its end, and return how it ended: ``finished`` or ``diverged``. A finished one is left alone."""
    folder = RunFolder(out, settings)
    with folder.locked():
        folder.prepare()
        found = folder.result()
        if found is None:
            found = _Training(settings, folder, data_dir, device, tick).run()
    status: str = found["status"]
    return status


class _Training:
    def __init__(self, settings: Settings, folder: RunFolder, data_dir: Path, device: torch.device, tick: Tick) -> None:
        self.settings, self.folder, self.device, self.tick = settings, folder, device, tick
        self.task: Task = TASKS[settings.task]
        self.split = self.task.split(data_dir, settings.fraction, settings.seed)
        torch.manual_seed(settings.seed)
        self.model = self.task.model(norm(settings.norm)).to(device)
        if self.split.train.inputs.dim() == 4:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.task.learning_rate, fused=True)
        self.metrics: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        self.best: dict[str, Any] | None = None
        self.best_epoch: int | None = None

    def run(self) -> dict[str, Any]:
        self.resume()
        validation = self.split.validation.to(self.device).batches(self.settings.batch_size)
        training = self.split.train.to(self.device)
        board = _board(self.folder.path, self.metrics)
        while len(self.metrics) < self.settings.epochs and not self.diverged():
            self.epoch(training, validation)
            for name, value in self.metrics[-1].items():
                if name != "epoch" and value is not None:
                    board.add_scalar(name, value, len(self.metrics))
        board.close()
        result = self.judge(validation)
        self.folder.finish(result, self.best)
        return result

    def resume(self) -> None:
        state = self.folder.load(self.device)
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.metrics, self.seconds = state["metrics"], state["seconds"]
        self.best, self.best_epoch = state["best"], state["best_epoch"]

    def epoch(self, training: Part, validation: Batches) -> None:
        begun, number = time.perf_counter(), len(self.metrics) + 1
        # What is drawn depends on seed and epoch alone, so that a run that was interrupted draws the same.
        torch.manual_seed(self.settings.seed * 10_007 + number)
        for layer in bln.layers(self.model).values():
            layer.reset_statistics()
        train_loss, train_accuracy = self.fit(self.batches(training))
        with torch.no_grad():
            for layer in bln.layers(self.model).values():
                layer.config = "FFFF"
            validation_loss, validation_accuracy = self.evaluate(validation)
        line = (number, train_loss, train_accuracy, validation_loss, validation_accuracy)
        names = ("epoch", "train_loss", "train_accuracy", "validation_loss", "validation_accuracy")
        self.metrics.append(dict(zip(names, map(_finite, line), strict=True)))
        self.seconds.append(round(time.perf_counter() - begun, 3))

        losses = [line["validation_loss"] for line in self.metrics]
        known = [loss for loss in losses if loss is not None]
        if known and losses[-1] == min(known) and not self.diverged():
            self.best_epoch = number
            self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": self.best,
            "best_epoch": self.best_epoch,
        }
        self.folder.save(state, self.metrics, self.seconds)

    def batches(self, training: Part) -> Batches:
        """The paper's mini-batches are drawn once, and come in the same order each epoch; clean ones are drawn anew."""
        order = torch.randperm(len(training.inputs)) if self.settings.protocol == "clean" else None
        return training.batches(self.settings.batch_size, order)

    def fit(self, batches: Batches) -> tuple[float, float]:
        """An epoch of training; loss and accuracy are averages over its mini-batches, as Keras logs them."""
        self.model.train()
        total = torch.zeros(2, device=self.device)
        for number, (inputs, targets) in enumerate(batches):
            self.optimizer.zero_grad()
            outputs = self.model(inputs)
            loss = self.task.loss(outputs, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            with torch.no_grad():
                total += torch.stack((loss, accuracy(outputs, targets))) * len(targets)
            if number % 50 == 0:
                self.tick((len(self.metrics) + number / len(batches)) / self.settings.epochs)
        return _pair(total / sum(len(targets) for _, targets in batches))

    def evaluate(self, batches: Batches) -> tuple[float, float]:
        self.model.eval()
        total, count = torch.zeros(2, device=self.device), 0
        for inputs, targets in batches:
            outputs = self.model(inputs)
            total += torch.stack((self.task.loss(outputs, targets), accuracy(outputs, targets))) * len(targets)
            count += len(targets)
        return _pair(total / count)

    def diverged(self) -> bool:
        return bool(self.metrics) and self.metrics[-1]["train_loss"] is None

    @torch.no_grad()
    def judge(self, validation: Batches) -> dict[str, Any]:
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
        size = self.settings.batch_size
        test = self.split.test.to(self.device)
        if not bln.layers(self.model):  # nothing depends on the batch, so take large ones
            result["test"] = _score(self.evaluate(test.batches(250)))
            return result
        found = self.configurations(validation)
        result["chosen"] = min(found, key=lambda config: (found[config][0] is None, found[config]))
        result["configurations"] = {"validation": found, "test": None}
        if self.settings.protocol == "paper":  # the paper ranks all 16 on the test set
            result["configurations"]["test"] = self.configurations(test.batches(size))
            result["test"] = _score(result["configurations"]["test"][result["chosen"]])
        else:
            bln.configure(self.model, result["chosen"])
            result["test"] = _score(self.evaluate(test.batches(size)))
        self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
        return result

    def configurations(self, batches: Batches) -> dict[str, tuple[float | None, float | None]]:
        """Loss and accuracy of all 16."""
        found = bln.search(self.model, batches, loss=self.task.loss, metrics={"accuracy": accuracy}, progress=False)
        return {str(row.config): (_finite(row.loss), _finite(row.metrics["accuracy"])) for row in found}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _pair(values: Tensor) -> tuple[float, float]:
    loss, right = values.tolist()
    return loss, right


def _score(pair: Sequence[float | None]) -> dict[str, float | None]:
    return dict(zip(("loss", "accuracy"), pair, strict=True))


def _board(path: Path, metrics: list[dict[str, Any]]) -> Any:
    """TensorBoard's file of this run, written anew up to here: what it held may be half a line."""
    from torch.utils.tensorboard import SummaryWriter

    place = path / "tensorboard"
    for stray in place.glob("events.*"):
        stray.unlink()
    writer = SummaryWriter(str(place))
    for line in metrics:
        for name, value in line.items():
            if name != "epoch" and value is not None:
                writer.add_scalar(name, value, line["epoch"])
    return writer
