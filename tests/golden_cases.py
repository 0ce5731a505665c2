"""Fixed problems and inputs whose results' SHA-256 are checked in: golden-sm_90a.json.

The inputs come from integer arithmetic, so that they are the same bytes with every version of everything.
They are no attention that ever ran (out and lse are invented): the backward is a function of its inputs.

Changing the file: a hash may change only together with its fingerprint, and with an entry "changes bits" in
CHANGELOG.md. Where numerics do not show in fingerprints by themselves, ``NUMERICS_VERSION`` or of the forward
``FORWARD_VERSION`` (schedule/constants.py) changes them. On a Hopper GPU,
``DASH_ATTN_WRITE_GOLDEN=tests/golden-sm_90a.json pytest tests/gpu/test_gpu_golden.py`` writes what is
missing: cases without hashes, and cases whose fingerprint is another one. It leaves all others as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from dash_attn.backends.shapes import tensor_shapes
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import (
    Descending,
    ForwardNumerics,
    Plan,
    Shift,
    build_plan,
    choose_policy,
    policy_by_name,
)

GOLDEN = Path(__file__).parent / "golden-sm_90a.json"

_RAGGED = [1, 700, 0, 64, 129, 1000]


@cache
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
    strides = Shift(ring=16, min_stride=2, max_stride=4)
    plans |= {name: build_plan(p, strides) for name, p in ring_problems().items()}
    return plans | {name: build_plan(p, *choose_policy(p)) for name, p in auto_problems().items()}


def ring_problems(times: int = 1) -> dict[str, Problem]:
    """Problems by name with several rings of 16; their members may start up to four q tiles apart.

    ``times``: as in :func:`auto_problems`.
    """
    full = Mask.full()
    problems = {
        "d64-full-stride3": Problem.dense(seqlen=6100, head_dim=64, mask=full),
        "d64-full-stride4": Problem.dense(seqlen=8192, head_dim=64, mask=full, dtype="float16"),
        "d128-full-stride3": Problem.dense(seqlen=3050, mask=full, dtype="float16"),
        "d128-full-stride4": Problem.dense(seqlen=4050, mask=full),
        "d128-full-varlen": Problem.varlen([2048, 1, 3050, 300], heads=1, mask=full),
        "d128-full-mqa-long": Problem.dense(heads=8, kv_heads=1, seqlen_q=4050, seqlen_k=2100, mask=full),
        "d128-full-rings-apart": Problem.dense(seqlen=5000, mask=full),
        "d64-full-rings-apart": Problem.dense(
            seqlen_q=9000, seqlen_k=17_000, head_dim=64, mask=full, dtype="float16"
        ),
    }
    return _with_heads(problems, times)


def auto_problems(times: int = 1) -> dict[str, Problem]:
    """Problems by name that show what ``policy="auto"`` runs: ``cpu/test_golden.py`` says what of it.

    They are as small as that allows: full rings of 16, rings that start apart, long sequences and squares
    under a causal mask, kv heads whose q heads are dealt to several head groups or to one, windows under
    which an item takes its q heads one after the other, and forwards of several segments, with one worker
    for all of them and with a fold.

    Args:
        times: so many times the heads, for tests whose workers should get in each other's way.
    """
    full, causal = Mask.full(), Mask.causal()
    problems = {
        "auto-d64-full-stride2": Problem.dense(batch=2, seqlen=4000, head_dim=64, mask=full),
        "auto-d128-full-stride2": Problem.dense(seqlen_q=2048, seqlen_k=4000, mask=full),
        "auto-d128-full-few-queries": Problem.dense(heads=2, seqlen_q=300, seqlen_k=2000, mask=full),
        "auto-d128-full-rings-apart": Problem.dense(seqlen=4200, mask=full),
        "auto-d64-full-rings-apart": Problem.dense(seqlen=5000, head_dim=64, mask=full, dtype="float16"),
        "auto-d128-causal-2100": Problem.dense(seqlen=2100, mask=causal),
        "auto-d128-causal-6144": Problem.dense(seqlen=6144, mask=causal),
        "auto-d128-causal-more-keys": Problem.dense(seqlen_q=700, seqlen_k=6300, mask=causal),
        "auto-d128-causal-varlen": Problem.varlen([700, 6200, 64], heads=1, mask=causal),
        "auto-d64-full-gqa": Problem.dense(heads=8, kv_heads=2, seqlen=2100, head_dim=64, mask=full),
        "auto-d128-full-mqa": Problem.dense(heads=8, kv_heads=1, seqlen_q=1000, seqlen_k=2000, mask=full),
        "auto-d64-causal-mqa": Problem.dense(heads=8, kv_heads=1, seqlen=1500, head_dim=64, mask=causal),
        "auto-d128-causal-gqa": Problem.dense(heads=16, kv_heads=2, seqlen=700, mask=causal),
        "auto-d128-causal-gqa-whole": Problem.dense(heads=4, kv_heads=1, seqlen=900, mask=causal),
        "auto-d128-causal-gqa-long": Problem.dense(heads=4, kv_heads=1, seqlen=16_640, mask=causal),
        "auto-d128-causal-square": Problem.dense(heads=3, seqlen=2048, mask=causal),
        "auto-d128-causal-square-16k": Problem.dense(seqlen=16_384, mask=causal, dtype="float16"),
        "auto-d128-causal-varlen-square": Problem.varlen([2000, 2500, 300], heads=2, mask=causal),
        "auto-d128-causal-gqa-square": Problem.dense(heads=4, kv_heads=2, seqlen=8192, mask=causal),
        "auto-d64-causal-gqa-square": Problem.dense(
            heads=6, kv_heads=2, seqlen=4096, head_dim=64, mask=causal
        ),
        "auto-d128-window-gqa": Problem.dense(heads=8, kv_heads=2, seqlen=1500, mask=Mask.window(300, 0)),
        "auto-d64-window-gqa": Problem.dense(
            heads=16, kv_heads=2, seqlen=2000, head_dim=64, mask=Mask.window(300, 0), dtype="float16"
        ),
        "auto-d128-varlen-window-gqa": Problem.varlen(
            [1900, 700, 64], heads=10, kv_heads=2, mask=Mask.window(400, 50)
        ),
        "auto-d64-causal-few-queries": Problem.dense(
            heads=2, seqlen_q=3, seqlen_k=17_000, head_dim=64, mask=causal
        ),
    }
    return _with_heads(problems, times)


def _with_heads(problems: dict[str, Problem], times: int) -> dict[str, Problem]:
    return {
        name: replace(p, heads=times * p.heads, kv_heads=times * p.kv_heads) for name, p in problems.items()
    }


HASHED = {"fingerprint": ("dq", "dk", "dv"), "forward": ("out", "lse")}
"""Of each direction: the entry of its fingerprint, and the results whose hashes an entry has."""


def identities(plan: Plan) -> dict[str, str]:
    """The fingerprints of a case: what its hashes belong to."""
    return {"fingerprint": plan.fingerprint, "forward": ForwardNumerics.of(plan.problem).fingerprint}


def completed(
    known: dict[str, dict[str, str]], hashes: Callable[[Plan], dict[str, str]]
) -> dict[str, dict[str, str]]:
    """What the file should hold: entries of today's numerics as they are, and hashes of all other cases.

    A hash of a known fingerprint is never replaced: it is what the kernels promised.

    Args:
        known: what it holds.
        hashes: the entry of a plan: its fingerprints, and SHA-256 of its results.
    """
    found = {}
    for name, plan in golden_plans().items():
        entry, fresh = known.get(name, {}), None
        found[name] = {}
        for direction, names in HASHED.items():
            source = entry
            if entry.get(direction) != identities(plan)[direction] or any(x not in entry for x in names):
                source = fresh = fresh or hashes(plan)
            found[name] |= {x: source[x] for x in (direction, *names)}
    return found


def golden_inputs(plan: Plan) -> list[Tensor]:
    """dout, q, k, v, out and lse on the CPU; packed where the lengths differ, dense otherwise."""
    p = plan.problem
    shapes = tensor_shapes(p)
    *sizes, lse = shapes.get(4, shapes[3]).of_tensors
    dtype = getattr(torch, p.dtype)
    tensors = [_noise(size, seed).to(dtype) for seed, size in enumerate(sizes)]
    return [*tensors, 6.0 + _noise(lse, 5)]


def _noise(size: tuple[int, ...], seed: int) -> Tensor:
    """Values in [-1.5, 1.5) in steps of 2**-10 * 3, from a linear congruence."""
    index = torch.arange(torch.Size(size).numel(), dtype=torch.int64).add_(7919 * seed)
    hashed = index.mul_(2654435761).add_(12345).bitwise_and_(2**32 - 1)
    hashed = (hashed >> 15).bitwise_xor_(hashed).mul_(2246822519).bitwise_and_(2**32 - 1)
    return ((hashed >> 22).float() * 3 / 2**10 - 1.5).view(size)
