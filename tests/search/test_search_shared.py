"""The 16 shared configurations in one pass, against sixteen evaluations."""

import math
from functools import partial

import pytest
import torch
from search_nets import (
    CONFIGS,
    ROUNDING,
    Masked,
    Residual,
    brute_force,
    conv,
    copies,
    data,
    deep,
    dense,
    grouped,
    lenet,
    trained,
)
from torch import nn
from torch.nn import functional as F

import bln

SIZES = (7, 7, 7, 4)


def masked_data(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for n in sizes:
        x = torch.randn(n, 5, 2, generator=generator, dtype=torch.float64) * (1 + seed)
        lengths = torch.randint(1, 6, (n, 1), generator=generator)
        mask = torch.arange(5) < lengths
        targets = torch.randint(3, (n,), generator=generator)
        batches.append(((torch.where(mask[..., None], x, math.nan), mask), targets))
    return batches


def middle():
    norms = bln.BatchLayerNorm(3, channel_dim=2), bln.BatchLayerNorm(3, channel_dim=-2, per_position=False)
    return nn.Sequential(norms[0], nn.Tanh(), norms[1], nn.Flatten(), nn.Linear(60, 3))


IMAGES = data((9, 9), (2, 6, 6), seed=1), data(SIZES, (2, 6, 6), shift=0.3)
CASES = {
    "dense": (dense, data((9, 9), seed=1), data(SIZES, shift=0.3)),
    "deep": (deep, data((9, 9), seed=1), data(SIZES, shift=0.3)),
    "conv": (conv, *IMAGES),
    "pooled": (partial(conv, per_position=False), *IMAGES),
    "grouped": (grouped, *IMAGES),
    "grouped, per position": (partial(conv, groups=2, per_position=True), *IMAGES),
    "one group": (partial(conv, groups=1), *IMAGES),
    "features in the middle": (middle, data((9, 9), (4, 3, 5), seed=1), data(SIZES, (4, 3, 5), shift=0.3)),
    "residual": (Residual, data((9, 9), seed=1), data(SIZES, shift=0.3)),
    "residual, grouped": (partial(Residual, groups=4), data((9, 9), seed=1), data(SIZES, shift=0.3)),
    "masked": (Masked, masked_data((9, 9), 1), masked_data(SIZES)),
    "masked, pooled": (partial(Masked, per_position=False), masked_data((9, 9), 1), masked_data(SIZES)),
    "masked, grouped": (partial(Masked, groups=2), masked_data((9, 9), 1), masked_data(SIZES)),
    "masked, grouped, per position": (
        partial(Masked, groups=2, per_position=True),
        masked_data((9, 9), 1),
        masked_data(SIZES),
    ),
    "untrained": (dense, [], data(SIZES, shift=0.3)),
    "untrained, masked, pooled": (partial(Masked, per_position=False), [], masked_data(SIZES)),
    "untrained, masked, grouped": (partial(Masked, groups=2), [], masked_data(SIZES)),
    "one sample": (dense, data((9, 9), seed=1), data((1,), shift=0.3)),
    "one sample, grouped": (grouped, IMAGES[0], data((1,), (2, 6, 6), shift=0.3)),
}


@pytest.mark.parametrize("case", CASES)
def test_all_sixteen_equal_separate_evaluations(case):
    make, train, batches = CASES[case]
    model = trained(make(), train)
    result = bln.search(model, batches, loss=F.cross_entropy)
    assert result.mode == "together"  # never compared with itself
    assert sorted(str(row.config) for row in result) == sorted(CONFIGS)
    expected = {config: brute_force(model, batches, [config] * len(bln.layers(model))) for config in CONFIGS}
    for row in result:
        assert row.loss == pytest.approx(expected[str(row.config)], rel=ROUNDING)
    # Of one sample alone, batch statistics are its own: some configurations meet, and so they do without a population.
    distinct = 16 if train and not case.startswith("one sample") else 8
    assert len({round(loss, 9) for loss in expected.values()}) >= distinct


@pytest.mark.parametrize("groups", [None, 2])
def test_float32_equals_separate_evaluations_to_rounding(groups):
    model = trained(lenet(groups), data((25, 25), (3, 32, 32), dtype=torch.float32, seed=1), torch.float32)
    batches = data((25, 25, 10), (3, 32, 32), 10, shift=0.2, dtype=torch.float32)
    result = bln.search(model, batches, loss=F.cross_entropy)
    for row in result:
        # float32 rounding, 1.2e-7, of sums over up to 576 terms in an order that depends on the batch's size.
        assert row.loss == pytest.approx(brute_force(model, batches, [str(row.config)] * 4), rel=1.2e-7 * 576)


def test_ranked_by_loss_then_by_the_first_metric():
    model = trained(dense(), data((9, 9), seed=1))
    batches = data(SIZES, shift=0.3)
    result = bln.search(model, batches, loss=F.cross_entropy, metrics="accuracy")
    losses = [row.loss for row in result]
    assert losses == sorted(losses)
    assert losses[0] < losses[-1]

    tied = bln.search(model, batches, loss=lambda outputs, targets: 1.0, metrics={"mine": lambda o, t: o.mean()})
    values = [row.metrics["mine"] for row in tied]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1]


