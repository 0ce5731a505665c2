"""Commands that run something: demo, precompile, kernels, verify, bench and doctor.

Heavy parts are imported by the command that needs them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import DashError
from ..problem import DTYPES
from .flags import add_command, policy_name, shape_flags

__all__ = ["add_demo", "add_running_commands"]

_KERNEL_LINE = "{variant:<30} {name:<12} {registers:>4} registers {stack:>4} stack {shared:>7} shared"


def add_running_commands(subparsers: Any) -> None:
    """Add these commands to a parser, all but the demo."""
    _add_precompile(subparsers)
    _add_kernels(subparsers)
    _add_verify(subparsers)
    _add_bench(subparsers)
    text = "what is installed here, what is supported, and why not"
    add_command(subparsers, "doctor", run_doctor, text, "")


def add_demo(subparsers: Any) -> None:
    """Add the demo, which comes first."""
    text = "train a small GPT twice and compare the bytes of its weights"
    demo = add_command(subparsers, "demo", run_demo, text, "--steps 60 --output demo-out")
    demo.add_argument("--steps", type=int, help="optimizer steps of each run")
    demo.add_argument("--seqlen", type=int, help="tokens per sequence")
    demo.add_argument("--batch", type=int, help="sequences per step")
    demo.add_argument("--layers", type=int, help="transformer blocks")
    demo.add_argument("--seed", type=int, help="seed of weights and data (default 0)")
    demo.add_argument("--dtype", choices=("bfloat16", "float32"), help="of attention (default bfloat16)")
    demo.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    demo.add_argument("--output", type=Path, default=Path("demo-out"), help="folder for the pictures")
    demo.add_argument("--quiet", action="store_true", help="no progress bar")


def run_demo(args: argparse.Namespace) -> int:
    from .demo import main_demo

    return main_demo(args)


def _add_precompile(subparsers: Any) -> None:
    text = "compile what a model's calls can launch and keep it on disk, so that no call has to; needs no GPU"
    command = add_command(subparsers, "precompile", run_precompile, text, "--head-dim 128 --dtype bfloat16")
    group = command.add_argument_group("the calls (Hopper kernels)")
    group.add_argument("--head-dim", type=int, default=128, help="default 128")
    group.add_argument("--head-dim-v", type=int, help="head dim of V, if another than --head-dim")
    group.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default bfloat16")
    group.add_argument("--softcap", action="store_true", help="they have a softcap")
    group.add_argument("--sink", action="store_true", help="they have a learnable sink")
    group.add_argument("--intervals", action="store_true", help="they have row_starts and row_ends")
    group.add_argument("--cache", action="store_true", help="there are calls over a cache of keys, too")
    command.add_argument(
        "--jobs", type=int, help="programs at a time, 1 GB each (default: as many as CPUs, up to 16)"
    )


def run_precompile(args: argparse.Namespace) -> int:
    from .precompile import compiled, default_jobs, programs_for, require_cache

    if args.jobs is not None and args.jobs < 1:
        raise DashError(f"--jobs must be >= 1, got {args.jobs}")
    programs = programs_for(args)
    folder, begin, seconds = require_cache(), time.perf_counter(), {}
    for name, taken in compiled(programs, args.jobs or default_jobs()):
        seconds[name] = round(taken, 2)
        if not args.json:
            print(f"{name:<40} {taken:6.2f} s", flush=True)
    whole = round(time.perf_counter() - begin, 2)
    if args.json:
        print(json.dumps({"folder": folder, "seconds": whole, "programs": seconds}))
    else:
        print(f"{len(programs)} programs are in {folder}: {whole:.1f} s")
    return 0


def _add_kernels(subparsers: Any) -> None:
    text = "compile every GPU kernel and say what it uses; needs no GPU"
    kernels = add_command(subparsers, "kernels", run_kernels, text, "--only backward-d128-bf16 --hashes")
    kernels.add_argument("--only", metavar="VARIANT", help="one variant by name")
    kernels.add_argument("--hashes", action="store_true", help="print hashes of PTX and machine code too")
    kernels.add_argument("--save", type=Path, metavar="FILE", help="write the hashes of all variants (JSON)")


def run_kernels(args: argparse.Namespace) -> int:
    from ..backends.sm90 import machine_code
    from ..backends.sm90.compile import ARCH, variants

    chosen = variants()
    if args.save:
        _require_hashes_of_all(args)
    if args.only is not None:
        if args.only not in chosen:
            near = ", ".join(get_close_matches(args.only, chosen, n=5, cutoff=0))
            raise DashError(f"unknown variant {args.only!r}; of {len(chosen)}, the nearest are {near}")
        chosen = {args.only: chosen[args.only]}
    codes, rows = {}, []
    for name, config in chosen.items():
        codes[name] = machine_code.machine_code(config)
        for kernel in codes[name].kernels:
            rows.append({"variant": name, "arch": ARCH, **asdict(kernel)})
            if not args.json:
                print(_KERNEL_LINE.format(**rows[-1]), flush=True)
        if args.hashes and not args.json:
            for what, digest in codes[name].hashes.items():
                print(f"{name:<30} {what:<12} {digest}", flush=True)
    hashes = machine_code.hashes_of(codes)
    if args.json:
        print(json.dumps({"kernels": rows} | ({"hashes": hashes} if args.hashes else {})))
    if args.save:
        args.save.write_text(json.dumps(hashes, indent=1) + "\n")
    return 1 if any(row["stack"] for row in rows) else 0


def _require_hashes_of_all(args: argparse.Namespace) -> None:
    """Compiling all variants takes minutes: see first that the file is meant, whole and can be written."""
    from ..model.output import check_writable

    if not args.hashes or args.only:
        raise DashError(f"--save {args.save} writes the hashes of all variants: give --hashes, and no --only")
    if args.save.is_dir():
        raise DashError(f"cannot write {args.save}: it is a folder")
    check_writable(args.save)


def _add_verify(subparsers: Any) -> None:
    text = "check on your shapes that results are accurate and repeat bit for bit"
    example = "--mask causal --seqlen 400 --heads 4 --kv-heads 2 --head-dim 64"
    verify = add_command(subparsers, "verify", run_verify, text, example)
    shape_flags(verify)
    verify.add_argument("--replays", type=int, help="runs to compare (default: 100 on a GPU, 3 on a CPU)")
    verify.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU that a backend covers")


def run_verify(args: argparse.Namespace) -> int:
    from .shapes import chosen_device, chosen_shapes
    from .verify import Settings, require_supported, verify_shape

    device = chosen_device(args.device)
    replays = args.replays if args.replays is not None else 100 if device == "cuda" else 3
    settings = Settings(device, replays)
    shapes = chosen_shapes(vars(args), device)
    say = _silent if args.json else partial(print, flush=True)
    for shape in shapes:  # all of them, before any is verified
        require_supported(shape, settings)
    reports = [verify_shape(shape, settings, say) for shape in shapes]
    passed = all(report.passed for report in reports)
    if args.json:
        print(json.dumps({"passed": passed, "shapes": [report.as_json() for report in reports]}))
    else:
        print(f"\n{'PASSED' if passed else 'FAILED'}: {len(reports)} shapes on {device}")
    return 0 if passed else 1


def _silent(text: str) -> None:
    pass


def _add_bench(subparsers: Any) -> None:
    text = "time the backward on your shapes, and installed peers beside it"
    example = "--mask causal --seqlen 4096 --heads 32 --kv-heads 8 --save bench.svg"
    bench = add_command(subparsers, "bench", run_bench, text, example)
    shape_flags(bench)
    bench.add_argument(
        "--policies",
        nargs="+",
        type=policy_name,
        metavar="NAME",
        default=[],
        help="measure these policies too",
    )
    bench.add_argument("--rounds", type=int, default=15, help="timed calls of each (default 15)")
    bench.add_argument("--no-peers", action="store_true", help="only this package's own modes")
    bench.add_argument("--save", type=Path, metavar="FILE", help="draw the speeds as .svg or .png")


def run_bench(args: argparse.Namespace) -> int:
    from ..model.output import require_writable
    from .bench import Settings, bench_shape, require_gpu_for, save_chart, table
    from .shapes import chosen_shapes

    if args.save:
        require_writable(args.save)
    shapes = chosen_shapes(vars(args), "cuda")
    settings = Settings(args.rounds, tuple(dict.fromkeys(args.policies)), not args.no_peers)
    for shape in shapes:  # all of them, before any is measured
        require_gpu_for(shape)
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
