"""The kernel cache with a stand-in compiler: once a process, once a folder, and never a damaged file."""

from __future__ import annotations

from pathlib import Path

import pytest

from dash_attn.kernels.cache import KernelCache, cache_folder


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


def run(folder: Path, config: str = "a", arch: str = "sm_90a") -> tuple[Compiler, str]:
    """What a fresh process does."""
    compiler = Compiler()
    cache = KernelCache(compiler.compile, compiler.load, folder)
    assert cache(config, arch) is cache(config, arch)
    return compiler, cache(config, arch).text


def test_compiled_once_and_then_loaded(folder: Path) -> None:
    first, second = run(folder), run(folder)
    assert (len(first[0].compiled), len(first[0].loaded)) == (1, 0)
    assert (len(second[0].compiled), len(second[0].loaded)) == (0, 1)
    assert first[1] == second[1] == "a"
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("other", [{"config": "b"}, {"arch": "sm_100a"}])
def test_another_configuration_is_another_entry(folder: Path, other: dict[str, str]) -> None:
    run(folder)
    assert len(run(folder, **other)[0].compiled) == 1


@pytest.mark.parametrize("damage", ["truncate", "other bytes", "no digest", "digest of junk"])
def test_damaged_entries_are_compiled_again_and_replaced(folder: Path, damage: str) -> None:
    run(folder)
    (entry,), (digest,) = folder.glob("*.o"), folder.glob("*.sha256")
    if damage == "truncate":
        entry.write_text("")
    elif damage == "other bytes":
        entry.write_text("junk")
    elif damage == "no digest":
        digest.unlink()
    else:
        import hashlib

        entry.write_text("junk")
        digest.write_text(hashlib.sha256(b"junk").hexdigest())
    compiler, text = run(folder)
    assert (len(compiler.compiled), text) == (1, "a")
    assert len(run(folder)[0].loaded) == 1


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_others_can_write_is_never_read(folder: Path, mode: int) -> None:
    run(folder)
    folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match="can be written by, somebody else"):
        compiler, _ = run(folder)
    assert compiler.compiled == ["a"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="kernels are not cached on disk"):
        compiler, text = run(tmp_path / "file" / "cache")
    assert (compiler.compiled, text) == (["a"], "a")


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DASH_ATTN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/dash-attn")
    monkeypatch.setenv("DASH_ATTN_CACHE_DIR", "/else")
    assert cache_folder() == Path("/else")
