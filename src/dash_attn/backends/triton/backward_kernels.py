"""The kernels of the backward. Each program adds in the order that its record states, and waits for nobody.

``prepare_kernel``  per (q tile, q head): delta = rowsum(dO * O), and the log-sum-exp in base 2
``dkdv_kernel``     per item of the plan: dK and dV, over its visits, for all q heads of its head group
``fold_kernel``     per kv tile whose q heads are dealt to several head groups: adds their sums, ascending
``sink_kernel``     per (sequence, q head): its rows' part of the gradient of the sink
``sinks_kernel``    per q head: the gradient of the sink from the parts of all sequences
``dq_kernel``       per (q tile, q head): its contributions to dQ, in the order of their tickets

Scores are computed in both main kernels. Strides of heads, rows and batches are in units of 8 elements.
"""

import triton
import triton.language as tl

from .parts import (
    add_products,
    added,
    capped,
    distance,
    filled,
    intervals_of,
    kept,
    keys_within,
    load_head,
    load_stats,
    load_sums,
    row_interval,
    scaled,
    scores_of,
    sequence_of,
    slope_of,
    store_head,
    store_sums,
    tiles_within,
    visible_part,
    whole_columns,
    whole_part,
    whole_rows,
    zeros,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(
    do_not_specialize=[
        "out_batch", "out_row", "out_head", "do_batch", "do_row", "do_head", "lse_batch", "lse_head",
        "stats_head", "tiles",
    ]
)  # fmt: skip
def prepare_kernel(
    out, dout, lse, stats, table,
    out_batch, out_row, out_head, do_batch, do_row, do_head, lse_batch, lse_head, stats_head, tiles,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``stats``: (heads, rows, 2), minus the log-sum-exp in base 2, and delta. Each sequence has rows up to
    the end of its last tile. The log-sum-exp of rows that see nothing becomes 0, for their scores are -inf.
    That of rows that do not exist becomes infinity: a bias makes their scores anything, and none counts."""
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    record = table + (pid % tiles) * 16
    batch_q, start_q, batch_k, start_k, seqlen_q, seqlen_k, diagonal = sequence_of(record)
    top = tl.load(record + 7) * ROWS
    rows = top + tl.arange(0, ROWS)
    there = rows < seqlen_q
    out_base = out + batch_q * out_batch * 8 + start_q * out_row * 8 + head * out_head * 8
    do_base = dout + batch_q * do_batch * 8 + start_q * do_row * 8 + head * do_head * 8
    o_tile = load_head(out_base, out_row, top, None, seqlen_q, ROWS, HEAD_DIM_V, BLOCK_DV, REST_DV)
    do_tile = load_head(do_base, do_row, top, None, seqlen_q, ROWS, HEAD_DIM_V, BLOCK_DV, REST_DV)
    delta = tl.sum(o_tile[0].to(tl.float32) * do_tile[0].to(tl.float32), 1)
    if REST_DV > 0:
        delta += tl.sum(o_tile[1].to(tl.float32) * do_tile[1].to(tl.float32), 1)
    at = batch_q * lse_batch + head * lse_head + start_q + rows
    natural = tl.load(lse + at, mask=there, other=float("inf"))
    place = stats + (head * stats_head + tl.load(record + 15) + rows) * 2
    tl.store(place, tl.where(natural == float("-inf"), 0.0, -natural * LOG2E))
    tl.store(place + 1, delta)


@triton.jit(
    do_not_specialize=["lse_batch", "lse_head", "stats_head", "heads"],
    do_not_specialize_on_alignment=["sums"],
)
def sink_kernel(
    lse, stats, sink, sums, table, lse_batch, lse_head, stats_head, heads, ROWS: tl.constexpr
):  # fmt: skip
    """Add exp(sink - lse) * delta to sums, in tiles of ROWS rows, one after the other; ``sink``: (heads,)."""
    pid = tl.program_id(0)
    head = (pid % heads).to(tl.int64)
    record = table + (pid // heads).to(tl.int64) * 16
    batch_q, start_q, batch_k, start_k, seqlen_q, seqlen_k, diagonal = sequence_of(record)
    first = batch_q * lse_batch + head * lse_head + start_q
    place = stats + (head * stats_head + tl.load(record + 15)) * 2 + 1
    score = tl.load(sink + head)
    total = tl.load(sums + pid)
    for top in range(0, seqlen_q, ROWS):
        rows = top + tl.arange(0, ROWS)
        there = rows < seqlen_q
        natural = tl.load(lse + first + rows, mask=there, other=float("inf"))
        exponent = (score - natural) * LOG2E
        # Of a large sink lse may be rounded to so much less that exp would overflow.
        exponent = tl.where(exponent > 1.0, 1.0, exponent)
        p = tl.where(natural == float("-inf"), 0.0, tl.exp2(exponent))
        total += tl.sum(p * tl.load(place + rows * 2, mask=there, other=0.0), 0)
    tl.store(sums + pid, total)


@triton.jit(do_not_specialize=["sequences", "heads"])
def sinks_kernel(sums, dsink, sequences, heads):
    """Minus the parts of all sequences, (sequences, heads), added one after the other."""
    head = tl.program_id(0)
    total = tl.full((), 0.0, tl.float32)
    at = head.to(tl.int64)
    for _ in range(sequences):
        total += tl.load(sums + at)
        at += heads
    tl.store(dsink + head, -total)


@triton.jit
def add_rows(
    dk_tile, dv_tile, k_tile, v_tile, q_base, do_base, stats, slopes, slope_batch, seed, threshold,
    rescale, origin, record, q_row, q_head, do_row, do_head, stats_head,
    head_first, heads, q_first, q_step, task, end, begin, diagonal, seqlen_q, seqlen_k, left, right, scale2,
    cap2, starts, ends, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    INTERVALS: tl.constexpr, CUT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, TILE_M: tl.constexpr,
    OF_K: tl.constexpr, OF_V: tl.constexpr,
):  # fmt: skip
    """Tasks ``task`` to ``end`` of a visit, each for all heads; ``CUT``: the mask may hide some scores.
    ``starts`` and ``ends``: with INTERVALS the rows that see each key."""
    STEPS: tl.constexpr = TILE_M // ROWS
    READY: tl.constexpr = SOFTCAP or ALIBI  # scores are scaled before they are exponents
    task = task + 0 * end  # a number that the compiler knows could not change in the loop
    head = head_first
    step = 0 * end
    for _ in range((end - task) * heads * STEPS):
        top = (q_first + q_step * task) * TILE_M + step * ROWS
        q_here = q_base + head.to(tl.int64) * q_head * 8
        do_here = do_base + head.to(tl.int64) * do_head * 8
        q_tile = load_head(q_here, q_row, top, None, seqlen_q, ROWS, HEAD_DIM, BLOCK_D, REST_D)
        do_tile = load_head(do_here, do_row, top, None, seqlen_q, ROWS, HEAD_DIM_V, BLOCK_DV, REST_DV)
        rows = top + tl.arange(0, ROWS)
        at = tl.multiple_of(head.to(tl.int64) * stats_head + top, 16)
        minus_lse, delta_here = load_stats(stats + at, ROWS)
        s = scores_of(k_tile, q_tile, REST_D)
        if SOFTCAP:
            tanh = capped(s, scale2)
            s = tanh * cap2
        elif ALIBI:
            s = s * scale2
        if ALIBI:
            positions = (rows + diagonal)[None, :]
            slope = slope_of(slopes, slope_batch, record, head)
            s -= slope * distance(positions, begin + tl.arange(0, KEYS)[:, None])
        p = tl.exp2(s + minus_lse[None, :] if READY else tl.fma(s, scale2, minus_lse[None, :]))
        if CUT:
            first, last = row_interval(rows, diagonal, seqlen_q, seqlen_k, left, right)
            keys = begin + tl.arange(0, KEYS)
            seen = (keys[:, None] >= first[None, :]) & (keys[:, None] <= last[None, :])
            if INTERVALS:
                seen &= (rows[None, :] >= starts[:, None]) & (rows[None, :] < ends[:, None])
            p = tl.where(seen, p, 0.0)
        weights = p
        if DROPOUT:
            keep = tl.trans(kept(tl.load(seed), threshold, origin, record, head, rows, begin, KEYS))
            weights = tl.where(keep, p, 0.0)
        if OF_K:
            dp = scores_of(v_tile, do_tile, REST_DV)
        if OF_V:  # behind dp, so that it runs beside what makes ds
            dv_tile = add_products(weights, do_tile, dv_tile, REST_DV)
        if OF_K:
            if DROPOUT:
                dp = tl.where(keep, dp * rescale, 0.0)
            ds = p * (dp - delta_here[None, :])
            if SOFTCAP:
                ds = ds * (1.0 - tanh * tanh)
            if CUT:
                ds = tl.where(seen, ds, 0.0)
            dk_tile = add_products(ds, q_tile, dk_tile, REST_D)
        step = tl.where(step + 1 == STEPS, 0, step + 1)
        head += tl.where(step == 0, 1, 0)
        task += tl.where(head == head_first + heads, 1, 0)
        head = tl.where(head == head_first + heads, head_first, head)
    return dk_tile, dv_tile


@triton.jit(
    do_not_specialize=[
        "q_batch", "q_row", "q_head", "k_batch", "k_row", "k_head", "v_batch", "v_row", "v_head",
        "do_batch", "do_row", "do_head", "dk_batch", "dk_row", "dk_head", "dv_batch", "dv_row", "dv_head",
        "stats_head", "group", "left", "right", "slope_batch", "rows_batch", "threshold",
        "origin_sequence", "origin_head", "origin_row", "origin_quarter",
    ]
)  # fmt: skip
def dkdv_kernel(
    q, k, v, dout, stats, slopes, seed, row_starts, row_ends, dk, dv, sums, table, visits,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    do_batch, do_row, do_head, dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head, stats_head,
    group, left, right, slope_batch, rows_batch, scale, scale2, cap2, threshold, rescale,
    origin_sequence, origin_head, origin_row, origin_quarter,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, INTERVALS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    OF_K: tl.constexpr, OF_V: tl.constexpr,
):  # fmt: skip
    """dK if OF_K, dV if OF_V. Visits are rows (q_first, q_step, count); each of their q tiles is taken for
    all heads, ascending, or all are taken once per head. Tiles at their ends that INTERVALS empty are left
    out: they would add 0.

    An item is shared by TILE_N / KEYS programs, for its keys share no sum. A q tile is taken in TILE_M / ROWS
    steps.
    """
    PARTS: tl.constexpr = TILE_N // KEYS
    # Both sums of large heads leave no registers for three loops; INTERVALS may cut any tile.
    FEW: tl.constexpr = (BLOCK_D + REST_D <= 128 and BLOCK_DV + REST_DV <= 128) or not (OF_K and OF_V)
    LOOPS: tl.constexpr = 3 if FEW and not INTERVALS else 1
    origin = (origin_sequence, origin_head, origin_row, origin_quarter)
    pid = tl.program_id(0)
    part = pid % PARTS
    record = table + (pid // PARTS).to(tl.int64) * 16
    batch_q, start_q, batch_k, start_k, seqlen_q, seqlen_k, diagonal = sequence_of(record)
    visit_first = tl.load(record + 8)
    visit_count = tl.load(record + 9)
    head_first = tl.load(record + 10)
    heads = tl.load(record + 13)
    passes = tl.load(record + 11) // heads
    slot = tl.load(record + 12).to(tl.int64)
    kv_head = (head_first // group).to(tl.int64)
    begin = tl.load(record + 7) * TILE_N + part * KEYS
    keys = begin + tl.arange(0, KEYS)
    key_there = keys < seqlen_k
    k_base = k + batch_k * k_batch * 8 + start_k * k_row * 8 + kv_head * k_head * 8
    v_base = v + batch_k * v_batch * 8 + start_k * v_row * 8 + kv_head * v_head * 8
    k_tile = load_head(k_base, k_row, begin, None, seqlen_k, KEYS, HEAD_DIM, BLOCK_D, REST_D)
    v_tile = k_tile
    if OF_K:
        v_tile = load_head(v_base, v_row, begin, None, seqlen_k, KEYS, HEAD_DIM_V, BLOCK_DV, REST_DV)
    q_base = q + batch_q * q_batch * 8 + start_q * q_row * 8
    do_base = dout + batch_q * do_batch * 8 + start_q * do_row * 8
    stats += tl.multiple_of(tl.load(record + 15), 16)

    dk_tile = zeros(KEYS, BLOCK_D, REST_D)
    dv_tile = zeros(KEYS, BLOCK_DV, REST_DV)
    low, high = whole_rows(begin, KEYS, TILE_M, diagonal, seqlen_q, seqlen_k, left, right)
    starts = keys
    ends = keys
    if INTERVALS:
        row_starts += batch_k * rows_batch + start_k
        row_ends += batch_k * rows_batch + start_k
        starts, ends = intervals_of(row_starts, row_ends, keys, seqlen_k)
        low, high = tiles_within(starts, ends, seqlen_q, TILE_M)
    for turn in range(passes * visit_count):
        visit = visit_first + turn % visit_count
        head = head_first + turn // visit_count
        q_first = tl.load(visits + visit * 3)
        q_step = tl.load(visits + visit * 3 + 1)
        count = tl.load(visits + visit * 3 + 2)
        # What nothing is hidden of has a loop of its own: a branch in the loop would take as long as its
        # products.
        whole, cut = count, count
        if LOOPS == 3:
            whole, cut = whole_part(q_first, q_step, count, low, high)
        skipped = 0
        if INTERVALS:
            skipped, whole = visible_part(q_first, q_step, count, low, high)
        bounds = (skipped, whole, cut, count)
        for third in tl.static_range(LOOPS):
            dk_tile, dv_tile = add_rows(
                dk_tile, dv_tile, k_tile, v_tile, q_base, do_base, stats,
                slopes, slope_batch, seed, threshold, rescale, origin, record,
                q_row, q_head, do_row, do_head, stats_head, head, heads, q_first, q_step,
                bounds[third], bounds[third + 1], begin, diagonal, seqlen_q, seqlen_k, left, right, scale2,
                cap2, starts, ends, SOFTCAP, ALIBI, DROPOUT, INTERVALS, third != 1,
                HEAD_DIM, BLOCK_D, REST_D, HEAD_DIM_V, BLOCK_DV, REST_DV, ROWS, KEYS, TILE_M, OF_K, OF_V,
            )  # fmt: skip

    if DROPOUT:
        dv_tile = scaled(dv_tile, rescale, REST_DV)
    place = sums + slot * (TILE_N * (BLOCK_D + REST_D + BLOCK_DV + REST_DV))
    if OF_K:
        if slot < 0:
            dk_base = dk + batch_k * dk_batch * 8 + start_k * dk_row * 8 + kv_head * dk_head * 8
            dk_tile = scaled(dk_tile, scale, REST_D)
            store_head(dk_base, dk_row, keys, key_there, dk_tile, HEAD_DIM, BLOCK_D, REST_D)
        else:
            store_sums(place, part * KEYS, dk_tile, TILE_N, BLOCK_D, REST_D)
    if OF_V:
        if slot < 0:
            dv_base = dv + batch_k * dv_batch * 8 + start_k * dv_row * 8 + kv_head * dv_head * 8
            store_head(dv_base, dv_row, keys, key_there, dv_tile, HEAD_DIM_V, BLOCK_DV, REST_DV)
        else:
            place += TILE_N * (BLOCK_D + REST_D)
            store_sums(place, part * KEYS, dv_tile, TILE_N, BLOCK_DV, REST_DV)


@triton.jit(do_not_specialize=["dk_batch", "dk_row", "dk_head", "dv_batch", "dv_row", "dv_head"])
def fold_kernel(
    sums, dk, dv, table, dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr,
    KEYS: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """dK and dV of a kv tile from the sums of its head groups."""
    PARTS: tl.constexpr = TILE_N // KEYS
    OF_DK: tl.constexpr = TILE_N * (BLOCK_D + REST_D)
    SIZE: tl.constexpr = OF_DK + TILE_N * (BLOCK_DV + REST_DV)
    pid = tl.program_id(0)
    part = pid % PARTS
    record = table + (pid // PARTS).to(tl.int64) * 16
    batch_q, start_q, batch_k, start_k, seqlen_q, seqlen_k, diagonal = sequence_of(record)
    kv_head = tl.load(record + 10).to(tl.int64)
    groups = tl.load(record + 11)
    slot = tl.load(record + 12).to(tl.int64)
    step = tl.load(record + 13).to(tl.int64)
    keys = tl.load(record + 7) * TILE_N + part * KEYS + tl.arange(0, KEYS)
    base = sums + slot * SIZE
    dk_tile = load_sums(base, part * KEYS, KEYS, TILE_N, BLOCK_D, REST_D)
    dv_tile = load_sums(base + OF_DK, part * KEYS, KEYS, TILE_N, BLOCK_DV, REST_DV)
    for _ in range(1, groups):
        base += step * SIZE
        dk_here = load_sums(base, part * KEYS, KEYS, TILE_N, BLOCK_D, REST_D)
        dv_here = load_sums(base + OF_DK, part * KEYS, KEYS, TILE_N, BLOCK_DV, REST_DV)
        dk_tile = added(dk_tile, dk_here, REST_D)
        dv_tile = added(dv_tile, dv_here, REST_DV)
    dk_base = dk + batch_k * dk_batch * 8 + start_k * dk_row * 8 + kv_head * dk_head * 8
    dv_base = dv + batch_k * dv_batch * 8 + start_k * dv_row * 8 + kv_head * dv_head * 8
    dk_tile = scaled(dk_tile, scale, REST_D)
    store_head(dk_base, dk_row, keys, keys < seqlen_k, dk_tile, HEAD_DIM, BLOCK_D, REST_D)
    store_head(dv_base, dv_row, keys, keys < seqlen_k, dv_tile, HEAD_DIM_V, BLOCK_DV, REST_DV)


@triton.jit(
    do_not_specialize=[
        "q_batch", "q_row", "q_head", "k_batch", "k_row", "k_head", "v_batch", "v_row", "v_head",
        "do_batch", "do_row", "do_head", "dq_batch", "dq_row", "dq_head", "stats_head",
        "tiles", "group", "left", "right", "slope_batch", "rows_batch", "threshold",
        "origin_sequence", "origin_head", "origin_row", "origin_quarter",
    ]
)  # fmt: skip
def dq_kernel(
    q, k, v, dout, stats, slopes, seed, row_starts, row_ends, dq, table, stretches,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    do_batch, do_row, do_head, dq_batch, dq_row, dq_head, stats_head,
    tiles, group, left, right, slope_batch, rows_batch, scale, scale2, cap2, threshold, rescale,
    origin_sequence, origin_head, origin_row, origin_quarter, nothing,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, INTERVALS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """Stretches are rows (kv_first, kv_step, count), in the order of the tickets.

    A q tile is shared by TILE_M / ROWS programs, and a contribution is one product in TILE_N / KEYS steps.
    LATE, of contributions in one step: each is added in the next task, so that its product runs beside loads.
    Contributions at the ends of a stretch that INTERVALS empty are left out: they would add 0.

    ``nothing`` is 0, and the compiler must not know it: it would make one product of all contributions where
    each is one, which is then added.
    """
    PARTS: tl.constexpr = TILE_M // ROWS
    STEPS: tl.constexpr = TILE_N // KEYS
    READY: tl.constexpr = SOFTCAP or ALIBI  # as in add_rows
    origin = (origin_sequence, origin_head, origin_row, origin_quarter)
    pid = tl.program_id(0)
    part = pid % PARTS
    head = (pid // PARTS // tiles).to(tl.int64)
    record = table + (pid // PARTS % tiles) * 16
    batch_q, start_q, batch_k, start_k, seqlen_q, seqlen_k, diagonal = sequence_of(record)
    stretch_first = tl.load(record + 8)
    stretch_count = tl.load(record + 9)
    top = tl.load(record + 7) * TILE_M + part * ROWS
    rows = top + tl.arange(0, ROWS)
    there = rows < seqlen_q
    q_base = q + batch_q * q_batch * 8 + start_q * q_row * 8 + head * q_head * 8
    do_base = dout + batch_q * do_batch * 8 + start_q * do_row * 8 + head * do_head * 8
    k_base = k + batch_k * k_batch * 8 + start_k * k_row * 8 + (head // group) * k_head * 8
    v_base = v + batch_k * v_batch * 8 + start_k * v_row * 8 + (head // group) * v_head * 8
    q_tile = load_head(q_base, q_row, top, None, seqlen_q, ROWS, HEAD_DIM, BLOCK_D, REST_D)
    do_tile = load_head(do_base, do_row, top, None, seqlen_q, ROWS, HEAD_DIM_V, BLOCK_DV, REST_DV)
    minus_lse, delta_here = load_stats(stats + head * stats_head + tl.load(record + 15) + top, ROWS)
    first, last = row_interval(rows, diagonal, seqlen_q, seqlen_k, left, right)
    all_first, all_last = whole_columns(top, ROWS, diagonal, seqlen_q, seqlen_k, left, right)
    if INTERVALS:
        row_starts += batch_k * rows_batch + start_k
        row_ends += batch_k * rows_batch + start_k
        end = tl.minimum(top + ROWS, seqlen_q)
        low, high = keys_within(
            row_starts, row_ends, tl.min(first, 0), tl.max(last, 0), top, end, seqlen_k, KEYS
        )

    positions = (rows + diagonal)[:, None]
    slope = 0.0
    if ALIBI:
        slope = slope_of(slopes, slope_batch, record, head)

    acc = zeros(ROWS, BLOCK_D, REST_D)
    empty = filled(nothing, ROWS, BLOCK_D, REST_D)
    late = acc
    for stretch in range(stretch_first, stretch_first + stretch_count):
        kv_first = tl.load(stretches + stretch * 3)
        kv_step = tl.load(stretches + stretch * 3 + 1)
        count = tl.load(stretches + stretch * 3 + 2)
        skipped = 0
        if INTERVALS:
            skipped, count = visible_part(
                kv_first, kv_step, count, low // TILE_N, (high + TILE_N) // TILE_N - 1
            )
        for task in range(skipped, count):
            contribution = empty
            for step in range(STEPS):
                begin = (kv_first + kv_step * task) * TILE_N + step * KEYS
                k_tile = load_head(k_base, k_row, begin, None, seqlen_k, KEYS, HEAD_DIM, BLOCK_D, REST_D)
                v_tile = load_head(v_base, v_row, begin, None, seqlen_k, KEYS, HEAD_DIM_V, BLOCK_DV, REST_DV)
                s = scores_of(q_tile, k_tile, REST_D)
                if LATE:
                    acc = added(acc, late, REST_D)
                if SOFTCAP:
                    tanh = capped(s, scale2)
                    s = tanh * cap2
                elif ALIBI:
                    s = s * scale2
                if ALIBI:
                    s -= slope * distance(positions, begin + tl.arange(0, KEYS)[None, :])
                p = tl.exp2(s + minus_lse[:, None] if READY else tl.fma(s, scale2, minus_lse[:, None]))
                dp = scores_of(do_tile, v_tile, REST_DV)
                if DROPOUT:
                    keep = kept(tl.load(seed), threshold, origin, record, head, rows, begin, KEYS)
                    dp = tl.where(keep, dp * rescale, 0.0)
                ds = p * (dp - delta_here[:, None])
                if SOFTCAP:
                    ds = ds * (1.0 - tanh * tanh)
                if INTERVALS | (begin < all_first) | (begin + KEYS - 1 > all_last):
                    keys = begin + tl.arange(0, KEYS)
                    seen = (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None])
                    if INTERVALS:
                        starts, ends = intervals_of(row_starts, row_ends, keys, seqlen_k)
                        seen &= (rows[:, None] >= starts[None, :]) & (rows[:, None] < ends[None, :])
                    ds = tl.where(seen, ds, 0.0)
                contribution = add_products(ds, k_tile, contribution, REST_D)
            if LATE:
                late = contribution
            else:
                acc = added(acc, contribution, REST_D)
    if LATE:
        acc = added(acc, late, REST_D)

    dq_base = dq + batch_q * dq_batch * 8 + start_q * dq_row * 8 + head * dq_head * 8
    acc = scaled(acc, scale, REST_D)
    store_head(dq_base, dq_row, rows, there, acc, HEAD_DIM, BLOCK_D, REST_D)
