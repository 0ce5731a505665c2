"""The first kernel: scores of every kv tile, and the largest of each row."""

import math
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from ..cached.load import CachedLoad
from ..cached.mma import CachedMma
from ..cached.pages import numbers_of_pages
from ..device.operands import DTYPES, multiply, tile_layout
from ..forward.block import products_of
from ..forward.config import ROWS, WARP_ROWS
from ..softcap import Cap
from .config import SpreadConfig
from .item import begin, place_in_scores, sequence_of


class Score:
    """One block per kv tile, kv head and sequence."""

    def __init__(self, config: SpreadConfig):
        self.config, self.dtype = config, DTYPES[config.dtype]
        self.load, self.mma = CachedLoad(config, self.dtype), CachedMma(config, self.dtype)

    @cute.jit
    def __call__(self, copy, memory, numbers, scales, launch, stream):
        c = self.config
        layouts = tuple(tile_layout(self.dtype, rows, c.head_dim, 1) for rows in (ROWS, c.tile_n))
        self.kernel(copy, layouts, products_of(c, self.dtype).scores, memory, numbers, scales).launch(
            grid=(launch.tiles, numbers.kv_heads, launch.batch),
            block=(128, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, copy, layouts, product, memory, numbers, scales) -> None:
        c = self.config
        kv_tile, head, sequence = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = SmemAllocator()
        full = allocator.allocate_array(Int64, 1)
        q, k = (
            allocator.allocate_tensor(self.dtype, x.outer, byte_alignment=1024, swizzle=x.inner)
            for x in layouts
        )
        if warp_idx == 0:
            cpasync.prefetch_descriptor(copy.atom)
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(full, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        begin()
        item = sequence_of(c, memory, numbers, sequence, head)
        if (kv_tile >= item.kv_first) & (kv_tile <= item.kv_last):
            if warp_idx == 0:
                of_pages = numbers_of_pages(numbers.pages, numbers.page_size, numbers.most_pages)
                where = self.load.where_is(memory.pages, of_pages, sequence, Int32(kv_tile), item.seqlen_k)
                place = self.load.place_of(where, numbers.k_rows)
                self.load.start(copy, k[None, None, 0], place, head, full)
            if warp_idx == 1:
                # All of Q, to stage 0.
                self.load.copy_rows(memory.q, q, (sequence, Int32(0), head), item.rows, 0, 0, 1)
                cute.arch.cp_async_wait_group(0)
                cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
            cute.arch.mbarrier_wait(full, 0)
            self._scores(product, memory, (q, k), scales, item, kv_tile)

    @cute.jit
    def _scores(self, product, memory, tiles, scales, item, kv_tile: Int32) -> None:
        c, (q, k) = self.config, tiles
        cap = Cap(*scales) if c.softcap else Cap(None, scales[0] * math.log2(math.e))
        scores = product.get_slice(0)
        tidx = cute.arch.thread_idx()[0]
        t = SimpleNamespace(
            group=Int32(0), tidx=tidx, inner=cap.inner,
            acc_S=cute.make_rmem_tensor(scores.partition_shape_C((ROWS, c.tile_n)), Float32),
        )  # fmt: skip
        of_q = scores.make_fragment_A(scores.partition_A(q))[None, None, None, 0]
        of_k = scores.make_fragment_B(scores.partition_B(k))[None, None, None, 0]
        multiply(product, t.acc_S, of_q, of_k, False)
        warpgroup.wait_group(0)
        warp, place = tidx // 32, item.first_tile + kv_tile
        if WARP_ROWS * warp < item.rows:
            self.mma.softmax.cap(t)
            self.mma.softmax.mask(t, item.words, self.mma._item(item.words, Int32(0)), kv_tile)
            largest = self.mma.softmax._largest(t)
            of_tile = memory.scores.iterator + Int64(place) * item.rows * c.tile_n
            for half in cutlass.range_constexpr(2):
                row = self.mma.softmax._row(t, half)
                if tidx % 4 == 0:
                    memory.largest[place * ROWS + row] = largest[half]
                if row < item.rows:
                    for j in cutlass.range_constexpr(c.tile_n // 8):
                        start = cute.assume(place_in_scores(c, row, j), divby=2)
                        target = cute.make_tensor(of_tile + start, cute.make_layout(2))
                        cute.autovec_copy(cute.make_tensor(t.acc_S.iterator + 4 * j + 2 * half, 2), target)
