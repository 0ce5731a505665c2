"""The last kernel, where sequences may have several segments: folds them, adds the sink, divides, and writes
out and LSE."""

import cutlass.cute as cute
from cutlass import Int32

from ..cached.fold import CachedFold
from .item import begin, sequence_of


class SpreadFold(CachedFold):
    """One block per kv head and sequence."""

    @cute.jit
    def __call__(self, memory, numbers, launch, stream):
        self.kernel(memory, numbers).launch(
            grid=(numbers.kv_heads, launch.batch, 1), block=(128, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, memory, numbers) -> None:
        begin()
        head, sequence, _ = cute.arch.block_idx()
        tidx = cute.arch.thread_idx()[0]
        item = sequence_of(self.config, memory, numbers, sequence, head)
        if tidx // 32 * 16 < item.rows:
            parts = (
                sequence * numbers.segments + item.segment_first,
                item.segment_last - item.segment_first + 1,
            )
            place = (sequence, Int32(0), item.rows, Int32(0), head)
            tensors = (memory.out, memory.lse, memory.sink)
            self.fold(tensors, memory.partial, parts, Int32(0), tidx, place)
