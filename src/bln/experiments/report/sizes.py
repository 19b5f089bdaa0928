"""The report of accuracy against batch size: what follows from the runs, the page, and the form for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from .. import table as table_of_runs
from ..sizes import study
from ..sizes.tasks import TASKS, Task
from ..table import Row, distinct
from . import figures
from .markup import Html, badge, document, figure, join, listed, save, table, tag
from .statistics import Estimate, mean_interval, number, paired_interval, seeds_in_words, seeds_to_decide
from .style import Plot, look
from .summary import Summary

if TYPE_CHECKING:
    from rich.console import Group

OURS = "bln-grouped"
"""The recommended form for images."""
FORMS = (OURS, "bln", "bln-pooled")
"""The forms of BLN; :attr:`Results.ours` says which of them the claim is about."""
RIVALS = ("bn", "gn", "ln", "rms", "batchrenorm")
MARGIN = 0.01
"""Norms are level where the whole interval of their difference in accuracy lies within this margin."""


class Wording(NamedTuple):
    """A task in words.

    Attributes:
        title: The net and its data.
        folder: The folder of its report.
        samples: The name of its samples.
        position: The name of a position in a sample.
        augmentation: A clause on how samples are augmented.
    """

    title: str
    folder: str
    samples: str
    position: str
    augmentation: str


WORDING = {
    "resnet20": Wording("ResNet-20 on CIFAR-10", "resnet", "images", "pixel", ", with random crops and mirror images"),
    "digits-resnet": Wording(
        "a small residual net on handwritten digits", "digits", "images", "pixel", ", with random crops"
    ),
    "transformer": Wording("a small transformer on IMDB", "transformer", "reviews", "token", ""),
}  # fmt: skip
NAMES = {"bln": "BLN as published"}
"""Names that differ from those in the report of the paper's experiments, where no other form stands beside them."""


def name(norm: str) -> str:
    """Return the name of a norm in this report."""
    return NAMES.get(norm) or look(norm).name


def rules(ours: str) -> tuple[str, ...]:
    """Return the rules by which the claim about this form of BLN is judged."""
    return (
        f"At each batch size {name(ours)} is compared with the other norm that has the highest mean test accuracy "
        "there, by differences paired by seed, with the wider of the t interval and the paired bootstrap, 95 % each.",
        f"It is ahead where the interval lies above 0, behind where it lies below, level where it lies within "
        f"± {MARGIN:g}, and undecided otherwise. Then it is said how many seeds would decide, if mean and spread stay.",
        "The claim holds where it is ahead or level at every batch size, and does not where it is behind at any.",
    )


