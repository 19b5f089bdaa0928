"""The space of all layers in Optuna's hands."""

import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import optuna
import pytest
import torch
from search_nets import CONFIGS, ROUNDING, all_assignments, brute_force, data, dense, grouped, trained
from study_worker import task
from torch.nn import functional as F

import bln

TRAIN, BATCHES = data((9, 9), seed=1), data((7, 7, 4), shift=0.3)


def url(folder):
    return f"sqlite:///{folder}/study.db"


def load(storage):
    """A study's trials, but for the shared configurations that were given to it."""
    opened = optuna.storages.get_storage(storage)
    try:
        trials = optuna.load_study(study_name="bln.search", storage=opened).get_trials()
    except KeyError:  # not there yet
        return []
    finally:
        opened.remove_session()
    return [trial for trial in trials if not trial.user_attrs.get("shared")]


def finished(storage):
    return [trial for trial in load(storage) if trial.state == optuna.trial.TrialState.COMPLETE]


def written(folder):
    """Trials finished so far, read without Optuna: it would create the tables, and so would the process it watches."""
    try:
        with closing(sqlite3.connect(f"file:{folder}/study.db?mode=ro", uri=True)) as database:
            return database.execute("SELECT COUNT(*) FROM trials WHERE state = 'COMPLETE'").fetchone()[0]
    except sqlite3.OperationalError:  # no file or no table yet, or locked
        return 0


def start(folder, name, trials, seconds):
    ready, go = folder / f"{name}.ready", folder / "go"
    script = Path(__file__).with_name("study_worker.py")
    arguments = [sys.executable, script, url(folder), str(trials), str(seconds), ready, go]
    return subprocess.Popen(list(map(str, arguments)), stderr=subprocess.PIPE, text=True), ready


def wait_for(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("make", "train", "batches"),
    [(dense, TRAIN, BATCHES), (grouped, data((9,), (2, 6, 6), seed=1), data((7, 4), (2, 6, 6), shift=0.3))],
)
def test_a_grid_finds_the_best_of_all_256(make, train, batches):
    model = trained(make(), train)
    expected = {a: brute_force(model, batches, a) for a in all_assignments(model)}
    result = bln.search(model, batches, loss=F.cross_entropy, per_layer=True, sampler="grid", trials=256)
    tried = {tuple(map(str, row.config.values() if row.per_layer else [row.config] * 2)): row.loss for row in result}
    assert tried.keys() == expected.keys()
    for assignment, loss in tried.items():
        assert loss == pytest.approx(expected[assignment], rel=ROUNDING)
    assert result.lowest.loss == pytest.approx(min(expected.values()), rel=ROUNDING)


@pytest.mark.parametrize("sampler", ["tpe", "random", "object"])
def test_samplers_are_never_worse_than_the_best_shared_configuration(sampler):
    model = trained(dense(), TRAIN)
    chosen = optuna.samplers.TPESampler(seed=3) if sampler == "object" else sampler
    result = bln.search(model, BATCHES, loss=F.cross_entropy, per_layer=True, sampler=chosen, trials=10)
    assert result.lowest.loss <= min(row.loss for row in result if not row.per_layer)
    assert 16 <= len(result) <= 26
    again = bln.search(model, BATCHES, loss=F.cross_entropy, per_layer=True, sampler="random", trials=10)
    if sampler == "random":  # in memory a study is repeatable
        assert [row.config for row in again] == [row.config for row in result]


def test_trials_default_to_sixteen_for_each_layer(tmp_path):
    model = trained(dense(), TRAIN)
    bln.search(model, BATCHES[:1], loss=F.cross_entropy, per_layer=True, sampler="random", storage=url(tmp_path))
    assert len(finished(url(tmp_path))) == 32


def test_nan_losses_do_not_stop_a_study(tmp_path):
    model = trained(dense(), TRAIN)
    with torch.no_grad():
        model[2].population.batch_mean.fill_(torch.nan)
    result = bln.search(
        model, BATCHES, loss=F.cross_entropy, per_layer=True, sampler="random", trials=12, storage=url(tmp_path)
    )
    assert len(finished(url(tmp_path))) == 12
    assert result.lowest.loss == min(row.loss for row in result if row.loss == row.loss)


