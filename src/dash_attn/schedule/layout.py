"""The layout of the plan table, the int32 array in which a kernel reads a plan (the device ABI).

Each class below lists the words of one kind of record, in order: :mod:`.table` writes and reads them by these
names, and so does the device code. The values are whatever the caller has: integers, NumPy columns, device
registers. ``HEADER``, ``ITEM``, ``RUN`` and ``SEQUENCE`` hold in each field the offset of its word.

The table is one contiguous array. Offsets count words from its start. A record has a multiple of four words
(the last ones are 0 where no field has them), and every section starts at a multiple of four words, so that
records are read with 16-byte loads. The sections, in order:

* the header;
* items, in the order in which workers claim them;
* runs;
* sequences;
* totals: one word for each q tile of every distinct pattern, padded to four words: how many contributions
  the dQ tile gets. 0: nobody contributes and the tile is zero;
* the map of q tiles and the map of kv tiles: for each tile, counted over all sequences, the sequence that it
  belongs to. Each map is padded to four words.

The ticket counter of (sequence, q head, q tile) has index
``q_tile_first * heads + q_head * q_tile_count + q_tile``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = [
    "ABI_VERSION",
    "HEADER",
    "HEADER_WORDS",
    "ITEM",
    "ITEM_WORDS",
    "MAGIC",
    "RUN",
    "RUN_WORDS",
    "SEQUENCE",
    "SEQUENCE_WORDS",
    "HeaderRecord",
    "ItemRecord",
    "RunRecord",
    "SequenceRecord",
]

MAGIC = 0x44534148
ABI_VERSION = 4


class HeaderRecord(NamedTuple):
    """The first words of the table."""

    magic: Any
    abi_version: Any
    item_count: Any
    run_count: Any
    sequence_count: Any
    item_offset: Any
    run_offset: Any
    sequence_offset: Any
    total_offset: Any
    tile_m: Any
    tile_n: Any
    heads: Any
    kv_heads: Any
    min_workers: Any
    window_left: Any  # -1: unbounded
    window_right: Any  # -1: unbounded
    q_map_offset: Any
    q_tile_total: Any  # words of the map of q tiles that mean something
    kv_map_offset: Any
    group_sum_count: Any  # places for sums of dK and dV


class ItemRecord(NamedTuple):
    """One item.

    It goes through runs ``run_first`` to ``run_first + run_count - 1``, ``task_count`` tasks in all, for
    ``q_head_count`` q heads from ``q_head_first`` on.

    Attributes:
        group_sum: where it leaves its sums of dK and dV, of ``group_sum_count`` places. -1: it owns all q
            heads of its kv head, and finishes dK and dV itself.
        needs: the last item of the list that it depends on, or its own place if there is none. A block may
            claim ahead of it what is behind that one.
        heads_per_pass: ``q_head_count``: it goes through its runs once, and does each task for all its q
            heads before the next task. 1: it goes through them once per q head.
    """

    sequence: Any
    kv_head: Any
    kv_tile: Any
    q_head_first: Any
    q_head_count: Any
    run_first: Any
    run_count: Any
    task_count: Any
    group_sum: Any
    needs: Any
    heads_per_pass: Any


class RunRecord(NamedTuple):
    """One run. Task k is q tile ``q_first + k * q_step``, its ticket ``t_first + t_step * (k // t_hold)``."""

    q_first: Any
    count: Any
    t_first: Any
    steps: Any  # (q_step & 0xff) | (t_step & 0xff) << 8 | t_hold << 16, both steps signed


class SequenceRecord(NamedTuple):
    """One sequence.

    With ``head_groups`` > 1, the sums of head group g of a kv head lie at
    ``group_sum_first + (kv_head * kv_tile_count + kv_tile) * head_groups + g``. They are added in ascending
    order of g.
    """

    seqlen_q: Any
    seqlen_k: Any
    q_tile_count: Any
    kv_tile_count: Any
    q_row_first: Any  # its first row in the packed layout, likewise k_row_first
    k_row_first: Any
    q_tile_first: Any  # q tiles of the sequences before it
    total_first: Any  # word of the table where its totals begin
    kv_tile_first: Any  # kv tiles of the sequences before it
    head_groups: Any
    group_sum_first: Any


def _padded(words: int) -> int:
    """Words of a record with so many fields."""
    return -(-words // 4) * 4


HEADER = HeaderRecord(*range(len(HeaderRecord._fields)))
ITEM = ItemRecord(*range(len(ItemRecord._fields)))
RUN = RunRecord(*range(len(RunRecord._fields)))
SEQUENCE = SequenceRecord(*range(len(SequenceRecord._fields)))
HEADER_WORDS, ITEM_WORDS, RUN_WORDS, SEQUENCE_WORDS = (
    _padded(len(record)) for record in (HEADER, ITEM, RUN, SEQUENCE)
)
