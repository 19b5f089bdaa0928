"""The whole study: corrupted images, nets, answers, and one file of results.

    checkpoints/         nets under way
    nets/NET.pt          a trained net and its line of the table, as far as training goes
    answers/NET.json     what it answered under each condition, and the priors that were chosen without labels
    runs.jsonl           the results: a line for each net, with its answers and choices

Whatever is there is not done again.
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
"""The severity at which requests come sorted by label, too."""
TRAINING, CHOOSING = 0.3, 0.1
"""About the shares of a net's time that are training and choosing priors."""


@dataclass(frozen=True)
class Questions:
    """The settings of what nets are asked."""

    images: int = 500
    """Images under each condition. Each seed has its own of the test set; of those held out there may be fewer."""
    severities: tuple[int, ...] = corruptions.SEVERITIES
    sizes: tuple[int, ...] = SIZES

    def __post_init__(self) -> None:
        if self.images < 1:
            raise ValueError(f"expected at least one image, got {self.images}")
        if odd := set(self.severities) - set(corruptions.SEVERITIES):
            raise ValueError(f"severities are 1 to 5, got {min(odd)}")


class Condition(NamedTuple):
    """The images that a net is asked about, and how they arrive."""

    part: str
    """``test``, or ``validation``: images held out of the training set, under other corruptions."""
    corruption: str
    """``none`` at severity 0."""
    severity: int
    arrangement: str


Tick = Callable[[float, str], None]
"""Called with the share of a net that is done, and what is under way."""


def plan(norms: Sequence[str] | None = None, seeds: int | None = None, epochs: int | None = None) -> list[Run]:
    """Return the nets of the study, seed by seed."""
    cells = sizes.plan("shift", norms=norms or NORMS, seeds=seeds, epochs=epochs)
    rate = TASKS["shift"].learning_rate
    return [run for seed in range(cells[0].seeds) for cell in cells for run in cell.runs([rate], [seed])]


def conditions(questions: Questions, sorted_too: bool) -> list[Condition]:
    """Return all conditions, those without corruption first; requests come sorted where that can matter."""
    found = [Condition("test", "none", 0, "shuffled"), Condition("validation", "none", 0, "shuffled")]
    for severity in questions.severities:
        found += [Condition("validation", name, severity, "shuffled") for name in corruptions.VALIDATION]
        found += [Condition("test", name, severity, "shuffled") for name in corruptions.TEST]
    if sorted_too:
        found.append(Condition("test", "none", 0, "sorted"))
        if SORTED_AT in questions.severities:
            found += [Condition("test", name, SORTED_AT, "sorted") for name in corruptions.TEST]
    return found


def study(
    nets: Sequence[Run],
    questions: Questions,
    out: Path,
    data_dir: Path,
    *,
    workers: int = 1,
    progress: Tick = lambda done, text: None,
) -> Path:
    """Bring the study to its end, from wherever its folder stands, and return its table."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    load("shift", data_dir, CPU)  # refuse missing data before processes begin

    rows: list[Row] = []

    def tick(done: float, text: str) -> None:
        progress(len(rows) + done, text)

    with runs.locked(out / "lock"):
        alone = (ask(run, questions, out, data_dir, tick) for run in nets)
        several = side_by_side(ask, ((run, questions, out, data_dir) for run in nets), workers)
        for row in several if workers > 1 else alone:
            rows.append(row)
            progress(len(rows), f"{len(rows)} of {len(nets)} nets finished")
    rows.sort(key=lambda row: nets.index(sizes.key(row)))
    return table.write(out / table.NAME, rows)


def ask(run: Run, questions: Questions, out: Path, data_dir: Path, tick: Tick = lambda done, text: None) -> Row:
    """Train a net, ask it under all conditions, choose priors for it, and return its line of the table."""
    net, row = train(run, out, data_dir, lambda done: tick(TRAINING * done, f"{run.name}, training"))
    net = with_bln(net)
    cifar = load("shift", data_dir, CPU)
    prepare = TASKS["shift"].inputs(cifar.train).plain

    def arranged(condition: Condition) -> tuple[Tensor, Tensor]:
        part = images(condition, questions, run, cifar)
        order = arrange(part.targets, condition.arrangement, run.seed)
        return prepare(part.inputs[order, None]), part.targets[order]

    path = out / "answers" / f"{run.name}.json"
    asked = {"configurations": CONFIGURATIONS, "images": questions.images, "sizes": list(questions.sizes)}
    known = runs.read_json(path) or {"asked": asked, "answers": [], "choices": []}
    if known["asked"] != asked:
        raise RunError(f"{path} has answers to other questions; take another --out, or delete that file")
    answered = {_condition(line) for line in known["answers"]}
    wanted = conditions(questions, bool(bln.layers(net)))
    for number, condition in enumerate(wanted):
        share = TRAINING + (1 - TRAINING - CHOOSING) * number / len(wanted)
        tick(share, f"{run.name}, {condition.corruption}")
        if condition in answered:
            continue
        begun = time.perf_counter()
        request_sizes = asked_sizes(questions.sizes, condition.arrangement)
        found = accuracies(net, *arranged(condition), request_sizes, CONFIGURATIONS)
        accuracy = {name: [round(value, 4) for value in values] for name, values in found.items()}
        seconds = round(time.perf_counter() - begun, 1)
        known["answers"].append({**condition._asdict(), "accuracy": accuracy, "seconds": seconds})
        runs.write(path, json.dumps(known).encode())
    if run.norm == "bn" and not known["choices"]:
        tick(1 - CHOOSING, f"{run.name}, choosing priors")
        given = [each for each in wanted if each.part == "test" and each.severity in (0, SORTED_AT)]
        known["choices"] = list(
            choice.compare(net, [(each.corruption, each.arrangement, *arranged(each)) for each in given])
        )
        runs.write(path, json.dumps(known).encode())
    own = [line for line in known["answers"] if _condition(line) in wanted]
    seconds = sum(line.pop("seconds") for line in own)
    return {
        **row,
        "hours": float(f"{row['hours'] + seconds / 3600:.4g}"),
        "questions": asdict(questions),
        "configurations": CONFIGURATIONS,
        "answers": own,
        "choices": known["choices"],
    }


def train(
    run: Run, out: Path, data_dir: Path, tick: Callable[[float], None] = lambda done: None
) -> tuple[nn.Module, Row]:
    """Return a trained net in ``eval()`` and its line of the table, from wherever its files stand."""
    path = out / "nets" / f"{run.name}.pt"
    found = runs.read_tensors(path, CPU)
    if found is None:
        training = Training([run], data_dir, CPU)
        work = training.run(out / "checkpoints" / path.name)
        (result,) = finish(work, lambda steps: tick(steps / run.steps))
        found = {"net": training.net.state_dict(), "row": {**asdict(run), **result, **runs.origin(CPU)}}
        runs.write_tensors(path, found)
    net = TASKS["shift"].net(run.norm, 1)
    net.load_state_dict(found["net"])
    return net.eval(), found["row"]


def with_bln(net: nn.Module) -> nn.Module:
    """Return a BatchNorm net converted to BLN, which keeps its function; other nets stay as they are."""
    if any("BatchNorm" in type(module).__name__ for module in net.modules()):
        bln.convert(net)
    return net


def images(condition: Condition, questions: Questions, run: Run, cifar: DataSet) -> Part:
    """Return the images that a net is asked about under a condition, with their labels."""
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
