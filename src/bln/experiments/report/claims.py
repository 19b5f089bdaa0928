"""The paper's five claims, in parts that figures can decide, and the verdicts.

A part is put as a quantity that is positive where the paper is right, one value for each seed. It is *reproduced*
where the 95 % interval of its mean lies above 0, *not reproduced* where it lies below 0, and *undecided* otherwise.
:data:`RULES` is what the page says about it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from .compare import MEASURES, TEST_ACCURACY, TEST_LOSS, TRAIN_ACCURACY, TRAIN_LOSS, Measure, ended, pairs
from .statistics import Estimate, paired_interval, runs_to_decide, seeds_in_words, seeds_to_decide, share_interval
from .summary import CONFIGURATIONS, Run, Setting, Summary

TOLERANCE = 0.05
"""How far a mean accuracy may lie from the one the paper prints, which is of one run."""
FAILED = 0.10
"""A net has failed where it is not this far above chance."""
FEW = 3
"""From this many seeds on their spread is used; an interval from two has no use (its half-width is 9 deviations)."""
FEW_ACCURACY, FEW_LOSS, FEW_CONFIGURATION = 0.05, 0.10, 0.01
"""The half-width assumed with fewer seeds: of accuracies; of losses, as a share; of configurations, which share weights
and test set, as a share."""
CHANCE = {"cnn": 0.1, "rnn": 0.5}
PROTOCOLS = {"paper": "As the authors did it", "clean": "With mini-batches drawn anew each epoch"}
NAMES = {"cnn": "CNN", "rnn": "RNN", "bln": "BLN", "bn": "BN", "ln": "LN"}

RULES = (
    "Each part is put as a difference, paired by seed, that the paper says lies on one side of 0. It is reproduced "
    "when the 95 % interval of the mean lies on that side, not reproduced when it lies on the other, and undecided "
    "when it contains 0 or when a run is missing.",
    "What is undecided says how many seeds would decide, if mean and spread stay as they are.",
    "The interval is the wider of the paired bootstrap and the t interval: a bootstrap of few seeds is too narrow.",
    f"With fewer than {FEW} seeds there is no useful interval. One is assumed, and the verdict marked: "
    f"± {FEW_ACCURACY} for an accuracy, ± {FEW_LOSS:.0%} for a loss, ± {FEW_CONFIGURATION:.0%} for the losses of two "
    "configurations, which share weights and test set.",
    f"An accuracy the paper prints is reproduced when the interval of ours lies within ± {TOLERANCE} of it, and not "
    "reproduced when it lies outside. With fewer than three seeds it can be refuted, not confirmed.",
    f"BN fails when its accuracy lies less than {FAILED:.2f} above chance (0.1 on CIFAR-10, 0.5 on IMDB).",
    "A run that diverged loses against one that finished. Where there is one, seeds decide: all must agree. Where an "
    "accuracy stands by itself, such a run counts as chance.",
    "Lower at each epoch: reproduced when the interval lies on the claimed side at every epoch, not reproduced when it "
    "lies on the other side at any. The difference shown is that of the epoch where it is the worst for the claim.",
    "A group of configurations leads when the lowest test loss in the group lies below the lowest outside it.",
    "The configuration depends on a factor when, for two settings that differ in it alone, the configuration that is "
    "chosen on validation in each has the lower test loss there. It does not when the same one is chosen in both, or "
    "one is better in both.",
)


class Verdict(Enum):
    """What the figures say about a part of a claim."""

    REPRODUCED = "reproduced"
    NOT = "not reproduced"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Part:
    """A part of a claim that figures can decide.

    Attributes:
        claim: The claim's number.
        row: What is said, of what.
        column: The figure it is judged by.
        verdict: What the figures say.
        figure: The effect with its interval, as text; empty where nothing has been run.
        note: What one should know about the verdict, such as that there is one seed only.
    """

    claim: int
    row: str
    column: str
    verdict: Verdict
    figure: str = ""
    note: str = ""


CLAIMS = {
    1: "CNN, train accuracy after 15 epochs: batch 25 BLN 0.87, BN 0.78, LN 0.73; batch 1 BLN 0.61, LN 0.34, BN 0.09.",
    2: "CNN and RNN: BLN converges faster (lower training loss at each epoch) and tests better than BN and LN, at "
    "batch 1 and 25.",
    3: "BN beats LN on the CNN at batch 25; LN beats BN on the RNN; BN fails at batch 1.",
    4: "Table 1, CNN: with 20 % of the data TTxx leads, with all data FTxx, and xxTT never does. Table 2, RNN: E_B = F "
    "leads in both.",
    5: "Std_F = F is usually best; the configuration depends on task, data size and batch size.",
}


def judge(summary: Summary, protocol: str = "paper") -> list[Part]:
    """Every part of the five claims, with its verdict, from the runs of one protocol."""
    claims = (_accuracies, _convergence, _rivals, _leaders, _dependence)
    return [part for claim in claims for part in claim(summary, protocol)]


def outcome(parts: Sequence[Part]) -> str:
    """Return one sentence: how many parts of the claims came out, and how."""
    counts = Counter(part.verdict for part in parts)
    reproduced, refuted, undecided = (counts[verdict] for verdict in Verdict)
    return (
        f"of {counts.total()} parts of the claims {reproduced} are reproduced, {refuted} are not, and {undecided} are "
        "undecided for want of runs."
    )


def overall(parts: Sequence[Part]) -> str:
    """One word for a claim: that of its parts where they agree, ``in part`` where some hold and some do not."""
    kinds = {part.verdict for part in parts}
    if kinds >= {Verdict.REPRODUCED, Verdict.NOT}:
        return "in part"
    return kinds.pop().value if len(kinds) == 1 else Verdict.UNDECIDED.value


def decide(gains: Sequence[float], few: float) -> tuple[Verdict, str]:
    """The verdict on a quantity that is positive where the paper is right, and a note.

    Args:
        gains: One for each seed; infinite where one of two runs diverged, NaN where both did.
        few: The half-width that is assumed with fewer than three seeds.
    """
    if not gains:
        return Verdict.UNDECIDED, "not run"
    if all(map(math.isfinite, gains)):
        low, high = _interval(gains, few)
        note = _few(len(gains)) if len(gains) < FEW else _needed([gains]) if low <= 0 <= high else ""
    else:  # seeds decide, and NaN speaks for no side
        low = 1.0 if all(gain > 0 for gain in gains) else -1.0
        high = -1.0 if all(gain < 0 for gain in gains) else 1.0
        note = "a run diverged"
    return Verdict.REPRODUCED if low > 0 else Verdict.NOT if high < 0 else Verdict.UNDECIDED, note


def _interval(values: Sequence[float], few: float) -> tuple[float, float]:
    if len(values) < FEW:
        middle = sum(values) / len(values)
        return min(*values, middle - few), max(*values, middle + few)
    estimate = paired_interval(values)
    return estimate.low, estimate.high


def _needed(undecided: Sequence[Sequence[float]]) -> str:
    """How many seeds would decide all of these, if means and spreads stay as they are."""
    found = [seeds_to_decide(values) for values in undecided]
    return seeds_in_words(None if None in found else max(filter(None, found)))


def _few(n: int) -> str:
    return f"{'one seed' if n == 1 else f'{n} seeds'}, interval assumed; a spread takes {FEW}"


def _estimate(values: Sequence[float]) -> Estimate:
    """The interval a verdict is made with, where it is not assumed."""
    kept = [value for value in values if math.isfinite(value)]
    if len(kept) < FEW:
        return Estimate(sum(kept) / len(kept) if kept else math.nan, math.nan, math.nan, len(kept))
    return Estimate(sum(kept) / len(kept), *_interval(kept, 0), len(kept))


def _gain(better: float, worse: float) -> float:
    """How far ``better`` lies above ``worse``; a run without a figure loses."""
    if math.isnan(better) or math.isnan(worse):
        return math.nan if math.isnan(better) and math.isnan(worse) else math.inf if math.isnan(worse) else -math.inf
    return better - worse


def _losses_few(values: Sequence[float], share: float) -> float:
    kept = [value for value in values if math.isfinite(value)]
    return share * sum(kept) / len(kept) if kept else share


def _beats(summary: Summary, setting: Setting, first: str, second: str, measure: Measure) -> tuple[Verdict, str, str]:
    """Whether the first norm is better than the second: verdict, figure, note."""
    values = [(measure.of(a), measure.of(b)) for a, b in pairs(summary, setting, first, second)]
    gains = [_gain(measure.better * a, measure.better * b) for a, b in values]
    accuracy = measure in (TRAIN_ACCURACY, TEST_ACCURACY)
    few = FEW_ACCURACY if accuracy else _losses_few([value for pair in values for value in pair], FEW_LOSS)
    verdict, note = decide(gains, few)
    shown = _estimate([a - b for a, b in values])
    return verdict, shown.text(signed=True) if shown.n else "", note


def _accuracies(summary: Summary, protocol: str) -> Iterator[Part]:
    """Claim 1."""
    printed = {25: {"bln": 0.87, "bn": 0.78, "ln": 0.73}, 1: {"bln": 0.61, "ln": 0.34, "bn": 0.09}}
    for batch, accuracies in printed.items():
        setting = Setting("cnn", protocol, 0.2, batch)
        for norm, paper in accuracies.items():
            values, diverged = _reached(ended(summary, setting, norm), TRAIN_ACCURACY)
            verdict, note = _within(values, paper)
            row = f"batch {batch}: {NAMES[norm]} reaches {paper:.2f}"
            figure = _estimate(values).text() if values else ""
            yield Part(1, row, TRAIN_ACCURACY.name, verdict, figure, diverged or note)
        order = list(accuracies)
        for first, second in pairwise(order):
            verdict, figure, note = _beats(summary, setting, first, second, TRAIN_ACCURACY)
            row = f"batch {batch}: {NAMES[first]} above {NAMES[second]}"
            yield Part(1, row, TRAIN_ACCURACY.name, verdict, figure, note)


def _within(values: Sequence[float], paper: float) -> tuple[Verdict, str]:
    if not values:
        return Verdict.UNDECIDED, "not run"
    low, high = _interval(values, FEW_ACCURACY)
    note = "" if len(values) >= FEW else _few(len(values))
    if paper - TOLERANCE < low and high < paper + TOLERANCE:
        return Verdict.REPRODUCED, note
    if high < paper - TOLERANCE or low > paper + TOLERANCE:
        return Verdict.NOT, note
    crossed = [bound for bound in (paper - TOLERANCE, paper + TOLERANCE) if low <= bound <= high]
    return Verdict.UNDECIDED, note or _needed([[value - bound for value in values] for bound in crossed])


def _reached(runs: Sequence[Run], measure: Measure) -> tuple[list[float], str]:
    """Accuracies by themselves, and how many runs diverged: those classify as chance does."""
    values = [measure.of(run) for run in runs]
    diverged = sum(map(math.isnan, values))
    note = f"{diverged} of {len(values)} diverged" if diverged else ""
    return [
        CHANCE[run.setting.task] if math.isnan(value) else value for run, value in zip(runs, values, strict=True)
    ], note


def _convergence(summary: Summary, protocol: str) -> Iterator[Part]:
    """Claim 2."""
    for task in ("cnn", "rnn"):
        for batch in (25, 1):
            for rival in ("bn", "ln"):
                setting = Setting(task, protocol, 0.2, batch)
                row = f"{NAMES[task]}, batch {batch}: BLN better than {NAMES[rival]}"
                yield Part(2, row, TRAIN_LOSS.name, *_beats(summary, setting, "bln", rival, TRAIN_LOSS))
                yield Part(2, row, "training loss, each epoch", *_each_epoch(summary, setting, rival))
                for measure in (TEST_ACCURACY, TEST_LOSS):
                    yield Part(2, row, measure.name, *_beats(summary, setting, "bln", rival, measure))


def _each_epoch(summary: Summary, setting: Setting, rival: str) -> tuple[Verdict, str, str]:
    runs = pairs(summary, setting, "bln", rival)
    epochs = max((run.epochs for pair in runs for run in pair), default=0)
    if not epochs:
        return Verdict.UNDECIDED, "", "not run"

    def loss(run: Run, epoch: int) -> float:
        return run.train_loss[epoch] if epoch < run.epochs else math.nan

    verdicts, notes, lower = [], set(), 0
    open_gains, effects = [], []
    for epoch in range(epochs):
        values = [(loss(a, epoch), loss(b, epoch)) for a, b in runs]
        gains = [_gain(-a, -b) for a, b in values]
        effects.append(_estimate([a - b for a, b in values]))
        verdict, note = decide(gains, _losses_few([value for pair in values for value in pair], FEW_LOSS))
        verdicts.append(verdict)
        if verdict is Verdict.UNDECIDED and len(gains) >= FEW and all(map(math.isfinite, gains)):
            open_gains.append(gains)
        else:
            notes.add(note)
        lower += sum(gains) > 0
    total = (
        Verdict.NOT if Verdict.NOT in verdicts
        else Verdict.UNDECIDED if Verdict.UNDECIDED in verdicts else Verdict.REPRODUCED
    )  # fmt: skip
    if total is Verdict.UNDECIDED and open_gains:
        notes.add(_needed(open_gains))
    figure, known = f"lower in {lower} of {epochs}", [each for each in effects if each.n]
    if known:
        figure += f", at worst {max(known, key=lambda each: each.mean).text(signed=True)}"
    return total, figure, ", ".join(sorted(notes - {""}))


def _rivals(summary: Summary, protocol: str) -> Iterator[Part]:
    """Claim 3."""
    for task, batch, first, second in (("cnn", 25, "bn", "ln"), ("rnn", 25, "ln", "bn"), ("rnn", 1, "ln", "bn")):
        setting = Setting(task, protocol, 0.2, batch)
        row = f"{NAMES[task]}, batch {batch}: {NAMES[first]} better than {NAMES[second]}"
        for measure in MEASURES:
            yield Part(3, row, measure.name, *_beats(summary, setting, first, second, measure))
    for task, chance in CHANCE.items():
        for measure in (TRAIN_ACCURACY, TEST_ACCURACY):
            values, diverged = _reached(ended(summary, Setting(task, protocol, 0.2, 1), "bn"), measure)
            verdict, note = decide([chance + FAILED - value for value in values], FEW_ACCURACY)
            figure = _estimate(values).text() if values else ""
            yield Part(3, f"{NAMES[task]}, batch 1: BN fails", measure.name, verdict, figure, diverged or note)


def searched(summary: Summary, setting: Setting) -> list[Run]:
    """The finished BLN runs whose 16 configurations were tested."""
    return [run for run in ended(summary, setting, "bln") if run.status == "finished" and run.test_configurations]


def _lead(run: Run, group: Callable[[str], bool]) -> float:
    """How far the group's lowest test loss lies below the lowest outside it; a loss that is not a number is no loss."""
    inside, outside = (
        min((score.loss for config, score in run.test_configurations.items()
             if group(config) is member and not math.isnan(score.loss)), default=math.nan)
        for member in (True, False)
    )  # fmt: skip
    return _gain(-inside, -outside)


