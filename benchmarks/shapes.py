"""Time forward and backward of shapes outside the DASH paper's grid, beside FlashAttention-4.

Cases are in shape_cases.py: many or few queries behind many keys, few heads, windows, packed batches,
patches, long and tiny problems, fp16. Timing is sustained, as in forward.py; then follows the energy of the
backwards. Where the host could decide, because a call takes less than SHORT_S, all contenders of the case are
captured in CUDA graphs.

    python benchmarks/shapes.py --output benchmarks/results/h200-shapes.json
    python benchmarks/shapes.py --only groups window
    python benchmarks/shapes.py --grid --output benchmarks/results/h200-grid.json
    python benchmarks/shapes.py --head-dims --output benchmarks/results/h200-head-dims.json
    python benchmarks/shapes.py --segments --alone --output benchmarks/results/h200-segments.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from card import facts_of_run
from energy import SECONDS, Meter
from forward import captured, once, timed
from forward_calls import OURS, Call, inputs, works
from forward_points import Point
from record import Row, write
from shape_cases import GRID, HEAD_DIMS, SEGMENTS, cases
from shape_values import RATIOS, Kind, ratio, times
from summary import geometric_mean

from dash_attn.backends.base import Tensors, backend_for
from dash_attn.ops.calls import shaped_call
from dash_attn.peers import fa4
from dash_attn.peers.registry import PEERS, Inputs
from dash_attn.schedule import Plan, build_plan, choose_policy
from dash_attn.scores import Scores
from dash_attn.spec import AttentionSpec
from dash_attn.tools.bench import require_hopper
from dash_attn.tools.bench.run import call_of

ROUNDS = 5
SHORT_S = 0.0005
"""Seconds of a call, host time included, below which contenders are captured."""
ORDERED: Kind = ("backward", OURS, True)
WEIGHED: tuple[Kind, ...] = (ORDERED, ("backward", "fa4", True), ("backward", "fa4", False))
"""Whose energy is measured."""


def contenders(x: Inputs, plan: Plan, peers: bool, grid: bool) -> dict[Kind, Call]:
    """What is timed of a case; of the grid, with cuDNN. A peer that cannot do it is left out, with a line."""
    ours = backend_for(x.q.device).prepare(x.problem, x.q.device, x.packed)
    whole = call_of(plan, x, ordered=True)()
    calls: dict[Kind, Call] = {
        ("forward", OURS, True): lambda: ours.forward(x.q, x.k, x.v, Scores(x.scale)),
        ORDERED: whole,
        ("backward", OURS, False): call_of(plan, x, ordered=False)(),
    }
    if cut := cut_backward(x):
        calls |= {ORDERED: cut, ("backward", f"{OURS} whole", True): whole}
    why = fa4.why_not() if peers else "--alone"
    if not why:
        mask, lengths = x.problem.mask, x.lengths
        calls["forward", "fa4", True] = lambda: fa4.forward(x.q, x.k, x.v, x.scale, mask, lengths)
        calls["backward", "fa4", True] = fa4.backward(x, deterministic=True)
        calls["backward", "fa4", False] = fa4.backward(x, deterministic=False)
        calls |= strict_cudnn(x) if grid else {}
    else:
        print(f"fa4 is left out: {why}", file=sys.stderr)
    return {kind: call for kind, call in calls.items() if works(str(kind), call, must=kind[1] == OURS)}


def strict_cudnn(x: Inputs) -> dict[Kind, Call]:
    """cuDNN's deterministic backward, where it covers the case."""
    found = (peer for peer in PEERS if peer.impl == "cudnn" and peer.deterministic and not peer.why_not(x))
    return {("backward", peer.impl, True): peer.make(x) for peer in found}


