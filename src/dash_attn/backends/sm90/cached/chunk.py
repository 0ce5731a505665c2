"""The main kernel over a cache of keys where sequences have many rows.

It is the kernel of training (forward/kernel.py): rows of a q tile are those of one q head, the copy engine
loads Q and stores O. But items come from a table that ``Deal`` wrote, and K and V in pages.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from ..device.copies import copy_of
from ..forward.arguments import Copies
from ..forward.block import layouts_of, products_of
from ..forward.config import ROWS
from ..forward.kernel import Forward
from ..forward.load import LoadRole
from .arguments import HEADER_WORDS, RECORD_WORDS, Memory
from .config import ChunkConfig
from .pages import Pages, copies_of_pages


class ChunkLoad(LoadRole, Pages):
    @cute.jit
    def run(self, copies, memory, shared, rings, numbers) -> None:
        left, right, group, q_heads, batches, *of_pages = numbers
        entries, heads = memory.table[0], memory.table[2]
        paged = memory.pages, of_pages
        LoadRole.run(
            self, copies, memory, shared, rings,
            (entries, heads, left, right, group, batches, q_heads, paged),
        )  # fmt: skip

    def _keys(self, sequence: Int32, seqlen_k: Int32, k_first: Int32, paged):
        return paged, sequence, seqlen_k

    def _load_tiles(self, copies, shared, rings, place, n_kv: Int32) -> None:
        ((pages, of_pages), sequence, seqlen_k), kv_tile, kv_head = place
        where = self.where_is(pages, of_pages, sequence, kv_tile, seqlen_k)
        for ring, copy, tiles, rows in (
            (rings.k, copies.k, shared.k, of_pages[3]), (rings.v, copies.v, shared.v, of_pages[4]),
        ):  # fmt: skip
            ring.wait_empty(n_kv)
            tile = tiles[None, None, ring.stage(n_kv)]
            self.start(copy, tile, self.place_of(where, rows), kv_head, ring.full_of(n_kv))

    @cute.jit
    def _read(self, table, numbers, index: Int32):
        """The words of an item; of the last one where there is none."""
        entries, heads, _, _, _, _, q_heads, _ = numbers
        index = cutlass.max(cutlass.min(index, entries * q_heads - 1), 0)
        in_section = cutlass.max(entries * heads, 1)
        first = HEADER_WORDS + index % in_section // heads * RECORD_WORDS
        return tuple(table[first + i] for i in range(RECORD_WORDS))


class Chunk(Forward):
    def __init__(self, config: ChunkConfig):
        super().__init__(config)
        self.load_role = ChunkLoad(config)

    @cute.jit
    def __call__(self, tensors, memory: Memory, launch, cap, stream):
        """cap: the numbers of a softcap, where the variant has one."""
        c, layouts = self.config, layouts_of(self.config, self.dtype)
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
        self.kernel(copies, layouts, products_of(c, self.dtype), memory, numbers).launch(
            grid=(launch.grid, 1, 1),
            block=(c.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )
