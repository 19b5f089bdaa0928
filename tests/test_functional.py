"""The torch function against the oracle, over ranks, layouts, types, masks and configurations."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
import tolerance
from bln import BatchLayerNorm, Statistics, StatisticsConfig
from bln.functional import batch_layer_norm
from cases import Case, cases

F64 = torch.float64
FORMS = ({}, {"per_position": False}, {"groups": 3}, {"groups": 1}, {"groups": 1, "per_position": True})
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def call(case: Case, x=None, **kwargs):
    return batch_layer_norm(
        case.x if x is None else x, case.weight, case.bias, channel_dim=case.channel_dim,
        per_position=case.per_position, mask=case.mask, **case.options, **kwargs,
    )  # fmt: skip


def current(case: Case):
    s = oracle.measure(case.rows, case.numpy_mask, case.per_position, case.groups)
    return s, (s.var_B, s.var_F, 1 / np.maximum(s.m, 1))


@given(cases())
def test_training_forward_is_algorithm_1(case):
    y, statistics = call(case, return_statistics=True)
    s, spread = current(case)
    expected = oracle.train(
        case.rows, *case.affine, mask=case.numpy_mask, per_position=case.per_position, **case.options
    )
    assert y.dtype == case.x.dtype
    assert y.shape == case.x.shape
    assert not case.x.is_contiguous() or y.is_contiguous()
    bound = tolerance.output(case.rows, expected, *spread, *case.affine, case.x.dtype, **case.options)
    tolerance.close(case.to_rows(y), expected, bound, "y")

    real = slice(None) if case.mask is None else case.numpy_mask
    size = np.abs(case.rows[real]).max()
    if case.groups is not None and case.mask is not None:
        real = case.numpy_mask.reshape(len(case.rows), -1).any(1)
    unit = tolerance.ROUNDINGS * tolerance.epsilon(case.x.dtype)
    tolerance.close(statistics.batch_mean, s.mean_B, unit * size, "batch mean")
    tolerance.close(statistics.batch_var, s.var_B, unit * (size**2 + case.eps), "batch variance")
    tolerance.close(statistics.feature_mean[real], s.mean_F[real], unit * size, "feature mean")
    tolerance.close(statistics.feature_var[real], s.var_F[real], unit * (size**2 + case.eps), "feature variance")


@given(cases())
def test_training_backward_is_the_chain_rule(case):
    x = case.x.clone().requires_grad_()
    for parameter in (case.weight, case.bias):
        if parameter is not None:
            parameter.requires_grad_()
    y = call(case, x)
    dy = torch.randn(y.shape, dtype=F64).to(y.dtype)
    y.backward(dy)
    rows_dy = case.to_rows(dy).double().numpy()
    dx, dgamma, dbeta = oracle.train_backward(
        case.rows, rows_dy, case.affine[0], mask=case.numpy_mask, per_position=case.per_position, **case.options
    )
    _, spread = current(case)
    for_x, for_gamma, for_beta = tolerance.gradient(
        case.rows, dx, rows_dy, *spread, case.affine[0], case.x.dtype, **case.options
    )
    tolerance.close(case.to_rows(x.grad), dx, for_x, "dx")
    if case.weight is not None:
        tolerance.close(case.weight.grad, dgamma, for_gamma, "dgamma")
    if case.bias is not None:
        tolerance.close(case.bias.grad, dbeta, for_beta, "dbeta")


def random_population(case: Case):
    shape = case.rows.shape[1:-1] if case.per_position else ()
    population = oracle.Population(shape, case.rows.shape[-1], case.groups)
    rng = np.random.default_rng(torch.randint(2**31, ()).item())
    for name in ("mean_B", "mean_F"):
        setattr(population, name, rng.normal(size=getattr(population, name).shape).astype(np.float32).astype(float))
    for name in ("var_B", "var_F"):
        value = rng.uniform(0.2, 2, size=getattr(population, name).shape)
        setattr(population, name, value.astype(np.float32).astype(float))
    population.inverse_m[...] = np.float32(rng.uniform(0, 1))
    population.updates[...] = 1
    dtype = torch.promote_types(case.x.dtype, torch.float32)
    fields = (population.mean_B, population.var_B, population.mean_F, population.var_F, population.inverse_m)
    return population, Statistics(*(torch.as_tensor(value, dtype=dtype) for value in fields))


@given(cases(), st.sampled_from(list(StatisticsConfig.all())))
def test_inference_is_algorithm_2_in_every_configuration(case, config):
    population, statistics = random_population(case)
    y, used = call(case, population=statistics, config=config, return_statistics=True)
    expected = population.infer(
        case.rows, str(config), *case.affine, mask=case.numpy_mask, per_position=case.per_position, **case.options
    )
    # A population mean may be larger than the input: it is subtracted, so it counts among the inputs' sizes.
    values = np.append(case.rows.ravel(), [population.mean_B.max(), population.mean_F.max()])
    var_B, var_F = (v.double().numpy() for v in (used.batch_var, used.feature_var))
    spread = (var_B, var_F, population.inverse_m)
    bound = tolerance.output(values, expected, *spread, *case.affine, case.x.dtype, **case.options)
    tolerance.close(case.to_rows(y), expected, bound, f"y in {config}")


@pytest.mark.parametrize("config", [None, *map(str, StatisticsConfig.all())])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("per_position", [True, False])
@pytest.mark.parametrize("groups", [None, 2])
def test_gradcheck_and_gradgradcheck(config, masked, per_position, groups):
    x = torch.randn(3, 4, 2, dtype=F64, requires_grad=True)
    weight, bias = (torch.randn(4, dtype=F64, requires_grad=True) for _ in range(2))
    mask = torch.tensor([[True, True], [True, False], [True, True]]) if masked else None
    shape = (2,) if per_position else ()
    feature = shape if groups is None else (groups,)
    population = config and Statistics(
        torch.randn(*shape, 4, dtype=F64), torch.rand(*shape, 4, dtype=F64) + 0.1,
        torch.randn(feature, dtype=F64), torch.rand(feature, dtype=F64) + 0.1, torch.rand(shape, dtype=F64),
    )  # fmt: skip

    def function(x, weight, bias):
        return batch_layer_norm(
            x, weight, bias, groups=groups, per_position=per_position, mask=mask, population=population,
            config=config or "TTFF",
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, (x, weight, bias))
    assert torch.autograd.gradgradcheck(function, (x, weight, bias))


@pytest.mark.parametrize("per_position", [True, False])
@pytest.mark.parametrize("groups", [None, 1, 8])
@pytest.mark.parametrize("training", [True, False])
def test_mean_2000_deviation_1_in_float32(per_position, groups, training):
    """Where E[x^2] - E[x]^2 would return rubbish: off by the squares' rounding, 2000^2 * 2^-23, half a variance."""
    x = 2000 + torch.randn(64, 32, 10)
    rows = x.double().movedim(1, -1).numpy()
    options = {"eps": 1e-4, "mix_eps": 1e-4, "dim_scale": False, "groups": groups}
    s = oracle.measure(rows, None, per_position, groups)
    population = None
    if not training:
        population = Statistics(*(torch.zeros(()) for _ in range(4)), torch.tensor(1 / 64))
    y, used = batch_layer_norm(
        x, per_position=per_position, **options, population=population, config="FFFF", return_statistics=True
    )
    expected = oracle.train(rows, per_position=per_position, **options)
    spread = (s.var_B, s.var_F, np.asarray(1 / 64))
    bound = tolerance.output(rows, expected, *spread, 1.0, 0.0, torch.float32, **options)
    assert bound.max() < 0.02
    tolerance.close(y.movedim(1, -1), expected, bound, "y")
    np.testing.assert_allclose(used.batch_var, s.var_B, rtol=2e-3)  # 2000 * 2^-23 * ROUNDINGS, twice
    np.testing.assert_allclose(used.feature_var.numpy(), s.var_F, rtol=2e-3)


