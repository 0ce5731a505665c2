"""What the warps of a kernel's main loop wait for, from a profile by NVIDIA Nsight Compute.

    ncu --clock-control none --warp-sampling-interval 0 --section SourceCounters -o run python ...
    ncu -i run.ncu-rep --page source --csv > source.csv
    python benchmarks/stalls.py source.csv --kernel kernelBackward

The loop is what is executed as often as the products (HGMMA) that are executed most. A line of the table is
the code up to a product, a wait, a barrier or a store: its share of the samples of the loop, and the most
frequent reasons.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

SAMPLES, EXECUTED, SOURCE = "Warp Stall Sampling (All Samples)", "Instructions Executed", "Source"
MARKS = ("HGMMA", "DEPBAR", "SYNCS", "BAR.", "STSM", "STS", "FENCE")
"""Instructions that end a line of the table."""


class Stretch(NamedTuple):
    """Code up to an instruction: samples, and samples by reason."""

    end: str
    samples: int
    reasons: Counter[str]


def kernel_in(lines: Iterable[list[str]], name: str) -> list[dict[str, str]]:
    """The instructions of the first kernel whose name has `name` in it.

    Raises:
        ValueError: there is none; the message has the names that there are.
    """
    found: list[dict[str, str]] = []
    names, header, here = [], None, False
    for line in lines:
        if line[:1] == ["Kernel Name"]:
            if found:
                break
            names.append(line[1])
            header, here = None, name in line[1]
        elif header is None:
            header = line
        elif here:
            found.append(dict(zip(header, line)))
    if not found:
        raise ValueError(f"no kernel has {name!r} in its name; there are {names}")
    return found


def stretches(instructions: list[dict[str, str]]) -> Iterator[Stretch]:
    """The main loop, in parts. Lines that are executed 2 % more or less often count, too: blocks differ."""
    products = [int(x[EXECUTED]) for x in instructions if "HGMMA" in x[SOURCE]]
    if not products:
        raise ValueError("the kernel has no products (HGMMA)")
    most, samples, reasons = max(products), 0, Counter[str]()
    for x in instructions:
        if abs(int(x[EXECUTED]) - most) > 0.02 * most:
            continue
        samples += int(x[SAMPLES])
        for name, value in x.items():
            if name.startswith("stall_") and "Not Issued" not in name and value:
                reasons[name.removeprefix("stall_")] += int(value)
        if any(mark in x[SOURCE] for mark in MARKS):
            yield Stretch(x[SOURCE].strip(), samples, reasons)
            samples, reasons = 0, Counter()
    yield Stretch("the end", samples, reasons)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("profile", type=Path, metavar="SOURCE.csv")
    parser.add_argument("--kernel", default="", metavar="TEXT", help="in the kernel's name; default: any")
    parser.add_argument(
        "--least", type=float, default=0.5, metavar="PERCENT", help="shares below are left out"
    )
    args = parser.parse_args(argv)
    with args.profile.open(newline="") as file:
        try:
            parts = list(stretches(kernel_in(csv.reader(file), args.kernel)))
        except ValueError as error:
            parser.error(str(error))
    total = sum(part.samples for part in parts)
    for part in parts:
        if total and 100 * part.samples >= args.least * total:
            why = ", ".join(f"{name} {100 * n / total:.1f}" for name, n in part.reasons.most_common(3))
            print(f"{100 * part.samples / total:5.1f} %  up to {part.end[:60]:60}  {why}")


if __name__ == "__main__":
    main()
