# `make run` and `make test` do all of their own set-up in .venv, once.

PYTHON ?=
ENGINE ?= cpu
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup run test train train-proof bench docs clean

help:
	@echo "make run     play 64 episodes of the calculator environment on the demo model"
	@echo "make test    format, lint, types and tests, with the real engine"
	@echo "make train   watch the demo model learn to use the calculator, some 7 minutes; train-proof does it thrice"
	@echo "make bench   the benchmarks; prints figures"
	@echo "make docs    guides and reference as a site, in build/docs"
	@echo "make setup   only what the others need: .venv, dependencies, the demo model"
	@echo "make clean   remove .venv and every cache; run files in runs/ stay"
	@echo "PYTHON=python3.12 names another interpreter (3.11 to 3.13); ENGINE=gpu installs vLLM for GPUs"

setup:
	@PYTHON="$(PYTHON)" .ci/setup $(ENGINE)

run: setup
	@$(BIN)/deltarunner run calculator --episodes 64 --temperature 0 --show 3

test: setup
	@echo "test: format"
	@$(BIN)/ruff format --check .
	@echo "test: lint"
	@$(BIN)/ruff check .
	@echo "test: types"
	@$(BIN)/mypy
	@echo "test: pytest, with the real engine (some minutes)"
	@$(BIN)/python -m pytest

train: setup
	@$(BIN)/python -m examples.train_grpo

train-proof: setup
	@$(BIN)/python -m examples.train_proof

bench: setup
	@$(BIN)/python -m tests.benchmarks

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
