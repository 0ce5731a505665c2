"""The load beside the chains of the hand-over litmus test: tensor cores, loads, stores and bulk copies."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.utils import hopper_helpers

from dash_attn.backends.sm90.device import ptx

FIRST_BUSY_WARP = 4
MMA_ROWS = MMA_COLUMNS = 128
MMA_DEPTH = 64
TRAFFIC_BYTES = 16_384
STOP_BARRIER = 1


@dsl_user_op
def load_relaxed(pointer: cute.Pointer, *, loc=None, ip=None) -> Int32:
    """ld.relaxed.gpu of one int32; the product has no use for it."""
    text = "ld.relaxed.gpu.global.b32 $0, [$1];"
    return Int32(ptx._asm(T.i32(), [ptx._address(pointer, loc, ip)], text, "=r,l,~{memory}", loc, ip))


def tiled_mma():
    """Products of two warpgroups: (MMA_ROWS, MMA_DEPTH) by (MMA_COLUMNS, MMA_DEPTH)."""
    major = cute.nvgpu.OperandMajorMode
    return hopper_helpers.make_trivial_tiled_mma(
        BFloat16,
        BFloat16,
        major.K,
        major.K,
        Float32,
        (2, 1, 1),
        (64, MMA_COLUMNS),
        warpgroup.OperandSource.SMEM,
    )


@cute.jit
def traffic_role(t, traffic_words: Int32):
    """One thread: bulk copies from one half of this block's traffic to the other."""
    if cute.arch.lane_idx() == 0:
        half = traffic_words // 2 // cute.arch.grid_dim()[0] // (TRAFFIC_BYTES // 4)  # chunks
        first = Int64(cute.arch.block_idx()[0]) * (half * 2)
        n, chunk = Int32(0), Int32(0)
        while load_relaxed(t.done) == 0:
            source = t.traffic + (first + chunk) * (TRAFFIC_BYTES // 4)
            cute.arch.mbarrier_arrive_and_expect_tx(t.traffic_full, TRAFFIC_BYTES)
            ptx.bulk_load(t.buffer, source, TRAFFIC_BYTES, t.traffic_full)
            cute.arch.mbarrier_wait(t.traffic_full, n & 1)
            ptx.bulk_store(t.buffer, source + half * (TRAFFIC_BYTES // 4), TRAFFIC_BYTES)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            n += 1
            chunk = chunk + 1 if chunk + 1 < half else Int32(0)
        cute.arch.cp_async_bulk_wait_group(0)


def multiply(mma, acc, a, b) -> None:
    """Issue and commit acc += a b, four times."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for k in 4 * [*range(cute.size(a.shape[2]))]:
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
    warpgroup.commit_group()


@cute.jit
def busy_role(t, traffic_words: Int32, mma, sA, sB):
    """Two warpgroups: products, and meanwhile loads and stores of this block's traffic."""
    tidx = cute.arch.thread_idx()[0] - 32 * FIRST_BUSY_WARP
    group = cute.arch.make_warp_uniform(tidx // 128)
    mine = mma.get_slice(group * 128)
    a, b = mine.make_fragment_A(mine.partition_A(sA)), mine.make_fragment_B(mine.partition_B(sB))
    acc = cute.make_rmem_tensor(mine.partition_shape_C((MMA_ROWS, MMA_COLUMNS)), Float32)
    acc.fill(0.0)
    vectors = traffic_words // cute.arch.grid_dim()[0] // 4
    buffer = cute.make_tensor(
        t.traffic + cute.assume(Int64(cute.arch.block_idx()[0]) * (vectors * 4), divby=4),
        cute.make_layout((4, vectors), stride=(1, 4)),
    )
    stop = cute.make_tensor(t.stop, cute.make_layout(4))
    place, running = Int32(tidx), Int32(1)
    while running == 1:
        multiply(mma, acc, a, b)
        values = cute.make_rmem_tensor((4, 4), Int32)
        for v in cutlass.range_constexpr(4):
            cute.autovec_copy(buffer[None, (place + 256 * v) % vectors], values[None, v])
        for v in cutlass.range_constexpr(4):
            cute.autovec_copy(values[None, v], buffer[None, (place + vectors // 2 + 256 * v) % vectors])
        place = (place + 1024) % vectors
        warpgroup.wait_group(0)
        if tidx % 128 == 0:
            stop[group] = load_relaxed(t.done)
        cute.arch.barrier(barrier_id=STOP_BARRIER + group, number_of_threads=128)
        running = Int32(1) if stop[group] == 0 else Int32(0)
        cute.arch.barrier(barrier_id=STOP_BARRIER + group, number_of_threads=128)
    # Products that nobody uses would be removed.
    buffer[0, tidx] = Int32(acc.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0))
