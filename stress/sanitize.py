"""compute-sanitizer over every kernel variant at small sizes; needs the CUDA toolkit and a Hopper GPU.

Without --launch it starts itself once per tool and kind of variant, and judges what the tool says. No oracle
and no test framework: the tools are slow, and what is wrong here is found by them, not by values.

    python stress/sanitize.py --jobs 8 --only bf16
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from multiprocessing import get_context
from multiprocessing.pool import ThreadPool
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from cached_launch import cached_problems, launch_cached
from dash_attn.backends.base import RowIntervals, SegmentTargets, Tensors
from dash_attn.backends.shapes import Keys, tensor_shapes
from dash_attn.backends.sm90 import launch as launcher
from dash_attn.backends.sm90.add_sums.config import AddSumsConfig
from dash_attn.backends.sm90.backend import BACKEND
from dash_attn.backends.sm90.backward.config import BackwardConfig
from dash_attn.backends.sm90.cached.config import CachedConfig
from dash_attn.backends.sm90.compile import Config, backward_variants, forward_variants, program, variants
from dash_attn.backends.sm90.convert.config import MANY, MANY_FROM, ConvertConfig, convert_config
from dash_attn.backends.sm90.fold.config import FoldConfig, fold_config
from dash_attn.backends.sm90.forward import launch as forward_launcher
from dash_attn.backends.sm90.forward.config import ForwardConfig
from dash_attn.backends.sm90.forward.launch import Forward
from dash_attn.backends.sm90.forward.traced import empty_trace
from dash_attn.backends.sm90.key_sums.config import KeySumsConfig
from dash_attn.backends.sm90.launch import Debug, run_backward
from dash_attn.backends.sm90.places import Buffer
from dash_attn.backends.sm90.segments import add_sums, finish_keys, run_segment
from dash_attn.backends.sm90.sinks.config import SinkConfig
from dash_attn.backends.sm90.sinks.launch import finish_sink
from dash_attn.backends.sm90.softcap import cap_of
from dash_attn.backends.sm90.tiles import kernel_of
from dash_attn.backends.sums import new_key_sums, new_sink_sums
from dash_attn.problem import Problem
from dash_attn.schedule import Plan, Shift, build_plan
from dash_attn.schedule.constants import FORWARD_SEGMENT
from dash_attn.scores import Scores
from gpu_cases import BY_HEAD, CAUSAL, FULL, WINDOW, auto_plan, dense, packed

TOOLS = {
    "memcheck": [
        "--report-api-errors",
        "no",
    ],  # the compiler's runtime asks for symbols that a driver may lack
    "racecheck": [],
    "initcheck": [],
    "synccheck": [],
}
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_RACE = r"^=+ (?:Error|Warning): Race reported between "
RACE_WRITERS = {"Backward": 7, "Forward": 7, "Chunk": 7, "Cached": 5, "Spread": 8}
"""Writing instructions of a main kernel whose readers racecheck takes for races. Of the backward: the
bulk loads of LSE, of delta and, four of them, of complete dQ tiles, and the store of a task's mask
bounds. Of forwards: the stores of an item's words, and of the word behind the last item. With intervals of
rows, a backward and a forward have one store more. Of ``Spread``: the bulk load of scores, unrolled eight
times. racecheck counts plain arrivals of the thread that wrote, on the barrier for which the reader waits.
Here the writer's arrival is arrive.expect_tx. Of ``Cached`` others arrive: the warps that copy Q, which meet
the writer at a named barrier.
For more, see docs/sanitizers.md.

``Deal`` has bar.sync and atomics, ``CachedFold`` no shared memory: nothing of them is excused."""
RACE_READERS = {"Backward": 4, "Forward": 0, "Chunk": 0, "Cached": 1, "Spread": 0}
"""Reads whose words racecheck finds overwritten. Of the backward: two of the load warp (where its dK belongs)
and two of converting warps (where a tile belongs). Of ``Cached``: that of the last words of an item. All
lanes of a warp read, bar.warp.sync follows, then one lane writes, or arrives on the barrier for which the
writer waits; racecheck does not follow bar.warp.sync."""


CAP = 2.0
"""Of variants with a softcap."""

FEWER = 24
"""So many columns less than their kernel has have tensors that it pads."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), metavar="TOOL")
    parser.add_argument("--only", default="", metavar="TEXT", help="variants whose name contains TEXT")
    parser.add_argument("--jobs", type=int, default=1, help="so many kinds of variants side by side")
    parser.add_argument(
        "--launch", nargs="*", metavar="VARIANT", help="launch these, or those of --only, under no tool"
    )
    args = parser.parse_args(argv)
    chosen = {name: config for name, config in variants().items() if args.only in name}
    if not chosen:
        parser.error(f"no variant's name contains {args.only!r}; known: {', '.join(variants())}")
    if unknown := set(args.launch or ()) - set(chosen):
        parser.error(f"no such variants: {', '.join(sorted(unknown))}")
    if args.jobs < 1:
        parser.error(f"--jobs must be >= 1, got {args.jobs}")
    if shutil.which("compute-sanitizer") is None and args.launch is None:
        parser.error("compute-sanitizer is not on the PATH; it is a part of the CUDA toolkit")
    if args.launch is not None:
        launch_all({name: chosen[name] for name in args.launch or chosen})
        return 0
    with get_context("spawn").Pool(args.jobs) as compilers:
        compilers.map(keep_compiled, chosen, chunksize=1)
    with ThreadPool(args.jobs) as runs:
        passed = runs.starmap(passes, product(args.tools, kinds(chosen).items()), chunksize=1)
    return int(not all(passed))


