# Every target builds .venv itself: Python 3.11 or later and make are all a fresh machine needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: test check demo docs bench format clean

test: $(READY)  ## all tests, under 10 minutes on two cores
	$(BIN)/python -m pytest

demo: $(READY)  ## BLN beside BN and LN on handwritten digits
	$(BIN)/python examples/digits.py

check: $(READY)  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)  ## the site, in site/
	$(BIN)/mkdocs build --strict

bench: $(READY)  ## the tables of the performance page
	$(BIN)/python benchmarks/cpu.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,experiments,search]"
	touch $@

clean:
	rm -rf .venv site build dist
