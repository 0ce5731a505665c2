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

from ...problem import Problem
from ...schedule import Plan
from ..base import Gradients, Keys, RowIntervals, Tensors
from ..cuda.upload import Upload
from .backward_kernels import dkdv_kernel, dq_kernel, fold_kernel, prepare_kernel
from .forward_kernel import forward_kernel
from .tables import WORDS, backward_tables, forward_table
from .tiles import ROOMY, Shape, forward_numerics, padded, shapes_of

__all__ = ["Backward", "Forward"]

UNIT = 8
"""Elements: what strides are counted in."""

MOST_STRIDE = 2**24
"""Elements between rows: places of a tile's rows, counted from its first one, must fit 32 bits."""

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
        self._tiles = 0

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float,
        softcap: float,
        rows_of_keys: RowIntervals | None,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        problem, shape, numerics = self.problem, self._shape, self.numerics
        if self._table is None:
            records = forward_table(problem, *self._placed, shape.rows)
            self._tiles, self._table = len(records), _OnDevice(problem, [records], self._device)
        out = torch.empty((*q.shape[:-1], problem.head_dim_v), dtype=q.dtype, device=q.device)
        *batch, rows, heads, _ = q.shape
        lse = torch.empty((*batch, heads, rows), dtype=torch.float32, device=q.device)
        if not q.numel():
            return out, lse
        q, k, v = (_aligned(x) for x in (q, k, v))
        (table,) = self._table.use()
        *starts_ends, rows_batch = _intervals(rows_of_keys, table)
        forward_kernel[(self._tiles * heads,)](
            q, k, v, out, lse, table, *starts_ends,
            *_strides(q), *_strides(k), *_strides(v), *_strides(out), *_lse_strides(lse),
            rows_batch, self._tiles, problem.group, *problem.mask.sides, *_of_scores(softmax_scale, softcap),
            SOFTCAP=softcap > 0, INTERVALS=rows_of_keys is not None, **_head(problem), ROWS=shape.rows,
            TILE=numerics.tile, SEGMENT=numerics.segment, KEEP=numerics.keep, ROOM=numerics.room,
            **_options(shape),
        )  # fmt: skip
        return out, lse


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
        self._shapes = shapes_of(problem.widest, problem.dtype, is_roomy(device))
        self._known: WeakKeyDictionary[Plan, _Tables] = WeakKeyDictionary()

    def __call__(
        self,
        plan: Plan,
        tensors: Tensors,
        factors: tuple[float, float],
        rows_of_keys: RowIntervals | None,
        disorder: random.Random | None,
    ) -> Gradients:
        """The gradients, by a plan of the problem. ``factors``: softmax scale and softcap."""
        softmax_scale, softcap = factors
        tables = self._tables(plan, disorder)
        items, visits, q_tiles, stretches, folds = tables.place.use()
        grads = Gradients(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors[1:4]))
        dout, q, k, v, out = (_aligned(x) for x in tensors[:5])
        lse = tensors.lse.contiguous()
        if lse.data_ptr() % 16:  # the compiler would make another variant for it
            lse = lse.clone()
        delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
        problem = self.problem
        scales = softmax_scale, *_of_scores(softmax_scale, softcap)
        head = _head(problem)
        of_v = {name: head[name] for name in ("HEAD_DIM_V", "BLOCK_DV")}
        tile = {"TILE_M": problem.tile_m, "TILE_N": problem.tile_n}
        read = (q, k, v, dout, lse2, delta)
        strides = [s for x in (q, k, v, dout) for s in _strides(x)]
        *starts_ends, rows_batch = _intervals(rows_of_keys, q_tiles)
        variant = {"SOFTCAP": softcap > 0, "INTERVALS": rows_of_keys is not None}
        if tables.q_tiles:
            prepare_kernel[(tables.q_tiles * problem.heads,)](
                out, dout, lse, delta, lse2, q_tiles, *_strides(out), *_strides(dout), *_lse_strides(lse),
                tables.q_tiles, ROWS=problem.tile_m, **of_v, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
            shape = self._shapes.dq
            dq_kernel[(tables.q_tiles * problem.heads * (problem.tile_m // shape.rows),)](
                *read, grads.dq, q_tiles, stretches, *starts_ends,
                *strides, *_strides(grads.dq), *_lse_strides(lse), rows_batch,
                tables.q_tiles, problem.group, *problem.mask.sides, *scales, 0.0, **variant,
                ROWS=shape.rows, KEYS=shape.keys, **head, **tile, **_options(shape),
            )  # fmt: skip
        if tables.items:
            shape = self._shapes.dkdv
            parts, size = problem.tile_n // shape.keys, problem.tile_n * (head["BLOCK_D"] + head["BLOCK_DV"])
            sums = torch.empty(tables.sums * size, dtype=torch.float32, device=q.device)
            dkdv_kernel[(tables.items * parts,)](
                *read, grads.dk, grads.dv, sums, items, visits, *starts_ends,
                *strides, *_strides(grads.dk), *_strides(grads.dv), *_lse_strides(lse), rows_batch,
                problem.group, *problem.mask.sides, *scales, **variant,
                ROWS=shape.rows, KEYS=shape.keys, **head, **tile, **_options(shape),
            )  # fmt: skip
            if tables.folds:
                fold_kernel[(tables.folds * parts,)](
                    sums, grads.dk, grads.dv, folds, *_strides(grads.dk), *_strides(grads.dv), softmax_scale,
                    KEYS=shape.keys, TILE_N=problem.tile_n, **head, num_warps=4, enable_fp_fusion=False,
                )  # fmt: skip
        return grads

    def _tables(self, plan: Plan, disorder: random.Random | None) -> _Tables:
        if disorder is None and (known := self._known.get(plan)) is not None:
            return known
        found = backward_tables(plan, self._packed, disorder)
        place = _OnDevice(plan, found[:5], self._device)
        made = _Tables(place, len(found.items), len(found.q_tiles), len(found.folds), found.sums)
        if disorder is None:
            self._known[plan] = made
        return made


def _head(problem: Problem) -> dict[str, int]:
    """Elements of a head, of Q and K and of V, and what a product takes of them."""
    of_qk, of_v = problem.head_dim, problem.head_dim_v
    return {"HEAD_DIM": of_qk, "BLOCK_D": padded(of_qk), "HEAD_DIM_V": of_v, "BLOCK_DV": padded(of_v)}


def _intervals(rows: RowIntervals | None, nothing: Tensor) -> tuple[Tensor, Tensor, int]:
    """Which rows see each key, and the stride of the batch; ``nothing``: in place of what nobody reads."""
    if rows is None:
        return nothing, nothing, 0
    starts, ends = (x.clone() if x.data_ptr() % 16 else x for x in rows)  # or there would be other variants
    return starts, ends, starts.shape[1] if starts.ndim == 2 else 0


def _of_scores(softmax_scale: float, softcap: float) -> tuple[float, float]:
    """What makes scores in base 2 of products: a factor and 0, or of a softcap what ``capped`` takes."""
    if softcap == 0:
        return softmax_scale * _LOG2E, 0.0
    return softmax_scale / softcap, softcap * _LOG2E


def _options(shape: Shape) -> dict[str, Any]:
    """Sums stay sums and products products: what one loop would fuse another might not."""
    return {"num_warps": shape.warps, "num_stages": shape.stages, "enable_fp_fusion": False}


def _aligned(x: Tensor) -> Tensor:
    """x itself if its rows are contiguous, with strides in UNITs and a base of 16 bytes; otherwise a copy."""
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape) if size > 1]
    near = x.shape[-3] == 1 or x.stride(-3) < MOST_STRIDE
    plain = near and x.stride(-1) == 1 and all(s % UNIT == 0 and s >= 0 for s in strides)
    if plain and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _strides(x: Tensor) -> tuple[int, ...]:
    """Of batch, row and head in UNITs; 0 where there is one or none."""
    steps = [stride // UNIT if size > 1 else 0 for stride, size in zip(x.stride()[:-1], x.shape)]
    return (0, *steps)[-3:]


def _lse_strides(lse: Tensor) -> tuple[int, int]:
    """Of batch and head, of a contiguous lse."""
    heads, rows = lse.shape[-2:]
    return heads * rows, rows


assert WORDS == 16, "the kernels know it"
