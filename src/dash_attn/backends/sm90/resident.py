"""What a plan keeps on a GPU, and how its launches are shaped by it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError, PlanMismatchError
from ...machine import (
    APART_BYTES,
    APART_ITEMS,
    APART_QUEUES,
    APART_QUEUES_BYTES,
    APART_RINGS_BYTES,
    CONVERSION_CYCLES,
    FEW_ROUNDS,
    ITEM_CYCLES,
    TASK_CYCLES,
    WORKERS,
)
from ...schedule.plan import Plan
from ...schedule.table import shared_sums, to_table
from ..cuda.upload import Upload
from ..shapes import tensor_shapes
from .backward.config import CONTROL_WORDS, SEEN_WORDS, BackwardConfig
from .places import Sizes, sizes_of
from .tiles import kernel_of, name_of, tiles_of

__all__ = ["OnDevice", "on_device"]


@dataclass(eq=False)
class OnDevice:
    """A plan on one device. It does not keep the plan alive: the plan keeps it.

    Attributes:
        upload: the plan table, int32.
        shapes: of the tensors (:class:`~dash_attn.backends.base.Tensors`) by rank; none of rank 4 where
            sequences are not equally long.
        dtypes: of the tensors.
        heads: q heads.
        q_tiles, kv_tiles: tiles of one head, over all sequences.
        tickets: most contributions that a dQ tile can get, at least 1.
        group_sums: items that leave sums of dK and dV, to be added by head groups.
        complete_tiles: dQ tiles of all heads that get contributions.
        items, min_workers: of the plan.
        converting: share of the work that is converting dQ tiles.
        apart: contributions to dQ better have memory of their own than wait for one another. No longer once
            there was none.
        variants: what was made of it for the kernel variants that ran, by what was asked.
    """

    upload: Upload | None
    shapes: dict[int, tuple[tuple[int, ...], ...]]
    dtypes: tuple[torch.dtype, ...]
    heads: int
    q_tiles: int
    kv_tiles: int
    tickets: int
    group_sums: int
    complete_tiles: int
    items: int
    min_workers: int
    converting: float
    apart: bool
    variants: dict[object, Any] = field(default_factory=dict)
    _extents: dict[int, Sizes] = field(default_factory=dict)

    @property
    def table(self) -> Tensor:
        """The plan table, for work that is next on the current stream."""
        assert self.upload is not None
        return self.upload.use()[0]

    def extents(self, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
        """Of tensors of the plan's shapes."""
        rank = q.dim()
        return self._extents.get(rank) or self._extents.setdefault(rank, sizes_of(q, k, v))

    def workspace(self, config: BackwardConfig) -> list[int]:
        """fp32 words of lse2, delta, dq, group sums and control, each a multiple of 128 bytes."""
        tiles = self.heads * self.q_tiles
        rows, sums = tiles * config.tile_m, self.group_sums * 2 * config.tile_n * config.head_dim
        control = -(-(CONTROL_WORDS + 2 * tiles) // 32) * 32
        dq = tiles * config.dq_elements * (self.tickets if config.apart else 1)
        return [rows, rows, dq, max(sums, 32), control]

    @property
    def seen_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of ``items`` and ``seen`` (:class:`.backward.arguments.Intervals`)."""
        tiles, words = self.heads * self.q_tiles, -(-self.tickets // 32)
        if tiles * words >= 2**31:
            raise InputError(
                f"row_starts and row_ends take {tiles} dQ tiles x {words} words here, 2^31 or more: give "
                "shorter sequences, or fewer heads per call"
            )
        return (self.items * SEEN_WORDS,), (tiles, words)

    def blocks(self, available: int) -> tuple[int, int]:
        """(blocks to launch on so many SMs, how many of them get items); the others convert dQ tiles from the
        start. All convert once there are no items left."""
        if self.items <= available:
            return self.items, self.items
        rounds = -(-self.items // available)
        spare = min(int(available * self.converting), available - self.min_workers)
        if rounds <= FEW_ROUNDS:
            spare = min(spare, available - -(-self.items // rounds))
        return available, available - spare


def on_device(plan: Plan, device: torch.device, *, key_sums: bool = False) -> OnDevice:
    """The plan on a device. It stays there as long as the plan lives.

    Args:
        plan: a proven plan with the tiles of the kernels.
        device: a GPU.
        key_sums: all items leave their sums of dK and dV where
            :func:`~dash_attn.schedule.table.shared_sums` says.

    Raises:
        PlanMismatchError: the plan's tiles are not those of the kernels, or its positions are not theirs.
        InputError: it is not there, and cannot be put there while a CUDA graph is captured.
    """
    places: dict[object, OnDevice] = plan.__dict__.setdefault("_places", {})
    found = places.get((device, key_sums))
    if found is None:
        _check_tiles(plan)
        table = shared_sums(to_table(plan), plan) if key_sums else to_table(plan)
        found = _place(plan, Upload(plan, [table], device))
        if key_sums:
            found = replace(found, group_sums=0)  # they are not in the workspace
        places[device, key_sums] = found
    return found


def _place(plan: Plan, upload: Upload | None) -> OnDevice:
    p, batch = plan.problem, plan.batch
    complete = p.heads * int(batch.sizes.complete_q_tiles.sum())
    conversion = CONVERSION_CYCLES * complete
    work = TASK_CYCLES * batch.task_count + ITEM_CYCLES * len(plan.items) + conversion
    q_tiles, tickets = int(batch.q_tiles.sum()), max(1, int(batch.kv_tiles.max()))
    return OnDevice(
        upload,
        {rank: shapes.of_tensors for rank, shapes in tensor_shapes(p).items()},
        (*[getattr(torch, p.dtype)] * 5, torch.float32),
        p.heads,
        q_tiles,
        int(batch.kv_tiles.sum()),
        tickets,
        int(plan.group_sum_first[-1]),
        complete,
        len(plan.items),
        plan.min_workers,
        conversion / max(1, work),
        _better_apart(plan, p.heads * q_tiles * tickets),
    )


def _better_apart(plan: Plan, contributions: int) -> bool:
    """Whether keeping so many contributions apart is faster than waiting: where there are few items, or where
    more contributions queue for a dQ tile than workers have tasks meanwhile."""
    p, batch = plan.problem, plan.batch
    if not batch.task_count:
        return False
    size = 4 * contributions * p.tile_m * kernel_of(p.head_dim, p.head_dim_v).head_dim
    # "auto" has several rings per head under a full mask whose q tiles are no smaller than kv tiles.
    most = APART_RINGS_BYTES if p.mask.is_full and p.tile_m >= p.tile_n else APART_BYTES
    if len(plan.items) <= APART_ITEMS and size <= most:
        return True
    tasks = batch.task_count / WORKERS
    if size > APART_QUEUES_BYTES or int(batch.kv_tiles.max()) < APART_QUEUES * tasks:
        return False
    queue = max(int(pattern.grid.contributions.max(initial=0)) for pattern in batch.distinct)
    return queue >= APART_QUEUES * max(tasks, int(batch.columns.tasks.max()))


def _check_tiles(plan: Plan) -> None:
    p = plan.problem
    head_dims = kernel_of(p.head_dim, p.head_dim_v)[:2]
    kernel = tiles_of(*head_dims)
    if (p.tile_m, p.tile_n) != (kernel.tile_m, kernel.tile_n):
        raise PlanMismatchError(
            f"the plan has tiles of {p.tile_m} x {p.tile_n} rows, the kernel for head_dim "
            f"{name_of(*head_dims)} has {kernel.tile_m} x {kernel.tile_n}"
        )
    if p.q_starts is not None:
        raise PlanMismatchError(
            f"the plan aligns rows with columns {p.q_starts!r:.80}, the kernels align them bottom-right"
        )
