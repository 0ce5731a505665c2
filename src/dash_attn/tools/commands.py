"""What the commands of :mod:`.cli` do. Heavy parts are imported by the command that needs them."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

from ..errors import DashError
from ..model import H200, H200_WORKERS, Costs, closed_form, lower_bounds, simulate
from ..problem import Mask, Problem
from ..schedule import POLICIES, Plan, build_plan, choose_policy, policy_by_name

__all__ = [
    "run_bench",
    "run_bounds",
    "run_demo",
    "run_doctor",
    "run_figures",
    "run_kernels",
    "run_plan",
    "run_simulate",
    "run_trace",
    "run_verify",
]

GRID_TILE = 128
"""Rows and columns of a tile where a grid is given as a number of tiles."""

_KERNEL_LINE = "{variant:<30} {name:<12} {registers:>4} registers {stack:>4} stack {shared:>7} shared"


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
    if args.tiles is not None and args.seqlen_k is not None:
        raise DashError(f"--seqlen-k {args.seqlen_k} belongs to --seqlen, not to --tiles")
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
        raise DashError(f"--{' and --'.join(parameters)} only with --policy shift, got {args.policy}")
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


def _show(args: argparse.Namespace, text: str) -> None:
    """A drawing in text; beside JSON it must not stand on standard output."""
    print("\n" + text, file=sys.stderr if args.json else sys.stdout)


def run_plan(args: argparse.Namespace) -> int:
    plan = _built_plan(args)
    _emit(args, _describe(plan))
    if args.show:
        from ..model.render import text_plan

        _show(args, text_plan(plan))
    if args.save:
        from ..model.render import save_plan

        save_plan(plan, args.save)
    return 0


def run_simulate(args: argparse.Namespace) -> int:
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
        from ..model.render import text_gantt

        _show(args, text_gantt(timeline))
    if args.save:
        from ..model.render import save_gantt

        save_gantt(timeline, args.save)
    return 0


def run_trace(args: argparse.Namespace) -> int:
    plan = _built_plan(args)
    import torch

    if not torch.cuda.is_available():
        raise DashError("a trace needs a Hopper GPU, and PyTorch sees no CUDA device")
    from ..model.render import save_gantt
    from .measure import simulated_and_measured

    simulated, measured = simulated_and_measured(plan)
    save_gantt([("simulated", simulated), ("measured", measured)], args.save, title=plan.policy)
    facts = {
        "simulated_makespan": simulated.makespan,
        "measured_makespan": measured.makespan,
        "picture": str(args.save),
    }
    _emit(args, facts | _describe(plan))
    return 0


def run_bounds(args: argparse.Namespace) -> int:
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


def run_figures(args: argparse.Namespace) -> int:
    from ..model.figures import draw_figures

    paths = [str(path) for path in draw_figures(args.folder, (args.format,))]
    print(json.dumps({"figures": paths}) if args.json else "\n".join(paths))
    return 0


def run_kernels(args: argparse.Namespace) -> int:
    from ..backends.sm90.compile import ARCH, resources, variants

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
                print(_KERNEL_LINE.format(**rows[-1]), flush=True)
    if args.json:
        print(json.dumps({"kernels": rows}))
    return 1 if any(row["stack"] for row in rows) else 0


def run_verify(args: argparse.Namespace) -> int:
    from .shapes import chosen_device, chosen_shapes
    from .verify import Settings, verify_shape

    device = chosen_device(args.device)
    replays = args.replays if args.replays is not None else 100 if device == "cuda" else 3
    settings = Settings(device, replays)
    shapes = chosen_shapes(vars(args), device)
    say = _silent if args.json else partial(print, flush=True)
    reports = [verify_shape(shape, settings, say) for shape in shapes]
    passed = all(report.passed for report in reports)
    if args.json:
        print(json.dumps({"passed": passed, "shapes": [report.as_json() for report in reports]}))
    else:
        print(f"\n{'PASSED' if passed else 'FAILED'}: {len(reports)} shapes on {device}")
    return 0 if passed else 1


def run_bench(args: argparse.Namespace) -> int:
    from ..model.charts import check_path
    from .bench import Settings, bench_shape, require_hopper, save_chart, table
    from .shapes import chosen_shapes

    shapes = chosen_shapes(vars(args), "cuda")
    settings = Settings(args.rounds, tuple(dict.fromkeys(args.policies)), not args.no_peers)
    require_hopper()
    if args.save:
        check_path(args.save)  # before the measurement, not after it
    results = []
    for shape in shapes:
        results.append(bench_shape(shape, settings, partial(print, file=sys.stderr, flush=True)))
        if not args.json:
            print(table(results[-1]) + "\n", flush=True)
    if args.json:
        print(json.dumps({"rounds": args.rounds, "results": [result.as_json() for result in results]}))
    if args.save:
        save_chart(results, args.save)
    return 0


def _silent(text: str) -> None:
    pass


def run_doctor(args: argparse.Namespace) -> int:
    from .doctor import examine

    facts = examine()
    if args.json:
        print(json.dumps(facts))
        return 0
    for name, value in facts.items():
        lines = value if isinstance(value, dict) else {"": value}
        for number, (what, answer) in enumerate(lines.items()):
            print(f"{'' if number else name:<18}{what:<{28 if what else 0}}{answer}")
    return 0


def run_demo(args: argparse.Namespace) -> int:
    from .demo import main_demo

    return main_demo(args)
