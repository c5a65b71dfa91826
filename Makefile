# make demo       trains a small Transformer through two cells, and through one
# make test       lint, types and tests
# make test-slow  the tests that take long
# make fuzz       random cases against plain Keras: see FUZZ_FLAGS below
# make test-versions  tests with other versions of TensorFlow, Keras and Python,
#                 each in an environment of its own: see VERSIONS_FLAGS below
# make test-gpu   what a GPU, or several, make of small models: docs/gpu.md
# make release    builds and checks a release: make release URL=https://...
# make lint       lint and types alone
# make docs       the documentation as a site, in site/
# make clean      removes everything made here
#
# Each target makes a virtual environment in .venv first if there is none.

PYTHON ?= python3
# Without it, devices share all cores, as they must where there is no Linux.
DEMO_FLAGS ?= --cores_per_device=1
PYTEST_FLAGS ?= --numprocesses=auto --dist=loadgroup
# Other ones with another --seed; --case=SEED:INDEX is one of them alone.
FUZZ_FLAGS ?= --count=2000 --seed=1 --jobs=2
# Others with --corners=oldest,nightly and --tests=tests/promises.
VERSIONS_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs

# TensorFlow's start-up messages hide what the targets print.
export TF_CPP_MIN_LOG_LEVEL ?= 2
export KERAS_BACKEND := tensorflow
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-slow test-versions test-gpu fuzz lint docs release clean
.DEFAULT_GOAL := test

$(STAMP): setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

demo: $(STAMP)
	$(BIN)/python -m tools.train --params=lm.austen_demo --steps=30 \
		--compare_num_partitions=1 $(DEMO_FLAGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(PYTEST_FLAGS)

test-versions: $(STAMP)
	$(BIN)/python -m tools.versions $(VERSIONS_FLAGS)

test-gpu: $(STAMP)
	$(BIN)/python -m tfgpipe report

fuzz: $(STAMP)
	$(BIN)/python tests/promises/fuzz.py $(FUZZ_FLAGS)

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

release: $(STAMP)
	$(BIN)/python -m tools.release --url=$(URL)

clean:
	rm -rf $(VENV) build dist site *.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
