"""The JSON file that several runs of a benchmark write to: rows in sets, each with the header of its run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Record:
    """``headers`` by set, and ``rows``, each of which names its set.

    Sets that are not measured again stay as they are in the file, with their headers.

    Args:
        path: the file. It may be missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._headers: dict[str, Row] = {}
        self._rows: list[Row] = []
        if path.exists():
            found = json.loads(path.read_text())
            self._headers, self._rows = found["headers"], found["rows"]

    def replace(self, set_: str, header: Row, rows: Iterable[Row]) -> None:
        """Put a set in the place of what the file has of it, and write the file."""
        self._headers[set_] = header
        self._rows = [row for row in self._rows if row["set"] != set_] + list(rows)
        headers = ",\n".join(f"{json.dumps(name)}: {json.dumps(x)}" for name, x in self._headers.items())
        lines = ",\n".join(json.dumps(row) for row in self._rows)
        self._path.write_text(f'{{"headers": {{\n{headers}}},\n"rows": [\n{lines}]}}\n')


def write(path: Path, header: Row, rows: Iterable[Row]) -> None:
    """Write a file of one run: its header, and a line per row."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"header": {json.dumps(header)},\n"rows": [\n{lines}]}}\n')


def versions(*packages: str) -> dict[str, str]:
    """Versions of packages, empty where one is not installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found
