"""What leaves the MMA warpgroups at the end of an item: dK and dV, rounded or as sums, or zeros."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp

from ..device import plan_view, ptx
from ..device.ring import arrive
from .config import MMA_WARPGROUPS, THREADS, V_BARRIER, BackwardConfig


class ItemEnd:
    """The end of an item, in a configuration. `t`: the tensors of `MmaRole`."""

    def __init__(self, config: BackwardConfig, dtype):
        self.config, self.dtype = config, dtype

    @cute.jit
    def put_dv(self, t, slot, rings):
        """V of an item is no longer needed: its buffer gets the finished dV, for the load warp to store.

        Not where dV is a sum of one of several head groups: that is stored elsewhere.
        A warpgroup overwrites the rows of V that it alone reads, when all its warps have done so.
        """
        if plan_view.mailbox_item(slot).record.group_sum < 0:
            cute.arch.barrier(barrier_id=V_BARRIER + t.group, number_of_threads=128)
            self._put(t.grads, t.acc_dV, None, t.sV[None, None, 0])
        arrive(rings.v.empty)

    @cute.jit
    def put_dk(self, t, following: Int32, slot, scale, rings):
        """Put dK into the buffer that the next item's first task will use, for the load warp to store."""
        c = self.config
        if plan_view.mailbox_item(slot).record.group_sum < 0:
            ring = rings.ds if c.wide else rings.dq
            ring.wait_empty(following)
            self._put(t.keys, t.acc_dK, scale, t.sdK[None, None, ring.stage(following) * c.dk_stages])
        arrive(rings.dk.full)

    @cute.jit
    def _put(self, product, acc, factor, shared):
        """Put this thread's values of dK or dV, times the factor if any, converted, into shared memory."""
        converted = cute.make_rmem_tensor(acc.layout, self.dtype)
        values = acc.load()
        if const_expr(factor is not None):
            values = values * factor
        converted.store(values.to(self.dtype))
        # Addresses are made of the thread index read here: the main loop has no registers for them.
        matrices = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        store = cute.make_tiled_copy_C(matrices, product).get_slice(self._mma_thread())
        cute.copy(store, store.retile(converted), store.partition_D(shared))
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()

    @cute.jit
    def store_zeros(self, target, item):
        """dK or dV of an item without tasks."""
        c = self.config
        threads, chunks = 128 * MMA_WARPGROUPS, c.head_dim // 8  # 16 bytes each
        for n in cutlass.range(c.tile_n * chunks // threads, unroll=1):
            index = n * threads + self._mma_thread()
            row = item.record.kv_tile * c.tile_n + index // chunks
            if (row < item.seqlen_k) & (8 * (index % chunks) < target.shape[3]):
                line = target[item.batch, item.k_row_first + row, item.record.kv_head, None]
                chunk = cute.local_tile(line, (8,), (index % chunks,))
                chunk.store(cute.zeros_like(chunk))

    @cute.jit
    def leave_sums(self, t, group_sums, slot: Int32):
        """Leave this thread's fp32 dK (unscaled) and dV where they are summed, in accumulator order like dQ.

        An item that owns one of several head groups stores them. With `key_sums` they are added to what the
        launches before have left: no other item of this launch has the same slot.
        """
        c = self.config
        size = c.tile_n * c.head_dim
        tidx = self._mma_thread()
        for which, acc in ((0, t.acc_dK), (1, t.acc_dV)):
            vectors = c.tile_n * (c.head_dim, c.head_dim_v)[which] // 1024
            layout = cute.make_layout((4, vectors), stride=(1, 512))
            place = tidx // 128 * (512 * vectors) + tidx % 128 * 4
            start = (Int64(slot) * 2 + which) * size + place
            target = cute.make_tensor(group_sums.iterator + cute.assume(start, divby=4), layout)
            if const_expr(c.key_sums):
                for v in cutlass.range_constexpr(vectors):
                    values = [acc[4 * v + e] for e in range(4)]
                    ptx.add_f32x4(target.iterator + 512 * v, values)
            else:
                cute.autovec_copy(cute.make_tensor(acc.iterator, cute.make_layout((4, vectors))), target)

    def _mma_thread(self):
        """This thread's index among those of the MMA warpgroups, read here: it takes no register before."""
        return ptx.thread_index() - 128 * (THREADS // 128 - MMA_WARPGROUPS)
