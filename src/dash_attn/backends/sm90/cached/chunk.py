"""The main kernel over a cache of keys where sequences have many rows.

It is the kernel of training (forward/kernel.py): rows of a q tile are those of one q head, and the copy
engine loads Q and stores O. But items come from a table that ``Deal`` wrote, and K and V in pages.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from ..device.copies import copy_of
from ..forward.arguments import Copies
from ..forward.block import launch_blocks, layouts_of, products_of
from ..forward.config import ROWS
from ..forward.item import segment_end
from ..forward.kernel import Forward
from ..forward.load import K, LoadRole, V
from .arguments import Memory
from .config import ChunkConfig
from .pages import Pages, copies_of_pages, numbers_of_pages, record_of


class ChunkLoad(LoadRole, Pages):
    """A look-up takes as many instructions as the loads of a tile. So there is one for as many tiles as lanes
    have pieces of."""

    config: Any

    def __init__(self, config: ChunkConfig):
        super().__init__(config)
        self.per_segment, self.piece = config.segment // config.tile_n, config.piece
        self.pieces = config.tile_n // config.piece

    @cute.jit
    def _numbers(self, memory, numbers):
        left, right, group, q_heads, batches, *of_pages, k_rows, v_rows = numbers
        paged = memory.pages, numbers_of_pages(*of_pages), k_rows, v_rows
        return memory.table[0], memory.table[2], left, right, group, batches, q_heads, paged

    def _keys_word(self, sequence: Int32, k_first: Int32, paged) -> Int32:
        return sequence

    def _keys(self, of_sequence, paged, kv_tiles):
        """The sequence, its keys, the kv tiles of the item, and what `_where` says of the first one."""
        (sequence, seqlen_k, _), (kv_first, kv_last) = of_sequence, kv_tiles
        own = sequence, seqlen_k, kv_first, kv_last
        return *own, *self._where(paged, own, segment_end(self.config, kv_first, kv_last))

    @cute.jit
    def _load_kv(self, copies, shared, rings, place, n_kv: Int32, seen, parts: cutlass.Constexpr[tuple]):
        """Load a kv tile of `parts`. Where the next one lies is found while its last stage is in use."""
        keys, kv_tile, kv_head, paged = place
        own, (first, row, k_shift, v_shift) = keys[:4], keys[4:]
        lane, found = (first - kv_tile) * self.pieces, (first, row, k_shift, v_shift)
        loads = {
            K: (rings.k, copies.k, shared.k, (row, k_shift, lane)),
            V: (rings.v, copies.v, shared.v, (row, v_shift, lane)),
        }
        for part in parts[:-1]:
            self._load(*loads[part], kv_head, n_kv)
        begin = cutlass.max(kv_tile // self.per_segment * self.per_segment, own[2])
        if (kv_tile == begin) | (lane == 32 - self.pieces):
            next_tile = kv_tile - 1
            if kv_tile == begin:
                end = (kv_tile // self.per_segment + 1) * self.per_segment
                next_tile = segment_end(self.config, end, own[3])
            found = self._where(paged, own, next_tile)
        self._load(*loads[parts[-1]], kv_head, n_kv)
        return n_kv + 1, (*own, *found)

    @cute.jit
    def _where(self, paged, of_item, kv_tile: Int32):
        """Where pieces of a kv tile lie, and in the next lanes those of tiles before it: (the tile, row,
        shift of K, shift of V), as in `place_of`."""
        c, lane = self.config, cute.arch.lane_idx()
        (pages, of_pages, k_rows, v_rows), (sequence, seqlen_k, _, _) = paged, of_item
        token = (kv_tile - lane // self.pieces) * c.tile_n + lane % self.pieces * self.piece
        row, page, used = self.piece_at(pages, of_pages, sequence, cutlass.max(token, 0), seqlen_k)
        return kv_tile, row, page * k_rows + used, page * v_rows + used

    def _read(self, table, numbers, index: Int32):
        entries, heads, _, _, _, _, q_heads, _ = numbers
        return record_of(table, (entries, heads, entries * q_heads), index)


class Chunk(Forward):
    def __init__(self, config: ChunkConfig):
        super().__init__(config)
        self.load_role = ChunkLoad(config)

    @cute.jit
    def __call__(self, tensors, memory: Memory, launch, cap, stream):
        """cap: the numbers of a softcap, where the variant has one."""
        c: Any = self.config
        layouts = layouts_of(c, self.dtype)
        k, v = copies_of_pages(c, self.dtype, tensors)
        fetch, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        copies = Copies(
            q=copy_of(fetch, tensors.q, layouts.q, ROWS), k=k, v=v,
            out=copy_of(store, tensors.out, layouts.out, ROWS),
        )  # fmt: skip
        q_heads, (pages, page_size, kv_heads, _) = tensors.q.shape[2], tensors.k.shape
        scales = cap if c.softcap else (launch.scale,)
        numbers = (
            *scales, launch.left, launch.right, q_heads // kv_heads, q_heads, tensors.q.shape[0],
            pages, page_size, launch.most_pages,
            *(Int32(x.stride[0] // x.stride[1]) for x in (tensors.k, tensors.v)),
        )  # fmt: skip
        launch_blocks(
            self.kernel(copies, layouts, products_of(c, self.dtype), memory, numbers), c, launch.grid, stream
        )
