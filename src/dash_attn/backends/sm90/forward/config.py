"""Static configuration of the Hopper forward kernel: everything that changes the machine code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from ....schedule.constants import FORWARD_KEEP, FORWARD_ROOM, FORWARD_SEGMENT, FORWARD_TILE

ROWS = 64  # of a warpgroup
OVERLAPS = ("nothing", "products", "softmax")


@dataclass(frozen=True)
class ForwardConfig:
    """One compiled variant of the forward pass.

    Attributes:
        direction: the package of its program.
        kernels: class names, which the compiler puts into the names of the kernels.
        head_dim: of Q, K and V. Tensors may have fewer columns; the copy engine fills a tile with zeros.
        dtype: "bf16" or "fp16".
        warpgroups: that multiply, ROWS rows each.
        q_stages, kv_stages: tiles of Q, and of K and of V, in shared memory.
        tile_n, segment, keep, room: the numerics, :mod:`dash_attn.schedule.forward`.
        in_turns: warpgroups start their products in turns, so that one's softmax runs beside the products of
            the others. Without, they get out of step by themselves.
        early: an item's first scores are started beside the end of the item before it.
        overlap: what a warpgroup's own products run beside: "nothing"; "products": scores of the next tile
            beside P V of this one; "softmax": both, and P V also beside the softmax of the next tile
            (FlashAttention-3, section 3.2).
        exp2_share: of 8 values of 2^x, how many are a polynomial in place of the exponential unit's
            (FlashAttention-4, section 3.1). For experiments: it changes bits.
        sink: every q head has one score more, of a key without a value.
        softcap: scores s become softcap * tanh(s / softcap).
        trace: keep when every item began and was done, and on which SM (trace.py).
    """

    direction: ClassVar[str] = "forward"
    kernels: ClassVar[tuple[str, ...]] = ("Claims", "Forward", "Fold")

    head_dim: int
    dtype: str = "bf16"
    warpgroups: int = 2
    q_stages: int = 2
    kv_stages: int = 2
    tile_n: int = FORWARD_TILE
    segment: int = FORWARD_SEGMENT
    keep: float = FORWARD_KEEP
    room: int = FORWARD_ROOM
    in_turns: bool = False
    early: bool = False
    overlap: str = "products"
    exp2_share: int = 0
    sink: bool = False
    softcap: bool = False
    trace: bool = False

    def __post_init__(self) -> None:
        if self.segment % self.tile_n or self.tile_n % 16:
            raise ValueError(f"{self}: a segment is whole kv tiles, and those are multiples of 16 keys")
        if min(self.q_stages, self.kv_stages) < 2:
            raise ValueError(f"{self}: what comes next is loaded beside what is in use: two stages each")
        if self.overlap not in OVERLAPS:
            raise ValueError(f"overlap must be one of {', '.join(OVERLAPS)}, got {self.overlap!r}")
        if not 0 <= self.exp2_share <= 8:
            raise ValueError(f"exp2_share must be in 0..8, got {self.exp2_share!r}")
        if self.warpgroups * self.q_stages > 9 or self.warpgroups > 3:
            raise ValueError(f"{self}: a block has 16 named barriers, and three warps that store")

    @property
    def few(self) -> float:
        """A sum of powers of 2 that is not larger holds none of an exponent above `keep`, even if the
        exponential unit rounds down."""
        return float(0.999 * 2.0**self.keep)

    @property
    def tile_m(self) -> int:
        return ROWS * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * (1 + self.warpgroups)

    @property
    def registers(self) -> tuple[int, int]:
        """Per thread: of warps that multiply, and of the others. A launch has as many for all threads;
        what some take, others must have left before, or all wait for ever."""
        return (240, 24) if self.warpgroups == 2 else (160, 32)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one block. Barriers and items take less than 1 KB; tiles begin at a multiple
        of it."""
        rows = self.tile_m * self.q_stages + 2 * self.tile_n * self.kv_stages
        return 1024 + 2 * rows * self.head_dim

    @property
    def partial_words(self) -> int:
        """fp32 words of what a warpgroup leaves of one segment: O, then two maxima and two sums per
        thread."""
        return ROWS * self.head_dim + 4 * 128

    @property
    def state_words(self) -> int:
        """fp32 words that a block keeps of its rows between segments."""
        return self.tile_m * self.head_dim


@cache
def forward_config(head_dim: int, dtype: str) -> ForwardConfig:
    """What a head dim runs with: the fastest of those measured (docs/experiments/forward.md)."""
    if head_dim == 64:
        return ForwardConfig(head_dim, dtype, warpgroups=3, kv_stages=4, early=True)
    if head_dim != 128:
        raise ValueError(f"no forward kernel has head dim {head_dim}; known: 64, 128")
    return ForwardConfig(head_dim, dtype, warpgroups=2, kv_stages=2)
