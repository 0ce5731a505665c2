"""The load warp: claims items, and loads their Q, K and V by the copy engine.

A stage of K becomes empty long before that of V in front of it. So V has a warp of its own where one is left.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ..device import plan_view, ptx
from ..device.copies import load_tile
from ..device.ring import arrive_together
from .bounds import first_bounds, may_see, seen_tiles
from .claims import CLAIM_BEFORE, READ_BEFORE, claim
from .config import ForwardConfig
from .item import Info, segment_end
from .table import ENTRY_WORDS

K, V = 0, 1


def divided(number: Int32, by: Int32) -> tuple[Int32, Int32]:
    """Quotient and rest of numbers that are not negative. Unsigned: the compiler then needs half as many
    instructions."""
    quotient = Int32(Uint32(number) // Uint32(by))
    return quotient, number - quotient * by


class LoadRole:
    def __init__(self, config: ForwardConfig):
        self.config = config
        self.parts = (K,) if config.v_warp else (K, V)

    @cute.jit
    def run(self, copies, memory, shared, rings, numbers) -> None:
        c, numbers = self.config, self._numbers(memory, numbers)
        entries, heads, left, right, group, batches, q_heads, k_batches = numbers
        table, items, in_section = memory.table, entries * q_heads, entries * heads
        n_item, n_kv = Int32(0), Int32(0)
        index, blocks = Int32(cute.arch.block_idx()[0]), Int32(cute.arch.grid_dim()[0])
        record = self._read(table, numbers, index)
        while index < items:
            section, inside = divided(index, in_section)
            q_head = section * heads + divided(inside, heads)[1]
            sequence, q_tile, segment, place, seqlen_q, seqlen_k, q_first, k_first = record
            shift = seqlen_k - seqlen_q
            low = shift - left if left >= 0 else Int32(-plan_view.UNBOUNDED)
            high = shift + right if right >= 0 else Int32(plan_view.UNBOUNDED)
            top = q_tile * c.tile_m
            bottom = cutlass.min(top + c.tile_m, seqlen_q) - 1
            kv_first = cutlass.max(top + low, 0) // c.tile_n
            last = cutlass.min(bottom + high, seqlen_k - 1)
            kv_last = last // c.tile_n if last >= 0 else Int32(-1)
            partial = Int32(-1)
            if segment >= 0:
                kv_first = cutlass.max(kv_first, segment * (c.segment // c.tile_n))
                kv_last = cutlass.min(kv_last, (segment + 1) * (c.segment // c.tile_n) - 1)
                partial = place * q_heads + q_head
            bounds = first_bounds(c, sequence, k_first)
            if const_expr(c.intervals):
                kv_first, kv_last = self._narrowed(
                    memory.intervals.bounds, bounds, (kv_first, kv_last), (top, bottom)
                )
            batch = Int32(0) if batches == 1 else sequence
            row_first = q_first if batches == 1 else Int32(0)
            tma_batch = Int32(plan_view.PACKED_ROWS) if batches == 1 else sequence
            tma_row, tma_shift = plan_view.tma_rows(seqlen_q, q_first, batches)
            keys = self._keys((sequence, seqlen_k, k_first), k_batches, (kv_first, kv_last))
            stage = rings.q.stage(n_item)
            rings.q.wait_empty(n_item)
            with cute.arch.elect_one():
                words = (
                    Int32(1), q_head, kv_first, kv_last, low, high, seqlen_k, seqlen_q, top,
                    tma_row, tma_batch, tma_shift, batch, row_first, partial,
                )  # fmt: skip
                for i, value in enumerate(words):
                    shared.item[i, stage] = value
                if const_expr(c.trace):
                    shared.item[Info.index, stage] = index
                if const_expr(c.sink):
                    bits = cute.make_tensor(cute.recast_ptr(memory.sink.iterator, dtype=Int32), q_heads)
                    shared.item[Info.sink, stage] = bits[q_head]
                if const_expr(c.intervals):
                    shared.item[Info.first_key, stage] = k_first
                    shared.item[Info.first_bounds, stage] = bounds
                if const_expr(c.v_warp):
                    shared.item[Info.keys, stage] = self._keys_word(sequence, k_first, k_batches)
                cute.arch.mbarrier_arrive_and_expect_tx(rings.q.full + stage, 2 * c.tile_m * c.head_dim)
            rows = (tma_row, tma_batch, tma_shift)
            for g in cutlass.range_constexpr(c.warpgroups):
                tile = shared.q[None, None, stage * c.warpgroups + g]
                load_tile(copies.q, tile, rows, q_tile * c.warpgroups + g, q_head, rings.q.full + stage)
            kv_head = divided(q_head, group)[0]
            per_segment = c.segment // c.tile_n
            begin, kv_tiles = kv_first, cutlass.max(kv_last - kv_first + 1, 0)
            to_load, claimed = kv_tiles, items - blocks
            while begin <= kv_last:
                end = segment_end(c, begin, kv_last)
                seen = Int64(-1)
                if const_expr(c.intervals):
                    tiles = (end // per_segment * per_segment, begin, end)
                    seen = seen_tiles(memory.intervals.bounds, bounds, tiles, (top, bottom))
                for i in cutlass.range(end - begin + 1, unroll=1):
                    if (to_load == cutlass.min(kv_tiles, CLAIM_BEFORE)) & (blocks < items):
                        claimed = claim(memory.claimed)
                    n_kv, keys = self._load_kv(
                        copies, shared, rings, (keys, end - i, kv_head, k_batches), n_kv, seen, self.parts
                    )
                    to_load -= 1
                    if to_load == cutlass.min(kv_tiles - 1, READ_BEFORE):
                        index = blocks + cute.arch.shuffle_sync(claimed, 0)
                        record = self._read(table, numbers, index)
                begin = end + 1
            if kv_tiles == 0:
                if blocks < items:
                    claimed = claim(memory.claimed)
                index = blocks + cute.arch.shuffle_sync(claimed, 0)
                record = self._read(table, numbers, index)
            n_item += 1
        rings.q.wait_empty(n_item)
        with cute.arch.elect_one():
            shared.item[Info.valid, rings.q.stage(n_item)] = Int32(0)
            cute.arch.mbarrier_arrive(rings.q.full_of(n_item))

    @cute.jit
    def run_values(self, copies, memory, shared, rings, numbers) -> None:
        """What the other warp does: it reads the words of an item as those who multiply do."""
        c, numbers = self.config, self._numbers(memory, numbers)
        _, _, _, _, group, _, _, k_batches = numbers
        n_item, n_kv = Int32(0), Int32(0)
        rings.q.wait_full(n_item)
        words = shared.item[None, rings.q.stage(n_item)]
        while words[Info.valid] == 1:
            kv_head, kv_first, kv_last = (
                words[Info.q_head] // group,
                words[Info.kv_first],
                words[Info.kv_last],
            )
            of_sequence = words[Info.keys], words[Info.seqlen_k], words[Info.keys]
            arrive_together(rings.q.empty_of(n_item))
            keys, begin = self._keys(of_sequence, k_batches, (kv_first, kv_last)), kv_first
            while begin <= kv_last:
                end = segment_end(c, begin, kv_last)
                for i in cutlass.range(end - begin + 1, unroll=1):
                    n_kv, keys = self._load_kv(
                        copies, shared, rings, (keys, end - i, kv_head, k_batches), n_kv, Int64(-1), (V,)
                    )
                begin = end + 1
            n_item += 1
            rings.q.wait_full(n_item)
            words = shared.item[None, rings.q.stage(n_item)]

    def _numbers(self, memory, numbers):
        """(entries, heads of a section, two mask sides, q heads per kv head, batches of q, q heads, batches
        of k)."""
        return numbers

    @cute.jit
    def _keys_word(self, sequence: Int32, k_first: Int32, k_batches: Int32) -> Int32:
        """What `_keys` needs of both."""
        return k_first if k_batches == 1 else sequence

    @cute.jit
    def _keys(self, of_sequence, k_batches: Int32, kv_tiles):
        """Where the keys of a sequence lie: (row, batch, shift) as in `plan_view.tma_rows`."""
        sequence, seqlen_k, k_first = of_sequence
        k_row, k_shift = plan_view.tma_rows(seqlen_k, k_first, k_batches)
        k_batch = Int32(plan_view.PACKED_ROWS) if k_batches == 1 else sequence
        return k_row, k_batch, k_shift

    @cute.jit
    def _load_kv(self, copies, shared, rings, place, n_kv: Int32, seen, parts: cutlass.Constexpr[tuple]):
        """Load a kv tile of `parts`, `place`: (keys, kv tile, kv head, batches), unless no row sees it.
        `seen` has a bit per tile of its segment. With what is then counted as loaded, and `_keys` of the next
        tile."""
        if const_expr(self.config.intervals):
            bit = place[1] % (self.config.segment // self.config.tile_n)
            if (seen >> Int64(bit)) & 1 == 1:
                self._load_tiles(copies, shared, rings, place, n_kv, parts)
                n_kv += 1
        else:
            self._load_tiles(copies, shared, rings, place, n_kv, parts)
            n_kv += 1
        return n_kv, place[0]

    def _load_tiles(self, copies, shared, rings, place, n_kv: Int32, parts) -> None:
        c, (rows, kv_tile, kv_head, _) = self.config, place
        both = (
            (rings.k, copies.k, shared.k, c.head_dim, copies.k_rest, shared.k_rest),
            (rings.v, copies.v, shared.v, c.head_dim_v, copies.v_rest, shared.v_rest),
        )
        for ring, copy, tiles, columns, rest, rest_tiles in (both[part] for part in parts):
            kv_stage = ring.stage(n_kv)
            ring.wait_empty(n_kv)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full + kv_stage, 2 * c.tile_n * columns)
            load_tile(
                copy,
                tiles[None, None, kv_stage],
                rows,
                kv_tile,
                kv_head,
                ring.full + kv_stage,
            )
            if c.rest:
                tile, first = rest_tiles[None, None, kv_stage], (columns - c.rest) // c.rest
                load_tile(rest, tile, rows, kv_tile, kv_head, ring.full + kv_stage, first)

    @cute.jit
    def _narrowed(self, bounds, first: Int32, kv_tiles, rows):
        """Of kv tiles, (first, last), those from the first to the last one that any of the rows may see. If
        there is none, the last one is before the first one. `first`: where bounds of the sequence begin."""
        kv_first, kv_last = kv_tiles
        lane, seen = cute.arch.lane_idx(), Int32(0)
        while (kv_last >= kv_first) & (seen == 0):
            seen = self._seen(bounds, first, (kv_first, kv_last), kv_last - lane, rows)
            if seen == 0:
                kv_last -= 32
            else:  # the lowest bit is that of the last tile
                kv_last -= ptx.highest_bit(seen & -seen)
        kv_last, seen = cutlass.max(kv_last, kv_first - 1), Int32(0)
        while (kv_last >= kv_first) & (seen == 0):
            seen = self._seen(bounds, first, (kv_first, kv_last), kv_first + lane, rows)
            if seen == 0:
                kv_first += 32
            else:
                kv_first += ptx.highest_bit(seen & -seen)
        return kv_first, kv_last

    @cute.jit
    def _seen(self, bounds, first: Int32, kv_tiles, kv_tile: Int32, rows) -> Int32:
        """A bit per lane: whether its kv tile is one of `kv_tiles` and may be seen."""
        (kv_first, kv_last), found = kv_tiles, Int32(0)
        if (kv_tile >= kv_first) & (kv_tile <= kv_last):
            found = may_see(bounds, first + kv_tile, rows)
        return cute.arch.vote_ballot_sync(found == 1)

    @cute.jit
    def _read(self, table, numbers, index: Int32):
        """The words of an item; of the last one where there is none."""
        entries, heads, _, _, _, _, q_heads, *_ = numbers
        index = cutlass.max(cutlass.min(index, entries * q_heads - 1), 0)
        first = divided(divided(index, entries * heads)[1], heads)[0] * ENTRY_WORDS
        return tuple(table[first + i] for i in range(ENTRY_WORDS))
