"""What importing the package loads, and the one-way imports between its parts; in fresh processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dash_attn

SOURCE = Path(dash_attn.__file__).parent

LAYERS = {
    "errors": set(),
    "problem": {"errors"},
    "schedule": {"errors", "problem"},
    "model": {"errors", "problem", "schedule"},
    "reference": {"errors", "problem", "schedule"},
    "kernels": {"errors", "problem", "schedule"},
    "measure": {"schedule", "model", "kernels"},
    "doctor": {"__init__", "api", "integrations", "kernels"},
    "testing": set(),
    "ops": {"errors", "problem", "schedule", "reference", "kernels"},
    "arguments": {"errors", "problem", "schedule", "ops"},
    "api": {"errors", "schedule", "ops", "arguments"},
    "integrations": {"errors", "api", "arguments", "ops"},
    "shapes": {"errors", "problem"},
    "verification": {"errors", "problem", "schedule", "api", "shapes", "testing"},
    "bench": {"errors", "problem", "schedule", "model", "kernels", "api", "shapes", "testing"},
    "demo": {"__init__", "errors", "problem", "schedule", "model", "reference", "api", "testing"},
    "commands": {
        "bench",
        "errors",
        "problem",
        "schedule",
        "model",
        "kernels",
        "demo",
        "doctor",
        "measure",
        "shapes",
        "verification",
    },
    "cli": {"__init__", "commands", "errors", "problem", "schedule"},
    "__main__": {"cli"},
    "__init__": {"problem", "schedule", "api"},
}


def loaded_by(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


COMMANDS = {
    "import": "import dash_attn",
    "plan": "from dash_attn.cli import main; main(['plan', '--tiles', '4'])",
    "simulate": "from dash_attn.cli import main; main(['simulate', '--tiles', '4', '--json'])",
    "bounds": "from dash_attn.cli import main; main(['bounds', '--tiles', '4'])",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_light_commands_load_neither_torch_nor_cutlass(name: str) -> None:
    assert not {"torch", "cutlass", "matplotlib"} & loaded_by(COMMANDS[name])


def test_attention_loads_torch_when_asked_for() -> None:
    assert "torch" in loaded_by("import dash_attn; dash_attn.attention")


def part_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Parts of the package that a file imports, read from its relative imports."""
    package = path.relative_to(SOURCE).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                parts = (*base, *str(name).split("."))
                is_part = (SOURCE / parts[0]).is_dir() or (SOURCE / f"{parts[0]}.py").exists()
                found.add(parts[0] if is_part else "__init__")
    return found - {part_of(path)}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    allowed = LAYERS[part_of(path)]
    assert imports_of(path) <= allowed, f"{part_of(path)} may import only {sorted(allowed)}"


@pytest.mark.parametrize("folder", ["schedule", "model"])
def test_pure_parts_name_no_heavy_library(folder: str) -> None:
    for path in [*(SOURCE / folder).rglob("*.py"), SOURCE / "problem.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {"torch", "cutlass"} & {m.partition(".")[0] for m in modules}, path


def test_public_names() -> None:
    assert sorted(dash_attn.__all__) == dir(dash_attn)
    for name in dash_attn.__all__:
        assert getattr(dash_attn, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = dash_attn.nonsense
