"""Many runs: which ones, side by side, and their summary."""

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY, patch

import bln
from bln._install import install
from bln.cli import _repeat_options, main
from bln.experiments import demo, table
from bln.experiments.reproduce import estimate, plan, reproduce, rows, work_left
from bln.experiments.runs import Estimate, RunFolder, Settings

CPU = torch.device("cpu")
FEW = [replace(TINY, norm=norm, seed=seed, epochs=2) for norm in ("bln", "ln") for seed in (0, 1)]


class TestPlan:
    def test_the_papers_runs(self):
        found = plan(("cnn", "rnn"))
        assert len(found) == 2 * 3 * 3 * 5  # tasks; batch 1 and 25 of 20 %, 25 of all; norms; seeds
        assert {(each.batch_size, each.fraction) for each in found} == {(1, 0.2), (25, 0.2), (25, 1.0)}
        assert {each.epochs for each in found if each.task == "rnn"} == {10}
        assert len({each.name for each in found}) == len(found)

    def test_what_is_asked_for_is_what_is_run(self):
        found = plan(("cnn",), batch_sizes=[1], fractions=[1.0], norms=["gn"], seeds=1, protocol="clean", epochs=2)
        assert found == [Settings("cnn", "gn", 1, 1.0, 0, "clean", 2)]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"batch_sizes": [0]}, "a batch size must be at least 1, got 0"),
            ({"fractions": [2.0]}, r"must be in \(0, 1\], got 2"),
            ({"norms": ["bln-hal"]}, "unknown normalizer 'bln-hal'; did you mean 'bln-half'"),
            ({"seeds": 0}, "seeds must be at least 1, got 0"),
            ({"epochs": 0}, "epochs must be at least 1, got 0"),
            ({"protocol": "dirty"}, "must be 'paper' or 'clean', got 'dirty'"),
        ],
    )
    def test_what_cannot_be_is_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            plan(("cnn",), **options)


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    told = []
    ended = reproduce(FEW, out, Path(), device=CPU, progress=lambda done, text: told.append(done))
    assert set(ended.values()) == {"finished"}
    assert told == sorted(told)
    assert told[-1] > 3
    return out


def test_workers_give_the_same_numbers(one_by_one, tmp_path):
    ended = reproduce(FEW, tmp_path, Path(), device=CPU, workers=2)
    assert set(ended.values()) == {"finished"}
    for each in FEW:
        assert RunFolder(tmp_path, each).result()["status"] == "finished"
        found, expected = (RunFolder(out, each).metrics() for out in (tmp_path, one_by_one))
        for line, other in zip(found, expected, strict=True):
            assert line == pytest.approx(other, rel=1e-3)  # threads may sum in another order


def test_a_run_that_cannot_go_on_does_not_keep_the_others(one_by_one, tmp_path):
    with RunFolder(tmp_path, FEW[0]).locked():
        ended = reproduce(FEW[:2], tmp_path, Path(), device=CPU)
    assert ended[FEW[0]].startswith("error: another process works on")
    assert ended[FEW[1]] == "finished"


def test_the_table_holds_every_run(one_by_one, tmp_path):
    table.write(tmp_path / table.NAME, rows(one_by_one))
    found = table.read(tmp_path / table.NAME)
    assert len(found) == len(FEW)
    for run in found:
        assert run["status"] == "finished"
        assert all(len(curve) == 2 for curve in run["curves"].values())
        assert (run["configurations"] is None) == (run["norm"] == "ln")
        assert 0 <= run["test"]["accuracy"] <= 1
        assert run["hours"] == pytest.approx(sum(run["seconds"]) / 3600, rel=1e-4)
        assert run["memory_mib"] > 0
        assert run["device"]
        assert run["versions"]["torch"] == torch.__version__


def test_what_is_left_is_estimated_from_a_few_steps(one_by_one, tmp_path):
    assert estimate(FEW, one_by_one, Path(), CPU).text().startswith("0 runs, about 0 s and 0 GiB")
    assert work_left(FEW, one_by_one) == [0, 0, 0, 0]
    assert all(steps > 0 for steps in work_left(FEW, tmp_path))
    said = estimate(FEW, tmp_path, Path(), CPU).text()
    assert said.startswith(f"{len(FEW)} runs, about ")
    assert "0 GiB" not in said
    assert not list(tmp_path.iterdir())


