"""The HTML page of the paper's experiments, section by section."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from . import figures
from .claims import CLAIMS, PROTOCOLS, RULES, ClaimPart, judge, outcome, overall, searched, tally
from .compare import MEASURES, difference, ended
from .figures import Column, data
from .markup import Html, badge, document, figure, join, safe, table, tag
from .overview import HEADINGS, PAPER, TITLES, chosen, lines, missing, state
from .statistics import agreement, mean_interval, number
from .style import Plot, look
from .summary import CONFIGURATIONS, Run, Score, Setting, Summary, authors

_PAPER_FIGURE = {"cnn": "4", "rnn": "6"}
_PAPER_TABLE = {"cnn": "1", "rnn": "2"}
_PART = {(0.2, 25): "part A: ", (1.0, 25): "part B: "}
_STATISTICS = ("E_B", "Std_B", "E_F", "Std_F")

Show = Callable[[Plot | None], Html]
"""Returns the markup of a figure, and notes the figure as one of the page's."""


def make(summary: Summary) -> tuple[str, list[Plot]]:
    """Return the page and the figures it shows."""
    plots: list[Plot] = []

    def show(plot: Plot | None) -> Html:
        if plot is None:
            return Html("")
        plots.append(plot)
        return figure(plot)

    digits_alone = bool(summary.runs) and all(run.setting.task.startswith("digits") for run in summary.runs)
    protocols = summary.protocols("cnn", "rnn")
    body = [_head(summary, digits_alone)]
    if not digits_alone:
        body += [_verdicts(summary, protocols), _missing(summary)]
        body += [tag("h2", "Results"), _results(summary, "cnn", "rnn")]
    body += [tag("h2", "The mixing weights (figure 2)"), show(figures.mixing())]
    for task in ("cnn", "rnn"):
        for protocol in summary.protocols(task):
            several = len(summary.protocols(task)) > 1
            heading = f"{TITLES[task]} (figure {_PAPER_FIGURE[task]}, table {_PAPER_TABLE[task]})"
            body.append(tag("h2", heading + (f", protocol {protocol}" if several else "")))
            body += [show(plot) for plot in _curves(summary, task, protocol)]
            body += _differences(summary, task, protocol, show)
            body += _configurations(summary, task, protocol, show)
    body += [_claims(summary, protocol, several=len(protocols) > 1) for protocol in protocols]
    if protocols:
        body.append(_rules())
    if summary.settings("resnet"):
        body += [tag("h2", TITLES["resnet"]), *(show(plot) for plot in _resnet(summary)), _results(summary, "resnet")]
    for task in ("digits-cnn", "digits-rnn"):
        if summary.settings(task):
            body += [tag("h2", TITLES[task]), *_digits(summary, task, show)]
    return document(_title(digits_alone), join(body)), plots


def _title(digits_alone: bool) -> str:
    return (
        "BLN beside BN and LN on handwritten digits"
        if digits_alone
        else "Batch Layer Normalization: the paper's experiments, run again"
    )


def _head(summary: Summary, digits_alone: bool) -> Html:
    states = state(summary.runs) if summary.runs else "none"
    commits = ", ".join(commit[:10] for commit in (summary.commit or "").split(", "))
    facts = [f"bln {summary.version}", f"commit {commits}" if commits else "", summary.created[:10]]
    facts += [", ".join(summary.machines), f"runs: {states}"]
    heading = tag("h1", _title(digits_alone))
    return join([heading, tag("p", " · ".join(filter(None, facts)), class_="meta"), tag("p", _WORDS, class_="note")])


_WORDS = (
    "BLN: Batch Layer Normalization. BN, LN: BatchNorm, LayerNorm. A configuration such as TTFF says "
    "which statistics BLN uses in inference: T the population's, kept from training, F the current mini-batch's. The "
    "order is E_B, Std_B (mean and deviation over the mini-batch), E_F, Std_F (mean and deviation over features)."
)
"""The abbreviations of the page."""


