"""The table of stalls, from a profile in Nsight Compute's form."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SAMPLES = "Warp Stall Sampling (All Samples)"
STALLS = ("stall_wait", "stall_long_sb", "stall_wait (Not Issued)")
HEADER = ("Source", SAMPLES, "Instructions Executed", *STALLS)


@pytest.fixture(scope="module")
def stalls() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield import_module("stalls")


def profile(folder: Path, *lines: tuple[object, ...]) -> str:
    """Of kernels "first" and "second", which has these lines."""
    table = [
        ("Kernel Name", "first"),
        HEADER,
        ("FADD", 9, 100, 9, 0, 9),
        ("Kernel Name", "second"),
        HEADER,
        *lines,
    ]
    path = folder / "source.csv"
    path.write_text("".join(",".join(f'"{x}"' for x in line) + "\n" for line in table))
    return str(path)


LINES = (
    ("  LDC R1, c[0x0][0x28]", 50, 4, 50, 0, 1),  # before the loop
    ("  LDS R0, [R1]", 10, 101, 0, 10, 1),
    ("  HGMMA.64x64x16 R8", 20, 100, 15, 5, 1),
    ("  FMUL R8, R8, R9", 30, 100, 30, 0, 1),
    ("@P0 SYNCS.ARRIVE R2", 40, 99, 1, 39, 1),
    ("  MOV R1, R2", 0, 100, 0, 0, 0),
)


def test_shares_are_those_of_the_loop(
    stalls: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stalls.main([profile(tmp_path, *LINES), "--kernel", "second"])
    first, second = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert first == "30.0 % up to HGMMA.64x64x16 R8 wait 15.0, long_sb 15.0"
    assert second == "70.0 % up to @P0 SYNCS.ARRIVE R2 long_sb 39.0, wait 31.0"


@pytest.mark.parametrize(
    ("kernel", "message"),
    [("third", "no kernel has 'third' in its name; there are ['first', 'second']"), ("first", "no products")],
)
def test_what_cannot_be_shown_is_named(
    stalls: Any, kernel: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        stalls.main([profile(tmp_path, *LINES), "--kernel", kernel])
    assert message in capsys.readouterr().err
