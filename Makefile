# `make check` is what CI runs. Needs Python 3.11 or newer; everything else lands in .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
SOURCES := src tests demo benchmarks hatch_build.py

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-slow test-clients test-hosts chaos check bench format clean

help:  ## print the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# Installed once, and again when pyproject.toml or the kernels change.
KERNELS := hatch_build.py $(wildcard src/triptych/kernels/csrc/*)

$(VENV)/.installed: pyproject.toml $(KERNELS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(KERNELS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(VENV)/.installed $@

demo: $(VENV)/.installed  ## answer questions about pictures with the packaged model
	$(BIN)/triptych demo

serve: $(VENV)/.installed  ## the same, and go on serving on port 8000
	$(BIN)/triptych demo --keep --port 8000

test: $(VENV)/.installed-dev  ## lint, types and the fast tests
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/pytest -m "not slow and not gpu and not clients and not hosts"

test-slow: $(VENV)/.installed-dev  ## the tests that need minutes
	$(BIN)/pytest -m "slow and not gpu and not clients and not hosts"

test-clients: $(VENV)/.installed-dev  ## public clients against a deployment; makes an environment for each
	$(BIN)/pytest -m clients tests/clients

test-hosts: $(VENV)/.installed-dev  ## workers in network namespaces, and their links cut; needs root
	$(BIN)/pytest -m hosts

CHAOS_SECONDS ?= 600
CHAOS_SEED ?= 0
chaos: $(VENV)/.installed-dev  ## faults under load against real processes; ten minutes
	$(BIN)/python -m tests.chaos --seconds $(CHAOS_SECONDS) --seed $(CHAOS_SEED) --json chaos-result.json

check: test test-slow test-hosts test-clients  ## what CI runs
	$(MAKE) chaos CHAOS_SECONDS=60

checkpoints/mid: $(VENV)/.installed
	$(BIN)/python benchmarks/checkpoints.py mid $@

bench: $(VENV)/.installed-dev checkpoints/mid  ## every comparison of benchmarks/specs, vLLM's included; hours
	benchmarks/peers/vllm/install.sh .venv-vllm
	mkdir -p benchmark-results
	for spec in benchmarks/specs/*.toml; do \
		PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/triptych bench compare $$spec --model-path checkpoints/mid \
			--output benchmark-results/$$(basename $$spec .toml).json || exit 1; \
	done

format: $(VENV)/.installed-dev  ## sort imports and format
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:  ## remove what the targets made
	rm -rf $(VENV) .venv-clients demo-output benchmark-results checkpoints chaos-result.json .pytest_cache .mypy_cache .ruff_cache