def _verdicts(summary: Summary, protocols: Sequence[str]) -> Html:
    head = tag("h2", "The paper's claims")
    if not protocols:
        return join([head, tag("p", "Neither the CNN nor the RNN has been run: there is nothing to judge yet.")])
    judged = {protocol: judge(summary, protocol) for protocol in protocols}
    lines = [
        join([tag("b", PROTOCOLS[protocol]), f" (protocol {protocol}): {outcome(parts)}"])
        for protocol, parts in judged.items()
    ]
    blocks = [head, tag("ul", *(tag("li", line) for line in lines))]
    for protocol, parts in judged.items():
        rows = []
        for claim, text in CLAIMS.items():
            parts_of_claim = [part for part in parts if part.claim == claim]
            verdict = join([badge(overall(parts_of_claim)), tag("small", tally(parts_of_claim))])
            rows.append([tag("b", str(claim)), text, verdict])
        caption = f"Protocol {protocol}. A claim is split into parts that figures can decide; details and rules below."
        blocks.append(table(caption, ["", "claim", "verdict, and its parts"], rows, "overview"))
    return join(blocks)


def _missing(summary: Summary) -> Html:
    gaps = missing(summary)
    if not gaps:
        return Html("")
    intro = tag("b", "Not run here, of what the paper ran. "), tag("code", "bln reproduce"), " adds it to the summary."
    return tag("div", *intro, tag("ul", *(tag("li", gap) for gap in gaps)), class_="missing")


def _results(summary: Summary, *tasks: str) -> Html:
    rows = list(lines(summary, *tasks))
    if not rows:
        return tag("p", "No runs yet.")
    shown = [at for at in range(len(HEADINGS)) if any(row[at] for row in rows)]
    caption = (
        "Mean over seeds ± 95 % t interval. Train accuracy is the last epoch's running average; test figures are of "
        "the epoch with the lowest validation loss, for BLN with the configuration chosen on validation."
    )
    if any(row.authors for row in rows):
        caption += " The authors chose BLN's configuration on the test set."
    return table(caption, [HEADINGS[at] for at in shown], [[row[at] for at in shown] for row in rows], "results")


def _by_norm(summary: Summary, setting: Setting) -> dict[str, list[Run]]:
    return {norm: summary.select(setting, norm) for norm in summary.norms(setting)}


def _count(runs: dict[str, list[Run]]) -> str:
    counts = {sum(run.status == "finished" for run in group) for group in runs.values()}
    most = max(counts)
    words = {0: "no finished run", 1: "one seed"}.get(most, f"{most} seeds")
    return f"up to {words}" if len(counts) > 1 and most > 1 else words


def _slug(*parts: object) -> str:
    return "-".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts).replace(".", "_")


def _curves(summary: Summary, task: str, protocol: str) -> Iterator[Plot]:
    """Yield figures 4 and 6, one for each setting."""
    paper = _PAPER_FIGURE[task]
    for setting in summary.settings(task, protocol):
        ours = _by_norm(summary, setting)
        columns = [Column(f"ours, {_count(ours)}", ours)]
        theirs = _by_norm(authors(), setting._replace(protocol="paper"))
        logged = any(run.epochs for runs in theirs.values() for run in runs)
        if logged:
            columns.append(Column("authors, one seed", theirs))
        caption = (
            f"Figure {paper}, {TITLES[task]}, {data(setting.fraction)}, batch {setting.batch_size}, protocol "
            f"{protocol}. Shaded: 95 % t interval of the mean over seeds. Hollow markers: test set, with the weights "
            "of the epoch with the lowest validation loss. Validation of BLN is under FFFF."
        )
        if not logged:
            caption += " The authors' curves of this setting are not known."
        name = _slug(f"figure-{paper}", task, protocol, f"{100 * setting.fraction:g}pct", "batch", setting.batch_size)
        yield figures.learning(name, caption, columns)


