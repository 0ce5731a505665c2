"""Device-side reading of the plan table (int32): header, items, runs, sequences, maps, totals.

Word offsets follow the table's ABI version 3 and are named here only.

Rows of a sequence: tensors of batch extent 1 hold all sequences one after the other (packed), otherwise the batch index is the
sequence: `first_k_row` and `finish.locate` for plain pointers, `tma_rows` for the copy engine.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

ITEM_COUNT, ITEM_OFFSET, RUN_OFFSET, SEQUENCE_OFFSET = 2, 5, 6, 7
HEADS, WINDOW_LEFT, WINDOW_RIGHT, Q_MAP_OFFSET, Q_TILES, KV_MAP_OFFSET = 11, 14, 15, 16, 17, 18
ITEM_WORDS, RUN_WORDS, SEQUENCE_WORDS = 12, 4, 12
ITEM_FIELDS = 10  # the words of an item that mean something
RUN_FIRST, RUN_COUNT = 5, 6  # words of an item

PACKED_ROWS = 1 << 30  # row extent of a packed tensor for the copy engine, see tma_rows


class Item(NamedTuple):
    """An item with what its sequence and the header say about it, as it lies in the mailbox of a block."""

    index: Int32
    sequence: Int32
    kv_head: Int32
    kv_tile: Int32
    q_head_first: Int32
    q_head_count: Int32
    run_first: Int32  # word of the table where its runs begin
    run_count: Int32
    task_count: Int32
    partial_slot: Int32  # -1: the item owns all q heads of its kv head
    needs: Int32  # the last item of the list that it depends on
    run_q_first: Int32  # the words of its first run
    run_tasks: Int32
    run_t_first: Int32
    run_steps: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    q_tile_count: Int32
    q_tile_first: Int32  # dQ tiles of all heads of earlier sequences
    total_first: Int32  # word of the table with the contributions to its first q tile
    batch: Int32
    k_row_first: Int32
    tma_batch: Int32  # see tma_rows, like what follows
    q_tma_row: Int32
    q_tma_shift: Int32
    k_tma_row: Int32
    k_tma_shift: Int32
    low: Int32  # key j is visible to query i iff i + low <= j <= i + high; an open side is out of reach
    high: Int32


MAILBOX_WORDS = 32
UNBOUNDED = 1 << 30
NO_ITEM = (1 << 31) - 1  # an index beyond every list


class Run(NamedTuple):
    q_first: Int32
    count: Int32
    t_first: Int32
    q_step: Int32
    t_step: Int32
    t_hold: Int32


class Sequence(NamedTuple):
    seqlen_q: Int32
    seqlen_k: Int32
    q_tile_count: Int32
    kv_tile_count: Int32
    q_row_first: Int32
    k_row_first: Int32
    q_tile_first: Int32
    total_first: Int32
    kv_tile_first: Int32
    head_groups: Int32
    partial_first: Int32


@cute.jit
def put_item(plan: cute.Tensor, index: Int32, batches: Int32, slot: cute.Tensor) -> None:
    """Write record `index` of the item list, as an Item, into a mailbox slot; beyond the list only index -1, the sign to stop.

    By one warp. Its lanes read the words of a record side by side: a block computes nothing while it waits for them.
    """
    lane = cute.arch.lane_idx()
    if index >= plan[ITEM_COUNT]:
        slot[0] = Int32(-1)
    else:
        word = Int32(0)
        if lane < ITEM_FIELDS:
            word = plan[plan[ITEM_OFFSET] + index * ITEM_WORDS + lane]
        sequence = cute.arch.shuffle_sync(word, 0)
        run_first = plan[RUN_OFFSET] + cute.arch.shuffle_sync(word, RUN_FIRST) * RUN_WORDS
        has_runs = cute.arch.shuffle_sync(word, RUN_COUNT) > 0
        if lane < ITEM_FIELDS:
            slot[1 + lane] = run_first if lane == RUN_FIRST else word
        record = Int32(0)
        if lane < len(Sequence._fields):
            record = plan[plan[SEQUENCE_OFFSET] + sequence * SEQUENCE_WORDS + lane]
        elif (lane >= 16) & (lane < 16 + RUN_WORDS) & has_runs:
            record = plan[run_first + lane - 16]
        if (lane >= 16) & (lane < 16 + RUN_WORDS):
            slot[1 + ITEM_FIELDS + lane - 16] = record
        for field in ("seqlen_q", "seqlen_k", "q_tile_count", "total_first"):
            if lane == Sequence._fields.index(field):
                slot[Item._fields.index(field)] = record
        if lane == Sequence._fields.index("q_tile_first"):
            slot[Item._fields.index("q_tile_first")] = record * plan[HEADS]
        seqlen_q, seqlen_k = cute.arch.shuffle_sync(record, 0), cute.arch.shuffle_sync(record, 1)
        batch, q_row_first, k_row_first = sequence, Int32(0), Int32(0)
        if batches == 1:
            batch = Int32(0)
            q_row_first = cute.arch.shuffle_sync(record, Sequence._fields.index("q_row_first"))
            k_row_first = cute.arch.shuffle_sync(record, Sequence._fields.index("k_row_first"))
        shift, left, right = seqlen_k - seqlen_q, plan[WINDOW_LEFT], plan[WINDOW_RIGHT]
        values = (
            batch,
            k_row_first,
            Int32(PACKED_ROWS) if batches == 1 else batch,
            *tma_rows(seqlen_q, q_row_first, batches),
            *tma_rows(seqlen_k, k_row_first, batches),
            shift - left if left >= 0 else Int32(-UNBOUNDED),
            shift + right if right >= 0 else Int32(UNBOUNDED),
        )
        for i, value in enumerate(values):
            slot[Item._fields.index("batch") + i] = value
        slot[0] = index


@cute.jit
def first_k_row(seq: Sequence, index: Int32, batches: Int32):
    """(batch, k row) where sequence `index` begins in tensors of `batches` batches."""
    batch, k_row = index, Int32(0)
    if batches == 1:
        batch, k_row = Int32(0), seq.k_row_first
    return batch, k_row


@cute.jit
def tma_rows(length: Int32, row_first: Int32, batches: Int32):
    """(row, shift) where a sequence begins in a copy-engine view, which ends where the sequence ends.

    The view has modes (row, head_dim, head, batch, shift). Of a dense tensor it is (S, D, H, B, 1). Of a packed one with row
    stride s it is (2^30, D, H, 2^31 - 1, 2^31 - 1) with strides (s, 1, h, 2^34 - s, s) elements, and row r of a sequence is
    (2^30 - length + r, ., ., 2^30, row_first + length). Its address is that of row row_first + r plus 2^64 elements, which is
    nothing modulo 2^64, and rows r >= length lie beyond the extent: they are read as zeros, and not written.
    """
    row, shift = Int32(0), Int32(0)
    if batches == 1:
        row, shift = PACKED_ROWS - length, row_first + length
    return row, shift


@cute.jit
def read_run(plan: cute.Tensor, slot: cute.Tensor, index: Int32):
    """Run `index` of the item in a mailbox slot, which holds its first one; the steps are signed bytes."""
    item = mailbox_item(slot)
    q_first, count, t_first, packed = item.run_q_first, item.run_tasks, item.run_t_first, item.run_steps
    if index > 0:
        base = item.run_first + index * RUN_WORDS
        q_first, count, t_first, packed = plan[base], plan[base + 1], plan[base + 2], plan[base + 3]
    q_step = (packed << 24) >> 24
    t_step = (packed << 16) >> 24
    return Run(q_first, count, t_first, q_step, t_step, packed >> 16)


@cute.jit
def read_sequence(plan: cute.Tensor, sequence_offset: Int32, index: Int32):
    """Record of sequence `index`."""
    base = sequence_offset + index * SEQUENCE_WORDS
    return Sequence(*[plan[base + i] for i in range(len(Sequence._fields))])


@cute.jit
def sequence_of_tile(plan: cute.Tensor, map_offset: cutlass.Constexpr[int], tile: Int32):
    """(index, record) of the sequence that owns a q or kv tile, counted over all sequences."""
    index = plan[plan[map_offset] + tile]
    return index, read_sequence(plan, plan[SEQUENCE_OFFSET], index)


def mailbox_item(slot: cute.Tensor) -> Item:
    """The item in a mailbox slot (int32 in shared memory); only the fields used are loaded."""
    return Item(*[slot[i] for i in range(len(Item._fields))])


def first_tile_of(item: Item, q_head: Int32) -> Int32:
    """Index of the first dQ tile of a head: of its tickets, fp32 accumulators, rows of LSE and delta."""
    return item.q_tile_first + q_head * item.q_tile_count
