"""tanh to the precision of scores: ``..softcap`` says how and why."""

from __future__ import annotations

import math
import struct

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import T, dsl_user_op

from ..softcap import FAR, NEAR, STRETCH
from . import ptx

_BIT_OF_FAR = 1 << 30  # of a float32: it is at least 2 in size, or NaN


def _hex(value: float) -> str:
    """A float32 constant of PTX."""
    return "0f" + struct.pack(">f", value).hex().upper()


def _horner(name: str, coefficients: tuple[float, ...]) -> str:
    """The steps of a polynomial of ``square``, whose leading coefficient ``name`` holds."""
    return " ".join(f"fma.rn.f32 {name}, {name}, square, {_hex(x)};" for x in coefficients)


_NEAR = f"""mul.rn.f32 square, $1, $1; mov.f32 near, {_hex(NEAR[0])}; {_horner("near", NEAR[1:])}"""
_TANH_NEAR = f"""{{ .reg .f32 square, near; {_NEAR} mul.rn.f32 $0, near, $1; }}"""
# The sign comes last: were $1 needed after $0 has a value, ptxas would keep both of all values.
_TANH = f"""{{ .reg .f32 square, near, size, far; .reg .pred is_near; {_NEAR}
    abs.f32 size, $1; mul.rn.f32 near, near, size;
    mul.rn.f32 far, size, {_hex(2 / STRETCH * math.log2(math.e))}; ex2.approx.ftz.f32 far, far;
    add.rn.f32 far, far, {_hex(1)}; rcp.approx.ftz.f32 far, far; fma.rn.f32 far, far, {_hex(-2)}, {_hex(1)};
    setp.lt.f32 is_near, size, {_hex(FAR)}; selp.f32 far, near, far, is_near; copysign.f32 $0, $1, far; }}"""


@dsl_user_op
def _tanh(u, instructions: str, *, loc=None, ip=None) -> Float32:
    # Operations are fused where it says so here and nowhere else, so that all copies agree.
    return Float32(ptx._asm(T.f32(), [Float32(u).ir_value(loc=loc, ip=ip)], instructions, "=f,f", loc, ip))


def tanh(u) -> Float32:
    """tanh(u / STRETCH), at most 1 in size; of NaN NaN."""
    return _tanh(u, _TANH)


def tanh_near(u) -> Float32:
    """The same where u is less than FAR in size."""
    return _tanh(u, _TANH_NEAR)


def scale_and_look(values, places, factor) -> cutlass.Boolean:
    """Multiply the values at `places`: whether any of the warp's is FAR from 0, or NaN."""
    words, bits = cute.recast_tensor(values, Int32), Int32(0)
    for i in places:
        values[i] = values[i] * factor
        bits = bits | words[i]
    return cute.arch.vote_any_sync((bits & _BIT_OF_FAR) != 0)


@cute.jit
def cap(values, places: cutlass.Constexpr, far) -> None:
    """tanh(u / STRETCH) in place of the values u at `places`, of which `scale_and_look` found some `far`."""
    if far:
        for i in places:
            values[i] = tanh(values[i])
    else:
        for i in places:
            values[i] = tanh_near(values[i])
