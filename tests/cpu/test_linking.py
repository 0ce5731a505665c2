"""Programs on disk are shared libraries where there is a linker: they load without the compiler."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dash_attn.backends.cuda import linking
from dash_attn.backends.cuda.cache import KernelCache
from dash_attn.backends.cuda.linking import is_shared, link, linker
from dash_attn.backends.sm90 import compile as compiling

pytest.importorskip("cutlass", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")
pytest.importorskip("tvm_ffi", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(linker() is None, reason="no C compiler on the PATH (cc, gcc, clang)"),
]

SOURCES = Path(__file__).parents[2] / "src"
NAME = "dash_attn_program"
SOURCE = """
struct any {{ int type, padding; long value; }};
{declared}
int __tvm_ffi_{name}(void *self, const struct any *arguments, int count, struct any *result) {{
    result->type = 1; result->padding = 0; result->value = {value};
    return 0;
}}
"""


@pytest.fixture(autouse=True)
def _there_and_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def made(value: int | str, declared: str = "") -> Path:
    """The object file of a program that returns a number, as the compiler exports one."""
    Path("a.c").write_text(SOURCE.format(name=NAME, value=value, declared=declared))
    subprocess.run([str(linker()), "-c", "-fPIC", "-o", "a.o", "a.c"], check=True)
    return Path("a.o").absolute()


def loaded(program: bytes) -> int:
    return compiling._PROGRAMS.loaded(program)()


def kind(program: bytes) -> str:
    Path("kept").write_bytes(program)
    return "shared library" if is_shared(Path("kept")) else "object file"


def test_a_program_is_kept_as_a_library() -> None:
    program = compiling._packed(made(7))
    assert kind(program) == "shared library"
    assert loaded(program) == 7


def test_programs_loaded_one_after_the_other_are_as_many() -> None:
    """Each is read through the same descriptor, and the system knows libraries by their names."""
    programs = [compiling._packed(made(value)) for value in (1, 2, 3)]
    assert [loaded(program) for program in programs] == [1, 2, 3]


def test_without_a_linker_it_stays_an_object_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(linking, "linker", lambda: None)
        program = compiling._packed(made(5))
    assert kind(program) == "object file"
    assert loaded(program) == 5


@pytest.mark.parametrize("command", ["false", "a folder", "a text", "a wait"])
def test_a_linker_that_does_not_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str) -> None:
    """It may end with an error, be no program, leave something that is no library, or not end."""
    other = tmp_path / "linker"
    if command == "a folder":
        other.mkdir()
    elif command == "a text":
        other.write_text("#!/bin/sh\necho no library > a.so\n")
        other.chmod(0o700)
    elif command == "a wait":
        monkeypatch.setattr(linking, "_PATIENCE", 0.1)
        other.write_text("#!/bin/sh\nexec sleep 60\n")
        other.chmod(0o700)
    where = command if command == "false" else str(other)
    object_file = made(5)
    monkeypatch.setattr(linking, "linker", lambda: where)
    assert compiling._packed(object_file) == object_file.read_bytes()


def test_what_nobody_defines_is_found_when_it_is_linked() -> None:
    object_file = made("missing()", declared="long missing(void);")
    assert not link(object_file, Path("a.so"), [])
    assert compiling._packed(object_file) == object_file.read_bytes()


class Compiled:
    """A function of the compiler's."""

    def __init__(self, value: int) -> None:
        self.value = value

    def export_to_c(self, path: str, name: str) -> None:
        assert name == NAME
        shutil.copy(made(self.value), path)


@pytest.mark.parametrize("kept", ["nothing", "its head", "no function"])
def test_entries_that_do_not_load_are_compiled_again(tmp_path: Path, kept: str) -> None:
    compiled = []

    def called() -> Any:
        """By a fresh process."""

        def compile(config: str) -> Compiled:
            compiled.append(config)
            return Compiled(7)

        parts = {"folder": tmp_path / "cache", "packed": compiling._packed}
        return KernelCache(compile, compiling._load, **parts)("a", "sm_90a")

    assert isinstance(called(), Compiled)
    (entry,) = (tmp_path / "cache").iterdir()
    program = entry.read_bytes()[32:]
    assert kind(program) == "shared library"
    changed = {"nothing": b"", "its head": program[:100], "no function": another_function()}[kept]
    entry.write_bytes(hashlib.sha256(changed).digest() + changed)
    assert isinstance(called(), Compiled)
    assert called()() == 7
    assert compiled == ["a", "a"]


def another_function() -> bytes:
    """A library without the function that is looked for."""
    made(7)
    Path("a.c").write_text(Path("a.c").read_text().replace(NAME, "another"))
    subprocess.run([str(linker()), "-shared", "-fPIC", "-o", "another.so", "a.c"], check=True)
    return Path("another.so").read_bytes()


LOAD = """
import sys
from pathlib import Path
from dash_attn.backends.sm90 import compile
print(compile._load(Path(sys.argv[1]), sys.argv[2])(), "cutlass" in sys.modules)
"""


@pytest.mark.parametrize("kept", ["shared library", "object file"])
def test_a_library_is_loaded_without_the_compiler(monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    object_file = made(9)
    Path("kept").write_bytes(
        compiling._packed(object_file) if kept == "shared library" else object_file.read_bytes()
    )
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    done = subprocess.run([sys.executable, "-c", LOAD, "kept", NAME], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"9 {kept == 'object file'}\n", "")
