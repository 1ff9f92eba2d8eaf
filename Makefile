# `make test` needs Python ≥ 3.11 and nothing else; it sets up all the rest in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CLIENTS := .venv-clients
WHEEL := .venv-wheel
DOCS := .venv-docs

.PHONY: test lint types unit try test-slow test-faults test-clients test-wheel first-hour docs docs-serve tutorials test-gpu clean

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

# Clients from PyPI (openai, cohere, LangChain, …), in an environment of their own, against a server with the built-in
# model; make test-clients WRITE=docs/clients.md updates the table there.
test-clients: $(READY) $(CLIENTS)/.ready
	$(CLIENTS)/bin/python -m tests_clients --bertie $(BIN)/bertie $(if $(WRITE),--write $(WRITE))

$(CLIENTS)/.ready: tests_clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --no-compile --requirement tests_clients/requirements.txt
	touch $(CLIENTS)/.ready

# The commands of the README and docs/, from a wheel in a clean environment: a quarter of an hour.
test-wheel: $(WHEEL)/.ready
	$(PYTHON) -m tests_wheel --bin $(WHEEL)/bin

# Installs the wheel into a new environment, runs the commands of the first hour, and writes their page.
first-hour: $(WHEEL)/.ready
	$(PYTHON) -m tests_wheel.first_hour --wheel "$$(echo dist/*.whl)" --write docs/first-hour.md

$(WHEEL)/.ready: $(shell find src -name '*.py' -o -name '*.cpp' -o -name '*.safetensors') pyproject.toml
	rm -rf $(WHEEL) dist
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(WHEEL)/bin/python -m pip install --quiet --no-compile "$$(echo dist/*.whl)[data,train,search,serve,tensorboard]"
	touch $(WHEEL)/.ready

# The documentation site, in build/site; warnings and dead links are errors. It needs neither .venv nor torch.
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

# The same at http://127.0.0.1:8000, rebuilt when a page is saved.
docs-serve: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve

$(DOCS)/.ready: docs_build/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --no-compile --requirement docs_build/requirements.txt
	touch $(DOCS)/.ready

# Executes the notebooks of the tutorials, and stores their outputs: a few minutes.
tutorials: $(READY)
	$(BIN)/python -m docs_build.notebooks $(or $(NOTEBOOK),docs/tutorials/*.ipynb)

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
	rm -rf $(VENV) $(CLIENTS) $(WHEEL) $(DOCS) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
