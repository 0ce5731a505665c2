"""The third kernel: O of some columns, from kv tile to kv tile of a segment."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

from ..cached.load import CachedLoad
from ..device import ptx
from ..device.copies import partitions
from ..device.operands import DTYPES, as_operand_a, multiply, tile_layout, transposed
from ..device.plan_view import PACKED_ROWS
from ..device.ring import Ring, arrive
from ..forward.config import ROWS, WARP_ROWS
from ..forward.exact import fma
from ..forward.softmax import multiply_rows
from .config import SpreadConfig
from .item import begin, sequence_of

LOAD_WARP = 4


class Spread:
    """One block per part of the columns and segment, kv head, and sequence: four warps that multiply, and one
    that loads."""

    def __init__(self, config: SpreadConfig):
        self.config, self.dtype = config, DTYPES[config.dtype]
        self.load = CachedLoad(config, self.dtype)
        self.parts = config.head_dim_v // config.columns

    def tile_of(self, rows: int, stages: int):
        return tile_layout(self.dtype, rows, self.config.columns, stages, row_bytes=2 * self.config.columns)

    @cute.jit
    def __call__(self, copy, memory, numbers, launch, stream):
        c = self.config
        types = self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN
        product = hopper_helpers.make_trivial_tiled_mma(
            *types, Float32, (1, 1, 1), (ROWS, c.columns), warpgroup.OperandSource.RMEM
        )
        self.kernel(copy, self.tile_of(c.tile_n, c.kv_stages), product, memory, numbers).launch(
            grid=(self.parts * launch.segments, numbers.kv_heads, launch.batch),
            block=(160, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, copy, layout, product, memory, numbers) -> None:
        c = self.config
        index, head, sequence = cute.arch.block_idx()
        part, segment = index % self.parts, index // self.parts
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = SmemAllocator()
        barriers = allocator.allocate_array(Int64, 2 * c.kv_stages)
        v = allocator.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        words = cute.make_layout((c.weighed_words, 4, c.kv_stages))
        weighed = allocator.allocate_tensor(Float32, words, byte_alignment=128)
        ring = Ring(barriers, barriers + c.kv_stages, c.kv_stages)
        if warp_idx == LOAD_WARP:
            cpasync.prefetch_descriptor(copy.atom)
            with cute.arch.elect_one():
                for stage in range(c.kv_stages):
                    cute.arch.mbarrier_init(ring.full + stage, 1)
                    cute.arch.mbarrier_init(ring.empty + stage, 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        begin()
        item = sequence_of(c, memory, numbers, sequence, head)
        if (segment >= item.segment_first) & (segment <= item.segment_last):
            per_segment = c.segment // c.tile_n
            first = cutlass.max(item.kv_first, segment * per_segment)
            last = cutlass.min(item.kv_last, (segment + 1) * per_segment - 1)
            if warp_idx == LOAD_WARP:
                where = (sequence, head, part)
                self._load(copy, memory, (v, weighed), ring, numbers, item, where, first, last)
            else:
                place = (sequence * numbers.segments + segment) * numbers.kv_heads + head
                self._multiply(product, memory, (v, weighed), ring, item, (place, part), first, last)

    @cute.jit
    def _load(self, copy, memory, tiles, ring, numbers, item, where, first: Int32, last: Int32) -> None:
        c, (v, weighed), (sequence, head, part) = self.config, tiles, where
        ptx.fence_proxy_async()  # the kernel before wrote P without the copy engine
        warp_bytes = 4 * c.weighed_words
        of_pages = (numbers.pages, numbers.page_size, numbers.most_pages)
        for n in cutlass.range(last - first + 1, unroll=1):
            kv_tile, stage = last - n, ring.stage(n)
            row, page, used = self.load._where(
                memory.pages, of_pages, sequence, Int32(kv_tile * c.tile_n), item.seqlen_k
            )
            ring.wait_empty(n)
            start = Int64(item.first_tile + kv_tile) * item.warps * c.weighed_words
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(
                    ring.full + stage, 2 * c.tile_n * c.columns + item.warps * warp_bytes
                )
            for w in cutlass.range(item.warps, unroll=1):
                source = memory.weighed.iterator + cute.assume(start + w * c.weighed_words, divby=4)
                target = weighed[None, w, stage].iterator
                with cute.arch.elect_one():
                    ptx.bulk_load(target, source, warp_bytes, ring.full + stage)
            pieces = cute.flat_divide(v[None, None, stage], (c.piece, c.columns))
            shift = page * numbers.v_rows + used
            for i in cutlass.range_constexpr(c.tile_n // c.piece):
                place = (
                    cute.arch.shuffle_sync(row, i), Int32(PACKED_ROWS), cute.arch.shuffle_sync(shift, i)
                )  # fmt: skip
                target, source = partitions(copy, pieces[None, None, i, 0], place, head, part)
                cute.copy(copy.atom, source[None, 0], target, tma_bar_ptr=ring.full + stage)

    @cute.jit
    def _multiply(self, product, memory, tiles, ring, item, place, first: Int32, last: Int32) -> None:
        c, (v, weighed) = self.config, tiles
        tidx = cute.arch.thread_idx()[0]
        out, warp, lane = product.get_slice(0), tidx // 32, tidx % 32
        of_v = out.make_fragment_B(out.partition_B(transposed(v)))
        values = ROWS * c.tile_n // 128
        t = SimpleNamespace(
            tidx=tidx, total=cute.make_rmem_tensor(2, Float32),
            acc_O=cute.make_rmem_tensor(out.partition_shape_C((ROWS, c.columns)), Float32),
            p=cute.make_rmem_tensor(values, self.dtype),
        )  # fmt: skip
        numbers = cute.make_rmem_tensor(4, Float32)
        for x in (t.total, t.acc_O, numbers):
            x.fill(0.0)
        t.p.fill(0.0)
        exists = WARP_ROWS * warp < item.rows
        for n in cutlass.range(last - first + 1, unroll=1):
            ring.wait_full(n)
            warpgroup.wait_group(0)  # it reads P from registers
            if exists:
                self._read(weighed[None, warp, ring.stage(n)], lane, t.p, numbers)
            if n > 0:
                arrive(ring.empty_of(n - 1))
                self._rescale(t, numbers)
            else:
                t.total[0], t.total[1] = numbers[2], numbers[3]
            of_stage = of_v[None, None, None, ring.stage(n)]
            multiply(product, t.acc_O, as_operand_a(t.p, self.dtype), of_stage, True)
        warpgroup.wait_group(0)
        if exists:
            self._leave(t, memory, place, item, (first, last))

    @cute.jit
    def _read(self, weighed, lane: Int32, p, numbers) -> None:
        """P of a tile, and what its rows are multiplied by, and their sums."""
        vectors, words = cute.size(p) // 8, cute.recast_tensor(p, Float32)
        for i in cutlass.range_constexpr(vectors):
            target = cute.make_tensor(words.iterator + 4 * i, 4)
            cute.autovec_copy(cute.local_tile(weighed, (4,), (32 * i + lane,)), target)
        cute.autovec_copy(cute.local_tile(weighed, (4,), (32 * vectors + lane,)), numbers)

    @cute.jit
    def _rescale(self, t, numbers) -> None:
        rises = (numbers[0] != Float32(1.0)) | (numbers[1] != Float32(1.0))
        if cute.arch.vote_any_sync(rises):
            multiply_rows(t.acc_O, (numbers[0], numbers[1]))
        for half in cutlass.range_constexpr(2):
            t.total[half] = fma(t.total[half], numbers[half], numbers[2 + half])

    @cute.jit
    def _leave(self, t, memory, place, item, tiles) -> None:
        """Leave columns as `MmaRole._leave` does; maxima and sums beside the first ones."""
        c, (of_segment, part), (first, last) = self.config, place, tiles
        start = Int64(of_segment) * c.partial_words + t.tidx * 4
        layout = cute.make_layout((4, c.head_dim_v // 8 + 1), stride=(1, 512))
        target = cute.make_tensor(memory.partial.iterator + cute.assume(start, divby=4), layout)
        vectors = c.columns // 8
        for i in cutlass.range_constexpr(vectors):
            cute.autovec_copy(cute.make_tensor(t.acc_O.iterator + 4 * i, 4), target[None, part * vectors + i])
        if part == 0:
            maxima = cute.make_rmem_tensor(2, Float32)
            maxima.fill(-Float32.inf)
            if first <= last:
                at = cute.assume(Int64((item.first_tile + first) * 128 + t.tidx) * 2, divby=2)
                cute.autovec_copy(cute.make_tensor(memory.maxima.iterator + at, cute.make_layout(2)), maxima)
            numbers = cute.make_rmem_tensor(4, Float32)
            for half in cutlass.range_constexpr(2):
                numbers[half], numbers[2 + half] = maxima[half], t.total[half]
            cute.autovec_copy(numbers, target[None, c.head_dim_v // 8])
