"""Finishing: fp32 dQ tiles, scaled and converted to the output dtype as soon as they are complete.

Whoever performs the last contribution to a tile puts the tile into a queue. Blocks without items take tiles
from it, in the order in which they were completed: a few blocks all the time, and every block at the end.
Their load warp lets the copy engine bring the tiles into the shared memory that items no longer need, their
MMA warps convert them. Nobody waits for these blocks, so they do not enter the liveness argument of the plan.
Each element is converted once and alone: who does it decides no bit. Few tiles need no queue, see
`has_places`.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ....schedule.layout import HEADER
from ..device import plan_view, ptx, registers
from ..device.ring import arrive_for_copies, arrive_together
from .config import (
    CONTROL_WORDS,
    FINISH_BARRIER,
    FINISHED,
    MMA_WARPGROUPS,
    MMA_WARPS,
    TAKEN,
    THREADS,
)

AHEAD, AHEAD_OF_FEW = 4, 2
"""Tiles that a load warp takes at a time: if there are more than two per block, and else."""
PLACE_WORDS, PLACE_STRIDE = 5, 8


def queue(control, table):
    """Where the keys of complete tiles are, or will be, in the order of their completion; -1: not yet."""
    return control.iterator + (CONTROL_WORDS + _tiles_of(table))


def _tiles_of(table):
    """dQ tiles of all heads."""
    return table[HEADER.q_tile_total] * table[HEADER.heads]


@cute.jit
def clear(control, table, position: Int32) -> None:
    """Make a queue entry empty, before the main kernel."""
    entry = cute.make_tensor(queue(control, table) + position, cute.make_layout(1))
    entry[0] = Int32(-1)


def has_places(table, complete: Int32, blocks: Int32 | None = None):
    """Whether tiles do without the queue: they are few, and all of them get contributions. `blocks`: of the
    main kernel, if this is another one.

    Then a tile has the entry of its number, and a block has the AHEAD_OF_FEW tiles of its own number.
    """
    few = complete <= AHEAD_OF_FEW * (cute.arch.grid_dim()[0] if blocks is None else blocks)
    return few & (complete == _tiles_of(table))


@cute.jit
def put(config: cutlass.Constexpr, memory, place, complete: Int32, blocks: Int32 | None = None) -> None:
    """Queue a tile, `place`: (its key, the tile), whose last contribution has been performed: who reads the
    entry with acquire sees all. `blocks`: see `has_places`."""
    key, tile = place
    position = tile
    if not has_places(memory.table, complete, blocks):
        position = ptx.add(memory.control.iterator + FINISHED)
    elif const_expr(config.spin_limit > 0):
        ptx.add(memory.control.iterator + FINISHED)  # bounded waits look at it
    ptx.store_release(queue(memory.control, memory.table) + position, key)


def stages_of(config: cutlass.Constexpr, n_item: Int32) -> Int32:
    """Tiles that fit shared memory: less in a block that had items, whose last dQ may still be leaving it."""
    alone, behind_items = config.finish_stages
    return cutlass.select_(n_item == 0, Int32(alone), Int32(behind_items))


@cute.jit
def load_role(config: cutlass.Constexpr, memory, shared, rings, n_item: Int32, complete: Int32) -> None:
    """Load warp: bring tiles until all `complete` ones (those with contributions) are taken, some at a time,
    each found by a lane of its own. Where a tile belongs is put beside it; batch -1: there are no more."""
    places, q_map, size = shared.tile_place, memory.table[HEADER.q_map_offset], 4 * config.dq_elements
    lane, stages, n, end = cute.arch.lane_idx(), stages_of(config, n_item), Int32(0), complete
    ring = replace(rings.tile, stages=stages)
    few = complete <= AHEAD_OF_FEW * cute.arch.grid_dim()[0]
    ahead = cutlass.select_(few, Int32(AHEAD_OF_FEW), Int32(AHEAD))
    # While the MMA warps are not here, other blocks can take the tiles.
    cute.arch.mbarrier_wait(ring.empty, 0)
    placed = has_places(memory.table, complete)
    first, following = Int32(cute.arch.block_idx()[0]) * ahead, end
    if not placed:
        first = cute.arch.shuffle_sync(_take(memory, ahead), 0)
    while first < end:
        if not placed:
            following = _take(memory, ahead)
        place = first + lane
        mine = (lane < ahead) & (place < end)
        key = _find(config, memory, queue(memory.control, memory.table), place, mine, end)
        if cute.arch.shuffle_sync(key, 0) < 0:
            end = Int32(-1)
        tile, where = locate(config, memory.table, q_map, key, memory.dq)
        # Entries were read through the generic proxy, the copy engine reads tiles through the async one.
        ptx.fence_proxy_async()
        for i in cutlass.range_constexpr(AHEAD):
            if (i < ahead) & (first + i < end):
                stage = ring.stage(n)
                ring.wait_empty(n)
                if lane == i:
                    for word, value in enumerate(where):
                        places[word, stage] = value
                    cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, size)
                    source = memory.dq_acc.iterator + Int64(tile) * config.dq_elements
                    ptx.bulk_load(shared.complete[None, stage].iterator, source, size, ring.full + stage)
                n += 1
        first = cute.arch.shuffle_sync(following, 0)
    for _ in cutlass.range_constexpr(MMA_WARPGROUPS):  # a sign to stop for each
        stage = ring.stage(n)
        ring.wait_empty(n)
        with cute.arch.elect_one():
            places[0, stage] = Int32(-1)
            cute.arch.mbarrier_arrive(ring.full + stage)
        n += 1


@cute.jit
def _take(memory, ahead: Int32) -> Int32:
    """The first of the next `ahead` places of the queue; in lane 0 only, so that nobody waits for it yet."""
    first = Int32(0)
    if cute.arch.lane_idx() == 0:
        first = ptx.add(memory.control.iterator + TAKEN, ahead)
    return first


@cute.jit
def _find(config: cutlass.Constexpr, memory, entries, place: Int32, mine, end: Int32) -> Int32:
    """The keys at the places that are `mine`, once all of them are there; -1 in every lane where a bounded
    wait gave up, since for so long no tile at all was completed."""
    key, spins, finished = _look(entries, place, mine, Int32(-1)), Int32(0), Int32(0)
    while _missing(key, mine) & (spins <= config.spin_limit):
        ptx.sleep()
        key = _look(entries, place, mine, key)
        if const_expr(config.spin_limit > 0):
            now = cute.arch.shuffle_sync(ptx.load_acquire(memory.control.iterator + FINISHED), 0)
            spins = spins + 1 if now == finished else Int32(0)
            finished = now
    if const_expr(config.spin_limit > 0):
        if _missing(key, mine):
            key = Int32(-1)
            if cute.arch.lane_idx() == 0:
                report(memory.errors, (Int32(-1), Int32(-1), Int32(-1), Int32(-1), end, finished))
    return key


@cute.jit
def _look(entries, place: Int32, mine, key: Int32) -> Int32:
    """The key at a place, if it is not known yet, or -1."""
    if mine & (key < 0):
        key = ptx.load_acquire(entries + place)
    cute.arch.sync_warp()
    return key


@cute.jit
def _missing(key: Int32, mine):
    """Whether a lane has no key yet that should have one."""
    missing, here = Int32(0), Int32(mine & (key < 0))
    for lane in cutlass.range_constexpr(AHEAD):
        missing |= cute.arch.shuffle_sync(here, lane)
    return missing != 0


@cute.jit
def convert_role(config: cutlass.Constexpr, mdQ, shared, rings, n_item: Int32, scale: Float32) -> None:
    """MMA warp: convert two pieces of every second tile that the load warp brings.

    The other warpgroup has the tiles between. The number of stages is even, so that every stage belongs to
    one warpgroup, which sees all phases of its barriers.
    """
    places, ring = shared.tile_place, replace(rings.tile, stages=stages_of(config, n_item))
    warp = cute.arch.make_warp_uniform(ptx.thread_index() // 32 - (THREADS // 32 - MMA_WARPS))
    n = warp // 4
    # Behind this, no item needs shared memory any more.
    cute.arch.barrier(barrier_id=FINISH_BARRIER, number_of_threads=32 * MMA_WARPS)
    for first in cutlass.range_constexpr(0, config.finish_stages[0], MMA_WARPGROUPS):
        arrive_together(ring.empty + first + n)
    cute.arch.mbarrier_wait(ring.full + n, 0)
    while places[0, ring.stage(n)] >= 0:
        stage = ring.stage(n)
        where = tuple(places[word, stage] for word in range(PLACE_WORDS))
        pieces = (warp % 4, warp % 4 + MMA_WARPS // 2)
        values = [load_piece(config, shared.complete[None, stage].iterator, piece) for piece in pieces]
        arrive_for_copies(ring.empty + stage)
        for piece, value in zip(pieces, values):
            store_piece(config, value, mdQ, where, piece, scale)
        n += MMA_WARPGROUPS
        ring.wait_full(n)


@cute.jit
def report(errors: cute.Tensor, values) -> None:
    """Keep the first failure: [1, sequence, q_head, kv_tile, q_tile, expected, seen].

    Sequence -1: `seen` of `expected` dQ tiles were complete.
    """
    if ptx.compare_and_swap(errors.iterator, Int32(0), Int32(1)) == 0:
        for i, value in enumerate(values):
            errors[1 + i] = value


@cute.jit
def contributions(table, index: Int32) -> Int32:
    """How many contributions q tile `index`, counted over all sequences, gets."""
    _, seq = plan_view.sequence_of_tile(table, HEADER.q_map_offset, index)
    return table[seq.total_first + index - seq.q_tile_first]


@cute.jit
def locate(config: cutlass.Constexpr, table, q_map: Int32, key: Int32, tensor):
    """The dQ tile of a key, and its place, see `store_piece`.

    `key`: q tile * heads + q head, with q tiles counted over all sequences; -1 is read like 0. `q_map`: word
    of the table where the map of q tiles begins. `tensor`: (B, Sq, H, D).
    """
    heads = tensor.shape[2]
    index, q_head = cutlass.max(key, 0) // heads, cutlass.max(key, 0) % heads
    # A dense batch: all sequences are as long as the tensor, and nothing has to be looked up.
    seqlen_q, row_first = Int32(tensor.shape[1]), Int32(0)
    tiles = (seqlen_q + config.tile_m - 1) // config.tile_m
    batch = index // cutlass.max(tiles, 1)
    tile_first = batch * tiles
    if tensor.shape[0] == 1:
        seq = plan_view.read_sequence(table, table[HEADER.sequence_offset], table[q_map + index])
        seqlen_q, row_first, tiles, tile_first = (
            seq.seqlen_q,
            seq.q_row_first,
            seq.q_tile_count,
            seq.q_tile_first,
        )
        batch = Int32(0)
    q_tile = index - tile_first
    return tile_first * heads + q_head * tiles + q_tile, (batch, row_first, seqlen_q, q_tile, q_head)


@cute.jit
def load_piece(config: cutlass.Constexpr, tile, piece: Int32, some: cutlass.Constexpr = None, first=0):
    """What one of the eight MMA warps held of the dQ tile at a pointer, in the same lanes: all of it, or
    `some` 8-column steps from the `first` on.

    Returns (2 columns, 2 rows, 8-column steps) fp32.
    """
    vectors = config.dq_elements // 1024
    layout = cute.make_layout((4, 128, vectors, 2), stride=(1, 4, 512, 512 * vectors))
    acc = cute.make_tensor(tile, layout)
    if const_expr(some is None):
        some = vectors
    values = cute.make_rmem_tensor((2, 2, some), Float32)
    for v in cutlass.range_constexpr(some):
        source = acc[None, piece % 4 * 32 + cute.arch.lane_idx(), first + v, piece // 4]
        cute.autovec_copy(source, cute.make_tensor(values[None, None, v].iterator, 4))
    return values


def place_apart(table, tile: Int32, ticket: Int32):
    """Where a contribution is in dq_acc if they are apart, in dQ tiles: first those of all tiles with ticket
    0, then those with ticket 1, and so on."""
    return Int64(ticket) * _tiles_of(table) + tile


@cute.jit
def sum_apart(config: cutlass.Constexpr, dq_acc, table, tile: Int32, count: Int32, piece: Int32, part: Int32):
    """Like `load_piece`, of a warp's part of the steps: the sum of a tile's `count` contributions in the
    order of their tickets. These are the bytes of the copy engine, which keeps subnormal numbers, too, when
    it adds to memory."""
    some = config.dq_elements // 1024 // config.piece_warps
    total = cute.make_rmem_tensor((2, 2, some), Float32)
    total.fill(0.0)
    for begin in cutlass.range(0, count, config.apart, unroll=1):
        found = [cute.make_rmem_tensor_like(total) for _ in range(config.apart)]
        for i in cutlass.range_constexpr(config.apart):  # all are on their way together
            found[i].fill(0.0)
            if begin + i < count:
                place = place_apart(table, tile, begin + i)
                found[i].store(load_place(config, dq_acc, place, piece, some, part * some).load())
        for i in cutlass.range_constexpr(config.apart):
            ticket = begin + i
            for n in cutlass.range_constexpr(cute.size(total)):
                added = cutlass.select_(ticket == 0, found[i][n], total[n] + found[i][n])
                total[n] = cutlass.select_(ticket < count, added, total[n])
    return total


def load_place(config, dq_acc, place, piece: Int32, some=None, first=0):
    """`load_piece` of what lies so many dQ tiles, an Int64, behind the beginning of dq_acc."""
    start = cute.assume(place * config.dq_elements, divby=4)  # 16-byte loads
    return load_piece(config, dq_acc.iterator + start, piece, some, first)


@cute.jit
def store_piece(
    config: cutlass.Constexpr, values, mdQ, where, piece: Int32, scale: Float32, first_step=0
) -> None:
    """Scale, convert and store what `load_piece` loaded from `first_step` on.

    `where`: (batch, first row of the sequence, its rows, q tile, q head).
    """
    c = config
    batch, first_row, seqlen_q, q_tile, q_head = where
    vectors, lane = cute.size(values.shape[2]), cute.arch.lane_idx()
    first, first_column = piece % 4 * 16 + lane // 4, 8 * first_step
    if const_expr(c.tile_m == 64):
        first_column += piece // 4 * (c.head_dim // 2)
    else:
        first += piece // 4 * 64
    for half in cutlass.range_constexpr(2):
        scaled = values[None, half, None].load() * scale
        converted = registers.converted_rows(scaled, vectors, mdQ.element_type)
        row = q_tile * c.tile_m + first + 8 * half
        line = mdQ[batch, first_row + row, q_head, None]
        columns = cute.local_tile(line, (8 * vectors,), (first_column // (8 * vectors),))
        there = registers.columns_from(c, mdQ, first_column, 8 * vectors)
        registers.store_rows(converted, columns, lane, row < seqlen_q, there)
