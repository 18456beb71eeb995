# make demo         two workers train on real images under each strategy, one of them slow: a table and a plot; then
#                   one of two workers is killed, and the weights are compared with native DDP's
# make test         what must pass before a change is merged
# make test-slow    also the soak and exhaustive tests
# make mutants      changes the pure core in one place at a time: which changes does no test see? An hour or two;
#                   make mutants MUTANTS='psengine.parameter_server.server.rules.average*' for one module
# make simulate     SEEDS=1000000 JOBS=2: whole jobs under simulated faults; the run is added to tests/simulation/runs.tsv
# make cuda         compile the CUDA kernels, where there is an nvcc; part of make test
# make gpu          on a machine with an NVIDIA GPU: build, test and measure the CUDA kernels, in nine minutes at most.
#                   It runs in the interpreter that has torch, and installs nothing: make PYTHON=python3 gpu
# make docs         the documentation, in build/docs; warnings are errors
# make wheel        the source distribution and a wheel for Linux, in dist; the wheel is tried in a fresh environment
# make test-matrix  the core tests with other versions of Python and torch: docs/versions.md
# make bench        ten minutes: benchmarks/RESULTS.md; BENCH=all_reduce for some benchmarks,
#                   QUICK=1 for a noisy try, PS_LITE=PATH to compare with a checkout of ps-lite. Those on several hosts want
#                   root, an hour and their names: BENCH=cluster,cluster_fast,cluster_slow,cluster_resnet,cluster_far
# make lint, format, clean
#
# PYTHON names the interpreter for the virtual environment: make PYTHON=python3.12 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What the demo needs; and what tests and the documentation need besides (Lightning, transformers, Sphinx, Selenium).
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev

NVCC := $(shell command -v nvcc)
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Three files at a time on two cores: half of the tests wait for leases and deadlines.
PARALLEL := -n 3 --dist loadfile
DEMO := examples/compare_strategies.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-matrix mutants simulate docs cuda gpu wheel lint format bench clean
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# One thread per rank: torchrun would choose the same, with a warning. No GPU: two ranks would need two.
demo: export OMP_NUM_THREADS := 1
demo: export CUDA_VISIBLE_DEVICES :=
demo: $(STAMP)
	$(BIN)/psengine run --workers 2 --strategy async --no-prefix $(DEMO)
	$(BIN)/python examples/survive_a_kill.py

# Each rank imports its test module: where bytecode is not kept, compiling it is half of a short test.
test test-slow: export PYTHONDONTWRITEBYTECODE :=

test: lint cuda
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL)

docs: $(DEV)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "build/docs/index.html"

# The CUDA sources at least compile, wherever there is a compiler for them; setup.py says what is linked.
# tests/kernels/test_cuda_on_host.py runs the kernels without a GPU.
cuda: $(if $(NVCC),build/cuda/.compiled)
	@$(if $(NVCC),,echo "make: no nvcc on PATH: csrc/kernels/*.cu were not compiled")

build/cuda/.compiled: $(STAMP) $(wildcard csrc/*/*.cu csrc/*/*.h)
	PSENGINE_CUDA=1 $(BIN)/python setup.py -q build_ext --build-lib build/cuda --build-temp build/cuda
	@touch $@

gpu:
	$(PYTHON) release/gpu.py

test-slow: lint
	$(BIN)/python -m pytest $(PARALLEL)

wheel: $(DEV)
	$(BIN)/python release/make_wheel.py

test-matrix: $(DEV)
	$(BIN)/python release/matrix.py $(MATRIX)

# Verdicts are kept in mutants/: a second run goes on where the first was stopped.
mutants: $(DEV)
	$(PIP) install -q -c constraints.txt mutmut
	$(BIN)/mutmut run $(if $(MUTANTS),'$(MUTANTS)')
	$(BIN)/mutmut results

SEEDS ?= 10000
JOBS ?= 2
simulate: $(DEV)
	PYTHONPATH=tests:. $(BIN)/python tests/simulation/runner.py --record --seeds $(SEEDS) --jobs $(JOBS) $(if $(FIRST),--first $(FIRST))

lint: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(DEV)
	$(BIN)/python benchmarks/harness/suite.py $(if $(BENCH),--only $(BENCH)) $(if $(QUICK),--quick) $(if $(PS_LITE),--ps-lite $(PS_LITE))

# The stamps go too, so that what was built is built again; the packages in the environment stay.
clean:
	rm -rf build dist mutants psengine.egg-info psengine_torch.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	rm -f $(STAMP) $(DEV)
	find psengine csrc tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	find psengine -name '*.so' -delete

# torch comes first and alone: an exact pin takes a CPU build where one is offered. The build requirements are installed
# because the package is built against that torch, not in an environment of its own.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard csrc/*/*)
	@command -v $(PYTHON) >/dev/null || { echo "make: expected Python 3.10 or later as $(PYTHON), got no such command." \
	  "Name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: expected Python 3.10 or later," \
	  "got $$($(PYTHON) --version 2>&1). Name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "make: $(PYTHON) lacks the modules venv and ensurepip" \
	  "(Debian: the package python3-venv)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt 'setuptools>=77'
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[examples]'
	@touch $@

# The package is there already: pip brings what the extra names, and leaves the package alone.
$(DEV): $(STAMP)
	$(PIP) install -c constraints.txt 'psengine-torch[dev]'
	@touch $@
