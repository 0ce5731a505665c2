"""The ordered reduction: waiting for tickets, adding in their order, handing over; and claiming items.

A contribution with ticket t may be added when exactly t contributions to its tile have been completed. The
reduce thread stores (the first one) or adds its contribution with one bulk operation, waits until the
*global* writes are performed (cp.async.bulk.wait_group without .read: with .read only the shared-memory
source is known to be free), and only then is the tile handed over.

Where contributions are kept apart (`BackwardConfig.apart`) nobody waits: the ticket warp only says what
comes, the reduce thread stores it in a place of its own, and a block finds its items by its number.

Where keys have intervals of rows, tickets are left out, and the counter is the ticket behind the last one
that was completed: see seen.py.

Three warps share the work of a contribution. The ticket warp alone walks the plan: it waits for tickets, up
to SLOTS contributions ahead of the reduction, and writes (tile, ticket) of each granted one into a ring of
slots in shared memory. The reduce warp and the release warp only follow that ring, so neither keeps any state
of the schedule in registers.

Why another warp may hand over: the reduce thread's mbarrier arrive (release.cta) and the other warp's wait
(acquire.cta) synchronise, and release is cumulative in the PTX model, so its red.release.gpu covers writes
that the reduce thread has observed as performed. The fence it needs is then no longer in the reduce thread's
loop. The ticket's ld.acquire.gpu reaches the reduce thread the same way.

Claiming: an item is claimed by the load warp, in list order, once every ticket of the block's current item
has been granted. From then on nothing the block still does depends on another block, so the block counts as
free for the liveness argument of the plan. Three tickets earlier it is claimed if every item that the current
one depends on has been claimed by then (schedule/proof.py says why that is safe); not much earlier, because a
block that claims and then waits keeps an item from others.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ....schedule.layout import HEADER
from ..device import plan_view, ptx
from . import finish, seen
from .config import ARRIVED, CLAIM_AHEAD, CLAIMED, CONTROL_WORDS

TRACE_WORDS = 4
SLOT_WORDS = 4
"""dQ tile (-1: no more), ticket, key of the tile in the queue if this is its last contribution, else -1.
Where keys have intervals of rows also what the counter is when it may be added."""


@cute.jit
def wait_item(shared, rings, n_item: Int32):
    """Wait for the `n_item`-th item of this block; returns its mailbox slot, valid until `release_item`."""
    rings.item.wait_full(n_item)
    return shared.mailbox[None, rings.item.stage(n_item)]


@cute.jit
def release_item(rings, n_item: Int32) -> None:
    """A warp has read the slot for the last time."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():  # one lane computes the address, unlike in `arrive_together`
        cute.arch.mbarrier_arrive(rings.item.empty_of(n_item))


@cute.jit
def claim_first_item(config: cutlass.Constexpr, memory, shared, rings, batches: Int32, workers: Int32):
    """`claim_item` for the first time: blocks after the first `workers` to arrive get no items, and convert
    dQ. If there are none, nobody counts arrivals."""
    index = Int32(plan_view.NO_ITEM)
    if cute.arch.lane_idx() == 0:
        arrived = Int32(0)
        if workers < cute.arch.grid_dim()[0]:
            arrived = ptx.add(memory.control.iterator + ARRIVED)
        if arrived < workers:
            index = ptx.add(memory.control.iterator + CLAIMED)
    return _put_item(config, memory, shared, rings, index, Int32(0), batches)


@cute.jit
def claim_item(config: cutlass.Constexpr, memory, shared, rings, n_item: Int32, batches: Int32):
    """Claim the next item, by one warp; returns its mailbox slot, where the index is -1 at the end. Where
    contributions are apart, nobody waits for another block, and each has its items by its number."""
    index = Int32(0)
    if const_expr(config.apart):
        index = cute.arch.block_idx()[0] + n_item * cute.arch.grid_dim()[0]
    elif cute.arch.lane_idx() == 0:
        index = ptx.add(memory.control.iterator + CLAIMED)
    return _put_item(config, memory, shared, rings, index, n_item, batches)


