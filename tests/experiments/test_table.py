"""The table of runs is read as it was written, and what is in the repository is complete."""

from pathlib import Path

import pytest

from bln.experiments import table

COMMITTED = Path(__file__).parents[2] / "docs" / "results" / table.NAME


def test_what_is_read_is_what_was_written(tmp_path):
    rows = [{"task": "cnn", "seed": seed, "test": {"accuracy": 0.5, "loss": None}} for seed in range(3)]
    path = table.write(tmp_path / table.NAME, rows)
    assert table.read(path) == rows
    path.write_text(path.read_text()[:-5])  # cut off
    assert table.read(path) == rows[:2]
    assert table.read(tmp_path / "nowhere.jsonl") == []


@pytest.mark.parametrize("content", [b"rubbish\n", b"[1]\n", b'{"norm": "bn"}\n', bytes(range(128, 256))])
def test_what_is_no_table_is_refused(content, tmp_path):
    (tmp_path / table.NAME).write_bytes(content)
    with pytest.raises(ValueError, match=r"is not a table of runs: .*`bln reproduce` writes one"):
        table.read(tmp_path / table.NAME)


def test_every_committed_run_says_where_it_comes_from():
    rows = table.read(COMMITTED)
    assert COMMITTED.stat().st_size < 5 * 2**20
    assert {"cnn", "rnn", "resnet", "shift", "digits-resnet"} <= {row["task"] for row in rows}
    for row in rows:
        assert {"norm", "batch_size", "seed", "status", "epochs"} <= row.keys()
        assert row["commit"]
        assert row["device"]
        assert {"bln", "torch"} <= row["versions"].keys()
        assert row["hours"] > 0
        assert row["started"] or row["collected"]
