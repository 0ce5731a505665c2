"""Static configuration of the Hopper forward kernel: everything that changes the machine code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

from ....schedule.constants import FORWARD_KEEP, FORWARD_ROOM, FORWARD_SEGMENT, FORWARD_TILE
from ..tiles import name_of

ROWS, WARP_ROWS = 64, 16  # of a warpgroup, and of each of its warps
OVERLAPS = ("nothing", "products", "softmax")


@dataclass(frozen=True)
class ForwardConfig:
    """One compiled variant of the forward pass.

    Attributes:
        direction: the package of its program.
        head_dim: of Q and K. Tensors may have fewer columns; the copy engine fills a tile with zeros.
        dtype: "bf16" or "fp16".
        warpgroups: that multiply, ROWS rows each. With one a block is narrow: it shares the tensor cores with
            nobody, and has a half or a third of the rows.
        q_stages, kv_stages: tiles of Q, and of K and of V, in shared memory. With one of Q, an item's Q is
            loaded when O of the item before has left.
        tile_n, segment, keep, room: the numerics, :mod:`dash_attn.schedule.forward`.
        in_turns: warpgroups start their products in turns, so that one's softmax runs beside the products of
            the others. Without, they get out of step by themselves, which takes some kv tiles.
        early: an item's first scores are started beside the end of the item before it.
        overlap: what a warpgroup's own products run beside: "nothing"; "products": scores of the next tile
            beside P V of this one; "softmax": both, and P V also beside the softmax of the next tile
            (FlashAttention-3, section 3.2).
        exp2_share: of 8 values of 2^x, how many are a polynomial in place of the exponential unit's
            (FlashAttention-4, section 3.1). For experiments: it changes bits.
        sink: every q head has one score more, of a key without a value.
        softcap: scores s become softcap * tanh(s / softcap).
        intervals: rows see a key in an interval of its own; kv tiles that none of an item's rows see are not
            loaded.
        trace: keep when every item began and was done, and on which SM (trace.py).
        head_dim_v: of V; 0: the same.
        rest: so many of the columns of K and of V, the last ones, lie in tiles of their own. 80 columns fill
            swizzled rows of 32 bytes only, and come in five copies; 64 fill rows of 128, and 16 of 32.
        q_registers: Q is read from shared memory once per segment of an item, and then kept in registers.
    """

    direction: ClassVar[str] = "forward"

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
    intervals: bool = False
    trace: bool = False
    head_dim_v: int = 0
    rest: int = 0
    q_registers: bool = False

    def __post_init__(self) -> None:
        if self.head_dim_v == 0:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        if self.head_dim_v > self.head_dim:
            raise ValueError(f"{self}: O leaves through the place of Q, which has fewer columns")
        if self.segment % self.tile_n or self.tile_n % 16:
            raise ValueError(f"{self}: a segment is whole kv tiles, and those are multiples of 16 keys")
        if self.kv_stages < 2 or self.q_stages < 1:
            raise ValueError(f"{self}: what comes next is loaded beside what is in use: two stages each")
        if self.overlap not in OVERLAPS:
            raise ValueError(f"overlap must be one of {', '.join(OVERLAPS)}, got {self.overlap!r}")
        if not 0 <= self.exp2_share <= 8:
            raise ValueError(f"exp2_share must be in 0..8, got {self.exp2_share!r}")
        if self.intervals and (self.softcap or max(self.head_dim, self.head_dim_v) > 128):
            raise ValueError(f"{self}: intervals of rows are for head dims up to 128, without a softcap")
        if self.intervals and (self.early or self.segment > 64 * self.tile_n):
            raise ValueError(f"{self}: which kv tiles an item has is known when it begins, of 64 at a time")
        if self.rest and (self.rest % 16 or self.head_dim % self.rest or self.head_dim_v != self.head_dim):
            raise ValueError(f"{self}: a rest is a multiple of 16 columns, and divides those of K and V")
        if self.warpgroups * self.q_stages > 9 or self.warpgroups > 3:
            raise ValueError(f"{self}: a block has 16 named barriers, and three warps that store")

    def with_intervals(self) -> ForwardConfig:
        """The same with intervals of rows."""
        return replace(self, intervals=True, early=False)

    @property
    def may_take_turns(self) -> bool:
        """Whether a variant in turns ships, too, which is faster where a block has few kv tiles."""
        others = self.softcap, self.intervals, self.trace, self.rest
        return self.head_dim in (64, 96, 128) and not (self.in_turns or any(others))

    @property
    def may_be_narrow(self) -> bool:
        """Whether a variant with one warpgroup ships, too, which is faster where there are few items."""
        return self.may_take_turns and self.warpgroups > 1

    def as_narrow(self) -> ForwardConfig:
        """The same with one warpgroup."""
        return replace(self, warpgroups=1, early=False, overlap="softmax")

    @property
    def kernels(self) -> tuple[str, ...]:
        """Class names, which the compiler puts into the names of the kernels, in the order of launches."""
        return ("Claims", *["KeyBounds"] * self.intervals, "Forward")

    @property
    def few(self) -> float:
        """A sum of powers of 2 that is not larger holds none of an exponent above `keep`, even if the
        exponential unit rounds down."""
        return float(0.999 * 2.0**self.keep)

    @property
    def tile_m(self) -> int:
        return ROWS * self.warpgroups

    @property
    def kv_columns(self) -> tuple[int, int]:
        """Of the tiles of K and of V, without their rest."""
        return self.head_dim - self.rest, self.head_dim_v - self.rest

    @property
    def v_warp(self) -> bool:
        """Whether a warp of its own loads V: with three warpgroups, all warps beside them load or store. With
        intervals it would have to know which kv tiles are seen."""
        return self.warpgroups <= 2 and not self.intervals

    @property
    def threads(self) -> int:
        return 128 * (1 + self.warpgroups)

    @property
    def registers(self) -> tuple[int, int]:
        """Per thread: of warps that multiply, and of the others. A launch has as many for all threads;
        what some take, others must have left before, or all wait for ever."""
        return {1: (240, 40), 2: (240, 24), 3: (160, 32)}[self.warpgroups]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one block. Barriers and items take less than 1 KB; tiles begin at a multiple
        of it."""
        q, kv = self.tile_m * self.q_stages, self.tile_n * self.kv_stages
        return 1024 + 2 * (q * self.head_dim + kv * (self.head_dim + self.head_dim_v))

    @property
    def partial_words(self) -> int:
        """fp32 words of what a warpgroup leaves of one segment: O, then two maxima and two sums per
        thread."""
        return partial_words_of(self.head_dim_v)

    @property
    def state_words(self) -> int:
        """fp32 words that a block keeps of its rows between segments."""
        return self.tile_m * self.head_dim_v


