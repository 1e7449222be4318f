# msllm's two commands are `make demo` and `make test`; `make help` lists all.
# A first call makes the virtual environment; later calls find it ready.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?=
JOBS ?= 2
DEMO ?= runs/demo
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Several test processes with several threads each would fight for the cores.
export OMP_NUM_THREADS := 1
export MPLBACKEND := Agg

.PHONY: help install demo test lint unit bench format constraints clean

help: ## list these commands
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

install: $(STAMP) ## make .venv with msllm and the tools that develop it

$(STAMP): pyproject.toml constraints.txt scripts/install.sh
	@PYTHON="$(PYTHON)" scripts/install.sh "$(VENV)"
	@touch $@

demo: $(STAMP) ## train a small model on this machine's CPU, from text to a sampled continuation
	@$(BIN)/python examples/demo.py --out $(DEMO)

test: lint unit ## lint, types, import contracts, spelling, then all tests

lint: $(STAMP) ## everything that is checked without running msllm
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_files.py
	git ls-files -z | xargs -0 $(BIN)/codespell

unit: $(STAMP) ## the tests; PYTEST_ARGS="-k plot" for some of them
	$(BIN)/pytest -n $(JOBS) --dist loadfile --durations=15 $(PYTEST_ARGS)

bench: $(STAMP) ## measure what docs/benchmarks.md reports
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

format: $(STAMP) ## sort imports and lay the code out
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

constraints: $(STAMP) ## write constraints.txt anew from what is installed
	@scripts/constraints.sh "$(BIN)/pip" > .constraints.tmp
	@mv .constraints.tmp constraints.txt

clean: ## remove the virtual environment, caches and the demo's folder
	rm -rf $(VENV) $(DEMO) .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache build dist
