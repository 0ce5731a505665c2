"""Which tasks are executed where keys have intervals of rows: those whose tiles any row sees, by bounds.

A task that is left out would add exactly 0. Its ticket is left out, too: who adds to a tile waits for the
last ticket below its own that is executed. The plan has that wait, directly or through others, so what the
proof says of claims holds. Where no ticket below is executed, a contribution is stored and not added. A tile
that has contributions in the plan, of which none is made, is zeroed and queued before the main kernel begins.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ....schedule.layout import HEADER, ITEM, ITEM_WORDS, RUN_WORDS, ItemRecord
from ..device import plan_view, ptx
from . import finish
from .arguments import UnseenMemory
from .config import SEEN_WORDS, BackwardConfig

MAILBOX_WORDS = plan_view.MAILBOX_WORDS + 8
MAILBOX_FIRST = plan_view.MAILBOX_WORDS
MAILBOX_LAST, MAILBOX_ALL_FROM, MAILBOX_ALL_TO, MAILBOX_KEY = range(MAILBOX_FIRST + 1, MAILBOX_FIRST + 5)
"""Words of a mailbox slot behind those of an `Item`: what `put_seen` adds."""


@cute.jit
def interval_of(intervals, key: Int32):
    """(first row, row behind the last one) that see a key, within what int32 can add to."""
    start, end = intervals.starts[key], intervals.ends[key]
    most = Int32(plan_view.UNBOUNDED)
    return cutlass.min(cutlass.max(start, 0), most), cutlass.min(cutlass.max(end, 0), most)


class MarkSeen:
    """Before the main kernel: what `Intervals` says of items and tickets. One warp per item."""

    def __init__(self, config: BackwardConfig):
        self.config = config

    @cute.jit
    def __call__(self, batches, workspace, stream):
        self.kernel(workspace.table, workspace.intervals, batches).launch(
            grid=(workspace.intervals.items.shape[0] // SEEN_WORDS, 1, 1),
            block=(32, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, table, intervals, batches: Int32) -> None:
        c = self.config
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # rows of `seen` have been zeroed
        index, lane = Int32(cute.arch.block_idx()[0]), cute.arch.lane_idx()
        base = table[HEADER.item_offset] + index * ITEM_WORDS
        item = ItemRecord(*[table[base + field] for field in ITEM])
        seq = plan_view.read_sequence(table, table[HEADER.sequence_offset], item.sequence)
        first_key = seq.k_row_first
        if batches > 1:
            first_key = item.sequence * seq.seqlen_k
        far = Int32(plan_view.UNBOUNDED)
        any_from, any_to, all_from, all_to = far, Int32(-1), Int32(0), far
        for n in cutlass.range_constexpr(c.tile_n // 32):
            row = item.kv_tile * c.tile_n + 32 * n + lane
            if row < seq.seqlen_k:
                start, end = interval_of(intervals, first_key + row)
                if start < end:
                    any_from, any_to = cutlass.min(any_from, start), cutlass.max(any_to, end - 1)
                all_from, all_to = cutlass.max(all_from, start), cutlass.min(all_to, end)
        any_from = cute.arch.warp_redux_sync(any_from, "min")
        any_to = cute.arch.warp_redux_sync(any_to, "max")
        all_from = cute.arch.warp_redux_sync(all_from, "max")
        all_to = cute.arch.warp_redux_sync(all_to, "min")
        first, last = any_from // c.tile_m, Int32(-1)
        if any_to >= 0:
            last = any_to // c.tile_m
        tile_first = seq.q_tile_first * table[HEADER.heads] + item.q_head_first * seq.q_tile_count
        count = Int32(0)
        for r in cutlass.range(item.run_count, unroll=1):
            run = plan_view.run_at(table, table[HEADER.run_offset] + (item.run_first + r) * RUN_WORDS)
            for k in cutlass.range((run.count + 31) // 32, unroll=1):
                i = 32 * k + lane
                q_tile, ticket = run.q_first + i * run.q_step, run.t_first + i // run.t_hold * run.t_step
                if (i < run.count) & (q_tile >= first) & (q_tile <= last):
                    count += 1
                    for h in cutlass.range(item.q_head_count, unroll=1):
                        tile = tile_first + h * seq.q_tile_count + q_tile
                        word = intervals.seen.iterator + tile * intervals.seen.shape[1] + ticket // 32
                        ptx.set_bits(word, 1 << ticket % 32)
        count = cute.arch.warp_redux_sync(count, "add")
        if lane == 0:
            values = (count, first, last, all_from, all_to, first_key + item.kv_tile * c.tile_n)
            for word, value in enumerate(values):
                intervals.items[index * SEEN_WORDS + word] = value


class PutUnseen:
    """Behind `MarkSeen`: tiles that would get contributions and get none are complete. One block per tile."""

    THREADS = 128

    def __init__(self, config: BackwardConfig):
        self.config = config

    @cute.jit
    def __call__(self, tensors, workspace, launch, stream):
        w = workspace
        memory = UnseenMemory(w.table, w.control, w.dq_acc, w.intervals.seen)
        self.kernel(tensors.dq, memory, launch.complete, launch.grid).launch(
            grid=(launch.q_tiles, tensors.dq.shape[2], 1),
            block=(self.THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mdQ, memory: UnseenMemory, complete: Int32, blocks: Int32) -> None:
        c, table = self.config, memory.table
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        index, q_head, _ = cute.arch.block_idx()
        tidx = cute.arch.thread_idx()[0]
        key = index * mdQ.shape[2] + q_head
        tile, _ = finish.locate(c, table, table[HEADER.q_map_offset], key, mdQ)
        if (is_last(memory.seen, tile, Int32(-1)) == 1) & (finish.contributions(table, index) > 0):
            acc = cute.make_tensor(
                memory.dq_acc.iterator + Int64(tile) * c.dq_elements, cute.make_layout(c.dq_elements)
            )
            for n in cutlass.range(c.dq_elements // self.THREADS, unroll=8):
                acc[n * self.THREADS + tidx] = Float32(0.0)
            cute.arch.sync_threads()
            if tidx == 0:
                finish.put(c, memory, (key, tile), complete, blocks)


@cute.jit
def put_seen(intervals, index: Int32, slot) -> None:
    """Complete an item in the mailbox: the tasks that it has, or no runs if it has none."""
    lane = cute.arch.lane_idx()
    if (lane < 6) & (slot[plan_view.MAILBOX.place] >= 0):
        word = intervals.items[index * SEEN_WORDS + lane]
        if lane == 0:
            slot[plan_view.MAILBOX.record.task_count] = word
            if word == 0:
                slot[plan_view.MAILBOX.record.run_count] = Int32(0)
        else:
            slot[MAILBOX_FIRST + lane - 1] = word
    cute.arch.sync_warp()


def heads_of_task(config: BackwardConfig, slot, q_tile: Int32) -> Int32:
    """How many q heads an item takes a task for, before the next task: none where it is left out."""
    heads = plan_view.mailbox_item(slot).record.heads_per_pass
    if not config.intervals:
        return heads
    executed = (q_tile >= slot[MAILBOX_FIRST]) & (q_tile <= slot[MAILBOX_LAST])
    return cutlass.select_(executed, heads, Int32(0))


@cute.jit
def ticket_before(seen, tile: Int32, ticket: Int32) -> Int32:
    """The last ticket of a tile below `ticket` that is executed; -1 if there is none."""
    word = ticket // 32
    bits = seen[tile, word] & ((1 << ticket % 32) - 1)
    while (bits == 0) & (word > 0):
        word -= 1
        bits = seen[tile, word]
    return 32 * word + ptx.highest_bit(bits)  # of 0 it is -1


@cute.jit
def is_last(seen, tile: Int32, ticket: Int32) -> Int32:
    """1 if no ticket of a tile above `ticket` is executed, else 0."""
    word = (ticket + 1) // 32
    bits = Int32(0)
    if word < seen.shape[1]:
        bits = seen[tile, word] & ~((1 << (ticket + 1) % 32) - 1)
    while (bits == 0) & (word + 1 < seen.shape[1]):
        word += 1
        bits = seen[tile, word]
    return Int32(bits == 0)