class Results:
    """The runs of one task, number of samples and number of epochs, and what follows from them."""

    def __init__(self, task: str, samples: int, epochs: int, rows: Sequence[Row]) -> None:
        self.task, self.samples, self.epochs, self.rows = task, samples, epochs, rows

    @property
    def words(self) -> Wording:
        """The task in words."""
        return WORDING[self.task]

    @property
    def title(self) -> str:
        """The net and its data."""
        return self.words.title

    @cached_property
    def ours(self) -> str:
        """The form of BLN that the claim is about: grouped for images, elsewhere the best on validation data."""
        forms = [norm for norm in FORMS if norm in self.norms]
        if self.words.position == "pixel" or len(forms) < 2:
            return forms[0] if forms else FORMS[0]
        return next(iter(self.by_validation(forms)), forms[0])

    def by_validation(self, norms: Sequence[str]) -> dict[str, float]:
        """Return the mean validation accuracy of norms over the batch sizes all were run at, the best first."""
        shared = [size for size in self.sizes if all(self.chosen(norm, size) for norm in norms)]
        means = {
            norm: sum(self.estimate(norm, size, "validation").mean for size in shared) / len(shared)
            for norm in norms
            if shared
        }
        return dict(sorted(means.items(), key=lambda item: -item[1]))

    @property
    def recipe(self) -> Task:
        """The task's recipe."""
        return TASKS[self.task]

    @cached_property
    def _cells(self) -> dict[tuple[str, int], list[Row]]:
        cells: dict[tuple[str, int], list[Row]] = {}
        for row in self.rows:
            cells.setdefault((row["norm"], row["batch_size"]), []).append(row)
        return cells

    @cached_property
    def norms(self) -> list[str]:
        """The norms, in the order of all reports."""
        return Summary.order(norm for norm, _ in self._cells)

    @cached_property
    def sizes(self) -> list[int]:
        """The batch sizes, the smallest first."""
        return sorted({size for _, size in self._cells})

    def tried(self, norm: str, size: int) -> list[float]:
        """Return the learning rates that were tried."""
        return sorted({row["learning_rate"] for row in self._cells.get((norm, size), ())})

    def rate(self, norm: str, size: int) -> float:
        """Return the learning rate that was chosen on validation data."""
        return study.best_rate(self._cells[norm, size])

    def chosen(self, norm: str, size: int) -> dict[int, Row]:
        """Return the runs with the chosen learning rate, by seed."""
        if (norm, size) not in self._cells:
            return {}
        rate = self.rate(norm, size)
        return {row["seed"]: row for row in self._cells[norm, size] if row["learning_rate"] == rate}

    def accuracies(self, norm: str, size: int, part: str = "test") -> dict[int, float]:
        """Return the accuracy by seed, on the test set or on validation data."""
        rows = self.chosen(norm, size)
        if part == "test":
            return {seed: row["test"]["accuracy"] for seed, row in rows.items() if row["test"]}
        return {seed: row["curves"]["validation_accuracy"][-1] for seed, row in rows.items()}

    def estimate(self, norm: str, size: int, part: str = "test") -> Estimate:
        """Return the mean accuracy with its interval over seeds."""
        return mean_interval(list(self.accuracies(norm, size, part).values()))

    def points(self, norms: Sequence[str]) -> dict[str, dict[int, Estimate]]:
        """Return the test accuracies to draw, by norm and batch size."""
        return {
            norm: {size: estimate for size in self.sizes if (estimate := self.estimate(norm, size)).n}
            for norm in norms
            if norm in self.norms
        }

    def differences(self, size: int, rival: str) -> list[float]:
        """Return our form's test accuracy minus a rival's, for each seed that both have."""
        ours, theirs = self.accuracies(self.ours, size), self.accuracies(rival, size)
        return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


@dataclass(frozen=True)
class Standing:
    """How our form of BLN stands at one batch size.

    Attributes:
        size: The batch size.
        rival: The best other norm.
        difference: In test accuracy, paired by seed.
        verdict: ``ahead``, ``level``, ``behind`` or ``undecided``.
        seeds: The number that would decide, where it is undecided; ``None`` beyond 1,000.
    """

    size: int
    rival: str
    difference: Estimate
    verdict: str
    seeds: int | None = None

    def text(self) -> str:
        """Return a clause: ``ahead of GroupNorm at batch 4 (+1.2 points)``."""
        by = f"{self.difference.times(100).text(signed=True, digits=1)} points"
        words = {"ahead": "ahead of", "level": "level with", "behind": "behind", "undecided": "undecided against"}
        needed = f"; {self.needed()}" if self.verdict == "undecided" else ""
        return f"{words[self.verdict]} {name(self.rival)} at batch {self.size} ({by}{needed})"

    def needed(self) -> str:
        """Say how many seeds would decide."""
        return seeds_in_words(self.seeds) if self.difference.n > 1 else "one seed has no spread"


def standings(results: Results) -> list[Standing]:
    """Compare our form of BLN with the best other norm, batch size by batch size."""
    standings_by_size = []
    for size in results.sizes:
        means = {norm: estimate.mean for norm in RIVALS if (estimate := results.estimate(norm, size)).n}
        if means and results.accuracies(results.ours, size):
            rival = max(means, key=means.__getitem__)
            standings_by_size.append(_standing(size, rival, results.differences(size, rival)))
    return standings_by_size


def _standing(size: int, rival: str, values: Sequence[float]) -> Standing:
    difference = paired_interval(values)
    _, low, high, n = difference
    if n < 2:
        return Standing(size, rival, difference, "undecided")
    if low > 0 or high < 0:
        return Standing(size, rival, difference, "ahead" if low > 0 else "behind")
    if low > -MARGIN and high < MARGIN:
        return Standing(size, rival, difference, "level")
    return Standing(size, rival, difference, "undecided", seeds_to_decide(values, MARGIN))


