"""The page: whole, well-formed, the same each time, and honest about what is missing."""

import copy
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import bln
from bln._install import install
from bln.experiments import report
from bln.experiments.report.page import make
from bln.experiments.report.summary import read
from report_runs import everything, like_authors, run, summary, world

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that elements close in order, and keeps what tests ask for."""

    def __init__(self, text):
        super().__init__()
        self.open, self.figures, self.links, self.ids, self.tags, self.words = [], [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[key] for key in ("href", "src", "xlink:href") if key in given]
        if tag == "svg":
            self.figures.append(given)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "svg" not in self.open and "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


def made(runs, folder):
    path = report.write(summary(runs), folder)
    assert path == folder / "report.html"
    text = path.read_text("utf-8")
    return Page(text), text


def shown(runs):
    """The page alone, without files."""
    text, _ = make(read(summary(runs)))
    return Page(text), text


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    folder = tmp_path_factory.mktemp("complete")
    runs = everything(np.random.default_rng(0))
    return *made(runs, folder), folder, runs


EXPECTED = {
    "figure-2", "differences-cnn-paper", "differences-rnn-paper", "configurations-cnn-paper",
    "configurations-rnn-paper", "resnet-clean-16pct", "digits-cnn-clean-100pct", "digits-rnn-clean-100pct",
    *(f"figure-{at}-{task}-paper-{setting}" for at, task in ((4, "cnn"), (6, "rnn"))
      for setting in ("20pct-batch-1", "20pct-batch-25", "100pct-batch-25")),
}  # fmt: skip


def test_a_complete_summary_shows_every_figure(complete):
    page, _, folder, _ = complete
    assert {figure["id"] for figure in page.figures} == EXPECTED
    assert {path.name for path in (folder / "figures").iterdir()} == {
        f"{name}.{kind}" for name in EXPECTED for kind in ("png", "svg")
    }
    assert "Not run here" not in page.text


def test_every_figure_is_described(complete):
    page, *_ = complete
    for figure in page.figures:
        assert figure["role"] == "img"
        assert len(figure["aria-label"]) > 60, figure["id"]


def test_figure_files_are_whole(complete):
    _, _, folder, _ = complete
    for path in (folder / "figures").iterdir():
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_page_is_small_and_loads_nothing(complete):
    page, text, folder, _ = complete
    assert len(text.encode()) < 3_000_000
    assert not {"script", "iframe", "img", "object", "embed"} & set(page.tags)
    for link in page.links:
        assert link.startswith(("#", "data:,")) or (folder / link).is_file(), link
    assert "@import" not in text
    assert not re.findall(r"url\((?!#)", text)


def test_ids_are_there_once(complete):
    """Figures share a page, so their clip paths and markers must not share names."""
    page, text, *_ = complete
    assert len(page.ids) == len(set(page.ids))
    used = set(re.findall(r"url\(#([^)]*)\)", text)) | {link[1:] for link in page.links if link.startswith("#")}
    assert used <= set(page.ids)


def test_every_colour_of_a_figure_follows_the_page(complete):
    _, text, *_ = complete
    light, dark = (set(re.findall(r"(--c[0-9a-f]{6}):", part)) for part in text.split("@media", 2)[:2])
    assert light == dark
    assert set(re.findall(r"var\((--c[0-9a-f]{6})\)", text)) <= light
    assert re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text) == []


def test_all_five_claims_and_their_rules_are_stated(complete):
    page, *_ = complete
    for claim in range(1, 6):
        assert f"Claim {claim}" in page.text
    for words in (
        "The rules",
        "fewer than 3 seeds",
        "Spearman",
        "Kendall",
        "around the current mean",
        "NaN",
        "test set",
    ):
        assert words in page.text


def test_the_same_summary_makes_the_same_page(complete, tmp_path):
    runs = [one for one in complete[-1] if one["task"] in ("cnn", "resnet")]
    first, second = tmp_path / "first", tmp_path / "second"
    made(copy.deepcopy(runs), first)
    made(runs, second)
    for path in first.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (second / path.relative_to(first)).read_bytes(), path.name


@pytest.mark.parametrize("attempt", range(2))
def test_parts_of_a_summary_make_a_page(rng, tmp_path, attempt):
    """Runs missing, diverged at any time, still running, without test or configurations: whatever there is is shown."""
    runs = []
    for one in everything(rng, seeds=2):
        if rng.random() < 0.5:
            continue
        state = rng.choice(["finished", "diverged", "running"], p=[0.6, 0.2, 0.2])
        one["status"] = str(state)
        if state != "finished":
            cut = int(rng.integers(0, len(one["curves"]["train_loss"]) + 1))
            for curve in one["curves"].values():
                curve[cut:] = [] if state == "running" else [None] * (len(curve) - cut)
            one["best_epoch"] = one["test"] = one["chosen"] = one["configurations"] = None
        elif one["configurations"] and rng.random() < 0.3:
            for table in one["configurations"].values():
                table[str(rng.choice(list(table)))] = [None, 0.1]
        runs.append(one)
    page, _ = made(runs, tmp_path)
    figures = {figure["id"] for figure in page.figures}
    assert "figure-2" in figures
    for one in runs:
        if one["task"] in ("cnn", "rnn"):
            name = f"-{one['task']}-paper-{100 * one['fraction']:g}pct-batch-{one['batch_size']}"
            assert any(figure.endswith(name) for figure in figures), name
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == figures
    console = Console(file=StringIO(), width=200)
    console.print(report.table(summary(runs)))


def test_what_was_not_run_is_said(rng):
    runs = [one for one in world(rng, seeds=3) if one["task"] == "cnn" and one["norm"] != "bn"]
    page, _ = shown(runs)
    assert "CNN on CIFAR-10, 20 % of the data, batch 25, protocol paper: BatchNorm not run" in page.text
    assert "RNN on IMDB, 20 % of the data, batch 1, protocol paper: BLN, BatchNorm, LayerNorm not run" in page.text
    assert "100 % of the data, batch 25, protocol paper: BatchNorm" not in page.text  # the paper did not either


def test_no_runs_make_a_page_too(tmp_path):
    page, _ = made([], tmp_path)
    assert [figure["id"] for figure in page.figures] == ["figure-2"]
    assert "nothing to judge yet" in page.text
    assert "RNN on IMDB, 100 % of the data, batch 25, protocol paper: BLN not run" in page.text


def test_diverged_runs_are_shown_as_such(rng):
    runs = like_authors(rng, 3, task="cnn", batch_size=1)
    for one in runs:
        if one["norm"] == "bn":
            one |= {"status": "diverged", "test": None, "best_epoch": None}
            for curve in one["curves"].values():
                curve[2:] = [None] * 13
    page, _ = shown(runs)
    assert "3 diverged" in page.text
    assert "3 of 3 with a run that diverged" in page.text
    [figure] = [figure for figure in page.figures if figure["id"].endswith("batch-1")]
    assert "BatchNorm has no finished run" in figure["aria-label"]


def test_one_seed_has_no_intervals_and_says_so(rng):
    page, _ = shown(like_authors(rng, 1))
    assert "1, no interval" in page.text
    assert "one seed, interval assumed" in page.text
    assert "±" not in page.text.split("Results")[1].split("The mixing weights")[0].replace("Mean over seeds ±", "")


def test_both_protocols_are_judged_apart(rng):
    runs = world(rng, True, 3, "paper") + world(rng, False, 3, "clean")
    page, _ = shown(runs)
    paper, clean = re.findall(r"Protocol (?:paper|clean)\..*?(?=Protocol clean\.|Not run here|Results)", page.text)[:2]
    assert "not reproduced" not in paper
    assert clean.count("not reproduced") == 10  # five claims, each with its count


def test_digits_alone_make_the_short_page(rng):
    runs = [one for one in everything(rng, 2) if one["task"] == "digits-cnn"]
    page, text = shown(runs)
    assert {figure["id"] for figure in page.figures} == {"figure-2", "digits-cnn-clean-100pct"}
    assert "claim" not in page.text
    assert "Not run here" not in page.text
    assert page.tags.count("details") == 3  # the 16 configurations at three batch sizes
    switches = Counter(re.findall(r'<td class="(t|f)">(T|F)</td>', text))
    assert switches == {("t", "T"): 3 * 32, ("f", "F"): 3 * 32}


def test_configuration_tables_hold_the_means_in_the_papers_order(rng):
    runs = like_authors(rng, 3, task="cnn", batch_size=25, fraction=0.2)
    _, text = shown(runs)
    part = text[text.index("Table 1, part A") :]
    rows = re.findall(r"<tr>(<td>\d+</td>.*?)</tr>", part)[:16]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    order = ["".join(row[2:6]) for row in cells]
    assert [row[1] for row in cells] == [f"<code>{config}</code>" for config in order]
    printed = "TTFF TTFT TTTT TTTF FFFT FFFF FFTT FFTF FTFT FTFF FTTT FTTF TFTF TFTT TFFT TFFF"
    assert " ".join(order) == printed
    tested = [one["configurations"]["test"] for one in runs if one["norm"] == "bln"]
    for config, row in zip(order, cells, strict=True):
        loss, accuracy = np.mean([table[config] for table in tested], axis=0)
        assert row[8:10] == [f"{loss:.4f}", f"{accuracy:.4f}"]
    assert sorted(int(row[10]) for row in cells) == list(range(1, 17))
    assert sum(int(row[11].split()[0]) for row in cells if row[11]) == 3


def test_markup_in_names_is_text(rng, tmp_path):
    name = '<script>alert("1")</script>'
    path = report.write(summary([run(rng, "resnet", name)], machines=[name], commit="<b>", created="&"), tmp_path)
    page = Page(path.read_text("utf-8"))
    assert "script" not in page.tags
    assert page.text.count(name) >= 2


def test_terminal_table_has_results_and_verdicts(rng):
    console = Console(file=StringIO(), width=220)
    console.print(report.table(summary(world(rng, seeds=3))))
    text = console.file.getvalue()
    assert "protocol paper" in text
    assert text.count(" reproduced") >= 6
    assert "CNN on CIFAR-10, 20 % of the data, protocol paper" in text
    assert re.search(r"25 .* BLN .* 3 finished .* TTFF", text)
    console.print(report.table(summary([])))
    assert "No runs yet" in console.file.getvalue()


def test_nothing_of_matplotlibs_settings_is_left_changed(rng, tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    made([run(rng)], tmp_path)
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("absent", ["matplotlib", "scipy"])
def test_an_absent_extra_is_named(absent):
    code = f"import sys; sys.modules[{absent!r}] = None; import bln.experiments.report"
    environment = {**os.environ, "PYTHONPATH": str(Path(bln.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert f"the report needs {absent}" in done.stderr
    assert install("experiments") in done.stderr


@pytest.mark.parametrize("task", ["cnn", "resnet", "digits-rnn"])
def test_a_run_that_has_only_begun_is_shown(rng, task):
    one = run(rng, task, epochs=1) | {"status": "running", "best_epoch": None, "test": None, "configurations": None}
    one["curves"] = {name: [] for name in one["curves"]}
    page, _ = shown([one | {"seconds": []}])
    assert "1 running (epoch 0)" in page.text
