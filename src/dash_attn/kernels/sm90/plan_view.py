"""Device-side reading of the plan table (int32): header, items, runs, sequences, totals.

Word offsets follow the table's ABI version 1; every reader is one function, so that a new ABI touches this file only.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

ITEM_COUNT, SEQUENCE_COUNT, ITEM_OFFSET, RUN_OFFSET, SEQUENCE_OFFSET = 2, 4, 5, 6, 7
HEADS, WINDOW_LEFT, WINDOW_RIGHT = 11, 14, 15
ITEM_WORDS, RUN_WORDS, SEQUENCE_WORDS = 8, 4, 8
RUN_FIRST = 5  # word of an item


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
    seqlen_q: Int32
    seqlen_k: Int32
    q_tile_count: Int32
    q_tile_first: Int32  # dQ tiles of all heads of earlier sequences
    total_first: Int32


MAILBOX_WORDS = 16


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


class Header(NamedTuple):
    """The header words that roles need again and again, kept in registers."""

    item_count: Int32
    item_offset: Int32
    run_offset: Int32
    sequence_offset: Int32
    heads: Int32


def read_header(plan: cute.Tensor) -> Header:
    return Header(plan[ITEM_COUNT], plan[ITEM_OFFSET], plan[RUN_OFFSET], plan[SEQUENCE_OFFSET], plan[HEADS])


@cute.jit
def read_item(plan: cute.Tensor, header: Header, index: Int32):
    """Record `index` of the item list; beyond the list: some record with index -1, the sign to stop."""
    beyond = index >= header.item_count
    safe = Int32(0) if beyond else index
    base = header.item_offset + safe * ITEM_WORDS
    words = [plan[base + i] for i in range(ITEM_WORDS)]
    seq = read_sequence(plan, header.sequence_offset, words[0])
    first = seq.q_tile_first * header.heads
    words[RUN_FIRST] = header.run_offset + words[RUN_FIRST] * RUN_WORDS
    return Item(
        Int32(-1) if beyond else index,
        *words,
        seq.seqlen_q,
        seq.seqlen_k,
        seq.q_tile_count,
        first,
        seq.total_first,
    )


@cute.jit
def read_run(plan: cute.Tensor, run_first: Int32, index: Int32):
    """Run `index` of an item whose runs begin at word `run_first`; the steps are signed bytes."""
    base = run_first + index * RUN_WORDS
    packed = plan[base + 3]
    q_step = (packed << 24) >> 24
    t_step = (packed << 16) >> 24
    return Run(plan[base], plan[base + 1], plan[base + 2], q_step, t_step, packed >> 16)


@cute.jit
def read_sequence(plan: cute.Tensor, sequence_offset: Int32, index: Int32):
    """Record of sequence `index`."""
    base = sequence_offset + index * SEQUENCE_WORDS
    return Sequence(*[plan[base + i] for i in range(SEQUENCE_WORDS)])


def mailbox_item(slot: cute.Tensor) -> Item:
    """The item in a mailbox slot (int32 in shared memory); only the fields used are loaded."""
    return Item(*[slot[i] for i in range(len(Item._fields))])


def first_tile_of(item: Item, q_head: Int32) -> Int32:
    """Index of the first dQ tile of a head: of its tickets, fp32 accumulators, rows of LSE and delta."""
    return item.q_tile_first + q_head * item.q_tile_count
