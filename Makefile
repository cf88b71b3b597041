# make lab opens the course, make test checks it; both set everything up first. `make` alone lists the targets.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
STAMP := .setup-done

.DEFAULT_GOAL := help
.PHONY: help setup lab test test-full answers durations slurm-test course notebooks check

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/$(STAMP)  ## create .venv and install the course with everything it needs (once)

# The stamp lies inside .venv, so that removing .venv also forgets the installation.
$(VENV)/$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer, or give its name, as in: make PYTHON=python3.12 lab"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$$($(PYTHON) --version) is too old: the course needs Python 3.11 or newer, as in: make PYTHON=python3.12 lab"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "could not create $(VENV): on Debian and Ubuntu, install the package python3-venv"; rm -rf $(VENV); exit 1; }
	@echo 'installing into $(VENV): 1.4 GB, a few minutes the first time'
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	@touch $@

lab: $(VENV)/$(STAMP)  ## open JupyterLab on the first lesson; TensorBoard is a tile of its launcher
	$(BIN)/python -m jupyterlab --config tools/jupyter/jupyter_server_config.py

test: $(VENV)/$(STAMP)  ## the tests that prove a checkout: library, ranks, notebooks, browser, SLURM where it can be had
	$(BIN)/python -m pytest tests --junitxml=build/test.xml

test-full: $(VENV)/$(STAMP)  ## what is expensive besides: whole matrices, every student version
	$(BIN)/python -m pytest tests -m full --junitxml=build/test-full.xml

answers: $(VENV)/$(STAMP)  ## every right and wrong answer to the exercises that is kept
	$(BIN)/python -m pytest tests/exercises -m ''

durations: $(VENV)/$(STAMP)  ## write tests/durations.md from the last `make test` and `make test-full`
	$(BIN)/python -m tools.durations build/test.xml build/test-full.xml > tests/durations.md

slurm-test: $(VENV)/$(STAMP)  ## the tests of what is generated for SLURM, on a real one; says which Debian packages it misses
	@slurm/cluster up 1 --name check && slurm/cluster down --name check
	$(BIN)/python -m pytest tests/slurm

course: $(VENV)/$(STAMP)  ## execute every solution notebook, print lesson, seconds, result; LESSON=04 for one
	$(BIN)/python -m tools.course $(LESSON)

notebooks: $(VENV)/$(STAMP)  ## build and execute the notebooks whose source changed; those you edited are left alone
	$(BIN)/python -m tools.build_notebooks

check: $(VENV)/$(STAMP)  ## fast checks: ruff, types, notebooks not stale, links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python --level error
	$(BIN)/python -m tools.build_notebooks --check
	$(BIN)/python -m tools.check_links
