"""Flags that several commands share, and what they mean: problems, plans, machines and shapes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import DashError
from ..model import H200, H200_WORKERS, Costs
from ..problem import DTYPES, Mask, Problem, default_tiles
from ..schedule import COMMON_PLACEMENTS, POLICIES, Plan, Schedule, build_plan, choose_policy, policy_by_name
from .limits import require_batch, require_plannable
from .shapes import KEYS

__all__ = [
    "add_command",
    "cost_flags",
    "emit",
    "machine_of",
    "plan_of",
    "policy_name",
    "problem_flags",
    "problem_of",
    "shape_flags",
]

GRID_TILE = 128
"""Rows and columns of a tile where a grid is given as a number of tiles."""

_WINDOW = "sliding window, -1: unbounded"

_POLICY = (
    f"auto (default), {', '.join(POLICIES)}, or a name that was printed, such as 'descending + lpt' or "
    "'shift(ring=16)'"
)


def add_command(
    subparsers: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, example: str
) -> argparse.ArgumentParser:
    """A command with ``--json``, a description and an example."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"example:\n  dash-attn {name} {example}".rstrip(),
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def policy_name(text: str) -> str:
    """A flag's value that is "auto" or the name of a schedule, as :meth:`Schedule.parse` takes it.

    Raises:
        ArgumentTypeError: it is neither; the message names it, and what is known.
    """
    if text != "auto":
        try:
            Schedule.parse(text)
        except DashError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return text


