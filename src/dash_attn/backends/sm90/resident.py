"""What a plan keeps on a GPU, uploaded once: its table and, for packed tensors, where sequences begin."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ...errors import InputError
from ...schedule.plan import Plan
from ...schedule.table import to_table
from .forward import PackedLengths

__all__ = ["OnDevice", "on_device"]


@dataclass(frozen=True, eq=False)
class OnDevice:
    """A plan on one device.

    Attributes:
        table: the plan table, int32.
        lengths: what the forward of packed tensors needs.
        stream: the CUDA stream that its memory belongs to.
        q_tiles, kv_tiles: tiles of one head, over all sequences.
        tickets: most contributions that a dQ tile can get, at least 1.
        group_sums: items that leave sums of dK and dV of their head group.
        complete_q_tiles: those of ``q_tiles`` that get contributions.
        items, min_workers: of the plan.
        converting: share of the work that is converting dQ tiles.
    """

    table: Tensor
    lengths: PackedLengths
    stream: int
    q_tiles: int
    kv_tiles: int
    tickets: int
    group_sums: int
    complete_q_tiles: int
    items: int
    min_workers: int
    converting: float

    def blocks(self, available: int) -> tuple[int, int]:
        """(blocks to launch on so many SMs, how many of them get items); the others convert dQ tiles from the
        start. All convert once there are no items left."""
        if self.items <= available:
            few = min(available, self.items + -(-self.items // 8))
            return few, few
        rounds = -(-self.items // available)
        spare = min(int(available * self.converting), available - self.min_workers)
        if rounds <= FEW_ROUNDS:
            spare = min(spare, available - -(-self.items // rounds))
        return available, available - spare


TASK, ITEM, CONVERSION = 3400, 6000, 900
"""Cycles of a task, of what an item takes beyond its tasks, and of converting a dQ tile beside them, on an
H200; the last from the number of converting blocks that was best (docs/experiments/finishing.md)."""

FEW_ROUNDS = 12
"""Up to so many items a block, converting blocks must not cost items of one length a round more; later blocks
are no longer in step."""


_RESIDENT: WeakKeyDictionary[Plan, dict[torch.device, OnDevice]] = WeakKeyDictionary()
_CAPTURED: set[OnDevice] = set()
"""What CUDA graphs read when they are replayed; never freed, for nobody says when a graph is gone."""


def on_device(plan: Plan, device: torch.device) -> OnDevice:
    """The plan on a device, for the current stream. It stays there as long as the plan lives.

    Raises:
        InputError: it is not there, and cannot be put there while a CUDA graph is captured.
    """
    places = _RESIDENT.setdefault(plan, {})
    found, capturing = places.get(device), torch.cuda.is_current_stream_capturing()
    if found is None:
        if capturing:
            raise InputError(f"{plan} is not on {device} yet: make the same call once before capturing it")
        found = places[device] = _upload(plan, device)
    if capturing:
        _CAPTURED.add(found)
    elif (stream := torch.cuda.current_stream(device)).cuda_stream != found.stream:
        for x in (found.table, found.lengths.cu_seqlens_q, found.lengths.cu_seqlens_k):
            x.record_stream(stream)
    return found


def _upload(plan: Plan, device: torch.device) -> OnDevice:
    problem = plan.problem
    lengths = np.array(problem.sequences, dtype=np.int64)
    starts = np.concatenate([np.zeros((1, 2), np.int64), lengths.cumsum(0)]).T
    stream = torch.cuda.current_stream(device)
    table, cu_seqlens_q, cu_seqlens_k = (
        torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)).to(device)
        for x in (to_table(plan), *starts)
    )
    stream.synchronize()  # other streams may use it next
    longest_q, longest_k = lengths.max(0).tolist()
    grids = [problem.grids[pair] for pair in problem.sequences]
    complete = sum(int((grid.contributions > 0).sum()) for grid in grids)
    conversion = CONVERSION * problem.heads * complete
    work = TASK * problem.tasks + ITEM * len(plan.items) + conversion
    return OnDevice(
        table,
        PackedLengths(cu_seqlens_q, cu_seqlens_k, longest_q, longest_k),
        stream.cuda_stream,
        sum(grid.q_tiles for grid in grids),
        sum(grid.kv_tiles for grid in grids),
        max(1, *(grid.kv_tiles for grid in problem.grids.values())),
        int(plan.group_sum_first[-1]),
        complete,
        len(plan.items),
        plan.min_workers,
        conversion / max(1, work),
    )
