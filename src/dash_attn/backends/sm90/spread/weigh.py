"""The warps of `Spread` that follow a row's maximum from kv tile to kv tile, and make P of every tile."""

import math
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..cached.mma import CachedSoftmax
from ..device.ring import arrive_together
from ..forward.config import ROWS, WARP_ROWS
from ..forward.exact import finite, fma
from ..softcap import Cap
from .config import GROUP_TILES, SCORES_LOG2, WEIGH_WARPS, SpreadConfig
from .item import WEIGH_BARRIER, groups_of, place_in_scores, unit_of


class Weigh:
    """Tiles go round the warps. Where there are rows of several warps, a warp has the same 16 rows always.

    Every warp goes through the largest scores of all tiles, with the operations of `Softmax.first_tile` and
    `Softmax._raise`.
    """

    def __init__(self, config: SpreadConfig, dtype):
        self.config, self.softmax = config, CachedSoftmax(config, dtype)

    @cute.jit
    def run(self, memory, shared, rings, scales, item, tiles) -> None:
        c, (first, last) = self.config, tiles
        cap = Cap(*scales) if c.softcap else Cap(None, scales[0] * math.log2(math.e))
        thread = cute.arch.thread_idx()[0] % (32 * WEIGH_WARPS)
        warp, count = thread // 32, last - first + 1
        self._copy_largest(memory, shared, item, last, count, thread)
        own = warp & (1 << item.shift) - 1
        t = SimpleNamespace(
            group=Int32(0), tidx=32 * own + thread % 32, scale_log2=cap.outer,
            acc_S=cute.make_rmem_tensor(ROWS * c.tile_n // 128, Float32),
            maximum=cute.make_rmem_tensor(2, Float32),
        )  # fmt: skip
        t.maximum.fill(-Float32.inf)
        seen, n = Int32(0), warp >> item.shift
        if own < item.warps:
            while n < groups_of(count) * GROUP_TILES:
                group = n // GROUP_TILES
                if n < count:
                    self._follow(t, shared.largest, item, last, seen, n, WEIGH_WARPS - 1)
                    self._weigh(t, shared, rings, item, last, n, own)
                    if n == count - 1:
                        cute.autovec_copy(t.maximum, shared.maxima[None, t.tidx])
                arrive_together(rings.p.full_of(group))
                seen = n + 1
                n = n + (WEIGH_WARPS >> item.shift)

    @cute.jit
    def _copy_largest(self, memory, shared, item, last: Int32, count: Int32, thread: Int32) -> None:
        quads = item.warps * (WARP_ROWS // 4)
        for i in cutlass.range(thread, count * quads, 32 * WEIGH_WARPS, unroll=4):
            n, quad = i // quads, i % quads
            start = cute.assume((item.first_tile + last - n) * ROWS + 4 * quad, divby=4)
            source = cute.make_tensor(memory.largest.iterator + start, cute.make_layout(4))
            target = cute.local_tile(shared.largest, (4,), (n * (ROWS // 4) + quad,))
            cute.autovec_copy(source, target)
        cute.arch.barrier(barrier_id=WEIGH_BARRIER, number_of_threads=32 * WEIGH_WARPS)

    @cute.jit
    def _follow(
        self, t, largest, item, last: Int32, begin: Int32, end: Int32, most: cutlass.Constexpr[int]
    ) -> None:
        """Maxima before tile `end`, from those before tile `begin`, counted from the last one of the segment.
        There are at most so many in between, but for the first ones."""
        fresh = cutlass.Boolean(False)
        for half in cutlass.range_constexpr(2):
            fresh = fresh | ((t.maximum[half] == -Float32.inf) & (self.softmax._row(t, half) < item.rows))
        if cute.arch.vote_any_sync(fresh):
            for i in cutlass.range(end - begin, unroll=1):
                self._step(t, largest, item, last, begin + i)
        else:
            for i in cutlass.range_constexpr(most):
                self._step_behind(t, largest, begin, end - most + i)

    @cute.jit
    def _step(self, t, largest, item, last: Int32, n: Int32) -> None:
        """A row's maximum after tile n."""
        for half in cutlass.range_constexpr(2):
            old, of_tile = t.maximum[half], largest[n * ROWS + self.softmax._row(t, half)]
            rises = (n == 0) | (fma(of_tile, t.scale_log2, -old) > self.config.keep)
            room = Float32(0.0)
            if old == -Float32.inf:
                room = self.softmax._room(t, (item.words, last - n), half)
            t.maximum[half] = cutlass.select_(rises, fma(of_tile, t.scale_log2, room), old)

    def _step_behind(self, t, largest, begin: Int32, n: Int32) -> None:
        """The same where every row has seen keys, and for tiles from `begin` on only."""
        for half in range(2):
            old, of_tile = t.maximum[half], largest[cutlass.max(n, 0) * ROWS + self.softmax._row(t, half)]
            rises = (n >= begin) & (fma(of_tile, t.scale_log2, -old) > self.config.keep)
            t.maximum[half] = cutlass.select_(rises, fma(of_tile, t.scale_log2, Float32(0.0)), old)

    @cute.jit
    def _weigh(self, t, shared, rings, item, last: Int32, n: Int32, own: Int32) -> None:
        """P of tile n, what O is multiplied by before it, and whether that is 1 for all rows of the warp."""
        c, values, before = self.config, cute.size(t.acc_S), cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(t.maximum, before)
        self._follow(t, shared.largest, item, last, n, n + 1, 1)
        lane, group = t.tidx % 32, n // GROUP_TILES
        rings.s.wait_full(n)
        scores = shared.scores.iterator + (rings.s.stage(n) << SCORES_LOG2 - rings.s.stages)
        t.acc_S.fill(0.0)
        for half in cutlass.range_constexpr(2):
            row = self.softmax._row(t, half)
            if row < item.rows:
                for j in cutlass.range_constexpr(c.tile_n // 8):
                    start = cute.assume(place_in_scores(c, row, j), divby=2)
                    source = cute.make_tensor(scores + start, cute.make_layout(2))
                    cute.autovec_copy(source, cute.make_tensor(t.acc_S.iterator + 4 * j + 2 * half, 2))
        arrive_together(rings.s.empty_of(n))
        shifts, sums = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        numbers, p = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(values // 2, Int32)
        for half in cutlass.range_constexpr(2):
            shift = finite(t.maximum[half])
            shifts[half] = -shift
            numbers[half] = cute.math.exp2(before[half] - shift, fastmath=True)
        for x in (sums, p):
            x.fill(0)
        if WARP_ROWS * own + WARP_ROWS // 2 < item.rows:
            self.softmax._probabilities(t, shifts, sums, p)
        else:
            self.softmax._probabilities(t, shifts, sums, p, rows=1)
        numbers[2], numbers[3] = sums[0], sums[1]
        rings.p.wait_empty(group)
        unit = unit_of(rings.p, item, group, n - group * GROUP_TILES) + own
        for v in cutlass.range_constexpr(values // 8):
            source = cute.make_tensor(p.iterator + 4 * v, 4)
            cute.autovec_copy(source, shared.p[None, lane, v, unit])
        cute.autovec_copy(numbers, shared.numbers[None, lane, unit])
        # Before the first tile there is nothing to multiply.
        rises = (n > 0) & ((numbers[0] != Float32(1.0)) | (numbers[1] != Float32(1.0)))
        shared.rises[unit] = Int32(cute.arch.vote_any_sync(rises))
