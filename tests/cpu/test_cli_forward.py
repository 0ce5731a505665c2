"""The command line with ``--pass forward``: plans, simulations, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_cases import Run, as_json

from dash_attn.tools.cli import main


@pytest.mark.parametrize(("head_dim", "tile_m"), [(64, 192), (96, 128), (128, 128), (192, 128), (264, 64)])
def test_a_forward_has_the_rows_of_the_kernel_that_runs_it(capsys: Run, head_dim: int, tile_m: int) -> None:
    """Of a kernel that pads tensors, too; where there is none, those of the backward."""
    found = as_json(capsys, f"plan --pass forward --seqlen 512 --head-dim {head_dim} --json")
    assert found["tile_m"] == tile_m


def test_a_forward_is_planned_and_simulated(capsys: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shape = "--pass forward --mask causal --seqlen 512 --heads 2"
    facts = as_json(capsys, f"plan {shape} --json")
    assert (facts["pass"], facts["items"], facts["kv_tiles"], facts["places"]) == ("forward", 8, 20, 0)
    picture = tmp_path / "f.svg"
    facts = as_json(capsys, f"simulate {shape} --workers 2 --compute 10 --launch 1 --save {picture} --json")
    assert facts["makespan"] == facts["lower_bound"] == 104
    assert facts["utilization"] == 1.0
    assert picture.read_text().count("<svg") == 1
    facts = as_json(capsys, f"simulate {shape} --preset h200 --json")
    assert (facts["workers"], facts["costs"]["tile"]) == (132, 2250)
    assert main(["plan", "--pass", "forward", "--seqlen", "1", "--seqlen-k", "17000", "--show"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split() for line in shown[-3:]] == [
        [*list("0000"), "64"],
        [*list("0011"), "64"],
        [*list("0022"), "5"],
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan --pass forward --seqlen 9 --policy spt", "--policy spt belongs to --pass backward"),
        ("plan --pass forward --tiles 9", "--tiles 9 belongs to --pass backward"),
        ("simulate --pass forward --seqlen 9 --dq-buffers 2", "--dq-buffers 2 belongs to --pass backward"),
        ("trace --pass forward --seqlen 9 --policy spt", "--policy spt belongs to --pass backward"),
        ("trace --pass forward --tiles 9", "--tiles 9 belongs to --pass backward"),
        ("trace --pass forward --seqlen 64 --batch 30000", "too many items to draw: 30,000"),
        ("simulate --pass forward --seqlen 9 --show", "--show draws a backward as text"),
        ("simulate --pass forward --seqlen 9 --workers 0", "workers must be an integer >= 1, got 0"),
        ("simulate --pass forward --seqlen 9 --workers 2000000", "2,000,000 workers, the limit is 1,048,576"),
        ("simulate --pass forward --seqlen 9 --head-dim 96 --preset h200", "measured at head dim 96"),
        ("plan --pass forward --seqlen 64 --batch 30000 --save x.svg", "too many items to draw: 30,000"),
        ("simulate --pass forward --seqlen 9 --compute -1", "tile must be finite and >= 0, got -1.0"),
    ],
)
def test_what_a_forward_does_not_take_is_named(capsys: Run, line: str, message: str) -> None:
    assert main(line.split()) != 0
    assert message in capsys.readouterr().err
