"""Launching the Hopper backward on PyTorch tensors.

Tensors of rank 4 are dense batches, (batch, seqlen, heads, head_dim). Those of rank 3, (total, heads,
head_dim), are packed: the rows of all sequences of the plan's problem one after the other.

Every call has a workspace of its own (fp32 dQ, row statistics, and ticket counters where contributions
wait), allocated on the current stream, so that calls on several streams share nothing. What a plan keeps on
a device is uploaded once. A call that finds it there neither copies nor waits, and can be captured in a CUDA
graph.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import HandOverError, InputError, PlanMismatchError
from ...schedule.plan import Plan
from ...schedule.proof import check_workers
from ...scores import Scores, scores_of
from ..base import NOTHING, Gradients, RowIntervals, Tensors, as_current
from ..cuda.multiprocessors import multiprocessors, usable_multiprocessors
from ..cuda.turns import in_turn
from ..cuda.upload import loadable
from ..shapes import Shapes
from .backward import arguments
from .backward.config import Accumulation, BackwardConfig
from .compile import program
from .convert.config import convert_config
from .places import Buffer, address_of, place_of
from .resident import OnDevice, on_device
from .sinks.launch import Statistics, add_to_sink_sums, sink_gradient
from .softcap import cap_of
from .tiles import SHORT_DTYPES, Kernel, has_softcap_apart, kernel_of

__all__ = [
    "NO_DEBUG",
    "Debug",
    "Demand",
    "Result",
    "Workspace",
    "check_hand_overs",
    "check_tensors",
    "launch",
    "run_backward",
    "variant_of",
]

SPIN_LIMIT = 2_000_000
"""Polls after which a bounded wait gives up: a few seconds."""
_SUMS = slice(arguments.PARTS.index("dq_acc"), arguments.PARTS.index("group_sums") + 1)
"""The parts of a buffer that `convert.arguments.Parts` names."""


class Debug(NamedTuple):
    """What a debugging run does besides its work. Each is a kernel variant of its own.

    Attributes:
        bounded: waits for tickets end in a HandOverError instead of lasting for ever.
        contributions: keep every task's fp32 contribution to dQ.
        trace: keep when every task got its ticket, had its contribution, and was done.
    """

    bounded: bool = False
    contributions: bool = False
    trace: bool = False


NO_DEBUG = Debug()


@dataclass(frozen=True)
class Result:
    """Gradients of one launch, and what a debugging run kept.

    Attributes:
        dq, dk, dv: in the shapes and dtype of q, k, v.
        dsink: (heads,) fp32; None without a sink.
        dq_contributions: (dq tiles, kv tiles, tile_m, head_dim) fp32, unscaled, by ticket; None unless asked
            for. dQ tiles count over sequences, q heads and q tiles.
        dq_tiles: (dq tiles, tile_m, head_dim) fp32 sums, unscaled; None unless contributions were asked for.
        trace: (dq tiles, kv tiles, 4) int64: nanoseconds at which the ticket was granted, the contribution
            was ready, and it was performed in global memory, and the SM; None unless asked for.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None = None
    dq_contributions: Tensor | None = None
    dq_tiles: Tensor | None = None
    trace: Tensor | None = None


