"""The report of accuracy against batch size, made from the table of runs alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import table as table_of_runs
from ..sizes import study
from ..sizes.tasks import TASKS, Task
from ..table import Row
from . import figures
from .markup import Html, badge, document, figure, join, table, tag
from .statistics import Estimate, mean_interval, number, paired_interval, seeds_in_words, seeds_to_decide
from .style import Plot, look
from .summary import Summary

if TYPE_CHECKING:
    from rich.console import Group

OURS = "bln-grouped"
"""The recommended form for images."""
FORMS = (OURS, "bln", "bln-pooled")
"""The forms of BLN. The claim is about the first that a task names; see :attr:`Results.ours`."""
RIVALS = ("bn", "gn", "ln", "rms", "batchrenorm")
MARGIN = 0.01
"""Norms are level where the whole interval of their difference in accuracy lies within this."""


class Words(NamedTuple):
    """What a task is called, the folder of its report, and what its samples, their positions and its recipe are."""

    title: str
    folder: str
    samples: str
    position: str
    varied: str


WORDS = {
    "resnet20": Words("ResNet-20 on CIFAR-10", "resnet", "images", "pixel", ", with random crops and mirror images"),
    "digits-resnet": Words(
        "a small residual net on handwritten digits", "digits", "images", "pixel", ", with random crops"
    ),
    "transformer": Words("a small transformer on IMDB", "transformer", "reviews", "token", ""),
}  # fmt: skip
NAMES = {"bln": "BLN as published"}
"""Called otherwise than in the report of the paper's experiments, which knows no other form."""


def name(norm: str) -> str:
    """What a norm is called here."""
    return NAMES.get(norm) or look(norm).name


def rules(ours: str) -> tuple[str, ...]:
    """How the claim about this form of BLN is judged."""
    return (
        f"At each batch size {name(ours)} is compared with the other norm that has the highest mean test accuracy "
        "there, by differences paired by seed, with the wider of the t interval and the paired bootstrap, 95 % each.",
        f"It is ahead where the interval lies above 0, behind where it lies below, level where it lies within "
        f"± {MARGIN:g}, and undecided otherwise. Then it is said how many seeds would decide, if mean and spread stay.",
        "The claim holds where it is ahead or level at every batch size, and does not where it is behind at any.",
    )


class Results:
    """The runs of one net, and what follows from them."""

    def __init__(self, task: str, samples: int, epochs: int, rows: Sequence[Row]) -> None:
        self.task, self.samples, self.epochs, self.rows = task, samples, epochs, rows

    @property
    def words(self) -> Words:
        """What this task's things are called."""
        return WORDS[self.task]

    @property
    def title(self) -> str:
        """What was trained on what."""
        return self.words.title

    @cached_property
    def ours(self) -> str:
        """The form of BLN that the claim is about: grouped for images; elsewhere the best on validation data."""
        forms = [norm for norm in FORMS if norm in self.norms]
        if self.words.position == "pixel" or len(forms) < 2:
            return forms[0] if forms else FORMS[0]
        return next(iter(self.by_validation(forms)), forms[0])

    def by_validation(self, norms: Sequence[str]) -> dict[str, float]:
        """Validation accuracy of these norms, mean over the batch sizes all were run at; the best first."""
        shared = [size for size in self.sizes if all(self.chosen(norm, size) for norm in norms)]
        means = {
            norm: sum(self.estimate(norm, size, "validation").mean for size in shared) / len(shared)
            for norm in norms
            if shared
        }
        return dict(sorted(means.items(), key=lambda item: -item[1]))

    @property
    def recipe(self) -> Task:
        """How it was trained."""
        return TASKS[self.task]

    @cached_property
    def _cells(self) -> dict[tuple[str, int], list[Row]]:
        found: dict[tuple[str, int], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row["norm"], row["batch_size"]), []).append(row)
        return found

    @cached_property
    def norms(self) -> list[str]:
        """Always in the same order."""
        return Summary.order(norm for norm, _ in self._cells)

    @cached_property
    def sizes(self) -> list[int]:
        """Batch sizes, the smallest first."""
        return sorted({size for _, size in self._cells})

    def tried(self, norm: str, size: int) -> list[float]:
        """The learning rates that were tried."""
        return sorted({row["learning_rate"] for row in self._cells.get((norm, size), ())})

    def rate(self, norm: str, size: int) -> float:
        """The learning rate that was chosen on validation data."""
        return study.best_rate(self._cells[norm, size])

    def chosen(self, norm: str, size: int) -> dict[int, Row]:
        """The runs with the chosen learning rate, by seed."""
        if (norm, size) not in self._cells:
            return {}
        rate = self.rate(norm, size)
        return {row["seed"]: row for row in self._cells[norm, size] if row["learning_rate"] == rate}

    def accuracies(self, norm: str, size: int, part: str = "test") -> dict[int, float]:
        """Accuracy by seed, on the test set or on validation data."""
        rows = self.chosen(norm, size)
        if part == "test":
            return {seed: row["test"]["accuracy"] for seed, row in rows.items() if row["test"]}
        return {seed: row["curves"]["validation_accuracy"][-1] for seed, row in rows.items()}

    def estimate(self, norm: str, size: int, part: str = "test") -> Estimate:
        """Mean accuracy with its interval over seeds."""
        return mean_interval(list(self.accuracies(norm, size, part).values()))

    def points(self, norms: Sequence[str]) -> dict[str, dict[int, Estimate]]:
        """What is drawn of these norms."""
        return {
            norm: {size: found for size in self.sizes if (found := self.estimate(norm, size)).n}
            for norm in norms
            if norm in self.norms
        }

    def differences(self, size: int, rival: str) -> list[float]:
        """Our form minus a rival in test accuracy, for each seed that both have."""
        own, other = self.accuracies(self.ours, size), self.accuracies(rival, size)
        return [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]


