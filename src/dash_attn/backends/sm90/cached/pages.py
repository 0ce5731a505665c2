"""What load warps over a cache read: records of the table that ``Deal`` wrote, and K and V from pages."""

from math import gcd

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from ..device import plan_view, ptx
from ..device.copies import copy_of, partitions
from ..device.operands import tile_layout
from ..tiles import row_bytes_of
from .arguments import HEADER_WORDS, RECORD_WORDS
from .config import CachedConfig


def box_of(config: CachedConfig) -> int:
    """Columns of a copy: those of a swizzled row, for K and for V."""
    return row_bytes_of(gcd(config.head_dim, config.head_dim_v)) // 2


@cute.jit
def as_packed(tensor):
    """(pages, rows, H, D) as rows of one batch. A page begins at a row: the launcher sees to that."""
    pages, rows, heads, columns = tensor.shape
    _, of_row, of_head, of_column = tensor.stride
    layout = cute.make_layout((1, pages * rows, heads, columns), stride=(of_row, of_row, of_head, of_column))
    return cute.make_tensor(tensor.iterator, layout)


def copies_of_pages(c: CachedConfig, dtype, tensors):
    """Copies of pieces of K and of V."""
    piece, fetch = tile_layout(dtype, c.piece, box_of(c), 1), cpasync.CopyBulkTensorTileG2SOp()
    return [copy_of(fetch, as_packed(x), piece, c.piece) for x in (tensors.k, tensors.v)]


@cute.jit
def numbers_of_pages(pages: Int32, page_size: Int32, most_pages: Int32):
    """What `Pages` asks for: how many pages there are, how many a sequence has at most, and the logarithm to
    base 2 of a page's tokens. The one page of a contiguous cache may have any number of tokens: here it has
    2^30, which are more than a sequence has.

    A division would run on the unit that takes exponentials, of which the softmax leaves no time."""
    size_log2 = Int32(30)
    if most_pages > 1:
        size_log2 = ptx.highest_bit(page_size)
    return pages, most_pages, size_log2


@cute.jit
def record_of(table, counts, index: Int32):
    """The words of an item; of the last one where there is none. `counts`: entries, heads of a section,
    items."""
    entries, heads, items = counts
    index = cutlass.max(cutlass.min(index, items - 1), 0)
    in_section = cutlass.max(entries * heads, 1)
    first = HEADER_WORDS + index % in_section // heads * RECORD_WORDS
    return tuple(table[first + i] for i in range(RECORD_WORDS))


class Pages:
    """``of_pages`` of its functions: see `numbers_of_pages`."""

    def __init__(self, config: CachedConfig):
        self.config = config

    @cute.jit
    def where_is(self, pages, of_pages, sequence: Int32, kv_tile: Int32, seqlen_k: Int32):
        """What `piece_at` says of the pieces of a kv tile: lane i has piece i."""
        token = cutlass.max(kv_tile, 0) * self.config.tile_n + cute.arch.lane_idx() * self.config.piece
        return self.piece_at(pages, of_pages, sequence, token, seqlen_k)

    @cute.jit
    def piece_at(self, pages, of_pages, sequence: Int32, token: Int32, seqlen_k: Int32):
        """(row of the view, page, used tokens from the page's first one on) of the piece that begins with a
        token. Of a page that has none of the used tokens, rows are zeros, whatever its number is."""
        number, most, size_log2 = of_pages
        column = token >> size_log2
        page = pages[sequence * most + cutlass.min(column, most - 1)]
        page = cutlass.min(cutlass.max(page, 0), number - 1)
        first = column << size_log2
        used = cutlass.max(seqlen_k - first, 0)
        return plan_view.PACKED_ROWS - used + token - first, page, used

    def place_of(self, where, rows_of_page: Int32):
        """(row, shift, first lane) of pieces, as in `plan_view.tma_rows`: pages lie among rows as sequences
        do in packed tensors. Each ends where the used tokens would, if they all lay behind one another: no
        piece goes beyond its page."""
        row, page, used = where
        return row, page * rows_of_page + used, 0

    @cute.jit
    def _load(self, ring, copy, tiles, place, head: Int32, n: Int32, fewer: Int32 | int = 0) -> None:
        """Start to load a tile of K or V, piece by piece, once its stage and ``fewer`` others are empty."""
        tile, barrier = tiles[None, None, ring.stage(n)], ring.full_of(n)
        ring.wait_empty(n + fewer)
        self.start(copy, tile, place, head, barrier)

    @cute.jit
    def start(self, copy, tile, place, head: Int32, barrier) -> None:
        """Start to load a tile of K or V into an empty stage."""
        c, (row, shift, lane) = self.config, place
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 2 * c.tile_n * cute.size(tile, mode=[1]))
        pieces = cute.flat_divide(tile, (c.piece, box_of(c)))
        for i in cutlass.range_constexpr(c.tile_n // c.piece):
            of_row, of_page = (cute.arch.shuffle_sync(x, lane + i) for x in (row, shift))
            place = of_row, Int32(plan_view.PACKED_ROWS), of_page
            for j in cutlass.range_constexpr(cute.size(tile, mode=[1]) // box_of(c)):
                target, source = partitions(copy, pieces[None, None, i, j], place, head, j)
                cute.copy(copy.atom, source[None, 0], target, tma_bar_ptr=barrier)
