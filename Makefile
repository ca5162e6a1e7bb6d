PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-demo
PYTEST := $(BIN)/pytest -q -n auto

.PHONY: help install test test-all demo bench clean
.DEFAULT_GOAL := help

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is required; try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,plot,text,image,log,hf]'
	@touch $@

$(DEMO_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[plot]'
	@touch $@

install: $(STAMP)  ## create .venv with the pinned versions

test: $(STAMP)  ## run the linter, the type checker and the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST)

test-all: test  ## run all tests, including slow ones
	$(PYTEST) -m slow

demo: $(DEMO_STAMP)  ## train a small model in minutes, evaluate it, generate text
	$(BIN)/tvq bench demo

bench: $(STAMP)  ## record time and memory up to 131,072 tokens (15 minutes on two cores)
	$(BIN)/tvq bench train --head-types shga --kinds full auto --d-model 256 --n-layer 2 \
		--checkpoint-activations on --repeats 2 --time-limit 100 --out benchmarks/scaling.json --overwrite
	$(BIN)/tvq plot benchmarks/scaling.json
	$(BIN)/tvq bench documents --out benchmarks/documents.json --overwrite
	$(BIN)/tvq bench context --out benchmarks/context.json --overwrite

clean:  ## remove .venv, build files and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
