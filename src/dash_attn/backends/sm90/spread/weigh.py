"""The warps of `Spread` that make P: one follows the maxima of rows from kv tile to kv tile, others make P of
single tiles."""

import math
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..cached.mma import CachedSoftmax
from ..device import ptx
from ..device.ring import arrive_together
from ..forward.config import ROWS, WARP_ROWS
from ..forward.exact import finite, fma
from ..softcap import Cap
from .config import GROUP_TILES, SCORES_LOG2, WEIGH_WARPS, SpreadConfig
from .item import groups_of, place_in_scores, unit_of

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
    def run(self, memory, shared, ring, scales, item, tiles) -> None:
        """Load the scores of every tile, and leave the maxima after it."""
        c, (first, last) = self.config, tiles
        cap = Cap(*scales) if c.softcap else Cap(None, scales[0] * math.log2(math.e))
        lane, count = cute.arch.lane_idx(), last - first + 1
        lanes = [
            SimpleNamespace(group=Int32(0), row=lane + 32 * i, scale_log2=cap.outer) for i in range(ROWS // 32)
        ]
        maxima = cute.make_rmem_tensor(ROWS // 32, Float32)
        maxima.fill(-Float32.inf)
        ptx.fence_proxy_async()  # the kernel before wrote without the copy engine
        largest, following = (cute.make_rmem_tensor((ROWS // 32, AHEAD), Float32) for _ in range(2))
        self._read(memory.largest, largest, lanes, item, last, Int32(0), count)
        for begin in cutlass.range(0, count, AHEAD, unroll=1):
            self._read(memory.largest, following, lanes, item, last, begin + AHEAD, count)
            for i in cutlass.range_constexpr(AHEAD):
                n = begin + i
                if n < count:
                    self._load(memory, shared.scores, ring, item, last, n)
                    self._step(lanes, maxima, largest[None, i], item, last, n)
                    for each in cutlass.range_constexpr(ROWS // 32):
                        shared.maxima[lanes[each].row, n] = maxima[each]
                    arrive_together(ring.full_of(n))
            largest.store(following.load())

    def _read(self, largest, values, lanes, item, last: Int32, begin: Int32, count: Int32) -> None:
        for i in range(AHEAD):
            tile = item.first_tile + last - cutlass.min(begin + i, count - 1)
            for each, of_lane in enumerate(lanes):
                values[each, i] = largest[tile * ROWS + cutlass.min(of_lane.row, item.rows - 1)]

    @cute.jit
    def _load(self, memory, scores, ring, item, last: Int32, n: Int32) -> None:
        words = item.rows * self.config.tile_n
        source = memory.scores.iterator + cute.assume(Int64(item.first_tile + last - n) * words, divby=4)
        ring.wait_empty(n)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ring.full_of(n), 4 * words)
            target = scores.iterator + (ring.stage(n) << SCORES_LOG2 - ring.stages)
            ptx.bulk_load(target.align(128), source, 4 * words, ring.full_of(n))

    @cute.jit
    def _step(self, lanes, maxima, largest, item, last: Int32, n: Int32) -> None:
        """Maxima after tile n, counted from the last one of the segment."""
        fresh = cutlass.Boolean(False)
        for i in cutlass.range_constexpr(len(lanes)):
            fresh = fresh | ((maxima[i] == -Float32.inf) & (lanes[i].row < item.rows))
        if cute.arch.vote_any_sync(fresh):
            for i in cutlass.range_constexpr(len(lanes)):
                room = self.softmax._room(lanes[i], (item.words, last - n), 0)
                room = cutlass.select_(maxima[i] == -Float32.inf, room, Float32(0.0))
                self._raise(lanes[i], maxima, largest, i, n == 0, room)
        else:
            for i in cutlass.range_constexpr(len(lanes)):
                self._raise(lanes[i], maxima, largest, i, cutlass.Boolean(False), Float32(0.0))

    def _raise(self, lane, maxima, largest, i: int, always, room) -> None:
        rises = always | (fma(largest[i], lane.scale_log2, -maxima[i]) > self.config.keep)
        maxima[i] = cutlass.select_(rises, fma(largest[i], lane.scale_log2, room), maxima[i])


class Weigh:
    """P of every tile. Units of 16 rows of a tile go round the warps."""

    def __init__(self, config: SpreadConfig, dtype):
        self.config, self.softmax = config, CachedSoftmax(config, dtype)

    @cute.jit
    def run(self, shared, rings, scales, item, count: Int32, warp: Int32) -> None:
        """warp: from 0 on."""
        cap = Cap(*scales) if self.config.softcap else Cap(None, scales[0] * math.log2(math.e))
        units, warps = groups_of(count) * GROUP_TILES << item.shift, Int32(WEIGH_WARPS)
        if warps > item.warps << rings.s.stages:
            # Who waits for a slot must have seen it full the time before.
            warps = Int32(4)
        unit = cutlass.select_(warp < warps, warp, units)
        while unit < units:
            n, own = unit >> item.shift, unit & (1 << item.shift) - 1
            if own < item.warps:
                group = n // GROUP_TILES
                rings.p.wait_empty(group)
                if n < count:
                    place = unit_of(rings.p, item, group, n - group * GROUP_TILES) + own
                    self._weigh(shared, rings, item, cap.outer, n, place, own)
                arrive_together(rings.p.full_of(group))
            unit += warps

    @cute.jit
    def _weigh(self, shared, rings, item, scale_log2, n: Int32, place: Int32, own: Int32) -> None:
        """P of tile n, what O is multiplied by before it, and whether that is 1 for all rows of the warp."""
        c, lane = self.config, cute.arch.lane_idx()
        t = SimpleNamespace(
            group=Int32(0), tidx=32 * own + lane, scale_log2=scale_log2,
            acc_S=cute.make_rmem_tensor(ROWS * c.tile_n // 128, Float32),
        )  # fmt: skip
        rows = [self.softmax._row(t, half) for half in range(2)]
        rings.s.wait_full(n)
        scores = shared.scores.iterator + (rings.s.stage(n) << SCORES_LOG2 - rings.s.stages)
        t.acc_S.fill(0.0)
        shifts, sums, numbers = (cute.make_rmem_tensor(k, Float32) for k in (2, 2, 4))
        for half in cutlass.range_constexpr(2):
            before = cutlass.select_(n == 0, -Float32.inf, shared.maxima[rows[half], cutlass.max(n - 1, 0)])
            shift = finite(shared.maxima[rows[half], n])
            shifts[half] = -shift
            numbers[half] = cute.math.exp2(before - shift, fastmath=True)
            if rows[half] < item.rows:
                for j in cutlass.range_constexpr(c.tile_n // 8):
                    start = cute.assume(place_in_scores(c, rows[half], j), divby=2)
                    source = cute.make_tensor(scores + start, cute.make_layout(2))
                    cute.autovec_copy(source, cute.make_tensor(t.acc_S.iterator + 4 * j + 2 * half, 2))
        arrive_together(rings.s.empty_of(n))
        p = cute.make_rmem_tensor(c.tile_n // 4, Int32)
        for x in (sums, p):
            x.fill(0)
        if WARP_ROWS * own + WARP_ROWS // 2 < item.rows:
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
