"""The study of shifted data, on images of noise: answers by request, resuming, the report."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_runs import fake_cifar

import bln
from bln.cli import main
from bln.experiments import table
from bln.experiments.report import shift as report
from bln.experiments.runs import RunError
from bln.experiments.shift import choice, corruptions, study
from bln.experiments.shift.evaluation import CONFIGURATIONS, accuracies, answers, arrange
from bln.experiments.shift.study import Questions, conditions
from bln.experiments.sizes import nets, tasks, training
from bln.experiments.sizes.training import Run

QUESTIONS = Questions(images=10, severities=(3,), sizes=(1, 4))
NETS = [Run("shift", name, 8, 0.003, seed, samples=40, epochs=2) for seed in (0, 1) for name in ("bn", "gn")]


@pytest.fixture
def cifar(monkeypatch):
    """Sixty images of noise, ten of them held out, a smaller net and fewer corruptions."""
    torch.manual_seed(0)
    found = fake_cifar()
    net = partial(nets.resnet, inputs=3, widths=(8, 16), blocks=1)
    small = replace(tasks.TASKS["shift"], load=lambda folder: found, net=net, validation=10)
    monkeypatch.setitem(tasks.TASKS, "shift", small)
    tasks.load.cache_clear()
    monkeypatch.setattr(corruptions, "TEST", ("fog", "contrast"))
    monkeypatch.setattr(corruptions, "VALIDATION", ("saturate",))
    yield found
    tasks.load.cache_clear()


@pytest.fixture
def asked(cifar, tmp_path):
    """The folder of a finished study."""
    study.study(NETS, QUESTIONS, tmp_path, tmp_path)
    return tmp_path


def a_net(name="bln-grouped"):
    torch.manual_seed(1)
    net = tasks.TASKS["shift"].net(name, 1)
    net(torch.randn(16, 3, 32, 32))
    return net.eval()


@pytest.mark.parametrize("config", CONFIGURATIONS.values())
@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_answers_equal_those_of_a_loop_over_requests(config, size):
    net, inputs = a_net(), torch.randn(10, 3, 32, 32)
    bln.configure(net, config)
    with torch.no_grad():
        loop = torch.cat([net(request) for request in inputs.split(size)])
        torch.testing.assert_close(answers(net, inputs, size), loop, atol=1e-5, rtol=1e-5)  # summed in another order


def test_accuracies_equal_those_of_a_loop_and_leave_the_net_as_it_was():
    net = a_net()
    inputs, labels = torch.randn(12, 3, 32, 32), torch.arange(12) % 3
    found = accuracies(net, inputs, labels, (1, 4), CONFIGURATIONS)
    assert {str(layer.config) for layer in bln.layers(net).values()} == {"TTFF"}
    assert {name: len(values) for name, values in found.items()} == {"T": 1, "64": 2, "16": 2, "4": 2, "F": 2}
    for name, config in CONFIGURATIONS.items():
        bln.configure(net, config)
        with torch.no_grad():
            right = torch.cat([net(request) for request in inputs.split(4)]).argmax(1) == labels
        assert found[name][-1] == pytest.approx(float(right.double().mean()))


def test_a_converted_batch_norm_net_answers_as_before():
    net, inputs = a_net("bn"), torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        before = net(inputs)
        torch.testing.assert_close(study.with_bln(net)(inputs), before, atol=1e-5, rtol=1e-5)
    assert bln.layers(net)
    assert not bln.layers(study.with_bln(a_net("gn")))


def test_sorted_requests_are_sorted_and_shuffled_ones_are_all_there():
    labels = torch.arange(50) % 5
    for seed in (0, 1):
        order = arrange(labels, "sorted", seed)
        assert (labels[order].diff() >= 0).all()
        assert order.sort().values.equal(torch.arange(50))
        shuffled = arrange(labels, "shuffled", seed)
        assert shuffled.sort().values.equal(torch.arange(50))
        assert not (labels[shuffled].diff() >= 0).all()
    assert not arrange(labels, "sorted", 0).equal(arrange(labels, "sorted", 1))
    with pytest.raises(ValueError, match="shuffled or sorted"):
        arrange(labels, "upwards", 0)


def test_results_hold_an_answer_for_every_net_and_condition(asked):
    rows = table.read(asked / table.NAME)
    assert [(row["norm"], row["seed"]) for row in rows] == [(run.norm, run.seed) for run in NETS]
    for row in rows:
        assert (row["samples"], row["epochs"], row["batch_size"], row["learning_rate"]) == (40, 2, 8, 0.003)
        assert row["questions"] == {"images": 10, "severities": [3], "sizes": [1, 4]}
        assert row["hours"] > 0
        assert len(row["curves"]["train_loss"]) == 2
        assert row["versions"]["torch"] == torch.__version__
        assert len(row["answers"]) == len(conditions(QUESTIONS, row["norm"] == "bn"))
        for answer in row["answers"]:
            values = answer["accuracy"]
            assert set(values) == ({"net"} if row["norm"] == "gn" else set(CONFIGURATIONS))
            if row["norm"] == "bn":
                assert len(values["F"]) == (1 if answer["arrangement"] == "sorted" else 2)


def test_a_study_that_was_killed_goes_on_and_ends_the_same(cifar, tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    study.study(NETS, QUESTIONS, whole, tmp_path)
    asked, calls = accuracies, [0]

    def killed(*args):
        calls[0] += 1
        if calls[0] == 9:
            raise KeyboardInterrupt
        return asked(*args)

    monkeypatch.setattr(study, "accuracies", killed)
    with pytest.raises(KeyboardInterrupt):
        study.study(NETS, QUESTIONS, broken, tmp_path)
    assert not (broken / table.NAME).exists()
    study.study(NETS, QUESTIONS, broken, tmp_path)
    conditions_of_all = 2 * len(conditions(QUESTIONS, True)) + 2 * len(conditions(QUESTIONS, False))
    assert calls[0] == conditions_of_all + 1  # nothing but the one that was cut off is asked twice
    study.study(NETS, QUESTIONS, broken, tmp_path)
    assert calls[0] == conditions_of_all + 1
    results = [[row["answers"] for row in table.read(folder / table.NAME)] for folder in (whole, broken)]
    assert results[0] == results[1]


def test_training_that_was_killed_ends_with_the_same_weights(cifar, tmp_path, monkeypatch):
    net, _ = study.train(NETS[0], tmp_path / "whole", tmp_path)
    monkeypatch.setattr(training, "_SAVE_EVERY", 0.0)

    def killed(done):
        if done > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.train(NETS[0], tmp_path / "broken", tmp_path, killed)
    assert list((tmp_path / "broken" / "checkpoints").iterdir())
    again, row = study.train(NETS[0], tmp_path / "broken", tmp_path)
    assert len(row["curves"]["train_loss"]) == 2
    for name, value in net.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_each_seed_has_images_of_its_own_and_none_it_was_trained_on(cifar):
    clean, foggy = (study.Condition("test", name, severity, "shuffled") for name, severity in (("none", 0), ("fog", 3)))
    first, other = (study.images(clean, QUESTIONS, run, cifar) for run in (NETS[0], NETS[2]))
    assert first.targets.equal(cifar.test_labels[:10])
    assert other.targets.equal(cifar.test_labels[10:20])
    twice = [study.images(foggy, QUESTIONS, NETS[0], cifar).inputs for _ in range(2)]
    assert twice[0].equal(twice[1])
    assert not twice[0].equal(first.inputs)
    held_out = study.images(clean._replace(part="validation"), QUESTIONS, NETS[0], cifar)
    trained, _ = training.split(NETS[0], len(cifar.train))
    assert not any(image.equal(each) for image in held_out.inputs for each in cifar.train[trained])
    with pytest.raises(ValueError, match="fewer --images"):
        study.images(clean, QUESTIONS, replace(NETS[0], seed=2), cifar)


def test_answers_to_other_questions_are_refused(asked, cifar):
    with pytest.raises(RunError, match="other questions"):
        study.study(NETS, Questions(10, (3,), (1, 2)), asked, asked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"norms": ["bnn"]}, "unknown normalizer 'bnn'; known here: bn, gn"),
    ],
)
def test_a_plan_is_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        study.plan(**arguments)
    with pytest.raises(ValueError, match="severities are 1 to 5"):
        Questions(severities=(0,))


def test_the_report_averages_what_the_results_say(asked, tmp_path):
    results = report.read(asked / table.NAME)
    lines = [
        line
        for line in results.answers
        if (line["norm"], line["part"], line["arrangement"]) == ("bn", "test", "shuffled") and line["severity"]
    ]
    expected = sum(line["accuracy"]["16"][1] for line in lines) / len(lines)
    assert results.accuracy("bn", "16", 4).mean == pytest.approx(expected)
    assert results.accuracy("bn", "T", 4).mean == results.accuracy("bn", "T", 1).mean
    best = max(CONFIGURATIONS, key=lambda name: results.accuracy("bn", name, 4, report.VALIDATION).mean)
    assert results.accuracy("bn", results.best_on_validation("bn", 4), 4, report.VALIDATION).mean == pytest.approx(
        results.accuracy("bn", best, 4, report.VALIDATION).mean
    )
    path = report.write(results, tmp_path / "report")
    assert "NaN" not in path.read_text()
    assert {plot.stem for plot in path.parent.glob("figures/*.png")} == {"requests", "corruptions", "arrivals"}
    for head, rows in (report.by_norm(results), report.by_request(results, "bn"), report.when_sorted(results, "bn")):
        assert all(len(row) == len(head) for row in rows)


def test_the_command_runs_and_reports_again(cifar, tmp_path, monkeypatch, capsys):
    small = Run("shift", "gn", 8, 0.003, 0, samples=40, epochs=1)
    monkeypatch.setattr(study, "plan", lambda norms, seeds, epochs: [small])
    out = str(tmp_path / "out")
    arguments = ["reproduce", "shift", "--out", out, "--images", "10", "--severities", "3", "--data-dir", str(tmp_path)]
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    assert "GroupNorm: clean" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["report", out])
    with pytest.raises(SystemExit, match="2"):
        main(["reproduce", "--seeds", "1", "shift"])
    assert "options of its own" in capsys.readouterr().err


def test_layers_of_the_published_form_answer_by_request_too():
    net, inputs = a_net("bln"), torch.randn(6, 3, 32, 32)
    bln.configure(net, "FFFF")
    with torch.no_grad():
        expected = torch.cat([net(inputs[:4]), net(inputs[4:])])
        torch.testing.assert_close(answers(net, inputs, 4), expected, atol=1e-5, rtol=1e-5)


def test_choosing_leaves_the_net_and_gives_the_accuracy_of_the_chosen_prior():
    net = a_net()
    images, labels = torch.randn(24, 3, 32, 32) - 1, torch.arange(24) % 10
    found = choice.chosen(net, images, labels, 4)
    assert found["prior"] in ("T", "64", "16", "4")
    assert {str(layer.config) for layer in bln.layers(net).values()} == {"TTFF"}
    bln.configure(net, "TTFF" if found["prior"] == "T" else f"{found['prior']} {found['prior']} F F")
    with torch.no_grad():
        right = (answers(net, images, 4).argmax(1) == labels).double().mean().item()
    assert found["accuracy"] == pytest.approx(right, abs=1e-4)


def test_signs_grow_with_the_distance_of_a_request_from_the_population():
    net, inputs = a_net(), torch.randn(16, 3, 32, 32)
    near, far = choice.signs(net, inputs, 8), choice.signs(net, inputs + 2, 8)
    assert near.shape == (2, len(choice.SIGNS))
    assert (far[:, 0] > near[:, 0]).all()


@pytest.mark.parametrize(
    ("ours", "theirs", "share"),
    [([3.0, 4.0], [1.0, 2.0], 1.0), ([1.0], [2.0, 3.0], 0.0), ([1.0, 2.0], [1.0, 2.0], 0.5)],
)
def test_separation_is_the_share_of_pairs_in_the_right_order(ours, theirs, share):
    assert choice.separation(torch.tensor(ours), torch.tensor(theirs)) == share


def test_choices_are_made_once_for_each_batch_norm_net_and_tabulated(cifar, tmp_path, monkeypatch):
    path = study.study(NETS, QUESTIONS, tmp_path, tmp_path)
    lines = report.read_choices(path)
    conditions = 2 * (1 + len(corruptions.TEST))  # shuffled and sorted, clean too
    assert len(lines) == 2 * (conditions + 1)
    assert {line["seed"] for line in lines} == {0, 1}
    monkeypatch.setattr(choice, "compare", lambda *_: pytest.fail("asked again"))
    study.study(NETS, QUESTIONS, tmp_path, tmp_path)
    head, rows = report.when_chosen(report.read(path), lines, "bn")
    assert all(len(row) == len(head) for row in rows)
    assert len(rows) == 4
    head, rows = report.told_apart(lines)
    assert [row[0] for row in rows] == ["4"]
