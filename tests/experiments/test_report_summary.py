"""A summary is checked before anything is made from it."""

import copy
import json
import math

import pytest

from bln.experiments import report
from bln.experiments.report.summary import CONFIGURATIONS, Score, Setting, authors, collect, read
from report_runs import run, summary


def test_what_is_read_is_what_was_written(rng):
    raw = run(rng, "rnn", "bln", 25, 0.2, 3, "clean", epochs=4)
    raw["curves"]["validation_loss"][1] = None
    raw["configurations"]["test"]["TFTF"] = [None, 0.5]
    [found] = read(json.loads(json.dumps(summary([raw])))).runs
    assert found.setting == Setting("rnn", "clean", 0.2, 25)
    assert (found.norm, found.seed, found.epochs, found.best_epoch) == ("bln", 3, 4, 4)
    assert found.train_loss == raw["curves"]["train_loss"]
    assert math.isnan(found.validation_loss[1])
    assert math.isnan(found.test_configurations["TFTF"].loss)
    assert found.validation_configurations["FTFF"] == Score(*raw["configurations"]["validation"]["FTFF"])
    assert set(found.test_configurations) == set(CONFIGURATIONS)


def test_norms_of_old_runs_are_called_as_today_and_those_made_no_more_are_left_out():
    row = {
        "task": "resnet",
        "versions": {"bln": "0.1.0", "torch": "2.13"},
        "commit": "c",
        "started": "s",
        "device": "d",
    }
    rows = [row | {"norm": norm} for norm in ("bn", "bln-shared", "bln-shared-no-scale")]
    assert [each["norm"] for each in collect(rows)["runs"]] == ["bn", "bln-pooled"]


def broken(change):
    def make(rng):
        whole = summary([run(rng, seed=0), run(rng, seed=1)])
        change(whole)
        return whole

    return make


BROKEN = {
    "format 2": broken(lambda s: s.update(format=2)),
    "has format None": broken(lambda s: s.pop("format")),
    "no list": broken(lambda s: s.update(runs={})),
    r"runs\[1\] has no 'norm'": broken(lambda s: s["runs"][1].pop("norm")),
    r"runs\[0\].task is 'mlp', expected one of cnn, rnn": broken(lambda s: s["runs"][0].update(task="mlp")),
    "status": broken(lambda s: s["runs"][0].update(status="done")),
    r"runs\[0\] and runs\[1\] are the same run": broken(lambda s: s["runs"][1].update(seed=0)),
    "different lengths": broken(lambda s: s["runs"][0]["curves"]["train_loss"].pop()),
    r"train_loss\[2\] is 'x', expected a number or null": broken(
        lambda s: s["runs"][0]["curves"]["train_loss"].__setitem__(2, "x")
    ),
    "16 configurations": broken(lambda s: s["runs"][0]["configurations"]["test"].pop("TTFF")),
    "chosen": broken(lambda s: s["runs"][0].update(chosen="TTF")),
    "best_epoch is 99, expected an epoch up to 5": broken(lambda s: s["runs"][0].update(best_epoch=99)),
    "batch_size": broken(lambda s: s["runs"][0].update(batch_size=0)),
    "fraction": broken(lambda s: s["runs"][0].update(fraction=20)),
    r"runs\[0\] is 7, expected an object": broken(lambda s: s["runs"].__setitem__(0, 7)),
    "test has no 'loss'": broken(lambda s: s["runs"][0]["test"].pop("loss")),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_summary_is_an_error_of_one_line_with_a_way_out(message, rng, tmp_path):
    whole = BROKEN[message](rng)
    with pytest.raises(ValueError, match=message) as caught:
        report.write(whole, tmp_path / "report")
    assert "\n" not in str(caught.value)
    assert "bln reproduce" in str(caught.value) or "keep one" in str(caught.value)
    assert not (tmp_path / "report").exists()


def test_a_list_is_no_summary():
    with pytest.raises(ValueError, match="JSON object, not list"):
        read([])


def test_reading_leaves_the_summary_as_it_was(rng):
    whole = summary([run(rng)])
    before = copy.deepcopy(whole)
    read(whole)
    assert whole == before


def test_the_authors_figures_are_those_of_the_paper():
    """Train accuracies of the text (0.61, 0.09, 0.34; 0.87, 0.78, 0.73), cut, and the leaders of the tables."""
    for batch, expected in ((1, {"bln": 0.61, "bn": 0.09, "ln": 0.34}), (25, {"bln": 0.87, "bn": 0.78, "ln": 0.73})):
        for norm, accuracy in expected.items():
            [found] = authors().select(Setting("cnn", "paper", 0.2, batch), norm)
            assert accuracy <= found.train_accuracy[-1] < accuracy + 0.01
    leaders = {("cnn", 0.2): "TTFF", ("cnn", 1.0): "FTFF", ("rnn", 0.2): "FFTF", ("rnn", 1.0): "FTFF"}
    for (task, fraction), leader in leaders.items():
        [found] = authors().select(Setting(task, "paper", fraction, 25), "bln")
        assert found.chosen == leader == next(iter(found.test_configurations))
    [single] = authors().select(Setting("rnn", "paper", 0.2, 1), "bln")
    assert sum(math.isnan(score.loss) for score in single.test_configurations.values()) == 8
