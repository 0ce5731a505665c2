"""The warps that let the copy engine store O, one per warpgroup that multiplies."""

import cutlass.cute as cute
from cutlass import Int32

from ..device.copies import partitions
from ..device.ring import arrive
from .config import ROWS, ForwardConfig
from .item import Info, done_barrier, tile_of_out


class StoreRole:
    def __init__(self, config: ForwardConfig):
        self.config = config

    @cute.jit
    def run(self, copies, shared, rings, group: Int32) -> None:
        """Let the copy engine store O of a warpgroup, and let its place go."""
        c, n_item = self.config, Int32(0)
        rings.q.wait_full(n_item)
        words = shared.item[None, rings.q.stage(n_item)]
        while words[Info.valid] == 1:
            stage = rings.q.stage(n_item)
            cute.arch.barrier(barrier_id=done_barrier(c, group, stage), number_of_threads=160)
            if words[Info.partial] < 0:
                place = (words[Info.tma_row], words[Info.tma_batch], words[Info.tma_shift])
                tile = tile_of_out(c, shared.q, stage * c.warpgroups + group)
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
