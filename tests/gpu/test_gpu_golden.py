"""The bytes of fixed problems are those that are checked in (docs/bit-contract.md)."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dash_attn.backends.sm90.forward.launch import Forward
from dash_attn.backends.sm90.launch import run_backward
from dash_attn.schedule import Plan
from golden_cases import GOLDEN, HASHED, completed, golden_inputs, golden_plans, identities


def sha256(x: Tensor) -> str:
    return hashlib.sha256(x.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def hashes(plan: Plan, *, apart: bool = False) -> dict[str, str]:
    inputs = [x.cuda() for x in golden_inputs(plan)]
    result = run_backward(plan, inputs, 0.25, apart=apart)
    found = {name: sha256(getattr(result, name)) for name in HASHED["fingerprint"]}
    both = Forward(plan.problem, torch.device("cuda", 0))(*inputs[1:4], 0.25)
    return identities(plan) | found | {name: sha256(x) for name, x in zip(HASHED["forward"], both)}


@pytest.fixture(scope="module")
def golden() -> dict[str, dict[str, str]]:
    known: dict[str, dict[str, str]] = json.loads(GOLDEN.read_text())
    if path := os.environ.get("DASH_ATTN_WRITE_GOLDEN"):
        known = completed(known, hashes)
        Path(path).write_text(json.dumps(known, indent=1) + "\n")
    return known


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", golden_plans())
def test_golden(name: str, apart: bool, golden: dict[str, dict[str, str]]) -> None:
    """A case without hashes fails. ``apart``: contributions to dQ are."""
    assert hashes(golden_plans()[name], apart=apart) == golden.get(name)
