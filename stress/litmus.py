"""The hand-over alone, under full load: does the next block always find what the one before it wrote?

A round is one hand-over of one tile from one block to another. Contributions have random values for which
every exchange of two neighbouring additions changes the bits of every word, so a tile is right only if all
contributions were there, in order.

    python stress/litmus.py --rounds 1e9 --forms release_warp queued --json litmus.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from litmus_kernel import (
    BAD_READS,
    FIRST_BLOCK,
    OUTCOME_WORDS,
    TIMEOUTS,
    Form,
    LitmusConfig,
    Reader,
    Wait,
    compile_litmus,
)
from litmus_load import TRAFFIC_BYTES

PROMISED = {
    "release_warp": Form(),  # what the kernel ships, from block to block
    "queued": Form(queued=True),  # the last hand-over of a tile, to the block that converts it
    "reduce_warp": Form(by_release_warp=False),
}
UNPROMISED = {
    "relaxed_poll": Form(acquire=False),
    "relaxed": Form(release=False, by_release_warp=False),
    "relaxed_warp": Form(release=False),
    "queued_relaxed": Form(release=False, queued=True),
    "source_read": Form(wait=Wait.SOURCE_READ),
    "source_read_relaxed": Form(wait=Wait.SOURCE_READ, release=False, by_release_warp=False),
    "nothing": Form(wait=Wait.NOTHING),
    "nothing_relaxed": Form(wait=Wait.NOTHING, release=False, by_release_warp=False),
}
FORMS = PROMISED | UNPROMISED
SHAPES = {
    "small-load": LitmusConfig(Form(), size=512, period=8, reader=Reader.LOAD),
    "small-bulk": LitmusConfig(Form(), size=512, period=8, reader=Reader.BULK),
    "small-order": LitmusConfig(Form(), size=512, period=8, reader=Reader.BULK, every_round=False),
    "large-load": LitmusConfig(Form(), size=32_768, period=3, reader=Reader.LOAD),
    "large-bulk": LitmusConfig(Form(), size=32_768, period=3, reader=Reader.BULK),
    "large-order": LitmusConfig(Form(), size=32_768, period=3, reader=Reader.BULK, every_round=False),
}
LOADS = {
    "none": 0,
    "l2": 2,
    "dram": 128,
}  # chunks of TRAFFIC_BYTES a block, of which the second half is written
REGIONS, REGION_WORDS = 32, 4 << 20


@dataclass(frozen=True)
class Outcome:
    """What a run found.

    Attributes:
        rounds: hand-overs.
        reads: those after which the tile was read.
        wrong: reads that differ, by the contribution of the period that was the last before them.
        timeouts: tickets that did not come within the bound.
        seconds: time of the kernels.
        first: block, tile, ticket and number of wrong words of the first wrong read; None without one.
    """

    rounds: int
    reads: int
    wrong: list[int]
    timeouts: int
    seconds: float
    first: tuple[int, ...] | None


def contributions(period: int, words: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(sources, expected), both (period, words) fp32: what is added, and the tile after each addition.

    Contribution 0 is stored, the others are added. For every word, exchanging any two neighbouring additions
    changes the bits of the last row of `expected`; an addition before the store is lost, and shows as well.
    """
    generator = torch.Generator().manual_seed(seed)
    kept = torch.empty(period, 0)
    while kept.shape[1] < words:
        values = torch.randn(period, 1 << 16, generator=generator)
        values *= torch.exp2(torch.randint(-3, 4, values.shape, generator=generator))
        end = fold(values)[-1]
        shows = torch.ones_like(end, dtype=torch.bool)
        for first in range(1, period - 1):
            order = list(range(period))
            order[first], order[first + 1] = order[first + 1], order[first]
            shows &= fold(values[order])[-1] != end
        kept = torch.cat((kept, values[:, shows]), 1)
    kept = kept[:, :words].contiguous()
    return kept, fold(kept)


def fold(values: Tensor) -> Tensor:
    """Running sums over the first dimension, one rounding a step."""
    rows = [values[0]]
    for value in values[1:]:
        rows.append(rows[-1] + value)
    return torch.stack(rows)


