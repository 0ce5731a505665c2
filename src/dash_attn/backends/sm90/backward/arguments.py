"""What the kernels of a backward pass are given, by name.

The host passes torch tensors, addresses and numbers, in the order of :class:`~..arguments.Given`. The code
that is traced sees CuTe tensors, hence no closer types. The order of the fields is that of the kernels'
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..arguments import Copy, Given
from .config import BackwardConfig

MATRICES = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
"""Of :class:`Tensors`, those that a launch is given as places."""

PARTS = ("lse2", "delta", "dq_acc", "group_sums", "control")
"""Parts of the buffer of a call, each a multiple of 128 bytes. See :class:`Workspace`."""


class Tensors(NamedTuple):
    """Inputs and gradients of one call.

    With batch extent 1, the sequences of the plan lie one after the other. Otherwise a batch is a sequence.

    Attributes:
        q, out, dout, dq: (B, Sq, H, D), bf16 or fp16. D contiguous, rows of 16-byte multiples.
        k, v, dk, dv: (B, Sk, Hkv, D), likewise.
        lse: (B, H, Sq) fp32, natural logarithm.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    dout: Any
    lse: Any
    dq: Any
    dk: Any
    dv: Any


class Intervals(NamedTuple):
    """Which rows see a key, and what follows for the tasks of a plan (seen.py).

    Attributes:
        starts, ends: int32, one per key, sequences one after the other.
        items: int32, `SEEN_WORDS` per item.
        seen: int32, (dQ tiles, words): bit t of a row is 1 if the task with ticket t is executed.
    """

    starts: Any
    ends: Any
    items: Any
    seen: Any


class Workspace(NamedTuple):
    """The plan, and what the kernels leave for each other. Only errors and trace need initial values.

    Attributes:
        table: the plan table, int32, see schedule/layout.py.
        lse2: base-2 LSE, fp32, tile_m values per dQ tile; +inf for rows without keys.
        delta: -rowsum(O dO), fp32, tile_m values per dQ tile.
        dq_acc: sums of contributions, fp32, tile_m * D values per dQ tile, in accumulator order. Where
            contributions are apart, as many for each of them, see `finish.place_apart`.
        group_sums: dK and dV of one head group, fp32, unscaled, in accumulator order: 2 * tile_n * D values
            per item that owns one of several head groups. Where V has fewer columns, dV takes less of its
            half.
        control: int32, see config.py.
        errors: int32, 8 words, 0: the first failure of a bounded wait, see `finish.report`.
        dq_contributions: fp32, (dQ tiles, tickets * tile_m * D): every contribution to dQ, by ticket.
        trace: int64, (dQ tiles, 4 * tickets), see `reduce.reduce_role`.
        intervals: of variants that have them.
    """

    table: Any
    lse2: Any
    delta: Any
    dq_acc: Any
    group_sums: Any
    control: Any
    errors: Any
    dq_contributions: Any
    trace: Any
    intervals: Any = None


class Launch(NamedTuple):
    """The numbers of one call.

    Attributes:
        scale: softmax scale, fp32. All others are int32.
        q_tiles: q tiles of one head, over all sequences.
        grid: blocks of the main kernel.
        workers: so many of them, the first to arrive, execute the plan. All convert dQ if contributions wait.
        complete: dQ tiles of all heads that get contributions.
    """

    scale: Any
    q_tiles: Any
    grid: Any
    workers: Any
    complete: Any


def tensors_of(config: BackwardConfig) -> list[str]:
    """What a launch is given as a tensor: the plan table, the buffer of the call, and where a variant
    leaves what others do not."""
    asked = {
        "group_sums": config.key_sums, "errors": config.spin_limit > 0,
        "dq_contributions": config.dump_contributions, "trace": config.trace,
    }  # fmt: skip
    intervals = Intervals._fields if config.intervals else ()
    return ["table", "work", *(name for name, wanted in asked.items() if wanted), *intervals]


def named(config: BackwardConfig, arguments: Sequence[Any]) -> Given:
    """The arguments of a compiled function by name."""
    return Given.of(arguments, tensors_of(config), MATRICES, len(PARTS), Launch)


class Copies(NamedTuple):
    """What the copy engine loads (q, dout, k, v) and stores (dk, dv)."""

    q: Copy
    dout: Copy
    k: Copy
    v: Copy
    dk: Copy
    dv: Copy


class Layouts(NamedTuple):
    """Layouts of tiles in shared memory, (rows, columns, stages)."""

    q: Any
    dout: Any
    k: Any
    v: Any
    ds: Any
    dk: Any


class Products(NamedTuple):
    """Tiled MMAs: of S^T and dP^T, of dV and dK, of dQ; of dK alone where that is another one; of S^T and
    dP^T by columns of K and V in registers, where there are any."""

    scores: Any
    grads: Any
    dq: Any
    keys: Any
    held: Any


class Memory(NamedTuple):
    """Global memory of the main kernel, without what Copies has; see Tensors and Workspace."""

    lse2: Any
    delta: Any
    dq_acc: Any
    dq: Any
    dk: Any
    dv: Any
    group_sums: Any
    table: Any
    control: Any
    errors: Any
    dq_contributions: Any
    trace: Any
    intervals: Any = None


class Numbers(NamedTuple):
    """Numbers of the main kernel, see Launch; of variants with a softcap also its own, see `Cap`."""

    scale: Any
    workers: Any
    complete: Any
    inner: Any = None
    outer: Any = None


class Shared(NamedTuple):
    """Shared memory of the main kernel, as tensors.

    Attributes:
        q, dout, k, v, ds: tiles of 16-bit values, (rows, columns, stages).
        lse2, delta: (tile_m, stages), beside Q and dO.
        dq: fp32 dQ tiles, or pieces of them, (values, stages), in accumulator order.
        dk: dK on its way out, (rows, columns, stages), where dS or dQ is, or K.
        complete: complete dQ tiles to be converted, (values, stages), from Q on.
        mailbox: items, (words, 2), see `plan_view.Item`.
        slots: granted contributions, (words, SLOTS), see reduce.py.
        q_info: what the mask hides of a task, (words, stages), see `LoadRole._put_q_info`.
        grads_place: where dK and dV belong that leave next, see `LoadRole._put_grads_place`.
        tile_place: where complete tiles belong, (words, stages), see `finish.store_piece`.
    """

    q: Any
    dout: Any
    k: Any
    v: Any
    ds: Any
    lse2: Any
    delta: Any
    dq: Any
    dk: Any
    complete: Any
    mailbox: Any
    slots: Any
    q_info: Any
    grads_place: Any
    tile_place: Any


class BeforeMemory(NamedTuple):
    """Global memory of the kernel before the main one."""

    out: Any
    dout: Any
    lse: Any
    lse2: Any
    delta: Any
    dq_acc: Any
    dq: Any
    table: Any
    control: Any
    intervals: Any = None


class UnseenMemory(NamedTuple):
    """Global memory of `PutUnseen`."""

    table: Any
    control: Any
    dq_acc: Any
    seen: Any
