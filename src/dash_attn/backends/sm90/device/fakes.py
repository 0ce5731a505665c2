"""Tensors without data, to compile for: strides 64 bit, rows of 16-byte multiples."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_tensor


def matrix(dtype):
    """(B, S, H, D), D a multiple of 8."""
    shape = (*(cute.sym_int32() for _ in range(3)), cute.sym_int32(divisibility=8))
    stride = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
    return make_fake_tensor(dtype, shape, stride, assumed_align=16)


def vector(element, align: int):
    return make_fake_tensor(element, (cute.sym_int64(),), (1,), assumed_align=align)


def statistics():
    """LSE: (B, H, S) fp32."""
    shape = tuple(cute.sym_int32() for _ in range(3))
    return make_fake_tensor(Float32, shape, (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)
