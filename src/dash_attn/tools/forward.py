"""The forward's side of the commands that look at schedules: ``--pass forward``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from ..errors import DashError
from ..machine import FORWARD_CYCLES, WORKERS
from ..model.cost import require_workers
from ..model.forward import ForwardCosts, require_drawable, save_forward, simulate_forward
from ..model.output import require_writable
from ..problem import Problem, default_tiles
from ..schedule import ForwardPlan, build_forward_plan, prove_forward
from .flags import emit, problem_of
from .limits import announce

__all__ = ["require_gpu", "run_forward_plan", "run_forward_simulation", "run_forward_trace"]

LONG_ITEMS = 1_000_000
"""Items of a plan from which on it takes a second or more."""

_OF_THE_BACKWARD = {
    "policy": "auto", "placement": None, "ring": None, "stride": None, "tiles": None,
    "reduce": None, "latency": None, "dq_buffers": None,
}  # fmt: skip


def run_forward_plan(args: argparse.Namespace) -> int:
    """Plan a forward, prove the plan and describe it."""
    plan = _plan_of(args, WORKERS)
    emit(args, _described(plan))
    if args.show:
        print("\nsequence  q tile  segment  place  kv tiles")
        for (sequence, tile, segment, place), kv_tiles in zip(plan.entries.tolist(), plan.kv_tiles.tolist()):
            one = f"{segment:>7}  {place:>5}" if segment >= 0 else f"{'all':>7}  {'-':>5}"
            print(f"{sequence:>8}  {tile:>6}  {one}  {kv_tiles:>8}")
    if args.save:
        known = plan.problem.head_dim in FORWARD_CYCLES
        costs = ForwardCosts.h200(plan.problem.head_dim) if known else ForwardCosts()
        save_forward(simulate_forward(plan, costs, WORKERS), args.save)
    return 0


def run_forward_simulation(args: argparse.Namespace) -> int:
    """Predict when every worker does what."""
    if args.show:
        raise DashError("--show draws a backward as text; for a forward use --save")
    workers = WORKERS if args.workers is None else args.workers
    plan = _plan_of(args, workers)
    base = asdict(ForwardCosts.h200(plan.problem.head_dim) if args.preset else ForwardCosts())
    given = {"tile": args.compute, "item": args.launch}
    costs = ForwardCosts(**{k: base[k] if v is None else v for k, v in given.items()})
    timeline = simulate_forward(plan, costs, workers)
    facts = {
        "makespan": timeline.makespan,
        "lower_bound": timeline.lower_bound,
        "utilization": timeline.utilization,
        "workers": workers,
        "costs": asdict(costs),
    }
    emit(args, facts | _described(plan))
    if args.save:
        save_forward(timeline, args.save)
    return 0


def run_forward_trace(args: argparse.Namespace) -> int:
    """Record what every worker does when, and draw it below what was predicted."""
    problem = _plan_of(args, WORKERS).problem
    require_gpu()
    from .measure import simulated_and_measured_forward

    simulated, measured = simulated_and_measured_forward(problem)
    save_forward([("simulated", simulated), ("measured", measured)], args.save)
    facts = {
        "simulated_makespan": simulated.makespan,
        "measured_makespan": measured.makespan,
        "measured_bound": measured.lower_bound,
        "measured_utilization": measured.utilization,
        "workers": measured.workers,
        "simulated_costs": asdict(simulated.costs),
        "measured_costs": asdict(measured.costs),
        "picture": str(args.save),
    }
    emit(args, facts | _described(measured.plan))
    return 0


def require_gpu() -> None:
    """Raise DashError unless there is a GPU to trace."""
    import torch

    if not torch.cuda.is_available():
        raise DashError("a trace needs a Hopper GPU, and PyTorch sees no CUDA device")


def _plan_of(args: argparse.Namespace, workers: int) -> ForwardPlan:
    """A proven plan, after a look at what else was asked for."""
    for name, default in _OF_THE_BACKWARD.items():
        if getattr(args, name, default) != default:
            flag = name.replace("_", "-")
            raise DashError(f"--{flag} {getattr(args, name)} belongs to --pass backward")
    if args.save:
        require_writable(args.save)
    require_workers(workers)
    problem = problem_of(args)
    plan = build_forward_plan(problem, _rows(problem), workers)
    if args.save:
        require_drawable(plan)
    if plan.items > LONG_ITEMS:
        announce(f"proving {plan.items:,} items ...")
    prove_forward(plan)
    return plan


def _rows(problem: Problem) -> int:
    """Rows of a q tile of the kernel, or of the backward's where there is no kernel. Narrow blocks, which few
    items may have, are not shown: nobody has measured their costs for the model."""
    from ..backends.sm90.forward.launch import config_of
    from ..backends.sm90.tiles import SHORT_DTYPES, covers

    if covers(problem.head_dim, problem.head_dim_v) and problem.dtype in SHORT_DTYPES:
        return config_of(problem).tile_m
    return default_tiles(problem.head_dim, problem.head_dim_v)[0]


def _described(plan: ForwardPlan) -> dict[str, Any]:
    p = plan.problem
    return {
        "pass": "forward",
        "mask": p.mask.name,
        "batch": len(p.sequences),
        "heads": p.heads,
        "kv_heads": p.kv_heads,
        "heads_per_section": plan.section,
        "head_dim": p.head_dim,
        "dtype": p.dtype,
        "tile_m": plan.tile_m,
        "tile_n": plan.numerics.tile,
        "segment": plan.numerics.segment,
        "items": plan.items,
        "kv_tiles": int(plan.kv_tiles.sum()) * p.heads,
        "places": plan.places * p.heads,
        "fingerprint": plan.numerics.fingerprint,
    }
