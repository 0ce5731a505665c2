"""Device-side reading of the plan table; its layout is :mod:`dash_attn.schedule.layout`.

Rows of a sequence: tensors of batch extent 1 hold all sequences one after the other (packed), otherwise the
batch index is the sequence. `first_k_row` and `finish.locate` say where rows begin for plain pointers,
`tma_rows` for the copy engine.
"""

from itertools import islice
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ....schedule.layout import (
    HEADER,
    ITEM,
    ITEM_WORDS,
    RUN,
    RUN_WORDS,
    SEQUENCE,
    SEQUENCE_WORDS,
    ItemRecord,
    RunRecord,
    SequenceRecord,
)

PACKED_ROWS = 1 << 30  # row extent of a packed tensor for the copy engine, see tma_rows
UNBOUNDED = 1 << 30
NO_ITEM = (1 << 31) - 1  # an index beyond every list
MAILBOX_WORDS = 32
FIRST_RUN_LANE = 16  # the lane of `put_item` that reads the first word of the first run


class Item(NamedTuple):
    """An item as it lies in the mailbox of a block, with what its sequence and the header say about it.

    Attributes:
        place: in the list of items; -1: there are no more.
        record: from the table, but `run_first` is the word of the table where its runs begin.
        first_run: the record of its first run.
    """

    place: Int32
    record: ItemRecord
    first_run: RunRecord
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


def _item_of(words) -> Item:
    """An Item of its words, in order."""
    words = iter(words)
    place = next(words)
    record = ItemRecord(*islice(words, len(ITEM)))
    first_run = RunRecord(*islice(words, len(RUN)))
    return Item(place, record, first_run, *islice(words, len(Item._fields) - 3))


MAILBOX = _item_of(range(MAILBOX_WORDS))
"""The word of a mailbox slot in which each field lies."""


class Run(NamedTuple):
    """A run with its steps unpacked."""

    q_first: Int32
    count: Int32
    t_first: Int32
    q_step: Int32
    t_step: Int32
    t_hold: Int32


@cute.jit
def put_item(plan: cute.Tensor, index: Int32, batches: Int32, slot: cute.Tensor) -> None:
    """Write record `index` of the item list, as an Item, into a mailbox slot.

    Beyond the list only index -1, the sign to stop. By one warp. Its lanes read the words of a record side by
    side: a block computes nothing while it waits for them.
    """
    lane = cute.arch.lane_idx()
    if index >= plan[HEADER.item_count]:
        slot[MAILBOX.place] = Int32(-1)
    else:
        word = Int32(0)
        if lane < len(ITEM):
            word = plan[plan[HEADER.item_offset] + index * ITEM_WORDS + lane]
        sequence = cute.arch.shuffle_sync(word, ITEM.sequence)
        run_first = plan[HEADER.run_offset] + cute.arch.shuffle_sync(word, ITEM.run_first) * RUN_WORDS
        has_runs = cute.arch.shuffle_sync(word, ITEM.run_count) > 0
        if lane < len(ITEM):
            slot[MAILBOX.record.sequence + lane] = run_first if lane == ITEM.run_first else word
        record = Int32(0)
        if lane < len(SEQUENCE):
            record = plan[plan[HEADER.sequence_offset] + sequence * SEQUENCE_WORDS + lane]
        elif (lane >= FIRST_RUN_LANE) & (lane < FIRST_RUN_LANE + RUN_WORDS) & has_runs:
            record = plan[run_first + lane - FIRST_RUN_LANE]
        if (lane >= FIRST_RUN_LANE) & (lane < FIRST_RUN_LANE + RUN_WORDS):
            slot[MAILBOX.first_run.q_first + lane - FIRST_RUN_LANE] = record
        for field in ("seqlen_q", "seqlen_k", "q_tile_count", "total_first"):
            if lane == getattr(SEQUENCE, field):
                slot[getattr(MAILBOX, field)] = record
        if lane == SEQUENCE.q_tile_first:
            slot[MAILBOX.q_tile_first] = record * plan[HEADER.heads]
        seqlen_q = cute.arch.shuffle_sync(record, SEQUENCE.seqlen_q)
        seqlen_k = cute.arch.shuffle_sync(record, SEQUENCE.seqlen_k)
        batch, q_row_first, k_row_first = sequence, Int32(0), Int32(0)
        if batches == 1:
            batch = Int32(0)
            q_row_first = cute.arch.shuffle_sync(record, SEQUENCE.q_row_first)
            k_row_first = cute.arch.shuffle_sync(record, SEQUENCE.k_row_first)
        shift, left, right = seqlen_k - seqlen_q, plan[HEADER.window_left], plan[HEADER.window_right]
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
            slot[MAILBOX.batch + i] = value
        slot[MAILBOX.place] = index


