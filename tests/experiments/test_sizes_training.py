"""Runs trained as one net are what each is alone; the recipe's parts are what torch has."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bln.experiments.norms import NORMS, BatchNorm
from bln.experiments.sizes import training
from bln.experiments.sizes.tasks import IMAGES, TASKS
from bln.experiments.sizes.training import Adam, Run, Training, finish, one_cycle

CPU = torch.device("cpu")
TINY = Run("digits-resnet", "bn", 4, 0.005, 0, 24, 2)
ROUNDING = 200 * torch.finfo(torch.float32).eps
"""A few layers, each a sum of some hundred terms, and six steps of Adam."""


def make(name, features, runs):
    return NORMS[name](features, 1, runs=runs, ordinary=True)


def norm_pairs(name, features=8, runs=3, epochs=2):
    """Outputs of three runs in one layer, and of three layers with a run each, in training and in inference."""
    torch.manual_seed(0)
    whole, alone = (
        make(name, features, runs),
        [make(name, features, 1) for _ in range(runs)],
    )
    with torch.no_grad():
        for parameter, *own in zip(whole.parameters(), *(layer.parameters() for layer in alone), strict=True):
            parameter.copy_(torch.randn_like(parameter))
            for mine, theirs in zip(own, parameter.chunk(runs), strict=True):
                mine.copy_(theirs)
    for training_mode in (True, True, False):
        x = torch.randn(4, runs * features, 5, 5) * torch.rand(runs * features, 1, 1) * 3 + 1
        whole.train(training_mode)
        yield (
            whole(x),
            torch.cat([own.train(training_mode)(p) for own, p in zip(alone, x.chunk(runs, 1), strict=True)], 1),
        )


@pytest.mark.parametrize("name", [*IMAGES, "rms", "in", "bln-no-scale", "bln-half"])
def test_a_normalizer_keeps_runs_apart(name):
    for together, alone in norm_pairs(name):
        torch.testing.assert_close(together, alone)


@pytest.mark.parametrize(("name", "groups"), [("gn", 8), ("bln-grouped", 8), ("bln-g1", 1), ("bln-gC", 16)])
def test_at_batch_one_grouped_bln_is_the_group_norm_of_its_groups(name, groups):
    x = torch.randn(1, 16, 5, 5)
    expected = nn.functional.group_norm(x, groups, eps=1e-5)
    torch.testing.assert_close(make(name, 16, 1)(x), expected, atol=1e-3, rtol=1e-3)  # another eps


def test_batch_norm_is_torchs_with_a_plain_average():
    own, torchs = BatchNorm(6, 1e-5, None), nn.BatchNorm2d(6, momentum=None)
    for _ in range(3):
        x = torch.randn(4, 6, 3, 3) + 2
        torch.testing.assert_close(own(x), torchs(x))
    torch.testing.assert_close(own.eval()(x), torchs.eval()(x))
    own.train().reset_statistics()
    own(x)
    torch.testing.assert_close(own.running_mean, x.mean((0, 2, 3)))


@pytest.mark.parametrize("norm", ["bn", "gn", "ln", "batchrenorm", "bln", "bln-grouped"])
def test_runs_of_one_net_end_as_each_alone(norm):
    group = [
        replace(TINY, norm=norm, seed=seed, learning_rate=rate) for seed, rate in ((0, 0.005), (1, 0.005), (0, 0.001))
    ]
    together = finish(Training(group, Path(), CPU).run())
    alone = [finish(Training([each], Path(), CPU).run())[0] for each in group]
    for one, other in zip(together, alone, strict=True):
        losses, expected = (torch.tensor(found["curves"]["train_loss"]) for found in (one, other))
        torch.testing.assert_close(losses, expected, atol=ROUNDING, rtol=ROUNDING)
    assert len({found["curves"]["train_loss"][-1] for found in together}) == 3


def test_resumed_it_ends_with_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_SAVE_EVERY", 0.0)
    whole = finish(Training([TINY], Path(), CPU).run())
    work = Training([TINY], Path(), CPU).run(tmp_path / "checkpoint.pt")
    steps = TINY.steps // TINY.epochs
    assert steps * TINY.batch_size < training._TURN
    next(work), next(work)  # it stops in the second epoch
    assert (tmp_path / "checkpoint.pt").exists()
    resumed = finish(Training([TINY], Path(), CPU).run(tmp_path / "checkpoint.pt"))
    assert resumed[0]["curves"] == whole[0]["curves"]
    assert not (tmp_path / "checkpoint.pt").exists()


def test_adam_is_torchs_with_a_rate_for_each_run():
    net = nn.Linear(3, 2)
    alone = [copy.deepcopy(net) for _ in range(2)]
    together = nn.Linear(3, 4)
    with torch.no_grad():
        together.weight.copy_(net.weight.repeat(2, 1))
        together.bias.copy_(net.bias.repeat(2))
    highest, steps = (0.1, 0.003), 7
    ours = Adam(together.parameters(), highest, steps)
    theirs = [torch.optim.Adam(each.parameters()) for each in alone]
    for share in one_cycle(steps).tolist():
        x = torch.randn(5, 3)
        together.zero_grad()
        together(x).square().sum().backward()
        ours.step()
        for each, optimizer, rate in zip(alone, theirs, highest, strict=True):
            optimizer.param_groups[0]["lr"] = rate * share
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(together.weight, torch.cat([each.weight for each in alone]))


@pytest.mark.parametrize("steps", [10, 101])
def test_the_cycle_is_torchs(steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, steps, cycle_momentum=False)
    expected = []
    for _ in range(steps):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        if len(expected) < steps:
            schedule.step()
    torch.testing.assert_close(one_cycle(steps), torch.tensor(expected, dtype=torch.float64))


def test_runs_that_differ_in_more_cannot_train_together():
    with pytest.raises(ValueError, match="seed and learning rate alone"):
        Training([TINY, replace(TINY, norm="gn")], Path(), CPU)
    with pytest.raises(ValueError, match="training samples, got 2,000"):
        Training([replace(TINY, samples=2_000)], Path(), CPU)
    with pytest.raises(ValueError, match="do not fill a mini-batch of 25"):
        Training([replace(TINY, batch_size=25)], Path(), CPU)


def test_resnet20_has_the_size_of_resnet20():
    net = TASKS["resnet20"].net("bn", 1)
    assert sum(isinstance(each, nn.Conv2d) and each.kernel_size == (3, 3) for each in net.modules()) == 19
    assert 0.26e6 < sum(each.numel() for each in net.parameters()) < 0.28e6
    assert net.eval().train()(torch.randn(2, 3, 32, 32)).shape == (2, 10)
