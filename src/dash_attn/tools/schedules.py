"""Commands that look at schedules: plan, simulate, trace, bounds and figures."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import DashError
from ..model import Costs, lower_bounds, simulate
from ..model.bounds import paper_makespan
from ..model.output import require_writable
from ..problem import Problem
from ..schedule import POLICIES, Plan, Schedule, build_plan
from ..schedule.head_groups import default_head_groups
from .flags import add_command, cost_flags, emit, machine_of, plan_of, problem_flags, problem_of
from .forward import require_gpu, run_forward_plan, run_forward_simulation, run_forward_trace
from .limits import announce, is_long, require_simulable

__all__ = ["add_schedule_commands"]


def add_schedule_commands(subparsers: Any) -> None:
    """Add these commands to a parser."""
    _add_plan(subparsers)
    _add_simulate(subparsers)
    _add_trace(subparsers)
    _add_bounds(subparsers)
    _add_figures(subparsers)


def _add_plan(subparsers: Any) -> None:
    text = "build a plan, prove it safe and describe it"
    example = "--mask causal --seqlen 4096 --heads 16 --policy symmetric_shift --show"
    plan = add_command(subparsers, "plan", run_plan, text, example)
    problem_flags(plan)
    _pass_flag(plan)
    plan.add_argument(
        "--show",
        action="store_true",
        help="print the grid of one head: step and ticket; of a forward its entries",
    )
    plan.add_argument("--save", type=Path, metavar="FILE", help="draw the plan as .svg or .png")


def _pass_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pass", choices=("backward", "forward"), default="backward", dest="direction",
        help="which plan; one of the forward has no policy, and no --tiles (default backward)",
    )  # fmt: skip


def run_plan(args: argparse.Namespace) -> int:
    if args.direction == "forward":
        return run_forward_plan(args)
    from ..model.render import plan_workers, save_plan, text_plan

    problem = problem_of(args)
    if args.save:
        require_writable(args.save)
        require_simulable(problem)
    plan = plan_of(args, problem)
    emit(args, _describe(plan))
    if args.show:
        _show(args, text_plan(plan))
    if args.save:
        require_simulable(problem, plan_workers(plan))
        _announce_simulation(plan.policy, problem)
        save_plan(plan, args.save)
    return 0


def _add_simulate(subparsers: Any) -> None:
    text = "predict when every worker does what, and why it waits"
    example = "--mask causal --policy descending --tiles 8 --heads 4 --compute 5 --reduce 2"
    sim = add_command(subparsers, "simulate", run_simulate, text, example)
    problem_flags(sim)
    cost_flags(sim)
    _pass_flag(sim)
    sim.add_argument("--show", action="store_true", help="print the timeline as text (backward only)")
    sim.add_argument("--save", type=Path, metavar="FILE", help="draw the timeline as .svg or .png")


def run_simulate(args: argparse.Namespace) -> int:
    if args.direction == "forward":
        return run_forward_simulation(args)
    from ..model.render import save_gantt, text_gantt

    if args.save:
        require_writable(args.save)
    problem = problem_of(args)
    costs, workers = machine_of(args, problem)
    require_simulable(problem, workers)
    plan = plan_of(args, problem)
    _announce_simulation(plan.policy, problem)
    timeline, numerics = simulate(plan, costs, workers), Schedule.parse(plan.policy).numerics
    facts = {
        "makespan": timeline.makespan,
        "lower_bound": max(lower_bounds(problem, costs, workers, numerics=numerics).values()),
        "utilization": timeline.utilization,
        "stall": timeline.stall,
        "stalls": timeline.stalls,
        "workers": workers,
        "costs": asdict(costs),
    }
    emit(args, facts | _describe(plan))
    if args.show:
        _show(args, text_gantt(timeline))
    if args.save:
        save_gantt(timeline, args.save)
    return 0


def _add_trace(subparsers: Any) -> None:
    text = "record a plan on a Hopper GPU and draw it beside its simulation"
    example = "--mask causal --seqlen 4096 --heads 8 --save trace.png"
    trace = add_command(subparsers, "trace", run_trace, text, example)
    problem_flags(trace, tiles="N kv tiles of the kernel, and as many rows of q")
    _pass_flag(trace)
    trace.add_argument("--save", type=Path, metavar="FILE", default=Path("trace.png"), help=".svg or .png")


def run_trace(args: argparse.Namespace) -> int:
    if args.direction == "forward":
        return run_forward_trace(args)
    require_writable(args.save)
    problem = problem_of(args, kernel_tiles=True)
    require_simulable(problem)
    plan = plan_of(args, problem)
    require_gpu()
    from ..model.render import save_gantt
    from .measure import simulated_and_measured

    simulated, measured = simulated_and_measured(plan)
    save_gantt([("simulated", simulated), ("measured", measured)], args.save, title=plan.policy)
    facts = {
        "simulated_makespan": simulated.makespan,
        "measured_makespan": measured.makespan,
        "picture": str(args.save),
    }
    emit(args, facts | _describe(plan))
    return 0


def _add_bounds(subparsers: Any) -> None:
    text = "lower bounds of plans with the default head groups, and every policy's makespan beside them"
    example = "--mask full --tiles 16 --heads 4 --compute 5 --reduce 2"
    bounds = add_command(subparsers, "bounds", run_bounds, text, example)
    problem_flags(bounds, policy=False)
    cost_flags(bounds)


def run_bounds(args: argparse.Namespace) -> int:
    problem = problem_of(args)
    costs, workers = machine_of(args, problem)
    require_simulable(problem, workers)
    bounds = lower_bounds(problem, costs, workers)
    groups = default_head_groups(problem.group, next(iter(problem.tile_grids.values())))
    policies, bound = {}, max(bounds.values())
    for number, name in enumerate(POLICIES, 1):
        _announce_simulation(f"policy {number} of {len(POLICIES)}, {name}", problem)
        policies[name] = _policy_makespan(problem, name, costs, workers, bound)
    if args.json:
        facts = {"lower_bounds": bounds, "head_groups": groups, "workers": workers, "costs": asdict(costs)}
        print(json.dumps({**facts, "policies": policies}))
        return 0
    print(f"{problem.mask.name}, {problem.tasks} tasks, {workers} workers, {costs}")
    print(f"lower bounds for plans with {groups} head group{'s' * (groups != 1)} per kv head:")
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


def _policy_makespan(problem: Problem, name: str, costs: Costs, workers: int, bound: float) -> dict[str, Any]:
    try:
        plan = build_plan(problem, name)
        makespan = simulate(plan, costs, workers).makespan
    except DashError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "makespan": makespan,
        "of_bound": makespan / bound if bound else 1.0,
        "closed_form": paper_makespan(name, problem, costs, workers),
    }


def _add_figures(subparsers: Any) -> None:
    text = "redraw figures 2 to 7 of the DASH paper from real plans"
    figures = add_command(subparsers, "figures", run_figures, text, "docs/figures")
    figures.add_argument("folder", type=Path, nargs="?", default=Path("figures"), help="where to put them")
    figures.add_argument("--format", choices=("svg", "png"), default="svg")


def run_figures(args: argparse.Namespace) -> int:
    from ..model.figures import draw_figures

    paths = [str(path) for path in draw_figures(args.folder, (args.format,))]
    print(json.dumps({"figures": paths}) if args.json else "\n".join(paths))
    return 0


def _describe(plan: Plan) -> dict[str, Any]:
    p = plan.problem
    return {
        "policy": plan.policy,
        "mask": p.mask.name,
        "tiles": max(grid.kv_tiles for grid in p.grids.values()),
        "batch": len(p.sequences),
        "heads": p.heads,
        "kv_heads": p.kv_heads,
        "head_groups": plan.pattern(0).head_groups,
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


def _show(args: argparse.Namespace, text: str) -> None:
    """A drawing in text; beside JSON it must not stand on standard output."""
    print("\n" + text, file=sys.stderr if args.json else sys.stdout)


def _announce_simulation(what: str, problem: Problem) -> None:
    if is_long(problem):
        announce(f"{what}: simulating {problem.tasks:,} tasks ...")