def keep_compiled(name: str) -> None:
    """Compile a variant into the cache, if it is not there."""
    program(variants()[name])


def kinds(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of variants by kernel, head dim and dtype."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found["-".join(name.split("-")[:3])].append(name)
    return dict(found)


def passes(tool: str, kind: tuple[str, list[str]]) -> bool:
    """Run one tool over the variants of a kind and print what it found."""
    name, names = kind
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "10000", *TOOLS[tool]]
    command += [sys.executable, __file__, "--launch", *names]
    # Every buffer an allocation of its own, so that the tool knows its ends.
    uncached = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=uncached, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wrong = findings(tool, done.stdout)
    if done.returncode:
        wrong.append(f"the program ended with {done.returncode}: {done.stdout[-2000:]}")
    first = f"{tool}, {name}: {len(launches(done.stdout))} launches, {len(wrong)} findings"
    print("\n  ".join([first, *wrong[:20]]), flush=True)
    return not wrong


def launches(log: str) -> list[str]:
    """Names of the launches that a log speaks of."""
    return re.findall(r"^launched (.+)$", log, re.M)


def findings(tool: str, log: str) -> list[str]:
    """What a tool's log says is wrong, without what is known to be right."""
    if not launches(log):
        return ["nothing was launched"]
    if tool == "racecheck":
        shown = len(re.findall(_RACE, log, re.M))
        summary = re.findall(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warn", log)
        if [(int(a), int(b) + int(c)) for a, b, c in summary] != [(shown, shown)]:
            return [f"{shown} reports, of which racecheck's summary says {summary or 'nothing'}"]
        parts = re.split(r"^launched (.+)$", log, flags=re.M)  # the name of a launch is behind its log
        names = [*parts[1::2], parts[-2]]
        return [line for part, name in zip(parts[::2], names) for line in races(part, name)]
    errors = re.findall(
        r"^=+ ((?:Invalid|Uninitialized|Barrier|Divergent|Missing|Program hit) .+)$", log, re.M
    )
    total = re.findall(r"ERROR SUMMARY: (\d+) error", log)
    if not total:
        return [*errors, "no errors summary"]
    return errors or ([] if total == ["0"] else [f"{total[-1]} errors"])


def races(log: str, name: str) -> list[str]:
    """Hazards of one launch, but for reads after the writes of at most RACE_WRITERS instructions of a kernel
    and writes after the reads of at most RACE_READERS. They are counted, not known: if the compiler merged
    some, as many others would pass."""
    found, known = [], {"Write": defaultdict(set), "Read": defaultdict(set)}
    for hazard in re.split(_RACE, log, flags=re.M)[1:]:
        first, *others = re.findall(r"(\w+) access at (\S+)\+(0x[0-9a-f]+)", hazard)
        if any(other[0] == first[0] for other in others):
            found.append(f"{first[0]} at {first[2]} of {first[1]}, then {others[0][0]} at {others[0][2]}")
        else:
            known[first[0]][first[1]].add(first[2])
    for kind, after, most in (("Write", "reads", RACE_WRITERS), ("Read", "writes", RACE_READERS)):
        for kernel, at in known[kind].items():
            known_of_it = max((n for main, n in most.items() if f"{main}_" in kernel), default=0)
            more = kind == "Write" and known_of_it > 0 and "-intervals" in name
            if len(at) > known_of_it + more:
                found.append(f"{after} race with the {kind.lower()}s at {', '.join(sorted(at))} of {kernel}")
    return found


def launch_all(chosen: dict[str, Config]) -> None:
    for name, config in chosen.items():
        if isinstance(config, CachedConfig):
            for fewer in (0, FEWER):
                for label, cached, blocks in cached_problems(config, fewer):
                    launch_cached(config, cached, blocks)
                    print(f"launched {name}, {label}, head dim {cached.head_dim}", flush=True)
        elif isinstance(config, ForwardConfig):
            for fewer in (0, FEWER):
                for label, problem, blocks in forward_problems(config, fewer):
                    if (config.intervals and label == "a cache") or (
                        config.warpgroups == 1 and label == "a fold"
                    ):
                        continue
                    launch_forward(config, problem, blocks, behind=100 if label == "a cache" else 0)
                    print(f"launched {name}, {label}, head dim {problem.head_dim}", flush=True)
        elif isinstance(config, BackwardConfig) and not config.key_sums:
            for label, plan in plans(config):
                launch(config, plan)
                print(f"launched {name}, {label}", flush=True)
        elif isinstance(config, FoldConfig):
            launch_fold(config)
            print(f"launched {name}", flush=True)
        elif isinstance(config, ConvertConfig):
            for label, before, plan in behind_backwards(config):
                launch(before, plan)
                print(f"launched {name}, {label}", flush=True)
        else:
            if isinstance(config, SinkConfig):
                launch_sinks(config)
            else:
                launch_segments(config)
            print(f"launched {name}", flush=True)


def launch_fold(config: FoldConfig) -> None:
    """Behind a forward that splits a tile."""
    before = next(each for each in forward_variants().values() if fold_config(each) == config)
    for label, problem, blocks in forward_problems(before, 0):
        if label == "a fold":
            launch_forward(before, problem, blocks, behind=0)


def behind_backwards(config: ConvertConfig) -> Iterator[tuple[str, BackwardConfig, Plan]]:
    """Backwards that leave something to do: sums of head groups, and dQ where no contribution waits."""
    tickets = MANY_FROM if config.apart == MANY else 1
    before = [each for each in backward_variants().values() if convert_config(each, tickets) == config]
    if config.apart == MANY:
        like = columns(before[0], fewer_of(before[0]))
        keys = tickets * before[0].tile_n
        few_rows = dense(FULL, seqlen_q=100, seqlen_k=keys, seqlen=None, heads=8, kv_heads=1, **like)
        yield "few rows", before[0], auto_plan(few_rows, head_groups=4)
        return
    yield "head groups", before[0], dict(plans(before[0]))["head groups"]
    not_waiting = next(each for each in before if not each.waits)
    label = "apart" if not_waiting.apart else "without order"
    yield label, not_waiting, dict(plans(not_waiting))["window"]


def columns(config: BackwardConfig | ForwardConfig | KeySumsConfig, fewer: int) -> dict[str, Any]:
    """Head dims and dtype of tensors with so many columns fewer than the tiles of a variant."""
    of_v = config.head_dim_v - fewer
    return {"head_dim": config.head_dim - fewer, "head_dim_v": of_v, "dtype": DTYPES[config.dtype]}


def fewer_of(config: BackwardConfig | KeySumsConfig) -> int:
    """How many columns less the tensors of a backward have: up to FEWER if it pads them, but never so many
    that the next smaller kernel would run in its place."""
    own = config.head_dim, config.head_dim_v
    here = (n for n in range(8, FEWER + 1, 8) if kernel_of(own[0] - n, own[1] - n)[:2] == own)
    return max(here) if config.padded else 0


def segment_of(config: BackwardConfig | KeySumsConfig | AddSumsConfig) -> Plan:
    """The plan of a segment of q rows behind others."""
    like = {}
    if not isinstance(config, AddSumsConfig):
        like = columns(config, fewer_of(config))
    problem = dense(CAUSAL, seqlen=None, seqlen_q=200, seqlen_k=300, **like)
    return auto_plan(problem, head_groups=2)


def sums_of(plan: Plan, like: Tensor) -> Tensor:
    """Zeros for the sums of a segment."""
    problem = plan.problem
    return new_key_sums(BACKEND, problem, problem.grid(0).kv_tiles, plan.pattern(0).head_groups, like)


def launch_segments(config: BackwardConfig | KeySumsConfig | AddSumsConfig) -> None:
    """The backward of a segment, its sums added to others, and dK and dV."""
    plan = segment_of(config)
    problem = plan.problem
    given = Tensors(*inputs(problem))
    sums = sums_of(plan, given.q)
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (given.q, given.k, given.v))
    debug = Debug(bounded=isinstance(config, BackwardConfig) and config.spin_limit > 0)
    scale = problem.head_dim**-0.5
    scores = Scores(scale, CAP * (isinstance(config, BackwardConfig) and config.softcap))
    run_segment(plan, given, scores, SegmentTargets(sums, dq), debug=debug)
    total = sums.clone()
    add_sums(total, sums)
    finish_keys(total, scale, dk, dv)
    for name, x in (("dq", dq), ("dk", dk), ("dv", dv)):
        if not x.cpu().isfinite().all():
            raise RuntimeError(f"{name} is not finite")


