"""The transformer sees no padding, and trains with every norm of its task."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bln.experiments import data, table
from bln.experiments.norms import NORMS, BatchNorm
from bln.experiments.sizes import study, tasks
from bln.experiments.sizes.transformer import transformer


def tokens(count, random):
    """Tokens with padding in front of all but the first row."""
    found = torch.randint(1, 20, (count, 6), generator=random)
    for row in range(1, count):
        found[row, : row % 5] = 0
    return found


@pytest.mark.parametrize("name", tasks.TOKENS)
@pytest.mark.parametrize("training", [True, False])
def test_what_stands_in_the_places_of_padding_changes_nothing(name, training):
    torch.manual_seed(0)
    net = transformer(name, words=20, length=6, embedded=4, features=8, heads=2).train(training)
    x = tokens(6, torch.Generator().manual_seed(1))
    before = net(x)
    with torch.no_grad():  # padding's row of the embedding is what these places begin with
        net.words.weight[0] += 10
    torch.testing.assert_close(net(x), before)


def test_a_masked_batch_norm_is_torchs_of_the_real_entries():
    torch.manual_seed(0)
    x, mask = torch.randn(5, 3, 7), torch.rand(5, 7) < 0.6
    ours, theirs = BatchNorm(3, 1e-5, None), nn.BatchNorm1d(3, momentum=None)
    for _ in range(2):
        found, expected = ours(x, mask).movedim(1, -1)[mask], theirs(x.movedim(1, -1)[mask])
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


def test_it_takes_one_run_at_a_time():
    with pytest.raises(ValueError, match="one run at a time, got 2"):
        transformer("ln", 2)
    with pytest.raises(ValueError, match="one at a time"):
        NORMS["bln-pooled"](8, 1, runs=2)


def test_a_study_of_reviews(tmp_path, monkeypatch):
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 2
    reviews = torch.randint(1, 50, (60, 80), generator=random)
    reviews[:, 40:] += 50 * labels[:, None]  # words that say what the label is
    found = data.DataSet(reviews, labels, reviews, labels)
    small = replace(tasks.TASKS["transformer"], load=lambda folder: found, validation=20)
    monkeypatch.setitem(tasks.TASKS, "transformer", small)
    tasks.load.cache_clear()
    cells = study.plan("transformer", norms=["ln", "bln"], batch_sizes=[4], seeds=2, samples=40, epochs=4)
    rows = table.read(study.study(cells, tmp_path, Path(), device=torch.device("cpu")))
    assert len(rows) == 2 * (3 + 1)  # three rates on the first seed, the best on the second
    assert {row["status"] for row in rows} == {"finished"}
    assert {row["together"] for row in rows} == {1}
    assert max(row["test"]["accuracy"] for row in rows if row["test"]) > 0.9
    tasks.load.cache_clear()
