"""The page, the docstrings and the example that need Keras."""

import doctest
import re
import warnings

import bln.keras
from pages import ROOT, check_lazy, check_missing, run_example


def test_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) > 5
    namespace: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(blocks, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings(
                "ignore", "__array__ implementation doesn't accept a copy"
            )  # Keras's, under NumPy 2
            exec(compile(block, f"frameworks.md, block {number}", "exec"), namespace)


def test_docstrings():
    failed, attempted = doctest.testmod(bln.keras)
    assert attempted > 0
    assert failed == 0


def test_the_example_runs_as_it_is():
    run_example("keras_digits.py")


def test_importing_bln_imports_no_keras_and_the_attribute_does():
    check_lazy("keras")


def test_a_missing_keras_is_named():
    check_missing("keras", "keras")
