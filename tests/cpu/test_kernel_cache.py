"""The kernel cache with a stand-in compiler: once a process, once a folder, nothing damaged or foreign."""

from __future__ import annotations

import ast
import ctypes
import errno
import gc
import hashlib
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dash_attn.backends.cuda import cache as module
from dash_attn.backends.cuda.cache import KernelCache, _sources, cache_folder, why_unsafe
from dash_attn.backends.sm90 import compile as compiler
from dash_attn.backends.sm90.compile import _uncollected, flavour
from dash_attn.errors import CompilationError, MissingCompilerError
from dash_attn.tools import doctor

SOURCES = Path(__file__).parents[2] / "src"


class Compiler:
    """Counts what it compiles and loads; a "function" exports its configuration as its object file."""

    def __init__(self) -> None:
        self.compiled: list[object] = []
        self.loaded: list[str] = []

    def compile(self, config: object) -> Compiler.Function:
        self.compiled.append(config)
        return Compiler.Function(str(config))

    def load(self, path: Path, name: str) -> Compiler.Function:
        text = path.read_text()
        if not text.startswith(name):
            raise RuntimeError("not an object file")
        self.loaded.append(text)
        return Compiler.Function(text.removeprefix(name))

    class Function:
        def __init__(self, text: str) -> None:
            self.text = text

        def export_to_c(self, path: str, name: str) -> None:
            Path(path).write_text(name + self.text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def run(
    folder: Path | None, config: str = "a", arch: str = "sm_90a", flavour: str = ""
) -> tuple[Compiler, str]:
    """What a fresh process does."""
    compiler = Compiler()
    cache = KernelCache(compiler.compile, compiler.load, folder, lambda: flavour)
    assert cache(config, arch) is cache(config, arch)
    return compiler, cache(config, arch).text


def entry_in(folder: Path) -> Path:
    (entry,) = folder.iterdir()
    return entry


def test_compiled_once_and_then_loaded(folder: Path) -> None:
    first, second = run(folder), run(folder)
    assert (len(first[0].compiled), len(first[0].loaded)) == (1, 0)
    assert (len(second[0].compiled), len(second[0].loaded)) == (0, 1)
    assert first[1] == second[1] == "a"
    assert entry_in(folder).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("other", [{"config": "b"}, {"arch": "sm_100a"}, {"flavour": "cu12"}])
def test_another_configuration_is_another_entry(folder: Path, other: dict[str, str]) -> None:
    run(folder)
    assert len(run(folder, **other)[0].compiled) == 1


def test_another_processor_is_another_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has instructions of the host's that another one may not have: that would end the process."""
    assert "fpu" in module._processor() or "asimd" in module._processor()
    run(folder)
    monkeypatch.setattr(module, "_processor", lambda: "fpu sse2")
    assert len(run(folder)[0].compiled) == 1


def test_other_settings_of_the_compiler_are_another_entry(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(folder)
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert len(run(folder)[0].compiled) == 1
    monkeypatch.delenv("CUTE_DSL_LINEINFO")
    assert len(run(folder)[0].loaded) == 1


@pytest.mark.parametrize(
    ("driver", "builds", "named"),
    [
        (12_090, [12, 13], "CUDA 12"),
        (14_000, [12, 13], "CUDA 13"),
        (13_000, [], "CUDA 13"),
        (None, [12, 13], "CUDA 13"),
        (None, [], "no driver"),
    ],
)
def test_the_build_of_the_compiler_is_named(
    driver: int | None, builds: list[int], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its package has several, and takes the newest that the driver can run."""

    def library(name: str) -> SimpleNamespace:
        def of_the_driver(version: Any) -> int:
            version._obj.value = driver
            return 0

        assert name == "libcuda.so.1"
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(cuDriverGetVersion=of_the_driver)

    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr(compiler, "_builds", lambda: builds)
    assert flavour() == named


def test_the_installed_builds_are_those_of_the_compiler() -> None:
    libs = pytest.importorskip("cutlass._mlir._mlir_libs")
    found = {path.name.split(".")[1] for path in Path(libs.__file__).parent.glob("_cutlass_ir.cu*.so")}
    assert found == {f"cu{build}" for build in compiler._builds()}


def test_another_compiler_in_the_same_place_is_another_entry(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same one in another place: programs name the libraries that they need."""
    assert module._installed("no-such-package") == "unknown"
    version, _, place = module._installed("pytest").partition(" ")
    assert version == pytest.__version__
    assert Path(pytest.__file__).is_relative_to(place)
    others = product(
        ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi"), ("4.8.2 /a", "4.8.1 /b")
    )
    for package, changed in [("", ""), *others]:
        found = {package: changed}
        monkeypatch.setattr(module, "_installed", lambda name, found=found: found.get(name, "4.8.1 /a"))
        assert len(run(folder)[0].compiled) == 1
        assert len(run(folder)[0].loaded) == 1


def test_nothing_is_compiled_of_files_that_are_not_those_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has been compiled of those is loaded."""
    run(folder)
    monkeypatch.setattr(module, "_digest_of_sources", lambda: b"of another version")
    assert len(run(folder)[0].loaded) == 1
    with pytest.raises(CompilationError, match="files of dash-attn in .* have changed since this process"):
        run(folder, "b")


def test_every_file_that_device_code_imports_is_part_of_the_key() -> None:
    package, hashed = SOURCES / "dash_attn", set(_sources())
    of_the_host = ("launch.py", "traced.py")
    files = [x for x in (package / "backends/sm90").rglob("*/*.py") if x.name not in of_the_host]
    assert {file.parent.name for file in files} >= {"backward", "forward", "cached", "spread", "device"}
    imported = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                names = (alias.name for alias in node.names)
                imported |= {base.with_suffix(".py"), *(base / f"{name}.py" for name in names)}
    imported = {file for file in imported if file.is_file()}
    assert package / "schedule/layout.py" in imported
    assert {*files, *imported} <= hashed


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DASH_ATTN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    with pytest.warns(RuntimeWarning, match="not cached on disk: Could not determine home directory"):
        assert run(None)[0].compiled == ["a"]
    assert doctor._kernel_cache() == "none: Could not determine home directory."


# Damage


@pytest.mark.parametrize("damage", ["empty", "cut short", "one bit", "no digest", "no object file"])
def test_damaged_entries_are_compiled_again_and_replaced(folder: Path, damage: str) -> None:
    run(folder)
    entry = entry_in(folder)
    whole = entry.read_bytes()
    junk = hashlib.sha256(b"junk").digest() + b"junk"
    changed = {
        "empty": b"",
        "cut short": whole[:-1],
        "one bit": whole[:40] + bytes([whole[40] ^ 1]) + whole[41:],
        "no digest": whole[32:],
        "no object file": junk,
    }
    entry.write_bytes(changed[damage])
    compiler, text = run(folder)
    assert (len(compiler.compiled), text) == (1, "a")
    assert entry.read_bytes() == whole
    assert len(run(folder)[0].loaded) == 1


# Other users


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o1777])
def test_a_folder_others_can_write_is_never_read(folder: Path, mode: int) -> None:
    run(folder)
    folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match=rf"cache can be written by others \(mode {mode:04o}\)"):
        compiler, _ = run(folder)
    assert compiler.compiled == ["a"]


def test_a_folder_whose_parent_others_can_write_is_never_read(tmp_path: Path) -> None:
    """Another user could put another folder in its place; in a sticky parent nobody else can."""
    shared = tmp_path / "shared"
    run(shared / "cache")
    for mode in (0o777, 0o775):
        shared.chmod(mode)
        with pytest.warns(RuntimeWarning, match=rf"shared can be written by others \(mode {mode:04o}\)"):
            assert run(shared / "cache")[0].compiled == ["a"]
    shared.chmod(0o1777)
    assert len(run(shared / "cache")[0].loaded) == 1


def owned_by(monkeypatch: pytest.MonkeyPatch, place: Path, user: int) -> None:
    """Let a folder look as if it belonged to somebody else."""
    lstat = Path.lstat

    def facts(path: Path) -> os.stat_result:
        found = list(lstat(path))
        return os.stat_result((*found[:4], user, *found[5:])) if path == place else lstat(path)

    monkeypatch.setattr(Path, "lstat", facts)


@pytest.mark.parametrize("place", ["shared", "shared/cache"])
def test_folders_of_another_user_are_never_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    run(tmp_path / "shared" / "cache")
    owned_by(monkeypatch, (tmp_path / place).resolve(), 54321)
    with pytest.warns(RuntimeWarning, match=f"{place} belongs to user 54321"):
        assert run(tmp_path / "shared" / "cache")[0].compiled == ["a"]


def test_links_are_followed_before_the_folders_are_checked(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    run(shared / "cache")
    (tmp_path / "link").symlink_to(shared)
    assert len(run(tmp_path / "link" / "cache")[0].loaded) == 1
    shared.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="shared can be written by others"):
        assert run(tmp_path / "link" / "cache")[0].compiled == ["a"]


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_an_entry_others_can_write_is_never_read(folder: Path, mode: int) -> None:
    run(folder)
    entry_in(folder).chmod(mode)
    assert run(folder)[0].compiled == ["a"]
    assert entry_in(folder).stat().st_mode & 0o777 == 0o600
    assert len(run(folder)[0].loaded) == 1


def test_an_entry_of_another_user_is_never_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder)
    fstat = os.fstat

    def facts(descriptor: int) -> os.stat_result:
        found = list(fstat(descriptor))
        return os.stat_result((*found[:4], 54321, *found[5:]))

    monkeypatch.setattr("dash_attn.backends.cuda.cache.os.fstat", facts)
    assert run(folder)[0].compiled == ["a"]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_an_entry_that_is_no_file_is_neither_followed_nor_waited_for(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    run(folder)
    entry = entry_in(folder)
    entry.rename(tmp_path / "elsewhere")
    if kind == "link":
        entry.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(entry)
    else:
        entry.mkdir()
    if kind == "folder":  # nothing can be renamed over it
        with pytest.warns(RuntimeWarning, match="could not be cached on disk"):
            assert run(folder)[0].compiled == ["a"]
        return
    assert run(folder)[0].compiled == ["a"]
    assert not entry.is_symlink()
    assert len(run(folder)[0].loaded) == 1


def test_what_is_loaded_is_what_was_checked(folder: Path) -> None:
    """An entry that changes between its check and its loading changes nothing."""
    run(folder)
    entry, compiler = entry_in(folder), Compiler()

    def load(path: Path, name: str) -> Compiler.Function:
        entry.write_bytes(b"something else")
        return compiler.load(path, name)

    assert KernelCache(compiler.compile, load, folder)("a", "sm_90a").text == "a"
    assert compiler.compiled == []


def test_this_machine_has_a_safe_folder(tmp_path: Path) -> None:
    assert why_unsafe(tmp_path.resolve()) == ""
    (tmp_path / "file").write_text("")
    assert "is not a folder" in why_unsafe(tmp_path.resolve() / "file")


# No folder, no compiler


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = "kernels are not cached on disk: .*; DASH_ATTN_CACHE_DIR names another folder"
    with pytest.warns(RuntimeWarning, match=message):
        compiler, text = run(tmp_path / "file" / "cache")
    assert (compiler.compiled, text) == (["a"], "a")


def read_only(**_: Any) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def test_a_read_only_folder_is_read_and_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", read_only)
    assert len(run(folder)[0].loaded) == 1
    with pytest.warns(RuntimeWarning, match="a kernel could not be cached on disk: .*Read-only file system"):
        compiler, text = run(folder, "b")
    assert (compiler.compiled, text) == (["b"], "b")


@pytest.mark.skipif(os.geteuid() == 0, reason="modes do not stop root")
def test_a_folder_without_write_permission(folder: Path) -> None:
    run(folder)
    folder.chmod(0o500)
    assert len(run(folder)[0].loaded) == 1
    with pytest.warns(RuntimeWarning, match="a kernel could not be cached on disk"):
        assert run(folder, "b")[1] == "b"
    folder.chmod(0o700)


def test_a_failed_compilation_is_named_and_tried_again(folder: Path) -> None:
    compiler, failures = Compiler(), [RuntimeError("ptxas: out of registers")]

    def compile(config: object) -> Compiler.Function:
        if failures:
            raise failures.pop()
        return compiler.compile(config)

    cache = KernelCache(compile, compiler.load, folder)
    with pytest.raises(
        CompilationError, match="a did not compile for sm_90a: RuntimeError: ptxas: out of registers"
    ) as caught:
        cache("a", "sm_90a")
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert list(folder.iterdir()) == []
    assert cache("a", "sm_90a").text == "a"
    assert len(run(folder)[0].loaded) == 1


@pytest.mark.parametrize("is_on", [True, False])
def test_a_compilation_leaves_the_collector_as_it_was(is_on: bool) -> None:
    seen = []

    @_uncollected()
    def failing() -> None:
        seen.append(gc.isenabled())
        raise CompilationError

    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(CompilationError):
            failing()
        assert (seen, gc.isenabled()) == ([False], is_on)
    finally:
        gc.enable()


def test_a_missing_compiler_is_no_damaged_entry(folder: Path) -> None:
    """What loads an entry says what is missing; compiling would not find more."""
    run(folder)
    compiler = Compiler()

    def missing(path: Path, name: str) -> None:
        raise MissingCompilerError("pip install 'dash-attn[cuda]'")

    with pytest.raises(MissingCompilerError):
        KernelCache(compiler.compile, missing, folder)("a", "sm_90a")
    assert compiler.compiled == []


def test_a_missing_compiler_says_so(folder: Path) -> None:
    def missing(config: object) -> None:
        raise MissingCompilerError("pip install 'dash-attn[cuda]'")

    with pytest.raises(MissingCompilerError):
        KernelCache(missing, Compiler().load, folder)("a", "sm_90a")


# Several processes

WORKER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_kernel_cache import Compiler
from dash_attn.backends.cuda.cache import KernelCache
folder, me = Path(sys.argv[2]), sys.argv[3]
print("ready", flush=True)
sys.stdin.readline()
for round in range(200):
    for entry in folder.iterdir():
        if round % 4 == 0 and entry.is_file():
            entry.unlink(missing_ok=True)
    compiler = Compiler()
    made = KernelCache(lambda config: Compiler.Function(me * 100_000), compiler.load, folder)("a", "sm_90a")
    assert len(made.text) == 100_000 and len(set(made.text)) == 1, "torn"
    if compiler.loaded and made.text[0] != me:
        print(made.text[0])
"""


def test_processes_that_compile_at_the_same_time_see_whole_entries(folder: Path) -> None:
    """Each writes an entry of its own letter and reads what the others wrote, while all of them delete."""
    folder.mkdir(mode=0o700)
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(Path(__file__).parent), str(folder), letter],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for letter in "abc"
    ]
    for worker in workers:
        assert worker.stdout
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin
        worker.stdin.write("go\n")
        worker.stdin.flush()
    results = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0], results
    seen = {letter for out, _ in results for letter in out.split()}
    assert seen, "no process ever read what another one wrote: this test has shown nothing"


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DASH_ATTN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/dash-attn")
    monkeypatch.setenv("DASH_ATTN_CACHE_DIR", "/else")
    assert cache_folder() == Path("/else")
