"""The layer: what it remembers, how it infers, what it refuses."""

import copy
import io
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bln
import oracle
from bln import BatchLayerNorm, StatisticsConfig
from cases import cases

CONFIGS = [str(config) for config in StatisticsConfig.all()]
PRIORS = ["16 16 F F", "F 2 T 0.5", "3 T 1 F", "0.25 4 8 1"]


def state(layer):
    return {name: value.clone() for name, value in layer.state_dict().items()}


def assert_same_state(layer, before):
    after = layer.state_dict()
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def assert_population(layer, expected, bound=1e-12):
    for name, theirs in oracle.NAMES.items():
        np.testing.assert_allclose(
            getattr(layer.population, name).double().numpy(), getattr(expected, theirs), atol=bound, rtol=bound,
            err_msg=name,
        )  # fmt: skip


FORMS = {
    "per position": {},
    "pooled": {"per_position": False},
    "grouped": {"groups": 3},
    "grouped, per position": {"groups": 3, "per_position": True},
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


class TestPopulation:
    @given(st.data(), st.sampled_from([None, 0.1, 0.7, 0.0, 1.0]), st.booleans(), st.sampled_from([None, 1, 2]))
    def test_statistics_are_those_of_the_oracle(self, data, momentum, per_position, groups):
        """Mini-batches of different sizes, masks and lengths, one after another, then all 16 configurations."""
        d, rank = data.draw(st.integers(1, 5)) * (groups or 1), data.draw(st.integers(0, 1))
        drawn = [data.draw(cases(dtypes=(torch.float64,), features=d, rank=rank)) for _ in range(4)]
        inputs = [(case.rows, case.numpy_mask) for case in drawn]
        positions = tuple(np.max([rows.shape[1:-1] for rows, _ in inputs], axis=0).astype(int))
        layer = BatchLayerNorm(
            d, groups=groups, channel_dim=-1, momentum=momentum, per_position=per_position, mix_eps=1e-4,
            dim_scale=True, position_shape=positions if per_position else None, dtype=torch.float64,
        )  # fmt: skip
        expected = oracle.Population(positions if per_position else (), d, groups)
        for rows, mask in inputs:
            layer(torch.tensor(rows), None if mask is None else torch.tensor(mask))
            short = rows if mask is None else np.where(mask[..., None], rows, 0)
            window = _Window(expected, rows.shape[1:-1] if per_position else ())
            window.update(short, momentum, mask, per_position)
        assert_population(layer, expected)

        layer.eval()
        rows, mask = inputs[-1]
        window = _Window(expected, rows.shape[1:-1] if per_position else ())
        for config in CONFIGS + PRIORS:
            layer.config = config
            y = layer(torch.tensor(rows), None if mask is None else torch.tensor(mask))
            wanted = window.infer(
                rows, config, mask=mask, per_position=per_position, eps=1e-4, mix_eps=1e-4, dim_scale=True
            )
            torch.testing.assert_close(y, torch.tensor(wanted), atol=1e-9, rtol=1e-9)

    def test_initial_values_never_mix_in(self):
        layer = BatchLayerNorm(3)
        x = torch.randn(4, 3) * 5 + 7
        layer(x)
        torch.testing.assert_close(layer.population.batch_mean, x.mean(0))
        torch.testing.assert_close(layer.population.batch_var, x.var(0))

    def test_a_first_single_sample_leaves_the_variance_for_the_next_to_set(self):
        layer = BatchLayerNorm(3)
        layer(torch.randn(1, 3))
        assert torch.equal(layer.population.batch_var, torch.ones(3))
        x = torch.randn(4, 3) * 5
        layer(x)
        torch.testing.assert_close(layer.population.batch_var, x.var(0))

    def test_the_average_of_one_over_m_is_remembered(self):
        layer = BatchLayerNorm(3, momentum=None)
        layer(torch.randn(2, 3))
        layer(torch.randn(6, 3))
        assert layer.population.inverse_m.item() == pytest.approx((2 * (1 / 2) + 6 * (1 / 6)) / 8)

    def test_pooled_m_counts_samples_not_entries(self):
        layer = BatchLayerNorm(3, per_position=False)
        layer(torch.randn(4, 3, 7, 7))
        assert layer.population.inverse_m.item() == 0.25

    def test_masked_m_is_counted_at_each_position(self):
        layer = BatchLayerNorm(3)
        mask = torch.tensor([[True, True, False, False], [True, False, False, False]])
        layer(torch.randn(2, 3, 4), mask)
        assert layer.population.inverse_m.tolist() == [0.5, 1, 0, 0]
        assert layer.population.updates.tolist() == [[1, int(name != "batch_var"), 0, 0] for name in oracle.NAMES]

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
    @pytest.mark.parametrize("masked", [False, True])
    @every_form
    def test_a_mini_batch_that_is_not_finite_never_enters(self, bad, masked, form):
        layer = BatchLayerNorm(3, **form)
        mask = torch.ones(4, 5, dtype=torch.bool) if masked else None
        layer(torch.randn(4, 3, 5), mask)
        before = state(layer)
        x = torch.randn(4, 3, 5)
        x[2, 1, 3] = bad
        layer(x, mask)
        assert_same_state(layer, before)
        layer(torch.randn(4, 3, 5), mask)
        assert layer.population.updates.unique().tolist() == [2]

    @pytest.mark.parametrize("grouped", [False, True])
    @pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
    def test_an_overflow_of_one_variance_alone_is_enough(self, shape, grouped):
        """A single sample has no batch variance to overflow, a single feature no feature variance."""
        layer = BatchLayerNorm(shape[1], groups=1 if grouped else None)
        x = torch.ones(shape)
        x.view(-1)[1] = 3e30
        layer(x)
        assert not layer.population.updates.any()

    def test_large_but_finite_variances_do_enter(self):
        """Their sum over positions, 2000 * 1e36, is not."""
        layer = BatchLayerNorm(2)
        layer(torch.randn(4, 2, 1000) * 1e18)
        assert layer.population.updates.all()

    @every_form
    def test_float16_values_that_overflow_a_float16_square_do_enter(self, form):
        layer = BatchLayerNorm(3, **form)
        x = torch.randn(8, 3).half() * 10000
        assert layer(x).isfinite().all()
        torch.testing.assert_close(layer.population.batch_var, x.float().var(0))

    @every_form
    def test_statistics_are_updated_in_place(self, form):
        """What a CUDA graph or DistributedDataParallel holds on to stays what the layer writes to."""
        layer = BatchLayerNorm(3, **form)
        held = dict(layer.named_buffers())
        layer(torch.randn(4, 3, 5))
        pointers = {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}
        layer(torch.randn(4, 3, 5))
        layer.reset_statistics()
        layer(torch.randn(4, 3, 5))
        for name, buffer in layer.named_buffers():
            assert buffer is held[name]
            assert buffer.data_ptr() == pointers[name]

    @every_form
    def test_two_forwards_before_a_backward(self, form):
        layer = BatchLayerNorm(3, **form)
        x = torch.randn(4, 3, requires_grad=True)
        (layer(x) + layer(x * 2)).sum().backward()
        assert not any(buffer.requires_grad for buffer in layer.buffers())

    @every_form
    def test_eval_remembers_nothing(self, form):
        layer = BatchLayerNorm(3, **form)
        layer(torch.randn(4, 3, 5))
        before = state(layer)
        layer.eval()
        for config in CONFIGS:
            layer.config = config
            layer(torch.randn(4, 3, 5))
        layer.config = "TTFF"
        assert_same_state(layer, before)

    @every_form
    def test_a_layer_first_shaped_in_inference_mode_can_be_trained(self, form):
        layer = BatchLayerNorm(3, **form)
        with torch.inference_mode():
            layer(torch.randn(5, 3, 4))
        layer(torch.randn(5, 3, 4)).sum().backward()
        assert (layer.population.updates == 2).all()

    @every_form
    def test_reset_forgets_but_knows_its_positions(self, form):
        layer = BatchLayerNorm(3, **form)
        layer(torch.randn(4, 3, 5))
        layer.reset_statistics()
        fresh = BatchLayerNorm(3, position_shape=5 if layer.per_position else None, **form)
        assert_same_state(layer, state(fresh))
        layer.weight.data.fill_(3)
        layer.bias.data.fill_(3)
        layer.reset_parameters()
        assert_same_state(layer, state(fresh))


class _Window(oracle.Population):
    """The first positions of an oracle's population, as a shorter sequence uses them."""

    def __init__(self, population, positions):
        index = (*(slice(size) for size in positions), ...)
        for name, value in vars(population).items():
            grouped = name.startswith("group") or (population.groups is not None and name in ("mean_F", "var_F"))
            setattr(self, name, value if grouped else value[index])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["second", "last"])
