"""tanh to the precision of scores: ``..softcap`` says how and why."""

from __future__ import annotations

import struct

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import T, dsl_user_op

from ..softcap import BOUND, FAR, NARROW, NEAR, P, Q
from . import ptx

_BIT_OF_FAR = 1 << 30  # of a float32: it is at least 2 in size, or NaN
_AT_ONCE = 8  # values, where some are far


def _hex(value: float) -> str:
    """A float32 constant of PTX."""
    return "0f" + struct.pack(">f", value).hex().upper()


def _horner(name: str, coefficients: tuple[float, ...]) -> str:
    """The steps of a polynomial of ``square``, whose leading coefficient ``name`` holds."""
    return " ".join(f"fma.rn.f32 {name}, {name}, square, {_hex(x)};" for x in coefficients)


def _monic(name: str, coefficients: tuple[float, ...]) -> str:
    """Likewise, and its leading coefficient is 1."""
    return f"add.rn.f32 {name}, square, {_hex(coefficients[0])}; {_horner(name, coefficients[1:])}"


_NEAR = f"""mul.rn.f32 square, $1, $1; mov.f32 near, {_hex(NEAR[0])}; {_horner("near", NEAR[1:])}
    mul.rn.f32 near, near, $1;"""
_TANH_NEAR = f"""{{ .reg .f32 square, near; {_NEAR} mov.f32 $0, near; }}"""
_TANH = f"""{{ .reg .f32 u, square, near, above, below; .reg .pred is_near; {_NEAR}
    mul.rn.f32 u, $1, {_hex(NARROW)}; min.NaN.f32 u, u, {_hex(BOUND)}; max.NaN.f32 u, u, {_hex(-BOUND)};
    mul.rn.f32 square, u, u; {_monic("above", P)} {_monic("below", Q)}
    rcp.approx.ftz.f32 below, below; mul.rn.f32 above, above, u; mul.rn.f32 above, above, below;
    abs.f32 u, $1; setp.lt.f32 is_near, u, {_hex(FAR)}; selp.f32 $0, near, above, is_near; }}"""


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
    for i in places:
        values[i] = values[i] * factor
    return _any_far(values, places)


def _any_far(values, places) -> cutlass.Boolean:
    words, bits = cute.recast_tensor(values, Int32), Int32(0)
    for i in places:
        bits = bits | words[i]
    return cute.arch.vote_any_sync((bits & _BIT_OF_FAR) != 0)


@cute.jit
def cap(values, places: cutlass.Constexpr, far) -> None:
    """tanh(u / STRETCH) in place of the values u at `places`, of which `scale_and_look` found some `far`."""
    if far:
        for first in cutlass.range_constexpr(0, len(places), _AT_ONCE):
            _cap_some(values, places[first : first + _AT_ONCE])
    else:
        for i in places:
            values[i] = tanh_near(values[i])


@cute.jit
def _cap_some(values, places: cutlass.Constexpr) -> None:
    """Near the cap are few scores, and these often side by side. Where they are not, all values at a time
    would be faster (docs/experiments/softcap.md)."""
    if _any_far(values, places):
        for i in places:
            values[i] = tanh(values[i])
    else:
        for i in places:
            values[i] = tanh_near(values[i])
