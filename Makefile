# Every target sets itself up: a fresh clone and a Python >= 3.10 are enough.
PYTHON ?= python3
BIN := .venv/bin

# LOCKED=1 installs the files of requirements.lock and no others, each checked by its hash; PyTorch is then the
# build for CUDA. Otherwise versions are those of constraints.txt, and pip finds a PyTorch for this machine.
ifdef LOCKED
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps
SETUP = $(INSTALL) --require-hashes -r requirements.lock && $(INSTALL) --no-build-isolation -e .
else
SETUP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,cuda]'
endif

# One process per core. Each takes tests from the others when it has none left.
PYTEST := $(BIN)/pytest -n auto --dist worksteal

# What catches most mistakes, without compiling a kernel: plans and their proof, the table, the public functions.
QUICK := src/dash_attn/problem.py src/dash_attn/schedule $(addprefix tests/cpu/test_, $(addsuffix .py, problem policies schedule_parameters \
	proof proof_mutations table golden graph head_groups simulate reference executor api imports docs supply_chain))

.PHONY: help demo check quick test test-slow test-all test-gpu soak sanitize litmus clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: .venv/ready ## a small GPT, trained twice: the same bytes; then once more in shuffled order
	$(BIN)/dash-attn demo

check: .venv/ready ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

quick: .venv/ready ## the tests that catch most mistakes, in less than a minute on 2 cores
	$(PYTEST) $(QUICK)

test: .venv/ready ## all tests but slow ones, in about 5 minutes on 2 cores
	$(PYTEST) -m "not slow"

test-slow: .venv/ready ## slow tests only: model checking, PTX on the CPU, every kernel variant
	$(PYTEST) -m slow

test-all: test test-slow ## all tests that need no GPU

test-gpu: .venv/ready ## tests on a Hopper GPU; with flash-attn-4 installed also beside the peer
	DASH_ATTN_PROBLEMS=300 DASH_ATTN_REPLAYS=1000 $(BIN)/pytest tests/gpu

soak: .venv/ready ## on a Hopper GPU: 10,000 replays under contention, after aborted launches, on few SMs
	$(BIN)/python stress/soak.py --replays 10000

sanitize: .venv/ready ## on a Hopper GPU: compute-sanitizer of the CUDA toolkit over every kernel variant
	$(BIN)/python stress/sanitize.py --jobs 8

litmus: .venv/ready ## on a Hopper GPU: more than 10^9 hand-overs of a tile from block to block, beside full load
	$(BIN)/python stress/litmus.py --rounds 2e8 --loads dram l2

.venv/ready: pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv .venv
	$(SETUP)
	touch $@

clean: ## remove the environment and the demo's pictures
	rm -rf .venv demo-out
