"""Adding up the fp32 sums of dK or dV that head groups have left of a kv tile, in ascending order."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..device import registers


class GroupsOf(NamedTuple):
    """slot: of the first head group; groups: how many follow each other; which: 0 of dK, 1 of dV; scale: what
    the total is multiplied by."""

    slot: Any
    groups: Any
    which: cutlass.Constexpr
    scale: Any


class RowsOf(NamedTuple):
    """target: dK or dV, (B, Sk, Hkv, D); first_row: of the sequence in its batch; rows: of the sequence."""

    target: Any
    batch: Any
    first_row: Any
    kv_tile: Any
    kv_head: Any
    rows: Any


@cute.jit
def add_up(config: cutlass.Constexpr, sums, of: GroupsOf, to: RowsOf, tidx: Int32) -> None:
    """Add, scale, round once and store a kv tile, 32 columns at a time, or 16. `tidx`: one of 256 threads."""
    c, target = config, to.target
    size = c.tile_n * c.head_dim
    vectors = c.tile_n * (c.head_dim, c.head_dim_v)[of.which] // 1024
    group, lane = tidx // 128, tidx % 32
    start = (Int64(of.slot) * 2 + of.which) * size + group * (512 * vectors) + tidx % 128 * 4
    some = 4 if vectors % 4 == 0 else 2  # vectors of 8 columns
    layout = cute.make_layout((4, some), stride=(1, 512))
    for chunk in cutlass.range(vectors // some, unroll=1):
        total = cute.make_rmem_tensor((4, some), Float32)
        added = cute.make_rmem_tensor((4, some), Float32)
        _load(sums, layout, start + chunk * (512 * some), total)
        for index in cutlass.range(1, of.groups, unroll=1):
            _load(sums, layout, start + chunk * (512 * some) + Int64(index) * (2 * size), added)
            total.store(total.load() + added.load())
        pairs = cute.make_tensor(total.iterator, cute.make_layout((2, 2, some)))
        for half in cutlass.range_constexpr(2):
            scaled = pairs[None, half, None].load() * of.scale
            values = registers.converted_rows(scaled, some, target.element_type)
            columns = chunk
            if const_expr(c.tile_n == 64):  # the warpgroups share the columns, otherwise the rows
                columns = chunk + group * (vectors // some)
                row = to.kv_tile * c.tile_n + tidx % 128 // 32 * 16 + lane // 4 + 8 * half
            else:
                row = to.kv_tile * c.tile_n + group * 64 + tidx % 128 // 32 * 16 + lane // 4 + 8 * half
            line = target[to.batch, to.first_row + row, to.kv_head, None]
            line = cute.local_tile(line, (8 * some,), (columns,))
            there = registers.columns_from(c, target, 8 * some * columns, 8 * some)
            registers.store_rows(values, line, lane, row < to.rows, there)


def _load(sums, layout, start: Int64, values) -> None:
    source = cute.make_tensor(sums.iterator + cute.assume(start, divby=4), layout)
    cute.autovec_copy(source, values)