def test_an_interrupted_study_goes_on(tmp_path):
    model = trained(dense(), TRAIN)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"per_layer": True, "sampler": "tpe", "storage": url(tmp_path), "trials": 8}

    def interrupted(outputs, targets):
        if len(finished(url(tmp_path))) >= 3:
            raise KeyboardInterrupt
        return F.cross_entropy(outputs, targets)

    with pytest.raises(KeyboardInterrupt):
        bln.search(model, BATCHES, loss=interrupted, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    done = [trial.params for trial in finished(url(tmp_path))]
    assert 3 <= len(done) < 8  # a combination that is known already is not evaluated again
    result = bln.search(model, BATCHES, loss=F.cross_entropy, **options)
    assert [trial.params for trial in finished(url(tmp_path))][: len(done)] == done
    assert len(finished(url(tmp_path))) == 8
    complete = bln.search(model, BATCHES, loss=F.cross_entropy, **options)  # nothing is left to do
    assert len(finished(url(tmp_path))) == 8
    assert complete.lowest.config == result.lowest.config


def test_a_killed_study_is_resumed(tmp_path):
    process, _ = start(tmp_path, "worker", 60, 0.02)
    (tmp_path / "go").touch()
    try:
        wait_for(lambda: written(tmp_path) >= len(CONFIGS) + 3, process)  # the 16 shared ones are given
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    done = finished(url(tmp_path))
    assert 3 <= len(done) < 60

    model, batches = task()
    wanted = len(done) + 5
    result = bln.search(
        model, batches, loss=F.cross_entropy, per_layer=True, sampler="tpe", storage=url(tmp_path), trials=wanted
    )
    after = finished(url(tmp_path))
    assert [trial.params for trial in after][: len(done)] == [trial.params for trial in done]
    assert len(after) == wanted
    assert len({trial.user_attrs["worker"] for trial in after}) == 2
    # The best of all, found by whichever process, is no worse than the best shared one.
    assert result.lowest.loss == pytest.approx(
        min([trial.value for trial in after] + [row.loss for row in result if not row.per_layer]), rel=1e-9
    )


def test_two_processes_work_on_one_study(tmp_path):
    workers = [start(tmp_path, name, 24, 0.02) for name in ("one", "two")]
    try:
        for process, ready in workers:
            wait_for(ready.exists, process)
        (tmp_path / "go").touch()
        for process, _ in workers:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process, _ in workers:
            process.kill()
            process.communicate()
    done = finished(url(tmp_path))
    assert 24 <= len(done) <= 25  # the other may be in the middle of one when the last is counted
    assert len({trial.user_attrs["worker"] for trial in done}) == 2


def test_a_study_of_something_else_is_refused(tmp_path):
    options = {"per_layer": True, "sampler": "random", "storage": url(tmp_path), "trials": 2}
    model = trained(dense(), TRAIN)
    bln.search(model, BATCHES, loss=F.cross_entropy, **options)
    with pytest.raises(ValueError, match=r"made with another model, weights, data or loss.* pass another study="):
        bln.search(model, data((7,), seed=9), loss=F.cross_entropy, **options)
    other, batches = task()
    with pytest.raises(ValueError, match=r"of its layers \['2', '5'\] had .*, that of \['2', '5', '8'\] here has"):
        bln.search(other, batches, loss=F.cross_entropy, **options)
    result = bln.search(other, batches, loss=F.cross_entropy, **options, study="another")
    assert len(result) >= len(CONFIGS)


def test_a_grid_too_large_is_refused():
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(6, 6), bln.BatchLayerNorm(6)) for _ in range(5)))
    trained(model, TRAIN)
    with pytest.raises(ValueError, match=r"for up to 4 layers, 'grid'; got 'grid' for 5 layers"):
        bln.search(model, BATCHES, loss=F.cross_entropy, per_layer=True, sampler="grid")


def test_a_storage_that_cannot_be_opened_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts
    storage = f"sqlite:///{tmp_path}/nowhere/study.db"
    message = r"storage cannot be opened, .*unable to open database file"
    with pytest.raises(ValueError, match=message):
        bln.search(
            trained(dense(), TRAIN), BATCHES, loss=F.cross_entropy, per_layer=True, sampler="tpe", storage=storage
        )
