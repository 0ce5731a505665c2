"""Numbers that decide bits. Whoever changes one sees to it that fingerprints differ where bits do, and says
it in the changelog. Most numbers show in fingerprints by themselves, as another pattern or segment. Where one
does not, ``NUMERICS_VERSION`` is raised, or of the forward ``FORWARD_VERSION``.

What kernels do with these numbers decides bits, too. Of Triton's kernels ``TRITON_VERSION`` stands for that,
and ``SOFTCAP_VERSION`` of a softcap in the Hopper kernels.
Tiles of plans and of forwards are in tables of their own, and in their fingerprints: docs/bit-contract.md
says where.

They were chosen by measurement (docs/design.md), but nothing measures them at run time: timing must not
choose bits. What may follow the machine is in :mod:`dash_attn.machine`.
"""

from __future__ import annotations

__all__ = [
    "AUTO_RING",
    "AUTO_STRIDE",
    "AUTO_WIDE_ABOVE",
    "AUTO_WIDE_KEYS",
    "BY_HEAD_ROWS",
    "BY_HEAD_TILES",
    "BY_HEAD_WINDOWS",
    "FEW_TASKS",
    "FORWARD_KEEP",
    "FORWARD_ROOM",
    "FORWARD_SEGMENT",
    "FORWARD_TILE",
    "FORWARD_VERSION",
    "FULL_HEADS",
    "FULL_HEADS_SHORT",
    "FULL_MOST_ITEMS",
    "HEADS",
    "HEADS_LONG",
    "LONG_ABOVE",
    "LONG_FROM",
    "LONG_ROWS",
    "MOST_ITEMS",
    "NUMERICS_VERSION",
    "Q_SEGMENT",
    "Q_SEGMENT_STEP",
    "SHIFT_FROM",
    "SHIFT_FROM_GROUPED",
    "SHIFT_FROM_NARROW",
    "SHIFT_KEYS",
    "SHIFT_TO",
    "SHORT",
    "SINK_ROWS",
    "SMALL_GROUP",
    "SOFTCAP_VERSION",
    "TRITON_VERSION",
]

NUMERICS_VERSION = 4

AUTO_RING, AUTO_STRIDE = 16, 2
"""Rings of "auto" under the full mask: kv tiles per ring, and q tiles between two members. Few members find
room on any GPU, also beside other kernels, and divide most lengths well. With a stride of one q tile a
hand-over takes as long as a task. With more than two, few heads have fewer rings under way."""

AUTO_WIDE_KEYS, AUTO_WIDE_ABOVE = 64, 128
"""Keys per kv tile at head dims above AUTO_WIDE_ABOVE: with such tiles causal plans are descending at any
length. 192 beside 128 of V has tiles of 128 keys, and does not count."""

LONG_FROM, LONG_ABOVE = 2048, 64
"""Keys of the shortest sequence that ``by_length`` sums in descending order; "auto" chooses that at head dims
above LONG_ABOVE, up to AUTO_WIDE_ABOVE."""

SHIFT_TO, SHIFT_KEYS = 16384, 128
"""``by_length`` sums squares of at most SHIFT_TO keys by symmetric shift, if their tiles of SHIFT_KEYS keys
are a power of two. Half of these tiles must be resident together, 64 at most. Such halves fill a GPU; those
of other lengths would leave a part of it idle (docs/experiments/choices.md)."""

SHIFT_FROM, SHIFT_FROM_GROUPED, SHIFT_FROM_NARROW = 2048, 8192, 4096
"""Keys of the shortest of these squares for "auto": above LONG_ABOVE with one q head per kv head, and with
several; up to LONG_ABOVE with several."""

HEADS, HEADS_LONG, LONG_ROWS = 2, 1, 8192
"""q heads per item where the mask cuts, and from so many rows per kv tile and q head on: more would make the
longest item too long for a GPU that has few heads."""

FEW_TASKS, SMALL_GROUP = 9, 4
"""With so few tasks per kv tile and q head, an item owns a whole group of at most SMALL_GROUP q heads: sums
of several head groups would take longer to store and add than the tasks gain."""

BY_HEAD_WINDOWS = 2
"""From so many windows of keys on, "auto" lets an item take its q heads one after the other: most items are
then equally long (docs/experiments/windows.md)."""

BY_HEAD_TILES, BY_HEAD_ROWS = 16, 2560
"""Such an item owns one q head per BY_HEAD_TILES kv tiles: 8 q heads then have items for a whole GPU. It owns
more where they have at most BY_HEAD_ROWS rows in all, and so take little time."""

FULL_HEADS, FULL_HEADS_SHORT, SHORT = 1, 2, 64
"""q heads per item under a full mask, from SHORT q tiles on and below. The items of a ring stand on all q
tiles at once. With several heads each, what they read and add to does not fit L2."""

MOST_ITEMS, FULL_MOST_ITEMS = 1024, 2048
"""About so many items per kv head at most: their sums of dK and dV take memory, and more balance nothing."""

Q_SEGMENT = 16384
"""Rows per segment of q (:mod:`.segments`). Fewer would cost time on one GPU. With more, several GPUs could
share only longer sequences."""

Q_SEGMENT_STEP = 128
"""What other numbers of rows per segment must be a multiple of: whole tiles, of any kernel."""

SINK_ROWS = 128
"""Rows whose parts of a sink's gradient are added to one sum, before these are added one after the other."""

FORWARD_VERSION = 3

TRITON_VERSION = 1
"""Of Triton's kernels and of their table of shapes: in the fingerprints of that backend, forward and
backward. Raise it when they make other bytes of the same numerics. Older fingerprints had none."""

SOFTCAP_VERSION = 3
"""Of how the Hopper kernels make tanh: in the fingerprints of their calls with a softcap, forward and
backward. The first version was in none."""

FORWARD_TILE, FORWARD_SEGMENT = 128, 8192
"""Keys per kv tile and per segment of the forward."""

FORWARD_KEEP, FORWARD_ROOM = 5.0, 5
"""By how much a score, in base 2, may exceed a row's maximum before that is raised, and by how much the first
maximum exceeds a single key (:mod:`.forward`)."""
