"""What benchmarks/blocks.py measures on a Hopper GPU, on two small blocks."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield SimpleNamespace(models=import_module("block_models"), blocks=import_module("blocks"))


@pytest.mark.parametrize("name", ["LLaMA3-8B", "SAM-H"])
def test_rows_of_a_small_block(script, name, capsys):
    model = script.models.MODELS[name]
    model = model._replace(
        hidden=4 * model.head_dim, heads=4, kv_heads=4 * model.kv_heads // model.heads, mlp=512
    )
    case = script.models.Case(name, model, 2, 1024)
    rows = {(row["impl"], row["deterministic"]): row for row in script.blocks.rows(case, 2)}
    assert {("dash_attn", True), ("dash_attn", False), ("fa2", True), ("fa2", False)} <= rows.keys(), (
        capsys.readouterr().err
    )
    for kind, row in rows.items():
        assert row["ms"] > 0
        assert row["peak_mib"] > 0
        assert row["repeatable"] or kind != ("dash_attn", True)
        forward, backward, products, rest = row["parts_ms"].values()
        assert min(forward, backward, products, rest) > 0, row["parts_ms"]
        assert backward > forward / 2
    script.blocks.line(list(rows.values()))
