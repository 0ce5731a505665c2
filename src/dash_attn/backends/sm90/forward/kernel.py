"""The forward kernel: persistent, warp specialised, one item (64 rows per warpgroup of one q head) after
the other.

Warp 0 claims items and loads Q, K and V by the copy engine, and one warp per warpgroup stores O.
Warpgroups multiply: S = Q K^T of the next kv tile and O += P V of this one are started together, and one
warpgroup's softmax runs beside the products of another (FlashAttention-3, section 3). Numerics:
schedule/forward.py."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

from ..device import plan_view, ptx
from ..device.copies import copy_of, load_tile, partitions
from ..device.operands import DTYPES, as_operand_a, multiply, tile_layout, transposed
from ..device.ring import Ring, arrive
from .arguments import Copies, Launch, Layouts, Memory, Products, Shared, Tensors, Workspace
from .config import ROWS, ForwardConfig
from .exact import finite, fma, folded, packed
from .table import ENTRY_WORDS

LOAD_WARP, FIRST_STORE_WARP, FIRST_MMA_WARP = 0, 1, 4
INFO_WORDS = 16
# The next item is claimed when so many kv tiles of an item are still to be loaded, and read when so many are.
CLAIM_BEFORE, READ_BEFORE = 4, 2
# Named barriers: one per warpgroup each, and of the last kind one per warpgroup and Q stage
WARPGROUP_BARRIER, TURN_BARRIER, DONE_BARRIER = 1, 4, 7


@dataclass(frozen=True)
class Rings:
    """q: tiles of Q with their item, until O has left their place; k, v: tiles of K and V."""

    q: Ring
    k: Ring
    v: Ring


CHAINS = [
    (half, e) for half in range(2) for e in range(2)
]  # of sums and maxima: both rows of a thread, two each


class Info:
    """Words that the load warp leaves beside Q of an item."""

    valid, q_head, kv_first, kv_last, low, high, seqlen_k, seqlen_q, row = range(9)
    tma_row, tma_batch, tma_shift, batch, row_first, partial = range(9, 15)


class Forward:
    def __init__(self, config: ForwardConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]

    def _tiled_mmas(self) -> Products:
        c = self.config
        major, source = cute.nvgpu.OperandMajorMode, warpgroup.OperandSource
        make = hopper_helpers.make_trivial_tiled_mma
        scores = make(
            self.dtype, self.dtype, major.K, major.K, Float32, (1, 1, 1), (ROWS, c.tile_n), source.SMEM
        )
        out = make(
            self.dtype, self.dtype, major.K, major.MN, Float32, (1, 1, 1), (ROWS, c.head_dim), source.RMEM
        )
        return Products(scores, out)

    def _storage(self):
        c, dtype = self.config, self.dtype

        def tile(rows, columns, stages):
            return cute.struct.Align[cute.struct.MemRange[dtype, rows * columns * stages], 1024]

        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[Int64, c.q_stages]
            q_empty: cute.struct.MemRange[Int64, c.q_stages]
            k_full: cute.struct.MemRange[Int64, c.kv_stages]
            k_empty: cute.struct.MemRange[Int64, c.kv_stages]
            v_full: cute.struct.MemRange[Int64, c.kv_stages]
            v_empty: cute.struct.MemRange[Int64, c.kv_stages]
            item: cute.struct.Align[cute.struct.MemRange[Int32, INFO_WORDS * c.q_stages], 16]
            q: tile(ROWS, c.head_dim, c.q_stages * c.warpgroups)
            k: tile(c.tile_n, c.head_dim, c.kv_stages)
            v: tile(c.tile_n, c.head_dim, c.kv_stages)

        return Storage

    def _barrier_counts(self):
        c = self.config
        return {
            "q_full": (c.q_stages, 1), "q_empty": (c.q_stages, c.warpgroups),
            "k_full": (c.kv_stages, 1), "k_empty": (c.kv_stages, 4 * c.warpgroups),
            "v_full": (c.kv_stages, 1), "v_empty": (c.kv_stages, 4 * c.warpgroups),
        }  # fmt: skip

    @cute.jit
    def __call__(self, tensors: Tensors, workspace: Workspace, launch: Launch, stream):
        c = self.config
        layouts = Layouts(
            q=tile_layout(self.dtype, ROWS, c.head_dim, c.q_stages * c.warpgroups),
            kv=tile_layout(self.dtype, c.tile_n, c.head_dim, c.kv_stages),
        )
        fetch, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        copies = Copies(
            q=copy_of(fetch, tensors.q, layouts.q, ROWS),
            k=copy_of(fetch, tensors.k, layouts.kv, c.tile_n),
            v=copy_of(fetch, tensors.v, layouts.kv, c.tile_n),
            out=copy_of(store, tensors.out, layouts.q, ROWS),
        )
        group = tensors.q.shape[2] // tensors.k.shape[2]
        memory = Memory(tensors.lse, *workspace)
        numbers = (
            launch.scale, launch.entries, launch.heads, launch.left, launch.right, group, tensors.q.shape[0],
            tensors.q.shape[2],
        )  # fmt: skip
        self.kernel(copies, layouts, self._tiled_mmas(), memory, numbers).launch(
            grid=(launch.grid, 1, 1),
            block=(c.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, copies: Copies, layouts: Layouts, products: Products, memory: Memory, numbers) -> None:
        c = self.config
        scale, *others = numbers
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == LOAD_WARP:
            for each in copies:
                cpasync.prefetch_descriptor(each.atom)
        storage = SmemAllocator().allocate(self._storage())
        barriers = {name: getattr(storage, name).data_ptr() for name in self._barrier_counts()}
        rings = Rings(
            q=Ring(barriers["q_full"], barriers["q_empty"], c.q_stages),
            k=Ring(barriers["k_full"], barriers["k_empty"], c.kv_stages),
            v=Ring(barriers["v_full"], barriers["v_empty"], c.kv_stages),
        )
        shared = Shared(
            q=storage.q.get_tensor(layouts.q.outer, swizzle=layouts.q.inner),
            k=storage.k.get_tensor(layouts.kv.outer, swizzle=layouts.kv.inner),
            v=storage.v.get_tensor(layouts.kv.outer, swizzle=layouts.kv.inner),
            item=storage.item.get_tensor(cute.make_layout((INFO_WORDS, c.q_stages))),
        )
        if warp_idx == LOAD_WARP:
            with cute.arch.elect_one():
                for name, (stages, count) in self._barrier_counts().items():
                    for stage in range(stages):
                        cute.arch.mbarrier_init(barriers[name] + stage, count)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        if warp_idx < FIRST_MMA_WARP:
            cute.arch.setmaxregister_decrease(c.registers[1])
            if warp_idx == LOAD_WARP:
                self.load(copies, memory, shared, rings, tuple(others))
            elif warp_idx < FIRST_STORE_WARP + c.warpgroups:
                self.store(copies, shared, rings, warp_idx - FIRST_STORE_WARP)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            self.multiply_role(products, memory, shared, rings, scale)

    # Loading

    @cute.jit
    def load(self, copies, memory, shared, rings, numbers) -> None:
        c = self.config
        entries, heads, left, right, group, batches, q_heads = numbers
        table, items, in_section = memory.table, entries * q_heads, entries * heads
        n_item, n_kv = Int32(0), Int32(0)
        index, blocks = Int32(cute.arch.block_idx()[0]), Int32(cute.arch.grid_dim()[0])
        record = self._read(table, numbers, index)
        while index < items:
            q_head = index // in_section * heads + index % in_section % heads
            sequence, q_tile, segment, place, seqlen_q, seqlen_k, q_first, k_first = record
            shift = seqlen_k - seqlen_q
            low = shift - left if left >= 0 else Int32(-plan_view.UNBOUNDED)
            high = shift + right if right >= 0 else Int32(plan_view.UNBOUNDED)
            top = q_tile * c.tile_m
            bottom = cutlass.min(top + c.tile_m, seqlen_q) - 1
            kv_first = cutlass.max(top + low, 0) // c.tile_n
            last = cutlass.min(bottom + high, seqlen_k - 1)
            kv_last = last // c.tile_n if last >= 0 else Int32(-1)
            partial = Int32(-1)
            if segment >= 0:
                kv_first = cutlass.max(kv_first, segment * (c.segment // c.tile_n))
                kv_last = cutlass.min(kv_last, (segment + 1) * (c.segment // c.tile_n) - 1)
                partial = place * q_heads + q_head
            batch = Int32(0) if batches == 1 else sequence
            row_first = q_first if batches == 1 else Int32(0)
            tma_batch = Int32(plan_view.PACKED_ROWS) if batches == 1 else sequence
            tma_row, tma_shift = plan_view.tma_rows(seqlen_q, q_first, batches)
            k_row, k_shift = plan_view.tma_rows(seqlen_k, k_first, batches)
            stage = rings.q.stage(n_item)
            rings.q.wait_empty(n_item)
            with cute.arch.elect_one():
                words = (
                    Int32(1), q_head, kv_first, kv_last, low, high, seqlen_k, seqlen_q, top,
                    tma_row, tma_batch, tma_shift, batch, row_first, partial,
                )  # fmt: skip
                for i, value in enumerate(words):
                    shared.item[i, stage] = value
                cute.arch.mbarrier_arrive_and_expect_tx(rings.q.full + stage, 2 * c.tile_m * c.head_dim)
            rows = (tma_row, tma_batch, tma_shift)
            for g in cutlass.range_constexpr(c.warpgroups):
                tile = shared.q[None, None, stage * c.warpgroups + g]
                load_tile(copies.q, tile, rows, q_tile * c.warpgroups + g, q_head, rings.q.full + stage)
            rows, kv_head = (k_row, tma_batch, k_shift), q_head // group
            per_segment = c.segment // c.tile_n
            begin, kv_tiles = kv_first, cutlass.max(kv_last - kv_first + 1, 0)
            to_load, claimed = kv_tiles, items - blocks
            while begin <= kv_last:
                end = cutlass.min((begin // per_segment + 1) * per_segment - 1, kv_last)
                for i in cutlass.range(end - begin + 1, unroll=1):
                    if (to_load == cutlass.min(kv_tiles, CLAIM_BEFORE)) & (blocks < items):
                        claimed = self._claim(memory.claimed)
                    for ring, copy, tiles in (
                        (rings.k, copies.k, shared.k),
                        (rings.v, copies.v, shared.v),
                    ):
                        kv_stage = ring.stage(n_kv)
                        ring.wait_empty(n_kv)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(
                                ring.full + kv_stage, 2 * c.tile_n * c.head_dim
                            )
                        load_tile(
                            copy,
                            tiles[None, None, kv_stage],
                            rows,
                            end - i,
                            kv_head,
                            ring.full + kv_stage,
                        )
                    n_kv += 1
                    to_load -= 1
                    if to_load == cutlass.min(kv_tiles - 1, READ_BEFORE):
                        index = blocks + cute.arch.shuffle_sync(claimed, 0)
                        record = self._read(table, numbers, index)
                begin = end + 1
            if kv_tiles == 0:
                if blocks < items:
                    claimed = self._claim(memory.claimed)
                index = blocks + cute.arch.shuffle_sync(claimed, 0)
                record = self._read(table, numbers, index)
            n_item += 1
        rings.q.wait_empty(n_item)
        with cute.arch.elect_one():
            shared.item[Info.valid, rings.q.stage(n_item)] = Int32(0)
            cute.arch.mbarrier_arrive(rings.q.full_of(n_item))

    @cute.jit
    def _read(self, table, numbers, index: Int32):
        """The words of an item; of the last one where there is none."""
        entries, heads, _, _, _, _, q_heads = numbers
        index = cutlass.max(cutlass.min(index, entries * q_heads - 1), 0)
        first = index % (entries * heads) // heads * ENTRY_WORDS
        return tuple(table[first + i] for i in range(ENTRY_WORDS))

    @cute.jit
    def _claim(self, claimed) -> Int32:
        """Claim the next item; lane 0 knows which. Nobody waits for the answer here."""
        number = Int32(0)
        if cute.arch.lane_idx() == 0:
            number = ptx.add(claimed.iterator)
        return number

    # Storing

    @cute.jit
    def store(self, copies, shared, rings, group: Int32) -> None:
        """Let the copy engine store O of a warpgroup, and let its place go."""
        c, n_item = self.config, Int32(0)
        rings.q.wait_full(n_item)
        words = shared.item[None, rings.q.stage(n_item)]
        while words[Info.valid] == 1:
            stage = rings.q.stage(n_item)
            cute.arch.barrier(barrier_id=self._done(group, stage), number_of_threads=160)
            if words[Info.partial] < 0:
                place = (words[Info.tma_row], words[Info.tma_batch], words[Info.tma_shift])
                tile = shared.q[None, None, stage * c.warpgroups + group]
                source, target = partitions(copies.out, tile, place, words[Info.q_head])
                at = words[Info.row] // ROWS + group
                with cute.arch.elect_one():
                    cute.copy(copies.out.atom, source, target[None, at])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
            arrive(rings.q.empty + stage)
            n_item += 1
            rings.q.wait_full(n_item)
            words = shared.item[None, rings.q.stage(n_item)]

    def _done(self, group, stage):
        """The barrier at which a warpgroup is done with its item: O, unless it is in parts, is where Q
        was. Every stage has one, for a warpgroup may be done with the next item before this one is
        stored."""
        return DONE_BARRIER + group * self.config.q_stages + stage

    # Multiplying

    @cute.jit
    def multiply_role(self, products, memory, shared, rings, scale) -> None:
        c = self.config
        tidx = cute.arch.thread_idx()[0] % 128
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        scores, out = (m.get_slice(0) for m in products)
        t = SimpleNamespace(
            products=products, group=group, tidx=tidx, scale_log2=scale * math.log2(math.e),
            tSrQ=scores.make_fragment_A(scores.partition_A(shared.q)),
            tSrK=scores.make_fragment_B(scores.partition_B(shared.k)),
            tOrV=out.make_fragment_B(out.partition_B(transposed(shared.v))),
            acc_S=cute.make_rmem_tensor(scores.partition_shape_C((ROWS, c.tile_n)), Float32),
            acc_O=cute.make_rmem_tensor(out.partition_shape_C((ROWS, c.head_dim)), Float32),
            p=cute.make_rmem_tensor(scores.partition_shape_C((ROWS, c.tile_n)), self.dtype),
            maximum=cute.make_rmem_tensor(2, Float32), total=cute.make_rmem_tensor(2, Float32),
        )  # fmt: skip
        if const_expr(c.in_turns):
            if group == c.warpgroups - 1:
                cute.arch.barrier_arrive(barrier_id=TURN_BARRIER, number_of_threads=256)
        n_item, n_kv, started = Int32(0), Int32(0), Int32(0)
        rings.q.wait_full(n_item)
        words = shared.item[None, rings.q.stage(n_item)]
        while words[Info.valid] == 1:
            stage = rings.q.stage(n_item) * c.warpgroups + group
            info = self._item(words, group)
            before_m, before_l = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
            t.maximum.fill(-Float32.inf)
            t.total.fill(0.0)
            t.acc_O.fill(0.0)
            begin, kept = words[Info.kv_first], Int32(0)
            kv_last = words[Info.kv_last]
            while begin <= kv_last:
                end = self._segment_end(begin, kv_last)
                n_end = n_kv + end - begin + 1
                own_begin, own_end = cutlass.max(begin, info.first), cutlass.min(end, info.last)
                if own_begin <= own_end:
                    if started == 0:
                        self._skip(t, rings, n_kv, end - own_end)
                        self._start_first(t, rings, stage, n_kv + end - own_end)
                    n = self.segment(t, rings, words, info, stage, n_kv + end - own_end, own_begin, own_end)
                    started = Int32(0)
                    if (end == kv_last) & (n == n_end) & c.early:
                        # The first scores of the next item, beside the last product and the end of this item.
                        started = self._start_early(t, rings, shared, n_item + 1, n_end)
                    else:
                        warpgroup.commit_group()
                    warpgroup.wait_group(1)
                    arrive(rings.v.empty_of(n - 1))
                    self._skip(t, rings, n, n_end - n)
                    if kept == 1:
                        self._fold(t, memory.state, before_m, before_l)
                    if end < info.last:
                        # What the segments so far have left makes room for a fresh one.
                        self._keep(t, memory.state)
                        for half in cutlass.range_constexpr(2):
                            before_m[half], before_l[half] = t.maximum[half], t.total[half]
                        t.acc_O.fill(0.0)
                        kept = Int32(1)
                else:
                    self._skip(t, rings, n_kv, end - begin + 1)
                n_kv = n_end
                begin = end + 1
            if words[Info.partial] >= 0:
                if words[Info.row] + ROWS * group < words[Info.seqlen_q]:
                    self._leave(t, memory.partial, words[Info.partial])
            else:
                self._finish(t, memory, shared, words, stage)
            done = self._done(group, rings.q.stage(n_item))
            cute.arch.barrier_arrive(barrier_id=done, number_of_threads=160)
            n_item += 1
            rings.q.wait_full(n_item)
            words = shared.item[None, rings.q.stage(n_item)]

    def _segment_end(self, begin: Int32, kv_last: Int32) -> Int32:
        """The last kv tile of the segment in which one stands, if the item goes so far."""
        per_segment = self.config.segment // self.config.tile_n
        return cutlass.min((begin // per_segment + 1) * per_segment - 1, kv_last)

    @cute.jit
    def _start_early(self, t, rings, shared, n_item: Int32, n: Int32) -> Int32:
        """Start an item's first scores if this warpgroup sees its first tile: 1 if so.

        There is one more group of products in any case.
        """
        rings.q.wait_full(n_item)
        stage, started = rings.q.stage(n_item), Int32(0)
        words = shared.item[None, stage]
        if words[Info.valid] == 1:
            info, kv_first = self._item(words, t.group), words[Info.kv_first]
            end = self._segment_end(kv_first, words[Info.kv_last])
            if (kv_first <= end) & (info.first <= end) & (info.last >= end):
                started = Int32(1)
        if started == 1:
            self._start_first(t, rings, stage * self.config.warpgroups + t.group, n)
        else:
            warpgroup.commit_group()
        return started

    @cute.jit
    def _start_first(self, t, rings, stage, n: Int32) -> None:
        rings.k.wait_full(n)
        self._turn(t)
        self._start_scores(t, rings, stage, n)
        self._next_turn(t)

    @cute.jit
    def _skip(self, t, rings, n_first: Int32, tiles: Int32) -> None:
        """Let tiles go that other warpgroups of the block see and this one does not."""
        for i in cutlass.range(tiles, unroll=1):
            n = n_first + i
            self._turn(t)
            self._next_turn(t)
            for ring in (rings.k, rings.v):
                ring.wait_full(n)
                arrive(ring.empty_of(n))

    def _item(self, words, group):
        """Which kv tiles a warpgroup's rows see any key of, and which of these all rows see as a whole."""
        c = self.config
        top, last_key = words[Info.row] + ROWS * group, words[Info.seqlen_k] - 1
        bottom = cutlass.min(top + ROWS, words[Info.seqlen_q]) - 1
        seen_to = cutlass.min(bottom + words[Info.high], last_key)
        last = cutlass.min(cutlass.max(seen_to + c.tile_n, 0) // c.tile_n - 1, words[Info.kv_last])
        # A tile is seen as a whole where its first key is not beyond these.
        whole_from = top + ROWS - 1 + words[Info.low]
        whole_to = cutlass.min(top + words[Info.high], last_key) - (c.tile_n - 1)
        return SimpleNamespace(
            first=cutlass.max(cutlass.max(top + words[Info.low], 0) // c.tile_n, words[Info.kv_first]),
            last=cutlass.select_(bottom < top, Int32(-1), last),
            first_whole=(cutlass.max(whole_from, 0) + c.tile_n - 1) // c.tile_n,
            last_whole=(cutlass.max(whole_to, -c.tile_n) + c.tile_n) // c.tile_n - 1,
        )  # fmt: skip

    @cute.jit
    def segment(self, t, rings, words, info, stage, n_first: Int32, begin: Int32, end: Int32) -> Int32:
        """Go through the kv tiles `end`, whose scores have been started, down to `begin` from fresh.

        The last product is on its way when this ends. Returns the number of the next use of K and V.
        """
        n = n_first
        warpgroup.wait_group(0)
        arrive(rings.k.empty_of(n))
        self._mask(t, words, info, end)
        self._first_softmax(t)
        # Asked long before the answer is used, so that it is there at once.
        k_is_full, v_is_full = Int32(0), Int32(0)
        for i in cutlass.range(end - begin, unroll=1):
            kv_tile = end - 1 - i
            cut = (kv_tile > info.last_whole) | (kv_tile < info.first_whole)
            rings.k.wait_full_unless(k_is_full, n + 1)
            self._turn(t)
            self._start_scores(t, rings, stage, n + 1)
            rings.v.wait_full_unless(v_is_full, n)
            self._start_out(t, rings, n)
            self._next_turn(t)
            warpgroup.wait_group(1)
            arrive(rings.k.empty_of(n + 1))
            warpgroup.wait_group(0)
            arrive(rings.v.empty_of(n))
            n += 1
            k_is_full, v_is_full = rings.k.is_full(n + 1), rings.v.is_full(n)
            if cut:
                self._mask(t, words, info, kv_tile)
            self._softmax(t)
        rings.v.wait_full(n)
        self._start_out(t, rings, n)
        return n + 1

    @cute.jit
    def _softmax(self, t) -> None:
        sums, shifts, factors = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        shifts[0], shifts[1] = -t.maximum[0], -t.maximum[1]
        factors.fill(1.0)
        self._probabilities(t, shifts, sums)
        few = (sums[0] <= self.config.enough) & (sums[1] <= self.config.enough)  # no NaN, too
        if ~cute.arch.vote_all_sync(few):
            self._raise(t, sums, factors)
        self._add(t, sums, factors)

    def _add(self, t, sums, factors) -> None:
        for half in range(2):
            t.total[half] = fma(t.total[half], factors[half], sums[half])

    def _turn(self, t) -> None:
        if const_expr(self.config.in_turns):
            cute.arch.barrier(barrier_id=TURN_BARRIER + t.group, number_of_threads=256)

    def _next_turn(self, t) -> None:
        if const_expr(self.config.in_turns):
            after = (t.group + 1) % self.config.warpgroups
            cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + after, number_of_threads=256)

    def _start_scores(self, t, rings, stage, n) -> None:
        keys = t.tSrK[None, None, None, rings.k.stage(n)]
        multiply(t.products.scores, t.acc_S, t.tSrQ[None, None, None, stage], keys, False)

    def _start_out(self, t, rings, n) -> None:
        values = t.tOrV[None, None, None, rings.v.stage(n)]
        multiply(t.products.out, t.acc_O, as_operand_a(t.p, self.dtype), values, True)

    def _probabilities(self, t, shifts, sums) -> None:
        """P, and this thread's sums of a tile."""
        # Four chains, so that no instruction waits for the one before it.
        totals, pairs = dict.fromkeys(CHAINS, Float32(0.0)), cute.recast_tensor(t.p, Int32)
        for j in range(self.config.tile_n // 8):
            values = {}
            for half, e in CHAINS:
                exponent = fma(t.acc_S[4 * j + 2 * half + e], t.scale_log2, shifts[half])
                values[half, e] = cute.math.exp2(exponent, fastmath=True)
                totals[half, e] = totals[half, e] + values[half, e]
            for half in range(2):
                pairs[2 * j + half] = packed(values[half, 0], values[half, 1], self.dtype)
        for half in range(2):
            sums[half] = totals[half, 0] + totals[half, 1]

    @cute.jit
    def _first_softmax(self, t) -> None:
        """P of the first tile of a segment; the maxima are those of this tile."""
        sums, shifts = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        found = self._maxima(t)
        for half in cutlass.range_constexpr(2):
            t.maximum[half] = found[half]
            shifts[half] = -finite(found[half])
        self._probabilities(t, shifts, sums)
        for half in cutlass.range_constexpr(2):
            t.total[half] = sums[half]

    @cute.jit
    def _raise(self, t, sums, factors) -> None:
        """P with new maxima of those rows whose sums with the old ones are large; O multiplied by what
        this takes, which is left in `factors` for the sums."""
        shifts = cute.make_rmem_tensor(2, Float32)
        found = self._maxima(t)
        for half in cutlass.range_constexpr(2):
            rises = cutlass.select_(sums[half] <= self.config.enough, Int32(0), Int32(1))
            for distance in cutlass.range_constexpr(1, 3):
                rises = rises | cute.arch.shuffle_sync_bfly(rises, offset=distance)
            old = t.maximum[half]
            new = cutlass.select_(rises == 1, cute.arch.fmax(old, found[half]), old)
            shift = finite(new)
            factors[half] = cute.math.exp2(old - shift, fastmath=True)
            t.maximum[half] = new
            shifts[half] = -shift
        self._probabilities(t, shifts, sums)
        self._multiply_rows(t.acc_O, factors)

    def _maxima(self, t):
        """Largest scores of this thread's rows."""
        largest = {chain: t.acc_S[2 * chain[0] + chain[1]] for chain in CHAINS}
        for j in range(1, self.config.tile_n // 8):
            for half, e in CHAINS:
                largest[half, e] = cute.arch.fmax(largest[half, e], t.acc_S[4 * j + 2 * half + e])
        found = []
        for half in range(2):
            value = cute.arch.fmax(largest[half, 0], largest[half, 1])
            for distance in (1, 2):
                value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=distance))
            found.append(value * t.scale_log2)
        return found

    @cute.jit
    def _mask(self, t, words, info, kv_tile: Int32) -> None:
        """Hide what rows do not see, where this is not nothing."""
        if kv_tile > info.last_whole:
            top, last_key = words[Info.row] + ROWS * t.group, words[Info.seqlen_k] - 1
            for half in cutlass.range_constexpr(2):
                row, column = top + self._row(t, half), self._column(t, kv_tile)
                last = cutlass.min(row + words[Info.high], last_key) - column
                self._hide(t, half, lambda c, last=last: c > last)
        if kv_tile < info.first_whole:
            for half in cutlass.range_constexpr(2):
                row = words[Info.row] + ROWS * t.group + self._row(t, half)
                first = row + words[Info.low] - self._column(t, kv_tile)
                self._hide(t, half, lambda c, first=first: c < first)

    def _row(self, t, half):
        """A thread's two rows of its warpgroup."""
        return t.tidx // 32 * 16 + t.tidx % 32 // 4 + 8 * half

    def _column(self, t, kv_tile):
        """A thread's first column of a tile."""
        return kv_tile * self.config.tile_n + t.tidx % 4 * 2

    def _hide(self, t, half, hidden) -> None:
        for j in range(self.config.tile_n // 8):
            for e in range(2):
                i = 4 * j + 2 * half + e
                t.acc_S[i] = cutlass.select_(hidden(8 * j + e), -Float32.inf, t.acc_S[i])

    def _multiply_rows(self, acc, factors) -> None:
        """Multiply this thread's two rows of an accumulator."""
        rows = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, cute.size(acc) // 4)))
        for half in range(2):
            row = rows[None, half, None]
            row.store(row.load() * factors[half])

    # Between segments

    def _place(self, t, state):
        """This thread's values of its warpgroup's rows in the block's part of the workspace."""
        c = self.config
        vectors = ROWS * c.head_dim // 512
        start = Int64(cute.arch.block_idx()[0]) * c.state_words + t.group * (ROWS * c.head_dim) + t.tidx * 4
        layout = cute.make_layout((4, vectors), stride=(1, 512))
        return cute.make_tensor(state.iterator + cute.assume(start, divby=4), layout)

    @cute.jit
    def _keep(self, t, state) -> None:
        vectors = cute.make_tensor(t.acc_O.iterator, cute.make_layout((4, cute.size(t.acc_O) // 4)))
        cute.autovec_copy(vectors, self._place(t, state))

    @cute.jit
    def _leave(self, t, partial, place: Int32) -> None:
        """Leave what a segment made of this warpgroup's rows, for `Fold`."""
        c = self.config
        start = (Int64(place) * c.warpgroups + t.group) * c.partial_words + t.tidx * 4
        layout = cute.make_layout((4, ROWS * c.head_dim // 512 + 1), stride=(1, 512))
        target = cute.make_tensor(partial.iterator + cute.assume(start, divby=4), layout)
        for v in cutlass.range_constexpr(cute.size(t.acc_O) // 4):
            cute.autovec_copy(cute.make_tensor(t.acc_O.iterator + 4 * v, 4), target[None, v])
        numbers = cute.make_rmem_tensor(4, Float32)
        for half in cutlass.range_constexpr(2):
            numbers[half], numbers[2 + half] = t.maximum[half], t.total[half]
        cute.autovec_copy(numbers, target[None, cute.size(t.acc_O) // 4])

    @cute.jit
    def _fold(self, t, state, before_m, before_l) -> None:
        left, right = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        for half in cutlass.range_constexpr(2):
            new = cute.arch.fmax(before_m[half], t.maximum[half])
            shift = finite(new)
            left[half] = cute.math.exp2(before_m[half] - shift, fastmath=True)
            right[half] = cute.math.exp2(t.maximum[half] - shift, fastmath=True)
            t.maximum[half] = new
            t.total[half] = folded(before_l[half], left[half], t.total[half], right[half])
        place = self._place(t, state)
        for v in cutlass.range_constexpr(cute.size(t.acc_O) // 4):
            before = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(place[None, v], before)
            for e in cutlass.range_constexpr(4):
                i = 4 * v + e
                t.acc_O[i] = folded(before[e], left[e // 2], t.acc_O[i], right[e // 2])

    @cute.jit
    def _finish(self, t, memory, shared, info, stage) -> None:
        """Divide, write LSE, and put O where Q was."""
        lane, warp_of_group = t.tidx % 32, t.tidx // 32
        factors = cute.make_rmem_tensor(2, Float32)
        for half in cutlass.range_constexpr(2):
            total = t.total[half]
            for distance in cutlass.range_constexpr(1, 3):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
            row = info[Info.row] + ROWS * t.group + warp_of_group * 16 + lane // 4 + 8 * half
            empty = total == Float32(0.0)
            lse = (t.maximum[half] + cute.math.log2(total, fastmath=True)) * math.log(2.0)
            if (lane % 4 == 0) & (row < info[Info.seqlen_q]):
                memory.lse[info[Info.batch], info[Info.q_head], info[Info.row_first] + row] = cutlass.select_(
                    empty, -Float32.inf, lse
                )
            factors[half] = Float32(1.0) / cutlass.select_(empty, Float32(1.0), total)
        converted = cute.make_rmem_tensor(t.acc_O.layout, self.dtype)
        self._multiply_rows(t.acc_O, factors)
        converted.store(t.acc_O.load().to(self.dtype))
        # Every warp of the group has read its Q.
        cute.arch.barrier(barrier_id=WARPGROUP_BARRIER + t.group, number_of_threads=128)
        matrices = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        store = cute.make_tiled_copy_C(matrices, t.products.out).get_slice(t.tidx)
        tile = shared.q[None, None, stage]
        cute.copy(store, store.retile(converted), store.partition_D(tile))
        cute.arch.fence_view_async_shared()