def launch_sinks(config: SinkConfig) -> None:
    """A backward of a packed batch with a sink, and its gradient, of all rows or of sums of sequences."""
    plan = auto_plan(packed(300, 0, 17, mask=CAUSAL, head_dim=64))
    arguments = inputs(plan.problem)
    sink = torch.zeros(plan.problem.heads, device=arguments[1].device)
    sums = new_sink_sums(3, sink) if config.step else None
    dsink = run_backward(plan, arguments, 0.125, sink=sink, sink_sums=sums).dsink
    if sums is not None:
        dsink = finish_sink(sums, sink.dtype)
    if dsink is None or not dsink.cpu().isfinite().all():
        raise RuntimeError("the gradient of a sink is not finite")


def plans(config: BackwardConfig) -> Iterator[tuple[str, Plan]]:
    """What a variant is launched with: a dense batch with a window. The variants that users get also run with
    blocks that wait for each other at every task, packed with empty sequences, in head groups, and with items
    that take their q heads one after the other."""
    like = columns(config, fewer_of(config))
    yield "window", auto_plan(dense(WINDOW, seqlen=300, **like))
    of_users = BackwardConfig(
        config.head_dim, config.dtype, config.padded, softcap=config.softcap, intervals=config.intervals,
        head_dim_v=config.head_dim_v,
    )  # fmt: skip
    if config.apart or config == of_users:
        yield "rings", build_plan(dense(FULL, seqlen=300, batch=1, **like), Shift(ring=3))
        lengths = ((130, 260), (0, 100), (100, 0), (0, 0), (1, 999), 64)
        yield "packed", auto_plan(packed(*lengths, mask=CAUSAL, **like))
        yield (
            "head groups",
            auto_plan(packed(300, 200, mask=FULL, heads=8, kv_heads=1, **like), head_groups=4),
        )
        yield "head after head", build_plan(dense(WINDOW, seqlen=300, **like), BY_HEAD, head_groups=1)


