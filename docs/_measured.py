"""Write measured tables into the pages, from the committed results: ``python docs/_measured.py``, or ``make tables``.

A page has a table between ``<!-- table: NAME -->`` and ``<!-- end -->``. A test compares the pages with the results.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bln.experiments import table as runs_table
from bln.experiments.report import page, shift, sizes
from bln.experiments.report.claims import CLAIMS, PROTOCOLS, Part, Verdict, judge, outcome, overall
from bln.experiments.report.compare import TEST_ACCURACY, TRAIN_ACCURACY, ended
from bln.experiments.report.overview import chosen, kind
from bln.experiments.report.statistics import mean_interval, number, paired_interval
from bln.experiments.report.style import look
from bln.experiments.report.summary import CONFIGURATIONS, Run, Score, Summary, authors, collect, read

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAIRS = ("TT", "FT", "FF", "TF")
NET = "bn"
"""The net of the shift study that its tables are about: the one that most readers have."""


def fill(text: str, results: Path = RESULTS) -> str:
    """Return the page with its tables made anew."""
    return PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place[2]](results)}\n\n{place[3]}", text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def recorded(name: str, results: Path) -> str:
    """Return what a benchmark wrote, as it is."""
    with (results / "benchmarks" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return table(head, rows)


# ---- accuracy against batch size


def _sizes(task: str, results: Path) -> list[sizes.Results]:
    return [each for each in sizes.read(results / runs_table.NAME) if each.task == task]


def _digits(results: Path) -> sizes.Results:
    (found,) = _sizes("digits-resnet", results)
    return found


def box(results: Path) -> str:
    """Return the three lines of the first screen."""
    found = _digits(results)
    return table(["", ""], [["**Gain**", _gain(found)], ["**Cost**", _cost(results)], ["**Not for**", _not_for(found)]])


def _gain(found: sizes.Results) -> str:
    """Return how far BLN and others are behind the best of them, each at its worst batch size."""
    norms = [norm for norm in (sizes.OURS, "bn", "gn") if norm in found.norms]
    means = {norm: [100 * found.estimate(norm, size).mean for size in found.sizes] for norm in norms}
    best = [max(column) for column in zip(*means.values(), strict=True)]
    behind = {norm: max(top - mean for top, mean in zip(best, means[norm], strict=True)) for norm in norms}
    ours, *others = (number(points, digits=1) for points in behind.values())
    rivals = ", ".join(f"{sizes.name(norm)} {points}" for norm, points in zip(norms[1:], others, strict=True))
    stands = sizes.standings(found)
    claim = "**No batch size to avoid.** " if all(each.verdict in ("ahead", "level") for each in stands) else ""
    return (
        f"{claim}At batch {_listed(found.sizes)} BLN is at most **{ours}** points of accuracy behind the best norm; "
        f"{rivals}. {_stands(stands)}"
    )


def _stands(stands: Sequence[sizes.Standing]) -> str:
    """Return one sentence: how BLN stands against the best other norm at each batch size."""
    words = {"ahead": "ahead", "level": "level", "behind": "behind", "undecided": "too close to call"}
    at = {kind: [each.size for each in stands if each.verdict == kind] for kind in words}
    parts = [
        f"{words[kind]} at {'every batch size' if len(own) == len(stands) else f'batch {_listed(own)}'}"
        for kind, own in at.items()
        if own
    ]
    return f"Against the best other norm it is {_listed(parts)}."


def _cost(results: Path) -> str:
    """Return the time of an eager training step over that with BatchNorm."""
    steps = [step for at, step in gpu_steps(results).items() if at[1:] == (*MAIN, "eager")]

    def takes(norm: str) -> str:
        ratios = [float(step[norm]["ratio"]) for step in steps if norm in step]
        return f"**{_range(ratios)}**" if ratios else ""

    on_gpu = "an unknown time on a GPU: it is not measured yet"
    if grouped := takes("bln grouped"):
        on_gpu = f"{grouped} times BatchNorm's in ResNet-50 on a GPU"
    if fused := takes("bln fused"):
        on_gpu += f", {fused} times with ReLU and shortcut in the layer"
    cpu = _range(_ratios(results / "benchmarks" / "resnet18_cpu.csv", "BLN grouped"))
    return (
        f"A training step takes {on_gpu}. On a CPU it takes {cpu} times BatchNorm's in ResNet-18. "
        "With population statistics alone (`TTTT`), `bln.freeze` folds it away for inference."
    )


def _not_for(found: sizes.Results) -> str:
    size = found.sizes[-1]
    gain = "little" if paired_interval(found.differences(size, "bn")).low > 0 else "no"
    return f"Large batches of one size: {gain} gain over BatchNorm is shown at batch {size}. Causal sequences."


def _listed(words: Sequence[object]) -> str:
    *firsts, last = map(str, words) if words else [""]
    return f"{', '.join(firsts)} and {last}" if firsts else last


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


def by_size(found: sizes.Results) -> str:
    """Return the accuracy by norm and batch size; bold is the highest mean of a column."""
    columns = {size: {norm: found.estimate(norm, size) for norm in found.norms} for size in found.sizes}
    rows = []
    for norm in found.norms:
        cells = []
        for each in columns.values():
            best = max(each.values(), key=lambda one: one.mean if one.n else -math.inf)
            text = each[norm].plus_minus() if each[norm].n else ""
            cells.append(f"**{text}**" if each[norm] is best and text else text)
        rows.append([sizes.name(norm), *cells])
    return table(["test accuracy", *(f"batch {size}" for size in found.sizes)], rows)


def standings(found: sizes.Results) -> str:
    """Return how BLN stands against the best other norm at each batch size."""
    rows = [
        [
            str(each.size),
            sizes.name(each.rival),
            each.difference.times(100).text(signed=True, digits=1),
            str(each.difference.n),
            each.verdict + (f"; {each.needed()}" if each.verdict == "undecided" else ""),
        ]
        for each in sizes.standings(found)
    ]
    return table(["batch", "best other norm", "difference, points", "seeds", f"{sizes.name(found.ours)} is"], rows)


def resnet(results: Path) -> str:
    """Return the residual net: ResNet-20 where it has been run, else the small net of the paper's protocol."""
    if known := _sizes("resnet20", results):
        return "\n\n".join(part for found in known for part in (by_size(found), standings(found)))
    summary = _summary(results)
    settings = summary.settings("resnet")
    norms = summary.order(norm for setting in settings for norm in summary.norms(setting))

    def cell(setting: Any, norm: str) -> str:
        found = mean_interval([TEST_ACCURACY.of(run) for run in summary.select(setting, norm)])
        return found.plus_minus() if found.n else ""

    rows = [[sizes.name(norm), *(cell(setting, norm) for setting in settings)] for norm in norms]
    return table(["test accuracy", *(f"batch {setting.batch_size}" for setting in settings)], rows)


