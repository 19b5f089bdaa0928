"""What the report of accuracy against batch size says follows from the runs, whatever they are."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from bln.cli import main
from bln.experiments.report import sizes
from bln.experiments.report.markup import unbroken
from bln.experiments.report.statistics import seeds_to_decide
from report_runs import by_size

NORMS = ("bn", "gn", "ln", "batchrenorm", "bln", "bln-grouped", "bln-g1")


def table(path, levels, seeds=5, spread=0.001, batch_sizes=(1, 4)):
    """A table in which each norm has its accuracy at each batch size, or the same everywhere, with that spread."""
    noise = np.linspace(-spread, spread, seeds)
    rows = []
    for norm, level in levels.items():
        for at, size in enumerate(batch_sizes):
            accuracy = level[at] if isinstance(level, tuple) else level
            own = noise if norm.startswith("bln") else -noise
            rows += [by_size(norm, size, seed, float(accuracy + own[seed])) for seed in range(seeds)]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    (found,) = sizes.read(path)
    return found


@pytest.mark.parametrize(
    ("ours", "word", "verdicts"),
    [
        (0.8, "holds", ["ahead", "ahead"]),
        ((0.7, 0.8), "holds", ["level", "ahead"]),
        ((0.8, 0.69), "does not hold", ["ahead", "behind"]),
        ((0.6, 0.6), "does not hold", ["behind", "behind"]),
    ],
)
def test_the_verdict_follows_from_the_accuracies(tmp_path, ours, word, verdicts):
    results = table(tmp_path / "runs.jsonl", {"bn": (0.5, 0.7), "gn": (0.7, 0.6), "bln-grouped": ours})
    found = sizes.standings(results)
    assert [each.rival for each in found] == ["gn", "bn"]
    assert [each.verdict for each in found] == verdicts
    assert sizes.verdict(found) == word
    said, clauses = sizes.conclusion(results)
    claim = "BLN grouped is ahead of or level with the best of BatchNorm and GroupNorm at every batch size."
    assert said == {"holds": "Here ", "does not hold": "Not so here: "}[word] + claim
    assert [clause.split()[0] for clause in clauses] == verdicts


def test_what_is_undecided_says_how_many_seeds_would_decide(tmp_path):
    results = table(tmp_path / "runs.jsonl", {"gn": 0.7, "bln-grouped": 0.705}, spread=0.01)
    found = sizes.standings(results)
    needed = seeds_to_decide(results.differences(1, "gn"), sizes.MARGIN)
    assert [each.verdict for each in found] == ["undecided"] * 2
    assert sizes.verdict(found) == "undecided"
    assert needed > 5
    assert f"about {needed} seeds would decide" in sizes.conclusion(results)[1][0]
    one = table(tmp_path / "runs.jsonl", {"gn": 0.7, "bln-grouped": 0.9}, seeds=1)
    assert {each.verdict for each in sizes.standings(one)} == {"undecided"}


@pytest.mark.parametrize(("mean", "margin"), [(0.01, 0.0), (0.002, 0.01), (0.0, 0.01)])
def test_so_many_seeds_do_decide(mean, margin):
    """Values with the mean and the deviation of the few, as many as were asked for, and one fewer."""

    def values(n):
        found = np.resize([-1.0, 1.0], n) + 0.0
        found = (found - found.mean()) / found.std(ddof=1)
        return (mean + 0.03 * found).tolist()

    n = seeds_to_decide(values(4), margin)
    decided = [
        sizes.mean_interval(values(count)).low > 0
        or (sizes.mean_interval(values(count)).low > -margin and sizes.mean_interval(values(count)).high < margin)
        for count in (n - 1, n)
    ]
    assert decided == [False, True]
    assert seeds_to_decide([0.0, 0.02, -0.02]) is None


def test_the_learning_rate_is_chosen_on_validation_data_and_said(tmp_path):
    rows = [
        by_size("gn", 4, seed, accuracy, rate, validation)
        for seed in range(3)
        for rate, accuracy, validation in ((0.001, 0.9, 0.5), (0.003, 0.8, 0.7), (0.01, 0.6, 0.6))
    ]
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    (results,) = sizes.read(path)
    assert results.estimate("gn", 4).mean == pytest.approx(0.8)
    page = sizes.write([results], tmp_path).read_text()
    assert "<td>0.003</td><td>0.001, 0.003, 0.01</td>" in page
    assert "36" in page  # seconds of a run
    assert "12.5" in page  # MiB


def test_the_page_begins_and_the_terminal_ends_with_what_the_runs_say(tmp_path, capsys):
    levels = {norm: 0.6 + 0.01 * at for at, norm in enumerate(NORMS)}
    results = table(tmp_path / "runs.jsonl", levels)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    assert ended.value.code == 0
    page = (tmp_path / "report.html").read_text()
    said = " ".join(capsys.readouterr().out.split())
    sentence, clauses = sizes.conclusion(results)
    for text in (sentence, *clauses):
        assert page.index(unbroken(text)) < page.index("<svg")
        assert said.index(text) > said.index("Mean over seeds")
    for explained in ("BatchNorm</b> normalizes", "E_B and Std_B, mean and deviation over the batch"):
        assert explained in page
    assert {path.stem for path in (tmp_path / "figures").glob("*.png")} == {
        "resnet20-accuracy", "resnet20-differences", "resnet20-groups"
    }  # fmt: skip
    assert list(sizes.groups(results)) == ["bln-grouped", "bln-g1"]


@pytest.mark.parametrize("content", ["rubbish\n", '{"task": "resnet20"}\n', "[1]\n"])
def test_what_is_no_table_is_refused(tmp_path, content):
    (tmp_path / "runs.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"is not a table of runs: .*`bln reproduce` writes one"):
        sizes.read(tmp_path / "runs.jsonl")


def test_a_table_without_runs_makes_a_page(tmp_path):
    assert sizes.read(tmp_path / "nowhere.jsonl") == []
    assert sizes.write([], tmp_path).exists()


@pytest.mark.parametrize(
    ("ours", "said"),
    [(0.8, "BLN helps in"), (0.6, "Do not use BLN in .*: it is behind GroupNorm at batch 1"), (0.7, "nothing here")],
)
def test_whether_to_use_it_follows_from_the_standings(tmp_path, ours, said):
    results = table(tmp_path / "runs.jsonl", {"gn": 0.7, "bln-grouped": ours})
    assert re.search(said, sizes.advice(results))


def test_a_size_that_is_undecided_is_said_beside_those_ahead(monkeypatch, tmp_path):
    results = table(tmp_path / "runs.jsonl", {"gn": 0.7, "bln-grouped": 0.8})
    first, *rest = sizes.standings(results)
    monkeypatch.setattr(sizes, "standings", lambda _: [replace(first, verdict="undecided"), *rest])
    ahead = " and ".join(str(each.size) for each in rest)
    assert f"ahead at batch {ahead}; at batch {first.size} these runs do not decide" in sizes.advice(results)


def test_of_several_forms_in_a_transformer_the_claim_is_about_the_best_on_validation_data(tmp_path):
    rows = [
        by_size(norm, 4, seed, 0.5, validation=level, task="transformer")
        for norm, level in (("ln", 0.9), ("bln", 0.6), ("bln-pooled", 0.8), ("bln-grouped", 0.7))
        for seed in range(2)
    ]
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    (results,) = sizes.read(path)
    assert results.ours == "bln-pooled"
    assert "reviews" in sizes.recipe(results)
