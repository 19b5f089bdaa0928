"""Write tables into the pages from the committed results: ``python docs/_measured.py``, or ``make tables``.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. A test compares the pages with the results.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bln.experiments import table as runs_table
from bln.experiments.report import page, shift, sizes
from bln.experiments.report.claims import CLAIMS, PROTOCOLS, ClaimPart, Verdict, judge, outcome, overall, tally
from bln.experiments.report.compare import TEST_ACCURACY, TRAIN_ACCURACY, ended
from bln.experiments.report.markup import listed
from bln.experiments.report.markup import markdown as table
from bln.experiments.report.overview import chosen, kind
from bln.experiments.report.statistics import mean_interval, number, paired_interval
from bln.experiments.report.style import look
from bln.experiments.report.summary import CONFIGURATIONS, Run, Score, Summary, authors, collect, read

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAIRS = ("TT", "FT", "FF", "TF")
NET = "bn"
"""The net that the tables of the shift study show: the one most readers have."""


def fill(text: str, results: Path = RESULTS) -> str:
    """Return a page with its tables replaced by those of the results."""
    return PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place[2]](results)}\n\n{place[3]}", text)


def recorded(name: str, results: Path) -> str:
    """Return the table of a benchmark unchanged."""
    with (results / "benchmarks" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return table(head, rows)


# ---- accuracy against batch size


def _sizes(task: str, results: Path) -> list[sizes.Results]:
    return [net for net in sizes.read(results / runs_table.NAME) if net.task == task]


def _digits(results: Path) -> sizes.Results:
    (net,) = _sizes("digits-resnet", results)
    return net


def box(results: Path) -> str:
    """Return the box of the README's first screen: gain, cost, and when not to use BLN."""
    net = _digits(results)
    return table(["", ""], [["**Gain**", _gain(net)], ["**Cost**", _cost(results)], ["**Not for**", _not_for(net)]])


def _gain(net: sizes.Results) -> str:
    """Return how far BLN and others are behind the best of them, each at its worst batch size."""
    norms = [norm for norm in (sizes.OURS, "bn", "gn") if norm in net.norms]
    means = {norm: [100 * net.estimate(norm, size).mean for size in net.sizes] for norm in norms}
    best = [max(column) for column in zip(*means.values(), strict=True)]
    behind = {norm: max(top - mean for top, mean in zip(best, means[norm], strict=True)) for norm in norms}
    ours, *others = (number(points, digits=1) for points in behind.values())
    rivals = ", ".join(f"{sizes.name(norm)} {points}" for norm, points in zip(norms[1:], others, strict=True))
    stands = sizes.standings(net)
    claim = "**No batch size to avoid.** " if all(stand.verdict in ("ahead", "level") for stand in stands) else ""
    return (
        f"{claim}At batch {listed(net.sizes)} BLN is at most **{ours}** points of accuracy behind the best norm; "
        f"{rivals}. {_stands(stands)}"
    )


def _stands(stands: Sequence[sizes.Standing]) -> str:
    """Return a sentence on how BLN compares with the best other norm at each batch size."""
    words = {"ahead": "ahead", "level": "level", "behind": "behind", "undecided": "too close to call"}
    batch_sizes = {verdict: [stand.size for stand in stands if stand.verdict == verdict] for verdict in words}
    parts = [
        f"{words[verdict]} at {'every batch size' if len(at) == len(stands) else f'batch {listed(at)}'}"
        for verdict, at in batch_sizes.items()
        if at
    ]
    return f"Against the best other norm it is {listed(parts)}."


def _cost(results: Path) -> str:
    """Return the time of an eager training step as a multiple of that with BatchNorm."""
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


def _not_for(net: sizes.Results) -> str:
    size = net.sizes[-1]
    gain = "little" if paired_interval(net.differences(size, "bn")).low > 0 else "no"
    return f"Large batches of one size: {gain} gain over BatchNorm is shown at batch {size}. Causal sequences."


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


def by_size(net: sizes.Results) -> str:
    """Return the accuracy by norm and batch size; bold is the highest mean of a column."""
    columns = [{norm: net.estimate(norm, size) for norm in net.norms} for size in net.sizes]
    rows = []
    for norm in net.norms:
        cells = []
        for column in columns:
            best = max(column.values(), key=lambda estimate: estimate.mean if estimate.n else -math.inf)
            text = column[norm].plus_minus() if column[norm].n else ""
            cells.append(f"**{text}**" if column[norm] is best and text else text)
        rows.append([sizes.name(norm), *cells])
    return table(["test accuracy", *(f"batch {size}" for size in net.sizes)], rows)


def standings(net: sizes.Results) -> str:
    """Return the comparison of BLN with the best other norm at each batch size."""
    rows = [
        [
            str(stand.size),
            sizes.name(stand.rival),
            stand.difference.times(100).text(signed=True, digits=1),
            str(stand.difference.n),
            stand.verdict + (f"; {stand.needed()}" if stand.verdict == "undecided" else ""),
        ]
        for stand in sizes.standings(net)
    ]
    return table(["batch", "best other norm", "difference, points", "seeds", f"{sizes.name(net.ours)} is"], rows)


