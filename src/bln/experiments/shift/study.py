"""The study of shifted data from end to end: nets are trained, asked under all conditions, and put into the table.

    checkpoints/         nets under way
    nets/NET.pt          a trained net, with its line of the table up to the end of training
    answers/NET.json     its accuracy under each condition, and the priors that were chosen without labels
    runs.jsonl           the results: a line for each net, with its answers and choices

A file that exists is used, so the same command continues where it was stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import bln

from .. import runs, table
from ..data import DataSet
from ..processes import side_by_side
from ..remaining import Progress
from ..runs import RunError
from ..sizes import study as sizes
from ..sizes.tasks import TASKS, load
from ..sizes.training import Run, Training, finish, split
from ..table import Row
from ..tasks import Part
from . import choice, corruptions
from .evaluation import CONFIGURATIONS, SIZES, accuracies, arrange, asked_sizes

CPU = torch.device("cpu")
NORMS = ("bn", "bln-grouped", "gn", "ln")
SORTED_AT = 3
"""The severity at which requests also come sorted by label."""
TRAINING, CHOOSING = 0.3, 0.1
"""The rough shares of training and of choosing priors in the time a net takes."""


@dataclass(frozen=True)
class Questions:
    """The settings of the questions to nets."""

    images: int = 500
    """Images under each condition. Each seed has its own part of the test set; fewer may be held out for validation."""
    severities: tuple[int, ...] = corruptions.SEVERITIES
    sizes: tuple[int, ...] = SIZES

    def __post_init__(self) -> None:
        if self.images < 1:
            raise ValueError(f"expected at least one image, got {self.images}")
        if odd := set(self.severities) - set(corruptions.SEVERITIES):
            raise ValueError(f"severities are 1 to 5, got {min(odd)}")


class Condition(NamedTuple):
    """The images of a question, and how they arrive."""

    part: str
    """``test``, or ``validation``: images held out of the training set, under other corruptions."""
    corruption: str
    """``none`` at severity 0."""
    severity: int
    arrangement: str


def plan(norms: Sequence[str] | None = None, seeds: int | None = None, epochs: int | None = None) -> list[Run]:
    """Return the nets of the study, seed by seed."""
    cells = sizes.plan("shift", norms=norms or NORMS, seeds=seeds, epochs=epochs)
    rate = TASKS["shift"].learning_rate
    return [run for seed in range(cells[0].seeds) for cell in cells for run in cell.runs([rate], [seed])]


def conditions(questions: Questions, sorted_too: bool) -> list[Condition]:
    """Return all conditions, those without corruption first; ``sorted_too`` adds requests sorted by label."""
    listed = [Condition("test", "none", 0, "shuffled"), Condition("validation", "none", 0, "shuffled")]
    for severity in questions.severities:
        listed += [Condition("validation", name, severity, "shuffled") for name in corruptions.VALIDATION]
        listed += [Condition("test", name, severity, "shuffled") for name in corruptions.TEST]
    if sorted_too:
        listed.append(Condition("test", "none", 0, "sorted"))
        if SORTED_AT in questions.severities:
            listed += [Condition("test", name, SORTED_AT, "sorted") for name in corruptions.TEST]
    return listed


def study(
    nets: Sequence[Run],
    questions: Questions,
    out: Path,
    data_dir: Path,
    *,
    workers: int = 1,
    progress: Progress = lambda done, text: None,
) -> Path:
    """Run the study to its end, or what is left of it, and return the path of its table."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    load("shift", data_dir, CPU)  # refuse missing data before processes begin

    rows: list[Row] = []

    def tick(done: float, text: str) -> None:
        progress(len(rows) + done, text)

    with runs.locked(out / "lock"):
        here = (ask(run, questions, out, data_dir, tick) for run in nets)
        in_processes = side_by_side(ask, ((run, questions, out, data_dir) for run in nets), workers)
        for row in in_processes if workers > 1 else here:
            rows.append(row)
            progress(len(rows), f"{len(rows)} of {len(nets)} nets finished")
    rows.sort(key=lambda row: nets.index(sizes.key(row)))
    return table.write(out / table.NAME, rows)


