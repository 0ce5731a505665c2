"""The examples run, with few steps."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_on_policy_refuses_more_tokens_than_places(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLES / "on_policy.py"))["main"]
    for tokens in ("0", "1001"):
        with pytest.raises(SystemExit):
            main(["--tokens", tokens])
        assert f"--tokens must be in 1 .. 1000, got {tokens}" in capsys.readouterr().err


@pytest.mark.slow
def test_on_policy(capsys: pytest.CaptureFixture[str]) -> None:
    """Ratios are exactly 1, also after the weights have changed; with PyTorch's defaults they are not."""
    main = runpy.run_path(str(EXAMPLES / "on_policy.py"))["main"]
    exact, usual = main(["--steps", "3"]).values()
    assert exact.same == [True] * 3
    assert exact.drift == [0.0] * 3
    assert not all(usual.same)
    assert max(usual.drift) > 0
    assert "the same bytes in 3 of 3 steps" in capsys.readouterr().out
