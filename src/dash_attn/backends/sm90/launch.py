"""Launching the Hopper kernels on PyTorch tensors: the GPU backend of :func:`dash_attn.attention`.

Tensors of rank 4 are dense batches, (batch, seqlen, heads, head_dim). Those of rank 3, (total, heads,
head_dim), are packed: the rows of all sequences of the plan's problem one after the other.

Every call has a workspace of its own (fp32 dQ, row statistics, ticket counters), allocated on the current
stream, so that calls on several streams share nothing. What a plan keeps on a device is uploaded once;
a call that finds it there neither copies nor waits, and can be captured in a CUDA graph.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...errors import HandOverError
from ...problem import Problem
from ...schedule.plan import Plan
from ...schedule.proof import check_workers
from ..cuda.multiprocessors import multiprocessors, usable_multiprocessors
from ..cuda.turns import in_turn
from .backward.config import CONTROL_WORDS, Accumulation, BackwardConfig
from .compile import program
from .forward import forward as any_forward
from .forward import why_no_forward
from .resident import OnDevice, on_device

__all__ = [
    "Debug",
    "Result",
    "backward",
    "forward",
    "run_backward",
    "unordered_backward",
    "why_not",
]

_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
SPIN_LIMIT = 2_000_000
"""Polls after which a bounded wait gives up: a few seconds."""


@dataclass(frozen=True)
class Debug:
    """What a debugging run does besides its work. Each is a kernel variant of its own.

    Attributes:
        bounded: waits for tickets end in a HandOverError instead of lasting for ever.
        contributions: keep every task's fp32 contribution to dQ.
        trace: keep when every task got its ticket, had its contribution, and was done.
    """

    bounded: bool = False
    contributions: bool = False
    trace: bool = False


@dataclass(frozen=True)
class Result:
    """Gradients of one launch, and what a debugging run kept.

    Attributes:
        dq, dk, dv: in the shapes and dtype of q, k, v.
        dq_contributions: (dq tiles, kv tiles, tile_m, head_dim) fp32, unscaled, by ticket; None unless asked
            for. dQ tiles count over sequences, q heads and q tiles.
        dq_tiles: (dq tiles, tile_m, head_dim) fp32 sums, unscaled; None unless contributions were asked for.
        trace: (dq tiles, kv tiles, 4) int64: nanoseconds at which the ticket was granted, the contribution
            was ready, and it was performed in global memory, and the SM; None unless asked for.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dq_contributions: Tensor | None = None
    dq_tiles: Tensor | None = None
    trace: Tensor | None = None


def why_not(problem: Problem, device: torch.device, packed: bool = False) -> str:
    """Why a problem, given as packed or dense tensors, cannot run on a GPU; empty if it can."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"{device} is sm_{major}{minor}; the kernels are for Hopper, sm_90"
    if problem.dtype not in _DTYPES:
        return f"dtype {problem.dtype} is not supported on a GPU; supported: {', '.join(_DTYPES)}"
    if problem.head_dim not in (64, 128):
        return f"head_dim {problem.head_dim} is not supported on a GPU; supported: 64, 128"
    return why_no_forward(problem, packed)


def forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse); the forward has no schedule.

    lse is (batch, heads, seqlen_q) of dense and (heads, total_q) of packed tensors, fp32, natural logarithm.
    Rows that see no key: out 0, lse -inf.
    """
    if not q.numel() or not k.numel():
        *batch, seqlen_q, heads, _ = q.shape
        return torch.zeros_like(q), q.new_full((*batch, heads, seqlen_q), -torch.inf, dtype=torch.float32)
    lengths = on_device(plan, q.device).lengths if q.dim() == 3 else None
    return any_forward(plan.problem, _loadable(q), _loadable(k), _loadable(v), softmax_scale, lengths)


def backward(
    plan: Plan, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), bitwise the same on every call. See :func:`run_backward`."""
    result = run_backward(plan, dout, q, k, v, out, lse, softmax_scale)
    return result.dq, result.dk, result.dv


def unordered_backward(
    plan: Plan, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) with dQ summed by atomics in no fixed order: the negative control."""
    result = run_backward(plan, dout, q, k, v, out, lse, softmax_scale, ordered=False)
    return result.dq, result.dk, result.dv