@pytest.mark.parametrize("value", [0.0, 1.0, -7.5, 300.0])
@pytest.mark.parametrize("per_position", [True, False])
@pytest.mark.parametrize("groups", [None, 1, 5])
def test_constant_inputs_give_the_shift(value, per_position, groups):
    x = torch.full((6, 5, 4), value, requires_grad=True)
    bias = torch.arange(5.0)
    y = batch_layer_norm(x, bias=bias, per_position=per_position, groups=groups)
    bound = tolerance.ROUNDINGS * tolerance.epsilon(x.dtype) * (1 + abs(value)) / 0.01  # deviation: sqrt(eps)
    torch.testing.assert_close(y, bias[:, None].expand(y.shape), atol=bound, rtol=0)
    y.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("n", [1, 5])
def test_one_feature_leaves_the_batch_part_alone(n):
    """With d = 1 the feature-normalized part is 0/0 without an epsilon, and 0 with it."""
    x = torch.randn(n, 1, 3, dtype=F64)
    y = batch_layer_norm(x)
    expected = (1 - 1 / n - 1e-4) * (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-4).sqrt()
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("masked", [False, True])
def test_one_feature_has_right_gradients(masked):
    x = torch.randn(4, 1, 3, dtype=F64, requires_grad=True)
    weight = torch.randn(1, dtype=F64, requires_grad=True)
    mask = torch.ones(4, 3, dtype=torch.bool) if masked else None
    assert torch.autograd.gradcheck(lambda x, w: batch_layer_norm(x, w, mask=mask), (x, weight))