@cache
def program(config: LitmusConfig):
    """The compiled variant."""
    return compile_litmus(config)


def run(
    config: LitmusConfig, rounds: int, *, load: str = "dram", chains: int = 1, tickets: int = 0
) -> Outcome:
    """At least `rounds` hand-overs on the current GPU, every SM taking part.

    Args:
        load: what the busy warps copy: "l2" fits the L2, "dram" does not; "none": they do not work.
        chains: tiles per block at the same time.
        tickets: contributions per tile in one launch, 0: enough for a launch of about 0.1 s.
    """
    config = replace(config, busy=load != "none")
    grid = torch.cuda.get_device_properties(0).multi_processor_count
    tickets = tickets or (1 << 16 if config.size <= 4096 else 1 << 13)
    tiles = grid * chains
    if tiles * config.words > REGION_WORDS:
        raise ValueError(f"{tiles} tiles of {config.size} bytes do not fit {4 * REGION_WORDS} bytes")
    like = {"dtype": torch.int32, "device": "cuda"}
    sources, expected = (
        x.cuda().view(torch.int32).flatten() for x in contributions(config.period, config.words)
    )
    data = torch.full((REGIONS, REGION_WORDS), -1, **like)
    traffic = torch.randint(0, 1 << 30, (grid * max(LOADS[load], 2) * TRAFFIC_BYTES // 4,), **like)
    counters, done, outcome = (
        torch.zeros(2, tiles, **like),
        torch.zeros(grid, **like),
        torch.zeros(OUTCOME_WORDS, **like),
    )
    kernel = program(config)
    launches = -(-rounds // (tiles * (tickets - 1)))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for launch in range(launches):
        counters.zero_()
        done.zero_()
        shift = 1 + launch * 37 % (grid - 1)
        place = data[launch % REGIONS]
        tensors = (place, counters.view(-1), sources, expected, done, outcome, traffic)
        kernel(*tensors, tickets, chains, shift, grid)
    end.record()
    torch.cuda.synchronize()
    flags = counters[0]
    if flags.min() != tickets or flags.max() != tickets:
        raise RuntimeError(f"counters should end at {tickets}, found {flags.min()} to {flags.max()}")
    words = outcome.tolist()
    each = tickets - 1 if config.every_round else (tickets - 1) // config.period
    return Outcome(
        rounds=launches * tiles * (tickets - 1),
        reads=launches * tiles * each,
        wrong=words[BAD_READS : BAD_READS + config.period],
        timeouts=words[TIMEOUTS],
        seconds=start.elapsed_time(end) / 1e3,
        first=tuple(words[FIRST_BLOCK : FIRST_BLOCK + 4]) if any(words[BAD_READS:]) else None,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds",
        type=float,
        default=1e8,
        help="hand-overs of each form, shape and load, 1/32 of them with tiles of 32 KB",
    )
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=list(PROMISED), metavar="FORM", help=", ".join(FORMS)
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES)
    )
    parser.add_argument("--chains", type=int, default=1, help="tiles per block at the same time")
    parser.add_argument(
        "--loads", nargs="+", choices=LOADS, default=["dram"], help="what runs beside the chains"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes")
    args = parser.parse_args(argv)
    rows, failed = [], False
    for form, shape, load in product(args.forms, args.shapes, args.loads):
        config = replace(SHAPES[shape], form=FORMS[form])
        rounds = int(args.rounds * min(1, 1024 / config.size))
        found = run(config, rounds, load=load, chains=args.chains)
        failed |= form in PROMISED and sum(found.wrong) + found.timeouts > 0
        rows.append({"form": form, "shape": shape, "load": load, "chains": args.chains} | asdict(found))
        wrong = (
            f"{sum(found.wrong):>9,} wrong {found.wrong} {found.first}" if any(found.wrong) else "all right"
        )
        print(
            f"{form:20} {shape:12} {load:5} {found.rounds:>14,} rounds, {found.reads:>14,} read, "
            f"{found.rounds / found.seconds / 1e6:6.1f} M/s, {found.timeouts} timeouts, {wrong}",
            flush=True,
        )
    if args.json:
        header = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        args.json.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