@dataclass(frozen=True)
class Standing:
    """How our form of BLN stands at one batch size.

    Attributes:
        size: The batch size.
        rival: The best other norm.
        difference: In test accuracy, paired by seed.
        verdict: ``ahead``, ``level``, ``behind`` or ``undecided``.
        seeds: How many would decide, where it is undecided; ``None`` beyond 1,000.
    """

    size: int
    rival: str
    difference: Estimate
    verdict: str
    seeds: int | None = None

    def text(self) -> str:
        """One clause."""
        by = f"{self.difference.times(100).text(signed=True, digits=1)} points"
        words = {"ahead": "ahead of", "level": "level with", "behind": "behind", "undecided": "undecided against"}
        more = f"; {self.needed()}" if self.verdict == "undecided" else ""
        return f"{words[self.verdict]} {name(self.rival)} at batch {self.size} ({by}{more})"

    def needed(self) -> str:
        """What would decide."""
        return seeds_in_words(self.seeds) if self.difference.n > 1 else "one seed has no spread"


def standings(results: Results) -> list[Standing]:
    """Compare our form of BLN with the best other norm, batch size by batch size."""
    found = []
    for size in results.sizes:
        others = {norm: results.estimate(norm, size) for norm in RIVALS}
        others = {norm: each for norm, each in others.items() if each.n}
        if not others or not results.accuracies(results.ours, size):
            continue
        rival = max(others, key=lambda norm: others[norm].mean)
        values = results.differences(size, rival)
        found.append(_stand(size, rival, values))
    return found


def _stand(size: int, rival: str, values: Sequence[float]) -> Standing:
    difference = paired_interval(values)
    _, low, high, n = difference
    if n < 2:
        return Standing(size, rival, difference, "undecided")
    if low > 0 or high < 0:
        return Standing(size, rival, difference, "ahead" if low > 0 else "behind")
    if low > -MARGIN and high < MARGIN:
        return Standing(size, rival, difference, "level")
    return Standing(size, rival, difference, "undecided", seeds_to_decide(values, MARGIN))


def verdict(found: Sequence[Standing]) -> str:
    """Whether our form is ahead of or level with the best other norm at every batch size."""
    kinds = {each.verdict for each in found}
    if "behind" in kinds:
        return "does not hold"
    return "holds" if kinds and kinds <= {"ahead", "level"} else "undecided"


def claim(results: Results) -> str:
    """What is judged, of the norms that were run."""
    names = [name(norm) for norm in RIVALS if norm in results.norms]
    best = f"the best of {_listed(names)}" if len(names) > 1 else names[0] if names else "every other norm"
    return f"{name(results.ours)} is ahead of or level with {best} at every batch size"


