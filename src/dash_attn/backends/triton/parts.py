"""What the kernels share: records of the tables, which columns rows see, rows of a head.

A head of BLOCK columns is one tile. One of BLOCK and REST columns is two, with a product for each: then fewer
columns are zeros. Both are tuples of tiles, and what takes ``tiles`` takes either.
"""

import triton
import triton.language as tl


@triton.jit
def sequence_of(record):
    """The first words of a record (``tables.py``); those that are multiplied by strides as int64."""
    batch_q = tl.load(record).to(tl.int64)
    start_q = tl.load(record + 1).to(tl.int64)
    batch_k = tl.load(record + 2).to(tl.int64)
    start_k = tl.load(record + 3).to(tl.int64)
    return (
        batch_q,
        start_q,
        batch_k,
        start_k,
        tl.load(record + 4),
        tl.load(record + 5),
        tl.load(record + 6),
    )


@triton.jit
def row_interval(rows, diagonal, seqlen_q, seqlen_k, left, right):
    """First and last column that each row sees, -1 for the last one of rows that do not exist.

    ``left`` and ``right``: sides of the band, negative where unbounded.
    """
    first = tl.where(left < 0, 0, tl.maximum(rows + diagonal - left, 0))
    last = tl.where(right < 0, seqlen_k - 1, tl.minimum(rows + diagonal + right, seqlen_k - 1))
    last = tl.where(rows < seqlen_q, tl.maximum(last, -1), -1)
    return first, last


@triton.jit
def whole_columns(top, ROWS: tl.constexpr, diagonal, seqlen_q, seqlen_k, left, right):
    """First and last column that every row of a tile sees, of those that exist."""
    end = tl.minimum(top + ROWS, seqlen_q)
    first = tl.where(left < 0, 0, tl.maximum(end - 1 + diagonal - left, 0))
    last = tl.where(right < 0, seqlen_k - 1, tl.minimum(top + diagonal + right, seqlen_k - 1))
    return first, last


