# make demo, make test: both set up .venv first; a second call starts at once unless
# pyproject.toml or constraints.txt changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint types check bench-env clean

help:
	@echo "make demo    train a network on handwritten digits, prune it to 5 % of its parameters, and time both"
	@echo "make test    lint, types and the whole test suite"
	@echo "make clean   remove .venv and caches"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/.installed
	$(PIP) --editable '.[test]'
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

bench-env: $(VENV)/.installed-bench

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
