"""The paper's five claims, split into parts that runs can decide, and the verdicts on them.

A part is stated as a quantity that is positive where the paper is right, with one value for each seed. It is
*reproduced* where the 95 % interval of its mean lies above 0, *not reproduced* where it lies below 0, and *undecided*
otherwise. :data:`RULES` says the same for readers of the report.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, pairwise

from .compare import MEASURES, TEST_ACCURACY, TEST_LOSS, TRAIN_ACCURACY, TRAIN_LOSS, Measure, ended, pairs
from .statistics import Estimate, paired_interval, runs_to_decide, seeds_in_words, seeds_to_decide, share_interval
from .summary import CONFIGURATIONS, Run, Setting, Summary

TOLERANCE = 0.05
"""The largest distance of a mean accuracy from the one the paper prints, which is of a single run."""
FAILED = 0.10
"""The distance above chance below which a net counts as failed."""
MIN_SEEDS = 3
"""The fewest seeds whose spread is used. With two, the half-width of an interval is 9 deviations: of no use."""
ASSUMED_ACCURACY, ASSUMED_LOSS, ASSUMED_CONFIGURATION = 0.05, 0.10, 0.01
"""Half-widths assumed with fewer seeds: of accuracies; of losses, as a share; and, as a share too, of the losses of
configurations, which have weights and test set in common."""
CHANCE = {"cnn": 0.1, "rnn": 0.5}
PROTOCOLS = {"paper": "As the authors did it", "clean": "With mini-batches drawn anew each epoch"}
NAMES = {"cnn": "CNN", "rnn": "RNN", "bln": "BLN", "bn": "BN", "ln": "LN"}

RULES = (
    "Each part is put as a difference, paired by seed, that the paper says lies on one side of 0. It is reproduced "
    "when the 95 % interval of the mean lies on that side, not reproduced when it lies on the other, and undecided "
    "when it contains 0 or when a run is missing.",
    "What is undecided says how many seeds would decide, if mean and spread stay as they are.",
    "The interval is the wider of the paired bootstrap and the t interval: a bootstrap of few seeds is too narrow.",
    f"With fewer than {MIN_SEEDS} seeds there is no useful interval. One is assumed, and the verdict marked: "
    f"± {ASSUMED_ACCURACY} for an accuracy, ± {ASSUMED_LOSS:.0%} for a loss, ± {ASSUMED_CONFIGURATION:.0%} for the "
    "losses of two configurations, which share weights and test set.",
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
    """What the runs say about a part of a claim."""

    REPRODUCED = "reproduced"
    NOT = "not reproduced"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class ClaimPart:
    """A part of a claim that runs can decide.

    Attributes:
        claim: The claim's number.
        row: The statement.
        column: The measure it is judged by.
        verdict: What the runs say.
        effect: The effect with its interval, as text; empty where nothing has been run.
        note: A caveat of the verdict, such as a single seed.
    """

    claim: int
    row: str
    column: str
    verdict: Verdict
    effect: str = ""
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


def judge(summary: Summary, protocol: str = "paper") -> list[ClaimPart]:
    """Return every part of the five claims with its verdict, by the runs of one protocol."""
    claims = (_accuracies, _convergence, _rivals, _leaders, _dependence)
    return [part for claim in claims for part in claim(summary, protocol)]


def outcome(parts: Sequence[ClaimPart]) -> str:
    """Return a sentence that counts the parts of the claims by verdict."""
    counts = Counter(part.verdict for part in parts)
    reproduced, refuted, undecided = (counts[verdict] for verdict in Verdict)
    return (
        f"of {counts.total()} parts of the claims {reproduced} are reproduced, {refuted} not reproduced, and "
        f"{undecided} undecided for want of runs."
    )


def overall(parts: Sequence[ClaimPart]) -> str:
    """Return the verdict on a claim: that of its parts if they agree, ``in part`` if some hold and some do not."""
    kinds = {part.verdict for part in parts}
    if kinds >= {Verdict.REPRODUCED, Verdict.NOT}:
        return "in part"
    return kinds.pop().value if len(kinds) == 1 else Verdict.UNDECIDED.value


def tally(parts: Sequence[ClaimPart]) -> str:
    """Count the parts by verdict: ``4 reproduced, 6 undecided``."""
    counts = Counter(part.verdict for part in parts)
    return ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict])


def decide(gains: Sequence[float], assumed: float) -> tuple[Verdict, str]:
    """Return the verdict on a quantity that is positive where the paper is right, and a note.

    Args:
        gains: One for each seed; infinite where one of two runs diverged, NaN where both did.
        assumed: The half-width of the interval with fewer than three seeds.
    """
    if not gains:
        return Verdict.UNDECIDED, "not run"
    if all(map(math.isfinite, gains)):
        low, high = _interval(gains, assumed)
        note = _assumed_note(len(gains)) if len(gains) < MIN_SEEDS else _needed([gains]) if low <= 0 <= high else ""
    else:  # all seeds must agree, and NaN agrees with neither side
        low = 1.0 if all(gain > 0 for gain in gains) else -1.0
        high = -1.0 if all(gain < 0 for gain in gains) else 1.0
        note = "a run diverged"
    return Verdict.REPRODUCED if low > 0 else Verdict.NOT if high < 0 else Verdict.UNDECIDED, note


def _decide_each(
    cases: Iterable[tuple[Sequence[float], float]],
) -> tuple[list[Verdict], set[str], list[Sequence[float]]]:
    """Decide on several quantities: return verdicts, notes, and the gains of those that more seeds would decide."""
    verdicts, notes, more_seeds = [], set(), []
    for gains, assumed in cases:
        verdict, note = decide(gains, assumed)
        verdicts.append(verdict)
        if verdict is Verdict.UNDECIDED and len(gains) >= MIN_SEEDS and all(map(math.isfinite, gains)):
            more_seeds.append(gains)
        else:
            notes.add(note)
    return verdicts, notes, more_seeds


def _all_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on a statement that holds where all of these do."""
    return next((kind for kind in (Verdict.NOT, Verdict.UNDECIDED) if kind in verdicts), Verdict.REPRODUCED)


