"""How tests read what the command line prints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dash_attn.tools.cli import main

Run = pytest.CaptureFixture[str]


def as_json(capsys: Run, line: str) -> dict[str, Any]:
    assert main(line.split()) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts
