"""The kernel of the forward: one program per (q tile, q head), by the numerics of ``schedule/forward.py``.

There is one variant per head dims and dtype. Masks, lengths, layouts and head counts are values, never
constants of the compiler: with them it might round elsewhere, and a row's bits would follow its company.

A score less its row's maximum is one fused operation of the product, scale and maximum, unless SCALED. The
output is multiplied by the reciprocal of its row's sum: a division per element would be most of the code.
"""

import triton
import triton.language as tl

from .cached_parts import load_group_head, load_pages_head, store_group_head, whole_columns_of_group
from .forward_parts import LOG2E, folded, lse_of, output_of, tile_of, with_sink
from .parts import (
    add_products,
    capped,
    distance,
    intervals_of,
    kept,
    keys_within,
    load_head,
    row_interval,
    scaled,
    scores_of,
    slope_of,
    store_head,
    whole_columns,
    zeros,
)


@triton.jit(
    do_not_specialize=[
        "q_batch", "q_row", "q_head", "k_batch", "k_row", "k_head", "v_batch", "v_row", "v_head",
        "out_batch", "out_row", "out_head", "lse_batch", "lse_head", "tiles", "group", "left", "right",
        "slope_batch", "rows_batch", "threshold",
        "origin_sequence", "origin_head", "origin_row", "origin_quarter",
        "batch", "seqlen_cached", "total_q", "most", "size", "number",
    ]
)  # fmt: skip
def forward_kernel(
    q, k, v, out, lse, sink, slopes, seed, row_starts, row_ends, table, lengths, bounds,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    out_batch, out_row, out_head, lse_batch, lse_head,
    tiles, group, left, right, slope_batch, rows_batch, scale2, cap2, threshold, rescale,
    origin_sequence, origin_head, origin_row, origin_quarter,
    batch, seqlen_cached, total_q, most, size, number,
    SOFTCAP: tl.constexpr, SINK: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    INTERVALS: tl.constexpr, CACHED: tl.constexpr, SCALED: tl.constexpr, SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SEGMENT: tl.constexpr, KEEP: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Strides of heads, rows and batches are in units of 8 elements; ``scale2``: softmax scale * log2(e), or
    with a softcap what ``capped`` takes; ``cap2``: softcap * log2(e). ``sink``: (heads,), read if SINK;
    ``slopes``: (heads,) or (batch, heads), read if ALIBI; ``seed``: (), read if DROPOUT, which counts
    from ``origin_*``, as ``kept`` has them; ``row_starts`` and ``row_ends``: one per key, read if INTERVALS.

    CACHED: ``table`` has page numbers, (batch, most), of pages of ``size`` tokens; lengths of keys and bounds
    of rows are on the device, and ``seqlen_cached`` is the number of rows where q is dense, otherwise -1.
    Rows of a tile are those of all q heads of kv head ``head``, token by token.

    SPLIT: program (., n) has the n-th segment of those that its tile sees, and leaves it to
    ``segments_kernel.py``, in fp32. For every row ``out`` has the sums of all segments, one behind the other,
    and ``lse`` the maximum and the sum of weights of each."""
    origin = (origin_sequence, origin_head, origin_row, origin_quarter)
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    record, batch_q, start_q, batch_k, start_k, seqlen_q, seqlen_k, diagonal, top = tile_of(
        pid % tiles, table, lengths, bounds, batch, seqlen_cached, total_q, most * size, group, CACHED, ROWS
    )
    if CACHED:
        packed_rows = top + tl.arange(0, ROWS)
        rows = packed_rows // group
        heads = head * group + packed_rows % group
        there = rows < seqlen_q
        q_base = q + batch_q * q_batch * 8 + start_q * q_row * 8
        k_base = k + head * k_head * 8
        v_base = v + head * v_head * 8
        pages = table + batch_k * most
        q_tile = load_group_head(q_base, q_row, q_head, rows, heads, there, HEAD_DIM, BLOCK_D, REST_D)
        all_first, all_last = whole_columns_of_group(
            top, ROWS, group, diagonal, seqlen_q, seqlen_k, left, right
        )
    else:
        rows = top + tl.arange(0, ROWS)
        heads = head
        there = rows < seqlen_q
        q_base = q + batch_q * q_batch * 8 + start_q * q_row * 8 + head * q_head * 8
        k_base = k + batch_k * k_batch * 8 + start_k * k_row * 8 + (head // group) * k_head * 8
        v_base = v + batch_k * v_batch * 8 + start_k * v_row * 8 + (head // group) * v_head * 8
        q_tile = load_head(q_base, q_row, top, 0, seqlen_q, ROWS, HEAD_DIM, BLOCK_D, REST_D)
        all_first, all_last = whole_columns(top, ROWS, diagonal, seqlen_q, seqlen_k, left, right)
    first, last = row_interval(rows, diagonal, seqlen_q, seqlen_k, left, right)
    slope = 0.0
    if ALIBI:
        slope = slope_of(slopes, slope_batch, record, head)
    # What the tile's rows see together. Keys beyond it are not read: they might be NaN.
    lowest = tl.min(first, 0)
    highest = tl.max(last, 0)
    if SPLIT:  # from here on there are no other keys than those of the segment
        part = tl.program_id(1)
        begin_here = (lowest // SEGMENT + part) * SEGMENT
        there &= begin_here <= highest
        lowest = tl.maximum(lowest, begin_here)
        highest = tl.minimum(highest, begin_here + SEGMENT - 1)
    if INTERVALS:
        row_starts += batch_k * rows_batch + start_k
        row_ends += batch_k * rows_batch + start_k
        end = tl.minimum(top + ROWS, seqlen_q)
        lowest, highest = keys_within(row_starts, row_ends, lowest, highest, top, end, seqlen_k, TILE)

    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = zeros(ROWS, BLOCK_DV, REST_DV)
    for segment in range(lowest // SEGMENT, (highest + SEGMENT) // SEGMENT):
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        total_here = tl.zeros((ROWS,), tl.float32)
        here = zeros(ROWS, BLOCK_DV, REST_DV)
        low = tl.maximum(lowest, segment * SEGMENT) // TILE
        high = tl.minimum(highest, segment * SEGMENT + SEGMENT - 1) // TILE
        for back in range(high - low + 1):
            begin = (high - back) * TILE
            if CACHED:
                keys_here = (begin, lowest, highest + 1)
                k_tile = load_pages_head(
                    k_base, k_batch, k_row, pages, size, number, keys_here, TILE, HEAD_DIM, BLOCK_D, REST_D
                )
            else:
                k_tile = load_head(k_base, k_row, begin, lowest, highest + 1, TILE, HEAD_DIM, BLOCK_D, REST_D)
            s = scores_of(q_tile, k_tile, REST_D)
            if SOFTCAP:
                s = capped(s, scale2) * cap2
            elif SCALED:
                s = s * scale2
            if ALIBI:
                positions = (rows + diagonal)[:, None]
                s -= slope * distance(positions, begin + tl.arange(0, TILE)[None, :])
            # room - floor(log2 n) of n keys, if positive: how many powers of two up to 2^room exceed n.
            room = tl.zeros((ROWS,), tl.float32)
            if (not INTERVALS) & (begin >= all_first) & (begin + TILE - 1 <= all_last):
                for power in tl.static_range(1, ROOM + 1):
                    if (1 << power) > TILE:
                        room += 1.0
            else:
                keys = begin + tl.arange(0, TILE)
                seen = (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None])
                count = tl.minimum(last, begin + TILE - 1) - tl.maximum(first, begin) + 1
                if INTERVALS:
                    starts, ends = intervals_of(row_starts, row_ends, keys, seqlen_k)
                    seen &= (rows[:, None] >= starts[None, :]) & (rows[:, None] < ends[None, :])
                    count = tl.sum(seen.to(tl.int32), 1)
                s = tl.where(seen, s, float("-inf"))
                for power in tl.static_range(1, ROOM + 1):
                    room += tl.where(count < (1 << power), 1.0, 0.0)
            found = tl.max(s, 1) if SCALED else tl.max(s, 1) * scale2
            raised = tl.where(m == float("-inf"), found + room, found)
            new = tl.where(found > m + KEEP, raised, m)
            shift = tl.where(new == float("-inf"), 0.0, new)
            decay = tl.exp2(m - shift)
            p = tl.exp2(s - shift[:, None] if SCALED else tl.fma(s, scale2, -shift[:, None]))
            total_here = total_here * decay + tl.sum(p, 1)
            if DROPOUT:
                keep = kept(tl.load(seed), threshold, origin, record, head, rows, begin, TILE)
                p = tl.where(keep, p, 0.0)
            if CACHED:
                v_tile = load_pages_head(
                    v_base, v_batch, v_row, pages, size, number, keys_here, TILE,
                    HEAD_DIM_V, BLOCK_DV, REST_DV,
                )  # fmt: skip
            else:
                v_tile = load_head(
                    v_base, v_row, begin, lowest, highest + 1, TILE, HEAD_DIM_V, BLOCK_DV, REST_DV
                )
            here = add_products(p, v_tile, scaled(here, decay[:, None], REST_DV), REST_DV)
            m = new
        if SPLIT:
            maximum, total, acc = m, total_here, here
        else:
            maximum, total, acc = folded(maximum, total, acc, m, total_here, here, REST_DV)

    if SPLIT:
        out += part * HEAD_DIM_V
        row = batch_q * lse_batch + heads * lse_head + start_q + rows
        place = lse + (row * tl.num_programs(1) + part) * 2
        tl.store(place, maximum, mask=there)
        tl.store(place + 1, total, mask=there)
    else:
        if SINK:
            m_sink = tl.load(sink + heads) * LOG2E
            maximum, total, acc = with_sink(maximum, total, acc, m_sink, REST_DV)
        lse_tile = lse_of(maximum, total)
        tl.store(lse + batch_q * lse_batch + heads * lse_head + start_q + rows, lse_tile, mask=there)
        acc = output_of(acc, total, rescale, DROPOUT, ROWS, BLOCK_DV, REST_DV)
    out_base = out + batch_q * out_batch * 8 + start_q * out_row * 8
    if CACHED:
        store_group_head(out_base, out_row, out_head, rows, heads, there, acc, HEAD_DIM_V, BLOCK_DV, REST_DV)
    else:
        store_head(out_base + head * out_head * 8, out_row, rows, there, acc, HEAD_DIM_V, BLOCK_DV, REST_DV)
