"""What an H100 or H200 costs. These numbers move work in time; none of them decides a bit.

What decides bits is in :mod:`dash_attn.schedule.constants`.
"""

from __future__ import annotations

__all__ = [
    "APART_BYTES",
    "APART_ITEMS",
    "APART_QUEUES",
    "APART_QUEUES_BYTES",
    "APART_RINGS_BYTES",
    "BYTES_IN_TURNS",
    "CACHED_BYTES",
    "COLUMNS_IN_TURNS",
    "CONVERSION_CYCLES",
    "DRAM_BYTES_PER_CYCLE",
    "DRAM_SHARE",
    "FEW_IN_TURNS",
    "FEW_ROUNDS",
    "FORWARD_CYCLES",
    "HEADS_IN_TURNS",
    "HEADS_TOGETHER",
    "HOP_TASKS",
    "IN_TURNS_TILES",
    "ITEM_CYCLES",
    "L2_BYTES",
    "LAUNCH_CYCLES",
    "NARROW_ITEMS",
    "NARROW_TILES",
    "QUEUE",
    "TASK_CYCLES",
    "WORKERS",
]

WORKERS = 132
"""Streaming multiprocessors: so many blocks a placement keeps busy."""

L2_BYTES = 50 * 2**20
"""L2 cache of an H100 or H200."""

HEADS_TOGETHER = 16
"""At most so many heads, or head groups, come together, the longest items first. Fewer leave workers idle
between sections, more hold more of L2 than they need, which an H100's memory does not hide
(docs/experiments/choices.md)."""

HEADS_IN_TURNS = 16
"""Heads that take turns where their items queue, if no more are needed to keep all workers busy."""

COLUMNS_IN_TURNS, FEW_IN_TURNS = 1024, 8
"""Under a window, heads that take turns have so many columns together, and are at least so many. With fewer
heads, more neighbouring items of each run at the same time, and share what they read
(docs/experiments/windows.md)."""

BYTES_IN_TURNS = L2_BYTES * 3 // 2
"""Up to so many bytes of all heads together, all of them may take turns, so that no long item is left alone
at the end; where all sequences have at most 1,024 keys, up to L2_BYTES. With more, what they read leaves L2
(docs/experiments/choices.md)."""

HOP_TASKS = 1.25
"""Tasks in the time from one contribution to a dQ tile to the next, by another worker."""

QUEUE = 4
"""From so many kv tiles on that every row of a sequence sees, its items queue at its first or last q tile."""

TASK_CYCLES, ITEM_CYCLES, CONVERSION_CYCLES = 3400, 6000, 900
"""Cycles of a task, of what an item takes beyond its tasks, and of converting a dQ tile beside them. The last
is from the number of converting blocks that was best (docs/performance.md)."""

DRAM_BYTES_PER_CYCLE, DRAM_SHARE, CACHED_BYTES, LAUNCH_CYCLES = 2700, 0.2, 35 * 2**20, 5000
"""Of the model alone: bytes that DRAM moves per cycle of an SM; the share of their time that tasks do not
hide; bytes of Q, dO and dQ that stay in L2 beside all else; and a launch behind the main kernel."""

FEW_ROUNDS = 12
"""Up to so many items per block, converting blocks must not cost items of one length a round more. Later
blocks are no longer in step."""

APART_ITEMS, APART_BYTES, APART_RINGS_BYTES = WORKERS, 12 * 2**20, 64 * 2**20
"""Contributions to dQ are kept apart where there are at most so many items, and they take at most
``APART_BYTES``, or ``APART_RINGS_BYTES`` where rings of a head would wait for one another
(docs/experiments/apart.md)."""

APART_QUEUES, APART_QUEUES_BYTES = 2, 512 * 2**20
"""They are kept apart, too, where at least ``APART_QUEUES`` times as many of them go to one dQ tile as a
worker, or an item, has tasks, and they take at most so many bytes: few rows behind many keys."""

IN_TURNS_TILES = 8
"""Warpgroups of a forward start their products in turns where an item has at most so many kv tiles, and a
worker in the mean of WORKERS (docs/experiments/forward.md)."""

NARROW_ITEMS, NARROW_TILES = 2, {64: 0.6, 96: 0.7, 128: 0.75}
"""A forward may have blocks of one warpgroup where a worker, of WORKERS, has at most so many items. A kv tile
then takes so much of the time that it takes with several (docs/experiments/forward.md)."""

FORWARD_CYCLES = {64: (2190, 4000), 128: (2250, 5700)}
"""Of the forward kernel at a head dim: cycles of a kv tile of an item, and of what an item takes beside."""
