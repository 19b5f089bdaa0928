"""Every Python block of the README and the docs runs, page by page, from top to bottom.

What is for several processes runs there, in tests/distributed.
"""

import csv
import importlib.util
import json
import re
import shutil
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from bln.experiments import report
from bln.experiments.report.summary import read
from report_runs import by_size, everything, run, summary

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"frameworks.md", "distributed.md"}  # tests/integrations and tests/distributed run them
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p) and p.name not in ELSEWHERE], ids=lambda p: str(p.relative_to(ROOT))
)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(blocks(page), 1):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


def test_the_notebook_runs(tmp_path, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    namespace: dict[str, object] = {"__name__": "notebook"}
    for number, cell in enumerate(cells, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")
            exec(compile(cell, f"quickstart.ipynb, cell {number}", "exec"), namespace)


def test_the_readme_example_is_short():
    (example,) = blocks(ROOT / "README.md")
    assert len(example.strip().splitlines()) <= 18
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 15


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_no_machine_paths_in_the_repository():
    tracked = [p for folder in ("src", "docs", "tests", "benchmarks", "examples") for p in (ROOT / folder).rglob("*.*")]
    for path in tracked:
        if path.suffix in (".py", ".md", ".json", ".csv", ".toml"):
            assert "/work" + "/main" not in path.read_text(encoding="utf-8"), path


@pytest.fixture(scope="module")
def measured():
    """What puts results into pages."""
    spec = importlib.util.spec_from_file_location("measured", ROOT / "docs" / "_measured.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def full(tmp_path_factory, measured):
    """A folder like docs/results in which every experiment has been run, and the figures the report makes of it."""
    docs = tmp_path_factory.mktemp("docs")
    rng = np.random.default_rng(0)
    runs = everything(rng, 3) + [run(rng, "cnn", "bln", 25, 1.0, seed, "clean") for seed in range(2)]
    for one in runs:  # the protocol looks at the test set once
        if one["protocol"] == "clean" and one["configurations"]:
            one["configurations"]["test"] = None
    (docs / "img").mkdir()
    shutil.copy(ROOT / "docs" / "img" / "search.json", docs / "img")
    (docs / "results").mkdir()
    (docs / "results" / "summary.json").write_text(json.dumps(summary(runs)), encoding="utf-8")
    report.write(summary(runs), docs / "results")
    return docs


def test_the_gallery_shows_every_figure_the_report_makes_with_a_caption(measured, full):
    text = measured.fill("<!-- measured: gallery -->", full)
    drawn = {path.stem for path in (full / "results" / "figures").glob("*.png")}
    entries = re.findall(r"^!\[.+\]\(results/figures/(\S+)\.png\)\n\n(.+)$", text, flags=re.MULTILINE)
    assert sorted(name for name, _ in entries) == sorted(drawn)
    for name, caption in entries:
        seen, made = caption.split(" Made by ")
        assert len(re.findall(r"\.(?: |$)", seen)) == 2, f"{name}: {seen}"
        assert re.fullmatch(r"\[`bln (reproduce|report|demo)[^`]*`\]\(reproduction.md\)\.", made), name


def test_a_figure_of_unknown_runs_is_shown_all_the_same(measured, full, tmp_path):
    shutil.copytree(full, tmp_path / "docs")
    shutil.copy(*(tmp_path / "docs/results/figures" / name for name in ("figure-2.png", "figure-9.png")))
    shutil.copy(*(tmp_path / "docs/results/figures" / name for name in ("figure-2.png", "layer.png")))
    text = measured.fill("<!-- measured: gallery -->", tmp_path / "docs")
    assert "results/figures/figure-9.png" in text
    assert "layer.png" not in text  # the benchmark's, on the page about performance


def test_the_page_about_choosing_says_what_the_summary_says(measured, full):
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    text = measured.fill(page, full)
    assert "measured:" not in text
    assert "NaN" not in text
    found = read(json.loads((full / "results" / "summary.json").read_text(encoding="utf-8")))
    for setting in found.settings("resnet"):
        accuracies = {
            norm: np.mean([one.test.accuracy for one in found.select(setting, norm)]) for norm in found.norms(setting)
        }
        assert len(accuracies) == 7
        for norm, accuracy in accuracies.items():
            column = re.search(rf"^\| [^|]*\(`{norm}`\) \|(.*)\|$", text, flags=re.MULTILINE)[1].split("|")
            at = [s.batch_size for s in found.settings("resnet")].index(setting.batch_size)
            assert column[at].strip().strip("*").startswith(f"{accuracy:.3f} ± ")
            assert ("**" in column[at]) == (accuracy == max(accuracies.values()))
    assert "(results/figures/resnet-clean-16pct.png)" in text
    assert "Of the variants of BLN the best is `bln" in text


def test_the_page_about_choosing_says_what_the_runs_at_every_batch_size_say(measured, full, tmp_path):
    shutil.copytree(full, tmp_path / "docs")
    levels = {"gn": 0.6, "bn": 0.5, "bln-grouped": 0.7, "bln-g1": 0.65}
    rows = [
        by_size(norm, size, seed, level + 0.001 * seed, validation=level)
        for norm, level in levels.items()
        for size in (1, 8)
        for seed in range(3)
    ]
    folder = tmp_path / "docs" / "results" / "resnet"
    (folder / "figures").mkdir(parents=True)
    (folder / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "figures" / "resnet20-accuracy.png").touch()
    text = measured.fill("<!-- measured: variants -->", tmp_path / "docs")
    assert "| BLN grouped (`bln-grouped`) | 0.701 ± 0.002 | 0.701 ± 0.002 |" in text
    assert "every batch size holds here: it is ahead of GroupNorm at batch 1 (+10.0 [" in text
    assert "| `gn` | 0.003 | 0.003 |" in text
    assert "`bln-grouped` has the highest validation accuracy, mean over batch sizes: 0.700" in text
    assert re.findall(r"\(results/resnet/figures/(.*)\)", text) == ["resnet20-accuracy.png"]


def test_the_page_about_performance_says_which_goals_are_reached(measured, tmp_path):
    last, across = ("features last", "NCHW")
    about = ("shape", "layout", "type", "copy us", "add us", "inference", "host / BN")
    found = [  # those, and then forward and backward of BLN, pooled BLN, two sweeps, BN, LN and the compiled formula
        (("256, 56x56, 64", last, "float32", 100, 150, 1.1, ""), (1.25, 2.5, 1.6, 3, 4, 1.2), (1.31, 2, 2, 3, 4, 1.2)),
        (("256, 56x56, 64", across, "float32", 100, 150, 1.3, ""), (1.4, 1.7, 1, 1.4, 4, ""), (1.5, 1.7, 1, 2, 4, "")),
        (("8, 112x112, 64", last, "float32", 10, 15, 1.1, ""), (1.8, 2, 1.5, 3, 4, ""), (1.8, 2, 1.6, 3, 4, "")),
        (("4096, -, 4096", last, "bfloat16", 20, 30, 1.1, ""), (2, "", 1.4, 3, 1.5, 4), (1.7, "", 1.7, 2, 3, 4)),
        (("1, 16x16, 6", last, "float32", 1, 1, 8, 2.01), (3, 4, 2, 5, 6, 7), (3, 4, 2, 5, 6, 7)),
    ]
    kinds = ("BLN", "pooled", "sweeps", "BN", "LN", "compiled")
    names = [f"{name} {way}" for way in ("forward", "backward") for name in kinds]
    (tmp_path / "results").mkdir()
    with (tmp_path / "results" / "layer.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([(*about, *names), *((*first, *f, *b) for first, f, b in found)])
    text = measured.fill("<!-- measured: goals -->\n\n<!-- measured: kernels -->", tmp_path)
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    rows = {name: rest for _, name, *rest, _ in (line for line in lines if len(line) == 8)}
    held = "features last, 64 MiB and more, slabs up to 64 KiB"
    assert rows[f"forward, {held}"] == ["1.25", "1 of 1", "1.25 to 1.25", "1.6 to 1.6", "(256, 56x56, 64), float32"]
    assert rows[f"backward, {held}"] == ["1.3", "0 of 1", "1.31 to 1.31", "2 to 2", "(256, 56x56, 64), float32"]
    assert rows["forward, larger slabs, and dense"] == [
        "1.75",
        "0 of 1",
        "2 to 2",
        "1.4 to 1.4",
        "(4096, 4096), bfloat16",
    ]
    assert rows["forward, pooled"] == ["1.75", "1 of 3", "1.7 to 2.5", "1 to 1.6", "(256, 56x56, 64), float32"]
    assert rows["forward, features last, 8 to 64 MiB, slabs up to 64 KiB"] == [
        "none",
        "",
        "1.8 to 1.8",
        "1.5 to 1.5",
        "(8, 112x112, 64), float32",
    ]
    assert rows["inference, `NCHW`"] == ["1.2", "0 of 1", "1.3 to 1.3", "", "(256, 56x56, 64), NCHW, float32"]
    assert rows["host, small inputs"] == ["2", "0 of 1", "2.01 to 2.01", "", "(1, 16x16, 6), float32"]
    across, dense = "forward on (256, 56x56, 64), NCHW, float32", "forward on (4096, 4096), bfloat16"
    assert f"BatchNorm is as fast as BLN or faster in 1 of 10 cases: {across}, 1.4 and 1.4." in text
    assert f"BatchNorm is as fast as pooled BLN or faster in 1 of 8 cases: {across}, 1.4 and 1.7." in text
    assert f"LayerNorm is as fast as BLN or faster in 1 of 10 cases: {dense}, 1.5 and 2." in text
    assert "LayerNorm is as fast as pooled BLN or faster in 0 of 8 cases." in text
    assert "The compiled formula is as fast as BLN or faster in 2 of 6 cases: forward on (256, 56x56, 64)" in text
    with (tmp_path / "results" / "layer.csv").open("w", encoding="utf-8", newline="") as file:  # cut off
        csv.writer(file).writerows([(*about, *names), (*found[1][0], *found[1][1], *found[1][2])])
    assert "The compiled" not in measured.fill("<!-- measured: goals -->", tmp_path)
    assert "| 256, 56x56, 64 | last | float32 | 100 | 1.25 | 2.5 | 1.6 | 3 | 4 | 1.2 | 1.1 | 69 % |" in text
    assert "| 1, 16x16, 6 | last | float32 | 1 | 3 | 4 |  | 5 | 6 | 7 | 8 | 0 % |" in text


def test_the_page_about_changed_data_says_what_the_results_say(measured):
    docs = ROOT / "docs"
    text = measured.fill((docs / "shift.md").read_text(encoding="utf-8"), docs)
    assert "measured:" not in text
    assert "nan" not in text.lower()
    lines = [json.loads(line) for line in (docs / "results" / "shift" / "shift.jsonl").read_text().splitlines()[1:]]
    own = [line for line in lines if (line["norm"], line["part"], line["arrangement"]) == ("bn", "test", "shuffled")]
    seeds = sorted({line["seed"] for line in own})
    means = [np.mean([x["accuracy"]["T"] for x in own if x["seed"] == seed and x["severity"]]) for seed in seeds]
    assert re.search(rf"^\| corrupted \| 16 \| \*{{0,2}}{f'{np.mean(means):.3f}'[1:]} ± ", text, flags=re.MULTILINE)
    clean = np.mean([line["accuracy"]["T"] for line in own if not line["severity"]])
    assert f"right about {clean:.3f} of clean CIFAR-10" in text
    for picture in re.findall(r"\((results/shift/\S+)\)", text):
        assert (docs / picture).exists()


def test_pages_can_be_made_before_anything_has_finished(measured, tmp_path, rng):
    shutil.copytree(ROOT / "docs" / "img", tmp_path / "img")
    (tmp_path / "results" / "figures").mkdir(parents=True)
    diverged = run(rng, "resnet", "bn", 1, status="diverged", test=None, best_epoch=None)
    running = run(rng, "cnn", "bln", status="running", test=None, chosen=None, configurations=None, best_epoch=None)
    for runs in ([], [running], [running, diverged]):
        (tmp_path / "results" / "summary.json").write_text(json.dumps(summary(runs)), encoding="utf-8")
        for page in ("gallery", "choosing"):
            measured.fill((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), tmp_path)
        assert len(list(measured.pictures(read(summary(runs))))) >= 1