@cute.jit
def _put_item(config: cutlass.Constexpr, memory, shared, rings, index: Int32, n_item: Int32, batches: Int32):
    index = cute.arch.shuffle_sync(index, 0)
    rings.item.wait_empty(n_item)
    slot = shared.mailbox[None, rings.item.stage(n_item)]
    plan_view.put_item(memory.table, index, batches, slot)
    if const_expr(config.intervals):
        cute.arch.sync_warp()
        seen.put_seen(memory.intervals, index, slot)
    cute.arch.mbarrier_arrive(rings.item.full_of(n_item))  # every lane for what it has written
    cute.arch.sync_warp()  # this warp reads the slot, too
    return slot


@cute.jit
def wait_ticket(config: cutlass.Constexpr, pointer, expected: Int32, errors) -> Int32:
    """Wait until the tile's counter equals `expected`; returns the last value seen.

    Another value: a bounded wait gave up, here or elsewhere.
    """
    seen = ptx.load_acquire(pointer)
    spins = Int32(0)
    while (seen != expected) & (spins <= config.spin_limit):
        seen = ptx.load_acquire(pointer)
        if const_expr(config.spin_limit > 0):
            spins += 1
            if errors[0] != 0:
                spins = Int32(config.spin_limit + 1)
    return seen


@cute.jit
def pass_on(config: cutlass.Constexpr, memory, slot, complete: Int32) -> None:
    """A contribution has been performed: let the next one follow, or queue the complete tile."""
    if slot[2] < 0:
        if const_expr(config.intervals):
            ptx.store_release(counter_of(memory, slot[0]), slot[1] + 1)
        else:
            ptx.add_release(counter_of(memory, slot[0]))
    else:
        finish.put(config, memory, (slot[2], slot[0]), complete)


@cute.jit
def publish(config: cutlass.Constexpr, shared, rings, n_task: Int32, words) -> None:
    """Put the `n_task`-th contribution of this block, `SLOT_WORDS`, into the ring; its slot must be empty."""
    slot = shared.slots[None, rings.granted.stage(n_task)]
    for i in cutlass.range_constexpr(SLOT_WORDS if config.intervals else SLOT_WORDS - 1):
        slot[i] = words[i]
    cute.arch.mbarrier_arrive(rings.granted.full_of(n_task))


@cute.jit
def wait_slot(ring, shared, n_task: Int32):
    """Wait for the `n_task`-th contribution, granted or performed as the ring says; returns its slot."""
    ring.wait_full(n_task)
    return shared.slots[None, ring.stage(n_task)]