def _leaders(summary: Summary, protocol: str) -> Iterator[Part]:
    """Claim 4."""
    data = {0.2: "20 % of the data", 1.0: "all data"}
    said: tuple[tuple[str, float, str, Callable[[str], bool], int], ...] = (
        ("cnn", 0.2, "TTxx leads", lambda config: config.startswith("TT"), 1),
        ("cnn", 1.0, "FTxx leads", lambda config: config.startswith("FT"), 1),
        ("cnn", 0.2, "xxTT does not lead", lambda config: config.endswith("TT"), -1),
        ("cnn", 1.0, "xxTT does not lead", lambda config: config.endswith("TT"), -1),
        ("rnn", 0.2, "E_B = F leads", lambda config: config[0] == "F", 1),
        ("rnn", 1.0, "E_B = F leads", lambda config: config[0] == "F", 1),
    )
    for task, fraction, what, group, sign in said:
        runs = searched(summary, Setting(task, protocol, fraction, 25))
        leads = [_lead(run, group) for run in runs]
        losses = [score.loss for run in runs for score in run.test_configurations.values()]
        verdict, note = decide([sign * lead for lead in leads], _losses_few(losses, FEW_CONFIGURATION))
        shown = _estimate([-lead for lead in leads])
        figure = shown.text(signed=True, digits=4) if shown.n else ""
        yield Part(4, f"{NAMES[task]}, {data[fraction]}: {what}", "test loss, best inside minus best outside",
                   verdict, figure, note)  # fmt: skip


