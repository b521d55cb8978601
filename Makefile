# make demo, make test, make docs: all set up .venv first; a second call starts at once unless
# pyproject.toml or constraints.txt changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint types check test-oldest docs bench-env clean

help:
	@echo "make demo    train a network on handwritten digits, prune it to 5 % of its parameters, and time both"
	@echo "make test    lint, types and the whole test suite"
	@echo "make test-oldest   the suite on the oldest supported PyTorch, which takes a download of 3 GB"
	@echo "make docs    the documentation site, in site/: runs the examples, and fails on any warning"
	@echo "make clean   remove .venv and caches"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/.installed
	$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.installed-bench: pyproject.toml constraints.txt | $(VENV)/.installed-test
	$(PIP) --editable '.[bench]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/hgnp run

# types beside the suite: on two cores the suite's workers wait for each other at its end, and mypy fills the gaps
test: lint
	@$(MAKE) --no-print-directory --jobs 2 types check

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

check: $(VENV)/.installed-test
	$(BIN)/pytest --numprocesses 2 --dist worksteal

# torch 2.6 pins sympy, and torchvision, which a test's dependency needs, pins torch
.venv-oldest/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	grep -vE '^(torch|sympy|torchvision)==' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --constraint .venv-oldest/constraints.txt 'torch==2.6.*' --editable '.[test]'
	@touch $@

test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/pytest --numprocesses 2 --dist worksteal

# the source folder is the repository, so that links between pages, reports and source files are those of the repository
docs: $(VENV)/.installed-docs
	@mkdir -p docs/generated
	$(BIN)/typer hgnp.cli utils docs --name hgnp --title "Command line" --output docs/generated/commands.md
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . site
	@echo "site/docs/index.html"

bench-env: $(VENV)/.installed-bench

clean:
	rm -rf $(VENV) .venv-oldest site docs/gallery docs/generated .mypy_cache .ruff_cache .pytest_cache .hypothesis
