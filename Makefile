# Every target sets itself up: a virtual environment in .venv, then the pinned packages. Only python3 (3.10 or newer) and make
# are needed. `make test PYTHON=python3.12` chooses another interpreter for a new environment.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := runs/demo
# The pins need Python 3.11; on 3.10 pip chooses the newest versions that still support it.
PINS = $(shell $(BIN)/python -c 'import sys; print("-c constraints.txt" if sys.version_info >= (3, 11) else "")')

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint format docs serve figures constraints clean

help:  ## this list
	@grep -E '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## /\1\t/' | awk -F '\t' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create .venv and install (the other targets do this by themselves)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check $(PINS) -e '.[dev,docs]'
	@touch $@

demo: $(STAMP)  ## one detector trained with a ranking loss and with focal loss, side by side (minutes on two cores)
	$(BIN)/bucketrank demo --out $(DEMO)

# A process for each core, and one thread in each: most tests are too small to share between threads.
test: $(STAMP)  ## the tests and the docstrings' examples
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

check: lint  ## linters, types and the tests that are not slow: the daily loop (about 5 minutes on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal -m 'not slow'

lint: $(STAMP)  ## ruff (rules and format), the import contracts and mypy over the whole tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(STAMP)  ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## build the documentation into site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

serve: $(STAMP)  ## the documentation in a browser, rebuilt at every save
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

figures: $(STAMP)  ## draw the documentation's figures again
	$(BIN)/python -m docs.figures.exact_bucketing
	$(BIN)/python -m docs.figures.delta
	$(BIN)/python -m docs.figures.detectors

constraints:  ## pin the newest versions of everything: a fresh environment, frozen into constraints.txt
	rm -rf build/pins && $(PYTHON) -m venv build/pins
	build/pins/bin/python -m pip install --disable-pip-version-check -e '.[dev,docs]'
	printf '# What the set-up installs, pinned (Python 3.11 and newer). Written by: make constraints\n' > constraints.txt
	build/pins/bin/python -m pip freeze --all --exclude-editable --exclude pip >> constraints.txt
	rm -rf build/pins

clean:  ## remove the environment and everything the commands wrote
	rm -rf $(VENV) runs site build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