@triton.jit
def whole_rows(begin, KEYS: tl.constexpr, TILE: tl.constexpr, diagonal, seqlen_q, seqlen_k, left, right):
    """First and last tile of rows that all see every one of some keys."""
    lowest = tl.where(right < 0, 0, begin + KEYS - 1 - diagonal - right)
    highest = tl.where(left < 0, seqlen_q - 1, begin + left - diagonal)
    first = (tl.maximum(lowest, 0) + TILE - 1) // TILE
    last = tl.maximum(highest + 1, 0) // TILE - 1
    last = tl.where(highest >= seqlen_q - 1, (seqlen_q + TILE - 1) // TILE - 1, last)
    return first, tl.where(begin + KEYS <= seqlen_k, last, -1)


@triton.jit
def whole_part(first, step, count, low, high):
    """Where in a stretch of ``count`` tiles those between ``low`` and ``high`` begin and end."""
    begin = tl.where(step < 0, first - high, low - first)
    end = tl.where(step < 0, first - low, high - first) + 1
    begin = tl.minimum(tl.maximum(begin, 0), count)
    end = tl.minimum(tl.maximum(end, begin), count)
    known = (step == 1) | (step == -1) | (count == 1)
    return tl.where(known, begin, 0), tl.where(known, end, 0)


@triton.jit
def visible_part(first, step, count, low, high):
    """As ``whole_part``, but all of a stretch where its step is another one: what may not be left out."""
    begin, end = whole_part(first, step, count, low, high)
    known = (step == 1) | (step == -1) | (count == 1)
    return tl.where(known, begin, 0), tl.where(known, end, count)


@triton.jit
def capped(s, scale):
    """tanh of scores / softcap, from products; ``scale``: softmax scale / softcap.

    Near 0 by its series, where a difference of two numbers close to 1 would have few digits.
    """
    x = s * scale
    y = x * x
    series = x + x * y * (y * (0.13333334 - y * (0.053968254 - y * 0.021869488)) - 0.33333334)
    return tl.where(y < 0.04, series, 1.0 - 2.0 / (tl.exp2(x * 2.8853901) + 1.0))


@triton.jit
def slope_of(slopes, slope_batch, record, head):
    """The ALiBi slope of a q head, for scores in base 2; ``slope_batch``: 0 where batches have the same."""
    return tl.load(slopes + tl.load(record + 14).to(tl.int64) * slope_batch + head) * 1.4426950408889634


@triton.jit
def distance(positions, keys):
    """How far keys are from the columns aligned with rows."""
    return tl.abs(positions - keys).to(tl.float32)


@triton.jit
def kept(seed, threshold, origin, record, head, rows, begin, KEYS: tl.constexpr):
    """(rows, KEYS): which weights dropout keeps, as ``backends/cpu/dropout.py`` says.

    ``begin``: the first key, a multiple of 4. ``origin``: the sequence, q head, row and quarter of a column
    that are the first ones of the call.
    """
    ROWS: tl.constexpr = rows.shape[0]
    row = tl.broadcast_to((origin[2] + rows)[:, None], (ROWS, KEYS // 4))
    first = origin[3] + begin // 4
    quarter = tl.broadcast_to((first + tl.arange(0, KEYS // 4))[None, :], (ROWS, KEYS // 4))
    sequence = origin[0] + tl.load(record + 14)
    a, b, c, d = tl.philox(seed, quarter, row, origin[1] + head.to(tl.int32), sequence)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, KEYS))
    return (words >> 8).to(tl.int32) >= threshold


@triton.jit
def load_rows(
    base, row_stride, top, first, end, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Rows from ``top`` on of one head, (ROWS, BLOCK_D): zeros before row ``first`` if it is not None, from
    row ``end`` on, and behind the head's elements.

    ``row_stride`` is in units of 8 elements, so that the compiler knows that rows are aligned. Only the first
    row's place takes 64 bits.
    """
    here = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    where = base + top.to(tl.int64) * row_stride * 8 + (here[:, None] * (row_stride * 8) + dims[None, :])
    mask = (here < end - top)[:, None]
    if first is not None:
        mask = mask & (here >= first - top)[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (dims < HEAD_DIM)[None, :]
    return tl.load(where, mask=mask, other=0.0)


@triton.jit
def load_head(
    base, row_stride, top, first, end, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The tiles of ``load_rows``."""
    if REST == 0:
        return (load_rows(base, row_stride, top, first, end, ROWS, HEAD_DIM, BLOCK),)
    else:
        tile = load_rows(base, row_stride, top, first, end, ROWS, BLOCK, BLOCK)
        return tile, load_rows(base + BLOCK, row_stride, top, first, end, ROWS, HEAD_DIM - BLOCK, REST)


@triton.jit
def zeros(ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """Tiles of sums."""
    if REST == 0:
        return (tl.zeros((ROWS, BLOCK), tl.float32),)
    else:
        return tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, REST), tl.float32)


@triton.jit
def filled(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """Tiles of one number."""
    if REST == 0:
        return (tl.zeros((ROWS, BLOCK), tl.float32) + x,)
    else:
        return tl.zeros((ROWS, BLOCK), tl.float32) + x, tl.zeros((ROWS, REST), tl.float32) + x


@triton.jit
def scores_of(tiles, others, REST: tl.constexpr):
    """Products of rows with rows: of all columns."""
    s = tl.dot(tiles[0], tl.trans(others[0]), input_precision="ieee")
    if REST > 0:
        s = tl.dot(tiles[1], tl.trans(others[1]), s, input_precision="ieee")
    return s


@triton.jit
def add_products(weights, tiles, sums, REST: tl.constexpr):
    """Tiles of sums, and the products of weights with tiles."""
    weights = weights.to(tiles[0].dtype)
    first = tl.dot(weights, tiles[0], sums[0], input_precision="ieee")
    if REST == 0:
        return (first,)
    else:
        return first, tl.dot(weights, tiles[1], sums[1], input_precision="ieee")


@triton.jit
def added(tiles, others, REST: tl.constexpr):
    """Sums of tiles."""
    if REST == 0:
        return (tiles[0] + others[0],)
    else:
        return tiles[0] + others[0], tiles[1] + others[1]


@triton.jit
def scaled(tiles, factor, REST: tl.constexpr):
    """Tiles times a number, or times one per row, (ROWS, 1)."""
    if REST == 0:
        return (tiles[0] * factor,)
    else:
        return tiles[0] * factor, tiles[1] * factor


@triton.jit
def load_stats(place, ROWS: tl.constexpr):
    """Minus the log-sum-exp in base 2, and delta, of ROWS rows; ``place``: of the first one's pair of fp32.

    A pair is read as one number of 64 bits: each thread reads those that it uses, and so there are fewer.
    """
    both = tl.load(place + tl.arange(0, ROWS))
    minus_lse = (both & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    delta = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return minus_lse, delta


@triton.jit
def store_rows(base, row_stride, rows, there, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of one head, those that are ``there``, in the dtype of the tensor; ``row_stride`` as above."""
    dims = tl.arange(0, BLOCK_D)
    where = base + rows.to(tl.int64)[:, None] * row_stride * 8 + dims[None, :]
    mask = there[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(where, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def store_head(
    base, row_stride, rows, there, tiles,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """``store_rows`` of tiles."""
    store_rows(base, row_stride, rows, there, tiles[0], HEAD_DIM, BLOCK)
    if REST > 0:
        store_rows(base + BLOCK, row_stride, rows, there, tiles[1], HEAD_DIM - BLOCK, REST)


@triton.jit
def places(first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where rows from ``first`` on lie in a dense array of fp32 sums, (ROWS, COLUMNS)."""
    return (first + tl.arange(0, ROWS))[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def store_sums(base, first, tiles, TILE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """Rows from ``first`` on of dense arrays of TILE rows, one for each tile, one behind the other."""
    ROWS: tl.constexpr = tiles[0].shape[0]
    tl.store(base + places(first, ROWS, BLOCK), tiles[0])
    if REST > 0:
        tl.store(base + TILE * BLOCK + places(first, ROWS, REST), tiles[1])


@triton.jit
def load_sums(
    base, first, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """What ``store_sums`` stored."""
    tile = tl.load(base + places(first, ROWS, BLOCK))
    if REST == 0:
        return (tile,)
    else:
        return tile, tl.load(base + TILE * BLOCK + places(first, ROWS, REST))


@triton.jit
def intervals_of(row_starts, row_ends, keys, seqlen_k):
    """The rows that see each key, beside the mask: none of keys that do not exist."""
    there = keys < seqlen_k
    return tl.load(row_starts + keys, mask=there, other=0), tl.load(row_ends + keys, mask=there, other=0)


@triton.jit
def keys_within(row_starts, row_ends, lowest, highest, top, end, seqlen_k, KEYS: tl.constexpr):
    """First and last key from ``lowest`` to ``highest`` that a row of ``top .. end - 1`` may see; 0 and -1
    if there is none."""
    low = highest + 1
    high = 0 * highest - 1
    for begin in range(lowest, highest + 1, KEYS):
        keys = begin + tl.arange(0, KEYS)
        starts, ends = intervals_of(row_starts, row_ends, keys, seqlen_k)
        hit = (tl.maximum(starts, top) < tl.minimum(ends, end)) & (keys <= highest)
        low = tl.minimum(low, tl.min(tl.where(hit, keys, highest + 1), 0))
        high = tl.maximum(high, tl.max(tl.where(hit, keys, -1), 0))
    return tl.where(high < 0, 0, low), high


@triton.jit
def tiles_within(starts, ends, seqlen_q, TILE: tl.constexpr):
    """First and last tile of rows that are in the interval of one key; 0 and -1 if there is none."""
    first, end = tl.maximum(starts, 0), tl.minimum(ends, seqlen_q)
    low = tl.min(tl.where(first < end, first, seqlen_q), 0)
    high = tl.max(tl.where(first < end, end, 0), 0)
    return tl.where(high == 0, 0, low // TILE), (high + TILE - 1) // TILE - 1