def run_backward(
    plan: Plan,
    tensors: Sequence[Tensor],
    scores: Scores | float,
    *,
    sink: Tensor | None = None,
    sink_sums: Tensor | None = None,
    rows: RowIntervals | None = None,
    ordered: bool = True,
    apart: bool | None = False,
    workers: int | None = None,
    debug: Debug | None = None,
) -> Result:
    """One backward of a plan on a Hopper GPU.

    Args:
        plan: a proven plan of the sequences in the tensors, with the tiles of the kernels.
        tensors: dout, q, k, v, out and lse (:class:`Tensors`), bf16 or fp16 with any strides, lse fp32.
        scores: what becomes of Q K^T; a number is a softmax scale.
        sink: (heads,) fp32, contiguous, as in the forward.
        sink_sums: as in :meth:`.Prepared.backward`.
        rows: which rows see each key, as in the forward.
        ordered: False adds as contributions come, by atomics: the negative control.
        apart: contributions to dQ are kept apart, and added behind the main kernel in the same order, so with
            the same bits. None, which users get: where that is faster, and as long as there is memory for
            it. By default they wait.
        workers: thread blocks to launch, at most one per SM, all of which get items. By default as many as
            are of use; a few of them may only convert dQ.
        debug: see :class:`Debug`.

    Raises:
        InputError: ``apart`` without an order.
        PlanMismatchError: the tensors are not of the plan's problem, or its tiles are not the kernels'.
        TooFewWorkersError: contributions wait, and the plan needs more resident workers than there are, or
            than the SMs that the context or the stream is limited to.
        HandOverError: a bounded wait gave up (``debug.bounded`` only).
    """
    given, debug, scores = Tensors(*tensors), debug or NO_DEBUG, scores_of(scores)
    q, k, v = given.q, given.k, given.v
    if not q.numel() or not k.numel():
        # No row, or no row with an output.
        nothing = torch.zeros_like(sink) if sink is not None and sink_sums is None else None
        return Result(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), nothing)
    place = on_device(plan, q.device)
    check_tensors(place, plan, given)
    softcap, intervals = scores.softcap > 0, rows is not None
    if may_wait := apart is None:
        plain = ordered and debug is NO_DEBUG and workers is None and not intervals
        apart = plain and place.apart and (not softcap or has_softcap_apart(q.shape[-1], v.shape[-1]))
    elif apart and not ordered:
        raise InputError("contributions that are apart have an order: apart=True beside ordered=False")
    asked = Demand(ordered, debug, softcap=softcap, intervals=intervals, apart=apart)
    made = None
    try:
        made = _launched(plan, place, given, scores, asked, rows, workers)
    except torch.OutOfMemoryError:  # before anything was launched
        if not (apart and may_wait) or torch.cuda.is_current_stream_capturing():
            raise
    if made is None:  # what was allocated is free again
        made = _launched(plan, place, given, scores, asked._replace(apart=False), rows, workers)
        place.apart = False
    work, grads = made
    if sink is not None:
        statistics = work.statistics(len(plan.problem.sequences))
        if sink_sums is None:
            grads = grads._replace(dsink=sink_gradient(statistics, sink))
        else:
            add_to_sink_sums(sink_sums, statistics, sink)
    return Result(*grads) if debug is NO_DEBUG else work.result(grads, debug)


def _launched(
    plan: Plan,
    place: OnDevice,
    given: Tensors,
    scores: Scores,
    asked: Demand,
    rows: RowIntervals | None,
    workers: int | None,
) -> tuple[Workspace, Gradients]:
    """The kernels launched, but for those of a sink."""
    variant = place.variants.get(asked) or variant_of(place, plan, asked)
    work = Workspace(variant, place, given.q.device, rows=rows)
    like = given.q, given.k, given.v
    grads = Gradients(*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in like))
    launch(plan, (variant, place, work), given, grads, scores, workers)
    return work, grads


Made = tuple["Variant", OnDevice, "Workspace"]