def verdict(stands: Sequence[Standing]) -> str:
    """Judge the claim that our form is ahead of or level with the best other norm at every batch size."""
    kinds = {stand.verdict for stand in stands}
    if "behind" in kinds:
        return "does not hold"
    return "holds" if kinds and kinds <= {"ahead", "level"} else "undecided"


def claim(results: Results) -> str:
    """State the claim, about the norms that were run."""
    names = [name(norm) for norm in RIVALS if norm in results.norms]
    best = f"the best of {listed(names)}" if len(names) > 1 else names[0] if names else "every other norm"
    return f"{name(results.ours)} is ahead of or level with {best} at every batch size"


def conclusion(results: Results) -> tuple[str, list[str]]:
    """Return a sentence with the verdict on the claim, and a clause for each batch size."""
    stands = standings(results)
    if not stands:
        return f"No run decides yet whether {claim(results)}.", []
    opening = {"holds": "Here ", "does not hold": "Not so here: ", "undecided": "These runs do not decide whether "}
    return f"{opening[verdict(stands)]}{claim(results)}.", [stand.text() for stand in stands]


def groups(results: Results) -> dict[str, float]:
    """Return the validation accuracy of each number of groups, mean over the batch sizes of all, the best first."""
    names = [norm for norm in results.norms if norm.startswith("bln-g")]
    return results.by_validation(names) if len(names) > 1 else {}


def advice(results: Results) -> str:
    """Return a sentence on whether to use BLN in this net, by the batch sizes at which the runs decide."""
    net, stands = results.title, standings(results)
    sizes = {kind: [str(stand.size) for stand in stands if stand.verdict == kind] for kind in ("ahead", "undecided")}
    if behind := [stand for stand in stands if stand.verdict == "behind"]:
        return f"Do not use BLN in {net}: it is {behind[0].text()}."
    if not sizes["ahead"]:
        return f"Do not use BLN in {net}: nothing here shows that it helps."
    if sizes["undecided"]:
        ahead, undecided = (" and ".join(sizes[kind]) for kind in ("ahead", "undecided"))
        return f"In {net} BLN is ahead at batch {ahead}; at batch {undecided} these runs do not decide."
    return f"BLN helps in {net}."


# ---- reading


def read(path: Path) -> list[Results]:
    """Return the results of a table, one for each net, number of samples and number of epochs."""
    try:
        recipes: dict[tuple[str, int, int], list[Row]] = {}
        for row in table_of_runs.read(path):
            if row["task"] in WORDING:
                study.key(row)
                recipes.setdefault((row["task"], row["samples"], row["epochs"]), []).append(row)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a table of runs: {error}; `bln reproduce` writes one") from None
    return [Results(*recipe, rows) for recipe, rows in recipes.items()]


# ---- the page


def write(nets: Sequence[Results], folder: Path) -> Path:
    """Write ``report.html`` and its figures; return the page's path."""
    drawn = [(results, plots(results)) for results in nets]
    body = join([part for results, its_plots in drawn for part in _page(results, its_plots)])
    page = document("Accuracy against batch size", body)
    return save(folder / "report.html", page, [plot for _, its_plots in drawn for plot in its_plots])


