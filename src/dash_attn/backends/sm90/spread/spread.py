"""The second kernel: O of some columns, from kv tile to kv tile of a segment."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from ..cached.load import CachedLoad
from ..cached.pages import numbers_of_pages
from ..device import ptx
from ..device.copies import partitions
from ..device.operands import DTYPES, tile_layout
from ..device.plan_view import PACKED_ROWS
from ..device.ring import arrive_together
from ..forward.config import WARP_ROWS
from ..forward.exact import fma
from ..forward.softmax import multiply_rows
from .config import COLUMNS, GROUP_TILES, P_GROUPS, SCORE_SLOTS, V_GROUPS, WEIGH_WARPS, SpreadConfig
from .fold import SpreadFold
from .item import PowerRing, Rings, Shared, begin, groups_of, sequence_of
from .weigh import Follow, Weigh

MULTIPLY_WARP, FOLLOW_WARP, V_WARPS, WARPS = 0, 4, (8, 12), 13
"""Every fourth warp has one scheduler. The one that multiplies shares its own with those that mostly wait."""


class Spread:
    """One block per 32 columns, 16 rows and segment, kv head, and sequence: a warp that multiplies, eight
    that make P, one that follows maxima, and two that load V."""

    def __init__(self, config: SpreadConfig):
        self.config, self.dtype = config, DTYPES[config.dtype]
        self.load, self.fold = CachedLoad(config, self.dtype), SpreadFold(config)
        self.follow, self.weigh = Follow(config, self.dtype), Weigh(config, self.dtype)
        self.parts = config.head_dim_v // COLUMNS
        self.pieces = config.tile_n // config.piece

    def tile_of(self, rows: int, stages: int):
        return tile_layout(self.dtype, rows, COLUMNS, stages, row_bytes=2 * COLUMNS)

    @cute.jit
    def __call__(self, copy, memory, numbers, scales, launch, stream):
        c = self.config
        rows = cute.size(memory.q, mode=[1])
        units = (rows + WARP_ROWS - 1) // WARP_ROWS
        layout = self.tile_of(c.tile_n, GROUP_TILES * V_GROUPS)
        self.kernel(copy, layout, memory, numbers, scales, units).launch(
            grid=(self.parts * units * launch.segments, numbers.kv_heads, launch.batch),
            block=(32 * WARPS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    def _shared(self, layout):
        c, allocator = self.config, SmemAllocator()

        def allocate(dtype, *shape):
            return allocator.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=128)

        stages = V_GROUPS, SCORE_SLOTS, P_GROUPS
        barriers, rings = allocator.allocate_array(Int64, 2 * sum(stages)), []
        for number in stages:
            rings.append(PowerRing(barriers, barriers + number, number))
            barriers = barriers + 2 * number
        v = allocator.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        places = GROUP_TILES * P_GROUPS
        shared = Shared(
            v=v,
            scores=allocate(Float32, WARP_ROWS * c.tile_n, SCORE_SLOTS),
            p=allocate(Int32, 4, 32, c.tile_n // 16, places),
            numbers=allocate(Float32, 4, 32, places),
            rises=allocate(Int32, places),
            maxima=allocate(Float32, WARP_ROWS, c.segment // c.tile_n),
        )
        return shared, Rings(*rings)

    @cute.kernel
    def kernel(self, copy, layout, memory, numbers, scales, units) -> None:
        c = self.config
        index, head, sequence = cute.arch.block_idx()
        part, index = index % self.parts, index // self.parts
        top, segment = index % units * WARP_ROWS, index // units
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared, rings = self._shared(layout)
        if warp_idx == V_WARPS[0]:
            cpasync.prefetch_descriptor(copy.atom)
            with cute.arch.elect_one():
                # Of maxima and P every lane arrives for what it has written, and of P for what it has read.
                for ring, full, empty in (
                    (rings.v, len(V_WARPS), 1),
                    (rings.s, 32 + 1, 1),
                    (rings.p, 32 * GROUP_TILES, 32),
                ):
                    for stage in range(ring.stages):
                        cute.arch.mbarrier_init(ring.full + stage, full)
                        cute.arch.mbarrier_init(ring.empty + stage, empty)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        begin()
        item = sequence_of(c, memory, numbers, sequence, head)
        weigher = warp_idx - 1 - warp_idx // 4
        if (segment >= item.segment_first) & (segment <= item.segment_last):
            per_segment = c.segment // c.tile_n
            first = cutlass.max(item.kv_first, segment * per_segment)
            last = cutlass.min(item.kv_last, (segment + 1) * per_segment - 1)
            work = SimpleNamespace(
                sequence=sequence, head=head, segment=segment, part=part, item=item, last=last,
                count=last - first + 1, top=top, rows=cutlass.min(item.rows - top, WARP_ROWS),
            )  # fmt: skip
            if (warp_idx == V_WARPS[0]) | (warp_idx == V_WARPS[1]):
                own = Int32(warp_idx == V_WARPS[1])
                self._load_v(copy, memory, shared.v, rings.v, numbers, work, own)
            elif warp_idx == FOLLOW_WARP:
                if work.count > 0:
                    self.follow.run(memory, shared, rings.s, scales, work)
            elif warp_idx == MULTIPLY_WARP:
                self._multiply(memory, shared, rings, numbers, work)
            elif weigher < WEIGH_WARPS:
                self.weigh.run(shared, rings, scales, work, weigher)

    @cute.jit
    def _load_v(self, copy, memory, v, ring, numbers, work, own: Int32) -> None:
        """One of the two warps loads every second tile."""
        c, count = self.config, work.count
        # A look-up takes longer than a product, so there is one for all tiles of which lanes have a piece.
        row, page, used = self._where(memory, numbers, work, work.last - own)
        n = own
        for group in cutlass.range(groups_of(count), unroll=1):
            full, end = ring.full_of(group), cutlass.min((group + 1) * GROUP_TILES, count)
            ring.wait_empty(group)
            with cute.arch.elect_one():
                loaded = cutlass.max(end - n + 1, 0) // 2 * (2 * c.tile_n * COLUMNS)
                cute.arch.mbarrier_arrive_and_expect_tx(full, loaded)
            while n < end:
                lane = n // 2 * self.pieces % 32
                if (n >= 2) & (lane == 0):
                    row, page, used = self._where(memory, numbers, work, work.last - n)
                place = ring.stage(group) * GROUP_TILES + n - group * GROUP_TILES
                pieces = cute.flat_divide(v[None, None, place], (c.piece, COLUMNS))
                shift = page * numbers.v_rows + used
                for i in cutlass.range_constexpr(self.pieces):
                    of_row, of_page = (cute.arch.shuffle_sync(x, lane + i) for x in (row, shift))
                    place = (of_row, Int32(PACKED_ROWS), of_page)
                    target, source = partitions(copy, pieces[None, None, i, 0], place, work.head, work.part)
                    cute.copy(copy.atom, source[None, 0], target, tma_bar_ptr=full)
                n += 2

    def _where(self, memory, numbers, work, kv_tile: Int32):
        """What `CachedLoad.piece_at` says of the pieces of a kv tile, and of every second one before it, in
        the next lanes."""
        c, lane = self.config, cute.arch.lane_idx()
        token = (kv_tile - lane // self.pieces * 2) * c.tile_n + lane % self.pieces * c.piece
        of_pages = numbers_of_pages(numbers.pages, numbers.page_size, numbers.most_pages)
        return self.load.piece_at(
            memory.pages, of_pages, work.sequence, cutlass.max(token, 0), work.item.seqlen_k
        )

    @cute.jit
    def _multiply(self, memory, shared, rings, numbers, work) -> None:
        """A sum waits for the one before it. So products of a warp, 16 rows, are as fast as a warpgroup's of
        64, and the warp waits for no other one."""
        count, lane = work.count, cute.arch.lane_idx()
        t = SimpleNamespace(
            lane=lane, total=cute.make_rmem_tensor(2, Float32),
            acc_O=cute.make_rmem_tensor((4, COLUMNS // 8), Float32),
        )  # fmt: skip
        for x in (t.total, t.acc_O):
            x.fill(0.0)
        for group in cutlass.range(groups_of(count), unroll=1):
            left = count - group * GROUP_TILES
            rings.p.wait_full(group)
            rings.v.wait_full(group)
            if self._goes_on(shared, rings, group, left):
                for i in cutlass.range_constexpr(GROUP_TILES):
                    self._multiply_tile(t, shared, rings, group, i, False)
            else:
                for i in cutlass.range(cutlass.min(left, GROUP_TILES), unroll=1):
                    self._multiply_tile(t, shared, rings, group, i, True)
            cute.arch.mbarrier_arrive(rings.p.empty_of(group))
            # V needs no `arrive_for_copies`, which takes 2 % longer: products have used what was read.
            arrive_together(rings.v.empty_of(group))
        of_rows = cute.make_rmem_tensor(4, Float32)
        for half in cutlass.range_constexpr(2):
            of_rows[half], of_rows[2 + half] = -Float32.inf, t.total[half]
            if count > 0:
                of_rows[half] = shared.maxima[cutlass.min(lane // 4 + 8 * half, work.rows - 1), count - 1]
        self._leave(t, memory, numbers, work, of_rows)

    def _goes_on(self, shared, rings, group: Int32, left: Int32):
        """Whether a group is whole, and no row is multiplied before any of its tiles."""
        tile = cutlass.min(cutlass.min(cute.arch.lane_idx(), GROUP_TILES - 1), left - 1)
        rises = shared.rises[rings.p.stage(group) * GROUP_TILES + tile] != 0
        return (left >= GROUP_TILES) & ~cute.arch.vote_any_sync(rises)

    @cute.jit
    def _multiply_tile(self, t, shared, rings, group: Int32, tile, rises: cutlass.Constexpr[bool]) -> None:
        """O += P V of a tile, and its sums of P. rises: rows are multiplied before."""
        c, place = self.config, rings.p.stage(group) * GROUP_TILES + tile
        numbers = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(shared.numbers[None, t.lane, place], numbers)
        if cutlass.const_expr(rises):
            multiply_rows(t.acc_O, (numbers[0], numbers[1]))
        for half in cutlass.range_constexpr(2):
            t.total[half] = fma(t.total[half], numbers[half], numbers[2 + half])
        # V has rows of 64 bytes. The copy engine has moved each 16 of them by bits of the row's number.
        key, blocks = t.lane % 16, COLUMNS // 8
        chunk = (t.lane // 16) ^ (key // 2 % 4)
        keys = cute.recast_ptr(shared.v.iterator, dtype=self.dtype)
        keys = keys + ((rings.v.stage(group) * GROUP_TILES + tile) * c.tile_n + key) * COLUMNS
        atom = cute.make_mma_atom(warp.MmaF16BF16Op(self.dtype, Float32, (WARP_ROWS, 8, 16)))
        acc = cute.make_tensor(t.acc_O.iterator, cute.make_layout(((2, 2), 1, blocks)))
        for k in cutlass.range_constexpr(c.tile_n // 16):
            p, v = cute.make_rmem_tensor(4, Int32), cute.make_rmem_tensor((2, blocks), Int32)
            cute.autovec_copy(shared.p[None, t.lane, k, place], p)
            for pair in cutlass.range_constexpr(blocks // 2):
                four = ptx.load_transposed(keys + (16 * k * COLUMNS + (chunk ^ 2 * pair) * 8))
                for i in cutlass.range_constexpr(4):
                    v[i % 2, 2 * pair + i // 2] = four[i]
            of_p, of_v = (cute.recast_tensor(x, self.dtype).iterator for x in (p, v))
            of_p = cute.make_tensor(of_p, cute.make_layout(((2, 2, 2), 1)))
            of_v = cute.make_tensor(of_v, cute.make_layout(((2, 2), blocks)))
            cute.gemm(atom, acc, of_p, of_v, acc)

    @cute.jit
    def _leave(self, t, memory, numbers, work, of_rows) -> None:
        """Leave columns as a thread of `MmaRole._leave` does, maxima and sums beside the first ones. Or write
        them, if sequences have one segment."""
        c, vectors, thread = self.config, COLUMNS // 8, 2 * work.top + t.lane
        if numbers.segments == 1:
            values = cute.make_tensor(t.acc_O.iterator, cute.make_layout((4, vectors)))
            place = (work.sequence, Int32(0), work.item.rows, Int32(0), work.head)
            tensors = (memory.out, memory.lse, memory.sink)
            self.fold.finish(tensors, of_rows, values, Int32(0), thread, place, work.part)
        else:
            of_segment = (work.sequence * numbers.segments + work.segment) * numbers.kv_heads + work.head
            start = Int64(of_segment) * c.partial_words + thread * 4
            layout = cute.make_layout((4, c.head_dim_v // 8 + 1), stride=(1, 512))
            target = cute.make_tensor(memory.partial.iterator + cute.assume(start, divby=4), layout)
            for i in cutlass.range_constexpr(vectors):
                source = cute.make_tensor(t.acc_O.iterator + 4 * i, 4)
                cute.autovec_copy(source, target[None, work.part * vectors + i])
            if work.part == 0:
                cute.autovec_copy(of_rows, target[None, c.head_dim_v // 8])