def cut_backward(x: Inputs) -> Call | None:
    """The backward as the public functions run it, where they cut sequences into segments."""
    p = x.problem
    sizes = p.heads, p.kv_heads, p.head_dim, p.head_dim_v
    spec = AttentionSpec(x.scale, *p.mask.sides)
    call = shaped_call(p.sequences, sizes, x.q.dtype, x.q.device, x.packed, spec)
    tensors = Tensors(x.dout, x.q, x.k, x.v, x.out, x.lse)
    return (lambda: call.backward(tensors)) if call.parts else None


def rows(name: str, point: Point, rounds: int, peers: bool, meter: Meter | None, seconds: float) -> list[Row]:
    """Of one case; with a meter, the energy of calls back to back for so many seconds, too."""
    torch.manual_seed(0)
    plan = build_plan(point.problem, choose_policy(point.problem))
    calls = contenders(inputs(point, torch.device("cuda")), plan, peers, point.set == "grid")
    short = any(min(once(call), once(call)) < SHORT_S for call in calls.values())
    several = {kind: captured(call) if short else (call, 1) for kind, call in calls.items()}
    calls = {kind: call for kind, (call, _) in several.items()}
    found = []
    for kind, took in timed(calls, rounds, with_single=False)["sustained"].items():
        number = several[kind][1]
        all_ms = [ms / number for ms in took]
        ms = statistics.median(all_ms)
        row = {"set": point.set, "case": name, "pass": kind[0], "impl": kind[1], "deterministic": kind[2],
               "ms": round(ms, 5), "spread": round((max(all_ms) - min(all_ms)) / ms, 4)}  # fmt: skip
        if number > 1:
            row["graph"] = True
        if meter and kind in WEIGHED:
            row["joules"] = round(meter.joules(calls[kind], seconds) / number, 5)
        found.append(row | ({"fingerprint": plan.fingerprint} if kind == ORDERED else {}))
    return found


def report(found: Sequence[Row]) -> str:
    """Geometric mean and least of every ratio."""
    by_case = times(found).values()
    lines = [f"{len(by_case)} cases"]
    for name in RATIOS:
        if values := [x for ms in by_case if (x := ratio(ms, name))]:
            lines.append(f"{name}: geometric mean {geometric_mean(values):.3f}, least {min(values):.3f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write header and rows as JSON")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name has one of these")
    parser.add_argument("--head-dims", action="store_true", help="other head dims than 64 and 128 instead")
    parser.add_argument("--alone", action="store_true", help="without FlashAttention-4")
    parser.add_argument("--segments", action="store_true", help="sequences that are cut instead")
    parser.add_argument("--grid", action="store_true", help="the DASH paper's 24 points instead")
    parser.add_argument(
        "--energy-s", type=float, default=SECONDS, metavar="S",
        help=f"seconds of calls for the energy of a backward, default {SECONDS}; 0: no energy",
    )  # fmt: skip
    parser.add_argument("--share", default="0/1", metavar="I/N", help="every Nth case only, from I on")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds must be >= 1, got {args.rounds}")
    require_hopper()
    facts = facts_of_run(args.rounds, "torch", "flash-attn-4", "nvidia-cutlass-dsl") | {"timing": "sustained"}
    found: list[Row] = []
    first, of = map(int, args.share.split("/"))
    meter = Meter.of_current_gpu() if args.energy_s else None
    dense = SEGMENTS if args.segments else HEAD_DIMS if args.head_dims else GRID if args.grid else ()
    all_cases = cases(dense, ()) if dense else cases()
    chosen = [(name, point) for name, point in all_cases if any(only in name for only in args.only)]
    for name, point in chosen[first::of]:
        new = rows(name, point, args.rounds, not args.alone, meter, args.energy_s)
        found += new
        (ms,) = times(new).values()
        said = "  ".join(f"{what} {x:.2f}" for what in RATIOS if (x := ratio(ms, what)))
        print(f"{name:58} {ms[ORDERED]:8.3f} ms  {said}", flush=True)
        torch.cuda.empty_cache()
        if args.output:  # after every case: a run that is cut short leaves what it has
            write(args.output, facts, found)
    print(report(found))


if __name__ == "__main__":
    main()
