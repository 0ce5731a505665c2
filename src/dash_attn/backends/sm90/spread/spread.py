"""The second kernel: O of some columns, from kv tile to kv tile of a segment."""

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
from ..device.ring import arrive
from ..forward.config import ROWS, WARP_ROWS
from ..forward.exact import fma
from ..forward.softmax import multiply_rows
from .config import P_SLOTS, SCORE_SLOTS, WEIGH_WARPS, SpreadConfig
from .fold import SpreadFold
from .item import PowerRing, Rings, Shared, begin, sequence_of
from .weigh import Weigh

MULTIPLY_WARPS = 4
AT_ONCE = 3
S_WARP = MULTIPLY_WARPS + WEIGH_WARPS  # loads scores
V_WARP = S_WARP + 1


class Spread:
    """One block per part of the columns and segment, kv head, and sequence: four warps that multiply, four
    that weigh, and two that load."""

    def __init__(self, config: SpreadConfig):
        self.config, self.dtype = config, DTYPES[config.dtype]
        self.load, self.weigh = CachedLoad(config, self.dtype), Weigh(config, self.dtype)
        self.fold = SpreadFold(config)
        self.parts = config.head_dim_v // config.columns
        self.pieces = config.tile_n // config.piece

    def tile_of(self, rows: int, stages: int):
        return tile_layout(self.dtype, rows, self.config.columns, stages, row_bytes=2 * self.config.columns)

    @cute.jit
    def __call__(self, copy, memory, numbers, scales, launch, stream):
        c = self.config
        types = self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN
        product = hopper_helpers.make_trivial_tiled_mma(
            *types, Float32, (1, 1, 1), (ROWS, c.columns), warpgroup.OperandSource.RMEM
        )
        self.kernel(copy, self.tile_of(c.tile_n, c.kv_stages), product, memory, numbers, scales).launch(
            grid=(self.parts * launch.segments, numbers.kv_heads, launch.batch),
            block=(32 * (V_WARP + 1), 1, 1),
            stream=stream,
            use_pdl=True,
        )

    def _shared(self, layout):
        """Tiles of V; per 16 rows scores, and P as threads have it, with the numbers of `Weigh`."""
        c, allocator = self.config, SmemAllocator()

        def allocate(dtype, *shape, align=16):
            return allocator.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=align)

        barriers = allocator.allocate_array(Int64, 2 * (c.kv_stages + SCORE_SLOTS + P_SLOTS))
        v = allocator.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        shared = Shared(
            v=v,
            scores=allocate(Float32, c.scores_words * SCORE_SLOTS, align=128),
            p=allocate(Int32, 4, 32, c.tile_n // 16, P_SLOTS),
            numbers=allocate(Float32, 4, 32, P_SLOTS),
            largest=allocate(Float32, c.segment // c.tile_n * ROWS),
            maxima=allocate(Float32, 2, 128),
            rises=allocate(Int32, P_SLOTS),
        )
        rings = []
        for stages in (c.kv_stages, SCORE_SLOTS, P_SLOTS):
            rings.append(PowerRing(barriers, barriers + stages, stages))
            barriers = barriers + 2 * stages
        return shared, Rings(*rings)

    @cute.kernel
    def kernel(self, copy, layout, product, memory, numbers, scales) -> None:
        c = self.config
        index, head, sequence = cute.arch.block_idx()
        part, segment = index % self.parts, index // self.parts
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared, rings = self._shared(layout)
        # Lengths, pages and V are there: what came before the kernel before is done (`begin`).
        item = sequence_of(c, memory, numbers, sequence, head)
        if warp_idx == V_WARP:
            cpasync.prefetch_descriptor(copy.atom)
            with cute.arch.elect_one():
                for ring, full, empty in (
                    (rings.v, 1, MULTIPLY_WARPS), (rings.s, 1, item.warps), (rings.p, item.warps, MULTIPLY_WARPS),
                ):  # fmt: skip
                    for stage in range(ring.stages):
                        cute.arch.mbarrier_init(ring.full + stage, full)
                        cute.arch.mbarrier_init(ring.empty + stage, empty)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp_idx != V_WARP:
            begin()
        if (segment >= item.segment_first) & (segment <= item.segment_last):
            per_segment = c.segment // c.tile_n
            tiles = (
                cutlass.max(item.kv_first, segment * per_segment),
                cutlass.min(item.kv_last, (segment + 1) * per_segment - 1),
            )
            if warp_idx == V_WARP:
                self._load_v(copy, memory, shared.v, rings.v, numbers, item, (sequence, head, part), tiles)
            elif warp_idx == S_WARP:
                self._load_scores(memory, shared.scores, rings.s, item, tiles)
            elif warp_idx >= MULTIPLY_WARPS:
                self.weigh.run(memory, shared, rings, scales, item, tiles)
            else:
                where = (sequence, segment, head, part)
                self._multiply(product, memory, shared, rings, numbers, item, where, tiles)

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
    def _load_scores(self, memory, scores, ring, item, tiles) -> None:
        c, (first, last) = self.config, tiles
        ptx.fence_proxy_async()  # the kernel before wrote without the copy engine
        words = item.rows * c.tile_n
        for n in cutlass.range(last - first + 1, unroll=1):
            u = n << item.shift
            source = memory.scores.iterator + cute.assume(Int64(item.first_tile + last - n) * words, divby=4)
            ring.wait_empty(u)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full_of(u), 4 * words)
                target = scores.iterator + ring.stage(u) * c.scores_words
                ptx.bulk_load(target, source, 4 * words, ring.full_of(u))

    @cute.jit
    def _multiply(self, product, memory, shared, rings, numbers, item, where, tiles) -> None:
        """Three tiles at a time where no row is multiplied before any of them: who waits for some, or reads their
        P, does so beside the products of others. ptxas keeps products on their way only where nothing else
        writes their sums, so there is a loop of its own for them."""
        c, (first, last) = self.config, tiles
        tidx, count = cute.arch.thread_idx()[0], last - first + 1
        exists = WARP_ROWS * (tidx // 32) < item.rows
        out = product.get_slice(0)
        words = ROWS * c.tile_n // 128 // 2
        t = SimpleNamespace(
            tidx=tidx, total=cute.make_rmem_tensor(2, Float32), numbers=cute.make_rmem_tensor(4, Float32),
            acc_O=cute.make_rmem_tensor(out.partition_shape_C((ROWS, c.columns)), Float32),
            of_v=out.make_fragment_B(out.partition_B(transposed(shared.v))),
        )  # fmt: skip
        p = tuple(cute.make_rmem_tensor(words, Int32) for _ in range(AT_ONCE))
        for x in (t.total, t.acc_O):
            x.fill(0.0)
        for x in p:
            x.fill(0)  # rows that do not exist
        n, held = Int32(0), Int32(0)  # tiles from `held` on have not been let go
        while n < count:
            go_on = self._go_on(shared, rings, item, n, count)
            while go_on == 1:
                warpgroup.wait_group(1)
                for i in cutlass.range_constexpr(AT_ONCE - 1):
                    self._take(t, shared, rings, item, exists, n + i, p[i])
                self._product(product, t, rings, n, p[0])
                warpgroup.wait_group(1)
                self._let_go(rings.v, held, n)
                self._take(t, shared, rings, item, exists, n + AT_ONCE - 1, p[AT_ONCE - 1])
                for i in cutlass.range_constexpr(1, AT_ONCE - 1):
                    self._product(product, t, rings, n + i, p[i])
                go_on = self._go_on(shared, rings, item, n + AT_ONCE, count)
                self._product(product, t, rings, n + AT_ONCE - 1, p[AT_ONCE - 1])
                held = n
                n += AT_ONCE
            warpgroup.wait_group(0)
            if n < count:
                rings.p.wait_full(n << item.shift)
                rings.v.wait_full(n)
                self._take(t, shared, rings, item, exists, n, p[0])
                if exists:
                    multiply_rows(t.acc_O, (t.numbers[0], t.numbers[1]))
                self._product(product, t, rings, n, p[0])
                warpgroup.wait_group(0)
                n += 1
            self._let_go(rings.v, held, n)
            held = n
        if exists:
            self._leave(t, memory, shared, numbers, item, where, count)

    @cute.jit
    def _go_on(self, shared, rings, item, n: Int32, count: Int32) -> Int32:
        """Wait for three tiles. 1 if there are so many, and no row is multiplied before any of them."""
        go_on = Int32(0)
        if n + AT_ONCE <= count:
            known = Int32(1)
            for i in cutlass.range_constexpr(AT_ONCE):
                known = known & rings.p.is_full(n + i << item.shift) & rings.v.is_full(n + i)
            if known == 0:
                for i in cutlass.range_constexpr(AT_ONCE):
                    rings.p.wait_full(n + i << item.shift)
                    rings.v.wait_full(n + i)
            slot = cutlass.min(cute.arch.lane_idx(), (AT_ONCE << item.shift) - 1)
            if slot & (1 << item.shift) - 1 >= item.warps:
                slot = Int32(0)
            rises = shared.rises[rings.p.stage((n << item.shift) + slot)] != 0
            go_on = Int32(~cute.arch.vote_any_sync(rises))
        return go_on

    @cute.jit
    def _let_go(self, ring, begin: Int32, end: Int32) -> None:
        for i in cutlass.range(end - begin, unroll=1):
            arrive(ring.empty_of(begin + i))

    @cute.jit
    def _take(self, t, shared, rings, item, exists, n: Int32, p) -> None:
        """P of tile n into registers, and its sums to those of the rows."""
        u = n << item.shift
        if exists:
            stage, lane = rings.p.stage(u) + t.tidx // 32, t.tidx % 32
            for v in cutlass.range_constexpr(cute.size(p) // 4):
                target = cute.make_tensor(p.iterator + 4 * v, 4)
                cute.autovec_copy(shared.p[None, lane, v, stage], target)
            cute.autovec_copy(shared.numbers[None, lane, stage], t.numbers)
            self._add(t.total, t.numbers)
        arrive(rings.p.empty_of(u))

    def _add(self, total, numbers) -> None:
        for half in range(2):
            total[half] = fma(total[half], numbers[half], numbers[2 + half])

    def _product(self, product, t, rings, n, p) -> None:
        of_p = as_operand_a(cute.recast_tensor(p, self.dtype), self.dtype)
        multiply(product, t.acc_O, of_p, t.of_v[None, None, None, rings.v.stage(n)], True)

    @cute.jit
    def _leave(self, t, memory, shared, numbers, item, where, count: Int32) -> None:
        """Leave columns as `MmaRole._leave` does, maxima and sums beside the first ones. Or write them, if
        sequences have one segment."""
        c, (sequence, segment, head, part) = self.config, where
        of_rows = cute.make_rmem_tensor(4, Float32)
        for half in cutlass.range_constexpr(2):
            of_rows[half], of_rows[2 + half] = -Float32.inf, t.total[half]
            if count > 0:
                of_rows[half] = shared.maxima[half, t.tidx]
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
