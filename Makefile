# Every target builds .venv itself: Python 3.11 or later and make are all a fresh machine needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
INTEGRATIONS := .venv-integrations

.PHONY: test test-browser test-gpu test-integrations test-triton check demo docs bench format clean

test: $(READY)  ## all tests, under 10 minutes on two cores
	$(BIN)/python -m pytest

# Keras takes one backend for each process, and Ray does not like JAX in its own: all run, and one that fails fails the target.
test-integrations: $(INTEGRATIONS)/.ready  ## the layer in other frameworks, in an environment of its own
	failed=; for backend in tensorflow jax torch; do \
	  echo "Keras on $$backend"; \
	  KERAS_BACKEND=$$backend $(INTEGRATIONS)/bin/python -m pytest -n 0 tests/integrations/keras_backends || failed=1; \
	done; \
	$(INTEGRATIONS)/bin/python -m pytest -n 0 tests/integrations/ray_cluster || failed=1; \
	$(INTEGRATIONS)/bin/python -m pytest -n 0 tests/integrations --ignore tests/integrations/keras_backends \
	  --ignore tests/integrations/ray_cluster || failed=1; \
	test -z "$$failed"

# The oldest Triton that the kernels are for, and one that knows launches that overlap; make test has the newest.
test-triton: $(READY)  ## the kernels, compiled by older versions of Triton; needs no GPU
	set -e; for version in 3.4.0 3.6.0; do \
	  test -f .venv-triton/$$version.ready || $(BIN)/pip install -q --no-deps --upgrade --target .venv-triton/$$version triton==$$version; \
	  touch .venv-triton/$$version.ready; \
	  PYTHONPATH=.venv-triton/$$version:src $(BIN)/python tests/compile_kernels.py; \
	done

test-browser: $(READY)  ## the report and the site in a headless Chromium; BLN_BROWSER names another browser
	$(BIN)/python -m pytest -n 0 tests/browser

# Without the conftest of the other tests, which has Triton's interpreter run the kernels.
test-gpu: $(READY)  ## training as CUDA graphs, several seeds together; needs a GPU
	$(BIN)/python -m pytest -n 0 --confcutdir tests/gpu tests/gpu

demo: $(READY)  ## BLN beside BatchNorm and GroupNorm on handwritten digits
	$(BIN)/bln demo

check: $(READY)  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)  ## the site, in site/
	$(BIN)/mkdocs build --strict

bench: $(READY)  ## training on a CPU: a table of the performance page
	$(BIN)/python benchmarks/cpu.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,experiments,search]"
	touch $@

$(INTEGRATIONS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[integrations]"
	$(INTEGRATIONS)/bin/python -m pip install --quiet --constraint constraints.txt --no-deps timm  # else torchvision, and its torch
	touch $@

clean:
	rm -rf .venv .venv-triton $(INTEGRATIONS) site build dist
