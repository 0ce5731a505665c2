"""The second kernel: O of some columns, from kv tile to kv tile of a segment."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from ..cached.load import CachedLoad
from ..device import ptx
from ..device.copies import partitions
from ..device.operands import DTYPES, tile_layout
from ..device.plan_view import PACKED_ROWS
from ..device.ring import arrive
from ..forward.config import ROWS, WARP_ROWS
from ..forward.exact import fma
from ..forward.softmax import multiply_rows
from .config import (
    GROUP_TILES,
    LEAST_ROWS_LOG2,
    P_STAGES_LOG2,
    SCORES_LOG2,
    V_STAGES_LOG2,
    WEIGH_WARPS,
    SpreadConfig,
)
from .fold import SpreadFold
from .item import PowerRing, Rings, Shared, begin, groups_of, sequence_of, unit_of
from .weigh import Follow, Weigh

MULTIPLY_WARPS = 4
FOLLOW_WARP, V_WARP = 4, 8
"""The sums of few rows are warp 0's, and a warp has its scheduler with every fourth one: none of these weighs."""


class Spread:
    """One block per part of the columns and segment, kv head, and sequence: four warps that multiply, six that
    make P, one that follows maxima, and one that loads V."""

    def __init__(self, config: SpreadConfig):
        self.config, self.dtype = config, DTYPES[config.dtype]
        self.load, self.fold = CachedLoad(config, self.dtype), SpreadFold(config)
        self.follow, self.weigh = Follow(config, self.dtype), Weigh(config, self.dtype)
        self.parts = config.head_dim_v // config.columns
        self.pieces = config.tile_n // config.piece

    def tile_of(self, rows: int, stages: int):
        return tile_layout(self.dtype, rows, self.config.columns, stages, row_bytes=2 * self.config.columns)

    @cute.jit
    def __call__(self, copy, memory, numbers, scales, launch, stream):
        c = self.config
        tiles = GROUP_TILES << V_STAGES_LOG2
        self.kernel(copy, self.tile_of(c.tile_n, tiles), memory, numbers, scales).launch(
            grid=(self.parts * launch.segments, numbers.kv_heads, launch.batch),
            block=(32 * (MULTIPLY_WARPS + WEIGH_WARPS + 2), 1, 1),
            stream=stream,
            use_pdl=True,
        )

    def _shared(self, layout, item):
        """Tiles of V; per 16 rows scores, and P as threads have it, with the numbers of `Weigh`."""
        c, allocator = self.config, SmemAllocator()

        def allocate(dtype, *shape, align=16):
            return allocator.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=align)

        units = GROUP_TILES << P_STAGES_LOG2
        slots = SCORES_LOG2 - LEAST_ROWS_LOG2 - (c.tile_n.bit_length() - 1)
        stages = V_STAGES_LOG2, slots, P_STAGES_LOG2
        barriers = allocator.allocate_array(Int64, sum(2 << n for n in stages))
        v = allocator.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        shared = Shared(
            v=v,
            scores=allocate(Float32, 1 << SCORES_LOG2, align=128),
            p=allocate(Int32, 4, 32, c.tile_n // 16, units),
            numbers=allocate(Float32, 4, 32, units),
            maxima=allocate(Float32, ROWS, c.segment // c.tile_n),
            rises=allocate(Int32, units),
        )
        rings = []
        for most, used in zip(
            stages,
            (
                V_STAGES_LOG2,
                slots + LEAST_ROWS_LOG2 - cutlass.max(item.rows_log2, LEAST_ROWS_LOG2),
                P_STAGES_LOG2 - item.shift,
            ),
        ):
            rings.append(PowerRing(barriers, barriers + (1 << most), used))
            barriers = barriers + (2 << most)
        return shared, Rings(*rings)

    @cute.kernel
    def kernel(self, copy, layout, memory, numbers, scales) -> None:
        c = self.config
        index, head, sequence = cute.arch.block_idx()
        part, segment = index % self.parts, index // self.parts
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # Lengths, pages and V are there: what came before the kernel before is done (`begin`).
        item = sequence_of(c, memory, numbers, sequence, head)
        shared, rings = self._shared(layout, item)
        if warp_idx == V_WARP:
            cpasync.prefetch_descriptor(copy.atom)
            with cute.arch.elect_one():
                for ring, most, full, empty in (
                    (rings.v, V_STAGES_LOG2, 1, item.warps),
                    (rings.s, SCORES_LOG2 - LEAST_ROWS_LOG2 - 7, 2, item.warps),
                    (rings.p, P_STAGES_LOG2, GROUP_TILES * item.warps, item.warps),
                ):
                    for stage in range(1 << most):
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
            elif warp_idx == FOLLOW_WARP:
                self.follow.run(memory, shared, rings.s, scales, item, tiles)
            elif warp_idx >= MULTIPLY_WARPS:
                count = tiles[1] - tiles[0] + 1
                weigher = warp_idx - FOLLOW_WARP - 1 - Int32(warp_idx > V_WARP)
                self.weigh.run(shared, rings, scales, item, count, weigher)
            elif warp_idx < item.warps:
                where = (sequence, segment, head, part)
                self._multiply(memory, shared, rings, numbers, item, where, tiles)

    @cute.jit
    def _load_v(self, copy, memory, v, ring, numbers, item, where, tiles) -> None:
        c, (sequence, head, part), (first, last) = self.config, where, tiles
        # A look-up takes longer than a product, so there is one for all tiles of which lanes have a piece.
        row, page, used = self._where(memory, numbers, item, sequence, last)
        count = last - first + 1
        for n in cutlass.range(count, unroll=1):
            group, lane = n // GROUP_TILES, n * self.pieces % 32
            full, of_group = ring.full_of(group), n - group * GROUP_TILES
            if (n > 0) & (lane == 0):
                row, page, used = self._where(memory, numbers, item, sequence, last - n)
            if of_group == 0:
                ring.wait_empty(group)
                loaded = cutlass.min(count - n, GROUP_TILES) * (2 * c.tile_n * c.columns)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, loaded)
            place = ring.stage(group) * GROUP_TILES + of_group
            pieces = cute.flat_divide(v[None, None, place], (c.piece, c.columns))
            shift = page * numbers.v_rows + used
            for i in cutlass.range_constexpr(self.pieces):
                of_row, of_page = (cute.arch.shuffle_sync(x, lane + i) for x in (row, shift))
                place = (of_row, Int32(PACKED_ROWS), of_page)
                target, source = partitions(copy, pieces[None, None, i, 0], place, head, part)
                cute.copy(copy.atom, source[None, 0], target, tma_bar_ptr=full)

    def _where(self, memory, numbers, item, sequence: Int32, kv_tile: Int32):
        """What `CachedLoad.piece_at` says of the pieces of a kv tile, and of those before it: in the next
        lanes."""
        c, lane = self.config, cute.arch.lane_idx()
        token = (kv_tile - lane // self.pieces) * c.tile_n + lane % self.pieces * c.piece
        of_pages = (numbers.pages, numbers.page_size, numbers.most_pages)
        return self.load.piece_at(memory.pages, of_pages, sequence, cutlass.max(token, 0), item.seqlen_k)

    @cute.jit
    def _multiply(self, memory, shared, rings, numbers, item, where, tiles) -> None:
        """One warp per 16 rows, by products of a warp: a sum waits for the one before it, so the 16 rows that
        a warp's product has are as fast as 64, and need no other warp."""
        c, (first, last) = self.config, tiles
        tidx, count = cute.arch.thread_idx()[0], last - first + 1
        t = SimpleNamespace(
            tidx=tidx, total=cute.make_rmem_tensor(2, Float32),
            acc_O=cute.make_rmem_tensor((4, c.columns // 8), Float32),
        )  # fmt: skip
        for x in (t.total, t.acc_O):
            x.fill(0.0)
        groups, go_on = groups_of(count), Int32(-1)  # -1: it is not known
        for group in cutlass.range(groups, unroll=1):
            left = count - group * GROUP_TILES
            if go_on < 0:
                rings.p.wait_full(group)
                rings.v.wait_full(group)
                go_on = self._goes_on(shared, rings, item, group, left)
            if go_on == 1:
                for i in cutlass.range_constexpr(GROUP_TILES - 1):
                    self._multiply_tile(t, shared, rings, item, group, i, False)
                go_on = self._look_ahead(shared, rings, item, group + 1, left - GROUP_TILES)
                self._multiply_tile(t, shared, rings, item, group, GROUP_TILES - 1, False)
            else:
                go_on = Int32(-1)
                for i in cutlass.range(cutlass.min(left, GROUP_TILES), unroll=1):
                    self._multiply_tile(t, shared, rings, item, group, i, True)
            cute.arch.sync_warp()
            for ring in (rings.p, rings.v):
                arrive(ring.empty_of(group))
        self._leave(t, memory, shared, numbers, item, where, count)

    @cute.jit
    def _look_ahead(self, shared, rings, item, group: Int32, left: Int32) -> Int32:
        """`_goes_on` of a group, beside products; -1 if it is not there yet."""
        go_on = Int32(-1)
        if left > 0:
            if rings.p.is_full(group) & rings.v.is_full(group) == 1:
                go_on = self._goes_on(shared, rings, item, group, left)
        return go_on

    def _goes_on(self, shared, rings, item, group: Int32, left: Int32) -> Int32:
        """1 if a group is whole, and none of this warp's rows is multiplied before any of its tiles."""
        tile = cutlass.min(cutlass.min(cute.arch.lane_idx(), GROUP_TILES - 1), left - 1)
        unit = unit_of(rings.p, item, group, tile) + cute.arch.thread_idx()[0] // 32
        return Int32((left >= GROUP_TILES) & ~cute.arch.vote_any_sync(shared.rises[unit] != 0))

    @cute.jit
    def _multiply_tile(
        self, t, shared, rings, item, group: Int32, tile, rises: cutlass.Constexpr[bool]
    ) -> None:
        """O += P V of a tile, and its sums of P. rises: rows are multiplied before."""
        c, lane = self.config, t.tidx % 32
        unit = unit_of(rings.p, item, group, tile) + t.tidx // 32
        numbers = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(shared.numbers[None, lane, unit], numbers)
        if cutlass.const_expr(rises):
            multiply_rows(t.acc_O, (numbers[0], numbers[1]))
        for half in cutlass.range_constexpr(2):
            t.total[half] = fma(t.total[half], numbers[half], numbers[2 + half])
        # 16 bytes of a row of 64 are moved by the row, as the copy engine does: `PACKED` by 64 bytes.
        row, place = lane % 16, (rings.v.stage(group) * GROUP_TILES + tile) * c.tile_n
        chunk = (lane // 16) ^ (row // 2 % 4)
        rows = cute.recast_ptr(shared.v.iterator, dtype=self.dtype) + (place + row) * c.columns
        atom = cute.make_mma_atom(warp.MmaF16BF16Op(self.dtype, Float32, (WARP_ROWS, 8, 16)))
        blocks = c.columns // 8
        of_a, of_b = cute.make_layout(((2, 2, 2), 1)), cute.make_layout(((2, 2), blocks))
        acc = cute.make_tensor(t.acc_O.iterator, cute.make_layout(((2, 2), 1, blocks)))
        for k in cutlass.range_constexpr(c.tile_n // 16):
            p, v = cute.make_rmem_tensor(4, Int32), cute.make_rmem_tensor((2, c.columns // 8), Int32)
            cute.autovec_copy(shared.p[None, lane, k, unit], p)
            for pair in cutlass.range_constexpr(c.columns // 16):
                four = ptx.load_transposed(rows + (16 * k * c.columns + (chunk ^ 2 * pair) * 8))
                for i in cutlass.range_constexpr(4):
                    v[i % 2, 2 * pair + i // 2] = four[i]
            of_p = cute.make_tensor(cute.recast_tensor(p, self.dtype).iterator, of_a)
            of_v = cute.make_tensor(cute.recast_tensor(v, self.dtype).iterator, of_b)
            cute.gemm(atom, acc, of_p, of_v, acc)

    @cute.jit
    def _leave(self, t, memory, shared, numbers, item, where, count: Int32) -> None:
        """Leave columns as `MmaRole._leave` does, maxima and sums beside the first ones. Or write them, if
        sequences have one segment."""
        c, (sequence, segment, head, part) = self.config, where
        of_rows = cute.make_rmem_tensor(4, Float32)
        for half in cutlass.range_constexpr(2):
            of_rows[half], of_rows[2 + half] = -Float32.inf, t.total[half]
            if count > 0:
                row = t.tidx // 32 * WARP_ROWS + t.tidx % 32 // 4 + 8 * half
                of_rows[half] = shared.maxima[row, count - 1]
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