def _dependence(summary: Summary, protocol: str) -> Iterator[Part]:
    """Claim 5."""
    settings = [setting for task in ("cnn", "rnn") for setting in summary.settings(task, protocol)]
    runs = [run for setting in settings for run in searched(summary, setting)]
    leads = [_lead(run, lambda config: config[3] == "F") for run in runs]
    leads = [lead for lead in leads if not math.isnan(lead)]
    hits = sum(lead > 0 for lead in leads)
    share = share_interval(hits, len(leads))
    verdict, column = Verdict.UNDECIDED, "configurations"
    if leads:
        verdict = Verdict.REPRODUCED if share.low > 0.5 else Verdict.NOT if share.high < 0.5 else Verdict.UNDECIDED
    figure = f"best in {hits} of {len(leads)} runs [{share.low:.0%}, {share.high:.0%}]" if leads else ""
    note = "" if leads else "not run"
    if leads and verdict is Verdict.UNDECIDED:
        note = seeds_in_words(runs_to_decide(hits, len(leads))).replace("seeds", "runs")
    yield Part(5, "Std_F = F has the lowest test loss in most runs", column, verdict, figure, note)
    few, every = "20 %", "all data"
    said = (
        (f"task: CNN or RNN, {few}, batch 25", ("cnn", 0.2, 25), ("rnn", 0.2, 25)),
        (f"task: CNN or RNN, {few}, batch 1", ("cnn", 0.2, 1), ("rnn", 0.2, 1)),
        (f"task: CNN or RNN, {every}, batch 25", ("cnn", 1.0, 25), ("rnn", 1.0, 25)),
        (f"data size: CNN, batch 25, {few} or {every}", ("cnn", 0.2, 25), ("cnn", 1.0, 25)),
        (f"data size: RNN, batch 25, {few} or {every}", ("rnn", 0.2, 25), ("rnn", 1.0, 25)),
        (f"batch size: CNN, {few}, batch 25 or 1", ("cnn", 0.2, 25), ("cnn", 0.2, 1)),
        (f"batch size: RNN, {few}, batch 25 or 1", ("rnn", 0.2, 25), ("rnn", 0.2, 1)),
    )
    for row, *two in said:
        both = [searched(summary, Setting(task, protocol, fraction, batch)) for task, fraction, batch in two]
        yield Part(5, f"depends on {row}", column, *_differ(*both))


