"""A short run of the fuzzer; ``python stress/fuzz.py`` is the long one."""

from __future__ import annotations

import os

from fuzz import run
from fuzz_case import hopper

PROBLEMS = int(os.environ.get("DASH_ATTN_PROBLEMS", "60"))


def test_random_problems(tmp_path):
    summary = run(iter(range(PROBLEMS)), hopper(), tmp_path, print)
    assert summary.passed, summary
    assert len(summary.seeds) == PROBLEMS
