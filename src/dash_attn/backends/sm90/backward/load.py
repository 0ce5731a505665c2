"""The load warp: claims items, loads their tiles by the copy engine, and stores their dK and dV."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ..arguments import Copy
from ..device import plan_view, ptx
from ..device.copies import load_tile, partitions
from ..device.ring import Ring, arrive_together
from . import finish, reduce, seen
from .config import BackwardConfig

GRADS_PLACE_WORDS = 8
UNREAD = 2  # an item has its K and V, and dK of the one before is still being read from shared memory


class Rows(NamedTuple):
    """Where Q with LSE, or dO with delta, comes from and goes to. columns: of a tile."""

    ring: Ring
    copy: Copy
    tiles: cute.Tensor  # shared memory, (rows, columns, stages)
    stats: cute.Tensor  # global memory
    stats_here: cute.Tensor  # shared memory, (tile_m, stages)
    columns: int


class LoadRole:
    """The load warp of a configuration."""

    def __init__(self, config: BackwardConfig):
        self.config = config

    @cute.jit
    def run(self, copies, memory, shared, rings, numbers) -> None:
        """Load warp: claims items; loads K and V per item, Q with LSE and dO with delta per task."""
        c, batches = self.config, memory.dq.shape[0]
        q = Rows(rings.q, copies.q, shared.q, memory.lse2, shared.lse2, c.head_dim)
        dout = Rows(rings.dout, copies.dout, shared.dout, memory.delta, shared.delta, c.head_dim_v)
        n_item, n_task, n_kv = Int32(0), Int32(0), Int32(0)
        if const_expr(c.apart):
            slot = reduce.claim_item(c, memory, shared, rings, n_item, batches)
        else:
            slot = reduce.claim_first_item(c, memory, shared, rings, batches, numbers.workers)
        while slot[0] >= 0:
            # Fields of the item are read from the mailbox where they are used: this warp has few registers.
            fresh = Int32(1)
            if plan_view.mailbox_item(slot).record.run_count > 0:
                # Their buffers may not be free for a while: until then K and V can come as far as L2.
                for copy, tile in ((copies.k, shared.k), (copies.v, shared.v)):
                    self._prefetch_kv(copy, tile, plan_view.mailbox_item(slot))
            r, first_head = Int32(0), Int32(0)
            while plan_view.has_run(slot, r, first_head):
                run = plan_view.read_run(memory.table, slot, r)
                for i in cutlass.range(run.count, unroll=1):
                    q_tile = run.q_first + i * run.q_step
                    heads = seen.heads_of_task(c, slot, q_tile)
                    for h in cutlass.range(heads, unroll=1):
                        item = plan_view.mailbox_item(slot)
                        q_head = item.record.q_head_first + first_head + h
                        self._load_rows(q, item, (n_task, q_tile, q_head), shared.q_info, slot)
                        self._load_rows(dout, item, (n_task, q_tile, q_head), None, slot)
                        if fresh == UNREAD:
                            self._release_dk(rings)
                            fresh = Int32(0)
                        # K and V last: their buffers are the last ones the previous item lets go.
                        if fresh == 1:
                            self._exchange_kv(copies, shared, rings, item, n_task, n_kv)
                            n_kv += 1
                            fresh = Int32(UNREAD)
                        if const_expr(c.apart):
                            if n_task == 0:
                                cute.arch.griddepcontrol_wait()
                                for rows in (q, dout):
                                    self._load_statistics(rows, item, (n_task, q_tile, q_head))
                        n_task += 1
                r, first_head = plan_view.next_run(slot, r, first_head)
            n_item += 1
            if fresh == UNREAD:
                self._release_dk(rings)
            if const_expr(not c.apart):
                if fresh != 1:
                    # Only an item whose tickets are granted depends on no other block: reduce.py, Claiming.
                    rings.item_granted.wait_full_before(n_kv)
            slot = reduce.claim_item(c, memory, shared, rings, n_item, batches)
        rings.v.wait_empty(n_kv)
        self._store(copies.dv, shared.v[None, None, 0], shared)
        self._store_dk(copies.dk, shared, rings, n_task, n_kv)
        if const_expr(c.apart):
            # Also in a block without tasks: who waits for this kernel waits for the ones before it, too.
            cute.arch.griddepcontrol_wait()
        if const_expr(c.waits):
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # complete tiles come where dV and dK were
            cute.arch.sync_warp()
            finish.load_role(c, memory, shared, rings, n_item, numbers.complete)
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def _load_rows(self, rows: Rows, item, task, info, slot) -> None:
        """Load the rows of a task, (its number in this block, q tile, q head), with their statistics.

        `info`: where to tell the MMA warps about its mask, None: it is not to be told. Where contributions
        are apart, the first task's statistics are still missing.
        """
        c = self.config
        n_task, q_tile, q_head = task
        stat = Int64(plan_view.first_tile_of(item, q_head) + q_tile) * c.tile_m
        place = (item.q_tma_row, item.tma_batch, item.q_tma_shift)
        stage, phase = rows.ring.stage(n_task), rows.ring.phase(n_task)
        cute.arch.mbarrier_wait(rows.ring.empty + stage, phase ^ 1)
        full = rows.ring.full + stage
        with cute.arch.elect_one():
            if const_expr(info is not None):
                self._put_q_info((info, stage), item, q_tile, slot)
            cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * c.tile_m * rows.columns + 4 * c.tile_m)
            if const_expr(not c.apart):
                self._copy_statistics(rows, stage, stat)
        if const_expr(c.apart):
            if n_task > 0:
                self._load_statistics(rows, item, task)
        load_tile(rows.copy, rows.tiles[None, None, stage], place, q_tile, q_head, full)

    @cute.jit
    def _load_statistics(self, rows: Rows, item, task) -> None:
        """Load what preprocessing says about the rows of a task."""
        c = self.config
        n_task, q_tile, q_head = task
        stat = Int64(plan_view.first_tile_of(item, q_head) + q_tile) * c.tile_m
        stage = rows.ring.stage(n_task)
        with cute.arch.elect_one():
            self._copy_statistics(rows, stage, stat)

    def _copy_statistics(self, rows: Rows, stage: Int32, stat: Int64) -> None:
        """Start to copy those from number `stat` on to a stage. By one lane."""
        target = rows.stats_here[None, stage].iterator
        ptx.bulk_load(target, rows.stats.iterator + stat, 4 * self.config.tile_m, rows.ring.full + stage)

    @cute.jit
    def _exchange_kv(self, copies, shared, rings, item, n_task: Int32, n_kv: Int32) -> None:
        """Store dV of the item before and load K and V of this one; begin to store dK of the item before."""
        c = self.config
        k_bytes, v_bytes = 2 * c.tile_n * c.head_dim, 2 * c.tile_n * c.head_dim_v
        rings.v.wait_empty(n_kv)
        self._store(copies.dv, shared.v[None, None, 0], shared)
        place = (item.k_tma_row, item.tma_batch, item.k_tma_shift)
        rings.k.wait_empty(n_kv)
        if const_expr(c.split):  # dK is where K comes
            self._store_dk(copies.dk, shared, rings, n_task, n_kv)
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(rings.k.full, k_bytes)
        tile = shared.k[None, None, 0]
        load_tile(copies.k, tile, place, item.record.kv_tile, item.record.kv_head, rings.k.full)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(rings.v.full, v_bytes)
        tile = shared.v[None, None, 0]
        load_tile(copies.v, tile, place, item.record.kv_tile, item.record.kv_head, rings.v.full)
        if const_expr(not c.split):
            self._store_dk(copies.dk, shared, rings, n_task, n_kv)
        cute.arch.sync_warp()  # every lane has read where that dK belongs
        with cute.arch.elect_one():
            self._put_grads_place(shared.grads_place, item)

    def _put_grads_place(self, place, item) -> None:
        """Remember where dK and dV of an item that gets its V now will belong: [they are stored from here, kv
        tile, kv head, row, batch, shift], the last three as `plan_view.tma_rows` defines them. Sums of head
        groups are stored elsewhere."""
        words = (
            Int32(item.record.group_sum < 0),
            item.record.kv_tile,
            item.record.kv_head,
            item.k_tma_row,
            item.tma_batch,
            item.k_tma_shift,
        )
        for i, word in enumerate(words):
            place[i] = word

    @cute.jit
    def _store_dk(self, copy, shared, rings, following: Int32, n_kv: Int32):
        """Begin to store dK of the item before, if any, from the buffer that task `following` will use."""
        c = self.config
        rings.dk.wait_full_before(n_kv)
        self._store(copy, shared.dk[None, None, following % c.leaving_stages * c.dk_stages], shared)

    @cute.jit
    def _release_dk(self, rings):
        """Let the MMA warps have the buffer of the dK that was stored last. Where that was K's, it holds K by
        now."""
        if const_expr(not self.config.split):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            arrive_together(rings.dk.empty)

    @cute.jit
    def _store(self, copy, tile, shared):
        """Begin to store dK or dV of the item before, if any, which the MMA warps have put into `tile`.

        One lane stores, and every lane waits for its own bulk groups before the buffer is used again.
        """
        cute.arch.sync_warp()
        place = shared.grads_place
        if place[0] == 1:
            source, target = partitions(copy, tile, (place[3], place[4], place[5]), place[2])
            with cute.arch.elect_one():  # the compiler elects for loads only (tests/cpu/test_kernels.py)
                cute.copy(copy.atom, source, target[None, place[1]])
            cute.arch.cp_async_bulk_commit_group()

    def _put_q_info(self, place, item, q_tile: Int32, slot) -> None:
        """Tell the MMA warps which scores of a task the mask hides."""
        c = self.config
        q_row, kv_row, low, high = q_tile * c.tile_m, item.record.kv_tile * c.tile_n, item.low, item.high
        cut = (kv_row + c.tile_n > item.seqlen_k) | (kv_row + c.tile_n - 1 > q_row + high)
        cut = cut | (kv_row < q_row + c.tile_m - 1 + low)
        if const_expr(c.intervals):
            cut = cut | (q_row < slot[seen.MAILBOX_ALL_FROM]) | (q_row + c.tile_m > slot[seen.MAILBOX_ALL_TO])
        words, stage = place
        info = words[None, stage]
        info[0] = Int32(cut)
        info[1] = kv_row - high - q_row  # first query column that sees key row 0 of the tile
        info[2] = kv_row - low - q_row  # the last one
        info[3] = item.seqlen_k - kv_row  # key rows that exist
        if const_expr(c.intervals):
            info[4] = slot[seen.MAILBOX_KEY]  # number of key row 0
            info[5] = q_row

    @cute.jit
    def _prefetch_kv(self, copy, shared, item) -> None:
        """Fetch K or V of an item into L2."""
        rows = (item.k_tma_row, item.tma_batch, item.k_tma_shift)
        _, source = partitions(copy, shared[None, None, 0], rows, item.record.kv_head)
        with cute.arch.elect_one():  # the compiler elects for loads only (tests/cpu/test_kernels.py)
            cute.prefetch(copy.atom, source[None, item.record.kv_tile])
