# make lab opens the course, make test checks it; both set everything up first. `make` alone lists the targets.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
STAMP := .setup-done
TIMED := test test-lessons chosen chosen-lessons changed changed-lessons release release-lessons
# Two workers, each with one thread of its own; lessons are executed as learners do it, and one at a time.
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n 2 --dist loadscope --no-loadscope-reorder
LESSONS := $(BIN)/python -m pytest tests/notebooks

.DEFAULT_GOAL := help
.PHONY: help setup lab shell test test-changed test-release test-matrix answers durations slurm-test course notebooks images book handout slides pages check

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/$(STAMP)  ## create .venv and install the course with everything it needs (once)
	@echo 'the course is installed: make lab opens it, make shell is for its commands'

# The stamp lies inside .venv, so that removing .venv also forgets the installation.
$(VENV)/$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer, or give its name, as in: make PYTHON=python3.12 lab"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$$($(PYTHON) --version) is too old: the course needs Python 3.11 or newer, as in: make PYTHON=python3.12 lab"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "could not create $(VENV): on Debian and Ubuntu, install the package python3-venv"; rm -rf $(VENV); exit 1; }
	@echo 'installing into $(VENV): 6 GB on Linux, 2.3 without CUDA; a few minutes the first time'
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

lab: $(VENV)/$(STAMP)  ## open JupyterLab on the first lesson; TensorBoard is a tile of its launcher
	$(BIN)/python -m jupyterlab --config tools/jupyter/jupyter_server_config.py $(LAB)

shell: $(VENV)/$(STAMP)  ## a shell that finds `python -m labcode.train` and `torchrun`, as JupyterLab's terminal does
	@COURSE_PROGRAMS=$(CURDIR)/$(BIN) COURSE_FOLDER=$(CURDIR) bash --rcfile tools/jupyter/bashrc

test: test-library test-lesson  ## the tests that prove a checkout: library, ranks, a notebook, browser, SLURM where it can be had

.PHONY: test-library test-lesson
test-library: $(VENV)/$(STAMP)
	$(TESTS) -m 'not release and not lesson' --junitxml=build/test.xml

test-lesson: $(VENV)/$(STAMP)
	$(LESSONS) -m 'lesson and not release' --junitxml=build/test-lessons.xml

test-changed: $(VENV)/$(STAMP)  ## what this change touches besides: its lessons executed, their answers, stories of its rooms
	$(TESTS) -m 'release and not lesson' --changed --junitxml=build/changed.xml || test $$? -eq 5
	$(LESSONS) -m 'release and lesson' --changed --junitxml=build/changed-lessons.xml || test $$? -eq 5

test-release: $(VENV)/$(STAMP)  ## all other tests: every lesson both ways, every answer, matrices, stories
	$(TESTS) -m 'release and not lesson' --junitxml=build/release.xml
	$(LESSONS) -m 'release and lesson' --junitxml=build/release-lessons.xml

test-matrix: $(VENV)/$(STAMP)  ## what depends on PyTorch, on each version of it and of Python; about 1 hour, 7 GB at a time
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_FLAGS) -c constraints.txt -e '.[matrix]'
	$(BIN)/nox
	$(BIN)/python -m tools.matrix

answers: $(VENV)/$(STAMP)  ## every right and wrong answer to the exercises that is kept
	$(TESTS:tests=tests/exercises) -m ''

durations: $(VENV)/$(STAMP)  ## write tests/costs.json and tests/durations.md from the reports in build/
	$(BIN)/python -m tools.durations $(TIMED:%=build/%.xml)

slurm-test: $(VENV)/$(STAMP)  ## the tests of what is generated for SLURM, on a real one; says which Debian packages it misses
	@slurm/cluster up 1 --name check && slurm/cluster down --name check
	$(BIN)/python -m pytest tests/slurm

course: $(VENV)/$(STAMP)  ## execute every solution notebook, print lesson, seconds, result; LESSON=04 for one
	$(BIN)/python -m tools.course $(LESSON)

notebooks: $(VENV)/$(STAMP)  ## build and execute the notebooks whose source changed; those you edited are left alone
	$(BIN)/python -m tools.build_notebooks

images: $(VENV)/$(STAMP)  ## draw the pictures in images/ that are stale; --check in `make check` names them
	$(BIN)/python -m tools.images

book: $(VENV)/$(STAMP)  ## the web book in build/book, which needs no network: lessons solved, glossary, library
	$(BIN)/python -m tools.book

handout: $(VENV)/$(STAMP)  ## the course for learners, without solutions and tests: build/handout and a zip of it
	$(BIN)/python -m tools.handout

slides: $(VENV)/$(STAMP)  ## five to ten slides a lesson in build/slides, which need no network
	$(BIN)/python -m tools.slides

pages: $(VENV)/$(STAMP)  ## write what README, INSTRUCTORS.md and docs/ take from lessons and checks
	$(BIN)/python -m tools.pages

check: $(VENV)/$(STAMP)  ## fast checks: ruff, types, notebooks not stale, links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python --level error
	$(BIN)/python -m tools.build_notebooks --check
	$(BIN)/python -m tools.check_links
	$(BIN)/python -m tools.pages --check
	$(BIN)/python -m tools.images --check