def test_gradients_of_large_means_are_those_of_centred_sums(memory_format):
    """A sum of dy * x from which mean * dy is taken away afterwards would be several times as far off."""
    x = (torch.randn(8, 16, 24, 24) + 1e4).to(memory_format=memory_format)
    dy = torch.randn(8, 16, 24, 24).to(memory_format=memory_format)
    found = []
    for dtype in (torch.float32, torch.float64):
        layer = BatchLayerNorm(16, groups=4, dtype=dtype)
        found.append(torch.autograd.grad(layer(x.to(dtype)), layer.weight, dy.to(dtype))[0].double())
    # The mean rounds by half an epsilon of its size, and moves dy * x_B by the sum of dy, some 70, times that.
    bound = torch.finfo(torch.float32).eps * 1e4 * dy.sum((0, 2, 3)).abs().clamp(min=70).double()
    assert ((found[0] - found[1]).abs() <= bound).all()


class TestInference:
    @pytest.mark.parametrize("config", CONFIGS + PRIORS)
    @pytest.mark.parametrize("per_position", [True, False])
    @pytest.mark.parametrize("groups", [None, 2])
    @pytest.mark.parametrize("m", [1, 2, 25])
    def test_any_batch_size_after_any_training_batch_size(self, config, per_position, groups, m):
        layer = BatchLayerNorm(6, groups=groups, per_position=per_position, config=config)
        for _ in range(3):
            layer(torch.randn(m, 6, 4, 4))
        layer.eval()
        for n in (1, 3, 40):
            y = layer(torch.randn(n, 6, 4, 4))
            assert y.isfinite().all()
            assert y.std() > 0.01

    @pytest.mark.parametrize("config", [c for c in CONFIGS if c.startswith("TT")])
    @pytest.mark.parametrize("shape", [(7,), (5, 3), (64, 7, 9), (1031,), (40001,), (3, 5, 2, 3)])
    @pytest.mark.parametrize("options", [{}, {"per_position": False}, {"groups": 1}], ids=str)
    @pytest.mark.parametrize("threads", [1, 2, 3])
    def test_population_batch_statistics_make_a_sample_independent_bit_for_bit(self, config, shape, options, threads):
        layer = BatchLayerNorm(shape[0], config=config, **options)
        layer(torch.randn(4, *shape))
        layer.eval()
        x = torch.randn(6, *shape) + 3
        torch.set_num_threads(threads)
        try:
            together = layer(x)
            for some in ([0], [3], [5, 3], [0, 1, 2]):
                assert torch.equal(layer(x[some]), together[some]), some
            if x.dim() == 4 and layer.groups is None:  # over positions, sums follow the order in memory
                assert torch.equal(layer(x.to(memory_format=torch.channels_last)), together)
        finally:
            torch.set_num_threads(1)

    @pytest.mark.parametrize("config", [c for c in CONFIGS if not c.startswith("TT")])
    @pytest.mark.parametrize("groups", [None, 1])
    def test_current_batch_statistics_make_it_depend_on_its_companions(self, config, groups):
        layer = BatchLayerNorm(5, groups=groups, config=config)
        layer(torch.randn(4, 5))
        layer.eval()
        x = torch.randn(6, 5)
        assert not torch.allclose(layer(x)[:1], layer(x[:1]), atol=1e-3)

    def test_before_training_it_uses_mean_0_variance_1_and_the_current_m(self):
        layer = BatchLayerNorm(4, config="TTFF", dim_scale=False, dtype=torch.float64).eval()
        x = torch.randn(5, 4, 3, dtype=torch.float64)
        x_F = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-4).sqrt()
        torch.testing.assert_close(layer(x), (4 / 5 - 1e-4) * x / (1 + 1e-4) ** 0.5 + (1 / 5 - 1e-4) * x_F)
        assert layer.population.position_shape is None

    def test_current_deviation_is_measured_around_the_chosen_mean(self):
        layer = BatchLayerNorm(4, config="TFTF", dim_scale=False, mix_eps=0.0, dtype=torch.float64)
        layer(torch.randn(6, 4, dtype=torch.float64))
        population = copy.deepcopy(layer.population)
        x = torch.randn(3, 4, dtype=torch.float64) + 2
        from_batch, from_features = x - population.batch_mean, x - population.feature_mean
        x_B = from_batch / (from_batch.square().mean(0) + 1e-4).sqrt()
        x_F = from_features / (from_features.square().mean(1, keepdim=True) + 1e-4).sqrt()
        torch.testing.assert_close(layer.eval()(x), 5 / 6 * x_B + 1 / 6 * x_F)

    def test_shorter_sequences_use_the_first_positions(self):
        """With groups the feature statistics are those of the shorter sequence: there only TTTT is the same."""
        for groups in (1, 3):
            layer = BatchLayerNorm(3, groups=groups, per_position=True, position_shape=6, config="TTTT")
            layer(torch.randn(4, 3, 6) + torch.arange(6.0))
            x = torch.randn(2, 3, 6)
            assert torch.equal(layer.eval()(x[..., :4]), layer(x)[..., :4])
        layer = BatchLayerNorm(3, position_shape=6)
        layer(torch.randn(4, 3, 6) + torch.arange(6.0))
        layer.eval()
        x = torch.randn(2, 3, 6)
        assert torch.equal(layer(x[..., :4]), layer(x)[..., :4])

    def test_a_shorter_training_sequence_updates_the_first_positions(self):
        for groups in (None, 3):
            layer = BatchLayerNorm(3, groups=groups, per_position=True, position_shape=6)
            layer(torch.randn(4, 3, 4))
            assert layer.population.updates[0].tolist() == [1, 1, 1, 1, 0, 0]

    @pytest.mark.parametrize("config", CONFIGS + PRIORS)
    @pytest.mark.parametrize("options", [{}, {"groups": 2}, {"groups": 2, "per_position": True}], ids=str)
    def test_fine_tuning_in_eval_has_gradients(self, config, options):
        layer = BatchLayerNorm(4, config=config, **options)
        layer(torch.randn(6, 4, 3))
        layer.eval()
        x = torch.randn(5, 4, 3, requires_grad=True)
        layer(x).square().sum().backward()
        for gradient in (x.grad, layer.weight.grad, layer.bias.grad):
            assert gradient.isfinite().all()
            assert gradient.abs().sum() > 0


