"""What the docs quote from the benchmark of decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import geometric_mean

from documents import Value, read, table_of
from summary import Row

__all__ = ["decode_values"]

FILE = "h200-decode.json"
OURS, TRAINING = "dash", "dash training"


def decode_values() -> Iterator[tuple[str, Value]]:
    yield "table", decode_table
    yield "chunks-least", lambda: f"{min(_chunks()):.2f}"
    yield "chunks-most", lambda: f"{max(_chunks()):.2f}"
    yield "chunks-mean", lambda: f"{geometric_mean(_chunks()):.2f}"
    yield "chunks-fa4-least", lambda: f"{min(_chunks_of_fa4()):.2f}"
    yield "chunks-fa4-most", lambda: f"{max(_chunks_of_fa4()):.2f}"


def decode_table() -> str:
    """Microseconds of contiguous keys and of pages, and the fastest peer's, with contiguous keys."""
    rows = [row for row in read(FILE) if row.get("kind") == "decode"]
    copied = next(row["gb_per_s"] for row in read(FILE) if row["case"] == "copy")
    lines: list[Sequence[object]] = []
    for row in rows:
        if row["impl"] != OURS or row["page_size"]:
            continue
        alike = [other for other in rows if _what(other) == _what(row)]
        pages = (next(r["ms"] for r in alike if r["impl"] == OURS and r["page_size"] == n) for n in (16, 64))
        peers = [r for r in alike if r["page_size"] == 0 and r["impl"] not in (OURS, TRAINING)]
        best = min(peers, key=lambda r: float(r["ms"]))
        times = (f"{1e3 * ms:.0f}" for ms in (row["ms"], *pages))
        heads, batch = f"{row['heads']}:{row['kv_heads']}", f"{row['batch']} x {row['keys']:,}"
        share, ratio = f"{row['gb_per_s'] / copied:.2f}", f"{best['ms'] / row['ms']:.2f}"
        lines.append([batch, heads, *times, share, f"{1e3 * best['ms']:.0f} ({best['impl']})", ratio])
    head = [
        "sequences x keys",
        "heads",
        "us",
        "pages of 16",
        "pages of 64",
        "of the copy's speed",
        "fastest peer",
        "fastest peer / ours",
    ]
    return table_of(head, lines)


def _what(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in ("batch", "keys", "heads", "kv_heads"))


def _chunks() -> list[float]:
    """How long chunks over a cache take, contiguous or not, as multiples of the same rows in training."""
    rows = [row for row in read(FILE) if row.get("kind") == "chunk"]
    training = {(r["rows"], r["keys"]): r["ms"] for r in rows if r["impl"] == TRAINING}
    return [r["ms"] / training[r["rows"], r["keys"]] for r in rows if r["impl"] == OURS]


def _chunks_of_fa4() -> list[float]:
    """How long the same takes FlashAttention-4, as multiples of ours."""
    rows = [row for row in read(FILE) if row.get("kind") == "chunk"]
    ours = {r["case"]: r["ms"] for r in rows if r["impl"] == OURS}
    return [r["ms"] / ours[r["case"]] for r in rows if r["impl"] == "fa4"]