@cute.jit
def ticket_role(config: cutlass.Constexpr, memory, shared, rings) -> None:
    """Ticket warp, one thread: goes through the tasks of every item and waits for the ticket of each.

    The reduce thread then waits for a barrier in shared memory instead of a counter in L2, and the load warp
    hears early that the item depends on nobody any more.
    """
    if cute.arch.lane_idx() == 0:
        n_item, n_task = Int32(0), Int32(0)
        slot = wait_item(shared, rings, n_item)
        while slot[0] >= 0:
            # Fields of the item are read from the mailbox where they are used: this warp has few registers.
            left = (
                plan_view.mailbox_item(slot).record.q_head_count
                * plan_view.mailbox_item(slot).record.task_count
            )
            claim_at = cutlass.min(CLAIM_AHEAD, left - 1)  # not before the first grant
            r, first_head = Int32(0), Int32(0)
            while plan_view.has_run(slot, r, first_head):
                run = plan_view.read_run(memory.table, slot, r)
                ticket, held = run.t_first, Int32(0)
                for i in cutlass.range(run.count, unroll=1):
                    q_tile = run.q_first + i * run.q_step
                    for h in cutlass.range(seen.heads_of_task(config, slot, q_tile), unroll=1):
                        item = plan_view.mailbox_item(slot)
                        q_head = item.record.q_head_first + first_head + h
                        tile = plan_view.first_tile_of(item, q_head) + q_tile
                        key = Int32(-1)
                        if const_expr(config.waits):
                            if _is_last(config, memory, (tile, ticket), item.total_first + q_tile):
                                key = item.q_tile_first + q_tile * memory.table[HEADER.heads] + q_head
                        rings.granted.wait_empty(n_task)
                        expected = _expected(config, memory, tile, ticket)
                        if const_expr(config.waits):
                            if expected > 0:
                                found = wait_ticket(config, counter_of(memory, tile), expected, memory.errors)
                                if const_expr(config.spin_limit > 0):
                                    if found != expected:
                                        item = plan_view.mailbox_item(slot)
                                        where = (
                                            item.record.sequence,
                                            q_head,
                                            item.record.kv_tile,
                                            q_tile,
                                            expected,
                                            found,
                                        )
                                        finish.report(memory.errors, where)
                        publish(config, shared, rings, n_task, (tile, ticket, key, expected))
                        n_task += 1
                        left -= 1
                        if const_expr(not config.apart):
                            if left == claim_at:
                                claim_at = Int32(-1)
                                if left > 0:
                                    claimed = ptx.load_acquire(memory.control.iterator + CLAIMED)
                                    if claimed <= plan_view.mailbox_item(slot).record.needs:
                                        claim_at = Int32(0)
                                if claim_at < 0:
                                    cute.arch.mbarrier_arrive(rings.item_granted.full)
                    held += 1
                    if held == run.t_hold:
                        held = Int32(0)
                        ticket += run.t_step
                r, first_head = plan_view.next_run(slot, r, first_head)
            cute.arch.mbarrier_arrive(rings.item.empty_of(n_item))
            n_item += 1
            slot = wait_item(shared, rings, n_item)
        rings.granted.wait_empty(n_task)
        publish(config, shared, rings, n_task, (Int32(-1), Int32(0), Int32(-1), Int32(0)))


def _expected(config, memory, tile: Int32, ticket: Int32) -> Int32:
    """What the counter of a tile is when a contribution may be added; 0: it is the first one."""
    if config.intervals and config.waits:
        return seen.ticket_before(memory.intervals.seen, tile, ticket) + 1
    return ticket


def _is_last(config, memory, place, total_word: Int32):
    """Whether a contribution, `place`: (dQ tile, ticket), is the last one. `total_word`: of the table, has
    the number of those of the plan."""
    tile, ticket = place
    if config.intervals:
        return seen.is_last(memory.intervals.seen, tile, ticket) == 1
    return ticket + 1 == memory.table[total_word]


def counter_of(memory, tile: Int32):
    """The ticket counter of a dQ tile."""
    return memory.control.iterator + (CONTROL_WORDS + tile)


