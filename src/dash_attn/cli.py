"""The command line: ``dash-attn`` or ``python -m dash_attn``.

Every command has ``--help`` with an example and ``--json`` for one JSON object on standard output.
Errors go to standard error and end with exit code 2; ``demo`` ends with 1 when runs differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import __version__
from .errors import DashError
from .model import H200, H200_WORKERS, Costs, closed_form, lower_bounds, simulate
from .problem import DTYPES, Mask, Problem
from .schedule import PLACEMENTS, POLICIES, Plan, build_plan, choose_policy, policy_by_name

__all__ = ["main"]

GRID_TILE = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        return code
    except BrokenPipeError:
        # Whoever read the output has gone; what was printed before is all they wanted.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (DashError, ImportError, OSError) as error:
        print(f"dash-attn {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dash-attn", description="Bitwise-reproducible attention: plans, their proofs and their speed."
    )
    parser.add_argument("--version", action="version", version=f"dash-attn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = _add(commands, "demo", _demo, "train a small GPT twice and compare the bytes of its weights")
    _example(demo, "dash-attn demo --steps 60 --output demo-out")
    demo.add_argument("--steps", type=int, help="optimizer steps of each run")
    demo.add_argument("--seqlen", type=int, help="tokens of a sequence")
    demo.add_argument("--layers", type=int, help="transformer blocks")
    demo.add_argument("--seed", type=int, help="seed of weights and data (default 0)")
    demo.add_argument("--dtype", choices=("bfloat16", "float32"), help="of attention (default bfloat16)")
    demo.add_argument("--output", type=Path, default=Path("demo-out"), help="folder for the pictures")
    demo.add_argument("--quiet", action="store_true", help="no progress bar")

    plan = _add(commands, "plan", _plan, "build a plan, prove it safe and describe it")
    _example(plan, "dash-attn plan --mask causal --seqlen 4096 --heads 16 --policy symmetric_shift --show")
    _problem_flags(plan)
    plan.add_argument("--show", action="store_true", help="print the grid of one head: step and ticket")
    plan.add_argument("--save", type=Path, metavar="FILE", help="draw the plan as .svg or .png")

    sim = _add(commands, "simulate", _simulate, "predict when every worker does what, and why it waits")
    _example(
        sim, "dash-attn simulate --mask causal --policy descending --tiles 8 --heads 4 --compute 5 --reduce 2"
    )
    _problem_flags(sim)
    _cost_flags(sim)
    sim.add_argument("--show", action="store_true", help="print the timeline as text")
    sim.add_argument("--save", type=Path, metavar="FILE", help="draw the timeline as .svg or .png")

    bounds = _add(commands, "bounds", _bounds, "lower bounds, and every policy's makespan beside them")
    _example(bounds, "dash-attn bounds --mask full --tiles 16 --heads 4 --compute 5 --reduce 2")
    _problem_flags(bounds, policy=False)
    _cost_flags(bounds)

    figures = _add(commands, "figures", _figures, "redraw figures 2 to 7 of the DASH paper from real plans")
    _example(figures, "dash-attn figures docs/figures")
    figures.add_argument("folder", type=Path, nargs="?", default=Path("figures"), help="where to put them")
    figures.add_argument("--format", choices=("svg", "png"), default="svg")

    kernels = _add(
        commands, "kernels", _kernels, "compile every GPU kernel and say what it uses; needs no GPU"
    )
    _example(kernels, "dash-attn kernels --only backward-d128-bf16")
    kernels.add_argument("--only", metavar="VARIANT", help="one variant by name")

    doctor = _add(commands, "doctor", _doctor, "what is installed here, what is supported, and why not")
    _example(doctor, "dash-attn doctor")
    return parser


def _add(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _example(parser: argparse.ArgumentParser, line: str) -> None:
    parser.epilog = f"example:\n  {line}"


def _problem_flags(parser: argparse.ArgumentParser, *, policy: bool = True) -> None:
    group = parser.add_argument_group("problem")
    group.add_argument("--mask", choices=("full", "causal"), default="full")
    group.add_argument(
        "--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="sliding window, -1: unbounded"
    )
    group.add_argument("--tiles", type=int, metavar="N", help="square grid of N kv tiles by N q tiles")
    group.add_argument("--seqlen", type=int, help="sequence length, where there is no --tiles")
    group.add_argument("--seqlen-k", type=int, help="key length, if another than --seqlen")
    group.add_argument("--batch", type=int, default=1)
    group.add_argument("--heads", type=int, default=1)
    group.add_argument("--kv-heads", type=int, help="default: as many as heads")
    group.add_argument("--head-dim", type=int, default=128)
    group.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    if policy:
        group = parser.add_argument_group("plan")
        group.add_argument("--policy", choices=("auto", *POLICIES), default="auto")
        group.add_argument("--placement", choices=PLACEMENTS, help="order in which items are claimed")
        group.add_argument("--ring", type=int, help="shift: kv tiles of a ring")
        group.add_argument("--stride", type=int, help="shift: q tiles between the starts of two members")


def _cost_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine (cycles; default: the paper's model with c = r = 1)")
    group.add_argument("--preset", choices=("h200",), help="measured costs and workers of an H200")
    group.add_argument("--workers", type=int, help="resident workers (default: as many as kv tiles)")
    group.add_argument("--compute", type=float, help="c, the matrix products of a task")
    group.add_argument("--reduce", type=float, help="r, adding its dQ tile")
    group.add_argument("--latency", type=float, help="hand-over to the next contribution")
    group.add_argument("--dq-buffers", type=int, help="dQ tiles in flight; 0: compute and reduce in series")
    group.add_argument("--launch", type=float, help="from claiming an item to its first compute")


def _problem(args: argparse.Namespace) -> Problem:
    mask = Mask.causal() if args.mask == "causal" else Mask.full()
    if args.window is not None:
        left, right = (None if side == -1 else side for side in args.window)
        mask = Mask.window(left, 0 if args.mask == "causal" else right)
    shape: dict[str, Any] = {
        "batch": args.batch, "heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim,
        "mask": mask, "dtype": args.dtype,
    }  # fmt: skip
    if (args.tiles is None) == (args.seqlen is None):
        raise DashError("give either --tiles or --seqlen")
    if args.tiles is not None:
        if args.tiles < 1:
            raise DashError(f"--tiles must be >= 1, got {args.tiles}")
        return Problem.dense(seqlen=args.tiles * GRID_TILE, tile_m=GRID_TILE, tile_n=GRID_TILE, **shape)
    seqlen_k = args.seqlen if args.seqlen_k is None else args.seqlen_k
    return Problem.dense(seqlen_q=args.seqlen, seqlen_k=seqlen_k, **shape)


def _built_plan(args: argparse.Namespace) -> Plan:
    problem = _problem(args)
    parameters = {k: v for k in ("ring", "stride") if (v := getattr(args, k)) is not None}
    if parameters and args.policy != "shift":
        raise DashError(f"--{' and --'.join(parameters)} belong to --policy shift, got {args.policy}")
    if args.policy == "auto":
        policy, placement = choose_policy(problem)
    else:
        policy, placement = policy_by_name(args.policy, **parameters), "policy"
    return build_plan(problem, policy, args.placement or placement)


def _machine(args: argparse.Namespace, problem: Problem) -> tuple[Costs, int]:
    base = H200 if args.preset else Costs(compute=1, reduce=1)
    given = {k: getattr(args, k) for k in asdict(base) if getattr(args, k) is not None}
    tiles = max(grid.kv_tiles for grid in problem.grids.values())
    workers = args.workers if args.workers is not None else H200_WORKERS if args.preset else max(tiles, 1)
    return Costs(**{**asdict(base), **given}), workers


def _describe(plan: Plan) -> dict[str, Any]:
    p = plan.problem
    return {
        "policy": plan.policy,
        "mask": p.mask.name,
        "tiles": max(grid.kv_tiles for grid in p.grids.values()),
        "batch": len(p.sequences),
        "heads": p.heads,
        "kv_heads": p.kv_heads,
        "head_dim": p.head_dim,
        "dtype": p.dtype,
        "tile_m": p.tile_m,
        "tile_n": p.tile_n,
        "items": len(plan.items),
        "tasks": p.tasks,
        "runs": sum(len(pattern.runs) for pattern in plan.patterns.values()),
        "bytes": plan.nbytes,
        "min_workers": plan.min_workers,
        "fingerprint": plan.fingerprint,
    }


def _emit(args: argparse.Namespace, facts: dict[str, Any]) -> None:
    if args.json:
        print(json.dumps(facts))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {_short(v)}" for k, v in value.items())
        print(f"{name:<{width}}  {_short(value)}")


def _short(value: object) -> str:
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _plan(args: argparse.Namespace) -> int:
    plan = _built_plan(args)
    _emit(args, _describe(plan))
    if args.show:
        from .model.render import text_plan

        print("\n" + text_plan(plan), file=sys.stderr if args.json else sys.stdout)
    if args.save:
        from .model.render import save_plan

        save_plan(plan, args.save)
    return 0


def _simulate(args: argparse.Namespace) -> int:
    plan = _built_plan(args)
    costs, workers = _machine(args, plan.problem)
    timeline = simulate(plan, costs, workers)
    facts = {
        "makespan": timeline.makespan,
        "lower_bound": max(lower_bounds(plan.problem, costs, workers).values()),
        "utilization": timeline.utilization,
        "stall": timeline.stall,
        "stalls": timeline.stalls,
        "workers": workers,
        "costs": asdict(costs),
    }
    _emit(args, facts | _describe(plan))
    if args.show:
        from .model.render import text_gantt

        print("\n" + text_gantt(timeline), file=sys.stderr if args.json else sys.stdout)
    if args.save:
        from .model.render import save_gantt

        save_gantt(timeline, args.save)
    return 0


def _bounds(args: argparse.Namespace) -> int:
    problem = _problem(args)
    costs, workers = _machine(args, problem)
    bounds = lower_bounds(problem, costs, workers)
    policies: dict[str, Any] = {}
    for name in POLICIES:
        policies[name] = _policy_makespan(problem, name, costs, workers)
    if args.json:
        print(
            json.dumps(
                {"lower_bounds": bounds, "workers": workers, "costs": asdict(costs), "policies": policies}
            )
        )
        return 0
    print(f"{problem.mask.name}, {problem.tasks} tasks, {workers} workers, {costs}")
    for reason, cycles in bounds.items():
        print(f"  bound by {reason:<10} {cycles:>14,.6g}")
    print(f"\n{'policy':<18}{'makespan':>14}{'of bound':>10}{'closed form':>14}")
    for name, row in policies.items():
        if "error" in row:
            print(f"{name:<18}  {row['error']}")
            continue
        paper = "-" if row["closed_form"] is None else f"{row['closed_form']:,.6g}"
        print(f"{name:<18}{row['makespan']:>14,.6g}{row['of_bound']:>10.3f}{paper:>14}")
    return 0


def _policy_makespan(problem: Problem, name: str, costs: Costs, workers: int) -> dict[str, Any]:
    try:
        plan = build_plan(problem, policy_by_name(name))
        makespan = simulate(plan, costs, workers).makespan
    except DashError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    grid = problem.grid(0)
    n, m = grid.kv_tiles, problem.heads * len(problem.sequences)
    square = len(problem.grids) == 1 and grid.q_tiles == n and problem.group == 1
    papers_model = costs == Costs(costs.compute, costs.reduce) and workers == n and square
    closed = closed_form(name, problem.mask.name, n, m, costs.compute, costs.reduce) if papers_model else None
    bound = max(lower_bounds(problem, costs, workers).values())
    return {"makespan": makespan, "of_bound": makespan / bound if bound else 1.0, "closed_form": closed}


def _figures(args: argparse.Namespace) -> int:
    from .model.figures import draw_figures

    paths = [str(path) for path in draw_figures(args.folder, (args.format,))]
    print(json.dumps({"figures": paths}) if args.json else "\n".join(paths))
    return 0


def _kernels(args: argparse.Namespace) -> int:
    from .kernels.compile import ARCH, resources, variants

    chosen = variants()
    if args.only is not None:
        if args.only not in chosen:
            raise DashError(f"unknown variant {args.only!r}; known: {', '.join(chosen)}")
        chosen = {args.only: chosen[args.only]}
    rows = []
    for name, config in chosen.items():
        for kernel in resources(config):
            rows.append({"variant": name, "arch": ARCH, **asdict(kernel)})
            if not args.json:
                print("{variant:<30} {name:<12} {registers:>4} registers  {stack:>3} stack  ".format(**rows[-1])
                      + "{shared:>7} shared  {barriers:>2} barriers".format(**rows[-1]), flush=True)  # fmt: skip
    if args.json:
        print(json.dumps({"kernels": rows}))
    return 1 if any(row["stack"] for row in rows) else 0


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import examine

    _emit(args, examine())
    return 0


def _demo(args: argparse.Namespace) -> int:
    from .demo import main_demo

    return main_demo(args)