def conclusion(results: Results) -> tuple[str, list[str]]:
    """Return one sentence, what the runs say of the claim, and a clause for each batch size."""
    found = standings(results)
    if not found:
        return f"No run decides yet whether {claim(results)}.", []
    opening = {"holds": "Here ", "does not hold": "Not so here: ", "undecided": "These runs do not decide whether "}
    return f"{opening[verdict(found)]}{claim(results)}.", [each.text() for each in found]


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def groups(results: Results) -> dict[str, float]:
    """The validation accuracy of each number of groups, mean over the batch sizes all were run at; the best first."""
    names = [norm for norm in results.norms if norm.startswith("bln-g")]
    return results.by_validation(names) if len(names) > 1 else {}


def advice(results: Results) -> str:
    """Return one sentence: whether to use BLN in this net, by the sizes at which the runs decide."""
    net, found = results.title, standings(results)
    sizes = {kind: [str(each.size) for each in found if each.verdict == kind] for kind in ("ahead", "undecided")}
    if behind := [each for each in found if each.verdict == "behind"]:
        return f"Do not use BLN in {net}: it is {behind[0].text()}."
    if not sizes["ahead"]:
        return f"Do not use BLN in {net}: nothing here shows that it helps."
    if sizes["undecided"]:
        ahead, open_at = (" and ".join(sizes[kind]) for kind in ("ahead", "undecided"))
        return f"In {net} BLN is ahead at batch {ahead}; at batch {open_at} these runs do not decide."
    return f"BLN helps in {net}."


# ---- reading


def read(path: Path) -> list[Results]:
    """Return the results of a table, one for each net, number of samples and number of epochs."""
    try:
        kinds: dict[tuple[str, int, int], list[Row]] = {}
        for row in table_of_runs.read(path):
            if row["task"] in WORDS:
                study.key(row)
                kinds.setdefault((row["task"], row["samples"], row["epochs"]), []).append(row)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a table of runs: {error}; `bln reproduce` writes one") from None
    return [Results(*kind, own) for kind, own in kinds.items()]


# ---- the page


def write(found: Sequence[Results], folder: Path) -> Path:
    """Write ``report.html`` and its figures; returns the page's path."""
    place = folder / "figures"
    place.mkdir(parents=True, exist_ok=True)
    plots: list[Plot] = []
    body = join([part for results in found for part in _page(results, plots)])
    for plot in plots:
        plot.save(place)
    path = folder / "report.html"
    path.write_text(document("Accuracy against batch size", body), encoding="utf-8")
    return path


def _page(results: Results, plots: list[Plot]) -> Iterator[Html]:
    def show(plot: Plot) -> Html:
        plots.append(plot)
        return figure(plot)

    stands = standings(results)
    title = results.title[0].upper() + results.title[1:]
    yield tag("h1", f"Accuracy against batch size: {title}")
    yield tag("p", _origin(results), class_="meta")
    said, clauses = conclusion(results)
    yield tag("p", tag("b", said))
    yield tag("ul", *(tag("li", clause) for clause in clauses))
    yield tag("h2", "Accuracy")
    for plot in pictures(results):
        yield show(plot)
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
        words = _listed([f"{number(mean)} with {name(norm)}" for norm, mean in means.items()])
        yield tag("p", f"Numbers of groups by validation accuracy, mean over batch sizes: {words}.")
    yield tag("h2", "How it was run")
    yield tag("p", recipe(results))
    yield _cost_table(results)


def pictures(results: Results) -> list[Plot]:
    """The figures of these results."""
    prefix, seeds = results.task, "95 % t intervals over seeds."
    main = [norm for norm in results.norms if norm == OURS or not norm.startswith("bln-g")]
    caption = f"Test accuracy against batch size. {seeds} Learning rates were chosen on validation data."
    found = [figures.batch_sizes(f"{prefix}-accuracy", caption, results.points(main), NAMES)]
    if stands := [each for each in standings(results) if each.difference.n]:
        caption = (
            f"{name(results.ours)} minus the best other norm, which stands above, in points of test accuracy; 95 % "
            f"intervals of differences paired by seed. Dotted: ± {100 * MARGIN:g}, within which norms are level."
        )
        pairs = {each.size: (each.rival, each.difference) for each in stands}
        found.append(figures.margins(f"{prefix}-differences", caption, results.ours, pairs, MARGIN, name(results.ours)))
    grouped = [norm for norm in results.norms if norm.startswith("bln-g")]
    if len(grouped) > 1:
        caption = f"BLN grouped by its number of groups; the recommended form has eight. {seeds}"
        found.append(figures.batch_sizes(f"{prefix}-groups", caption, results.points(grouped), NAMES))
    return found