def transformer_verdict(results: Path) -> str:
    """Return whether BLN helps in a transformer, and how this was run."""
    parts = []
    for found in _sizes("transformer", results):
        parts += [f"**{sizes.advice(found)}**", sizes.recipe(found)]
        every = [(norm, size) for norm in found.recipe.norms for size in found.recipe.batch_sizes]
        known = [each for each in every if found.chosen(*each)]
        if len(known) < len(every):
            parts.append(
                f"This is from {len(known)} of {len(every)} norms and batch sizes. The others have not been run here "
                "yet; the command above makes them."
            )
    return "\n\n".join(parts) or "It has not been run here yet."


# ---- the paper's experiments


def grid(results: Path) -> str:
    """Return what each norm reached in each setting of the paper's experiments, ours beside the authors'."""
    summary, rows = _summary(results), []
    for task in ("cnn", "rnn"):
        for setting in summary.settings(task):
            for norm in summary.norms(setting):
                runs = summary.select(setting, norm)
                known = next(iter(authors().select(setting, norm)), None)
                train, test = (
                    mean_interval([measure.of(run) for run in runs]).plus_minus()
                    for measure in (TRAIN_ACCURACY, TEST_ACCURACY)
                )
                loss = mean_interval([run.train_loss[-1] for run in runs]).plus_minus()
                net = f"{kind(task)}, {100 * setting.fraction:g} %, batch {setting.batch_size}, `{setting.protocol}`"
                printed = (
                    number(known.train_accuracy[-1]) if known and known.train_accuracy else "",
                    number(known.test.accuracy) if known and known.test else "",
                )
                rows.append([net, look(norm).name, str(len(runs)), loss, train, printed[0], test, printed[1]])
    head = ["setting", "norm", "seeds", "train loss", "train accuracy", "authors'", "test accuracy", "authors'"]
    return table(head, rows)


