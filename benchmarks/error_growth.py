"""How the error grows with length: gradients of long sequences against float64, on sampled rows.

One sequence and one head of normal inputs at each length. Softmax and delta of every row are computed in
float64, in slices; dQ for sampled queries, dK and dV for sampled keys. Errors are norms over the norms of
what is exact.

    python benchmarks/error_growth.py --output benchmarks/results/h200-error-growth.json
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from card import driver
from record import versions, write
from torch import Tensor

import dash_attn
from dash_attn.backends.base import Tensors, backend_for
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import Plan, build_plan, choose_policy
from dash_attn.scores import Scores
from dash_attn.tools.bench import require_hopper

LENGTHS = tuple(2**n for n in range(10, 18))
SAMPLES = 256
SLICE = 2**26
"""Elements of a slice of scores."""


class Inputs(NamedTuple):
    """One head: (seqlen, head_dim)."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


class Exact(NamedTuple):
    """float64; out and dq of the sampled queries, dk and dv of the sampled keys."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def exact_rows(x: Inputs, causal: bool, scale: float, rows: Tensor) -> Exact:
    """Output and gradients at some rows, in float64; ``rows`` are taken as queries and as keys."""
    keys, values = x.k.double(), x.v.double()
    out = torch.empty(len(rows), x.q.shape[1], dtype=torch.float64, device=x.q.device)
    dq = torch.empty_like(out)
    dk, dv = torch.zeros_like(out), torch.zeros_like(out)
    place = torch.full((len(x.q),), -1, device=x.q.device)
    place[rows] = torch.arange(len(rows), device=x.q.device)
    for at in _slices(len(x.q), len(x.k)):
        q, dout = x.q[at].double(), x.dout[at].double()
        query = torch.arange(at.start, at.start + len(q), device=q.device)[:, None]
        scores = (q @ keys.T).mul_(scale)
        if causal:
            scores.masked_fill_(torch.arange(len(keys), device=q.device) > query, -torch.inf)
        p = torch.softmax(scores, -1)
        o = p @ values
        delta = (dout * o).sum(-1, keepdim=True)
        mine = place[at] >= 0
        chosen = place[at][mine]
        out[chosen] = o[mine]
        ds = (dout[mine] @ values.T - delta[mine]) * p[mine] * scale
        dq[chosen] = ds @ keys
        columns = p[:, rows]
        dv += columns.T @ dout
        dk += ((dout @ values[rows].T - delta) * columns * scale).T @ q
    return Exact(out, dq, dk, dv)


def _slices(seqlen_q: int, seqlen_k: int) -> Iterator[slice]:
    step = max(SLICE // seqlen_k, 1)
    for start in range(0, seqlen_q, step):
        yield slice(start, min(start + step, seqlen_q))


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def point(seqlen: int, head_dim: int, causal: bool, dtype: str) -> dict[str, Any]:
    """Errors of out, dq, dk, dv at one length, and of dq summed in no order."""
    mask, scale = (Mask.causal() if causal else Mask.full()), head_dim**-0.5
    problem = Problem.dense(seqlen=seqlen, head_dim=head_dim, mask=mask, dtype=dtype)
    plan: Plan = build_plan(problem, *choose_policy(problem))
    generator = torch.Generator("cuda").manual_seed(seqlen)
    size = (seqlen, head_dim)
    drawn = (torch.randn(size, generator=generator, device="cuda") for _ in Inputs._fields)
    x = Inputs(*(t.to(getattr(torch, dtype)) for t in drawn))
    dout, q, k, v = (t[None, :, None] for t in x)
    prepared = backend_for(q.device).prepare(problem, q.device, False)
    out, lse = prepared.forward(q, k, v, Scores(scale))
    tensors = Tensors(dout, q, k, v, out, lse)
    found = prepared.backward(plan, tensors, Scores(scale))
    loose = prepared.backward(plan, tensors, Scores(scale), ordered=False)
    rows = torch.randperm(seqlen, generator=generator, device="cuda")[:SAMPLES]
    exact = exact_rows(x, causal, scale, rows)
    row: dict[str, Any] = {"seqlen": seqlen, "head_dim": head_dim, "mask": mask.name, "dtype": dtype}
    row |= {"policy": plan.policy, "fingerprint": plan.fingerprint}
    row |= {name: relative(t[0, rows, 0], e) for name, t, e in zip(Exact._fields, (out, *found), exact)}
    row["dq_unordered"] = relative(loose[0][0, rows, 0], exact.dq)
    if not all(map(math.isfinite, (row[name] for name in Exact._fields))):
        raise RuntimeError(f"an error is not finite: {row}")
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the rows as JSON")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help=f"default {LENGTHS[-1]:,}")
    args = parser.parse_args(argv)
    require_hopper()
    rows = []
    for head_dim in (64, 128):
        for causal in (False, True):
            for seqlen in (n for n in LENGTHS if n <= args.longest):
                rows.append(point(seqlen, head_dim, causal, "bfloat16"))
                print(
                    " ".join(f"{x:.3e}" if isinstance(x, float) else str(x) for x in rows[-1].values()),
                    flush=True,
                )
    if args.output:
        header = {
            "gpu": torch.cuda.get_device_name(),
            "driver": driver(),
            "dash_attn": dash_attn.__version__,
            "versions": versions("torch", "nvidia-cutlass-dsl"),
            "command": shlex.join(["python", *sys.argv]),
            "samples": SAMPLES,
            "heads": 1,
        }
        write(args.output, header, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