def _origin(results: Results) -> str:
    def every(values: Iterator[Any]) -> str:
        return ", ".join(sorted({str(value) for value in values if value}))

    rows = results.rows
    facts = [
        f"{len(rows)} runs",
        f"bln {every(row['versions']['bln'] for row in rows)}, torch {every(row['versions']['torch'] for row in rows)}",
        f"commit {every(row['commit'] and row['commit'][:10] for row in rows)}",
        every(row["device"] for row in rows),
    ]
    return " · ".join(facts)


def _explained(results: Results) -> Iterator[tuple[str, str]]:
    place = results.words.position
    texts = {
        "bn": (
            "BatchNorm",
            " normalizes each feature by its mean and deviation over the mini-batch. For inference it keeps averages, "
            "the population statistics. The fewer samples, the more the two differ.",
        ),
        "gn": (
            "GroupNorm",
            f" normalizes each sample by itself, over groups of features and all {place}s. It does not know about "
            "mini-batches.",
        ),
        "ln": ("LayerNorm", f" normalizes each sample by itself, over all features, {place} by {place}."),
        "rms": ("RMSNorm", f" divides each {place} by the root of the mean square of its features."),
        "batchrenorm": ("Batch Renormalization", " is BatchNorm corrected towards its averages while it trains."),
        "bln-grouped": (
            "BLN grouped",
            " computes what BatchNorm and GroupNorm compute, and mixes the two: with m samples in a mini-batch the "
            "first has the weight 1 \N{MINUS SIGN} 1/m, the second 1/m.",
        ),
        "bln": (
            "BLN as published",
            f" mixes in the same way, but keeps the batch's statistics apart for each {place}, and normalizes a sample "
            f"over its features at each {place}.",
        ),
        "bln-pooled": ("BLN pooled", f" is BLN as published with the batch's statistics pooled over {place}s."),
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
            each = results.estimate(norm, size)
            lost = sum(row["status"] == "diverged" for row in results.chosen(norm, size).values())
            cells.append((each.plus_minus() if each.n else "") + (f" ({lost} diverged)" if lost else ""))
        rows.append([name(norm), *cells])
    caption = "Test accuracy, mean over seeds ± 95 % t interval."
    return table(caption, ["", *(f"batch {size}" for size in results.sizes)], rows, "results")


def _cost_table(results: Results) -> Html:
    rows = [
        [
            name(norm),
            str(size),
            f"{results.rate(norm, size):g}",
            _edge(results, norm, size),
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


def _edge(results: Results, norm: str, size: int) -> str:
    tried, rate = results.tried(norm, size), results.rate(norm, size)
    words = ", ".join(f"{each:g}" for each in tried)
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
    """Return how the nets were trained, in words."""
    words, held_out = results.words, results.recipe.validation
    tried = max((len(results.tried(norm, size)) for norm in results.norms for size in results.sizes), default=0)
    return (
        f"{results.samples:,} training {words.samples}, drawn anew for each seed, {results.epochs} epochs, reshuffled"
        f"{words.varied}; Adam with a one-cycle learning rate, whose peak is chosen for each norm and batch size out "
        f"of {tried} on {held_out:,} validation {words.samples}. The last epoch's weights are tested; population "
        "statistics are averages over that epoch, of BatchNorm as of BLN. Every norm has its library's epsilon. The "
        "test set is used with the chosen learning rate alone."
    )


# ---- the terminal


def lines(found: Sequence[Results]) -> Group:
    """Results in short, for rich to print; what they say comes last."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Table | Text] = []
    for results in found:
        shown = Table(title=f"Test accuracy, {results.title}", title_justify="left")
        for head in ("", *(f"batch {size}" for size in results.sizes)):
            shown.add_column(head)
        for norm in results.norms:
            estimates = [results.estimate(norm, size) for size in results.sizes]
            shown.add_row(name(norm), *(each.plus_minus() if each.n else "" for each in estimates))
        parts += [shown, Text("Mean over seeds ± 95 % interval; learning rates chosen on validation.", style="dim")]
        said, clauses = conclusion(results)
        parts += [Text(f"\n{said}", style="bold"), *(Text(f"- {clause}") for clause in clauses)]
    return Group(*(parts or [Text("No runs yet.")]))