class PartsAlone(Buffer):
    """Every part an allocation of its own, so that the tool knows its ends."""

    def __init__(self, words: Sequence[int], device: torch.device) -> None:
        self._parts = [torch.empty(n, dtype=torch.float32, device=device) for n in words]
        self.whole, self.addresses = self._parts[0], [x.data_ptr() for x in self._parts]

    def part(self, index: int) -> Tensor:
        return self._parts[index]


def launch(config: BackwardConfig, plan: Plan) -> None:
    """One backward with random inputs, waited for.

    initcheck does not see what bulk operations write to global memory, so fp32 dQ, dumped contributions and
    gradients are filled with NaN first: a gradient made of what was read before it was written, or of
    nothing, would not be finite. Other buffers are as the allocator gives them.
    """
    problem = plan.problem
    tiles = problem.heads * sum(-(-seqlen_q // problem.tile_m) for seqlen_q, _ in problem.sequences)
    size, empty, empty_like, filled = tiles * config.dq_elements, torch.empty, torch.empty_like, []
    if config.apart:
        size *= max(grid.kv_tiles for grid in problem.grids.values())

    def fill(x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype is torch.float32 and x.numel() and x.numel() % size == 0:
            filled.append(x.fill_(torch.nan).numel())
        elif x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
            x.fill_(torch.nan)
        return x

    arguments = inputs(problem)
    debug = Debug(config.spin_limit > 0, config.dump_contributions, config.trace)
    with (
        mock.patch.object(torch, "empty", lambda *args, **how: fill(empty(*args, **how))),
        mock.patch.object(torch, "empty_like", lambda *args, **how: fill(empty_like(*args, **how))),
        mock.patch.object(launcher, "Buffer", PartsAlone),
    ):
        scores = Scores(problem.head_dim**-0.5, CAP * config.softcap)
        rows = rows_of(arguments[2]) if config.intervals else None
        ways = {"ordered": config.ordered, "apart": config.apart}
        result = run_backward(plan, arguments, scores, rows=rows, debug=debug, **ways)
    if size not in filled:
        raise RuntimeError(f"no buffer of {size} fp32 values was allocated for dQ")
    for name in ("dq", "dk", "dv"):
        if not getattr(result, name).cpu().isfinite().all():
            raise RuntimeError(f"{name} is not finite")
    dumped = result.dq_contributions
    if dumped is not None and not contributed(plan, dumped.cpu()).isfinite().all():
        raise RuntimeError("a dumped contribution is not finite")


def forward_problems(config: ForwardConfig, fewer: int) -> Iterator[tuple[str, Problem, int | None]]:
    """What a forward is launched with, and on how many blocks (None: on all). Traced ones have a window."""
    like = columns(config, fewer)
    yield "window", dense(WINDOW, seqlen=300, **like), 3
    if config.trace:
        return
    yield "packed", packed((130, 260), (0, 100), (100, 0), (0, 0), (1, 999), 64, mask=CAUSAL, **like), None
    yield (
        "segments",
        dense(CAUSAL, seqlen_q=200, seqlen_k=FORWARD_SEGMENT + 400, seqlen=None, batch=1, **like),
        2,
    )
    yield (
        "a fold",
        dense(FULL, seqlen_q=1, seqlen_k=FORWARD_SEGMENT + 400, seqlen=None, batch=1, **like),
        None,
    )
    yield "a cache", dense(CAUSAL, seqlen_q=130, seqlen_k=300, seqlen=None, **like), None


def launch_forward(config: ForwardConfig, problem: Problem, blocks: int | None, behind: int) -> None:
    """One forward with random inputs, waited for. What it leaves unwritten is NaN.

    ``behind``: rows of k and v behind the used ones of each sequence, all of them NaN.
    """
    empty, empty_like = torch.empty, torch.empty_like

    def fill(x: Tensor) -> Tensor:
        return x.fill_(torch.nan) if x.is_cuda and x.is_floating_point() else x

    q, k, v = inputs(problem)[1:4]
    with (
        mock.patch.object(forward_launcher, "Buffer", PartsAlone),
        mock.patch.object(torch, "empty", lambda *args, **how: fill(empty(*args, **how))),
        mock.patch.object(torch, "empty_like", lambda *args, **how: fill(empty_like(*args, **how))),
    ):
        keys = None
        if behind:
            k, v = (F.pad(x, (0, 0, 0, 0, 0, behind), value=torch.nan) for x in (k, v))
            keys = Keys(tuple(k.shape), None)
        how = {"keys": keys, "blocks": blocks, "config": config, "turns": config.in_turns, "narrow": False}
        forward, trace = Forward(problem, q.device, **how), None
        if config.trace:
            trace = empty_trace(forward.plan(), q.device)
        sink = torch.zeros(problem.heads, device=q.device) if config.sink else None
        rows = rows_of(k) if config.intervals else None
        scores = Scores(problem.head_dim**-0.5, CAP * config.softcap)
        out, lse = forward(
            q, k, v, scores.softmax_scale, sink=sink, trace=trace, rows=rows, cap=cap_of(scores)
        )
    if not out.cpu().isfinite().all() or lse.cpu().isnan().any():
        raise RuntimeError("out or lse is not a number")
    if trace is not None and not trace[:, :2].cpu().all():
        raise RuntimeError("an item left no record")


def rows_of(k: Tensor) -> RowIntervals:
    """Intervals of rows of up to 200 rows that begin at any of 300; none of the second hundred of keys."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(300, k.shape[:-2], generator=generator, dtype=torch.int32)
    ends = starts + torch.randint(200, k.shape[:-2], generator=generator, dtype=torch.int32)
    ends[..., 100:260] = 0
    return RowIntervals(starts.cuda(), ends.cuda())


def contributed(plan: Plan, dumped: Tensor) -> Tensor:
    """Of dumped contributions, by tile and ticket, those that there are, (., tile_m, head_dim)."""
    sequences = range(len(plan.problem.sequences))
    counts = [plan.pattern(i).grid.contributions for i in sequences for _ in range(plan.problem.heads)]
    each = torch.tensor([int(count) for of_head in counts for count in of_head])
    return dumped[torch.arange(dumped.shape[1]) < each[:, None]]


def inputs(problem: Problem) -> list[Tensor]:
    """dout, q, k, v, out, lse: made on the CPU, so that few kernels but ours run."""
    generator = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(problem)
    *sizes, stats = shapes.get(4, shapes[3]).of_tensors
    dtype = getattr(torch, problem.dtype)
    tensors = [torch.randn(shape, generator=generator).to(dtype).cuda() for shape in sizes]
    return [*tensors, torch.full(stats, 6.0).cuda()]


if __name__ == "__main__":
    sys.exit(main())
