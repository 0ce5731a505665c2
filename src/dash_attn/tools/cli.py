"""The command line: ``dash-attn`` or ``python -m dash_attn``.

Every command has ``--help`` with an example and ``--json`` for one JSON object on standard output.
Errors go to standard error and end with exit code 2; ``demo`` and ``verify`` end with 1 when
bytes differ.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import DashError
from ..problem import DTYPES
from ..schedule import PLACEMENTS, POLICIES
from .commands import (
    run_bench,
    run_bounds,
    run_demo,
    run_doctor,
    run_figures,
    run_kernels,
    run_plan,
    run_simulate,
    run_trace,
    run_verify,
)

__all__ = ["main"]


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
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = _add(subparsers, "demo", run_demo, "train a small GPT twice and compare the bytes of its weights")
    _example(demo, "dash-attn demo --steps 60 --output demo-out")
    demo.add_argument("--steps", type=int, help="optimizer steps of each run")
    demo.add_argument("--seqlen", type=int, help="tokens of a sequence")
    demo.add_argument("--batch", type=int, help="sequences of a step")
    demo.add_argument("--layers", type=int, help="transformer blocks")
    demo.add_argument("--seed", type=int, help="seed of weights and data (default 0)")
    demo.add_argument("--dtype", choices=("bfloat16", "float32"), help="of attention (default bfloat16)")
    demo.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    demo.add_argument("--output", type=Path, default=Path("demo-out"), help="folder for the pictures")
    demo.add_argument("--quiet", action="store_true", help="no progress bar")

    plan = _add(subparsers, "plan", run_plan, "build a plan, prove it safe and describe it")
    _example(plan, "dash-attn plan --mask causal --seqlen 4096 --heads 16 --policy symmetric_shift --show")
    _problem_flags(plan)
    plan.add_argument("--show", action="store_true", help="print the grid of one head: step and ticket")
    plan.add_argument("--save", type=Path, metavar="FILE", help="draw the plan as .svg or .png")

    sim = _add(subparsers, "simulate", run_simulate, "predict when every worker does what, and why it waits")
    _example(
        sim, "dash-attn simulate --mask causal --policy descending --tiles 8 --heads 4 --compute 5 --reduce 2"
    )
    _problem_flags(sim)
    _cost_flags(sim)
    sim.add_argument("--show", action="store_true", help="print the timeline as text")
    sim.add_argument("--save", type=Path, metavar="FILE", help="draw the timeline as .svg or .png")

    trace = _add(
        subparsers,
        "trace",
        run_trace,
        "record a plan on a Hopper GPU and draw it beside its simulation",
    )
    _example(trace, "dash-attn trace --mask causal --seqlen 4096 --heads 8 --save trace.png")
    _problem_flags(trace)
    trace.add_argument("--save", type=Path, metavar="FILE", default=Path("trace.png"), help=".svg or .png")

    bounds = _add(subparsers, "bounds", run_bounds, "lower bounds, and every policy's makespan beside them")
    _example(bounds, "dash-attn bounds --mask full --tiles 16 --heads 4 --compute 5 --reduce 2")
    _problem_flags(bounds, policy=False)
    _cost_flags(bounds)

    figures = _add(
        subparsers, "figures", run_figures, "redraw figures 2 to 7 of the DASH paper from real plans"
    )
    _example(figures, "dash-attn figures docs/figures")
    figures.add_argument("folder", type=Path, nargs="?", default=Path("figures"), help="where to put them")
    figures.add_argument("--format", choices=("svg", "png"), default="svg")

    kernels = _add(
        subparsers,
        "kernels",
        run_kernels,
        "compile every GPU kernel and say what it uses; needs no GPU",
    )
    _example(kernels, "dash-attn kernels --only backward-d128-bf16")
    kernels.add_argument("--only", metavar="VARIANT", help="one variant by name")

    verify = _add(
        subparsers,
        "verify",
        run_verify,
        "check on your shapes that results are accurate and repeat bit for bit",
    )
    _example(verify, "dash-attn verify --mask causal --seqlen 400 --heads 4 --kv-heads 2 --head-dim 64")
    _shape_flags(verify)
    verify.add_argument("--replays", type=int, help="runs to compare (default: 100 on a GPU, 3 on a CPU)")
    verify.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU if it is a Hopper one")

    bench = _add(
        subparsers, "bench", run_bench, "time the backward on your shapes, and installed peers beside it"
    )
    _example(bench, "dash-attn bench --mask causal --seqlen 4096 --heads 32 --kv-heads 8 --save bench.svg")
    _shape_flags(bench)
    bench.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=[], help="measure these policies too"
    )
    bench.add_argument("--rounds", type=int, default=15, help="timed calls of each (default 15)")
    bench.add_argument("--no-peers", action="store_true", help="only this package's own modes")
    bench.add_argument("--save", type=Path, metavar="FILE", help="draw the speeds as .svg or .png")

    doctor = _add(subparsers, "doctor", run_doctor, "what is installed here, what is supported, and why not")
    _example(doctor, "dash-attn doctor")
    return parser


def _add(subparsers: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
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


def _shape_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shape (default: a dense and a packed one)")
    group.add_argument(
        "--shapes",
        type=Path,
        metavar="FILE",
        help="JSON: an object, or a list, with the names of these flags",
    )
    group.add_argument("--mask", choices=("full", "causal"), default="full")
    group.add_argument(
        "--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="sliding window, -1: unbounded"
    )
    group.add_argument("--batch", type=int, help="sequences of a dense batch (default 2)")
    group.add_argument("--seqlen", type=int, help="length of each of them")
    group.add_argument("--seqlen-k", type=int, help="key length, if another than --seqlen")
    group.add_argument("--seqlens", type=int, nargs="+", metavar="N", help="lengths of a packed batch")
    group.add_argument("--seqlens-k", type=int, nargs="+", metavar="N", help="key lengths, if other ones")
    group.add_argument("--heads", type=int, help="default 8")
    group.add_argument("--kv-heads", type=int, help="default: as many as heads")
    group.add_argument("--head-dim", type=int, help="default 128")
    group.add_argument("--dtype", choices=DTYPES, help="default bfloat16")
    group.add_argument("--policy", choices=("auto", *POLICIES), help="default auto")
    group.add_argument("--seed", type=int, help="of the random tensors (default 0)")


def _cost_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine (cycles; default: the paper's model with c = r = 1)")
    group.add_argument("--preset", choices=("h200",), help="measured costs and workers of an H200")
    group.add_argument("--workers", type=int, help="resident workers (default: as many as kv tiles)")
    group.add_argument("--compute", type=float, help="c, the matrix products of a task")
    group.add_argument("--reduce", type=float, help="r, adding its dQ tile")
    group.add_argument("--latency", type=float, help="hand-over to the next contribution")
    group.add_argument("--dq-buffers", type=int, help="dQ tiles in flight; 0: compute and reduce in series")
    group.add_argument("--launch", type=float, help="from claiming an item to its first compute")
