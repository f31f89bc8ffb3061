# `make train` and `make test` do everything on a machine that has only Python >= 3.11 and make.
.DEFAULT_GOAL := help
.PHONY: help setup train tensorboard test test-more test-all gpu gpu-check gpu-engine gpu-packs lint types imports docs clean

VENV := .venv
BIN := $(VENV)/bin
LOGDIR ?= runs
STAMP := $(VENV)/.crossbow-installed
DEV_STAMP := $(VENV)/.crossbow-dev-installed
ZOO_STAMP := $(VENV)/.zoo-installed
PYTHONS := $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11 python
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
MORE_TESTS := tests/pages tests/unit/fuzz tests/unit/experiments
SIDE_BY_SIDE := -n auto --maxprocesses 4 --dist loadfile
# The tests of CUDA, on a device that is simulated on host memory; nothing runs where that cannot be built.
SIMULATED := $(BIN)/python -m tests.simulated_cuda pytest -n auto --maxprocesses 4 --dist load
ON_CUDA := tests/gpu tests/simulated_cuda
# GPU_PYTHON=python3 make gpu-check: by that Python as it is, without an environment, an installation or a repository.
ifdef GPU_PYTHON
ON_GPU := PYTHONPATH=.$(if $(PYTHONPATH),:$(PYTHONPATH)) $(GPU_PYTHON)
else
ON_GPU := $(BIN)/python
GPU_SETUP := setup
endif
define HAS_CUDA
import importlib.util as u, sys; \
missing = [name for name in ("torch", "hydra", "omegaconf") if u.find_spec(name) is None]; \
sys.exit("error: this Python has no " + ", ".join(missing) + "; experiments/gpu/README.md says how they travel.") if missing else None; \
import torch; \
sys.exit(None if torch.cuda.is_available() else "error: no CUDA device is visible here; run make gpu on a machine with a GPU.")
endef
# A process for each, as a fault on a GPU ends its process; what fails stops nothing, and is named at the end.
STAGES := experiments/gpu/on_device.py --results experiments
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F'\t' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(DEV_STAMP)  ## create .venv and install the package with all that tests, pages and pictures need

# Stamps come last: an interrupted installation is taken up again, a changed list of dependencies installed again.
$(STAMP): pyproject.toml constraints.txt
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  for python in $(PYTHONS); do \
	    if $$python -c '$(NEW_ENOUGH)' 2>/dev/null; then \
	      echo "creating $(VENV) with $$(command -v $$python)"; \
	      $$python -m venv $(VENV) && break; \
	      echo "error: $$python cannot create a virtual environment; install its venv module (python3-venv)." >&2; exit 2; \
	    fi; \
	  done; \
	fi
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "error: Python 3.11 or newer is needed and was not found; install it or run make PYTHON=/path/to/python3." >&2; exit 2; }
	$(INSTALL) -e .
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(INSTALL) -e '.[dev,docs,plots]'
	@touch $@

$(ZOO_STAMP): $(DEV_STAMP)
	$(INSTALL) -e '.[zoo]'
	@touch $@

train: $(STAMP)  ## train on the built-in digits and say where the results are
	$(BIN)/python -m crossbow_py.train +experiment=digits
	@echo "look at the curves of all runs with: make tensorboard"

tensorboard: $(STAMP)  ## the curves of all runs, on http://localhost:6006
	@echo "open http://localhost:6006/#custom_scalars; of more than forty runs none is shown until you press TOGGLE ALL RUNS"
	$(BIN)/tensorboard --logdir $(LOGDIR) --host localhost

test: setup  ## what is quick, some forty runs from end to end, and the main ways of CUDA on a simulated device, in minutes
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not slow' $(addprefix --ignore=,$(MORE_TESTS))
	$(SIMULATED) -m 'gpu and not slow' $(ON_CUDA)

test-more: setup  ## all other tests that no busy machine upsets: fuzzing, pages, experiments in short, and what takes longer
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not slow' $(MORE_TESTS)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'slow and not long'
	$(SIMULATED) -m 'gpu and slow and not long' $(ON_CUDA)

test-all: setup $(ZOO_STAMP)  ## everything, also what takes minutes or wants the machine to itself, and models of timm and transformers
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not slow'
	$(BIN)/python -m pytest -m slow
	$(SIMULATED) -m 'gpu and slow' $(ON_CUDA)
	TRITON_INTERPRET=1 $(SIMULATED) -m gpu tests/gpu/test_executors.py tests/gpu/test_one_row.py

gpu: $(GPU_SETUP)  ## what a GPU can be trusted with, its tests, and all that is to be measured on it; nothing stops the rest
	@$(ON_GPU) -c '$(HAS_CUDA)'
	@$(MAKE) --keep-going gpu-check gpu-engine gpu-packs

gpu-check: $(GPU_SETUP)  ## the ladder of trust, in minutes; its archive is crossbow_check_<time>.tar.gz
	@$(ON_GPU) -c '$(HAS_CUDA)'
	$(ON_GPU) -m crossbow_py.check device=cuda again=true

gpu-engine: $(GPU_SETUP)  ## that of training one model, in 8 minutes
	@$(ON_GPU) -c '$(HAS_CUDA)'
	OUT=runs/gpu/$@ $(ON_GPU) $(STAGES) tests suite sides update memory tables

gpu-packs: $(GPU_SETUP)  ## that of packs, ensembles and searches, in 6 minutes
	@$(ON_GPU) -c '$(HAS_CUDA)'
	OUT=runs/gpu/$@ $(ON_GPU) $(STAGES) tests.packs packs ensembles families hyperband tables

lint: setup  ## ruff
	$(BIN)/python -m ruff check .

types: setup  ## mypy
	$(BIN)/python -m mypy

imports: setup  ## import rules
	$(BIN)/lint-imports --no-cache

docs: setup  ## the documentation as a site of its own, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:  ## remove caches and build products; runs/ and .venv stay
	rm -rf tests/simulated_cuda/build build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
