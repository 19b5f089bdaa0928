"""Every Python block of the README and the docs runs, page by page, from top to bottom.

What is for several processes runs there, in tests/distributed.
"""

import importlib.util
import json
import re
import runpy
import shutil
import sys
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch

from bln.experiments import table
from bln.experiments.report import sizes
from bln.experiments.report.statistics import Estimate
from report_runs import by_size, everything

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


def run_notebook(name):
    """Run an example's cells, from top to bottom, with every warning an error."""
    notebook = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    namespace: dict[str, object] = {"__name__": "notebook"}
    for number, cell in enumerate(cells, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")
            exec(compile(cell, f"{name}.ipynb, cell {number}", "exec"), namespace)
    return len(cells)


def test_the_notebook_runs(tmp_path, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    assert run_notebook("quickstart") > 5


def test_notebooks_are_their_programs():
    notebooks = module("_notebooks")
    for name in notebooks.NAMES:
        program, made = ((ROOT / "examples" / f"{name}.{kind}").read_text(encoding="utf-8") for kind in ("py", "ipynb"))
        assert notebooks.notebook(program) == made, "run `make tables`"


@pytest.mark.parametrize(("name", "least"), [("adapt_to_shift", 0.9), ("padded_transformer", 0.9)])
def test_an_example_ends_with_its_result(name, least, capsys):
    """Those that need more than torch run in tests/integrations."""
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    run_notebook(name)
    assert capsys.readouterr().out == printed
    assert float(re.search(r"test accuracy ([\d.]+)$", printed.strip())[1]) > least
    if name == "padded_transformer":
        assert "moves the answers by 0e+00" in printed


def test_the_page_of_examples_lists_every_program():
    text = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    programs = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")}
    assert programs == set(re.findall(r"`(\w+\.(?:py|ipynb))`", text))


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_example_is_short_and_prints_a_result(page, capsys):
    first = blocks(ROOT / page)[0]
    assert sum(bool(line.strip()) for line in first.splitlines()) <= 15
    torch.manual_seed(0)
    exec(compile(first, page, "exec"), {})
    shown = re.fullmatch(r"(\d+)% of 80 new images\n", capsys.readouterr().out)
    assert int(shown[1]) > 90  # of four classes


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"(?:\]\(|src=\")([^)#:\"]+?)(?:#[^)]*)?[)\"]", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_no_machine_paths_in_the_repository():
    tracked = [p for folder in ("src", "docs", "tests", "benchmarks", "examples") for p in (ROOT / folder).rglob("*.*")]
    for path in tracked:
        if path.suffix in (".py", ".md", ".json", ".csv", ".toml"):
            assert "/work" + "/main" not in path.read_text(encoding="utf-8"), path


def module(name):
    """A program of the docs; they import each other."""
    if str(ROOT / "docs") not in sys.path:
        sys.path.append(str(ROOT / "docs"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def measured():
    return module("_measured")


WITH_TABLES = [page for page in PAGES if "<!-- table: " in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", WITH_TABLES, ids=lambda page: page.name)
def test_tables_are_those_of_the_results(measured, page):
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- table: ") == text.count("<!-- end -->") == len(measured.PLACE.findall(text))
    assert measured.fill(text) == text, "run `make tables`"


@pytest.mark.parametrize("name", ["reproduction", "batch-sizes", "choosing", "shift"])
def test_pages_of_results_have_their_numbers_in_tables(measured, name):
    """Decimals of the text outside of tables are settings of runs, so that no result is written by hand."""
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for pattern in (
        measured.PLACE,
        re.compile(r"```.*?```", re.DOTALL),
        re.compile(r"`[^`]*`"),
        re.compile(r"\(.*?\)"),
    ):
        text = pattern.sub("", text)
    settings = {0.5}  # of two classes, by chance
    for row in table.read(measured.RESULTS / table.NAME):
        settings |= {row.get(key) for key in ("learning_rate", "fraction")}
    assert [found for found in re.findall(r"\d*\.\d+", text) if float(found) not in settings] == []


def test_every_table_is_shown(measured):
    shown = {name for page in WITH_TABLES for _, name, _ in measured.PLACE.findall(page.read_text(encoding="utf-8"))}
    assert shown == measured.TABLES.keys()


def test_the_gallery_shows_every_figure_of_the_report():
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    drawn = {path.stem for path in (ROOT / "docs" / "results" / "figures").glob("*.png")} - {"layer"}
    assert set(re.findall(r"\(results/figures/(.+)\.png\)", text)) == drawn  # layer is on the page about kernels


def test_a_table_follows_its_results(measured, tmp_path):
    results = shutil.copytree(ROOT / "docs" / "results", tmp_path / "results")
    path = results / "benchmarks" / "resnet18_cpu.csv"
    path.write_text(path.read_text().replace("1.26", "1.27"))
    assert "On a CPU it takes 1.09 to 1.27 times BatchNorm's" in measured.box(results)
    assert "| 1.02 | 1.27 |" in measured.fill("<!-- table: resnet18_cpu -->\n<!-- end -->", results)


def test_accuracies_are_the_means_of_the_runs(measured):
    digits = [run for run in table.read(measured.RESULTS / table.NAME) if run["task"] == "digits-resnet"]
    means = {}
    for norm in ("bln-grouped", "bn", "gn"):
        tested = [run for run in digits if run["test"] and run["norm"] == norm]
        by_batch = [[run["test"]["accuracy"] for run in tested if run["batch_size"] == size] for size in (1, 4, 25)]
        means[norm] = np.array([np.mean(accuracies) for accuracies in by_batch])
        for mean in means[norm]:
            assert f"{mean:.3f} ± " in measured.TABLES["digits"](measured.RESULTS)
    best = np.max(list(means.values()), axis=0)
    ours, bn, gn = (f"{100 * (best - mean).max():.1f}" for mean in means.values())
    gain = measured.box(measured.RESULTS).splitlines()[2]
    assert f"BLN is at most **{ours}** points of accuracy behind the best norm; BatchNorm {bn}, GroupNorm {gn}." in gain


def test_tables_can_be_made_of_every_experiment(measured, tmp_path):
    runs = everything(np.random.default_rng(0), 3)
    table.write(tmp_path / table.NAME, runs)
    for name in ("resnet", "verdicts", "configurations"):
        made = measured.TABLES[name](tmp_path)
        assert len(made.splitlines()) > 5
        assert "nan" not in made.lower()
    levels = {"gn": 0.6, "bn": 0.5, "bln-grouped": 0.7}
    rows = [by_size(norm, size, seed, level + 0.001 * seed, validation=level)
            for norm, level in levels.items() for size in (1, 8) for seed in range(3)]  # fmt: skip
    table.write(tmp_path / table.NAME, rows)
    made = measured.resnet(tmp_path)
    assert "| BLN grouped | **0.701 ± 0.002** | **0.701 ± 0.002** |" in made
    assert re.search(r"\| 1 \| GroupNorm \| \+10.0 .* \| ahead \|", made)


def widths(plot):
    """The lengths of a chart's bars, by their name."""
    (axes,) = plot.figure.axes
    return {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}


def test_the_chart_of_a_cpu_shows_its_table(measured):
    ratios = measured._ratios(measured.RESULTS / "benchmarks" / "resnet18_cpu.csv", "BLN grouped")
    assert widths(module("_charts").cpu_steps())["BLN grouped"] == ratios


GPU_RATIOS = {"bn": 1.0, "bln grouped": 1.1, "bln published": 2.2, "gn": 1.3, "bln fused": 1.05}


@pytest.mark.filterwarnings("ignore:path is deprecated")  # by the library that draws formulas
def test_a_number_and_its_interval_stay_on_a_line_of_the_site():
    keep = module("_hooks").on_page_content
    assert keep("<td>+0.8 [\N{MINUS SIGN}3.2, +4.9] points</td>") == (
        "<td>+0.8\N{NO-BREAK SPACE}[\N{MINUS SIGN}3.2,\N{NO-BREAK SPACE}+4.9] points</td>"
    )
    assert keep("<p>0.87 ± 0.01, 95 % of</p>").count("\N{NO-BREAK SPACE}") == 3
    assert keep("<pre>x = 3 [1, 2]</pre>") == "<pre>x = 3 [1, 2]</pre>"


@pytest.mark.filterwarnings("ignore:path is deprecated")
def test_a_table_of_words_knows_its_headings_in_each_cell_for_phones():
    def table(*rows):
        cells = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
        head, *body = (f"<tr>{row}</tr>" for row in cells)
        return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"

    cards = module("_hooks").on_page_content
    head = ("norm", "<code>1/m</code>", "why")
    made = cards(table(head, ("BatchNorm", "0", "so that it computes what it did before"), ("4", "1", "")))
    assert "<table data-cards><thead><tr><td>norm</td>" in made
    assert '<td data-heading="">BatchNorm</td><td data-heading="1/m">0</td>' in made
    assert '<td data-heading="norm">4</td>' in made
    assert cards(numbers := table(head, ("BN", "0.5", "1.2"))) == numbers


def gpu_results(folder, ratios=GPU_RATIOS):
    """The committed results, with made-up rows of a GPU."""
    results = shutil.copytree(ROOT / "docs" / "results", folder / "results")
    settings = [(batch, "bfloat16", "last", mode) for batch in (128, 32)
                for mode in ("eager", "compiled", "reduce-overhead", "graph")]  # fmt: skip
    settings += [(128, "float32", "last", "eager"), (128, "bfloat16", "NCHW", "eager")]
    rows = ["net,batch,type,layout,mode,norm,ms,ratio,host ms,images/s,peak MiB"]
    for batch, dtype, layout, mode in settings:
        for norm, ratio in ratios.items():
            ratio += 0.1 * (batch == 32 and norm != "bn")
            rows.append(f"resnet50,{batch},{dtype},{layout},{mode},{norm},{40 * ratio:.3f},{ratio:.3f},9.0,3200,7000")
    (results / "benchmarks" / "resnet50_gpu.csv").write_text("\n".join(rows) + "\n")
    (results / "benchmarks" / "resnet50_gpu.txt").write_text("One made-up GPU.\n")
    return results


def test_a_gpu_run_is_a_table_a_chart_and_a_line_of_the_first_screen(measured, tmp_path):
    results = gpu_results(tmp_path)
    made = measured.resnet50(results)
    assert "| 128 | bfloat16 | channels last | eager | 40.0 | 1.30 | 1.10 | 1.05 | 2.20 |" in made
    assert "| 128 | bfloat16 | NCHW | eager |" in made
    assert "| 128 | float32 | channels last | eager |" in made
    assert "\n\nOne made-up GPU.\n\n" in made
    assert "| 128 | float32 | channels last | 7000 | 7000 |" in measured.resnet50_memory(results)
    bars = widths(module("_charts").gpu_chart(results))
    assert bars["BLN grouped"] == [1.1] * 4 + [1.2] * 4
    cost = measured.box(results).splitlines()[3]
    assert "takes **1.10 to 1.20** times BatchNorm's in ResNet-50 on a GPU, **1.05 to 1.15** times with ReLU" in cost


def test_a_norm_that_did_not_run_on_the_gpu_leaves_its_cells_empty(measured, tmp_path):
    results = gpu_results(tmp_path)
    path = results / "benchmarks" / "resnet50_gpu.csv"
    rows = [row for row in path.read_text().splitlines() if ",bln fused," not in row and ",compiled,bn," not in row]
    path.write_text("\n".join(rows) + "\n")
    assert "fused" not in measured.resnet50(results)
    assert "| 128 | bfloat16 | channels last | compiled |  | 1.30 | 1.10 | 2.20 |" in measured.resnet50(results)
    assert "with ReLU" not in measured.box(results)


def test_without_a_gpu_run_the_pages_say_so(measured, tmp_path):
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "results", ignore=shutil.ignore_patterns("resnet50_gpu*"))
    results = tmp_path / "results"
    for text in (measured.resnet50(results), measured.resnet50_memory(results), measured.box(results)):
        assert "not measured yet" in text
    assert module("_charts").gpu_chart(results) is None


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["ahead", "ahead"], "it is ahead at every batch size."),
        (["undecided", "undecided"], "it is too close to call at every batch size."),
        (["ahead", "level", "ahead"], "it is ahead at batch 1 and 3 and level at batch 2."),
        (
            ["undecided", "behind", "ahead"],
            "it is ahead at batch 3, behind at batch 2 and too close",
        ),
    ],
)
def test_the_first_screen_reads_well_whatever_the_results(measured, verdicts, expected):
    found = [sizes.Standing(size, "bn", Estimate(0, 0, 0, 3), verdict) for size, verdict in enumerate(verdicts, 1)]
    assert expected in measured._stands(found)
