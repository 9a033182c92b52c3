# Every target works on a fresh clone: set-up runs first where it is needed. Only Python 3.11+, pip, make and git are asked for.
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
READY := .venv/.ready
FAST := not slow and not chaos
PACKAGES := protos learner rollout_server reward_server deploy headrace.py examples tests $(if $(wildcard benchmarks/*.py),benchmarks)

.PHONY: help setup demo model smoke test test-full chaos soak check lint types imports contract stubs fix protos baseline bench
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(READY) ## make .venv with everything (some minutes once; again only when pyproject.toml changes)

$(READY): pyproject.toml deploy/set_up.py
	@test -n "$(PYTHON)" || { echo "headrace set-up: Python 3.11 or later is needed on PATH: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -I deploy/set_up.py
	@touch $@

demo: $(READY) ## train SmolLM2 on arithmetic with all three services and report the accuracy before and after
	@$(BIN)/headrace demo $(ARGS)

model: $(READY) ## write models/smollm2, the model of the demo and of the examples, as a Hugging Face folder
	@$(BIN)/python -m deploy.models models/smollm2

smoke: $(READY) ## the same on a tiny model, under two minutes
	@$(BIN)/headrace smoke $(ARGS)

test: $(READY) ## fast tests; one that fails is run once more in a process of its own, and the log shows both
	$(BIN)/python -m pytest -q --cache-clear -m "$(FAST)" $(ARGS) || { echo "== what failed, once more by itself"; $(BIN)/python -m pytest -q -m "$(FAST)" --last-failed --last-failed-no-failures=none $(ARGS); }

test-full: $(READY) ## all tests but chaos: real models, whole runs, killed processes
	$(BIN)/python -m pytest -q -m "not chaos" $(ARGS)

chaos: $(READY) ## 30 minutes of faults in whole runs, seeds printed, the audit clean after each (needs root)
	$(BIN)/python -m pytest -q -s -m chaos tests/chaos $(ARGS)

soak: $(READY) ## an hour of a real vLLM server under a mix of clients: memory flat, nothing left behind (ARGS="--minutes 5" for less)
	@$(BIN)/python -m tests.system.soak $(ARGS)

check: $(READY) ## all of continuous integration; every part runs, any failure fails
	@$(MAKE) --no-print-directory --keep-going lint types imports contract stubs test

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy $(PACKAGES)

imports: $(READY)
	$(BIN)/lint-imports --no-cache

contract: $(READY)
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/image.binpb

stubs: $(READY)
	$(BIN)/python -m protos.generate --check

fix: $(READY) ## whatever lint and stubs can mend by themselves
	$(BIN)/ruff check --fix .
	$(BIN)/python -m protos.generate

protos: $(READY) ## generate the stubs after a change to a .proto file
	$(BIN)/python -m protos.generate

baseline: $(READY) ## after a breaking change that CHANGELOG.md names: what `buf breaking` compares with
	$(BIN)/buf build -o protos/image.binpb

bench: $(READY) ## every benchmark; each prints its result as one JSON line last
	@for file in benchmarks/[a-z]*.py; do name=$$(basename $$file .py); echo "== $$name"; $(BIN)/python -m benchmarks.$$name --json || exit 1; done
