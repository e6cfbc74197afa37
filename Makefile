# Two commands matter: `make demo` and `make test`. Each sets up everything it needs.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
C_SRC  := $(wildcard src/symcomm/_core/*.c src/symcomm/_core/*.h)
STAMP  := $(VENV)/.installed
BUILT  := $(VENV)/.built

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu lint format bench conformance soak sanitize clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup: $(BUILT) ## make .venv with everything the other targets use

$(STAMP): pyproject.toml constraints.txt
	@echo "== setting up $(VENV) (first time only, about a minute)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt "setuptools>=68" wheel
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,torch,plot,notebook,examples]'
	@touch $@

$(BUILT): $(STAMP) setup.py $(C_SRC)
	@echo "== building the C core"
	@SYMCOMM_WERROR=1 $(BIN)/python setup.py -q build_ext --inplace
	@touch $@

demo: $(BUILT) ## a language model trained on two ranks, beside Gloo, and what failures say (two minutes)
	@mkdir -p build
	@$(BIN)/symcomm demo --picture build/demo.png

test: $(BUILT) lint ## lint, types and all tests (about twenty minutes on 2 cores)
	$(BIN)/python -m pytest -q --durations=15

lint: $(BUILT) ## ruff (lint and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(BUILT) ## let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-gpu: $(BUILT) ## what needs a CUDA GPU (skipped by `make test` where there is none)
	$(BIN)/python -m pytest -q tests/test_gpu_*.py

bench: $(BUILT) ## measure this machine; see BENCHMARKS.md
	$(BIN)/symcomm bench all

conformance: $(BUILT) ## PyTorch's own DistributedTest on our backend, at 2, 3, 4 and 8 ranks (about ten minutes)
	for n in 2 3 4 8; do $(BIN)/python -m tests.conformance --ranks $$n || exit 1; done

soak: $(BUILT) ## a thousand random faults, then ten minutes each of hosts and of ranks that come and go
	$(BIN)/python -m tests.soak
	$(BIN)/python -m tests.hosts_soak 10
	$(BIN)/python -m tests.elastic_soak 10

sanitize: $(BUILT) ## the C core under ASan, UBSan and TSan
	$(BIN)/python tests/sanitize.py

clean: ## remove everything that was built
	rm -rf $(VENV) build dist src/*.egg-info src/symcomm/_core/*.so .pytest_cache .mypy_cache .ruff_cache
