# Every target sets itself up: a fresh clone and a Python >= 3.10 are enough.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-gpu sanitize litmus check clean

demo: .venv/ready
	$(BIN)/dash-attn demo

test: .venv/ready
	$(BIN)/pytest -n auto

# On a machine with a Hopper GPU; with flash-attn-4 installed, packed batches and errors beside the peer's too.
test-gpu: .venv/ready
	DASH_ATTN_PROBLEMS=300 DASH_ATTN_REPLAYS=1000 $(BIN)/pytest tests/gpu

# compute-sanitizer, from the CUDA toolkit, over every kernel variant.
sanitize: .venv/ready
	$(BIN)/python tests/gpu/sanitize.py

# More than 10^9 hand-overs of a tile from block to block for every form that may be shipped.
litmus: .venv/ready
	$(BIN)/python tests/gpu/litmus.py --rounds 2e8 --loads dram l2 none

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,cuda]'
	touch $@

clean:
	rm -rf .venv demo-out
