"""The fixed scale and shift that a frozen layer is."""

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn

import bln
from bln import Affine, BatchLayerNorm
from cases import cases, remembered
from tolerance import close, output


@given(cases())
def test_it_is_the_layer_in_every_layout_and_type(case):
    d, dtype = case.x.shape[case.channel_dim], case.x.dtype
    layer = BatchLayerNorm(
        d, channel_dim=case.channel_dim, per_position=case.per_position, affine=case.weight is not None,
        bias=case.bias is not None, config="TTTT", dtype=torch.promote_types(dtype, torch.float32), **case.options,
    )  # fmt: skip
    for name, parameter in layer.named_parameters():
        nn.init.constant_(parameter, 0).data.add_(getattr(case, name))
    layer(torch.where(case.x.isfinite(), case.x, 1))  # every position, also those a mask hides
    layer.eval()
    population = remembered(layer)
    gamma, beta = (
        default if parameter is None else parameter.detach().double().numpy()
        for parameter, default in ((layer.weight, 1.0), (layer.bias, 0.0))
    )
    expected = population.infer(
        case.rows, "TTTT", gamma, beta, mask=case.numpy_mask, per_position=case.per_position, **case.options
    )
    bound = output(
        np.append(case.rows, population.mean_B),  # the shift is of the means' size, however small the input
        expected, population.var_B, population.var_F, population.inverse_m, gamma, beta, dtype, **case.options,
    )  # fmt: skip
    y = bln.freeze(layer)(case.x, case.mask)
    assert y.dtype == dtype
    close(case.to_rows(y), expected, bound, "affine")


@pytest.mark.parametrize("shape", [(4,), (4, 6)])
def test_an_empty_batch_comes_out_empty(shape):
    x = torch.randn(0, 4, 6, requires_grad=True)
    y = Affine(torch.ones(shape), torch.ones(shape))(x, torch.ones(0, 6, dtype=torch.bool))
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_it_is_one_operation():
    affine = Affine(torch.randn(4), torch.randn(4))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        affine(torch.randn(3, 4, 5))
    working = {"aten::addcmul", "aten::mul", "aten::add", "aten::copy_", "aten::sub", "aten::div"}
    assert [e.name for e in profile.events() if e.name in working] == ["aten::addcmul"]


def test_it_says_what_does_not_fit():
    with pytest.raises(ValueError, match="expected 4 features along dimension 1, got 5"):
        Affine(torch.ones(4), torch.ones(4))(torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"positions \(7,\), but statistics are kept for positions \(6,\)"):
        Affine(torch.ones(4, 6), torch.ones(4, 6))(torch.ones(2, 4, 7))
    with pytest.raises(ValueError, match=r"one shape.*got \(4,\) and \(3,\)"):
        Affine(torch.ones(4), torch.ones(3))


def test_it_compiles_and_exports_with_a_dynamic_batch():
    affine, x = Affine(torch.randn(4, 6), torch.randn(4, 6)), torch.randn(3, 4, 6)
    program = torch.export.export(affine, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for n in (1, 5):
        x = torch.randn(n, 4, 6)
        torch.testing.assert_close(program.module()(x), affine(x))
