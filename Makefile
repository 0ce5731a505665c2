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

.PHONY: demo test test-gpu soak sanitize litmus check clean

demo: .venv/ready
	$(BIN)/dash-attn demo

test: .venv/ready
	$(BIN)/pytest -n auto

# On a machine with a Hopper GPU; with flash-attn-4 installed, packed batches and errors beside the peer's too.
test-gpu: .venv/ready
	DASH_ATTN_PROBLEMS=300 DASH_ATTN_REPLAYS=1000 $(BIN)/pytest tests/gpu

# On a machine with a Hopper GPU: 10,000 replays under contention, after aborted launches, on few SMs.
soak: .venv/ready
	$(BIN)/python stress/soak.py --replays 10000

# compute-sanitizer, from the CUDA toolkit, over every kernel variant.
sanitize: .venv/ready
	$(BIN)/python stress/sanitize.py

# More than 10^9 hand-overs of a tile from block to block, beside full load, for every form that may be shipped.
litmus: .venv/ready
	$(BIN)/python stress/litmus.py --rounds 2e8 --loads dram l2

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/ready: pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv .venv
	$(SETUP)
	touch $@

clean:
	rm -rf .venv demo-out
