"""``g(BLN(x) + residual)`` in one layer: against the oracle, and on every path against the layer and what follows it.

On a GPU the grouped form does both in the same pass: see test_grouped_kernels.
"""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bln
import oracle
import tolerance
from bln import Affine, BatchLayerNorm, StatisticsConfig
from cases import Case, cases

NAMES = ("relu", "silu", "gelu")
FORMS = {
    "published": {},
    "pooled": {"per_position": False},
    "grouped": {"groups": 3},
    "grouped, per position": {"groups": 2, "per_position": True},
}
every_form = pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
STEEPEST, CURVED = 1.13, 0.8  # the largest |g'| of all activations, gelu's, and the largest |g''|


def layer_of(options, activation="silu", features=6, **more):
    layer = BatchLayerNorm(features, **options, activation=activation, **more)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def without(layer):
    """The same layer, with nothing behind it."""
    bare = copy.deepcopy(layer)
    bare.activation = None
    return bare


def composed(bare, activation, x, mask=None, residual=None):
    """A layer, and in operators what may stand behind it."""
    y = bare(x, mask)
    y = y if residual is None else y + residual
    y = y if activation is None else getattr(F, activation)(y)
    return y if mask is None else torch.where(mask.unsqueeze(bare.channel_dim), y, 0)


def gradients(y, dy, layer, inputs):
    layer.zero_grad()
    y.backward(dy)
    return [t.grad for t in (*inputs, *layer.parameters())]