class TestCommandLine:
    def test_options_take_several_values(self):
        given = ["reproduce", "cnn", "--batch-size", "1", "25", "--norms", "bln", "--seeds", "2"]
        expected = ["reproduce", "cnn", "--batch-size", "1", "--batch-size", "25", "--norms", "bln", "--seeds", "2"]
        assert _repeat_options(given) == expected

    def test_an_experiment_from_end_to_end(self, tmp_path, monkeypatch, capsys):
        patch(monkeypatch)
        arguments = f"reproduce cnn --out {tmp_path} --batch-size 1 25 --norms bln bn --seeds 1 --epochs 1 --device cpu"
        for _ in range(2):  # the second time nothing is left to do
            with pytest.raises(SystemExit) as ended:
                main([*arguments.split(), "--fraction", "0.5", "1.0"])
            assert ended.value.code == 0
        said = capsys.readouterr().out.replace("\n", "")
        assert said.startswith("8 runs, about ")
        assert "0 runs, about 0 s" in said
        assert "report.html" in said
        assert (tmp_path / "report.html").stat().st_size > 10_000
        assert len(table.read(tmp_path / table.NAME)) == 8

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("reproduce cnn --fraction 2", "a fraction of the training data must be in (0, 1], got 2"),
            ("reproduce cnn --batch-size 0", "a batch size must be at least 1, got 0"),
            ("reproduce cnn --norms batchnorm", "unknown normalizer 'batchnorm'; did you mean 'batchrenorm'?"),
            ("reproduce gnn", "expected cnn, rnn, all, resnet, transformer or shift, got 'gnn'"),
            ("reproduce cnn --data-dir {}/nowhere --epochs 1 --seeds 1 --out {}/out", "bln data get cifar10"),
            ("reproduce cnn --device tpu --out {}", "device 'tpu' cannot be used here"),
            ("reproduce cnn --out {}/old", "holds runs of version 0.0 (format 0), this is"),
            ("demo --workers 0 --out {}/out", "workers must be at least 1, got 0"),
            ("report {}/nowhere.jsonl", "there is no table of runs at {}/nowhere.jsonl; `bln reproduce` and"),
            ("report {}", "there is no table of runs at {}/runs.jsonl"),
            ("report {}/rubbish.jsonl", "rubbish.jsonl is not a table of runs"),
            ("report {}/binary.jsonl", "binary.jsonl is not a table of runs"),
            ("report {}/other.jsonl", "has no runs that are known here"),
        ],
    )
    def test_what_goes_wrong_is_one_line_and_exit_code_2(self, arguments, message, tmp_path, capsys):
        (tmp_path / "rubbish.jsonl").write_text("{\n")
        (tmp_path / "binary.jsonl").write_bytes(bytes(range(128, 256)))
        (tmp_path / "other.jsonl").write_text('{"task": "other"}\n')
        (tmp_path / "old").mkdir()
        (tmp_path / "old" / "version.json").write_text('{"format": 0, "version": "0.0"}')
        with pytest.raises(SystemExit) as ended:
            main(arguments.format(tmp_path, tmp_path).split())
        assert ended.value.code == 2
        errors = capsys.readouterr().err
        assert message.format(tmp_path) in errors
        assert len(errors.strip().splitlines()) == 1

    def test_an_interruption_says_how_to_go_on(self, monkeypatch, capsys, tmp_path):
        def interrupted(*_, **__):
            raise KeyboardInterrupt

        monkeypatch.setattr("bln.experiments.reproduce.reproduce", interrupted)
        monkeypatch.setattr("bln.experiments.sizes.study.study", interrupted)
        for place in ("reproduce", "sizes.study"):
            monkeypatch.setattr(f"bln.experiments.{place}.estimate", lambda *_: Estimate(1.0, 1, 1, "a run"))
        for command in ("demo", "reproduce cnn"):
            with pytest.raises(SystemExit) as ended:
                main([*command.split(), "--out", str(tmp_path)])
            assert ended.value.code == 130
            assert "the same command goes on from here" in capsys.readouterr().err

    @pytest.mark.parametrize(("options", "seeds"), [([], demo.SEEDS), (["--seeds", "1"], 1)])
    def test_the_demonstration_has_as_many_seeds_as_asked_for(self, monkeypatch, tmp_path, options, seeds):
        seen = []
        monkeypatch.setattr("bln.experiments.commands._run_sizes", lambda *arguments: seen.append(arguments))
        with pytest.raises(SystemExit):
            main(["demo", "--out", str(tmp_path), "--device", "auto", *options])
        ((cells, _, _, device, _),) = seen
        assert device == "auto"
        assert {each.seeds for each in cells} == {seeds}
        assert {each.norm for each in cells} == set(demo.NORMS)
        assert {each.batch_size for each in cells} == set(demo.BATCH_SIZES)

    @pytest.mark.parametrize("arguments", [["--version"], ["--version", "demo"]])
    def test_the_version(self, arguments, capsys):
        with suppress(SystemExit):
            main(arguments)
        assert capsys.readouterr().out == f"bln {bln.__version__}\n"

    def test_the_version_needs_no_extra(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "bln.experiments.commands", None)
        main(["--version"])
        assert capsys.readouterr().out == f"bln {bln.__version__}\n"

    def test_a_missing_extra_is_named(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "bln.experiments.commands", None)
        with pytest.raises(SystemExit) as ended:
            main(["demo"])
        assert ended.value.code == 2
        assert install("experiments") in capsys.readouterr().err


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "ray://127.0.0.1:1", "no-such-host.invalid:6379", "127.0.0.1:99999"]
)
def test_a_ray_cluster_that_does_not_answer_is_an_error_at_once(tmp_path, address):
    with pytest.raises(ValueError, match=f"no Ray cluster at '{address}'.*ray start --head"):
        reproduce([TINY], tmp_path, Path(), device=torch.device("cpu"), backend="ray", address=address)


@pytest.mark.parametrize("address", ["cluster", "cluster:", ":6379", "cluster:port"])
def test_what_is_no_address_of_a_ray_cluster_is_refused(tmp_path, address):
    with pytest.raises(ValueError, match=f"no Ray cluster at '{address}'.*host:port"):
        reproduce([TINY], tmp_path, Path(), device=torch.device("cpu"), backend="ray", address=address)
