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
from ..device.operands import DTYPES, multiply, tile_layout, transposed
from ..device.plan_view import PACKED_ROWS
from ..device.ring import Ring, arrive
from ..forward.config import ROWS, WARP_ROWS
from ..forward.exact import fma
from ..forward.softmax import multiply_rows
from .config import SpreadConfig
from .fold import SpreadFold
from .item import begin, sequence_of

V_WARP, P_WARP = 4, 5  # that load


class Spread:
    """One block per part of the columns and segment, kv head, and sequence: four warps that multiply, and two
    that load."""

    def __init__(self, config: SpreadConfig):
        self.config, self.dtype = config, DTYPES[config.dtype]
        self.load, self.fold = CachedLoad(config, self.dtype), SpreadFold(config)
        self.parts = config.head_dim_v // config.columns
        self.pieces = config.tile_n // config.piece

    def tile_of(self, rows: int, stages: int):
        return tile_layout(self.dtype, rows, self.config.columns, stages, row_bytes=2 * self.config.columns)

    @cute.jit
    def __call__(self, copy, memory, numbers, launch, stream):
        c = self.config
        types = self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN
        product = hopper_helpers.make_trivial_tiled_mma(
            *types, Float32, (1, 1, 1), (ROWS, c.columns), warpgroup.OperandSource.SMEM
        )
        layouts = tile_layout(self.dtype, ROWS, c.tile_n, c.kv_stages), self.tile_of(c.tile_n, c.kv_stages)
        self.kernel(copy, layouts, product, memory, numbers).launch(
            grid=(self.parts * launch.segments, numbers.kv_heads, launch.batch),
            block=(192, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, copy, layouts, product, memory, numbers) -> None:
        c = self.config
        index, head, sequence = cute.arch.block_idx()
        part, segment = index % self.parts, index // self.parts
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = SmemAllocator()
        barriers = allocator.allocate_array(Int64, 2 * c.kv_stages)
        p, v = (
            allocator.allocate_tensor(self.dtype, x.outer, byte_alignment=1024, swizzle=x.inner)
            for x in layouts
        )
        sums = allocator.allocate_tensor(Float32, cute.make_layout((4, 128, c.kv_stages)), byte_alignment=128)
        ring = Ring(barriers, barriers + c.kv_stages, c.kv_stages)
        if warp_idx == V_WARP:
            cpasync.prefetch_descriptor(copy.atom)
            with cute.arch.elect_one():
                for stage in range(c.kv_stages):
                    cute.arch.mbarrier_init(ring.full + stage, 2)
                    cute.arch.mbarrier_init(ring.empty + stage, 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        begin()
        item = sequence_of(c, memory, numbers, sequence, head)
        if (segment >= item.segment_first) & (segment <= item.segment_last):
            per_segment = c.segment // c.tile_n
            first = cutlass.max(item.kv_first, segment * per_segment)
            last = cutlass.min(item.kv_last, (segment + 1) * per_segment - 1)
            if warp_idx == V_WARP:
                self._load_v(copy, memory, v, ring, numbers, item, (sequence, head, part), (first, last))
            elif warp_idx == P_WARP:
                self._load_p(memory, p, sums, ring, item, (first, last))
            else:
                where = (sequence, segment, head, part)
                self._multiply(product, memory, (p, v, sums), ring, numbers, item, where, (first, last))

    @cute.jit
    def _load_v(self, copy, memory, v, ring, numbers, item, where, tiles) -> None:
        c, (sequence, head, part), (first, last) = self.config, where, tiles
        # A look-up takes longer than a product, so there is one for all tiles of which lanes have a piece.
        row, page, used = self._where(memory, numbers, item, sequence, last)
        for n in cutlass.range(last - first + 1, unroll=1):
            stage, lane = ring.stage(n), n * self.pieces % 32
            if (n > 0) & (lane == 0):
                row, page, used = self._where(memory, numbers, item, sequence, last - n)
            ring.wait_empty(n)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, 2 * c.tile_n * c.columns)
            pieces = cute.flat_divide(v[None, None, stage], (c.piece, c.columns))
            shift = page * numbers.v_rows + used
            for i in cutlass.range_constexpr(self.pieces):
                of_row, of_page = (cute.arch.shuffle_sync(x, lane + i) for x in (row, shift))
                place = (of_row, Int32(PACKED_ROWS), of_page)
                target, source = partitions(copy, pieces[None, None, i, 0], place, head, part)
                cute.copy(copy.atom, source[None, 0], target, tma_bar_ptr=ring.full + stage)

    def _where(self, memory, numbers, item, sequence: Int32, kv_tile: Int32):
        """What `CachedLoad.piece_at` says of the pieces of a kv tile, and of those before it: in the next
        lanes."""
        c, lane = self.config, cute.arch.lane_idx()
        token = (kv_tile - lane // self.pieces) * c.tile_n + lane % self.pieces * c.piece
        of_pages = (numbers.pages, numbers.page_size, numbers.most_pages)
        return self.load.piece_at(memory.pages, of_pages, sequence, cutlass.max(token, 0), item.seqlen_k)

    @cute.jit
    def _load_p(self, memory, p, sums, ring, item, tiles) -> None:
        """P and what `Weigh` left beside it, of the warps that have rows."""
        c, (first, last) = self.config, tiles
        ptx.fence_proxy_async()  # the kernel before wrote without the copy engine
        halves = cute.recast_tensor(cute.make_tensor(p.iterator.align(1024), cute.make_layout(1)), Float32)
        half, of_sums = Int32(item.warps * c.half_words), Int32(item.warps * 128)
        for n in cutlass.range(last - first + 1, unroll=1):
            stage = ring.stage(n)
            start = Int64(item.first_tile + last - n) * item.warps * c.weighed_words
            source = memory.weighed.iterator + cute.assume(start, divby=4)
            ring.wait_empty(n)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, 4 * (2 * half + of_sums))
                for i in range(2):
                    target = halves.iterator + (2 * stage + i) * 4 * c.half_words
                    ptx.bulk_load(target, source + i * half, 4 * half, ring.full + stage)
                target = sums[None, None, stage].iterator
                ptx.bulk_load(target, source + 2 * half, 4 * of_sums, ring.full + stage)

    @cute.jit
    def _multiply(self, product, memory, shared, ring, numbers, item, where, tiles) -> None:
        """Tiles come in runs: before the first tile of a run rows are multiplied, and within it products
        follow one another without a pause."""
        c, (p, v, sums), (first, last) = self.config, shared, tiles
        tidx = cute.arch.thread_idx()[0]
        out = product.get_slice(0)
        t = SimpleNamespace(
            tidx=tidx, total=cute.make_rmem_tensor(2, Float32),
            acc_O=cute.make_rmem_tensor(out.partition_shape_C((ROWS, c.columns)), Float32),
            of_p=out.make_fragment_A(out.partition_A(p)),
            of_v=out.make_fragment_B(out.partition_B(transposed(v))),
        )  # fmt: skip
        for x in (t.total, t.acc_O):
            x.fill(0.0)
        exists = WARP_ROWS * (tidx // 32) < item.rows
        base = last // (c.segment // c.tile_n) * (c.segment // c.tile_n)
        rises = Int64(0)
        if first <= last:
            rises = self._rises(memory.rises, item, base, first, last)
        first_of_run = last
        while first_of_run >= first:
            below = rises & ((Int64(1) << Int64(first_of_run - base)) - 1)
            behind = cutlass.max(base + ptx.highest_bit_of_64(below), first - 1)
            n = last - first_of_run
            ring.wait_full(n)
            if exists:
                # Before the first tile by 0, and there is nothing yet.
                of_rows = sums[None, tidx, ring.stage(n)]
                multiply_rows(t.acc_O, (of_rows[0], of_rows[1]))
                self._add(t, of_rows)
            self._product(product, t, ring.stage(n))
            for i in cutlass.range(first_of_run - behind - 1, unroll=1):
                m = n + 1 + i
                ring.wait_full(m)
                self._product(product, t, ring.stage(m))
                if exists:
                    self._add(t, sums[None, tidx, ring.stage(m)])
                warpgroup.wait_group(1)
                arrive(ring.empty_of(m - 1))
            warpgroup.wait_group(0)
            arrive(ring.empty_of(last - behind - 1))
            first_of_run = behind
        if exists:
            self._leave(t, memory, numbers, item, where, tiles)

    def _product(self, product, t, stage) -> None:
        multiply(product, t.acc_O, t.of_p[None, None, None, stage], t.of_v[None, None, None, stage], True)

    def _rises(self, rises, item, base: Int32, first: Int32, last: Int32) -> Int64:
        """Before which tiles of a segment, counted from its first, some row is multiplied."""
        both = []
        for half in range(2):
            tile, any_warp = base + 32 * half + cute.arch.lane_idx(), cutlass.Boolean(False)
            place = (item.first_tile + cutlass.min(cutlass.max(tile, first), last)) * 4
            for warp in range(4):
                any_warp = any_warp | (rises[place + cutlass.min(warp, item.warps - 1)] != Float32(0.0))
            seen = (tile >= first) & (tile <= last)
            both.append(Int64(cutlass.Uint32(cute.arch.vote_ballot_sync(any_warp & seen))))
        return both[0] | (both[1] << Int64(32))

    def _add(self, t, sums) -> None:
        for half in range(2):
            t.total[half] = fma(t.total[half], sums[half], sums[2 + half])

    @cute.jit
    def _leave(self, t, memory, numbers, item, where, tiles) -> None:
        """Leave columns as `MmaRole._leave` does, maxima and sums beside the first ones. Or write them, if
        sequences have one segment."""
        c, (sequence, segment, head, part), (first, last) = self.config, where, tiles
        maxima, of_rows = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(4, Float32)
        maxima.fill(-Float32.inf)
        if first <= last:
            at = cute.assume(Int64((item.first_tile + first) * 128 + t.tidx) * 2, divby=2)
            cute.autovec_copy(cute.make_tensor(memory.maxima.iterator + at, cute.make_layout(2)), maxima)
        for half in cutlass.range_constexpr(2):
            of_rows[half], of_rows[2 + half] = maxima[half], t.total[half]
        vectors = c.columns // 8
        if numbers.segments == 1:
            values = cute.make_tensor(t.acc_O.iterator, cute.make_layout((4, vectors)))
            place = (sequence, Int32(0), item.rows, Int32(0), head)
            tensors = (memory.out, memory.lse, memory.sink)
            self.fold.finish(tensors, of_rows, values, Int32(0), t.tidx, place, part)
        else:
            of_segment = (sequence * numbers.segments + segment) * numbers.kv_heads + head
            start = Int64(of_segment) * c.partial_words + t.tidx * 4
            layout = cute.make_layout((4, c.head_dim_v // 8 + 1), stride=(1, 512))
            target = cute.make_tensor(memory.partial.iterator + cute.assume(start, divby=4), layout)
            for i in cutlass.range_constexpr(vectors):
                source = cute.make_tensor(t.acc_O.iterator + 4 * i, 4)
                cute.autovec_copy(source, target[None, part * vectors + i])
            if part == 0:
                cute.autovec_copy(of_rows, target[None, c.head_dim_v // 8])
