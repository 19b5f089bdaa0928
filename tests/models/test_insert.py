"""A BLN layer after every nonlinearity."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bln
from bln import BatchLayerNorm


class Mixed(nn.Module):
    """Nonlinearities as module, function, method and in place; one module used twice."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.again = nn.Conv2d(6, 6, 1)
        self.act = nn.Tanh()
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = self.act(self.conv(x))
        x = F.relu(self.again(x), inplace=True)
        x = self.act(x)
        x = x.mean((2, 3))
        x = torch.tanh(self.head(x))
        return x.relu() + 1


@pytest.mark.parametrize("options", [{}, {"groups": 2}], ids=str)
def test_each_place_gets_its_own_layer_behind_the_nonlinearity(options):
    model = Mixed()
    net = bln.insert(model, torch.randn(2, 3, 8, 8), **options)
    found = list(bln.layers(net).values())
    assert [layer.num_features for layer in found] == [6, 6, 6, 4, 4]
    assert [layer.channel_dim for layer in found] == [1, 1, 1, -1, -1]
    x = torch.randn(5, 3, 8, 8)
    y = net(x)

    def norm(x, channel_dim=1):
        return bln.functional.batch_layer_norm(x, channel_dim=channel_dim, **options)

    z = norm(torch.tanh(model.conv(x)))
    z = norm(torch.tanh(norm(torch.relu(model.again(z)))))
    z = norm(torch.relu(norm(torch.tanh(model.head(z.mean((2, 3)))))))
    torch.testing.assert_close(y, z + 1, atol=1e-5, rtol=1e-5)


def test_it_shares_parameters_and_trains():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    net = bln.insert(model, torch.randn(2, 4))
    assert any(p is model[0].weight for p in net.parameters())
    net(torch.randn(6, 4)).square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_sequences_behind_linear_layers_have_features_last():
    net = bln.insert(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.GELU()), torch.randn(2, 5, 4))
    (layer,) = bln.layers(net).values()
    assert (layer.num_features, layer.channel_dim) == (8, -1)


def test_the_example_leaves_no_trace():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout())
    model[3].eval()
    net = bln.insert(model, torch.randn(2, 4))
    assert model[1].num_batches_tracked == 0
    assert [m.training for m in model] == [True, True, True, False]
    assert all(layer.training for layer in bln.layers(net).values())


def test_options_reach_the_layers_and_only_the_named_nonlinearities_get_one():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Sigmoid()).double()
    net = bln.insert(model, torch.randn(2, 4).double(), after=nn.Sigmoid, per_position=False, config="FTFF")
    (layer,) = bln.layers(net).values()
    assert not layer.per_position
    assert str(layer.config) == "FTFF"
    assert layer.weight.dtype == torch.float64


def test_existing_bln_layers_are_left_alone():
    model = nn.Sequential(nn.Conv1d(3, 4, 3), BatchLayerNorm(4), nn.Tanh())
    net = bln.insert(model, torch.randn(2, 3, 8))
    assert len(bln.layers(net)) == 2


def test_inserting_again_changes_nothing():
    net = bln.insert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 4))
    first = bln.layers(net)
    with pytest.raises(ValueError, match="GraphModule has no nonlinearity without a BatchLayerNorm after it"):
        bln.insert(net, torch.randn(2, 4))
    assert bln.layers(net) == first


def test_a_name_that_is_taken_is_not_overwritten():
    model = nn.Sequential()
    model.add_module("a", nn.Tanh())
    model.add_module("a_bln", nn.Linear(4, 4))
    net = bln.insert(model, torch.randn(2, 4))
    assert isinstance(net.a_bln, nn.Linear)
    assert len(bln.layers(net)) == 1


def test_the_mode_is_the_models():
    net = bln.insert(nn.Sequential(nn.Linear(4, 8), nn.ReLU()).eval(), torch.randn(2, 4))
    assert not any(layer.training for layer in bln.layers(net).values())


@pytest.mark.parametrize("first", [nn.Conv1d(4, 8, 1), nn.Linear(6, 6)])
def test_features_that_were_moved_are_asked_for(first):
    class Moved(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = first

        def forward(self, x):
            return torch.relu(self.first(x).transpose(1, 2))

    with pytest.raises(ValueError, match="cannot tell where the features"):
        bln.insert(Moved(), torch.randn(2, 4, 6))


def test_an_input_may_be_a_dict():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 5)

        def forward(self, inputs):
            return torch.tanh(self.linear(inputs["x"]))

    net = bln.insert(Named(), {"x": torch.randn(2, 4)})
    assert [layer.num_features for layer in bln.layers(net).values()] == [5]


def test_functional_dropout_is_warned_about():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return F.dropout(torch.tanh(self.linear(x)), 0.5, self.training)

    with pytest.warns(UserWarning, match="tracing fixed whether a dropout function drops"):
        bln.insert(Dropping(), torch.randn(2, 4))


class TestBadInput:
    def test_an_in_place_function_whose_input_is_used_again(self):
        class InPlace(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x):
                h = self.linear(x)
                F.relu_(h)
                return h + x

        with pytest.raises(ValueError, match="works in place"):
            bln.insert(InPlace(), torch.randn(2, 4))

    def test_an_example_that_does_not_fit(self, capsys):
        with pytest.raises(ValueError, match=r"model \(mat1 and mat2 .*2x5 and 4x4.*It was \(2, 5\); pass an input"):
            bln.insert(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 5))
        assert capsys.readouterr().err == ""

    def test_a_module_in_place_of_its_type(self):
        with pytest.raises(TypeError, match=r"a module type such as nn\.Tanh, or a tuple of some, got \(Tanh\(\),\)"):
            bln.insert(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4), after=nn.Tanh())

    @pytest.mark.parametrize("dim", [5, 0, -2, "1"])
    def test_a_dimension_that_has_no_features(self, dim):
        with pytest.raises(
            ValueError, match=rf"shape \(4, 6\), stand; pass channel_dim=1 .* another dimension but 0; got {dim!r}"
        ):
            bln.insert(nn.Sequential(nn.Linear(3, 6), nn.Tanh()), torch.randn(4, 3), channel_dim=dim)

    def test_nothing_to_stand_behind(self):
        with pytest.raises(
            ValueError, match=r"Linear has no nonlinearity without .*; after= are the types to look for, Tanh, ReLU"
        ):
            bln.insert(nn.Linear(3, 3), torch.randn(2, 3))

    def test_a_model_that_cannot_be_traced(self):
        class Branching(nn.Module):
            def forward(self, x):
                return x if x.sum() > 0 else torch.tanh(x)

        with pytest.raises(ValueError, match=r"torch.fx cannot trace Branching.*by hand"):
            bln.insert(Branching(), torch.randn(2, 3))

    def test_features_that_could_stand_anywhere(self):
        model = nn.Sequential(nn.Identity(), nn.Tanh())
        with pytest.raises(ValueError, match=r"cannot tell where the features.*channel_dim=1"):
            bln.insert(model, torch.randn(2, 3, 4))
        net = bln.insert(model, torch.randn(2, 3, 4), channel_dim=1)
        assert next(iter(bln.layers(net).values())).num_features == 3
