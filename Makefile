# make verify-all    set everything up and check every claim on this machine
# make test          the test suite            make lint    ruff and mypy            make setup    only set up
# make fuzz          10,000 hostile inputs to everything that reads files, a few minutes
# make test-ray      campaigns on a local Ray cluster of several nodes, one of them killed
# make test-eval     multiple-choice questions through lm-eval, on a local task
# ARGS="..." is handed on: make verify-all ARGS=--quick, make test ARGS="-k account"
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
BIN := .venv/bin
ARGS ?=
# Exit codes of `artifact verify-all` that count as success here; 3 means that something stayed inconclusive or was not run.
OK_CODES ?= 0
# Test files side by side; empty runs them in one process.
PARALLEL ?= -n auto --maxprocesses=4 --dist=loadfile

.PHONY: help setup test test-ray test-eval fuzz lint verify-all clean

help:
	@sed -n 's/^# //p' Makefile | head -n 6

setup:
	@requirements/setup.sh
	@echo "ready: make verify-all, or $(BIN)/artifact --help"

test:
	@requirements/setup.sh test
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

fuzz:
	@requirements/setup.sh test
	FUZZ_INPUTS=1000 $(BIN)/python -m pytest tests/test_fuzz.py $(ARGS)

test-ray:
	@requirements/setup.sh test ray
	$(BIN)/python -m pytest tests/test_ray_executor.py $(ARGS)

test-eval:
	@requirements/setup.sh test eval
	$(BIN)/python -m pytest tests/test_multiple_choice.py $(ARGS)

lint:
	@requirements/setup.sh lint
	$(BIN)/ruff check .
	$(BIN)/mypy

verify-all:
	@requirements/setup.sh
	@code=0; $(BIN)/artifact verify-all $(ARGS) || code=$$?; \
	case " $(OK_CODES) " in *" $$code "*) ;; *) exit $$code;; esac

clean:
	rm -rf .venv .cache build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
