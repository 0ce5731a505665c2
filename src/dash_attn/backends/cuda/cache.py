"""Compiled kernels, kept in the process and on disk.

An entry on disk is one file: the SHA-256 of a program, and the program, a shared library or an object file
(linking.py). Its name is a hash of everything that decides its contents: configuration, every source file of
the kernels, the compiler with its settings and its place, the version of Python, architecture. And of the
processor: the part of a program that runs on the host is made for the one it is compiled on. A missing,
damaged or unreadable entry is compiled again; a folder that cannot be written costs the disk cache and no
more.

Loading an entry runs its code. The digest finds damage; it cannot find an attacker, who would write it anew.
Against other users there are owners and modes: the folder and its entries must be the user's and be writable
by nobody else, and nobody else may be able to put another folder in its place. What is not so is never read.
The bytes that are loaded are the bytes that were checked.
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
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from ...errors import CompilationError, DashError

__all__ = ["NOT_KEPT", "KernelCache", "cache_folder", "examine_folder", "why_unsafe"]

NOT_KEPT = ("kernels are not cached on disk", "a kernel could not be cached on disk")
"""How warnings begin that say so."""

_FUNCTION = "dash_attn_program"
_SUFFIX = ".program"
_SETTINGS = "CUTE_DSL_"  # variables of the environment that the compiler reads
_PACKAGES = (
    "nvidia-cutlass-dsl",
    *(f"nvidia-cutlass-dsl-libs-{part}" for part in ("base", "core", "cu12", "cu13")),
    "apache-tvm-ffi",
)
_DIGEST = hashlib.sha256().digest_size
_PACKAGE = Path(__file__).parents[2]
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """``$DASH_ATTN_CACHE_DIR``, or ``dash-attn`` in the user's cache folder.

    Raises:
        OSError: nothing says where that is.
    """
    if given := os.environ.get("DASH_ATTN_CACHE_DIR"):
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dash-attn"
    except RuntimeError as error:  # the user has no home
        raise OSError(str(error)) from error


def why_unsafe(folder: Path, *, exists: bool = True) -> str:
    """Why somebody else could change what lies in a folder, or replace it; empty if nobody can.

    Whoever owns the root folder is trusted like root: in a user namespace root's folders show another owner.

    Args:
        folder: absolute, without symbolic links.
        exists: if not, the question is about a folder that would be made below this one.

    Raises:
        OSError: the folder, or one above it, cannot be examined.
    """
    me = os.geteuid()
    trusted = {0, me, os.stat("/").st_uid}
    for place in (folder, *folder.parents):
        facts = place.lstat()
        mode = stat.S_IMODE(facts.st_mode)
        ours = exists and place == folder
        if not stat.S_ISDIR(facts.st_mode):
            return f"{place} is not a folder"
        if facts.st_uid not in ({me} if ours else trusted):
            return f"{place} belongs to user {facts.st_uid}"
        # In a sticky folder such as /tmp only the owner of an entry can rename it.
        if mode & _WRITABLE_BY_OTHERS and (ours or not mode & stat.S_ISVTX):
            return f"{place} can be written by others (mode {mode:04o})"
    return ""


def examine_folder(folder: Path) -> tuple[bool, str]:
    """What a kernel would do with a folder. Leaves everything as it is.

    Args:
        folder: need not exist; a kernel would make it, and those above it.

    Returns:
        Whether it would use the folder, and why it could not keep a new program there, empty if it could.
    """
    folder = folder.absolute()
    place = next(p for p in (folder, *folder.parents) if os.path.lexists(p))
    try:
        place = place.resolve(strict=True)
        exists = place == folder.resolve()
        if reason := why_unsafe(place, exists=exists):
            return False, reason
    except OSError as error:
        return False, str(error)
    try:
        with tempfile.TemporaryDirectory(dir=place):
            return True, ""
    except OSError as error:
        return exists, f"{place} cannot be written: {error.strerror}"


def _make(folder: Path) -> None:
    """Make a folder, and those above it that do not exist, for the user alone, whatever the umask."""
    for place in (*reversed(folder.parents), folder):
        place.mkdir(mode=0o700, exist_ok=True)


class KernelCache:
    """Functions by configuration; each is compiled or loaded at most once per process.

    Args:
        compile: makes the function of a configuration (``cute.compile`` with TVM-FFI).
        load: makes a function of a program and the name it was exported under.
        folder: where entries are kept, default :func:`cache_folder`.
        compiler: names the compiler that `compile` has, beyond its version.
        packed: makes a program, what is kept, of an object file.
    """

    def __init__(
        self,
        compile: Callable[[Any], Any],
        load: Callable[[Path, str], Any],
        folder: Path | None = None,
        compiler: Callable[[], str] = str,
        packed: Callable[[Path], bytes] = Path.read_bytes,
    ) -> None:
        self._compile, self._load, self._folder, self._compiler = compile, load, folder, compiler
        self._packed = packed
        self._functions: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def __call__(self, config: Hashable, arch: str) -> Any:
        """The compiled function of a configuration for an architecture such as ``sm_90a``.

        Raises:
            CompilationError: the compiler failed; the next call tries again.
        """
        found = self._functions.get((config, arch))
        if found is not None:
            return found
        with self._lock:
            if (config, arch) not in self._functions:
                self._functions[config, arch] = self._from_disk_or_compiler(config, arch)
            return self._functions[config, arch]

    def _from_disk_or_compiler(self, config: Hashable, arch: str) -> Any:
        folder = self._usable_folder()
        entry = None
        if folder is not None:
            entry = folder / f"{_key(config, arch, self._compiler())}{_SUFFIX}"
            if (function := self._from_disk(entry)) is not None:
                return function
        if _digest_of_sources() != _IMPORTED:
            raise CompilationError(
                f"{config} is not compiled: files of dash-attn in {_PACKAGE} have changed since this process "
                "imported them, and a kernel of one version must not meet the other: start the process again"
            )
        try:
            function = self._compile(config)
        except DashError:
            raise
        except Exception as error:
            raise CompilationError(
                f"{config} did not compile for {arch}: {type(error).__name__}: {error}"
            ) from error
        if entry is not None:
            self._store(function, entry)
        return function

    def _usable_folder(self) -> Path | None:
        try:
            folder = cache_folder() if self._folder is None else self._folder
            _make(folder)
            folder = folder.resolve(strict=True)
            reason = why_unsafe(folder)
        except OSError as error:
            reason = str(error)
        if reason:
            warnings.warn(
                f"{NOT_KEPT[0]}: {reason}; DASH_ATTN_CACHE_DIR names another folder",
                RuntimeWarning,
                stacklevel=5,
            )
            return None
        return folder

    def _from_disk(self, entry: Path) -> Any | None:
        try:
            program = _read(entry)
            return None if program is None else self.loaded(program)
        except DashError:
            raise
        except Exception:
            return None  # compiled again, and the entry replaced

    def loaded(self, program: bytes) -> Any:
        """The function of a program, from memory: a file with a name could change after it was checked."""
        memory = os.memfd_create(_FUNCTION)
        with open(memory, "wb") as file:
            file.write(program)
            file.flush()
            return self._load(Path(f"/proc/self/fd/{memory}"), _FUNCTION)

    def _store(self, function: Any, entry: Path) -> None:
        """Write beside the entry, then rename: a reader sees a whole one or none, whoever else writes it."""
        try:
            with tempfile.TemporaryDirectory(dir=entry.parent) as scratch:
                made, whole = Path(scratch) / "program.o", Path(scratch) / "entry"
                function.export_to_c(str(made), _FUNCTION)
                program = self._packed(made)
                with open(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(hashlib.sha256(program).digest() + program)
                os.replace(whole, entry)
        except OSError as error:
            warnings.warn(f"{NOT_KEPT[1]}: {error}", RuntimeWarning, stacklevel=7)


def _read(entry: Path) -> bytes | None:
    """The program in an entry, or None if it is damaged or somebody else could have written it."""
    # A link or a pipe in the place of an entry is an error rather than another file or a wait.
    descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        mine = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid()
        if not mine or facts.st_mode & _WRITABLE_BY_OTHERS:
            return None
        contents = file.read()
    digest, program = contents[:_DIGEST], contents[_DIGEST:]
    return program if hashlib.sha256(program).digest() == digest else None


def _key(config: Hashable, arch: str, compiler: str) -> str:
    digest = hashlib.sha256(_IMPORTED)
    settings = sorted(x for x in os.environ.items() if x[0].startswith(_SETTINGS))
    facts = (repr(config), arch, compiler, platform.python_version(), platform.machine(), _processor())
    for fact in (*facts, repr(settings)):
        digest.update(fact.encode() + b"\0")
    for package in _PACKAGES:
        digest.update(f"{package}={_installed(package)}\0".encode())
    return digest.hexdigest()


@cache
def _installed(package: str) -> str:
    """Version and place of a package: a program names the libraries there that it needs."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return "unknown"
    return f"{found.version} {found.locate_file('')}"


@cache
def _processor() -> str:
    """The instructions that this machine's processor has, as Linux names them; empty if nothing says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    named = (line.partition(":") for line in lines)
    return next((value for name, _, value in named if name.strip() in ("flags", "Features")), "")


def _sources() -> list[Path]:
    """Every file that can change a compiled kernel: the backends, and numbers that they share with plans."""
    others = (_PACKAGE / name for name in ("machine.py", "schedule/constants.py", "schedule/layout.py"))
    return [*sorted((_PACKAGE / "backends").rglob("*.py")), *others]


def _digest_of_sources() -> bytes:
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(str(source.relative_to(_PACKAGE)).encode() + b"\0" + source.read_bytes())
    return digest.digest()


_IMPORTED = _digest_of_sources()
"""Of the files as this process knows them."""