def run_backward(
    plan: Plan,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    *,
    ordered: bool = True,
    workers: int | None = None,
    debug: Debug | None = None,
) -> Result:
    """One backward of a plan on a Hopper GPU.

    Args:
        plan: a verified plan of the sequences in the tensors.
        dout, q, out: (batch, seqlen_q, heads, head_dim), or packed (total_q, heads, head_dim), bf16 or fp16,
            CUDA, any strides.
        k, v: (batch, seqlen_k, kv_heads, head_dim), or packed (total_k, kv_heads, head_dim).
        lse: (batch, heads, seqlen_q), or packed (heads, total_q), fp32, natural logarithm.
        softmax_scale: factor on Q K^T.
        ordered: False adds as contributions come, by atomics: the negative control.
        workers: thread blocks to launch, at most one a SM, all of which get items. By default as many as are
            of use; a few of them may only convert dQ.
        debug: see :class:`Debug`.

    Raises:
        TooFewWorkersError: the plan needs more resident workers than there are, or than the SMs that
            the context or the stream is limited to.
        HandOverError: a bounded wait gave up (``debug.bounded`` only).
    """
    debug = debug or Debug()
    problem = plan.problem
    if not q.numel() or not k.numel():
        return Result(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
    config = _config(problem.head_dim, problem.dtype, ordered, debug)
    ring = ordered and plan.min_workers > 1
    available = usable_multiprocessors(q.device) if ring else multiprocessors(q.device)
    if workers is not None:
        available = min(workers, available)
    if ordered:
        check_workers(plan, available)
    place = on_device(plan, q.device)
    deal = ordered and workers is None
    blocks, with_items = place.blocks(available) if deal else (available, available)
    run = program(config)  # compiled before others wait for this launch's turn
    work = _Workspace(config, place, problem.heads, q.device)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    tensors = [_loadable(x) for x in (q, k, v, out, dout)] + [lse.contiguous(), dq, dk, dv]
    if q.dim() == 3:
        tensors = [x.unsqueeze(0) for x in tensors]
    with torch.cuda.device(q.device), in_turn(q.device) if ring else nullcontext():
        run(
            *tensors, place.table,
            work.lse2, work.delta, work.dq, work.group_sums, work.control, work.errors, work.dq_contributions,
            work.trace, softmax_scale, place.q_tiles, place.kv_tiles if place.group_sums else 0,
            blocks, with_items, problem.heads * place.complete_q_tiles,
        )  # fmt: skip
    if debug.bounded:
        _check_hand_overs(work.errors)
    tiles, tickets = problem.heads * place.q_tiles, place.tickets
    shape = (tiles, tickets, problem.tile_m, problem.head_dim)
    order = _accumulator_order(config.tile_m, config.head_dim).to(q.device) if debug.contributions else None
    dumped = work.dq_contributions
    return Result(
        dq, dk, dv,
        dumped.view(tiles, tickets, -1)[..., order].view(shape) if debug.contributions else None,
        work.dq.view(tiles, -1)[..., order] if debug.contributions else None,
        work.trace.view(tiles, tickets, 4) if debug.trace else None,
    )  # fmt: skip


@cache
def _config(head_dim: int, dtype: str, ordered: bool, debug: Debug) -> BackwardConfig:
    return BackwardConfig(
        head_dim,
        _DTYPES[dtype],
        accumulation=Accumulation.TICKETS if ordered else Accumulation.ATOMIC,
        spin_limit=SPIN_LIMIT if debug.bounded else 0,
        dump_contributions=debug.contributions,
        trace=debug.trace,
    )


class _Workspace:
    """Buffers of one call. The kernels initialise what they read, so nothing is zeroed here."""

    def __init__(self, config: BackwardConfig, place: OnDevice, heads: int, device: torch.device) -> None:
        def empty(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        tiles = heads * place.q_tiles
        self.lse2, self.delta = empty(tiles * config.tile_m), empty(tiles * config.tile_m)
        self.dq = empty(tiles * config.dq_elements)
        self.control = empty(CONTROL_WORDS + 2 * tiles, torch.int32)
        # What only debugging variants or head groups need is a constant for the others.
        self.errors, self.dq_contributions, self.trace, self.group_sums = _unused(device)
        if place.group_sums:
            self.group_sums = empty(place.group_sums * 2 * config.tile_n * config.head_dim)
        if config.spin_limit:
            self.errors = torch.zeros(8, dtype=torch.int32, device=device)
        if config.dump_contributions:
            self.dq_contributions = empty(tiles * place.tickets * config.dq_elements).view(tiles, -1)
        if config.trace:
            self.trace = torch.zeros(tiles, 4 * place.tickets, dtype=torch.int64, device=device)


@cache
def _unused(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.zeros(8, dtype=torch.int32, device=device),
        torch.zeros(1, 4, device=device),
        torch.zeros(1, 4, dtype=torch.int64, device=device),
        torch.zeros(32, device=device),
    )


def _loadable(x: Tensor) -> Tensor:
    """x itself if the copy engine can read it: last dimension contiguous, rows and base 16-byte aligned."""
    *strides, last = x.stride()
    unit = 16 // x.element_size()
    if last == 1 and x.data_ptr() % 16 == 0 and all(s % unit == 0 and s > 0 for s in strides):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _check_hand_overs(errors: Tensor) -> None:
    failed, sequence, head, kv_tile, q_tile, expected, seen, _ = errors.tolist()
    if failed and sequence < 0:
        raise HandOverError(f"{seen} of {expected} dQ tiles got all their contributions")
    if failed:
        raise HandOverError(
            f"sequence {sequence}, q head {head}, kv tile {kv_tile}, q tile {q_tile}: waited for ticket "
            f"{expected}, the counter stayed at {seen}"
        )


@cache
def _accumulator_order(tile_m: int, head_dim: int) -> Tensor:
    """(tile_m, head_dim) index into a dQ tile as the kernel keeps it: in the order of its registers."""
    rows, columns = torch.arange(tile_m)[:, None], torch.arange(head_dim)[None, :]
    if tile_m == 64:  # the two warpgroups share the columns, otherwise the rows
        group, column, row = columns // (head_dim // 2), columns % (head_dim // 2), rows
    else:
        group, column, row = rows // 64, columns, rows % 64
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    element = row % 16 // 8 * 2 + column % 2
    vectors = tile_m * head_dim // 1024
    return ((group * vectors + column // 8) * 128 + thread) * 4 + element