@pytest.mark.parametrize("groups", [None, 3])
def test_returned_statistics_are_detached(groups):
    x = torch.randn(4, 3, requires_grad=True)
    for mask in (None, torch.ones(4, dtype=torch.bool)):
        _, statistics = batch_layer_norm(x, mask=mask, groups=groups, return_statistics=True)
        assert not any(s.requires_grad for s in statistics)


@pytest.mark.parametrize("groups", [None, 3])
def test_variances_are_never_negative(groups):
    x = torch.full((64, 33), 1000.0) + torch.randn(64, 33) * 1e-5
    _, statistics = batch_layer_norm(x, groups=groups, return_statistics=True)
    assert (statistics.batch_var >= 0).all()
    assert (statistics.feature_var >= 0).all()


def test_single_sample_batch_is_layer_norm_up_to_mix_eps():
    x = torch.randn(1, 6, 4, dtype=F64)
    y = batch_layer_norm(x, dim_scale=False)
    rows = x.movedim(1, -1)
    expected = torch.nn.functional.layer_norm(rows, (6,), eps=1e-4).movedim(-1, 1)
    torch.testing.assert_close(y, (1 - 1e-4) * expected)


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [None, 3])
def test_autocast_computes_in_float32_and_returns_the_input_type(layout, dtype, groups):
    x = torch.randn(5, 6, 4, 4).to(dtype)
    x = x.to(memory_format=torch.channels_last) if layout == "channels last" else x
    weight = torch.randn(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = batch_layer_norm(x, weight, groups=groups)
    assert y.dtype == dtype
    assert torch.equal(y, batch_layer_norm(x, weight, groups=groups))


@every_form
def test_hidden_entries_do_not_matter(form):
    x = torch.randn(5, 3, 6, dtype=F64)
    mask = torch.rand(5, 6) < 0.6
    mask[0] = True
    other = torch.where(mask[:, None], x, torch.randn_like(x) * 1e6)
    a, b = (batch_layer_norm(value, mask=mask, **form) for value in (x, other))
    assert torch.equal(a, b)
    assert (a.movedim(1, -1)[~mask] == 0).all()


@every_form
def test_a_full_mask_is_no_mask(form):
    x = torch.randn(5, 3, 6, dtype=F64)
    mask = torch.ones(5, 6, dtype=torch.bool)
    torch.testing.assert_close(batch_layer_norm(x, mask=mask, **form), batch_layer_norm(x, **form))


@every_form
def test_a_masked_batch_is_the_batch_without_the_hidden_samples(form):
    x = torch.randn(5, 3, dtype=F64)
    mask = torch.tensor([True, False, True, True, False])
    torch.testing.assert_close(batch_layer_norm(x, mask=mask, **form)[mask], batch_layer_norm(x[mask], **form))


class TestBadInput:
    def test_integers_are_refused_and_float_suggested(self):
        with pytest.raises(TypeError, match=r"got torch.int64.*x\.float\(\)"):
            batch_layer_norm(torch.ones(3, 4, dtype=torch.int64))

    def test_complex_numbers_are_refused(self):
        with pytest.raises(TypeError, match=r"real floating point.*complex64"):
            batch_layer_norm(torch.ones(3, 4, dtype=torch.complex64))

    @pytest.mark.parametrize("shape", [(), (4,)])
    def test_a_rank_below_two_names_the_shapes(self, shape):
        with pytest.raises(ValueError, match=r"expected an input \(N, C\).*x\[None\]"):
            batch_layer_norm(torch.ones(shape))

    @pytest.mark.parametrize("channel_dim", [0, 3, -3, -4])
    def test_a_channel_dim_that_is_not_there(self, channel_dim):
        with pytest.raises(ValueError, match=rf"channel_dim={channel_dim}"):
            batch_layer_norm(torch.ones(3, 4, 5), channel_dim=channel_dim)

    @pytest.mark.parametrize("shape", [(0, 4), (3, 4, 0)])
    def test_an_empty_batch(self, shape):
        with pytest.raises(ValueError, match="empty input"):
            batch_layer_norm(torch.ones(shape))

    def test_a_mask_of_another_type(self):
        with pytest.raises(TypeError, match=r"boolean mask.*got torch.float32; try mask.bool\(\)"):
            batch_layer_norm(torch.ones(3, 4, 5), mask=torch.ones(3, 5))

    def test_a_mask_of_another_shape(self):
        with pytest.raises(ValueError, match=r"mask of shape \(3, 5\).*got \(3, 4\)"):
            batch_layer_norm(torch.ones(3, 4, 5), mask=torch.ones(3, 4, dtype=torch.bool))

    def test_a_population_of_other_inputs(self):
        x = torch.randn(3, 4, 5)
        _, own = batch_layer_norm(x, return_statistics=True)
        batch_layer_norm(x, population=own)
        with pytest.raises(ValueError, match=r"population\.batch_var has shape \(4, 5\), expected \(5, 4\)"):
            batch_layer_norm(x, population=own._replace(batch_var=own.batch_var.T))
        with pytest.raises(ValueError, match=r"population\.inverse_m has shape \(3, 3, 5\), expected \(5,\)"):
            batch_layer_norm(x, population=own._replace(inverse_m=torch.ones(3, 3, 5)))
        with pytest.raises(TypeError, match=r"Statistics of five tensors, got Statistics of .*float"):
            batch_layer_norm(x, population=own._replace(inverse_m=0.2))
        with pytest.raises(TypeError, match="got tuple of Tensor"):
            batch_layer_norm(x, population=tuple(own))

    def test_a_mask_that_hides_everything(self):
        with pytest.raises(ValueError, match="hides every entry"):
            batch_layer_norm(torch.ones(3, 4, 5), mask=torch.zeros(3, 5, dtype=torch.bool))

    @pytest.mark.parametrize("options", [{"eps": 0.0}, {"eps": -1.0}, {"mix_eps": -5.0}])
    def test_an_epsilon_out_of_range(self, options):
        with pytest.raises(ValueError, match=r"eps must be"):
            batch_layer_norm(torch.ones(3, 4), **options)

    def test_a_weight_of_another_length(self):
        with pytest.raises(ValueError, match=r"weight has shape \(5,\), expected \(4,\)"):
            batch_layer_norm(torch.ones(3, 4, 5), torch.ones(5))

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"weight": [1, 2, 3, 4]}, TypeError, "weight must be a torch.Tensor or None, got list"),
            ({"channel_dim": None}, TypeError, "channel_dim must be an integer"),
            ({"config": "zz"}, ValueError, "'zz' is not a configuration"),
        ],
    )
    def test_arguments_of_another_kind(self, arguments, error, message):
        with pytest.raises(error, match=message):
            batch_layer_norm(torch.ones(3, 4), **arguments)

    def test_integers_of_numpy_are_integers(self):
        x = torch.randn(3, 4)
        assert torch.equal(batch_layer_norm(x, channel_dim=np.int64(1)), batch_layer_norm(x, channel_dim=1))

    def test_a_tracer_that_looks_inside_is_told_the_way_out(self):
        with pytest.raises(TypeError, match=r"got Proxy; torch.fx wants a Tracer whose is_leaf_module"):
            torch.fx.symbolic_trace(BatchLayerNorm(4))

    @pytest.mark.parametrize("config", ["TTF", "TTFX", "ttff", "", "TTFFF"])
    def test_a_configuration_that_is_not_four_of_t_and_f(self, config):
        with pytest.raises(ValueError, match="four letters"):
            StatisticsConfig.parse(config)

    def test_a_configuration_of_another_type(self):
        with pytest.raises(TypeError, match="StatisticsConfig or a string"):
            StatisticsConfig.parse(15)

    def test_letters_are_not_switches(self):
        with pytest.raises(TypeError, match=r"True \(population\), False.*parse\('TTFF'\)"):
            StatisticsConfig("T", "T", "F", "F")

    @pytest.mark.parametrize("config", ["16 16 F", "16", "1616", "16 16 F F F", "16 x F F", "16,16,F,F"])
    def test_a_configuration_that_is_not_four_letters_or_numbers(self, config):
        with pytest.raises(ValueError, match="prior strengths too, such as '16 16 F F'"):
            StatisticsConfig.parse(config)

    @pytest.mark.parametrize("config", ["-1 16 F F", "nan T F F"])
    def test_a_prior_that_is_no_number_of_samples(self, config):
        with pytest.raises(ValueError, match=r"batch_mean has a prior strength of (-1|nan); it counts samples"):
            StatisticsConfig.parse(config)

    def test_a_prior_in_training(self):
        with pytest.raises(ValueError, match=r"config='16 16 F F' has prior strengths.*pass population="):
            batch_layer_norm(torch.ones(3, 4), config="16 16 F F")


@pytest.mark.parametrize("channel_dim", [1, -1])
@pytest.mark.parametrize("form", [{}, {"per_position": False}, {"groups": 8}], ids=str)
def test_backward_keeps_the_input_and_the_statistics(channel_dim, form):
    x = torch.randn((32, 24, 20) if channel_dim == 1 else (32, 20, 24), requires_grad=True)
    weight, bias = torch.ones(24, requires_grad=True), torch.zeros(24, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = batch_layer_norm(x, weight, bias, channel_dim=channel_dim, **form)
    assert y.requires_grad
    large = sum(size for size in kept.values() if size >= x.untyped_storage().nbytes())
    assert large == x.untyped_storage().nbytes()
    small = sum(kept.values()) - large
    statistics = 4 * (2 * 20 * 24 + 2 * 32 * 20) + 4 * 2 * 20 * 24  # means and deviations; scale and shift, spread
    assert small <= 1.1 * statistics
