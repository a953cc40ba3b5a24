# Everything a contributor runs. Each target sets itself up; all it needs is make and Python 3.11 or newer with venv and pip.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q --inline-snapshot=disable
JOBS   ?= 3
FAILED := .pytest_cache/v/cache/lastfailed

# Bytecode caches are worth seconds here: without them each test worker compiles and rewrites its plugins again.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
PIP_INSTALL := -m pip install -qq --no-compile

# A virtual environment is tied to its folder: scripts and the editable install hold absolute paths. The stamp's name holds
# the folder too, so that a copied or moved tree makes its own environment instead of testing the code of the other one,
# and the project's name, so that an environment from before the rename is made anew.
HERE := $(shell pwd | cksum | cut -d' ' -f1)
NEW  := $(VENV)/.new-perdure-$(HERE)
RUN  := $(VENV)/.run-perdure-$(HERE)
DEV  := $(VENV)/.dev-perdure-$(HERE)

OTHERS := 3.11 3.12 3.13 3.14

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: help setup demo lint types imports prose check quick test gate test-all test-again gate-again test-crash test-mcp test-wire test-commands test-code mutants soak fuzz cover bench bench-peers format clean \
        $(addprefix smoke-,$(OTHERS))

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Set-up

$(NEW):
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Perdure needs Python 3.11 or newer, and " + \
	  "$(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12 ..." % v[:2])'
	@echo "Setting up $(VENV) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python $(PIP_INSTALL) --upgrade pip # pays for itself: a recent pip resolves and installs faster
	@touch $@

$(RUN): pyproject.toml | $(NEW)
	@$(BIN)/python $(PIP_INSTALL) -e '.[cli]'
	@touch $@

$(DEV): pyproject.toml | $(NEW)
	@echo "Installing the development tools (half a minute, once) ..."
	@$(BIN)/python $(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(RUN)

setup: $(DEV) ## Create .venv with everything development needs (again only when pyproject.toml changes)

# See it work

demo: $(RUN) ## Watch a durable agent being killed in mid-turn and finishing: no key, no network
	@$(BIN)/perdure demo

# Quick checks

lint: $(DEV) ## Style: ruff check and ruff format --check
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@echo "lint: clean"

types: $(DEV) ## Types: mypy strict and ty
	@$(BIN)/mypy
	@$(BIN)/ty check --quiet --error-on-warning
	@echo "types: clean"

imports: $(DEV) ## Layers, purity and cycles: import-linter
	@$(BIN)/lint-imports --no-logo

prose: $(DEV) ## Sentences to rewrite: no more of them than in tests/prose/counts.toml
	@$(BIN)/python tests/prose/ratchet.py

check: $(DEV) ## All quick checks, two at a time
	@$(MAKE) --no-print-directory -j2 types lint imports prose

format: $(DEV) ## Format the code and apply the safe fixes
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

# Tests

# $(1) is a lane (tests/lanes.py). Where a run did not come to its end, what failed is not the whole of it: then its list is
# removed, and test-again finds nothing to run.
run_lane = rm -f $(FAILED); $(PYTEST) -n $(JOBS) --lane=$(1) --durations=15 || { [ $$? -eq 1 ] || rm -f $(FAILED); exit 1; }

quick: $(DEV) ## For the inner loop, in memory and with one kill mode. PKG=sessions,turn: what is nearest to them
	@$(if $(PKG),paths=$$($(BIN)/python tests/nearest.py "$(PKG)") || exit 1;) $(MAKE) --no-print-directory check && \
	  $(PYTEST) -n $(JOBS) --lane=quick $(if $(PKG),$$paths)

test: check ## Every behaviour once, on every store that needs nothing but Python: quick checks, then tests
	@$(call run_lane,test)

gate: $(DEV) ## What make test leaves: every way to die on every store, real kills at every point, fuzzing
	@$(call run_lane,gate)

test-again: $(DEV) ## After a test that failed: pass if it passes alone, unless it is about a promise
	$(BIN)/python tests/again.py

gate-again: test-again ## The same after make gate

test-all: test gate $(addprefix smoke-,$(OTHERS)) ## Everything, then the smoke tests on every other Python found (3.11 to 3.14)

# $(1) is a version. Prints the first interpreter that really is that version: a shim on PATH may point nowhere.
find_python = for python in python$(1) "$$HOME"/.pyenv/versions/$(1).*/bin/python \
  "$$HOME"/.local/share/uv/python/cpython-$(1).*/bin/python; do \
  if "$$python" -c 'import sys, venv; sys.exit(sys.version.split(".")[:2] != "$(1)".split("."))' 2>/dev/null; \
  then echo "$$python"; break; fi; done

$(addprefix smoke-,$(OTHERS)): smoke-%: $(DEV)
	@set -e; \
	if $(BIN)/python -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$*")'; then \
	  echo "Python $*: had every test"; exit; fi; \
	python=$$($(call find_python,$*)); \
	if [ -z "$$python" ]; then echo "Python $*: not found"; exit; fi; \
	stamp=$(VENV)-$*/.test-perdure-$(HERE); \
	if [ ! -e $$stamp ] || [ pyproject.toml -nt $$stamp ]; then \
	  "$$python" -m venv --clear $(VENV)-$*; \
	  $(VENV)-$*/bin/python $(PIP_INSTALL) -e '.[cli,test]'; \
	  touch $$stamp; fi; \
	echo "Python $*: smoke tests"; \
	$(VENV)-$*/bin/python -m pytest -q tests/smoke

# The SDKs weigh more than everything else together, so they have an environment of their own.
WIRE := $(VENV)-wire/.stamp-perdure-$(HERE)

$(WIRE): pyproject.toml
	@echo "Installing the official SDKs (a minute, once) ..."
	@$(PYTHON) -m venv --clear $(VENV)-wire
	@$(VENV)-wire/bin/python $(PIP_INSTALL) -e '.[cli,http,test,wire]'
	@touch $@

test-wire: $(WIRE) ## Our readers against the official SDKs, on the same bytes
	PERDURE_REQUIRE=wire $(VENV)-wire/bin/python -m pytest -q --inline-snapshot=disable -W default tests/oracles

test-commands: $(DEV) ## Everything about OS commands at full size: gigabytes of output, hundreds of commands
	PERDURE_COMMANDS=whole $(PYTEST) -n $(JOBS) tests/commands

test-code: $(DEV) ## Cells of every turn in full CPython, and killed at every point there; escapes, and thousands of programs
	PERDURE_CODE=cpython PERDURE_FUZZ=full $(PYTEST) -n $(JOBS) tests/codemode tests/crash/test_coded.py \
	  tests/tools/test_run_code.py $(wildcard tests/tools/test_cells*.py)

test-crash: $(DEV) ## The crash matrix with every real kill and every pair of kills
	PERDURE_CRASH=full $(PYTEST) -n $(JOBS) tests/crash

mutants: $(DEV) ## Break the code on purpose; each break must turn the crash matrix red
	$(BIN)/python tests/mutants/run.py

test-mcp: $(DEV) ## The official conformance suite of MCP, of servers and of clients; npm brings it
	$(BIN)/python tests/server/conformance.py

soak: $(DEV) ## Run for long under load, kills, stops and leavings (an hour)
	$(BIN)/python tests/soak/run_verbs.py
	$(BIN)/python tests/soak/run.py
	$(BIN)/python tests/soak/run_functions.py
	$(BIN)/python tests/soak/races.py
	$(BIN)/python tests/soak/run_stops.py

fuzz: $(DEV) ## Every property test and state machine, with many more examples
	PERDURE_FUZZ=full $(PYTEST) -n $(JOBS) -m "hypothesis or fuzz"

cover: $(DEV) ## Branch coverage of make test and make gate together
	$(BIN)/coverage run -m pytest -q
	$(BIN)/coverage report

# Speed

bench: $(DEV) ## Measure against the floor; peers from their stored figures
	$(BIN)/python benchmarks/run.py

bench-peers: $(DEV) ## Measure the peers again too
	$(BIN)/python benchmarks/run.py --peers

clean: ## Remove environments, caches and builds
	rm -rf .venv .venv-3.* build dist htmlcov .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
