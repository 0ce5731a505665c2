"""What the forward's kernel needs of a cache of keys: which tile a program has, rows of a group, pages."""

import triton
import triton.language as tl


@triton.jit
def first_tile(bounds, sequence, total_q, group, ROWS: tl.constexpr):
    """The number of the first tile of a sequence of packed rows: there is room for all of those before."""
    row = tl.minimum(tl.maximum(tl.load(bounds + sequence), 0), total_q)
    return row * group // ROWS + sequence


@triton.jit
def cached_tile(
    lengths, bounds, tile, batch, seqlen_q, total_q, room, group, ROWS: tl.constexpr
):  # fmt: skip
    """Sequence, batch and first row of q, rows and keys of the sequence, and the first row of a tile.

    Values of the device are clamped. A tile that does not exist begins behind all rows.
    """
    if seqlen_q >= 0:
        per = (seqlen_q * group + ROWS - 1) // ROWS
        sequence = tile // per
        before = sequence * per
        batch_q = sequence
        start_q = 0 * tile
        rows = seqlen_q
    else:
        low = 0
        high = batch - 1
        while low < high:
            middle = (low + high + 1) // 2
            if first_tile(bounds, middle, total_q, group, ROWS) <= tile:
                low = middle
            else:
                high = middle - 1
        sequence = low
        before = first_tile(bounds, sequence, total_q, group, ROWS)
        batch_q = 0
        start_q = tl.minimum(tl.maximum(tl.load(bounds + sequence), 0), total_q)
        rows = tl.minimum(tl.maximum(tl.load(bounds + sequence + 1), start_q), total_q) - start_q
    keys = tl.minimum(tl.maximum(tl.load(lengths + sequence), 0), room)
    top = tl.where(tile < before, rows, tile - before) * ROWS
    top = tl.where(top < rows * group, top, rows * group)
    return sequence.to(tl.int64), batch_q.to(tl.int64), start_q.to(tl.int64), rows, keys, top


@triton.jit
def whole_columns_of_group(
    top, ROWS: tl.constexpr, group, diagonal, seqlen_q, seqlen_k, left, right
):  # fmt: skip
    """First and last column that every row of a tile sees, of those that exist."""
    bottom = (tl.minimum(top + ROWS, seqlen_q * group) - 1) // group
    first = tl.where(left < 0, 0, tl.maximum(bottom + diagonal - left, 0))
    last = tl.where(right < 0, seqlen_k - 1, tl.minimum(top // group + diagonal + right, seqlen_k - 1))
    return first, last


@triton.jit
def load_group(
    base, row_stride, head_stride, rows, heads, there, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Rows of several q heads; strides are in units of 8 elements."""
    dims = tl.arange(0, BLOCK_D)
    at = rows.to(tl.int64) * row_stride * 8 + heads * head_stride * 8
    mask = there[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(base + at[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def load_group_head(
    base, row_stride, head_stride, rows, heads, there,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The tiles of ``load_group``, as ``parts.py`` has them."""
    if REST == 0:
        return (load_group(base, row_stride, head_stride, rows, heads, there, HEAD_DIM, BLOCK),)
    else:
        tile = load_group(base, row_stride, head_stride, rows, heads, there, BLOCK, BLOCK)
        rest = load_group(base + BLOCK, row_stride, head_stride, rows, heads, there, HEAD_DIM - BLOCK, REST)
        return tile, rest


@triton.jit
def store_group_head(
    base, row_stride, head_stride, rows, heads, there, tiles,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """``store_group`` of tiles."""
    store_group(base, row_stride, head_stride, rows, heads, there, tiles[0], HEAD_DIM, BLOCK)
    if REST > 0:
        behind = base + BLOCK
        store_group(behind, row_stride, head_stride, rows, heads, there, tiles[1], HEAD_DIM - BLOCK, REST)


@triton.jit
def store_group(
    base, row_stride, head_stride, rows, heads, there, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """As ``load_group``, in the dtype of the tensor."""
    dims = tl.arange(0, BLOCK_D)
    at = rows.to(tl.int64) * row_stride * 8 + heads * head_stride * 8
    mask = there[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(base + at[:, None] + dims[None, :], tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_pages(
    base, page_stride, row_stride, pages, size, number, keys_here,
    TILE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keys from the first of ``keys_here`` on: zeros before the second one, and from the third one on.

    ``pages``: the page numbers of a sequence, which are clamped; ``size``: tokens of a page.
    """
    begin, first, end = keys_here
    keys = begin + tl.arange(0, TILE)
    dims = tl.arange(0, BLOCK_D)
    there = (keys >= first) & (keys < end)
    page = tl.load(pages + keys // size, mask=there, other=0)
    page = tl.minimum(tl.maximum(page, 0), number - 1).to(tl.int64)
    at = page * page_stride * 8 + (keys % size).to(tl.int64) * row_stride * 8
    mask = there[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (dims < HEAD_DIM)[None, :]
    return tl.load(base + at[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def load_pages_head(
    base, page_stride, row_stride, pages, size, number, keys_here,
    TILE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The tiles of ``load_pages``."""
    if REST == 0:
        tile = load_pages(
            base, page_stride, row_stride, pages, size, number, keys_here, TILE, HEAD_DIM, BLOCK
        )
        return (tile,)
    else:
        tile = load_pages(base, page_stride, row_stride, pages, size, number, keys_here, TILE, BLOCK, BLOCK)
        rest = load_pages(
            base + BLOCK,
            page_stride,
            row_stride,
            pages,
            size,
            number,
            keys_here,
            TILE,
            HEAD_DIM - BLOCK,
            REST,
        )
        return tile, rest
