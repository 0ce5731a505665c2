"""Arithmetic that the compiler must not choose.

It may make one instruction of a product and a sum, or two, as it finds better, and otherwise in another loop.
Where a row's bits must be the same wherever it is computed, the source says which it is.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass._mlir.dialects import math
from cutlass.cutlass_dsl import T, dsl_user_op

from ..device import ptx


@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None) -> Float32:
    """a b + c, rounded once."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    return Float32(math.fma(*values, loc=loc, ip=ip))


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
