# One front door. `make` alone lists the targets; the README's two commands are `make demo` and `make test`.
# Everything left over lies in .venv and .lmcache-work; `make clean` removes both.

PYTHON ?= python3
PY := .venv/bin/python
WORK := .lmcache-work
STAGE := $(PY) .ci/stage.py
PYTEST_ARGS ?=
SEED ?=
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(WORK)/pycache
export HYPOTHESIS_STORAGE_DIRECTORY := $(CURDIR)/$(WORK)/hypothesis

.DEFAULT_GOAL := help
.PHONY: help setup demo test bench bench-storage bench-disk bench-tiers check sim catalogue clean

help:
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## \(.*\)/make \1\t\2/p' Makefile | expand -t 22
	@echo 'make nightly-PART     one long part alone: storage daemon vllm tiers serdes faults install'

setup:  ## make .venv and install this tree into it; nothing to do when nothing changed
	@$(PYTHON) .ci/setup.py

demo: setup  ## a real model answers from its cache: cold, from disk in a new process, from memory; MODEL= DTYPE= SERDE= TIER=
	@.venv/bin/lmcache demo $(if $(MODEL),--model '$(MODEL)') $(if $(DTYPE),--dtype '$(DTYPE)') \
	    $(if $(SERDE),--serde '$(SERDE)') $(if $(TIER),--tier '$(TIER)')

test: setup  ## every test; needs neither root nor a service started by hand
	@$(STAGE) tests 600 -- $(PY) -m pytest -q -o cache_dir=$(WORK)/pytest $(PYTEST_ARGS)

test-vllm:  ## the connector in a real vLLM, in an environment of its own (2.4 GB, outside the tree)
	@$(PYTHON) .ci/stage.py vllm 480 -- $(PYTHON) .ci/vllm_env.py test $(PYTEST_ARGS)

check: setup  ## lint, format, types, layering, catalogue, docs
	@$(PY) .ci/check.py

bench: setup  ## measure what the README claims, as ratios in one run
	@$(PY) .ci/nightly.py bench

bench-storage: setup  ## the storage part of the benchmarks
	@$(PY) .ci/nightly.py bench-storage

bench-disk: setup  ## the disk tier against fio (needs fio)
	@$(PY) .ci/nightly.py bench-disk

bench-tiers: setup  ## remote tiers against raw loops on the same servers
	@$(PY) .ci/nightly.py bench-tiers

bench-daemon: setup  ## the daemon: round trips, copies, streams, deaths
	@$(PY) .ci/nightly.py bench-daemon

bench-vllm:  ## hits in vLLM's own prefix cache and in ours, in pairs; upstream's where it is installed
	@$(PYTHON) .ci/vllm_env.py run benchmarks/vllm_hits.py

sim: setup  ## simulated histories of engines, daemon and tiers; SEED=n replays one
	@$(PY) .ci/nightly.py sim $(SEED)

nightly-%: setup
	@$(PY) .ci/nightly.py $*

catalogue: setup  ## write what follows from plugins.toml and from declarations
	@$(PY) .ci/catalogue.py sync
	@$(PY) .ci/docs.py sync

clean:  ## remove the environment and everything left over
	rm -rf .venv $(WORK)
