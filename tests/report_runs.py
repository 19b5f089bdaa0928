"""Runs that never happened, near what the paper's authors logged."""

import json
from importlib.resources import files

import numpy as np

from bln.experiments.report.summary import CONFIGURATIONS, CURVES

AUTHORS = json.loads((files("bln.experiments") / "authors.json").read_text("utf-8"))["runs"]
RESNET = ("bln", "bln-pooled", "bn", "gn", "ln", "batchrenorm")


ORIGIN = {
    "commit": "0123abcd", "device": "a machine", "versions": {"bln": "0.1.0", "torch": "2", "python": "3"},
    "started": "2025-01-31T12:00:00+00:00",
}  # fmt: skip


def summary(runs, **more):
    return {
        "format": 1, "bln": "0.1.0", "commit": "0123abcd", "created": "2025-01-31T12:00:00+00:00",
        "machines": ["2 CPU cores", "one GPU"], "runs": runs, **more,
    }  # fmt: skip


def run(
    rng, task="cnn", norm="bln", batch_size=25, fraction=0.2, seed=0, protocol="paper", epochs=5, level=0.0, **more
):
    """A finished run; ``level`` makes its losses higher and its accuracies lower."""
    fall = np.exp(-np.arange(1, epochs + 1) / epochs) + level

    def noisy(values, scale=0.01):
        return (values + rng.normal(0, scale, np.shape(values))).tolist()

    configurations = None
    if norm.startswith("bln"):
        configurations = {
            part: {config: noisy(np.array([1.0 + level, 0.6 - level / 4])) for config in CONFIGURATIONS}
            for part in ("validation", "test")
        }
    curves = noisy(fall), noisy(0.9 - fall / 4), noisy(fall + 0.2), noisy(0.8 - fall / 4)
    loss, accuracy = noisy(np.array([1.0 + level, 0.6 - level / 4]))
    return {
        "task": task, "norm": norm, "batch_size": batch_size, "fraction": fraction, "seed": seed, "protocol": protocol,
        "status": "finished",
        "curves": dict(zip(CURVES, curves, strict=True)),
        "best_epoch": epochs, "test": {"loss": loss, "accuracy": accuracy},
        "chosen": "TTFF" if configurations else None, "configurations": configurations,
        "seconds": noisy(np.full(epochs, 3.0)), **ORIGIN, **more,
    }  # fmt: skip


def by_size(norm, size, seed, accuracy, rate=0.003, validation=0.9, **more):
    """A finished run of the study of batch sizes, as its table has it."""
    curve = [0.5, validation]
    curves = dict.fromkeys(("train_loss", "train_accuracy", "validation_loss", "validation_accuracy"), curve)
    return {
        "task": "resnet20", "norm": norm, "batch_size": size, "learning_rate": rate, "seed": seed, "samples": 100,
        "epochs": 2, "status": "finished", "curves": curves, "test": {"loss": 1.0, "accuracy": accuracy},
        "hours": 0.01, "memory_mib": 12.5, "together": 1, **ORIGIN, **more,
    }  # fmt: skip


