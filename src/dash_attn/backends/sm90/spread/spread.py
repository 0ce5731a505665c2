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
from .item import PowerRing, Rings, Shared, begin, sequence_of, unit_of
from .weigh import Weigh

MULTIPLY_WARPS = 4
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
        tiles = GROUP_TILES << V_STAGES_LOG2
        self.kernel(copy, self.tile_of(c.tile_n, tiles), product, memory, numbers, scales).launch(
            grid=(self.parts * launch.segments, numbers.kv_heads, launch.batch),
            block=(32 * (V_WARP + 1), 1, 1),
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
            largest=allocate(Float32, c.segment // c.tile_n * ROWS),
            maxima=allocate(Float32, 2, 128),
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
    def kernel(self, copy, layout, product, memory, numbers, scales) -> None:
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
                    (rings.v, V_STAGES_LOG2, 1, MULTIPLY_WARPS),
                    (rings.s, SCORES_LOG2 - LEAST_ROWS_LOG2 - 7, 1, item.warps),
                    (rings.p, P_STAGES_LOG2, GROUP_TILES * item.warps, MULTIPLY_WARPS),
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
    def _load_scores(self, memory, scores, ring, item, tiles) -> None:
        c, (first, last) = self.config, tiles
        ptx.fence_proxy_async()  # the kernel before wrote without the copy engine
        words = item.rows * c.tile_n
        for n in cutlass.range(last - first + 1, unroll=1):
            source = memory.scores.iterator + cute.assume(Int64(item.first_tile + last - n) * words, divby=4)
            ring.wait_empty(n)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full_of(n), 4 * words)
                target = scores.iterator + (ring.stage(n) << SCORES_LOG2 - ring.stages)
                ptx.bulk_load(target.align(128), source, 4 * words, ring.full_of(n))

    @cute.jit
    def _multiply(self, product, memory, shared, rings, numbers, item, where, tiles) -> None:
        """A group of tiles at once where no row is multiplied before any of them: who waits for some, or reads
        their P, does so beside the products of others. ptxas keeps products on their way only where nothing
        else writes their sums, so there is a loop of its own for them."""
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
        p = tuple(cute.make_rmem_tensor(words, Int32) for _ in range(GROUP_TILES))
        for x in (t.total, t.acc_O):
            x.fill(0.0)
        for x in p:
            x.fill(0)  # rows that do not exist
        group, held = Int32(0), Int32(0)  # held: V of the group before is still in use
        while group * GROUP_TILES < count:
            go_on = self._go_on(shared, rings, item, group, count)
            while go_on == 1:
                place = rings.v.stage(group) * GROUP_TILES
                warpgroup.wait_group(1)
                for i in cutlass.range_constexpr(GROUP_TILES - 1):
                    self._take(t, shared, rings, item, exists, group, i, p[i])
                self._product(product, t, place, p[0])
                warpgroup.wait_group(1)
                if held == 1:
                    arrive(rings.v.empty_of(group - 1))
                self._take(t, shared, rings, item, exists, group, GROUP_TILES - 1, p[GROUP_TILES - 1])
                arrive(rings.p.empty_of(group))
                for i in cutlass.range_constexpr(1, GROUP_TILES - 1):
                    self._product(product, t, place + i, p[i])
                go_on = self._go_on(shared, rings, item, group + 1, count)
                self._product(product, t, place + GROUP_TILES - 1, p[GROUP_TILES - 1])
                held = Int32(1)
                group += 1
            warpgroup.wait_group(0)
            if held == 1:
                arrive(rings.v.empty_of(group - 1))
            held = Int32(0)
            if group * GROUP_TILES < count:
                for i in cutlass.range(cutlass.min(count - group * GROUP_TILES, GROUP_TILES), unroll=1):
                    self._take(t, shared, rings, item, exists, group, i, p[0])
                    if exists:
                        multiply_rows(t.acc_O, (t.numbers[0], t.numbers[1]))
                    self._product(product, t, rings.v.stage(group) * GROUP_TILES + i, p[0])
                    warpgroup.wait_group(0)
                arrive(rings.p.empty_of(group))
                arrive(rings.v.empty_of(group))
                group += 1
        if exists:
            self._leave(t, memory, shared, numbers, item, where, count)

    @cute.jit
    def _go_on(self, shared, rings, item, group: Int32, count: Int32) -> Int32:
        """Wait for a group. 1 if it is whole, and no row is multiplied before any of its tiles."""
        go_on = Int32(0)
        if group * GROUP_TILES < count:
            known = rings.p.is_full(group) & rings.v.is_full(group)
            if known == 0:
                rings.p.wait_full(group)
                rings.v.wait_full(group)
            if (group + 1) * GROUP_TILES <= count:
                unit = cutlass.min(cute.arch.lane_idx(), (GROUP_TILES << item.shift) - 1)
                if unit & (1 << item.shift) - 1 >= item.warps:
                    unit = Int32(0)
                rises = shared.rises[unit_of(rings.p, item, group, 0) + unit] != 0
                go_on = Int32(~cute.arch.vote_any_sync(rises))
        return go_on

    @cute.jit
    def _take(self, t, shared, rings, item, exists, group: Int32, tile, p) -> None:
        """P of a tile of a group into registers, and its sums to those of the rows."""
        if exists:
            unit, lane = unit_of(rings.p, item, group, tile) + t.tidx // 32, t.tidx % 32
            for v in cutlass.range_constexpr(cute.size(p) // 4):
                target = cute.make_tensor(p.iterator + 4 * v, 4)
                cute.autovec_copy(shared.p[None, lane, v, unit], target)
            cute.autovec_copy(shared.numbers[None, lane, unit], t.numbers)
            self._add(t.total, t.numbers)

    def _add(self, total, numbers) -> None:
        for half in range(2):
            total[half] = fma(total[half], numbers[half], numbers[2 + half])

    def _product(self, product, t, place, p) -> None:
        of_p = as_operand_a(cute.recast_tensor(p, self.dtype), self.dtype)
        multiply(product, t.acc_O, of_p, t.of_v[None, None, None, place], True)

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
