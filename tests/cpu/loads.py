"""Loads of shared memory in machine code (SASS of sm_90a) that may still be under way when a warp arrives."""

from __future__ import annotations

import numpy as np

_LDS, _LDSM, _ARRIVE, _FENCE = 0x984, 0x83B, 0x9A7, 0x3C6
_NO_BARRIER = 7


def under_way(code: bytes, waits: bool = True) -> list[tuple[int, int]]:
    """(address of an arrival at an mbarrier, bits per lane of a load) of all such loads, in a straight line.

    A load names one of six scoreboards, and an instruction the scoreboards that it waits for. ``waits``: as
    if none did.
    """
    words = np.frombuffer(code, "<u8").reshape(-1, 2)
    found, pending = list[tuple[int, int]](), list[tuple[int, int]]()
    for number, (low, high) in enumerate(words.tolist()):
        operation, scoreboard, mask = low & 0xFFF, high >> 46 & 7, high >> 52 & 0x3F
        if operation == _FENCE:
            pending = []
        pending = [load for load in pending if not (waits and mask >> load[0] & 1)]
        if operation == _ARRIVE:
            found += [(16 * number, bits) for _, bits in pending]
        elif operation in (_LDS, _LDSM) and scoreboard != _NO_BARRIER:
            bits = 128 if operation == _LDSM else 8 << (high >> 9 & 7) - 2
            pending.append((scoreboard, bits))
    return found