def _interval(values: Sequence[float], assumed: float) -> tuple[float, float]:
    if len(values) < MIN_SEEDS:
        middle = sum(values) / len(values)
        return min(*values, middle - assumed), max(*values, middle + assumed)
    estimate = paired_interval(values)
    return estimate.low, estimate.high


def _needed(undecided: Sequence[Sequence[float]]) -> str:
    """Say how many seeds would decide all of these, if means and spreads stay as they are."""
    seeds = [seeds_to_decide(gains) for gains in undecided]
    return seeds_in_words(None if None in seeds else max(filter(None, seeds)))


def _assumed_note(n: int) -> str:
    return f"{'one seed' if n == 1 else f'{n} seeds'}, interval assumed; a spread takes {MIN_SEEDS}"


def _estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of the finite values, with the interval a verdict is made with unless that is assumed."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < MIN_SEEDS:
        return Estimate(sum(finite) / len(finite) if finite else math.nan, math.nan, math.nan, len(finite))
    return Estimate(sum(finite) / len(finite), *_interval(finite, 0), len(finite))


def _gain(better: float, worse: float) -> float:
    """Return how far ``better`` lies above ``worse``; a run without a number loses."""
    if math.isnan(better) or math.isnan(worse):
        return math.nan if math.isnan(better) and math.isnan(worse) else math.inf if math.isnan(worse) else -math.inf
    return better - worse


