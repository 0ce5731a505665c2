"""The kernel after the main one: folds what was left of single segments, as many as there are."""

import cutlass.cute as cute
from cutlass import Int32

from ..forward.config import ROWS, WARP_ROWS
from ..forward.fold import Fold
from .arguments import HEADER_WORDS, RECORD_WORDS
from .config import CachedConfig


class CachedFold(Fold):
    """One block per split tile that there may be and kv head."""

    def __init__(self, config: CachedConfig):
        super().__init__(config)

    @cute.jit
    def __call__(self, memory, launch, stream):
        heads = cute.size(memory.out, mode=[2])
        self.kernel(memory, launch.tiles + launch.places).launch(
            grid=(launch.folds, heads, 1),
            block=(128 * self.config.warpgroups, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, memory, before: Int32) -> None:
        c = self.config
        cute.arch.griddepcontrol_wait()
        index, kv_head, _ = cute.arch.block_idx()
        tidx, group = cute.arch.thread_idx()[0] % 128, cute.arch.thread_idx()[0] // 128
        if index < memory.table[1]:
            record = HEADER_WORDS + (before + index) * RECORD_WORDS
            sequence, q_tile, first, segments, rows, _, first_token, _ = (
                memory.table[record + i] for i in range(RECORD_WORDS)
            )
            batch = Int32(0) if cute.size(memory.q, mode=[0]) == 1 else sequence
            if q_tile * c.tile_m + ROWS * group + WARP_ROWS * (tidx // 32) < rows:
                of_q = cute.size(memory.sink, mode=[1])
                place = (batch, first_token * of_q, rows, q_tile, kv_head)
                tensors = (memory.out, memory.lse, memory.sink)
                self.fold(tensors, memory.partial, (first, segments), group, tidx, place)

    def _sink_of(self, sink, q_head: Int32, top: Int32, tidx: Int32, half):
        row = top + tidx // 32 * 16 + tidx % 32 // 4 + 8 * half
        return sink[q_head, row % cute.size(sink, mode=[1])]