def ask(run: Run, questions: Questions, out: Path, data_dir: Path, progress: Progress = lambda done, text: None) -> Row:
    """Train a net, ask it under all conditions, choose priors for it, and return its line of the table."""
    net, row = train(run, out, data_dir, lambda done: progress(TRAINING * done, f"{run.name}, training"))
    net = with_bln(net)
    cifar = load("shift", data_dir, CPU)
    prepare = TASKS["shift"].inputs(cifar.train).prepared

    def arranged(condition: Condition) -> tuple[Tensor, Tensor]:
        part = images(condition, questions, run, cifar)
        order = arrange(part.targets, condition.arrangement, run.seed)
        return prepare(part.inputs[order, None]), part.targets[order]

    path = out / "answers" / f"{run.name}.json"
    asked = {"configurations": CONFIGURATIONS, "images": questions.images, "sizes": list(questions.sizes)}
    record = runs.read_json(path) or {"asked": asked, "answers": [], "choices": []}
    if record["asked"] != asked:
        raise RunError(f"{path} has answers to other questions; take another --out, or delete that file")
    answered = {_condition(line) for line in record["answers"]}
    to_ask = conditions(questions, bool(bln.layers(net)))
    for number, condition in enumerate(to_ask):
        share = TRAINING + (1 - TRAINING - CHOOSING) * number / len(to_ask)
        progress(share, f"{run.name}, {condition.corruption}")
        if condition in answered:
            continue
        begun = time.perf_counter()
        request_sizes = asked_sizes(questions.sizes, condition.arrangement)
        by_name = accuracies(net, *arranged(condition), request_sizes, CONFIGURATIONS)
        accuracy = {name: [round(value, 4) for value in by_size] for name, by_size in by_name.items()}
        seconds = round(time.perf_counter() - begun, 1)
        record["answers"].append({**condition._asdict(), "accuracy": accuracy, "seconds": seconds})
        runs.write(path, json.dumps(record).encode())
    if run.norm == "bn" and not record["choices"]:
        progress(1 - CHOOSING, f"{run.name}, choosing priors")
        of_test = [
            condition for condition in to_ask if condition.part == "test" and condition.severity in (0, SORTED_AT)
        ]
        record["choices"] = list(
            choice.compare(net, [(test.corruption, test.arrangement, *arranged(test)) for test in of_test])
        )
        runs.write(path, json.dumps(record).encode())
    answers = [line for line in record["answers"] if _condition(line) in to_ask]  # others are of further severities
    seconds = sum(line.pop("seconds") for line in answers)
    return {
        **row,
        "hours": float(f"{row['hours'] + seconds / 3600:.4g}"),
        "questions": asdict(questions),
        "configurations": CONFIGURATIONS,
        "answers": answers,
        "choices": record["choices"],
    }


def train(
    run: Run, out: Path, data_dir: Path, tick: Callable[[float], None] = lambda done: None
) -> tuple[nn.Module, Row]:
    """Return a trained net in ``eval()`` and its line of the table, from its file if that exists."""
    path = out / "nets" / f"{run.name}.pt"
    saved = runs.read_tensors(path, CPU)
    if saved is None:
        training = Training([run], data_dir, CPU)
        work = training.run(out / "checkpoints" / path.name)
        (result,) = finish(work, lambda steps: tick(steps / run.steps))
        saved = {"net": training.net.state_dict(), "row": {**asdict(run), **result, **runs.origin(CPU)}}
        runs.write_tensors(path, saved)
    net = TASKS["shift"].net(run.norm, 1)
    net.load_state_dict(saved["net"])
    return net.eval(), saved["row"]


def with_bln(net: nn.Module) -> nn.Module:
    """Convert a BatchNorm net to BLN, which keeps its function, and return it; other nets stay unchanged."""
    if any("BatchNorm" in type(module).__name__ for module in net.modules()):
        bln.convert(net)
    return net


def images(condition: Condition, questions: Questions, run: Run, cifar: DataSet) -> Part:
    """Return the images of a condition, with their labels."""
    count = questions.images
    if condition.part == "test":
        rows = torch.arange(run.seed * count, (run.seed + 1) * count)
        if (run.seed + 1) * count > len(cifar.test):
            raise ValueError(
                f"{run.seed + 1} seeds of {count:,} images each are more than the {len(cifar.test):,} of the test set; "
                "take fewer --images"
            )
        clean = Part(cifar.test[rows], cifar.test_labels[rows])
    else:
        rows = split(run, len(cifar.train))[1][:count]
        clean = Part(cifar.train[rows], cifar.train_labels[rows])
    if not condition.severity:
        return clean
    corrupted = corruptions.corrupt(clean.inputs.numpy(), condition.corruption, condition.severity)
    return clean._replace(inputs=torch.from_numpy(corrupted))


def _condition(line: dict[str, Any]) -> Condition:
    return Condition(*(line[name] for name in Condition._fields))
