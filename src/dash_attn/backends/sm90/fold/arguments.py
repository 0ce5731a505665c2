"""What the fold is given, by name; see ../forward/arguments.py. No cutlass here."""

from __future__ import annotations

from typing import Any, NamedTuple


class Launch(NamedTuple):
    """lse: its address; partial: address of a part of the buffer, and its fp32 words; entries and folds of
    the table."""

    lse: Any
    partial: Any
    partial_words: Any
    entries: Any
    folds: Any
