"""Fixed problems and inputs whose gradients' SHA-256 are checked in: golden-sm_90a.json.

The inputs come from integer arithmetic, so that they are the same bytes with every version of everything.
They are no attention that ever ran (out and lse are invented): the backward is a function of its inputs.

Changing the file: a hash may change only together with ``NUMERICS_VERSION`` (schedule/plan.py), which
changes every fingerprint, and an entry "changes bits" in CHANGELOG.md. On a Hopper GPU,
``DASH_ATTN_WRITE_GOLDEN=tests/golden-sm_90a.json pytest tests/gpu/test_gpu_golden.py`` writes it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dash_attn.problem import Mask, Problem
from dash_attn.schedule import Descending, Plan, Shift, build_plan, policy_by_name

GOLDEN = Path(__file__).parent / "golden-sm_90a.json"

_RAGGED = [1, 700, 0, 64, 129, 1000]


def golden_plans() -> dict[str, Plan]:
    """The plans of all cases by name."""
    full, causal, window = Mask.full(), Mask.causal(), Mask.window(200, 50)
    problems = {
        "d64-full": Problem.dense(batch=2, heads=4, seqlen=1000, head_dim=64, mask=full),
        "d64-causal-gqa": Problem.dense(heads=8, kv_heads=2, seqlen=1000, head_dim=64, mask=causal),
        "d128-full-fp16": Problem.dense(heads=2, seqlen=1000, head_dim=128, mask=full, dtype="float16"),
        "d128-causal": Problem.dense(heads=2, seqlen_q=500, seqlen_k=900, head_dim=128, mask=causal),
        "d128-causal-mqa": Problem.dense(heads=9, kv_heads=1, seqlen=800, head_dim=128, mask=causal),
        "d128-window": Problem.dense(heads=2, seqlen=1000, head_dim=128, mask=window),
        "d128-varlen": Problem.varlen(_RAGGED, heads=4, kv_heads=2, head_dim=128, mask=causal),
        "d64-varlen-window": Problem.varlen(_RAGGED, heads=2, head_dim=64, mask=window, dtype="float16"),
    }
    policies = {True: Shift(ring=64), False: Descending()}
    plans = {name: build_plan(p, policies[p.mask == full]) for name, p in problems.items()}
    for policy in ("fa3", "spt", "symmetric_shift"):
        square = Problem.dense(heads=2, seqlen=1024, head_dim=128, mask=causal)
        plans[f"d128-causal-{policy}"] = build_plan(square, policy_by_name(policy))
    return plans


def golden_inputs(plan: Plan) -> list[Tensor]:
    """dout, q, k, v, out and lse on the CPU; packed where the lengths differ, dense otherwise."""
    p = plan.problem
    dense = len(p.grids) == 1
    (seqlen_q, seqlen_k), batch = p.sequences[0], len(p.sequences)
    rows = [(batch, seqlen_q), (batch, seqlen_k)] if dense else [(sum(n),) for n in zip(*p.sequences)]
    q, k = (*rows[0], p.heads, p.head_dim), (*rows[1], p.kv_heads, p.head_dim)
    dtype = getattr(torch, p.dtype)
    tensors = [_noise(size, seed).to(dtype) for seed, size in enumerate((q, q, k, k, q))]
    lse = (batch, p.heads, seqlen_q) if dense else (p.heads, *rows[0])
    return [*tensors, 6.0 + _noise(lse, 5)]


def _noise(size: tuple[int, ...], seed: int) -> Tensor:
    """Values in [-1.5, 1.5) in steps of 2**-10 * 3, from a linear congruence."""
    index = torch.arange(torch.Size(size).numel(), dtype=torch.int64) + 7919 * seed
    hashed = (index * 2654435761 + 12345) % 2**32
    hashed = (hashed ^ (hashed >> 15)) * 2246822519 % 2**32
    return ((hashed >> 22).float() * 3 / 2**10 - 1.5).view(size)
