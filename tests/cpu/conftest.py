"""Hypothesis settings: no deadlines (no timing in tests), reproducible examples."""

from __future__ import annotations

import os
from pathlib import Path

import outputs
import pytest
from hypothesis import settings

settings.register_profile("dash", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("dash")

FIRST = ("test_triton.py", "test_distributed.py")
"""Their tests take minutes each: begun last, one of them would run alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in FIRST)


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    if given := os.environ.get("DASH_ATTN_TEST_OUTPUTS"):  # of several sessions, of the same sources
        outputs.folder = Path(given)
        return
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all processes of this session
    outputs.folder = base / "outputs"
    outputs.folder.mkdir(exist_ok=True)


@pytest.fixture
def large_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placements as they are of heads that do not fit L2 together."""
    for placement in ("in_order", "rings"):
        monkeypatch.setattr(f"dash_attn.schedule.placement.{placement}.all_fit", lambda batch, limit: False)