def partial_words_of(head_dim_v: int) -> int:
    """`ForwardConfig.partial_words`."""
    return ROWS * head_dim_v + 4 * 128


@cache
def forward_config(head_dim: int, dtype: str, head_dim_v: int = 0, rest: int = 0) -> ForwardConfig:
    """What a kernel of :data:`..tiles.FORWARD` runs with: the fastest of those measured
    (docs/experiments/forward.md, for others than 64 and 128 docs/experiments/head-dims.md)."""
    head_dims = head_dim, head_dim_v or head_dim
    if head_dims == (64, 64):
        return ForwardConfig(head_dim, dtype, warpgroups=3, kv_stages=4, early=True)
    if head_dims == (80, 80) and rest:
        return ForwardConfig(head_dim, dtype, kv_stages=3, in_turns=True, overlap="softmax", rest=rest)
    if head_dims == (80, 80):
        return ForwardConfig(head_dim, dtype, kv_stages=3, in_turns=True, overlap="softmax", q_registers=True)
    if head_dims == (96, 96) and rest:
        return ForwardConfig(head_dim, dtype, kv_stages=3, in_turns=True, rest=rest)
    if head_dims == (96, 96):
        return ForwardConfig(head_dim, dtype, kv_stages=3, overlap="softmax")
    if head_dims == (128, 128):
        return ForwardConfig(head_dim, dtype, overlap="softmax")
    if head_dims == (192, 128):
        return ForwardConfig(head_dim, dtype, q_stages=1, kv_stages=2, in_turns=True, head_dim_v=head_dim_v)
    if head_dims == (256, 256):
        # O takes 128 registers, and K and V take 32 KB per 64 keys.
        return ForwardConfig(head_dim, dtype, q_stages=1, kv_stages=2, tile_n=64, overlap="softmax")
    known = "64, 80, 96, 128, 192 (V: 128), 256"
    raise ValueError(f"no forward kernel has head dim {name_of(*head_dims)}; known: {known}")
