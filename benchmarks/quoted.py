"""Figures in the docs that are computed: markers, what stands behind them, and what should.

A marker is an HTML comment that names a source and a value of tables.py. At the end of a line it stands for
the lines below it, up to an empty one: a table. Within a line it stands for the number or the code span right
behind it. Pages do not show it.

    <!-- from benchmarks/results/h200-backward.json: grid-table -->
    | head dim | ...

    is <!-- from benchmarks/results/h200-backward.json: grid-det-mean -->1.12 times as fast

``python benchmarks/figures.py`` writes all of them anew; tests/cpu/test_docs.py compares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tables import VALUES

ROOT = Path(__file__).parents[1]

MARKER = re.compile(r"<!-- from (\S+): (.+?) -->")
INLINE = re.compile(r"`[^`\n]+`|[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?%?")
BLOCK = re.compile(r"\n(?:[^\n]+(?:\n|\Z))*")


class Quote(NamedTuple):
    """One marker of a page.

    Attributes:
        source, name: what it quotes.
        line: of the marker, from 1.
        start, end: where the quoted text stands in the page.
        block: whether that is a table and not a figure within a line.
    """

    source: str
    name: str
    line: int
    start: int
    end: int
    block: bool

    def value(self) -> str:
        """What should stand there; KeyError names a source and name that tables.py does not have."""
        text = VALUES[self.source, self.name]()
        if self.block:
            return f"\n{text}\n"
        if not INLINE.fullmatch(text):
            raise ValueError(f"{self.source}: {self.name} is not a figure within a line: {text!r}")
        return text


def quotes(page: str) -> Iterator[Quote]:
    """The markers of a page, in its order.

    Raises:
        ValueError: no number or code span follows a marker within a line, or it begins the line, where it
            would end the paragraph.
    """
    for marker in MARKER.finditer(page):
        block = page.startswith("\n", marker.end())
        found = (BLOCK if block else INLINE).match(page, marker.end())
        line = page.count("\n", 0, marker.start()) + 1
        if found is None:
            raise ValueError(f"line {line}: no figure behind {marker[0]}")
        if not block and not page[page.rfind("\n", 0, marker.start()) + 1 : marker.start()].strip():
            raise ValueError(f"line {line}: {marker[0]} begins the line; put a word before it")
        yield Quote(marker[1], marker[2], line, found.start(), found.end(), block)


def stale(page: str) -> list[str]:
    """A line for each quoted text that is not what it should be."""
    lines = []
    for quote in quotes(page):
        found, wanted = page[quote.start : quote.end], quote.value()
        if found != wanted:
            name = f"line {quote.line}: {quote.source}: {quote.name}"
            lines.append(f"{name} is {wanted.strip()}, the page has {found.strip()}")
    return lines


def filled(page: str) -> str:
    """The page with every quoted text computed anew."""
    parts, done = [], 0
    for quote in quotes(page):
        parts += [page[done : quote.start], quote.value()]
        done = quote.end
    return "".join([*parts, page[done:]])


def pages() -> list[Path]:
    """Every Markdown page of the repository that people read."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
