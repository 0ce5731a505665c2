"""What the kernel after a backward is given, by name; see ../backward/arguments.py. No cutlass here."""

from __future__ import annotations

from typing import Any, NamedTuple

MATRICES = ("dq", "dk", "dv")


class Parts(NamedTuple):
    """Parts of the buffer of a call: where they begin, and how many fp32 words they have."""

    dq_acc: Any
    group_sums: Any
    dq_acc_words: Any
    group_sums_words: Any


class Launch(NamedTuple):
    """scale: softmax scale, fp32; q_tiles: of one head, whose dQ is to be converted; kv_tiles: of one head,
    whose head groups' sums are to be added up. Tiles count over all sequences."""

    scale: Any
    q_tiles: Any
    kv_tiles: Any
