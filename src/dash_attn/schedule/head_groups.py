"""Head groups: which q heads of a kv head one item owns.

An item that owns every q head of its kv head finishes dK and dV alone. Where that leaves few long items,
as in multi-query attention, the q heads of a kv head are dealt to several head groups instead; each sums
its own dK and dV, and these sums are added in ascending order of the groups. The deal decides bits, so it
looks at one sequence and at the number of q heads a kv head, never at the batch or the machine.
"""

from __future__ import annotations

from ..problem import SequenceGrid

__all__ = ["default_head_groups", "group_heads"]

EVEN_HEADS = 8
"""q heads of an item where all items are equally long: enough items to fill a GPU is all that counts."""

LEAST_HEADS, MOST_HEADS = 2, 4
"""q heads of an item where items differ: the longest should be short beside what a worker does in all."""

ENOUGH_TASKS = 64
"""Tasks an item should have on average, within these limits, so that starting it stays cheap."""

MOST_ITEMS = 512
"""Items of one kv head beyond which further ones balance nothing."""


def default_head_groups(group: int, grid: SequenceGrid) -> int:
    """Head groups of a kv head with ``group`` q heads.

    The constants come from simulation with the costs of an H200 (docs/design.md).

    >>> from dash_attn.problem import Mask
    >>> [default_head_groups(32, SequenceGrid(n, n, 64, 128, Mask.causal())) for n in (512, 4096, 65536)]
    [8, 16, 1]
    """
    if not grid.tasks:
        return 1
    if grid.is_full:
        heads = EVEN_HEADS
    else:
        heads = min(max(-(-ENOUGH_TASKS * grid.kv_tiles // grid.tasks), LEAST_HEADS), MOST_HEADS)
    heads = max(heads, -(-group * grid.kv_tiles // MOST_ITEMS))
    return -(-group // min(heads, group))


def group_heads(group: int, groups: int) -> list[range]:
    """The q heads of one kv head, counted from its first, dealt evenly to ``groups`` head groups.

    >>> group_heads(7, 2)
    [range(0, 3), range(3, 7)]
    """
    return [range(group * i // groups, group * (i + 1) // groups) for i in range(groups)]
