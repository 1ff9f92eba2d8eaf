# `make test` needs Python ≥ 3.11 and nothing else; it sets up all the rest in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test lint types unit try test-slow test-faults test-gpu clean

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/python -m pytest -n auto

# Every task once, on the built-in model.
try: $(READY)
	$(BIN)/bertie tour

# Real weights and real tokenizers against the originals: minutes, and half a gigabyte of models.
test-slow: $(READY)
	$(BIN)/python -m benchmarks.real_models
	$(BIN)/python -m pytest -m slow

# 500 random schedules of kills, failing system calls and hostile clients; make test-faults SEED=7 repeats those of a seed.
test-faults: $(READY)
	$(BIN)/python -m tests.faults --schedules 500 $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.search.store_faults --schedules 30 $(if $(SEED),--seed $(SEED))

# On a machine with a GPU, its torch and the test packages; installs nothing.
test-gpu:
	PYTHONPATH=$(CURDIR)/src python3 -m pytest tests/gpu tests/nn tests/ops tests/parity tests/training/test_optimizer.py tests/test_neighbours.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# torch first and by its exact version, so that no other package chooses a build for us
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[test]'
	# pip compiles one file after another; some packages have files for other versions of Python, which fail
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
