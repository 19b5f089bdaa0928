"""Statistics that start anew at each epoch; the frameworks' own callbacks are tested with the frameworks."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import bln
from bln._install import install
from bln.callbacks import reset_each_epoch


@pytest.mark.parametrize("groups", [None, 2])
def test_each_pass_over_the_batches_is_an_epoch(groups):
    layer = bln.BatchLayerNorm(4, groups=groups, momentum=None)
    data = torch.randn(20, 4)
    loader = reset_each_epoch(layer, DataLoader(TensorDataset(data), 5, shuffle=True))
    assert len(loader) == 4
    for _ in range(3):
        for (x,) in loader:
            layer(x * 3)
            layer(x)
    assert layer.population.updates[0] == 8
    layer.reset_statistics()
    for (x,) in loader:
        layer(x)
    torch.testing.assert_close(layer.population.batch_mean, data.mean(0))


def test_layers_with_a_momentum_forget_by_themselves():
    net = torch.nn.Sequential(bln.BatchLayerNorm(4), bln.BatchLayerNorm(4, momentum=None))
    for _ in range(2):
        for x in reset_each_epoch(net, [torch.randn(5, 4)] * 3):
            net(x)
    assert [layer.population.updates[0].item() for layer in net] == [6, 3]


class TestBadInput:
    def test_what_can_be_gone_through_once(self):
        with pytest.raises(TypeError, match=r"generator can be gone through once only.*reset_statistics"):
            reset_each_epoch(bln.BatchLayerNorm(4), (torch.randn(5, 4) for _ in range(3)))

    def test_a_model_without_layers(self):
        with pytest.raises(ValueError, match="has no BatchLayerNorm"):
            reset_each_epoch(torch.nn.Linear(3, 3), [])

    def test_batches_without_a_length(self):
        class Endless:
            def __iter__(self):
                yield torch.ones(2, 4)

        with pytest.raises(TypeError, match="'Endless' has no len"):
            len(reset_each_epoch(bln.BatchLayerNorm(4), Endless()))

    def test_a_name_that_is_not_there(self):
        with pytest.raises(AttributeError, match="no attribute 'KerasReset'"):
            bln.callbacks.KerasReset  # noqa: B018


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("LightningReset", "lightning"),
        ("LightningCalibrate", "lightning"),
        ("TrainerReset", "transformers"),
        ("TrainerCalibrate", "transformers"),
    ],
)
def test_a_missing_framework_is_named_with_its_extra(name, extra):
    code = textwrap.dedent(
        f"""
        import sys
        sys.modules["{extra}"] = None  # as if it were not installed
        import bln
        try:
            bln.callbacks.{name}
        except ImportError as error:
            print(error)
        """
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert install(extra) in printed
