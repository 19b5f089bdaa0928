"""What has been measured, put into pages when the site is built, so that a figure in the text cannot go stale.

A line ``<!-- measured: NAME -->`` in a page becomes what the function of that name makes of the results:
``results/summary.json`` with its figures, ``results/layer.csv``, ``results/shift/shift.jsonl`` and ``img/search.json``.
Each may come to hold more than it does today.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bln.experiments.report import shift, sizes
from bln.experiments.report.compare import TEST_ACCURACY, TRAIN_ACCURACY, Measure, difference, ended
from bln.experiments.report.figures import data
from bln.experiments.report.overview import TITLES, chosen
from bln.experiments.report.statistics import Estimate, mean_interval, number
from bln.experiments.report.style import look
from bln.experiments.report.summary import CONFIGURATIONS, NORMS, Run, Score, Setting, Summary, authors, read

PLACE = re.compile(r"^<!-- measured: (\w+) -->$", re.MULTILINE)
PAIRS = ("TT", "FT", "FF", "TF")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Fill the places of a page."""
    return fill(markdown, Path(config.docs_dir))


def fill(markdown: str, docs: Path) -> str:
    """The page with what is measured in it."""
    makers: dict[str, Callable[[Path], Iterable[str]]] = {
        "gallery": lambda docs: gallery(_summary(docs), docs / "results" / "figures"),
        "configurations": lambda docs: configurations(_summary(docs)),
        "variants": lambda docs: by_size(docs) or variants(_summary(docs), docs / "results" / "figures"),
        "arrivals": lambda docs: arrivals(_search(docs)),
        "calibration": lambda docs: calibration(_search(docs)),
        "kernels": lambda docs: kernels(_timings(docs)),
        "goals": lambda docs: goals(_timings(docs)),
        "shift_short": lambda docs: shift_short(_shift(docs)),
        "shift_table": lambda docs: shift_table(_shift(docs)),
        "shift_advice": lambda docs: shift_advice(_shift(docs)),
        "shift_severities": lambda docs: shift_severities(_shift(docs)),
        "shift_norms": lambda docs: shift_norms(_shift(docs)),
        "shift_sorted": lambda docs: shift_sorted(_shift(docs)),
        "shift_settings": lambda docs: shift_settings(_shift(docs)),
        "shift_chosen": lambda docs: shift_chosen(_shift(docs), _choices(docs)),
        "shift_signs": lambda docs: shift_signs(_choices(docs)),
    }
    return PLACE.sub(lambda place: "\n\n".join(makers[place[1]](docs)), markdown)


PEAK = 4.8e12  # bytes a second, of an H200's memory by its data sheet


class Timing(NamedTuple):
    """A line of what ``benchmarks/layer.py`` wrote."""

    row: Mapping[str, str]
    size: int  # of the tensor, in bytes
    slab: int  # of what is at one position
    last: bool  # the features
    dense: bool

    def __str__(self) -> str:
        shape, layout = self.row["shape"].replace(", -", ""), "" if self.last else "NCHW, "
        return f"({shape}), {layout}{self.row['type']}"

    def ratio(self, name: str) -> float:
        """A column; NaN where nothing was measured."""
        return float(self.row[name] or "nan")


