#   Everything runs in .venv; all it needs is Python >= 3.11 with its venv module.
#   make up      serve the demo model (Ctrl-C stops)     make down    stop a suite in the background
#   make test    before each commit: lint, types, and the quick tier of tests (3 minutes)
#   make test-changed   the same, with all tests that a change reaches (SINCE=REV)
#   make test-all   all tests that start no suite (10 minutes)
#   make test-suites    the tests that start suites and services as processes, and whole models on a fake GPU (16 minutes)
#   make test-builds    the tests of the CPU kernels, with each build that this CPU can run
#   make test-compose   the tests of the suite in containers; skipped where there is no Docker engine
#   make sizes   lines of each part, the largest files and folders
#   make fmt     format the sources                  make lint    styles, layers and types: part of make test
#   make bench   measure what the project claims
#   make fuzz    hostile messages, to the C sources and to all listeners, five minutes each (FUZZ_SECONDS=60 for less)
#   make stress  tests of processes and sockets, ten times beside four busy processes (TESTS=... ROUNDS=10)
#   make nightly all that continuous integration leaves out (some hours)
#   make coverage, make mutants   which lines make test runs, and how many random faults it finds
#   make costs   measure what each test costs, for the quick tier
#   make soak    half an hour of mixed traffic and killed workers (SOAK_MINUTES=3 for less)
#   make test-clients   other people's clients against a real suite: docs/use/clients lists them
#   make lm-eval    every log-likelihood of lm_eval beside that of transformers
#   make proto   generate the stubs from protos/     make gpu     what needs a CUDA device
#   make docs    build the site of the documentation into build/docs; broken links fail
#   make dist    build the packages of a release into dist/
#   make lock    pin the versions that .venv holds   make reference   list every setting and metric
#   make paths   record the files that a request, a row, an epoch, a threshold and a scale-up meet

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.14 python3,\
            $(if $(shell $(name) -c 'import sys, venv, ensurepip; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),$(name))))
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# Python compiles what is imported, once: pip would compile all modules, of which most are never used.
INSTALL := $(PIP) install --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE

COMMA := ,

# The tests interpret the kernels. A torch built for CUDA brings the triton it was built with, which
# no pin of ours may contradict; one built for CPUs brings none, and gets this.
TRITON := triton>=3.7,<3.8

.DEFAULT_GOAL := help
.PHONY: help up down test test-quick test-changed test-rest test-rest-turn test-all test-suites test-suites-turn test-builds stress nightly \
  test-nightly mutants coverage costs sizes test-compose test-clients lm-eval soak fuzz fmt lint styles checks proto bench docs dist gpu lock reference paths

help:
	@sed -n 's/^#   //p' Makefile

up: .venv/installed-all .venv/kernels
	@$(BIN)/moesaic up $(ARGS)

down: .venv/installed-all
	@$(BIN)/moesaic down

# Tiers of tests, each with a budget of time that it tells at its end: tests/tiers.
TIER := $(BIN)/python -m tests.tiers.run
ROUNDS ?= 10
SINCE ?=

# Quick checks first: a fault that is found soon should not wait. Layers and types run beside the tests.
test: styles
	@$(MAKE) -s -j 2 checks test-quick

test-quick: .venv/installed-dev
	@$(TIER) quick $(ARGS)

# The same with all tests of the modules that a change reaches: SINCE=REV, or since the upstream branch.
test-changed: styles
	@$(TIER) quick --changed $(if $(SINCE),--since $(SINCE)) $(ARGS)

test-rest: .venv/installed-dev
	@$(TIER) rest $(ARGS)

# What continuous integration runs of test-rest and test-suites: a quarter of what costs much, by the commit, and all else.
test-rest-turn test-suites-turn: .venv/installed-dev
	@$(TIER) $(@:test-%=%) $(ARGS)

test-all: .venv/installed-dev
	@$(TIER) all $(ARGS)

test-suites: .venv/installed-dev
	@$(TIER) suites $(ARGS)

# The tests that compute with the kernels for CPUs, with each build of them that this CPU can run.
test-builds: .venv/installed-dev
	@tests/builds.sh

# Tests that start threads, sockets and processes, ten times in a row beside four busy processes: TESTS='tests/a tests/b.py'.
stress: .venv/installed-dev
	@$(BIN)/python -m tests.tiers.stress --rounds $(ROUNDS) $(TESTS)

# All that continuous integration leaves out: slow tests, all examples of properties by a new seed, clients, containers.
nightly: .venv/installed-dev
	@MARKS=compose $(MAKE) -k lint test-nightly test-builds stress test-compose test-clients lm-eval fuzz soak

test-nightly: .venv/installed-dev
	@ALL_EXAMPLES=1 OPENAPI_EXAMPLES=20 $(TIER) nightly $(ARGS)

# Faults of one line each, drawn at random: how many does make test find? ARGS='--seed 2 --mutants 40'
mutants: coverage
	@$(BIN)/python -m tests.tiers.mutants $(ARGS)

# The lines of libs and services that make test runs in its own processes.
coverage: .venv/installed-dev
	@$(TIER) quick --coverage $(ARGS)

# What each test costs, for the choice of the quick tier; on an idle machine. ARGS="--only FILE FILE" measures new files
# alone, and keeps the costs of others.
costs: .venv/installed-dev
	@rm -f .venv/records.jsonl
	@TEST_RECORDS=$(CURDIR)/.venv/records.jsonl $(TIER) all $(ARGS)
	@$(BIN)/python -m tests.tiers.costs .venv/records.jsonl

sizes:
	@$(PYTHON) tests/tiers/sizes.py

test-compose: .venv/installed-dev
	@tests/compose/run.sh

# The clients live in an environment of their own; where it cannot be had, this says so and is no failure.
OF_CLIENTS = MOESAIC_COMMAND=$(CURDIR)/$(BIN)/moesaic HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1

# Each environment runs the tests whose clients it has, and skips the others. The last line plays models for agents.
ASK_CLIENTS = python -m pytest -q -rs -o filterwarnings=default --confcutdir=tests/clients
OPENAI2 = tests/clients/test_instructor.py tests/clients/test_litellm.py tests/clients/test_llama_index.py

test-clients: .venv/installed-dev
	@$(MAKE) -s .venv-clients/installed .venv-clients-openai2/installed || { echo 'SKIPPED: the clients cannot be installed here'; exit 0; } && \
	  { $(MAKE) -s .venv-clients/npm/installed || echo 'SKIPPED: the clients of npm cannot be installed here'; } && \
	  $(OF_CLIENTS) .venv-clients/bin/$(ASK_CLIENTS) tests/clients && \
	  $(OF_CLIENTS) .venv-clients-openai2/bin/$(ASK_CLIENTS) $(OPENAI2) && \
	  $(BIN)/python -m pytest -q -rs tests/gateway/tools/test_coding_agents.py

# Every log-likelihood of lm_eval beside that of transformers: five sets, three topologies; prints a line each.
lm-eval: .venv/installed-all .venv-clients/installed
	@$(OF_CLIENTS) .venv-clients/bin/python -m pytest -q -s -o filterwarnings=default \
	  --confcutdir=tests/clients tests/clients/test_likelihoods.py

# The report goes to benchmarks/results/soak.json.
soak: .venv/installed-dev
	@$(BIN)/pytest -q -s -m slow tests/soak

# Every round has its seed; the first one is drawn, and printed. A round that fails says how it is played again.
fuzz: .venv/installed-dev
	@$(BIN)/pytest -q -s -m slow tests/native tests/system/strangers

# The site: mkdocs.yml and docs/site. It needs no network and no server: open build/docs/index.html.
docs: .venv/installed-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q

# The packages of a release: docs/inside/releasing.md.
dist: .venv/installed-dev
	@rm -rf dist
	@for each in . models libs/moesaic_lab; do \
	  (cd $$each && $(CURDIR)/$(BIN)/python -m hatchling build -d $(CURDIR)/dist) > /dev/null || exit 1; done
	@ls -l dist

lint: styles checks

styles: .venv/installed-dev
	@echo 'ruff'
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check .

# One after the other, so that the tests beside them keep a core.
checks: .venv/installed-dev
	@echo 'layers, types'
	@$(BIN)/lint-imports --no-logo > .venv/lint-imports.log || { cat .venv/lint-imports.log; exit 1; }
	@$(BIN)/mypy --no-error-summary libs benchmarks models docs

fmt: .venv/installed-dev
	@$(BIN)/ruff check -q --fix .
	@$(BIN)/ruff format -q .

bench: .venv/installed-dev
	@$(BIN)/moesaic bench parity $(ARGS)
	@$(BIN)/moesaic bench hop $(ARGS)
	@$(BIN)/moesaic bench engine $(ARGS)
	@$(BIN)/moesaic bench gateway $(ARGS)
	@$(BIN)/moesaic bench router $(ARGS)
	@$(BIN)/moesaic bench sweeps $(ARGS)
	@$(BIN)/moesaic bench prefill $(ARGS)
	@$(BIN)/moesaic bench accuracy $(ARGS)
	@$(BIN)/moesaic bench aebs $(ARGS)
	@$(BIN)/moesaic bench placement $(ARGS)
	@$(BIN)/moesaic bench routed $(ARGS)
	@$(BIN)/moesaic bench replacement $(ARGS)
	@$(BIN)/moesaic bench brownout $(ARGS)
	@$(BIN)/moesaic bench brownout-accuracy $(ARGS)
	@$(BIN)/moesaic bench brownout-burst $(ARGS)
	@$(BIN)/moesaic bench edge $(ARGS)
	@$(BIN)/moesaic bench simulate $(ARGS)

# Tests and benchmarks for a CUDA device, as many as fit: make gpu MINUTES=10. Without a device its status is 3.
# On a machine where nothing may be installed, name a Python that has what they need: make gpu GPU_PYTHON=python3.
# For a machine without a network, see benchmarks/gpu/bundle.py.
GPU_PYTHON ?=
MINUTES ?= 25
gpu: $(if $(GPU_PYTHON),,.venv/installed-dev)
	@PYTHONPATH=$(CURDIR)/libs:$(CURDIR):$(PYTHONPATH) $(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu --minutes $(MINUTES) $(ARGS)

# The stubs are committed, so that nobody needs the compiler to run the services.
proto: .venv/installed-dev
	@$(BIN)/python -m grpc_tools.protoc -I protos --python_out=libs --grpc_python_out=libs \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --mypy_out=libs \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --mypy_grpc_out=libs \
	  protos/moesaic/v1/*.proto
	@touch libs/moesaic/v1/__init__.py

# The pages that list every setting and every metric.
reference: .venv/installed-dev
	@PYTHONPATH=libs:. $(BIN)/python docs/reference/generate.py

# The page of paths: suites are started and recorded, some minutes. make reference renders the last record.
paths: .venv/installed-dev
	@PYTHONPATH=libs:. $(BIN)/python -m docs.inside.paths $(ARGS)

# Pin what .venv holds now. To move to newer versions: rm -rf .venv constraints.txt, make a new
# .venv by hand with pip install -e '.[all,dev]' -e libs/moesaic_lab, test, then make lock.
lock:
	@$(BIN)/python -m pip --disable-pip-version-check list --format=freeze \
	  | grep -Ev '^(moesaic|moesaic-lab|moesaic_lab|pip|setuptools|triton|wheel)==' | sed 's/+[A-Za-z0-9.]*$$//' | LC_ALL=C sort -f > constraints.txt
	@echo "constraints.txt: $$(wc -l < constraints.txt) versions"

.venv/bin/python:
	@if [ -z '$(PYTHON)' ]; then \
	  echo 'Moesaic needs Python 3.11 or newer with its venv module: install it (Debian: apt install python3 python3-venv),' >&2; \
	  echo 'or name it: make PYTHON=/path/to/python3' >&2; exit 1; fi
	@echo 'making .venv with $(PYTHON)'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo '$(PYTHON) is older than Python 3.11: name a newer one, make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

.venv/installed-all: pyproject.toml constraints.txt | .venv/bin/python
	@echo 'installing the services into .venv (some minutes the first time)'
	@$(INSTALL) -e '.[all]'
	@touch $@

.venv/installed-dev: pyproject.toml libs/moesaic_lab/pyproject.toml constraints.txt | .venv/bin/python
	@echo 'installing the services, the lab and the tools of development into .venv (some minutes the first time)'
	@$(INSTALL) -e '.[all,dev$(if $(CI),$(COMMA)ci)]' -e libs/moesaic_lab
	@$(BIN)/python -c 'import triton' 2> /dev/null || $(INSTALL) '$(TRITON)'
	@touch $@ .venv/installed-all

# What computes on a CPU. Without a C compiler torch computes instead, some times slower.
NATIVE := libs/moesaic/native
.venv/kernels: $(wildcard $(NATIVE)/sources/*.h $(NATIVE)/sources/*/* $(NATIVE)/compile.py) | .venv/installed-all
	@$(BIN)/python $(NATIVE)/compile.py > $@ 2> .venv/kernels.log \
	  || { echo 'the kernels for CPUs cannot be compiled (.venv/kernels.log): install gcc for full speed'; touch $@; }

.venv-clients/installed: tests/clients/requirements.txt | .venv/bin/python
.venv-clients-openai2/installed: tests/clients/requirements-openai2.txt | .venv/bin/python
.venv-clients/installed .venv-clients-openai2/installed:
	@echo 'installing the clients into $(@D) (some minutes the first time)'
	@test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check -q install -r $<
	@touch $@

# 700 MB, most of it Codex and Claude Code.
.venv-clients/npm/installed: tests/clients/npm/package.json tests/clients/npm/package-lock.json | .venv-clients/installed
	@mkdir -p $(@D) && cp $^ $(@D) && npm ci --prefix $(@D) --no-audit --no-fund --loglevel=error
	@touch $@
