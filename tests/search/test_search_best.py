"""Which row is called best, which configurations are compared, and what is said when one is applied."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from search_nets import CONFIGS, ROUNDING, Residual, brute_force, data, dense, labelled, sided, trained

import bln
from bln._search.result import Row, Score, SearchResult, average_scores

TRAIN, BATCHES = data((9, 9, 4), seed=1), data((7, 7, 4), shift=0.3)
PRIORS = bln.StatisticsConfig.shrunk(4, 16, 64)


def result_of(losses, error=0.1, **more):
    """A result of these losses, given by configuration, lowest first."""
    rows = [Row(loss, error, config=bln.StatisticsConfig.parse(config)) for config, loss in losses.items()]
    return SearchResult(rows, "together", (), 18, **{"batches": 3} | more)


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ({"FFFF": 1.0, "TTFF": 1.09, "TTTT": 1.11}, "TTFF"),
        ({"FFFF": 1.0, "TTFF": 1.11}, "FFFF"),
        ({"FFFF": 1.0, "4 4 F F": 1.05, "16 16 F F": 1.08, "TTFF": 1.2}, "16 16 F F"),
        ({"FFFF": 1.0, "FTFF": 1.05, "TTFF": 1.2}, "FTFF"),
        ({"TTFT": 1.0, "FFFF": 1.01, "TTFF": 1.02}, "TTFT"),
        ({"FFFF": 1.0, "TTFF": math.nan}, "FFFF"),
    ],
)
def test_the_best_depends_least_on_its_batch_within_a_standard_error(losses, best):
    result = result_of(losses)
    assert str(result.best.config) == best
    assert result.lowest is result.rows[0]
    assert (f"best (*) is {best}, not {result.lowest.label}" in str(result)) == (best != next(iter(losses)))


def test_one_mini_batch_says_nothing_for_depending_on_it():
    result = result_of({"FFFF": 1.0, "TTTT": 1.5, "TTFF": 2.0, "FTFF": math.nan}, error=math.nan, batches=1)
    assert str(result.best.config) == "TTTT"
    assert "a loss on one mini-batch" in str(result)


def test_robust_takes_the_error_of_the_worst_arrangement():
    rows = [
        Row(0.5, 0.5, config=bln.StatisticsConfig.parse("FFFF"), rebatched={"sorted": Score(1.0, 0.01)}),
        Row(0.4, 0.5, config=bln.StatisticsConfig.parse("TTFF"), rebatched={"sorted": Score(1.1, 0.01)}),
    ]
    assert str(SearchResult(rows, "together", (), 18, 3, robust=True).best.config) == "FFFF"


@pytest.mark.parametrize("make", [dense, Residual], ids=["dense", "residual"])
@pytest.mark.parametrize("per_layer", [False, True], ids=["", "per layer"])
def test_candidates_are_compared_with_the_16(make, per_layer):
    torch.manual_seed(0)
    model = trained(make(), TRAIN)
    result = bln.search(
        model, BATCHES, loss=F.cross_entropy, candidates=[*PRIORS, "16 16 F F", "TTFF"], per_layer=per_layer
    )
    shared = [row for row in result if not row.per_layer]
    assert sorted(row.label for row in shared) == sorted([*CONFIGS, *map(str, PRIORS)])
    for config in PRIORS:
        expected = brute_force(model, BATCHES, [str(config)] * len(bln.layers(model)))
        assert result[config].loss == pytest.approx(expected, rel=ROUNDING)
    if per_layer:
        tried = {config for row in result if row.per_layer for config in row.config.values()}
        assert set(PRIORS) <= tried


def test_optuna_draws_from_candidates():
    model = trained(dense(), TRAIN)
    options = {"per_layer": True, "sampler": "random", "trials": 60, "progress": False}
    result = bln.search(model, BATCHES, loss=F.cross_entropy, candidates=PRIORS, **options)
    assert any(set(PRIORS) & set(row.config.values()) for row in result if row.per_layer)


@pytest.mark.parametrize(
    ("candidates", "error", "message"),
    [
        ("TTFF", TypeError, r"candidates must be several configurations, as \['TTFF'\]"),
        ([16], TypeError, "a configuration is a StatisticsConfig or a string"),
        (["16 F"], ValueError, "is not a configuration"),
    ],
)
def test_candidates_that_are_no_configurations(candidates, error, message):
    with pytest.raises(error, match=message):
        bln.search(trained(dense(), TRAIN), BATCHES, loss=F.cross_entropy, candidates=candidates)


def test_applying_what_was_measured_to_collapse_says_so():
    model, batches = sided(), labelled((25,) * 8, 0)
    result = bln.search(model, batches, loss=F.cross_entropy, metrics="accuracy", rebatch=True)
    with pytest.warns(UserWarning, match="FFFF was measured to collapse where samples arrive one at a time or sorted"):
        result.apply(model, "FFFF")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result.apply(model, "TFFF")  # it depends on its batch, and was measured not to collapse


def test_applying_what_depends_on_its_batch_says_so_where_nobody_measured():
    model = trained(dense(), TRAIN)
    result = bln.search(model, BATCHES, loss=F.cross_entropy, candidates=PRIORS)
    for config in ("FFFF", "16 16 F F"):
        with pytest.warns(UserWarning, match=f"{config} makes a prediction depend.*rebatch=True measures it"):
            result.apply(model, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result.apply(model, "TTFF")
        result.apply(model, result["TTTT"])


def test_a_result_prints_where_every_row_has_an_order_that_gives_nan():
    row = Row(0.5, 0.1, config=bln.StatisticsConfig.parse("FFFF"), rebatched={"single": Score(math.nan)})
    result = SearchResult([row], "together", (), 18, 3, robust=True)
    assert "0.5000" in str(result)
    with pytest.raises(ValueError, match="every configuration has a NaN loss"):
        _ = result.best


def test_a_loss_that_explodes_has_an_infinite_error():
    exploding, usual = average_scores([[[1e200], [1.0]], [[3e200], [2.0]]], [5, 5], [])
    assert (exploding.loss, exploding.loss_error) == (2e200, math.inf)
    assert usual.loss_error == 0.5