class TestTypes:
    @pytest.mark.parametrize("cast", ["half", "bfloat16"])
    @every_form
    def test_low_precision_does_not_touch_the_statistics(self, cast, form):
        layer = BatchLayerNorm(3, **form)
        layer(torch.randn(4, 3, 5))
        before = copy.deepcopy(layer.population)
        getattr(layer, cast)()
        assert layer.weight.dtype == getattr(torch, cast if cast == "bfloat16" else "float16")
        for name, value in before.named_buffers():
            assert torch.equal(getattr(layer.population, name), value)
        y = layer(torch.randn(4, 3, 5).to(layer.weight.dtype))
        assert y.dtype == layer.weight.dtype
        assert layer.population.batch_mean.dtype == torch.float32

    def test_to_a_type_inside_a_model_keeps_the_statistics_too(self):
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), BatchLayerNorm(3)).to(torch.bfloat16)
        assert net[1].population.batch_var.dtype == torch.float32
        net(torch.randn(4, 3).bfloat16()).sum().backward()
        assert net[1].weight.grad.dtype == torch.bfloat16

    def test_double_layers_keep_double_statistics_and_come_back(self):
        layer = BatchLayerNorm(3, dtype=torch.float64)
        assert layer.population.batch_mean.dtype == torch.float64
        assert layer.float().population.batch_mean.dtype == torch.float32
        assert BatchLayerNorm(3).double().population.batch_mean.dtype == torch.float64
        assert BatchLayerNorm(3, dtype=torch.float16).population.batch_mean.dtype == torch.float32

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("training", [True, False])
    @every_form
    def test_the_output_has_the_input_type(self, dtype, training, form):
        layer = BatchLayerNorm(3, **form)
        layer(torch.randn(4, 3))
        assert layer.train(training)(torch.randn(4, 3).to(dtype)).dtype == dtype
        assert layer.population.batch_mean.dtype == torch.float32


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.channels_last_3d])
@pytest.mark.parametrize("positions", [(5, 4), (5, 4, 3), (5, 4, 3, 2)])
def test_statistics_keep_their_layout_in_any_memory_format(positions, memory_format):
    layer = BatchLayerNorm(2, position_shape=positions)
    layer(torch.randn(6, 2, *positions))
    affine = bln.Affine(torch.rand(2, *positions), torch.rand(2, *positions))
    net = torch.nn.Sequential(layer, affine)
    before = {name: (value, value.clone()) for name, value in net.named_buffers()}
    net.to(memory_format=memory_format)
    for name, value in net.named_buffers():
        assert value is before[name][0]
        assert value.is_contiguous()
        assert torch.equal(value, before[name][1])
    net.to(torch.float64, memory_format=memory_format)
    for name, value in net.named_buffers():
        assert value.is_contiguous()
        assert value.dtype == (torch.float64 if value.is_floating_point() else torch.int64)
        assert torch.equal(value, before[name][1].to(value.dtype))


