"""Tensors at the addresses that a launch is given (../places.py), as `fakes` describes them."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..places import Place


def matrix_at(dtype, place: Place, extents, columns=None):
    """(B, S, H, D) of `extents`; `columns`: D, where it is a constant of the compiler."""
    batch, rows, heads, given = extents
    columns = cute.assume(given, divby=8) if columns is None else columns
    strides = (*(cute.assume(n, divby=8) for n in place[1:]), 1)
    pointer = cute.make_ptr(dtype, place.address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout((batch, rows, heads, columns), stride=strides))


def statistics_at(address, extents):
    """LSE: (B, H, S) fp32, contiguous. `extents`: of q."""
    batch, rows, heads, _ = extents
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
    strides = (Int64(heads) * rows, Int64(rows), 1)
    return cute.make_tensor(pointer, cute.make_layout((batch, heads, rows), stride=strides))


def vector_at(address, words):
    """A part of a buffer: fp32 words, from a multiple of 128 bytes on."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=128)
    return cute.make_tensor(pointer, cute.make_layout((words,), stride=(1,)))


def words_of(vector, element, align: int):
    """A vector seen as words of another kind."""
    pointer = cute.recast_ptr(vector.iterator.align(align), dtype=element)
    return cute.make_tensor(pointer, vector.layout)


def unused_rows(vector, element):
    """What a variant never touches: rows (n, m) where `vector` lies."""
    pointer = cute.recast_ptr(vector.iterator.align(16), dtype=element)
    return cute.make_tensor(pointer, cute.make_layout((Int32(1), Int32(1)), stride=(Int64(1), 1)))


def fake_places(number: int):
    """Numbers for `number` places, to compile for."""
    return [Int64(0)] * (number * len(Place._fields))
