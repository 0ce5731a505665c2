"""What the roles of a block share of an item: words beside Q, rings of tiles, named barriers."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ..device.operands import tile_layout
from ..device.ring import Ring
from .config import ROWS, ForwardConfig

# Named barriers: one per warpgroup each, and of the last kind one per warpgroup and Q stage
WARPGROUP_BARRIER, TURN_BARRIER, DONE_BARRIER = 1, 4, 7


@dataclass(frozen=True)
class Rings:
    """q: tiles of Q with their item, until the item is done with; k, v: tiles of K and V."""

    q: Ring
    k: Ring
    v: Ring


class Info:
    """Words that the load warp leaves beside Q of an item."""

    valid, q_head, kv_first, kv_last, low, high, seqlen_k, seqlen_q, row = range(9)
    tma_row, tma_batch, tma_shift, batch, row_first, partial = range(9, 15)
    index = 15  # of the item; where it is traced
    sink = 16  # the bits of a float, natural logarithm; where there is one
    first_key, first_bounds = 17, 18  # of its sequence; where keys have intervals of rows
    keys = 17  # where they lie, for `LoadRole.run_values`; where a warp of its own loads V


def info_words(config: ForwardConfig) -> int:
    """Words per item."""
    return 20 if config.sink or config.intervals or config.v_warp else 16


def segment_end(config: ForwardConfig, begin, kv_last):
    """The last kv tile of the segment in which one stands, if the item goes so far."""
    per_segment = config.segment // config.tile_n
    return cutlass.min((begin // per_segment + 1) * per_segment - 1, kv_last)


def tile_of_out(config: ForwardConfig, q, place):
    """The tile of O at a place of Q, whose tile may have more columns: those of O are its first."""
    tile = q[None, None, place]
    if const_expr(config.head_dim_v == config.head_dim):
        return tile
    layout = tile_layout(q.element_type, ROWS, config.head_dim_v, 1).outer
    return cute.make_tensor(tile.iterator, cute.select(layout, [0, 1]))


def done_barrier(config: ForwardConfig, group, stage):
    """The barrier at which a warpgroup is done with its item: O, unless it is in parts, is where Q was. Every
    stage has one, for a warpgroup may be done with the next item before this one is stored."""
    return DONE_BARRIER + group * config.q_stages + stage
