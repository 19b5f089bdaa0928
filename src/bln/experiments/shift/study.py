"""The whole study: corrupted images, nets, answers, and one file of results.

    corrupted/          images by corruption and severity
    runs/NET/           a folder for each net, see ``bln.experiments.runs``
    answers/NET.jsonl   a line for each condition that the net was asked under, the settings first
    choices/NET.jsonl   a line for each prior that was chosen without labels
    runs.jsonl          the results: a line for each net, with its answers and choices

Whatever is there is not done again.
"""

from __future__ import annotations

import io
import itertools
import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import bln

from .. import data, runs, table
from ..norms import norm
from ..runs import RunError, RunFolder
from ..tasks import Part
from . import choice, corruptions
from .evaluation import CONFIGURATIONS, SIZES, accuracies, arrange
from .training import Recipe, held_out, standardize, train

FORMAT = 1
"""Bump when older answers or images can no longer be used."""
NORMS = ("bn", "bln-grouped", "gn", "ln")
SORTED_AT = 3
"""The severity at which requests come sorted by label, too."""
TRAINING = 0.3
"""About the share of a net's time that is training."""


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


Progress = Callable[[float, str], None]
"""Called with the number of nets done, fractions included, and what is under way."""


def plan(norms: Sequence[str] | None = None, seeds: int = 3, epochs: int | None = None) -> list[Recipe]:
    """Return the nets of the study, seed by seed."""
    for name in norms or ():
        norm(name)
    for what, value in (("seeds", seeds), ("epochs", epochs)):
        if value is not None and value < 1:
            raise ValueError(f"{what} must be at least 1, got {value}")
    found = [Recipe(name, seed) for seed, name in itertools.product(range(seeds), norms or NORMS)]
    return found if epochs is None else [replace(each, epochs=epochs) for each in found]


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
    recipes: Sequence[Recipe],
    questions: Questions,
    out: Path,
    data_dir: Path,
    *,
    workers: int = 1,
    progress: Progress = lambda done, text: None,
) -> Path:
    """Bring the study to its end, from wherever its folder stands, and return its table."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    _cifar10(data_dir)
    seeds = sorted({recipe.seed for recipe in recipes})
    wanted = [(each, seed) for seed in seeds for each in conditions(questions, False) if each.severity]
    for number, (each, seed) in enumerate(wanted):
        progress(0, f"corrupting images, {number} of {len(wanted)}")
        images(each, questions, seed, out, data_dir)
    if workers == 1:
        for number, recipe in enumerate(recipes):

            def tick(done: float, text: str, number: int = number) -> None:
                progress(number + done, text)

            ask(recipe, questions, out, data_dir, tick)
    else:
        from joblib import Parallel, delayed

        threads = max(1, torch.get_num_threads() // workers)
        parallel = Parallel(n_jobs=workers, backend="loky", batch_size=1, return_as="generator_unordered")
        done = parallel(delayed(_ask_alone)(recipe, questions, out, data_dir, threads) for recipe in recipes)
        progress(0, f"{workers} nets at a time")
        for number, name in enumerate(done, 1):
            progress(number, f"{name} finished")
    return collect(recipes, questions, out)


def ask(recipe: Recipe, questions: Questions, out: Path, data_dir: Path, tick: Progress) -> None:
    """Train a net and ask it under all conditions."""
    tick(0, f"{recipe.name}, training")
    net = train(recipe, out, _cifar10(data_dir), lambda done: tick(TRAINING * done, f"{recipe.name}, training"))
    net = with_bln(net)
    with RunFolder(out, recipe).locked():
        path = out / "answers" / f"{recipe.name}.jsonl"
        lines = _answers(path, recipe, questions)
        known = {_condition(line) for line in lines}
        wanted = conditions(questions, bool(bln.layers(net)))
        for number, condition in enumerate(wanted):
            tick(TRAINING + (1 - TRAINING) * number / len(wanted), f"{recipe.name}, {condition.corruption}")
            if condition in known:
                continue
            begun = time.perf_counter()
            part = images(condition, questions, recipe.seed, out, data_dir)
            order = arrange(part.targets, condition.arrangement, recipe.seed)
            sizes = asked_sizes(questions.sizes, condition.arrangement)
            found = accuracies(net, part.inputs[order], part.targets[order], sizes, CONFIGURATIONS)
            rounded = {name: [round(value, 4) for value in values] for name, values in found.items()}
            seconds = round(time.perf_counter() - begun, 1)
            lines.append({**condition._asdict(), "accuracy": rounded, "seconds": seconds})
            runs.write(path, _lines([_header(recipe, questions), *lines]))


def with_bln(net: nn.Module) -> nn.Module:
    """Return a BatchNorm net converted to BLN, which keeps its function; other nets stay as they are."""
    if any("BatchNorm" in type(module).__name__ for module in net.modules()):
        bln.convert(net)
    return net


def asked_sizes(sizes: Sequence[int], arrangement: str) -> list[int]:
    """Return the request sizes of an arrangement. A request of one image has only one."""
    return [size for size in sizes if size > 1 or arrangement == "shuffled"]


def images(condition: Condition, questions: Questions, seed: int, out: Path, data_dir: Path) -> Part:
    """Return the images of a condition with their labels; corrupted ones are made once and kept."""
    cifar = _cifar10(data_dir)
    count = questions.images
    if condition.part == "test":
        start = seed * count
        if start + count > len(cifar.test_images):
            raise ValueError(
                f"{seed + 1} seeds of {count:,} images each are more than the {len(cifar.test_images):,} of the test "
                "set; take fewer --images"
            )
        clean = Part(cifar.test_images[start : start + count], cifar.test_labels[start : start + count])
    else:
        clean = Part(*(each[:count] for each in held_out(cifar)))
    if not condition.severity:
        return clean
    of = zlib.crc32(clean.inputs.numpy().tobytes())
    name = f"{FORMAT}-{condition.part}-{condition.corruption}-{condition.severity}-{len(clean.inputs)}-{of:08x}.npy"
    path = out / "corrupted" / name
    kept = _kept(path, clean.inputs)
    if kept is None:
        corrupted = corruptions.corrupt(clean.inputs.numpy(), condition.corruption, condition.severity)
        buffer = io.BytesIO()
        np.save(buffer, corrupted)
        path.parent.mkdir(parents=True, exist_ok=True)
        runs.write(path, buffer.getvalue())
        kept = torch.from_numpy(corrupted)
    return clean._replace(inputs=kept)


def collect(recipes: Sequence[Recipe], questions: Questions, out: Path) -> Path:
    """Write the table of these nets, with all their answers and choices; returns its path."""
    wanted = set(conditions(questions, True))
    return table.write(out / table.NAME, [_row(recipe, questions, out, wanted) for recipe in recipes])


def _row(recipe: Recipe, questions: Questions, out: Path, wanted: set[Condition]) -> table.Row:
    folder = RunFolder(out, recipe)
    found = _answers(out / "answers" / f"{recipe.name}.jsonl", recipe, questions)
    answers = [line for line in found if _condition(line) in wanted]
    seconds = sum(folder.seconds()) + sum(line.pop("seconds") for line in answers)
    environment = (runs.read_json(folder.path / "settings.json") or {})["environment"]
    return {
        "task": "shift",
        **asdict(recipe),
        "status": "finished",
        "hours": float(f"{seconds / 3600:.4g}"),
        **runs.origin(environment),
        "questions": asdict(questions),
        "configurations": CONFIGURATIONS,
        "answers": answers,
        "choices": _choices(out, recipe),
    }


def _ask_alone(recipe: Recipe, questions: Questions, out: Path, data_dir: Path, threads: int) -> str:
    torch.set_num_threads(threads)
    ask(recipe, questions, out, data_dir, lambda done, text: None)
    return recipe.name


def _answers(path: Path, recipe: Recipe, questions: Questions) -> list[dict[str, Any]]:
    """Return the answers in this file, to go on from."""
    try:
        header, *lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return []
    except ValueError as error:
        raise RunError(f"{path} is harmed: {error}; delete it, and the net is asked again") from None
    if header != json.loads(json.dumps(_header(recipe, questions))):
        raise RunError(
            f"{path} has answers to other questions; take another --out, or delete that file: the net is not trained "
            "again"
        )
    return lines


def _header(recipe: Recipe, questions: Questions) -> dict[str, Any]:
    """Return what all answers of a net have in common; severities may be added later."""
    asked = {"configurations": CONFIGURATIONS, "images": questions.images, "sizes": questions.sizes}
    return {"format": FORMAT, "recipe": asdict(recipe), "questions": asked}


def _condition(line: dict[str, Any]) -> Condition:
    return Condition(*(line[name] for name in Condition._fields))


def _lines(lines: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()


def _kept(path: Path, like: Tensor) -> Tensor | None:
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    good = found.shape == tuple(like.shape) and found.dtype == np.uint8
    return torch.from_numpy(found) if good else None


def choose(recipes: Sequence[Recipe], questions: Questions, out: Path, data_dir: Path, progress: Progress) -> Path:
    """Choose priors without labels for the BatchNorm nets, and return the table with their choices in it.

    A net whose choices are there is not asked again.
    """
    asked = [recipe for recipe in recipes if recipe.norm == "bn"]
    for number, recipe in enumerate(asked):
        if _choices(out, recipe):
            continue
        net = with_bln(train(recipe, out, _cifar10(data_dir)))
        given = []
        for each in conditions(questions, True):
            if each.part == "test" and each.severity in (0, SORTED_AT):
                part = images(each, questions, recipe.seed, out, data_dir)
                order = arrange(part.targets, each.arrangement, recipe.seed)
                given.append((each.corruption, each.arrangement, standardize(part.inputs[order]), part.targets[order]))
        found = []
        wanted = len(given) * len(choice.SIZES)
        for done, line in enumerate(choice.compare(net, given)):
            progress(number + min(1.0, done / wanted), f"{recipe.name}, choosing priors")
            found.append(line)
        path = _choices_path(out, recipe)
        path.parent.mkdir(exist_ok=True)
        runs.write(path, _lines(found))
    return collect(recipes, questions, out)


def _choices_path(out: Path, recipe: Recipe) -> Path:
    return out / "choices" / f"{recipe.name}.jsonl"


def _choices(out: Path, recipe: Recipe) -> list[dict[str, Any]]:
    path = _choices_path(out, recipe)
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


@cache
def _cifar10(folder: Path) -> data.CIFAR:
    return data.cifar10(folder)