def _differences(summary: Summary, task: str, protocol: str, show: Show) -> Iterator[Html]:
    settings = summary.settings(task, protocol)
    yield tag("h3", "BLN minus its rivals")
    caption = (
        f"BLN minus its rivals, {TITLES[task]}, protocol {protocol}. Paired differences (same seed) with 95 % "
        "intervals. Hollow: one seed, no interval."
    )
    plot = figures.differences(_slug("differences", task, protocol), caption, summary, settings)
    if plot is None:
        yield tag("p", "Nothing can be paired yet: this takes BLN and BN or LN with the same seed.")
        return
    yield show(plot)
    rows = []
    for setting in settings:
        for rival in ("bn", "ln"):
            if not (ended(summary, setting, "bln") and ended(summary, setting, rival)):
                continue
            differences = [difference(summary, setting, "bln", rival, measure) for measure in MEASURES]
            estimates, diverged = [measured.estimate for measured in differences], differences[0].diverged
            pairs = estimates[0].n + diverged
            remark = f"{diverged} of {pairs} with a run that diverged" if diverged else str(pairs)
            cells = [estimate.text(signed=True) if estimate.n else "" for estimate in estimates]
            if pairs == 1:
                remark += ", no interval"
            where = f"{100 * setting.fraction:g} %, batch {setting.batch_size}"
            rows.append([where, f"BLN \N{MINUS SIGN} {look(rival).name}", *cells, remark])
    caption = (
        "Mean of the paired differences [95 % interval over seeds, the wider of two: t, and the paired bootstrap with "
        "10,000 fixed draws]."
    )
    yield table(caption, ["setting", "", *(measure.name for measure in MEASURES), "pairs"], rows, "results")


def _configurations(summary: Summary, task: str, protocol: str, show: Show) -> Iterator[Html]:
    """Yield a figure and tables 1 and 2."""
    settings = sorted(
        {*summary.settings(task, protocol), *(Setting(task, protocol, *key) for key in PAPER)},
        key=lambda setting: (-setting.batch_size, setting.fraction),
    )
    yield tag("h3", f"The 16 configurations (table {_PAPER_TABLE[task]})")
    yield tag("ul", *(tag("li", note) for note in _NOTES))
    caption = (
        f"The 16 configurations, {TITLES[task]}, protocol {protocol}. Test loss of each, ours against the authors'. "
        "Bars: 95 % t interval over seeds."
    )
    yield show(figures.configurations(_slug("configurations", task, protocol), caption, summary, settings))
    for setting in settings:
        validated = _validated(summary, setting)
        if validated and not searched(summary, setting):  # only the chosen configuration was tested
            yield tag("h4", f"{data(setting.fraction)}, batch {setting.batch_size}")
            yield _ranked(validated, opened=False)
        else:
            yield _configuration_table(summary, setting, f"Table {_PAPER_TABLE[task]}, {_PART.get(setting[2:], '')}")


_NOTES = (
    "The order is the paper's.",
    "The ranking is by loss on the test set, which is the paper's protocol. Ours was chosen on validation data: the "
    "column says in how many seeds each configuration was.",
    "The authors' TFxx and xxTF rows measure the deviation around the current mean, ours around the chosen mean, as "
    "the paper's eqs 19 and 21 write it.",
    "At batch 1 the authors' code divides by zero: configurations with Std_B = T gave NaN, others with Std_F = T "
    "fell to chance. The paper does not print that table; its rows are ordered by the authors' loss.",
)


def _configuration_table(summary: Summary, setting: Setting, title: str) -> Html:
    runs = searched(summary, setting)
    logged = searched(authors(), setting._replace(protocol="paper"))
    theirs = logged[0].test_configurations if logged else {}
    where = f"{title}{data(setting.fraction)}, batch {setting.batch_size}. "
    if not (runs or theirs):
        return tag("p", where + "Not run.", class_="note")
    ours = {config: _mean_score(runs, config) for config in CONFIGURATIONS}
    leading = theirs or ours
    ranks = {config: at for at, config in enumerate(sorted(CONFIGURATIONS, key=lambda c: _nan_last(ours[c].loss)), 1)}
    order = sorted(leading, key=lambda config: _nan_last(leading[config].loss))
    votes = Counter(run.chosen for run in runs)
    rows = []
    for at, config in enumerate(order, 1):
        first = {"class_": "first"} if runs and ranks[config] == 1 else {}
        cells = [str(at) if theirs else "", tag("code", config), *map(_switch, config)]
        cells += [number(value, digits=4) for value in theirs[config]] if theirs else ["", ""]
        if runs:
            cells += [tag("td", number(value, digits=4), **first) for value in ours[config]]
            cells += [
                tag("td", str(ranks[config]), **first),
                f"{votes[config]} of {len(runs)}" if votes[config] else "",
            ]
        else:
            cells += [""] * 4
        rows.append(cells)
    text = where + ("Not run here: the authors' figures alone." if not runs else _agreement(runs, ours, theirs))
    head = ["authors' rank", "configuration", *_STATISTICS, "authors' test loss", "authors' test accuracy"]
    head += ["our test loss", "our test accuracy", "our rank", "chosen on validation"]
    return table(text, head, rows, "configurations")