def undecided(results: Path) -> str:
    """Return the parts of the claims that are open under the paper's protocol, their effects and what would decide."""
    parts = [part for part in judge(_summary(results)) if part.verdict is Verdict.UNDECIDED]
    rows = [[f"{part.claim}. {part.row}", part.column, part.figure, part.note] for part in parts]
    return table(["part", "figure", "effect", "what would decide"], rows)


def _summary(results: Path) -> Summary:
    return read(collect(runs_table.read(results / runs_table.NAME)))


def claims(results: Path) -> str:
    """Return a line for each protocol: how many parts of the paper's claims came out, and how."""
    summary = _summary(results)
    return "\n".join(
        f"- **{PROTOCOLS[protocol]}** (`{protocol}`): {outcome(judge(summary, protocol))}"
        for protocol in summary.protocols("cnn", "rnn")
    )


def verdicts(results: Path) -> str:
    """Return the verdict on each of the paper's claims under each protocol, with those on its parts."""
    summary = _summary(results)
    protocols = summary.protocols("cnn", "rnn")
    parts = {protocol: judge(summary, protocol) for protocol in protocols}

    def cell(own: Sequence[Part]) -> str:
        counts = Counter(part.verdict for part in own)
        words = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict])
        return f"**{overall(own)}**: {words}"

    rows = [
        [f"{claim}. {text}", *(cell([part for part in parts[name] if part.claim == claim]) for name in protocols)]
        for claim, text in CLAIMS.items()
    ]
    return table(["claim", *(f"under `{protocol}`" for protocol in protocols)], rows)


def gallery(results: Path) -> str:
    """Return every figure of the report, with its caption."""
    parts = []
    for plot in page.make(_summary(results))[1]:
        title, _, rest = plot.caption.partition(". ")
        parts.append(f"## {title.rstrip('.')}\n\n![{plot.alt}](results/figures/{plot.name}.png)\n\n{rest}".rstrip())
    return "\n\n".join(parts)


def _scores(run: Run) -> dict[str, Score]:
    """Return the 16 scores on the test set where the protocol looks at it, and else on validation data."""
    return run.test_configurations or run.validation_configurations


def configurations(results: Path) -> str:
    """Return the accuracy of the configurations on batches composed as in training, setting by setting."""
    summary = _summary(results)
    rows = []
    for setting in (setting for task in ("cnn", "rnn", "resnet") for setting in summary.settings(task)):
        runs = [run for run in ended(summary, setting, "bln") if run.status == "finished" and _scores(run)]
        if not runs:
            continue
        means = {name: sum(_scores(run)[name].accuracy for run in runs) / len(runs) for name in CONFIGURATIONS}
        about = [kind(setting.task), f"{100 * setting.fraction:g} %"]
        about += [str(setting.batch_size), f"`{setting.protocol}`", str(len(runs)), f"`{chosen(runs)}`"]
        spreads = [number(_spread(means, slice(2, 4))), number(_spread(means, slice(2)))]
        rows.append([*about, *(number(means[f"{pair}FF"]) for pair in PAIRS), *spreads])
    head = ["net", "data", "batch", "protocol", "seeds", "chosen", *(f"`{pair}FF`" for pair in PAIRS)]
    return table([*head, "first two", "last two"], rows)


def _spread(means: Mapping[str, float], kept: slice) -> float:
    """Return how far apart mean accuracies are, at most, where these letters stay and the others change."""
    groups: dict[str, list[float]] = {}
    for name, accuracy in means.items():
        if not math.isnan(accuracy):
            groups.setdefault(name[kept], []).append(accuracy)
    return max((max(group) - min(group) for group in groups.values()), default=math.nan)


# ---- the search on digits


ARRIVALS = {"": "as in training", "shuffled_": "reshuffled", "sorted_": "sorted by label", "single_": "one at a time"}


def _search(results: Path) -> dict[str, Mapping[str, Any]]:
    rows = json.loads((results.parent / "img" / "search.json").read_text("utf-8"))["rows"]
    return {row["config"]: row for row in rows}


def arrivals(results: Path) -> str:
    """Return the accuracy of the same samples in other batches."""
    found = {f"{pair}FF": _search(results)[f"{pair}FF"] for pair in PAIRS}
    rows = [[f"`{name}`", *(number(row[f"{how}accuracy"]) for how in ARRIVALS)] for name, row in found.items()]
    return table(["configuration", *ARRIVALS.values()], rows)