def launch(
    plan: Plan,
    made: Made,
    given: Tensors,
    grads: Gradients,
    scores: Scores,
    workers: int | None,
) -> None:
    """Run the kernels, but for those of a sink."""
    variant, place, work = made
    q, k, v, waits = given.q, given.k, given.v, variant.config.waits
    ring = waits and place.min_workers > 1
    available = usable_multiprocessors(q.device) if ring else multiprocessors(q.device)
    if workers is not None:
        available = min(workers, available)
    blocks = with_items = min(available, place.items)
    if waits:
        check_workers(plan, available)
        blocks, with_items = place.blocks(available) if workers is None else (available, available)
    # As in arguments.MATRICES. They, and what is copied, live until the launch is on its stream.
    matrices = [*map(loadable, (q, k, v, given.out, given.dout)), *grads[:3]]
    places, extents = [*map(place_of, matrices)], place.extents(q, k, v)
    lse = given.lse.contiguous()
    numbers = arguments.Launch(
        scale=scores.softmax_scale,
        q_tiles=place.q_tiles,
        grid=blocks,
        workers=with_items,
        complete=place.complete_tiles,
    )
    with as_current(q.device), in_turn(q.device) if ring else NOTHING:
        variant.run(
            *work.tensors, *chain.from_iterable(places), address_of(lse), *extents, *work.buffer.addresses,
            *variant.sizes, *numbers, *cap_of(scores),
        )  # fmt: skip
        if variant.convert is not None:
            # As in convert.arguments.Launch.
            left = 0 if waits else place.q_tiles, place.kv_tiles if place.group_sums else 0
            variant.convert(
                work.tensors[0], *chain.from_iterable(places[-3:]), *extents, *work.buffer.addresses[_SUMS],
                *variant.sizes[_SUMS], scores.softmax_scale, *left,
            )  # fmt: skip


class Variant(NamedTuple):
    """A kernel variant for a plan: its configuration, the compiled program, the one behind it if there is
    something left to do, and the sizes of its buffers."""

    config: BackwardConfig
    run: Any
    convert: Any
    sizes: list[int]


class Demand(NamedTuple):
    """What of a launch decides the kernel variant, beside the problem."""

    ordered: bool
    debug: Debug
    key_sums: bool = False
    softcap: bool = False
    intervals: bool = False
    apart: bool = False


def variant_of(place: OnDevice, plan: Plan, asked: Demand) -> Variant:
    problem = plan.problem
    kernel = kernel_of(problem.head_dim, problem.head_dim_v)
    config = _config(kernel, problem.dtype, asked, SPIN_LIMIT)
    leaves = not config.waits or place.group_sums > 0
    convert = program(convert_config(config, place.tickets)) if leaves else None
    found = place.variants[asked] = Variant(config, program(config), convert, place.workspace(config))
    return found


def check_tensors(place: OnDevice, plan: Plan, given: Tensors) -> None:
    """The plan's shapes and dtype, and one device: kernels take them from the plan table and from q."""
    dout, q, k, v, out, lse = given
    shapes, device = place.shapes.get(q.dim(), Shapes().of_tensors), q.device
    if (
        (dout.shape, q.shape, k.shape, v.shape, out.shape, lse.shape) == shapes
        and (dout.dtype, q.dtype, k.dtype, v.dtype, out.dtype, lse.dtype) == place.dtypes
        and dout.device == device == k.device == v.device == out.device == lse.device
    ):
        return
    for name, x, shape, dtype in zip(Tensors._fields, given, shapes, place.dtypes):
        if x.shape != shape or x.dtype != dtype:
            raise PlanMismatchError(
                f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}; {plan} is for "
                f"{shape or 'packed tensors'} and {dtype}"
            )
        if x.device != device:
            raise PlanMismatchError(f"{name} is on {x.device}, q on {device}")


@cache
def _config(kernel: Kernel, dtype: str, asked: Demand, spin_limit: int) -> BackwardConfig:
    debug = asked.debug
    return BackwardConfig(
        kernel.head_dim,
        SHORT_DTYPES[dtype],
        kernel.padded or asked.intervals,
        Accumulation.APART if asked.apart else Accumulation.TICKETS if asked.ordered else Accumulation.ATOMIC,
        key_sums=asked.key_sums,
        softcap=asked.softcap,
        intervals=asked.intervals,
        spin_limit=spin_limit if debug.bounded else 0,
        dump_contributions=debug.contributions,
        trace=debug.trace,
        head_dim_v=kernel.head_dim_v,
    )