def _nan_last(loss: float) -> float:
    """Return a key for sorting that puts NaN last."""
    return math.inf if math.isnan(loss) else loss


def _switch(letter: str) -> Html:
    return tag("td", letter, class_=letter.lower())


def _mean_score(runs: Sequence[Run], config: str) -> Score:
    """Return mean test loss and accuracy over seeds. One seed's NaN makes it NaN: the configuration is unusable."""
    scores = [run.test_configurations[config] for run in runs]
    losses, accuracies = zip(*scores, strict=True) if scores else ([math.nan], [math.nan])
    return Score(sum(losses) / len(losses), sum(accuracies) / len(accuracies))


def _agreement(runs: Sequence[Run], ours: dict[str, Score], theirs: dict[str, Score]) -> str:
    """Say how far our ranking agrees with the authors', of the means and of each seed."""
    seeds = f"Ours: mean over {len(runs)} seeds. " if len(runs) > 1 else "Ours: one seed. "
    if not theirs:
        return seeds
    other = [theirs[config].loss for config in CONFIGURATIONS]
    of_means = agreement([ours[config].loss for config in CONFIGURATIONS], other)
    if math.isnan(of_means.spearman):
        return seeds + "The rankings cannot be compared: too few losses are numbers."
    by_seed = [agreement([run.test_configurations[c].loss for c in CONFIGURATIONS], other).spearman for run in runs]
    by_seed = [value for value in by_seed if not math.isnan(value)]
    text = f"Rank correlation of the test losses with the authors': Spearman {number(of_means.spearman, digits=2)}"
    if len(by_seed) > 1:
        text += f" (single seeds {number(min(by_seed), digits=2)} to {number(max(by_seed), digits=2)})"
    return seeds + text + f", Kendall {number(of_means.kendall, digits=2)}, over {of_means.n} configurations."


def _resnet(summary: Summary) -> Iterator[Plot]:
    for protocol in summary.protocols("resnet"):
        settings = summary.settings("resnet", protocol)
        for fraction in sorted({setting.fraction for setting in settings}):
            same = [setting for setting in settings if setting.fraction == fraction]
            diverged = [
                f"{look(run.norm).name} at batch {run.setting.batch_size} (seed {run.seed})"
                for run in summary.runs
                if run.setting in same and run.status == "diverged"
            ]
            caption = (
                f"Test accuracy against batch size, {TITLES['resnet']}, {data(fraction)}, protocol {protocol}. 95 % t "
                "intervals where "
            )
            caption += "there are several seeds." + (f" Diverged: {', '.join(diverged)}." if diverged else "")
            points = {
                norm: {
                    setting.batch_size: mean_interval(
                        [run.test.accuracy for run in summary.select(setting, norm) if run.test]
                    )
                    for setting in same
                }
                for norm in summary.order(norm for setting in same for norm in summary.norms(setting))
            }
            yield figures.batch_sizes(_slug("resnet", protocol, f"{100 * fraction:g}pct"), caption, points)