def calibration(results: Path) -> str:
    """Return what recomputed population statistics change."""
    found = {f"{pair}FF": _search(results)[f"{pair}FF"] for pair in PAIRS}
    losses = {name: (row["uncalibrated_loss"], row["loss"]) for name, row in found.items()}
    rows = [
        [f"`{name}`", number(before), number(after), number(after - before, signed=True)]
        for name, (before, after) in losses.items()
    ]
    return table(["configuration", "loss as trained", "loss after `bln.calibrate`", "change"], rows)


# ---- steps of whole nets, and kernels, on a GPU


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _ratios(path: Path, column: str) -> list[float]:
    return [float(row[column]) for row in _rows(path) if row[column]]


MAIN = ("bfloat16", "last")
"""The type and layout of the chart and of the first screen."""
STEP_NAMES = {
    "bn": "BatchNorm", "gn": "GroupNorm", "ln": "LayerNorm", "bln grouped": "BLN grouped",
    "bln fused": "BLN grouped, fused", "bln pooled": "BLN pooled", "bln published": "BLN as published",
}  # fmt: skip
MODES = {"graph": "CUDA graph"}
MODES_EXPLAINED = {
    "compiled": "*compiled* is `torch.compile`.", "reduce-overhead": "*reduce-overhead* is its mode of that name.",
    "graph": "A CUDA graph leaves the host out: it is the GPU's time alone.",
}  # fmt: skip
LAYOUTS = {"last": "channels last"}
Steps = dict[tuple[str, ...], dict[str, dict[str, str]]]


def gpu_steps(results: Path = RESULTS) -> Steps:
    """Return the rows of ResNet-50 on a GPU by batch, type, layout and mode, then by norm; none if not measured.

    They are what ``benchmarks/model.py --out`` wrote. ``resnet50_gpu.txt`` beside them says on what and when.
    """
    path, found = results / "benchmarks" / "resnet50_gpu.csv", Steps()
    for row in _rows(path) if path.exists() else []:
        setting = found.setdefault((row["batch"], row["type"], row["layout"], row["mode"]), {})
        if row["ratio"]:
            setting[row["norm"]] = row
    return dict(sorted(found.items(), key=lambda item: item[0][1:3] != MAIN))


def step_norms(steps: Steps) -> list[str]:
    """Return the norms that were measured, in one order."""
    return [norm for norm in STEP_NAMES if any(norm in step for step in steps.values())]


def resnet50(results: Path) -> str:
    """Return chart and table of a training step of ResNet-50 on a GPU."""
    if not (steps := gpu_steps(results)):
        return "A step of ResNet-50 on a GPU is not measured yet."
    origin, norms = results / "benchmarks" / "resnet50_gpu.txt", step_norms(steps)
    rows = [
        [*_setting(at[:3]), MODES.get(at[3], at[3]), f"{float(step['bn']['ms']):.1f}" if "bn" in step else ""]
        + [f"{float(step[norm]['ratio']):.2f}" if norm in step else "" for norm in norms[1:]]
        for at, step in steps.items()
    ]
    chart = (
        "![A training step of ResNet-50 on a GPU with each norm, as a multiple of the step with BatchNorm]"
        "(results/benchmarks/resnet50_gpu.png)"
    )
    head = ["batch", "type", "layout", "mode", "BatchNorm, ms", *(STEP_NAMES[norm] for norm in norms[1:])]
    legend = (
        "Images have 224 pixels. The time with BatchNorm is in milliseconds, the other columns are multiples of it. "
        '*Fused* is the grouped form with `activation="relu"`: ReLU and shortcut are in the same pass as the '
        "normalization. Empty cells were not measured."
    )
    legend = " ".join([legend, *(text for mode, text in MODES_EXPLAINED.items() if any(at[3] == mode for at in steps))])
    made = [origin.read_text(encoding="utf-8").strip()] if origin.exists() else []
    return "\n\n".join([chart, table(head, rows), *made, legend])


def resnet50_memory(results: Path) -> str:
    """Return the peak of memory of an eager training step of ResNet-50 on a GPU."""
    steps = {at: step for at, step in gpu_steps(results).items() if at[3] == "eager"}
    if not steps:
        return "The peak of a whole net on a GPU is not measured yet."
    norms = step_norms(steps)
    rows = [
        [*_setting(at[:3]), *(step[norm]["peak MiB"] if norm in step else "" for norm in norms)]
        for at, step in steps.items()
    ]
    return table(["batch", "type", "layout", *(f"{STEP_NAMES[norm]}, MiB" for norm in norms)], rows)


