"""The MMA warpgroups: S, P and O of every kv tile of an item, segment by segment, then O and LSE."""

import math
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from ..device import ptx
from ..device.operands import (
    as_operand_a,
    blocks_of,
    multiply,
    multiply_all,
    operand_registers,
    read_operand,
    transposed,
)
from ..device.ring import arrive
from ..softcap import Cap
from .bounds import seen_tiles, tiles_between
from .config import ROWS, ForwardConfig
from .exact import folded, inverse, lse_of, row_sum, weights, with_sink, without_sign
from .item import TURN_BARRIER, WARPGROUP_BARRIER, Info, done_barrier, segment_end, tile_of_out
from .softmax import Softmax
from .trace import BEGIN, END, note


class MmaRole:
    def __init__(self, config: ForwardConfig, dtype):
        self.config, self.dtype, self.softmax = config, dtype, Softmax(config, dtype)

    @cute.jit
    def run(self, products, memory, shared, rings, scales) -> None:
        """scales: the softmax scale, or the numbers of a softcap."""
        c = self.config
        cap = Cap(*scales) if c.softcap else Cap(None, scales[0] * math.log2(math.e))
        tidx = cute.arch.thread_idx()[0] % 128
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        scores, out = products.scores.get_slice(0), products.out.get_slice(0)
        t = SimpleNamespace(
            products=products, group=group, tidx=tidx, inner=cap.inner, scale_log2=cap.outer,
            tiles_of_q=shared.q, tSrQ=self._queries(scores, shared.q),
            tSrK=scores.make_fragment_B(scores.partition_B(shared.k)),
            tOrV=None if c.rest else out.make_fragment_B(out.partition_B(transposed(shared.v))),
            acc_S=cute.make_rmem_tensor(scores.partition_shape_C((ROWS, c.tile_n)), Float32),
            acc_O=cute.make_rmem_tensor(out.partition_shape_C((ROWS, c.head_dim_v)), Float32),
            intervals=memory.intervals if c.intervals else None,
            p=cute.make_rmem_tensor(scores.partition_shape_C((ROWS, c.tile_n)), self.dtype),
            next_p=cute.make_rmem_tensor(scores.partition_shape_C((ROWS, c.tile_n)), self.dtype),
            maximum=cute.make_rmem_tensor(2, Float32), total=cute.make_rmem_tensor(2, Float32),
            careful=cute.make_rmem_tensor(1, Int32), rows=cute.make_rmem_tensor(1, Int32),
            seen=cute.make_rmem_tensor(2, Int64),
            uncapped=cute.make_rmem_tensor(1, Int32) if c.softcap else None,
        )  # fmt: skip
        if const_expr(c.in_turns):
            if group == c.warpgroups - 1:
                cute.arch.barrier_arrive(barrier_id=TURN_BARRIER, number_of_threads=256)
        if const_expr(c.rest > 0):
            self._put_parts(t, shared)
        t.careful[0] = Int32(0)
        n_item, n_kv, started = Int32(0), Int32(0), Int32(0)
        rings.q.wait_full(n_item)
        words = shared.item[None, rings.q.stage(n_item)]
        while words[Info.valid] == 1:
            stage = rings.q.stage(n_item) * c.warpgroups + group
            if const_expr(c.trace):
                note(memory.trace, words[Info.index], BEGIN)
            info = self._item(words, group)
            before_m, before_l = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
            t.maximum.fill(-Float32.inf)
            t.total.fill(0.0)
            t.acc_O.fill(0.0)
            begin, kept = words[Info.kv_first], Int32(0)
            kv_last = words[Info.kv_last]
            while begin <= kv_last:
                end = segment_end(self.config, begin, kv_last)
                self._look(t, words, begin, end)
                n_end = self._behind_all(t, n_kv, begin, end)
                own_begin, own_end = cutlass.max(begin, info.first), cutlass.min(end, info.last)
                if self._any(t, begin, own_begin, own_end):
                    if started == 0:
                        self._skip(t, rings, n_kv, self._behind(t, 0, own_end, end))
                        self._start_first(t, rings, stage, self._behind(t, n_kv, own_end, end))
                    first = self._behind(t, n_kv, own_end, end)
                    n = self.segment(t, rings, words, info, stage, first, own_begin, own_end)
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
                        self._fold(t, words, memory.state, before_m, before_l)
                        if const_expr(c.intervals):
                            kept = Int32(0)
                    if end < info.last:
                        # What the segments so far have left makes room for a fresh one.
                        self._keep(t, memory.state)
                        for half in cutlass.range_constexpr(2):
                            before_m[half], before_l[half] = t.maximum[half], t.total[half]
                        t.acc_O.fill(0.0)
                        kept = Int32(1)
                else:
                    self._skip(t, rings, n_kv, self._behind_all(t, 0, begin, end))
                n_kv = n_end
                begin = end + 1
            if const_expr(c.intervals):
                if kept == 1:  # no row sees a tile of the segments behind
                    t.maximum.fill(-Float32.inf)
                    t.total.fill(0.0)
                    self._fold(t, words, memory.state, before_m, before_l)
            if words[Info.partial] >= 0:
                if words[Info.row] + ROWS * group < words[Info.seqlen_q]:
                    self._leave(t, memory.partial, words)
            else:
                self._finish(t, memory, shared, words, stage)
            if const_expr(c.trace):
                note(memory.trace, words[Info.index], END)
            self._let_go(rings, group, n_item)
            n_item += 1
            rings.q.wait_full(n_item)
            words = shared.item[None, rings.q.stage(n_item)]

    def _queries(self, scores, tiles):
        """The places of Q as operands, or registers for one."""
        c = self.config
        if c.q_registers:
            return operand_registers(c.head_dim, self.dtype)
        return scores.make_fragment_A(scores.partition_A(tiles))

    def _let_go(self, rings, group, n_item: Int32) -> None:
        """This warpgroup is done with an item, and its place of Q may be stored."""
        done = done_barrier(self.config, group, rings.q.stage(n_item))
        cute.arch.barrier_arrive(barrier_id=done, number_of_threads=160)

    @cute.jit
    def _look(self, t, words, begin: Int32, end: Int32):
        """Keep which kv tiles of a segment have been loaded, where keys have intervals of rows."""
        if const_expr(self.config.intervals):
            top = words[Info.row]
            rows = (top, cutlass.min(top + self.config.tile_m, words[Info.seqlen_q]) - 1)
            tiles = (self._segment_begin(begin), begin, end)
            t.seen[0] = seen_tiles(t.intervals.bounds, words[Info.first_bounds], tiles, rows)

    def _behind_all(self, t, n, begin: Int32, end: Int32):
        """`n` and how many kv tiles of a segment, `begin` to `end`, are loaded."""
        return n + ptx.count_of_64(t.seen[0]) if self.config.intervals else n + end - begin + 1

    def _behind(self, t, n, last: Int32, end: Int32):
        """`n` and how many of them are loaded before tile `last`."""
        if self.config.intervals:
            return n + ptx.count_of_64(tiles_between(t.seen[0], self._segment_begin(end), last + 1, end))
        return n + end - last

    def _any(self, t, begin: Int32, first: Int32, last: Int32):
        """Whether one from `first` to `last` is; then `_next_tile` goes through them."""
        if self.config.intervals:
            t.seen[1] = tiles_between(t.seen[0], self._segment_begin(begin), first, last)
            return t.seen[1] != 0
        return first <= last

    def _first_tile(self, t, begin: Int32, end: Int32) -> Int32:
        """The first kv tile of a segment that a warpgroup sees, `end` if all are loaded."""
        return self._segment_begin(begin) + ptx.highest_bit_of_64(t.seen[1]) if self.config.intervals else end

    def _others(self, t, begin: Int32, end: Int32) -> Int32:
        """How many there are behind it."""
        return ptx.count_of_64(t.seen[1]) - 1 if self.config.intervals else end - begin

    def _next_tile(self, t, begin: Int32, following: Int32) -> Int32:
        """The next one, `following` if all are loaded."""
        if not self.config.intervals:
            return following
        t.seen[1] = t.seen[1] & ~(Int64(1) << Int64(ptx.highest_bit_of_64(t.seen[1])))
        return self._first_tile(t, begin, following)

    def _segment_begin(self, kv_tile: Int32) -> Int32:
        per_segment = self.config.segment // self.config.tile_n
        return kv_tile // per_segment * per_segment

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
            end = segment_end(self.config, kv_first, words[Info.kv_last])
            if (kv_first <= end) & (info.first <= end) & (info.last >= end):
                started = Int32(1)
        if started == 1:
            self._start_first(t, rings, stage * self.config.warpgroups + t.group, n)
        else:
            warpgroup.commit_group()
        return started

    @cute.jit
    def _start_first(self, t, rings, stage, n: Int32) -> None:
        if const_expr(self.config.q_registers):
            read_operand(t.products.scores, t.tidx, t.tiles_of_q[None, None, stage], t.tSrQ)
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
        self.softmax.cap(t)
        first = self._first_tile(t, begin, end)
        self.softmax.mask(t, words, info, first)
        self.softmax.first_tile(t, (words, first))
        # Asked long before the answer is used, so that it is there at once.
        k_is_full, v_is_full = Int32(0), Int32(0)
        for i in cutlass.range(self._others(t, begin, end), unroll=1):
            kv_tile = self._next_tile(t, begin, end - 1 - i)
            cut = (kv_tile > info.last_whole) | (kv_tile < info.first_whole)
            if const_expr(self.config.intervals):
                cut = cut | self.softmax.is_cut_by_intervals(t, words, kv_tile)
            if const_expr(self.config.overlap == "nothing"):
                rings.v.wait_full(n)
                self._turn(t)
                self._start_out(t, rings, n)
                warpgroup.wait_group(0)
                arrive(rings.v.empty_of(n))
                rings.k.wait_full(n + 1)
                self._start_scores(t, rings, stage, n + 1)
                self._next_turn(t)
                warpgroup.wait_group(0)
                arrive(rings.k.empty_of(n + 1))
            else:
                rings.k.wait_full_unless(k_is_full, n + 1)
                self._turn(t)
                self._start_scores(t, rings, stage, n + 1)
                rings.v.wait_full_unless(v_is_full, n)
                self._start_out(t, rings, n)
                self._next_turn(t)
                warpgroup.wait_group(1)
                arrive(rings.k.empty_of(n + 1))
            if const_expr(self.config.overlap == "products"):
                warpgroup.wait_group(0)
                arrive(rings.v.empty_of(n))
            n += 1
            k_is_full, v_is_full = rings.k.is_full(n + 1), rings.v.is_full(n)
            self.softmax.begin_cap(t, cut)
            if cut:
                self.softmax.mask(t, words, info, kv_tile)
            self.softmax.next_tile(t, (words, kv_tile), rings.v.empty_of(n - 1))
        rings.v.wait_full(n)
        self._start_out(t, rings, n)
        return n + 1

    def _turn(self, t) -> None:
        if const_expr(self.config.in_turns):
            cute.arch.barrier(barrier_id=TURN_BARRIER + t.group, number_of_threads=256)

    def _next_turn(self, t) -> None:
        if const_expr(self.config.in_turns):
            after = (t.group + 1) % self.config.warpgroups
            cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + after, number_of_threads=256)

    def _start_scores(self, t, rings, stage, n) -> None:
        of_stage = None, None, None, rings.k.stage(n)
        keys = t.tSrK[of_stage]
        queries = t.tSrQ if self.config.q_registers else t.tSrQ[None, None, None, stage]
        if self.config.rest:
            pairs = zip(blocks_of(queries), [*blocks_of(keys), *blocks_of(t.rest_K[of_stage])])
            multiply_all([(t.products.scores, t.acc_S, pairs, False)])
        else:
            multiply(t.products.scores, t.acc_S, queries, keys, False)

    def _start_out(self, t, rings, n) -> None:
        of_stage = None, None, None, rings.v.stage(n)
        if self.config.rest:
            p = blocks_of(as_operand_a(t.p, self.dtype))
            multiply_all([(x, acc, zip(p, blocks_of(v[of_stage])), True) for x, acc, v in t.parts_of_O])
        else:
            values = t.tOrV[of_stage]
            multiply(t.products.out, t.acc_O, as_operand_a(t.p, self.dtype), values, True)

    def _put_parts(self, t, shared) -> None:
        """rest_K: the rest of K as an operand; parts_of_O: (product, accumulator, V as an operand), without
        the rest and of the rest. Accumulators of fewer columns are parts of one of all."""
        first, values = 0, (shared.v, shared.v_rest)
        scores = t.products.scores.get_slice(0)
        t.rest_K = scores.make_fragment_B(scores.partition_B(shared.k_rest))
        t.parts_of_O = []
        for product, tiles in zip((t.products.first, t.products.rest), values):
            own = product.get_slice(0)
            layout = cute.make_layout(own.partition_shape_C((ROWS, cute.size(tiles, mode=[1]))))
            acc = cute.make_tensor(t.acc_O.iterator + first, layout)
            t.parts_of_O.append((product, acc, own.make_fragment_B(own.partition_B(transposed(tiles)))))
            first += cute.size(acc)

    # Between segments

    def _place(self, t, state):
        """This thread's values of its warpgroup's rows in the block's part of the workspace."""
        c = self.config
        vectors = ROWS * c.head_dim_v // 512
        start = Int64(cute.arch.block_idx()[0]) * c.state_words + t.group * (ROWS * c.head_dim_v) + t.tidx * 4
        layout = cute.make_layout((4, vectors), stride=(1, 512))
        return cute.make_tensor(state.iterator + cute.assume(start, divby=4), layout)

    @cute.jit
    def _keep(self, t, state) -> None:
        vectors = cute.make_tensor(t.acc_O.iterator, cute.make_layout((4, cute.size(t.acc_O) // 4)))
        cute.autovec_copy(vectors, self._place(t, state))

    @cute.jit
    def _leave(self, t, partial, words) -> None:
        """Leave what a segment made of this warpgroup's rows, for `Fold`."""
        c = self.config
        start = (Int64(words[Info.partial]) * c.warpgroups + t.group) * c.partial_words + t.tidx * 4
        layout = cute.make_layout((4, ROWS * c.head_dim_v // 512 + 1), stride=(1, 512))
        target = cute.make_tensor(partial.iterator + cute.assume(start, divby=4), layout)
        for v in cutlass.range_constexpr(cute.size(t.acc_O) // 4):
            cute.autovec_copy(cute.make_tensor(t.acc_O.iterator + 4 * v, 4), target[None, v])
        numbers = cute.make_rmem_tensor(4, Float32)
        for half in cutlass.range_constexpr(2):
            numbers[half], numbers[2 + half] = t.maximum[half], t.total[half]
        cute.autovec_copy(numbers, target[None, cute.size(t.acc_O) // 4])

    @cute.jit
    def _fold(self, t, words, state, before_m, before_l) -> None:
        left, right = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        for half in cutlass.range_constexpr(2):
            t.maximum[half], left[half], right[half] = weights(before_m[half], t.maximum[half])
            t.total[half] = folded(before_l[half], left[half], t.total[half], right[half])
        place, vectors = self._place(t, state), cute.size(t.acc_O) // 4
        if const_expr(self.config.head_dim_v <= 128):
            self._fold_vectors(t, place, left, right, 0, vectors)
        else:
            for v in cutlass.range_constexpr(0, vectors, 8):
                # Registers do not hold all that is loaded, and ptxas moves no load across this branch.
                cute.arch.barrier(barrier_id=WARPGROUP_BARRIER + t.group, number_of_threads=128)
                if words[Info.valid] == 1:
                    self._fold_vectors(t, place, left, right, v, v + 8)

    @cute.jit
    def _fold_vectors(
        self, t, place, left, right, begin: cutlass.Constexpr[int], end: cutlass.Constexpr[int]
    ):
        """Fold some of this thread's values of O, four at a time, with those at `place`."""
        for v in cutlass.range_constexpr(begin, end):
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
            maximum, total = t.maximum[half], row_sum(t.total[half])
            factors[half] = Float32(1.0)
            if const_expr(self.config.sink):
                score = cute.recast_tensor(info, Float32)[Info.sink]
                maximum, total, factors[half] = with_sink(maximum, total, score)
            row = info[Info.row] + ROWS * t.group + warp_of_group * 16 + lane // 4 + 8 * half
            empty, lse = total == Float32(0.0), lse_of(maximum, total)
            if (lane % 4 == 0) & (row < info[Info.seqlen_q]):
                memory.lse[info[Info.batch], info[Info.q_head], info[Info.row_first] + row] = cutlass.select_(
                    empty, -Float32.inf, lse
                )
            factors[half] = factors[half] * inverse(total)
        converted = cute.make_rmem_tensor(t.acc_O.layout, self.dtype)
        for v in cutlass.range_constexpr(cute.size(t.acc_O) // 4):
            for e in cutlass.range_constexpr(4):
                t.acc_O[4 * v + e] = without_sign(t.acc_O[4 * v + e], factors[e // 2])
        converted.store(t.acc_O.load().to(self.dtype))
        # Every warp of the group has read its Q.
        cute.arch.barrier(barrier_id=WARPGROUP_BARRIER + t.group, number_of_threads=128)
        matrices = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        store = cute.make_tiled_copy_C(matrices, t.products.out).get_slice(t.tidx)
        tile = tile_of_out(self.config, shared.q, stage)
        cute.copy(store, store.retile(converted), store.partition_D(tile))
        cute.arch.fence_view_async_shared()
