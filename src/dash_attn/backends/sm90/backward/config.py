"""Static configuration of the Hopper backward kernels: everything that changes the machine code."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from ..tiles import Registers, has_softcap_apart, row_bytes_of, tiles_of

SHARED_MEMORY_LIMIT = 232_448  # bytes one block may own on sm_90
MMA_WARPGROUPS = 2
MMA_WARPS = 4 * MMA_WARPGROUPS
THREADS = 128 * (1 + MMA_WARPGROUPS)
DS_BARRIER, V_BARRIER, FINISH_BARRIER = 1, 2, 4  # named; from V_BARRIER on one per MMA warpgroup
SLOTS = 8  # contributions that the warps around the reduction may be apart
# The control buffer, int32: counters of items claimed, blocks arrived, dQ tiles queued and taken, each on a
# line of 128 bytes; then one ticket counter per dQ tile, and one queue entry per dQ tile.
CLAIMED, ARRIVED, FINISHED, TAKEN = 0, 32, 64, 96
CONTROL_WORDS = 128
SEEN_WORDS = 8
"""Of an item whose keys have intervals of rows: tasks per q head that are executed; the first and the last q
tile that see any of its keys; the first row that sees all of them, and the one behind the last; the number of
its first key among all keys. See seen.py."""
CLAIM_AHEAD = 3
"""Tickets of an item that need not be granted yet when its block claims another, where that is safe."""


class Accumulation(Enum):
    """How contributions to a dQ tile are added."""

    TICKETS = "tickets"  # in the order of the plan's tickets
    APART = "apart"  # in that order, too, behind the main kernel: each has memory of its own until then
    ATOMIC = "atomic"  # as they come, into a zeroed dQ: the negative control


@dataclass(frozen=True)
class BackwardConfig:
    """One compiled variant of the backward pass.

    Attributes:
        direction: the package of its program.
        head_dim: of Q and K.
        padded: tensors may have fewer columns; the copy engine fills a tile with zeros.
        dtype: "bf16" or "fp16".
        accumulation: how contributions to dQ are added.
        key_sums: every item adds its dK and dV to fp32 sums that several launches share, and finishes none.
        softcap: scores s are softcap * tanh(s / softcap).
        intervals: rows see a key in an interval of its own, and tasks that no row sees are left out.
        spin_limit: bounds every wait for a ticket or a complete dQ tile; 0: unbounded. An exceeded bound is
            reported in the error buffer.
        dump_contributions: keep every task's fp32 contribution to dQ.
        trace: keep when every task got its ticket, had its contribution, and was done.
        head_dim_v: of V, 0: the same.
        tile_m, tile_n, q_stages, do_stages, ds_stages, dq_stages, k_columns, v_columns: 0: what
            :mod:`..tiles` says, see there.

    Raises:
        ValueError: a value is not supported, or does not fit the others.
    """

    direction: ClassVar[str] = "backward"

    head_dim: int
    dtype: str = "bf16"
    padded: bool = False
    accumulation: Accumulation = Accumulation.TICKETS
    key_sums: bool = False
    softcap: bool = False
    intervals: bool = False
    spin_limit: int = 0
    dump_contributions: bool = False
    trace: bool = False
    tile_m: int = 0
    tile_n: int = 0
    q_stages: int = 0
    do_stages: int = 0
    ds_stages: int = 0
    dq_stages: int = 0
    k_columns: int = 0
    v_columns: int = 0
    head_dim_v: int = 0

    def __post_init__(self) -> None:
        if self.head_dim_v == 0:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        for name, value in tiles_of(self.head_dim, self.head_dim_v)._asdict().items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)
        if self.dtype not in ("bf16", "fp16"):
            raise ValueError(f"dtype must be 'bf16' or 'fp16', got {self.dtype!r}")
        rows = tiles_of(self.head_dim, self.head_dim_v).tile_n
        if self.tile_n != rows:
            raise ValueError(f"tile_n must be {rows} (64 rows per warpgroup), got {self.tile_n}")
        if self.tile_m not in (64, 128):
            raise ValueError(f"tile_m must be 64 or 128, got {self.tile_m}")
        for name, most in (("k_columns", self.head_dim), ("v_columns", self.head_dim_v)):
            if getattr(self, name) not in range(0, most + 1, 16):
                raise ValueError(
                    f"{name} must be a multiple of 16 and at most {most}, got {getattr(self, name)}"
                )
        self._check_buffers()

    def _check_buffers(self) -> None:
        if self.shared_bytes > SHARED_MEMORY_LIMIT:
            raise ValueError(
                f"{self} needs {self.shared_bytes} bytes of shared memory, limit {SHARED_MEMORY_LIMIT}"
            )
        if self.q_stages < 2 or self.do_stages < (1 if self.split else 2):
            raise ValueError(f"{self} has one stage of Q or dO; the load warp must be a task ahead")
        if self.leaving_stages != (1 if self.tight or self.split else 2):
            raise ValueError(f"{self} needs two stages of the buffer that dK leaves through, or one if tight")
        if self.split and (self.ds_stages, self.tile_m) != (2, 64):
            raise ValueError(f"{self}: P and dS have a buffer each, for 64 rows of Q")
        if self.head_dim_v != self.head_dim and not self.tight:
            raise ValueError(f"{self}: V has the head dim of K where the kernel is not tight")
        if self.softcap and self.tight:
            raise ValueError(f"{self}: no register is left for what a softcap multiplies dP by")
        debugging = self.spin_limit, self.dump_contributions, self.trace
        if self.apart and any((self.key_sums, self.intervals, *debugging)):
            raise ValueError(
                f"{self}: contributions are not apart in segments, beside intervals of rows, or where a "
                "debugging variant is asked for"
            )
        if self.apart and self.softcap and not has_softcap_apart(self.head_dim, self.head_dim_v):
            raise ValueError(f"{self}: no register is left for contributions apart beside a softcap")
        if self.intervals and (self.tight or self.split or self.softcap):
            raise ValueError(f"{self}: intervals of rows are for head dims up to 128, without a softcap")
        if self.intervals and (self.key_sums or self.dump_contributions):
            raise ValueError(
                f"{self}: where tasks are left out, all of a sequence is one launch, and no "
                "contributions are kept"
            )
        tile, (alone, behind) = 4 * self.dq_elements, self.finish_stages
        least = max(alone * tile, behind * tile + 4 * self.dq_stage * self.dq_stages)
        if self.tiles_bytes < least:
            raise ValueError(f"{self} keeps tiles in {self.tiles_bytes} bytes, finishing needs {least}")

    @property
    def kernels(self) -> tuple[str, ...]:
        """Class names, which the compiler puts into the names of the kernels, in the order of launches."""
        before = ["MarkSeen"] * self.intervals + ["PutUnseen"] * (self.intervals and self.waits)
        return ("Preprocess", *before, "Backward")

    @property
    def registers(self) -> Registers:
        """Registers per thread."""
        return tiles_of(self.head_dim, self.head_dim_v).registers

    @property
    def ordered(self) -> bool:
        """Whether the order of additions is the plan's, so that gradients repeat bit for bit."""
        return self.accumulation is not Accumulation.ATOMIC

    @property
    def waits(self) -> bool:
        """Whether contributions wait for their tickets; then the main kernel also converts complete tiles."""
        return self.accumulation is Accumulation.TICKETS

    @property
    def apart(self) -> bool:
        """Whether each contribution has memory of its own, and nobody waits."""
        return self.accumulation is Accumulation.APART

    @property
    def tiles_before(self) -> int:
        """q tiles per block of preprocessing. Two leave half of the SMs to a main kernel that begins early.
        With 256 columns they take more registers than a block has."""
        return 2 if self.apart and not self.split else 1

    @property
    def delayed_dq(self) -> bool:
        """Whether dQ is computed a task later: where dS has two buffers."""
        return self.ds_stages == 2 and not self.split

    @property
    def wide(self) -> bool:
        """Whether q tiles have 128 rows, and each warpgroup makes dQ of 64."""
        return self.tile_m == 128

    @property
    def tight(self) -> bool:
        """Whether dK and dV take so many registers that one tile of scores has room beside them, and not two:
        see `TightMma`."""
        return self.head_dim + self.head_dim_v > 256 and not self.split

    @property
    def split(self) -> bool:
        """Whether a kv tile has 64 rows, and each warpgroup half the columns of dK and dV: `SplitColumns`."""
        return self.tile_n == 64

    @property
    def dq_pieces(self) -> int:
        """A contribution to dQ leaves in so many pieces, each through a buffer of its own: columns of both
        warpgroups' halves."""
        return 4 if self.split else 1

    @property
    def dq_stage(self) -> int:
        """fp32 values of one buffer of dQ."""
        return self.dq_elements // self.dq_pieces

    @property
    def k_row_bytes(self) -> int:
        """Of the rows in which K is kept. Each warpgroup makes half the columns of dQ where a q tile has 64
        rows: 96 of 192, 48 of 96, or 40 of 80, are no whole number of 128 bytes."""
        return row_bytes_of(self.head_dim if self.wide else self.head_dim // 2)

    @property
    def finish_stages(self) -> tuple[int, int]:
        """Complete dQ tiles that a block brings into shared memory at a time: if it got no items, and if it
        had some, whose last dQ may still be leaving. Even, see finish.py."""
        if self.split:
            return 2, 2
        return (4, 2) if self.tight else (6, 4)

    @property
    def leaving_stages(self) -> int:
        """Stages of the buffer that dK leaves through: of dS if q tiles are wide, else of dQ; K where the
        columns are split."""
        if self.split:
            return 1
        return self.ds_stages if self.wide else self.dq_stages

    @property
    def dk_stages(self) -> int:
        """Tiles of dK that fit one stage of the buffer that dK leaves through."""
        if self.split:
            return 1
        stage = 2 * self.tile_m * self.tile_n if self.wide else 4 * self.dq_elements
        return stage // (2 * self.tile_n * self.head_dim)

    @property
    def dq_elements(self) -> int:
        """fp32 values of one dQ tile."""
        return self.tile_m * self.head_dim

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one block. Barriers, slots and mailbox take at most 1,280 bytes, 1,024 with few
        stages, and tiles begin at a multiple of 1 KB."""
        head = (1024 if self.tight else 1280) + 4 * self.tile_m * (self.q_stages + self.do_stages)
        return -(-head // 1024) * 1024 + self.tiles_bytes

    @property
    def tiles_bytes(self) -> int:
        """Shared memory of the tiles, from Q on; those of dQ are the last."""
        q = 2 * self.tile_m * (self.head_dim * self.q_stages + self.head_dim_v * self.do_stages)
        kv = 2 * self.tile_n * (self.head_dim + self.head_dim_v)
        ds = 2 * self.tile_m * self.tile_n * self.ds_stages
        return q + kv + ds + 4 * self.dq_stage * self.dq_stages
