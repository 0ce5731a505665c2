"""Time blocks of the DASH paper's models, forward and backward, with our attention and with others.

The blocks are in block_models.py, the attentions in block_attention.py; all else in a block is the same.
Timing is sustained, as in forward.py. Each contender's time by part comes from a profile of one more call.
Its peak memory is what a call takes beyond weights and inputs. A contender whose results are others than ours
is left out, with a line.

    python benchmarks/blocks.py --output benchmarks/results/h200-blocks.json
    python benchmarks/blocks.py --quick --cases LLaMA SAM
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from block_attention import Kind, attentions
from block_models import CENTRAL, Attend, Case, block_of, cases
from block_parts import profiled
from card import facts_of_run
from forward import once, sustained
from forward_calls import Call
from record import Row, write
from torch import Tensor

from dash_attn.testing import same_bytes
from dash_attn.tools.bench import require_hopper

ROUNDS, QUICK_ROUNDS = 7, 3
BLOCK_S, LEAST_CALLS = 0.05, 2
OURS: Kind = ("dash_attn", True)
TOLERANCE = 0.02
"""Of another attention's results, as a share of ours, in 16 bits."""


def calls(case: Case, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> dict[Kind, Call]:
    """Forward and backward of a block by kind of attention; each was called, and gives what ours gives."""
    torch.manual_seed(0)
    with device:
        block = block_of(case).to(dtype)
        x = torch.randn(case.batch, case.tokens, case.model.hidden, dtype=dtype).requires_grad_()
        dout = torch.randn_like(x)
    leaves = [x, *block.parameters()]

    def call_of(attend: Attend) -> Call:
        def call() -> list[Tensor]:
            out = block(x, attend)
            return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

        return call

    made = {kind: call_of(attend) for kind, attend in attentions(case, device).items()}
    expected = made[OURS]()
    return {kind: call for kind, call in made.items() if kind == OURS or agrees(kind, call, expected)}


def agrees(kind: Kind, call: Call, expected: Sequence[Tensor]) -> bool:
    """Whether a contender runs and gives about what ours gives; if not, a line says why."""
    try:
        found = call()
        error = max(_distance(a, b) for a, b in zip(found[:2], expected))  # out, and the gradient of x
        why = f"results differ by {error:.3f}" if not error <= TOLERANCE else ""
    except Exception as problem:  # a library that cannot do it
        why = f"{type(problem).__name__}: {(str(problem).strip().splitlines() or [''])[0]}"
    if why:
        print(f"{_named(kind)} is left out: {why}"[:300], file=sys.stderr, flush=True)
    return not why


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def rows(case: Case, rounds: int) -> list[Row]:
    """Of one case."""
    made = calls(case, torch.device("cuda"))
    counts = {kind: max(LEAST_CALLS, int(BLOCK_S / once(call))) for kind, call in made.items()}
    times = sustained(made, counts, rounds)
    found = []
    for kind, all_ms in times.items():
        ms = statistics.median(all_ms)
        row = {"case": case.title, "model": case.name, "batch": case.batch, "seqlen": case.tokens,
               "central": case.seqlen in CENTRAL, "impl": kind[0], "deterministic": kind[1],
               "ms": round(ms, 5), "spread": round((max(all_ms) - min(all_ms)) / ms, 4)}  # fmt: skip
        row |= {"repeatable": repeats(made[kind]), "peak_mib": peak_mib(made[kind])}
        found.append(row | parts(kind, made[kind]))
    return found


def parts(kind: Kind, call: Call) -> Row:
    """Time by part. Where a profile does not say, a line does."""
    try:
        return {"parts_ms": profiled(call)}
    except ValueError as error:
        print(f"{_named(kind)}: {error}", file=sys.stderr, flush=True)
        return {}


def repeats(call: Call) -> bool:
    """Two calls give the same bytes, out and all gradients."""
    return all(same_bytes(a, b) for a, b in zip(call(), call()))


def peak_mib(call: Call) -> int:
    """What a call takes at most, without what is there before and behind it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20)


def line(found: Sequence[Row]) -> str:
    """One case: milliseconds of all contenders, and how ours are spent."""
    (ours,) = (row for row in found if (row["impl"], row["deterministic"]) == OURS)
    others = [row for row in found if row is not ours]
    said = [f"{_named((row['impl'], row['deterministic']))} {row['ms'] / ours['ms']:.3f}" for row in others]
    parts = ", ".join(f"{part} {ms:.2f}" for part, ms in ours.get("parts_ms", {}).items())
    return f"{ours['case']}: {ours['ms']:.3f} ms ({parts}); others / ours: {', '.join(said)}"


def _named(kind: Kind) -> str:
    return f"{kind[0]} {'det' if kind[1] else 'nondet'}"


def chosen(quick: bool, only: Sequence[str], share: str) -> list[Case]:
    """The cases whose title has one of these words, central ones only if quick, and a share of them."""
    first, of = map(int, share.split("/"))
    found = [case for case in cases() if not only or any(word in case.title for word in only)]
    return [case for case in found if not quick or case.seqlen in CENTRAL][first::of]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write header and rows as JSON")
    parser.add_argument(
        "--cases", nargs="+", default=(), metavar="WORD", help="cases whose title has one of these"
    )
    parser.add_argument("--share", default="0/1", metavar="I/N", help="every Nth case only, from I on")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}, and {QUICK_ROUNDS} with --quick")
    parser.add_argument("--quick", action="store_true", help="one length per model, few rounds")
    args = parser.parse_args(argv)
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds must be >= 1, got {args.rounds}")
    if not (wanted := chosen(args.quick, args.cases, args.share)):
        parser.error(f"no case has one of {list(args.cases)}: {', '.join(case.title for case in cases())}")
    require_hopper()
    packages = ("torch", "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-frontend")
    facts: dict[str, Any] = facts_of_run(rounds, *packages) | {"timing": "sustained"}
    found: list[Row] = []
    for case in wanted:
        new = rows(case, rounds)
        found += new
        print(line(new), flush=True)
        torch.cuda.empty_cache()
        if args.output:  # after every case: a run that is cut short leaves what it has
            write(args.output, facts, found)


if __name__ == "__main__":
    main()
