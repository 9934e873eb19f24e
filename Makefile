# `make run` and `make test` set up .venv on first use.

PYTHON ?=
ENGINE ?= cpu
BIN := .venv/bin
# Modules stay compiled whatever the shell sets: tests start hundreds of processes, and each would compile all of them.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help setup setup-run setup-train run check test-quick test test-all test-clients test-interop train train-proof bench conformance weight-conformance screenshots docs release constraints clean

help:
	@echo "make run     play 64 episodes of the calculator environment on the demo model"
	@echo "make check   format, lint, layers, plain English and types: some seconds"
	@echo "make test-quick  the quick tests, without an engine, while you work: under 3 minutes"
	@echo "make test    format, lint, layers, types and tests, with the real engine: some 13 minutes on two cores"
	@echo "make test-all  the same with whole sweeps, both event loops, wheels, the site and test-interop: some 75 minutes, before a release"
	@echo "make test-clients  agent programs from PyPI and npm play, unmodified; 2.8 GB at its first time"
	@echo "make test-interop  data sets and games of other projects play, with the real packages"
	@echo "make train   watch the demo model learn to use the calculator, some 7 minutes; train-proof trains three times"
	@echo "make bench   the benchmarks; prints figures"
	@echo "make weight-conformance  new weights of 44 architectures, tiny; writes docs/weight-conformance.md"
	@echo "make screenshots  the pictures of the pages in docs/images; needs Chromium"
	@echo "make docs    guides and reference as a site, in build/docs"
	@echo "make release build the wheel and the source archive in dist, and check them; uploads nothing"
	@echo "make constraints  write the newest versions to constraints.txt, from which setup installs; another 4.5 GB in build/"
	@echo "make setup   only what the others need: .venv, dependencies, the demo model; setup-run and setup-train need less"
	@echo "make clean   remove .venv and every cache; run files in runs/ stay"
	@echo "PYTHON=python3.12 names another interpreter (3.11 to 3.13); ENGINE=gpu installs vLLM for GPUs"

setup:
	@PYTHON="$(PYTHON)" .ci/setup $(ENGINE) all

# The dependencies of a newcomer's first command alone.
setup-run:
	@PYTHON="$(PYTHON)" .ci/setup $(ENGINE) run

setup-train:
	@PYTHON="$(PYTHON)" .ci/setup $(ENGINE) train

run: setup-run
	@$(BIN)/deltarunner run calculator --episodes 64 --temperature 0 --show 3

# Some seconds, or half a minute if mypy has not seen this tree before; it runs beside the others.
check: setup
	@echo "check: format, lint, layers, plain English, types"
	@$(BIN)/mypy >.venv/types.log 2>&1 & types=$$!; \
	$(BIN)/ruff format --check --quiet . && \
	$(BIN)/ruff check --quiet . && \
	{ $(BIN)/lint-imports --no-logo >.venv/layers.log || { cat .venv/layers.log; false; }; } && \
	$(BIN)/python -m tests.plain_english || { kill $$types; exit 1; }; \
	wait $$types; ended=$$?; cat .venv/types.log; exit $$ended

test-quick: setup
	@$(BIN)/python -m pytest -q -n 2 -m "not engine and not slow"

# Three processes on two cores, since many tests wait; those with the real engine are together in one (tests/lanes.py).
test: check
	@$(BIN)/python -m pytest -n 3 --durations=25

test-all: check docs
	@$(BIN)/python -m pytest -n 3 --durations=25 --sweeps=whole
	@$(BIN)/python -m tests.interop.installing

# One at a time: a program takes a core and up to 700 MB.
test-clients: setup
	@$(BIN)/python -m tests.clients.installing
	@$(BIN)/python -m pytest -q --clients tests/clients

# Packages of other projects, each group in a virtual environment over .venv.
test-interop: setup
	@$(BIN)/python -m tests.interop.installing

train: setup-train
	@$(BIN)/python -m examples.train_grpo

train-proof: setup-train
	@$(BIN)/python -m examples.train_proof

# About a minute a case, one process at a time; it continues where it was stopped.
conformance: weight-conformance

weight-conformance: setup
	@$(BIN)/python -m tests.weight_conformance

bench: setup
	@$(BIN)/python -m tests.benchmarks

# Pictures of the pages for the docs, of a run on the scripted engine; needs Chromium.
screenshots: setup
	@$(BIN)/python -m tests.report.screenshots

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

release: check
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist
	@$(BIN)/twine check --strict dist/*

# In an environment of its own: that of setup has the versions of constraints.txt.
constraints:
	@rm -rf build/constraints
	@PYTHON="$(PYTHON)" .ci/setup cpu newest
	@sed -n '/^#/p' constraints.txt >constraints.new
	@build/constraints/bin/python -m pip freeze --exclude-editable --local | grep '==' | sed 's/+cpu$$//' >>constraints.new
	@mv constraints.new constraints.txt

clean:
	rm -rf .venv .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
