"""The kernel after the main one of a backward: dK and dV of head groups and, where no contribution to dQ
has waited, dQ."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream

from ....schedule.layout import HEADER
from ..arguments import regrouped
from ..backward import finish
from ..backward.add_up import GroupsOf, RowsOf, add_up
from ..device import plan_view
from ..device.fakes import vector
from ..device.operands import DTYPES
from ..device.places import fake_places, matrix_at, vector_at
from ..places import Place, Sizes
from .arguments import MATRICES, Launch, Parts
from .config import ConvertConfig


class Memory(NamedTuple):
    """Global memory; see Tensors and Workspace of the backward."""

    dq_acc: Any
    group_sums: Any
    dq: Any
    dk: Any
    dv: Any
    table: Any


class Convert:
    """What is left after the main kernel.

    Where no contribution has waited, dQ = softmax scale * fp32 dQ in the output dtype: one block per q tile
    and head (`q_tiles` of a head). Contributions that are apart are added before, by a block per piece of a
    tile, whose warps share the columns. Where kv heads have several head groups, more blocks add the
    groups' sums of dK and dV of a kv tile (`kv_tiles` of a head), in ascending order, and finish them (dV
    unscaled).
    """

    def __init__(self, config: ConvertConfig):
        self.config = config

    @cute.jit
    def __call__(self, memory: Memory, launch: Launch, stream):
        c = self.config
        self.kernel(memory, launch.scale, launch.q_tiles).launch(
            grid=(launch.q_tiles * c.q_blocks + launch.kv_tiles * c.kv_blocks, memory.dq.shape[2], 1),
            block=(c.threads, 1, 1),
            # All registers it can use: what it reads is then on its way together.
            min_blocks_per_mp=1 if c.apart else 0,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, memory: Memory, scale: Float32, q_tiles: Int32) -> None:
        c, mdQ, table = self.config, memory.dq, memory.table
        index, y, _ = cute.arch.block_idx()
        q_blocks = q_tiles * c.q_blocks
        if const_expr(not c.apart):
            cute.arch.griddepcontrol_wait()
        if index < q_blocks:
            key = index // c.q_blocks * mdQ.shape[2] + y
            tile, where = finish.locate(c, table, table[HEADER.q_map_offset], key, mdQ)
            if const_expr(c.apart):
                # The table was there before the main kernel, which lets this one start at its own start.
                count = finish.contributions(table, index // c.q_blocks)
                cute.arch.griddepcontrol_wait()
                piece, part = index % c.q_blocks, cute.arch.warp_idx()
                values = finish.sum_apart(c, memory.dq_acc, table, tile, count, piece, part)
                first = part * cute.size(values.shape[2])
                finish.store_piece(c, values, mdQ, where, piece, scale, first)
            else:
                piece = cute.arch.warp_idx()
                values = finish.load_place(c, memory.dq_acc, Int64(tile), piece)
                finish.store_piece(c, values, mdQ, where, piece, scale)
        elif y // 2 < memory.dk.shape[2]:  # a kv head of two head groups has two q heads at least
            if const_expr(c.apart):
                cute.arch.griddepcontrol_wait()
            if y % 2 == 0:
                self.add_groups(memory, 0, scale, index - q_blocks, y // 2)
            else:
                self.add_groups(memory, 1, Float32(1.0), index - q_blocks, y // 2)

    @cute.jit
    def add_groups(
        self, memory, which: cutlass.Constexpr[int], scale: Float32, block: Int32, kv_head: Int32
    ) -> None:
        """dK (`which` 0) or dV (1) of one kv tile: its groups' sums added up, 32 columns at a time."""
        c, table, mdX = self.config, memory.table, (memory.dk, memory.dv)[which]
        index, thread = block // c.kv_blocks, block % c.kv_blocks * c.threads + cute.arch.thread_idx()[0]
        sequence, seq = plan_view.sequence_of_tile(table, HEADER.kv_map_offset, index)
        batch, first_row = plan_view.first_k_row(seq, sequence, mdX.shape[0])
        if seq.head_groups > 1:
            kv_tile = index - seq.kv_tile_first
            slot = seq.group_sum_first + (kv_head * seq.kv_tile_count + kv_tile) * seq.head_groups
            of = GroupsOf(slot, seq.head_groups, which, scale)
            to = RowsOf(mdX, batch, first_row, kv_tile, kv_head, seq.seqlen_k)
            add_up(c, memory.group_sums, of, to, thread)


class Program:
    def __init__(self, config: ConvertConfig):
        self.config, self.convert = config, Convert(config)

    @cute.jit
    def __call__(self, table, *arguments):
        """Called with the plan table, the place of each of ``MATRICES``, and the fields of ``Sizes``,
        ``Parts`` and ``Launch``; traced with a stream behind."""
        kinds = [Place] * len(MATRICES) + [Sizes, Parts, Launch]
        *places, sizes, parts, launch = regrouped(arguments[:-1], *kinds)
        c, dtype = self.config, DTYPES[self.config.dtype]
        columns = [None] * 3 if c.padded else [c.head_dim, c.head_dim, c.head_dim_v]
        extents = (sizes.of_q, sizes.of_k, sizes.of_v)
        dq_acc = vector_at(parts.dq_acc, parts.dq_acc_words)
        group_sums = vector_at(parts.group_sums, parts.group_sums_words)
        dq, dk, dv = (matrix_at(dtype, *of) for of in zip(places, extents, columns))
        self.convert(Memory(dq_acc, group_sums, dq, dk, dv, table), launch, arguments[-1])


def fake_arguments(config: ConvertConfig, env_stream: bool):
    """What stands for the arguments of `Program.__call__` while it is compiled."""
    return [
        vector(Int32, 16), *fake_places(len(MATRICES)), *(Int32(1) for _ in Sizes._fields),
        *(Int64(32) for _ in Parts._fields), *Launch(Float32(1.0), Int32(1), Int32(1)),
        make_fake_stream(use_tvm_ffi_env_stream=env_stream),
    ]  # fmt: skip
