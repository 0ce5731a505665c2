"""The second kernel: what each row does from kv tile to kv tile of its segment, and P of every tile."""

import math
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ..cached.mma import CachedSoftmax
from ..device.operands import DTYPES
from ..forward.config import ROWS, WARP_ROWS
from ..forward.exact import finite, fma
from ..forward.item import segment_end
from ..softcap import Cap
from .config import SpreadConfig
from .item import begin, sequence_of, threads_of


class Weigh:
    """One block per kv tile, kv head and sequence.

    A row's maximum at a tile follows from the largest scores of the tiles before it in the segment. Every
    block goes through those by itself, with the operations of `Softmax.first_tile` and `Softmax._raise`.
    """

    def __init__(self, config: SpreadConfig):
        self.config, self.dtype = config, DTYPES[config.dtype]
        self.softmax = CachedSoftmax(config, self.dtype)

    @cute.jit
    def __call__(self, memory, numbers, scales, launch, stream):
        self.kernel(memory, numbers, scales).launch(
            grid=(launch.tiles, numbers.kv_heads, launch.batch),
            block=(128, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, memory, numbers, scales) -> None:
        c = self.config
        layout = cute.make_layout(c.segment // c.tile_n * ROWS)
        largest = SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)
        kv_tile, head, sequence = cute.arch.block_idx()
        begin()
        item = sequence_of(c, memory, numbers, sequence, head)
        if (kv_tile >= item.kv_first) & (kv_tile <= item.kv_last):
            end = segment_end(c, kv_tile, item.kv_last)
            place, tidx = item.first_tile + kv_tile, cute.arch.thread_idx()[0]
            quads = item.warps * (WARP_ROWS // 4)
            for i in cutlass.range(tidx, (end - kv_tile + 1) * quads, 128, unroll=4):
                at = i // quads * (ROWS // 4) + i % quads
                start = cute.assume(place * ROWS + 4 * at, divby=4)
                source = cute.make_tensor(memory.largest.iterator + start, cute.make_layout(4))
                cute.autovec_copy(source, cute.local_tile(largest, (4,), (at,)))
            cute.arch.sync_threads()
            if WARP_ROWS * (tidx // 32) < item.rows:
                self._weigh(memory, largest, scales, item, (kv_tile, end), place)

    @cute.jit
    def _weigh(self, memory, largest, scales, item, tiles, place: Int32) -> None:
        c, (kv_tile, end) = self.config, tiles
        cap = Cap(*scales) if c.softcap else Cap(None, scales[0] * math.log2(math.e))
        tidx = cute.arch.thread_idx()[0]
        warp, values = tidx // 32, ROWS * c.tile_n // 128
        t = SimpleNamespace(
            group=Int32(0), tidx=tidx, scale_log2=cap.outer,
            acc_S=cute.make_rmem_tensor(values, Float32), maximum=cute.make_rmem_tensor(2, Float32),
        )  # fmt: skip
        source = threads_of(c, memory.scores, c.scores_words, place * item.warps, warp)
        for v in cutlass.range_constexpr(values // 4):
            cute.autovec_copy(source[None, v], cute.make_tensor(t.acc_S.iterator + 4 * v, 4))
        before, shifts, sums = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        t.maximum.fill(-Float32.inf)
        for i in cutlass.range(end - kv_tile + 1, unroll=4):
            for half in cutlass.range_constexpr(2):
                before[half] = t.maximum[half]
                row = self.softmax._row(t, half)
                t.maximum[half] = self._maximum(
                    t, largest[(end - kv_tile - i) * ROWS + row], (item.words, end - i), half, i == 0
                )
        numbers = cute.make_rmem_tensor(4, Float32)
        for half in cutlass.range_constexpr(2):
            shift = finite(t.maximum[half])
            shifts[half] = -shift
            numbers[half] = cute.math.exp2(before[half] - shift, fastmath=True)
        p = cute.make_rmem_tensor(values // 2, Int32)
        self.softmax._probabilities(t, shifts, sums, p)
        numbers[2], numbers[3] = sums[0], sums[1]
        self._put(memory, p, numbers, place, item.warps)
        rises = (numbers[0] != Float32(1.0)) | (numbers[1] != Float32(1.0))
        memory.rises[place * 4 + warp] = Float32(Int32(cute.arch.vote_any_sync(rises)))
        start = cute.assume(cutlass.Int64(place * 128 + tidx) * 2, divby=2)
        cute.autovec_copy(t.maximum, cute.make_tensor(memory.maxima.iterator + start, cute.make_layout(2)))

    def _put(self, memory, p, numbers, place: Int32, warps: Int32) -> None:
        """P where the copy engine takes it from, row by row, 64 keys of a row in 128 swizzled bytes."""
        c, tidx, lane = self.config, cute.arch.thread_idx()[0], cute.arch.lane_idx()
        start, words = cutlass.Int64(place) * warps * c.weighed_words, cute.recast_tensor(p, Float32)
        for half in range(2):
            row = start + (tidx // 32 * 2 + half) * 256 + lane // 4 * 32
            for j in range(c.tile_n // 8):
                chunk = ((j % 8) ^ (lane // 4)) * 4 + lane % 4
                memory.weighed[row + j // 8 * warps * c.half_words + chunk] = words[2 * j + half]
        start = start + warps * (2 * c.half_words) + tidx * 4
        target = memory.weighed.iterator + cute.assume(start, divby=4)
        cute.autovec_copy(numbers, cute.make_tensor(target, cute.make_layout(4)))

    @cute.jit
    def _maximum(self, t, largest, tile, half: cutlass.Constexpr[int], first) -> Float32:
        """A row's maximum after a tile whose largest score this is."""
        old = t.maximum[half]
        rises = first | (fma(largest, t.scale_log2, -old) > self.config.keep)
        room = cutlass.select_(old == -Float32.inf, self.softmax._room(t, tile, half), Float32(0.0))
        return cutlass.select_(rises, fma(largest, t.scale_log2, room), old)
