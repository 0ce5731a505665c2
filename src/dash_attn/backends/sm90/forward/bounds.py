"""Before a forward whose keys have intervals of rows: which rows see any key of a kv tile, and which all."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .arguments import BOUNDS_WORDS
from .config import ForwardConfig
from .table import ENTRY_WORDS

WARPS = 4
FAR = 1 << 30


def first_bounds(config: ForwardConfig, sequence: Int32, k_first: Int32) -> Int32:
    """Where bounds of a sequence's kv tiles begin. Those of two sequences never overlap."""
    return k_first // config.tile_n + sequence


def may_see(bounds, tile: Int32, rows) -> Int32:
    """1 if any of the rows, (first, last), may see a key of the kv tile with these bounds, else 0."""
    place = tile * BOUNDS_WORDS
    return Int32((bounds[place] <= rows[1]) & (bounds[place + 1] > rows[0]))


@cute.jit
def seen_tiles(bounds, first: Int32, kv_tiles, rows) -> Int64:
    """Which kv tiles of a segment any of the rows, (first, last), may see. By one warp.

    `kv_tiles`: (base, begin, end), at most 64 from base on; bit i is that of tile base + i. `first`: where
    bounds of the sequence begin.
    """
    (base, begin, end), lane, found = kv_tiles, cute.arch.lane_idx(), Int64(0)
    for half in cutlass.range_constexpr(2):
        kv_tile, seen = base + 32 * half + lane, Int32(0)
        if (kv_tile >= begin) & (kv_tile <= end):
            seen = may_see(bounds, first + kv_tile, rows)
        ballot = Int64(cute.arch.vote_ballot_sync(seen == 1)) & 0xFFFFFFFF
        found = found | (ballot << (32 * half))
    return found


def tiles_between(seen: Int64, base: Int32, first: Int32, last: Int32) -> Int64:
    """Of the tiles of a segment, see `seen_tiles`, those from `first` to `last`."""
    low, high = cutlass.max(first - base, 0), cutlass.min(last - base, 63)
    from_low, behind = Int64(-1) << Int64(cutlass.min(low, 63)), Int64(-2) << Int64(cutlass.max(high, 0))
    return cutlass.select_(low <= high, seen & from_low & ~behind, Int64(0))


class KeyBounds:
    """One block per entry of the table. It takes the kv tiles whose number is that of its q tile, and every
    further one behind so many as there are q tiles. Several entries of one q tile write the same."""

    def __init__(self, config: ForwardConfig):
        self.config = config

    @cute.jit
    def __call__(self, table, intervals, entries: Int32, stream):
        self.kernel(table, intervals).launch(
            grid=(entries, 1, 1), block=(32 * WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, table, intervals) -> None:
        c = self.config
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        first = Int32(cute.arch.block_idx()[0]) * ENTRY_WORDS
        sequence, q_tile, _, _, seqlen_q, seqlen_k, _, k_first = (
            table[first + i] for i in range(ENTRY_WORDS)
        )
        q_tiles = (seqlen_q + c.tile_m - 1) // c.tile_m
        kv_tiles = (seqlen_k + c.tile_n - 1) // c.tile_n
        kv_tile = q_tile + warp * q_tiles
        while kv_tile < kv_tiles:
            any_from, any_to, all_from, all_to = Int32(FAR), Int32(-FAR), Int32(-FAR), Int32(FAR)
            for n in cutlass.range_constexpr(c.tile_n // 32):
                column = kv_tile * c.tile_n + 32 * n + lane
                if column < seqlen_k:
                    start, end = intervals.starts[k_first + column], intervals.ends[k_first + column]
                    if start < end:
                        any_from, any_to = cutlass.min(any_from, start), cutlass.max(any_to, end)
                    all_from, all_to = cutlass.max(all_from, start), cutlass.min(all_to, end)
            values = (
                cute.arch.warp_redux_sync(any_from, "min"),
                cute.arch.warp_redux_sync(any_to, "max"),
                cute.arch.warp_redux_sync(all_from, "max"),
                cute.arch.warp_redux_sync(all_to, "min"),
            )
            if lane == 0:
                place = (first_bounds(c, sequence, k_first) + kv_tile) * BOUNDS_WORDS
                for i, value in enumerate(values):
                    intervals.bounds[place + i] = value
            kv_tile += WARPS * q_tiles