def _assumed_loss(losses: Iterable[float], share: float) -> float:
    """Return the half-width assumed for losses: this share of their mean."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return share * sum(finite) / len(finite) if finite else share


def _beats(summary: Summary, setting: Setting, first: str, second: str, measure: Measure) -> tuple[Verdict, str, str]:
    """Judge whether the first norm is better than the second: verdict, effect, note."""
    values = [(measure.of(a), measure.of(b)) for a, b in pairs(summary, setting, first, second)]
    gains = [_gain(measure.better * a, measure.better * b) for a, b in values]
    accuracy = measure in (TRAIN_ACCURACY, TEST_ACCURACY)
    assumed = ASSUMED_ACCURACY if accuracy else _assumed_loss(chain.from_iterable(values), ASSUMED_LOSS)
    verdict, note = decide(gains, assumed)
    effect = _estimate([a - b for a, b in values])
    return verdict, effect.text(signed=True) if effect.n else "", note


def _accuracies(summary: Summary, protocol: str) -> Iterator[ClaimPart]:
    """Claim 1."""
    printed = {25: {"bln": 0.87, "bn": 0.78, "ln": 0.73}, 1: {"bln": 0.61, "ln": 0.34, "bn": 0.09}}
    for batch, accuracies in printed.items():
        setting = Setting("cnn", protocol, 0.2, batch)
        for norm, paper in accuracies.items():
            values, diverged = _reached(ended(summary, setting, norm), TRAIN_ACCURACY)
            verdict, note = _within(values, paper)
            row = f"batch {batch}: {NAMES[norm]} reaches {paper:.2f}"
            effect = _estimate(values).text() if values else ""
            yield ClaimPart(1, row, TRAIN_ACCURACY.name, verdict, effect, diverged or note)
        for first, second in pairwise(accuracies):
            row = f"batch {batch}: {NAMES[first]} above {NAMES[second]}"
            yield ClaimPart(1, row, TRAIN_ACCURACY.name, *_beats(summary, setting, first, second, TRAIN_ACCURACY))


def _within(values: Sequence[float], paper: float) -> tuple[Verdict, str]:
    """Judge whether accuracies are the one the paper prints, and return a note."""
    if not values:
        return Verdict.UNDECIDED, "not run"
    low, high = _interval(values, ASSUMED_ACCURACY)
    note = "" if len(values) >= MIN_SEEDS else _assumed_note(len(values))
    if paper - TOLERANCE < low and high < paper + TOLERANCE:
        return Verdict.REPRODUCED, note
    if high < paper - TOLERANCE or low > paper + TOLERANCE:
        return Verdict.NOT, note
    crossed = [bound for bound in (paper - TOLERANCE, paper + TOLERANCE) if low <= bound <= high]
    return Verdict.UNDECIDED, note or _needed([[value - bound for value in values] for bound in crossed])


def _reached(runs: Sequence[Run], measure: Measure) -> tuple[list[float], str]:
    """Return accuracies and a note on runs that diverged, which count as chance."""
    values = [measure.of(run) for run in runs]
    diverged = sum(map(math.isnan, values))
    note = f"{diverged} of {len(values)} diverged" if diverged else ""
    return [
        CHANCE[run.setting.task] if math.isnan(value) else value for run, value in zip(runs, values, strict=True)
    ], note


def _convergence(summary: Summary, protocol: str) -> Iterator[ClaimPart]:
    """Claim 2."""
    for task in ("cnn", "rnn"):
        for batch in (25, 1):
            for rival in ("bn", "ln"):
                setting = Setting(task, protocol, 0.2, batch)
                row = f"{NAMES[task]}, batch {batch}: BLN better than {NAMES[rival]}"
                yield ClaimPart(2, row, TRAIN_LOSS.name, *_beats(summary, setting, "bln", rival, TRAIN_LOSS))
                yield ClaimPart(2, row, "training loss, each epoch", *_each_epoch(summary, setting, rival))
                for measure in (TEST_ACCURACY, TEST_LOSS):
                    yield ClaimPart(2, row, measure.name, *_beats(summary, setting, "bln", rival, measure))


def _each_epoch(summary: Summary, setting: Setting, rival: str) -> tuple[Verdict, str, str]:
    """Judge whether the training loss of BLN is lower at every epoch: verdict, effect, note."""
    runs = pairs(summary, setting, "bln", rival)
    epochs = max((run.epochs for pair in runs for run in pair), default=0)
    if not epochs:
        return Verdict.UNDECIDED, "", "not run"

    def loss(run: Run, epoch: int) -> float:
        return run.train_loss[epoch] if epoch < run.epochs else math.nan

    losses = [[(loss(a, epoch), loss(b, epoch)) for a, b in runs] for epoch in range(epochs)]
    gains = [[_gain(-a, -b) for a, b in values] for values in losses]
    assumed = [_assumed_loss(chain.from_iterable(values), ASSUMED_LOSS) for values in losses]
    verdicts, notes, more_seeds = _decide_each(zip(gains, assumed, strict=True))
    verdict = _all_of(verdicts)
    if verdict is Verdict.UNDECIDED and more_seeds:
        notes.add(_needed(more_seeds))
    effect = f"lower in {sum(sum(of_epoch) > 0 for of_epoch in gains)} of {epochs}"
    differences = [_estimate([a - b for a, b in values]) for values in losses]
    if known := [difference for difference in differences if difference.n]:
        effect += f", at worst {max(known, key=lambda difference: difference.mean).text(signed=True)}"
    return verdict, effect, ", ".join(sorted(notes - {""}))


def _rivals(summary: Summary, protocol: str) -> Iterator[ClaimPart]:
    """Claim 3."""
    for task, batch, first, second in (("cnn", 25, "bn", "ln"), ("rnn", 25, "ln", "bn"), ("rnn", 1, "ln", "bn")):
        setting = Setting(task, protocol, 0.2, batch)
        row = f"{NAMES[task]}, batch {batch}: {NAMES[first]} better than {NAMES[second]}"
        for measure in MEASURES:
            yield ClaimPart(3, row, measure.name, *_beats(summary, setting, first, second, measure))
    for task, chance in CHANCE.items():
        for measure in (TRAIN_ACCURACY, TEST_ACCURACY):
            values, diverged = _reached(ended(summary, Setting(task, protocol, 0.2, 1), "bn"), measure)
            verdict, note = decide([chance + FAILED - value for value in values], ASSUMED_ACCURACY)
            effect = _estimate(values).text() if values else ""
            yield ClaimPart(3, f"{NAMES[task]}, batch 1: BN fails", measure.name, verdict, effect, diverged or note)


def searched(summary: Summary, setting: Setting) -> list[Run]:
    """Return the finished BLN runs whose 16 configurations were tested."""
    return [run for run in ended(summary, setting, "bln") if run.status == "finished" and run.test_configurations]


def _lead(run: Run, group: Callable[[str], bool]) -> float:
    """Return how far the lowest test loss in the group lies below the lowest outside it; NaN losses are left out."""
    inside, outside = (
        min((score.loss for config, score in run.test_configurations.items()
             if group(config) is member and not math.isnan(score.loss)), default=math.nan)
        for member in (True, False)
    )  # fmt: skip
    return _gain(-inside, -outside)


def _leaders(summary: Summary, protocol: str) -> Iterator[ClaimPart]:
    """Claim 4."""
    data = {0.2: "20 % of the data", 1.0: "all data"}
    statements: tuple[tuple[str, float, str, Callable[[str], bool], int], ...] = (
        ("cnn", 0.2, "TTxx leads", lambda config: config.startswith("TT"), 1),
        ("cnn", 1.0, "FTxx leads", lambda config: config.startswith("FT"), 1),
        ("cnn", 0.2, "xxTT does not lead", lambda config: config.endswith("TT"), -1),
        ("cnn", 1.0, "xxTT does not lead", lambda config: config.endswith("TT"), -1),
        ("rnn", 0.2, "E_B = F leads", lambda config: config[0] == "F", 1),
        ("rnn", 1.0, "E_B = F leads", lambda config: config[0] == "F", 1),
    )
    for task, fraction, statement, group, sign in statements:
        runs = searched(summary, Setting(task, protocol, fraction, 25))
        leads = [_lead(run, group) for run in runs]
        losses = [score.loss for run in runs for score in run.test_configurations.values()]
        verdict, note = decide([sign * lead for lead in leads], _assumed_loss(losses, ASSUMED_CONFIGURATION))
        difference = _estimate([-lead for lead in leads])
        effect = difference.text(signed=True, digits=4) if difference.n else ""
        row = f"{NAMES[task]}, {data[fraction]}: {statement}"
        yield ClaimPart(4, row, "test loss, best inside minus best outside", verdict, effect, note)


def _dependence(summary: Summary, protocol: str) -> Iterator[ClaimPart]:
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
    effect = f"best in {hits} of {len(leads)} runs [{share.low:.0%}, {share.high:.0%}]" if leads else ""
    note = "" if leads else "not run"
    if leads and verdict is Verdict.UNDECIDED:
        note = seeds_in_words(runs_to_decide(hits, len(leads))).replace("seeds", "runs")
    yield ClaimPart(5, "Std_F = F has the lowest test loss in most runs", column, verdict, effect, note)
    few, every = "20 %", "all data"
    comparisons = (
        (f"task: CNN or RNN, {few}, batch 25", ("cnn", 0.2, 25), ("rnn", 0.2, 25)),
        (f"task: CNN or RNN, {few}, batch 1", ("cnn", 0.2, 1), ("rnn", 0.2, 1)),
        (f"task: CNN or RNN, {every}, batch 25", ("cnn", 1.0, 25), ("rnn", 1.0, 25)),
        (f"data size: CNN, batch 25, {few} or {every}", ("cnn", 0.2, 25), ("cnn", 1.0, 25)),
        (f"data size: RNN, batch 25, {few} or {every}", ("rnn", 0.2, 25), ("rnn", 1.0, 25)),
        (f"batch size: CNN, {few}, batch 25 or 1", ("cnn", 0.2, 25), ("cnn", 0.2, 1)),
        (f"batch size: RNN, {few}, batch 25 or 1", ("rnn", 0.2, 25), ("rnn", 0.2, 1)),
    )
    for row, *two in comparisons:
        first, second = (searched(summary, Setting(task, protocol, fraction, batch)) for task, fraction, batch in two)
        yield ClaimPart(5, f"depends on {row}", column, *_differ(first, second))


def _favourite(runs: Sequence[Run]) -> str | None:
    """Return the configuration with the lowest validation loss, mean over seeds; on test where validation was not kept.

    ``None`` where no configuration has a loss that is a number in every seed.
    """

    def cost(config: str) -> float:
        losses = [(run.validation_configurations or run.test_configurations)[config].loss for run in runs]
        return math.inf if any(map(math.isnan, losses)) else sum(losses) / len(losses)

    best = min(CONFIGURATIONS, key=cost)
    return best if math.isfinite(cost(best)) else None


def _differ(first: list[Run], second: list[Run]) -> tuple[Verdict, str, str]:
    """Judge whether two settings want different configurations: verdict, effect, note."""
    if not (first and second):
        return Verdict.UNDECIDED, "", "not run"
    best_first, best_second = _favourite(first), _favourite(second)
    if best_first is None or best_second is None:
        return Verdict.UNDECIDED, "", "no loss is a number"
    effect = f"{best_first} / {best_second}"
    if best_first == best_second:
        return Verdict.NOT, effect, "the same is chosen"
    losses = [
        [(run.test_configurations[chosen].loss, run.test_configurations[other].loss) for run in runs]
        for runs, chosen, other in ((first, best_first, best_second), (second, best_second, best_first))
    ]
    gains = [[_gain(-a, -b) for a, b in values] for values in losses]
    assumed = [_assumed_loss(chain.from_iterable(values), ASSUMED_CONFIGURATION) for values in losses]
    verdicts, notes, more_seeds = _decide_each(zip(gains, assumed, strict=True))
    notes = {note.replace("a run diverged", "a loss is not a number") for note in notes}
    if more_seeds:
        notes.add(_needed(more_seeds))
    differences = [_estimate([a - b for a, b in values]) for values in losses]
    if all(difference.n for difference in differences):
        effect += ": " + " and ".join(difference.text(signed=True, digits=4) for difference in differences)
    return _all_of(verdicts), effect, ", ".join(sorted(notes - {""}))