def _page(results: Results, its_plots: Sequence[Plot]) -> Iterator[Html]:
    stands = standings(results)
    title = results.title[0].upper() + results.title[1:]
    yield tag("h1", f"Accuracy against batch size: {title}")
    yield tag("p", _origin(results), class_="meta")
    sentence, clauses = conclusion(results)
    yield tag("p", tag("b", sentence))
    yield tag("ul", *(tag("li", clause) for clause in clauses))
    yield tag("h2", "Accuracy")
    yield from map(figure, its_plots)
    yield _accuracy_table(results)
    yield tag("h2", "What is compared")
    yield tag("ul", *(tag("li", tag("b", what), text) for what, text in _explained(results)))
    if stands:
        yield tag("h2", f"{name(results.ours)} minus the best other norm")
        yield tag("p", claim(results) + ": ", badge(verdict(stands)))
        rows = [
            [str(s.size), name(s.rival), s.difference.text(signed=True), str(s.difference.n), badge(s.verdict),
             s.needed() if s.verdict == "undecided" else ""]
            for s in stands
        ]  # fmt: skip
        head = ["batch", "best other", "difference [95 % interval]", "seeds", "verdict", ""]
        yield table("Differences in test accuracy, paired by seed.", head, rows, "results")
        yield tag("ul", *(tag("li", rule) for rule in rules(results.ours)))
    if means := groups(results):
        words = listed([f"{number(mean)} with {name(norm)}" for norm, mean in means.items()])
        yield tag("p", f"Numbers of groups by validation accuracy, mean over batch sizes: {words}.")
    yield tag("h2", "How it was run")
    yield tag("p", recipe(results))
    yield _cost_table(results)


def plots(results: Results) -> list[Plot]:
    """Draw the figures of these results."""
    prefix, seeds = results.task, "95 % t intervals over seeds."
    main = [norm for norm in results.norms if norm == OURS or not norm.startswith("bln-g")]
    caption = f"Test accuracy against batch size. {seeds} Learning rates were chosen on validation data."
    drawn = [figures.batch_sizes(f"{prefix}-accuracy", caption, results.points(main), NAMES)]
    if stands := [stand for stand in standings(results) if stand.difference.n]:
        caption = (
            f"{name(results.ours)} minus the best other norm, which stands above, in points of test accuracy; 95 % "
            f"intervals of differences paired by seed. Dotted: ± {100 * MARGIN:g}, within which norms are level."
        )
        pairs = {stand.size: (stand.rival, stand.difference) for stand in stands}
        drawn.append(figures.margins(f"{prefix}-differences", caption, results.ours, pairs, MARGIN, name(results.ours)))
    grouped = [norm for norm in results.norms if norm.startswith("bln-g")]
    if len(grouped) > 1:
        caption = f"BLN grouped by its number of groups; the recommended form has eight. {seeds}"
        drawn.append(figures.batch_sizes(f"{prefix}-groups", caption, results.points(grouped), NAMES))
    return drawn


def _origin(results: Results) -> str:
    rows = results.rows
    versions, torch_versions, commits, devices = (
        ", ".join(distinct(values))
        for values in (
            (row["versions"]["bln"] for row in rows),
            (row["versions"]["torch"] for row in rows),
            (row["commit"] and row["commit"][:10] for row in rows),
            (row["device"] for row in rows),
        )
    )
    return f"{len(rows)} runs · bln {versions}, torch {torch_versions} · commit {commits} · {devices}"


def _explained(results: Results) -> Iterator[tuple[str, str]]:
    position = results.words.position
    texts = {
        "bn": (
            "BatchNorm",
            " normalizes each feature by its mean and deviation over the mini-batch. For inference it keeps averages, "
            "the population statistics. The fewer samples, the more the two differ.",
        ),
        "gn": (
            "GroupNorm",
            f" normalizes each sample by itself, over groups of features and all {position}s. It does not know about "
            "mini-batches.",
        ),
        "ln": ("LayerNorm", f" normalizes each sample by itself, over all features, {position} by {position}."),
        "rms": ("RMSNorm", f" divides each {position} by the root of the mean square of its features."),
        "batchrenorm": ("Batch Renormalization", " is BatchNorm corrected towards its averages while it trains."),
        "bln-grouped": (
            "BLN grouped",
            " computes what BatchNorm and GroupNorm compute, and mixes the two: with m samples in a mini-batch the "
            "first has the weight 1 \N{MINUS SIGN} 1/m, the second 1/m.",
        ),
        "bln": (
            "BLN as published",
            f" mixes in the same way, but keeps the batch's statistics apart for each {position}, and normalizes a "
            f"sample over its features at each {position}.",
        ),
        "bln-pooled": ("BLN pooled", f" is BLN as published with the batch's statistics pooled over {position}s."),
    }
    for norm, text in texts.items():
        if norm in results.norms:
            yield text
    yield (
        "In inference",
        " BLN can take each of its four statistics from training (T, the population's) or from the batch at hand (F): "
        "E_B and Std_B, mean and deviation over the batch, and E_F and Std_F, those of a sample's features. Here it is "
        "TTFF: E_B and Std_B from training, as BatchNorm has them, so no prediction depends on what else is in its "
        "batch.",
    )