def _digits(summary: Summary, task: str, show: Show) -> Iterator[Html]:
    for protocol in summary.protocols(task):
        settings = summary.settings(task, protocol)
        for fraction in sorted({setting.fraction for setting in settings}):
            same = [setting for setting in settings if setting.fraction == fraction]
            columns = [Column(f"batch {setting.batch_size}", _by_norm(summary, setting)) for setting in same]
            caption = (
                f"Learning curves, {data(fraction)}. Shaded: 95 % t interval over seeds. Hollow markers: test set."
            )
            yield show(figures.learning(_slug(task, protocol, f"{100 * fraction:g}pct"), caption, columns))
            norms = list(dict.fromkeys(norm for column in columns for norm in column.runs))
            rows = [[look(norm).name, *(_accuracy(column.runs.get(norm, [])) for column in columns)] for norm in norms]
            yield table(
                "Test accuracy ± 95 % t interval over seeds.", ["", *(c.title for c in columns)], rows, "results"
            )
            validated = filter(None, (_validated(summary, setting) for setting in same))
            yield from (_ranked(runs, opened=at == 0) for at, runs in enumerate(validated))


def _validated(summary: Summary, setting: Setting) -> list[Run]:
    """Return the finished BLN runs whose 16 configurations were compared on validation data."""
    runs = summary.select(setting, "bln")
    return [run for run in runs if run.status == "finished" and run.validation_configurations]


def _accuracy(runs: Sequence[Run]) -> str:
    if not runs:
        return "not run"
    estimate = mean_interval([run.test.accuracy for run in runs if run.test and run.status == "finished"])
    return estimate.plus_minus() if estimate.n else state(list(runs))


def _ranked(runs: Sequence[Run], opened: bool) -> Html:
    """Return the 16 configurations by validation loss, as a search ranks them, in a box to open and close."""

    def mean(part: str, config: str, what: str) -> float:
        tables = [getattr(run, f"{part}_configurations") for run in runs]
        return sum(getattr(scores[config], what) for scores in tables) / len(tables) if all(tables) else math.nan

    order = sorted(CONFIGURATIONS, key=lambda config: _nan_last(mean("validation", config, "loss")))
    parts = ["validation", "test"] if all(run.test_configurations for run in runs) else ["validation"]
    shown = [(part, what) for part in parts for what in ("loss", "accuracy")]
    rows = [
        [
            str(at),
            tag("code", config),
            *map(_switch, config),
            *(number(mean(part, config, what), digits=4) for part, what in shown),
        ]
        for at, config in enumerate(order, 1)
    ]
    head = ["", "configuration", *_STATISTICS, *(f"{part} {what}" for part, what in shown)]
    title = tag("summary", f"The 16 configurations at batch {runs[0].setting.batch_size}")
    text = f"By validation loss, mean over seeds. Chosen: {chosen(list(runs))}."
    return tag("details", title, table(text, head, rows, "configurations"), **({"open": ""} if opened else {}))


def _claims(summary: Summary, protocol: str, several: bool) -> Html:
    blocks = [tag("h2", "The claims in detail" + (f", protocol {protocol}" if several else ""))]
    intro = "Under each verdict: our figure [the interval it was made with], then the authors' figure, one run each."
    blocks.append(tag("p", intro, class_="note"))
    ours, theirs = judge(summary, protocol), judge(authors())
    for claim, text in CLAIMS.items():
        rows: dict[str, dict[str, Html]] = {}
        for part, their_part in zip(ours, theirs, strict=True):
            if part.claim == claim:
                rows.setdefault(part.row, {})[part.column] = _verdict(part, their_part)
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        body = [[row, *(cells.get(column, Html("")) for column in columns)] for row, cells in rows.items()]
        blocks.append(tag("h3", f"Claim {claim}"))
        blocks.append(table(text, ["", *columns], body, "claims"))
    return join(blocks)


def _verdict(part: ClaimPart, theirs: ClaimPart) -> Html:
    small = [part.effect, f"({part.note})" if part.note else "", f"authors {theirs.effect}" if theirs.effect else ""]
    return join([badge(part.verdict.value), *(tag("small", line) for line in small if line)], "")


def _rules() -> Html:
    return join([tag("h2", "The rules"), tag("ul", *(tag("li", safe(rule)) for rule in RULES))])
