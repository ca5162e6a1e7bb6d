PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-demo
DOCS_STAMP := $(VENV)/.installed-for-docs
CLIENTS_STAMP := $(VENV)/.installed-for-clients
BROWSER_STAMP := $(VENV)/.installed-for-browser
PYTEST := $(BIN)/pytest -q -n auto
# Modules are compiled when they are first imported: most of what is installed is never used.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	--constraint constraints.txt --editable

.PHONY: help install test types quick-tests test-slow test-all test-browser \
	demo bench docs docs-serve figures clean
.DEFAULT_GOAL := help

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is required; try: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[dev,plot,text,data,image,log,hf,convert,serve,triton]'
	@touch $@

$(DEMO_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing transformer_vq, PyTorch and a few packages in $(VENV); the first time takes minutes."
	@$(INSTALL) '.[plot,text]'
	@touch $@

$(DOCS_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[docs]'
	@touch $@

$(CLIENTS_STAMP): $(STAMP)
	$(INSTALL) '.[hf,clients]'
	@touch $@

$(BROWSER_STAMP): $(STAMP)
	$(INSTALL) '.[browser]'
	@touch $@

install: $(STAMP)  ## create .venv with the pinned versions

test: $(STAMP)  ## run the linter, the type checker and the quick tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --jobs=2 types quick-tests

types: $(STAMP)
	$(BIN)/mypy

quick-tests: $(STAMP)
	$(PYTEST)

test-slow: $(STAMP)  ## run the slow tests
	$(PYTEST) -m slow

test-all: test test-slow $(CLIENTS_STAMP)  ## run all tests, including those with client libraries
	$(PYTEST) tests/clients

test-browser: $(BROWSER_STAMP)  ## test the page of `tvq serve` in a browser
	@command -v chromium || command -v chromium-browser || command -v google-chrome \
		|| $(BIN)/playwright install chromium \
		|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }
	$(BIN)/pytest -q tests/browser

demo: $(DEMO_STAMP)  ## generate text with the model in the package, train a small one in minutes
	@$(BIN)/tvq demo

bench: $(STAMP)  ## record time and memory up to 131,072 tokens (15 minutes on two cores)
	$(BIN)/python benchmarks/train.py --head-types shga --kinds full auto --d-model 256 --n-layer 2 \
		--checkpoint-activations on --repeats 2 --time-limit 100 --out benchmarks/scaling.json --overwrite
	$(BIN)/python benchmarks/documents.py --out benchmarks/documents.json --overwrite
	$(BIN)/python benchmarks/context.py --out benchmarks/context.json --overwrite

docs: $(DOCS_STAMP)  ## build the documentation in site/
	$(BIN)/python docs/generate_commands.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(DOCS_STAMP)  ## serve the documentation on http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

figures: $(STAMP)  ## draw all figures again from the recorded measurements
	$(BIN)/python docs/assets/idea.py
	$(BIN)/python benchmarks/figures.py

clean:  ## remove .venv, build files and caches
	rm -rf $(VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
