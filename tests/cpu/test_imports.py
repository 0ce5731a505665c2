"""What importing the package loads, and the one-way imports between its parts; in fresh processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dash_attn

SOURCE = Path(dash_attn.__file__).parent

ARGUMENTS = {"arguments", "values"}
BELOW_BACKENDS = {"errors", "machine", "problem", "schedule", "scores"}
LIBRARY = {
    "__init__",
    "errors",
    "machine",
    "problem",
    "schedule",
    "scores",
    "model",
    "backends",
    "peers",
    "api",
    "integrations",
}
LAYERS = {
    "errors": set(),
    "grid": {"errors"},
    "problem": {"errors", "grid"},
    "machine": set(),
    "scores": set(),
    "schedule": {"errors", "machine", "problem"},
    "model": {"errors", "machine", "problem", "schedule"},
    "testing": set(),
    "peers": BELOW_BACKENDS,
    "backends/cuda": {"errors"},
    "backends": BELOW_BACKENDS,
    "backends/cpu": {*BELOW_BACKENDS, "backends"},
    "backends/sm90": {*BELOW_BACKENDS, "backends", "backends/cuda"},
    "backends/triton": {*BELOW_BACKENDS, "backends", "backends/cuda"},
    "spec": {"problem", "schedule", "scores"},
    "ops": {*BELOW_BACKENDS, "backends", "spec"},
    "values": {"errors", "schedule"},
    "arguments": {*BELOW_BACKENDS, "backends", "ops", "spec", "values"},
    "cache_arguments": {"errors", "backends", "ops", *ARGUMENTS, "spec"},
    "kvcache": {"ops", *ARGUMENTS, "cache_arguments"},
    "dispatch": {"backends", "ops", *ARGUMENTS, "spec"},
    "preview": {"errors", "schedule", "backends", "ops", *ARGUMENTS, "cache_arguments", "dispatch"},
    "planned": {"errors", "schedule", "scores", "backends", "ops", *ARGUMENTS},
    "flash": {"errors", "schedule", *ARGUMENTS, "cache_arguments", "dispatch", "kvcache"},
    "api": {"schedule", *ARGUMENTS, "backends", "dispatch", "flash", "kvcache", "planned", "preview"},
    "distributed": {
        "errors",
        "problem",
        "schedule",
        "scores",
        *ARGUMENTS,
        "backends",
        "backends/cuda",
        "ops",
        "spec",
    },
    "integrations": {"errors", "api", *ARGUMENTS, "backends", "ops"},
    "tools": {*LIBRARY, "testing", "backends/cpu", "backends/cuda", "backends/sm90"},
    "__main__": {"tools"},
    "__init__": {"problem", "schedule", "api"},
}
"""What each part may import besides itself. The longest name that fits a file is its part."""


def loaded_by(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


COMMANDS = {
    "import": "import dash_attn",
    "plan": "from dash_attn.tools.cli import main; main(['plan', '--tiles', '4'])",
    "simulate": "from dash_attn.tools.cli import main; main(['simulate', '--tiles', '4', '--json'])",
    "bounds": "from dash_attn.tools.cli import main; main(['bounds', '--tiles', '4'])",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_light_commands_load_neither_torch_nor_cutlass(name: str) -> None:
    assert not {"torch", "cutlass", "matplotlib"} & loaded_by(COMMANDS[name])


def test_attention_loads_torch_when_asked_for() -> None:
    assert "torch" in loaded_by("import dash_attn; dash_attn.attention")


def part_of(module: tuple[str, ...]) -> str:
    """The part that a module of the package belongs to."""
    names = ["/".join(module[:length]) for length in range(len(module), 0, -1)]
    return next((name for name in names if name in LAYERS), "__init__")


def imports_of(path: Path) -> set[str]:
    """Parts of the package that a file imports, read from its relative imports."""
    relative = path.relative_to(SOURCE)
    package = relative.parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            named = (*base, *(node.module or "").split(".")) if node.module else base
            found |= {part_of((*named, alias.name)) for alias in node.names}
    return found - {part_of(relative.with_suffix("").parts)}


def imported_libraries(path: Path) -> set[str]:
    """Other libraries that a file imports, anywhere in it."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.append(node.module or "")
    return {module.partition(".")[0] for module in modules}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path.relative_to(SOURCE).with_suffix("").parts)
    assert "dash_attn" not in imported_libraries(path), "what imports by the full name is not seen below"
    assert imports_of(path) <= LAYERS[part], f"{part} may import only {sorted(LAYERS[part])}"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_only_the_hopper_backend_imports_cutlass(path: Path) -> None:
    if SOURCE / "backends" / "sm90" not in path.parents:
        assert not {"cutlass"} & imported_libraries(path)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_only_the_triton_backend_imports_triton(path: Path) -> None:
    if SOURCE / "backends" / "triton" not in path.parents:
        assert not {"triton"} & imported_libraries(path)


@pytest.mark.parametrize("folder", ["schedule", "model"])
def test_pure_parts_name_no_heavy_library(folder: str) -> None:
    paths = list((SOURCE / folder).rglob("*.py"))
    assert paths
    for path in [*paths, SOURCE / "problem.py", SOURCE / "grid.py"]:
        assert not {"torch", "cutlass"} & imported_libraries(path), path


def test_public_names() -> None:
    modules = {"distributed", "errors", "integrations", "testing"}
    assert modules | set(dash_attn.__all__) == set(dir(dash_attn))
    for name in dir(dash_attn):
        assert getattr(dash_attn, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = dash_attn.nonsense


def test_modules_need_no_import_of_their_own() -> None:
    names = "distributed.attention", "testing.same_bytes", "integrations"
    code = "\n".join(["import dash_attn", *(f"dash_attn.{name}" for name in names)])
    subprocess.run([sys.executable, "-c", code], check=True)