def _favourite(runs: Sequence[Run]) -> str | None:
    """The configuration with the lowest validation loss, mean over seeds; on test where validation was not kept.

    None where no configuration has a loss that is a number in every seed.
    """

    def cost(config: str) -> float:
        losses = [(run.validation_configurations or run.test_configurations)[config].loss for run in runs]
        return math.inf if any(map(math.isnan, losses)) else sum(losses) / len(losses)

    best = min(CONFIGURATIONS, key=cost)
    return best if math.isfinite(cost(best)) else None


def _differ(first: list[Run], second: list[Run]) -> tuple[Verdict, str, str]:
    """Whether two settings want different configurations."""
    if not (first and second):
        return Verdict.UNDECIDED, "", "not run"
    own, other = _favourite(first), _favourite(second)
    if own is None or other is None:
        return Verdict.UNDECIDED, "", "no loss is a number"
    figure = f"{own} / {other}"
    if own == other:
        return Verdict.NOT, figure, "the same is chosen"
    verdicts, notes, effects = set(), set(), []
    open_gains = []
    for runs, good, bad in ((first, own, other), (second, other, own)):
        losses = [(run.test_configurations[good].loss, run.test_configurations[bad].loss) for run in runs]
        few = _losses_few([loss for pair in losses for loss in pair], FEW_CONFIGURATION)
        gains = [_gain(-a, -b) for a, b in losses]
        verdict, note = decide(gains, few)
        verdicts.add(verdict)
        if verdict is Verdict.UNDECIDED and len(gains) >= FEW and all(map(math.isfinite, gains)):
            open_gains.append(gains)
        else:
            notes.add(note.replace("a run diverged", "a loss is not a number"))
        effects.append(_estimate([a - b for a, b in losses]))
    if open_gains:
        notes.add(_needed(open_gains))
    if all(each.n for each in effects):
        figure += ": " + " and ".join(each.text(signed=True, digits=4) for each in effects)
    verdict = Verdict.NOT if Verdict.NOT in verdicts else verdicts.pop() if len(verdicts) == 1 else Verdict.UNDECIDED
    return verdict, figure, ", ".join(sorted(notes - {""}))
