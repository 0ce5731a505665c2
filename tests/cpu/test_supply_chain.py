"""What `make` installs: pinned versions, and a lock file that agrees with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.10", "3.11", "3.12")


def pins(name: str) -> list[Requirement]:
    lines = (ROOT / name).read_text().replace("\\\n", " ").splitlines()
    bare = [re.sub(r"\s--hash=\S+", "", line) for line in lines if line and not line.startswith("#")]
    return [Requirement(line) for line in bare]


def versions(name: str, python: str) -> dict[str, str]:
    """Pinned version by package, on Linux with one version of Python."""
    here = {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": "linux"}
    found = [pin for pin in pins(name) if pin.marker is None or pin.marker.evaluate(here)]
    assert all(len(pin.specifier) == 1 for pin in found)
    return {pin.name: next(iter(pin.specifier)).version for pin in found}


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_file_has_the_versions_of_the_constraints(python: str) -> None:
    locked, wanted = versions("requirements.lock", python), versions("constraints.txt", python)
    assert {name: locked.get(name) for name in wanted} == wanted


def test_every_file_of_the_lock_is_named_by_a_hash_and_nothing_names_a_place() -> None:
    text = (ROOT / "requirements.lock").read_text()
    entries = re.split(r"^(?=[a-z])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    assert len(entries) > 50
    for entry in filter(None, entries):
        name, _, rest = entry.partition("==")
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", rest), name
        assert "://" not in entry


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_file_has_what_the_package_asks_for(python: str) -> None:
    locked = versions("requirements.lock", python)
    text = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(r'"([a-z][a-z0-9-]*)[^"]*[><=]=[^"]*"', text[text.index("dependencies = [") :])
    asked = set(lists) - {"dash-attn"}
    assert {"torch", "numpy", "nvidia-cutlass-dsl", "pytest", "transformers"} <= asked
    assert asked <= set(locked), asked - set(locked)
