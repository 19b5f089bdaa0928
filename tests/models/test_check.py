"""``bln convert-check``: what it says is what ``convert`` does."""

import re

import pytest
import torch
from torch import nn

import bln
from bln._models.check import check, load
from bln.cli import main

NET = """
from torch import nn

class Scale(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) * x.abs().mean()

def net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), Scale(4),
        nn.Flatten(), nn.Linear(8 * 16, 2),
    )

def number():
    return 3
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    name = f"net_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(NET, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_each_norm_is_listed_with_what_convert_makes_of_it_and_the_model_stays_as_it_was(place):
    model = load(f"{place}:net")
    first, head, *rows, note = check(model).splitlines()
    assert isinstance(model[1], nn.BatchNorm2d)
    with pytest.warns(UserWarning, match="left as it is"):
        converted = bln.convert(model)
    assert first == "convert replaces 2 norms"
    assert head.split() == ["name", "class", "becomes"]
    wanted = [("1", "BatchNorm2d", str(converted[1])), ("4", "GroupNorm", str(converted[4]))]
    assert [tuple(row.split(maxsplit=2)) for row in rows] == wanted
    assert re.match(r"5: left as it is, net_\d+\.Scale: ", note)


def test_a_step_is_timed_before_and_after(place):
    shown = check(load(f"{place}:net"), (2, 3, 8, 8), groups=2)
    assert "groups=2" in shown
    assert 0 <= moved(shown) < 1e-4
    steps = re.findall(r"([\d.]+) ms \(([\d.]+) to ([\d.]+)\)", shown)
    assert len(steps) == 2
    for median, low, high in steps:
        assert 0 < float(low) <= float(median) <= float(high)


def moved(shown):
    (value,) = re.findall(r"move by (\S+) of the largest", shown)
    return float(value)


def test_a_model_without_norms():
    assert check(nn.Linear(3, 3), (2, 3)).endswith("There is nothing to compare.")


def test_outputs_in_parts_count(place):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return {"y": self.norm(x), "parts": (x.argmax(1), [self.norm(x) + 1])}

    assert moved(check(Parts(), (5, 4))) < 1e-4


class TestCommand:
    def test_prints(self, place, capsys):
        with pytest.raises(SystemExit) as ended:
            main(["convert-check", f"{place}:net", "--input", "2,3,8,8"])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert "convert replaces 2 norms" in shown
        assert re.search(r"  1 +BatchNorm2d +BatchLayerNorm\(8, groups=8", shown)
        assert re.search(r"A training step, .* before, .* after: [\d.]+ times", shown)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["{}"], "expected MODULE:FACTORY, as in torchvision.models:resnet18, got 'net_"),
            (["{}:nothing"], "no model at 'net_.* has no attribute 'nothing'"),
            (["no_such_module:net"], "no model at 'no_such_module:net': No module named 'no_such_module'"),
            (["{}:number"], "gives a int, expected a torch module"),
            (
                ["torch.nn:Linear"],
                "torch.nn:Linear takes in_features, out_features; write a function without arguments",
            ),
            (["{}:net", "--input", "2x3"], "--input must be sizes with commas between.*got '2x3'"),
            (["{}:net", "--input", "2,5,8,8"], r"cannot be run on random inputs of shape \(2, 5, 8, 8\)"),
            (["{}:net", "--device", "nowhere"], "device 'nowhere' cannot be used here"),
        ],
    )
    def test_what_cannot_be_is_one_line(self, place, capsys, arguments, message):
        with pytest.raises(SystemExit) as ended:
            main(["convert-check", *(argument.format(place) for argument in arguments)])
        assert ended.value.code == 2
        shown = capsys.readouterr().err
        assert re.search(message, shown)
        assert shown.count("\n") == 1


def test_the_model_is_left_as_it_was(place):
    model = load(f"{place}:net").eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check(model, (2, 3, 8, 8))
    assert not model.training
    assert list(before) == list(model.state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
