"""Operands of wgmma: their dtypes, their places in shared memory and registers, and a product of two."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op

from ..tiles import row_bytes_of
from . import ptx

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


def tile_layout(dtype, rows: int, columns: int, stages: int, row_bytes: int = 0):
    """Shared-memory layout (rows, columns, stages), columns contiguous in atoms of `row_bytes`.

    0: as many as the columns fill. Those of 16 are not swizzled.
    """
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {128: kinds.K_SW128, 64: kinds.K_SW64, 32: kinds.K_SW32, 16: kinds.K_INTER}
    atom = warpgroup.make_smem_layout_atom(kind[row_bytes or row_bytes_of(columns)], dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """View of a (rows, columns, stages) tile as (columns, rows, stages)."""
    shape = (tensor.shape[1], tensor.shape[0], tensor.shape[2])
    return cute.composition(tensor, cute.make_ordered_layout(shape, order=(1, 0, 2)))


def multiply(tiled_mma, acc, a, b, accumulate: bool, first: int = 0) -> None:
    """Issue and commit acc (+)= a b as one wgmma group.

    a and b are (MMA, M or N, K); a begins at block `first` of b's K.
    """
    pairs = ((a[None, None, k], b[None, None, first + k]) for k in range(cute.size(a.shape[2])))
    multiply_all([(tiled_mma, acc, pairs, accumulate)])


def multiply_all(products) -> None:
    """Issue and commit several products as one wgmma group: (tiled MMA, acc, blocks of a and b along K,
    whether acc already holds what they are added to)."""
    warpgroup.fence()
    for tiled_mma, acc, pairs, accumulate in products:
        atom = cute.make_mma_atom(tiled_mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, accumulate)
        for a, b in pairs:
            cute.gemm(atom, acc, a, b, acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def blocks_of(operand) -> list[cute.Tensor]:
    """The blocks of an operand, (MMA, M or N, K), along K."""
    return [operand[None, None, k] for k in range(cute.size(operand.shape[2]))]


def as_operand_a(acc: cute.Tensor, dtype) -> cute.Tensor:
    """View an accumulator (64 x N per warpgroup) as a register A operand of K = N; convert it if fp32.

    Every value stays in its thread, and keeps its place.
    """
    out = acc
    if acc.element_type is not dtype:
        out = cute.make_rmem_tensor(acc.layout, dtype)
        out.store(acc.load().to(dtype))
    blocks = cute.size(acc) // 8
    return cute.make_tensor(out.iterator, cute.make_layout(((2, 2, 2), 1, blocks), stride=((1, 2, 4), 0, 8)))


def operand_registers(columns: int, dtype) -> cute.Tensor:
    """Registers for a first operand of 64 rows per warpgroup, for `read_operand` to fill."""
    return as_operand_a(cute.make_rmem_tensor(64 * columns // 128, dtype), dtype)


def read_operand(tiled_mma, thread, tile, registers) -> None:
    """Read a tile (rows, columns) of shared memory into the registers of a first operand."""
    matrices = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), tile.element_type)
    load = cute.make_tiled_copy_A(matrices, tiled_mma).get_slice(thread)
    cute.copy(load, load.partition_S(tile), load.retile(registers))


@dsl_user_op
def packed(low, high, dtype, *, loc=None, ip=None) -> Int32:
    """Two values as bf16 or fp16 in one word. The compiler does not move it to where it keeps more
    registers."""
    name = "bf16x2" if dtype is BFloat16 else "f16x2"
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (high, low)]
    text = f"cvt.rn.{name}.f32 $0, $1, $2;"
    return Int32(ptx._asm(T.i32(), values, text, "=r,f,f", loc, ip))
