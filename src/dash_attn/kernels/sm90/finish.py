"""Finishing: fp32 dQ tiles, scaled and converted to the output dtype as soon as they are complete.

Whoever performs the last contribution to a tile puts the tile into a queue. The MMA warps of blocks without items take
parts of tiles from it, in the order in which tiles were completed: of a few blocks all the time, while what they read is
still in L2, and of every block at the end. Nobody waits for them, so they do not enter the liveness argument of the plan.
Each element is converted once and alone: who does it decides no bit.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from . import plan_view, ptx, registers
from .config import CONTROL_WORDS, FINISHED, MMA_WARPGROUPS, PARTS, TAKEN

MMA_WARPS = 4 * MMA_WARPGROUPS


def queue(mControl, mPlan):
    """Where the keys of complete tiles are, or will be, in the order in which they were completed; -1: not yet."""
    tiles = mPlan[plan_view.Q_TILES] * mPlan[plan_view.HEADS]
    return mControl.iterator + (CONTROL_WORDS + tiles)


@cute.jit
def clear(mControl, mPlan, position: Int32) -> None:
    """Make a queue entry empty, before the main kernel."""
    entry = cute.make_tensor(queue(mControl, mPlan) + position, cute.make_layout(1))
    entry[0] = Int32(-1)


@cute.jit
def put(mControl, mPlan, key: Int32) -> None:
    """Queue a tile whose last contribution has been performed: what reads the entry with acquire sees all of them."""
    position = ptx.add(mControl.iterator + FINISHED)
    ptx.store_release(queue(mControl, mPlan) + position, key)


@cute.jit
def take(mControl) -> Int32:
    """The next part of the queue, for a warp; in lane 0, so that nobody waits for it yet."""
    part = Int32(0)
    if cute.arch.lane_idx() == 0:
        part = ptx.add(mControl.iterator + TAKEN)
    return part


@cute.jit
def look(entries, part: Int32, parts: Int32) -> Int32:
    """The key of the tile that a part belongs to, or -1 if the tile is not complete or there is none."""
    key = Int32(-1)
    if (part < parts) & (cute.arch.lane_idx() == 0):
        key = ptx.load_acquire(entries + part // PARTS)
    cute.arch.sync_warp()  # what lane 0 has acquired, the other lanes may read
    return cute.arch.shuffle_sync(key, 0)


@cute.jit
def wait(config: cutlass.Constexpr, mControl, entries, mErrors, part: Int32, parts: Int32) -> Int32:
    """`look` until there is a key; -1 where a bounded wait gave up, since for so long no tile at all was completed."""
    key, spins, finished = look(entries, part, parts), Int32(0), Int32(0)
    while (key < 0) & (spins <= config.spin_limit):
        ptx.sleep()
        key = look(entries, part, parts)
        if const_expr(config.spin_limit > 0):
            now = ptx.load_acquire(mControl.iterator + FINISHED)
            spins = spins + 1 if now == finished else Int32(0)
            finished = now
    if const_expr(config.spin_limit > 0):
        if (key < 0) & (cute.arch.lane_idx() == 0):
            report(mErrors, (Int32(-1), Int32(-1), Int32(-1), Int32(-1), parts // PARTS, finished))
    return key


@cute.jit
def report(mErrors: cute.Tensor, values) -> None:
    """First failure wins: [1, sequence, q_head, kv_tile, q_tile, expected, seen]; sequence -1: dQ tiles that were never complete."""
    if ptx.compare_and_swap(mErrors.iterator, Int32(0), Int32(1)) == 0:
        for i, value in enumerate(values):
            mErrors[1 + i] = value


@cute.jit
def finish_role(
    config: cutlass.Constexpr, mPlan, mControl, mErrors, mdQacc, mdQ, scale: Float32, complete: Int32
):
    """A warp: convert parts of tiles until all `complete` tiles (those with contributions) are taken.

    A part is 16 KB that a warp asks for at once. The way to the next one, four dependent reads, is gone while they arrive.
    """
    pieces, parts = MMA_WARPS // PARTS, complete * PARTS
    entries, q_map = queue(mControl, mPlan), mPlan[plan_view.Q_MAP_OFFSET]
    part = cute.arch.shuffle_sync(take(mControl), 0)
    following = take(mControl)
    key = look(entries, part, parts)
    tile, where = locate(config, mPlan, q_map, key, mdQ)
    while part < parts:
        if key < 0:
            key = wait(config, mControl, entries, mErrors, part, parts)
            tile, where = locate(config, mPlan, q_map, key, mdQ)
        if key < 0:
            part = parts
        else:
            first = part % PARTS * pieces
            values = [load_piece(config, mdQacc, tile, first + n) for n in range(pieces)]
            here = where
            part = cute.arch.shuffle_sync(following, 0)
            following = take(mControl)
            key = look(entries, part, parts)
            tile, where = locate(config, mPlan, q_map, key, mdQ)
            for n in cutlass.range_constexpr(pieces):
                store_piece(config, values[n], mdQ, here, first + n, scale)


@cute.jit
def contributions(mPlan, index: Int32) -> Int32:
    """How many contributions q tile `index`, counted over all sequences, gets."""
    _, seq = plan_view.sequence_of_tile(mPlan, plan_view.Q_MAP_OFFSET, index)
    return mPlan[seq.total_first + index - seq.q_tile_first]


@cute.jit
def locate(config: cutlass.Constexpr, mPlan, q_map: Int32, key: Int32, tensor):
    """The dQ tile of a key, q tile * heads + q head with q tiles counted over all sequences, and its place, see `store_piece`.

    `q_map`: word of the table where the map of q tiles begins; `tensor`: (B, Sq, H, D). A key of -1 is read like 0.
    """
    heads = tensor.shape[2]
    index, q_head = cutlass.max(key, 0) // heads, cutlass.max(key, 0) % heads
    # A dense batch: all sequences are as long as the tensor, and nothing has to be looked up.
    seqlen_q, row_first = Int32(tensor.shape[1]), Int32(0)
    tiles = (seqlen_q + config.tile_m - 1) // config.tile_m
    batch = index // cutlass.max(tiles, 1)
    tile_first = batch * tiles
    if tensor.shape[0] == 1:
        seq = plan_view.read_sequence(mPlan, mPlan[plan_view.SEQUENCE_OFFSET], mPlan[q_map + index])
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
def load_piece(config: cutlass.Constexpr, mdQacc, tile: Int32, piece: Int32):
    """What one of the eight MMA warps held of a dQ tile, in the same lanes: (2 columns, 2 rows, 8-column steps)."""
    vectors = config.dq_elements // 1024
    layout = cute.make_layout((4, 128, vectors, 2), stride=(1, 4, 512, 512 * vectors))
    start = cute.assume(Int64(tile) * config.dq_elements, divby=4)  # 16-byte loads
    acc = cute.make_tensor(mdQacc.iterator + start, layout)
    values = cute.make_rmem_tensor((2, 2, vectors), Float32)
    for v in cutlass.range_constexpr(vectors):
        source = acc[None, piece % 4 * 32 + cute.arch.lane_idx(), v, piece // 4]
        cute.autovec_copy(source, cute.make_tensor(values[None, None, v].iterator, 4))
    return values


@cute.jit
def store_piece(config: cutlass.Constexpr, values, mdQ, where, piece: Int32, scale: Float32) -> None:
    """Scale, convert and store what `load_piece` loaded; `where`: (batch, first row of the sequence, its rows, q tile, q head)."""
    c = config
    batch, first_row, seqlen_q, q_tile, q_head = where
    vectors, lane = c.dq_elements // 1024, cute.arch.lane_idx()
    first, first_column = piece % 4 * 16 + lane // 4, 0
    if const_expr(c.tile_m == 64):
        first_column = piece // 4 * (c.head_dim // 2)
    else:
        first += piece // 4 * 64
    for half in cutlass.range_constexpr(2):
        converted = cute.make_rmem_tensor((2, vectors), mdQ.element_type)
        converted.store((values[None, half, None].load() * scale).to(mdQ.element_type))
        row = q_tile * c.tile_m + first + 8 * half
        line = mdQ[batch, first_row + row, q_head, None]
        columns = cute.local_tile(line, (8 * vectors,), (first_column // (8 * vectors),))
        registers.store_rows(converted, columns, lane, row < seqlen_q)
