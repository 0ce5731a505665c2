"""The load warp: claims items, loads their tiles by the copy engine, and stores their dK and dV."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from ..device import plan_view, ptx
from . import finish, reduce
from .config import BackwardConfig

GRADS_PLACE_WORDS = 8
UNREAD = 2  # an item has its K and V, and dK of the one before is still being read from shared memory


def q_info(config, bars):
    """What the load warp tells the MMA warps about the mask of a task, (4, stage)."""
    return cute.make_tensor(bars.q_info, cute.make_layout((4, config.q_stages)))


class LoadRole:
    """The load warp of a configuration."""

    def __init__(self, config: BackwardConfig):
        self.config = config

    @cute.jit
    def run(
        self, tma, mLse2, mDelta, sLse2, sDelta, mPlan, mControl, mErrors, mdQacc, mdQ, sTiles, bars, workers, complete
    ):  # fmt: skip
        """Load warp: claims items; K and V once an item; Q with LSE and dO with delta once a task, in the order of the item's runs."""
        c, batches = self.config, mdQ.shape[0]
        (
            atom_q, mQ, sQ, atom_do, mdO, sdO, atom_k, mK, sK, atom_v, mV, sV, atom_dk, tma_dK, sdK, atom_dv, tma_dV
        ) = tma  # fmt: skip
        tile_bytes = 2 * c.tile_m * c.head_dim + 4 * c.tile_m
        kv_bytes = 2 * c.tile_n * c.head_dim
        n_item, n_task, n_kv = Int32(0), Int32(0), Int32(0)
        slot = reduce.claim_first_item(mPlan, mControl, bars, batches, workers)
        while slot[0] >= 0:
            # Fields of the item are read from the mailbox where they are used: this warp has few registers.
            fresh = Int32(1)
            if plan_view.mailbox_item(slot).run_count > 0:
                # Their buffers may not be free for a while: until then K and V can come as far as L2.
                for atom, mX, sX in ((atom_k, mK, sK), (atom_v, mV, sV)):
                    self._prefetch_kv(atom, mX, sX, plan_view.mailbox_item(slot))
            for r in cutlass.range(plan_view.mailbox_item(slot).run_count, unroll=1):
                run = plan_view.read_run(mPlan, slot, r)
                for i in cutlass.range(run.count, unroll=1):
                    q_tile = run.q_first + i * run.q_step
                    for h in cutlass.range(plan_view.mailbox_item(slot).q_head_count, unroll=1):
                        item = plan_view.mailbox_item(slot)
                        q_head = item.q_head_first + h
                        stat = Int64(plan_view.first_tile_of(item, q_head) + q_tile) * c.tile_m
                        rows = (item.q_tma_row, item.tma_batch, item.q_tma_shift)
                        stage, phase = n_task % c.q_stages, (n_task // c.q_stages) & 1
                        cute.arch.mbarrier_wait(bars.q_empty + stage, phase ^ 1)
                        full = bars.q_full + stage
                        with cute.arch.elect_one():
                            self._put_q_info(bars, stage, item, q_tile)
                            cute.arch.mbarrier_arrive_and_expect_tx(full, tile_bytes)
                            ptx.bulk_load(
                                sLse2[None, stage].iterator, mLse2.iterator + stat, 4 * c.tile_m, full
                            )
                        self._load_tile(atom_q, mQ, sQ[None, None, stage], rows, q_tile, q_head, full)
                        stage, phase = n_task % c.do_stages, (n_task // c.do_stages) & 1
                        cute.arch.mbarrier_wait(bars.do_empty + stage, phase ^ 1)
                        full = bars.do_full + stage
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(full, tile_bytes)
                            ptx.bulk_load(
                                sDelta[None, stage].iterator, mDelta.iterator + stat, 4 * c.tile_m, full
                            )
                        self._load_tile(atom_do, mdO, sdO[None, None, stage], rows, q_tile, q_head, full)
                        if fresh == UNREAD:
                            self._release_dk(bars)
                            fresh = Int32(0)
                        # K and V last: their buffers are the last ones the previous item lets go.
                        if fresh == 1:
                            cute.arch.mbarrier_wait(bars.v_empty, (n_kv & 1) ^ 1)
                            self._store(atom_dv, tma_dV, sV[None, None, 0], bars)
                            rows = (item.k_tma_row, item.tma_batch, item.k_tma_shift)
                            cute.arch.mbarrier_wait(bars.k_empty, (n_kv & 1) ^ 1)
                            with cute.arch.elect_one():
                                cute.arch.mbarrier_arrive_and_expect_tx(bars.k_full, kv_bytes)
                            tile = sK[None, None, 0]
                            self._load_tile(atom_k, mK, tile, rows, item.kv_tile, item.kv_head, bars.k_full)
                            cute.arch.cp_async_bulk_wait_group(0, read=True)
                            cute.arch.sync_warp()
                            with cute.arch.elect_one():
                                cute.arch.mbarrier_arrive_and_expect_tx(bars.v_full, kv_bytes)
                            tile = sV[None, None, 0]
                            self._load_tile(atom_v, mV, tile, rows, item.kv_tile, item.kv_head, bars.v_full)
                            self._store_dk(atom_dk, tma_dK, sdK, n_task, n_kv, bars)
                            cute.arch.sync_warp()  # every lane has read where that dK belongs
                            with cute.arch.elect_one():
                                self._put_grads_place(bars, item)
                            n_kv += 1
                            fresh = Int32(UNREAD)
                        n_task += 1
            n_item += 1
            if fresh == UNREAD:
                self._release_dk(bars)
            if fresh != 1:
                # Only an item whose tickets are granted no longer depends on other blocks: see reduce.py, Claiming.
                cute.arch.mbarrier_wait(bars.item_granted, (n_kv & 1) ^ 1)
            slot = reduce.claim_item(mPlan, mControl, bars, n_item, batches)
        cute.arch.mbarrier_wait(bars.v_empty, (n_kv & 1) ^ 1)
        self._store(atom_dv, tma_dV, sV[None, None, 0], bars)
        self._store_dk(atom_dk, tma_dK, sdK, n_task, n_kv, bars)
        if const_expr(c.ordered):
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # complete tiles come where dV and dK were
            cute.arch.sync_warp()
            finish.load_role(c, mPlan, mControl, mErrors, mdQacc, mdQ, sTiles, bars, n_item, complete)
        cute.arch.cp_async_bulk_wait_group(0)

    def grads_place(self, bars):
        """Where dK and dV that are to be stored belong: [there is one, kv tile, kv head, row, batch, shift] as `plan_view.tma_rows` defines them."""
        return cute.make_tensor(bars.grads_place, cute.make_layout(GRADS_PLACE_WORDS))

    def _put_grads_place(self, bars, item) -> None:
        """Remember where dK and dV of an item that gets its V now will belong; partial sums are stored elsewhere."""
        place = self.grads_place(bars)
        words = (
            Int32(item.group_sum < 0),
            item.kv_tile,
            item.kv_head,
            item.k_tma_row,
            item.tma_batch,
            item.k_tma_shift,
        )
        for i, word in enumerate(words):
            place[i] = word

    @cute.jit
    def _store_dk(self, atom, tensor, sdK, following: Int32, n_kv: Int32, bars):
        """Begin to store dK of the item before, if there is one, from the buffer that task `following` will use."""
        c = self.config
        cute.arch.mbarrier_wait(bars.dk_full, (n_kv & 1) ^ 1)
        self._store(atom, tensor, sdK[None, None, following % 2 * c.dk_stages], bars)

    @cute.jit
    def _release_dk(self, bars):
        """Let the MMA warps have the buffer of the dK that was stored last."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bars.dk_empty)

    @cute.jit
    def _store(self, atom, tensor, shared, bars):
        """Begin to store dK or dV of the item before, which the MMA warps have put into shared memory, if there is one.

        One lane stores, and every lane waits for its own bulk groups before the buffer is used again.
        """
        cute.arch.sync_warp()
        place = self.grads_place(bars)
        if place[0] == 1:
            source, target = self._tiles(atom, tensor, shared, (place[3], place[4], place[5]), place[2])
            with cute.arch.elect_one():  # the compiler elects for loads only (tests/cpu/test_kernels.py)
                cute.copy(atom, source, target[None, place[1]])
            cute.arch.cp_async_bulk_commit_group()

    def _put_q_info(self, bars, stage, item, q_tile: Int32) -> None:
        """Tell the MMA warps which scores of a task the mask hides."""
        c = self.config
        q_row, kv_row, low, high = q_tile * c.tile_m, item.kv_tile * c.tile_n, item.low, item.high
        cut = (kv_row + c.tile_n > item.seqlen_k) | (kv_row + c.tile_n - 1 > q_row + high)
        cut = cut | (kv_row < q_row + c.tile_m - 1 + low)
        info = q_info(self.config, bars)[None, stage]
        info[0] = Int32(cut)
        info[1] = kv_row - high - q_row  # first query column that sees key row 0 of the tile
        info[2] = kv_row - low - q_row  # the last one
        info[3] = item.seqlen_k - kv_row  # key rows that exist

    def _load_tile(self, atom, tensor, shared, rows, tile: Int32, head: Int32, barrier) -> None:
        """Start the TMA load of one tile of a sequence; `rows`: (row, batch, shift) as `plan_view.tma_rows` defines them."""
        target, source = self._tiles(atom, tensor, shared, rows, head)
        cute.copy(atom, source[None, tile], target, tma_bar_ptr=barrier)

    @cute.jit
    def _prefetch_kv(self, atom, tensor, shared, item) -> None:
        """Fetch K or V of an item into L2."""
        rows = (item.k_tma_row, item.tma_batch, item.k_tma_shift)
        _, source = self._tiles(atom, tensor, shared[None, None, 0], rows, item.kv_head)
        with cute.arch.elect_one():  # the compiler elects for loads only (tests/cpu/test_kernels.py)
            cute.prefetch(atom, source[None, item.kv_tile])

    def _tiles(self, atom, tensor, shared, rows, head: Int32):
        """Partitions of a tile in shared memory and of a sequence's tiles, (., tile), for the copy engine; `rows` as in `_load_tile`."""
        row, batch, shift = rows
        sequence = cute.domain_offset((row, 0), tensor[None, None, head, batch, shift])
        tile_shape = (cute.size(shared, mode=[0]), self.config.head_dim)
        tiles = cute.flat_divide(sequence, tile_shape)[None, None, None, 0]
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )
