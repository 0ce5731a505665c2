"""Launching the kernels: tables on the device, strides, workspace."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import InputError
from ...problem import Problem
from ...schedule import Plan
from ...schedule.constants import SINK_ROWS
from ...scores import Scores
from ..base import AuxTensors, Gradients, Tensors
from ..cuda.upload import Upload
from ..shapes import Keys, lse_shape
from ..sums import new_sink_sums
from .backward_kernels import (
    dkdv_kernel,
    dq_kernel,
    fold_kernel,
    prepare_kernel,
    sink_kernel,
    sinks_kernel,
)
from .split import Launch
from .strides import aligned, at_16_bytes, lse_strides, strides_of, values_of
from .tables import WORDS, backward_tables, forward_table, most_segments
from .tiles import FOLDED_KEYS, ROOMY, Shape, Shapes, columns_of, forward_numerics, shapes_of

__all__ = ["Backward", "Forward"]

_LOG2E = math.log2(math.e)


@cache
def is_roomy(device: torch.device) -> bool:
    """Whether the table has a row of its own for a device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) in ROOMY


class _OnDevice:
    """int32 tables on a device."""

    def __init__(self, what: object, tables: Sequence[NDArray[Any]], device: torch.device) -> None:
        flat = [table.reshape(-1) for table in tables]
        self._upload: Upload | None = None
        self._here: list[Tensor] = []
        if device.type == "cuda":
            self._upload = Upload(what, flat, device)
        else:
            self._here = [torch.from_numpy(table) for table in flat]

    def use(self) -> list[Tensor]:
        """The tables, for work that is next on the current stream."""
        return self._here if self._upload is None else self._upload.use()


class Forward:
    """The forward of a problem on a device."""

    def __init__(self, problem: Problem, device: torch.device, packed: bool, keys: Keys | None) -> None:
        self.problem, self._device, self._placed = problem, device, (packed, keys)
        self.numerics = forward_numerics(problem, is_roomy(device))
        self._shape = shapes_of(problem.widest, problem.dtype, is_roomy(device)).forward
        self._table: _OnDevice | None = None
        self._tiles = self._segments = 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, aux: AuxTensors
    ) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        problem = self.problem
        if self._table is None:
            self._table = self._made_table()
        out = torch.empty((*q.shape[:-1], problem.head_dim_v), dtype=q.dtype, device=q.device)
        lse = torch.empty(lse_shape(q), dtype=torch.float32, device=q.device)
        if not q.numel():
            return out, lse
        (table,) = self._table.use()
        *starts_ends, rows_batch = _intervals(aux, table)
        others = values_of(aux.learnable_sink, lse), values_of(aux.alibi_slopes, lse), _seed(aux, lse)
        flags = {"CACHED": False, "SINK": aux.learnable_sink is not None, "SCALED": is_scaled(scores, aux)}
        launch = Launch(
            (aligned(q), aligned(k), aligned(v)), (*others, *starts_ends), (table, table, table),
            self._tiles, problem.group, problem.mask.sides, (_slope_batch(aux), rows_batch),
            of_scores(scores), (0, 0, 0, 0, 0, 0), self.numerics, self._shape, options_of(self._shape),
            head_of(problem), variant_of(scores, aux) | flags,
        )  # fmt: skip
        launch(self._tiles * problem.heads, self._segments, out, lse)
        return out, lse

    def _made_table(self) -> _OnDevice:
        records = forward_table(self.problem, *self._placed, self._shape.rows)
        self._tiles = len(records)
        self._segments = most_segments(records, self.problem.mask, self._shape.rows, self.numerics.segment)
        return _OnDevice(self.problem, [records], self._device)


class _Tables(NamedTuple):
    """A plan on a device, and the counts of its programs."""

    place: _OnDevice
    items: int
    q_tiles: int
    folds: int
    sums: int


class _Records(NamedTuple):
    """The tables of a plan, as :class:`.BackwardTables` has them, on the device."""

    items: Tensor
    visits: Tensor
    q_tiles: Tensor
    stretches: Tensor
    folds: Tensor
    sequences: Tensor