def same_step(layer, x, mask=None, residual=None, run=None):
    """Outputs, gradients and population are those of the composition, up to the rounding of float64."""
    bare = without(layer)
    dy, found = torch.randn(x.shape, dtype=x.dtype), []
    for one, call in (
        (layer, layer if run is None else run),
        (bare, lambda x, mask=None, residual=None: composed(bare, layer.activation, x, mask, residual)),
    ):
        inputs = [t.detach().clone().requires_grad_() for t in (x, residual) if t is not None]
        y = call(inputs[0], mask, inputs[1] if residual is not None else None)
        found.append([y, *gradients(y, dy, one, inputs), *one.population.buffers()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def masked(n, *positions):
    mask = torch.rand(n, *positions) < 0.7
    mask[0] = True
    return mask


# ---- against the oracle


@given(case=cases(), activation=st.sampled_from([None, *NAMES]), with_residual=st.booleans())
def test_outputs_and_gradients_are_those_of_the_equations(case: Case, activation, with_residual):
    """In every type, layout and form, and under masks; what the residual holds at hidden entries does not matter."""
    kind = case.x.dtype
    layer = BatchLayerNorm(
        case.rows.shape[-1], channel_dim=case.channel_dim, per_position=case.per_position, activation=activation,
        affine=case.weight is not None, bias=case.bias is not None, dtype=torch.promote_types(kind, torch.float32),
        **case.options,
    )  # fmt: skip
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(getattr(case, name))
    gamma = 1.0 if case.weight is None else case.weight.double().numpy()
    beta = 0.0 if case.weight is None or case.bias is None else case.bias.double().numpy()
    hidden = None if case.mask is None else ~case.mask.unsqueeze(case.channel_dim).expand(case.x.shape)
    x, residual, dy = case.x.clone().requires_grad_(), None, torch.randn(case.x.shape).to(kind)
    beside = 0.0
    if with_residual:
        residual = torch.randn(case.x.shape[::-1]).to(kind).permute(*reversed(range(case.x.dim())))
        beside = case.to_rows(residual).double().numpy()
        if hidden is not None:
            residual = residual.masked_fill(hidden, torch.nan)
            beside = np.where(case.numpy_mask[..., None], beside, 0.0)
        residual.requires_grad_()
    y = layer(x, case.mask, residual)
    assert y.dtype == kind
    assert y.shape == x.shape
    assert not x.is_contiguous() or y.is_contiguous()

    where = {"mask": case.numpy_mask, "per_position": case.per_position}
    clean = case.rows if case.mask is None else np.where(case.numpy_mask[..., None], case.rows, 0.0)
    s = oracle.measure(case.rows, case.numpy_mask, case.per_position, case.groups)
    spread = s.var_B, s.var_F, 1 / np.maximum(s.m, 1)
    normalized = oracle.train(case.rows, gamma, beta, **where, **case.options)
    z, unit = normalized + beside, torch.finfo(kind).eps
    g, slope = oracle.ACTIVATIONS[activation]
    # The sum is rounded, and g of it: by a few units of z, since gelu is z times a factor that is.
    moved = tolerance.output(clean, normalized, *spread, gamma, beta, kind, **case.options) + unit * np.abs(z)
    tolerance.close(case.to_rows(y), g(z), STEEPEST * moved + 4 * unit * np.abs(z), "y")
    if hidden is not None:
        assert (y[hidden] == 0).all()

    # The side of relu's kink that the layer saw, which rounding may decide.
    steep = case.to_rows(y).detach().double().numpy() > 0 if activation == "relu" else slope(z)
    rows_dy = case.to_rows(dy).double().numpy()
    if case.mask is not None:
        rows_dy = np.where(case.numpy_mask[..., None], rows_dy, 0.0)
    dz = rows_dy * steep
    off = (CURVED * moved * (activation != "relu") + 8 * unit) * np.abs(rows_dy) * (activation is not None)
    wanted = oracle.train_backward(case.rows, dz, gamma, **where, **case.options)
    around = tolerance.gradient(clean, wanted[0], dz, *spread, gamma, kind, **case.options)
    through = tolerance.gradient(clean, 0 * wanted[0], off, *spread, gamma, kind, **case.options)
    share = tolerance.ROUNDINGS * tolerance.epsilon(kind)
    bounds = [a + b / share + 1e-30 for a, b in zip(around, through, strict=True)]
    inputs = [t for t in (x, layer.weight, layer.bias, residual) if t is not None]
    found = dict(zip(map(id, inputs), torch.autograd.grad(y, inputs, dy), strict=True))
    tolerance.close(case.to_rows(found[id(x)]), wanted[0], bounds[0], "dx")
    for parameter, truth, bound, name in zip(
        (layer.weight, layer.bias), wanted[1:], bounds[1:], ("dgamma", "dbeta"), strict=True
    ):
        if parameter is not None:
            tolerance.close(found[id(parameter)], truth, bound, name)
    if with_residual:
        tolerance.close(case.to_rows(found[id(residual)]), dz, off + unit * np.abs(dz) + 1e-30, "dresidual")


# ---- every path computes what the layer and what follows it do


@pytest.mark.parametrize("activation", [None, *NAMES])
@pytest.mark.parametrize("with_mask", [False, True], ids=["", "masked"])
@every_form
def test_training_and_all_configurations(options, with_mask, activation):
    layer = layer_of(options, activation).double()
    for residual in (None, torch.randn(5, 6, 4, 3, dtype=torch.float64)):
        x, mask = torch.randn(5, 6, 4, 3, dtype=torch.float64) + 1, masked(5, 4, 3) if with_mask else None
        same_step(layer.train(), x, mask, residual)
        for config in StatisticsConfig.all():
            layer.config = config
            same_step(layer.eval(), x, mask, residual)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("with_mask", [False, True], ids=["", "masked"])
@every_form
def test_compiled_whole(options, with_mask, training):
    layer = layer_of(options, "gelu").double()
    x, residual = torch.randn(2, 5, 6, 4, dtype=torch.float64).unbind()
    mask = masked(5, 4) if with_mask else None
    layer(x, mask)
    torch.compiler.reset()
    layer.train(training)
    same_step(layer, x, mask, residual, run=torch.compile(layer, backend="aot_eager", fullgraph=True))


def test_a_compiled_graph_has_plain_operators_that_a_compiler_fuses():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    layer, x = layer_of({"groups": 3}, "relu"), torch.randn(5, 6, 4)
    torch.compile(layer, backend=backend, fullgraph=True)(x, residual=x)
    (graph,) = graphs
    names = [getattr(node.target, "__name__", "") for node in graph.graph.nodes]
    assert names.count("relu") == 1
    assert not any("apply" in name for name in names)


@every_form
def test_mapped_over_models_with_statistics_of_their_own(options):
    """``vmap`` over stacked parameters, statistics, inputs and residuals, in training."""
    models = [layer_of(options, position_shape=4 if options.get("per_position", not options) else None).double()
              for _ in range(3)]  # fmt: skip
    x, residual = torch.randn(2, 3, 5, 6, 4, dtype=torch.float64).unbind()
    bare = [without(model) for model in models]
    parameters, buffers = torch.func.stack_module_state(models)

    def call(parameters, buffers, x, residual):
        return torch.func.functional_call(models[0], (parameters, buffers), (x,), {"residual": residual})

    y = torch.func.vmap(call)(parameters, buffers, x, residual)
    for at, model in enumerate(bare):
        torch.testing.assert_close(y[at], composed(model, "silu", x[at], None, residual[at]))
    shared = models[0].eval()
    each = torch.func.vmap(lambda r: shared(x[0], residual=r))(residual)  # of the residual alone
    for at in range(3):
        torch.testing.assert_close(each[at], composed(without(shared), "silu", x[0], None, residual[at]))


@every_form
def test_exported_with_any_batch_size(options):
    layer, batch = layer_of(options, "relu"), torch.export.Dim("batch")
    layer(torch.randn(5, 6, 4))
    layer.eval()
    shapes = {"x": {0: batch}, "mask": {0: batch}, "residual": {0: batch}}
    program = torch.export.export(
        layer, (torch.randn(5, 6, 4), masked(5, 4), torch.randn(5, 6, 4)), dynamic_shapes=shapes
    )
    for n in (2, 7):
        x, mask, residual = torch.randn(n, 6, 4), masked(n, 4), torch.randn(n, 6, 4)
        expected = composed(without(layer), "relu", x, mask, residual)
        torch.testing.assert_close(program.module()(x, mask, residual), expected)


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@every_form
def test_first_and_second_derivatives_are_exact(options, training, activation):
    layer = layer_of(options, activation, config="FFFF").double().train(training)
    layer(torch.randn(3, 6, 2, dtype=torch.float64))
    weight, bias = layer.weight, layer.bias
    layer.momentum = 0.0  # calls change nothing

    def call(x, residual, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,), {"residual": residual})

    for _ in range(20):  # relu has a kink that finite differences must not step over
        inputs = [torch.randn(3, 6, 2, dtype=torch.float64).requires_grad_() for _ in range(2)]
        with torch.no_grad():
            away = composed(without(layer), None, inputs[0], None, inputs[1]).abs().min() > 1e-3
        if away:
            break
    inputs += [p.detach().clone().requires_grad_() for p in (weight, bias)]
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("reentrant", [True, False])
@every_form
def test_checkpointing_counts_a_mini_batch_once_and_uses_a_given_mask(options, reentrant):
    layer = layer_of(options).double()
    mask = masked(5, 4)

    def run(x, _, residual):
        with bln.padding(mask):
            return checkpoint(layer, x, residual=residual, use_reentrant=False)

    def run_reentrant(x, _, residual):
        with bln.padding(mask):
            return checkpoint(lambda x, r: layer(x, residual=r), x, residual, use_reentrant=True)

    x, residual = torch.randn(2, 5, 6, 4, dtype=torch.float64).unbind()
    same_step(layer, x, mask, residual, run=run_reentrant if reentrant else run)
    updates = layer.population.updates
    assert updates[updates > 0].eq(1).all()


@every_form
def test_padding_given_around_a_model_hides_the_residual_too(options):
    layer, mask = layer_of(options), masked(5, 4)
    hidden = ~mask[:, None].expand(5, 6, 4)
    x, residual = torch.randn(2, 5, 6, 4).masked_fill(hidden, torch.nan).unbind()
    expected = composed(without(layer), "silu", x, mask, residual)
    with bln.padding(mask):
        assert torch.equal(layer(x, residual=residual), expected)
    assert (expected[hidden] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_form
def test_under_autocast_the_output_has_the_input_s_type(options, dtype):
    layer, linear = layer_of(options, channel_dim=-1), nn.Linear(6, 6)
    x, residual = torch.randn(5, 4, 6), torch.randn(5, 4, 6)
    bare = without(layer)
    with torch.autocast("cpu", dtype):
        low = linear(x)
        y = layer(low, residual=residual)
        y.float().sum().backward()
    assert y.dtype == low.dtype == dtype
    assert torch.equal(y, composed(bare, "silu", low, None, residual.to(dtype)))


def test_an_empty_batch_comes_out_empty():
    layer, empty = layer_of({"groups": 3}).eval(), torch.empty(0, 6, 4)
    assert layer(empty, residual=empty).shape == (0, 6, 4)


def test_relu_keeps_only_what_comes_out():
    """It stands behind a map whose output nothing needs: the input and the output are all that backward has."""
    x, residual = torch.randn(2, 8, 16, 32, 4).unbind()
    x.requires_grad_(), residual.requires_grad_()
    for options in ({"groups": 4}, {"per_position": False}, {}):
        kept: dict[int, int] = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = BatchLayerNorm(16, **options, activation="relu")(x, residual=residual)
        large = [at for at, size in kept.items() if size >= y.untyped_storage().nbytes()]
        assert sorted(large) == sorted(t.untyped_storage().data_ptr() for t in (x, y)), options


@every_form
def test_the_function_takes_them_as_the_layer_does(options):
    x, residual = torch.randn(2, 5, 6, 4).unbind()
    layer, mask = layer_of(options, "gelu"), masked(5, 4)
    more = {"mask": mask, "residual": residual, "activation": "gelu"}
    y = bln.functional.batch_layer_norm(x, layer.weight, layer.bias, **options, **more)
    assert torch.equal(y, layer(x, mask, residual))
    twin = BatchLayerNorm(6, **options, affine=False)
    population = bln.functional.Statistics(*(torch.rand(1, 1) + 0.5 for _ in range(4)), torch.tensor(0.2))
    if twin.spec.coefficients:
        population = population._replace(batch_mean=torch.rand(6), batch_var=torch.rand(6) + 0.5)
    plain, ours = (
        bln.functional.batch_layer_norm(x, **options, population=population, config="TTTT", **extra)
        for extra in ({}, {"residual": residual, "activation": "relu"})
    )
    assert torch.equal(ours, F.relu(plain + residual))


# ---- tools


class Block(nn.Module):
    """A residual block, its activation and its addition in the last norm."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.second = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm1, self.norm2 = (layer_of(options, "relu") for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        y = self.norm2(self.second(self.norm1(self.first(x))), residual=x)
        return self.head(y.mean((2, 3)))


@every_form
def test_search_finds_what_an_evaluation_of_each_configuration_finds(options):
    net = Block(**options).double()
    batches = [(torch.randn(6, 6, 5, 5, dtype=torch.float64), torch.randint(3, (6,))) for _ in range(2)]
    for x, _ in batches:
        net(x)
    result = bln.search(net, batches, loss=F.cross_entropy, progress=False)
    assert result.mode == "together"  # never compared with itself
    for row in result:
        bln.configure(net, row.config)
        with torch.no_grad():
            losses = [F.cross_entropy(net.eval()(x), target).item() for x, target in batches]
        assert row.loss == pytest.approx(sum(losses) / 2, rel=1e-9)


@pytest.mark.parametrize("activation", NAMES)
def test_frozen_the_activation_stays_where_it_was(activation):
    kind = {"relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU}[activation]
    norms = [layer_of({"groups": 3}, activation, config="TTTT") for _ in range(2)]
    net = nn.Sequential(nn.Conv2d(3, 6, 3), norms[0], nn.MaxPool2d(2), norms[1], nn.Conv2d(6, 2, 1)).double()
    net(torch.randn(8, 3, 9, 9, dtype=torch.float64))
    x = torch.randn(4, 3, 9, 9, dtype=torch.float64)
    expected = net.eval()(x)
    _, report = bln.freeze(net, report=True)
    assert report.folded == {"1": "into 0"}
    assert list(report.kept) == ["3"]
    assert report.kept["3"].endswith(f"its {activation} stands between it and what comes after")
    assert isinstance(net[1], kind)
    assert repr(net[3]) == f"Affine((6,), activation={activation})"
    torch.testing.assert_close(net(x), expected)


@every_form
def test_frozen_a_layer_that_adds_a_residual_goes_on_adding_it(options):
    net = Block(**options).double()
    for _ in range(2):
        net(torch.randn(6, 6, 5, 5, dtype=torch.float64))
    bln.configure(net, "TTTT")
    x = torch.randn(4, 6, 5, 5, dtype=torch.float64)
    expected = net.eval()(x)
    _, report = bln.freeze(net, report=True)
    assert report.kept["norm2"] == "it is called with a residual"
    assert isinstance(net.norm2, Affine)
    torch.testing.assert_close(net(x), expected)


def test_a_frozen_layer_hides_the_residual_under_a_mask():
    affine = Affine(torch.randn(6), torch.randn(6), activation="gelu")
    x, residual = torch.randn(2, 5, 6, 4).unbind()
    mask = masked(5, 4)
    hidden = ~mask[:, None].expand(x.shape)
    y = affine(x, mask, residual.masked_fill(hidden, torch.nan))
    assert (y[hidden] == 0).all()
    expected = F.gelu(x * affine.scale[:, None] + affine.shift[:, None] + residual)
    torch.testing.assert_close(y[~hidden], expected[~hidden])


def test_it_is_inserted_copied_pickled_shown_and_loaded_like_any_layer():
    layer = layer_of({"groups": 3}, "gelu")
    x = torch.randn(5, 6, 4)
    layer(x)
    assert repr(layer) == "BatchLayerNorm(6, groups=3, config=TTFF, activation=gelu)"
    assert "activation" not in repr(without(layer))
    assert layer.state_dict().keys() == without(layer).state_dict().keys()  # it is no state, as eps and groups are not
    fresh = BatchLayerNorm(6, groups=3, activation="gelu")
    fresh.load_state_dict(without(layer).state_dict())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        assert other.activation == "gelu"
        assert torch.equal(other.eval()(x, residual=x), layer.eval()(x, residual=x))
    net = bln.insert(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), torch.randn(3, 4), activation="silu")
    assert [inserted.activation for inserted in bln.layers(net).values()] == ["silu"]


def test_synchronized_over_this_process_alone_it_is_the_same():
    layer = layer_of({"groups": 3}, process_group="world").double()
    x, residual = torch.randn(2, 5, 6, 4, dtype=torch.float64).unbind()
    same_step(layer, x, None, residual)


# ---- what is refused

WRONG_SHAPES = [(5, 6, 1), (1, 6, 4), (6, 4), (5, 6, 4, 1), ()]


@pytest.mark.parametrize(
    "make", [lambda a: BatchLayerNorm(4, activation=a), lambda a: Affine(torch.ones(4), torch.ones(4), activation=a),
             lambda a: bln.functional.batch_layer_norm(torch.randn(3, 4), activation=a)],
    ids=["layer", "affine", "function"],
)  # fmt: skip
@pytest.mark.parametrize(
    "given", ["tanh", "ReLU", "", nn.ReLU(), F.relu, True], ids=lambda given: getattr(given, "__name__", str(given))
)
def test_an_activation_that_is_not_known_is_refused_with_the_ways_out(make, given):
    with pytest.raises(ValueError, match=r"None or one of 'relu', 'silu', 'gelu', got .*put its module after"):
        make(given)


def test_an_activation_assigned_later_is_checked_too():
    layer = BatchLayerNorm(4)
    layer.activation = "relu"
    for value in ("tanh", nn.ReLU()):
        with pytest.raises(ValueError, match="activation must be None or one of"):
            layer.activation = value
    assert (layer(torch.randn(3, 4)) >= 0).all()


@pytest.mark.parametrize(("shape", "training"), list(itertools.product(WRONG_SHAPES, [True, False])), ids=str)
def test_a_residual_of_another_shape_is_refused_before_anything_is_learned(shape, training):
    x, residual = torch.randn(5, 6, 4), torch.randn(shape)
    layer = BatchLayerNorm(6, groups=3).train(training)
    calls = (
        lambda: layer(x, residual=residual),
        lambda: bln.functional.batch_layer_norm(x, residual=residual),
        lambda: Affine(torch.ones(6), torch.ones(6))(x, residual=residual),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"shape of the input, \(5, 6, 4\), got \(") as error:
            call()
        assert str(tuple(shape)) in str(error.value)
    assert not layer.population.updates.any()


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (1.0, "got float"),
        ([[0.0]], "got list"),
        (np.zeros((5, 6, 4)), "got ndarray"),
        (torch.ones(5, 6, 4, dtype=torch.bool), r"got torch\.bool; a mask goes to mask="),
        (torch.ones(5, 6, 4, dtype=torch.int64), r"got torch\.int64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_residual_that_cannot_be_added_is_refused(residual, message):
    with pytest.raises(TypeError, match=message):
        BatchLayerNorm(6)(torch.randn(5, 6, 4), residual=residual)


def test_a_residual_on_another_device_is_refused():
    with pytest.raises(ValueError, match="residual is on meta, the input on cpu"):
        BatchLayerNorm(6)(torch.randn(5, 6, 4), residual=torch.empty(5, 6, 4, device="meta"))
