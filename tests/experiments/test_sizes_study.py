"""The table of runs: made in one go or in several, side by side or not, it says the same."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from bln.cli import main
from bln.experiments import data, table
from bln.experiments.sizes import nets, study, tasks, training
from bln.experiments.sizes.study import Budget, Cell, Place
from bln.experiments.sizes.training import finish

CPU = torch.device("cpu")
CELL = Cell("digits-resnet", "gn", 8, 24, 1, seeds=3, tried_on=2)


def numbers(rows):
    return sorted((row["learning_rate"], row["seed"], json.dumps([row["curves"], row["test"]])) for row in rows)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return table.read(study.study([CELL], out, Path(), device=CPU))


def test_every_rate_is_tried_and_the_best_gets_all_seeds(whole):
    rate = study.best_rate(whole)
    assert sorted({row["learning_rate"] for row in whole}) == CELL.rates
    assert sorted((row["learning_rate"], row["seed"]) for row in whole) == sorted(
        [(each, seed) for each in CELL.rates for seed in (0, 1)] + [(rate, 2)]
    )
    for row in whole:
        assert (row["test"] is None) == (row["learning_rate"] != rate)
        assert row["status"] == "finished"
        assert row["hours"] > 0
        assert row["memory_mib"] > 0
        assert row["versions"]["torch"] == torch.__version__
        assert row["device"]
        assert "commit" in row


def test_the_best_rate_is_the_one_with_the_highest_accuracy_on_the_seeds_all_have():
    def row(rate, seed, accuracy, status="finished"):
        curves = {"validation_accuracy": [0.9, accuracy]}
        return {"learning_rate": rate, "seed": seed, "curves": curves, "status": status}

    rows = [row(0.1, 0, 0.5), row(0.1, 1, 0.6), row(0.2, 0, 0.7), row(0.2, 1, 0.3), row(0.1, 2, 0.1)]
    assert study.best_rate(rows) == 0.1
    assert study.best_rate([*rows, row(0.3, 0, None, "diverged"), row(0.3, 1, 0.99)]) == 0.1


def test_what_a_process_is_sent_does_not_change_while_it_is_sent(tmp_path, monkeypatch):
    def side_by_side(function, jobs, workers):
        jobs = list(jobs)
        before = [dict(known) for _, known, _ in jobs]
        for job in jobs:
            yield function(*job)
        assert [known for _, known, _ in jobs] == before

    monkeypatch.setattr(study, "side_by_side", side_by_side)
    path = study.study([CELL, replace(CELL, norm="bn")], tmp_path, Path(), device=CPU, workers=2)
    assert {row["norm"] for row in table.read(path)} == {"gn", "bn"}


def test_more_seeds_are_added_to_what_is_there(whole, tmp_path, monkeypatch):
    study.study([replace(CELL, seeds=2)], tmp_path, Path(), device=CPU)
    trained = []
    real = training.Training
    monkeypatch.setattr(study, "Training", lambda group, *rest: (trained.extend(group), real(group, *rest))[1])
    study.study([CELL], tmp_path, Path(), device=CPU)
    assert [each.seed for each in trained] == [2]
    assert numbers(table.read(tmp_path / table.NAME)) == numbers(whole)
    study.study([CELL], tmp_path, Path(), device=CPU)
    assert len(trained) == 1


def test_side_by_side_the_numbers_are_the_same(whole, tmp_path):
    kept, cells = [], [CELL, replace(CELL, norm="bn")]
    more = {"lanes": 2, "budget": Budget(None)}
    study._in_lanes(cells, {}, Place(tmp_path, Path(), CPU), kept.extend, lambda done, text: None, **more)
    assert numbers(row for row in kept if row["norm"] == "gn") == numbers(whole)
    assert len(kept) == 2 * len(whole)


def test_work_that_is_likely_to_end_too_late_is_not_begun():
    assert Budget(None).admits(1e12)
    assert not Budget(0).admits(1e-12)
    budget = Budget(1)
    assert budget.admits(1e12)  # nothing is known yet
    budget.note(10, 30.0)
    assert budget.admits(10)
    assert not budget.admits(30)


def test_cut_off_by_time_it_goes_on_from_the_last_whole_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_SAVE_EVERY", 0.0)
    cells = [replace(CELL, epochs=3), replace(CELL, norm="bn", epochs=3)]
    whole = table.read(study.study(cells, tmp_path / "whole", Path(), device=CPU))
    epochs = []
    real = training.Training.epoch
    monkeypatch.setattr(training.Training, "epoch", lambda self: (epochs.append(1), real(self))[1])
    with monkeypatch.context() as patched:  # six epochs are the first cell's, and one more is whole
        patched.setattr(Budget, "left", lambda self: 1e9 if len(epochs) < 8 else 0.0)
        cut = table.read(study.study(cells, tmp_path / "cut", Path(), device=CPU, minutes=1))
    assert 0 < len(cut) < len(whole)
    assert list((tmp_path / "cut" / "checkpoints").glob("*.pt"))
    assert study.unfinished(cells, tmp_path / "cut") == 1
    epochs.clear()
    again = table.read(study.study(cells, tmp_path / "cut", Path(), device=CPU))
    assert numbers(again) == numbers(whole)
    assert len(epochs) == 2 + 3  # what is left of the net that was cut off, and the other one
    assert study.unfinished(cells, tmp_path / "cut") == 0


def test_processes_give_the_same_numbers(whole, tmp_path):
    study.study([CELL, replace(CELL, norm="bn")], tmp_path, Path(), device=CPU, workers=2)
    assert numbers(row for row in table.read(tmp_path / table.NAME) if row["norm"] == "gn") == numbers(whole)


def test_a_run_that_diverged_does_not_spoil_its_companions(tmp_path, monkeypatch):
    real, asked = training.Training, []

    class Spoiled(real):
        def _results(self, *arguments):
            asked.append(len(self.group))
            found = super()._results(*arguments)
            for run, each in zip(self.group, found, strict=True):
                each["status"] = "diverged" if run.seed == 1 else "finished"
            return found

    monkeypatch.setattr(study, "Training", Spoiled)
    rows = finish(study._train(CELL.runs([0.01], range(3)), "name", Place(tmp_path, Path(), CPU)))
    assert asked == [3, 2]
    assert [row["status"] for row in rows] == ["finished", "diverged", "finished"]
    assert [row["together"] for row in rows] == [2, 3, 2]


def test_a_line_that_was_cut_off_is_made_again(whole, tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in whole)[:-20])
    assert len(table.read(path)) == len(whole) - 1


def test_the_estimate_counts_what_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "measure", lambda group, *_: training.Cost(0.01 * group[0].batch_size, 2**30))
    cells = [replace(CELL, batch_size=size) for size in (2, 4, 8)]
    found = study.estimate(cells, tmp_path, Path(), CPU)
    assert found.runs == 3 * (3 * 2 + 1)
    assert found.measured == "2 nets"
    once = (24 + 2 * 359 / 3) * 0.01  # 24 images to train on; 359 to validate and as many to test, forward alone
    assert found.seconds == pytest.approx(2 * 3 * once)  # two nets for each cell
    study.study(cells[:2], tmp_path, Path(), device=CPU)
    left = study.estimate(cells, tmp_path, Path(), CPU, workers=2)
    assert left.runs == 3 * 2 + 1
    assert left.seconds == pytest.approx(2 * once)
    assert "7 runs, about 5 s and 1 GiB" in left.text()


def test_a_few_steps_are_measured():
    cost = training.measure(CELL.tried, Path(), CPU)
    assert 0 < cost.step < 60
    larger = training.measure(replace(CELL, batch_size=4).tried, Path(), CPU)
    assert cost.memory > larger.memory > 0


def test_a_plan_has_fewer_seeds_at_batch_one_and_tries_rates_on_all_where_that_is_cheap():
    cells = {(cell.norm, cell.batch_size): cell for cell in study.plan("resnet20")}
    assert {size for _, size in cells} == {1, 2, 4, 8, 16, 32, 128}
    assert {"bn", "gn", "ln", "batchrenorm", "bln", "bln-grouped"} < {norm for norm, _ in cells}
    assert (cells["bn", 1].seeds, cells["bn", 1].tried_on) == (3, 3)
    assert (cells["bn", 128].seeds, cells["bn", 128].tried_on) == (5, 2)
    assert all(len(cell.rates) >= 3 for cell in cells.values())
    assert cells["gn", 8].rates == cells["bln-grouped", 8].rates
    first = study.plan("resnet20", by_importance=True)
    assert set(first) == set(cells.values())
    assert [(cell.batch_size, cell.norm) for cell in first[:7]] == [
        (4, "bn"), (4, "gn"), (4, "ln"), (4, "batchrenorm"), (4, "bln"), (4, "bln-grouped"), (32, "bn")
    ]  # fmt: skip
    assert {cell.norm for cell in first[-4 * 7 :]} == {"bln-g1", "bln-g4", "bln-g16", "bln-gC"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--norms bnn", "unknown normalizer 'bnn'; known here: bn, gn"),
        ("--batch-size 0", "a batch size must be 1 to the number of training samples, 20,000; got 0"),
        ("--data-dir {}/nowhere --batch-size 4 --norms bn", "bln data get cifar10"),
        ("--workers 0", "workers must be at least 1, got 0"),
    ],
)
def test_what_goes_wrong_is_one_line(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "resnet", "--out", str(tmp_path / "out"), *arguments.format(tmp_path).split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_resnet_from_end_to_end(tmp_path, monkeypatch, capsys):
    random = torch.Generator().manual_seed(0)
    images = torch.randint(256, (60, 3, 32, 32), dtype=torch.uint8, generator=random)
    labels = torch.arange(60) % 10
    small = replace(
        tasks.TASKS["resnet20"], load=lambda folder: data.DataSet(images, labels, images, labels), validation=20,
        net=partial(nets.resnet, inputs=3, blocks=1, widths=(8, 16)),
    )  # fmt: skip
    monkeypatch.setitem(tasks.TASKS, "resnet20", small)
    tasks.load.cache_clear()
    arguments = f"reproduce resnet --out {tmp_path} --batch-size 1 8 --norms bn bln-grouped --seeds 2 --device cpu"
    arguments += " --images 16 --epochs 1"
    for more in ("--dry-run", "--minutes 0", "", ""):  # the last time nothing is left to do
        with pytest.raises(SystemExit) as ended:
            main([*arguments.split(), *more.split()])
        assert ended.value.code == 0
        assert (tmp_path / "runs.jsonl").exists() == (more == "")
    said = " ".join(capsys.readouterr().out.split())
    assert "24 runs, about" in said
    assert "4 of 4 norms and batch sizes are left; the same command goes on" in said
    assert "0 runs, about 0 s" in said
    assert "Test accuracy, ResNet-20 on CIFAR-10" in said
    assert "BLN grouped is ahead of or level with BatchNorm at every batch size." in said
    assert (tmp_path / "report.html").stat().st_size > 10_000
    tasks.load.cache_clear()