class _BackwardLaunch(NamedTuple):
    """What the kernels of a backward are given, but for where results go; each method is a kernel's launch.

    Attributes:
        problem: of the plan.
        counts: of the plan's programs.
        records: its tables.
        out, dout: as the kernels read them.
        lse: contiguous.
        stats: (heads, rows of all q tiles, 2) fp32: what ``prepare`` makes of out, dout and lse.
        read: q, k, v and dout; stats by pairs; slopes, seed, and the intervals of rows.
        strides: of q, k, v and dout.
        sides: of the mask; then how far apart slopes and intervals of two sequences are.
        scales: the softmax scale; then factors, threshold, and the origin.
        shapes: tiles of the kernels.
        head: head dims.
        variant: tiles of the plan, and flags of the compiler.
    """

    problem: Problem
    counts: _Tables
    records: _Records
    out: Tensor
    dout: Tensor
    lse: Tensor
    stats: Tensor
    read: tuple[Tensor, ...]
    strides: list[int]
    sides: tuple[int, ...]
    scales: tuple[float, ...]
    shapes: Shapes
    head: dict[str, int]
    variant: dict[str, int]

    def prepare(self) -> None:
        """Write ``stats``, which the others read."""
        tiles = self.counts.q_tiles
        of_v = {name: self.head[name] for name in ("HEAD_DIM_V", "BLOCK_DV", "REST_DV")}
        prepare_kernel[(tiles * self.problem.heads,)](
            self.out, self.dout, self.lse, self.stats, self.records.q_tiles,
            *strides_of(self.out), *strides_of(self.dout), *lse_strides(self.lse), self.stats.shape[1], tiles,
            ROWS=self.problem.tile_m, **of_v, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

    def make_dq(self, dq: Tensor) -> None:
        """Write dQ."""
        shape, tiles, problem = self.shapes.dq, self.counts.q_tiles, self.problem
        dq_kernel[(tiles * problem.heads * (problem.tile_m // shape.rows),)](
            *self.read, dq, self.records.q_tiles, self.records.stretches, *self.strides, *strides_of(dq),
            self.stats.shape[1], tiles, problem.group, *self.sides, *self.scales, 0.0,
            ROWS=shape.rows, KEYS=shape.keys, LATE=self.shapes.late,
            **self.head, **self.variant, **options_of(shape),
        )  # fmt: skip

    def make_dk_dv(self, dk: Tensor, dv: Tensor) -> Tensor:
        """Write dK and dV, but for kv tiles that have several head groups: the sums of these are returned."""
        problem = self.problem
        columns = sum(sum(columns_of(n)) for n in (problem.head_dim, problem.head_dim_v))
        size = self.counts.sums * problem.tile_n * columns
        sums = torch.empty(size, dtype=torch.float32, device=self.lse.device)
        for shape, makes_k, makes_v in self.shapes.of_keys():
            dkdv_kernel[(self.counts.items * (problem.tile_n // shape.keys),)](
                *self.read, dk, dv, sums, self.records.items, self.records.visits,
                *self.strides, *strides_of(dk), *strides_of(dv), self.stats.shape[1],
                problem.group, *self.sides, *self.scales,
                ROWS=shape.rows, KEYS=shape.keys, OF_K=makes_k, OF_V=makes_v,
                **self.head, **self.variant, **options_of(shape),
            )  # fmt: skip
        return sums

    def fold(self, sums: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Write dK and dV of kv tiles that have several head groups."""
        softmax_scale, tile_n = self.scales[0], self.problem.tile_n
        fold_kernel[(self.counts.folds * (tile_n // FOLDED_KEYS),)](
            sums, dk, dv, self.records.folds, *strides_of(dk), *strides_of(dv), softmax_scale,
            KEYS=FOLDED_KEYS, TILE_N=tile_n, **self.head, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

    def add_to_sink_sums(self, sums: Tensor, sink: Tensor) -> None:
        """``sums``: (sequences, heads) fp32; ``sink``: (heads,)."""
        count, heads = sums.shape
        if count:
            sink_kernel[(count * heads,)](
                self.lse, self.stats, values_of(sink, self.lse), sums, self.records.sequences,
                *lse_strides(self.lse), self.stats.shape[1], heads,
                ROWS=SINK_ROWS, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip


class Backward:
    """The backward of a problem on a device. It keeps the tables of plans while these live."""

    def __init__(self, problem: Problem, device: torch.device, packed: bool) -> None:
        self.problem, self._device, self._packed = problem, device, packed
        self._shapes = [
            shapes_of(problem.widest, problem.dtype, is_roomy(device), dropout) for dropout in (False, True)
        ]
        self._known: WeakKeyDictionary[Plan, _Tables] = WeakKeyDictionary()

    def __call__(
        self,
        plan: Plan,
        tensors: Tensors,
        scores: Scores,
        aux: AuxTensors,
        disorder: random.Random | None,
        grads: Gradients,
        sink_sums: Tensor | None,
    ) -> Gradients:
        """The gradients, by a plan of the problem; dq, dk and dv of ``grads`` are written, in any dtype.
        ``sink_sums``: as in :meth:`.Prepared.backward`."""
        tables = self._tables(plan, disorder)
        launch = self._launch(tables, tensors, scores, aux)
        if tables.q_tiles:
            launch.prepare()
            launch.make_dq(grads.dq)
        if tables.items:
            sums = launch.make_dk_dv(grads.dk, grads.dv)
            if tables.folds:
                launch.fold(sums, grads.dk, grads.dv)
        sink = aux.learnable_sink
        if sink is None:
            return grads
        sequences = len(self.problem.sequences)
        of_sink = new_sink_sums(sequences, sink.float()) if sink_sums is None else sink_sums
        launch.add_to_sink_sums(of_sink, sink)
        return grads._replace(dsink=finish_sink(of_sink, sink.dtype) if sink_sums is None else None)

    def _launch(self, tables: _Tables, tensors: Tensors, scores: Scores, aux: AuxTensors) -> _BackwardLaunch:
        problem, records = self.problem, _Records(*tables.place.use())
        dout, q, k, v, out = (aligned(x) for x in tensors[:5])
        lse = at_16_bytes(tensors.lse.contiguous())
        rows = tables.q_tiles * problem.tile_m
        stats = torch.empty((problem.heads, rows, 2), dtype=torch.float32, device=lse.device)
        *starts_ends, rows_batch = _intervals(aux, records.q_tiles)
        beside = values_of(aux.alibi_slopes, stats), _seed(aux, stats), *starts_ends
        return _BackwardLaunch(
            problem, tables, records, out, dout, lse, stats,
            read=(q, k, v, dout, stats.view(torch.int64), *beside),
            strides=[stride for x in (q, k, v, dout) for stride in strides_of(x)],
            sides=(*problem.mask.sides, _slope_batch(aux), rows_batch),
            scales=(scores.softmax_scale, *of_scores(scores)),
            shapes=self._shapes[scores.dropout_p > 0],
            head=head_of(problem),
            variant={"TILE_M": problem.tile_m, "TILE_N": problem.tile_n, **variant_of(scores, aux)},
        )  # fmt: skip

    def _tables(self, plan: Plan, disorder: random.Random | None) -> _Tables:
        if disorder is None and (known := self._known.get(plan)) is not None:
            return known
        found = backward_tables(plan, self._packed, disorder)
        place = _OnDevice(plan, [*found[:5], found.sequences], self._device)
        made = _Tables(place, len(found.items), len(found.q_tiles), len(found.folds), found.sums)
        if disorder is None:
            self._known[plan] = made
        return made


def finish_sink(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """(heads,): minus the sums of all sequences, in their order."""
    count, heads = sums.shape
    dsink = torch.empty(heads, dtype=dtype, device=sums.device)
    sinks_kernel[(heads,)](sums, dsink, count, heads, num_warps=1)
    return dsink


def _slope_batch(aux: AuxTensors) -> int:
    """How far apart the slopes of two sequences are."""
    slopes = aux.alibi_slopes
    return 0 if slopes is None or slopes.ndim == 1 else slopes.shape[1]


def _seed(aux: AuxTensors, unread: Tensor) -> Tensor:
    """The seed of dropout at a multiple of 16 bytes; without any ``unread``."""
    seed = aux.dropout_seed
    if seed is None:
        return unread  # were it read, the compiler would refuse its type
    return at_16_bytes(seed)


def _intervals(aux: AuxTensors, unread: Tensor) -> tuple[Tensor, Tensor, int]:
    """Which rows see each key, and how far apart those of two sequences are; without any ``unread`` twice."""
    if aux.rows is None:
        return unread, unread, 0
    starts, ends = map(at_16_bytes, aux.rows)
    return starts, ends, starts.shape[1] if starts.ndim == 2 else 0


def head_of(problem: Problem) -> dict[str, int]:
    """Elements of a head, of Q and K and of V, and what a product takes of them."""
    columns, columns_v = columns_of(problem.head_dim), columns_of(problem.head_dim_v)
    return {
        "HEAD_DIM": problem.head_dim, "BLOCK_D": columns.block, "REST_D": columns.rest,
        "HEAD_DIM_V": problem.head_dim_v, "BLOCK_DV": columns_v.block, "REST_DV": columns_v.rest,
    }  # fmt: skip


def variant_of(scores: Scores, aux: AuxTensors) -> dict[str, bool]:
    """Which variant of the kernels makes the scores."""
    return {
        "SOFTCAP": scores.softcap > 0,
        "ALIBI": aux.alibi_slopes is not None,
        "DROPOUT": scores.dropout_p > 0,
        "INTERVALS": aux.rows is not None,
    }


def of_scores(scores: Scores) -> tuple[float, ...]:
    """What makes scores in base 2 of products: a factor and 0, or of a softcap what ``capped`` takes.

    Then what dropout takes: the threshold, the factor, and where it counts from, columns by fours.
    """
    *places, column = scores.origin
    if column % 4:
        raise InputError(f"column {column} of {scores.origin} is no multiple of 4, as dropout draws them")
    dropout = scores.dropout_threshold, scores.dropout_rescale, *places, column // 4
    if scores.softcap == 0:
        return scores.softmax_scale * _LOG2E, 0.0, *dropout
    return scores.softmax_scale / scores.softcap, scores.softcap * _LOG2E, *dropout


def options_of(shape: Shape) -> dict[str, Any]:
    """Sums stay sums and products products: what one loop would fuse another might not."""
    return {"num_warps": shape.warps, "num_stages": shape.stages, "enable_fp_fusion": False}


def is_scaled(scores: Scores, aux: AuxTensors) -> bool:
    """Whether the forward scales scores where they are made, not where they become exponents.

    The largest product is not the largest score where the scale is negative, or 0 in float32.
    """
    is_positive = scores.softmax_scale * _LOG2E > ROUNDED_TO_0
    return scores.softcap > 0 or aux.alibi_slopes is not None or not is_positive


ROUNDED_TO_0 = 2.0**-150
"""The largest number that float32 rounds to 0."""


assert WORDS == 16, "the kernels know it"
