"""Arithmetic that the compiler must not choose.

It may make one instruction of a product and a sum, or two, as it finds better, and otherwise in another loop.
Where a row's bits must be the same wherever it is computed, the source says which it is.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass._mlir.dialects import math as mlir_math
from cutlass.cutlass_dsl import T, dsl_user_op

from ..device import ptx


@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None) -> Float32:
    """a b + c, rounded once."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    return Float32(mlir_math.fma(*values, loc=loc, ip=ip))


@dsl_user_op
def packed(low, high, dtype, *, loc=None, ip=None) -> Int32:
    """Two values as bf16 or fp16 in one word. The compiler does not move it to where it keeps more
    registers."""
    name = "bf16x2" if dtype is BFloat16 else "f16x2"
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (high, low)]
    text = f"cvt.rn.{name}.f32 $0, $1, $2;"
    return Int32(ptx._asm(T.i32(), values, text, "=r,f,f", loc, ip))


@cute.jit
def finite(maximum) -> Float32:
    """A row's maximum, 0 if it has seen nothing yet: -inf - -inf would be NaN."""
    return cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum)


@cute.jit
def folded(before, left, after, right) -> Float32:
    """before * left + after * right."""
    return fma(before, left, after * right)


def weights(before, after):
    """The maximum of two segments, and what the first and the second one are multiplied by."""
    maximum = cute.arch.fmax(before, after)
    shift = finite(maximum)
    left, right = (cute.math.exp2(x - shift, fastmath=True) for x in (before, after))
    return maximum, left, right


def row_sum(total) -> Float32:
    """The sum of a row from the parts of the four threads that have it."""
    for distance in (1, 2):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
    return total


def lse_of(maximum, total) -> Float32:
    """LSE of a row that has seen something."""
    return (maximum + cute.math.log2(total, fastmath=True)) * math.log(2.0)


def inverse(total) -> Float32:
    """What a row's output is multiplied by; 1 if it has seen nothing."""
    return Float32(1.0) / cutlass.select_(total == Float32(0.0), Float32(1.0), total)
