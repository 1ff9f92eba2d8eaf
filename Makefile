# `make test` needs Python ≥ 3.11 and nothing else; it sets up all the rest in .venv.
PYTHON ?= python3
VENV := .venv
SCRIPTS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
BIN := $(VENV)/$(SCRIPTS)
CORE := $(VENV)/.core
READY := $(VENV)/.ready
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile
CLIENTS := .venv-clients
WHEEL := .venv-wheel
DOCS := .venv-docs
TOOLS := .venv-tools

.PHONY: test lint types unit try libraries coverage test-slow test-faults test-clients test-migration test-wheel test-emulated first-hour \
	docs docs-serve tutorials test-gpu wheel wheels sdist release-check clean

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY) libraries
	$(BIN)/python -m pytest -n auto

# Every task once, on the built-in model; installs nothing but Bertie and what it needs.
try: $(CORE) libraries
	$(BIN)/bertie tour

# The C++ libraries in src/, where their sources have changed.
libraries: $(CORE)
	$(BIN)/python build_libraries.py

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
	$(CLIENTS)/$(SCRIPTS)/python -m tests_clients --bertie $(BIN)/bertie $(if $(WRITE),--write $(WRITE))

$(CLIENTS)/.ready: tests_clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/$(SCRIPTS)/python -m pip install --quiet --no-compile --requirement tests_clients/requirements.txt
	touch $(CLIENTS)/.ready

# The pages docs/migration with setfit, txtai and accelerate, which `make test` does without.
test-migration: $(READY) libraries
	$(PIP_INSTALL) --no-deps --upgrade --target build/peers setfit==1.2.0 txtai==9.14.0 accelerate==1.15.0 evaluate==0.4.6
	PYTHONPATH=build/peers $(BIN)/python -m pytest tests/docs/test_snippets.py -k migration

# The commands of the README and docs/, from a wheel in a clean environment: a quarter of an hour.
test-wheel: $(WHEEL)/.ready
	$(PYTHON) -m tests_wheel --bin $(WHEEL)/$(SCRIPTS)

# Installs the wheel into a new environment, runs the commands of the first hour, and writes their page.
first-hour: $(WHEEL)/.ready
	$(PYTHON) -m tests_wheel.first_hour --wheel "$$(echo build/wheel/*.whl)" --write docs/first-hour.md

$(WHEEL)/.ready: $(shell find src -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name '*.safetensors') pyproject.toml setup.py
	rm -rf $(WHEEL) build/wheel build/bdist.* build/lib.*
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/$(SCRIPTS)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(WHEEL)/$(SCRIPTS)/python -m pip install --quiet --no-compile "$$(echo build/wheel/*.whl)[data,train,search,serve,tracing,export,tensorboard,elmo]"
	touch $(WHEEL)/.ready

# The documentation site, in build/site; warnings and dead links are errors. It needs neither .venv nor torch.
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/$(SCRIPTS)/mkdocs build --strict --quiet

# The same at http://127.0.0.1:8000, rebuilt when a page is saved.
docs-serve: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/$(SCRIPTS)/mkdocs serve

$(DOCS)/.ready: docs_build/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/$(SCRIPTS)/python -m pip install --quiet --no-compile --requirement docs_build/requirements.txt
	touch $(DOCS)/.ready

# Executes the notebooks of the tutorials, and stores their outputs: a few minutes.
tutorials: $(READY)
	$(BIN)/python -m docs_build.notebooks $(or $(NOTEBOOK),docs/tutorials/*.ipynb)

# The wheel for Linux on x86-64, for every Python and glibc >= 2.17: built, audited, installed where there is no compiler.
wheel: $(TOOLS)/.ready
	rm -f dist/*manylinux*x86_64.whl
	$(TOOLS)/$(SCRIPTS)/python -m tools.wheels manylinux_2_17_x86_64
	$(TOOLS)/$(SCRIPTS)/python -m tools.check_wheel dist/*manylinux*x86_64.whl

# The wheels for all platforms, cross-compiled, and the source distribution.
wheels: $(TOOLS)/.ready sdist
	$(TOOLS)/$(SCRIPTS)/python -m tools.wheels all

sdist: $(TOOLS)/.ready
	$(TOOLS)/$(SCRIPTS)/python -m build --sdist
	$(TOOLS)/$(SCRIPTS)/python -m twine check --strict dist/*.tar.gz

# The compiled libraries on other CPUs, emulated by QEMU: older x86-64, and AArch64.
test-emulated:
	$(PYTHON) -m tools.emulated

$(TOOLS)/.ready: tools/requirements.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/$(SCRIPTS)/python -m pip install --quiet --no-compile --requirement tools/requirements.txt
	touch $(TOOLS)/.ready

# Whether a release can be made, and the commands that make it; see docs/packaging.md.
release-check:
	$(PYTHON) -m tools.release

# The tests with branch coverage; fails below the floor in pyproject.toml. Slower than `make test`.
coverage: $(READY) libraries
	$(PIP_INSTALL) --constraint constraints.txt pytest-cov
	$(BIN)/python -m pytest -n auto --cov --cov-report=term

# On a machine with a GPU, its torch and the test packages; installs nothing.
test-gpu:
	PYTHONPATH=$(CURDIR)/src python3 -m pytest tests/gpu tests/nn tests/ops tests/parity tests/training/test_optimizer.py tests/test_neighbours.py

$(CORE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# torch first and by its exact version, so that no other package chooses a build for us; the C++ libraries meanwhile
	$(BIN)/python build_libraries.py & \
	$(PIP_INSTALL) --constraint constraints.txt torch && wait
	$(PIP_INSTALL) --constraint constraints.txt --editable .
	touch $(CORE)

$(READY): $(CORE)
	$(PIP_INSTALL) --constraint constraints.txt --editable '.[test]'
	# pip compiles one file after another; some packages have files for other versions of Python, which fail
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $(READY)

clean:
	rm -rf $(VENV) $(CLIENTS) $(WHEEL) $(DOCS) $(TOOLS) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
	find src -name '_*.so' -delete -o -name '_*.dll' -delete -o -name _compiled.json -delete