class Workspace:
    """The plan on the device and the buffers of one call. The kernels initialise what they read.

    Attributes:
        tensors: what a launch is given as tensors, see ``arguments.tensors_of``.
        buffer: its parts are ``arguments.PARTS``.
    """

    def __init__(
        self,
        variant: Variant,
        place: OnDevice,
        device: torch.device,
        key_sums: Tensor | None = None,
        rows: RowIntervals | None = None,
    ) -> None:
        self.config, self.place = variant.config, place
        self.buffer = Buffer(variant.sizes, device)
        self.tensors = [place.table, self.buffer.whole]
        if key_sums is not None:
            self.tensors.append(key_sums)
        tiles = place.heads * place.q_tiles
        if self.config.spin_limit:
            self.errors = torch.zeros(8, dtype=torch.int32, device=device)
            self.tensors.append(self.errors)
        if self.config.dump_contributions:
            size = tiles * place.tickets * self.config.dq_elements
            self.contributions = torch.empty(size, dtype=torch.float32, device=device).view(tiles, -1)
            self.tensors.append(self.contributions)
        if self.config.trace:
            self.trace = torch.zeros(tiles, 4 * place.tickets, dtype=torch.int64, device=device)
            self.tensors.append(self.trace)
        if rows is not None:
            self.tensors += map(torch.flatten, rows)
            self.tensors += [
                torch.empty(shape, dtype=torch.int32, device=device) for shape in place.seen_shapes
            ]

    def part(self, name: str) -> Tensor:
        """A part of the buffer, one of ``arguments.PARTS``."""
        return self.buffer.part(arguments.PARTS.index(name))

    def statistics(self, sequences: int) -> Statistics:
        """What the kernels of a sink read, of so many sequences."""
        return Statistics(self.place.table, self.part("lse2"), self.part("delta"), sequences)

    def result(self, grads: Gradients, debug: Debug) -> Result:
        """The gradients with what a debugging run kept."""
        config, tickets = self.config, self.place.tickets
        tiles = self.place.heads * self.place.q_tiles
        trace = self.trace.view(tiles, tickets, 4) if debug.trace else None
        if debug.bounded:
            check_hand_overs(self.errors, trace)
        if not debug.contributions:
            return Result(*grads, trace=trace)
        order = _accumulator_order(config.tile_m, config.head_dim).to(grads.dq.device)
        shape = (tiles, tickets, config.tile_m, config.head_dim)
        contributions = self.contributions.view(tiles, tickets, -1)[..., order].view(shape)
        return Result(*grads, contributions, self.part("dq_acc").view(tiles, -1)[..., order], trace)


def check_hand_overs(errors: Tensor, trace: Tensor | None) -> None:
    failed, sequence, head, kv_tile, q_tile, expected, seen, _ = errors.tolist()
    if not failed:
        return
    if sequence < 0:
        what = f"{seen} of {expected} dQ tiles got all their contributions"
    else:
        what = (
            f"sequence {sequence}, q head {head}, kv tile {kv_tile}, q tile {q_tile}: waited for ticket "
            f"{expected}, the counter stayed at {seen}"
        )
    raise HandOverError(what if trace is None else f"{what}; {_saved(trace)}")


def _saved(trace: Tensor) -> str:
    """Save what a trace holds (:class:`Result`), and say where."""
    descriptor, path = tempfile.mkstemp(prefix="dash-attn-trace-", suffix=".npy")
    with open(descriptor, "wb") as file:
        np.save(file, trace.cpu().numpy())
    done = int((trace[..., 2] > 0).sum())
    return f"{done} contributions were made until then; when, and on which SM, is in {path}"


@cache
def _accumulator_order(tile_m: int, head_dim: int) -> Tensor:
    """(tile_m, head_dim) index into a dQ tile as the kernel keeps it: in the order of its registers."""
    rows, columns = (torch.arange(n, device="cpu") for n in (tile_m, head_dim))
    rows, columns = rows[:, None], columns[None, :]
    if tile_m == 64:  # the two warpgroups share the columns, otherwise the rows
        group, column, row = columns // (head_dim // 2), columns % (head_dim // 2), rows
    else:
        group, column, row = rows // 64, columns, rows % 64
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    element = row % 16 // 8 * 2 + column % 2
    vectors = tile_m * head_dim // 1024
    return ((group * vectors + column // 8) * 128 + thread) * 4 + element
