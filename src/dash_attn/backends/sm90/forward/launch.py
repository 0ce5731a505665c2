"""Launching the Hopper forward on PyTorch tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....errors import InputError, PlanMismatchError
from ....machine import IN_TURNS_TILES, NARROW_ITEMS, NARROW_TILES, WORKERS
from ....problem import Problem
from ....schedule import ForwardNumerics, ForwardPlan, build_forward_plan
from ...base import RowIntervals
from ...cuda.multiprocessors import multiprocessors
from ...cuda.upload import Upload, loadable
from ...shapes import Keys
from ..compile import program
from ..fold.config import fold_config
from ..places import Buffer, Sizes, address_of, place_of, sizes_of
from ..softcap import Cap
from ..tiles import SHORT_DTYPES, forward_kernel_of
from .arguments import BOUNDS_WORDS
from .config import ForwardConfig, forward_config
from .table import forward_table

__all__ = ["Forward", "config_of", "numerics_of", "why_no_scale"]


@lru_cache
def why_no_scale(softmax_scale: float) -> str:
    """Why the kernel cannot use a scale: in float32 and base 2 it would be 0, negative or infinite."""
    with np.errstate(over="ignore"):
        scale = np.float32(softmax_scale)
        in_base_2 = scale * np.float32(math.log2(math.e))
    if scale > 0 and np.isfinite(in_base_2):
        return ""
    return (
        f"for sm90 softmax_scale must be positive, and softmax_scale log2(e) finite, in float32, "
        f"got {softmax_scale}"
    )


def config_of(problem: Problem) -> ForwardConfig:
    """What a problem runs with."""
    head_dim, head_dim_v, rest = forward_kernel_of(problem.head_dim, problem.head_dim_v)
    return forward_config(head_dim, SHORT_DTYPES[problem.dtype], head_dim_v, rest)


def numerics_of(problem: Problem) -> ForwardNumerics:
    """What decides the bits of out and lse. At head dims above 192 kv tiles have 64 keys."""
    return _numerics(problem, config_of(problem))


def _faster_in_turns(config: ForwardConfig, plan: ForwardPlan) -> bool:
    """Whether warpgroups better start their products in turns: with few kv tiles they stay in step."""
    if not config.may_take_turns or plan.items > IN_TURNS_TILES * WORKERS:
        return config.in_turns
    longest, tiles = int(plan.kv_tiles.max(initial=0)), int(plan.kv_tiles.sum()) * plan.problem.heads
    return longest <= IN_TURNS_TILES and tiles <= IN_TURNS_TILES * WORKERS


def _faster_narrow(config: ForwardConfig, plan: ForwardPlan, narrow: ForwardPlan) -> bool:
    """Whether blocks of one warpgroup are faster, by how long the last worker has kv tiles at least."""
    return NARROW_TILES[config.head_dim] * _kv_tiles_in_a_row(narrow) < _kv_tiles_in_a_row(plan)


def _kv_tiles_in_a_row(plan: ForwardPlan) -> float:
    """No way to deal items to WORKERS leaves all with less kv tiles. Of k * WORKERS + 1 items one worker has
    k + 1. Entries of a plan come by their length."""
    tiles, heads = plan.kv_tiles, plan.problem.heads
    rounds = np.arange(-(-plan.items // WORKERS))
    several = (rounds + 1) * tiles[rounds * WORKERS // heads]
    return max(float(several.max(initial=0)), float(tiles.sum()) * heads / WORKERS)


def _numerics(problem: Problem, config: ForwardConfig) -> ForwardNumerics:
    numbers = config.tile_n, config.segment, config.keep, config.room
    return ForwardNumerics(problem.head_dim, problem.dtype, *numbers, head_dim_v=problem.head_dim_v)


class _Ready(NamedTuple):
    """What stays the same from call to call: the table on the device, extents, and the shape of lse."""

    upload: Upload
    extents: Sizes
    lse: tuple[int, ...]


class Forward:
    """The forward of a problem on a device. What a batch needs there is uploaded by the first call.

    Args:
        problem: what to compute.
        device: a Hopper GPU.
        keys: where the keys lie, if not as in the backward.
        blocks: thread blocks to launch, by default one per SM. Blocks never wait for one another, so any
            number ends, and none changes a bit.
        config: another configuration than the problem's, for tests.
        turns: whether warpgroups start their products in turns; None: where that is faster. It changes no
            bit.
        narrow: whether blocks have one warpgroup; None: where that is faster, unless ``turns`` says
            something. It changes no bit.
    """

    def __init__(
        self,
        problem: Problem,
        device: torch.device,
        *,
        keys: Keys | None = None,
        blocks: int | None = None,
        config: ForwardConfig | None = None,
        turns: bool | None = None,
        narrow: bool | None = None,
    ) -> None:
        self._problem, self._device, self._keys, self._blocks = problem, device, keys, blocks
        self._turns, self._narrow = turns, narrow
        self.config = config_of(problem) if config is None else config
        self._ready: dict[tuple[int, int], _Ready] = {}  # by the step of keys, and the rank of q
        self._dtypes = (getattr(torch, problem.dtype),) * 3

    def plan(self) -> ForwardPlan:
        """What the device will do."""
        return self._chosen()[1]

    def _chosen(self) -> tuple[ForwardConfig, ForwardPlan]:
        """What runs, and its plan."""
        config, plan = self.config, self._plan_of(self.config)
        narrow, turns = self._narrow, self._turns
        if config.may_be_narrow and narrow is not False and (narrow or turns is None):
            if narrow or plan.items <= NARROW_ITEMS * WORKERS:
                other = self._plan_of(config.as_narrow())
                # Folds have a program by the warpgroups of a block, and none for one.
                if not len(other.folds) and (narrow or _faster_narrow(config, plan, other)):
                    return config.as_narrow(), other
        turns = _faster_in_turns(config, plan) if turns is None else turns
        return config if turns == config.in_turns else replace(config, in_turns=turns), plan

    def _plan_of(self, config: ForwardConfig) -> ForwardPlan:
        numerics = _numerics(self._problem, config)
        return build_forward_plan(self._problem, config.tile_m, self._available(), numerics)

    def _available(self) -> int:
        return multiprocessors(self._device) if self._blocks is None else self._blocks

    def _prepare(self, step: int, rank: int, extents: Sizes) -> _Ready:
        problem, available, (config, plan) = self._problem, self._available(), self._chosen()
        starts = None if self._keys is None else self._keys.starts
        table = forward_table(plan, [i * step for i in range(len(problem.sequences))] if step else starts)
        upload = Upload(f"the forward of {problem.heads} heads", [table], self._device)
        grid = max(1, min(available, plan.items))
        several = int(problem.lengths[:, 1].max()) > config.segment
        partial = plan.places * problem.heads * config.warpgroups * config.partial_words
        # As in arguments.PARTS.
        self._words = [32, *(max(n, 32) for n in (several * grid * config.state_words, partial))]
        # As in arguments.Launch, behind the scale.
        self._numbers = (len(plan.entries), plan.section, grid, *problem.mask.sides)
        self._program = program(config)
        # As in fold.arguments.Launch, behind the addresses.
        self._of_fold = (self._words[-1], len(plan.entries), len(plan.folds))
        self._fold = program(fold_config(config)) if len(plan.folds) else None
        return _Ready(upload, extents, (extents.batch, extents.heads, extents.rows)[4 - rank :])

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float,
        *,
        sink: Tensor | None = None,
        trace: Tensor | None = None,
        rows: RowIntervals | None = None,
        cap: Cap | tuple[()] = (),
    ) -> tuple[Tensor, Tensor]:
        """out and lse (fp32, natural logarithm) of tensors of the problem's shapes, k and v of the keys'.

        Shapes: q and out (batch, seqlen_q, heads, head_dim), lse (batch, heads, seqlen_q); packed: q and out
        (total_q, heads, head_dim), lse (heads, total_q). The head_dim of out is that of v. With keys, k and v
        may be packed where q is dense.
        ``sink``, ``trace``, ``rows`` and ``cap`` belong to configurations that have them: (heads,) float32,
        contiguous; (items, 3) int64, see :class:`~.traced.Traced`; which rows see each key; the numbers of a
        softcap.

        Raises:
            InputError: the scale is not positive or too large, or a first call is captured in a CUDA graph.
            PlanMismatchError: a tensor has another dtype than the problem, or is on another device than q.
        """
        if reason := why_no_scale(softmax_scale):
            raise InputError(reason)
        self._check(q, k, v)
        if v.shape[-1] == q.shape[-1]:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)  # takes less time
        else:
            out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
        # They, and what is copied, live until the launch is on its stream.
        q, k, v = loadable(q), loadable(k), loadable(v)
        step = 0
        if self._keys is not None:
            k, v = (x.unsqueeze(0) if x.dim() == 3 else x for x in (k, v))
            if k.shape[0] > 1:
                k, v, step = _as_packed(k, v)
        key, device = (step, q.dim()), q.device
        ready = self._ready.get(key) or self._ready.setdefault(key, self._prepare(*key, sizes_of(q, k, v)))
        lse = torch.empty(ready.lse, dtype=torch.float32, device=device)
        buffer, (table,), extents = Buffer(self._words, device), ready.upload.use(), ready.extents
        sinks, of_out, of_lse = () if sink is None else (sink,), place_of(out), address_of(lse)
        traces = () if trace is None else (trace.view(-1),)
        self._program(
            table, buffer.whole, *sinks, *traces, *self._intervals(rows),
            *place_of(q), *place_of(k), *place_of(v), *of_out, of_lse, *extents,
            *buffer.addresses, *self._words, softmax_scale, *self._numbers, *cap,
        )  # fmt: skip
        if self._fold is not None:
            partial = buffer.addresses[-1]
            self._fold(table, *sinks, *of_out, *extents, of_lse, partial, *self._of_fold)
        return out, lse

    def _intervals(self, rows: RowIntervals | None) -> tuple[Tensor, ...]:
        """As in arguments.Intervals."""
        if rows is None:
            return ()
        starts, ends = map(torch.flatten, rows)
        tiles = len(starts) // self.config.tile_n + len(self._problem.sequences) + 1
        return starts, ends, starts.new_empty(tiles * BOUNDS_WORDS)

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """One dtype, the problem's, and one device: kernels take addresses, and read whatever is there."""
        if (q.dtype, k.dtype, v.dtype) == self._dtypes and q.device == k.device == v.device:
            return
        for name, x, dtype in zip("qkv", (q, k, v), self._dtypes):
            if x.dtype != dtype:
                raise PlanMismatchError(f"{name} has dtype {x.dtype}, the problem says {dtype}")
            if x.device != q.device:
                raise PlanMismatchError(f"{name} is on {x.device}, q on {q.device}")


def _as_packed(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
    """k and v, (batch, rows, kv_heads, head_dim), as rows of one batch, and how many rows apart sequences
    begin. Rows of a packed tensor end where the used keys of a sequence end; of a dense one they do not.
    Copied where a sequence begins no whole number of rows behind the one before it, as many in both."""
    steps = {x.stride(0) // x.stride(1) if x.stride(0) % x.stride(1) == 0 else 0 for x in (k, v)}
    if len(steps) > 1 or 0 in steps:
        k, v = (x.clone(memory_format=torch.contiguous_format) for x in (k, v))
        steps = {k.shape[1]}
    (step,) = steps
    rows = (k.shape[0] - 1) * step + k.shape[1]
    k, v = (x.as_strided((1, rows, *x.shape[2:]), (x.stride(1), *x.stride()[1:])) for x in (k, v))
    return k, v, step
