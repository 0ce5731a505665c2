"""Device code of the hand-over litmus test: bulk reductions handed from block to block, and checked.

A block has those roles of the backward kernel that hand over, and no others: the ticket warp polls counters,
the reduce warp stores (first contribution of a period) or adds by one bulk operation and waits for it, the
release warp counts it. A further warp, the reader, looks at the tile between the grant of a ticket and the
contribution that it allows. The other warps keep the queues full until the block's chains are done
(``litmus_load.py``).

Contribution t of tile `i + k * grid` belongs to block (i + t * shift) mod grid: every hand-over crosses from
one SM to another, and which pairs of SMs meet changes with `shift`.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.memory import SmemAllocator

from dash_attn.backends.sm90.device import ptx
from dash_attn.backends.sm90.device.ring import Ring
from litmus_load import (
    FIRST_BUSY_WARP,
    MMA_COLUMNS,
    MMA_DEPTH,
    MMA_ROWS,
    TRAFFIC_BYTES,
    busy_role,
    load_relaxed,
    tiled_mma,
    traffic_role,
)

TRAFFIC_WARP, REDUCE_WARP, RELEASE_WARP, TICKET_WARP, READER_WARP = 0, 1, 2, 3, 12
THREADS = 32 * (READER_WARP + 1)
SLOTS = 8
SPIN_LIMIT = 1 << 21
MAX_PERIOD = 8
# Words of the outcome; from BAD_READS on one per contribution of a period, the last one before the read.
TIMEOUTS, FIRST_BLOCK, FIRST_TILE, FIRST_TICKET, FIRST_WORDS, LOCK, BAD_READS = 0, 1, 2, 3, 4, 5, 8
OUTCOME_WORDS = BAD_READS + MAX_PERIOD


@dsl_user_op
def add_relaxed(pointer: cute.Pointer, *, loc=None, ip=None) -> None:
    """red.relaxed.gpu: add 1; the product has no use for it."""
    text = "red.relaxed.gpu.global.add.s32 [$0], 1;"
    ptx._asm(None, [ptx._address(pointer, loc, ip)], text, "l,~{memory}", loc, ip)


@dsl_user_op
def store_relaxed(pointer: cute.Pointer, value: Int32, *, loc=None, ip=None) -> None:
    """st.relaxed.gpu of one int32; the product has no use for it."""
    operands = [ptx._address(pointer, loc, ip), Int32(value).ir_value(loc=loc, ip=ip)]
    ptx._asm(None, operands, "st.relaxed.gpu.global.b32 [$0], $1;", "l,r,~{memory}", loc, ip)


class Wait(enum.Enum):
    """What the reduce thread waits for before the flag is raised."""

    PERFORMED = "cp.async.bulk.wait_group"
    SOURCE_READ = "cp.async.bulk.wait_group.read"  # wrong: the global writes may still be under way
    NOTHING = "nothing"  # wrong


class Reader(enum.Enum):
    """How the reader looks at a tile."""

    LOAD = "ld.global"
    BULK = "cp.async.bulk"  # behind a fence.proxy.async


@dataclass(frozen=True)
class Form:
    """A hand-over: what is waited for, who raises the flag and how, and how it is polled.

    Without ``release``, what raises the flag is relaxed.
    """

    wait: Wait = Wait.PERFORMED
    release: bool = True
    by_release_warp: bool = True
    acquire: bool = True  # ld.acquire.gpu, otherwise ld.relaxed.gpu
    queued: bool = False  # a relaxed atomic takes a place and the flag is stored, not added to


@dataclass(frozen=True)
class LitmusConfig:
    """One compiled variant.

    Attributes:
        size: bytes per tile, a multiple of 512.
        period: contributions until a tile is stored anew.
        every_round: the tile is read after every hand-over, otherwise only after the last one of a period,
            whose bits show the order of the additions.
        busy: tensor cores and copies work beside the chains.
    """

    form: Form
    size: int = 512
    period: int = 8
    every_round: bool = True
    reader: Reader = Reader.LOAD
    busy: bool = True

    def __post_init__(self) -> None:
        if self.size % 512 or self.size <= 0:
            raise ValueError(f"size must be a positive multiple of 512, got {self.size}")
        if not 2 <= self.period <= MAX_PERIOD:
            raise ValueError(f"period must be 2 to {MAX_PERIOD}, got {self.period}")

    @property
    def words(self) -> int:
        """fp32 values per tile."""
        return self.size // 4


class Memory(NamedTuple):
    """What a launch is given: one-dimensional int32 tensors, 128-byte aligned.

    Attributes:
        data: tiles * words, bits of fp32.
        counters: the flag of each tile, then how many places each has given away; 0.
        sources, expected: period * words: what is added, and the tile after each of these additions.
        done: one per block, 0.
        outcome: OUTCOME_WORDS, 0.
        traffic: what the busy warps copy, the same even number of 16 KB chunks per block.
    """

    data: cute.Tensor
    counters: cute.Tensor
    sources: cute.Tensor
    expected: cute.Tensor
    done: cute.Tensor
    outcome: cute.Tensor
    traffic: cute.Tensor


class Rounds(NamedTuple):
    """`chains` tiles per block, each with `tickets` contributions; 0 < `shift` < blocks."""

    tickets: Int32
    chains: Int32
    shift: Int32


@dataclass(frozen=True)
class Block:
    """Pointers of a block into global and shared memory, and its rings of contributions.

    Attributes:
        granted: from the ticket warp to the reduce warp and the reader.
        checked: from the reader to the reduce warp.
        performed: from the reduce warp to the release warp.
    """

    data: cute.Pointer
    counters: cute.Pointer
    expected: cute.Pointer
    outcome: cute.Pointer
    traffic: cute.Pointer
    done: cute.Pointer
    granted: Ring
    checked: Ring
    performed: Ring
    read_full: cute.Pointer
    traffic_full: cute.Pointer
    stop: cute.Pointer
    source: cute.Pointer
    read: cute.Pointer
    buffer: cute.Pointer


class Litmus:
    """One launch of a variant."""

    def __init__(self, config: LitmusConfig):
        self.config = config

    def _storage(self):
        c = self.config
        buffered = c.reader is Reader.BULK

        @cute.struct
        class Storage:
            granted: cute.struct.MemRange[Int64, SLOTS]
            checked: cute.struct.MemRange[Int64, SLOTS]
            performed: cute.struct.MemRange[Int64, SLOTS]
            slot_empty: cute.struct.MemRange[Int64, SLOTS]
            read_full: cute.struct.MemRange[Int64, 1]
            traffic_full: cute.struct.MemRange[Int64, 1]
            stop: cute.struct.MemRange[Int32, 4]
            source: cute.struct.Align[cute.struct.MemRange[Int32, c.period * c.words], 1024]
            read: cute.struct.Align[cute.struct.MemRange[Int32, c.words if buffered else 4], 128]
            buffer: cute.struct.Align[cute.struct.MemRange[Int32, TRAFFIC_BYTES // 4], 128]
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, MMA_ROWS * MMA_DEPTH], 1024]
            b: cute.struct.Align[cute.struct.MemRange[BFloat16, MMA_COLUMNS * MMA_DEPTH], 1024]

        return Storage

    @cute.jit
    def __call__(self, *arguments):
        """Called with ``(*Memory, *Rounds, blocks)``; traced with a stream behind."""
        *flat, grid, stream = arguments
        memory, rounds = Memory(*flat[: len(Memory._fields)]), Rounds(*flat[len(Memory._fields) :])
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        layout = cute.tile_to_shape(atom, (MMA_ROWS, MMA_DEPTH), order=(0, 1))
        words = Int32(memory.traffic.shape[0])
        self.kernel(memory, words, rounds, layout, tiled_mma()).launch(
            grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        memory: Memory,
        traffic_words: Int32,
        rounds: Rounds,
        operand: cute.ComposedLayout,
        mma: cute.TiledMma,
    ) -> None:
        c, sources = self.config, memory.sources
        tidx = cute.arch.thread_idx()[0]
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self._storage())
        t = self._block(storage, memory)
        if tidx == 0:
            for slot in range(SLOTS):
                cute.arch.mbarrier_init(t.granted.full + slot, 1)
                cute.arch.mbarrier_init(t.checked.full + slot, 1)
                cute.arch.mbarrier_init(t.performed.full + slot, 1)
                cute.arch.mbarrier_init(t.granted.empty + slot, 2)
            cute.arch.mbarrier_init(t.read_full, 1)
            cute.arch.mbarrier_init(t.traffic_full, 1)
            cute.arch.mbarrier_init_fence()
        words = cute.make_tensor(t.source, cute.make_layout(c.period * c.words))
        for i in range(tidx, c.period * c.words, THREADS):
            words[i] = sources[i]
        sA = storage.a.get_tensor(operand.outer, swizzle=operand.inner)
        sB = storage.b.get_tensor(operand.outer, swizzle=operand.inner)
        for i in range(tidx, MMA_ROWS * MMA_DEPTH, THREADS):
            row, column = i // MMA_DEPTH, i % MMA_DEPTH
            sA[row, column] = BFloat16(Float32(i * 37 % 64 - 32))
            sB[row, column] = BFloat16(Float32(i * 53 % 64 - 32))
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        if warp_idx == TICKET_WARP:
            self.ticket_role(t, rounds)
        if warp_idx == REDUCE_WARP:
            self.reduce_role(t, rounds)
        if const_expr(c.form.by_release_warp):
            if warp_idx == RELEASE_WARP:
                self.release_role(t, rounds)
        if warp_idx == READER_WARP:
            self.reader_role(t, rounds)
        if const_expr(c.busy):
            if warp_idx == TRAFFIC_WARP:
                traffic_role(t, traffic_words)
            if (warp_idx >= FIRST_BUSY_WARP) & (warp_idx < READER_WARP):
                busy_role(t, traffic_words, mma, sA, sB)

    def _block(self, storage, memory: Memory) -> Block:
        names = ("granted", "checked", "performed", "slot_empty", "read_full", "traffic_full")
        names += ("stop", "source", "read", "buffer")
        here = {name: getattr(storage, name).data_ptr() for name in names}
        slot_empty = here.pop("slot_empty")
        rings = {
            name: Ring(here.pop(name), slot_empty, SLOTS) for name in ("granted", "checked", "performed")
        }
        return Block(
            data=memory.data.iterator,
            counters=memory.counters.iterator,
            expected=memory.expected.iterator,
            outcome=memory.outcome.iterator,
            traffic=memory.traffic.iterator,
            done=memory.done.iterator + cute.arch.block_idx()[0],
            **here,
            **rings,
        )

    @cute.jit
    def next_place(self, place: Int32, shift: Int32) -> Int32:
        """First tile of this block at the next ticket."""
        grid = cute.arch.grid_dim()[0]
        return place - shift + (grid if place < shift else Int32(0))

    def tile(self, t, index: Int32):
        """First word of a tile."""
        return t.data + cute.assume(Int64(index) * self.config.words, divby=128)

    @cute.jit
    def ticket_role(self, t, rounds):
        """One thread: waits for every ticket; once the bound is exceeded it counts, and waits no more."""
        if cute.arch.lane_idx() == 0:
            place, n, limit = cute.arch.block_idx()[0], Int32(0), Int32(SPIN_LIMIT)
            for ticket in cutlass.range(rounds.tickets, unroll=1):
                for k in cutlass.range(rounds.chains, unroll=1):
                    counter = t.counters + (place + k * cute.arch.grid_dim()[0])
                    t.granted.wait_empty(n)
                    if ticket > 0:
                        seen, spins = self.poll(counter), Int32(0)
                        while (seen != ticket) & (spins < limit):
                            seen = self.poll(counter)
                            spins += 1
                        if seen != ticket:
                            limit = Int32(0)
                            add_relaxed(t.outcome + TIMEOUTS)
                    cute.arch.mbarrier_arrive(t.granted.full_of(n))
                    n += 1
                place = self.next_place(place, rounds.shift)

    @cute.jit
    def poll(self, counter) -> Int32:
        if const_expr(self.config.form.acquire):
            return ptx.load_acquire(counter)
        else:
            return load_relaxed(counter)

    @cute.jit
    def raise_flag(self, counter, chains: Int32) -> None:
        form = self.config.form
        if const_expr(form.queued):
            following = ptx.add(counter + chains * cute.arch.grid_dim()[0]) + 1
            if const_expr(form.release):
                ptx.store_release(counter, following)
            else:
                store_relaxed(counter, following)
        elif const_expr(form.release):
            ptx.add_release(counter)
        else:
            add_relaxed(counter)

    @cute.jit
    def reduce_role(self, t, rounds):
        """One thread: performs the granted contributions, the first of a period as a store."""
        c = self.config
        if cute.arch.lane_idx() == 0:
            place, n, part = cute.arch.block_idx()[0], Int32(0), Int32(0)
            for _ in cutlass.range(rounds.tickets, unroll=1):
                for k in cutlass.range(rounds.chains, unroll=1):
                    tile = place + k * cute.arch.grid_dim()[0]
                    t.granted.wait_full(n)
                    t.checked.wait_full(n)
                    source = t.source + part * c.words
                    target = self.tile(t, tile)
                    ptx.fence_proxy_async()
                    if part == 0:
                        ptx.bulk_store(source, target, c.size)
                    else:
                        ptx.bulk_add_f32(source, target, c.size)
                    cute.arch.cp_async_bulk_commit_group()
                    if const_expr(c.form.wait is not Wait.NOTHING):
                        cute.arch.cp_async_bulk_wait_group(0, read=c.form.wait is Wait.SOURCE_READ)
                    if const_expr(c.form.by_release_warp):
                        cute.arch.mbarrier_arrive(t.performed.full_of(n))
                    else:
                        self.raise_flag(t.counters + tile, rounds.chains)
                        cute.arch.mbarrier_arrive(t.granted.empty_of(n))
                    n += 1
                part = part + 1 if part + 1 < c.period else Int32(0)
                place = self.next_place(place, rounds.shift)
            cute.arch.cp_async_bulk_wait_group(0)
            add_relaxed(t.done)

    @cute.jit
    def release_role(self, t, rounds):
        """One thread: raises the flag of each contribution that the reduce thread has passed on."""
        if cute.arch.lane_idx() == 0:
            place, n = cute.arch.block_idx()[0], Int32(0)
            for _ in cutlass.range(rounds.tickets, unroll=1):
                for k in cutlass.range(rounds.chains, unroll=1):
                    t.performed.wait_full(n)
                    self.raise_flag(t.counters + (place + k * cute.arch.grid_dim()[0]), rounds.chains)
                    cute.arch.mbarrier_arrive(t.granted.empty_of(n))
                    n += 1
                place = self.next_place(place, rounds.shift)

    @cute.jit
    def reader_role(self, t, rounds):
        """One warp: compares granted tiles with what the contributions before the ticket add up to."""
        c = self.config
        place, n, n_read, part = cute.arch.block_idx()[0], Int32(0), Int32(0), Int32(0)
        for ticket in cutlass.range(rounds.tickets, unroll=1):
            for k in cutlass.range(rounds.chains, unroll=1):
                tile = place + k * cute.arch.grid_dim()[0]
                t.granted.wait_full(n)
                due = ticket > 0
                if const_expr(not c.every_round):
                    due = due & (part == 0)
                if due:
                    row = part - 1 if part > 0 else Int32(c.period - 1)
                    if const_expr(c.reader is Reader.BULK):
                        with cute.arch.elect_one():
                            ptx.fence_proxy_async()
                            cute.arch.mbarrier_arrive_and_expect_tx(t.read_full, c.size)
                            ptx.bulk_load(t.read, self.tile(t, tile), c.size, t.read_full)
                        cute.arch.mbarrier_wait(t.read_full, n_read & 1)
                        self.compare(t, t.read, row, tile, ticket)
                    else:
                        self.compare(t, self.tile(t, tile), row, tile, ticket)
                    n_read += 1
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(t.checked.full_of(n))
                    cute.arch.mbarrier_arrive(t.granted.empty_of(n))
                n += 1
            part = part + 1 if part + 1 < c.period else Int32(0)
            place = self.next_place(place, rounds.shift)

    @cute.jit
    def compare(self, t, found, row: Int32, tile: Int32, ticket: Int32) -> None:
        """Count a read that differs in any word, and keep the first."""
        c = self.config
        lane = cute.arch.lane_idx()
        layout = cute.make_layout((4, 32, c.words // 128), stride=(1, 4, 128))
        expected = t.expected + cute.assume(row * c.words, divby=128)
        left, right = cute.make_tensor(found, layout), cute.make_tensor(expected, layout)
        wrong = Int32(0)
        for v in cutlass.range(c.words // 128, unroll=4):
            ours, theirs = cute.make_rmem_tensor(4, Int32), cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(left[None, lane, v], ours)
            cute.autovec_copy(right[None, lane, v], theirs)
            for e in cutlass.range_constexpr(4):
                wrong += Int32(1) if ours[e] != theirs[e] else Int32(0)
        wrong = cute.arch.warp_reduction(wrong, lambda x, y: x + y)
        if (lane == 0) & (wrong > 0):
            add_relaxed(t.outcome + (BAD_READS + row))
            if ptx.compare_and_swap(t.outcome + LOCK, Int32(0), Int32(1)) == 0:
                first = (
                    (FIRST_BLOCK, cute.arch.block_idx()[0]),
                    (FIRST_TILE, tile),
                    (FIRST_TICKET, ticket),
                    (FIRST_WORDS, wrong),
                )
                line = cute.make_tensor(t.outcome, cute.make_layout(OUTCOME_WORDS))
                for word, value in first:
                    line[word] = value


def fake_arguments():
    """Tensors without data, in the order of `Litmus.__call__`."""
    vectors = [make_fake_tensor(Int32, (cute.sym_int64(),), (1,), assumed_align=128) for _ in Memory._fields]
    rounds = Rounds(tickets=Int32(1), chains=Int32(1), shift=Int32(1))
    return [*vectors, *rounds, Int32(2), make_fake_stream(use_tvm_ffi_env_stream=True)]


def compile_litmus(config: LitmusConfig, options: str = ""):
    """Compile a variant for sm_90a, GPU or not."""
    return cute.compile(
        Litmus(config), *fake_arguments(), options=f"--enable-tvm-ffi --gpu-arch sm_90a {options}"
    )