@pytest.mark.parametrize("module", [BatchLayerNorm(3), bln.Affine(torch.ones(3), torch.ones(3))])
def test_torchscript_names_the_ways_out(module):
    net, x = torch.nn.Sequential(torch.nn.Linear(3, 3), module).eval(), torch.randn(4, 3)
    name = type(module).__name__
    exported = torch.export.export(net, (x,)).module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and a trace holds for this shape
        with pytest.raises(NotImplementedError, match=rf"script cannot compile {name}.*export.*trace.*compile"):
            torch.jit.script(net)
        traced = torch.jit.trace(net, x)
    for way in (exported, traced):
        torch.testing.assert_close(way(x), net(x))


class TestStateDict:
    def trained(self, **kwargs):
        layer = BatchLayerNorm(3, config="FTFT", **kwargs)
        for _ in range(3):
            layer(torch.randn(4, 3, 5))
        torch.nn.init.normal_(layer.weight)
        return layer

    @pytest.mark.parametrize("config", ["FTFT", "16 0.1 F T"])
    def test_it_holds_the_configuration(self, config):
        source, layer = self.trained(), BatchLayerNorm(3)
        source.config = config
        layer.load_state_dict(source.state_dict())
        assert str(layer.config) == config

    @pytest.mark.parametrize("assign", [False, True])
    @pytest.mark.parametrize("target", [{}, {"position_shape": 5}, {"dtype": torch.float64}, {"device": "meta"}])
    @every_form
    def test_it_loads_strictly_into_layers_that_know_their_positions_or_do_not(self, target, assign, form):
        if target.get("device") == "meta" and not assign:
            target = {"device": "cpu"}
        source = self.trained(**form)
        if not source.per_position:
            target = {name: value for name, value in target.items() if name != "position_shape"}
        layer = BatchLayerNorm(3, **form, **target)
        layer.load_state_dict(state(source), strict=True, assign=assign)
        assert str(layer.config) == "FTFT"
        assert layer.population.position_shape == ((5,) if source.per_position else ())
        x = torch.randn(2, 3, 5)
        torch.testing.assert_close(layer.eval()(x), source.eval()(x))
        layer.train()(x)

    @pytest.mark.parametrize("assign", [False, True])
    @pytest.mark.parametrize("form", [{}, {"groups": 3, "per_position": True}], ids=str)
    def test_one_from_before_the_first_batch_loads_into_a_layer_that_knows(self, assign, form):
        layer = self.trained(**form)
        layer.load_state_dict(state(BatchLayerNorm(3, **form)), assign=assign)
        assert layer.population.position_shape == (5,)
        assert layer.population.updates.shape == (5, 5)
        assert not layer.population.updates.any()
        layer(torch.randn(4, 3, 5))

    def test_weights_only_files(self, tmp_path):
        source = self.trained()
        torch.save(source.state_dict(), tmp_path / "layer.pt")
        layer = BatchLayerNorm(3)
        layer.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
        assert_same_state(layer, state(source))

    @pytest.mark.parametrize("kind", ["deepcopy", "pickle", "save"])
    @every_form
    def test_copies_go_their_own_ways(self, kind, form):
        source = self.trained(**form)
        if kind == "deepcopy":
            layer = copy.deepcopy(source)
        elif kind == "pickle":
            layer = pickle.loads(pickle.dumps(source))
        else:
            buffer = io.BytesIO()
            torch.save(source, buffer)
            buffer.seek(0)
            layer = torch.load(buffer, weights_only=False)
        before = state(source)
        assert_same_state(layer, before)
        assert repr(layer) == repr(source)
        assert str(layer.config) == "FTFT"
        layer(torch.randn(4, 3, 5))
        assert_same_state(source, before)

    @every_form
    def test_on_meta(self, tmp_path, form):
        source = self.trained(**form)
        torch.save(source.state_dict(), tmp_path / "layer.pt")
        layer = BatchLayerNorm(3, device="meta", **form)
        layer.load_state_dict(torch.load(tmp_path / "layer.pt", map_location="meta"), assign=True)
        assert layer.population.batch_mean.is_meta
        assert layer.population.position_shape == source.population.position_shape
        with torch.device("meta"):
            layer.load_state_dict(layer.state_dict(), assign=True)

    def test_statistics_that_are_assigned_lie_as_the_kernels_read_them(self):
        source = self.trained()
        saved = {k: v.T.contiguous().T if v.dim() == 2 else v for k, v in state(source).items()}
        assert not saved["population.batch_var"].is_contiguous()
        layer = BatchLayerNorm(3)
        layer.load_state_dict(saved, assign=True)
        assert all(buffer.is_contiguous() for buffer in layer.population.buffers())
        assert_same_state(layer, state(source))

    def test_a_dict_in_half_precision_does_not_narrow_the_statistics(self):
        saved = {k: v.half() if v.is_floating_point() else v for k, v in state(self.trained()).items()}
        layer = BatchLayerNorm(3)
        layer.load_state_dict(saved, assign=True)
        assert layer.weight.dtype == torch.float16
        assert layer.population.batch_var.dtype == torch.float32

    @pytest.mark.parametrize(
        "bad", [torch.tensor([1.0, 1]), torch.tensor([1.0, 1, 1, -7]), torch.full((4,), math.nan), None, "TTFF"]
    )
    def test_a_malformed_configuration_is_refused(self, bad):
        with pytest.raises(ValueError, match="four prior strengths"):
            BatchLayerNorm(3).load_state_dict({**state(BatchLayerNorm(3)), "_extra_state": bad})

    def test_a_refused_state_leaves_statistics_and_configuration(self):
        for options in ({}, {"per_position": False}, {"groups": 1}):
            layer = BatchLayerNorm(4, **options)
            layer(torch.randn(6, 4, 5))
            before = state(layer)
            with pytest.raises(RuntimeError, match="do not fit a layer of 4 features"):
                layer.load_state_dict(state(self.trained(**options)))
            assert_same_state(layer, before)

    def test_other_positions_are_refused_with_a_reason(self):
        layer = BatchLayerNorm(3, position_shape=7)
        before = state(layer)
        with pytest.raises(RuntimeError, match=r"saved with statistics for positions \(5,\).*keeps them for \(7,\)"):
            layer.load_state_dict(state(self.trained()))
        assert_same_state(layer.population, {k[11:]: v for k, v in before.items() if k.startswith("population")})

    def test_a_per_position_state_is_refused_by_a_pooled_layer(self):
        with pytest.raises(RuntimeError, match="per_position=False"):
            BatchLayerNorm(3, per_position=False).load_state_dict(state(self.trained()))

    @pytest.mark.parametrize(
        "options",
        [{"per_position": False}, {"per_position": True}, {"per_position": True, "position_shape": 5}],
        ids=str,
    )
    @pytest.mark.parametrize(("ours", "theirs"), [(1, 3), (3, 1), (3, None), (None, 3)])
    def test_another_number_of_groups_is_refused_by_name(self, ours, theirs, options):
        layer = BatchLayerNorm(3, groups=ours, **options)
        before = state(layer)
        source = self.trained(groups=theirs, **options)
        with pytest.raises(
            RuntimeError, match=f"saved with groups={theirs}, but this layer has groups={ours}; build it"
        ):
            layer.load_state_dict(state(source))
        kept = {k: v for k, v in before.items() if k not in ("weight", "bias")}
        assert_same_state(layer, {**state(layer), **kept})
        assert str(layer.config) == "TTFF"

    def test_another_number_of_features_is_refused(self):
        with pytest.raises(RuntimeError, match="size mismatch"):
            BatchLayerNorm(4).load_state_dict(state(self.trained()))

    def test_a_missing_statistic_is_refused(self):
        incomplete = state(self.trained())
        del incomplete["population.inverse_m"]
        with pytest.raises(RuntimeError, match=r"Missing key.*population\.inverse_m"):
            BatchLayerNorm(3).load_state_dict(incomplete)


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"num_features": 0}, "an integer of at least 1, got 0"),
            ({"channel_dim": 0}, "got 0; 0 is that of samples"),
            ({"channel_dim": 1.5}, "got 1.5"),
            ({"num_features": "3"}, "an integer of at least 1, got '3'"),
            ({"momentum": "x"}, "momentum must be"),
            ({"eps": None}, "eps must be a positive number, got None"),
            ({"eps": 0.0}, "eps must be a positive number, got 0.0"),
            ({"eps": -1e-4}, "eps must be"),
            ({"eps": float("nan")}, "eps must be"),
            ({"mix_eps": 1.5}, "mix_eps must be None"),
            ({"eps": 2.0}, "mix_eps must be None .*with eps=2.0"),
            ({"momentum": 1.5}, r"momentum must be None \(plain average\) or in \[0, 1\], got 1.5"),
            ({"momentum": -0.1}, "momentum must be"),
            ({"config": "TTT"}, "'TTT' is not a configuration"),
            *(
                ({"dtype": dtype}, rf"dtype must be float32.*, got {dtype}")
                for dtype in (torch.int32, torch.cfloat, torch.float8_e4m3fn)
            ),
            *(
                ({"position_shape": shape}, "must hold positive sizes, as 80")
                for shape in ((4, 0), 0, 8.0, "8", (4, 0.5))
            ),
            ({"position_shape": 4, "per_position": False}, "goes with per_position=True"),
        ],
    )
    def test_constructor(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            BatchLayerNorm(**{"num_features": 3, **arguments})

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize(
        ("x", "mask", "error", "message"),
        [
            (torch.randn(4, 5, 6), None, ValueError, "expected 3 features along dimension 1, got 5"),
            (torch.randn(3), None, ValueError, "expected an input"),
            (torch.randn(4, 3), None, ValueError, r"positions \(\), but .* for positions \(6,\).*a layer of its own"),
            (torch.randn(4, 3, 7), None, ValueError, r"\(1\) position_shape=.*\(2\) per_position=False"),
            (torch.randn(4, 3, 6, 2), None, ValueError, r"positions \(6, 2\)"),
            (torch.randn(4, 3, 0), None, ValueError, "empty"),
            (torch.ones(4, 3, 6, dtype=torch.int32), None, TypeError, "floating point"),
            (torch.ones(4, 3, 6, dtype=torch.cfloat), None, TypeError, "floating point"),
            (torch.ones(4, 3, 6).to(torch.float8_e4m3fn), None, TypeError, "16 bits or more, got torch.float8"),
            (torch.randn(4, 3, 6), torch.ones(4, 6), TypeError, "boolean mask"),
            (torch.randn(4, 3, 6), [[True] * 6] * 4, TypeError, "true at real entries, got list; try torch.tensor"),
            (np.ones((4, 3, 6)), None, TypeError, "expected a torch.Tensor as input, got ndarray"),
            (torch.randn(4, 3, 6), torch.ones(4, 3, dtype=torch.bool), ValueError, r"mask of shape \(4, 6\)"),
            (torch.randn(4, 3, 6), torch.zeros(4, 6, dtype=torch.bool), ValueError, "hides every entry"),
        ],
    )
    def test_forward_says_what_is_wrong_and_leaves_the_statistics(self, training, x, mask, error, message):
        layer = BatchLayerNorm(3)
        layer(torch.randn(4, 3, 6))
        before = state(layer)
        layer.train(training)
        with pytest.raises(error, match=message):
            layer(x, mask)
        assert_same_state(layer, before)

    def test_other_images_are_not_told_to_be_sequences(self):
        layer = BatchLayerNorm(3, position_shape=(8, 8))
        with pytest.raises(ValueError, match=r"Ways out: \(1\) per_position=False.*groups=8.*\(2\) pad or crop"):
            layer(torch.randn(4, 3, 5, 5))
        layer = BatchLayerNorm(3)
        layer(torch.randn(4, 3))
        with pytest.raises(ValueError, match=r"kept for inputs without positions, \(N, C\)"):
            layer(torch.randn(4, 3, 5, 5))

    def test_a_checkpoint_of_batch_norm_is_to_be_loaded_first(self):
        with (
            pytest.warns(UserWarning, match=r"running_mean is a BatchNorm's: load .* then call bln\.convert"),
            pytest.raises(RuntimeError, match="Missing key"),
        ):
            BatchLayerNorm(3).load_state_dict(torch.nn.BatchNorm2d(3).state_dict())

    def test_a_bad_configuration_leaves_the_old_one(self):
        layer = BatchLayerNorm(3, config="FTFF")
        with pytest.raises(ValueError, match="not a configuration"):
            layer.config = "FT"
        assert str(layer.config) == "FTFF"


def test_integers_of_any_kind_are_sizes():
    layer = BatchLayerNorm(np.int64(3), position_shape=(np.int64(4), 5))
    assert type(layer.num_features) is int
    assert type(BatchLayerNorm(3, channel_dim=np.int64(-1)).channel_dim) is int
    assert layer.population.position_shape == (4, 5)
    assert BatchLayerNorm(3, position_shape=np.int32(7)).population.position_shape == (7,)


def test_repr_tells_what_was_chosen():
    assert repr(BatchLayerNorm(3)) == "BatchLayerNorm(3, position_shape=None, config=TTFF)"
    layer = BatchLayerNorm(3, channel_dim=-1, per_position=False, momentum=None, bias=False, eps=1e-3, config="FTFF")
    assert repr(layer) == (
        "BatchLayerNorm(3, channel_dim=-1, per_position=False, config=FTFF, eps=0.001, momentum=None, bias=False)"
    )


def test_training_with_bln_learns():
    """A net that cannot fit the labels without a working backward does with it."""
    x = torch.randn(64, 10)
    target = (x[:, 0] * x[:, 1] > 0).float()
    net = torch.nn.Sequential(
        torch.nn.Linear(10, 32), torch.nn.Tanh(), BatchLayerNorm(32), torch.nn.Linear(32, 32), torch.nn.Tanh(),
        BatchLayerNorm(32), torch.nn.Linear(32, 1),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(net(x)[:, 0], target).backward()
        optimizer.step()
    bln.calibrate(net, [x], progress=False)
    assert ((net.eval()(x)[:, 0] > 0) == target.bool()).float().mean() > 0.95


@pytest.mark.parametrize("options", [{}, {"per_position": False}, {"groups": 3}], ids=str)
def test_an_empty_batch_comes_out_empty_at_inference_and_is_refused_in_training(options):
    layer = BatchLayerNorm(3, **options)
    layer(torch.randn(4, 3, 6))
    before = state(layer)
    with pytest.raises(ValueError, match="cannot train on an empty input"):
        layer(torch.randn(0, 3, 6))
    layer.eval()
    for config in CONFIGS:
        layer.config = config
        x = torch.randn(0, 3, 6, requires_grad=True)
        y = layer(x, torch.ones(0, 6, dtype=torch.bool))
        assert y.shape == x.shape
        y.sum().backward()
        assert x.grad.shape == x.shape
    layer.config = "TTFF"
    assert_same_state(layer, before)


def test_a_float64_layer_without_parameters_computes_in_float64():
    x = torch.randn(6, 4, 5) + 300
    layer = BatchLayerNorm(4, affine=False, dtype=torch.float64, momentum=None)
    layer(x)
    expected = x.double().var(0, correction=1).T
    torch.testing.assert_close(layer.population.batch_var, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"per_position": False}, {"groups": 1}, {"groups": 1, "per_position": True}], ids=str
)
@pytest.mark.parametrize("features", [3, 16])
def test_gradients_of_inputs_of_order_1e15_are_right(options, features):
    """r ** 3 of a deviation r of 1e-15 is no normal float32: it must not be formed."""
    layer = BatchLayerNorm(features, **options)
    x = (torch.randn(8, features, 5, dtype=torch.float64) * 1e15).float()
    dy = torch.randn(8, features, 5)
    (ours,) = torch.autograd.grad(layer(leaf := x.clone().requires_grad_()), leaf, dy)
    wide = x.double().requires_grad_()
    (theirs,) = torch.autograd.grad(copy.deepcopy(layer).double()(wide), wide, dy.double())
    torch.testing.assert_close(ours.double() * 1e15, theirs * 1e15, rtol=1e-4, atol=1e-5)


