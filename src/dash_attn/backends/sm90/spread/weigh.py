"""The warps of `Spread` that make P: one follows the maxima of rows from kv tile to kv tile, others make P of
single tiles."""

import math
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..cached.mma import CachedSoftmax
from ..device import ptx
from ..device.ring import arrive_for_copies
from ..forward.config import ROWS, WARP_ROWS
from ..forward.exact import finite, fma
from ..softcap import Cap
from .config import GROUP_TILES, WEIGH_WARPS, SpreadConfig
from .item import groups_of, place_in_scores

AHEAD = 8
"""Tiles whose largest scores are read at once."""


class RowSoftmax(CachedSoftmax):
    """Of threads that have a row each."""

    def _row(self, t, half):
        return t.row


class Follow:
    """A row's maximum at a tile follows from the largest scores of the tiles before it in the segment, by the
    operations of `Softmax.first_tile` and `Softmax._raise`."""

    def __init__(self, config: SpreadConfig, dtype):
        self.config, self.softmax = config, RowSoftmax(config, dtype)

    @cute.jit
    def run(self, memory, shared, ring, scales, work) -> None:
        """Load the scores of every tile, and leave the maxima after it. A lane has a row."""
        c = self.config
        cap = Cap(*scales) if c.softcap else Cap(None, scales[0] * math.log2(math.e))
        lane = cute.arch.lane_idx()
        row = cutlass.min(lane, work.rows - 1)
        t = SimpleNamespace(group=Int32(0), row=work.top + row, scale_log2=cap.outer)
        ptx.fence_proxy_async()  # the kernel before wrote without the copy engine
        largest, following = (cute.make_rmem_tensor(AHEAD, Float32) for _ in range(2))
        self._read(memory.largest, largest, t.row, work, Int32(0))
        maximum = -Float32.inf
        for begin in cutlass.range(0, work.count, AHEAD, unroll=1):
            self._read(memory.largest, following, t.row, work, begin + AHEAD)
            for i in cutlass.range_constexpr(AHEAD):
                n = begin + i
                if n < work.count:
                    self._load(memory.scores, shared.scores, ring, work, n)
                    maximum = self._after(t, maximum, largest[i], work, n)
                    if lane < work.rows:
                        shared.maxima[row, n] = maximum
                    cute.arch.mbarrier_arrive(ring.full_of(n))
            largest.store(following.load())

    def _read(self, largest, values, row, work, begin: Int32) -> None:
        for i in range(AHEAD):
            tile = work.item.first_tile + work.last - cutlass.min(begin + i, work.count - 1)
            values[i] = largest[tile * ROWS + row]

    @cute.jit
    def _load(self, scores, slots, ring, work, n: Int32) -> None:
        words, item = self.config.tile_n, work.item
        row = (item.first_tile + work.last - n) * item.rows + work.top
        source = scores.iterator + cute.assume(Int64(row) * words, divby=4)
        ring.wait_empty(n)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ring.full_of(n), 4 * words * work.rows)
            target = slots[None, ring.stage(n)].iterator
            ptx.bulk_load(target, source, 4 * words * work.rows, ring.full_of(n))

    @cute.jit
    def _after(self, t, old, largest, work, n: Int32):
        """A row's maximum after tile n, counted from the last one of the segment."""
        first, room = cutlass.Boolean(False), Float32(0.0)
        if cute.arch.vote_any_sync(old == -Float32.inf):
            first, room = n == 0, self.softmax._room(t, (work.item.words, work.last - n), 0)
            room = cutlass.select_(old == -Float32.inf, room, Float32(0.0))
        rises = first | (fma(largest, t.scale_log2, -old) > self.config.keep)
        return cutlass.select_(rises, fma(largest, t.scale_log2, room), old)


class Weigh:
    """P of every tile. Tiles go round the warps."""

    def __init__(self, config: SpreadConfig, dtype):
        self.config, self.softmax = config, CachedSoftmax(config, dtype)

    @cute.jit
    def run(self, shared, rings, scales, work, warp: Int32) -> None:
        cap = Cap(*scales) if self.config.softcap else Cap(None, scales[0] * math.log2(math.e))
        n = warp
        while n < groups_of(work.count) * GROUP_TILES:
            group = n // GROUP_TILES
            rings.p.wait_empty(group)
            if n < work.count:
                place = rings.p.stage(group) * GROUP_TILES + n - group * GROUP_TILES
                self._weigh(shared, rings.s, cap.outer, work.rows, n, place)
            cute.arch.mbarrier_arrive(rings.p.full_of(group))
            n += WEIGH_WARPS

    @cute.jit
    def _weigh(self, shared, ring, scale_log2, rows: Int32, n: Int32, place: Int32) -> None:
        """P of tile n, what O is multiplied by before it, and whether that is 1 for all rows."""
        c, lane = self.config, cute.arch.lane_idx()
        t = SimpleNamespace(
            scale_log2=scale_log2, acc_S=cute.make_rmem_tensor(WARP_ROWS * c.tile_n // 32, Float32)
        )
        t.acc_S.fill(0.0)
        ring.wait_full(n)
        scores = shared.scores[None, ring.stage(n)].iterator
        shifts, sums, numbers = (cute.make_rmem_tensor(k, Float32) for k in (2, 2, 4))
        for half in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * half
            of_row = shared.maxima[cutlass.min(row, rows - 1), None]
            shift = finite(of_row[n])
            shifts[half] = -shift
            before = cutlass.select_(n == 0, -Float32.inf, of_row[cutlass.max(n - 1, 0)])
            numbers[half] = cute.math.exp2(before - shift, fastmath=True)
            if row < rows:
                for j in cutlass.range_constexpr(c.tile_n // 8):
                    start = cute.assume(place_in_scores(c, row, j), divby=2)
                    source = cute.make_tensor(scores + start, cute.make_layout(2))
                    cute.autovec_copy(source, cute.make_tensor(t.acc_S.iterator + 4 * j + 2 * half, 2))
        arrive_for_copies(ring.empty_of(n))
        p = cute.make_rmem_tensor(c.tile_n // 4, Int32)
        for x in (sums, p):
            x.fill(0)
        if rows > WARP_ROWS // 2:
            self.softmax._probabilities(t, shifts, sums, p)
        else:
            self.softmax._probabilities(t, shifts, sums, p, rows=1)
        numbers[2], numbers[3] = sums[0], sums[1]
        for k in cutlass.range_constexpr(c.tile_n // 16):
            cute.autovec_copy(cute.make_tensor(p.iterator + 4 * k, 4), shared.p[None, lane, k, place])
        cute.autovec_copy(numbers, shared.numbers[None, lane, place])
        # Before the first tile there is nothing to multiply.
        rises = (n > 0) & ((numbers[0] != Float32(1.0)) | (numbers[1] != Float32(1.0)))
        shared.rises[place] = Int32(cute.arch.vote_any_sync(rises))