def problem_flags(
    parser: argparse.ArgumentParser,
    *,
    policy: bool = True,
    tiles: str = "square grid of N kv tiles by N q tiles",
) -> None:
    """Flags of :func:`problem_of`, and of :func:`plan_of` where there is a policy to choose.

    Args:
        parser: of the command.
        policy: add the flags of a plan.
        tiles: what ``--tiles N`` means to the command.
    """
    group = parser.add_argument_group("problem")
    group.add_argument("--mask", choices=("full", "causal"), default="full")
    group.add_argument("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help=_WINDOW)
    group.add_argument("--tiles", type=int, metavar="N", help=tiles)
    group.add_argument("--seqlen", type=int, help="sequence length, where there is no --tiles")
    group.add_argument("--seqlen-k", type=int, help="key length, if another than --seqlen")
    group.add_argument("--batch", type=int, default=1)
    group.add_argument("--heads", type=int, default=1)
    group.add_argument("--kv-heads", type=int, help="default: as many as heads")
    group.add_argument("--head-dim", type=int, default=128)
    group.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    if policy:
        group = parser.add_argument_group("plan")
        group.add_argument("--policy", type=policy_name, metavar="NAME", default="auto", help=_POLICY)
        group.add_argument(
            "--placement",
            choices=COMMON_PLACEMENTS,
            help="order in which items are claimed, if --policy names none",
        )
        group.add_argument("--ring", type=int, help="shift: kv tiles of a ring")
        group.add_argument("--stride", type=int, help="shift: q tiles between the starts of two members")


def problem_of(args: argparse.Namespace, *, kernel_tiles: bool = False) -> Problem:
    """The problem of :func:`problem_flags`.

    Args:
        args: what was parsed.
        kernel_tiles: ``--tiles`` counts kv tiles of the kernel, which has q tiles of its own, and not tiles
            of a square grid.

    Raises:
        DashError: a value is out of range, or the problem is too large for a plan.
    """
    if (args.tiles is None) == (args.seqlen is None):
        raise DashError("give either --tiles or --seqlen")
    if args.tiles is not None and args.seqlen_k is not None:
        raise DashError(f"--seqlen-k {args.seqlen_k} belongs to --seqlen, not to --tiles")
    if args.tiles is not None and args.tiles < 1:
        raise DashError(f"--tiles must be >= 1, got {args.tiles}")
    require_batch(args.batch, args.heads)
    if args.tiles is None:
        seqlen_k = args.seqlen if args.seqlen_k is None else args.seqlen_k
        size = {"seqlen_q": args.seqlen, "seqlen_k": seqlen_k}
    elif kernel_tiles:
        size = {"seqlen": args.tiles * default_tiles(args.head_dim)[1]}
    else:
        size = {"seqlen": args.tiles * GRID_TILE, "tile_m": GRID_TILE, "tile_n": GRID_TILE}
    problem = Problem.dense(
        **size, batch=args.batch, heads=args.heads, kv_heads=args.kv_heads, head_dim=args.head_dim,
        mask=_mask_of(args), dtype=args.dtype,
    )  # fmt: skip
    require_plannable(problem)
    return problem


def _mask_of(args: argparse.Namespace) -> Mask:
    left, right = (None if side == -1 else side for side in args.window or (-1, -1))
    return Mask.window(left, 0 if args.mask == "causal" else right)


def plan_of(args: argparse.Namespace, problem: Problem) -> Plan:
    """The plan of :func:`problem_flags` for a problem.

    Raises:
        DashError: the policy does not cover the problem, a flag belongs to another policy, or two flags name
            a placement.
    """
    parameters = {k: v for k in ("ring", "stride") if (v := getattr(args, k)) is not None}
    if parameters and args.policy != "shift":
        raise DashError(f"--{' and --'.join(parameters)} only with --policy shift, got {args.policy}")
    if args.placement and " + " in args.policy:
        raise DashError(f"--placement {args.placement} and --policy {args.policy}: give one of them")
    if args.policy == "auto":
        schedule = choose_policy(problem)
    elif parameters:
        schedule = Schedule.of(policy_by_name(args.policy, **parameters))
    else:
        schedule = Schedule.parse(args.policy)
    return build_plan(problem, schedule.numerics, args.placement or schedule.placement)


def cost_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of :func:`machine_of`."""
    group = parser.add_argument_group("machine (cycles; default: the paper's model with c = r = 1)")
    group.add_argument("--preset", choices=("h200",), help="measured costs and workers of an H200")
    group.add_argument(
        "--workers", type=int, help="resident workers (default: as many as kv tiles; of a forward 132)"
    )
    group.add_argument(
        "--compute", type=float, help="c, the matrix products of a task; of a forward a kv tile"
    )
    group.add_argument("--reduce", type=float, help="r, adding its dQ tile")
    group.add_argument("--latency", type=float, help="hand-over to the next contribution")
    group.add_argument("--dq-buffers", type=int, help="dQ tiles in flight; 0: compute and reduce in series")
    group.add_argument("--launch", type=float, help="from claiming an item to its first compute")


def machine_of(args: argparse.Namespace, problem: Problem) -> tuple[Costs, int]:
    """Costs and workers of :func:`cost_flags`."""
    base = H200 if args.preset else Costs(compute=1, reduce=1)
    given = {k: getattr(args, k) for k in asdict(base) if getattr(args, k) is not None}
    tiles = max(grid.kv_tiles for grid in problem.grids.values())
    workers = args.workers if args.workers is not None else H200_WORKERS if args.preset else max(tiles, 1)
    return Costs(**{**asdict(base), **given}), workers


def shape_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of :func:`~dash_attn.tools.shapes.chosen_shapes`."""
    group = parser.add_argument_group("shape (default: a dense and a packed one)")
    group.add_argument(
        "--shapes",
        type=Path,
        metavar="FILE",
        help=f"JSON: an object, or a list of them, with the keys {', '.join(KEYS)}; the mask is either "
        'mask ("full" or "causal") or causal (true or false)',
    )
    group.add_argument("--mask", choices=("full", "causal"), help="default full")
    group.add_argument("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help=_WINDOW)
    group.add_argument("--batch", type=int, help="sequences of a dense batch (default 2)")
    group.add_argument("--seqlen", type=int, help="length of each of them")
    group.add_argument("--seqlen-k", type=int, help="key length, if another than --seqlen")
    group.add_argument("--seqlens", type=int, nargs="+", metavar="N", help="lengths of a packed batch")
    group.add_argument("--seqlens-k", type=int, nargs="+", metavar="N", help="key lengths, if other ones")
    group.add_argument("--heads", type=int, help="default 8")
    group.add_argument("--kv-heads", type=int, help="default: as many as heads")
    group.add_argument("--head-dim", type=int, help="default 128")
    group.add_argument("--head-dim-v", type=int, help="head dim of V, if another than --head-dim")
    group.add_argument("--dtype", choices=DTYPES, help="default bfloat16")
    group.add_argument("--policy", type=policy_name, metavar="NAME", help=_POLICY)
    group.add_argument("--backend", metavar="NAME", help="cpu, sm90 or triton; default auto")
    group.add_argument("--seed", type=int, help="of the random tensors (default 0)")


def emit(args: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Print facts: a line each, or one JSON object."""
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
