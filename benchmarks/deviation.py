"""Table 1 of the DASH paper: how far repeated backward passes are from the first one.

For each mask and head dim: ``passes`` backwards of the same inputs after a first one, and the largest
absolute difference of any gradient element, averaged over the passes. 0 means the same bytes.

    python benchmarks/deviation.py --output benchmarks/results/h200-deviation.json
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from card import driver
from record import versions, write

import dash_attn
from dash_attn.peers.registry import PEERS, Backward
from dash_attn.tools.bench import require_hopper
from dash_attn.tools.bench.run import call_of, prepare
from dash_attn.tools.shapes import Shape

TOKENS, HIDDEN, SEQLEN = 16_384, 2_048, 4_096


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the rows as JSON")
    parser.add_argument("--passes", type=int, default=10, help="passes compared with the first (default 10)")
    args = parser.parse_args(argv)
    require_hopper()
    rows = []
    for head_dim in (64, 128):
        for causal in (False, True):
            rows += point(head_dim, causal, args.passes)
    if args.output:
        header = {
            "gpu": torch.cuda.get_device_name(),
            "driver": driver(),
            "dash_attn": dash_attn.__version__,
            "versions": versions("torch", "nvidia-cutlass-dsl", "flash-attn-4"),
            "command": shlex.join(["python", *sys.argv]),
            "tokens": TOKENS,
            "hidden": HIDDEN,
            "passes": args.passes,
        }
        write(args.output, header, rows)
    return 0


def point(head_dim: int, causal: bool, passes: int) -> list[dict[str, Any]]:
    """Rows of one mask and head dim."""
    shape = Shape(
        batch=TOKENS // SEQLEN, seqlen=SEQLEN, heads=HIDDEN // head_dim, head_dim=head_dim, causal=causal
    )
    plan, inputs = prepare(shape)
    modes = [
        ("dash_attn", deterministic, call_of(plan, inputs, deterministic)) for deterministic in (True, False)
    ]
    modes += [(p.impl, p.deterministic, partial(p.make, inputs)) for p in PEERS if not p.why_not(inputs)]
    rows = []
    for impl, deterministic, make in modes:
        row = {"impl": impl, "deterministic": deterministic, "mask": "causal" if causal else "full"}
        row |= {"head_dim": head_dim, "seqlen": SEQLEN}
        if impl == "dash_attn":
            row |= {"policy": plan.policy, "fingerprint": plan.fingerprint}
        try:
            row |= deviations(make(), passes)
        except Exception as error:  # a peer that fails is a row of the table
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        rows.append(row)
        print(row, flush=True)
    return rows


def deviations(call: Backward, passes: int) -> dict[str, float]:
    """Mean over the passes of the largest difference, of all gradients and of each; their largest element."""
    first = [x.float() for x in call()]
    found = [[float((x.float() - y).abs().max()) for x, y in zip(call(), first)] for _ in range(passes)]
    means = dict(zip(("dq", "dk", "dv"), map(statistics.fmean, zip(*found))))
    return {
        "max": statistics.fmean(map(max, found)),
        **means,
        "largest": max(float(x.abs().max()) for x in first),
    }


if __name__ == "__main__":
    sys.exit(main())
