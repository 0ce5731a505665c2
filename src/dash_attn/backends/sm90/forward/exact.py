"""Arithmetic that the compiler must not choose.

It may make one instruction of a product and a sum, or two, as it finds better, and otherwise in another loop.
Where a row's bits must be the same wherever it is computed, the source says which it is.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import math as mlir_math
from cutlass.cutlass_dsl import T, dsl_user_op

from ..device import ptx


@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None) -> Float32:
    """a b + c, rounded once."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    return Float32(mlir_math.fma(*values, loc=loc, ip=ip))


@dsl_user_op
def polynomial_exp2(exponent, *, loc=None, ip=None) -> Float32:
    """2^exponent without the exponential unit (FlashAttention-4, section 3.1), off by 9e-5 of it at most.

    2^floor goes into the exponent's bits; 2^rest is 1 + 0.69512 r + 0.22764 r^2 + 0.07707 r^3, the cubic with
    the least relative error of those that are 1 at 0 (fitted here). Beyond -127 .. 127 it is 0 or 2^127,
    and of NaN 0.
    """
    text = """{ .reg .f32 x, whole, rest, y; .reg .b32 bits, power;
        max.f32 x, $1, 0fC2FE0000; min.f32 x, x, 0f42FE0000;
        add.rm.f32 whole, x, 0f4B400000; sub.f32 rest, whole, 0f4B400000; sub.f32 rest, x, rest;
        fma.rn.f32 y, rest, 0f3D9DD554, 0f3E691BC4; fma.rn.f32 y, y, rest, 0f3F31F32D;
        fma.rn.f32 y, y, rest, 0f3F800000; mov.b32 bits, y;
        mov.b32 power, whole; shl.b32 power, power, 23; add.s32 bits, bits, power; mov.b32 $0, bits; }"""
    return Float32(ptx._asm(T.f32(), [Float32(exponent).ir_value(loc=loc, ip=ip)], text, "=f,f", loc, ip))


@dsl_user_op
def log2_below(number, *, loc=None, ip=None) -> Int32:
    """floor(log2(number)) of a positive Int32."""
    operands = [Int32(number).ir_value(loc=loc, ip=ip)]
    return Int32(ptx._asm(T.i32(), operands, "bfind.u32 $0, $1;", "=r,r", loc, ip))


@cute.jit
def finite(maximum) -> Float32:
    """A row's maximum, 0 if it has seen nothing yet: -inf - -inf would be NaN."""
    return cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum)


def without_sign(value, factor) -> Float32:
    """value * factor, and 0 for -0: a fold with what a row does not see makes 0 of -0, too."""
    return fma(value, factor, Float32(0.0))


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


def with_sink(maximum, total, sink):
    """Maximum and sum of a row with one key more, and what the row's output is multiplied by.

    The sink is the score of that key, a natural logarithm. The key has no value.
    """
    maximum, left, right = weights(maximum, sink * math.log2(math.e))
    return maximum, folded(total, left, Float32(1.0), right), left


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
