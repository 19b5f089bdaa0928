# Every target builds .venv itself: Python 3.11 or later and make are all a fresh machine needs.
PYTHON ?= python3
BIN := .venv/bin
DEMO := .venv/.demo
READY := .venv/.ready
INTEGRATIONS := .venv-integrations
DIST := .venv-dist

.PHONY: test test-browser test-gpu test-integrations test-triton check demo dist docs tables bench format clean

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

demo: $(DEMO)  ## BLN beside BatchNorm and GroupNorm on handwritten digits
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

tables: $(READY)  ## measured tables, figures and charts of README and docs from docs/results, notebooks from examples
	$(BIN)/bln report docs/results --out build/report
	cd build/report && cp --parents $$(find . -path "*/figures/*.png") ../../docs/results
	$(BIN)/python docs/_measured.py
	$(BIN)/python docs/_charts.py
	$(BIN)/python docs/_notebooks.py

# The wheel is made from the sdist, as an installer would. The program that tries it out takes torch alone.
dist: $(DIST)/.ready  ## wheel and sdist in dist/, checked, installed in an environment of its own and tried out
	rm -rf dist $(DIST)/fresh
	$(DIST)/bin/python -m build --outdir dist
	$(DIST)/bin/twine check --strict dist/*
	$(PYTHON) -m venv $(DIST)/fresh
	$(DIST)/fresh/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd $(DIST) && fresh/bin/bln --version && fresh/bin/python ../tests/integrations/typed_example.py

bench: $(READY)  ## training on a CPU: a table of the performance page
	$(BIN)/python benchmarks/cpu.py

# In two steps: the demonstration needs nothing that only development does.
$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[experiments]"
	touch $@

$(READY): $(DEMO)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,experiments,search]"
	touch $@

$(DIST)/.ready: constraints.txt
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet --constraint constraints.txt build twine
	touch $@

$(INTEGRATIONS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[integrations]"
	$(INTEGRATIONS)/bin/python -m pip install --quiet --constraint constraints.txt --no-deps timm  # else torchvision, and its torch
	touch $@

clean:
	rm -rf .venv .venv-triton $(INTEGRATIONS) $(DIST) site build dist