@cute.jit
def reduce_role(config: cutlass.Constexpr, memory, shared, rings) -> None:
    """Reduce warp, one thread: performs the granted contributions in the order of the ring.

    Words of a trace record: nanoseconds at which the ticket was granted, the contribution was ready, and it
    was performed; the multiprocessor.
    """
    dumped, trace = memory.dq_contributions, memory.trace
    if cute.arch.lane_idx() == 0:
        n_task = Int32(0)
        slot = wait_slot(rings.granted, shared, n_task)
        while slot[0] >= 0:
            tile, ticket = slot[0], slot[1]
            expected = slot[3] if config.intervals else ticket
            granted_at, ready_at = Int64(0), Int64(0)
            if const_expr(config.trace):
                granted_at = ptx.nanoseconds()
            for piece in cutlass.range_constexpr(config.dq_pieces):
                n_dq = use_of_dq(config, n_task, piece)
                rings.dq.wait_full(n_dq)
                if const_expr(config.trace):
                    ready_at = ptx.nanoseconds()
                source = shared.dq[None, rings.dq.stage(n_dq)].iterator
                if const_expr(config.apart):
                    put_apart(config, memory, source, (tile, ticket), piece)
                else:
                    add_contribution(config, memory.dq_acc, source, tile, expected, piece)
                if const_expr(config.dump_contributions):
                    place = Int64(tile) * (dumped.shape[1] // config.dq_elements) + ticket
                    target = dumped.iterator + place * config.dq_elements
                    for here, there, size in parts_of(config, source, target, piece):
                        ptx.bulk_store(here, there, size)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.mbarrier_arrive(rings.dq.empty_of(n_dq))
            if const_expr(config.waits):
                cute.arch.cp_async_bulk_wait_group(0)
            if const_expr(config.trace):
                record = Int64(tile) * trace.shape[1] + ticket * TRACE_WORDS
                line = cute.make_tensor(trace.iterator + record, cute.make_layout(TRACE_WORDS))
                for k, value in enumerate((granted_at, ready_at, ptx.nanoseconds(), ptx.multiprocessor())):
                    line[k] = Int64(value)
            if const_expr(config.waits):
                cute.arch.mbarrier_arrive(rings.performed.full_of(n_task))
            else:
                cute.arch.mbarrier_arrive(rings.granted.empty_of(n_task))
            n_task += 1
            slot = wait_slot(rings.granted, shared, n_task)
        if const_expr(config.waits):
            cute.arch.mbarrier_arrive(rings.performed.full_of(n_task))
        cute.arch.cp_async_bulk_wait_group(0)


def use_of_dq(config, n_task, piece: int):
    """Which use of the dQ buffers has a piece of a task's contribution."""
    return n_task if config.dq_pieces == 1 else n_task * config.dq_pieces + piece


def parts_of(config, source, target, piece: int):
    """What of a dQ tile at `target` a buffer at `source` holds: (from, to, bytes). Of several pieces each
    has a part of both warpgroups' halves."""
    if config.dq_pieces == 1:
        return [(source, target, 4 * config.dq_elements)]
    size, half = config.dq_stage // 2, config.dq_elements // 2
    return [(source + group * size, target + (group * half + piece * size), 4 * size) for group in range(2)]


@cute.jit
def add_contribution(
    config: cutlass.Constexpr, dq_acc, source, tile: Int32, expected: Int32, piece: cutlass.Constexpr[int]
) -> None:
    """Start the bulk operations of a piece of a contribution: the first contribution is stored, so nobody
    zeroes the tile. `expected`: what the counter of the tile was."""
    target = dq_acc.iterator + Int64(tile) * config.dq_elements
    if const_expr(config.waits):
        # The ticket was read through the generic proxy, the reduction goes through the async proxy.
        ptx.fence_proxy_async()
        if expected == 0:
            for here, there, size in parts_of(config, source, target, piece):
                ptx.bulk_store(here, there, size)
        else:
            for here, there, size in parts_of(config, source, target, piece):
                ptx.bulk_add_f32(here, there, size)
    else:
        for here, there, size in parts_of(config, source, target, piece):
            ptx.bulk_add_f32(here, there, size)


@cute.jit
def put_apart(config: cutlass.Constexpr, memory, source, place, piece: cutlass.Constexpr[int]) -> None:
    """Start to store a piece of a contribution, `place`: (dQ tile, ticket), where `finish.sum_apart` looks
    for it."""
    target = memory.dq_acc.iterator + finish.place_apart(memory.table, *place) * config.dq_elements
    for here, there, size in parts_of(config, source, target, piece):
        ptx.bulk_store(here, there, size)


@cute.jit
def release_role(config: cutlass.Constexpr, memory, shared, rings, complete: Int32) -> None:
    """Release warp, one thread: follows the reduce warp and hands over what has been performed."""
    if cute.arch.lane_idx() == 0:
        n_task = Int32(0)
        slot = wait_slot(rings.performed, shared, n_task)
        while slot[0] >= 0:
            pass_on(config, memory, slot, complete)
            cute.arch.mbarrier_arrive(rings.granted.empty_of(n_task))
            n_task += 1
            slot = wait_slot(rings.performed, shared, n_task)