def _timings(docs: Path) -> list[Timing]:
    found = []
    with (docs / "results" / "layer.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            sizes = [int(size) for size in re.findall(r"\d+", row["shape"])]
            each = 4 if row["type"] == "float32" else 2
            size, slab = math.prod(sizes) * each, sizes[0] * sizes[-1] * each
            found.append(Timing(row, size, slab, row["layout"] == "features last", len(sizes) == 2))
    return found


def kernels(timings: Sequence[Timing]) -> Iterator[str]:
    """Forward and backward on a GPU."""
    for direction, unit, tensors, more in (("forward", "copy us", 2, ["inference"]), ("backward", "add us", 3, [])):
        names = [f"{name} {direction}" for name in ("BLN", "pooled", "sweeps", "BN", "LN", "compiled")] + more
        if direction == "backward":
            names.append("host / BN")
        head = ["shape", "layout", "type", unit, *(name.removesuffix(f" {direction}") for name in names), "of peak"]
        lines = []
        for each in timings:
            seconds = each.ratio(unit) * each.ratio(f"BLN {direction}") * 1e-6
            share = f"{100 * tensors * each.size / seconds / PEAK:.0f} %"
            about = [each.row["shape"], each.row["layout"].removeprefix("features "), each.row["type"], each.row[unit]]
            shown = [each.row[name] if _large(each) or not name.startswith("sweeps") else "" for name in names]
            lines.append([*about, *shown, share])  # two sweeps of small inputs are two launches, and say nothing else
        yield f"### {direction.capitalize()}"
        yield _table(head, lines)


MIB, KIB = 2**20, 2**10


class Goal(NamedTuple):
    """At most such a ratio, or any, wherever a timing counts."""

    words: str
    column: str
    most: float
    counts: Callable[[Timing], bool]


def _large(t: Timing) -> bool:
    return t.size >= 8 * MIB


def _small_slabs(t: Timing) -> bool:
    return not t.dense and t.slab <= 64 * KIB and _large(t)


def _held(t: Timing) -> bool:
    return t.last and _small_slabs(t) and t.size >= 64 * MIB


def _middling(t: Timing) -> bool:
    return t.last and _small_slabs(t) and t.size < 64 * MIB


def _swept(t: Timing) -> bool:
    return _large(t) and not _small_slabs(t)


def _across(t: Timing) -> bool:
    return not t.last and _small_slabs(t)


GOALS = [
    Goal(f"{direction}, {words}", f"{column} {direction}", most, counts)
    for direction, limits in (
        ("forward", (1.25, math.inf, 1.75, 1.75, 1.5)), ("backward", (1.3, math.inf, 1.8, 1.8, 1.6)),
    )
    for most, (words, column, counts) in zip(
        limits,
        (
            ("features last, 64 MiB and more, slabs up to 64 KiB", "BLN", _held),
            ("features last, 8 to 64 MiB, slabs up to 64 KiB", "BLN", _middling),
            ("larger slabs, and dense", "BLN", _swept),
            ("pooled", "pooled", _large),
            ("`NCHW`, slabs up to 64 KiB", "BLN", _across),
        ),
        strict=True,
    )
] + [
    Goal("inference, features last", "inference", 1.2, lambda t: t.last and _large(t)),
    Goal("inference, `NCHW`", "inference", 1.2, lambda t: not t.last and _large(t)),
    Goal("host, small inputs", "host / BN", 2.0, lambda t: True),
]  # fmt: skip


def goals(timings: Sequence[Timing]) -> Iterator[str]:
    """Which figures have been reached, and which have not; then where something else is faster."""
    lines = []
    for goal in GOALS:
        met = [each for each in timings if each.row[goal.column] and goal.counts(each)]
        if not met:  # the table may be that of a run that was cut off
            continue
        ratios, said = [each.ratio(goal.column) for each in met], ["none", ""]
        if goal.most < math.inf:
            said = [f"{goal.most:g}", f"{sum(ratio <= goal.most for ratio in ratios)} of {len(met)}"]
        direction = goal.column.split()[-1]
        least = [each.ratio(f"sweeps {direction}") for each in met] if direction in ("forward", "backward") else []
        largest = max(met, key=lambda each: each.ratio(goal.column))
        lines.append([goal.words, *said, _range(ratios), _range(least), str(largest)])
    yield _table(["", "goal, at most", "reached", "measured", "two sweeps", "the largest"], lines)
    for name, words, ours, called in (
        ("BN", "BatchNorm", "BLN", "BLN"), ("BN", "BatchNorm", "pooled", "pooled BLN"),
        ("LN", "LayerNorm", "BLN", "BLN"), ("LN", "LayerNorm", "pooled", "pooled BLN"),
        ("compiled", "The compiled formula", "BLN", "BLN"),
    ):  # fmt: skip
        compared = [
            (each.ratio(f"{name} {direction}"), each.ratio(f"{ours} {direction}"), f"{direction} on {each}")
            for direction in ("forward", "backward")
            for each in timings
            if each.row[f"{name} {direction}"] and each.row[f"{ours} {direction}"]
        ]
        if not compared:
            continue
        faster = [f"{where}, {theirs:g} and {taken:g}" for theirs, taken, where in compared if theirs <= taken]
        which = f": {'; '.join(faster)}." if faster else "."
        yield f"{words} is as fast as {called} or faster in {len(faster)} of {len(compared)} cases{which}"


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):g} to {max(ratios):g}" if ratios else ""