def test_means_are_over_samples_and_errors_over_mini_batches():
    model = trained(dense(), data((9, 9), seed=1))
    batches = data((8, 8, 2), shift=0.3)
    result = bln.search(model, batches, loss=F.cross_entropy, metrics="accuracy")
    bln.configure(model, "FTFF")
    model.eval()
    losses = [F.cross_entropy(model(x), t).item() for x, t in batches]
    accuracies = [(model(x).argmax(1) == t).double().mean().item() for x, t in batches]
    row = result["FTFF"]
    for values, mean, error in (
        (losses, row.loss, row.loss_error),
        (accuracies, row.metrics["accuracy"], row.metrics_error["accuracy"]),
    ):
        weights = [8 / 18, 8 / 18, 2 / 18]
        expected = sum(w * v for w, v in zip(weights, values, strict=True))
        assert mean == pytest.approx(expected, abs=1e-7)  # accuracies are float32
        spread = sum((w * (v - expected)) ** 2 for w, v in zip(weights, values, strict=True))
        assert error == pytest.approx(math.sqrt(spread * 3 / 2), abs=1e-7)
    equal = bln.search(model, batches[:2], loss=F.cross_entropy)["FTFF"]
    assert equal.loss_error == pytest.approx(torch.tensor(losses[:2]).std().item() / math.sqrt(2), rel=1e-5)


def test_a_single_mini_batch_has_no_error():
    result = bln.search(trained(dense(), data((9,))), data((9,), seed=1), loss=F.cross_entropy)
    assert all(math.isnan(row.loss_error) for row in result)
    assert "±" not in str(result)


def test_every_batch_is_loaded_once():
    model, batches, loaded = trained(dense(), data((9, 9), seed=1)), data(SIZES), []

    def load():
        for at, batch in enumerate(batches):
            loaded.append(at)
            yield batch

    result = bln.search(model, load(), loss=F.cross_entropy)
    assert loaded == [0, 1, 2, 3]
    assert (result.samples, result.batches) == (sum(SIZES), 4)


def test_what_comes_before_the_first_layer_runs_once_for_all():
    model, rows = trained(dense(), data((9, 9), seed=1)), {0: [], 3: []}
    for at, seen in rows.items():
        model[at].register_forward_hook(lambda module, args, output, seen=seen: seen.append(copies(output)))
    bln.search(model, data((7, 7, 7)), loss=F.cross_entropy)
    # The first batch is evaluated separately and then together, the two after it together.
    assert rows[0] == [1] * 16 + [1, 1, 1]
    assert rows[3] == [1] * 16 + [16, 16, 16]


def binary(outputs, targets):
    return F.binary_cross_entropy_with_logits(outputs.squeeze(1), targets.to(outputs.dtype))


def test_accuracy_of_a_single_output_is_that_of_its_sign():
    model = nn.Sequential(nn.Linear(6, 5), bln.BatchLayerNorm(5), nn.Linear(5, 1))
    trained(model, data((9, 9), seed=1))
    batches = data((8, 8), classes=2)
    result = bln.search(model, batches, loss=binary, metrics="accuracy")
    result.apply(model)
    model.eval()
    expected = sum(((model(x) > 0).squeeze(1) == t).sum().item() for x, t in batches) / 16
    assert result.best.metrics["accuracy"] == pytest.approx(expected)
