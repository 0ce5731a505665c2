"""The warps that load: one claims items, and loads K and V page by page; the others copy rows of Q."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from ..device import plan_view, ptx
from ..forward.claims import CLAIM_BEFORE, READ_BEFORE, claim
from ..forward.config import ROWS, WARP_ROWS
from ..forward.item import Info, segment_end
from .config import CachedConfig
from .item import ITEM_BARRIER, Q_WARPS
from .pages import Pages, numbers_of_pages, record_of

ROWS_LOG2 = ROWS.bit_length() - 1
THREADS_OF_ITEM = 32 * (1 + Q_WARPS)


class CachedLoad(Pages):
    def __init__(self, config: CachedConfig, dtype):
        super().__init__(config)
        self.dtype = dtype

    @cute.jit
    def run(self, copies, memory, shared, rings, numbers) -> None:
        c = self.config
        left, right, group, kv_heads, pages, page_size, most_pages, *more = numbers
        of_pages = numbers_of_pages(pages, page_size, most_pages)
        table = memory.table
        section, items = table[2], table[0] * kv_heads
        in_section, blocks = table[0] * section, Int32(cute.arch.grid_dim()[0])
        n_item, n_kv, index = Int32(0), Int32(0), Int32(cute.arch.block_idx()[0])
        per_segment = c.segment // c.tile_n
        # With three, the load warp has no registers for the next tile's place, nor for a logarithm.
        ahead = c.warpgroups < 3
        fewer = Int32(0)
        if const_expr(c.warpgroups == 1):
            fewer = self._fewer(items, more[2])
        record = record_of(table, (table[0], section, items), index)
        while index < items:
            head = index // in_section * section + index % in_section % section
            sequence, q_tile, segment, place, rows, seqlen_k, first, shift = record
            low = shift - left if left >= 0 else Int32(-plan_view.UNBOUNDED)
            high = shift + right if right >= 0 else Int32(plan_view.UNBOUNDED)
            top = q_tile * c.tile_m
            bottom = cutlass.min(top + c.tile_m, rows) - 1
            kv_first = cutlass.max(top // group + low, 0) // c.tile_n
            last = cutlass.min(bottom // group + high, seqlen_k - 1)
            kv_last = last // c.tile_n if last >= 0 else Int32(-1)
            partial = Int32(-1)
            if segment >= 0:
                kv_first = cutlass.max(kv_first, segment * per_segment)
                kv_last = cutlass.min(kv_last, (segment + 1) * per_segment - 1)
                partial = place * kv_heads + head
            batch = Int32(0) if cute.size(memory.q, mode=[0]) == 1 else sequence
            stage = rings.q.stage(n_item)
            rings.q.wait_empty(n_item)
            with cute.arch.elect_one():
                words = (
                    Int32(1), head, kv_first, kv_last, low, high, seqlen_k, rows, top,
                    group, Int32(0), Int32(0), batch, first * group, partial,
                )  # fmt: skip
                for i, value in enumerate(words):
                    shared.item[i, stage] = value
            self._tell(stage)
            kv_tiles = cutlass.max(kv_last - kv_first + 1, 0)
            begin, to_load, claimed = kv_first, kv_tiles, items - blocks
            first_end = segment_end(c, begin, kv_last)
            where = self.where_is(memory.pages, of_pages, sequence, first_end, seqlen_k)
            while begin <= kv_last:
                end = segment_end(c, begin, kv_last)
                for i in cutlass.range(end - begin + 1, unroll=1):
                    if (to_load == cutlass.min(kv_tiles, CLAIM_BEFORE)) & (blocks < items):
                        claimed = claim(memory.claimed)
                    if const_expr(not ahead):
                        of_pages = numbers_of_pages(pages, page_size, most_pages)
                        where = self.where_is(memory.pages, of_pages, sequence, end - i, seqlen_k)
                    of_k, of_v = (self.place_of(where, rows) for rows in more[:2])
                    self._load(rings.k, copies.k, shared.k, of_k, head, n_kv, fewer)
                    if const_expr(ahead):  # found while the stage of V is in use
                        next_one = end - i - 1 if i < end - begin else segment_end(c, end + 1, kv_last)
                        where = self.where_is(memory.pages, of_pages, sequence, next_one, seqlen_k)
                    self._load(rings.v, copies.v, shared.v, of_v, head, n_kv, fewer)
                    n_kv += 1
                    to_load -= 1
                    if to_load == cutlass.min(kv_tiles - 1, READ_BEFORE):
                        index = blocks + cute.arch.shuffle_sync(claimed, 0)
                        record = record_of(table, (table[0], section, items), index)
                begin = end + 1
            if kv_tiles == 0:
                if blocks < items:
                    claimed = claim(memory.claimed)
                index = blocks + cute.arch.shuffle_sync(claimed, 0)
                record = record_of(table, (table[0], section, items), index)
            n_item += 1
        rings.q.wait_empty(n_item)
        with cute.arch.elect_one():
            shared.item[Info.valid, rings.q.stage(n_item)] = Int32(0)
        self._tell(rings.q.stage(n_item))

    def _fewer(self, items: Int32, share: Int32) -> Int32:
        """How many stages the load warp leaves empty: a third, where seven of eight SMs have items. At head
        dim 128 memory then gives less if each SM asks for three tiles than for two. Where half of the SMs
        have items, it gives less for two."""
        c = self.config
        return cutlass.select_(8 * c.eager * items >= 7 * share, Int32(c.kv_stages // 3), Int32(0))

    def _tell(self, stage) -> None:
        """The words of a stage are there. Nobody still waits for those before: the stage was empty."""
        cute.arch.sync_warp()
        cute.arch.barrier_arrive(barrier_id=ITEM_BARRIER + stage, number_of_threads=THREADS_OF_ITEM)

    @cute.jit
    def copy_queries(self, memory, shared, rings, part: Int32) -> None:
        """Each of the other warps copies a part of the Q of every item, and lets those who multiply have it
        with the item's words."""
        n_item, go_on = Int32(0), Int32(1)
        while go_on == 1:
            stage = rings.q.stage(n_item)
            # No mbarrier: a warp that waits long for one looks again and again, and takes time from others.
            cute.arch.barrier(barrier_id=ITEM_BARRIER + stage, number_of_threads=THREADS_OF_ITEM)
            words = shared.item[None, stage]
            go_on = words[Info.valid]
            if go_on == 1:
                top, rows = words[Info.row], words[Info.seqlen_q]
                place = (words[Info.batch], words[Info.row_first] + top, words[Info.q_head])
                self.copy_rows(memory.q, shared.q, place, rows - top, stage, part, Q_WARPS)
                cute.arch.cp_async_wait_group(0)
                cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(rings.q.full + stage)
            n_item += 1

    @cute.jit
    def copy_rows(
        self, mQ, sQ, place, exist: Int32, stage, part: Int32, parts: cutlass.Constexpr[int]
    ) -> None:
        """Start to copy a part of the rows of Q, 16 bytes at a time; those that do not exist are zeros. Where
        there are few, warps that have none do not look at theirs."""
        c = self.config
        lane, vectors = cute.arch.lane_idx(), c.head_dim // 8
        column, own = lane % vectors, lane // vectors
        step, rows = 32 // vectors, Int32(c.tile_m)
        if const_expr(c.warpgroups == 1):
            rows = cutlass.min(rows, (exist + WARP_ROWS - 1) // WARP_ROWS * WARP_ROWS)
        for i in cutlass.range(part, (rows + step - 1) // step, parts, unroll=1):
            row = i * step + own
            tile = sQ[None, None, stage * c.warpgroups + (row >> ROWS_LOG2)]
            # Lanes that are too many for a whole number of rows copy nothing.
            if const_expr(32 % vectors == 0):
                self._copy_vector(mQ, tile, place, row, column, exist)
            else:
                if own < step:
                    self._copy_vector(mQ, tile, place, row, column, exist)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def _copy_vector(self, mQ, tile, place, row: Int32, column: Int32, exist: Int32) -> None:
        """Start to copy 16 bytes of a row of Q to its place in a tile, or store zeros there."""
        batch, first, head = place
        target = cute.local_tile(tile[row & (ROWS - 1), None], (8,), (column,))
        if (row < exist) & (8 * column < cute.size(mQ, mode=[3])):
            copy = cute.make_copy_atom(cpasync.CopyG2SOp(), self.dtype, num_bits_per_copy=128)
            group = mQ.shape[1][0]
            token = ptx.quotient(first + row, group)
            source = mQ[batch, (first + row - token * group, token), head, None]
            source = cute.local_tile(source, (8,), (column,))
            cute.copy(copy, source, target)
        else:
            zeros = cute.make_rmem_tensor(8, self.dtype)
            zeros.fill(0.0)
            cute.autovec_copy(zeros, target)