def resnet(results: Path) -> str:
    """Return the accuracies of ResNet-20, or where it has not been run of the small net of the paper's protocol."""
    if nets := _sizes("resnet20", results):
        return "\n\n".join(part for net in nets for part in (by_size(net), standings(net)))
    summary = _summary(results)
    settings = summary.settings("resnet")
    norms = summary.order(norm for setting in settings for norm in summary.norms(setting))

    def cell(setting: Any, norm: str) -> str:
        estimate = mean_interval([TEST_ACCURACY.of(run) for run in summary.select(setting, norm)])
        return estimate.plus_minus() if estimate.n else ""

    rows = [[sizes.name(norm), *(cell(setting, norm) for setting in settings)] for norm in norms]
    return table(["test accuracy", *(f"batch {setting.batch_size}" for setting in settings)], rows)


def transformer_verdict(results: Path) -> str:
    """Say whether BLN helps in a transformer, and how it was run."""
    parts = []
    for net in _sizes("transformer", results):
        parts += [f"**{sizes.advice(net)}**", sizes.recipe(net)]
        cells = [bool(net.chosen(norm, size)) for norm in net.recipe.norms for size in net.recipe.batch_sizes]
        if not all(cells):
            parts.append(
                f"This is from {sum(cells)} of {len(cells)} norms and batch sizes. The others have not been run here "
                "yet; the command above makes them."
            )
    return "\n\n".join(parts) or "It has not been run here yet."


# ---- the paper's experiments


def grid(results: Path) -> str:
    """Return loss and accuracies of each norm in each setting of the paper's experiments, with the authors'."""
    summary, rows = _summary(results), []
    for task in ("cnn", "rnn"):
        for setting in summary.settings(task):
            for norm in summary.norms(setting):
                runs = summary.select(setting, norm)
                logged = next(iter(authors().select(setting, norm)), None)
                train, test = (
                    mean_interval([measure.of(run) for run in runs]).plus_minus()
                    for measure in (TRAIN_ACCURACY, TEST_ACCURACY)
                )
                loss = mean_interval([run.train_loss[-1] for run in runs]).plus_minus()
                net = f"{kind(task)}, {100 * setting.fraction:g} %, batch {setting.batch_size}, `{setting.protocol}`"
                their_train = number(logged.train_accuracy[-1]) if logged and logged.train_accuracy else ""
                their_test = number(logged.test.accuracy) if logged and logged.test else ""
                rows.append([net, look(norm).name, str(len(runs)), loss, train, their_train, test, their_test])
    head = ["setting", "norm", "seeds", "train loss", "train accuracy", "authors'", "test accuracy", "authors'"]
    return table(head, rows)


def undecided(results: Path) -> str:
    """Return the undecided parts of the claims under the paper's protocol, with effects and what would decide."""
    parts = [part for part in judge(_summary(results)) if part.verdict is Verdict.UNDECIDED]
    rows = [[f"{part.claim}. {part.row}", part.column, part.effect, part.note] for part in parts]
    return table(["part", "figure", "effect", "what would decide"], rows)


def _summary(results: Path) -> Summary:
    return read(collect(runs_table.read(results / runs_table.NAME)))


def claims(results: Path) -> str:
    """Return a line for each protocol that counts the parts of the paper's claims by verdict."""
    summary = _summary(results)
    return "\n".join(
        f"- **{PROTOCOLS[protocol]}** (`{protocol}`): {outcome(judge(summary, protocol))}"
        for protocol in summary.protocols("cnn", "rnn")
    )


def verdicts(results: Path) -> str:
    """Return the verdict on each of the paper's claims and on its parts, under each protocol."""
    summary = _summary(results)
    protocols = summary.protocols("cnn", "rnn")
    parts = {protocol: judge(summary, protocol) for protocol in protocols}

    def cell(parts_of_claim: Sequence[ClaimPart]) -> str:
        return f"**{overall(parts_of_claim)}**: {tally(parts_of_claim)}"

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
    """Return the scores of the 16 configurations on the test set, or on validation data where not all are tested."""
    return run.test_configurations or run.validation_configurations


def configurations(results: Path) -> str:
    """Return accuracies of configurations on mini-batches composed as in training, setting by setting."""
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


def _spread(means: Mapping[str, float], fixed: slice) -> float:
    """Return the largest range of mean accuracies over configurations that share these letters."""
    groups: dict[str, list[float]] = {}
    for name, accuracy in means.items():
        if not math.isnan(accuracy):
            groups.setdefault(name[fixed], []).append(accuracy)
    return max((max(group) - min(group) for group in groups.values()), default=math.nan)


# ---- the search on digits


ARRIVALS = {"": "as in training", "shuffled_": "reshuffled", "sorted_": "sorted by label", "single_": "one at a time"}


def _search(results: Path) -> dict[str, Mapping[str, Any]]:
    rows = json.loads((results.parent / "img" / "search.json").read_text("utf-8"))["rows"]
    return {row["config"]: row for row in rows}


def arrivals(results: Path) -> str:
    """Return the accuracy of the same samples in other batches."""
    search = _search(results)
    rows = [[f"`{pair}FF`", *(number(search[f"{pair}FF"][f"{how}accuracy"]) for how in ARRIVALS)] for pair in PAIRS]
    return table(["configuration", *ARRIVALS.values()], rows)


def calibration(results: Path) -> str:
    """Return losses before and after population statistics are recomputed."""
    rows = []
    for name, row in ((f"{pair}FF", _search(results)[f"{pair}FF"]) for pair in PAIRS):
        before, after = row["uncalibrated_loss"], row["loss"]
        rows.append([f"`{name}`", number(before), number(after), number(after - before, signed=True)])
    return table(["configuration", "loss as trained", "loss after `bln.calibrate`", "change"], rows)


# ---- steps of whole nets, and kernels, on a GPU


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table by the names of its columns."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _ratios(path: Path, column: str) -> list[float]:
    return [float(row[column]) for row in read_csv(path) if row[column]]


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

    ``benchmarks/model.py --out`` writes them. ``resnet50_gpu.txt`` beside them names machine and date.
    """
    path, steps = results / "benchmarks" / "resnet50_gpu.csv", Steps()
    for row in read_csv(path) if path.exists() else []:
        setting = steps.setdefault((row["batch"], row["type"], row["layout"], row["mode"]), {})
        if row["ratio"]:
            setting[row["norm"]] = row
    return dict(sorted(steps.items(), key=lambda item: item[0][1:3] != MAIN))


def step_norms(steps: Steps) -> list[str]:
    """Return the norms that were measured, in the order of all tables."""
    return [norm for norm in STEP_NAMES if any(norm in step for step in steps.values())]


def resnet50(results: Path) -> str:
    """Return chart and table of the time of a training step of ResNet-50 on a GPU."""
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
    machine = [origin.read_text(encoding="utf-8").strip()] if origin.exists() else []
    return "\n\n".join([chart, table(head, rows), *machine, legend])


def resnet50_memory(results: Path) -> str:
    """Return the peak memory of an eager training step of ResNet-50 on a GPU."""
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


def kernels(direction: str, unit: str, last: str, results: Path) -> str:
    """Return the times of single layers, forward or backward, as ratios to that of a copy or an addition."""
    columns = ["shape", "layout", "type", unit]
    columns += [f"{name} {direction}" for name in ("BLN", "pooled", "sweeps", "BN", "LN", "compiled")] + [last]
    head = [column.removesuffix(f" {direction}").replace("us", "µs") for column in columns]
    rows = read_csv(results / "layer.csv")
    return table(head, [[row[column].removeprefix("features ") for column in columns] for row in rows])


# ---- when the data changes


def _shift(results: Path) -> shift.Results:
    return shift.read(results / runs_table.NAME)


def shifted(make: Callable[..., shift.Table], *arguments: Any, results: Path) -> str:
    """Return a table of the shift study."""
    return table(*make(_shift(results), *arguments))


def _choices(results: Path) -> list[Mapping[str, Any]]:
    return shift.read_choices(results / runs_table.NAME)


def shift_chosen(results: Path) -> str:
    """Return the accuracy with the prior that unlabelled requests choose."""
    return shifted(shift.when_chosen, _choices(results), NET, results=results)


def shift_gains(results: Path) -> str:
    """Return the gain of each prior at each request size, and the one chosen on validation corruptions."""
    answers, names = _shift(results), ("64", "16", "4")
    rows = [
        [str(size), shift.NAMES[answers.best_on_validation(NET, size)]]
        + [
            answers.gain(NET, name, size, where).text(signed=True).replace("0.", ".")
            for name in names
            for where in (shift.CORRUPTED, shift.CLEAN)
        ]
        for size in answers.sizes
    ]
    head = ["request", "chosen"] + [f"k = {name}, {images}" for name in names for images in ("corrupted", "clean")]
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
    "kernels_forward": partial(kernels, "forward", "copy us", "inference"),
    "kernels_backward": partial(kernels, "backward", "add us", "host / BN"),
    "shift_bn": lambda results: shifted(shift.by_request, "bn", results=results),
    "shift_bln": lambda results: shifted(shift.by_request, "bln-grouped", results=results),
    "shift_gains": shift_gains,
    "shift_severities": lambda results: shifted(shift.by_severity, NET, results=results),
    "shift_sorted": lambda results: shifted(shift.when_sorted, NET, results=results),
    "shift_norms": lambda results: shifted(shift.by_norm, results=results),
    "shift_chosen": shift_chosen,
    "shift_signs": lambda results: table(*shift.told_apart(_choices(results))),
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
        if (filled := fill(text)) != text:
            path.write_text(filled, encoding="utf-8")
            print(f"rewritten: {path.relative_to(ROOT)}")