class TestGroups:
    """Exactly GroupNorm, InstanceNorm and BatchNorm at its ends."""

    @pytest.mark.parametrize(
        ("shape", "groups"), [((1, 6, 4, 5), 1), ((1, 6, 4, 5), 2), ((1, 6, 4, 5), 6), ((1, 6, 7), 3), ((1, 6), 2)]
    )
    def test_a_single_sample_is_group_norm(self, shape, groups):
        ours = BatchLayerNorm(6, groups=groups)
        theirs = torch.nn.GroupNorm(groups, 6, eps=ours.eps)
        _same_function(ours, theirs, torch.randn(shape))
        for config in ("TTFF", "FFFF"):  # remembered, 1/m = 1
            ours.config = config
            _same_function(ours.eval(), theirs, torch.randn(shape))
            _same_function(ours.eval(), theirs, torch.randn(5, *shape[1:]))

    @pytest.mark.parametrize("layout", ["first", "channels_last", "last", "strided"])
    def test_what_follows_may_change_the_output_in_place(self, layout):
        """As nets do behind BatchNorm: ReLU(inplace=True), y += shortcut."""
        x = torch.randn(4, 6, 5, 3)
        if layout == "channels_last":
            x = x.to(memory_format=torch.channels_last)
        elif layout == "strided":
            x = torch.randn(5, 4, 3, 6).permute(1, 3, 0, 2)
        x = (x.movedim(1, -1) if layout == "last" else x).requires_grad_()
        layer = BatchLayerNorm(6, groups=3, channel_dim=-1 if layout == "last" else 1)
        y = layer(x)
        assert not y._is_view()
        expected = torch.autograd.grad((layer(x) + 1).relu().square().sum(), x)
        y += 1
        y = torch.relu_(y)
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x), expected)

    def test_as_many_groups_as_features_are_instance_norm(self):
        ours = BatchLayerNorm(6, groups=6)
        _same_function(ours, torch.nn.InstanceNorm2d(6, eps=ours.eps, affine=True), torch.randn(1, 6, 4, 5))

    @pytest.mark.parametrize("shape", [(8, 6, 4, 5), (8, 6, 7), (8, 6)])
    @pytest.mark.parametrize("config", ["TTFF", "FFFF"])
    def test_one_over_m_of_0_is_batch_norm(self, shape, config):
        ours = BatchLayerNorm(6, groups=2, config=config).eval()
        theirs = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}[len(shape)](6, ours.eps)
        theirs.train(config == "FFFF")
        with torch.no_grad():
            for buffer in (ours.population.batch_mean, ours.population.batch_var):
                buffer.copy_(torch.rand(6) + 0.5)
            theirs.running_mean.copy_(ours.population.batch_mean)
            theirs.running_var.copy_(ours.population.batch_var)
        ours.population.mark_seen(["inverse_m"], 1)
        _same_function(ours, theirs, torch.randn(shape))

    def test_with_groups_the_defaults_are_those_of_the_grouped_form(self):
        layer = BatchLayerNorm(6, groups=3)
        assert (layer.per_position, layer.mix_eps, layer.dim_scale) == (False, 0, False)
        assert repr(layer) == "BatchLayerNorm(6, groups=3, config=TTFF)"
        assert layer.population.feature_mean.shape == (3,)

    @pytest.mark.parametrize(
        ("groups", "message"),
        [(4, "groups=4 does not divide 6 features; try groups=2 or groups=3 or groups=6"), (0, "at least 1"),
         (True, "at least 1"), (2.0, "at least 1")],
    )  # fmt: skip
    def test_groups_that_do_not_fit_are_refused_with_those_that_do(self, groups, message):
        with pytest.raises(ValueError, match=message):
            BatchLayerNorm(6, groups=groups)