def _setting(at: tuple[str, ...]) -> list[str]:
    batch, dtype, layout = at
    return [batch, dtype, LAYOUTS.get(layout, layout)]


def kernels(direction: str, unit: str, more: Sequence[str], results: Path) -> str:
    """Return forward or backward of single layers, as ratios to a copy or an addition."""
    names = [f"{name} {direction}" for name in ("BLN", "pooled", "sweeps", "BN", "LN", "compiled")] + [*more]
    head = [
        "shape",
        "layout",
        "type",
        unit.replace("us", "µs"),
        *(name.removesuffix(f" {direction}") for name in names),
    ]
    rows = _rows(results / "layer.csv")
    about = ("shape", "layout", "type", unit)
    return table(head, [[row[name].removeprefix("features ") for name in (*about, *names)] for row in rows])


# ---- when the data changes


def _shift(results: Path) -> shift.Results:
    return shift.read(results / runs_table.NAME)


def shifted(maker: Callable[..., shift.Table], *more: Any, results: Path) -> str:
    """Return a table of the shift study."""
    return shift.markdown(*maker(_shift(results), *more))


def _choices(results: Path) -> list[Mapping[str, Any]]:
    return shift.read_choices(results / runs_table.NAME)


def shift_chosen(results: Path) -> str:
    """Return the accuracy with the prior that unlabelled requests choose."""
    return shifted(shift.when_chosen, _choices(results), NET, results=results)


def shift_gains(results: Path) -> str:
    """Return what each prior gains at each request size, and what is chosen on validation corruptions."""
    found, names = _shift(results), ("64", "16", "4")
    rows = [
        [str(size), shift.NAMES[found.chosen(NET, size)]]
        + [
            found.gain(NET, name, size, where).text(signed=True).replace("0.", ".")
            for name in names
            for where in (shift.SHIFTED, shift.CLEAN)
        ]
        for size in found.sizes
    ]
    head = ["request", "chosen"] + [f"k = {name}, {what}" for name in names for what in ("corrupted", "clean")]
    return table(head, rows)


TABLES: dict[str, Callable[[Path], str]] = {
    "box": box,
    "gain": lambda results: _gain(_digits(results)),
    "cost": _cost,
    "digits": lambda results: by_size(_digits(results)),
    "digits_standings": lambda results: standings(_digits(results)),
    "resnet": resnet,
    "claims": claims,
    "verdicts": verdicts,
    "undecided": undecided,
    "grid": grid,
    "transformer": lambda results: "\n\n".join(map(by_size, _sizes("transformer", results))),
    "transformer_standings": lambda results: "\n\n".join(map(standings, _sizes("transformer", results))),
    "transformer_verdict": transformer_verdict,
    "gallery": gallery,
    "configurations": configurations,
    "arrivals": arrivals,
    "calibration": calibration,
    "kernels_forward": partial(kernels, "forward", "copy us", ["inference"]),
    "kernels_backward": partial(kernels, "backward", "add us", ["host / BN"]),
    "shift_bn": lambda results: shifted(shift.by_request, "bn", results=results),
    "shift_bln": lambda results: shifted(shift.by_request, "bln-grouped", results=results),
    "shift_gains": shift_gains,
    "shift_severities": lambda results: shifted(shift.by_severity, NET, results=results),
    "shift_sorted": lambda results: shifted(shift.when_sorted, NET, results=results),
    "shift_norms": lambda results: shifted(shift.by_norm, results=results),
    "shift_chosen": shift_chosen,
    "shift_signs": lambda results: shift.markdown(*shift.told_apart(_choices(results))),
    **{path.stem: partial(recorded, path.stem) for path in sorted((RESULTS / "benchmarks").glob("*.csv"))},
    "resnet50_gpu": resnet50,
    "resnet50_gpu_memory": resnet50_memory,
}


def pages() -> list[Path]:
    """Return the README and every page of the site."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


if __name__ == "__main__":
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (made := fill(text)) != text:
            path.write_text(made, encoding="utf-8")
            print(f"rewritten: {path.relative_to(ROOT)}")