def like_authors(rng, seeds=5, noise=0.02, **only):
    """The authors' runs with noise on every figure, once for each seed; ``only`` selects, e.g. ``task="cnn"``."""
    runs = []
    for seed in range(seeds):
        for theirs in AUTHORS:
            if any(theirs[key] != value for key, value in only.items()):
                continue
            factor = np.exp(rng.normal(0, noise))

            def near(value, factor=factor, scale=noise / 2):
                return None if value is None else float(value * factor * np.exp(rng.normal(0, scale)))

            ours = json.loads(json.dumps(theirs)) | {"seed": seed, **ORIGIN}
            if not ours["curves"]["train_loss"]:  # the authors logged no curves of all data
                twin = next(
                    r for r in AUTHORS if r["task"] == ours["task"] and r["norm"] == "bln" and r["batch_size"] == 25
                )
                ours["curves"], ours["best_epoch"] = json.loads(json.dumps(twin["curves"])), twin["best_epoch"]
            ours["curves"] = {
                name: [near(v) if name.endswith("loss") else min(1.0, near(v)) for v in curve]
                for name, curve in ours["curves"].items()
            }
            ours["test"] = {key: near(value) for key, value in ours["test"].items()}
            if theirs["configurations"]:
                shared = theirs["configurations"]["test"]
                tables = {}
                for part in ("validation", "test"):
                    tables[part] = {
                        config: [near(2.0 if loss is None else loss, scale=0.001), near(accuracy, scale=0.001)]
                        for config, (loss, accuracy) in shared.items()
                    }
                ours["configurations"] = tables
                ours["chosen"] = min(CONFIGURATIONS, key=lambda config: tables["validation"][config][0])
                ours["test"] = dict(zip(("loss", "accuracy"), tables["test"][ours["chosen"]], strict=True))
            ours["seconds"] = [near(value / 10) for value in theirs["seconds"]] * len(ours["curves"]["train_loss"])
            runs.append(ours)
    return runs


def everything(rng, seeds=4):
    """Every task of the report."""
    runs = like_authors(rng, seeds)
    for seed in range(seeds):
        for at, norm in enumerate(RESNET):
            runs += [
                run(rng, "resnet", norm, batch, 0.16, seed, "clean", level=0.1 * at + 0.3 / batch)
                for batch in (2, 4, 8, 32)
            ]
        for task in ("digits-cnn", "digits-rnn"):
            for norm, level in (("bln", 0.0), ("bn", 0.2), ("ln", 0.1)):
                runs += [run(rng, task, norm, batch, 1.0, seed, "clean", 8, level) for batch in (1, 8, 32)]
    return runs


ORDER = {("cnn", 25): ("bln", "bn", "ln"), ("cnn", 1): ("bln", "ln", "bn"),
         ("rnn", 25): ("bln", "ln", "bn"), ("rnn", 1): ("bln", "ln", "bn")}  # fmt: skip
"""The norms as the paper ranks them, best first."""
REACHED = {("cnn", 25): (0.87, 0.78, 0.73), ("cnn", 1): (0.61, 0.34, 0.1),
           ("rnn", 25): (0.95, 0.85, 0.75), ("rnn", 1): (0.9, 0.8, 0.5)}  # fmt: skip
ELSEWHERE = {("cnn", 25): (0.97, 0.9, 0.6), ("cnn", 1): (0.7, 0.5, 0.2),
             ("rnn", 25): (0.95, 0.85, 0.75), ("rnn", 1): (0.9, 0.8, 0.7)}  # fmt: skip
"""Accuracies none of which the paper prints for the norm at that place."""
LEADERS = {("cnn", 0.2, 25): "TTFF", ("cnn", 1.0, 25): "FTFF", ("cnn", 0.2, 1): "TFFF",
           ("rnn", 0.2, 25): "FFTF", ("rnn", 1.0, 25): "FTTF", ("rnn", 0.2, 1): "TFTF"}  # fmt: skip
"""A configuration for each setting, as the paper claims: no two of those that are compared agree."""


def world(rng, right=True, seeds=4, protocol="paper", noise=0.003):
    """Runs in which every part of every claim holds, or in which none does."""
    runs = []
    for (task, fraction, batch), leader in LEADERS.items():
        order = ORDER[task, batch] if right else ORDER[task, batch][::-1]
        for place, norm in enumerate(order):
            for seed in range(seeds):
                one = run(rng, task, norm, batch, fraction, seed, protocol, level=0.3 * place)
                accuracy = (REACHED if right else ELSEWHERE)[task, batch][place] + rng.normal(0, noise)
                one["curves"]["train_accuracy"][-1] = accuracy
                one["test"]["accuracy"] = accuracy
                best = leader if right else "TFTT"
                if norm == "bln":
                    for part in one["configurations"].values():
                        for config, score in part.items():
                            score[0] = 1 + 0.3 * place + 0.1 * (config != best) + rng.normal(0, noise)
                    one["chosen"] = best
                runs.append(one)
    return runs
