"""Head groups: which q heads of a kv head one item owns.

An item that owns every q head of its kv head finishes dK and dV alone. Where that leaves few long items,
as in multi-query attention, the q heads of a kv head are dealt to several head groups instead; each sums
its own dK and dV, and these sums are added in ascending order of the groups. The deal decides bits, so it
looks at one sequence and at the number of q heads per kv head, never at the batch or the machine.
"""

from __future__ import annotations

from ..problem import TileGrid
from .constants import (
    BY_HEAD_ROWS,
    BY_HEAD_TILES,
    FEW_TASKS,
    FULL_HEADS,
    FULL_HEADS_SHORT,
    FULL_MOST_ITEMS,
    HEADS,
    HEADS_LONG,
    LONG_ROWS,
    MOST_ITEMS,
    SHORT,
    SMALL_GROUP,
)

__all__ = ["default_head_groups", "group_heads", "most_heads"]


def default_head_groups(group: int, grid: TileGrid, *, by_head: bool = False) -> int:
    """Head groups of a kv head with ``group`` q heads.

    The constants were measured on an H200, those of items that take their q heads one after the other
    (``by_head``) on an H100 (docs/experiments/head-groups.md).

    >>> from dash_attn.problem import Mask
    >>> lengths = [(n, n) for n in (512, 4096, 16384, 65536)]
    >>> grids = TileGrid.of(lengths, 64, 128, Mask.causal())
    >>> [(default_head_groups(4, grid), default_head_groups(32, grid)) for grid in grids]
    [(1, 16), (2, 16), (4, 8), (2, 2)]
    """
    if not grid.tasks:
        return 1
    tasks, most = grid.tasks / grid.kv_tiles, MOST_ITEMS
    if grid.is_full:
        heads, most = FULL_HEADS_SHORT if grid.q_tiles < SHORT else FULL_HEADS, FULL_MOST_ITEMS
    elif tasks <= FEW_TASKS and group <= SMALL_GROUP:
        heads = group
    else:
        heads = HEADS if tasks * grid.tile_m < LONG_ROWS else HEADS_LONG
    if by_head:
        heads = max(heads, grid.kv_tiles // BY_HEAD_TILES, int(BY_HEAD_ROWS / (tasks * grid.tile_m)))
    heads = max(heads, -(-group * grid.kv_tiles // most))
    return -(-group // min(heads, group))


def most_heads(group: int, groups: int) -> int:
    """q heads of the largest of so many head groups of a kv head.

    >>> most_heads(7, 2)
    4
    """
    return -(-group // groups)


def group_heads(group: int, groups: int) -> list[range]:
    """The q heads of one kv head, counted from its first, dealt evenly to ``groups`` head groups.

    >>> group_heads(7, 2)
    [range(0, 3), range(3, 7)]
    """
    return [range(group * i // groups, group * (i + 1) // groups) for i in range(groups)]