def _accuracy_table(results: Results) -> Html:
    rows = []
    for norm in results.norms:
        cells = []
        for size in results.sizes:
            estimate = results.estimate(norm, size)
            diverged = sum(row["status"] == "diverged" for row in results.chosen(norm, size).values())
            text = estimate.plus_minus() if estimate.n else ""
            cells.append(text + (f" ({diverged} diverged)" if diverged else ""))
        rows.append([name(norm), *cells])
    caption = "Test accuracy, mean over seeds ± 95 % t interval."
    return table(caption, ["", *(f"batch {size}" for size in results.sizes)], rows, "results")


def _cost_table(results: Results) -> Html:
    rows = [
        [
            name(norm),
            str(size),
            f"{results.rate(norm, size):g}",
            _tried(results, norm, size),
            *_cost(results, norm, size),
        ]
        for norm in results.norms
        for size in results.sizes
        if results.chosen(norm, size)
    ]
    caption = (
        "The learning rate chosen on validation data, those tried, and what a run took: test accuracy, and its share "
        "of the time and memory of the runs it was trained together with."
    )
    head = ["norm", "batch", "learning rate", "tried", "test accuracy", "seconds a run", "MiB a run"]
    return table(caption, head, rows, "results")


def _tried(results: Results, norm: str, size: int) -> str:
    """List the learning rates tried, and say if the chosen one is the smallest or largest."""
    tried, rate = results.tried(norm, size), results.rate(norm, size)
    words = ", ".join(f"{tried_rate:g}" for tried_rate in tried)
    at_edge = len(tried) > 1 and rate in (tried[0], tried[-1])
    return words + (" (at the edge)" if at_edge else "")


def _cost(results: Results, norm: str, size: int) -> list[str]:
    rows = list(results.chosen(norm, size).values())
    seconds = [3600 * row["hours"] for row in rows if row["hours"] is not None]
    memory = [row["memory_mib"] for row in rows if row["memory_mib"] is not None]
    return [
        results.estimate(norm, size).plus_minus(),
        f"{median(seconds):.3g}" if seconds else "",
        f"{median(memory):.3g}" if memory else "",
    ]


def recipe(results: Results) -> str:
    """Say how the nets were trained."""
    words, held_out = results.words, results.recipe.validation
    tried = max((len(results.tried(norm, size)) for norm in results.norms for size in results.sizes), default=0)
    return (
        f"{results.samples:,} training {words.samples}, drawn anew for each seed, {results.epochs} epochs, reshuffled"
        f"{words.augmentation}; Adam with a one-cycle learning rate, whose peak is chosen for each norm and batch size "
        f"out of {tried} on {held_out:,} validation {words.samples}. The last epoch's weights are tested; population "
        "statistics are averages over that epoch, of BatchNorm as of BLN. Every norm has its library's epsilon. The "
        "test set is used with the chosen learning rate alone."
    )


# ---- the terminal


def rich_table(nets: Sequence[Results]) -> Group:
    """Return the results in short, for rich to print; conclusions come last."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Table | Text] = []
    for results in nets:
        accuracies = Table(title=f"Test accuracy, {results.title}", title_justify="left")
        for head in ("", *(f"batch {size}" for size in results.sizes)):
            accuracies.add_column(head)
        for norm in results.norms:
            estimates = [results.estimate(norm, size) for size in results.sizes]
            accuracies.add_row(name(norm), *(estimate.plus_minus() if estimate.n else "" for estimate in estimates))
        parts += [
            accuracies,
            Text("Mean over seeds ± 95 % interval; learning rates chosen on validation.", style="dim"),
        ]
        sentence, clauses = conclusion(results)
        parts += [Text(f"\n{sentence}", style="bold"), *(Text(f"- {clause}") for clause in clauses)]
    return Group(*(parts or [Text("No runs yet.")]))
