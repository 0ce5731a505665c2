"""The copy engine: tiles between shared memory and tensors whose sequences are dense or packed."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from ..arguments import Copy
from . import plan_view

MAX_INT32 = (1 << 31) - 1


@cute.jit
def copy_of(op: cutlass.Constexpr, tensor, layout, rows: cutlass.Constexpr[int]) -> Copy:
    """Copies of (rows, head_dim) tiles of a (B, S, H, D) tensor seen as `plan_view.tma_rows` says.

    Where the tensor has fewer columns than a tile, the others come as zeros, and are not written. Of a copy
    that has nothing but such columns, or such rows, an H200 looks up the first address of the view, which
    must exist: no view begins before its tensor.
    """
    batch_stride, row_stride, head_stride, _ = tensor.stride
    row_extent, batches, shifts = tensor.shape[1], tensor.shape[0], Int32(1)
    if tensor.shape[0] == 1:
        row_extent, batches, shifts = Int32(plan_view.PACKED_ROWS), Int32(MAX_INT32), Int32(MAX_INT32)
        batch_stride = (1 << 34) - row_stride
    batch_stride = cute.assume(batch_stride, divby=8)
    shape = (row_extent, tensor.shape[3], tensor.shape[2], batches, shifts)
    stride = (row_stride, 1, head_stride, batch_stride, row_stride)
    view = cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))
    tile = (rows, cute.size(layout, mode=[1]))
    return Copy(*cpasync.make_tiled_tma_atom(op, view, cute.select(layout, [0, 1]), tile))


def load_tile(copy: Copy, shared, rows, tile: Int32, head: Int32, barrier, columns: int = 0) -> None:
    """Start to load one tile of a sequence; `rows`: (row, batch, shift) as in `plan_view.tma_rows`;
    `columns`: which tile of columns."""
    target, source = partitions(copy, shared, rows, head, columns)
    cute.copy(copy.atom, source[None, tile], target, tma_bar_ptr=barrier)


def partitions(copy: Copy, shared, rows, head: Int32, columns: int = 0):
    """Partitions for the copy engine of a tile in shared memory, and of a sequence's tiles, (., tile).

    `rows` as in `load_tile`; `columns`: which tile of columns.
    """
    row, batch, shift = rows
    sequence = cute.domain_offset((row, 0), copy.tensor[None, None, head, batch, shift])
    tile_shape = (cute.size(shared, mode=[0]), cute.size(shared, mode=[1]))
    tiles = cute.flat_divide(sequence, tile_shape)[None, None, None, columns]
    return cpasync.tma_partition(
        copy.atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )
