"""Object files made into shared libraries.

What loads an object file is a part of the compiler, whose import takes a second, or several from a cold disk.
A shared library is loaded by the system, in milliseconds. The linker is that of the host's C compiler, which
Triton needs, too.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ["is_shared", "link", "linker"]

_NAMES = "cc", "gcc", "clang"
_PATIENCE = 60  # seconds for what takes 0.03
_SHARED = 3  # ET_DYN, in the third word of an ELF file


def linker() -> str | None:
    """Path of a C compiler, which links; None if there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def link(made: Path, library: Path, needed: Sequence[str]) -> bool:
    """Make a shared library of an object file; False if that cannot be done here.

    Args:
        made: the object file, position-independent.
        library: the file to be written.
        needed: paths of libraries that define what `made` does not; found there again by whoever loads it.
    """
    if (command := linker()) is None:
        return False
    options = ["-z", "now", "-z", "defs"]
    for path in needed:
        options += ["-rpath", str(Path(path).parent)]
    passed = [word for option in options for word in ("-Xlinker", option)]
    try:
        done = subprocess.run(
            [command, "-shared", *passed, "-o", library, made, *needed],
            capture_output=True,
            timeout=_PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def is_shared(path: Path) -> bool:
    """Whether an ELF file is a shared library."""
    with path.open("rb") as file:
        head = file.read(18)
    return head.startswith(b"\x7fELF") and int.from_bytes(head[16:18], "little") == _SHARED
