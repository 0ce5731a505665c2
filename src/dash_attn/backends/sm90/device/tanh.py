"""tanh to the precision of scores: ``..softcap`` says how and why."""

from __future__ import annotations

import struct

from cutlass import Float32
from cutlass.cutlass_dsl import T, dsl_user_op

from ..softcap import BOUND, P, Q
from . import ptx


def _hex(value: float) -> str:
    """A float32 constant of PTX."""
    return "0f" + struct.pack(">f", value).hex().upper()


def _horner(name: str, coefficients: tuple[float, ...]) -> str:
    """A polynomial of ``square`` whose leading coefficient is 1."""
    first, *others = (_hex(x) for x in coefficients)
    steps = [f"fma.rn.f32 {name}, {name}, square, {x};" for x in others]
    return " ".join([f"add.rn.f32 {name}, square, {first};", *steps])


_TANH = f"""{{ .reg .f32 u, square, above, below;
    mul.rn.f32 u, $1, $2; min.NaN.f32 u, u, {_hex(BOUND)}; max.NaN.f32 u, u, {_hex(-BOUND)};
    mul.rn.f32 square, u, u; {_horner("above", P)} {_horner("below", Q)}
    rcp.approx.ftz.f32 below, below; mul.rn.f32 above, above, u; mul.rn.f32 $0, above, below; }}"""


@dsl_user_op
def tanh(value, factor, *, loc=None, ip=None) -> Float32:
    """tanh(value factor / STRETCH), at most 1 in size; of NaN NaN.

    Operations are fused where it says so here and nowhere else, so that all copies agree.
    """
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (value, factor)]
    return Float32(ptx._asm(T.f32(), operands, _TANH, "=f,f,f", loc, ip))