@cute.jit
def first_k_row(seq: SequenceRecord, index: Int32, batches: Int32):
    """(batch, k row) where sequence `index` begins in tensors of `batches` batches."""
    batch, k_row = index, Int32(0)
    if batches == 1:
        batch, k_row = Int32(0), seq.k_row_first
    return batch, k_row


@cute.jit
def tma_rows(length: Int32, row_first: Int32, batches: Int32):
    """(row, shift) where a sequence begins in a copy-engine view, which ends where the sequence ends.

    The view has modes (row, head_dim, head, batch, shift). Of a dense tensor it is (S, D, H, B, 1). Of a
    packed one with row stride s it is (2^30, D, H, 2^31 - 1, 2^31 - 1) with strides (s, 1, h, 2^34 - s, s)
    elements, and row r of a sequence is (2^30 - length + r, ., ., 2^30, row_first + length). Its address is
    that of row row_first + r plus 2^64 elements, which is nothing modulo 2^64, and rows r >= length lie
    beyond the extent: they are read as zeros, and not written.
    """
    row, shift = Int32(0), Int32(0)
    if batches == 1:
        row, shift = PACKED_ROWS - length, row_first + length
    return row, shift


@cute.jit
def read_run(plan: cute.Tensor, slot: cute.Tensor, index: Int32):
    """Run `index` of the item in a mailbox slot, which holds its first one; the steps are signed bytes."""
    item = mailbox_item(slot)
    q_first, count = item.first_run.q_first, item.first_run.count
    t_first, packed = item.first_run.t_first, item.first_run.steps
    if index > 0:
        base = item.record.run_first + index * RUN_WORDS
        q_first, count = plan[base + RUN.q_first], plan[base + RUN.count]
        t_first, packed = plan[base + RUN.t_first], plan[base + RUN.steps]
    return _unpacked(q_first, count, t_first, packed)


@cute.jit
def run_at(plan: cute.Tensor, base: Int32):
    """The run whose record begins at word `base`."""
    return _unpacked(*[plan[base + field] for field in RUN])


def _unpacked(q_first: Int32, count: Int32, t_first: Int32, packed: Int32) -> Run:
    q_step = (packed << 24) >> 24
    t_step = (packed << 16) >> 24
    return Run(q_first, count, t_first, q_step, t_step, packed >> 16)


@cute.jit
def has_run(slot: cute.Tensor, index: Int32, head: Int32):
    """Whether an item has run `index` for its q heads from number `head` on, as `next_run` counts them."""
    record = mailbox_item(slot).record
    return (index < record.run_count) & (head < record.q_head_count)


@cute.jit
def next_run(slot: cute.Tensor, index: Int32, head: Int32):
    """(run, number of its first q head) that follow in an item: after its last run, it goes on with other q
    heads."""
    index += 1
    if index == mailbox_item(slot).record.run_count:
        index = Int32(0)
        head += mailbox_item(slot).record.heads_per_pass
    return index, head


@cute.jit
def read_sequence(plan: cute.Tensor, sequence_offset: Int32, index: Int32):
    """Record of sequence `index`."""
    base = sequence_offset + index * SEQUENCE_WORDS
    return SequenceRecord(*[plan[base + i] for i in range(len(SEQUENCE))])


@cute.jit
def sequence_of_tile(plan: cute.Tensor, map_offset: cutlass.Constexpr[int], tile: Int32):
    """(index, record) of the sequence that owns a q or kv tile, counted over all sequences."""
    index = plan[plan[map_offset] + tile]
    return index, read_sequence(plan, plan[HEADER.sequence_offset], index)


def mailbox_item(slot: cute.Tensor) -> Item:
    """The item in a mailbox slot (int32 in shared memory); only the fields used are loaded."""
    return _item_of([slot[i] for i in range(MAILBOX.high + 1)])


def first_tile_of(item: Item, q_head: Int32) -> Int32:
    """Index of the first dQ tile of a head: of its tickets, fp32 accumulators, rows of LSE and delta."""
    return item.q_tile_first + q_head * item.q_tile_count
