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
from .tiles import FOLDED_KEYS, ROOMY, Shape, columns_of, forward_numerics, shapes_of

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
        items, visits, q_tiles, stretches, folds, sequences = tables.place.use()
        dout, q, k, v, out = (aligned(x) for x in tensors[:5])
        lse = at_16_bytes(tensors.lse.contiguous())
        problem = self.problem
        rows = tables.q_tiles * problem.tile_m
        stats = torch.empty((problem.heads, rows, 2), dtype=torch.float32, device=lse.device)
        pairs = stats.view(torch.int64)
        scales = scores.softmax_scale, *of_scores(scores)
        head = head_of(problem)
        of_v = {name: head[name] for name in ("HEAD_DIM_V", "BLOCK_DV", "REST_DV")}
        tile = {"TILE_M": problem.tile_m, "TILE_N": problem.tile_n, **variant_of(scores, aux)}
        shapes = self._shapes[scores.dropout_p > 0]
        *starts_ends, rows_batch = _intervals(aux, q_tiles)
        sides = (*problem.mask.sides, _slope_batch(aux), rows_batch)
        read = (q, k, v, dout, pairs, values_of(aux.alibi_slopes, stats), _seed(aux, stats), *starts_ends)
        strides = [s for x in (q, k, v, dout) for s in strides_of(x)]
        if tables.q_tiles:
            prepare_kernel[(tables.q_tiles * problem.heads,)](
                out, dout, lse, stats, q_tiles, *strides_of(out), *strides_of(dout), *lse_strides(lse),
                rows, tables.q_tiles, ROWS=problem.tile_m, **of_v, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
            shape = shapes.dq
            dq_kernel[(tables.q_tiles * problem.heads * (problem.tile_m // shape.rows),)](
                *read, grads.dq, q_tiles, stretches, *strides, *strides_of(grads.dq), rows,
                tables.q_tiles, problem.group, *sides, *scales, 0.0,
                ROWS=shape.rows, KEYS=shape.keys, LATE=shapes.late, **head, **tile, **options_of(shape),
            )  # fmt: skip
        if tables.items:
            columns = sum(sum(columns_of(n)) for n in (problem.head_dim, problem.head_dim_v))
            size = problem.tile_n * columns
            sums = torch.empty(tables.sums * size, dtype=torch.float32, device=q.device)
            for shape, makes_k, makes_v in shapes.of_keys():
                dkdv_kernel[(tables.items * (problem.tile_n // shape.keys),)](
                    *read, grads.dk, grads.dv, sums, items, visits,
                    *strides, *strides_of(grads.dk), *strides_of(grads.dv), rows,
                    problem.group, *sides, *scales,
                    ROWS=shape.rows, KEYS=shape.keys, OF_K=makes_k, OF_V=makes_v,
                    **head, **tile, **options_of(shape),
                )  # fmt: skip
            if tables.folds:
                fold_kernel[(tables.folds * (problem.tile_n // FOLDED_KEYS),)](
                    sums, grads.dk, grads.dv, folds, *strides_of(grads.dk), *strides_of(grads.dv),
                    scores.softmax_scale,
                    KEYS=FOLDED_KEYS, TILE_N=problem.tile_n, **head, num_warps=4, enable_fp_fusion=False,
                )  # fmt: skip
        sink = aux.learnable_sink
        if sink is None:
            return grads
        of_sink = new_sink_sums(len(problem.sequences), sink.float()) if sink_sums is None else sink_sums
        _add_to_sink_sums(of_sink, sink, lse, stats, sequences)
        return grads._replace(dsink=finish_sink(of_sink, sink.dtype) if sink_sums is None else None)

    def _tables(self, plan: Plan, disorder: random.Random | None) -> _Tables:
        if disorder is None and (known := self._known.get(plan)) is not None:
            return known
        found = backward_tables(plan, self._packed, disorder)
        place = _OnDevice(plan, [*found[:5], found.sequences], self._device)
        made = _Tables(place, len(found.items), len(found.q_tiles), len(found.folds), found.sums)
        if disorder is None:
            self._known[plan] = made
        return made


def _add_to_sink_sums(sums: Tensor, sink: Tensor, lse: Tensor, stats: Tensor, sequences: Tensor) -> None:
    """``sequences``: their records."""
    count, heads = sums.shape
    if count:
        sink_kernel[(count * heads,)](
            lse, stats, values_of(sink, lse), sums, sequences, *lse_strides(lse),
            stats.shape[1], heads, ROWS=SINK_ROWS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


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