def _summary(docs: Path) -> Summary:
    return read(json.loads((docs / "results" / "summary.json").read_text("utf-8")))


def _search(docs: Path) -> dict[str, Mapping[str, Any]]:
    rows = json.loads((docs / "img" / "search.json").read_text("utf-8"))["rows"]
    return {row["config"]: row for row in rows}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _words(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _where(setting: Setting, task: bool = True) -> str:
    parts = [TITLES[setting.task]] if task else []
    parts += [data(setting.fraction), f"batch {setting.batch_size}"]
    return ", ".join(parts) + ("" if setting.protocol == "paper" else f", protocol {setting.protocol}")


# ---- the gallery


class Picture(NamedTuple):
    """A figure of the report: the name of its file, a title, what one sees, and the command that makes it."""

    name: str
    title: str
    seen: str
    command: str


def gallery(summary: Summary, figures: Path) -> Iterator[str]:
    """Every figure of the report that is there."""
    known = {picture.name: picture for picture in pictures(summary)}
    present = {path.stem for path in figures.glob("*.png")} - {"layer"}  # which is not the report's
    for name in [*(name for name in known if name in present), *sorted(present - known.keys())]:
        _, title, seen, command = known.get(name, Picture(name, name, "", "bln report docs/results"))
        yield f"## {title}"
        yield f"![{title}](results/figures/{name}.png)"
        yield f"{seen} Made by [`{command}`](reproduction.md).".strip()


def pictures(summary: Summary) -> Iterator[Picture]:
    """What the report draws of these runs."""
    yield Picture(
        "figure-2",
        "The mixing weights",
        "The smaller the mini-batch, the more the output leans on features: a single sample leans on them alone, and "
        "two samples on both alike. At 25 samples the batch has 0.96 of the weight.",
        "bln report docs/results",
    )
    for task, number_of in (("cnn", 4), ("rnn", 6)):
        for protocol in summary.protocols(task):
            settings = summary.settings(task, protocol)
            for setting in settings:
                name = f"figure-{number_of}-{task}-{protocol}-{_share(setting)}pct-batch-{setting.batch_size}"
                yield Picture(name, _where(setting), _curves(summary, [setting]), _command(summary, [setting]))
            command, title = _command(summary, settings), f"{TITLES[task]}, protocol {protocol}"
            yield Picture(
                f"differences-{task}-{protocol}",
                f"{title}: BLN minus its rivals",
                _differences(summary, settings),
                command,
            )
            yield Picture(
                f"configurations-{task}-{protocol}",
                f"{title}: the 16 configurations",
                _leaders(summary, settings),
                command,
            )
    for task in ("resnet", "digits-cnn", "digits-rnn"):
        for protocol in summary.protocols(task):
            for share in sorted({_share(setting) for setting in summary.settings(task, protocol)}):
                settings = [setting for setting in summary.settings(task, protocol) if _share(setting) == share]
                title = f"{TITLES[task]}, {data(settings[0].fraction)}, protocol {protocol}"
                seen = _sizes(summary, settings) if task == "resnet" else _curves(summary, settings)
                yield Picture(f"{task}-{protocol}-{share}pct", title, seen, _command(summary, settings))


def _share(setting: Setting) -> str:
    return f"{100 * setting.fraction:g}".replace(".", "_")


def _command(summary: Summary, settings: Sequence[Setting]) -> str:
    task, protocol = settings[0].task, settings[0].protocol
    if task.startswith("digits"):
        return "bln demo"
    sizes = " ".join(map(str, sorted({setting.batch_size for setting in settings})))
    fractions = " ".join(f"{fraction:g}" for fraction in sorted({setting.fraction for setting in settings}))
    seeds = 1 + max(run.seed for run in summary.runs if run.setting in settings)
    return f"bln reproduce {task} --batch-size {sizes} --fraction {fractions} --seeds {seeds}" + (
        "" if protocol == "paper" else f" --protocol {protocol}"
    )


def _estimates(summary: Summary, setting: Setting, measure: Measure) -> dict[str, Estimate]:
    """The mean of each norm that has one, the highest first."""
    found = {
        norm: mean_interval([measure.of(run) for run in summary.select(setting, norm)])
        for norm in summary.norms(setting)
    }
    return dict(sorted(((n, e) for n, e in found.items() if e.n), key=lambda item: -item[1].mean))


def _ranking(estimates: Mapping[str, Estimate]) -> str:
    return _words([f"{look(norm).name} {number(estimate.mean)}" for norm, estimate in estimates.items()])


def _curves(summary: Summary, settings: Sequence[Setting]) -> str:
    ends = (
        ("Training ends at an accuracy of", TRAIN_ACCURACY),
        ("The hollow markers are the test set, with the weights of the epoch that validated best:", TEST_ACCURACY),
    )
    sentences = []
    for what, measure in ends:
        found = {setting.batch_size: _estimates(summary, setting, measure) for setting in settings}
        parts = [_ranking(each) + f" at batch {size}" * (len(settings) > 1) for size, each in found.items() if each]
        sentences.append(f"{what} {'; '.join(parts)}." if parts else "No run has finished yet.")
    return " ".join(dict.fromkeys(sentences))


def _differences(summary: Summary, settings: Sequence[Setting]) -> str:
    rivals = [(setting, rival) for setting in settings for rival in ("bn", "ln")]
    found = [difference(summary, setting, "bln", rival, TEST_ACCURACY).estimate for setting, rival in rivals]
    found = [estimate for estimate in found if estimate.n]
    ahead, clear = sum(estimate.mean > 0 for estimate in found), sum(estimate.low > 0 for estimate in found)
    return (
        "A point on the side of *BLN better* is a rival that BLN beats with the same seeds; hollow ones have one seed. "
        f"In test accuracy BLN is ahead in {ahead} of {len(found)} comparisons, in {clear} with its whole interval."
    )


def _leaders(summary: Summary, settings: Sequence[Setting]) -> str:
    parts = []
    for setting in settings:
        ours, theirs = _searched(summary, setting), _searched(authors(), setting._replace(protocol="paper"))
        if ours and theirs:
            parts.append(f"with `{_leading(ours)}` for {_where(setting, task=False)} (authors: `{_leading(theirs)}`)")
    where = _words(parts) if parts else "nowhere yet"
    return (
        "Each point is a configuration, our test loss over the authors'; colours are the batch statistics it uses, "
        f"markers the feature statistics. Our loss is lowest {where}."
    )


def _sizes(summary: Summary, settings: Sequence[Setting]) -> str:
    best = []
    for setting in settings:
        found = _estimates(summary, setting, TEST_ACCURACY)
        if found:
            norm = next(iter(found))
            best.append(f"{look(norm).name} at batch {setting.batch_size} ({number(found[norm].mean)})")
    best = best or ["not known yet"]
    return f"Each line says how the test accuracy of a norm depends on the batch size. The best are {_words(best)}."


# ---- which configuration


def _searched(summary: Summary, setting: Setting) -> list[Run]:
    """The finished BLN runs whose 16 configurations were compared, on one part of the data at least."""
    runs = [run for run in ended(summary, setting, "bln") if run.status == "finished"]
    return [run for run in runs if _scores(run)]


def _scores(run: Run) -> dict[str, Score]:
    """The 16 on the test set, where the protocol looks at it, and else on validation data."""
    return run.test_configurations or run.validation_configurations


def _mean(runs: Sequence[Run], config: str, what: str = "accuracy") -> float:
    return sum(getattr(_scores(run)[config], what) for run in runs) / len(runs)


def _leading(runs: Sequence[Run]) -> str:
    losses = {config: _mean(runs, config, "loss") for config in CONFIGURATIONS}
    return min((config for config in losses if not math.isnan(losses[config])), key=losses.__getitem__, default="none")


def configurations(summary: Summary) -> Iterator[str]:
    """The configurations on batches composed as in training, setting by setting."""
    found = {
        setting: runs
        for task in ("cnn", "rnn", "resnet")
        for setting in summary.settings(task)
        if (runs := _searched(summary, setting))
    }
    rows = [
        [
            setting.task.replace("cnn", "CNN").replace("rnn", "RNN"), f"{100 * setting.fraction:g} %",
            str(setting.batch_size), setting.protocol, str(len(runs)),
            ", ".join(f"`{part[:4]}`{part[4:]}" for part in chosen(runs).split(", ")),
            *(number(_mean(runs, f"{pair}FF")) for pair in PAIRS),
            number(_spread(runs, slice(2, 4))), number(_spread(runs, slice(2))),
        ]
        for setting, runs in found.items()
    ]  # fmt: skip
    head = ["net", "data", "batch", "protocol", "seeds", "chosen", *(f"`{pair}FF`" for pair in PAIRS)]
    yield _table([*head, "first two", "last two"], rows)
    yield (
        "How often a configuration was chosen on validation data; accuracies on the test set (under the protocol "
        "`clean` on validation data), means over seeds; how far they move when the first two letters change, or "
        "the last two. Population statistics are averages over an epoch, not calibrated."
    )
    gains = sorted(
        (_scores(run)[str(run.chosen)].accuracy - _scores(run)["TTFF"].accuracy, _where(setting))
        for setting, runs in found.items()
        for run in runs
    )
    if gains:
        (least, _), (most, where) = gains[0], gains[-1]
        yield (
            f"The configuration chosen on validation is more accurate than `TTFF` in {sum(g > 0 for g, _ in gains)} of "
            f"{len(gains)} runs. What it gains lies between {number(least, signed=True)} and "
            f"{number(most, signed=True)} ({where})."
        )


def _spread(runs: Sequence[Run], kept: slice) -> float:
    """How far apart mean accuracies are where these letters stay and the others change, at most."""
    groups: dict[str, list[float]] = {}
    for config in CONFIGURATIONS:
        if not math.isnan(accuracy := _mean(runs, config)):
            groups.setdefault(config[kept], []).append(accuracy)
    return max((max(group) - min(group) for group in groups.values()), default=math.nan)


# ---- how requests arrive


ARRIVALS = {
    "": "in batches as in training",
    "shuffled_": "reshuffled",
    "sorted_": "sorted by label",
    "single_": "one at a time",
}


def arrivals(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The accuracy of the same samples when they come otherwise."""
    yield _table(
        ["configuration", *ARRIVALS.values()],
        [[f"`{pair}FF`", *(number(rows[f"{pair}FF"][f"{how}accuracy"]) for how in ARRIVALS)] for pair in PAIRS],
    )
    moved = {
        pair: max(
            abs(rows[f"{pair}{last}"][f"{how}accuracy"] - rows[f"{pair}{last}"]["accuracy"])
            for last in ("FF", "FT", "TF", "TT")
            for how in ARRIVALS
        )
        for pair in PAIRS
    }
    yield (
        "Over all 16 configurations, the accuracy moves by at most "
        + _words([f"{number(distance)} under `{pair}xx`" for pair, distance in moved.items()])
        + "."
    )


def calibration(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What recomputing the population statistics changes."""
    shown = {f"{pair}FF": rows[f"{pair}FF"] for pair in PAIRS}
    yield _table(
        ["configuration", "loss as trained", "loss after `bln.calibrate`", "change"],
        [
            [f"`{name}`", number(row["uncalibrated_loss"]), number(row["loss"]), _change(row)]
            for name, row in shown.items()
        ],
    )


def _change(row: Mapping[str, Any]) -> str:
    return number(row["loss"] - row["uncalibrated_loss"], signed=True)


# ---- which variant


def by_size(docs: Path) -> list[str]:
    """ResNet-20: accuracy by norm and batch size, the claim and its verdict; nothing where it has not been run."""
    parts = []
    for results in sizes.read(docs / "results" / "resnet" / "runs.jsonl"):
        parts += sizes.sentences(results)
        rows = [
            [f"{sizes.name(norm)} (`{norm}`)", *(results.estimate(norm, size).plus_minus() for size in results.sizes)]
            for norm in results.norms
        ]
        parts.append(_table(["test accuracy", *(f"batch {size}" for size in results.sizes)], rows))
        rates = [
            [
                f"`{norm}`",
                *(f"{results.rate(norm, size):g}" if results.chosen(norm, size) else "" for size in results.sizes),
            ]
            for norm in results.norms
        ]
        parts += ["Learning rates, chosen on validation data:"]
        parts.append(_table(["", *(f"batch {size}" for size in results.sizes)], rates))
        if means := sizes.groups(results):
            best, accuracy = next(iter(means.items()))
            parts.append(
                f"Of the numbers of groups, `{best}` has the highest validation accuracy, mean over batch sizes: "
                f"{number(accuracy)}; `{sizes.OURS}`, the recommended one, has {number(means[sizes.OURS])}."
            )
        for plot in ("accuracy", "differences", "groups"):
            path = f"results/resnet/figures/{results.task}-{plot}.png"
            if (docs / path).exists():
                parts.append(f"![Test accuracy against batch size: {plot}]({path})")
    return parts


def variants(summary: Summary, figures: Path) -> Iterator[str]:
    """The residual net: accuracy by norm and batch size."""
    if not summary.settings("resnet"):
        yield "The comparison over batch sizes has not been run here yet: `bln reproduce resnet` makes it."
    for protocol in summary.protocols("resnet"):
        for fraction in sorted({setting.fraction for setting in summary.settings("resnet", protocol)}):
            settings = [setting for setting in summary.settings("resnet", protocol) if setting.fraction == fraction]
            yield from _variant_table(summary, settings)
            name = f"resnet-{protocol}-{_share(settings[0])}pct"
            if (figures / f"{name}.png").exists():
                yield f"![Test accuracy against batch size](results/figures/{name}.png)"


def _variant_table(summary: Summary, settings: Sequence[Setting]) -> Iterator[str]:
    found = {setting: _estimates(summary, setting, TEST_ACCURACY) for setting in settings}
    present = {norm for setting in settings for norm in summary.norms(setting)}
    norms = sorted(present, key=lambda norm: NORMS.index(norm) if norm in NORMS else len(NORMS))

    def cell(setting: Setting, norm: str) -> str:
        estimates = found[setting]
        if norm not in estimates:
            return "diverged" if any(run.status == "diverged" for run in summary.select(setting, norm)) else ""
        text = estimates[norm].plus_minus()
        return f"**{text}**" if norm == next(iter(estimates)) else text

    yield _table(
        ["test accuracy", *(f"batch {setting.batch_size}" for setting in settings)],
        [[f"{look(norm).name} (`{norm}`)", *(cell(setting, norm) for setting in settings)] for norm in norms],
    )
    seeds = (
        max(estimate.n for estimates in found.values() for estimate in estimates.values()) if any(found.values()) else 0
    )
    yield (
        f"{TITLES['resnet']}, {data(settings[0].fraction)}, protocol {settings[0].protocol}, up to {seeds} "
        f"seed{'s' if seeds != 1 else ''}; ± is the 95 % interval over seeds, bold the highest mean."
    )
    ours = [own[0] for each in found.values() if (own := _own(each))]
    if ours:
        votes = [f"`{norm}` at {count} of {len(ours)} batch sizes" for norm, count in Counter(ours).most_common()]
        yield f"Of the variants of BLN the best is {_words(votes)}."
    told = [words for setting, each in found.items() if (words := _rivalry(setting.batch_size, each))]
    if told:
        yield f"The best of them against the best other norm: {'; '.join(told)}."


def _own(estimates: Mapping[str, Estimate]) -> list[str]:
    return [norm for norm in estimates if norm.startswith("bln")]


def _rivalry(batch_size: int, estimates: Mapping[str, Estimate]) -> str:
    own, others = _own(estimates), [norm for norm in estimates if not norm.startswith("bln")]
    if not (own and others):
        return ""
    gap = number(estimates[own[0]].mean - estimates[others[0]].mean, signed=True)
    return f"{gap} at batch {batch_size} ({look(own[0]).name} and {look(others[0]).name})"


# ---- when the data changes


NET = "bn"
"""The net that the text speaks of: the one that most readers have."""


def _shift(docs: Path) -> shift.Results:
    return shift.read(docs / "results" / "shift" / "shift.jsonl")


def _choices(docs: Path) -> list[Mapping[str, Any]]:
    return shift.read_choices(docs / "results" / "shift" / "choice.jsonl")


def shift_chosen(found: shift.Results, choices: list[Mapping[str, Any]]) -> Iterator[str]:
    """What `bln.adapt` chooses without labels."""
    yield shift.markdown(*shift.when_chosen(found, choices, NET))
    priors = Counter(line["prior"] for line in choices if line.get("arrangement") == "sorted")
    shuffled = Counter(line["prior"] for line in choices if line.get("arrangement") == "shuffled")
    yield (
        f"Accuracy of the BatchNorm net, mean over {len(found.seeds)} seeds ± half its 95 % interval. Where requests "
        f"come sorted, `T` is chosen in {priors['T']} of {priors.total()} cases; where they come shuffled, in "
        f"{shuffled['T']} of {shuffled.total()}."
    )


def shift_signs(choices: list[Mapping[str, Any]]) -> Iterator[str]:
    """How well a request's own statistics tell a shift of labels from a shift of inputs."""
    yield shift.markdown(*shift.told_apart(choices))


def shift_short(found: shift.Results) -> Iterator[str]:
    """What population statistics lose, and what a prior wins back."""
    clean, lost, some, many = (
        number(found.accuracy(NET, name, size, where).mean)
        for name, size, where in (
            ("T", 1, shift.CLEAN), ("T", 1, shift.SHIFTED), ("16", 16, shift.SHIFTED), ("16", 250, shift.SHIFTED),
        )
    )  # fmt: skip
    yield (
        f"A small residual net with BatchNorm is right about {clean} of clean CIFAR-10 test images, and about {lost} "
        f"of the same images under {len(shift.corruptions(found))} common corruptions. With `prior=16` it is right "
        f"about {some} of them in requests of 16 images and {many} in requests of 250. No weight has changed."
    )


def shift_table(found: shift.Results) -> Iterator[str]:
    """Accuracy by request size and configuration, for each net that can fit its statistics."""
    for norm in shift.shown(found):
        yield f"### The {shift.BLN[norm]}"
        yield shift.markdown(*shift.by_request(found, norm))
    severities = _words([str(severity) for severity in found.header["questions"]["severities"]])
    yield (
        f"Accuracy, mean over {len(found.seeds)} seeds ± half its 95 % interval. Corrupted: mean of "
        f"{len(shift.corruptions(found))} corruptions at severities {severities}. Bold is the highest of a row. `T` "
        "does not depend on the request."
    )


def shift_advice(found: shift.Results) -> Iterator[str]:
    """What is chosen for each request size on validation corruptions, and what it gains on the others."""
    names = ("64", "16", "4")
    rows = []
    for size in found.sizes:
        gains = [found.gain(NET, name, size, where) for name in names for where in (shift.SHIFTED, shift.CLEAN)]
        rows.append(
            [
                str(size),
                shift.NAMES[found.chosen(NET, size)],
                *(gain.text(signed=True).replace("0.", ".") for gain in gains),
            ]
        )
    head = ["request", "chosen"] + [f"k = {name}, {what}" for name in names for what in ("corrupted", "clean")]
    yield shift.markdown(head, rows)
    yield (
        "How much more accurate the BatchNorm net is than with population statistics, with the 95 % interval of the "
        "difference. *Chosen* is what is most accurate on four other corruptions of images held out of training."
    )


def shift_severities(found: shift.Results) -> Iterator[str]:
    """How much the best prior depends on how far the data has moved."""
    yield shift.markdown(*shift.by_severity(found, NET))
    yield "Accuracy of the BatchNorm net on corrupted images by request size and severity."


def shift_norms(found: shift.Results) -> Iterator[str]:
    """Nets that can fit their statistics beside nets that cannot."""
    yield shift.markdown(*shift.by_norm(found))
    parts = []
    for norm in found.norms:
        name = "T" if norm in shift.BLN else "net"
        clean, lost = (found.accuracy(norm, name, 1, where).mean for where in (shift.CLEAN, shift.SHIFTED))
        parts.append(f"{number(clean - lost)} with {look(norm).name}")
    yield f"Corruptions cost a net that is left alone {_words(parts)}."


def shift_sorted(found: shift.Results) -> Iterator[str]:
    """What happens to requests that hold few classes."""
    yield shift.markdown(*shift.when_sorted(found, NET))
    where = shift.Where("test", "sorted", False)
    parts = [
        f"from {number(found.accuracy(NET, name, 16, shift.CLEAN).mean)} to "
        f"{number(found.accuracy(NET, name, 16, where).mean)} with {shift.NAMES[name]}"
        for name in found.configurations
        if name != "T"
    ]
    yield f"Sorting clean images, in requests of 16, moves the accuracy {_words(parts)}. `T` cannot notice."
    images = found.header["questions"]["images"]
    several = [f"{math.ceil(10 * size / images)} in one of {size}" for size in found.sizes if 10 * size > images]
    if several:
        yield f"With {images:,} images of ten classes a sorted request holds about {_words(several)}, else one or two."


def shift_settings(found: shift.Results) -> Iterator[str]:
    """What was run."""
    recipe, asked = found.header["recipe"], found.header["questions"]
    nets = _words([look(norm).name for norm in found.norms])
    severities = " ".join(map(str, asked["severities"]))
    command = "bln reproduce shift" + ("" if len(asked["severities"]) == 5 else f" --severities {severities}")
    yield (
        f"Made by `{command}`: {nets} in the small residual net, {len(found.seeds)} seeds each, {recipe['images']:,} "
        f"training images, {recipe['epochs']} epochs, batch {recipe['batch_size']}, reshuffled, flips and crops, Adam "
        f"with a one-cycle learning rate up to {recipe['learning_rate']:g}. Each seed draws its own training images "
        f"and {asked['images']:,} test images of its own. It took {found.header['hours']:.1f} hours of CPU cores that "
        f"others used too, at commit `{str(found.header['commit'])[:10]}`. [All answers](results/shift/shift.jsonl), a "
        "line for each net and condition."
    )