def _same_function(ours, theirs, x):
    """The same outputs and gradients up to rounding, in both types.

    Each value is the end of some ten operations on numbers of order 1; one in a thousand has a deviation of 1/10 and
    less, whose square a gradient is divided by.
    """
    with torch.no_grad():
        for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.copy_(parameter.copy_(torch.randn_like(parameter)))
    dy = torch.randn_like(x)
    for dtype in (torch.float64, torch.float32):
        results = []
        for layer in (ours.to(dtype), theirs.to(dtype)):
            leaf = x.to(dtype, copy=True).requires_grad_()
            y = layer(leaf)
            results.append((y, *torch.autograd.grad(y, (leaf, *layer.parameters()), dy.to(dtype))))
        eps = torch.finfo(dtype).eps
        for ours_, theirs_ in zip(*results, strict=True):
            torch.testing.assert_close(ours_, theirs_, rtol=1000 * eps, atol=1000 * eps)


class TestProcessGroup:
    """Without other processes; those are in tests/distributed."""

    def test_the_world_is_this_process_until_there_is_a_group(self):
        alone, layer = BatchLayerNorm(3), BatchLayerNorm(3, process_group="world")
        x = torch.randn(4, 3, 2)
        assert torch.equal(layer(x), alone(x))
        assert_same_state(layer, state(alone))
        with pytest.raises(ValueError, match="empty"):
            layer(x[:0])

    def test_it_travels_with_copies_and_shows(self):
        layer = BatchLayerNorm(3, process_group="world")
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert other.process_group == "world"
        assert "process_group='world'" in repr(layer)
        layer.process_group = None
        assert layer.process_group is None
        assert "process_group" not in repr(layer)

    def test_anything_else_is_refused(self):
        with pytest.raises(ValueError, match="'world' or None, got 'all'"):
            BatchLayerNorm(3, process_group="all")
        with pytest.raises(TypeError, match="got 7"):
            BatchLayerNorm(3, process_group=7)

    def test_averaging_without_other_processes_changes_nothing(self):
        layer = BatchLayerNorm(3)
        layer(torch.randn(4, 3, 2))
        before = state(layer)
        bln.average_statistics(layer)
        assert_same_state(layer, before)
        with pytest.raises(ValueError, match="no BatchLayerNorm"):
            bln.average_statistics(torch.nn.Linear(2, 2))
