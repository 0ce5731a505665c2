"""Compiled kernels, kept in the process and on disk.

An entry on disk is an object file and its SHA-256. Its name is a hash of everything that decides its
contents: configuration, every source file of the kernels, versions of the compiler and of Python,
architecture. A missing, damaged or unreadable entry is compiled again; a folder that cannot be written
costs the disk cache and nothing else. Loading an entry runs its code, so the folder must belong to the
user and be writable by nobody else; one that is not is never read.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable, Hashable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["KernelCache", "cache_folder"]

_FUNCTION = "dash_attn_program"


def cache_folder() -> Path:
    """``$DASH_ATTN_CACHE_DIR``, or ``dash-attn`` in the user's cache folder."""
    if given := os.environ.get("DASH_ATTN_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dash-attn"


class KernelCache:
    """Functions by configuration; each is compiled or loaded at most once a process.

    Args:
        compile: makes the function of a configuration (``cute.compile`` with TVM-FFI).
        load: makes a function of an object file and the name it was exported under.
        folder: where object files are kept, default :func:`cache_folder`.
    """

    def __init__(
        self,
        compile: Callable[[Any], Any],
        load: Callable[[Path, str], Any],
        folder: Path | None = None,
    ) -> None:
        self._compile, self._load, self._folder = compile, load, folder
        self._functions: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def __call__(self, config: Hashable, arch: str) -> Any:
        """The compiled function of a configuration for an architecture such as ``sm_90a``."""
        found = self._functions.get((config, arch))
        if found is not None:
            return found
        with self._lock:
            if (config, arch) not in self._functions:
                self._functions[config, arch] = self._from_disk_or_compiler(config, arch)
            return self._functions[config, arch]

    def _from_disk_or_compiler(self, config: Hashable, arch: str) -> Any:
        folder = self._usable_folder()
        entry = None if folder is None else folder / f"{_key(config, arch)}.o"
        if entry is not None and (function := self._from_disk(entry)) is not None:
            return function
        function = self._compile(config)
        if entry is not None:
            _store(function, entry)
        return function

    def _usable_folder(self) -> Path | None:
        folder = cache_folder() if self._folder is None else self._folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = folder.stat()
        except OSError as error:
            warnings.warn(f"kernels are not cached on disk: {error}", RuntimeWarning, stacklevel=5)
            return None
        if hasattr(os, "getuid") and (facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o022):
            warnings.warn(
                f"kernels are not cached on disk: {folder} belongs to, or can be written by, somebody else",
                RuntimeWarning,
                stacklevel=5,
            )
            return None
        return folder

    def _from_disk(self, entry: Path) -> Any | None:
        try:
            expected = entry.with_suffix(".sha256").read_text().strip()
            if hashlib.sha256(entry.read_bytes()).hexdigest() != expected:
                return None
            return self._load(entry, _FUNCTION)
        except (OSError, RuntimeError, AttributeError):
            return None  # compiled again, and the entry replaced


def _store(function: Any, entry: Path) -> None:
    """Export next to the entry, then rename: a reader sees a whole file or none."""
    try:
        with tempfile.TemporaryDirectory(dir=entry.parent) as scratch:
            made = Path(scratch) / "program.o"
            function.export_to_c(str(made), _FUNCTION)
            digest = Path(scratch) / "program.sha256"
            digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest() + "\n")
            os.replace(made, entry)
            os.replace(digest, entry.with_suffix(".sha256"))
    except OSError as error:
        warnings.warn(f"a kernel could not be cached on disk: {error}", RuntimeWarning, stacklevel=6)


def _key(config: Hashable, arch: str) -> str:
    digest = hashlib.sha256()
    for fact in (repr(config), arch, platform.python_version(), platform.machine()):
        digest.update(fact.encode() + b"\0")
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        try:
            digest.update(f"{package}={version(package)}\0".encode())
        except PackageNotFoundError:
            digest.update(f"{package}=unknown\0".encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(str(source.relative_to(Path(__file__).parent)).encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()
