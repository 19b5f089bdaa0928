"""Batch statistics of recent requests join those of the next one."""

import copy
import threading

import numpy as np
import pytest
import torch

import oracle
from bln import BatchLayerNorm
from cases import remembered

FORMS = [
    {},
    {"per_position": False},
    {"groups": 2},
    {"groups": 2, "per_position": True},
]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def layer_with(samples, config="16 4 F F", **form):
    """A trained layer that remembers as many samples."""
    layer = BatchLayerNorm(4, dtype=torch.float64, config=config, **form)
    for _ in range(3):
        layer(torch.randn(6, 4, 5, dtype=torch.float64) + 1)
    layer.memory = samples
    return layer.eval()


def request(n=2):
    return torch.randn(n, 4, 5, dtype=torch.float64) * 2 - 1


def together(layer, requests):
    """What the oracle makes of the last request when all of them are samples of one mini-batch."""
    rows = torch.cat(requests).movedim(1, -1).numpy()
    options = {"eps": layer.eps, "mix_eps": layer.mix_eps, "dim_scale": layer.dim_scale}
    y = remembered(layer).infer(rows, str(layer.config), per_position=layer.per_position, **options)
    return torch.tensor(y[-len(requests[-1]) :]).movedim(-1, 1)


@every_form
@pytest.mark.parametrize("config", ["FFFF", "16 4 F F", "TFFF", "8 T F F"])
def test_requests_are_samples_of_one_mini_batch_while_there_is_room(form, config):
    layer = layer_with(100, config, **form)
    requests = [request(n) for n in (1, 3, 2)]
    for at in range(3):
        torch.testing.assert_close(layer(requests[at]), together(layer, requests[: at + 1]))


@every_form
def test_older_requests_fade_once_the_memory_is_full(form):
    """A full memory counts as many samples as its bound, beside those of the request."""
    layer = layer_with(4, "FFFF", **form)
    first, second, third = (request(4) + at for at in range(3))
    for x in (first, second, third):
        layer(x)
    over = (0,) if layer.per_position else (0, 2)
    mean = [x.mean(over) for x in (first, second, third)]
    expected = 0.5 * (0.5 * (mean[0] + mean[1])) + 0.5 * mean[2]
    torch.testing.assert_close(layer.memory.mean, expected.T if layer.per_position else expected)
    assert (layer.memory.count == 4).all()


def test_population_statistics_alone_ask_no_memory():
    layer = layer_with(10, "TTFF")
    layer(request())
    assert not layer.memory.count.any()


def test_masked_requests_are_counted_at_each_position():
    layer = layer_with(10)
    mask = torch.tensor([[True, True, True, False, False], [True, False, False, False, False]])
    layer(torch.where(mask[:, None], request(), torch.nan), mask)
    assert layer.memory.count.tolist() == [2, 1, 1, 0, 0]
    assert layer.memory.mean.isfinite().all()


def test_shorter_sequences_use_the_first_positions():
    layer = layer_with(10)
    layer(request()[..., :3])
    assert layer.memory.count.tolist() == [2, 2, 2, 0, 0]


@every_form
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_request_that_is_not_finite_is_not_remembered(form, bad):
    layer = layer_with(10, **form)
    layer(request())
    before = [buffer.clone() for buffer in layer.memory.buffers()]
    x = request()
    x[0, 1, 2] = bad
    layer(x)
    for old, new in zip(before, layer.memory.buffers(), strict=True):
        assert torch.equal(old, new)
    assert layer(request()).isfinite().all()


def test_training_neither_reads_nor_writes_it():
    layer, plain = layer_with(10), layer_with(10)
    plain.load_state_dict(layer.state_dict())
    plain.memory = None
    layer(request())
    before = layer.memory.mean.clone()
    x = request(4)
    assert torch.equal(layer.train()(x), plain.train()(x))
    assert torch.equal(layer.memory.mean, before)


def test_it_is_not_in_the_state_dict_and_can_be_forgotten():
    layer = layer_with(10)
    fresh = copy.deepcopy(layer)
    x = request()
    y = layer(x)
    assert not torch.equal(layer(request()), fresh(request()))
    assert layer.state_dict().keys() == BatchLayerNorm(4, position_shape=5).state_dict().keys()
    layer.memory.reset()
    assert torch.equal(layer(x), y)
    layer.memory = None
    assert layer.memory is None


def test_copies_remember_by_themselves():
    layer = layer_with(10)
    layer(request())
    twin = copy.deepcopy(layer)
    assert torch.equal(twin.memory.mean, layer.memory.mean)
    twin(request())
    assert not torch.equal(twin.memory.mean, layer.memory.mean)


def test_low_precision_does_not_narrow_it():
    layer = BatchLayerNorm(4, position_shape=5, config="FFFF")
    layer.memory = 10
    layer.eval().bfloat16()
    layer(request().bfloat16())
    assert layer.memory.mean.dtype == torch.float32


def test_threads_lose_no_request():
    layer = layer_with(10**6, per_position=False)
    requests = [request(3) for _ in range(40)]

    def serve(some):
        for x in some:
            layer(x)

    threads = [threading.Thread(target=serve, args=(requests[at::4],)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert layer.memory.count.item() == 120
    rows = torch.cat(requests).movedim(1, -1).numpy()
    s = oracle.measure(rows, per_position=False)
    np.testing.assert_allclose(layer.memory.mean.numpy(), s.mean_B, atol=1e-12)
    np.testing.assert_allclose(layer.memory.var.numpy(), s.var_B, rtol=1e-12)


def test_compiled_it_remembers_as_well():
    layer, plain = layer_with(10, groups=2), layer_with(10, groups=2)
    plain.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for x in (request(), request(), request()):
        torch.testing.assert_close(compiled(x), plain(x))
    torch.testing.assert_close(layer.memory.var, plain.memory.var)


@pytest.mark.parametrize("samples", [0, -3, 2.5, "10", True])
def test_a_bound_that_is_no_number_of_samples(samples):
    layer = BatchLayerNorm(4, position_shape=5)
    with pytest.raises(ValueError, match="memory must be None or an integer of at least 1"):
        layer.memory = samples
    assert layer.memory is None


def test_a_layer_that_does_not_know_its_positions():
    with pytest.raises(ValueError, match=r"does not know its positions yet.*position_shape="):
        BatchLayerNorm(4).memory = 10
